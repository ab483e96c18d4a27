/* mr_check on the demo and on synthetic runs: sums, epoch table, slab arithmetic, what is refused, and the printed table. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

#include "base/log.h"
#include "data/check.h"

static char dir[64];

static const char *const synthetic[] = {"/actors/1/engine=\"synthetic\"", "/actors/2/engine=\"synthetic\"",
                                        "/target/checkpoint=\"synthetic:hidden=8,layers=6,vocab=50\"",
                                        "/data/train=\"synthetic:500?min=10&max=512&seed=1\""};

/* conf/demo.json with the synthetic model when `syn`, and up to 8 more assignments. */
static int run(struct mr_checked *c, struct mr_topology *t, int syn, const char *const *more, int n, unsigned parts, struct mr_err *err)
{
    const char *set[16];
    int k = 0;

    for (; syn && k < 4; k++)
        set[k] = synthetic[k];
    for (int i = 0; i < n; i++)
        set[k++] = more[i];
    memset(c, 0, sizeof *c);
    return mr_topology_load(t, MR_SOURCE_DIR "/conf/demo.json", set, k, err) || mr_check(c, t, parts, err) ? -1 : 0;
}

static void refused(int syn, const char *more, const char *why)
{
    struct mr_checked c;
    struct mr_topology t;
    struct mr_err err = {0};

    if (!run(&c, &t, syn, &more, 1, MR_CHECK_PLAN, &err))
        fail_msg("accepted: %s", more);
    assert_int_equal(err.code, MR_EXIT_CONFIG);
    if (!strstr(err.msg, why))
        fail_msg("message \"%s\"\n  lacks \"%s\"", err.msg, why);
    mr_checked_free(&c);
    mr_topology_free(&t);
}

static void demo(void **state)
{
    struct mr_checked c;
    struct mr_topology t;
    struct mr_err err = {0};
    uint64_t microbatches = 0;
    static char text[8192];
    FILE *f = fmemopen(text, sizeof text, "w");

    (void)state;
    if (run(&c, &t, 0, NULL, 0, MR_CHECK_PLAN, &err))
        fail_msg("%s", err.msg);
    assert_int_equal(c.samples, 7470);
    assert_int_equal(c.tokens, 1444859);
    assert_int_equal(c.target.embedding_rows, 2048);
    for (int b = 0; b < t.data.n_buckets; b++)
        microbatches += c.bucket_n[b];
    assert_int_equal(microbatches, c.epoch[1].first_pos);
    assert_in_range(c.epoch[1].first_step, 450, 480); /* about 16 samples a step */
    assert_int_equal(c.slab_bytes, 1664 * 3 * 128 * 4);
    assert_int_equal(c.n_slabs, 8);
    assert_true(c.target_fingerprint != 0);
    mr_check_print(&c, &t, f);
    fclose(f);
    print_message("%s", text);
    assert_non_null(strstr(text, "7470 rows = 7470 kept (0 truncated) + 0 dropped"));
    assert_non_null(strstr(text, "8 slabs x 2.44 MiB (1664 tokens x 3 layers x 128 x 4 bytes) = 19.5 MiB"));
    assert_null(strstr(text, "warning"));
    mr_checked_free(&c);
    mr_topology_free(&t);
}

/* An embedding with more rows than config.json says: the head has only vocab_size of them, so an id above is a label without a logit. */
static void ids_without_head(void **state)
{
    char config[96], weights[96], text[2048], set[128];
    FILE *f = fopen(MR_SOURCE_DIR "/demo/target/config.json", "r");
    char *at;

    (void)state;
    assert_non_null(f);
    text[fread(text, 1, sizeof text - 1, f)] = 0;
    fclose(f);
    at = strstr(text, "\"vocab_size\": 2048");
    assert_non_null(at);
    memcpy(at, "\"vocab_size\": 2000", 18);
    snprintf(config, sizeof config, "%s/config.json", dir);
    snprintf(weights, sizeof weights, "%s/model.safetensors", dir);
    snprintf(set, sizeof set, "/target/checkpoint=\"%s\"", dir);
    f = fopen(config, "w");
    fputs(text, f);
    fclose(f);
    assert_int_equal(symlink(MR_SOURCE_DIR "/demo/target/model.safetensors", weights), 0);
    refused(0, set, "; ids are 0..1999 (the rows of the target's head)");
    unlink(weights);
    unlink(config);
}

static void epochs(void **state)
{
    const char *more[] = {"/train/epochs=3", "/train/grad_accum=2", "/train/max_steps=5"};
    struct mr_checked c;
    struct mr_topology t;
    struct mr_err err = {0};

    (void)state;
    if (run(&c, &t, 1, more, 3, MR_CHECK_PLAN, &err))
        fail_msg("%s", err.msg);
    assert_int_equal(c.synthetic, 1);
    assert_int_equal(c.epoch[0].first_pos, 0);
    for (unsigned e = 0; e < 3; e++) {
        struct mr_plan p;

        mr_plan_make(&p, c.data, &c.plan_opts, e, &err);
        assert_int_equal(c.epoch[e + 1].first_pos - c.epoch[e].first_pos, p.n);
        assert_int_equal(c.epoch[e + 1].first_step - c.epoch[e].first_step, (p.n + 3) / 4);
        assert_true(p.n <= c.max_entries && p.n_samples <= c.max_samples);
        mr_plan_free(&p);
    }
    mr_checked_free(&c);
    mr_topology_free(&t);
}

/* What an actor asks for: no data is opened. */
static void model_only(void **state)
{
    const char *more[] = {"/data/train=\"/nonexistent.jsonl\""};
    struct mr_checked c;
    struct mr_topology t;
    struct mr_err err = {0};

    (void)state;
    assert_int_equal(run(&c, &t, 0, more, 1, MR_CHECK_MODEL, &err), 0);
    assert_null(c.data);
    assert_null(c.epoch);
    assert_true(c.layout.P > 0);
    assert_int_equal(c.plan_opts.max_seqs, 832);
    mr_checked_free(&c);
    mr_topology_free(&t);
    refused(0, more[0], "/nonexistent.jsonl: cannot open");
}

static void relations(void **state)
{
    (void)state;
    refused(0, "/target/layers=[1,5]", "/target/layers/1: is 5, the target's last layer");
    refused(0, "/target/layers=[1,6]", "the target has 6 layers; 0..4");
    refused(0, "/drafter/mask_token_id=2048", "the target's embedding has 2048 rows; 0..2047");
    refused(0, "/drafter/hidden_size=64", "the target's is 128");
    refused(0, "/drafter/num_key_value_heads=3", "does not divide num_attention_heads = 4");
    refused(0, "/target/checkpoint=\"/nonexistent\"", "/nonexistent: no such directory");
    refused(0, "/drafter/init=\"checkpoint:/nonexistent\"", "/nonexistent: no such directory");
    refused(1, "/target/checkpoint=\"synthetic:hidden=8\"", "the form is synthetic:hidden=H");
    refused(1, "/data/train=\"synthetic:500?min=513&max=600&seed=1\"", "no usable row: of 500 rows 0 too short, 0 all masked");
    refused(1, "/train/epochs=1048576", "is 1048576: at least 79691776 microbatches and");
}

static void too_long_for_the_target(void **state)
{
    const char *more[] = {"/data/max_tokens=2000", "/data/buckets=[2000]", "/data/token_budget=2000"};
    struct mr_checked c;
    struct mr_topology t;
    struct mr_err err = {0};

    (void)state;
    assert_int_equal(run(&c, &t, 0, more, 3, MR_CHECK_MODEL, &err), -1);
    assert_non_null(strstr(err.msg, "max_position_embeddings = 1024"));
    mr_checked_free(&c);
    mr_topology_free(&t);
}

/* A drafter to start from: its own output is accepted, another one is not. */
static void init_from(void **state)
{
    struct mr_checked c;
    struct mr_topology t;
    struct mr_err err = {0};
    char path[96], set[128];
    float *p;
    const char *more[2] = {set, "/target/layers=[1,2,4]"};

    (void)state;
    assert_int_equal(run(&c, &t, 0, NULL, 0, MR_CHECK_MODEL, &err), 0);
    p = calloc(c.layout.P, sizeof *p);
    snprintf(path, sizeof path, "%s/config.json", dir);
    assert_int_equal(mr_drafter_config_save(&c.drafter, path, &err), 0);
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    assert_int_equal(mr_drafter_weights_save(&c.layout, p, NULL, path, &err), 0);
    free(p);
    mr_checked_free(&c);
    mr_topology_free(&t);
    snprintf(set, sizeof set, "/drafter/init=\"checkpoint:%s\"", dir);
    if (run(&c, &t, 0, more, 1, MR_CHECK_MODEL, &err))
        fail_msg("%s", err.msg);
    mr_checked_free(&c);
    mr_topology_free(&t);
    assert_int_equal(run(&c, &t, 0, more, 2, MR_CHECK_MODEL, &err), -1);
    assert_non_null(strstr(err.msg, "/drafter/init: "));
    mr_checked_free(&c);
    mr_topology_free(&t);
    err.code = 0;
    more[1] = "/drafter/layers=1";
    assert_int_equal(run(&c, &t, 0, more, 2, MR_CHECK_MODEL, &err), -1);
    assert_non_null(strstr(err.msg, "no such parameter"));
    mr_checked_free(&c);
    mr_topology_free(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(demo),
                                       cmocka_unit_test(ids_without_head),
                                       cmocka_unit_test(epochs),
                                       cmocka_unit_test(model_only),
                                       cmocka_unit_test(relations),
                                       cmocka_unit_test(too_long_for_the_target),
                                       cmocka_unit_test(init_from)};
    int rc;
    char cmd[96];

    mr_log_init("test", MR_LOG_ERROR);
    strcpy(dir, "/tmp/mr-check-XXXXXX");
    if (!mkdtemp(dir) || chdir(MR_SOURCE_DIR))
        return 1;
    rc = cmocka_run_group_tests(tests, NULL, NULL);
    snprintf(cmd, sizeof cmd, "rm -r %s", dir);
    return system(cmd) || rc;
}
