/* millrace-bench kernels [--json] [--threads N]: the cpu kernels at the shapes of the demo, and what a microbatch costs in them.
 *
 * Each line is one operation at one shape: the best of many calls, its rate, how often a microbatch needs it, and the product of the
 * two; the sums say what a target and a drafter spend on a microbatch, hence the tokens/s that one core of each could reach.  One core:
 * actors run one thread each.  The best, not the mean, and with one thread its processor time, not the wall's: what other processes of
 * the machine do is not what is measured.  With more threads it is wall time, and needs an idle machine to mean anything.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/err.h"
#include "base/rng.h"
#include "bench/bench.h"
#include "kernels/cpu/isa.h"
#include "kernels/kernels.h"

/* The demo (conf/demo.json): a microbatch of 9 samples. */
enum {
    H = 128, I = 384, NH = 4, KV = 2, HD = 32, V = 2048, B = 8, K = 3,          /* model; K captured layers */
    SEQS = 9, LEN = 189, TOK = SEQS * LEN, BLOCKS = SEQS * 32, ROWS = BLOCKS * B, LABELS = ROWS * 7 / 8,
    T_LAYERS = 4, D_LAYERS = 2, PARAMS = K * H * H + 2 * H + D_LAYERS * (H * HD * (2 * NH + 2 * KV) + 3 * H * I + 2 * H + 2 * HD),
    WIDE = ROWS * 2 * I                                                         /* floats of the largest activation */
};

struct work {
    struct mr_k *k;
    int threads;
    float *x, *y, *z, *u;                /* (WIDE) activations */
    float *w, *dw, *state[8];            /* (V, H) a weight, its gradient; (PARAMS) optimizer */
    float *cs, *rstd, *lse, *ce, *weight;
    float *one;                          /* (HD) norm weights 1: repeated in place, any other would end in subnormal numbers */
    void *scratch;
    int32_t cu[SEQS + 1], seq[BLOCKS], pos[BLOCKS], row_pos[ROWS], label[ROWS], argmax[ROWS];
    struct mr_k_blocks blocks;
    struct mr_k_block_mask mask;
};

struct entry {
    const char *who, *name;
    int (*run)(struct work *w, const struct entry *e);
    int m, n, kk;                        /* products: as in kernels.h; rows and columns otherwise */
    double calls;                        /* in a microbatch */
    double flop;                         /* of a call; 0: a memory-bound operation */
};

static int linear(struct work *w, const struct entry *e)
{
    return w->k->op->linear(w->k, e->m, e->n, e->kk, w->x, e->kk, w->w, w->y, e->n, 0);
}

static int linear_dx(struct work *w, const struct entry *e)
{
    return w->k->op->linear_dx(w->k, e->m, e->n, e->kk, w->x, e->n, w->w, w->y, e->kk, 0);
}

static int linear_dw(struct work *w, const struct entry *e)
{
    return w->k->op->linear_dw(w->k, e->m, e->n, e->kk, w->x, e->n, w->y, e->kk, w->dw);
}

static int norm(struct work *w, const struct entry *e) { return w->k->op->rmsnorm(w->k, e->m, e->n, w->x, w->w, 1e-6f, w->y, w->rstd); }

static int norm_bwd(struct work *w, const struct entry *e)
{
    return w->k->op->rmsnorm_bwd(w->k, e->m, e->n, w->x, w->w, w->rstd, w->y, w->z, 1, w->dw);
}

static int rope(struct work *w, const struct entry *e)
{
    return w->k->op->head_norm_rope(w->k, e->m, e->n, HD, w->x, e->n * HD, w->one, 1e-6f, w->row_pos, w->cs, w->z, w->rstd);
}

static int rope_bwd(struct work *w, const struct entry *e)
{
    return w->k->op->head_norm_rope_bwd(w->k, e->m, e->n, HD, w->y, e->n * HD, w->x, w->one, w->rstd, w->row_pos, w->cs, w->dw);
}

static int glu(struct work *w, const struct entry *e) { return w->k->op->swiglu(w->k, e->m, e->n, w->x, w->x + e->n, 2 * e->n, w->y); }

static int glu_bwd(struct work *w, const struct entry *e)
{
    return w->k->op->swiglu_bwd(w->k, e->m, e->n, w->x, w->x + e->n, 2 * e->n, w->y, w->z, w->z + e->n, 2 * e->n);
}

static int causal(struct work *w, const struct entry *e)
{
    int ld = (NH + 2 * KV) * HD;

    (void)e;
    return w->k->op->attn_causal(w->k, SEQS, w->cu, w->cu, NH, KV, HD, w->x, ld, w->x + NH * HD, w->x + (NH + KV) * HD, ld, w->y, NH * HD);
}

static int block(struct work *w, const struct entry *e)
{
    int ld = 2 * KV * HD;

    (void)e;
    return w->k->op->attn_block(w->k, &w->blocks, w->cu, w->cu, &w->mask, NH, KV, HD, w->u, w->x, w->x + KV * HD, ld, w->x + TOK * ld,
                                w->x + TOK * ld + KV * HD, ld, w->y, w->lse);
}

static int block_bwd(struct work *w, const struct entry *e)
{
    int ld = 2 * KV * HD;
    float *x = w->x, *b = x + TOK * ld, *d = w->z, *db = d + TOK * ld;

    (void)e;
    return w->k->op->attn_block_bwd(w->k, &w->blocks, w->cu, w->cu, &w->mask, NH, KV, HD, w->u, x, x + KV * HD, ld, b, b + KV * HD, ld,
                                    w->y, w->lse, w->u, w->y + ROWS * NH * HD, d, d + KV * HD, ld, db, db + KV * HD, ld);
}

static int loss(struct work *w, const struct entry *e)
{
    return w->k->op->ce(w->k, e->m, e->kk, e->n, w->x, w->w, w->label, w->weight, w->scratch, w->ce, w->argmax, w->y);
}

static int embed(struct work *w, const struct entry *e) { return w->k->op->embed(w->k, e->m, e->n, w->w, w->label, w->y); }
static int copy(struct work *w, const struct entry *e) { return w->k->op->copy2d(w->k, e->m, e->n, w->x, e->n, w->y, K * e->n); }

static int adamw(struct work *w, const struct entry *e)
{
    float **s = w->state;

    return w->k->op->adamw(w->k, (size_t)e->m, s[0], s[1], s[2], s[3], 1.0f, 1e-3f, 0.9f, 0.999f, 1e-8f, 0.0f, 0.1f, 0.001f, s[4], s[5],
                           s[6]);
}

static int reduce(struct work *w, const struct entry *e)
{
    const float *src[2] = {w->state[3], w->state[0]};

    return w->k->op->sum(w->k, (size_t)e->m, src, 2, w->state[7]);
}

static int sumsq(struct work *w, const struct entry *e)
{
    double out;

    return w->k->op->sumsq(w->k, (size_t)e->m, w->state[3], &out);
}

#define GEMM(who, f, m, n, kk, calls) {who, #f, f, m, n, kk, calls, 2.0 * (m) * (n) * (kk)}
#define ATTN_T (2.0 * 2 * NH * HD * SEQS * LEN * (LEN + 1) / 2)                 /* the visible pairs only */
#define ATTN_D (2.0 * 2 * NH * HD * ROWS * (LEN / 2 + B))

static const struct entry entries[] = {
    {"target", "embed", embed, TOK, H, 0, 1, 0},
    {"target", "rmsnorm", norm, TOK, H, 0, 2 * T_LAYERS, 0},
    GEMM("target", linear, TOK, (NH + 2 * KV) * HD, H, T_LAYERS),
    {"target", "head_norm_rope q", rope, TOK, NH, 0, T_LAYERS, 0},
    {"target", "head_norm_rope k", rope, TOK, KV, 0, T_LAYERS, 0},
    {"target", "attn_causal", causal, TOK, NH, 0, T_LAYERS, ATTN_T},
    GEMM("target", linear, TOK, H, NH * HD, T_LAYERS),
    GEMM("target", linear, TOK, 2 * I, H, T_LAYERS),
    {"target", "swiglu", glu, TOK, I, 0, T_LAYERS, 0},
    GEMM("target", linear, TOK, H, I, T_LAYERS),
    {"target", "copy2d", copy, TOK, H, 0, K, 0},
    GEMM("drafter", linear, TOK, H, K * H, 1),
    GEMM("drafter", linear, TOK, KV * HD, H, 2 * D_LAYERS),
    {"drafter", "embed", embed, ROWS, H, 0, 1, 0},
    {"drafter", "rmsnorm", norm, ROWS, H, 0, 2 * D_LAYERS + 2, 0},
    GEMM("drafter", linear, ROWS, H, H, 2 * D_LAYERS),
    GEMM("drafter", linear, ROWS, KV * HD, H, 2 * D_LAYERS),
    {"drafter", "head_norm_rope q", rope, ROWS, NH, 0, D_LAYERS, 0},
    {"drafter", "head_norm_rope k", rope, ROWS, KV, 0, 2 * D_LAYERS, 0},
    {"drafter", "attn_block", block, ROWS, NH, 0, D_LAYERS, ATTN_D},
    GEMM("drafter", linear, ROWS, I, H, 2 * D_LAYERS),
    {"drafter", "swiglu", glu, ROWS, I, 0, D_LAYERS, 0},
    GEMM("drafter", linear, ROWS, H, I, D_LAYERS),
    {"drafter", "ce", loss, LABELS, V, H, 1, 4.0 * LABELS * V * H},
    GEMM("drafter", linear_dx, ROWS, H, I, D_LAYERS),
    GEMM("drafter", linear_dw, ROWS, H, I, D_LAYERS),
    {"drafter", "swiglu_bwd", glu_bwd, ROWS, I, 0, D_LAYERS, 0},
    GEMM("drafter", linear_dx, ROWS, I, H, 2 * D_LAYERS),
    GEMM("drafter", linear_dw, ROWS, I, H, 2 * D_LAYERS),
    {"drafter", "rmsnorm_bwd", norm_bwd, ROWS, H, 0, 2 * D_LAYERS + 2, 0},
    GEMM("drafter", linear_dx, ROWS, H, H, 2 * D_LAYERS),
    GEMM("drafter", linear_dw, ROWS, H, H, 2 * D_LAYERS),
    {"drafter", "attn_block_bwd", block_bwd, ROWS, NH, 0, D_LAYERS, 2.5 * ATTN_D},
    {"drafter", "head_norm_rope_bwd q", rope_bwd, ROWS, NH, 0, D_LAYERS, 0},
    {"drafter", "head_norm_rope_bwd k", rope_bwd, ROWS, KV, 0, 2 * D_LAYERS, 0},
    GEMM("drafter", linear_dx, ROWS, KV * HD, H, 4 * D_LAYERS),
    GEMM("drafter", linear_dw, ROWS, KV * HD, H, 4 * D_LAYERS),
    GEMM("drafter", linear_dw, TOK, H, K * H, 1),
    {"step", "sum of 2", reduce, PARAMS, 1, 0, 1, 0},
    {"step", "sumsq", sumsq, PARAMS, 1, 0, 1, 0},
    {"step", "adamw", adamw, PARAMS, 1, 0, 1, 0},
};
enum { ENTRIES = sizeof(entries) / sizeof(*entries) };

static float *normal(struct mr_k *k, size_t n, double scale)
{
    float *p = k->op->alloc(k, n * sizeof(*p));
    struct mr_rng r = mr_rng_key(n, 1, 1);

    for (size_t i = 0; p && i < n; i++)
        p[i] = (float)(scale * mr_rng_normal(&r));
    return p;
}

static void draw_blocks(struct work *w)
{
    for (int s = 0; s <= SEQS; s++)
        w->cu[s] = s * LEN;
    for (int j = 0; j < BLOCKS; j++) {
        w->seq[j] = j / (BLOCKS / SEQS);
        w->pos[j] = j % (BLOCKS / SEQS) * (LEN - B) / (BLOCKS / SEQS);
    }
    for (int i = 0; i < ROWS; i++) {
        w->row_pos[i] = i % LEN;
        w->label[i] = (int32_t)(mr_mix64((uint64_t)i) % V);
        w->weight[i] = 1.0f;
    }
    w->blocks = (struct mr_k_blocks){BLOCKS, B, w->seq, w->pos, w->seq, w->pos};
}

static int set_up(struct work *w, int threads)
{
    struct mr_k *k = w->k = mr_k_cpu_create(threads);
    float inv[HD / 2] = {1.0f};
    int ok;

    w->threads = threads;
    if (!k)
        return -ENOMEM;
    w->x = normal(k, WIDE, 1.0), w->y = normal(k, WIDE, 1.0), w->z = normal(k, WIDE, 1.0), w->u = normal(k, WIDE, 1.0);
    w->w = normal(k, V * H, 0.05), w->dw = normal(k, V * H, 1.0), w->cs = normal(k, LEN * HD, 1.0), w->rstd = normal(k, ROWS * NH, 0.0);
    w->lse = normal(k, ROWS * NH, 1.0), w->ce = normal(k, ROWS, 1.0), w->weight = normal(k, ROWS, 1.0);
    w->one = normal(k, HD, 0.0);
    w->scratch = k->op->alloc(k, k->op->ce_scratch(k, ROWS, H, V));
    ok = w->x && w->y && w->z && w->u && w->w && w->dw && w->cs && w->rstd && w->lse && w->ce && w->weight && w->one && w->scratch;
    for (int i = 0; i < 8; i++)
        ok &= (w->state[i] = normal(k, PARAMS, i == 2 ? 0.0 : 1.0)) != NULL;
    if (!ok)
        return -ENOMEM;
    mr_k_rope_table(w->cs, LEN, HD, inv);
    for (int i = 0; i < HD; i++)
        w->one[i] = 1.0f;
    draw_blocks(w);
    return 0;
}

static void tear_down(struct work *w)
{
    void *all[] = {w->x, w->y, w->z, w->u, w->w, w->dw, w->cs, w->rstd, w->lse, w->ce, w->weight, w->one, w->scratch};

    if (!w->k)
        return;
    for (size_t i = 0; i < sizeof(all) / sizeof(*all); i++)
        w->k->op->release(w->k, all[i]);
    for (int i = 0; i < 8; i++)
        w->k->op->release(w->k, w->state[i]);
    mr_k_cpu_destroy(w->k);
}

static double now_ms(const struct work *w)
{
    struct timespec ts;

    clock_gettime(w->threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &ts);
    return (double)ts.tv_sec * 1e3 + (double)ts.tv_nsec * 1e-6;
}

/* Best of the calls that fit into 40 ms, at least 5; in ms.  Negative: the call failed. */
static double best_ms(struct work *w, const struct entry *e)
{
    double best = 1e30, end = now_ms(w) + 40.0;

    for (int i = 0; i < 6 || now_ms(w) < end; i++) {
        double t0 = now_ms(w), ms;

        if (e->run(w, e))
            return -1.0;
        ms = now_ms(w) - t0;
        if (i > 0 && ms < best)          /* the first call compiles products and grows scratch */
            best = ms;
    }
    return best;
}

static void print_entry(const struct entry *e, double ms, int json, int first)
{
    if (json)
        printf(
            "%s\n  {\"actor\": \"%s\", \"op\": \"%s\", \"m\": %d, \"n\": %d, \"k\": %d, \"ms\": %.5f, \"gflops\": %.1f, \"calls\": %.0f}",
            first ? "" : ",", e->who, e->name, e->m, e->n, e->kk, ms, e->flop / ms * 1e-6, e->calls);
    else
        printf("%-8s %-22s %6d %5d %5d %9.4f %9.1f %5.0f %9.3f\n", e->who, e->name, e->m, e->n, e->kk, ms, e->flop / ms * 1e-6, e->calls,
               ms * e->calls);
}

static void print_sums(const double *sum, const struct work *w, int json)
{
    double tokens = TOK * 1e3;

    if (json)
        printf("\n],\n\"isa\": \"%s\", \"tokens\": %d, \"target_ms\": %.3f, \"drafter_ms\": %.3f, \"step_ms\": %.3f}\n",
               mr_k_cpu_isa(w->k)->name, TOK, sum[0], sum[1], sum[2]);
    else
        printf("\nrow loops: %s.  One microbatch of %d tokens, %d block rows, on one core:\n"
               "  target   %8.2f ms   %8.0f tokens/s\n"
               "  drafter  %8.2f ms   %8.0f tokens/s\n"
               "  step     %8.2f ms   (sum, norm, AdamW of %d parameters)\n"
               "  all      %8.2f ms   %8.0f tokens/s a core\n",
               mr_k_cpu_isa(w->k)->name, TOK, ROWS, sum[0], tokens / sum[0], sum[1], tokens / sum[1], sum[2], PARAMS,
               sum[0] + sum[1] + sum[2], tokens / (sum[0] + sum[1] + sum[2]));
}

static int measure(struct work *w, int json)
{
    double sum[3] = {0, 0, 0};

    if (json)
        printf("{\"ops\": [");
    else
        printf("%-8s %-22s %6s %5s %5s %9s %9s %5s %9s\n", "actor", "op", "m", "n", "k", "ms", "GFLOP/s", "calls", "ms in all");
    for (int i = 0; i < ENTRIES; i++) {
        const struct entry *e = entries + i;
        double ms = best_ms(w, e);

        if (ms < 0) {
            fprintf(stderr, "millrace-bench: %s (%d, %d, %d) failed\n", e->name, e->m, e->n, e->kk);
            return MR_EXIT_FAILED;
        }
        sum[e->who[0] == 't' ? 0 : e->who[0] == 'd' ? 1 : 2] += ms * e->calls;
        print_entry(e, ms, json, i == 0);
    }
    print_sums(sum, w, json);
    return MR_EXIT_OK;
}

int mr_bench_kernels(int argc, char **argv)
{
    int json = 0, threads = 1, rc = MR_EXIT_ENV;
    struct work *w;

    for (int i = 0; i < argc; i++) {
        if (!strcmp(argv[i], "--json")) {
            json = 1;
        } else if (!strcmp(argv[i], "--threads") && i + 1 < argc && atoi(argv[i + 1]) >= 1) {
            threads = atoi(argv[++i]);
        } else {
            fprintf(stderr, "usage: millrace-bench kernels [--json] [--threads N]     (N >= 1: threads of the products)\n");
            return MR_EXIT_CONFIG;
        }
    }
    w = calloc(1, sizeof(*w));
    if (w && set_up(w, threads) == 0)
        rc = measure(w, json);
    else
        fprintf(stderr, "millrace-bench: kernels: out of memory; about %d MB are needed\n", (int)(5.0 * WIDE * 4e-6));
    if (w)
        tear_down(w);
    free(w);
    return rc;
}
