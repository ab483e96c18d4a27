/* The emulated device: fibers, barriers, warp exchange, asynchronous copies; and plain loops in the place of cuBLAS.
 *
 * A fiber switches by saving the callee-saved registers on its stack (x86-64, System V): swapcontext would cost two system calls a switch,
 * and a tile of attention needs some ten thousand. */
#include "kernels/cuda/attn_bwd.cuh"

#include <vector>

dim3 threadIdx, blockIdx, blockDim, gridDim;
unsigned char *emu_smem;

enum { STACK = 64 << 10, LANES = 32, MAX_THREADS = 1024 };

struct copy {
    void *dst;
    const void *src;
    int n;
    bool ok;
};

struct fiber {
    void *sp;
    bool done;
    std::vector<struct copy> open, committed;
};

struct meeting {                       /* a barrier of `all` threads, used again and again */
    unsigned arrived, round;
};

static struct fiber fibers[MAX_THREADS];
static unsigned char *stacks;
static void *main_sp;
static unsigned current, live;
static struct meeting block_meeting, warp_meeting[MAX_THREADS / LANES];
static unsigned char slot[MAX_THREADS][64];
static const std::function<void()> *body;
static bool early;

extern "C" void emu_switch(void **save, void *load);
asm(".text\n.globl emu_switch\nemu_switch:\n"
    "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
    "mov %rsp, (%rdi)\nmov %rsi, %rsp\n"
    "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n");

static void yield(void)
{
    emu_switch(&fibers[current].sp, main_sp);
}

static void fiber_main(void)
{
    (*body)();
    fibers[current].done = true;
    live--;
    yield();
    abort();
}

static void fiber_start(unsigned i)
{
    void **sp = (void **)(stacks + (size_t)(i + 1) * STACK) - 2;   /* aligned as after a call */

    *sp = (void *)fiber_main;
    fibers[i].sp = sp - 6;
    fibers[i].done = false;
    fibers[i].open.clear();
    fibers[i].committed.clear();
}

static void run_block(unsigned n, bool backwards)
{
    block_meeting = {0, 0};
    for (unsigned i = 0; i < n; i++)
        fiber_start(i);
    for (unsigned w = 0; w < n / LANES; w++)
        warp_meeting[w] = {0, 0};
    live = n;
    while (live)
        for (unsigned i = 0; i < n; i++) {
            current = backwards ? n - 1 - i : i;
            if (fibers[current].done)
                continue;
            threadIdx = dim3(current, 0, 0);
            emu_switch(&main_sp, fibers[current].sp);
        }
}

void emu_launch(dim3 grid, dim3 block, size_t smem, const std::function<void()> &kernel)
{
    static unsigned count;
    unsigned n = block.x;

    if (!stacks) {
        stacks = (unsigned char *)aligned_alloc(64, (size_t)MAX_THREADS * STACK);
        early = getenv("MR_EMU_ASYNC") != NULL;
    }
    if (n == 0 || n > MAX_THREADS || n % LANES || block.y != 1 || grid.x == 0 || grid.y == 0 || grid.y > 65535) {
        fprintf(stderr, "emulated launch of (%u,%u) blocks of %u threads\n", grid.x, grid.y, n);
        abort();
    }
    emu_smem = (unsigned char *)aligned_alloc(1024, (smem + 1023) / 1024 * 1024 + 1024);
    body = &kernel;
    gridDim = grid;
    blockDim = block;
    for (unsigned y = 0; y < grid.y; y++)
        for (unsigned x = 0; x < grid.x; x++) {
            blockIdx = dim3(x, y, 0);
            memset(emu_smem, 0xff, smem);
            run_block(n, count++ & 1);
        }
    free(emu_smem);
}

/* ---- meetings ---------------------------------------------------------------------------------------------------- */

/* Threads that have returned count as arrived at a block barrier, and are an error in a warp operation. */
static void meet(struct meeting *m, unsigned all, bool whole)
{
    unsigned round = m->round;

    m->arrived++;
    while (m->round == round) {
        if (m->arrived == (whole ? all : live)) {
            m->arrived = 0;
            m->round++;
            return;
        }
        yield();
    }
}

void __syncthreads(void)
{
    meet(&block_meeting, 0, false);
}

void __syncwarp(void)
{
    meet(&warp_meeting[current / LANES], LANES, true);
}

void emu_exchange(const void *mine, size_t n, void *all)
{
    unsigned first = current / LANES * LANES;

    memcpy(slot[current], mine, n);
    __syncwarp();
    for (unsigned l = 0; l < LANES; l++)
        memcpy((unsigned char *)all + l * n, slot[first + l], n);
    __syncwarp();
}

/* ---- asynchronous copies ----------------------------------------------------------------------------------------- */

static void land(const struct copy &c)
{
    if (c.ok)
        memcpy(c.dst, c.src, (size_t)c.n);
    else
        memset(c.dst, 0, (size_t)c.n);
}

void emu_copy_async(void *dst, const void *src, int n, bool ok)
{
    struct copy c = {dst, src, n, ok};

    if (early)
        land(c);
    else
        fibers[current].open.push_back(c);
}

void emu_copy_commit(void)
{
    struct fiber *f = &fibers[current];

    f->committed.insert(f->committed.end(), f->open.begin(), f->open.end());
    f->open.clear();
}

void emu_copy_wait(void)
{
    for (const struct copy &c : fibers[current].committed)
        land(c);
    fibers[current].committed.clear();
}

/* ---- kernels for one kind of device ------------------------------------------------------------------------------ */

int mr_cuda_attn_sm90_init(struct mr_cuda *)
{
    return 0;
}

int mr_cuda_attn_sm90(struct mr_cuda *, const struct attn_args *, const struct attn_plan *, int, int)
{
    return -ENOTSUP;
}

int mr_cuda_attn_dkv_sm90(struct mr_cuda *, const struct attn_args *, const struct attn_plan *, int, int)
{
    return -ENOTSUP;
}

int mr_cuda_attn_dq_sm90(struct mr_cuda *, const struct attn_args *, const struct attn_plan *, int, int)
{
    return -ENOTSUP;
}

int mr_cuda_mlp_sm90(struct mr_cuda *, int, int, int, const void *, int, const void *, void *)
{
    return -ENOTSUP;
}

/* ---- products ---------------------------------------------------------------------------------------------------- */

void mr_cuda_blas_open(void)
{
}

void mr_cuda_blas_wait(void)
{
}

int mr_cuda_gemm_init(struct mr_cuda *)
{
    return 0;
}

void mr_cuda_gemm_destroy(struct mr_cuda *)
{
}

static float dot(const bf16 *x, size_t sx, const bf16 *y, size_t sy, int n)
{
    float s = 0.0f;

    for (int i = 0; i < n; i++)
        s += bf_f32(x[i * sx]) * bf_f32(y[i * sy]);
    return s;
}

int mr_cuda_linear(struct mr_k *, int m, int n, int kk, const void *x, int ldx, const void *W, void *y, int ldy, int acc)
{
    if (kk <= 0)
        return -EINVAL;
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            bf16 *d = (bf16 *)y + (size_t)i * ldy + j;

            *d = bf_of(dot((const bf16 *)x + (size_t)i * ldx, 1, (const bf16 *)W + (size_t)j * kk, 1, kk) + (acc ? bf_f32(*d) : 0.0f));
        }
    return 0;
}

int mr_cuda_linear_f32(struct mr_cuda *, int m, int n, int kk, const void *x, int ldx, const void *W, float *z, int ldz)
{
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++)
            z[(size_t)i * ldz + j] = dot((const bf16 *)x + (size_t)i * ldx, 1, (const bf16 *)W + (size_t)j * kk, 1, kk);
    return 0;
}

int mr_cuda_linear_dx(struct mr_k *, int m, int n, int kk, const void *dy, int ldy, const void *W, void *dx, int ldx, int acc)
{
    for (int i = 0; i < m; i++)
        for (int j = 0; j < kk; j++) {
            bf16 *d = (bf16 *)dx + (size_t)i * ldx + j;

            *d = bf_of(dot((const bf16 *)dy + (size_t)i * ldy, 1, (const bf16 *)W + j, (size_t)kk, n) + (acc ? bf_f32(*d) : 0.0f));
        }
    return 0;
}

int mr_cuda_linear_dw(struct mr_k *, int m, int n, int kk, const void *dy, int ldy, const void *x, int ldx, float *dW)
{
    if (m == 0)
        return 0;
    for (int i = 0; i < n; i++)
        for (int j = 0; j < kk; j++)
            dW[(size_t)i * kk + j] += dot((const bf16 *)dy + i, (size_t)ldy, (const bf16 *)x + j, (size_t)ldx, m);
    return 0;
}
