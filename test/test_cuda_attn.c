/* Attention of the cuda backend, forward and backward, against the cpu backend.
 *
 * Beyond the rounding of results, the device rounds probabilities (and dS) to bf16 before the second product: an independent relative error
 * of up to 2^-8 a term, which averages out over keys; errors stay within two roundings forward and three backward (the saved output, from
 * which delta comes, is rounded too).  The largest single error is far wider in the gradients of keys: a key that draws most of a query has
 * P near 1 and dS = P * (dP - delta), a difference of numbers of the size of |dO||V|, about sqrt(hd) times the rms of dO; each of its terms
 * may be wrong by 2^-8 of that, where the gradient of most keys is near 0.  sqrt(128) * 2^-8 * (a few such queries) is 0.1 to 0.2. */
#include "cuda_ref.h"

#include <errno.h>

#define FWD_RMS 4e-3
#define FWD_MAX 3e-2
#define BWD_RMS 8e-3
#define BWD_MAX 2.5e-1

/* ---- causal ---- */

static void causal_case(int n_seqs, const int32_t *cu, int nh, int kv, int hd, int gap)
{
    int rows = cu[n_seqs], ldq = (nh + 2 * kv) * hd + gap, ldo = nh * hd + gap;
    struct ten qkv = ten_rnd((size_t)rows * ldq, 1, 1, 1.5), o = ten_new((size_t)rows * ldo, 1), o2 = ten_new((size_t)rows * ldo, 1);
    int32_t *dcu = dev_i32(cu, (size_t)n_seqs + 1);
    char *g = qkv.g;

    BOTH(gpu->op->attn_causal(gpu, n_seqs, dcu, cu, nh, kv, hd, g, ldq, g + 2 * nh * hd, g + 2 * (nh + kv) * hd, ldq, o.g, ldo),
         cpu->op->attn_causal(cpu, n_seqs, cu, cu, nh, kv, hd, qkv.c, ldq, qkv.c + nh * hd, qkv.c + (nh + kv) * hd, ldq, o.c, ldo));
    ten_check("attn_causal", &o, FWD_RMS, FWD_MAX);
    assert_int_equal(
        gpu->op->attn_causal(gpu, n_seqs, dcu, cu, nh, kv, hd, g, ldq, g + 2 * nh * hd, g + 2 * (nh + kv) * hd, ldq, o2.g, ldo), 0);
    ten_same("attn_causal", &o, &o2);
    gpu->op->release(gpu, dcu);
    ten_free(&qkv), ten_free(&o), ten_free(&o2);
}

static void test_causal(void **state)
{
    static const int32_t one[] = {0, 1}, tile[] = {0, 128}, over[] = {0, 129}, ragged[] = {0, 1, 10, 10, 74, 201};
    static const int32_t big[] = {0, 1000, 3500, 3613};

    (void)state;
    causal_case(1, one, 2, 1, 16, 0);
    causal_case(1, tile, 1, 1, 64, 0);
    causal_case(1, over, 1, 1, 128, 8);
    causal_case(5, ragged, 4, 2, 16, 8);
    causal_case(5, ragged, 3, 1, 32, 0);
    causal_case(5, ragged, 2, 2, 64, 16);
    causal_case(5, ragged, 2, 1, 128, 0);
    causal_case(5, ragged, 2, 1, 80, 8);
    causal_case(5, ragged, 1, 1, 24, 0);
    causal_case(5, ragged, 2, 1, 8, 0);
    causal_case(0, one, 2, 1, 16, 0);
    if (test_large()) {
        causal_case(3, big, 8, 2, 128, 0);
        causal_case(3, big, 4, 1, 64, 0);
        causal_case(3, big, 4, 2, 96, 8);
    }
}

/* More plans than are remembered, then the first again. */
static void test_plans(void **state)
{
    (void)state;
    for (int i = 0; i < 22; i++) {
        int32_t cu[3] = {0, 3 + i % 11, 9 + 2 * (i % 11)};

        causal_case(2, cu, 1, 1, 16, 0);
    }
}

/* ---- blocks ---- */

struct blocks_case {
    int n, B, nh, kv, hd;
    struct mr_k_block_mask mask;
    int n_seqs;
    const int32_t *cu;
};

static int by_anchor(const void *a, const void *b)
{
    const int32_t *x = a, *y = b;

    return x[0] != y[0] ? (x[0] > y[0]) - (x[0] < y[0]) : (x[1] > y[1]) - (x[1] < y[1]);
}

/* Random anchors, some at 0, some -1 (padding), the last at its sequence's end; sorted. */
static void draw_anchors(const struct blocks_case *a, uint64_t seed, int32_t *seq, int32_t *pos)
{
    struct mr_rng r = mr_rng_key(seed, 1, 2);
    int32_t(*pair)[2] = malloc((size_t)(a->n + 1) * sizeof *pair);

    for (int j = 0; j < a->n; j++) {
        int len;

        pair[j][0] = (int32_t)mr_rng_below(&r, (uint64_t)a->n_seqs);
        len = a->cu[pair[j][0] + 1] - a->cu[pair[j][0]];
        pair[j][1] = j % 9 == 4 ? -1 : j % 7 == 1 ? 0 : j % 11 == 3 ? len : (int32_t)mr_rng_below(&r, (uint64_t)len);
    }
    qsort(pair, (size_t)a->n, sizeof *pair, by_anchor);
    for (int j = 0; j < a->n; j++) {
        seq[j] = pair[j][0];
        pos[j] = pair[j][1];
    }
    free(pair);
}

struct block_data {
    struct ten q, c, b, o, lse, dO, dq, dc, db;
    int ldc, ldb, kc;                  /* strides of context and block rows; offset of the values */
    struct mr_k_blocks on_gpu, on_cpu;
    int32_t *dcu, *dseq, *dpos, *seq, *pos;
};

static struct block_data data_new(const struct blocks_case *a, uint64_t seed)
{
    int w = a->kv * a->hd, nB = a->n * a->B, rows = a->cu[a->n_seqs];
    size_t nq = (size_t)nB * a->nh * a->hd;
    struct block_data d = {.ldc = 2 * w + 8, .ldb = 2 * w + 16, .kc = w};

    d.seq = calloc((size_t)a->n + 1, sizeof *d.seq);
    d.pos = calloc((size_t)a->n + 1, sizeof *d.pos);
    draw_anchors(a, seed, d.seq, d.pos);
    d.dseq = dev_i32(d.seq, (size_t)a->n), d.dpos = dev_i32(d.pos, (size_t)a->n), d.dcu = dev_i32(a->cu, (size_t)a->n_seqs + 1);
    d.on_gpu = (struct mr_k_blocks){a->n, a->B, d.dseq, d.dpos, d.seq, d.pos};
    d.on_cpu = (struct mr_k_blocks){a->n, a->B, d.seq, d.pos, d.seq, d.pos};
    d.q = ten_rnd(nq, 1, seed + 1, 1.5), d.c = ten_rnd((size_t)rows * d.ldc, 1, seed + 2, 1.5);
    d.b = ten_rnd((size_t)nB * d.ldb, 1, seed + 3, 1.5), d.dO = ten_rnd(nq, 1, seed + 4, 1.0);
    d.o = ten_new(nq, 1), d.lse = ten_new((size_t)nB * a->nh, 0), d.dq = ten_new(nq, 1);
    d.dc = ten_rnd((size_t)rows * d.ldc, 1, seed + 5, 0.1), d.db = ten_new((size_t)nB * d.ldb, 1);
    return d;
}

static void data_free(struct block_data *d)
{
    ten_free(&d->q), ten_free(&d->c), ten_free(&d->b), ten_free(&d->o), ten_free(&d->lse), ten_free(&d->dO), ten_free(&d->dq);
    ten_free(&d->dc), ten_free(&d->db);
    gpu->op->release(gpu, d->dcu), gpu->op->release(gpu, d->dseq), gpu->op->release(gpu, d->dpos);
    free(d->seq), free(d->pos);
}

static void *at(const struct ten *t, int off)
{
    return (char *)t->g + 2 * off;
}

static int gpu_bwd(const struct blocks_case *a, const struct block_data *d, const struct ten *dq, const struct ten *dc,
                   const struct ten *db)
{
    return gpu->op->attn_block_bwd(gpu, &d->on_gpu, d->dcu, a->cu, &a->mask, a->nh, a->kv, a->hd, d->q.g, d->c.g, at(&d->c, d->kc), d->ldc,
                                   d->b.g, at(&d->b, d->kc), d->ldb, d->o.g, d->lse.g, d->dO.g, dq->g, dc->g, at(dc, d->kc), d->ldc, db->g,
                                   at(db, d->kc), d->ldb);
}

static int cpu_bwd(const struct blocks_case *a, struct block_data *d)
{
    return cpu->op->attn_block_bwd(cpu, &d->on_cpu, a->cu, a->cu, &a->mask, a->nh, a->kv, a->hd, d->q.c, d->c.c, d->c.c + d->kc, d->ldc,
                                   d->b.c, d->b.c + d->kc, d->ldb, d->o.c, d->lse.c, d->dO.c, d->dq.c, d->dc.c, d->dc.c + d->kc, d->ldc,
                                   d->db.c, d->db.c + d->kc, d->ldb);
}

/* Rows of padding blocks must be exact zeros. */
static void check_padding(const struct blocks_case *a, const struct block_data *d)
{
    float *o = ten_pull(&d->o), *dq = ten_pull(&d->dq);
    size_t w = (size_t)a->B * a->nh * a->hd;

    for (size_t i = 0; i < d->q.n; i++)
        if (d->pos[i / w] < 0 && (o[i] != 0.0f || dq[i] != 0.0f))
            fail_msg("padding block %zu has output %g and gradient %g", i / w, (double)o[i], (double)dq[i]);
    free(o);
    free(dq);
}

static void block_case(const struct blocks_case *a, uint64_t seed)
{
    struct block_data d = data_new(a, seed);
    struct ten dq2 = ten_new(d.dq.n, 1), db2 = ten_new(d.db.n, 1), dc2 = ten_rnd(d.dc.n, 1, seed + 5, 0.1);

    BOTH(gpu->op->attn_block(gpu, &d.on_gpu, d.dcu, a->cu, &a->mask, a->nh, a->kv, a->hd, d.q.g, d.c.g, at(&d.c, d.kc), d.ldc, d.b.g,
                             at(&d.b, d.kc), d.ldb, d.o.g, d.lse.g),
         cpu->op->attn_block(cpu, &d.on_cpu, a->cu, a->cu, &a->mask, a->nh, a->kv, a->hd, d.q.c, d.c.c, d.c.c + d.kc, d.ldc, d.b.c,
                             d.b.c + d.kc, d.ldb, d.o.c, d.lse.c));
    ten_check("attn_block", &d.o, FWD_RMS, FWD_MAX);
    ten_check("attn_block lse", &d.lse, 1e-4, 1e-3);
    BOTH(gpu_bwd(a, &d, &d.dq, &d.dc, &d.db), cpu_bwd(a, &d));
    ten_check("attn_block_bwd dq", &d.dq, BWD_RMS, BWD_MAX);
    ten_check("attn_block_bwd dc", &d.dc, BWD_RMS, BWD_MAX);
    ten_check("attn_block_bwd db", &d.db, BWD_RMS, BWD_MAX);
    check_padding(a, &d);
    assert_int_equal(gpu_bwd(a, &d, &dq2, &dc2, &db2), 0);
    ten_same("attn_block_bwd dq", &d.dq, &dq2);
    ten_same("attn_block_bwd dc", &d.dc, &dc2);
    ten_same("attn_block_bwd db", &d.db, &db2);
    data_free(&d);
    ten_free(&dq2), ten_free(&db2), ten_free(&dc2);
}

static const int32_t ctx[] = {0, 1, 10, 47, 247};

static void test_block_shapes(void **state)
{
    static const int shape[][5] = {{1, 8, 1, 1, 16},  {33, 8, 4, 2, 32}, {20, 5, 4, 1, 24}, {11, 16, 2, 2, 64}, {7, 10, 4, 2, 128},
                                   {40, 1, 2, 1, 16}, {9, 64, 1, 1, 80}, {3, 128, 2, 1, 32}, {19, 7, 2, 1, 8},  {30, 16, 2, 1, 128}};

    (void)state;
    for (size_t i = 0; i < sizeof shape / sizeof *shape; i++) {
        struct blocks_case a = {shape[i][0], shape[i][1], shape[i][2], shape[i][3], shape[i][4], {0, 0, 0}, 4, ctx};

        block_case(&a, 100 * i);
    }
}

static void test_block_masks(void **state)
{
    static const int windows[] = {0, 1, 6, 70, 1000};

    (void)state;
    for (int i = 0; i < 20; i++) {
        struct blocks_case a = {23, 8, 2, 1, 16, {windows[i % 5], i / 5 & 1, i / 10}, 4, ctx};

        block_case(&a, 1000 + 10 * (uint64_t)i);
    }
}

static void test_block_large(void **state)
{
    static const int32_t big[] = {0, 3072, 3100, 5000};
    struct blocks_case a = {512, 16, 8, 2, 128, {0, 0, 0}, 3, big}, b = {700, 10, 4, 2, 64, {512, 1, 0}, 3, big},
                       c = {512, 16, 2, 2, 128, {2048, 0, 1}, 1, big};

    (void)state;
    if (!test_large())
        return;
    block_case(&a, 7);
    block_case(&b, 8);
    block_case(&c, 9);
}

static void test_refusals(void **state)
{
    static const int32_t cu[] = {0, 4};
    struct blocks_case a = {2, 4, 1, 1, 16, {0, 0, 0}, 1, cu};
    struct block_data d = data_new(&a, 5);
    const struct mr_k_ops *op = gpu->op;

    (void)state;
    assert_int_equal(op->attn_causal(gpu, 1, d.dcu, cu, 3, 2, 16, d.q.g, 48, d.c.g, d.c.g, 40, d.o.g, 48), -EINVAL);
    assert_int_equal(op->attn_causal(gpu, 1, d.dcu, cu, 1, 1, 12, d.q.g, 16, d.c.g, d.c.g, 40, d.o.g, 16), -EINVAL);
    assert_int_equal(op->attn_causal(gpu, 1, d.dcu, cu, 1, 1, 136, d.q.g, 136, d.c.g, d.c.g, 136, d.o.g, 136), -EINVAL);
    assert_int_equal(op->attn_causal(gpu, 1, d.dcu, cu, 1, 1, 16, d.q.g, 17, d.c.g, d.c.g, 40, d.o.g, 16), -EINVAL);
    d.pos[1] = 5;                      /* behind the end of its sequence */
    assert_int_equal(op->attn_block(gpu, &d.on_gpu, d.dcu, cu, &a.mask, 1, 1, 16, d.q.g, d.c.g, d.c.g, d.ldc, d.b.g, d.b.g, d.ldb, d.o.g,
                                    d.lse.g), -EINVAL);
    d.pos[0] = 3, d.pos[1] = 1;        /* not sorted */
    assert_int_equal(op->attn_block(gpu, &d.on_gpu, d.dcu, cu, &a.mask, 1, 1, 16, d.q.g, d.c.g, d.c.g, d.ldc, d.b.g, d.b.g, d.ldb, d.o.g,
                                    d.lse.g), -EINVAL);
    d.on_gpu.n = 0;
    assert_int_equal(op->attn_block(gpu, &d.on_gpu, d.dcu, cu, &a.mask, 1, 1, 16, d.q.g, d.c.g, d.c.g, d.ldc, d.b.g, d.b.g, d.ldb, d.o.g,
                                    d.lse.g), 0);
    assert_int_equal(gpu_bwd(&a, &d, &d.dq, &d.dc, &d.db), 0);
    data_free(&d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_causal),      cmocka_unit_test(test_plans),       cmocka_unit_test(test_block_shapes),
        cmocka_unit_test(test_block_masks), cmocka_unit_test(test_block_large), cmocka_unit_test(test_refusals),
    };

    test_open();
    return test_close(cmocka_run_group_tests(tests, NULL, NULL));
}
