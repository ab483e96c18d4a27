/* Properties that every DFlash implementation has (docs/dflash.md 8b), and this one's promises: chunks, bits, refusals. */
#include <errno.h>

#include "test/models.h"

enum { ROWS = TINY_BLOCKS * 4 };

static void forward(struct tiny *t, const struct mr_dflash_batch *b, int32_t *argmax, float *ce)
{
    struct mr_dflash *d = tiny_model(t, 0, 1000, MR_DFLASH_IN_ROW, 0);
    struct mr_dflash_result r;

    assert_int_equal(mr_dflash_forward(d, b, argmax, ce, &r), 0);
    mr_dflash_destroy(d);
}

/* (a), (e): hidden states at and behind a block's anchor are not context. */
static void later_hidden_states_are_not_seen(void **state)
{
    struct tiny t;
    struct mr_dflash_batch b;
    float before[ROWS], after[ROWS];
    int F, j = 2;                             /* third block of the first sequence */

    (void)state;
    tiny_open(&t, 32);
    b = tiny_batch(&t);
    F = 2 * t.c.hidden_size;
    forward(&t, &b, NULL, before);
    for (int i = t.pos[j] * F; i < t.cu[1] * F; i++)
        t.features[i] = 100.0f;
    forward(&t, &b, NULL, after);
    assert_memory_equal(before + 4 * j, after + 4 * j, 4 * sizeof(float));
    assert_memory_equal(before + 4 * 4, after + 4 * 4, 4 * 4 * sizeof(float));       /* the next sequence */
    assert_true(memcmp(before + 4 * (j + 1), after + 4 * (j + 1), 4 * sizeof(float)));
    t.features[(t.pos[j] - 1) * F] += 1.0f;   /* the last row that is context */
    forward(&t, &b, NULL, after);
    assert_true(memcmp(before + 4 * j, after + 4 * j, 4 * sizeof(float)));
    tiny_close(&t);
}

/* (b), (c): a block's outputs do not depend on which other blocks there are, nor on its place among them. */
static void blocks_do_not_see_each_other(void **state)
{
    struct tiny t;
    struct mr_dflash_batch all, one;
    float before[ROWS], after[ROWS];

    (void)state;
    tiny_open(&t, 32);
    all = tiny_batch(&t);
    forward(&t, &all, NULL, before);
    for (int j = 0; j < t.n_blocks; j++) {
        one = all;
        one.n_blocks = 1;
        one.seq = t.seq + j;
        one.pos = t.pos + j;
        forward(&t, &one, NULL, after);
        assert_true(tiny_distance(after, before + 4 * j, 4) < 1e-5);
    }
    tiny_close(&t);
}

/* (d): nothing to learn from is no gradient, and no NaN. */
static void nothing_supervised(void **state)
{
    struct tiny t;
    struct mr_dflash *d;
    struct mr_dflash_batch b;
    struct mr_dflash_result r;
    float *g;

    (void)state;
    tiny_open(&t, 32);
    memset(t.mask, 0, sizeof t.mask);
    d = tiny_model(&t, 1, 12, MR_DFLASH_LABELLED, 0);
    b = tiny_batch(&t);
    for (int blocks = t.n_blocks; blocks >= 0; blocks -= t.n_blocks) {
        b.n_blocks = blocks;
        g = tiny_gradient(&t, d, &b, &r);
        for (uint64_t i = 0; i < t.l.P; i++)
            assert_true(g[i] == 0.0f);
        assert_true(r.loss_sum == 0.0 && r.weight_sum == 0.0 && r.labels == 0);
        free(g);
    }
    mr_dflash_destroy(d);
    tiny_close(&t);
}

/* (g), (h): packed sequences and any split over microbatches give the same sums. */
static void split_gives_the_same_sums(void **state)
{
    struct tiny t;
    struct mr_dflash *d;
    struct mr_dflash_batch all, b;
    struct mr_dflash_result whole, part;
    float *g, *sum;
    double loss = 0, weight = 0;

    (void)state;
    tiny_open(&t, 32);
    d = tiny_model(&t, 1, 1000, MR_DFLASH_LABELLED, 0);
    all = tiny_batch(&t);
    g = tiny_gradient(&t, d, &all, &whole);
    sum = calloc(t.l.P, sizeof *sum);
    assert_non_null(sum);
    for (int s = 0; s < TINY_SEQS; s++) {
        const int32_t cu[2] = {0, t.cu[s + 1] - t.cu[s]}, seq[4] = {0, 0, 0, 0};

        b = (struct mr_dflash_batch){.n_seqs = 1,
                                     .n_tokens = cu[1],
                                     .n_blocks = 4,
                                     .ids = t.ids + t.cu[s],
                                     .cu = cu,
                                     .mask = t.mask + t.cu[s],
                                     .features = t.features + t.cu[s] * 2 * t.c.hidden_size,
                                     .seq = seq,
                                     .pos = t.pos + 4 * s};
        assert_int_equal(mr_dflash_accumulate(d, &b, sum, &part), 0);
        loss += part.loss_sum;
        weight += part.weight_sum;
    }
    assert_true(fabs(loss - whole.loss_sum) < 1e-5 * loss);
    assert_true(fabs(weight - whole.weight_sum) < 1e-9 * weight);
    assert_true(tiny_distance(sum, g, t.l.P) < 1e-5);
    free(g);
    free(sum);
    mr_dflash_destroy(d);
    tiny_close(&t);
}

/* Chunks bound memory, not results; and the same batch gives the same bits every time. */
static void chunks_and_bits(void **state)
{
    struct tiny t;
    struct mr_dflash_batch b;
    struct mr_dflash_result r, r2;
    float *g[3];

    (void)state;
    tiny_open(&t, 32);
    b = tiny_batch(&t);
    for (int i = 0; i < 3; i++) {
        struct mr_dflash *d = tiny_model(&t, 1, i ? 8 : 1000, MR_DFLASH_LABELLED, 0);

        free(tiny_gradient(&t, d, &b, &r2));         /* a call before must leave no trace */
        g[i] = tiny_gradient(&t, d, &b, &r);
        mr_dflash_destroy(d);
    }
    assert_true(tiny_distance(g[1], g[0], t.l.P) < 1e-5);
    assert_memory_equal(g[1], g[2], t.l.P * sizeof(float));
    assert_int_equal(r.rows, t.n_blocks * t.c.block_size);
    for (int i = 0; i < 3; i++)
        free(g[i]);
    tiny_close(&t);
}

/* The gaps between tensors of the flat vector belong to nobody. */
static void gaps_stay_zero(void **state)
{
    struct tiny t;
    struct mr_dflash *d;
    struct mr_dflash_batch b;
    struct mr_dflash_result r;
    float *g;

    (void)state;
    tiny_open(&t, 20);
    d = tiny_model(&t, 1, 1000, MR_DFLASH_LABELLED, 0);
    b = tiny_batch(&t);
    g = tiny_gradient(&t, d, &b, &r);
    for (int i = 0; i < t.l.n; i++) {
        uint64_t end = i + 1 < t.l.n ? t.l.t[i + 1].offset : t.l.P;

        for (uint64_t j = t.l.t[i].offset + t.l.t[i].n; j < end; j++)
            assert_true(g[j] == 0.0f);
    }
    free(g);
    mr_dflash_destroy(d);
    tiny_close(&t);
}

static void counts(void **state)
{
    struct tiny t;
    struct mr_dflash *d;
    struct mr_dflash_batch b;
    struct mr_dflash_result r;
    int32_t argmax[ROWS];
    uint64_t labels = 0, correct = 0, accepted = 0;

    (void)state;
    tiny_open(&t, 32);
    b = tiny_batch(&t);
    forward(&t, &b, argmax, NULL);
    for (int j = 0; j < t.n_blocks; j++) {            /* half of the slots shall be right */
        assert_int_equal(argmax[4 * j], -1);
        for (int k = 1; k < 4; k += 2)
            if (t.cu[t.seq[j]] + t.pos[j] + k < t.cu[t.seq[j] + 1])
                t.ids[t.cu[t.seq[j]] + t.pos[j] + k] = argmax[4 * j + k];
    }
    forward(&t, &b, argmax, NULL);
    for (int j = 0; j < t.n_blocks; j++) {
        int run = 1;

        for (int k = 1; k < 4; k++) {
            int at = t.cu[t.seq[j]] + t.pos[j] + k, hit;

            if (at >= t.cu[t.seq[j] + 1] || !t.mask[at])
                continue;
            hit = argmax[4 * j + k] == t.ids[at];
            labels++;
            correct += (uint64_t)hit;
            run = run && hit;
            accepted += (uint64_t)run;
        }
    }
    d = tiny_model(&t, 1, 8, MR_DFLASH_LABELLED, 0);
    free(tiny_gradient(&t, d, &b, &r));
    assert_true(correct > 0);
    assert_int_equal(r.labels, labels);
    assert_int_equal(r.correct, correct);
    assert_int_equal(r.accepted, accepted);
    assert_int_equal(r.blocks, t.n_blocks);
    mr_dflash_destroy(d);
    tiny_close(&t);
}

/* What the slots say by themselves: counted once more from what the forward hands out. */
static void by_slot(void **state)
{
    struct tiny t;
    struct mr_dflash *d[2];
    struct mr_dflash_batch b;
    struct mr_dflash_result r, dpace;
    struct mr_slot_sums want[3] = {{0}}, all = {0};
    int32_t argmax[ROWS];
    float ce[ROWS];
    double weighted = 0;

    (void)state;
    tiny_open(&t, 32);
    b = tiny_batch(&t);
    forward(&t, &b, argmax, NULL);
    for (int j = 0; j < t.n_blocks; j++)              /* the first slot shall be right more often */
        if (t.cu[t.seq[j]] + t.pos[j] + 1 < t.cu[t.seq[j] + 1])
            t.ids[t.cu[t.seq[j]] + t.pos[j] + 1] = argmax[4 * j + 1];
    forward(&t, &b, argmax, ce);
    for (int i = 0; i < t.n_blocks * 4; i++) {
        int j = i / 4, k = i % 4, at = t.cu[t.seq[j]] + t.pos[j] + k;

        if (k && at < t.cu[t.seq[j] + 1] && t.mask[at]) {
            want[k - 1].labels++;
            want[k - 1].correct += argmax[i] == t.ids[at];
            want[k - 1].loss += (double)ce[i];
        }
    }
    d[0] = tiny_model(&t, 1, 8, MR_DFLASH_LABELLED, 0);
    d[1] = tiny_model(&t, 1, 8, MR_DFLASH_LABELLED, 1);
    free(tiny_gradient(&t, d[0], &b, &r));
    free(tiny_gradient(&t, d[1], &b, &dpace));
    for (int k = 1; k < 4; k++) {
        const struct mr_slot_sums *s = &r.slot[k - 1];

        assert_int_equal(s->labels, want[k - 1].labels);
        assert_int_equal(s->correct, want[k - 1].correct);
        assert_true(fabs(s->loss - want[k - 1].loss) < 1e-5 * want[k - 1].loss);
        assert_memory_equal(s, &dpace.slot[k - 1], sizeof *s);       /* cross-entropy, whatever the loss weighs */
        all.labels += s->labels;
        all.correct += s->correct;
        weighted += s->loss * exp(-(k - 1) / 3.0);
    }
    assert_true(want[0].correct > want[1].correct && want[0].labels != want[2].labels);
    assert_int_equal(all.labels, r.labels);
    assert_int_equal(all.correct, r.correct);
    assert_true(fabs(weighted - r.loss_sum) < 1e-6 * r.loss_sum);
    assert_true(r.slot[3].labels == 0 && r.slot[MR_MAX_BLOCK - 2].labels == 0);
    mr_dflash_destroy(d[0]);
    mr_dflash_destroy(d[1]);
    tiny_close(&t);
}

/* Two slots by hand: P = s1, s1 s2; R = P1 + P2, P2. */
static void dpace_by_hand(void **state)
{
    const float ce[3] = {0.5f, 9.0f, 1.5f};
    const uint8_t labelled[3] = {1, 0, 1};
    double s1 = 0.5 * exp(-0.5) + 0.5, s3 = 0.5 * exp(-1.5) + 0.5;
    float w[3];

    (void)state;
    mr_dflash_dpace(3, ce, labelled, w);
    assert_true(fabs((double)w[0] - (s1 + s1 * s3)) < 1e-6);
    assert_true(w[1] == 0.0f);
    assert_true(fabs((double)w[2] - s1 * s3) < 1e-6);
}

static void refusals(void **state)
{
    struct tiny t;
    struct mr_dflash *d;
    struct mr_dflash_batch b;
    struct mr_dflash_result r;
    struct mr_err err = {0};
    struct mr_dflash_opts o = {.max_tokens = 8, .max_seqs = 1, .max_blocks = 1, .chunk_rows = 4};

    (void)state;
    tiny_open(&t, 32);
    b = tiny_batch(&t);
    d = mr_dflash_create(t.k, &t.c, &t.l, &t.frozen, &o, &err);
    assert_non_null(d);
    assert_int_equal(mr_dflash_accumulate(d, &b, t.param, &r), -EINVAL);
    assert_int_equal(mr_dflash_forward(d, &b, NULL, NULL, &r), -E2BIG);
    mr_dflash_destroy(d);
    t.frozen.H = 48;
    assert_null(mr_dflash_create(t.k, &t.c, &t.l, &t.frozen, &o, &err));
    assert_non_null(strstr(err.msg, "hidden_size is 32"));
    err = (struct mr_err){0};
    t.frozen.H = 32;
    t.c.block_size = MR_MAX_BLOCK + 1;
    assert_null(mr_dflash_create(t.k, &t.c, &t.l, &t.frozen, &o, &err));
    assert_non_null(strstr(err.msg, "block_size is 257"));
    tiny_close(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(later_hidden_states_are_not_seen),
        cmocka_unit_test(blocks_do_not_see_each_other),
        cmocka_unit_test(nothing_supervised),
        cmocka_unit_test(split_gives_the_same_sums),
        cmocka_unit_test(chunks_and_bits),
        cmocka_unit_test(gaps_stay_zero),
        cmocka_unit_test(counts),
        cmocka_unit_test(by_slot),
        cmocka_unit_test(dpace_by_hand),
        cmocka_unit_test(refusals),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
