/* The optimizer's operations: sum of squares, ordered sum of several gradients, AdamW.  All f32, bound by memory bandwidth: four elements
 * (16 bytes a stream) a thread when every pointer allows it. */
#include "kernels/cuda/ctx.cuh"

enum { THREADS = 256, SQ_BLOCKS = 1024, SRC_MAX = 16 };

static unsigned grid4(size_t n)
{
    return (unsigned)((n + THREADS * 4 - 1) / (THREADS * 4));
}

/* ---- sum of squares ---------------------------------------------------------------------------------------------- */

__device__ static inline double block_sum_f64(double v, double *tmp)
{
    int warps = blockDim.x / 32;

    for (int o = 16; o; o >>= 1)
        v += __shfl_xor_sync(0xffffffffu, v, o);
    if (threadIdx.x % 32 == 0)
        tmp[threadIdx.x / 32] = v;
    __syncthreads();
    v = 0.0;
    for (int i = 0; i < warps; i++)
        v += tmp[i];
    return v;
}

/* A thread adds runs of 16 squares in f32 and the runs in f64: f64 adds are too slow to do them all. */
__global__ void __launch_bounds__(THREADS) sumsq_part(size_t n, const float *x, int wide, double *part)
{
    __shared__ double tmp[32];
    size_t step = (size_t)gridDim.x * THREADS * 4, at = ((size_t)blockIdx.x * THREADS + threadIdx.x) * 4;
    double total = 0.0;
    float run = 0.0f;
    int runs = 0;

    for (; at < n; at += step) {
        if (wide && at + 4 <= n) {
            float4 f = *(const float4 *)(x + at);

            run += f.x * f.x + f.y * f.y + (f.z * f.z + f.w * f.w);
        } else {
            for (size_t j = at; j < n && j < at + 4; j++)
                run += x[j] * x[j];
        }
        if (++runs % 4 == 0) {
            total += run;
            run = 0.0f;
        }
    }
    total = block_sum_f64(total + run, tmp);
    if (threadIdx.x == 0)
        part[blockIdx.x] = total;
}

__global__ void __launch_bounds__(THREADS) sumsq_all(int n, double *part)
{
    __shared__ double tmp[32];
    double s = 0.0;

    for (int i = threadIdx.x; i < n; i += THREADS)
        s += part[i];
    s = block_sum_f64(s, tmp);
    if (threadIdx.x == 0)
        part[n] = s;
}

int mr_cuda_sumsq(struct mr_k *k, size_t n, const float *x, double *host_out)
{
    struct mr_cuda *c = mr_cuda_of(k);
    int blocks = grid4(n) < SQ_BLOCKS ? (int)grid4(n) : SQ_BLOCKS;
    double *part;

    *host_out = 0.0;
    if (c->err || n == 0)
        return c->err;
    part = (double *)mr_cuda_scratch(c, (SQ_BLOCKS + 1) * sizeof *part);
    if (!part)
        return c->err;
    MR_LAUNCH(sumsq_part, blocks, THREADS, 0, c->stream, n, x, mr_cuda_aligned16(x), part);
    MR_LAUNCH(sumsq_all, 1, THREADS, 0, c->stream, blocks, part);
    if (mr_cuda_launched(c, "sum of squares") ||
        mr_cuda_check(c, cudaMemcpyAsync(c->host_sum, part + blocks, sizeof *part, cudaMemcpyDeviceToHost, c->stream), "sum of squares") ||
        mr_cuda_check(c, cudaStreamSynchronize(c->stream), "sum of squares"))
        return c->err;
    *host_out = *c->host_sum;
    return 0;
}

/* ---- ordered sum ------------------------------------------------------------------------------------------------- */

struct sources {
    const float *p[SRC_MAX];
    int n;
};

__global__ void __launch_bounds__(THREADS) sum_sources(size_t n, struct sources s, float *dst, int wide)
{
    size_t i = ((size_t)blockIdx.x * THREADS + threadIdx.x) * 4;

    if (wide && i + 4 <= n) {
        float4 a = *(const float4 *)(s.p[0] + i);

        for (int j = 1; j < s.n; j++) {
            float4 b = *(const float4 *)(s.p[j] + i);

            a.x += b.x, a.y += b.y, a.z += b.z, a.w += b.w;
        }
        *(float4 *)(dst + i) = a;
        return;
    }
    for (size_t e = i; e < n && e < i + 4; e++) {
        float a = s.p[0][e];

        for (int j = 1; j < s.n; j++)
            a += s.p[j][e];
        dst[e] = a;
    }
}

int mr_cuda_sum(struct mr_k *k, size_t n, const float *const *src, int n_src, float *dst)
{
    struct mr_cuda *c = mr_cuda_of(k);
    struct sources s = {};
    int wide = mr_cuda_aligned16(dst);

    if (c->err)
        return c->err;
    if (n_src < 1 || n_src > SRC_MAX)
        return -EINVAL;
    if (n == 0)
        return 0;
    s.n = n_src;
    for (int i = 0; i < n_src; i++) {
        s.p[i] = src[i];
        wide = wide && mr_cuda_aligned16(src[i]);
    }
    MR_LAUNCH(sum_sources, grid4(n), THREADS, 0, c->stream, n, s, dst, wide);
    return mr_cuda_launched(c, "sum");
}

/* ---- AdamW ------------------------------------------------------------------------------------------------------- */

struct adamw_args {
    size_t n;
    const float *p, *m, *v, *g;
    float *p2, *m2, *v2;
    float scale, lr, b1, b2, eps, wd, bc1, bc2;
};

__device__ static inline void adamw_one(const struct adamw_args *a, float p, float m, float v, float g, float *p2, float *m2, float *v2)
{
    g *= a->scale;
    m = a->b1 * m + (1.0f - a->b1) * g;
    v = a->b2 * v + (1.0f - a->b2) * g * g;
    *p2 = p * (1.0f - a->lr * a->wd) - a->lr * (m / a->bc1) / (sqrtf(v / a->bc2) + a->eps);
    *m2 = m;
    *v2 = v;
}

__global__ void __launch_bounds__(THREADS) adamw_step(struct adamw_args a, int wide)
{
    size_t i = ((size_t)blockIdx.x * THREADS + threadIdx.x) * 4;

    if (wide && i + 4 <= a.n) {
        float4 p = *(const float4 *)(a.p + i), m = *(const float4 *)(a.m + i), v = *(const float4 *)(a.v + i);
        float4 g = *(const float4 *)(a.g + i);

        adamw_one(&a, p.x, m.x, v.x, g.x, &p.x, &m.x, &v.x);
        adamw_one(&a, p.y, m.y, v.y, g.y, &p.y, &m.y, &v.y);
        adamw_one(&a, p.z, m.z, v.z, g.z, &p.z, &m.z, &v.z);
        adamw_one(&a, p.w, m.w, v.w, g.w, &p.w, &m.w, &v.w);
        *(float4 *)(a.p2 + i) = p;
        *(float4 *)(a.m2 + i) = m;
        *(float4 *)(a.v2 + i) = v;
        return;
    }
    for (size_t j = i; j < a.n && j < i + 4; j++)
        adamw_one(&a, a.p[j], a.m[j], a.v[j], a.g[j], a.p2 + j, a.m2 + j, a.v2 + j);
}

int mr_cuda_adamw(struct mr_k *k, size_t n, const float *p, const float *m, const float *v, const float *grad, float scale, float lr,
                  float b1, float b2, float eps, float wd, float bc1, float bc2, float *p2, float *m2, float *v2)
{
    struct mr_cuda *c = mr_cuda_of(k);
    struct adamw_args a = {n, p, m, v, grad, p2, m2, v2, scale, lr, b1, b2, eps, wd, bc1, bc2};
    int wide = mr_cuda_aligned16(p) && mr_cuda_aligned16(m) && mr_cuda_aligned16(v) && mr_cuda_aligned16(grad) && mr_cuda_aligned16(p2) &&
               mr_cuda_aligned16(m2) && mr_cuda_aligned16(v2);

    if (c->err || n == 0)
        return c->err;
    MR_LAUNCH(adamw_step, grid4(n), THREADS, 0, c->stream, a, wide);
    return mr_cuda_launched(c, "adamw");
}
