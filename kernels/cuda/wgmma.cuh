/* The instructions of Hopper (sm_90a) that the kernels of *_sm90.cu use: products of a warp group, bulk tensor copies, their barriers,
 * clusters of blocks.
 *
 * A product m64nNk16 is issued by a warp group (four warps whose first index is a multiple of four).  B, and A where it is not in
 * registers, are read from shared memory through a descriptor; the f32 result lies in registers as that of mma.sync does: warp w of the
 * group holds rows 16w.., lane l rows l/4 and l/4 + 8, columns 8n + 2(l%4)..+1 in c[n].  A in registers is a C packed to bf16 (frag_c).
 *
 * Tiles lie in panels of 64 columns: ROWS x 128 bytes, in which the tensor copy engine swaps 16-byte chunks (chunk c of row r at c ^ r%8),
 * the layout that the descriptors below name ("128-byte swizzle").  Panels are 1024-byte aligned.
 * Read along its columns (A, and B of Q K^T) a tile is "K-major": eight rows every 1024 bytes, the next 16 columns 32 bytes on.
 * Read along its rows (B of P V) it is "MN-major": the next eight rows every 1024 bytes, the next 64 columns one panel on. */
#ifndef MR_CUDA_WGMMA_CUH
#define MR_CUDA_WGMMA_CUH

#include "kernels/cuda/mma.cuh"

#include <cuda.h>

/* ---- barriers in shared memory ----------------------------------------------------------------------------------- */

__device__ static inline void bar_init(smem_t bar, int arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(bar), "r"(arrivals) : "memory");
}

/* Before the barrier (of the block, or of the cluster) behind which others use what was initialised. */
__device__ static inline void bar_init_fence(void)
{
    asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
}

__device__ static inline void bar_arrive(smem_t bar)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(bar) : "memory");
}

/* Arrives, and lets the phase last until `bytes` have been copied as well. */
__device__ static inline void bar_expect(smem_t bar, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(bar), "r"(bytes) : "memory");
}

/* Arrives at the barrier of the same place in block `rank` of the cluster, if `on`.  Nothing that this thread wrote is published by that: for
 * stages that were only read (products) it need not be.  With .release.cluster it would be, and the compiler makes a full memory barrier of
 * the device of it (MEMBAR.ALL.GPU): in every k-step, that costs a sixth of a product's rate. */
__device__ static inline void bar_arrive_at(smem_t bar, uint32_t rank, bool on)
{
    asm volatile("{\n.reg .pred p;\n.reg .b32 there;\nsetp.ne.b32 p, %2, 0;\n"
                 "@p mapa.shared::cluster.u32 there, %0, %1;\n"
                 "@p mbarrier.arrive.shared::cluster.b64 _, [there];\n}"
                 : : "r"(bar), "r"(rank), "r"((int)on) : "memory");
}

/* Waits for the end of the phase of this parity. */
__device__ static inline void bar_wait(smem_t bar, uint32_t parity)
{
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}" : : "r"(bar), "r"(parity) : "memory");
}

/* Barriers of the block by number (0 is __syncthreads): wait for, or only announce oneself to, `threads` threads. */
__device__ static inline void named_sync(int id, int threads)
{
    asm volatile("bar.sync %0, %1;" : : "r"(id), "r"(threads) : "memory");
}

__device__ static inline void named_arrive(int id, int threads)
{
    asm volatile("bar.arrive %0, %1;" : : "r"(id), "r"(threads) : "memory");
}

__device__ static inline uint32_t cluster_rank(void)
{
    uint32_t r;

    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}

/* Every thread of every block of the cluster. */
__device__ static inline void cluster_sync(void)
{
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" : : : "memory");
}

/* ---- copies ------------------------------------------------------------------------------------------------------ */

/* The driver's function that makes tensor maps; 0, or -ENOTSUP where there is none (tensor_map.cu). */
int mr_cuda_tensor_open(struct mr_cuda *c);

/* The tensor map of a (rows, cols; ld) tensor of bf16, in boxes of box_rows rows and 64 columns ("128-byte swizzle": above) or 32 columns
 * ("64-byte swizzle": chunk c of row r at c ^ r/2%4).  After mr_cuda_tensor_open.  0, or -EINVAL. */
int mr_cuda_tensor_map(struct mr_cuda *c, CUtensorMap *map, const void *p, int rows, int cols, int ld, int box_rows, int box_cols);

/* One box of a tensor, from column x and row y, to shared memory; arrives on bar by its bytes.  What lies outside the tensor is zero. */
__device__ static inline void tensor_load(smem_t dst, const CUtensorMap *map, int x, int y, smem_t bar)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
                 : : "r"(dst), "l"(map), "r"(bar), "r"(x), "r"(y) : "memory");
}

/* The same into every block of the cluster that is in `mask` (bit: rank), at the same place there; arrives on the barrier of each. */
__device__ static inline void tensor_load_all(smem_t dst, const CUtensorMap *map, int x, int y, smem_t bar, uint16_t mask)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;"
                 : : "r"(dst), "l"(map), "r"(bar), "r"(x), "r"(y), "h"(mask) : "memory");
}

/* One box from shared memory to a tensor; what lies outside the tensor is not written.  What is stored leaves the second-level cache first. */
__device__ static inline void tensor_store(const CUtensorMap *map, int x, int y, smem_t src)
{
    const uint64_t evict_first = 0x12F0000000000000ull;

    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2, %3}], [%1], %4;"
                 : : "l"(map), "r"(src), "r"(x), "r"(y), "l"(evict_first) : "memory");
}

/* Makes what this thread wrote to shared memory visible to stores; a warp: each lane, then __syncwarp, then one lane stores. */
__device__ static inline void tensor_store_fence(void)
{
    asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
}

__device__ static inline void tensor_store_commit(void)
{
    asm volatile("cp.async.bulk.commit_group;" : : : "memory");
}

/* Until this thread's stores have read their shared memory. */
__device__ static inline void tensor_store_wait(void)
{
    asm volatile("cp.async.bulk.wait_group.read 0;" : : : "memory");
}

__device__ static inline void tensor_prefetch(const CUtensorMap *map)
{
    asm volatile("prefetch.tensormap [%0];" : : "l"(map) : "memory");
}

/* ---- products ---------------------------------------------------------------------------------------------------- */

/* Four 8x8 matrices of bf16, laid out over the warp as C is; lane l gives the address of row l%8 of matrix l/8. */
__device__ static inline void stmatrix(smem_t p, const uint32_t r[4])
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" : : "r"(p), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

/* 1 / x, flushing denormals: one instruction. */
__device__ static inline float reciprocal_fast(float x)
{
    float y;

    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Descriptor of a tile at `at`, stride 1024 bytes between groups of eight rows, `panel` bytes between panels. */
__device__ static inline uint64_t desc_of(smem_t at, uint32_t panel)
{
    return (uint64_t)1 << 62 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)(panel >> 4) << 16 | ((at & 0x3ffff) >> 4);
}

__device__ static inline void wgmma_fence(void)
{
    asm volatile("wgmma.fence.sync.aligned;" : : : "memory");
}

__device__ static inline void wgmma_commit(void)
{
    asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory");
}

/* Until at most N committed groups are still running. */
template <int N>
__device__ static inline void wgmma_wait(void)
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(N) : "memory");
}

/* Keeps the compiler from moving accesses to registers that a running product owns. */
template <int N>
__device__ static inline void wgmma_pin(float (&c)[N][4])
{
#pragma unroll
    for (int i = 0; i < N; i++)
        asm volatile("" : "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3]) : : "memory");
}

template <int N>
__device__ static inline void wgmma_pin(uint32_t (&a)[N][4])
{
#pragma unroll
    for (int i = 0; i < N; i++)
        asm volatile("" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3]) : : "memory");
}

#define MR_C4(c, i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define MR_C16(c, i) MR_C4(c, i), MR_C4(c, i + 1), MR_C4(c, i + 2), MR_C4(c, i + 3)
#define MR_R32 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define MR_R64 MR_R32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58," \
                      "%59,%60,%61,%62,%63"
#define MR_R96 MR_R64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91," \
                      "%92,%93,%94,%95"

/* c (64 x 8N) = or += A B, both K-major in shared memory; `add` 0 overwrites c. */
__device__ static inline void wgmma_ss(float (&c)[24][4], uint64_t a, uint64_t b, int add)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %98, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 " MR_R96 "}, %96, %97, p, 1, 1, 0, 0;\n}"
                 : MR_C16(c, 0), MR_C16(c, 4), MR_C16(c, 8), MR_C16(c, 12), MR_C16(c, 16), MR_C16(c, 20) : "l"(a), "l"(b), "r"(add));
}

__device__ static inline void wgmma_ss(float (&c)[16][4], uint64_t a, uint64_t b, int add)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " MR_R64 "}, %64, %65, p, 1, 1, 0, 0;\n}"
                 : MR_C16(c, 0), MR_C16(c, 4), MR_C16(c, 8), MR_C16(c, 12) : "l"(a), "l"(b), "r"(add));
}

__device__ static inline void wgmma_ss(float (&c)[8][4], uint64_t a, uint64_t b, int add)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " MR_R32 "}, %32, %33, p, 1, 1, 0, 0;\n}"
                 : MR_C16(c, 0), MR_C16(c, 4) : "l"(a), "l"(b), "r"(add));
}

/* c += A B, A in registers, B MN-major in shared memory. */
__device__ static inline void wgmma_rs(float (&c)[16][4], const uint32_t a[4], uint64_t b)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " MR_R64 "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"
                 : MR_C16(c, 0), MR_C16(c, 4), MR_C16(c, 8), MR_C16(c, 12) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ static inline void wgmma_rs(float (&c)[8][4], const uint32_t a[4], uint64_t b)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " MR_R32 "}, {%32,%33,%34,%35}, %36, 1, 1, 1, 1;"
                 : MR_C16(c, 0), MR_C16(c, 4) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

/* Registers a thread of this warp group may hold from here on. */
template <int N>
__device__ static inline void registers_more(void)
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(N));
}

template <int N>
__device__ static inline void registers_fewer(void)
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(N));
}

#endif
