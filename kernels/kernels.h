/* The tensor operations: one table of functions, implemented by kernels/cpu (f32) and kernels/cuda (bf16 activations, f32 accumulation).
 *
 * Model code (actors/) is written against this table only, so that a backend is a second implementation and not a second model.
 * Conventions
 *   - Everything is row-major.  `act` = the backend's activation type (k->act_bytes: 4 on cpu, 2 on cuda).  `void *` in a signature below
 *     is act unless the comment says f32.  Weights are act; gradients, masters, moments, statistics (rstd, lse, ce) are f32.
 *   - Pointers are device pointers of k's device; model code never dereferences them.  Host pointers are named host_*.
 *   - Calls are asynchronous in the order issued (one stream a context); sync() waits and returns the first device error.
 *     On cpu every call has completed on return.
 *   - No call allocates after warm-up: scratch comes from the caller, sizes from the *_scratch functions.
 *   - Sequences are packed back to back: cu[0..n_seqs] i32 on the device AND host_cu on the host (tiles are planned from it).
 *   - Return 0, or a negative errno-like code; after a device error every later call fails with -EIO (sticky).
 *   - One context per thread; no globals; nothing here knows rings, processes or JSON.
 *   - With k->deterministic, same inputs give the same bits on the same machine and library (cpu: always).
 */
#ifndef MR_KERNELS_H
#define MR_KERNELS_H

#include <stddef.h>
#include <stdint.h>

struct mr_k;

enum mr_k_dtype { MR_K_F32, MR_K_BF16, MR_K_F16 };

/* Attention mask switches of a drafter layer (docs/dflash.md 1.4, 1.6). */
struct mr_k_block_mask {
    int window;          /* 0 = full, else W tokens */
    int causal;          /* 1: in-block key offset must be <= query offset */
    int window_origin;   /* 0: window measured from the query (SpecForge: t >= a + oq - (W - 1)), 1: from the anchor (t >= a - W) */
};

struct mr_k_blocks {     /* the anchors of a microbatch: n blocks of B slots; block j belongs to sequence seq[j], anchor pos[j] in it */
    int n, B;
    const int32_t *seq, *pos;            /* (n) device */
    const int32_t *host_seq, *host_pos;  /* (n) host; sorted by seq, then pos */
};

struct mr_k_ops {
    const char *name;                    /* "cpu", "cuda" */

    /* ---- memory and order -------------------------------------------------------------------------------------------------- */
    void *(*alloc)(struct mr_k *k, size_t bytes);            /* zeroed, aligned to 256; NULL when out of memory */
    void (*release)(struct mr_k *k, void *p);
    int (*h2d)(struct mr_k *k, void *dst, const void *host_src, size_t bytes);
    int (*d2h)(struct mr_k *k, void *host_dst, const void *src, size_t bytes);   /* asynchronous on cuda: sync() before reading */
    int (*d2d)(struct mr_k *k, void *dst, const void *src, size_t bytes);
    int (*zero)(struct mr_k *k, void *p, size_t bytes);
    int (*sync)(struct mr_k *k);
    /* dst (act) = src converted, n elements; src is a HOST buffer of dtype.  For weights. */
    int (*load)(struct mr_k *k, void *dst, const void *host_src, enum mr_k_dtype dtype, size_t n);
    int (*f32_to_act)(struct mr_k *k, void *dst, const float *src, size_t n);
    int (*act_to_f32)(struct mr_k *k, float *dst, const void *src, size_t n);

    /* ---- products ---------------------------------------------------------------------------------------------------------- */
    /* y (m,n; ldy) = x (m,k; ldx) * W (n,k)^T [+ y when acc]     W as Hugging Face stores a Linear */
    int (*linear)(struct mr_k *k, int m, int n, int kk, const void *x, int ldx, const void *W, void *y, int ldy, int acc);
    /* dx (m,k; ldx) = dy (m,n; ldy) * W (n,k) [+ dx when acc] */
    int (*linear_dx)(struct mr_k *k, int m, int n, int kk, const void *dy, int ldy, const void *W, void *dx, int ldx, int acc);
    /* dW (n,k) f32 += dy (m,n; ldy)^T * x (m,k; ldx) */
    int (*linear_dw)(struct mr_k *k, int m, int n, int kk, const void *dy, int ldy, const void *x, int ldx, float *dW);

    /* ---- forward, shared by targets and drafters ------------------------------------------------------------------------------ */
    /* out (n,H) = table[ids[i]]; ids i32 device, every id already checked against the table's rows by the data room */
    int (*embed)(struct mr_k *k, int n, int H, const void *table, const int32_t *ids, void *out);
    /* y = x * rsqrt(mean(x^2) + eps) * w per row; rstd (rows) f32 saved when not NULL */
    int (*rmsnorm)(struct mr_k *k, int rows, int H, const void *x, const void *w, float eps, void *y, float *rstd);
    /* x += d, then y = rmsnorm(x): residual add fused.  y may be NULL (only add). */
    int (*add_rmsnorm)(struct mr_k *k, int rows, int H, void *x, const void *d, const void *w, float eps, void *y, float *rstd);
    /* In place on x (rows, nh*hd; ldx): per-head RMSNorm with w (hd) (NULL: none), then rotate-half RoPE at pos[row] with the table
     * cs (max_pos, hd) f32 = [cos(hd/2) | sin(hd/2)] (NULL: no rope).  pre (rows, nh*hd) gets the input, rstd (rows, nh) f32, when not
     * NULL (both needed by the backward). */
    int (*head_norm_rope)(struct mr_k *k, int rows, int nh, int hd, void *x, int ldx, const void *w, float eps, const int32_t *pos,
                          const float *cs, void *pre, float *rstd);
    /* Causal self-attention per sequence; q (n, nh*hd; ldq), k and v (n, kv*hd; ldkv), o (n, nh*hd; ldo); scale hd^-0.5; GQA contiguous */
    int (*attn_causal)(struct mr_k *k, int n_seqs, const int32_t *cu, const int32_t *host_cu, int nh, int kv, int hd, const void *q,
                       int ldq, const void *kx, const void *v, int ldkv, void *o, int ldo);
    /* m (rows,I) = silu(g) * u; g,u (rows,I; ldgu) */
    int (*swiglu)(struct mr_k *k, int rows, int I, const void *g, const void *u, int ldgu, void *m);
    /* dst (rows; ldd) = src (rows, cols; lds) */
    int (*copy2d)(struct mr_k *k, int rows, int cols, const void *src, int lds, void *dst, int ldd);
    /* dst (n, cols) = src[idx[i]] (rows of cols; lds) and its inverse dst[idx[i]] += src[i] (idx without duplicates) */
    int (*gather)(struct mr_k *k, int n, int cols, const void *src, int lds, const int32_t *idx, void *dst);
    int (*scatter_add)(struct mr_k *k, int n, int cols, const void *src, const int32_t *idx, void *dst, int ldd);

    /* ---- drafter attention (docs/dflash.md 1.4) --------------------------------------------------------------------------------- */
    /* Queries: block rows (b->n * b->B).  Keys: context rows of the block's sequence at positions t < anchor (minus the window), then the
     * block's own B rows.  q, o (nB, nh*hd); ck, cv (n_ctx, kv*hd; ldc); bk, bv (nB, kv*hd; ldb).  lse (nB, nh) f32 for the backward
     * (NULL: none follows).  A block with pos < 0 is padding: it sees no key, its o is exactly 0, it gives and gets no gradient. */
    int (*attn_block)(struct mr_k *k, const struct mr_k_blocks *b, const int32_t *cu, const int32_t *host_cu,
                      const struct mr_k_block_mask *mask, int nh, int kv, int hd, const void *q, const void *ck, const void *cv, int ldc,
                      const void *bk, const void *bv, int ldb, void *o, float *lse);
    /* Given dO: dq (nB, nh*hd), dbk, dbv (nB, kv*hd; lddb) written; dck, dcv (n_ctx, kv*hd; lddc) ADDED to (zero them first). */
    int (*attn_block_bwd)(struct mr_k *k, const struct mr_k_blocks *b, const int32_t *cu, const int32_t *host_cu,
                          const struct mr_k_block_mask *mask, int nh, int kv, int hd, const void *q, const void *ck, const void *cv,
                          int ldc, const void *bk, const void *bv, int ldb, const void *o, const float *lse, const void *dO, void *dq,
                          void *dck, void *dcv, int lddc, void *dbk, void *dbv, int lddb);

    /* ---- backward ------------------------------------------------------------------------------------------------------------- */
    /* g = dy*w; dx = rstd*(g - x*rstd^2*mean(g*x)) [+ dx when acc]; dw (H) f32 += sum_rows dy*x*rstd.  dx NULL: only dw.
     * Without acc, dx may be dy. */
    int (*rmsnorm_bwd)(struct mr_k *k, int rows, int H, const void *x, const void *w, const float *rstd, const void *dy, void *dx, int acc,
                       float *dw);
    /* Inverse of head_norm_rope, in place on dx (rows, nh*hd; lddx); dw (hd) f32 added to */
    int (*head_norm_rope_bwd)(struct mr_k *k, int rows, int nh, int hd, void *dx, int lddx, const void *pre, const void *w,
                              const float *rstd, const int32_t *pos, const float *cs, float *dw);
    /* dg = dm*u*silu'(g), du = dm*silu(g); dg, du (rows,I; lddgu) */
    int (*swiglu_bwd)(struct mr_k *k, int rows, int I, const void *g, const void *u, int ldgu, const void *dm, void *dg, void *du,
                      int lddgu);
    int (*add)(struct mr_k *k, size_t n, void *x, const void *y);      /* x += y */

    /* ---- loss ----------------------------------------------------------------------------------------------------------------- */
    /* Rows x (n,H) against the frozen head W (V,H), chunk by chunk: logits never exist whole.  labels (n) i32, weight (n) f32.
     * ce (n) f32 = logsumexp(z) - z[label]; argmax (n) i32 (may be NULL); dx (n,H) = sum_v (softmax(z) - onehot)*weight * W (may be NULL).
     * Weight 0: dx exactly 0, ce and argmax as usual.  Label < 0: the row is left out and costs nothing; ce 0, argmax -1, dx 0.
     * Weights that depend on ce (D-PACE): call once with dx NULL for ce, then again with the weights. */
    int (*ce)(struct mr_k *k, int n, int H, int V, const void *x, const void *W, const int32_t *labels, const float *weight, void *scratch,
              float *ce, int32_t *argmax, void *dx);
    size_t (*ce_scratch)(struct mr_k *k, int n, int H, int V);          /* bytes */

    /* ---- optimizer (all f32, n elements) ----------------------------------------------------------------------------------------- */
    int (*sumsq)(struct mr_k *k, size_t n, const float *x, double *host_out);   /* sum of squares, accumulated in double; synchronous */
    int (*sum)(struct mr_k *k, size_t n, const float *const *src, int n_src, float *dst);  /* dst = src[0] + src[1] + ..., in this order */
    /* AdamW (Loshchilov, Hutter 2019) with bias correction, from one state into the other: g = grad*scale;
     * m' = b1*m + (1-b1)*g; v' = b2*v + (1-b2)*g^2; p' = p*(1 - lr*wd) - lr * (m'/bc1) / (sqrt(v'/bc2) + eps);  bc = 1 - b^t */
    int (*adamw)(struct mr_k *k, size_t n, const float *p, const float *m, const float *v, const float *grad, float scale, float lr,
                 float b1, float b2, float eps, float wd, float bc1, float bc2, float *p2, float *m2, float *v2);
};

/* A context: the table, and what the backend keeps. */
struct mr_k {
    const struct mr_k_ops *op;
    int act_bytes;       /* bytes of one activation element: 4 or 2 */
    enum mr_k_dtype act;
    int deterministic;
    void *impl;
};

/* f32 on the CPU; `threads` >= 1 for this context's matrix products (1 unless the topology says more; then no other thread is ever made, so
 * none can spin), everything else runs on the caller's thread.  Scratch of the operations grows to the largest call's need and stays.
 * An anchor or a label that is out of range: -EINVAL.  NULL when out of memory. */
struct mr_k *mr_k_cpu_create(int threads);
void mr_k_cpu_destroy(struct mr_k *k);

/* bf16 on CUDA device `device` (index after CUDA_VISIBLE_DEVICES).  First CUDA call of the process.  NULL with a message in err
 * (err_bytes long) when there is no such device, or the build has no CUDA. */
struct mr_k *mr_k_cuda_create(int device, int deterministic, char *err, size_t err_bytes);
void mr_k_cuda_destroy(struct mr_k *k);

/* Host helper: RoPE table (max_pos, hd) f32 from inverse frequencies (hd/2), angles in f32 as Hugging Face computes them. */
void mr_k_rope_table(float *host_cs, int max_pos, int hd, const float *host_inv_freq);

#endif
