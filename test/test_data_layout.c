/* The flat block of a target's weights, and random checkpoints. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/target_layout.h"

#define SHAPE MR_SOURCE_DIR "/conf/shapes/qwen3-8b"

static struct mr_model_config config(const char *dir)
{
    struct mr_model_config c;
    struct mr_err err = {0};

    if (mr_model_config_load(&c, dir, &err))
        fail_msg("%s", err.msg);
    return c;
}

/* Total parameters as published (docs/target-models.md 1.4); no two tensors overlap, all are aligned, offsets ascend. */
static void qwen3_8b_has_its_parameters(void **state)
{
    struct mr_model_config c = config(SHAPE);
    struct mr_tlayout l;
    uint64_t n = 0, end = 0;

    (void)state;
    assert_int_equal(mr_tlayout_make(&l, &c, c.n_layers, MR_TL_LAYERS | MR_TL_NORM | MR_TL_EMBED | MR_TL_HEAD, 2), 0);
    for (int i = 0; i < l.n; i++) {
        assert_true(l.t[i].offset >= end);
        assert_int_equal(l.t[i].offset % 16, 0);
        end = l.t[i].offset + 2 * l.t[i].n;
        n += l.t[i].n;
    }
    assert_true(end <= l.bytes && l.bytes < end + 256);
    assert_int_equal(n, 8190735360);
    assert_int_equal(l.n, 36 * 11 + 3);
    assert_int_equal(l.layer[0].qkv % 256, 0);
    mr_tlayout_free(&l);
}

static void parts(void **state)
{
    struct mr_model_config c = config(SHAPE), tied = c;
    struct mr_tlayout l, half;

    (void)state;
    tied.tied = 1;
    assert_int_equal(mr_tlayout_make(&l, &tied, 4, MR_TL_HEAD, 2), 0);
    assert_int_equal(l.depth, 0);
    assert_int_equal(l.n, 1);                              /* the embedding is the head */
    assert_int_equal(l.head, l.embed);
    mr_tlayout_free(&l);
    assert_int_equal(mr_tlayout_make(&l, &c, 4, MR_TL_LAYERS | MR_TL_EMBED, 2), 0);
    assert_true(l.head == MR_TL_NONE && l.norm == MR_TL_NONE);
    assert_int_equal(mr_tlayout_make(&half, &c, 3, MR_TL_LAYERS | MR_TL_EMBED, 2), 0);
    assert_true(mr_tlayout_fingerprint(&l, 1) != mr_tlayout_fingerprint(&half, 1));
    assert_true(mr_tlayout_fingerprint(&l, 1) != mr_tlayout_fingerprint(&l, 2));
    mr_tlayout_free(&half);
    mr_tlayout_free(&l);
    c.arch = MR_ARCH_LLAMA;
    assert_int_equal(mr_tlayout_make(&l, &c, 2, MR_TL_LAYERS, 2), 0);
    assert_int_equal(l.n, 2 * 9);
    assert_true(l.layer[1].qn == MR_TL_NONE);
    mr_tlayout_free(&l);
}

static void random_checkpoints(void **state)
{
    struct mr_model_config c = config("random:" SHAPE "?seed=7"), d = config("random:" SHAPE);
    struct mr_model_files f, g;
    struct mr_err err = {0};

    (void)state;
    assert_int_equal(c.hidden_size, 4096);
    assert_int_equal(mr_model_files_open(&f, &c, "random:" SHAPE "?seed=7", &err), 0);
    assert_int_equal(mr_model_files_open(&g, &d, "random:" SHAPE, &err), 0);
    assert_true(f.random && f.seed == 7 && g.seed == 1 && f.n_shards == 0);
    assert_true(mr_model_fingerprint(&c, &f) != mr_model_fingerprint(&d, &g));
    mr_model_files_close(&f);
    mr_model_files_close(&g);
    assert_int_equal(mr_model_config_load(&c, "random:" SHAPE "?sed=7", &err), -1);
    assert_int_equal(err.code, MR_EXIT_CONFIG);
    assert_non_null(strstr(err.msg, "random:DIR?seed=N"));
    err.code = 0;
    assert_int_equal(mr_model_config_load(&c, "random:/nowhere?seed=7", &err), -1);
    assert_non_null(strstr(err.msg, "/nowhere"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(qwen3_8b_has_its_parameters), cmocka_unit_test(parts),
                                       cmocka_unit_test(random_checkpoints)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
