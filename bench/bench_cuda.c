/* millrace-bench cuda [--device N] [NAME]: the cuda kernels at the shapes of Qwen3-8B, and a whole layer beside its matrix products.
 *
 * A target microbatch is 8 sequences of 2048 tokens; a drafter one is a sequence of 3072 tokens with 512 anchors of 16 slots.  Each line
 * is one operation on random data in buffers far larger than the second-level cache: the median of five measurements of at least 40 ms,
 * each from the first call to the end of the last.  Memory-bound operations are rated by the bytes they must move (every input read once,
 * every output written once), the others by the operations of the definition (masked work not counted).  The last lines compare a target's
 * layer with its products alone, measured in turn, and give the time of each step inside a run of layers, by events of the device.
 * NAME: only lines that contain it.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/err.h"
#include "base/rng.h"
#include "bench/bench.h"
#include "kernels/kernels.h"

enum {
    H = 4096, I = 12288, NH = 32, KV = 8, HD = 128, V = 151936, QKV = (NH + 2 * KV) * HD,
    T = 16384, LEN = 2048, T_LONG = 15360, LEN_LONG = 3072,
    N = 512, B = 16, R = N * B, S = 3072, ROWS_CE = N * (B - 1),
    PARAMS = 256 << 20,
    MAX_SEQS = 64
};

#define GB(x) ((x) * 1e-9)
#define TERA(x) ((x) * 1e-12)

struct work {
    struct mr_k *k;
    void *x, *y, *z, *o, *gu, *m, *w, *big;  /* activations (T, QKV) four times, (T, 2 I), (T, I); weights (2 I, H); head (V, H) */
    float *f[7];                         /* (PARAMS) optimizer */
    float *rstd, *lse, *cs, *ce, *weight, *dw;
    void *scratch;
    int32_t *cu, *cu_long, *cu_ragged, *cu_one, *pos, *label, *argmax, *seq, *anchor;
    int32_t host_cu[MAX_SEQS + 1], host_long[MAX_SEQS + 1], host_ragged[MAX_SEQS + 1], host_one[2], host_seq[N], host_anchor[N];
    int n_ragged;
    struct mr_k_blocks blocks;
    struct mr_k_block_mask mask;
    const char *only;
};

/* ---- data ---------------------------------------------------------------------------------------------------------------------- */

/* n bf16 values, normal with this scale: 4 Mi of them, repeated. */
static int fill(struct work *w, void *p, size_t n, double scale)
{
    enum { PIECE = 4 << 20 };
    struct mr_rng r = mr_rng_key(n, 1, 1);
    float *v = malloc(PIECE * sizeof *v);
    int rc = v ? 0 : -1;

    for (size_t i = 0; i < PIECE && v; i++)
        v[i] = (float)(scale * (mr_rng_unit(&r) + mr_rng_unit(&r) + mr_rng_unit(&r) - 1.5) * 2.0);
    for (size_t at = 0; at < n && !rc; at += PIECE)
        rc = at == 0 ? w->k->op->load(w->k, p, v, MR_K_F32, n < PIECE ? n : PIECE)
                     : w->k->op->d2d(w->k, (char *)p + at * 2, p, (n - at < PIECE ? n - at : PIECE) * 2);
    free(v);
    return rc;
}

static void *act(struct work *w, size_t n, double scale)
{
    void *p = w->k->op->alloc(w->k, n * 2);

    return p && fill(w, p, n, scale) == 0 ? p : NULL;
}

static void *upload(struct work *w, const void *v, size_t bytes)
{
    void *p = w->k->op->alloc(w->k, bytes);

    return p && w->k->op->h2d(w->k, p, v, bytes) == 0 ? p : NULL;
}

/* Sequences of `len` tokens, or of 100..3000 when len is 0, that make up at most T tokens. */
static int lengths(int32_t *cu, int len, int total)
{
    struct mr_rng r = mr_rng_key(1, 2, 3);
    int n = 0;

    cu[0] = 0;
    while (cu[n] < total && n < MAX_SEQS) {
        int l = len ? len : 100 + (int)mr_rng_below(&r, 2900);

        cu[n + 1] = cu[n] + l < total ? cu[n] + l : total;
        n++;
    }
    return n;
}

static int by_value(const void *a, const void *b)
{
    return (*(const int32_t *)a > *(const int32_t *)b) - (*(const int32_t *)a < *(const int32_t *)b);
}

static int host_data(struct work *w)
{
    struct mr_rng r = mr_rng_key(5, 5, 5);
    int32_t *pos = malloc(T * sizeof *pos), *label = malloc(R * sizeof *label);
    float *weight = malloc(R * sizeof *weight), *cs = malloc((size_t)LEN_LONG * HD * sizeof *cs), inv[HD / 2];

    if (!pos || !label || !weight || !cs)
        return -1;
    for (int i = 0; i < T; i++)
        pos[i] = i % LEN;
    for (int i = 0; i < R; i++) {
        label[i] = (int32_t)mr_rng_below(&r, V);
        weight[i] = 1.0f;
    }
    for (int i = 0; i < N; i++)
        w->host_anchor[i] = (int32_t)mr_rng_below(&r, S);
    qsort(w->host_anchor, N, sizeof *w->host_anchor, by_value);
    for (int i = 0; i < HD / 2; i++)
        inv[i] = 1.0f / (float)(1 + i * i);
    mr_k_rope_table(cs, LEN_LONG, HD, inv);
    lengths(w->host_cu, LEN, T);
    lengths(w->host_long, LEN_LONG, T_LONG);
    w->n_ragged = lengths(w->host_ragged, 0, T);
    w->host_one[1] = S;
    w->pos = upload(w, pos, T * sizeof *pos), w->label = upload(w, label, R * sizeof *label);
    w->weight = upload(w, weight, R * sizeof *weight), w->cs = upload(w, cs, (size_t)LEN_LONG * HD * sizeof *cs);
    w->cu = upload(w, w->host_cu, sizeof w->host_cu), w->cu_long = upload(w, w->host_long, sizeof w->host_long);
    w->cu_ragged = upload(w, w->host_ragged, sizeof w->host_ragged), w->cu_one = upload(w, w->host_one, sizeof w->host_one);
    w->seq = upload(w, w->host_seq, sizeof w->host_seq), w->anchor = upload(w, w->host_anchor, sizeof w->host_anchor);
    w->blocks = (struct mr_k_blocks){N, B, w->seq, w->anchor, w->host_seq, w->host_anchor};
    free(pos), free(label), free(weight), free(cs);
    return w->pos && w->label && w->weight && w->cs && w->cu && w->cu_long && w->cu_ragged && w->cu_one && w->seq && w->anchor ? 0 : -1;
}

static int device_data(struct work *w)
{
    const struct mr_k_ops *op = w->k->op;

    w->x = act(w, (size_t)T * QKV, 1.0), w->y = act(w, (size_t)T * QKV, 1.0), w->z = act(w, (size_t)T * QKV, 1.0);
    w->o = act(w, (size_t)T * QKV, 1.0);
    w->gu = act(w, (size_t)T * 2 * I, 1.0), w->m = act(w, (size_t)T * I, 1.0);
    w->w = act(w, (size_t)2 * I * H, 0.015), w->big = act(w, (size_t)V * H, 0.015);
    w->rstd = op->alloc(w->k, (size_t)T * NH * 4), w->lse = op->alloc(w->k, (size_t)R * NH * 4), w->ce = op->alloc(w->k, R * 4);
    w->argmax = op->alloc(w->k, R * 4), w->dw = op->alloc(w->k, (size_t)2 * I * H * 4);
    w->scratch = op->alloc(w->k, op->ce_scratch(w->k, ROWS_CE, H, V));
    for (int i = 0; i < 7; i++) {
        w->f[i] = op->alloc(w->k, (size_t)PARAMS * 4);
        if (!w->f[i] || (i < 4 && fill(w, w->f[i], (size_t)PARAMS * 2, 1.0)))
            return -1;
    }
    return w->x && w->y && w->z && w->o && w->gu && w->m && w->w && w->big && w->rstd && w->lse && w->ce && w->argmax && w->dw && w->scratch
               ? 0 : -1;
}

/* ---- operations ---------------------------------------------------------------------------------------------------------------- */

struct entry {
    const char *name;
    int (*run)(struct work *w, const struct entry *e);
    int m, n, kk;
    double flop, bytes;                  /* of one call; the other is 0 */
};

static int linear(struct work *w, const struct entry *e)
{
    return w->k->op->linear(w->k, e->m, e->n, e->kk, e->kk == I ? w->m : w->x, e->kk, w->w, e->n == 2 * I ? w->gu : w->y, e->n, e->n == H);
}

static int linear_dx(struct work *w, const struct entry *e)
{
    return w->k->op->linear_dx(w->k, e->m, e->n, e->kk, e->n == 2 * I ? w->gu : w->x, e->n, w->w, e->kk == I ? w->m : w->y, e->kk, 0);
}

static int linear_dw(struct work *w, const struct entry *e)
{
    return w->k->op->linear_dw(w->k, e->m, e->n, e->kk, e->n == 2 * I ? w->gu : w->x, e->n, e->kk == I ? w->m : w->y, e->kk, w->dw);
}

static int head(struct work *w, const struct entry *e)
{
    return w->k->op->ce(w->k, e->m, H, V, w->x, w->big, w->label, w->weight, w->scratch, w->ce, w->argmax, e->n ? w->y : NULL);
}

/* m: 0 uniform, 1 long, 2 ragged; n: heads; kk: head size.  Keys and values: 8 heads, or as many as n allows. */
static int causal(struct work *w, const struct entry *e)
{
    const int32_t *host = e->m == 0 ? w->host_cu : e->m == 1 ? w->host_long : w->host_ragged;
    const int32_t *dev = e->m == 0 ? w->cu : e->m == 1 ? w->cu_long : w->cu_ragged;
    int n = e->m == 0 ? T / LEN : e->m == 1 ? T_LONG / LEN_LONG : w->n_ragged, kv = KV, ld = (e->n + 2 * kv) * e->kk;

    return w->k->op->attn_causal(w->k, n, dev, host, e->n, kv, e->kk, w->x, ld, (char *)w->x + 2 * e->n * e->kk,
                                 (char *)w->x + 2 * (e->n + kv) * e->kk, ld, w->y, e->n * e->kk);
}

/* m: window; n: 1 backward */
static int block(struct work *w, const struct entry *e)
{
    struct mr_k_block_mask mask = {e->m, e->m != 0, 0};
    char *c = w->gu, *b = w->m, *dc = (char *)w->gu + (size_t)S * 2 * KV * HD * 2, *db = (char *)w->m + (size_t)R * 2 * KV * HD * 2;
    void *dq = (char *)w->x + (size_t)R * NH * HD * 2;
    int ld = 2 * KV * HD, v = 2 * KV * HD;

    if (!e->n)
        return w->k->op->attn_block(w->k, &w->blocks, w->cu_one, w->host_one, &mask, NH, KV, HD, w->x, c, c + v, ld, b, b + v, ld, w->y,
                                    w->lse);
    return w->k->op->attn_block_bwd(w->k, &w->blocks, w->cu_one, w->host_one, &mask, NH, KV, HD, w->x, c, c + v, ld, b, b + v, ld, w->y,
                                    w->lse, w->z, dq, dc, dc + v, ld, db, db + v, ld);
}

static int norm(struct work *w, const struct entry *e)
{
    return w->k->op->rmsnorm(w->k, e->m, H, w->x, w->w, 1e-6f, w->y, w->rstd);
}

static int add_norm(struct work *w, const struct entry *e)
{
    return w->k->op->add_rmsnorm(w->k, e->m, H, w->x, w->z, w->w, 1e-6f, w->y, w->rstd);
}

static int norm_bwd(struct work *w, const struct entry *e)
{
    return w->k->op->rmsnorm_bwd(w->k, e->m, H, w->x, w->w, w->rstd, w->z, w->y, 1, w->dw);
}

static int rope(struct work *w, const struct entry *e)
{
    return w->k->op->head_norm_rope(w->k, e->m, NH, HD, w->y, QKV, w->w, 1e-6f, w->pos, w->cs, e->n ? w->m : NULL, e->n ? w->rstd : NULL);
}

static int rope_bwd(struct work *w, const struct entry *e)
{
    return w->k->op->head_norm_rope_bwd(w->k, e->m, NH, HD, w->y, NH * HD, w->m, w->w, w->rstd, w->pos, w->cs, w->dw);
}

static int swiglu(struct work *w, const struct entry *e)
{
    return w->k->op->swiglu(w->k, e->m, I, w->gu, (char *)w->gu + 2 * I, 2 * I, w->m);
}

static int gate_up(struct work *w, const struct entry *e)
{
    return w->k->op->linear_swiglu(w->k, e->m, I, H, w->x, H, w->w, w->gu, w->m);
}

static int gate_up_two(struct work *w, const struct entry *e)
{
    int rc = w->k->op->linear(w->k, e->m, 2 * I, H, w->x, H, w->w, w->gu, 2 * I, 0);

    return rc ? rc : swiglu(w, e);
}

static int swiglu_bwd(struct work *w, const struct entry *e)
{
    return w->k->op->swiglu_bwd(w->k, e->m, I, w->gu, (char *)w->gu + 2 * I, 2 * I, w->m, w->big, (char *)w->big + 2 * I, 2 * I);
}

static int adamw(struct work *w, const struct entry *e)
{
    return w->k->op->adamw(w->k, (size_t)e->m, w->f[0], w->f[1], w->f[2], w->f[3], 1.0f, 1e-4f, 0.9f, 0.999f, 1e-8f, 0.0f, 0.1f, 0.001f,
                           w->f[4], w->f[5], w->f[6]);
}

static int to_bf16(struct work *w, const struct entry *e)
{
    return w->k->op->f32_to_act(w->k, w->f[1], w->f[0], (size_t)e->m);
}

static int copy(struct work *w, const struct entry *e)
{
    return w->k->op->d2d(w->k, w->f[0], w->f[1], (size_t)e->m * 4);
}

static int sumsq(struct work *w, const struct entry *e)
{
    double s;

    return w->k->op->sumsq(w->k, (size_t)e->m, w->f[0], &s);
}

/* ---- a layer of the target, as its model calls it ---- */

enum { STEPS = 9, GATE_UP_ALONE = STEPS, PRODUCTS = 1 << 1 | 1 << 5 | 1 << 8 | 1 << GATE_UP_ALONE };
static const char *const step_name[STEPS] = {"rmsnorm", "qkv", "q norm + rope", "k norm + rope", "attention",
                                             "o", "rmsnorm", "gate+up and swiglu", "down"};

static int step(struct work *w, int i)
{
    const struct mr_k_ops *op = w->k->op;
    char *q = w->y, *kx = q + 2 * NH * HD, *v = kx + 2 * KV * HD;

    switch (i) {
    case 0:
    case 6: return op->rmsnorm(w->k, T, H, w->x, w->w, 1e-6f, w->z, NULL);
    case 1: return op->linear(w->k, T, QKV, H, w->z, H, w->w, w->y, QKV, 0);
    case 2: return op->head_norm_rope(w->k, T, NH, HD, q, QKV, w->w, 1e-6f, w->pos, w->cs, NULL, NULL);
    case 3: return op->head_norm_rope(w->k, T, KV, HD, kx, QKV, w->w, 1e-6f, w->pos, w->cs, NULL, NULL);
    case 4: return op->attn_causal(w->k, T / LEN, w->cu, w->host_cu, NH, KV, HD, q, QKV, kx, v, QKV, w->o, NH * HD);
    case 5: return op->linear(w->k, T, H, H, w->o, H, w->w, w->x, H, 1);
    case 7: return op->linear_swiglu(w->k, T, I, H, w->z, H, w->w, w->gu, w->m);
    case 8: return op->linear(w->k, T, H, I, w->m, I, w->w, w->x, H, 1);
    default: return op->linear(w->k, T, 2 * I, H, w->z, H, w->w, w->gu, 2 * I, 0);
    }
}

/* m: set of steps, and the product of step 7 without its activation */
static int layer(struct work *w, const struct entry *e)
{
    int rc = 0;

    for (int i = 0; i <= GATE_UP_ALONE && !rc; i++)
        if (e->m >> i & 1)
            rc = step(w, i);
    return rc;
}

#define PRODUCT(text, f, m, n, k) {text, f, m, n, k, 2.0 * (m) * (n) * (k), 0}
#define CAUSAL(text, kind, heads, hd, tokens, len) {text, causal, kind, heads, hd, 2.0 * (tokens) * (len) * (heads) * (hd), 0}
#define MOVES(text, f, m, n, elems) {text, f, m, n, 0, 0, 2.0 * (m) * (elems)}

static const struct entry entries[] = {
    {"copy on the device, 1 GiB", copy, PARAMS, 0, 0, 0, 8.0 * PARAMS},
    PRODUCT("target qkv", linear, T, QKV, H),
    PRODUCT("target o", linear, T, H, H),
    PRODUCT("target gate+up", linear, T, 2 * I, H),
    PRODUCT("target gate+up and swiglu", gate_up, T, 2 * I, H),
    PRODUCT("target gate+up, then swiglu", gate_up_two, T, 2 * I, H),
    PRODUCT("target down", linear, T, H, I),
    CAUSAL("attention 8 x 2048, hd 128", 0, NH, HD, T, LEN),
    CAUSAL("attention 5 x 3072, hd 128", 1, NH, HD, T_LONG, LEN_LONG),
    CAUSAL("attention 8 x 2048, hd 64", 0, NH, 64, T, LEN),
    {"attention ragged, hd 128", causal, 2, NH, HD, -1, 0},
    MOVES("rmsnorm", norm, T, 0, 2.0 * H),
    MOVES("add + rmsnorm", add_norm, T, 0, 4.0 * H),
    MOVES("q norm + rope", rope, T, 0, 2.0 * NH * HD),
    MOVES("swiglu", swiglu, T, 0, 3.0 * I),
    PRODUCT("drafter gate+up", linear, R, 2 * I, H),
    PRODUCT("drafter down", linear, R, H, I),
    PRODUCT("drafter gate+up dx", linear_dx, R, 2 * I, H),
    PRODUCT("drafter down dx", linear_dx, R, H, I),
    PRODUCT("drafter gate+up dW", linear_dw, R, 2 * I, H),
    PRODUCT("drafter down dW", linear_dw, R, H, I),
    PRODUCT("drafter q dW", linear_dw, R, H, H),
    {"block attention", block, 0, 0, 0, -2, 0},
    {"block attention backward", block, 0, 1, 0, -3, 0},
    {"block attention, window 1024", block, 1024, 0, 0, -2, 0},
    {"... backward", block, 1024, 1, 0, -3, 0},
    {"head: ce", head, ROWS_CE, 0, 0, 2.0 * ROWS_CE * V * H, 0},
    {"head: ce and gradient", head, ROWS_CE, 1, 0, 4.0 * ROWS_CE * V * H, 0},
    MOVES("q norm + rope, saved", rope, R, 1, 3.0 * NH * HD),
    MOVES("q norm + rope backward", rope_bwd, R, 0, 3.0 * NH * HD),
    MOVES("rmsnorm backward", norm_bwd, R, 0, 4.0 * H),
    MOVES("swiglu backward", swiglu_bwd, R, 0, 5.0 * I),
    {"adamw", adamw, PARAMS, 0, 0, 0, 28.0 * PARAMS},
    {"f32 to bf16", to_bf16, PARAMS, 0, 0, 0, 6.0 * PARAMS},
    {"sum of squares", sumsq, PARAMS, 0, 0, 0, 4.0 * PARAMS},
};
enum { ENTRIES = sizeof entries / sizeof *entries };

/* Operations of one call of an attention with a mask that no formula describes: pairs of query and key, counted. */
static double counted_flop(const struct work *w, const struct entry *e)
{
    double pairs = 0.0;

    if (e->flop >= 0)
        return e->flop;
    for (int i = 0; e->flop == -1 && i < w->n_ragged; i++) {
        double n = w->host_ragged[i + 1] - w->host_ragged[i];

        pairs += n * n / 2;
    }
    for (int j = 0; e->flop < -1 && j < N; j++)
        for (int s = 0; s < B; s++) {
            int a = w->host_anchor[j], lo = e->m ? a + s - (e->m - 1) : 0;

            pairs += (lo < 0 ? a : lo < a ? a - lo : 0) + (e->m ? s + 1 : B);
        }
    return pairs * NH * HD * (e->flop == -3 ? 10.0 : 4.0);
}

/* ---- measuring ----------------------------------------------------------------------------------------------------------------- */

static int by_time(const void *a, const void *b)
{
    return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b);
}

static double calls_ms(struct work *w, const struct entry *e, int n)
{
    uint64_t t = mr_now_ns();

    for (int i = 0; i < n; i++)
        if (e->run(w, e) != 0)
            return -1.0;
    if (w->k->op->sync(w->k) != 0)
        return -1.0;
    return (double)(mr_now_ns() - t) * 1e-6;
}

/* Median milliseconds of a call, or -1. */
static double measure(struct work *w, const struct entry *e)
{
    double ms, five[5];
    int n;

    if (calls_ms(w, e, 2) < 0 || (ms = calls_ms(w, e, 2)) < 0)
        return -1.0;
    n = ms > 80.0 ? 1 : (int)(80.0 / ms) + 1;
    for (int i = 0; i < 5; i++) {
        five[i] = calls_ms(w, e, n) / n;
        if (five[i] < 0)
            return -1.0;
    }
    qsort(five, 5, sizeof *five, by_time);
    return five[2];
}

/* Device milliseconds of each step inside a run of layers, and between them. */
static int timeline(struct work *w, double ms[STEPS])
{
    enum { LAYERS = 20 };
    struct mr_k_mark *mark[LAYERS * STEPS + 1];
    int rc = 0;

    for (int i = 0; i <= LAYERS * STEPS; i++)
        if (!(mark[i] = mr_k_cuda_mark_create(w->k)))
            return -1;
    for (int i = 0; i < LAYERS * STEPS && !rc; i++)            /* warm, as in a forward pass */
        rc = step(w, i % STEPS);
    rc = rc ? rc : mr_k_cuda_mark_set(w->k, mark[0]);
    for (int i = 0; i < LAYERS * STEPS && !rc; i++) {
        rc = step(w, i % STEPS);
        rc = rc ? rc : mr_k_cuda_mark_set(w->k, mark[i + 1]);
    }
    rc = rc ? rc : w->k->op->sync(w->k);
    for (int i = 0; i < LAYERS * STEPS && !rc; i++) {
        double t;

        rc = mr_k_cuda_mark_ms(w->k, mark[i], mark[i + 1], &t);
        ms[i % STEPS] += rc ? 0.0 : t / LAYERS;
    }
    for (int i = 0; i <= LAYERS * STEPS; i++)
        mr_k_cuda_mark_destroy(w->k, mark[i]);
    return rc;
}

/* A whole layer beside its products alone, in turn; then where the time of a layer goes. */
static int whole_layer(struct work *w)
{
    static const double flop = 2.0 * T * ((double)QKV * H + (double)H * H + 3.0 * I * H);
    static const struct entry whole = {"target layer, whole", layer, (1 << STEPS) - 1, 0, 0, flop + 2.0 * T * LEN * NH * HD, 0};
    static const struct entry products = {"its products", layer, PRODUCTS, 0, 0, flop, 0};
    double a[3], b[3], ms[STEPS] = {0};

    for (int i = 0; i < 3; i++)
        if ((a[i] = measure(w, &whole)) < 0 || (b[i] = measure(w, &products)) < 0)
            return -1;
    qsort(a, 3, sizeof *a, by_time), qsort(b, 3, sizeof *b, by_time);
    printf("%-32s %9.3f %9.1f\n", whole.name, a[1], TERA(whole.flop) / (a[1] * 1e-3));
    printf("%-32s %9.3f %9.1f           alone they are %.1f %% of the layer; 36 layers: %.1fk tokens/s\n", products.name, b[1],
           TERA(flop) / (b[1] * 1e-3), 100.0 * b[1] / a[1], T / (36.0 * a[1]));
    if (timeline(w, ms))
        return -1;
    printf("inside the layer:");
    for (int i = 0; i < STEPS; i++)
        printf("%s %s %.3f", i ? "," : "", step_name[i], ms[i]);
    printf(" ms\n");
    return 0;
}

static int table(struct work *w)
{
    double ms;

    printf("%-32s %9s %9s %8s\n", "operation", "ms", "TFLOP/s", "GB/s");
    for (int i = 0; i < ENTRIES; i++) {
        const struct entry *e = &entries[i];

        if (w->only && !strstr(e->name, w->only))
            continue;
        ms = measure(w, e);
        if (ms < 0)
            return fprintf(stderr, "millrace-bench: %s failed\n", e->name), MR_EXIT_FAILED;
        if (e->bytes > 0)
            printf("%-32s %9.3f %9s %8.0f\n", e->name, ms, "", GB(e->bytes) / (ms * 1e-3));
        else
            printf("%-32s %9.3f %9.1f\n", e->name, ms, TERA(counted_flop(w, e)) / (ms * 1e-3));
        fflush(stdout);
    }
    if (w->only && !strstr("target layer, whole", w->only))
        return MR_EXIT_OK;
    return whole_layer(w) ? MR_EXIT_FAILED : MR_EXIT_OK;
}

int mr_bench_cuda(int argc, char **argv)
{
    struct work *w = calloc(1, sizeof *w);
    char err[256] = "";
    int device = 0, rc = MR_EXIT_ENV;

    for (int i = 0; i < argc && w; i++)
        if (!strcmp(argv[i], "--device") && i + 1 < argc)
            device = atoi(argv[++i]);
        else
            w->only = argv[i];
    if (!w)
        return MR_EXIT_ENV;
    w->k = mr_k_cuda_create(device, 0, err, sizeof err);
    if (!w->k)
        fprintf(stderr, "millrace-bench: %s\n", err);
    else if (host_data(w) || device_data(w) || w->k->op->sync(w->k))
        fprintf(stderr, "millrace-bench: not enough memory: about 14 GiB on the device are needed\n");
    else
        rc = table(w);
    mr_k_cuda_destroy(w->k);
    free(w);
    return rc;
}
