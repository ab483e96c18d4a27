/* Attention forward on Hopper (compute capability 9.0), head sizes 64 and 128; the rest stays with attn_fwd.cu.
 *
 * Blocks are persistent, one a multiprocessor, and take (tile, head) pairs of the plan in turn.  One thread of a block copies tiles of 128
 * queries and 128 keys with the tensor copy engine, through two stages, and runs ahead into the next tile while the others write the last
 * one out.  Two warp groups own 64 query rows each and
 *     S = Q K(i+1)^T;  O += P(i) V(i);   while that runs: softmax of S, which becomes P(i+1)
 * and take turns at issuing products, so that one's softmax runs beside the other's products.  Probabilities stay in registers.
 *
 * Tiles are copied whole: a tile may hold rows of the sequence behind its own.  Their scores are masked and their probabilities exactly 0,
 * so they count for nothing as long as they are finite numbers.  This file is compiled for sm_90a alone (CMakeLists.txt). */
#include "kernels/cuda/attn_sm90.cuh"

#include <cmath>

enum {
    KEYS = 128, STAGES = 2,
    ORDER = 1                          /* named barriers ORDER, ORDER + 1: a group's turn */
};

template <int D>
struct layout {                        /* of shared memory */
    static constexpr uint32_t tile = tile_bytes<D, 128>, q = 0, k = tile, v = k + STAGES * tile, o = v + STAGES * tile, bars = o + tile;
    static constexpr uint32_t bytes = bars + 256;
};

enum bars { Q_FULL, Q_FREE, K_FULL, K_FREE = K_FULL + STAGES, V_FULL = K_FREE + STAGES, V_FREE = V_FULL + STAGES, BARS = V_FREE + STAGES };

struct maps {
    CUtensorMap q, ck, cv, bk, bv;
};

struct work {
    struct attn_tile t;
    int head, n_context, n;            /* key tiles: of the context, and all */
};

__device__ static inline struct work work_of(const struct attn_args &a, const struct attn_tile *tiles, int i)
{
    struct work w;

    w.t = tiles[i / a.nh];
    w.head = i % a.nh;
    w.n_context = (w.t.khi - w.t.klo + KEYS - 1) / KEYS;
    w.n = w.n_context + (a.B ? (w.t.nq + KEYS - 1) / KEYS : 0);
    return w;
}

/* ---- the copying thread ------------------------------------------------------------------------------------------ */

template <int D>
__device__ static inline void load(smem_t dst, const CUtensorMap *map, int col, int row, smem_t bar)
{
    bar_expect(bar, layout<D>::tile);
    load_boxes<D, 128>(dst, map, col, row, bar);
}

template <int D>
__device__ static inline void produce(const struct attn_args &a, const struct maps &m, const struct attn_tile *tiles, int n_work,
                                      smem_t smem, smem_t bars)
{
    uint32_t at = 0;                   /* key tiles so far */

    for (int round = 0, i; (i = turn(round)) < n_work; round++) {
        const struct work w = work_of(a, tiles, i);
        const int kh = w.head / (a.nh / a.kv) * D;

        bar_wait(bars + Q_FREE * 8, ~round & 1);
        load<D>(smem + layout<D>::q, &m.q, w.head * D, w.t.q0, bars + Q_FULL * 8);
        for (int j = 0; j < w.n; j++, at++) {
            const bool own = j >= w.n_context;
            const int row = own ? w.t.q0 + (j - w.n_context) * KEYS : w.t.k0 + w.t.klo + j * KEYS;
            const uint32_t s = at % STAGES, parity = ~(at / STAGES) & 1;

            bar_wait(bars + (K_FREE + s) * 8, parity);
            load<D>(smem + layout<D>::k + s * layout<D>::tile, own ? &m.bk : &m.ck, kh, row, bars + (K_FULL + s) * 8);
            bar_wait(bars + (V_FREE + s) * 8, parity);
            load<D>(smem + layout<D>::v + s * layout<D>::tile, own ? &m.bv : &m.cv, kh, row, bars + (V_FULL + s) * 8);
        }
    }
}

/* ---- the computing groups ---------------------------------------------------------------------------------------- */

struct rows {                          /* a lane's two rows */
    float max[2], sum[2], shrink[2];
};

/* Scores become probabilities; r->shrink is what the output so far must be multiplied with. */
__device__ static inline void softmax(float (&s)[KEYS / 8][4], float scale, struct rows *r)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float top = r->max[h], base, part = 0.0f;

#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
            top = fmaxf(top, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
        base = top == -INFINITY ? 0.0f : top * scale;
        r->shrink[h] = exp2_fast(r->max[h] * scale - base);
        r->max[h] = top;
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) {
            s[n][2 * h] = exp2_fast(s[n][2 * h] * scale - base);
            s[n][2 * h + 1] = exp2_fast(s[n][2 * h + 1] * scale - base);
            part += s[n][2 * h] + s[n][2 * h + 1];
        }
        r->sum[h] = r->sum[h] * r->shrink[h] + part;
    }
}

/* Masks key tile j where a row of the warp does not see all of it. */
__device__ static inline void mask(const struct attn_args &a, const struct work &w, int j, int first, int lane, struct bounds *see,
                                   float (&s)[KEYS / 8][4])
{
    const int own = j >= w.n_context, key = own ? (j - w.n_context) * KEYS : w.t.klo + j * KEYS;

    if (j == 0 || j == w.n_context)
        bounds_of<16>(a, w.t, own, first, see);
    if (key < see->mask_lo || key + KEYS > see->mask_hi)
        mask_scores<KEYS, 1>(a, w.t, own, first, key, lane, &s);
}

/* Normalises the warp's 16 rows and writes them, and their log-sum-exp. */
template <int D>
__device__ static inline void finish(const struct attn_args &a, const struct work &w, int warp_row, int lane, unsigned char *stage,
                                     const float (&o)[D / 8][4], const struct rows &r)
{
    float inv[2];

#pragma unroll
    for (int h = 0; h < 2; h++) {
        int q = warp_row + lane / 4 + h * 8;
        float l = r.sum[h];

        l += __shfl_xor_sync(0xffffffffu, l, 1);
        l += __shfl_xor_sync(0xffffffffu, l, 2);
        inv[h] = l > 0.0f ? 1.0f / l : 0.0f;
        if (a.lse && (lane & 3) == 0 && q < w.t.nq)
            a.lse[(size_t)(w.t.q0 + q) * a.nh + w.head] = l > 0.0f ? r.max[h] * a.scale + logf(l) : 0.0f;
    }
    store_rows<D>(o, inv[0], inv[1], w.t.nq - warp_row, lane, stage, a.o + (size_t)(w.t.q0 + warp_row) * a.ldo + w.head * D,
                  a.ldo);
}

template <int D>
__device__ static inline void consume(const struct attn_args &a, const struct attn_tile *tiles, int n_work, unsigned char *base,
                                      smem_t smem, smem_t bars)
{
    const int group = threadIdx.x / GROUP - 1, lane = threadIdx.x % 32, warp_row = (threadIdx.x - GROUP) / 32 * 16;
    const int first = warp_row + lane / 4;
    const smem_t q = smem + layout<D>::q + group * 64 * 128, k = smem + layout<D>::k, v = smem + layout<D>::v;
    uint32_t at = 0, p[KEYS / 16][4];
    float o[D / 8][4], s[KEYS / 8][4];

    if (group == 1)
        named_arrive(ORDER, 2 * GROUP);                /* the first turn is group 0's */
    for (int round = 0, i; (i = turn(round)) < n_work; round++, at++) {
        const struct work w = work_of(a, tiles, i);
        struct rows r = {{-INFINITY, -INFINITY}, {}, {}};
        struct bounds see;

#pragma unroll
        for (int d = 0; d < D / 2; d++)
            o[d / 4][d % 4] = 0.0f;
        bar_wait(bars + Q_FULL * 8, round & 1);
        bar_wait(bars + (K_FULL + at % STAGES) * 8, at / STAGES & 1);
        start_rows<D, 128, KEYS>(s, q, k + at % STAGES * layout<D>::tile);
        wgmma_wait<0>();
        wgmma_pin(s);
        if (lane == 0)
            bar_arrive(bars + (K_FREE + at % STAGES) * 8);
        mask(a, w, 0, first, lane, &see, s);
        softmax(s, a.scale_log2, &r);
        pack(p, s);
        for (int j = 1; j < w.n; j++, at++) {
            const uint32_t next = at + 1;

            bar_wait(bars + (K_FULL + next % STAGES) * 8, next / STAGES & 1);
            named_sync(ORDER + group, 2 * GROUP);
            start_rows<D, 128, KEYS>(s, q, k + next % STAGES * layout<D>::tile);
            bar_wait(bars + (V_FULL + at % STAGES) * 8, at / STAGES & 1);
            start_sum<D, KEYS>(o, p, v + at % STAGES * layout<D>::tile);
            named_arrive(ORDER + 1 - group, 2 * GROUP);
            wgmma_wait<1>();
            wgmma_pin(s);
            if (lane == 0)
                bar_arrive(bars + (K_FREE + next % STAGES) * 8);
            mask(a, w, j, first, lane, &see, s);
            softmax(s, a.scale_log2, &r);
            wgmma_wait<0>();
            wgmma_pin(o);
            if (lane == 0)
                bar_arrive(bars + (V_FREE + at % STAGES) * 8);
            pack(p, s);
#pragma unroll
            for (int d = 0; d < D / 8; d++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    o[d][e] *= r.shrink[e / 2];
        }
        if (lane == 0)
            bar_arrive(bars + Q_FREE * 8);
        bar_wait(bars + (V_FULL + at % STAGES) * 8, at / STAGES & 1);
        start_sum<D, KEYS>(o, p, v + at % STAGES * layout<D>::tile);
        wgmma_wait<0>();
        wgmma_pin(o);
        if (lane == 0)
            bar_arrive(bars + (V_FREE + at % STAGES) * 8);
        finish<D>(a, w, warp_row, lane, base + layout<D>::o + warp_row * D * 2, o, r);
    }
}

template <int D>
__global__ void __launch_bounds__(SM90_THREADS, 1) attn_sm90(const __grid_constant__ struct attn_args a,
                                                             const __grid_constant__ struct maps m, const struct attn_tile *tiles,
                                                             int n_work)
{
    MR_DYN_SMEM(base);
    const smem_t smem = smem_of(base), bars = smem + layout<D>::bars;

    if (threadIdx.x == 0) {
        for (int i = 0; i < BARS; i++)                 /* filled by one thread, freed by one lane of each computing warp */
            bar_init(bars + i * 8, i == Q_FULL || (i >= K_FULL && i < K_FREE) || (i >= V_FULL && i < V_FREE) ? 1 : 8);
        bar_init_fence();
        tensor_prefetch(&m.q), tensor_prefetch(&m.ck), tensor_prefetch(&m.cv);
    }
    __syncthreads();
    if (threadIdx.x < GROUP) {
        registers_fewer<COPY_REGISTERS>();
        if (threadIdx.x == 0)
            produce<D>(a, m, tiles, n_work, smem, bars);
    } else {
        registers_more<COMPUTE_REGISTERS>();
        consume<D>(a, tiles, n_work, base, smem, bars);
    }
}

/* ---- host -------------------------------------------------------------------------------------------------------- */

/* Leaves c->encode_tiled NULL where these kernels do not run. */
int mr_cuda_attn_sm90_init(struct mr_cuda *c)
{
    const cudaFuncAttribute max = cudaFuncAttributeMaxDynamicSharedMemorySize;

    if (c->cc != 90 || mr_cuda_tensor_open(c))
        return 0;
    mr_cuda_check(c, cudaFuncSetAttribute(attn_sm90<64>, max, (int)layout<64>::bytes), "attention set-up");
    return mr_cuda_check(c, cudaFuncSetAttribute(attn_sm90<128>, max, (int)layout<128>::bytes), "attention set-up");
}

int mr_cuda_attn_sm90(struct mr_cuda *c, const struct attn_args *a, const struct attn_plan *p, int q_rows, int c_rows)
{
    const int n_work = p->n_tiles * a->nh, grid = n_work < c->sms ? n_work : c->sms, cols = a->kv * a->hd;
    struct maps m;

    if (!c->encode_tiled || (a->hd != 64 && a->hd != 128) || a->ldo % 8 || !mr_cuda_aligned16(a->o))
        return -ENOTSUP;
    if (mr_cuda_tensor_map(c, &m.q, a->q, q_rows, a->nh * a->hd, a->ldq, 128, 64) ||
        mr_cuda_tensor_map(c, &m.ck, a->ck, c_rows, cols, a->ldc, 128, 64) || mr_cuda_tensor_map(c, &m.cv, a->cv, c_rows, cols, a->ldc, 128, 64))
        return -ENOTSUP;
    if (a->B && (mr_cuda_tensor_map(c, &m.bk, a->bk, q_rows, cols, a->ldb, 128, 64) ||
                 mr_cuda_tensor_map(c, &m.bv, a->bv, q_rows, cols, a->ldb, 128, 64)))
        return -ENOTSUP;
    if (a->hd == 64)
        MR_LAUNCH(attn_sm90<64>, grid, SM90_THREADS, layout<64>::bytes, c->stream, *a, m, p->tile, n_work);
    else
        MR_LAUNCH(attn_sm90<128>, grid, SM90_THREADS, layout<128>::bytes, c->stream, *a, m, p->tile, n_work);
    return mr_cuda_launched(c, "attention");
}
