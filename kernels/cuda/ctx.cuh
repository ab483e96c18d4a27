/* What the files of kernels/cuda share: the context, error handling, scratch, and the bf16 helpers of device code.
 *
 * Activations are raw bf16 bits in uint16_t.  Device code reads them eight at a time (16 bytes) and computes in f32; a bf16 is the upper
 * half of an f32, so unpacking is a shift, and packing is one cvt.rn instruction (sm_80).
 *
 * Every operation is asynchronous on the context's one stream.  The first device error is kept in `err`, logged once, and makes every
 * later call return -EIO; a wrong argument returns -EINVAL and changes nothing. */
#ifndef MR_CUDA_CTX_CUH
#define MR_CUDA_CTX_CUH

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cuda_runtime.h>

extern "C" {
#include "kernels/kernels.h"
#include "base/log.h"
}

#ifndef MR_LAUNCH
#define MR_LAUNCH(kernel, grid, block, smem, stream, ...) kernel<<<grid, block, smem, stream>>>(__VA_ARGS__)
#define MR_DYN_SMEM(name) extern __shared__ __align__(1024) unsigned char name[]
#endif

typedef uint16_t bf16;

struct mr_cuda_gemms;
struct mr_cuda_plans;

enum { MR_CUDA_STAGES = 4 };

struct mr_cuda {
    struct mr_k k;                     /* what callers hold; k.impl points back here */
    int device, sms, cc;               /* cc: compute capability, major * 10 + minor */
    size_t smem_max;                   /* dynamic shared memory a block may ask for */
    int err;                           /* 0, or -EIO for ever */
    cudaStream_t stream;

    void *scratch;                     /* used by one operation at a time: stream order keeps users apart */
    size_t scratch_bytes;

    struct {                           /* ring of pinned staging buffers for copies from the host */
        unsigned char *p;              /* made when it is first its turn */
        cudaEvent_t free;
    } stage[MR_CUDA_STAGES];
    unsigned stage_next;
    int attn_ready;                    /* attention's kernels are set up: at the first use, which loads them */

    double *host_sum;                  /* pinned, one double */
    struct mr_cuda_gemms *gemms;
    struct mr_cuda_plans *plans;
    void *encode_tiled;                /* cuTensorMapEncodeTiled, once asked for, where the kernels of *_sm90.cu run */
    int mlp_clusters;                  /* clusters of mlp_sm90.cu that are resident at once; 0: not asked yet, -1: it does not run here */
};

static inline struct mr_cuda *mr_cuda_of(struct mr_k *k)
{
    return (struct mr_cuda *)k->impl;
}

/* Records e as the context's first error, with the name of the call.  Returns 0 or -EIO. */
int mr_cuda_check(struct mr_cuda *c, cudaError_t e, const char *what);

/* After launches: the launch error, if there is one. */
static inline int mr_cuda_launched(struct mr_cuda *c, const char *what)
{
    return mr_cuda_check(c, cudaGetLastError(), what);
}

/* At least `bytes` of device scratch, valid until the next operation on this context.  Grows (and then waits for the device) only while
 * sizes grow.  NULL after an error. */
void *mr_cuda_scratch(struct mr_cuda *c, size_t bytes);

/* Copies host memory to the device in stream order; `src` may be reused on return. */
int mr_cuda_upload(struct mr_cuda *c, void *dst, const void *src, size_t bytes);

/* Begins to load cuBLAS, beside what the caller does next; once a process.  Not before the driver is loaded: both take the loader's lock. */
void mr_cuda_blas_open(void);
/* Until it is loaded, if that was begun.  Before the process leaves: a library's constructors do not run beside its destructors. */
void mr_cuda_blas_wait(void);
int mr_cuda_gemm_init(struct mr_cuda *c);
void mr_cuda_gemm_destroy(struct mr_cuda *c);
int mr_cuda_plan_init(struct mr_cuda *c);
void mr_cuda_plan_destroy(struct mr_cuda *c);
/* Sets attention's kernels up, before their first use in this context.  0 or -EIO. */
int mr_cuda_attn_open(struct mr_cuda *c);
int mr_cuda_attn_init(struct mr_cuda *c);
int mr_cuda_attn_bwd_init(struct mr_cuda *c);
int mr_cuda_attn_sm90_init(struct mr_cuda *c);

/* z (m,n; ldz) f32 = x (m,k; ldx) * W (n,k)^T; and the gradient product with dy (m,n; ldy).  gemm.cu; used by the loss. */
int mr_cuda_linear_f32(struct mr_cuda *c, int m, int n, int kk, const void *x, int ldx, const void *W, float *z, int ldz);

/* linear_swiglu in one kernel; -ENOTSUP, with nothing done, where that does not run or does not pay.  mlp_sm90.cu. */
int mr_cuda_mlp_sm90(struct mr_cuda *c, int rows, int I, int kk, const void *x, int ldx, const void *W, void *m);

/* The operations, by file; the table is in context.cu. */
int mr_cuda_linear(struct mr_k *k, int m, int n, int kk, const void *x, int ldx, const void *W, void *y, int ldy, int acc);
int mr_cuda_linear_dx(struct mr_k *k, int m, int n, int kk, const void *dy, int ldy, const void *W, void *dx, int ldx, int acc);
int mr_cuda_linear_dw(struct mr_k *k, int m, int n, int kk, const void *dy, int ldy, const void *x, int ldx, float *dW);
int mr_cuda_load(struct mr_k *k, void *dst, const void *host_src, enum mr_k_dtype dtype, size_t n);
int mr_cuda_f32_to_act(struct mr_k *k, void *dst, const float *src, size_t n);
int mr_cuda_act_to_f32(struct mr_k *k, float *dst, const void *src, size_t n);
int mr_cuda_embed(struct mr_k *k, int n, int H, const void *table, const int32_t *ids, void *out);
int mr_cuda_rmsnorm(struct mr_k *k, int rows, int H, const void *x, const void *w, float eps, void *y, float *rstd);
int mr_cuda_add_rmsnorm(struct mr_k *k, int rows, int H, void *x, const void *d, const void *w, float eps, void *y, float *rstd);
int mr_cuda_head_norm_rope(struct mr_k *k, int rows, int nh, int hd, void *x, int ldx, const void *w, float eps, const int32_t *pos,
                           const float *cs, void *pre, float *rstd);
int mr_cuda_attn_causal(struct mr_k *k, int n_seqs, const int32_t *cu, const int32_t *host_cu, int nh, int kv, int hd, const void *q,
                        int ldq, const void *kx, const void *v, int ldkv, void *o, int ldo);
int mr_cuda_linear_swiglu(struct mr_k *k, int rows, int I, int kk, const void *x, int ldx, const void *W, void *gu, void *m);
int mr_cuda_swiglu(struct mr_k *k, int rows, int I, const void *g, const void *u, int ldgu, void *m);
int mr_cuda_copy2d(struct mr_k *k, int rows, int cols, const void *src, int lds, void *dst, int ldd);
int mr_cuda_gather(struct mr_k *k, int n, int cols, const void *src, int lds, const int32_t *idx, void *dst);
int mr_cuda_scatter_add(struct mr_k *k, int n, int cols, const void *src, const int32_t *idx, void *dst, int ldd);
int mr_cuda_attn_block(struct mr_k *k, const struct mr_k_blocks *b, const int32_t *cu, const int32_t *host_cu,
                       const struct mr_k_block_mask *mask, int nh, int kv, int hd, const void *q, const void *ck, const void *cv, int ldc,
                       const void *bk, const void *bv, int ldb, void *o, float *lse);
int mr_cuda_attn_block_bwd(struct mr_k *k, const struct mr_k_blocks *b, const int32_t *cu, const int32_t *host_cu,
                           const struct mr_k_block_mask *mask, int nh, int kv, int hd, const void *q, const void *ck, const void *cv,
                           int ldc, const void *bk, const void *bv, int ldb, const void *o, const float *lse, const void *dO, void *dq,
                           void *dck, void *dcv, int lddc, void *dbk, void *dbv, int lddb);
int mr_cuda_rmsnorm_bwd(struct mr_k *k, int rows, int H, const void *x, const void *w, const float *rstd, const void *dy, void *dx,
                        int acc, float *dw);
int mr_cuda_head_norm_rope_bwd(struct mr_k *k, int rows, int nh, int hd, void *dx, int lddx, const void *pre, const void *w,
                               const float *rstd, const int32_t *pos, const float *cs, float *dw);
int mr_cuda_swiglu_bwd(struct mr_k *k, int rows, int I, const void *g, const void *u, int ldgu, const void *dm, void *dg, void *du,
                       int lddgu);
int mr_cuda_add(struct mr_k *k, size_t n, void *x, const void *y);
int mr_cuda_ce(struct mr_k *k, int n, int H, int V, const void *x, const void *W, const int32_t *labels, const float *weight,
               void *scratch, float *ce, int32_t *argmax, void *dx);
size_t mr_cuda_ce_scratch(struct mr_k *k, int n, int H, int V);
int mr_cuda_sumsq(struct mr_k *k, size_t n, const float *x, double *host_out);
int mr_cuda_sum(struct mr_k *k, size_t n, const float *const *src, int n_src, float *dst);
int mr_cuda_adamw(struct mr_k *k, size_t n, const float *p, const float *m, const float *v, const float *grad, float scale, float lr,
                  float b1, float b2, float eps, float wd, float bc1, float bc2, float *p2, float *m2, float *v2);

static inline int mr_cuda_div_up(long long a, long long b)
{
    return (int)((a + b - 1) / b);
}

static inline int mr_cuda_aligned16(const void *p)
{
    return ((uintptr_t)p & 15) == 0;
}

/* ---- device helpers ---------------------------------------------------------------------------------------------- */

__device__ static inline float bf_lo(uint32_t u)   /* element 0 of a pair */
{
    return __uint_as_float(u << 16);
}

__device__ static inline float bf_hi(uint32_t u)   /* element 1 of a pair */
{
    return __uint_as_float(u & 0xffff0000u);
}

__device__ static inline float bf_f32(bf16 v)
{
    return __uint_as_float((uint32_t)v << 16);
}

#ifndef MR_CUDA_EMULATED
/* Two f32 to a bf16 pair, round to nearest even; lo becomes element 0. */
__device__ static inline uint32_t bf_pack(float lo, float hi)
{
    uint32_t u;

    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(u) : "f"(hi), "f"(lo));
    return u;
}
#endif

__device__ static inline bf16 bf_of(float f)
{
    return (bf16)bf_pack(f, 0.0f);
}

__device__ static inline void unpack8(uint4 u, float f[8])
{
    f[0] = bf_lo(u.x), f[1] = bf_hi(u.x), f[2] = bf_lo(u.y), f[3] = bf_hi(u.y);
    f[4] = bf_lo(u.z), f[5] = bf_hi(u.z), f[6] = bf_lo(u.w), f[7] = bf_hi(u.w);
}

__device__ static inline uint4 pack8(const float f[8])
{
    return make_uint4(bf_pack(f[0], f[1]), bf_pack(f[2], f[3]), bf_pack(f[4], f[5]), bf_pack(f[6], f[7]));
}

__device__ static inline float warp_sum(float v)
{
    for (int o = 16; o; o >>= 1)
        v += __shfl_xor_sync(0xffffffffu, v, o);
    return v;
}

/* Sum over the block, in a fixed order; `tmp` is 32 floats of shared memory, free again after the caller's next barrier. */
__device__ static inline float block_sum(float v, float *tmp)
{
    int warp = threadIdx.x / 32, warps = blockDim.x / 32;

    v = warp_sum(v);
    if (threadIdx.x % 32 == 0)
        tmp[warp] = v;
    __syncthreads();
    v = tmp[0];
    for (int i = 1; i < warps; i++)
        v += tmp[i];
    return v;
}

#endif
