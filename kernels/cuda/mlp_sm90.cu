/* The first half of an MLP in one kernel on Hopper (compute capability 9.0): m = silu(x Wg^T) * (x Wu^T).
 *
 * A tile is 256 rows of m by 96 columns, and its product 192 columns: 96 of gate, 96 of up.  So a thread's accumulators hold gate and up of
 * the same elements of m, and neither is ever written.  Blocks are persistent, one a multiprocessor, in clusters of two that take tiles side
 * by side.  One thread of a block copies with the tensor copy engine, through three stages of 64 columns of x and W, and runs ahead into the
 * next tile while the others write the last one out.  Two warp groups own 128 rows each.
 *
 * The blocks of a cluster need the same rows of x: each copies half of them into both.  So a stage may be filled again when the groups of
 * both blocks have read it, which each tells both.
 *
 * At this size a Hopper is at its power limit, and what moves least does most: large tiles, x read once for two blocks, and products waited
 * for in each k-step rather than one step later (docs/performance.md).  Order of everything is fixed: the same bits every time.
 * This file is compiled for sm_90a alone (CMakeLists.txt). */
#include "kernels/cuda/wgmma.cuh"

enum {
    BLOCKS = 2,                        /* of a cluster */
    ROWS = 256, COLS = 96,             /* of m, a tile */
    STEP = 64,                         /* columns of x and W, a stage */
    STAGES = 3,
    GROUP = 128, GROUPS = 2, THREADS = GROUP * (1 + GROUPS),
    PARTS = ROWS / GROUPS / 64,        /* products of 64 rows of a group, one below the other */
    BOX_ROWS = 16, BOX_COLS = 32,      /* of m, as it is written: a warp's rows of a part */
    SWEEP = 16,                        /* tiles of rows that sweep the weights together: what they read of x stays in the second-level cache */
    MIN_ROWS = 1024,                   /* of a call: below, tiles of 256 rows are too coarse */
    COPY_REGISTERS = 24, COMPUTE_REGISTERS = 240       /* of 65536: 128 * (24 + 2 * 240) */
};

static constexpr uint32_t X_BYTES = ROWS * STEP * 2, W_BYTES = 2 * COLS * STEP * 2, STAGE = X_BYTES + W_BYTES;
static constexpr uint32_t BOX = BOX_ROWS * BOX_COLS * 2, PART_OUT = COLS / BOX_COLS * BOX, WARP_OUT = PARTS * PART_OUT;

/* Shared memory. */
static constexpr uint32_t OUT = STAGES * STAGE, FULL = OUT + GROUPS * 4 * WARP_OUT, FREE = FULL + STAGES * 8, BYTES = FREE + STAGES * 8;

struct mlp_args {
    CUtensorMap x, w, m;
    int row_tiles, col_tiles;          /* col_tiles: of a cluster, BLOCKS * COLS columns */
    int steps, I;
};

struct share {                         /* a block's part of the work: tiles of its cluster */
    int rank, first, step, n;
};

/* First row and column of m of the block's share of tile t: SWEEP tiles of rows at a time sweep the columns, forth and back. */
__device__ static inline void tile_of(const struct mlp_args &a, const struct share &w, int t, int *row, int *col)
{
    const int sweep = t / (SWEEP * a.col_tiles), first = sweep * SWEEP, high = min((int)SWEEP, a.row_tiles - first);
    const int i = t - first * a.col_tiles, across = i / high;

    *row = (first + i % high) * ROWS;
    *col = ((sweep & 1 ? a.col_tiles - 1 - across : across) * BLOCKS + w.rank) * COLS;
}

/* ---- the copying thread ------------------------------------------------------------------------------------------ */

__device__ static inline void produce(const struct mlp_args &a, const struct share &w, smem_t smem)
{
    const uint16_t all = (1 << BLOCKS) - 1;
    uint32_t s = 0, parity = 0;
    int row, col;

    for (int t = w.first; t < w.n; t += w.step) {
        tile_of(a, w, t, &row, &col);
        row += w.rank * (ROWS / BLOCKS);
#pragma unroll 1
        for (int k = 0; k < a.steps; k++) {
            const smem_t xs = smem + s * STAGE, ws = xs + X_BYTES, bar = smem + FULL + 8 * s;

            bar_wait(smem + FREE + 8 * s, parity ^ 1);
            bar_expect(bar, STAGE);    /* the other block's half of x too, which may have come already */
            tensor_load_all(xs + w.rank * (X_BYTES / BLOCKS), &a.x, k * STEP, row, bar, all);
            tensor_load(ws, &a.w, k * STEP, col, bar);
            tensor_load(ws + W_BYTES / 2, &a.w, k * STEP, a.I + col, bar);
            if (++s == STAGES)
                s = 0, parity ^= 1;
        }
    }
}

/* ---- the computing groups ---------------------------------------------------------------------------------------- */

/* c = or += the product of one stage; it has been read when this returns. */
__device__ static inline void multiply(float (&c)[PARTS][COLS / 4][4], smem_t xs, smem_t ws, int add)
{
    const uint64_t x = desc_of(xs, 16), w = desc_of(ws, 16);

#pragma unroll
    for (int p = 0; p < PARTS; p++)
        wgmma_pin(c[p]);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < STEP / 16; i++)
#pragma unroll
        for (int p = 0; p < PARTS; p++)
            wgmma_ss(c[p], x + (p * 64 * STEP * 2 + i * 32) / 16, w + i * 32 / 16, i > 0 || add);
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int p = 0; p < PARTS; p++)
        wgmma_pin(c[p]);
}

/* silu(g0) u0 and silu(g1) u1.  Two divisions by one reciprocal; exponents are held below 2^60 so that their product stays finite (where they
 * are held, silu is below 1e-16 for gates down to -90, and below 1e-14 to -10000). */
__device__ static inline uint32_t silu_mul(float g0, float g1, float u0, float u1)
{
    const float log2e = 1.4426950408889634f;
    const float e0 = 1.0f + exp2_fast(fminf(g0 * -log2e, 60.0f)), e1 = 1.0f + exp2_fast(fminf(g1 * -log2e, 60.0f));
    const float r = reciprocal_fast(e0 * e1);

    return bf_pack(g0 * u0 * (r * e1), g1 * u1 * (r * e0));
}

/* 16 columns of a part, those of two 8-column blocks of gate and of up, to the warp's piece of shared memory. */
__device__ static inline void put(const float (*g)[4], const float (*u)[4], int col, smem_t out, int lane)
{
    const int row = lane % 16, chunk = col % BOX_COLS / 8 + lane / 16;
    const smem_t at = out + col / BOX_COLS * BOX + row * (BOX_COLS * 2) + ((chunk ^ (row / 2 & 3)) << 4);
    uint32_t v[4];

#pragma unroll
    for (int i = 0; i < 4; i++)
        v[i] = silu_mul(g[i / 2][i % 2 * 2], g[i / 2][i % 2 * 2 + 1], u[i / 2][i % 2 * 2], u[i / 2][i % 2 * 2 + 1]);
    stmatrix(at, v);
}

/* Writes a warp's rows of the tile: row, col of its first element of m. */
__device__ static inline void finish(const struct mlp_args &a, const float (&c)[PARTS][COLS / 4][4], smem_t out, int row, int col, int lane)
{
    if (lane == 0)
        tensor_store_wait();           /* the last tile's stores have read the piece */
    __syncwarp();
#pragma unroll
    for (int p = 0; p < PARTS; p++)
#pragma unroll
        for (int j = 0; j < COLS; j += 16)
            put(c[p] + j / 8, c[p] + COLS / 8 + j / 8, j, out + p * PART_OUT, lane);
    tensor_store_fence();
    __syncwarp();
    if (lane == 0) {
#pragma unroll
        for (int p = 0; p < PARTS; p++)
#pragma unroll
            for (int j = 0; j < COLS; j += BOX_COLS)
                tensor_store(&a.m, col + j, row + p * 64, out + p * PART_OUT + j / BOX_COLS * BOX);
        tensor_store_commit();
    }
}

__device__ static inline void consume(const struct mlp_args &a, const struct share &w, smem_t smem, int group, int warp, int lane)
{
    const smem_t xs = smem + group * (ROWS / GROUPS * STEP * 2), ws = smem + X_BYTES, out = smem + OUT + (group * 4 + warp) * WARP_OUT;
    const int warp_row = group * (ROWS / GROUPS) + warp * 16;
    uint32_t s = 0, parity = 0;
    float c[PARTS][COLS / 4][4];
    int row, col;

    for (int t = w.first; t < w.n; t += w.step) {
#pragma unroll 1
        for (int k = 0; k < a.steps; k++) {
            bar_wait(smem + FULL + 8 * s, parity);
            multiply(c, xs + s * STAGE, ws + s * STAGE, k > 0);
            bar_arrive_at(smem + FREE + 8 * s, (uint32_t)warp, lane == 0 && warp < BLOCKS);    /* warp i tells block i */
            if (++s == STAGES)
                s = 0, parity ^= 1;
        }
        tile_of(a, w, t, &row, &col);
        finish(a, c, out, row + warp_row, col, lane);
    }
    if (lane == 0)
        tensor_store_wait();
}

__global__ void __launch_bounds__(THREADS, 1) mlp_sm90(const __grid_constant__ struct mlp_args a)
{
    MR_DYN_SMEM(base);
    const smem_t smem = smem_of(base);
    const int group = __shfl_sync(0xffffffffu, (int)threadIdx.x / GROUP, 0), lane = (int)threadIdx.x % 32;
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32 % 4, 0);
    const struct share w = {(int)cluster_rank(), (int)blockIdx.x / BLOCKS, (int)gridDim.x / BLOCKS, a.row_tiles * a.col_tiles};

    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            bar_init(smem + FULL + 8 * i, 1);
            bar_init(smem + FREE + 8 * i, BLOCKS * GROUPS);
        }
        bar_init_fence();
        tensor_prefetch(&a.x), tensor_prefetch(&a.w);
    }
    cluster_sync();
    if (group == 0) {
        registers_fewer<COPY_REGISTERS>();
        if (threadIdx.x == 0)
            produce(a, w, smem);
        __syncwarp();
    } else {
        registers_more<COMPUTE_REGISTERS>();
        consume(a, w, smem, group - 1, warp, lane);
    }
    cluster_sync();                    /* nobody leaves while the other block may still copy to it, or arrive at its barriers */
}

/* ---- host -------------------------------------------------------------------------------------------------------- */

static void configure(cudaLaunchConfig_t *g, cudaLaunchAttribute *cluster, int clusters, cudaStream_t stream)
{
    *g = cudaLaunchConfig_t{};
    g->gridDim = dim3((unsigned)(clusters * BLOCKS)), g->blockDim = dim3(THREADS), g->dynamicSmemBytes = BYTES, g->stream = stream;
    cluster->id = cudaLaunchAttributeClusterDimension;
    cluster->val.clusterDim.x = BLOCKS, cluster->val.clusterDim.y = cluster->val.clusterDim.z = 1;
    g->attrs = cluster, g->numAttrs = 1;
}

/* At the first use, which loads the kernel: how many clusters are resident at once. */
static int open_mlp(struct mr_cuda *c)
{
    cudaLaunchConfig_t g;
    cudaLaunchAttribute cluster;
    int n = 0;

    if (c->mlp_clusters)
        return c->err;
    c->mlp_clusters = -1;
    if (c->cc != 90 || mr_cuda_tensor_open(c))
        return 0;
    configure(&g, &cluster, c->sms / BLOCKS, c->stream);
    if (mr_cuda_check(c, cudaFuncSetAttribute(mlp_sm90, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)BYTES), "MLP set-up") ||
        mr_cuda_check(c, cudaOccupancyMaxActiveClusters(&n, mlp_sm90, &g), "MLP set-up"))
        return c->err;
    if (n > 0)
        c->mlp_clusters = n;
    return 0;
}

int mr_cuda_mlp_sm90(struct mr_cuda *c, int rows, int I, int kk, const void *x, int ldx, const void *W, void *m)
{
    cudaLaunchConfig_t g;
    cudaLaunchAttribute cluster;
    struct mlp_args a;

    if (rows < MIN_ROWS || I % (BLOCKS * COLS) || kk % STEP || ldx % 8 || !mr_cuda_aligned16(x) || !mr_cuda_aligned16(W) ||
        !mr_cuda_aligned16(m))
        return -ENOTSUP;
    if (open_mlp(c))
        return c->err;
    a.row_tiles = mr_cuda_div_up(rows, ROWS), a.col_tiles = I / (BLOCKS * COLS), a.steps = kk / STEP, a.I = I;
    if (c->mlp_clusters < 0 || a.row_tiles * a.col_tiles < c->mlp_clusters)    /* too few: smaller tiles use more multiprocessors */
        return -ENOTSUP;
    if (mr_cuda_tensor_map(c, &a.x, x, rows, kk, ldx, ROWS / BLOCKS, STEP) || mr_cuda_tensor_map(c, &a.w, W, 2 * I, kk, kk, COLS, STEP) ||
        mr_cuda_tensor_map(c, &a.m, m, rows, I, I, BOX_ROWS, BOX_COLS))
        return -ENOTSUP;
    configure(&g, &cluster, c->mlp_clusters, c->stream);
    return mr_cuda_check(c, cudaLaunchKernelEx(&g, mlp_sm90, a), "gate, up and SwiGLU");
}
