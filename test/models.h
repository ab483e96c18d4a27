/* A drafter small enough for finite differences, with random weights, a random frozen target and a random batch. */
#ifndef MR_TEST_MODELS_H
#define MR_TEST_MODELS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "actors/dflash.h"
#include "base/rng.h"

enum { TINY_SEQS = 3, TINY_TOKENS = 64, TINY_BLOCKS = 32 };

struct tiny {
    struct mr_k *k;
    struct mr_drafter_config c;
    struct mr_dlayout l;
    struct mr_frozen frozen;
    float *param, *features;         /* device = host: the cpu backend */
    int32_t ids[TINY_TOKENS], cu[TINY_SEQS + 1], seq[TINY_BLOCKS], pos[TINY_BLOCKS];
    uint8_t mask[TINY_TOKENS];
    int n_blocks;
};

static inline void tiny_fill(float *x, size_t n, uint64_t key, double std)
{
    struct mr_rng r = mr_rng_key(key, n, 7);

    for (size_t i = 0; i < n; i++)
        x[i] = (float)(std * mr_rng_normal(&r));
}

static inline void tiny_weights(struct tiny *t)
{
    for (int i = 0; i < t->l.n; i++) {
        float *p = t->param + t->l.t[i].offset;

        tiny_fill(p, t->l.t[i].n, (uint64_t)i, 0.25);
        for (uint64_t j = 0; !t->l.t[i].cols && j < t->l.t[i].n; j++)
            p[j] += 1.0f;
    }
}

/* `hidden` that is no multiple of 32 leaves gaps in the flat vector: then neither [k; v] nor [gate; up] is one matrix. */
static inline void tiny_open(struct tiny *t, int hidden)
{
    static const int len[TINY_SEQS] = {23, 11, 30};
    struct mr_rng r = mr_rng_key(1, 2, 3);
    size_t F;

    memset(t, 0, sizeof *t);
    t->k = mr_k_cpu_create(1);
    assert_non_null(t->k);
    t->c = (struct mr_drafter_config){.hidden_size = hidden,
                                      .intermediate_size = 22,
                                      .n_layers = 2,
                                      .n_heads = 4,
                                      .n_kv_heads = 2,
                                      .head_dim = 6,
                                      .K = 2,
                                      .target_hidden = hidden,
                                      .target_layers = 4,
                                      .layer_ids = {0, 2},
                                      .block_size = 4,
                                      .mask_token_id = 1,
                                      .vocab_size = 37,
                                      .max_position = 128,
                                      .rms_eps = 1e-6,
                                      .rope_theta = 1e4};
    assert_int_equal(mr_dlayout_make(&t->l, &t->c), 0);
    t->frozen = (struct mr_frozen){.k = t->k, .rows = 37, .vocab = 37, .H = hidden};
    t->frozen.embed = t->k->op->alloc(t->k, 37 * (size_t)hidden * sizeof(float));
    t->frozen.head = t->k->op->alloc(t->k, 37 * (size_t)hidden * sizeof(float));
    t->param = t->k->op->alloc(t->k, t->l.P * sizeof(float));
    F = (size_t)TINY_TOKENS * 2 * (size_t)hidden;
    t->features = t->k->op->alloc(t->k, F * sizeof(float));
    assert_true(t->frozen.embed && t->frozen.head && t->param && t->features);
    tiny_fill(t->frozen.embed, 37 * (size_t)hidden, 100, 1.0);
    tiny_fill(t->frozen.head, 37 * (size_t)hidden, 101, 0.5);
    tiny_fill(t->features, F, 102, 1.0);
    tiny_weights(t);
    for (int s = 0; s < TINY_SEQS; s++)
        t->cu[s + 1] = t->cu[s] + len[s];
    assert_int_equal(t->cu[TINY_SEQS], TINY_TOKENS);
    for (int i = 0; i < TINY_TOKENS; i++) {
        t->ids[i] = (int32_t)mr_rng_below(&r, 37);
        t->mask[i] = mr_rng_below(&r, 5) > 0;
    }
    for (int s = 0; s < TINY_SEQS; s++)          /* anchors at the start, in the middle, one whose block leaves the sequence */
        for (int j = 0; j < 4; j++) {
            t->seq[t->n_blocks] = s;
            t->pos[t->n_blocks++] = j * (len[s] - 2) / 3;
        }
}

static inline void tiny_close(struct tiny *t)
{
    mr_frozen_release(&t->frozen);
    t->k->op->release(t->k, t->param);
    t->k->op->release(t->k, t->features);
    mr_dlayout_free(&t->l);
    mr_k_cpu_destroy(t->k);
}

static inline struct mr_dflash *tiny_model(const struct tiny *t, int train, int chunk_rows, enum mr_dflash_rows rows, int loss)
{
    struct mr_dflash_opts o = {.max_tokens = TINY_TOKENS,
                               .max_seqs = TINY_SEQS,
                               .max_blocks = TINY_BLOCKS,
                               .chunk_rows = chunk_rows,
                               .gamma = 3.0,
                               .train = train,
                               .rows = rows,
                               .loss = loss};
    struct mr_err err = {0};
    struct mr_dflash *d = mr_dflash_create(t->k, &t->c, &t->l, &t->frozen, &o, &err);

    assert_non_null(d);
    assert_int_equal(mr_dflash_set_param(d, t->param), 0);
    return d;
}

static inline struct mr_dflash_batch tiny_batch(const struct tiny *t)
{
    return (struct mr_dflash_batch){.n_seqs = TINY_SEQS,
                                    .n_tokens = TINY_TOKENS,
                                    .n_blocks = t->n_blocks,
                                    .ids = t->ids,
                                    .cu = t->cu,
                                    .mask = t->mask,
                                    .features = t->features,
                                    .seq = t->seq,
                                    .pos = t->pos};
}

/* Gradient (P) of a batch, malloc'd. */
static inline float *tiny_gradient(const struct tiny *t, struct mr_dflash *d, const struct mr_dflash_batch *b, struct mr_dflash_result *r)
{
    float *acc = calloc(t->l.P, sizeof *acc);

    assert_non_null(acc);
    assert_int_equal(mr_dflash_accumulate(d, b, acc, r), 0);
    return acc;
}

static inline double tiny_distance(const float *a, const float *b, size_t n)
{
    double d = 0, r = 0;

    for (size_t i = 0; i < n; i++) {
        d += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
        r += (double)b[i] * (double)b[i];
    }
    return sqrt(d / (r + 1e-30));
}

#endif
