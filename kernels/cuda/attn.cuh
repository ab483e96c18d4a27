/* What the attention kernels share: tiles, arguments, and which keys a query row sees.
 *
 * Every mask of millrace is an interval: query row r sees the keys lo <= t < hi of a key range.  Causal attention: [0, position + 1).
 * Drafter attention has two ranges: the context before the anchor, cut by the window, and the own block.  So one forward kernel and one
 * pair of backward kernels serve all masks, and tiles without a boundary in them run without masking. */
#ifndef MR_CUDA_ATTN_CUH
#define MR_CUDA_ATTN_CUH

#include "kernels/cuda/mma.cuh"

#include <climits>

enum {
    Q_ROWS = 128,      /* query rows of a forward tile */
    KV_ROWS = 128      /* key rows of a key-gradient tile */
};

/* Queries [q0, q0 + nq) of one sequence; keys [klo, khi) of the context that starts at row k0; and, for drafter attention, the own block
 * keys: the same rows of bk, bv. */
struct attn_tile {
    int32_t q0, nq, k0, klo, khi, qpos, pad0, pad1;
};

/* Key gradients: key rows [row, row + nk) of ck (own 0) or bk (own 1), which are keys t0.. of their range; queries [q0, q0 + nq). */
struct kv_tile {
    int32_t row, nk, t0, q0, nq, own, slot, pad;   /* slot: place of a context tile among the context tiles */
};

struct attn_args {
    const bf16 *q, *ck, *cv, *bk, *bv;
    int ldq, ldc, ldb, ldo;
    bf16 *o;
    float *lse;                        /* (rows, nh), natural logarithm; may be NULL */
    int nh, kv, hd;
    float scale, scale_log2;           /* hd^-0.5, and that times log2(e) */
    int B;                             /* 0: causal self-attention */
    int window, causal, origin;
    const int32_t *pos;                /* anchors */

    const bf16 *dO;                    /* backward */
    const float *delta;                /* (rows, nh) sum of o * dO */
    bf16 *dq, *dck, *dcv, *dbk, *dbv;
    int lddc, lddb, splits;
    float *part_k, *part_v;            /* splits > 1: (splits, part_rows, kv * hd); row = slot * KV_ROWS + key */
    int part_rows;
};

struct span {
    int lo, hi;
};

/* Keys of the context that query `row` (a row of q; r = row - tile's first) sees. */
__device__ static inline struct span context_span(const struct attn_args &a, int row, int r, int qpos)
{
    struct span s;
    int anchor, slot;

    if (a.B == 0) {
        s.lo = 0;
        s.hi = qpos + r + 1;
        return s;
    }
    anchor = a.pos[row / a.B];
    slot = row % a.B;
    s.lo = a.window == 0 ? 0 : a.origin ? anchor - a.window : anchor + slot - (a.window - 1);
    s.hi = anchor;
    return s;
}

/* Own-block keys, counted from the tile's first row (which starts a block).  A padding block (anchor below 0) sees nothing, here and
 * above. */
__device__ static inline struct span own_span(const struct attn_args &a, int row, int r)
{
    struct span s;

    s.lo = r - r % a.B;
    s.hi = a.pos[row / a.B] < 0 ? s.lo : a.causal ? r + 1 : s.lo + a.B;
    return s;
}

/* Rows past the tile's end hold zeros and are never written: they see everything, so that they never force a mask. */
__device__ static inline struct span full_span(void)
{
    struct span s = {-0x40000000, 0x40000000};

    return s;
}

/* What the query rows of a warp see of one key range.  A lane's own rows are worked out again where a mask is applied: that is rare,
 * and registers are what this kernel is short of. */
struct bounds {
    int mask_lo, mask_hi;              /* no masking for keys in [mask_lo, mask_hi) */
    int any_lo, any_hi;                /* no row of the warp sees a key outside [any_lo, any_hi) */
};

__device__ static inline struct span span_of(const struct attn_args &a, const struct attn_tile &t, int own, int r)
{
    if (r >= t.nq)
        return full_span();
    return own ? own_span(a, t.q0 + r, r) : context_span(a, t.q0 + r, r, t.qpos);
}

/* ROWS: 16 or 32 rows of the warp.  first: the lane's first row; its others are 8, 16 and 24 further. */
template <int ROWS>
__device__ static inline void bounds_of(const struct attn_args &a, const struct attn_tile &t, int own, int first, struct bounds *b)
{
    int mask_lo = INT_MIN, mask_hi = INT_MAX, any_lo = INT_MAX, any_hi = INT_MIN;

#pragma unroll
    for (int r = first; r < first + ROWS; r += 8) {
        struct span p = span_of(a, t, own, r);

        mask_lo = max(mask_lo, p.lo);
        mask_hi = min(mask_hi, p.hi);
        if (r < t.nq) {
            any_lo = min(any_lo, p.lo);
            any_hi = max(any_hi, p.hi);
        }
    }
    b->mask_lo = warp_max(mask_lo);
    b->mask_hi = warp_min(mask_hi);
    b->any_lo = warp_min(any_lo);
    b->any_hi = warp_max(any_hi);
}

/* Scores of keys that a row does not see become -inf; BLOCKS blocks of 16 rows.  key: index of the tile's first key. */
template <int KEYS, int BLOCKS>
__device__ static inline void mask_scores(const struct attn_args &a, const struct attn_tile &t, int own, int first, int key, int lane,
                                          float s[BLOCKS][KEYS / 8][4])
{
#pragma unroll
    for (int i = 0; i < 2 * BLOCKS; i++) {
        struct span p = span_of(a, t, own, first + i * 8);
        int lo = p.lo - key - (lane & 3) * 2, hi = p.hi - key - (lane & 3) * 2;

#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                if (n * 8 + e < lo || n * 8 + e >= hi)
                    s[i >> 1][n][(i & 1) * 2 + e] = -INFINITY;
    }
}

/* ---- host -------------------------------------------------------------------------------------------------------- */

struct attn_plan {                     /* tiles on the device, longest first */
    const struct attn_tile *tile;
    const struct kv_tile *kv;
    int n_tiles, n_kv, n_context;      /* n_context of the n_kv key tiles are context tiles */
};

/* The plans below are kept by content: a microbatch is planned once, not once a layer.  Return 0, -EINVAL for a shape that is not
 * supported, -ENOMEM, or the sticky error. */
int mr_cuda_plan_causal(struct mr_cuda *c, int n_seqs, const int32_t *host_cu, struct attn_plan *out);
int mr_cuda_plan_blocks(struct mr_cuda *c, const struct mr_k_blocks *b, const struct mr_k_block_mask *mask, const int32_t *host_cu,
                        struct attn_plan *out);

/* attn_sm90.cu: the forward pass where the device is a Hopper and the shape is one of its; rows of q, and of ck, that may be read.
 * -ENOTSUP: take the other kernel; else 0 or the sticky error. */
int mr_cuda_attn_sm90(struct mr_cuda *c, const struct attn_args *a, const struct attn_plan *p, int q_rows, int c_rows);

#endif
