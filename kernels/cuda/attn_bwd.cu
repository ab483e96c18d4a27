/* Backward of the drafter's anchor attention, without atomics: the same bits in every run.  On Hopper attn_bwd_sm90.cu takes both passes of
 * head sizes 64 and 128.
 *
 * With P the probabilities (recomputed from the saved log-sum-exp), D = rowsum(o * dO) and dS = P * (dO V^T - D):
 *     dV = P^T dO        dK = scale * dS^T Q        dQ = scale * dS K
 * Two passes share the work so that every sum has one owner: query tiles walk over their keys and keep dQ; key tiles (of context or of own
 * blocks) walk over the queries that see them and keep dK and dV.  Recomputing P twice costs 7 products where an atomic dQ costs 5, and
 * saves an f32 copy of dQ and its order.
 *
 * The key pass works on transposes: S^T = K Q^T has keys as rows, so that P^T and dS^T are in registers exactly where the next product
 * wants its A operand.  A warp owns 16 keys and has all of dK and dV for them (128 registers at head size 128).
 * One key head serves nh/kv query heads: a key tile's block walks over all of them, or, when that gives the device too few blocks, each
 * query head gets its own block and f32 partial sums, which a last launch adds in order. */
#include "kernels/cuda/attn_bwd.cuh"

#include <cmath>

enum {
    DQ_THREADS = 128, DQ_KEYS = 32,    /* query pass: 4 warps of 32 rows, two stages of 32 keys */
    KV_THREADS = 256, KV_QUERIES = 64, /* key pass: 8 warps of 16 keys, stages of 64 queries */
};

/* ---- query pass -------------------------------------------------------------------------------------------------- */

template <int D>
constexpr size_t dq_smem(void)
{
    return (size_t)(2 * Q_ROWS + 4 * DQ_KEYS) * D * sizeof(bf16);
}

/* What a lane knows about its four rows, by [row block][half]. */
struct query_rows {
    float lse[2][2], delta[2][2];      /* lse in base 2 */
};

__device__ static inline void query_rows_of(const struct attn_args &a, const struct attn_tile &t, int head, int first,
                                            struct query_rows *q)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int r = first + i * 8;
        size_t at = (size_t)(t.q0 + r) * a.nh + head;
        bool live = r < t.nq;

        q->lse[i >> 1][i & 1] = live ? a.lse[at] * LOG2E : 0.0f;
        q->delta[i >> 1][i & 1] = live ? a.delta[at] : 0.0f;
    }
}

/* c = A B^T for 32 rows of tile A (at: the rows, lane_rows) and DQ_KEYS rows of tile B (lane_cols). */
template <int D>
__device__ static inline void product_32(float c[2][DQ_KEYS / 8][4], smem_t ta, smem_t tb)
{
#pragma unroll
    for (int i = 0; i < DQ_KEYS; i++)
        c[i / (DQ_KEYS / 2)][i / 4 % (DQ_KEYS / 8)][i % 4] = 0.0f;
#pragma unroll
    for (int ch = 0; ch < D / 8; ch += 2) {
        uint32_t fa[2][4], fb[4];

        frag_a<D>(fa[0], ta, 0, ch);
        frag_a<D>(fa[1], ta, 16, ch);
#pragma unroll
        for (int n = 0; n < DQ_KEYS / 16; n++) {
            frag_b<D>(fb, tb, n * 16, ch);
#pragma unroll
            for (int m = 0; m < 2; m++) {
                mma(c[m][2 * n], fa[m], fb[0], fb[1]);
                mma(c[m][2 * n + 1], fa[m], fb[2], fb[3]);
            }
        }
    }
}

/* s becomes dS = P * (dP - delta).  Keys that a row does not see keep score -inf, so that P and dS are 0. */
__device__ static inline void query_ds(const struct query_rows &q, float scale, float s[2][DQ_KEYS / 8][4],
                                       const float dp[2][DQ_KEYS / 8][4])
{
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < DQ_KEYS / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                s[m][n][e] = exp2_fast(s[m][n][e] * scale - q.lse[m][e >> 1]) * (dp[m][n][e] - q.delta[m][e >> 1]);
}

/* Starts the copy of key tile i (context tiles first, then own-block tiles). */
template <int D>
__device__ static inline void fetch_keys(const struct attn_args &a, const struct attn_tile &t, int i, int n_context, int kh, smem_t k,
                                         smem_t v)
{
    bool own = i >= n_context;
    int ld = own ? a.ldb : a.ldc, at = own ? (i - n_context) * DQ_KEYS : t.klo + i * DQ_KEYS, end = own ? t.nq : t.khi;
    size_t base = (size_t)(own ? t.q0 : t.k0) * ld + kh * a.hd;

    load_tile<D, DQ_KEYS, DQ_THREADS>(k, (own ? a.bk : a.ck) + base, ld, at, end, a.hd / 8);
    load_tile<D, DQ_KEYS, DQ_THREADS>(v, (own ? a.bv : a.cv) + base, ld, at, end, a.hd / 8);
    cp_async_commit();
}

template <int D>
__device__ static inline void dq_add(float dq[2][D / 8][4], const float s[2][DQ_KEYS / 8][4], smem_t k)
{
#pragma unroll
    for (int n = 0; n < DQ_KEYS / 16; n++) {
        uint32_t sa[2][4], kb[4];

        frag_c(sa[0], s[0][2 * n], s[0][2 * n + 1]);
        frag_c(sa[1], s[1][2 * n], s[1][2 * n + 1]);
#pragma unroll
        for (int ch = 0; ch < D / 8; ch += 2) {
            frag_bt<D>(kb, k, n * 16, ch);
#pragma unroll
            for (int m = 0; m < 2; m++) {
                mma(dq[m][ch], sa[m], kb[0], kb[1]);
                mma(dq[m][ch + 1], sa[m], kb[2], kb[3]);
            }
        }
    }
}

template <int D>
__global__ void __launch_bounds__(DQ_THREADS, 2) attn_dq(const struct attn_args a, const struct attn_tile *tiles)
{
    MR_DYN_SMEM(smem);
    const struct attn_tile t = tiles[blockIdx.y];
    const int head = blockIdx.x, kh = head / (a.nh / a.kv), lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 32;
    const int n_context = (t.khi - t.klo + DQ_KEYS - 1) / DQ_KEYS, n = n_context + (t.nq + DQ_KEYS - 1) / DQ_KEYS;
    const smem_t q = smem_of(smem), dO = q + Q_ROWS * D * 2, kv = dO + Q_ROWS * D * 2, stage = DQ_KEYS * D * 2;
    const smem_t rows = lane_rows<D>(lane), cols = lane_cols<D>(lane), mine = warp_row * D * 2 + rows;
    float dq[2][D / 8][4] = {};
    struct query_rows stat;
    struct bounds see;

    load_tile<D, Q_ROWS, DQ_THREADS>(q, a.q + (size_t)t.q0 * a.ldq + head * a.hd, a.ldq, 0, t.nq, a.hd / 8);
    load_tile<D, Q_ROWS, DQ_THREADS>(dO, a.dO + (size_t)t.q0 * a.ldq + head * a.hd, a.ldq, 0, t.nq, a.hd / 8);
    fetch_keys<D>(a, t, 0, n_context, kh, kv, kv + stage);
    query_rows_of(a, t, head, warp_row + lane / 4, &stat);
    for (int i = 0; i < n; i++) {
        int own = i >= n_context, key = own ? (i - n_context) * DQ_KEYS : t.klo + i * DQ_KEYS;
        smem_t k = kv + (i & 1) * 2 * stage, v = k + stage;
        float s[2][DQ_KEYS / 8][4], dp[2][DQ_KEYS / 8][4];

        if (i == 0 || i == n_context)
            bounds_of<32>(a, t, own, warp_row + lane / 4, &see);
        cp_async_wait();
        __syncthreads();
        if (i + 1 < n)
            fetch_keys<D>(a, t, i + 1, n_context, kh, kv + (~i & 1) * 2 * stage, kv + (~i & 1) * 2 * stage + stage);
        if (key >= see.any_hi || key + DQ_KEYS <= see.any_lo)
            continue;
        product_32<D>(s, q + mine, k + cols);
        if (key < see.mask_lo || key + DQ_KEYS > see.mask_hi)
            mask_scores<DQ_KEYS, 2>(a, t, own, warp_row + lane / 4, key, lane, s);
        product_32<D>(dp, dO + mine, v + cols);
        query_ds(stat, a.scale_log2, s, dp);
        dq_add<D>(dq, s, k + rows);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int r = warp_row + lane / 4 + i * 8, m = i >> 1, h = i & 1;
        bf16 *out = a.dq + (size_t)(t.q0 + r) * a.ldq + head * a.hd + (lane & 3) * 2;

#pragma unroll
        for (int d = 0; d < D / 8; d++)
            if (r < t.nq && d * 8 < a.hd)
                *(uint32_t *)(out + d * 8) = bf_pack(dq[m][d][2 * h] * a.scale, dq[m][d][2 * h + 1] * a.scale);
    }
}

/* ---- key pass ---------------------------------------------------------------------------------------------------- */

/* Shared memory: K, V, then per stage Q, dO and the rows' spans, lse, delta. */
template <int D>
struct kv_layout {
    static constexpr uint32_t keys = KV_ROWS * D * 2, queries = KV_QUERIES * D * 2, stats = KV_QUERIES * 16;
    static constexpr uint32_t stage = 2 * queries + stats;
    static constexpr size_t bytes(int stages)
    {
        return 2 * keys + (size_t)stages * stage;
    }
};

struct row_stats {                     /* as they lie in a stage after dO */
    struct span see[KV_QUERIES];
    float lse[KV_QUERIES], delta[KV_QUERIES];
};

/* Starts the copy of one tile of queries of `head`, from query row `first` of the tile's range, into the stage at `at`. */
template <int D>
__device__ static inline void fetch_queries(const struct attn_args &a, const struct kv_tile &t, int head, int first, unsigned char *at)
{
    struct row_stats *st = (struct row_stats *)(at + 2 * kv_layout<D>::queries);
    const size_t base = (size_t)t.q0 * a.ldq + head * a.hd;
    int i = threadIdx.x % KV_QUERIES, r = first + i, row = t.q0 + r;
    bool live = r < t.nq;

    load_tile<D, KV_QUERIES, KV_THREADS>(smem_of(at), a.q + base, a.ldq, first, t.nq, a.hd / 8);
    load_tile<D, KV_QUERIES, KV_THREADS>(smem_of(at) + kv_layout<D>::queries, a.dO + base, a.ldq, first, t.nq, a.hd / 8);
    if (threadIdx.x < KV_QUERIES)
        cp_async4(smem_of(&st->lse[i]), live ? a.lse + (size_t)row * a.nh + head : a.lse, live);
    else if (threadIdx.x < 2 * KV_QUERIES)
        cp_async4(smem_of(&st->delta[i]), live ? a.delta + (size_t)row * a.nh + head : a.delta, live);
    else if (threadIdx.x < 3 * KV_QUERIES)
        st->see[i] = !live ? full_span() : t.own ? own_span(a, row, r) : context_span(a, row, r, 0);
    cp_async_commit();
}

/* c = A B^T for 16 rows of tile A (at: the rows, lane_rows) and KV_QUERIES rows of tile B (lane_cols). */
template <int D>
__device__ static inline void product_16(float c[KV_QUERIES / 8][4], smem_t ta, smem_t tb)
{
#pragma unroll
    for (int i = 0; i < KV_QUERIES / 2; i++)
        c[i / 4][i % 4] = 0.0f;
#pragma unroll
    for (int ch = 0; ch < D / 8; ch += 2) {
        uint32_t fa[4], fb[4];

        frag_a<D>(fa, ta, 0, ch);
#pragma unroll
        for (int n = 0; n < KV_QUERIES / 16; n++) {
            frag_b<D>(fb, tb, n * 16, ch);
            mma(c[2 * n], fa, fb[0], fb[1]);
            mma(c[2 * n + 1], fa, fb[2], fb[3]);
        }
    }
}

/* acc += A B for A (16 x KV_QUERIES) in registers, packed, and a tile B of KV_QUERIES rows (lane_rows). */
template <int D>
__device__ static inline void product_acc(float acc[D / 8][4], const uint32_t fa[KV_QUERIES / 16][4], smem_t tb)
{
#pragma unroll
    for (int n = 0; n < KV_QUERIES / 16; n++)
#pragma unroll
        for (int ch = 0; ch < D / 8; ch += 2) {
            uint32_t fb[4];

            frag_bt<D>(fb, tb, n * 16, ch);
            mma(acc[ch], fa[n], fb[0], fb[1]);
            mma(acc[ch + 1], fa[n], fb[2], fb[3]);
        }
}

/* From S^T and dP^T of keys key, key+8 (this lane's rows) to packed P^T and dS^T.  MASKED: not every query sees every key. */
template <bool MASKED>
__device__ static inline void key_probabilities(const struct row_stats *st, float scale, int key, int lane, float s[KV_QUERIES / 8][4],
                                                float dp[KV_QUERIES / 8][4], uint32_t pa[KV_QUERIES / 16][4],
                                                uint32_t sa[KV_QUERIES / 16][4])
{
#pragma unroll
    for (int n = 0; n < KV_QUERIES / 8; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int q = n * 8 + (lane & 3) * 2 + e;
            float lse = st->lse[q] * LOG2E, delta = st->delta[q];

#pragma unroll
            for (int h = 0; h < 2; h++) {
                float p = exp2_fast(s[n][2 * h + e] * scale - lse);

                if (MASKED)
                    p = key + h * 8 >= st->see[q].lo && key + h * 8 < st->see[q].hi ? p : 0.0f;
                s[n][2 * h + e] = p;
                dp[n][2 * h + e] = p * (dp[n][2 * h + e] - delta);
            }
        }
    }
#pragma unroll
    for (int n = 0; n < KV_QUERIES / 16; n++) {
        frag_c(pa[n], s[2 * n], s[2 * n + 1]);
        frag_c(sa[n], dp[2 * n], dp[2 * n + 1]);
    }
}

enum sight { NONE, SOME, ALL };

/* Which of the 16 keys from `key` do the stage's queries see? */
__device__ static inline enum sight seen(const struct row_stats *st, int key, int lane)
{
    struct span a = st->see[lane], b = st->see[lane + 32];

    if (warp_max(max(a.lo, b.lo)) <= key && warp_min(min(a.hi, b.hi)) >= key + 16)
        return ALL;
    return warp_min(min(a.lo, b.lo)) < key + 16 && warp_max(max(a.hi, b.hi)) > key ? SOME : NONE;
}

/* The work of one warp on one stage of queries. */
template <int D>
__device__ static inline void key_step(const struct attn_args &a, const struct kv_tile &t, smem_t k, smem_t v, unsigned char *at,
                                       int first, int lane, float dk[D / 8][4], float dv[D / 8][4])
{
    const struct row_stats *st = (const struct row_stats *)(at + 2 * kv_layout<D>::queries);
    const smem_t q = smem_of(at), dO = q + kv_layout<D>::queries;
    const smem_t rows = lane_rows<D>(lane), cols = lane_cols<D>(lane), mine = first * D * 2 + rows;
    float s[KV_QUERIES / 8][4], dp[KV_QUERIES / 8][4];
    uint32_t pa[KV_QUERIES / 16][4], sa[KV_QUERIES / 16][4];

    enum sight sight = seen(st, t.t0 + first, lane);

    if (sight == NONE)
        return;
    product_16<D>(s, k + mine, q + cols);
    product_16<D>(dp, v + mine, dO + cols);
    if (sight == ALL)
        key_probabilities<false>(st, a.scale_log2, t.t0 + first + lane / 4, lane, s, dp, pa, sa);
    else
        key_probabilities<true>(st, a.scale_log2, t.t0 + first + lane / 4, lane, s, dp, pa, sa);
    product_acc<D>(dv, pa, dO + rows);
    product_acc<D>(dk, sa, q + rows);
}

/* stages: 2 where shared memory allows it, else 1. */
template <int D>
__global__ void __launch_bounds__(KV_THREADS, 1) attn_dkv(const struct attn_args a, const struct kv_tile *tiles, int stages)
{
    MR_DYN_SMEM(smem);
    const struct kv_tile t = tiles[blockIdx.y];
    const int kh = blockIdx.x % a.kv, split = blockIdx.x / a.kv, group = a.nh / a.kv, heads = t.own ? group : group / a.splits;
    const int head0 = kh * group + split * heads, lane = threadIdx.x % 32, first = threadIdx.x / 32 * 16;
    const int per_head = (t.nq + KV_QUERIES - 1) / KV_QUERIES, n = per_head * heads;
    const smem_t k = smem_of(smem), v = k + kv_layout<D>::keys;
    const int ld = t.own ? a.ldb : a.ldc;
    unsigned char *queries = smem + 2 * kv_layout<D>::keys;
    float dk[D / 8][4] = {}, dv[D / 8][4] = {};

    if (t.own && split)                /* own blocks are little work: one block walks over all heads */
        return;
    load_tile<D, KV_ROWS, KV_THREADS>(k, (t.own ? a.bk : a.ck) + (size_t)t.row * ld + kh * a.hd, ld, 0, t.nk, a.hd / 8);
    load_tile<D, KV_ROWS, KV_THREADS>(v, (t.own ? a.bv : a.cv) + (size_t)t.row * ld + kh * a.hd, ld, 0, t.nk, a.hd / 8);
    fetch_queries<D>(a, t, head0, 0, queries);
    for (int i = 0; i < n; i++) {
        unsigned char *at = queries + (stages == 2 ? (i & 1) * kv_layout<D>::stage : 0);
        unsigned char *next = queries + (stages == 2 ? (~i & 1) * kv_layout<D>::stage : 0);
        int head = head0 + (i + 1) / per_head, q = (i + 1) % per_head * KV_QUERIES;

        cp_async_wait();
        __syncthreads();
        if (stages == 2 && i + 1 < n)
            fetch_queries<D>(a, t, head, q, next);
        key_step<D>(a, t, k, v, at, first, lane, dk, dv);
        if (stages == 1 && i + 1 < n) {
            __syncthreads();
            fetch_queries<D>(a, t, head, q, next);
        }
    }
    store_tile<D>(a, t, kh, split, dk, dv, first, lane);
}

/* ---- around the passes ------------------------------------------------------------------------------------------- */

/* delta (rows, nh) = sum over the head of o * dO; 16 lanes a head. */
__global__ void __launch_bounds__(256) attn_delta(int heads, int hd, const bf16 *o, const bf16 *dO, float *delta)
{
    int head = ((int)blockIdx.x * 256 + threadIdx.x) / 16, l = threadIdx.x % 16;
    size_t at = (size_t)head * hd + l * 8;
    float x[8], y[8], s = 0.0f;

    if (head < heads && l * 8 < hd) {
        unpack8(*(const uint4 *)(o + at), x);
        unpack8(*(const uint4 *)(dO + at), y);
        for (int e = 0; e < 8; e++)
            s += x[e] * y[e];
    }
    for (int i = 8; i; i >>= 1)
        s += __shfl_xor_sync(0xffffffffu, s, i);
    if (head < heads && l == 0)
        delta[head] = s;
}

/* Adds the splits of one key row of a context tile to dck and dcv. */
__global__ void __launch_bounds__(256) attn_add_parts(const struct attn_args a, const struct kv_tile *tiles)
{
    const struct kv_tile t = tiles[blockIdx.y];
    const int width = a.kv * a.hd, key = blockIdx.x;
    const size_t at = ((size_t)t.slot * KV_ROWS + key) * width, step = (size_t)a.part_rows * width;

    if (t.own || key >= t.nk)
        return;
    for (int i = threadIdx.x; i < width; i += 256) {
        bf16 *k = a.dck + (size_t)(t.row + key) * a.lddc + i, *v = a.dcv + (size_t)(t.row + key) * a.lddc + i;
        float sk = 0.0f, sv = 0.0f;

        for (int j = 0; j < a.splits; j++) {
            sk += a.part_k[j * step + at + i];
            sv += a.part_v[j * step + at + i];
        }
        *k = bf_of(bf_f32(*k) + sk);
        *v = bf_of(bf_f32(*v) + sv);
    }
}

/* ---- host -------------------------------------------------------------------------------------------------------- */

int mr_cuda_attn_bwd_init(struct mr_cuda *c)
{
    const cudaFuncAttribute max = cudaFuncAttributeMaxDynamicSharedMemorySize;
    int stages = kv_layout<128>::bytes(2) <= c->smem_max ? 2 : 1;

    mr_cuda_check(c, cudaFuncSetAttribute(attn_dq<32>, max, (int)dq_smem<32>()), "attention set-up");
    mr_cuda_check(c, cudaFuncSetAttribute(attn_dq<64>, max, (int)dq_smem<64>()), "attention set-up");
    mr_cuda_check(c, cudaFuncSetAttribute(attn_dq<128>, max, (int)dq_smem<128>()), "attention set-up");
    mr_cuda_check(c, cudaFuncSetAttribute(attn_dkv<32>, max, (int)kv_layout<32>::bytes(2)), "attention set-up");
    mr_cuda_check(c, cudaFuncSetAttribute(attn_dkv<64>, max, (int)kv_layout<64>::bytes(2)), "attention set-up");
    return mr_cuda_check(c, cudaFuncSetAttribute(attn_dkv<128>, max, (int)kv_layout<128>::bytes(stages)), "attention set-up");
}

/* c_rows: rows of the context that exist. */
template <int D>
static int launch(struct mr_cuda *c, const struct attn_args *a, const struct attn_plan *p, int q_rows, int c_rows)
{
    int stages = kv_layout<D>::bytes(2) <= c->smem_max ? 2 : 1, e;
    dim3 q_grid((unsigned)a->nh, (unsigned)p->n_tiles), kv_grid((unsigned)(a->kv * a->splits), (unsigned)p->n_kv);

    e = mr_cuda_attn_dkv_sm90(c, a, p, q_rows, c_rows);
    if (e == -ENOTSUP)
        MR_LAUNCH(attn_dkv<D>, kv_grid, KV_THREADS, kv_layout<D>::bytes(stages), c->stream, *a, p->kv, stages);
    else if (e)
        return e;
    if (a->splits > 1)
        MR_LAUNCH(attn_add_parts, dim3(KV_ROWS, (unsigned)p->n_kv), 256, 0, c->stream, *a, p->kv);
    e = mr_cuda_attn_dq_sm90(c, a, p, q_rows, c_rows);
    if (e != -ENOTSUP)
        return e;
    MR_LAUNCH(attn_dq<D>, q_grid, DQ_THREADS, dq_smem<D>(), c->stream, *a, p->tile);
    return mr_cuda_launched(c, "attention backward");
}

/* delta and, where the key heads alone are too few blocks for the device, partial sums by query head. */
static int take_scratch(struct mr_cuda *c, struct attn_args *a, const struct attn_plan *p, int rows)
{
    size_t delta = ((size_t)rows * a->nh + 63) / 64 * 64, part;
    float *f;

    a->splits = p->n_context * a->kv < 4 * c->sms ? a->nh / a->kv : 1;
    a->part_rows = p->n_context * KV_ROWS;
    part = a->splits > 1 ? (size_t)a->splits * a->part_rows * a->kv * a->hd : 0;
    f = (float *)mr_cuda_scratch(c, (delta + 2 * part) * sizeof *f);
    if (!f)
        return c->err;
    a->delta = f;
    a->part_k = f + delta;
    a->part_v = f + delta + part;
    return 0;
}

static int supported(const struct attn_args *a)
{
    const void *wide[] = {a->q, a->ck, a->cv, a->bk, a->bv, a->o, a->dO}, *pairs[] = {a->dq, a->dck, a->dcv, a->dbk, a->dbv};

    for (const void *p : wide)
        if (!p || !mr_cuda_aligned16(p))
            return 0;
    for (const void *p : pairs)
        if (!p || ((uintptr_t)p & 3))
            return 0;
    return a->nh > 0 && a->kv > 0 && a->nh % a->kv == 0 && a->hd >= 8 && a->hd <= 128 && a->hd % 8 == 0 && a->ldc % 8 == 0 &&
           a->ldb % 8 == 0 && a->lddc % 2 == 0 && a->lddb % 2 == 0 && a->lse;
}

int mr_cuda_attn_block_bwd(struct mr_k *k, const struct mr_k_blocks *b, const int32_t *cu, const int32_t *host_cu,
                           const struct mr_k_block_mask *mask, int nh, int kv, int hd, const void *q, const void *ck, const void *cv,
                           int ldc, const void *bk, const void *bv, int ldb, const void *o, const float *lse, const void *dO, void *dq,
                           void *dck, void *dcv, int lddc, void *dbk, void *dbv, int lddb)
{
    struct mr_cuda *c = mr_cuda_of(k);
    struct attn_args a = {};
    struct attn_plan plan;
    int e, rows = b->n * b->B, c_rows;

    (void)cu;
    if (mr_cuda_attn_open(c))
        return c->err;
    a.q = (const bf16 *)q, a.ck = (const bf16 *)ck, a.cv = (const bf16 *)cv, a.bk = (const bf16 *)bk, a.bv = (const bf16 *)bv;
    a.o = (bf16 *)o, a.lse = (float *)lse, a.dO = (const bf16 *)dO;
    a.dq = (bf16 *)dq, a.dck = (bf16 *)dck, a.dcv = (bf16 *)dcv, a.dbk = (bf16 *)dbk, a.dbv = (bf16 *)dbv;
    a.ldq = nh * hd, a.ldc = ldc, a.ldb = ldb, a.lddc = lddc, a.lddb = lddb;
    a.nh = nh, a.kv = kv, a.hd = hd;
    a.B = b->B, a.window = mask->window, a.causal = mask->causal, a.origin = mask->window_origin;
    a.pos = b->pos;
    a.scale = 1.0f / sqrtf((float)hd);
    a.scale_log2 = a.scale * LOG2E;
    if (!supported(&a))
        return -EINVAL;
    e = mr_cuda_plan_blocks(c, b, mask, host_cu, &plan);
    if (e || rows == 0)
        return e;
    e = take_scratch(c, &a, &plan, rows);
    if (e)
        return e;
    MR_LAUNCH(attn_delta, mr_cuda_div_up((long long)rows * nh * 16, 256), 256, 0, c->stream, rows * nh, hd, a.o, a.dO, (float *)a.delta);
    c_rows = host_cu[b->host_seq[b->n - 1] + 1];
    return hd <= 32 ? launch<32>(c, &a, &plan, rows, c_rows) : hd <= 64 ? launch<64>(c, &a, &plan, rows, c_rows)
                                                                          : launch<128>(c, &a, &plan, rows, c_rows);
}
