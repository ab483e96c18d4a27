/* Cross-entropy against the frozen head, in chunks of rows.
 *
 * A chunk's logits are one product with an f32 result; one launch then finds log-sum-exp, cross-entropy and argmax of every row and turns
 * the logits, in place, into bf16 gradients; a second product brings those back to the rows.  So each logit is computed once, and scratch
 * holds one chunk: at most 2048 rows and about 1.25 GiB, the size from which the products are as fast as the whole one.
 *
 * In place: gradients are half as wide as logits, and a block goes through its row front to back, so that what it writes lies in the part
 * that all its threads have read (they read one piece ahead of what they write, with a barrier in between). */
#include "kernels/cuda/ctx.cuh"

#include <climits>
#include <cmath>

enum { THREADS = 512, PIECE = THREADS * 8, ROWS_MAX = 2048 };

static const float LOG2E = 1.44269504088896340736f;

struct best {                          /* of the logits seen so far */
    float max, sum;                    /* sum of exp(z - max); max -inf: nothing seen */
    int at;                            /* smallest index with z == max */
};

__device__ static inline struct best merge(struct best a, struct best b)
{
    struct best r = a;

    if (b.max > a.max || (b.max == a.max && b.at < a.at)) {
        r.max = b.max;
        r.at = b.at;
    }
    r.sum = (a.max == -INFINITY ? 0.0f : a.sum * exp2f((a.max - r.max) * LOG2E)) +
            (b.max == -INFINITY ? 0.0f : b.sum * exp2f((b.max - r.max) * LOG2E));
    return r;
}

__device__ static inline struct best merge_warp(struct best b)
{
    for (int o = 16; o; o >>= 1) {
        struct best other;

        other.max = __shfl_xor_sync(0xffffffffu, b.max, o);
        other.sum = __shfl_xor_sync(0xffffffffu, b.sum, o);
        other.at = __shfl_xor_sync(0xffffffffu, b.at, o);
        b = merge(b, other);
    }
    return b;
}

/* Eight logits from z[i]; beyond V they count as -inf. */
__device__ static inline void load8(const float *z, int i, int V, float f[8])
{
    if (i + 8 <= V) {
        *(float4 *)f = *(const float4 *)(z + i);
        *(float4 *)(f + 4) = *(const float4 *)(z + i + 4);
        return;
    }
    for (int e = 0; e < 8; e++)
        f[e] = i + e < V ? z[i + e] : -INFINITY;
}

/* This thread's share of the row, which is every PIECE-th run of eight. */
__device__ static inline struct best scan_row(const float *z, int V)
{
    struct best b = {-INFINITY, 0.0f, INT_MAX};

    for (int i = threadIdx.x * 8; i < V; i += PIECE) {
        float f[8], top = b.max, part = 0.0f;

        load8(z, i, V, f);
        for (int e = 0; e < 8; e++)
            if (f[e] > top) {
                top = f[e];
                b.at = i + e;
            }
        for (int e = 0; e < 8; e++)
            part += exp2f((f[e] - top) * LOG2E);
        b.sum = part + (b.max == -INFINITY ? 0.0f : b.sum * exp2f((b.max - top) * LOG2E));
        b.max = top;
    }
    return b;
}

/* Logits to gradients (softmax - onehot) * weight, bf16, from the front of the same row.  Weight 0 gives exact zeros. */
__device__ static inline void gradient_row(float *z, int V, float lse, int label, float weight)
{
    float f[8], next[8];

    load8(z, threadIdx.x * 8, V, f);
    for (int base = 0; base < V; base += PIECE) {
        int i = base + threadIdx.x * 8;

        load8(z, i + PIECE, V, next);
        __syncthreads();
        for (int e = 0; e < 8; e++) {
            float p = exp2f((f[e] - lse) * LOG2E);

            f[e] = weight == 0.0f ? 0.0f : weight * (i + e == label ? p - 1.0f : p);
        }
        if (i < V)
            *(uint4 *)((bf16 *)z + i) = pack8(f);
        for (int e = 0; e < 8; e++)
            f[e] = next[e];
    }
}

__global__ void __launch_bounds__(THREADS) ce_rows(int V, int ldz, float *z, const int32_t *labels, const float *weight, float *ce,
                                                   int32_t *argmax, int gradient)
{
    __shared__ struct best warp_best[THREADS / 32];
    int label = labels[blockIdx.x];
    struct best b;
    float lse;

    z += (size_t)blockIdx.x * ldz;
    b = merge_warp(scan_row(z, V));
    if (threadIdx.x % 32 == 0)
        warp_best[threadIdx.x / 32] = b;
    __syncthreads();
    b = warp_best[0];
    for (int i = 1; i < THREADS / 32; i++)
        b = merge(b, warp_best[i]);
    lse = b.max + logf(b.sum);
    if (threadIdx.x == 0) {
        ce[blockIdx.x] = label < 0 ? 0.0f : label < V ? lse - z[label] : NAN;
        if (argmax)
            argmax[blockIdx.x] = label < 0 ? -1 : b.at;
    }
    if (gradient)
        gradient_row(z, V, lse, label, label < 0 ? 0.0f : weight[blockIdx.x]);
}

/* ---- host -------------------------------------------------------------------------------------------------------- */

static int row_stride(int V)
{
    return (V + 7) / 8 * 8;
}

/* Rows of a chunk: equal chunks, a multiple of 64 so that the products have whole tiles. */
static int chunk_rows(int n, int V)
{
    long long fit = ((long long)1280 << 20) / ((long long)row_stride(V) * 4) / 128 * 128;
    int most = fit < 128 ? 128 : fit > ROWS_MAX ? (int)ROWS_MAX : (int)fit, chunks = mr_cuda_div_up(n, most);

    return chunks <= 1 ? n : mr_cuda_div_up(mr_cuda_div_up(n, chunks), 64) * 64;
}

size_t mr_cuda_ce_scratch(struct mr_k *k, int n, int H, int V)
{
    (void)k;
    (void)H;
    return n > 0 && V > 0 ? (size_t)chunk_rows(n, V) * row_stride(V) * sizeof(float) : 0;
}

int mr_cuda_ce(struct mr_k *k, int n, int H, int V, const void *x, const void *W, const int32_t *labels, const float *weight,
               void *scratch, float *ce, int32_t *argmax, void *dx)
{
    struct mr_cuda *c = mr_cuda_of(k);
    const bf16 *bx = (const bf16 *)x;
    bf16 *bdx = (bf16 *)dx;
    float *z = (float *)scratch;
    int ldz = row_stride(V), chunk;

    if (c->err)
        return c->err;
    if (n < 0 || H <= 0 || V <= 0 || (n > 0 && !mr_cuda_aligned16(scratch)) || (dx && !weight))
        return -EINVAL;
    if (n == 0)
        return 0;
    chunk = chunk_rows(n, V);
    for (int at = 0; at < n; at += chunk) {
        int rows = n - at < chunk ? n - at : chunk, e;

        e = mr_cuda_linear_f32(c, rows, V, H, bx + (size_t)at * H, H, W, z, ldz);
        if (e)
            return e;
        MR_LAUNCH(ce_rows, rows, THREADS, 0, c->stream, V, ldz, z, labels + at, weight ? weight + at : NULL, ce + at,
                  argmax ? argmax + at : NULL, dx != NULL);
        if (mr_cuda_launched(c, "cross-entropy"))
            return c->err;
        e = dx ? mr_cuda_linear_dx(k, rows, V, H, z, 2 * ldz, W, bdx + (size_t)at * H, H, 0) : 0;
        if (e)
            return e;
    }
    return 0;
}
