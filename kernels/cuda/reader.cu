/* Device memory to the host beside the context's work: a stream and pinned blocks of its own, for one thread that is not the context's.
 *
 * Nothing of the context is touched after create, so the two threads share no state; a sticky error reaches both, each at its own next
 * call.  The thread sleeps while a copy runs: a copy of several MiB takes longer than to be woken, and a spinning copier would take a
 * processor from the actor for the whole of a checkpoint. */
#include "kernels/cuda/ctx.cuh"

#include <cerrno>
#include <cstdlib>

struct mr_k_reader {
    int device;
    size_t block_bytes;
    char *block;
    cudaStream_t stream;
    cudaEvent_t copied;
};

static int failed(const struct mr_k_reader *r, cudaError_t e, const char *what)
{
    if (e != cudaSuccess)
        mr_error("cuda device %d: %s: %s (%s)", r->device, what, cudaGetErrorString(e), cudaGetErrorName(e));
    return e != cudaSuccess;
}

extern "C" struct mr_k_reader *mr_k_cuda_reader_create(struct mr_k *k, int n_blocks, size_t block_bytes)
{
    struct mr_k_reader *r = (struct mr_k_reader *)calloc(1, sizeof *r);

    if (!r)
        return NULL;
    r->device = mr_cuda_of(k)->device;
    r->block_bytes = block_bytes;
    if (failed(r, cudaSetDevice(r->device), "reader") ||
        failed(r, cudaMallocHost((void **)&r->block, (size_t)n_blocks * block_bytes), "pinned memory of the reader") ||
        failed(r, cudaStreamCreateWithFlags(&r->stream, cudaStreamNonBlocking), "reader's stream") ||
        failed(r, cudaEventCreateWithFlags(&r->copied, cudaEventDisableTiming | cudaEventBlockingSync), "reader's event")) {
        mr_k_cuda_reader_destroy(r);
        return NULL;
    }
    return r;
}

extern "C" void mr_k_cuda_reader_destroy(struct mr_k_reader *r)
{
    if (!r)
        return;
    if (r->copied)
        cudaEventDestroy(r->copied);
    if (r->stream)
        cudaStreamDestroy(r->stream);
    cudaFreeHost(r->block);
    free(r);
}

extern "C" void *mr_k_cuda_reader_block(struct mr_k_reader *r, int i)
{
    return r->block + (size_t)i * r->block_bytes;
}

extern "C" int mr_k_cuda_reader_read(struct mr_k_reader *r, void *host, const void *src, size_t bytes)
{
    if (failed(r, cudaSetDevice(r->device), "reader") ||
        failed(r, cudaMemcpyAsync(host, src, bytes, cudaMemcpyDeviceToHost, r->stream), "copying the state to the host") ||
        failed(r, cudaEventRecord(r->copied, r->stream), "copying the state to the host") ||
        failed(r, cudaEventSynchronize(r->copied), "copying the state to the host"))
        return -EIO;
    return 0;
}
