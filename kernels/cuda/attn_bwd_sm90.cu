/* Backward of the drafter's anchor attention on Hopper, head sizes 64 and 128: the two passes of attn_bwd.cu (see there for what they
 * compute, and why there are two) with products of warp groups.
 *
 * Key pass: a block keeps a tile of 128 keys and walks over the queries that see it, 64 at a time, through three stages; each computing
 * group owns 64 keys and has dK and dV for them in registers.  Besides the copying thread, one warp of the copying group brings what is
 * known of each query: which keys it sees, its log-sum-exp, its delta.
 * Query pass: persistent blocks as in attn_sm90.cu; a computing group owns 64 queries and has dQ for them in registers.
 * Within a group products and arithmetic follow each other; the two groups drift apart, and one's arithmetic runs beside the other's
 * products.  Rows behind a tile's end are those of its neighbours, as in the forward pass: nothing of them is seen, or written. */
#include "kernels/cuda/attn_bwd.cuh"
#include "kernels/cuda/attn_sm90.cuh"

enum { KEYS = 128, QUERIES = 64, KEY_STAGES = 2, QUERY_STAGES = 3, WARPS = 8 /* that compute */ };

struct maps {
    CUtensorMap q, dO, ck, cv, bk, bv;
};

/* ---- key pass ---------------------------------------------------------------------------------------------------- */

struct query_stats {
    struct span see[QUERIES];
    float lse[QUERIES], delta[QUERIES];                /* lse in base 2 */
};

template <int D>
struct dkv_layout {                                    /* of shared memory; a stage holds Q, dO and query_stats */
    static constexpr uint32_t keys = tile_bytes<D, KEYS>, queries = tile_bytes<D, QUERIES>, stage = 2 * queries + 1024;
    static constexpr uint32_t k = 0, v = keys, stages = 2 * keys, bars = stages + QUERY_STAGES * stage, bytes = bars + 256;
};
static_assert(sizeof(struct query_stats) <= 1024, "fits behind a stage's tiles");

enum { KV_FULL, Q_FULL, Q_FREE = Q_FULL + QUERY_STAGES, DKV_BARS = Q_FREE + QUERY_STAGES };

struct key_work {
    struct kv_tile t;
    int kh, split, head0, per_head, n;                 /* n stages of queries: per_head for each query head from head0 */
};

__device__ static inline struct key_work key_work_of(const struct attn_args &a, const struct kv_tile *tiles)
{
    const int group = a.nh / a.kv;
    struct key_work w;

    w.t = tiles[blockIdx.y];
    w.kh = blockIdx.x % a.kv;
    w.split = blockIdx.x / a.kv;
    w.per_head = (w.t.nq + QUERIES - 1) / QUERIES;
    w.n = w.per_head * (w.t.own ? group : group / a.splits);
    w.head0 = w.kh * group + (w.t.own ? 0 : w.split * (group / a.splits));
    return w;
}

template <int D>
__device__ static inline void copy_queries(const struct maps &m, const struct key_work &w, smem_t smem, smem_t bars)
{
    typedef dkv_layout<D> L;
    const CUtensorMap *mk = w.t.own ? &m.bk : &m.ck, *mv = w.t.own ? &m.bv : &m.cv;

    bar_expect(bars + KV_FULL * 8, 2 * L::keys);
    load_boxes<D, KEYS>(smem + L::k, mk, w.kh * D, w.t.row, bars + KV_FULL * 8);
    load_boxes<D, KEYS>(smem + L::v, mv, w.kh * D, w.t.row, bars + KV_FULL * 8);
    for (int i = 0; i < w.n; i++) {
        const int s = i % QUERY_STAGES, col = (w.head0 + i / w.per_head) * D, row = w.t.q0 + i % w.per_head * QUERIES;
        const smem_t at = smem + L::stages + s * L::stage, full = bars + (Q_FULL + s) * 8;

        bar_wait(bars + (Q_FREE + s) * 8, ~(i / QUERY_STAGES) & 1);
        bar_expect(full, 2 * L::queries);
        load_boxes<D, QUERIES>(at, &m.q, col, row, full);
        load_boxes<D, QUERIES>(at + L::queries, &m.dO, col, row, full);
    }
}

/* Run by a whole warp. */
template <int D>
__device__ static inline void copy_stats(const struct attn_args &a, const struct key_work &w, int lane, unsigned char *base, smem_t bars)
{
    typedef dkv_layout<D> L;

    for (int i = 0; i < w.n; i++) {
        const int s = i % QUERY_STAGES, head = w.head0 + i / w.per_head, first = i % w.per_head * QUERIES;
        struct query_stats *st = (struct query_stats *)(base + L::stages + s * L::stage + 2 * L::queries);

        bar_wait(bars + (Q_FREE + s) * 8, ~(i / QUERY_STAGES) & 1);
        for (int j = lane; j < QUERIES; j += 32) {
            const int r = first + j, row = w.t.q0 + r;
            const size_t at = (size_t)row * a.nh + head;
            const bool live = r < w.t.nq;

            st->see[j] = !live ? span{0, 0} : w.t.own ? own_span(a, row, r) : context_span(a, row, r, 0);
            st->lse[j] = live ? a.lse[at] * LOG2E : 0.0f;
            st->delta[j] = live ? a.delta[at] : 0.0f;
        }
        __syncwarp();
        if (lane == 0)
            bar_arrive(bars + (Q_FULL + s) * 8);
    }
}

enum sight { NONE, SOME, ALL };

/* Which of the group's 64 keys from `key` do the stage's queries see?  The same for all warps of the group. */
__device__ static inline enum sight seen(const struct query_stats *st, int key, int lane)
{
    const struct span a = st->see[lane], b = st->see[lane + 32];

    if (warp_max(max(a.lo, b.lo)) <= key && warp_min(min(a.hi, b.hi)) >= key + 64)
        return ALL;
    return warp_min(min(a.lo, b.lo)) < key + 64 && warp_max(max(a.hi, b.hi)) > key ? SOME : NONE;
}

/* Scores of keys key, key + 8 (the lane's rows) become probabilities. */
template <bool MASKED>
__device__ static inline void key_probabilities(const struct query_stats *st, float scale, int key, int lane, float (&s)[QUERIES / 8][4])
{
#pragma unroll
    for (int n = 0; n < QUERIES / 8; n++) {
        const int q = n * 8 + (lane & 3) * 2;
        const float2 lse = *(const float2 *)&st->lse[q];

#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int k = key + (i >> 1) * 8;
            float p = exp2_fast(s[n][i] * scale - (i & 1 ? lse.y : lse.x));

            if (MASKED)
                p = k >= st->see[q + (i & 1)].lo && k < st->see[q + (i & 1)].hi ? p : 0.0f;
            s[n][i] = p;
        }
    }
}

/* dp becomes dS = P * (dP - delta). */
__device__ static inline void key_ds(const struct query_stats *st, int lane, const float (&p)[QUERIES / 8][4],
                                     float (&dp)[QUERIES / 8][4])
{
#pragma unroll
    for (int n = 0; n < QUERIES / 8; n++) {
        const float2 delta = *(const float2 *)&st->delta[n * 8 + (lane & 3) * 2];

#pragma unroll
        for (int i = 0; i < 4; i++)
            dp[n][i] = p[n][i] * (dp[n][i] - (i & 1 ? delta.y : delta.x));
    }
}

/* One stage of queries.  k, v: the group's 64 rows; key: the lane's first key. */
template <int D>
__device__ static inline void key_step(const struct query_stats *st, bool masked, float scale, int key, int lane, smem_t k, smem_t v,
                                       smem_t q, smem_t dO, float (&dk)[D / 8][4], float (&dv)[D / 8][4])
{
    float s[QUERIES / 8][4], dp[QUERIES / 8][4];
    uint32_t pa[QUERIES / 16][4], sa[QUERIES / 16][4];

    start_rows<D, KEYS, QUERIES>(s, k, q);
    start_rows<D, KEYS, QUERIES>(dp, v, dO);
    wgmma_wait<1>();
    wgmma_pin(s);
    if (masked)
        key_probabilities<true>(st, scale, key, lane, s);
    else
        key_probabilities<false>(st, scale, key, lane, s);
    pack(pa, s);
    start_sum<D, QUERIES>(dv, pa, dO);
    wgmma_wait<1>();
    wgmma_pin(dp);
    key_ds(st, lane, s, dp);
    pack(sa, dp);
    start_sum<D, QUERIES>(dk, sa, q);
    wgmma_wait<0>();
    wgmma_pin(dv);
    wgmma_pin(dk);
}

template <int D>
__device__ static inline void walk_queries(const struct attn_args &a, const struct key_work &w, unsigned char *base, smem_t smem,
                                           smem_t bars)
{
    typedef dkv_layout<D> L;
    const int group = threadIdx.x / GROUP - 1, lane = threadIdx.x % 32, first = (threadIdx.x - GROUP) / 32 * 16;
    const int key = w.t.t0 + first + lane / 4;
    const smem_t k = smem + L::k + group * 64 * 128, v = smem + L::v + group * 64 * 128;
    float dk[D / 8][4] = {}, dv[D / 8][4] = {};

    bar_wait(bars + KV_FULL * 8, 0);
    for (int i = 0; i < w.n; i++) {
        const int s = i % QUERY_STAGES;
        const uint32_t at = L::stages + s * L::stage;
        const struct query_stats *st = (const struct query_stats *)(base + at + 2 * L::queries);
        const smem_t q = smem + at, dO = q + L::queries;
        enum sight sight;

        bar_wait(bars + (Q_FULL + s) * 8, i / QUERY_STAGES & 1);
        sight = seen(st, w.t.t0 + group * 64, lane);
        if (sight != NONE)
            key_step<D>(st, sight == SOME, a.scale_log2, key, lane, k, v, q, dO, dk, dv);
        __syncwarp();                                  /* all lanes have read the statistics */
        if (lane == 0)
            bar_arrive(bars + (Q_FREE + s) * 8);
    }
    store_tile<D>(a, w.t, w.kh, w.split, dk, dv, first, lane);
}

template <int D>
__global__ void __launch_bounds__(SM90_THREADS, 1) attn_dkv_sm90(const __grid_constant__ struct attn_args a,
                                                                 const __grid_constant__ struct maps m, const struct kv_tile *tiles)
{
    MR_DYN_SMEM(base);
    const smem_t smem = smem_of(base), bars = smem + dkv_layout<D>::bars;
    const struct key_work w = key_work_of(a, tiles);

    if (w.t.own && w.split)            /* own blocks are little work: one block walks over all heads */
        return;
    if (threadIdx.x == 0) {
        for (int i = 0; i < DKV_BARS; i++)
            bar_init(bars + i * 8, i == KV_FULL ? 1 : i < Q_FREE ? 2 : WARPS);
        bar_init_fence();
    }
    __syncthreads();
    if (threadIdx.x < GROUP) {
        registers_fewer<COPY_REGISTERS>();
        if (threadIdx.x == 0)
            copy_queries<D>(m, w, smem, bars);
        else if (threadIdx.x / 32 == 1)
            copy_stats<D>(a, w, threadIdx.x % 32, base, bars);
    } else {
        registers_more<COMPUTE_REGISTERS>();
        walk_queries<D>(a, w, base, smem, bars);
    }
}

/* ---- query pass -------------------------------------------------------------------------------------------------- */

template <int D>
struct dq_layout {
    static constexpr uint32_t tile = tile_bytes<D, 128>, q = 0, dO = tile, k = 2 * tile, v = k + KEY_STAGES * tile;
    static constexpr uint32_t out = v + KEY_STAGES * tile, bars = out + tile, bytes = bars + 256;
};

enum { QDO_FULL, QDO_FREE, K_FULL, K_FREE = K_FULL + KEY_STAGES, V_FULL = K_FREE + KEY_STAGES, V_FREE = V_FULL + KEY_STAGES,
       DQ_BARS = V_FREE + KEY_STAGES };

struct query_work {
    struct attn_tile t;
    int head, n_context, n;            /* key tiles: of the context, and all */
};

__device__ static inline struct query_work query_work_of(const struct attn_args &a, const struct attn_tile *tiles, int i)
{
    struct query_work w;

    w.t = tiles[i / a.nh];
    w.head = i % a.nh;
    w.n_context = (w.t.khi - w.t.klo + KEYS - 1) / KEYS;
    w.n = w.n_context + (w.t.nq + KEYS - 1) / KEYS;
    return w;
}

template <int D>
__device__ static inline void copy_keys(const struct attn_args &a, const struct maps &m, const struct attn_tile *tiles, int n_work,
                                        smem_t smem, smem_t bars)
{
    typedef dq_layout<D> L;
    uint32_t at = 0;                   /* key tiles so far */

    for (int round = 0, i; (i = turn(round)) < n_work; round++) {
        const struct query_work w = query_work_of(a, tiles, i);
        const int kh = w.head / (a.nh / a.kv) * D;

        bar_wait(bars + QDO_FREE * 8, ~round & 1);
        bar_expect(bars + QDO_FULL * 8, 2 * L::tile);
        load_boxes<D, 128>(smem + L::q, &m.q, w.head * D, w.t.q0, bars + QDO_FULL * 8);
        load_boxes<D, 128>(smem + L::dO, &m.dO, w.head * D, w.t.q0, bars + QDO_FULL * 8);
        for (int j = 0; j < w.n; j++, at++) {
            const bool own = j >= w.n_context;
            const int row = own ? w.t.q0 + (j - w.n_context) * KEYS : w.t.k0 + w.t.klo + j * KEYS;
            const uint32_t s = at % KEY_STAGES, parity = ~(at / KEY_STAGES) & 1;

            bar_wait(bars + (K_FREE + s) * 8, parity);
            bar_expect(bars + (K_FULL + s) * 8, L::tile);
            load_boxes<D, KEYS>(smem + L::k + s * L::tile, own ? &m.bk : &m.ck, kh, row, bars + (K_FULL + s) * 8);
            bar_wait(bars + (V_FREE + s) * 8, parity);
            bar_expect(bars + (V_FULL + s) * 8, L::tile);
            load_boxes<D, KEYS>(smem + L::v + s * L::tile, own ? &m.bv : &m.cv, kh, row, bars + (V_FULL + s) * 8);
        }
    }
}

struct query_rows {                    /* what a lane knows about its two rows; lse in base 2 */
    float lse[2], delta[2];
};

__device__ static inline void query_rows_of(const struct attn_args &a, const struct query_work &w, int first, struct query_rows *q)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int r = first + h * 8;
        const size_t at = (size_t)(w.t.q0 + r) * a.nh + w.head;
        const bool live = r < w.t.nq;

        q->lse[h] = live ? a.lse[at] * LOG2E : 0.0f;
        q->delta[h] = live ? a.delta[at] : 0.0f;
    }
}

/* Scores become probabilities, 0 where a row does not see a key. */
__device__ static inline void query_probabilities(const struct attn_args &a, const struct query_work &w, int j, int first, int lane,
                                                  const struct query_rows &q, struct bounds *see, float (&s)[KEYS / 8][4])
{
    const int own = j >= w.n_context, key = own ? (j - w.n_context) * KEYS : w.t.klo + j * KEYS;

    if (j == 0 || j == w.n_context)
        bounds_of<16>(a, w.t, own, first, see);
    if (key < see->mask_lo || key + KEYS > see->mask_hi)
        mask_scores<KEYS, 1>(a, w.t, own, first, key, lane, &s);
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            s[n][e] = exp2_fast(s[n][e] * a.scale_log2 - q.lse[e >> 1]);
}

template <int D>
__device__ static inline void walk_keys(const struct attn_args &a, const struct attn_tile *tiles, int n_work, unsigned char *base,
                                        smem_t smem, smem_t bars)
{
    typedef dq_layout<D> L;
    const int group = threadIdx.x / GROUP - 1, lane = threadIdx.x % 32, warp_row = (threadIdx.x - GROUP) / 32 * 16;
    const int first = warp_row + lane / 4;
    const smem_t q = smem + L::q + group * 64 * 128, dO = smem + L::dO + group * 64 * 128;
    uint32_t at = 0, sa[KEYS / 16][4];

    for (int round = 0, i; (i = turn(round)) < n_work; round++) {
        const struct query_work w = query_work_of(a, tiles, i);
        float dq[D / 8][4] = {}, s[KEYS / 8][4], dp[KEYS / 8][4];
        struct query_rows rows;
        struct bounds see;

        query_rows_of(a, w, first, &rows);
        bar_wait(bars + QDO_FULL * 8, round & 1);
        for (int j = 0; j < w.n; j++, at++) {
            const uint32_t st = at % KEY_STAGES, parity = at / KEY_STAGES & 1;

            bar_wait(bars + (K_FULL + st) * 8, parity);
            start_rows<D, 128, KEYS>(s, q, smem + L::k + st * L::tile);
            bar_wait(bars + (V_FULL + st) * 8, parity);
            start_rows<D, 128, KEYS>(dp, dO, smem + L::v + st * L::tile);
            wgmma_wait<1>();
            wgmma_pin(s);
            query_probabilities(a, w, j, first, lane, rows, &see, s);
            wgmma_wait<0>();
            wgmma_pin(dp);
            if (lane == 0)
                bar_arrive(bars + (V_FREE + st) * 8);
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    s[n][e] *= dp[n][e] - rows.delta[e >> 1];
            pack(sa, s);
            start_sum<D, KEYS>(dq, sa, smem + L::k + st * L::tile);
            wgmma_wait<0>();
            wgmma_pin(dq);
            if (lane == 0)
                bar_arrive(bars + (K_FREE + st) * 8);
        }
        if (lane == 0)
            bar_arrive(bars + QDO_FREE * 8);
        store_rows<D>(dq, a.scale, a.scale, w.t.nq - warp_row, lane, base + L::out + warp_row * D * 2,
                      a.dq + (size_t)(w.t.q0 + warp_row) * a.ldq + w.head * D, a.ldq);
    }
}

template <int D>
__global__ void __launch_bounds__(SM90_THREADS, 1) attn_dq_sm90(const __grid_constant__ struct attn_args a,
                                                                const __grid_constant__ struct maps m, const struct attn_tile *tiles,
                                                                int n_work)
{
    MR_DYN_SMEM(base);
    const smem_t smem = smem_of(base), bars = smem + dq_layout<D>::bars;

    if (threadIdx.x == 0) {
        for (int i = 0; i < DQ_BARS; i++)
            bar_init(bars + i * 8, i == QDO_FULL || (i >= K_FULL && i < K_FREE) || (i >= V_FULL && i < V_FREE) ? 1 : WARPS);
        bar_init_fence();
    }
    __syncthreads();
    if (threadIdx.x < GROUP) {
        registers_fewer<COPY_REGISTERS>();
        if (threadIdx.x == 0)
            copy_keys<D>(a, m, tiles, n_work, smem, bars);
    } else {
        registers_more<COMPUTE_REGISTERS>();
        walk_keys<D>(a, tiles, n_work, base, smem, bars);
    }
}

/* ---- host -------------------------------------------------------------------------------------------------------- */

static int maps_of(struct mr_cuda *c, const struct attn_args *a, int q_rows, int c_rows, int q_box, struct maps *m)
{
    const struct {
        CUtensorMap *map;
        const bf16 *p;
        int rows, cols, ld, box;
    } t[] = {
        {&m->q, a->q, q_rows, a->nh * a->hd, a->ldq, q_box}, {&m->dO, a->dO, q_rows, a->nh * a->hd, a->ldq, q_box},
        {&m->ck, a->ck, c_rows, a->kv * a->hd, a->ldc, KEYS}, {&m->cv, a->cv, c_rows, a->kv * a->hd, a->ldc, KEYS},
        {&m->bk, a->bk, q_rows, a->kv * a->hd, a->ldb, KEYS}, {&m->bv, a->bv, q_rows, a->kv * a->hd, a->ldb, KEYS},
    };

    if (!c->encode_tiled || (a->hd != 64 && a->hd != 128) || !mr_cuda_aligned16(a->dq) || c_rows == 0)
        return -ENOTSUP;
    for (const auto &x : t)
        if (mr_cuda_tensor_map(c, x.map, x.p, x.rows, x.cols, x.ld, x.box, 64))
            return -ENOTSUP;
    return 0;
}

template <int D>
static int launch_dkv(struct mr_cuda *c, const struct attn_args *a, const struct attn_plan *p, const struct maps *m)
{
    dim3 grid((unsigned)(a->kv * a->splits), (unsigned)p->n_kv);

    if (mr_cuda_check(c, cudaFuncSetAttribute(attn_dkv_sm90<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)dkv_layout<D>::bytes),
                      "attention set-up"))
        return c->err;
    MR_LAUNCH(attn_dkv_sm90<D>, grid, SM90_THREADS, dkv_layout<D>::bytes, c->stream, *a, *m, p->kv);
    return mr_cuda_launched(c, "attention backward, keys");
}

template <int D>
static int launch_dq(struct mr_cuda *c, const struct attn_args *a, const struct attn_plan *p, const struct maps *m)
{
    const int n_work = p->n_tiles * a->nh, grid = n_work < c->sms ? n_work : c->sms;

    if (mr_cuda_check(c, cudaFuncSetAttribute(attn_dq_sm90<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)dq_layout<D>::bytes),
                      "attention set-up"))
        return c->err;
    MR_LAUNCH(attn_dq_sm90<D>, grid, SM90_THREADS, dq_layout<D>::bytes, c->stream, *a, *m, p->tile, n_work);
    return mr_cuda_launched(c, "attention backward, queries");
}

int mr_cuda_attn_dkv_sm90(struct mr_cuda *c, const struct attn_args *a, const struct attn_plan *p, int q_rows, int c_rows)
{
    struct maps m;
    int e = maps_of(c, a, q_rows, c_rows, QUERIES, &m);

    return e ? e : a->hd == 64 ? launch_dkv<64>(c, a, p, &m) : launch_dkv<128>(c, a, p, &m);
}

int mr_cuda_attn_dq_sm90(struct mr_cuda *c, const struct attn_args *a, const struct attn_plan *p, int q_rows, int c_rows)
{
    struct maps m;
    int e = maps_of(c, a, q_rows, c_rows, 128, &m);

    return e ? e : a->hd == 64 ? launch_dq<64>(c, a, p, &m) : launch_dq<128>(c, a, p, &m);
}
