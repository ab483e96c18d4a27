/* Asynchronous work around the table's calls: pinned memory, marks in the stream, pulls on a second stream, random weights.
 *
 * A mark is an event that the host sleeps on (blocking sync): whoever publishes hidden states waits here, with the next microbatch issued
 * already, so its sleep costs the device nothing.  Events are made once; nothing here allocates in steady state. */
#include "kernels/cuda/ctx.cuh"

#include <cstdlib>

struct mr_k_mark {
    cudaEvent_t event;
};

struct mr_k_pull {
    cudaStream_t stream;
    struct {
        cudaEvent_t idle, full;        /* readers of the old contents are done; the copy is done */
    } place[2];
};

/* ---- pinned memory ----------------------------------------------------------------------------------------------- */

extern "C" void *mr_k_cuda_host_alloc(struct mr_k *k, size_t bytes)
{
    struct mr_cuda *c = mr_cuda_of(k);
    void *p = NULL;
    cudaError_t e;

    if (c->err)
        return NULL;
    e = cudaMallocHost(&p, bytes ? bytes : 1);
    if (e == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        return NULL;
    }
    return mr_cuda_check(c, e, "pinned memory") ? NULL : p;
}

extern "C" void mr_k_cuda_host_free(struct mr_k *k, void *p)
{
    if (p && !mr_cuda_of(k)->err)
        mr_cuda_check(mr_cuda_of(k), cudaFreeHost(p), "pinned memory");
}

extern "C" int mr_k_cuda_put(struct mr_k *k, void *dst, const void *src, size_t bytes)
{
    struct mr_cuda *c = mr_cuda_of(k);

    return c->err ? c->err : mr_cuda_check(c, cudaMemcpyAsync(dst, src, bytes, cudaMemcpyHostToDevice, c->stream), "copy to the device");
}

/* ---- marks ------------------------------------------------------------------------------------------------------- */

extern "C" struct mr_k_mark *mr_k_cuda_mark_create(struct mr_k *k)
{
    struct mr_k_mark *m = (struct mr_k_mark *)calloc(1, sizeof *m);

    if (m && mr_cuda_check(mr_cuda_of(k), cudaEventCreateWithFlags(&m->event, cudaEventBlockingSync), "event")) {
        free(m);
        return NULL;
    }
    return m;
}

extern "C" void mr_k_cuda_mark_destroy(struct mr_k *k, struct mr_k_mark *m)
{
    (void)k;
    if (m)
        cudaEventDestroy(m->event);
    free(m);
}

extern "C" int mr_k_cuda_mark_set(struct mr_k *k, struct mr_k_mark *m)
{
    struct mr_cuda *c = mr_cuda_of(k);

    return c->err ? c->err : mr_cuda_check(c, cudaEventRecord(m->event, c->stream), "event");
}

extern "C" int mr_k_cuda_mark_wait(struct mr_k *k, struct mr_k_mark *m)
{
    struct mr_cuda *c = mr_cuda_of(k);

    return c->err ? c->err : mr_cuda_check(c, cudaEventSynchronize(m->event), "waiting for the device");
}

extern "C" int mr_k_cuda_mark_ms(struct mr_k *k, const struct mr_k_mark *from, const struct mr_k_mark *to, double *ms)
{
    struct mr_cuda *c = mr_cuda_of(k);
    float f = 0;
    int rc = c->err ? c->err : mr_cuda_check(c, cudaEventElapsedTime(&f, from->event, to->event), "event time");

    *ms = f;
    return rc;
}

/* ---- pulls ------------------------------------------------------------------------------------------------------- */

extern "C" struct mr_k_pull *mr_k_cuda_pull_create(struct mr_k *k)
{
    struct mr_cuda *c = mr_cuda_of(k);
    struct mr_k_pull *p = (struct mr_k_pull *)calloc(1, sizeof *p);

    if (!p)
        return NULL;
    mr_cuda_check(c, cudaStreamCreateWithFlags(&p->stream, cudaStreamNonBlocking), "copy stream");
    for (int i = 0; i < 2; i++) {
        mr_cuda_check(c, cudaEventCreateWithFlags(&p->place[i].idle, cudaEventDisableTiming), "event");
        mr_cuda_check(c, cudaEventCreateWithFlags(&p->place[i].full, cudaEventDisableTiming | cudaEventBlockingSync), "event");
    }
    if (!c->err)
        return p;
    mr_k_cuda_pull_destroy(k, p);
    return NULL;
}

extern "C" void mr_k_cuda_pull_destroy(struct mr_k *k, struct mr_k_pull *p)
{
    (void)k;
    if (!p)
        return;
    if (p->stream)
        cudaStreamSynchronize(p->stream);
    for (int i = 0; i < 2; i++) {
        if (p->place[i].idle)
            cudaEventDestroy(p->place[i].idle);
        if (p->place[i].full)
            cudaEventDestroy(p->place[i].full);
    }
    if (p->stream)
        cudaStreamDestroy(p->stream);
    free(p);
}

extern "C" int mr_k_cuda_pull_begin(struct mr_k *k, struct mr_k_pull *p, int place, void *dst, const void *src, size_t bytes)
{
    struct mr_cuda *c = mr_cuda_of(k);

    if (c->err || mr_cuda_check(c, cudaEventRecord(p->place[place].idle, c->stream), "event") ||
        mr_cuda_check(c, cudaStreamWaitEvent(p->stream, p->place[place].idle, 0), "copy stream") ||
        mr_cuda_check(c, cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, p->stream), "pulling hidden states"))
        return c->err;
    return mr_cuda_check(c, cudaEventRecord(p->place[place].full, p->stream), "event");
}

extern "C" int mr_k_cuda_pull_use(struct mr_k *k, struct mr_k_pull *p, int place)
{
    struct mr_cuda *c = mr_cuda_of(k);

    return c->err ? c->err : mr_cuda_check(c, cudaStreamWaitEvent(c->stream, p->place[place].full, 0), "copy stream");
}

extern "C" int mr_k_cuda_pull_wait(struct mr_k *k, struct mr_k_pull *p, int place)
{
    struct mr_cuda *c = mr_cuda_of(k);

    return c->err ? c->err : mr_cuda_check(c, cudaEventSynchronize(p->place[place].full), "pulling hidden states");
}

/* ---- random weights ---------------------------------------------------------------------------------------------- */

__device__ static inline uint64_t mix64(uint64_t x)     /* base/rng.h */
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

__global__ void random_kernel(bf16 *dst, uint64_t seed, size_t n, float scale)
{
    size_t step = (size_t)gridDim.x * blockDim.x;

    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step)
        dst[i] = bf_of((float)((int32_t)(mix64(seed ^ i) >> 40) - (1 << 23)) * scale);
}

extern "C" int mr_k_cuda_random(struct mr_k *k, void *dst, uint64_t seed, size_t n, float std)
{
    struct mr_cuda *c = mr_cuda_of(k);

    if (c->err || !n)
        return c->err;
    MR_LAUNCH(random_kernel, c->sms * 8, 256, 0, c->stream, (bf16 *)dst, seed, n, std * 1.7320508f * 0x1p-23f);
    return mr_cuda_launched(c, "random weights");
}
