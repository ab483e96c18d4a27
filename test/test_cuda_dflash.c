/* The drafter on a GPU: its gradients against the cpu backend's, and the properties of docs/dflash.md 8b.
 *
 * The device is MR_TEST_DEVICE, cuda:0 by default; exit code 77 where it is not.  Weights are rounded to bf16 on both sides, so what differs
 * is the arithmetic: some 2^-9 for every rounded activation between the loss and a weight.  Where a property is exact, it is asked for bit for
 * bit: the contexts are deterministic ones.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "actors/backend.h"
#include "actors/dflash.h"
#include "base/rng.h"
#include "data/drafter_memory.h"
#include "data/safetensors.h"

enum { SEQS = 3, TOKENS = 192, BLOCKS = 24, VOCAB = 203, H = 96 };

#define GRADIENT_RMS 3e-2      /* of a tensor; the deepest ones have ten roundings behind them */
#define LOSS_REL 3e-3
#define SLOT_LOSS_REL 1e-2      /* of some twenty labels instead of all */

static struct mr_k *gpu, *cpu;

struct shape { int layers, nh, kv, hd, window, causal, loss; };

struct world {
    struct mr_k *k;
    struct mr_drafter_config c;
    struct mr_dlayout l;
    struct mr_frozen frozen;
    float *param;                    /* device */
    void *features;                  /* device */
    int32_t ids[TOKENS], cu[SEQS + 1], seq[BLOCKS], pos[BLOCKS];
    uint8_t mask[TOKENS];
};

static int small(void)
{
    return getenv("MR_TEST_SMALL") != NULL;
}

/* ---- the world ------------------------------------------------------------------------------------------------------------------ */

static float *random_f32(size_t n, uint64_t key, double mean, double std)
{
    struct mr_rng r = mr_rng_key(key, n, 3);
    float *x = malloc(n * sizeof *x);

    assert_non_null(x);
    for (size_t i = 0; i < n; i++)
        x[i] = mr_bf16_f32(mr_bf16((float)(mean + std * mr_rng_normal(&r))));
    return x;
}

static void *act(struct mr_k *k, size_t n, uint64_t key, double std)
{
    float *x = random_f32(n, key, 0, std);
    void *p = k->op->alloc(k, n * (size_t)k->act_bytes);

    assert_non_null(p);
    assert_int_equal(k->op->load(k, p, x, MR_K_F32, n), 0);
    assert_int_equal(k->op->sync(k), 0);
    free(x);
    return p;
}

static void make_param(struct world *w)
{
    float *flat = calloc(w->l.P, sizeof *flat);

    for (int i = 0; i < w->l.n; i++) {
        const struct mr_dparam *t = &w->l.t[i];
        float *x = random_f32(t->n, 50 + (uint64_t)i, t->cols ? 0 : 1, t->cols ? 1.5 / sqrt(t->cols) : 0.1);

        memcpy(flat + t->offset, x, t->n * sizeof *x);
        free(x);
    }
    w->param = w->k->op->alloc(w->k, w->l.P * sizeof *flat);
    assert_non_null(w->param);
    assert_int_equal(w->k->op->h2d(w->k, w->param, flat, w->l.P * sizeof *flat), 0);
    assert_int_equal(w->k->op->sync(w->k), 0);
    free(flat);
}

static void make_batch(struct world *w)
{
    static const int len[SEQS] = {70, 29, 93};
    struct mr_rng r = mr_rng_key(4, 4, 4);

    for (int s = 0; s < SEQS; s++)
        w->cu[s + 1] = w->cu[s] + len[s];
    assert_int_equal(w->cu[SEQS], TOKENS);
    for (int i = 0; i < TOKENS; i++) {
        w->ids[i] = (int32_t)mr_rng_below(&r, VOCAB);
        w->mask[i] = mr_rng_below(&r, 6) > 0;
    }
    for (int j = 0; j < BLOCKS; j++) {       /* the first at position 0; the last leaves its sequence */
        w->seq[j] = j / 8;
        w->pos[j] = j % 8 * (len[j / 8] - 2) / 7;
    }
}

static void open_world(struct world *w, struct mr_k *k, const struct shape *s)
{
    memset(w, 0, sizeof *w);
    w->k = k;
    w->c = (struct mr_drafter_config){.hidden_size = H, .intermediate_size = 160, .n_layers = s->layers, .n_heads = s->nh, .n_kv_heads = s->kv,
                                      .head_dim = s->hd, .K = 2, .target_hidden = H, .target_layers = 6, .layer_ids = {1, 3}, .block_size = 8,
                                      .mask_token_id = 1, .vocab_size = VOCAB, .max_position = 512, .rms_eps = 1e-6, .rope_theta = 1e4,
                                      .sliding_window = s->window};
    for (int i = 0; i < s->layers; i++) {
        w->c.sliding[i] = s->window && i == 0;
        w->c.causal[i] = (unsigned char)(s->causal && i == 0);
    }
    assert_int_equal(mr_dlayout_make(&w->l, &w->c), 0);
    w->frozen = (struct mr_frozen){.k = k, .rows = VOCAB, .vocab = VOCAB, .H = H, .embed = act(k, (size_t)VOCAB * H, 1, 1),
                                   .head = act(k, (size_t)VOCAB * H, 2, 0.15)};
    w->features = act(k, (size_t)TOKENS * 2 * H, 3, 1);
    make_param(w);
    make_batch(w);
}

static void close_world(struct world *w)
{
    mr_frozen_release(&w->frozen);
    w->k->op->release(w->k, w->features);
    w->k->op->release(w->k, w->param);
    mr_dlayout_free(&w->l);
}

static struct mr_dflash *model(const struct world *w, int train, int chunk_blocks, int loss)
{
    struct mr_dflash_opts o = {.max_tokens = TOKENS, .max_seqs = SEQS, .max_blocks = BLOCKS, .chunk_rows = chunk_blocks * 8, .gamma = 5.0,
                               .loss = loss, .train = train, .rows = train ? MR_DFLASH_LABELLED : MR_DFLASH_IN_ROW};
    struct mr_err err = {0};
    struct mr_dflash *d = mr_dflash_create(w->k, &w->c, &w->l, &w->frozen, &o, &err);

    if (!d)
        fail_msg("%s", err.msg);
    assert_int_equal(mr_dflash_set_param(d, w->param), 0);
    return d;
}

static struct mr_dflash_batch batch(const struct world *w)
{
    return (struct mr_dflash_batch){.n_seqs = SEQS, .n_tokens = TOKENS, .n_blocks = BLOCKS, .ids = w->ids, .cu = w->cu, .mask = w->mask,
                                    .features = w->features, .seq = w->seq, .pos = w->pos};
}

/* Sequence s alone. */
static struct mr_dflash_batch one_of(const struct world *w, int s, int32_t *cu, int32_t *seq)
{
    struct mr_dflash_batch b = batch(w);
    int t = w->cu[s];

    cu[0] = 0;
    cu[1] = w->cu[s + 1] - t;
    memset(seq, 0, 8 * sizeof *seq);
    b.n_seqs = 1;
    b.n_tokens = cu[1];
    b.n_blocks = 8;
    b.ids += t;
    b.mask += t;
    b.features = (const char *)w->features + (size_t)t * 2 * H * (size_t)w->k->act_bytes;
    b.cu = cu;
    b.seq = seq;
    b.pos += 8 * s;
    return b;
}

static float *new_acc(const struct world *w)
{
    float *acc = w->k->op->alloc(w->k, w->l.P * sizeof *acc);

    assert_non_null(acc);
    return acc;
}

static float *to_host(const struct world *w, const float *acc)
{
    float *x = malloc(w->l.P * sizeof *x);

    assert_non_null(x);
    assert_int_equal(w->k->op->d2h(w->k, x, acc, w->l.P * sizeof *x), 0);
    assert_int_equal(w->k->op->sync(w->k), 0);
    return x;
}

/* The gradient of the whole batch, on the host. */
static float *gradient(const struct world *w, int chunk_blocks, int loss, struct mr_dflash_result *r)
{
    struct mr_dflash *d = model(w, 1, chunk_blocks, loss);
    struct mr_dflash_batch b = batch(w);
    float *acc = new_acc(w), *x;

    assert_int_equal(mr_dflash_accumulate(d, &b, acc, r), 0);
    x = to_host(w, acc);
    w->k->op->release(w->k, acc);
    mr_dflash_destroy(d);
    return x;
}

static double distance(const float *a, const float *b, size_t n)
{
    double d = 0, r = 0;

    for (size_t i = 0; i < n; i++) {
        d += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
        r += (double)b[i] * (double)b[i];
    }
    return sqrt(d / (r + 1e-30));
}

static void forward(const struct world *w, const struct mr_dflash_batch *b, int32_t *argmax, float *ce)
{
    struct mr_dflash *d = model(w, 0, BLOCKS, 0);
    struct mr_dflash_result r;

    assert_int_equal(mr_dflash_forward(d, b, argmax, ce, &r), 0);
    mr_dflash_destroy(d);
}

/* ---- against the cpu -------------------------------------------------------------------------------------------------------------- */

static void compare(const struct shape *s)
{
    struct mr_dflash_result rg, rc;
    struct world a, b;
    float *x, *y;

    open_world(&a, gpu, s);
    open_world(&b, cpu, s);
    x = gradient(&a, BLOCKS, s->loss, &rg);
    y = gradient(&b, BLOCKS, s->loss, &rc);
    assert_true(fabs(rg.loss_sum - rc.loss_sum) < (s->loss ? 5 : 1) * LOSS_REL * rc.loss_sum);
    assert_true(fabs(rg.weight_sum - rc.weight_sum) < 1e-9 * rc.weight_sum);
    assert_int_equal(rg.labels, rc.labels);
    for (int i = 0; i < a.l.n; i++) {
        const struct mr_dparam *t = &a.l.t[i];
        double d = distance(x + t->offset, y + t->offset, t->n);

        if (!(d < GRADIENT_RMS))
            fail_msg("hd %d, window %d, causal %d, loss %d: gradient of %s: relative rms %g", s->hd, s->window, s->causal, s->loss, t->name, d);
    }
    free(x);
    free(y);
    close_world(&a);
    close_world(&b);
}

/* Tokens that are no anchor become what the cpu's drafter says: then many slots are right, and no input has changed. */
static void make_right(struct world *cpu_world, struct world *gpu_world)
{
    struct mr_dflash_batch b = batch(cpu_world);
    int32_t argmax[BLOCKS * 8];
    uint8_t anchor[TOKENS] = {0};

    forward(cpu_world, &b, argmax, NULL);
    for (int j = 0; j < BLOCKS; j++)
        anchor[b.cu[b.seq[j]] + b.pos[j]] = 1;
    for (int j = 0; j < BLOCKS; j++)
        for (int k = 1; k < 8; k++) {
            int t = b.cu[b.seq[j]] + b.pos[j] + k;

            if (t < b.cu[b.seq[j] + 1] && !anchor[t] && (j + k) % 3)
                cpu_world->ids[t] = argmax[j * 8 + k];
        }
    memcpy(gpu_world->ids, cpu_world->ids, sizeof gpu_world->ids);
}

/* Labels, right slots and cross-entropy of each position in the block. */
static void slots_as_on_the_cpu(void **state)
{
    static const struct shape shape[] = {{2, 4, 2, 32, 0, 0, 0}, {1, 2, 1, 64, 0, 0, 1}};

    (void)state;
    for (size_t i = 0; i < sizeof shape / sizeof *shape; i++) {
        struct mr_dflash_result g, c;
        uint64_t labels = 0, correct = 0;
        struct world a, b;

        open_world(&a, gpu, &shape[i]);
        open_world(&b, cpu, &shape[i]);
        make_right(&b, &a);
        free(gradient(&a, 9, shape[i].loss, &g));
        free(gradient(&b, BLOCKS, shape[i].loss, &c));
        for (int k = 1; k < 8; k++) {
            const struct mr_slot_sums *x = &g.slot[k - 1], *y = &c.slot[k - 1];

            assert_int_equal(x->labels, y->labels);
            assert_in_range(x->correct + 3, y->correct, y->correct + 6);     /* two logits may change their order in bf16 */
            if (!(fabs(x->loss - y->loss) < SLOT_LOSS_REL * y->loss))
                fail_msg("loss %d: position %d: %g on the gpu, %g on the cpu", shape[i].loss, k, x->loss, y->loss);
            labels += x->labels;
            correct += x->correct;
        }
        assert_true(labels == g.labels && correct == g.correct && correct > labels / 8);
        close_world(&a);
        close_world(&b);
    }
}

static void as_on_the_cpu(void **state)
{
    static const struct shape shape[] = {{2, 4, 2, 16, 0, 0, 0}, {2, 4, 2, 24, 24, 1, 0}, {1, 2, 1, 64, 0, 0, 1}, {2, 2, 1, 128, 40, 0, 0},
                                         {3, 6, 2, 40, 0, 0, 0}, {3, 4, 4, 64, 16, 1, 1}, {2, 8, 2, 128, 0, 0, 0}};

    (void)state;
    for (size_t i = 0; i < (small() ? 4 : sizeof shape / sizeof *shape); i++)
        compare(&shape[i]);
}

/* ---- properties (docs/dflash.md 8b) --------------------------------------------------------------------------------------------- */

static const struct shape plain = {2, 4, 2, 32, 0, 0, 0};

/* (a) hidden states at and behind an anchor, (b) other blocks: no bit of a block depends on them. */
static void sees_its_context_only(void **state)
{
    int32_t pos[BLOCKS], seq[BLOCKS];
    float ce[BLOCKS * 8], other[BLOCKS * 8];
    struct mr_dflash_batch b;
    struct world w;
    int j = 11, from;                        /* fourth block of the second sequence */

    (void)state;
    open_world(&w, gpu, &plain);
    b = batch(&w);
    forward(&w, &b, NULL, ce);
    memcpy(pos, w.pos, sizeof pos);
    memcpy(seq, w.seq, sizeof seq);
    for (int i = 0; i < BLOCKS; i++)
        if (i != j && w.seq[i] == 1 && pos[i] + 1 < (i < 15 ? pos[i + 1] : 27))
            pos[i]++;
    b.pos = pos;
    forward(&w, &b, NULL, other);
    assert_memory_equal(ce + j * 8, other + j * 8, 8 * sizeof *ce);
    from = w.cu[1] + w.pos[j];
    assert_int_equal(gpu->op->zero(gpu, (char *)w.features + (size_t)from * 2 * H * (size_t)gpu->act_bytes,
                                   (size_t)(TOKENS - from) * 2 * H * (size_t)gpu->act_bytes), 0);
    b.pos = w.pos;
    forward(&w, &b, NULL, other);
    assert_memory_equal(ce + j * 8, other + j * 8, 8 * sizeof *ce);
    assert_memory_not_equal(ce + (j + 1) * 8, other + (j + 1) * 8, 8 * sizeof *ce);
    close_world(&w);
}

/* (c) sequences in another order, (e) a block alone, (g) a sequence alone: the same outputs, but for the rounding of other tiles. */
static void alone_as_packed(void **state)
{
    float ce[BLOCKS * 8], alone[64];
    int32_t cu[2], seq[8];
    struct mr_dflash_batch b;
    struct world w;

    (void)state;
    open_world(&w, gpu, &plain);
    b = batch(&w);
    forward(&w, &b, NULL, ce);
    for (int s = SEQS - 1; s >= 0; s--) {
        b = one_of(&w, s, cu, seq);
        forward(&w, &b, NULL, alone);
        assert_true(distance(alone, ce + s * 64, 64) < 5e-3);
        b.n_blocks = 1;
        b.pos += 3;
        forward(&w, &b, NULL, alone);
        assert_true(distance(alone, ce + s * 64 + 24, 8) < 1e-2);
    }
    close_world(&w);
}

/* (d) nothing supervised: no loss, and not one bit of gradient. */
static void nothing_supervised(void **state)
{
    struct mr_dflash_result r;
    struct world w;
    float *x;

    (void)state;
    open_world(&w, gpu, &plain);
    memset(w.mask, 0, sizeof w.mask);
    x = gradient(&w, BLOCKS, 0, &r);
    for (uint64_t i = 0; i < w.l.P; i++)
        assert_true(x[i] == 0.0f);
    assert_true(r.loss_sum == 0 && r.weight_sum == 0 && r.labels == 0);
    free(x);
    close_world(&w);
}

/* (h) the batch in one, in chunks of whole sequences, and as one microbatch for each sequence: the same numerator gradients. */
static void split_gives_the_same_sums(void **state)
{
    struct mr_dflash_result r, part, all = {0};
    float *whole, *chunked, *again, *x, *acc;
    struct mr_dflash *d;
    struct world w;

    (void)state;
    open_world(&w, gpu, &plain);
    whole = gradient(&w, BLOCKS, 0, &r);
    again = gradient(&w, BLOCKS, 0, &part);
    assert_memory_equal(whole, again, w.l.P * sizeof *whole);
    chunked = gradient(&w, 9, 0, &part);     /* 8 + 8 + 8: a chunk ends with a sequence */
    assert_true(distance(chunked, whole, w.l.P) < 5e-3 && fabs(part.loss_sum - r.loss_sum) < 1e-3 * r.loss_sum);
    acc = new_acc(&w);
    d = model(&w, 1, BLOCKS, 0);
    for (int s = 0; s < SEQS; s++) {
        int32_t cu[2], seq[8];
        struct mr_dflash_batch b = one_of(&w, s, cu, seq);

        assert_int_equal(mr_dflash_accumulate(d, &b, acc, &part), 0);
        all.loss_sum += part.loss_sum;
        all.weight_sum += part.weight_sum;
    }
    x = to_host(&w, acc);
    assert_true(distance(x, whole, w.l.P) < 5e-3);
    assert_true(fabs(all.loss_sum - r.loss_sum) < 1e-3 * r.loss_sum && fabs(all.weight_sum - r.weight_sum) < 1e-9 * r.weight_sum);
    mr_dflash_destroy(d);
    gpu->op->release(gpu, acc);
    free(whole), free(again), free(chunked), free(x);
    close_world(&w);
}

/* What `check` says a drafter needs is what it takes. */
static void memory_as_planned(void **state)
{
    static struct mr_topology t;
    struct mr_drafter_chunk k;
    struct mr_drafter_work plan;
    struct world w;

    (void)state;
    t.data.token_budget = TOKENS;
    t.data.max_tokens = 93;
    t.drafter.anchors = 8;
    open_world(&w, gpu, &plain);
    for (int train = 1; train < 3; train++) {
        struct mr_dflash_opts o = {.gamma = 5.0, .train = 1};
        struct mr_err err = {0};
        struct mr_dflash *d;
        uint64_t planned, taken;

        t.drafter.anchors = 8 * train;
        k = mr_drafter_chunk_of(&t, 8, SEQS, gpu->act_bytes);
        mr_drafter_work_bytes(&plan, &w.c, w.l.P, &k, gpu->act_bytes, 0);
        o.max_tokens = k.max_tokens;
        o.max_seqs = k.max_seqs;
        o.max_blocks = k.max_blocks;
        o.chunk_rows = k.rows;
        d = mr_dflash_create(gpu, &w.c, &w.l, &w.frozen, &o, &err);
        assert_non_null(d);
        planned = plan.total - plan.scratch - plan.loss;
        taken = mr_dflash_bytes(d) - gpu->op->ce_scratch(gpu, k.max_blocks * 8, H, VOCAB);
        assert_true(taken <= planned + 256 && planned <= taken + 256);
        if (gpu->act_bytes == 2)
            assert_true(gpu->op->ce_scratch(gpu, k.max_blocks * 8, H, VOCAB) <= plan.loss);
        mr_dflash_destroy(d);
    }
    close_world(&w);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(as_on_the_cpu),      cmocka_unit_test(slots_as_on_the_cpu),       cmocka_unit_test(sees_its_context_only),
        cmocka_unit_test(alone_as_packed),    cmocka_unit_test(nothing_supervised),        cmocka_unit_test(split_gives_the_same_sums),
        cmocka_unit_test(memory_as_planned),
    };
    const char *device = getenv("MR_TEST_DEVICE");
    struct mr_err err = {0};
    int rc;

    gpu = mr_backend_open(device ? device : "cuda:0", 1, 1, &err);
    if (!gpu) {
        printf("skipped: %s\n", err.msg);
        return 77;
    }
    cpu = mr_backend_open("cpu", 1, 1, &err);
    rc = cmocka_run_group_tests(tests, NULL, NULL);
    mr_backend_close(gpu);
    mr_backend_close(cpu);
    return rc;
}
