/* A kernel that never stops writing: for the probe of what a killed process's GPU work does (test_cuda_ipc.c). */
#include <cuda_runtime.h>

#include <stddef.h>

__global__ void write_on(volatile unsigned *p, size_t n, unsigned long long ns)
{
    unsigned long long t0, t;

    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t0));
    do {
        for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
            p[i] = p[i] + 1;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    } while (t - t0 < ns);
}

__global__ void out_of_bounds(unsigned *p)
{
    p[(size_t)1 << 44] = 1;
}

/* Issues `seconds` of writing to every word; returns at once. */
extern "C" int probe_write(void *p, size_t bytes, double seconds)
{
    write_on<<<64, 256>>>((unsigned *)p, bytes / 4, (unsigned long long)(seconds * 1e9));
    return cudaGetLastError() == cudaSuccess ? 0 : -1;
}

/* Poisons the process's context.  0 when it did. */
extern "C" int probe_poison(void *p)
{
    out_of_bounds<<<1, 1>>>((unsigned *)p);
    return cudaDeviceSynchronize() == cudaSuccess ? -1 : 0;
}
