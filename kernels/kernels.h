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
    /* m (rows,I) = silu(x Wg^T) * (x Wu^T): both products and the activation between them.  x (rows,kk; ldx); W (2I,kk), the rows of Wg
     * first; gu (rows,2I) is scratch, undefined afterwards; m overlaps none of them.  A backend may do it in one pass, in which gate and up
     * stay f32, or as linear into gu and swiglu of that (gate and up rounded to act): by shape and device, so the same way every time. */
    int (*linear_swiglu)(struct mr_k *k, int rows, int I, int kk, const void *x, int ldx, const void *W, void *gu, void *m);
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

/* ---- device memory that outlives an actor (kernels/cuda/arena.cu) --------------------------------------------------------------------
 * Not part of the table: only GPUs need it.  A keeper allocates and exports; others open by handle.  All return 0, or a negative errno with
 * a message in err (err_bytes long).  In a build without CUDA each one fails with -ENOSYS and says so. */

enum { MR_K_CUDA_HANDLE = 64, MR_K_CUDA_UUID = 41, MR_K_CUDA_DEVICES = 16 };

struct mr_k_cuda_device {
    char name[64], uuid[MR_K_CUDA_UUID];             /* "NVIDIA H200", "GPU-6f3c..." */
    uint64_t free_bytes, total_bytes;
    int major, minor, sms;
    uint8_t peer[MR_K_CUDA_DEVICES];                 /* peer[j]: this device can map the memory of device j (itself: 1) */
};

/* Visible devices, in the order of CUDA_VISIBLE_DEVICES; *n of them, at most MR_K_CUDA_DEVICES.  Makes a context on each, which costs memory
 * there as long as the process lives: for short-lived processes. */
int mr_k_cuda_devices(struct mr_k_cuda_device *out, int *n, char *err, size_t err_bytes);

/* "cuda:N" or "GPU-<uuid>" (or its unique beginning) -> *index among the visible devices.  Makes no context. */
int mr_k_cuda_resolve(const char *device, int *index, char *err, size_t err_bytes);

/* Makes `device` the calling thread's.  A keeper needs no more of CUDA than this: no stream, no library, no kernel. */
int mr_k_cuda_use(int device, char *err, size_t err_bytes);
int mr_k_cuda_mem_info(uint64_t *free_bytes, uint64_t *total_bytes, char *err, size_t err_bytes);
/* Zeroed memory of the current device, by plain cudaMalloc (anything else cannot be exported), and its handle and device uuid (0-terminated).
 * -ENOMEM: it does not fit now.  Nothing frees it but the end of the process: under those who have it mapped, freeing is undefined. */
int mr_k_cuda_arena_alloc(uint64_t bytes, void **base, uint8_t handle[MR_K_CUDA_HANDLE], char uuid[MR_K_CUDA_UUID], char *err,
                          size_t err_bytes);
/* Maps an exported arena into this process, for the current device (over peer access when it lies on another one).  -ENXIO: the exporter
 * is dead, or the handle is of memory that is no more.  -EXDEV: the current device cannot map that of the arena.  Never in the exporting
 * process. */
int mr_k_cuda_arena_open(const uint8_t handle[MR_K_CUDA_HANDLE], void **base, char *err, size_t err_bytes);
void mr_k_cuda_arena_close(void *base);

/* ---- asynchronous work around the table's calls (kernels/cuda/async.cu): 0 or -EIO; a context's first error is logged and stays -------- */

/* Pinned host memory.  NULL when there is none. */
void *mr_k_cuda_host_alloc(struct mr_k *k, size_t bytes);
void mr_k_cuda_host_free(struct mr_k *k, void *p);
/* dst (device) = src (pinned), in stream order; src must stay until a mark behind it has passed. */
int mr_k_cuda_put(struct mr_k *k, void *dst, const void *src, size_t bytes);

/* A mark: a point in the stream of a context. */
struct mr_k_mark;
struct mr_k_mark *mr_k_cuda_mark_create(struct mr_k *k);
void mr_k_cuda_mark_destroy(struct mr_k *k, struct mr_k_mark *m);
int mr_k_cuda_mark_set(struct mr_k *k, struct mr_k_mark *m);     /* behind everything issued so far */
int mr_k_cuda_mark_wait(struct mr_k *k, struct mr_k_mark *m);    /* sleeps until all before it is done; at once when never set */
/* Device milliseconds between two marks that have passed. */
int mr_k_cuda_mark_ms(struct mr_k *k, const struct mr_k_mark *from, const struct mr_k_mark *to, double *ms);

/* A pull: copies from other memory (a slab, also on another GPU) into one of two staging places, on a stream of its own, while the
 * context computes on the other place.  `place` is 0 or 1. */
struct mr_k_pull;
struct mr_k_pull *mr_k_cuda_pull_create(struct mr_k *k);
void mr_k_cuda_pull_destroy(struct mr_k *k, struct mr_k_pull *p);
/* Begins the copy once everything issued so far that may still read the place's old contents is done. */
int mr_k_cuda_pull_begin(struct mr_k *k, struct mr_k_pull *p, int place, void *dst, const void *src, size_t bytes);
int mr_k_cuda_pull_use(struct mr_k *k, struct mr_k_pull *p, int place);    /* what is issued from here on runs behind the copy */
int mr_k_cuda_pull_wait(struct mr_k *k, struct mr_k_pull *p, int place);   /* host: the copy is complete, the source may be freed (edge E2) */

/* A reader: device memory to the host for another thread than the context's own, on a stream of its own (kernels/cuda/reader.cu).  While it
 * reads, the context computes.  One thread at a time. */
struct mr_k_reader;
/* With n_blocks pinned blocks.  NULL: no pinned memory, or the device has failed. */
struct mr_k_reader *mr_k_cuda_reader_create(struct mr_k *k, int n_blocks, size_t block_bytes);
void mr_k_cuda_reader_destroy(struct mr_k_reader *r);
void *mr_k_cuda_reader_block(struct mr_k_reader *r, int i);
/* host (inside a block) = device memory; complete on return.  -EIO after a device error, which is logged. */
int mr_k_cuda_reader_read(struct mr_k_reader *r, void *host, const void *src, size_t bytes);

/* ---- one sum over the ranks of a group (kernels/cuda/comm.cu: NCCL) ----------------------------------------------------------------------
 * Nothing here waits for a peer: begin and sum only start, and poll says how far it is; so the caller can give up, by its own deadline or
 * because a peer has died.  A communicator with a failed or abandoned operation is of no use any more: end it with `broken`, begin another. */
enum { MR_K_COMM_ID = 128 };
struct mr_k_comm;

/* Version of the library, as 22809; 0: this build has none. */
int mr_k_comm_version(void);
/* One rank makes the id of a group and hands it to the others.  0 or -EIO with err. */
int mr_k_comm_id(uint8_t id[MR_K_COMM_ID], char *err, size_t err_bytes);
/* Starts to join.  NULL with err. */
struct mr_k_comm *mr_k_comm_begin(struct mr_k *k, const uint8_t id[MR_K_COMM_ID], int rank, int ranks, char *err, size_t err_bytes);
/* Starts dst (n) = sum over the ranks of src (n), device memory of `type` (F32 or BF16); src is final, and dst not in use, when this is
 * called.  0 or -EIO with err. */
int mr_k_comm_sum(struct mr_k_comm *c, const void *src, void *dst, size_t n, enum mr_k_dtype type, char *err, size_t err_bytes);
/* Of what was started last: 0 = complete on the device, -EINPROGRESS, -EIO with err. */
int mr_k_comm_poll(struct mr_k_comm *c, char *err, size_t err_bytes);
/* NULL is allowed.  broken: abort.  -ETIMEDOUT: the library has not let go within `ms`; it is left to a thread of its own, so `dst` of a sum that
 * was not complete may still be written. */
int mr_k_comm_end(struct mr_k_comm *c, int broken, unsigned ms);

/* ---- random weights: the same numbers on every backend -------------------------------------------------------------------------------- */

/* x[i] = uniform with mean 0 and the given standard deviation, a pure function of (seed, first + i); f32 on the host, act on the device. */
void mr_k_random_f32(float *host_x, uint64_t seed, uint64_t first, size_t n, float std);
int mr_k_cuda_random(struct mr_k *k, void *dst, uint64_t seed, size_t n, float std);

/* Host helper: RoPE table (max_pos, hd) f32 from inverse frequencies (hd/2), angles in f32 as Hugging Face computes them. */
void mr_k_rope_table(float *host_cs, int max_pos, int hd, const float *host_inv_freq);

#endif
