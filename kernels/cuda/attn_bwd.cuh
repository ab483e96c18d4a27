/* What the two forms of the attention backward share: how the gradients of keys are written. */
#ifndef MR_CUDA_ATTN_BWD_CUH
#define MR_CUDA_ATTN_BWD_CUH

#include "kernels/cuda/attn.cuh"

static const float LOG2E = 1.44269504088896340736f;

/* Writes 16 keys' dK or dV: to bf16 rows (set, or added when add), or to f32 partial sums. */
template <int D>
__device__ static inline void store_keys(const float acc[D / 8][4], float scale, int hd, int nk, int first, int lane, bf16 *dst, int ld,
                                         bool add, float *part, int part_ld)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int r = first + lane / 4 + h * 8, col = (lane & 3) * 2;

#pragma unroll
        for (int d = 0; d < D / 8; d++) {
            float x = acc[d][2 * h] * scale, y = acc[d][2 * h + 1] * scale;

            if (r >= nk || d * 8 >= hd)
                continue;
            if (part) {
                *(float2 *)(part + (size_t)r * part_ld + d * 8 + col) = make_float2(x, y);
            } else {
                uint32_t *p = (uint32_t *)(dst + (size_t)r * ld + d * 8 + col);

                *p = add ? bf_pack(bf_lo(*p) + x, bf_hi(*p) + y) : bf_pack(x, y);
            }
        }
    }
}

template <int D>
__device__ static inline void store_tile(const struct attn_args &a, const struct kv_tile &t, int kh, int split, const float dk[D / 8][4],
                                         const float dv[D / 8][4], int first, int lane)
{
    int width = a.kv * a.hd, ld = t.own ? a.lddb : a.lddc;
    size_t at = (size_t)t.row * ld + kh * a.hd;
    float *pk = NULL, *pv = NULL;

    if (!t.own && a.splits > 1) {
        size_t row = (size_t)split * a.part_rows + (size_t)t.slot * KV_ROWS;

        pk = a.part_k + row * width + kh * a.hd;
        pv = a.part_v + row * width + kh * a.hd;
    }
    store_keys<D>(dk, a.scale, a.hd, t.nk, first, lane, (t.own ? a.dbk : a.dck) + at, ld, !t.own, pk, width);
    store_keys<D>(dv, 1.0f, a.hd, t.nk, first, lane, (t.own ? a.dbv : a.dcv) + at, ld, !t.own, pv, width);
}

/* attn_bwd_sm90.cu: both passes where the device is a Hopper and the shape is one of its; rows of ck that may be read.
 * -ENOTSUP: take the other kernels; else 0 or the sticky error.  The sums of splits are the caller's. */
int mr_cuda_attn_dkv_sm90(struct mr_cuda *c, const struct attn_args *a, const struct attn_plan *p, int q_rows, int c_rows);
int mr_cuda_attn_dq_sm90(struct mr_cuda *c, const struct attn_args *a, const struct attn_plan *p, int q_rows, int c_rows);

#endif
