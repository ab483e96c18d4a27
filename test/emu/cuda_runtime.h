/* A CUDA device made of fibers, for tests on machines without one.
 *
 * The files of kernels/cuda compile as plain C++ against this header (found before the real cuda_runtime.h) with MR_CUDA_EMULATED defined.
 * A launch runs its blocks one after the other; the threads of a block are fibers that run until they meet a barrier or a warp operation.
 * The few instructions that kernels/cuda/mma.cuh wraps are written out below as their definition in the PTX manual.  What it finds: wrong
 * index arithmetic, missing barriers and missing waits (asynchronous copies land at the wait, or at once with MR_EMU_ASYNC=early; shared
 * memory starts as NaN; the order of threads alternates).  What it does not find: anything about speed, and alignment faults.
 * One launch at a time, one process thread. */
#ifndef MR_EMU_CUDA_RUNTIME_H
#define MR_EMU_CUDA_RUNTIME_H

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>

#define __device__
#define __global__ static
#define __shared__ static
#define __launch_bounds__(...)
#define MR_LAUNCH(kernel, grid, block, smem, stream, ...) emu_launch(grid, block, smem, [&] { kernel(__VA_ARGS__); })
#define MR_DYN_SMEM(name) unsigned char *name = emu_smem

struct dim3 {
    unsigned x, y, z;

    dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};
struct uint4 {
    uint32_t x, y, z, w;
};
struct float4 {
    float x, y, z, w;
};
struct float2 {
    float x, y;
};

static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w)
{
    return uint4{x, y, z, w};
}

static inline float2 make_float2(float x, float y)
{
    return float2{x, y};
}

/* ---- the device (emu.cc) ----------------------------------------------------------------------------------------- */

extern dim3 threadIdx, blockIdx, blockDim, gridDim;
extern unsigned char *emu_smem;

void emu_launch(dim3 grid, dim3 block, size_t smem, const std::function<void()> &kernel);
void __syncthreads(void);
void __syncwarp(void);

/* Gives every lane's value (n <= 64 bytes) to every lane of the warp: all[lane]. */
void emu_exchange(const void *mine, size_t n, void *all);

template <class T>
static inline T __shfl_xor_sync(unsigned, T v, int mask)
{
    T all[32];

    emu_exchange(&v, sizeof v, all);
    return all[(threadIdx.x % 32) ^ (unsigned)mask];
}

void emu_copy_async(void *dst, const void *src, int n, bool ok);
void emu_copy_commit(void);
void emu_copy_wait(void);

/* ---- arithmetic -------------------------------------------------------------------------------------------------- */

static inline float __uint_as_float(uint32_t u)
{
    float f;

    memcpy(&f, &u, 4);
    return f;
}

static inline uint32_t emu_bf16(float f)
{
    uint32_t u;

    memcpy(&u, &f, 4);
    if (f != f)
        return 0x7fff;
    return (u + 0x7fff + (u >> 16 & 1)) >> 16;
}

static inline uint32_t bf_pack(float lo, float hi)
{
    return emu_bf16(hi) << 16 | emu_bf16(lo);
}

static inline float rsqrtf(float x)
{
    return 1.0f / sqrtf(x);
}

static inline float __fdividef(float a, float b)
{
    return a / b;
}

#define __expf expf    /* the C library has a hidden __expf of its own */

static inline float exp2_fast(float x)
{
    return exp2f(x);
}

static inline int min(int a, int b)
{
    return a < b ? a : b;
}

static inline int max(int a, int b)
{
    return a > b ? a : b;
}

struct emu_half {
    uint16_t v;
};

static inline emu_half __ushort_as_half(uint16_t v)
{
    return emu_half{v};
}

static inline float __half2float(emu_half h)
{
    int e = h.v >> 10 & 31, m = h.v & 1023;
    float f = e == 31 ? (m ? NAN : INFINITY) : e ? ldexpf((float)(m + 1024), e - 25) : ldexpf((float)m, -24);

    return h.v >> 15 ? -f : f;
}

/* ---- instructions of kernels/cuda/mma.cuh ------------------------------------------------------------------------ */

static inline uint32_t smem_of(const void *p)
{
    return (uint32_t)((const unsigned char *)p - emu_smem);
}

static inline float emu_of(uint32_t pair, int i)
{
    return __uint_as_float(i ? pair & 0xffff0000u : pair << 16);
}

static inline void mma(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    uint32_t mine[6] = {a[0], a[1], a[2], a[3], b0, b1}, all[32][6];
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;

    emu_exchange(mine, sizeof mine, all);
    for (int i = 0; i < 4; i++) {
        int row = g + (i / 2) * 8, col = t * 2 + i % 2;

        for (int k = 0; k < 16; k++) {
            float x = emu_of(all[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2);
            float y = emu_of(all[col * 4 + k % 8 / 2][4 + k / 8], k % 2);

            c[i] += x * y;
        }
    }
}

static inline void emu_ldmatrix(uint32_t r[4], uint32_t p, bool trans)
{
    uint32_t all[32];
    int lane = threadIdx.x % 32;

    if (p % 16) {
        fprintf(stderr, "ldmatrix: address %u is not a multiple of 16\n", p);
        abort();
    }
    emu_exchange(&p, sizeof p, all);
    for (int i = 0; i < 4; i++) {
        uint16_t lo, hi;

        for (int e = 0; e < 2; e++) {
            int row = trans ? lane % 4 * 2 + e : lane / 4, col = trans ? lane / 4 : lane % 4 * 2 + e;

            memcpy(e ? &hi : &lo, emu_smem + all[i * 8 + row] + col * 2, 2);
        }
        r[i] = (uint32_t)hi << 16 | lo;
    }
    __syncwarp();
}

static inline void ldmatrix(uint32_t r[4], uint32_t p)
{
    emu_ldmatrix(r, p, false);
}

static inline void ldmatrix_t(uint32_t r[4], uint32_t p)
{
    emu_ldmatrix(r, p, true);
}

static inline void cp_async16(uint32_t dst, const void *src, bool ok)
{
    emu_copy_async(emu_smem + dst, src, 16, ok);
}

static inline void cp_async4(uint32_t dst, const void *src, bool ok)
{
    emu_copy_async(emu_smem + dst, src, 4, ok);
}

static inline void cp_async_commit(void)
{
    emu_copy_commit();
}

static inline void cp_async_wait(void)
{
    emu_copy_wait();
}

static inline int warp_min(int v)
{
    for (int o = 16; o; o >>= 1)
        v = min(v, __shfl_xor_sync(0, v, o));
    return v;
}

static inline int warp_max(int v)
{
    for (int o = 16; o; o >>= 1)
        v = max(v, __shfl_xor_sync(0, v, o));
    return v;
}

/* ---- runtime interface: as much of it as kernels/cuda uses ------------------------------------------------------- */

typedef int cudaError_t;
typedef struct emu_stream *cudaStream_t;
typedef struct emu_event *cudaEvent_t;
enum { cudaSuccess, cudaErrorMemoryAllocation = 2 };
enum { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDefault };
enum { cudaStreamNonBlocking, cudaEventDisableTiming };
typedef int cudaFuncAttribute;
enum { cudaFuncAttributeMaxDynamicSharedMemorySize };

enum cudaDeviceAttr {
    cudaDevAttrComputeCapabilityMajor,
    cudaDevAttrComputeCapabilityMinor,
    cudaDevAttrMultiProcessorCount,
    cudaDevAttrMaxSharedMemoryPerBlockOptin
};

static inline cudaError_t cudaGetLastError(void)
{
    return cudaSuccess;
}

static inline cudaError_t cudaPeekAtLastError(void)
{
    return cudaSuccess;
}

static inline const char *cudaGetErrorString(cudaError_t)
{
    return "emulated";
}

static inline const char *cudaGetErrorName(cudaError_t)
{
    return "emulated";
}

/* Exact to the byte and aligned as cudaMalloc's: the address sanitizer sees what a kernel reads beyond it.  Filled with NaN. */
static inline cudaError_t cudaMalloc(void **p, size_t n)
{
    if (posix_memalign(p, 256, n))
        return cudaErrorMemoryAllocation;
    memset(*p, 0xff, n);
    return cudaSuccess;
}

static inline cudaError_t cudaMallocHost(void **p, size_t n)
{
    return cudaMalloc(p, n);
}

static inline cudaError_t cudaFree(void *p)
{
    free(p);
    return cudaSuccess;
}

static inline cudaError_t cudaFreeHost(void *p)
{
    return cudaFree(p);
}

static inline cudaError_t cudaMemsetAsync(void *p, int v, size_t n, cudaStream_t)
{
    memset(p, v, n);
    return cudaSuccess;
}

static inline cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t n, int, cudaStream_t)
{
    memcpy(dst, src, n);
    return cudaSuccess;
}

static inline cudaError_t cudaGetDeviceCount(int *n)
{
    *n = 1;
    return cudaSuccess;
}

static inline cudaError_t cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int)
{
    const char *smem = getenv("MR_EMU_SMEM");
    const int is[] = {9, 0, 3, smem ? atoi(smem) : 232448};

    *v = is[a];
    return cudaSuccess;
}

static inline cudaError_t cudaSetDevice(int)
{
    return cudaSuccess;
}

static inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, int)
{
    *s = (cudaStream_t)1;
    return cudaSuccess;
}

static inline cudaError_t cudaStreamSynchronize(cudaStream_t)
{
    return cudaSuccess;
}

static inline cudaError_t cudaStreamDestroy(cudaStream_t)
{
    return cudaSuccess;
}

static inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, int)
{
    *e = (cudaEvent_t)1;
    return cudaSuccess;
}

static inline cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t)
{
    return cudaSuccess;
}

static inline cudaError_t cudaEventSynchronize(cudaEvent_t)
{
    return cudaSuccess;
}

static inline cudaError_t cudaEventDestroy(cudaEvent_t)
{
    return cudaSuccess;
}

template <class F>
static inline cudaError_t cudaFuncSetAttribute(F *, cudaFuncAttribute, int)
{
    return cudaSuccess;
}

#endif
