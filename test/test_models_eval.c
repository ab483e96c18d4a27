/* The walk of the acceptance length by hand; eval end to end against an independent walk; export and its refusals. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "actors/eval.h"
#include "actors/export.h"
#include "data/drafter_config.h"

#define TARGET MR_SOURCE_DIR "/test/goldens/targets/qwen3/fp32"

/* Row of 8 tokens, first supervised at 2, blocks of 4.  Guesses of the blocks at 2, 3, 4, 5, 6; slot 0 is no guess. */
static void walk_by_hand(void **state)
{
    const int32_t ids[8] = {9, 9, 10, 11, 12, 13, 14, 15};
    const int32_t guess[5 * 4] = {
        -1, 11, 12, 99,      /* at 2: two right: on to 5 */
        -1, 99, 99, 99,
        -1, 13, 14, 15,
        -1, 99, 15, 99,      /* at 5: none right: on to 6 */
        -1, 15, 99, 99,      /* at 6: all that is left is right; two would leave the row: 1 */
    };
    uint64_t blocks = 0, advances = 0;

    (void)state;
    mr_eval_walk(ids, 8, 2, 4, guess, &blocks, &advances);
    assert_int_equal(blocks, 3);
    assert_int_equal(advances, 5);
}

/* ---- a drafter checkpoint for the golden target ------------------------------------------------------------------------------- */

static char dir[] = "/tmp/mr-test-eval-XXXXXX";

static void path_of(char out[512], const char *name) { snprintf(out, 512, "%s/%s", dir, name); }

static int make_drafter(void **state)
{
    struct mr_drafter_config c = {.hidden_size = 64,
                                  .intermediate_size = 96,
                                  .n_layers = 1,
                                  .n_heads = 4,
                                  .n_kv_heads = 2,
                                  .head_dim = 16,
                                  .K = 2,
                                  .target_hidden = 64,
                                  .target_layers = 4,
                                  .layer_ids = {1, 2},
                                  .block_size = 4,
                                  .mask_token_id = 3,
                                  .vocab_size = 320,
                                  .max_position = 1024,
                                  .rms_eps = 1e-6,
                                  .rope_theta = 1e4};
    struct mr_dlayout l;
    struct mr_err err = {0};
    float *param;
    char path[512];
    FILE *f;

    (void)state;
    if (!mkdtemp(dir) || mr_dlayout_make(&l, &c))
        return -1;
    param = calloc(l.P, sizeof *param);
    mr_drafter_init(&l, param, 1, 0.02);
    path_of(path, "ckpt");
    mkdir(path, 0777);
    path_of(path, "ckpt/config.json");
    if (mr_drafter_config_save(&c, path, &err))
        return -1;
    path_of(path, "ckpt/model.safetensors");
    if (mr_drafter_weights_save(&l, param, NULL, path, &err))
        return -1;
    free(param);
    mr_dlayout_free(&l);
    path_of(path, "rows.jsonl");
    f = fopen(path, "w");
    if (!f)
        return -1;
    fprintf(f, "{\"input_ids\": [5, 6, 7, 8, 9, 10], \"loss_mask\": [0, 0, 1, 1, 1, 1]}\n");
    fprintf(f, "{\"input_ids\": [5, 6, 7], \"loss_mask\": [0, 0, 0]}\n");
    fprintf(f, "{\"input_ids\": [20, 21, 22, 23], \"loss_mask\": [1, 1, 0, 1]}\n");
    return fclose(f);
}

static int remove_all(void **state)
{
    static const char *const name[] = {
        "ckpt/config.json", "ckpt/model.safetensors", "out/config.json", "out/model.safetensors", "ckpt", "out", "rows.jsonl"};
    char path[512];

    (void)state;
    for (size_t i = 0; i < sizeof name / sizeof name[0]; i++) {
        path_of(path, name[i]);
        remove(path);
    }
    return rmdir(dir);
}

static void eval_counts_rows_blocks_and_slots(void **state)
{
    char draft[512], data[512];
    struct mr_eval_opts o = {.target = TARGET, .draft = draft, .data = data, .device = "cpu", .threads = 1};
    struct mr_eval_result r;
    struct mr_err err = {0};

    (void)state;
    path_of(draft, "ckpt");
    path_of(data, "rows.jsonl");
    if (mr_eval(&r, &o, &err))
        fail_msg("%s", err.msg);
    assert_int_equal(r.rows, 2);
    assert_int_equal(r.tokens, 10);
    assert_int_equal(r.advances, 3 + 3);            /* every row is walked to its last token */
    assert_in_range(r.blocks, 2, 6);
    /* row 0: anchors 2, 3, 4; row 2: anchor 0 only (0 and 1 are supervised), its slot 2 is not, its slot 3 is */
    assert_int_equal(r.labels[1], 3 + 1);
    assert_int_equal(r.labels[2], 2 + 0);
    assert_int_equal(r.labels[3], 1 + 1);
    assert_int_equal(r.dropped[MR_DROP_MASKED], 1);
    assert_true(r.loss_sum > 0);
    o.limit = 1;
    assert_int_equal(mr_eval(&r, &o, &err), 0);
    assert_int_equal(r.rows, 1);
}

static void eval_refuses_a_foreign_drafter(void **state)
{
    char draft[512], data[512];
    struct mr_eval_opts o = {
        .target = MR_SOURCE_DIR "/test/goldens/dflash/dflash_b", .draft = draft, .data = data, .device = "cpu", .threads = 1};
    struct mr_eval_result r;
    struct mr_err err = {0};

    (void)state;
    path_of(draft, "ckpt");
    path_of(data, "rows.jsonl");
    assert_int_equal(mr_eval(&r, &o, &err), -1);        /* no target there at all */
    assert_int_equal(err.code, MR_EXIT_CONFIG);
}

static long size_of(const char *name)
{
    struct stat st;
    char path[512];

    path_of(path, name);
    return stat(path, &st) ? -1 : (long)st.st_size;
}

static void export_copies_once(void **state)
{
    char ckpt[512], out[512];
    struct mr_err err = {0};

    (void)state;
    path_of(ckpt, "ckpt");
    path_of(out, "out");
    if (mr_export(ckpt, out, &err))
        fail_msg("%s", err.msg);
    assert_int_equal(size_of("out/model.safetensors"), size_of("ckpt/model.safetensors"));
    assert_int_equal(size_of("out/config.json"), size_of("ckpt/config.json"));
    assert_int_equal(mr_export(ckpt, out, &err), -1);
    assert_non_null(strstr(err.msg, "not empty"));
    assert_int_equal(err.code, MR_EXIT_CONFIG);
}

/* A checkpoint whose tensors do not fit its config is never exported. */
static void export_checks_shapes(void **state)
{
    struct mr_drafter_config c;
    struct mr_err err = {0};
    char ckpt[512], out[512], config[512];

    (void)state;
    path_of(ckpt, "ckpt");
    path_of(out, "out2");
    path_of(config, "ckpt/config.json");
    assert_int_equal(mr_drafter_config_load(&c, ckpt, &err), 0);
    c.intermediate_size = 64;
    assert_int_equal(mr_drafter_config_save(&c, config, &err), 0);
    assert_int_equal(mr_export(ckpt, out, &err), -1);
    assert_int_equal(err.code, MR_EXIT_CONFIG);
    assert_int_equal(size_of("out2"), -1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(walk_by_hand),
        cmocka_unit_test(eval_counts_rows_blocks_and_slots),
        cmocka_unit_test(eval_refuses_a_foreign_drafter),
        cmocka_unit_test(export_copies_once),
        cmocka_unit_test(export_checks_shapes),
    };

    return cmocka_run_group_tests(tests, make_drafter, remove_all);
}
