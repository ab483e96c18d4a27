/* What the files of the cpu backend share.  Nothing outside kernels/cpu/ includes this. */
#ifndef MR_KERNELS_CPU_PVT_H
#define MR_KERNELS_CPU_PVT_H

#include "kernels/cpu/isa.h"
#include "kernels/kernels.h"

#include <errno.h>
#include <string.h>

struct mr_kc {
    const struct mr_kc_isa *isa;
    int threads;                         /* of the matrix products; the row loops run on the calling thread */
    void (*set_threads)(int);            /* of the product library's runtime; NULL: it has none, or it is global and already set */
    float *scratch;                      /* one block, grows to the largest call's need and stays: no allocation after warm-up */
    size_t scratch_n;                    /* floats */
};

static inline struct mr_kc *mr_kc(struct mr_k *k)
{
    return k->impl;
}

/* n floats, aligned to 64 bytes, valid until the next call; NULL when out of memory. */
float *mr_kc_scratch(struct mr_kc *c, size_t n);

/* Rounded up to whole cache lines: parts of one scratch block stay aligned. */
static inline size_t mr_kc_pad(size_t n)
{
    return (n + 15) & ~(size_t)15;
}

/* C (m,n) = alpha * op(A) (m,k) * op(B) (k,n) + beta * C, all row-major; ta, tb 'N' or 'T'.  m, n or k 0: nothing is done. */
int mr_kc_gemm(struct mr_kc *c, char ta, char tb, int m, int n, int kk, float alpha, const float *A, int lda, const float *B, int ldb,
               float beta, float *C, int ldc);
/* Fills in set_threads, or sets the library's global thread count where that is all it has. */
void mr_kc_gemm_init(struct mr_kc *c);

/* The query heads of one GQA group under one another: dst (g*rows, hd) from src (rows; ld), g heads of hd side by side. */
void mr_kc_stack(float *dst, const float *src, int rows, int ld, int g, int hd);
/* And back; row i of src is multiplied by by[i] (NULL: not). */
void mr_kc_unstack(struct mr_kc *c, float *dst, const float *src, int rows, int ld, int g, int hd, const float *by);

/* The ops of kernels.h, by file. */
int mr_kc_linear(struct mr_k *k, int m, int n, int kk, const void *x, int ldx, const void *W, void *y, int ldy, int acc);
int mr_kc_linear_dx(struct mr_k *k, int m, int n, int kk, const void *dy, int ldy, const void *W, void *dx, int ldx, int acc);
int mr_kc_linear_dw(struct mr_k *k, int m, int n, int kk, const void *dy, int ldy, const void *x, int ldx, float *dW);

int mr_kc_load(struct mr_k *k, void *dst, const void *host_src, enum mr_k_dtype dtype, size_t n);

int mr_kc_embed(struct mr_k *k, int n, int H, const void *table, const int32_t *ids, void *out);
int mr_kc_rmsnorm(struct mr_k *k, int rows, int H, const void *x, const void *w, float eps, void *y, float *rstd);
int mr_kc_add_rmsnorm(struct mr_k *k, int rows, int H, void *x, const void *d, const void *w, float eps, void *y, float *rstd);
int mr_kc_head_norm_rope(struct mr_k *k, int rows, int nh, int hd, void *x, int ldx, const void *w, float eps, const int32_t *pos,
                         const float *cs, void *pre, float *rstd);
int mr_kc_linear_swiglu(struct mr_k *k, int rows, int I, int kk, const void *x, int ldx, const void *W, void *gu, void *m);
int mr_kc_swiglu(struct mr_k *k, int rows, int I, const void *g, const void *u, int ldgu, void *m);
int mr_kc_copy2d(struct mr_k *k, int rows, int cols, const void *src, int lds, void *dst, int ldd);
int mr_kc_gather(struct mr_k *k, int n, int cols, const void *src, int lds, const int32_t *idx, void *dst);
int mr_kc_scatter_add(struct mr_k *k, int n, int cols, const void *src, const int32_t *idx, void *dst, int ldd);
int mr_kc_rmsnorm_bwd(struct mr_k *k, int rows, int H, const void *x, const void *w, const float *rstd, const void *dy, void *dx, int acc,
                      float *dw);
int mr_kc_head_norm_rope_bwd(struct mr_k *k, int rows, int nh, int hd, void *dx, int lddx, const void *pre, const void *w,
                             const float *rstd, const int32_t *pos, const float *cs, float *dw);
int mr_kc_swiglu_bwd(struct mr_k *k, int rows, int I, const void *g, const void *u, int ldgu, const void *dm, void *dg, void *du,
                     int lddgu);
int mr_kc_add(struct mr_k *k, size_t n, void *x, const void *y);
int mr_kc_sumsq(struct mr_k *k, size_t n, const float *x, double *host_out);
int mr_kc_sum(struct mr_k *k, size_t n, const float *const *src, int n_src, float *dst);
int mr_kc_adamw(struct mr_k *k, size_t n, const float *p, const float *m, const float *v, const float *grad, float scale, float lr,
                float b1, float b2, float eps, float wd, float bc1, float bc2, float *p2, float *m2, float *v2);

int mr_kc_attn_causal(struct mr_k *k, int n_seqs, const int32_t *cu, const int32_t *host_cu, int nh, int kv, int hd, const void *q, int ldq,
                      const void *kx, const void *v, int ldkv, void *o, int ldo);
int mr_kc_attn_block(struct mr_k *k, const struct mr_k_blocks *b, const int32_t *cu, const int32_t *host_cu,
                     const struct mr_k_block_mask *mask, int nh, int kv, int hd, const void *q, const void *ck, const void *cv, int ldc,
                     const void *bk, const void *bv, int ldb, void *o, float *lse);
int mr_kc_attn_block_bwd(struct mr_k *k, const struct mr_k_blocks *b, const int32_t *cu, const int32_t *host_cu,
                         const struct mr_k_block_mask *mask, int nh, int kv, int hd, const void *q, const void *ck, const void *cv, int ldc,
                         const void *bk, const void *bv, int ldb, const void *o, const float *lse, const void *dO, void *dq, void *dck,
                         void *dcv, int lddc, void *dbk, void *dbv, int lddb);

int mr_kc_ce(struct mr_k *k, int n, int H, int V, const void *x, const void *W, const int32_t *labels, const float *weight, void *scratch,
             float *ce, int32_t *argmax, void *dx);
size_t mr_kc_ce_scratch(struct mr_k *k, int n, int H, int V);

#endif
