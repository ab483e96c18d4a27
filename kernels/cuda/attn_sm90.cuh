/* What the attention kernels for Hopper share: tiles, products of tiles, and who works on what.
 *
 * A block is three warp groups: the first copies (few registers), the others compute (many), 64 rows of a 128-row tile each. */
#ifndef MR_CUDA_ATTN_SM90_CUH
#define MR_CUDA_ATTN_SM90_CUH

#include "kernels/cuda/attn.cuh"
#include "kernels/cuda/wgmma.cuh"

enum {
    GROUP = 128, SM90_THREADS = 3 * GROUP,
    COPY_REGISTERS = 40, COMPUTE_REGISTERS = 232       /* of 65536: 128 * (40 + 2 * 232) */
};

/* Bytes of a tile of ROWS rows, and of one of its panels. */
template <int D, int ROWS>
constexpr uint32_t tile_bytes = ROWS * D * 2;

template <int ROWS>
constexpr uint32_t panel_bytes = ROWS * 128;

/* Starts the copy of a tile, from row `row` and column `col`; the caller has announced its bytes to bar. */
template <int D, int ROWS>
__device__ static inline void load_boxes(smem_t dst, const CUtensorMap *map, int col, int row, smem_t bar)
{
#pragma unroll
    for (int p = 0; p < D / 64; p++)
        tensor_load(dst + p * panel_bytes<ROWS>, map, col + p * 64, row, bar);
}

/* Starts C = A B^T for 64 rows of A, which lie in a tile of A_ROWS rows (a: the first of the 64), and a tile of N rows B. */
template <int D, int A_ROWS, int N>
__device__ static inline void start_rows(float (&c)[N / 8][4], smem_t a, smem_t b)
{
    wgmma_pin(c);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < D / 16; i++)
        wgmma_ss(c, desc_of(a + i / 4 * panel_bytes<A_ROWS> + i % 4 * 32, 16), desc_of(b + i / 4 * panel_bytes<N> + i % 4 * 32, 16), i > 0);
    wgmma_commit();
}

/* Starts C += A B for A (64 x K) in registers and a tile B of K rows. */
template <int D, int K>
__device__ static inline void start_sum(float (&c)[D / 8][4], uint32_t (&a)[K / 16][4], smem_t b)
{
    wgmma_pin(c);
    wgmma_pin(a);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < K / 16; i++)
        wgmma_rs(c, a[i], desc_of(b + i * 16 * 128, panel_bytes<K>));
    wgmma_commit();
}

template <int N>
__device__ static inline void pack(uint32_t (&p)[N / 2][4], const float (&s)[N][4])
{
#pragma unroll
    for (int n = 0; n < N / 2; n++)
        frag_c(p[n], s[2 * n], s[2 * n + 1]);
}

/* The block's piece of work in this round, of a list with the longest first: forth and back, so that nobody always gets the longest. */
__device__ static inline int turn(int round)
{
    return round * (int)gridDim.x + (int)(round & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
}

/* Writes a warp's 16 rows of results, times f by row half, through its own piece of shared memory so that stores are whole lines.
 * dst: the row of the first; nq: how many of the 16 exist. */
template <int D>
__device__ static inline void store_rows(const float (&c)[D / 8][4], float f0, float f1, int nq, int lane, unsigned char *stage, bf16 *dst,
                                         int ld)
{
    constexpr int CHUNKS = D / 8, AT_ONCE = 32 / CHUNKS;

#pragma unroll
    for (int d = 0; d < D / 8; d++) {
        *(uint32_t *)(stage + tile_at<D>(lane / 4, d) + (lane & 3) * 4) = bf_pack(c[d][0] * f0, c[d][1] * f0);
        *(uint32_t *)(stage + tile_at<D>(lane / 4 + 8, d) + (lane & 3) * 4) = bf_pack(c[d][2] * f1, c[d][3] * f1);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16; i += AT_ONCE) {
        int row = i + lane / CHUNKS, chunk = lane % CHUNKS;

        if (row < nq)
            *(uint4 *)(dst + (size_t)row * ld + chunk * 8) = *(const uint4 *)(stage + tile_at<D>(row, chunk));
    }
    __syncwarp();
}

#endif
