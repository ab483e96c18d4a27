/* The optimizer step as the drafter actor sees it, and the target model's refusals. */
#include "test/models.h"

#include <errno.h>

#include "actors/actors.h"
#include "actors/target_model.h"

#define TARGET MR_SOURCE_DIR "/test/goldens/targets/qwen3/fp32"

struct bench {
    struct mr_topology t;
    struct mr_checked c;
    struct mr_drafter_engine d;
    struct mr_drafter_view v;
    float *block;
};

static void bench_open(struct bench *b)
{
    struct mr_err err = {0};
    uint64_t P;

    memset(b, 0, sizeof *b);
    strcpy(b->t.target.checkpoint, TARGET);
    b->t.run.seed = 3;
    b->t.data.token_budget = 256;
    b->t.drafter.anchors = 5;
    b->t.train.lr = 1e-2;
    b->t.train.clip = 1.0;
    b->t.train.beta1 = 0.9;
    b->t.train.beta2 = 0.999;
    b->t.train.eps = 1e-8;
    b->t.train.loss_decay = 4.0;
    b->t.train.constant_lr = 1;
    b->t.n_actors = 1;
    b->t.actor[0] = (struct mr_topo_actor){.kind = MR_DRAFTER, .engine = MR_ENGINE_CPU, .device = "cpu", .threads = 1};
    b->c.plan_opts.max_seqs = 4;
    b->c.drafter = (struct mr_drafter_config){.hidden_size = 64, .intermediate_size = 96, .n_layers = 1, .n_heads = 4, .n_kv_heads = 2,
                                              .head_dim = 16, .K = 2, .target_hidden = 64, .target_layers = 4, .layer_ids = {2, 0},
                                              .block_size = 4, .mask_token_id = 3, .vocab_size = 320, .max_position = 1024, .rms_eps = 1e-6,
                                              .rope_theta = 1e4};
    assert_int_equal(mr_dlayout_make(&b->c.layout, &b->c.drafter), 0);
    P = b->v.P = b->c.layout.P;
    b->block = calloc(8 * P, sizeof *b->block);
    assert_non_null(b->block);
    for (int i = 0; i < 2; i++) {
        b->v.param[i] = b->block + (size_t)i * P;
        b->v.m[i] = b->block + (size_t)(2 + i) * P;
        b->v.v[i] = b->block + (size_t)(4 + i) * P;
    }
    b->v.acc = b->block + 6 * P;
    b->v.reduced = b->block + 7 * P;
    mr_drafter_init(&b->c.layout, b->v.param[0], 1, 0.02);
    if (mr_drafter_engine_create(&b->d, &b->t, &b->c, 0, &err))
        fail_msg("%s", err.msg);
}

static void bench_close(struct bench *b)
{
    b->d.destroy(b->d.self);
    mr_dlayout_free(&b->c.layout);
    free(b->block);
}

/* Two sequences, hidden states from the real target: loss falls when the same microbatch is learnt again and again. */
static void learns_a_microbatch(void **state)
{
    int32_t ids[60], cu[3] = {0, 25, 60};
    uint8_t mask[60];
    uint32_t sample[2] = {7, 8};
    struct mr_batch mb = {.n_seqs = 2, .n_tokens = 60, .ids = ids, .cu = cu, .mask = mask, .sample = sample};
    struct mr_target_engine target;
    struct mr_draft_stats st, first;
    struct mr_err err = {0};
    struct bench b;
    double norm;
    float *slab = aligned_alloc(256, 60 * 128 * sizeof(float));
    const float *src[1];

    (void)state;
    bench_open(&b);
    for (int i = 0; i < 60; i++) {
        ids[i] = (i * 37 + 11) % 320;
        mask[i] = i % 30 > 3;
    }
    assert_int_equal(mr_target_engine_create(&target, &b.t, &b.c, 0, &err), 0);
    assert_int_equal(target.forward(target.self, &mb, slab, &err), 0);
    src[0] = b.v.acc;
    for (unsigned s = 0; s < 20; s++) {
        assert_int_equal(b.d.accumulate(b.d.self, &mb, slab, b.v.param[s % 2], b.v.acc, &st, &err), 0);
        if (!s)
            first = st;
        assert_int_equal(b.d.sum(b.d.self, src, 1, b.v.reduced), 0);
        assert_int_equal(b.d.apply(b.d.self, &b.v, s, 20, st.weight_sum, &norm, &err), 0);
        assert_true(norm > 0);
        assert_int_equal(b.d.zero(b.d.self, b.v.acc), 0);
    }
    assert_int_equal(first.blocks, 10);
    assert_int_equal(first.draft_tokens, 40);
    assert_true(st.loss_sum < 0.5 * first.loss_sum);
    assert_true(st.weight_sum == first.weight_sum);
    target.destroy(target.self);
    free(slab);
    bench_close(&b);
}

/* By hand: gradient 3 in one place, weight 2: 1.5, clipped to 1; the first AdamW update is lr. */
static void one_step_by_hand(void **state)
{
    struct mr_err err = {0};
    struct bench b;
    double norm;
    float p;

    (void)state;
    bench_open(&b);
    p = b.v.param[0][5];
    b.v.reduced[5] = 3.0f;
    assert_int_equal(b.d.apply(b.d.self, &b.v, 0, 10, 2.0, &norm, &err), 0);
    assert_true(fabs(norm - 1.5) < 1e-9);
    assert_true(fabs((double)(p - b.v.param[1][5]) - 1e-2) < 1e-6);
    assert_true(fabs((double)b.v.m[1][5] - 0.1) < 1e-6);
    assert_true(fabs((double)b.v.v[1][5] - 0.001) < 1e-7);
    assert_true(b.v.param[1][6] == b.v.param[0][6]);
    bench_close(&b);
}

static void no_label_moves_nothing(void **state)
{
    struct mr_err err = {0};
    struct bench b;
    double norm;

    (void)state;
    bench_open(&b);
    b.v.m[0][1] = 0.5f;
    b.v.v[0][1] = 0.25f;
    assert_int_equal(b.d.apply(b.d.self, &b.v, 0, 10, 0.0, &norm, &err), 0);
    assert_memory_equal(b.v.param[0], b.v.param[1], b.v.P * sizeof(float));
    assert_true(b.v.m[1][1] == 0.5f && b.v.v[1][1] == 0.25f);
    bench_close(&b);
}

static void a_broken_gradient_is_named(void **state)
{
    struct mr_err err = {0};
    struct bench b;
    double norm;

    (void)state;
    bench_open(&b);
    b.v.reduced[0] = NAN;
    assert_int_equal(b.d.apply(b.d.self, &b.v, 4, 10, 1.0, &norm, &err), -1);
    assert_non_null(strstr(err.msg, "step 4"));
    bench_close(&b);
}

static void target_refuses(void **state)
{
    const int layers[1] = {4};
    const int32_t ids[4] = {1, 2, 3, 4}, cu[3] = {0, 2, 4};
    struct mr_target_model_opts o = {.layers = layers, .n_layers = 1, .max_tokens = 4, .max_seqs = 1};
    struct mr_k *k = mr_k_cpu_create(1);
    struct mr_target_model *m;
    struct mr_err err = {0};

    (void)state;
    assert_null(mr_target_model_create(k, TARGET, &o, &err));
    assert_non_null(strstr(err.msg, "layers 0 to 3"));
    o.n_layers = 0;
    o.full = 1;
    m = mr_target_model_create(k, TARGET, &o, &err);
    assert_non_null(m);
    assert_int_equal(mr_target_model_forward(m, 2, 4, ids, cu, NULL, NULL), -E2BIG);
    mr_target_model_destroy(m);
    mr_k_cpu_destroy(k);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(learns_a_microbatch),
        cmocka_unit_test(one_step_by_hand),
        cmocka_unit_test(no_label_moves_nothing),
        cmocka_unit_test(a_broken_gradient_is_named),
        cmocka_unit_test(target_refuses),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
