/* The matrix instructions of the attention kernels, and the layout of their tiles in shared memory.
 *
 * mma.sync m16n8k16 (sm_80 and newer), bf16 operands, f32 accumulators.  Lane l of a warp, with g = l/4 and t = l%4, holds
 *   A (16x16)  a[0]: (g, 2t..2t+1)  a[1]: (g+8, 2t..)  a[2]: (g, 2t+8..)  a[3]: (g+8, 2t+8..)
 *   B (16x8)   b[0]: (k = 2t..2t+1, n = g)             b[1]: (k = 2t+8.., n = g)
 *   C (16x8)   c[0..1]: (g, 2t..2t+1)                  c[2..3]: (g+8, 2t..2t+1)
 * so the C of one product, packed to bf16, is the A of the next: probabilities never leave the registers.
 *
 * A tile is ROWS x D elements; a row is D/8 chunks of 16 bytes, and chunk c of row r lies at chunk c ^ (r % 8) (D/8 >= 8), so that the
 * eight rows that one ldmatrix phase reads fall into eight different bank groups.
 *
 * Shared memory is addressed by 32-bit offsets (smem_t), as the instructions want it. */
#ifndef MR_CUDA_MMA_CUH
#define MR_CUDA_MMA_CUH

#include "kernels/cuda/ctx.cuh"

typedef uint32_t smem_t;

#ifndef MR_CUDA_EMULATED

__device__ static inline smem_t smem_of(const void *p)
{
    return (smem_t)__cvta_generic_to_shared(p);
}

__device__ static inline void mma(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Four 8x8 matrices; lane l gives the address of row l%8 of matrix l/8. */
__device__ static inline void ldmatrix(uint32_t r[4], smem_t p)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(p) : "memory");
}

__device__ static inline void ldmatrix_t(uint32_t r[4], smem_t p)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(p) : "memory");
}

/* 16 bytes global to shared, asynchronous; zeros when !ok (src must still be an address that may be formed). */
__device__ static inline void cp_async16(smem_t dst, const void *src, bool ok)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" : : "r"(dst), "l"(__cvta_generic_to_global(src)), "r"(ok ? 16 : 0)
                 : "memory");
}

__device__ static inline void cp_async4(smem_t dst, const void *src, bool ok)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" : : "r"(dst), "l"(__cvta_generic_to_global(src)), "r"(ok ? 4 : 0)
                 : "memory");
}

__device__ static inline void cp_async_commit(void)
{
    asm volatile("cp.async.commit_group;" : : : "memory");
}

/* Waits until all of this thread's copies have landed; others' only after a barrier. */
__device__ static inline void cp_async_wait(void)
{
    asm volatile("cp.async.wait_group 0;" : : : "memory");
}

/* 2^x, flushing denormals: one instruction. */
__device__ static inline float exp2_fast(float x)
{
    float y;

    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ static inline int warp_min(int v)
{
    return __reduce_min_sync(0xffffffffu, v);
}

__device__ static inline int warp_max(int v)
{
    return __reduce_max_sync(0xffffffffu, v);
}

#endif

/* Byte offset of chunk c (16 bytes) of row r in a tile with D columns. */
template <int D>
__device__ static inline uint32_t tile_at(int r, int c)
{
    constexpr int chunks = D / 8;
    int swizzled = chunks >= 8 ? c ^ (r & 7) : c ^ ((r >> 1) & 3);

    return (uint32_t)(r * chunks + swizzled) * 16;
}

/* Copies ROWS rows of D elements into a tile: row r of the tile is row first + r of src (rows of ld elements).  Rows at or after `end`, and
 * chunks at or after `chunks` (head sizes below D), become zeros.  The caller commits. */
template <int D, int ROWS, int THREADS>
__device__ static inline void load_tile(smem_t dst, const bf16 *src, int ld, int first, int end, int chunks)
{
    constexpr int C = D / 8, STEP = THREADS / C;
    const int r = threadIdx.x / C, c = threadIdx.x % C;
    const bf16 *p = src + (long long)(first + r) * ld + c * 8;

    static_assert(ROWS % STEP == 0 && STEP % 8 == 0, "every thread copies the same chunk of every STEP-th row: one swizzle a thread");
    dst += tile_at<D>(r, c);
#pragma unroll
    for (int i = 0; i < ROWS; i += STEP) {
        bool ok = first + r + i < end && c < chunks;

        cp_async16(dst + i * D * 2, ok ? p : src, ok);
        p += (long long)STEP * ld;
    }
}

/* Fragments of a tile.  Chunks are even and rows multiples of 8, so that a lane's address is a constant of the lane, XOR the chunk, plus
 * the row: one instruction a fragment.  `at` is the tile's address (a multiple of 256) plus lane_rows() or lane_cols(). */
template <int D>
__device__ static inline smem_t lane_rows(int lane)
{
    return tile_at<D>(lane & 15, lane >> 4);
}

template <int D>
__device__ static inline smem_t lane_cols(int lane)
{
    return tile_at<D>(((lane >> 4) << 3) + (lane & 7), (lane >> 3) & 1);
}

/* A: 16 rows from r, 16 columns from chunk c.  at: tile + lane_rows. */
template <int D>
__device__ static inline void frag_a(uint32_t a[4], smem_t at, int r, int c)
{
    ldmatrix(a, (at ^ (uint32_t)(c * 16)) + r * D * 2);
}

/* B of a tile whose rows are n and whose columns are k: n = r..r+15 (b[0..1]: first eight, b[2..3]: second), k from chunk c.
 * at: tile + lane_cols. */
template <int D>
__device__ static inline void frag_b(uint32_t b[4], smem_t at, int r, int c)
{
    ldmatrix(b, (at ^ (uint32_t)(c * 16)) + r * D * 2);
}

/* B of a tile whose rows are k and whose columns are n: k = r..r+15, n = chunk c (b[0..1]) and chunk c+1 (b[2..3]).
 * at: tile + lane_rows. */
template <int D>
__device__ static inline void frag_bt(uint32_t b[4], smem_t at, int r, int c)
{
    ldmatrix_t(b, (at ^ (uint32_t)(c * 16)) + r * D * 2);
}

/* A fragment from the C of two neighbouring n-blocks of a product. */
__device__ static inline void frag_c(uint32_t a[4], const float lo[4], const float hi[4])
{
    a[0] = bf_pack(lo[0], lo[1]);
    a[1] = bf_pack(lo[2], lo[3]);
    a[2] = bf_pack(hi[0], hi[1]);
    a[3] = bf_pack(hi[2], hi[3]);
}

#endif
