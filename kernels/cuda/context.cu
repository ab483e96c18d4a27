/* The cuda context: device, stream, memory, copies, and the table of operations.
 *
 * One stream, one thread.  Copies from the host go through a small ring of pinned buffers, so that a caller's buffer is free on return
 * and nothing waits for the device unless the ring is four buffers behind.  Memory comes from plain cudaMalloc: what must outlive the
 * process belongs to a keeper, whose pointers work here as any others do. */
#include "kernels/cuda/ctx.cuh"

#include <cstdio>
#include <cstdlib>
#include <cstring>

enum { STAGE_BYTES = 4 << 20 };

int mr_cuda_check(struct mr_cuda *c, cudaError_t e, const char *what)
{
    if (e != cudaSuccess && !c->err) {
        c->err = -EIO;
        mr_error("cuda device %d: %s: %s (%s)", c->device, what, cudaGetErrorString(e), cudaGetErrorName(e));
    }
    return c->err;
}

void *mr_cuda_scratch(struct mr_cuda *c, size_t bytes)
{
    if (c->err)
        return NULL;
    if (bytes <= c->scratch_bytes)
        return c->scratch;
    cudaFree(c->scratch);              /* waits for the work that uses it */
    c->scratch = NULL;
    c->scratch_bytes = 0;
    bytes = (bytes + bytes / 4 + 255) & ~(size_t)255;
    if (mr_cuda_check(c, cudaMalloc(&c->scratch, bytes), "scratch"))
        return NULL;
    c->scratch_bytes = bytes;
    return c->scratch;
}

/* ---- memory and order -------------------------------------------------------------------------------------------- */

static void *cuda_alloc(struct mr_k *k, size_t bytes)
{
    struct mr_cuda *c = mr_cuda_of(k);
    void *p = NULL;
    cudaError_t e;

    if (c->err)
        return NULL;
    e = cudaMalloc(&p, bytes ? bytes : 1);
    if (e == cudaErrorMemoryAllocation) {
        cudaGetLastError();            /* not sticky: the caller decides what a full device means */
        return NULL;
    }
    if (mr_cuda_check(c, e, "cudaMalloc") || mr_cuda_check(c, cudaMemsetAsync(p, 0, bytes, c->stream), "cudaMemset"))
        return NULL;
    return p;
}

static void cuda_release(struct mr_k *k, void *p)
{
    struct mr_cuda *c = mr_cuda_of(k);

    if (p && !c->err)
        mr_cuda_check(c, cudaFree(p), "cudaFree");
}

static int open_stage(struct mr_cuda *c, unsigned i)
{
    if (c->stage[i].p)
        return c->err;
    mr_cuda_check(c, cudaMallocHost((void **)&c->stage[i].p, STAGE_BYTES), "pinned memory");
    return mr_cuda_check(c, cudaEventCreateWithFlags(&c->stage[i].free, cudaEventDisableTiming), "event");
}

int mr_cuda_upload(struct mr_cuda *c, void *dst, const void *src, size_t bytes)
{
    const unsigned char *s = (const unsigned char *)src;
    unsigned char *d = (unsigned char *)dst;

    while (bytes && !c->err) {
        unsigned i = c->stage_next++ % MR_CUDA_STAGES;
        size_t n = bytes < STAGE_BYTES ? bytes : (size_t)STAGE_BYTES;

        if (open_stage(c, i))
            break;
        mr_cuda_check(c, cudaEventSynchronize(c->stage[i].free), "staging");
        memcpy(c->stage[i].p, s, n);
        mr_cuda_check(c, cudaMemcpyAsync(d, c->stage[i].p, n, cudaMemcpyHostToDevice, c->stream), "copy to the device");
        mr_cuda_check(c, cudaEventRecord(c->stage[i].free, c->stream), "staging");
        s += n, d += n, bytes -= n;
    }
    return c->err;
}

static int cuda_h2d(struct mr_k *k, void *dst, const void *host_src, size_t bytes)
{
    return mr_cuda_upload(mr_cuda_of(k), dst, host_src, bytes);
}

static int cuda_d2h(struct mr_k *k, void *host_dst, const void *src, size_t bytes)
{
    struct mr_cuda *c = mr_cuda_of(k);

    return c->err ? c->err : mr_cuda_check(c, cudaMemcpyAsync(host_dst, src, bytes, cudaMemcpyDeviceToHost, c->stream), "copy to the host");
}

static int cuda_d2d(struct mr_k *k, void *dst, const void *src, size_t bytes)
{
    struct mr_cuda *c = mr_cuda_of(k);

    return c->err ? c->err : mr_cuda_check(c, cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, c->stream), "copy on the device");
}

static int cuda_zero(struct mr_k *k, void *p, size_t bytes)
{
    struct mr_cuda *c = mr_cuda_of(k);

    return c->err ? c->err : mr_cuda_check(c, cudaMemsetAsync(p, 0, bytes, c->stream), "cudaMemset");
}

static int cuda_sync(struct mr_k *k)
{
    struct mr_cuda *c = mr_cuda_of(k);

    return c->err ? c->err : mr_cuda_check(c, cudaStreamSynchronize(c->stream), "synchronize");
}

/* ---- the table --------------------------------------------------------------------------------------------------- */

static const struct mr_k_ops *cuda_ops(void)
{
    static const struct mr_k_ops ops = {
        .name = "cuda",
        .alloc = cuda_alloc,
        .release = cuda_release,
        .h2d = cuda_h2d,
        .d2h = cuda_d2h,
        .d2d = cuda_d2d,
        .zero = cuda_zero,
        .sync = cuda_sync,
        .load = mr_cuda_load,
        .f32_to_act = mr_cuda_f32_to_act,
        .act_to_f32 = mr_cuda_act_to_f32,
        .linear = mr_cuda_linear,
        .linear_dx = mr_cuda_linear_dx,
        .linear_dw = mr_cuda_linear_dw,
        .embed = mr_cuda_embed,
        .rmsnorm = mr_cuda_rmsnorm,
        .add_rmsnorm = mr_cuda_add_rmsnorm,
        .head_norm_rope = mr_cuda_head_norm_rope,
        .attn_causal = mr_cuda_attn_causal,
        .swiglu = mr_cuda_swiglu,
        .linear_swiglu = mr_cuda_linear_swiglu,
        .copy2d = mr_cuda_copy2d,
        .gather = mr_cuda_gather,
        .scatter_add = mr_cuda_scatter_add,
        .attn_block = mr_cuda_attn_block,
        .attn_block_bwd = mr_cuda_attn_block_bwd,
        .rmsnorm_bwd = mr_cuda_rmsnorm_bwd,
        .head_norm_rope_bwd = mr_cuda_head_norm_rope_bwd,
        .swiglu_bwd = mr_cuda_swiglu_bwd,
        .add = mr_cuda_add,
        .ce = mr_cuda_ce,
        .ce_scratch = mr_cuda_ce_scratch,
        .sumsq = mr_cuda_sumsq,
        .sum = mr_cuda_sum,
        .adamw = mr_cuda_adamw,
    };

    return &ops;
}

/* ---- life -------------------------------------------------------------------------------------------------------- */

/* Single attributes: the whole description of a device takes the driver milliseconds. */
static cudaError_t describe(struct mr_cuda *c, int *major)
{
    int minor = 0, smem = 0;
    cudaError_t e = cudaDeviceGetAttribute(major, cudaDevAttrComputeCapabilityMajor, c->device);

    if (e == cudaSuccess)
        e = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, c->device);
    if (e == cudaSuccess)
        e = cudaDeviceGetAttribute(&c->sms, cudaDevAttrMultiProcessorCount, c->device);
    if (e == cudaSuccess)
        e = cudaDeviceGetAttribute(&smem, cudaDevAttrMaxSharedMemoryPerBlockOptin, c->device);
    c->cc = *major * 10 + minor;
    c->smem_max = (size_t)smem;
    return e;
}

static int open_device(struct mr_cuda *c, char *err, size_t n)
{
    int count = 0, major = 0;
    cudaError_t e = cudaGetDeviceCount(&count);

    if (e != cudaSuccess || c->device < 0 || c->device >= count) {
        snprintf(err, n, "cuda device %d: %s; %d device(s) visible; check CUDA_VISIBLE_DEVICES and nvidia-smi", c->device,
                 e != cudaSuccess ? cudaGetErrorString(e) : "no such device", count);
        return -1;
    }
    mr_cuda_blas_open();
    e = describe(c, &major);
    if (e == cudaSuccess && major < 8) {
        snprintf(err, n, "cuda device %d has compute capability %d.%d; 8.0 or newer is needed (bf16 matrix instructions)", c->device, major,
                 c->cc % 10);
        return -1;
    }
    if (e == cudaSuccess)
        e = cudaSetDevice(c->device);
    if (e == cudaSuccess)
        e = cudaStreamCreateWithFlags(&c->stream, cudaStreamNonBlocking);
    if (e != cudaSuccess) {
        snprintf(err, n, "cuda device %d: %s", c->device, cudaGetErrorString(e));
        return -1;
    }
    return 0;
}

int mr_cuda_attn_open(struct mr_cuda *c)
{
    if (!c->attn_ready && !c->err && !mr_cuda_attn_init(c) && !mr_cuda_attn_bwd_init(c))
        c->attn_ready = 1;
    return c->err;
}

extern "C" struct mr_k *mr_k_cuda_create(int device, int deterministic, char *err, size_t err_bytes)
{
    struct mr_cuda *c = (struct mr_cuda *)calloc(1, sizeof *c);

    if (!c) {
        snprintf(err, err_bytes, "cuda device %d: out of host memory", device);
        return NULL;
    }
    c->device = device;
    c->k.op = cuda_ops();
    c->k.act_bytes = 2;
    c->k.act = MR_K_BF16;
    c->k.deterministic = deterministic;
    c->k.impl = c;
    if (open_device(c, err, err_bytes) < 0)
        goto fail;
    if (mr_cuda_check(c, cudaMallocHost((void **)&c->host_sum, sizeof *c->host_sum), "pinned memory") || mr_cuda_gemm_init(c) ||
        mr_cuda_plan_init(c)) {
        snprintf(err, err_bytes, "cuda device %d: set-up failed (%s); the log above says where", device,
                 cudaGetErrorString(cudaPeekAtLastError()));
        goto fail;
    }
    return &c->k;
fail:
    mr_k_cuda_destroy(&c->k);
    return NULL;
}

/* Takes a half-built context too.  After a sticky error the calls below fail one by one, which changes nothing. */
extern "C" void mr_k_cuda_destroy(struct mr_k *k)
{
    struct mr_cuda *c;

    if (!k)
        return;
    mr_cuda_blas_wait();
    c = mr_cuda_of(k);
    if (c->stream)
        cudaStreamSynchronize(c->stream);
    mr_cuda_plan_destroy(c);
    mr_cuda_gemm_destroy(c);
    cudaFree(c->scratch);
    cudaFreeHost(c->host_sum);
    for (int i = 0; i < MR_CUDA_STAGES; i++) {
        cudaFreeHost(c->stage[i].p);
        if (c->stage[i].free)
            cudaEventDestroy(c->stage[i].free);
    }
    if (c->stream)
        cudaStreamDestroy(c->stream);
    free(c);
}
