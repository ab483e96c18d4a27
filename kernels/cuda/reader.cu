/* Device memory to the host beside the context's work: a stream and a pinned block of its own, for one thread that is not the context's.
 *
 * Nothing of the context is touched after create, so the two threads share no state; a sticky error reaches both, each at its own next
 * call. */
#include "kernels/cuda/ctx.cuh"

#include <cstdlib>

struct mr_k_reader {
    int device;
    size_t block_bytes;
    void *block;
    cudaStream_t stream;
};

static int failed(const struct mr_k_reader *r, cudaError_t e, const char *what)
{
    if (e != cudaSuccess)
        mr_error("cuda device %d: %s: %s (%s)", r->device, what, cudaGetErrorString(e), cudaGetErrorName(e));
    return e != cudaSuccess;
}

extern "C" struct mr_k_reader *mr_k_cuda_reader_create(struct mr_k *k, size_t block_bytes)
{
    struct mr_k_reader *r = (struct mr_k_reader *)calloc(1, sizeof *r);

    if (!r)
        return NULL;
    r->device = mr_cuda_of(k)->device;
    r->block_bytes = block_bytes;
    if (failed(r, cudaSetDevice(r->device), "reader") || failed(r, cudaMallocHost(&r->block, block_bytes), "pinned memory of the reader") ||
        failed(r, cudaStreamCreateWithFlags(&r->stream, cudaStreamNonBlocking), "reader's stream")) {
        mr_k_cuda_reader_destroy(r);
        return NULL;
    }
    return r;
}

extern "C" void mr_k_cuda_reader_destroy(struct mr_k_reader *r)
{
    if (!r)
        return;
    if (r->stream)
        cudaStreamDestroy(r->stream);
    cudaFreeHost(r->block);
    free(r);
}

extern "C" const void *mr_k_cuda_reader_read(struct mr_k_reader *r, const void *src, size_t bytes)
{
    if (bytes > r->block_bytes || failed(r, cudaSetDevice(r->device), "reader") ||
        failed(r, cudaMemcpyAsync(r->block, src, bytes, cudaMemcpyDeviceToHost, r->stream), "copying the state to the host") ||
        failed(r, cudaStreamSynchronize(r->stream), "copying the state to the host"))
        return NULL;
    return r->block;
}
