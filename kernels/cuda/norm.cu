/* RMSNorm, forward (with a fused residual add) and backward.
 *
 * One block a row; rows of at most 8192 elements, a multiple of 8, stay in registers between the reduction and the output, so that every
 * byte is read once.  Any other row length takes the plain kernels below, which read it again.  The result is rounded to bf16 once, after
 * the weight (Hugging Face rounds before it too; one rounding is nearer to the f32 reference).
 * The weight gradient is a column sum: blocks take rows in turn, keep their columns in registers, and write one partial row each. */
#include "kernels/cuda/reduce.cuh"

enum { THREADS = 256, ROW_MAX = THREADS * 8 * 4 };

/* ---- forward ----------------------------------------------------------------------------------------------------- */

/* x += d when d; y = norm(x) when y. */
template <int V>
__global__ void __launch_bounds__(THREADS) norm_fwd(int H, bf16 *x, const bf16 *d, const bf16 *w, float eps, bf16 *y, float *rstd)
{
    __shared__ float tmp[32];
    float f[V][8], ss = 0.0f, r;

    x += (size_t)blockIdx.x * H;
    for (int v = 0; v < V; v++) {
        int i = (v * blockDim.x + threadIdx.x) * 8;

        if (i >= H)
            continue;
        unpack8(*(const uint4 *)(x + i), f[v]);
        if (d) {
            float g[8];

            unpack8(*(const uint4 *)(d + (size_t)blockIdx.x * H + i), g);
            for (int e = 0; e < 8; e++)
                f[v][e] += g[e];
            uint4 sum = pack8(f[v]);
            *(uint4 *)(x + i) = sum;
            unpack8(sum, f[v]);
        }
        for (int e = 0; e < 8; e++)
            ss += f[v][e] * f[v][e];
    }
    if (!y)
        return;
    r = rsqrtf(block_sum(ss, tmp) / H + eps);
    if (rstd && threadIdx.x == 0)
        rstd[blockIdx.x] = r;
    y += (size_t)blockIdx.x * H;
    for (int v = 0; v < V; v++) {
        int i = (v * blockDim.x + threadIdx.x) * 8;
        float g[8];

        if (i >= H)
            continue;
        unpack8(*(const uint4 *)(w + i), g);
        for (int e = 0; e < 8; e++)
            g[e] *= f[v][e] * r;
        *(uint4 *)(y + i) = pack8(g);
    }
}

__global__ void __launch_bounds__(THREADS) norm_fwd_any(int H, bf16 *x, const bf16 *d, const bf16 *w, float eps, bf16 *y, float *rstd)
{
    __shared__ float tmp[32];
    size_t row = (size_t)blockIdx.x * H;
    float ss = 0.0f, r;

    for (int i = threadIdx.x; i < H; i += blockDim.x) {
        if (d)
            x[row + i] = bf_of(bf_f32(x[row + i]) + bf_f32(d[row + i]));
        ss += bf_f32(x[row + i]) * bf_f32(x[row + i]);
    }
    if (!y)
        return;
    r = rsqrtf(block_sum(ss, tmp) / H + eps);
    if (rstd && threadIdx.x == 0)
        rstd[blockIdx.x] = r;
    for (int i = threadIdx.x; i < H; i += blockDim.x)
        y[row + i] = bf_of(bf_f32(x[row + i]) * r * bf_f32(w[i]));
}

static int in_registers(int H, const void *a, const void *b, const void *c, const void *d)
{
    return H % 8 == 0 && H <= ROW_MAX && mr_cuda_aligned16(a) && mr_cuda_aligned16(b) && mr_cuda_aligned16(c) && mr_cuda_aligned16(d);
}

static int forward(struct mr_cuda *c, int rows, int H, bf16 *x, const bf16 *d, const bf16 *w, float eps, bf16 *y, float *rstd)
{
    int vecs = H / 8;

    if (c->err)
        return c->err;
    if (rows < 0 || H <= 0)
        return -EINVAL;
    if (rows == 0)
        return 0;
    if (!in_registers(H, x, d, w, y))
        MR_LAUNCH(norm_fwd_any, rows, THREADS, 0, c->stream, H, x, d, w, eps, y, rstd);
    else if (vecs <= THREADS)
        MR_LAUNCH(norm_fwd<1>, rows, mr_cuda_div_up(vecs, 32) * 32, 0, c->stream, H, x, d, w, eps, y, rstd);
    else if (vecs <= 2 * THREADS)
        MR_LAUNCH(norm_fwd<2>, rows, mr_cuda_div_up(vecs, 64) * 32, 0, c->stream, H, x, d, w, eps, y, rstd);
    else
        MR_LAUNCH(norm_fwd<4>, rows, mr_cuda_div_up(vecs, 128) * 32, 0, c->stream, H, x, d, w, eps, y, rstd);
    return mr_cuda_launched(c, "rmsnorm");
}

int mr_cuda_rmsnorm(struct mr_k *k, int rows, int H, const void *x, const void *w, float eps, void *y, float *rstd)
{
    return forward(mr_cuda_of(k), rows, H, (bf16 *)x, NULL, (const bf16 *)w, eps, (bf16 *)y, rstd);
}

int mr_cuda_add_rmsnorm(struct mr_k *k, int rows, int H, void *x, const void *d, const void *w, float eps, void *y, float *rstd)
{
    return forward(mr_cuda_of(k), rows, H, (bf16 *)x, (const bf16 *)d, (const bf16 *)w, eps, (bf16 *)y, rstd);
}

/* ---- backward ---------------------------------------------------------------------------------------------------- */

/* One row of norm_bwd: this thread's part of g.x, and the weight gradient.  xf and g come back for the output. */
__device__ static inline float bwd_row(const bf16 *x, const bf16 *dy, const bf16 *w, float r, float xf[8], float g[8], float acc[8])
{
    float wf[8], dot = 0.0f;

    unpack8(*(const uint4 *)x, xf);
    unpack8(*(const uint4 *)dy, g);
    unpack8(*(const uint4 *)w, wf);
    for (int e = 0; e < 8; e++) {
        acc[e] += g[e] * xf[e] * r;
        g[e] *= wf[e];
        dot += g[e] * xf[e];
    }
    return dot;
}

template <int V>
__global__ void __launch_bounds__(THREADS) norm_bwd(int rows, int H, const bf16 *x, const bf16 *w, const float *rstd, const bf16 *dy,
                                                    bf16 *dx, int add, float *partial)
{
    __shared__ float tmp[32];
    float acc[V][8] = {};

    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
        float xf[V][8], g[V][8], dot = 0.0f, r = rstd[row], t;
        size_t at = (size_t)row * H;

        for (int v = 0; v < V; v++) {
            int i = (v * blockDim.x + threadIdx.x) * 8;

            if (i < H)
                dot += bwd_row(x + at + i, dy + at + i, w + i, r, xf[v], g[v], acc[v]);
        }
        if (!dx)
            continue;
        t = block_sum(dot, tmp) / H * r * r;
        for (int v = 0; v < V; v++) {
            int i = (v * blockDim.x + threadIdx.x) * 8;
            float old[8] = {};

            if (i >= H)
                continue;
            if (add)
                unpack8(*(const uint4 *)(dx + at + i), old);
            for (int e = 0; e < 8; e++)
                old[e] += r * (g[v][e] - xf[v][e] * t);
            *(uint4 *)(dx + at + i) = pack8(old);
        }
        __syncthreads();               /* tmp is written again */
    }
    for (int v = 0; v < V; v++) {
        int i = (v * blockDim.x + threadIdx.x) * 8;

        for (int e = 0; e < 8 && i < H; e++)
            partial[(size_t)blockIdx.x * H + i + e] = acc[v][e];
    }
}

__global__ void __launch_bounds__(THREADS) norm_bwd_any(int rows, int H, const bf16 *x, const bf16 *w, const float *rstd, const bf16 *dy,
                                                        bf16 *dx, int add, float *partial)
{
    __shared__ float tmp[32];

    partial += (size_t)blockIdx.x * H;
    for (int i = threadIdx.x; i < H; i += blockDim.x)
        partial[i] = 0.0f;
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
        float dot = 0.0f, r = rstd[row], t;
        size_t at = (size_t)row * H;

        for (int i = threadIdx.x; i < H; i += blockDim.x) {
            float g = bf_f32(dy[at + i]), xf = bf_f32(x[at + i]);

            partial[i] += g * xf * r;
            dot += g * bf_f32(w[i]) * xf;
        }
        if (!dx)
            continue;
        t = block_sum(dot, tmp) / H * r * r;
        for (int i = threadIdx.x; i < H; i += blockDim.x) {
            float v = r * (bf_f32(dy[at + i]) * bf_f32(w[i]) - bf_f32(x[at + i]) * t);

            dx[at + i] = bf_of(v + (add ? bf_f32(dx[at + i]) : 0.0f));
        }
        __syncthreads();
    }
}

int mr_cuda_rmsnorm_bwd(struct mr_k *k, int rows, int H, const void *x, const void *w, const float *rstd, const void *dy, void *dx,
                        int acc, float *dw)
{
    struct mr_cuda *c = mr_cuda_of(k);
    const bf16 *bx = (const bf16 *)x, *bw = (const bf16 *)w, *bdy = (const bf16 *)dy;
    bf16 *bdx = (bf16 *)dx;
    int grid = rows < 4 * c->sms ? rows : 4 * c->sms, vecs = H / 8;
    float *partial;

    if (c->err)
        return c->err;
    if (rows < 0 || H <= 0)
        return -EINVAL;
    if (rows == 0)
        return 0;
    partial = (float *)mr_cuda_scratch(c, (size_t)grid * H * sizeof(float));
    if (!partial)
        return c->err;
    if (!in_registers(H, x, w, dy, dx))
        MR_LAUNCH(norm_bwd_any, grid, THREADS, 0, c->stream, rows, H, bx, bw, rstd, bdy, bdx, acc, partial);
    else if (vecs <= THREADS)
        MR_LAUNCH(norm_bwd<1>, grid, mr_cuda_div_up(vecs, 32) * 32, 0, c->stream, rows, H, bx, bw, rstd, bdy, bdx, acc, partial);
    else if (vecs <= 2 * THREADS)
        MR_LAUNCH(norm_bwd<2>, grid, mr_cuda_div_up(vecs, 64) * 32, 0, c->stream, rows, H, bx, bw, rstd, bdy, bdx, acc, partial);
    else
        MR_LAUNCH(norm_bwd<4>, grid, mr_cuda_div_up(vecs, 128) * 32, 0, c->stream, rows, H, bx, bw, rstd, bdy, bdx, acc, partial);
    if (mr_cuda_launched(c, "rmsnorm backward"))
        return c->err;
    return mr_cuda_column_sum(c, grid, H, partial, dw);
}

/* ---- column sums ------------------------------------------------------------------------------------------------- */

/* 32 columns a block; 16 threads a column take every 16th row, then one adds the 16 in order. */
__global__ void __launch_bounds__(512) column_sum(int rows, int cols, const float *partial, float *dw)
{
    __shared__ float part[16][33];
    int tx = threadIdx.x % 32, ty = threadIdx.x / 32, col = blockIdx.x * 32 + tx;
    float s = 0.0f;

    for (int r = ty; r < rows && col < cols; r += 16)
        s += partial[(size_t)r * cols + col];
    part[ty][tx] = s;
    __syncthreads();
    if (ty == 0 && col < cols) {
        for (int i = 1; i < 16; i++)
            s += part[i][tx];
        dw[col] += s;
    }
}

int mr_cuda_column_sum(struct mr_cuda *c, int rows, int cols, const float *partial, float *dw)
{
    MR_LAUNCH(column_sum, mr_cuda_div_up(cols, 32), 512, 0, c->stream, rows, cols, partial, dw);
    return mr_cuda_launched(c, "column sum");
}
