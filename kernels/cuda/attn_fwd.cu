/* Attention forward: causal self-attention of packed sequences, and the drafter's anchor blocks.  What follows runs everywhere; on Hopper
 * attn_sm90.cu takes head sizes 64 and 128.
 *
 * One block of four warps a (128 queries, head) tile; a warp owns 32 query rows, so that every K and V fragment it reads from shared memory
 * serves two products (with 16 rows the kernel would wait for shared memory).  Keys come 64 at a time through two stages of cp.async; the
 * softmax is online, in f32, in base 2.  Heads are the fast grid dimension: the query heads that share a key head run side by side and
 * find its keys in L2.  Head sizes between the instantiated ones (32, 64, 128) run in the next one, padded with zeros. */
#include "kernels/cuda/attn.cuh"

#include <cmath>

enum { THREADS = 128, KEYS = 64 };

template <int D>
constexpr size_t fwd_smem(void)
{
    return (size_t)(Q_ROWS + 4 * KEYS) * D * sizeof(bf16);
}

/* s = Q K^T for the warp's 32 rows and one tile of keys.  q: at the warp's rows, lane_rows; k: lane_cols. */
template <int D>
__device__ static inline void scores(float s[2][KEYS / 8][4], smem_t q, smem_t k)
{
#pragma unroll
    for (int i = 0; i < 2 * (KEYS / 8) * 4; i++)
        s[i / (KEYS / 2)][i / 4 % (KEYS / 8)][i % 4] = 0.0f;
#pragma unroll
    for (int c = 0; c < D / 8; c += 2) {
        uint32_t qa[2][4], kb[4];

        frag_a<D>(qa[0], q, 0, c);
        frag_a<D>(qa[1], q, 16, c);
#pragma unroll
        for (int n = 0; n < KEYS / 16; n++) {
            frag_b<D>(kb, k, n * 16, c);
#pragma unroll
            for (int m = 0; m < 2; m++) {
                mma(s[m][2 * n], qa[m], kb[0], kb[1]);
                mma(s[m][2 * n + 1], qa[m], kb[2], kb[3]);
            }
        }
    }
}

/* One step of the online softmax for row half h of row block m: scores become probabilities, the running maximum and sum and the
 * output so far are brought to the new maximum.  A row that has seen no key yet keeps maximum -inf and probabilities 0. */
template <int D>
__device__ static inline void softmax_row(float s[KEYS / 8][4], float o[D / 8][4], int h, float scale, float *max, float *sum)
{
    float top = *max, base, shrink, part = 0.0f;

#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
        top = fmaxf(top, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
    base = top == -INFINITY ? 0.0f : top * scale;
    shrink = exp2_fast(*max * scale - base);
    *max = top;
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++) {
        s[n][2 * h] = exp2_fast(s[n][2 * h] * scale - base);
        s[n][2 * h + 1] = exp2_fast(s[n][2 * h + 1] * scale - base);
        part += s[n][2 * h] + s[n][2 * h + 1];
    }
    *sum = *sum * shrink + part;
#pragma unroll
    for (int d = 0; d < D / 8; d++) {
        o[d][2 * h] *= shrink;
        o[d][2 * h + 1] *= shrink;
    }
}

/* o += P V.  v: lane_rows. */
template <int D>
__device__ static inline void values(float o[2][D / 8][4], const float s[2][KEYS / 8][4], smem_t v)
{
#pragma unroll
    for (int n = 0; n < KEYS / 16; n++) {
        uint32_t pa[2][4], vb[4];

        frag_c(pa[0], s[0][2 * n], s[0][2 * n + 1]);
        frag_c(pa[1], s[1][2 * n], s[1][2 * n + 1]);
#pragma unroll
        for (int c = 0; c < D / 8; c += 2) {
            frag_bt<D>(vb, v, n * 16, c);
#pragma unroll
            for (int m = 0; m < 2; m++) {
                mma(o[m][c], pa[m], vb[0], vb[1]);
                mma(o[m][c + 1], pa[m], vb[2], vb[3]);
            }
        }
    }
}

/* Normalises and writes the warp's rows, and their log-sum-exp. */
template <int D>
__device__ static inline void finish(const struct attn_args &a, const struct attn_tile &t, int head, int first, int lane,
                                     const float o[2][D / 8][4], const float max[2][2], const float sum[2][2])
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int m = i >> 1, h = i & 1, r = first + m * 16 + h * 8;
        float l = sum[m][h], inv;
        bf16 *out = a.o + (size_t)(t.q0 + r) * a.ldo + (size_t)head * a.hd + (lane & 3) * 2;

        l += __shfl_xor_sync(0xffffffffu, l, 1);
        l += __shfl_xor_sync(0xffffffffu, l, 2);
        if (r >= t.nq)
            continue;
        inv = l > 0.0f ? 1.0f / l : 0.0f;
        if (a.lse && (lane & 3) == 0)
            a.lse[(size_t)(t.q0 + r) * a.nh + head] = l > 0.0f ? max[m][h] * a.scale + logf(l) : 0.0f;
#pragma unroll
        for (int d = 0; d < D / 8; d++)
            if (d * 8 < a.hd)
                *(uint32_t *)(out + d * 8) = bf_pack(o[m][d][2 * h] * inv, o[m][d][2 * h + 1] * inv);
    }
}

/* Starts the copy of key tile i (context tiles first, then own-block tiles) into a stage. */
template <int D>
__device__ static inline void fetch(const struct attn_args &a, const struct attn_tile &t, int i, int n_context, int kh, smem_t k, smem_t v)
{
    if (i < n_context) {
        int at = t.klo + i * KEYS;
        const bf16 *ck = a.ck + (size_t)t.k0 * a.ldc + kh * a.hd, *cv = a.cv + (size_t)t.k0 * a.ldc + kh * a.hd;

        load_tile<D, KEYS, THREADS>(k, ck, a.ldc, at, t.khi, a.hd / 8);
        load_tile<D, KEYS, THREADS>(v, cv, a.ldc, at, t.khi, a.hd / 8);
    } else {
        int at = (i - n_context) * KEYS;
        const bf16 *bk = a.bk + (size_t)t.q0 * a.ldb + kh * a.hd, *bv = a.bv + (size_t)t.q0 * a.ldb + kh * a.hd;

        load_tile<D, KEYS, THREADS>(k, bk, a.ldb, at, t.nq, a.hd / 8);
        load_tile<D, KEYS, THREADS>(v, bv, a.ldb, at, t.nq, a.hd / 8);
    }
    cp_async_commit();
}

template <int D>
__global__ void __launch_bounds__(THREADS, 2) attn_fwd(const struct attn_args a, const struct attn_tile *tiles)
{
    MR_DYN_SMEM(smem);
    const struct attn_tile t = tiles[blockIdx.y];
    const int head = blockIdx.x, kh = head / (a.nh / a.kv), lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 32;
    const int n_context = (t.khi - t.klo + KEYS - 1) / KEYS, n = n_context + (a.B ? (t.nq + KEYS - 1) / KEYS : 0);
    const smem_t q = smem_of(smem), kv = q + Q_ROWS * D * 2, stage = KEYS * D * 2;
    const smem_t rows = lane_rows<D>(lane), cols = lane_cols<D>(lane);
    float o[2][D / 8][4] = {}, max[2][2], sum[2][2] = {};
    struct bounds see;

    max[0][0] = max[0][1] = max[1][0] = max[1][1] = -INFINITY;
    load_tile<D, Q_ROWS, THREADS>(q, a.q + (size_t)t.q0 * a.ldq + head * a.hd, a.ldq, 0, t.nq, a.hd / 8);
    fetch<D>(a, t, 0, n_context, kh, kv, kv + stage);
    for (int i = 0; i < n; i++) {
        int own = i >= n_context, key = own ? (i - n_context) * KEYS : t.klo + i * KEYS;
        smem_t k = kv + (i & 1) * 2 * stage, v = k + stage;
        float s[2][KEYS / 8][4];

        if (i == 0 || i == n_context)
            bounds_of<32>(a, t, own, warp_row + lane / 4, &see);
        cp_async_wait();
        __syncthreads();               /* tile i has landed for all, and nobody reads tile i - 1 any more */
        if (i + 1 < n)
            fetch<D>(a, t, i + 1, n_context, kh, kv + (~i & 1) * 2 * stage, kv + (~i & 1) * 2 * stage + stage);
        if (key >= see.any_hi || key + KEYS <= see.any_lo)
            continue;
        scores<D>(s, q + warp_row * D * 2 + rows, k + cols);
        if (key < see.mask_lo || key + KEYS > see.mask_hi)
            mask_scores<KEYS, 2>(a, t, own, warp_row + lane / 4, key, lane, s);
#pragma unroll
        for (int r = 0; r < 4; r++)
            softmax_row<D>(s[r >> 1], o[r >> 1], r & 1, a.scale_log2, &max[r >> 1][r & 1], &sum[r >> 1][r & 1]);
        values<D>(o, s, v + rows);
    }
    finish<D>(a, t, head, warp_row + lane / 4, lane, o, max, sum);
}

/* ---- host -------------------------------------------------------------------------------------------------------- */

int mr_cuda_attn_init(struct mr_cuda *c)
{
    const cudaFuncAttribute max = cudaFuncAttributeMaxDynamicSharedMemorySize;

    mr_cuda_attn_sm90_init(c);
    mr_cuda_check(c, cudaFuncSetAttribute(attn_fwd<32>, max, (int)fwd_smem<32>()), "attention set-up");
    mr_cuda_check(c, cudaFuncSetAttribute(attn_fwd<64>, max, (int)fwd_smem<64>()), "attention set-up");
    return mr_cuda_check(c, cudaFuncSetAttribute(attn_fwd<128>, max, (int)fwd_smem<128>()), "attention set-up");
}

static int supported(const struct attn_args *a)
{
    return a->nh > 0 && a->kv > 0 && a->nh % a->kv == 0 && a->hd >= 8 && a->hd <= 128 && a->hd % 8 == 0 && a->ldq % 8 == 0 &&
           a->ldc % 8 == 0 && a->ldb % 8 == 0 && a->ldo % 2 == 0 && mr_cuda_aligned16(a->q) && mr_cuda_aligned16(a->ck) &&
           mr_cuda_aligned16(a->cv) && mr_cuda_aligned16(a->bk) && mr_cuda_aligned16(a->bv) && ((uintptr_t)a->o & 3) == 0;
}

/* q_rows, c_rows: rows of q, and of the context, that exist. */
static int launch(struct mr_cuda *c, struct attn_args *a, const struct attn_plan *p, int q_rows, int c_rows)
{
    dim3 grid((unsigned)a->nh, (unsigned)p->n_tiles);
    int e;

    if (p->n_tiles == 0)
        return 0;
    a->scale = 1.0f / sqrtf((float)a->hd);
    a->scale_log2 = a->scale * 1.44269504088896340736f;
    e = mr_cuda_attn_sm90(c, a, p, q_rows, c_rows);
    if (e != -ENOTSUP)
        return e;
    if (a->hd <= 32)
        MR_LAUNCH(attn_fwd<32>, grid, THREADS, fwd_smem<32>(), c->stream, *a, p->tile);
    else if (a->hd <= 64)
        MR_LAUNCH(attn_fwd<64>, grid, THREADS, fwd_smem<64>(), c->stream, *a, p->tile);
    else
        MR_LAUNCH(attn_fwd<128>, grid, THREADS, fwd_smem<128>(), c->stream, *a, p->tile);
    return mr_cuda_launched(c, "attention");
}

int mr_cuda_attn_causal(struct mr_k *k, int n_seqs, const int32_t *cu, const int32_t *host_cu, int nh, int kv, int hd, const void *q,
                        int ldq, const void *kx, const void *v, int ldkv, void *o, int ldo)
{
    struct mr_cuda *c = mr_cuda_of(k);
    struct attn_args a = {};
    struct attn_plan plan;
    int e;

    (void)cu;                          /* the plan was made from the host's copy */
    if (mr_cuda_attn_open(c))
        return c->err;
    a.q = (const bf16 *)q, a.ck = (const bf16 *)kx, a.cv = (const bf16 *)v, a.o = (bf16 *)o;
    a.ldq = ldq, a.ldc = ldkv, a.ldo = ldo;
    a.nh = nh, a.kv = kv, a.hd = hd;
    if (!supported(&a))
        return -EINVAL;
    e = mr_cuda_plan_causal(c, n_seqs, host_cu, &plan);
    return e ? e : launch(c, &a, &plan, host_cu[n_seqs], host_cu[n_seqs]);
}

int mr_cuda_attn_block(struct mr_k *k, const struct mr_k_blocks *b, const int32_t *cu, const int32_t *host_cu,
                       const struct mr_k_block_mask *mask, int nh, int kv, int hd, const void *q, const void *ck, const void *cv, int ldc,
                       const void *bk, const void *bv, int ldb, void *o, float *lse)
{
    struct mr_cuda *c = mr_cuda_of(k);
    struct attn_args a = {};
    struct attn_plan plan;
    int e;

    (void)cu;
    if (mr_cuda_attn_open(c))
        return c->err;
    a.q = (const bf16 *)q, a.ck = (const bf16 *)ck, a.cv = (const bf16 *)cv, a.bk = (const bf16 *)bk, a.bv = (const bf16 *)bv;
    a.o = (bf16 *)o, a.lse = lse;
    a.ldq = a.ldo = nh * hd, a.ldc = ldc, a.ldb = ldb;
    a.nh = nh, a.kv = kv, a.hd = hd;
    a.B = b->B, a.window = mask->window, a.causal = mask->causal, a.origin = mask->window_origin;
    a.pos = b->pos;
    if (!supported(&a))
        return -EINVAL;
    e = mr_cuda_plan_blocks(c, b, mask, host_cu, &plan);
    return e || b->n == 0 ? e : launch(c, &a, &plan, b->n * b->B, host_cu[b->host_seq[b->n - 1] + 1]);
}
