/* SwiGLU, conversions, row copies, gather, scatter, add: everything that reads and writes each element once.
 *
 * Rows whose length, strides and pointers allow it move 16 bytes a thread; others one element a thread.  Grids are (row, part of a row). */
#include "kernels/cuda/ctx.cuh"

#ifndef MR_CUDA_EMULATED
#include <cuda_fp16.h>
#endif

enum { THREADS = 256 };

/* Blocks for `items` of a row, as the y extent of a grid. */
static dim3 grid_rows(int rows, int items)
{
    return dim3((unsigned)rows, (unsigned)mr_cuda_div_up(items, THREADS));
}

/* ---- SwiGLU ------------------------------------------------------------------------------------------------------ */

__device__ static inline float sigmoid(float g)
{
    return __fdividef(1.0f, 1.0f + __expf(-g));
}

__global__ void __launch_bounds__(THREADS) swiglu_fwd8(int I, const bf16 *g, const bf16 *u, int ld, bf16 *m)
{
    int i = (blockIdx.y * THREADS + threadIdx.x) * 8;
    size_t in = (size_t)blockIdx.x * ld + i;
    float a[8], b[8];

    if (i >= I)
        return;
    unpack8(*(const uint4 *)(g + in), a);
    unpack8(*(const uint4 *)(u + in), b);
    for (int e = 0; e < 8; e++)
        b[e] *= a[e] * sigmoid(a[e]);
    *(uint4 *)(m + (size_t)blockIdx.x * I + i) = pack8(b);
}

__global__ void __launch_bounds__(THREADS) swiglu_fwd1(int I, const bf16 *g, const bf16 *u, int ld, bf16 *m)
{
    int i = blockIdx.y * THREADS + threadIdx.x;
    size_t in = (size_t)blockIdx.x * ld + i;
    float a;

    if (i >= I)
        return;
    a = bf_f32(g[in]);
    m[(size_t)blockIdx.x * I + i] = bf_of(bf_f32(u[in]) * a * sigmoid(a));
}

int mr_cuda_swiglu(struct mr_k *k, int rows, int I, const void *g, const void *u, int ldgu, void *m)
{
    struct mr_cuda *c = mr_cuda_of(k);
    const bf16 *bg = (const bf16 *)g, *bu = (const bf16 *)u;

    if (c->err)
        return c->err;
    if (rows < 0 || I <= 0 || ldgu < I)
        return -EINVAL;
    if (rows == 0)
        return 0;
    if (I % 8 == 0 && ldgu % 8 == 0 && mr_cuda_aligned16(g) && mr_cuda_aligned16(u) && mr_cuda_aligned16(m))
        MR_LAUNCH(swiglu_fwd8, grid_rows(rows, I / 8), THREADS, 0, c->stream, I, bg, bu, ldgu, (bf16 *)m);
    else
        MR_LAUNCH(swiglu_fwd1, grid_rows(rows, I), THREADS, 0, c->stream, I, bg, bu, ldgu, (bf16 *)m);
    return mr_cuda_launched(c, "swiglu");
}

int mr_cuda_linear_swiglu(struct mr_k *k, int rows, int I, int kk, const void *x, int ldx, const void *W, void *gu, void *m)
{
    struct mr_cuda *c = mr_cuda_of(k);
    int e;

    if (c->err)
        return c->err;
    if (rows < 0 || I <= 0 || kk <= 0 || ldx < kk)
        return -EINVAL;
    e = mr_cuda_mlp_sm90(c, rows, I, kk, x, ldx, W, m);
    if (e != -ENOTSUP)
        return e;
    e = mr_cuda_linear(k, rows, 2 * I, kk, x, ldx, W, gu, 2 * I, 0);
    return e ? e : mr_cuda_swiglu(k, rows, I, gu, (const bf16 *)gu + I, 2 * I, m);
}

/* dg = dm*u*silu'(g), du = dm*silu(g) for one element; g and u are replaced by dg and du. */
__device__ static inline void swiglu_back(float dm, float *g, float *u)
{
    float s = sigmoid(*g), du = dm * *g * s;

    *g = dm * *u * s * (1.0f + *g * (1.0f - s));
    *u = du;
}

__global__ void __launch_bounds__(THREADS) swiglu_bwd8(int I, const bf16 *g, const bf16 *u, int ld, const bf16 *dm, bf16 *dg, bf16 *du,
                                                       int ldd)
{
    int i = (blockIdx.y * THREADS + threadIdx.x) * 8;
    size_t in = (size_t)blockIdx.x * ld + i, out = (size_t)blockIdx.x * ldd + i;
    float a[8], b[8], d[8];

    if (i >= I)
        return;
    unpack8(*(const uint4 *)(g + in), a);
    unpack8(*(const uint4 *)(u + in), b);
    unpack8(*(const uint4 *)(dm + (size_t)blockIdx.x * I + i), d);
    for (int e = 0; e < 8; e++)
        swiglu_back(d[e], &a[e], &b[e]);
    *(uint4 *)(dg + out) = pack8(a);
    *(uint4 *)(du + out) = pack8(b);
}

__global__ void __launch_bounds__(THREADS) swiglu_bwd1(int I, const bf16 *g, const bf16 *u, int ld, const bf16 *dm, bf16 *dg, bf16 *du,
                                                       int ldd)
{
    int i = blockIdx.y * THREADS + threadIdx.x;
    size_t in = (size_t)blockIdx.x * ld + i, out = (size_t)blockIdx.x * ldd + i;
    float a, b;

    if (i >= I)
        return;
    a = bf_f32(g[in]), b = bf_f32(u[in]);
    swiglu_back(bf_f32(dm[(size_t)blockIdx.x * I + i]), &a, &b);
    dg[out] = bf_of(a);
    du[out] = bf_of(b);
}

int mr_cuda_swiglu_bwd(struct mr_k *k, int rows, int I, const void *g, const void *u, int ldgu, const void *dm, void *dg, void *du,
                       int lddgu)
{
    struct mr_cuda *c = mr_cuda_of(k);
    const bf16 *bg = (const bf16 *)g, *bu = (const bf16 *)u, *bdm = (const bf16 *)dm;
    bf16 *bdg = (bf16 *)dg, *bdu = (bf16 *)du;

    if (c->err)
        return c->err;
    if (rows < 0 || I <= 0 || ldgu < I || lddgu < I)
        return -EINVAL;
    if (rows == 0)
        return 0;
    if (I % 8 == 0 && ldgu % 8 == 0 && lddgu % 8 == 0 && mr_cuda_aligned16(g) && mr_cuda_aligned16(u) && mr_cuda_aligned16(dm) &&
        mr_cuda_aligned16(dg) && mr_cuda_aligned16(du))
        MR_LAUNCH(swiglu_bwd8, grid_rows(rows, I / 8), THREADS, 0, c->stream, I, bg, bu, ldgu, bdm, bdg, bdu, lddgu);
    else
        MR_LAUNCH(swiglu_bwd1, grid_rows(rows, I), THREADS, 0, c->stream, I, bg, bu, ldgu, bdm, bdg, bdu, lddgu);
    return mr_cuda_launched(c, "swiglu backward");
}

/* ---- rows -------------------------------------------------------------------------------------------------------- */

/* The rows of both sides: row i of the launch reads src row from[i] and writes dst row to[i]; NULL means i itself. */
struct row_args {
    int cols, lds, ldd;
    const bf16 *src;
    bf16 *dst;
    const int32_t *from, *to;
};

template <int ADD>
__global__ void __launch_bounds__(THREADS) rows8(struct row_args p)
{
    int i = (blockIdx.y * THREADS + threadIdx.x) * 8;
    const bf16 *s = p.src + (size_t)(p.from ? p.from[blockIdx.x] : (int)blockIdx.x) * p.lds + i;
    bf16 *d = p.dst + (size_t)(p.to ? p.to[blockIdx.x] : (int)blockIdx.x) * p.ldd + i;

    if (i >= p.cols)
        return;
    if (ADD) {
        float a[8], b[8];

        unpack8(*(const uint4 *)s, a);
        unpack8(*(const uint4 *)d, b);
        for (int e = 0; e < 8; e++)
            a[e] += b[e];
        *(uint4 *)d = pack8(a);
    } else {
        *(uint4 *)d = *(const uint4 *)s;
    }
}

template <int ADD>
__global__ void __launch_bounds__(THREADS) rows1(struct row_args p)
{
    int i = blockIdx.y * THREADS + threadIdx.x;
    const bf16 *s = p.src + (size_t)(p.from ? p.from[blockIdx.x] : (int)blockIdx.x) * p.lds + i;
    bf16 *d = p.dst + (size_t)(p.to ? p.to[blockIdx.x] : (int)blockIdx.x) * p.ldd + i;

    if (i < p.cols)
        *d = ADD ? bf_of(bf_f32(*s) + bf_f32(*d)) : *s;
}

static int move_rows(struct mr_cuda *c, int rows, const struct row_args *p, int add, const char *what)
{
    int wide = p->cols % 8 == 0 && p->lds % 8 == 0 && p->ldd % 8 == 0 && mr_cuda_aligned16(p->src) && mr_cuda_aligned16(p->dst);

    if (c->err)
        return c->err;
    if (rows < 0 || p->cols <= 0 || p->lds < p->cols || p->ldd < p->cols)
        return -EINVAL;
    if (rows == 0)
        return 0;
    if (wide && add)
        MR_LAUNCH(rows8<1>, grid_rows(rows, p->cols / 8), THREADS, 0, c->stream, *p);
    else if (wide)
        MR_LAUNCH(rows8<0>, grid_rows(rows, p->cols / 8), THREADS, 0, c->stream, *p);
    else if (add)
        MR_LAUNCH(rows1<1>, grid_rows(rows, p->cols), THREADS, 0, c->stream, *p);
    else
        MR_LAUNCH(rows1<0>, grid_rows(rows, p->cols), THREADS, 0, c->stream, *p);
    return mr_cuda_launched(c, what);
}

int mr_cuda_embed(struct mr_k *k, int n, int H, const void *table, const int32_t *ids, void *out)
{
    struct row_args p = {H, H, H, (const bf16 *)table, (bf16 *)out, ids, NULL};

    return move_rows(mr_cuda_of(k), n, &p, 0, "embedding");
}

int mr_cuda_copy2d(struct mr_k *k, int rows, int cols, const void *src, int lds, void *dst, int ldd)
{
    struct row_args p = {cols, lds, ldd, (const bf16 *)src, (bf16 *)dst, NULL, NULL};

    return move_rows(mr_cuda_of(k), rows, &p, 0, "row copy");
}

int mr_cuda_gather(struct mr_k *k, int n, int cols, const void *src, int lds, const int32_t *idx, void *dst)
{
    struct row_args p = {cols, lds, cols, (const bf16 *)src, (bf16 *)dst, idx, NULL};

    return move_rows(mr_cuda_of(k), n, &p, 0, "gather");
}

int mr_cuda_scatter_add(struct mr_k *k, int n, int cols, const void *src, const int32_t *idx, void *dst, int ldd)
{
    struct row_args p = {cols, cols, ldd, (const bf16 *)src, (bf16 *)dst, NULL, idx};

    return move_rows(mr_cuda_of(k), n, &p, 1, "scatter");
}

/* ---- flat vectors ------------------------------------------------------------------------------------------------ */

__global__ void __launch_bounds__(THREADS) add_flat(size_t n, bf16 *x, const bf16 *y, int wide)
{
    size_t i = ((size_t)blockIdx.x * THREADS + threadIdx.x) * 8;

    if (wide && i + 8 <= n) {
        float a[8], b[8];

        unpack8(*(const uint4 *)(x + i), a);
        unpack8(*(const uint4 *)(y + i), b);
        for (int e = 0; e < 8; e++)
            a[e] += b[e];
        *(uint4 *)(x + i) = pack8(a);
        return;
    }
    for (size_t j = i; j < n && j < i + 8; j++)
        x[j] = bf_of(bf_f32(x[j]) + bf_f32(y[j]));
}

__global__ void __launch_bounds__(THREADS) to_bf16(size_t n, bf16 *dst, const float *src, int wide)
{
    size_t i = ((size_t)blockIdx.x * THREADS + threadIdx.x) * 8;

    if (wide && i + 8 <= n) {
        float4 a = *(const float4 *)(src + i), b = *(const float4 *)(src + i + 4);

        *(uint4 *)(dst + i) = make_uint4(bf_pack(a.x, a.y), bf_pack(a.z, a.w), bf_pack(b.x, b.y), bf_pack(b.z, b.w));
        return;
    }
    for (size_t j = i; j < n && j < i + 8; j++)
        dst[j] = bf_of(src[j]);
}

__global__ void __launch_bounds__(THREADS) to_f32(size_t n, float *dst, const bf16 *src)
{
    size_t i = ((size_t)blockIdx.x * THREADS + threadIdx.x) * 4;

    for (size_t j = i; j < n && j < i + 4; j++)
        dst[j] = bf_f32(src[j]);
}

__global__ void __launch_bounds__(THREADS) half_to_bf16(size_t n, bf16 *dst, const uint16_t *src)
{
    size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x;

    if (i < n)
        dst[i] = bf_of(__half2float(__ushort_as_half(src[i])));
}

static unsigned grid_flat(size_t n, int per_thread)
{
    return (unsigned)((n + (size_t)THREADS * per_thread - 1) / ((size_t)THREADS * per_thread));
}

int mr_cuda_add(struct mr_k *k, size_t n, void *x, const void *y)
{
    struct mr_cuda *c = mr_cuda_of(k);

    if (c->err || n == 0)
        return c->err;
    MR_LAUNCH(add_flat, grid_flat(n, 8), THREADS, 0, c->stream, n, (bf16 *)x, (const bf16 *)y,
              mr_cuda_aligned16(x) && mr_cuda_aligned16(y));
    return mr_cuda_launched(c, "add");
}

int mr_cuda_f32_to_act(struct mr_k *k, void *dst, const float *src, size_t n)
{
    struct mr_cuda *c = mr_cuda_of(k);

    if (c->err || n == 0)
        return c->err;
    MR_LAUNCH(to_bf16, grid_flat(n, 8), THREADS, 0, c->stream, n, (bf16 *)dst, src, mr_cuda_aligned16(dst) && mr_cuda_aligned16(src));
    return mr_cuda_launched(c, "conversion to bf16");
}

int mr_cuda_act_to_f32(struct mr_k *k, float *dst, const void *src, size_t n)
{
    struct mr_cuda *c = mr_cuda_of(k);

    if (c->err || n == 0)
        return c->err;
    MR_LAUNCH(to_f32, grid_flat(n, 4), THREADS, 0, c->stream, n, dst, (const bf16 *)src);
    return mr_cuda_launched(c, "conversion to f32");
}

/* Weights from the host: bf16 goes straight to its place; f32 and f16 go through scratch, 16 MiB at a time. */
int mr_cuda_load(struct mr_k *k, void *dst, const void *host_src, enum mr_k_dtype dtype, size_t n)
{
    struct mr_cuda *c = mr_cuda_of(k);
    const size_t chunk = (size_t)4 << 20;
    size_t bytes = dtype == MR_K_F32 ? 4 : 2;

    if (c->err || n == 0)
        return c->err;
    if (dtype == MR_K_BF16)
        return mr_cuda_upload(c, dst, host_src, n * 2);
    if (dtype != MR_K_F32 && dtype != MR_K_F16)
        return -EINVAL;
    for (size_t at = 0; at < n && !c->err; at += chunk) {
        size_t m = n - at < chunk ? n - at : chunk;
        void *tmp = mr_cuda_scratch(c, (n < chunk ? n : chunk) * bytes);

        if (!tmp || mr_cuda_upload(c, tmp, (const unsigned char *)host_src + at * bytes, m * bytes))
            break;
        if (dtype == MR_K_F32)
            mr_cuda_f32_to_act(k, (bf16 *)dst + at, (const float *)tmp, m);
        else
            MR_LAUNCH(half_to_bf16, grid_flat(m, 1), THREADS, 0, c->stream, m, (bf16 *)dst + at, (const uint16_t *)tmp);
        mr_cuda_launched(c, "weight conversion");
    }
    return c->err;
}
