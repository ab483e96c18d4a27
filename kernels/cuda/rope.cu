/* Per-head RMSNorm fused with rotate-half RoPE, forward and backward.
 *
 * Head sizes 16, 32, 64, 128 (the tuned path): hd/16 neighbouring lanes share a head; each holds eight elements of its first half and the
 * eight that RoPE pairs them with in the second, so that rotation needs no exchange and all traffic is 16 bytes wide.  Other even head
 * sizes take one warp a head and read twice.  All arithmetic is f32 with one rounding at the end. */
#include "kernels/cuda/reduce.cuh"

enum { THREADS = 256, HD_MAX = 256, HEADS_MAX = 1 << 26 };   /* rows * heads: keeps index arithmetic in 32 bits */

struct rope_args {
    int rows, nh, hd, ldx;
    bf16 *x;                           /* forward: in and out; backward: gradient, in and out */
    const bf16 *w;
    const int32_t *pos;
    const float *cs;
    float eps;
    bf16 *pre;                         /* (rows, nh*hd) */
    float *rstd;                       /* (rows, nh) */
    float *partial;                    /* backward: (blocks, hd) */
};

struct half_pair {                     /* eight elements of either half of a head */
    float a[8], b[8];
};

__device__ static inline void load_pair(const bf16 *p, int half, struct half_pair *f)
{
    unpack8(*(const uint4 *)p, f->a);
    unpack8(*(const uint4 *)(p + half), f->b);
}

__device__ static inline void store_pair(bf16 *p, int half, const struct half_pair *f)
{
    *(uint4 *)p = pack8(f->a);
    *(uint4 *)(p + half) = pack8(f->b);
}

/* sign +1 rotates by +pos, -1 back. */
__device__ static inline void rotate(struct half_pair *f, const float *cs, int half, float sign)
{
    for (int e = 0; e < 8; e++) {
        float c = cs[e], s = sign * cs[half + e], a = f->a[e], b = f->b[e];

        f->a[e] = a * c - b * s;
        f->b[e] = b * c + a * s;
    }
}

/* Sum over the `lanes` (a power of two) neighbouring lanes of a head. */
__device__ static inline float head_sum(float v, int lanes)
{
    for (int o = lanes / 2; o; o >>= 1)
        v += __shfl_xor_sync(0xffffffffu, v, o);
    return v;
}

/* ---- forward ----------------------------------------------------------------------------------------------------- */

__global__ void __launch_bounds__(THREADS) rope_fwd(struct rope_args p)
{
    int lanes = p.hd / 16, half = p.hd / 2, l = threadIdx.x % lanes;
    int head = ((int)blockIdx.x * THREADS + threadIdx.x) / lanes;
    int row = head / p.nh, h = head % p.nh, live = row < p.rows;
    bf16 *x = p.x + (size_t)row * p.ldx + h * p.hd + l * 8;
    struct half_pair f, w;
    float ss = 0.0f, r;

    if (live) {
        load_pair(x, half, &f);
        if (p.pre)
            store_pair(p.pre + (size_t)head * p.hd + l * 8, half, &f);
        for (int e = 0; e < 8; e++)
            ss += f.a[e] * f.a[e] + f.b[e] * f.b[e];
    }
    ss = head_sum(ss, lanes);
    if (!live)
        return;
    if (p.w) {
        r = rsqrtf(ss / p.hd + p.eps);
        if (p.rstd && l == 0)
            p.rstd[head] = r;
        load_pair(p.w + l * 8, half, &w);
        for (int e = 0; e < 8; e++) {
            f.a[e] *= r * w.a[e];
            f.b[e] *= r * w.b[e];
        }
    }
    if (p.cs)
        rotate(&f, p.cs + (size_t)p.pos[row] * p.hd + l * 8, half, 1.0f);
    store_pair(x, half, &f);
}

/* One warp a head, any even head size. */
__global__ void __launch_bounds__(THREADS) rope_fwd_any(struct rope_args p)
{
    int half = p.hd / 2, lane = threadIdx.x % 32;
    int head = ((int)blockIdx.x * THREADS + threadIdx.x) / 32;
    int row = head / p.nh, h = head % p.nh;
    bf16 *x = p.x + (size_t)row * p.ldx + h * p.hd;
    float ss = 0.0f, r = 1.0f;

    if (row >= p.rows)                 /* the whole warp */
        return;
    for (int j = lane; j < p.hd; j += 32) {
        ss += bf_f32(x[j]) * bf_f32(x[j]);
        if (p.pre)
            p.pre[(size_t)head * p.hd + j] = x[j];
    }
    ss = warp_sum(ss);
    if (p.w) {
        r = rsqrtf(ss / p.hd + p.eps);
        if (p.rstd && lane == 0)
            p.rstd[head] = r;
    }
    __syncwarp();
    for (int j = lane; j < half; j += 32) {
        float a = bf_f32(x[j]) * r, b = bf_f32(x[j + half]) * r, c = 1.0f, s = 0.0f;

        if (p.w)
            a *= bf_f32(p.w[j]), b *= bf_f32(p.w[j + half]);
        if (p.cs)
            c = p.cs[(size_t)p.pos[row] * p.hd + j], s = p.cs[(size_t)p.pos[row] * p.hd + half + j];
        x[j] = bf_of(a * c - b * s);
        x[j + half] = bf_of(b * c + a * s);
    }
}

static int tuned(const struct rope_args *p)
{
    int lanes = p->hd / 16;

    return p->hd % 16 == 0 && lanes <= 8 && (lanes & (lanes - 1)) == 0 && p->ldx % 8 == 0 && mr_cuda_aligned16(p->x) &&
           mr_cuda_aligned16(p->w) && mr_cuda_aligned16(p->pre);
}

static int valid(const struct rope_args *p)
{
    return p->rows >= 0 && p->nh > 0 && (long long)p->rows * p->nh <= HEADS_MAX && p->hd >= 2 && p->hd % 2 == 0 && p->hd <= HD_MAX &&
           p->ldx >= p->nh * p->hd && (!p->cs || p->pos);
}

int mr_cuda_head_norm_rope(struct mr_k *k, int rows, int nh, int hd, void *x, int ldx, const void *w, float eps, const int32_t *pos,
                           const float *cs, void *pre, float *rstd)
{
    struct mr_cuda *c = mr_cuda_of(k);
    struct rope_args p = {rows, nh, hd, ldx, (bf16 *)x, (const bf16 *)w, pos, cs, eps, (bf16 *)pre, rstd, NULL};
    long long heads = (long long)rows * nh;

    if (c->err)
        return c->err;
    if (!valid(&p))
        return -EINVAL;
    if (rows == 0)
        return 0;
    if (tuned(&p))
        MR_LAUNCH(rope_fwd, mr_cuda_div_up(heads * (hd / 16), THREADS), THREADS, 0, c->stream, p);
    else
        MR_LAUNCH(rope_fwd_any, mr_cuda_div_up(heads * 32, THREADS), THREADS, 0, c->stream, p);
    return mr_cuda_launched(c, "head norm and rope");
}

/* ---- backward ---------------------------------------------------------------------------------------------------- */

/* Through the norm: f holds dy and becomes dx; acc collects the weight gradient. */
__device__ static inline void norm_back(struct half_pair *f, const struct half_pair *x, const struct half_pair *w, float r, float mean,
                                        struct half_pair *acc)
{
    for (int e = 0; e < 8; e++) {
        acc->a[e] += f->a[e] * x->a[e] * r;
        acc->b[e] += f->b[e] * x->b[e] * r;
        f->a[e] = r * (f->a[e] * w->a[e] - x->a[e] * r * r * mean);
        f->b[e] = r * (f->b[e] * w->b[e] - x->b[e] * r * r * mean);
    }
}

/* Adds the threads' accumulators of a block column by column, in thread order, into one row of partial sums. */
__device__ static inline void store_partial(const struct half_pair *acc, int hd, float *partial)
{
    __shared__ float all[THREADS][17];
    int lanes = hd / 16, half = hd / 2;

    for (int e = 0; e < 8; e++) {
        all[threadIdx.x][e] = acc->a[e];
        all[threadIdx.x][8 + e] = acc->b[e];
    }
    __syncthreads();
    if ((int)threadIdx.x < hd) {
        int j = (int)threadIdx.x % half, e = j % 8 + ((int)threadIdx.x >= half ? 8 : 0);
        float s = 0.0f;

        for (int t = j / 8; t < THREADS; t += lanes)
            s += all[t][e];
        partial[(size_t)blockIdx.x * hd + threadIdx.x] = s;
    }
}

__global__ void __launch_bounds__(THREADS) rope_bwd(struct rope_args p)
{
    int lanes = p.hd / 16, half = p.hd / 2, l = threadIdx.x % lanes;
    int heads = p.rows * p.nh, per_block = THREADS / lanes;
    struct half_pair acc = {}, w = {};

    if (p.w)
        load_pair(p.w + l * 8, half, &w);
    for (int first = blockIdx.x * per_block; first < heads; first += gridDim.x * per_block) {
        int head = first + (int)threadIdx.x / lanes;
        int row = head / p.nh, h = head % p.nh, live = head < heads;
        bf16 *dx = p.x + (size_t)row * p.ldx + h * p.hd + l * 8;
        struct half_pair f = {}, x = {};
        float dot = 0.0f;

        if (live) {
            load_pair(dx, half, &f);
            if (p.cs)
                rotate(&f, p.cs + (size_t)p.pos[row] * p.hd + l * 8, half, -1.0f);
            if (p.w)
                load_pair(p.pre + (size_t)head * p.hd + l * 8, half, &x);
            for (int e = 0; e < 8; e++)
                dot += f.a[e] * w.a[e] * x.a[e] + f.b[e] * w.b[e] * x.b[e];
        }
        dot = head_sum(dot, lanes);
        if (live && p.w)
            norm_back(&f, &x, &w, p.rstd[head], dot / p.hd, &acc);
        if (live)
            store_pair(dx, half, &f);
    }
    if (p.w)
        store_partial(&acc, p.hd, p.partial);
}

/* One head of the plain backward, by one warp; sums (hd) is the warp's own weight gradient in shared memory. */
__device__ static inline void back_any(const struct rope_args *p, int head, int lane, float *sums)
{
    int row = head / p->nh, h = head % p->nh, half = p->hd / 2;
    bf16 *dx = p->x + (size_t)row * p->ldx + h * p->hd;
    const bf16 *pre = p->pre + (size_t)head * p->hd;
    float ga[HD_MAX / 64], gb[HD_MAX / 64], dot = 0.0f, r = p->w ? p->rstd[head] : 1.0f;

    for (int i = 0, j = lane; j < half; i++, j += 32) {
        float a = bf_f32(dx[j]), b = bf_f32(dx[j + half]), c = 1.0f, s = 0.0f;

        if (p->cs)
            c = p->cs[(size_t)p->pos[row] * p->hd + j], s = p->cs[(size_t)p->pos[row] * p->hd + half + j];
        ga[i] = a * c + b * s;
        gb[i] = b * c - a * s;
        if (p->w)
            dot += ga[i] * bf_f32(p->w[j]) * bf_f32(pre[j]) + gb[i] * bf_f32(p->w[j + half]) * bf_f32(pre[j + half]);
    }
    dot = warp_sum(dot) / p->hd * r * r;
    for (int i = 0, j = lane; j < half; i++, j += 32) {
        if (p->w) {
            float xa = bf_f32(pre[j]), xb = bf_f32(pre[j + half]);

            sums[j] += ga[i] * xa * r;
            sums[j + half] += gb[i] * xb * r;
            ga[i] = r * (ga[i] * bf_f32(p->w[j]) - xa * dot);
            gb[i] = r * (gb[i] * bf_f32(p->w[j + half]) - xb * dot);
        }
        dx[j] = bf_of(ga[i]);
        dx[j + half] = bf_of(gb[i]);
    }
}

__global__ void __launch_bounds__(THREADS) rope_bwd_any(struct rope_args p)
{
    __shared__ float sums[THREADS / 32][HD_MAX];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = THREADS / 32;
    int heads = p.rows * p.nh;

    for (int j = lane; j < p.hd; j += 32)
        sums[warp][j] = 0.0f;
    __syncwarp();
    for (int head = blockIdx.x * warps + warp; head < heads; head += gridDim.x * warps)
        back_any(&p, head, lane, sums[warp]);
    __syncthreads();
    if (!p.w)
        return;
    for (int j = threadIdx.x; j < p.hd; j += THREADS) {
        float s = 0.0f;

        for (int i = 0; i < warps; i++)
            s += sums[i][j];
        p.partial[(size_t)blockIdx.x * p.hd + j] = s;
    }
}

int mr_cuda_head_norm_rope_bwd(struct mr_k *k, int rows, int nh, int hd, void *dx, int lddx, const void *pre, const void *w,
                               const float *rstd, const int32_t *pos, const float *cs, float *dw)
{
    struct mr_cuda *c = mr_cuda_of(k);
    struct rope_args p = {rows, nh, hd, lddx, (bf16 *)dx, (const bf16 *)w, pos, cs, 0.0f, (bf16 *)pre, (float *)rstd, NULL};
    int fast = tuned(&p), grid = mr_cuda_div_up((long long)rows * nh * (fast ? hd / 16 : 32), THREADS);

    if (c->err)
        return c->err;
    if (!valid(&p) || (w && (!pre || !rstd || !dw)))
        return -EINVAL;
    if (rows == 0)
        return 0;
    grid = grid < 4 * c->sms ? grid : 4 * c->sms;
    if (w) {
        p.partial = (float *)mr_cuda_scratch(c, (size_t)grid * hd * sizeof(float));
        if (!p.partial)
            return c->err;
    }
    if (fast)
        MR_LAUNCH(rope_bwd, grid, THREADS, 0, c->stream, p);
    else
        MR_LAUNCH(rope_bwd_any, grid, THREADS, 0, c->stream, p);
    if (mr_cuda_launched(c, "head norm and rope backward"))
        return c->err;
    return w ? mr_cuda_column_sum(c, grid, hd, p.partial, dw) : 0;
}
