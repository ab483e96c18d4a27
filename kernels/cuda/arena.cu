/* Device memory that outlives an actor: allocation and export by a keeper, opening by everybody else, and what devices there are.
 *
 * Facts this rests on (docs/design.md section 12): a handle names a whole cudaMalloc block, so each arena is one; an importer's mapping
 * stays valid when its exporter dies, but nobody can open that handle any more; memory returns to the device when exporter and all
 * importers are gone.  Errors here are answers, not states: a handle that cannot be opened leaves the context usable, so they are cleared. */
#include "kernels/cuda/ctx.cuh"

#include <cstdio>
#include <cstdlib>
#include <cstring>

static_assert(sizeof(cudaIpcMemHandle_t) == MR_K_CUDA_HANDLE, "a row of the arena registry holds one handle");

static int fail(int code, cudaError_t e, const char *what, char *err, size_t n)
{
    cudaGetLastError();
    if (err && n)
        snprintf(err, n, "%s: %s (%s)", what, cudaGetErrorString(e), cudaGetErrorName(e));
    return code;
}

/* As nvidia-smi prints it. */
static void print_uuid(const cudaUUID_t *u, char out[MR_K_CUDA_UUID])
{
    const unsigned char *b = (const unsigned char *)u->bytes;

    snprintf(out, MR_K_CUDA_UUID, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0], b[1], b[2], b[3], b[4],
             b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]);
}

/* ---- devices ------------------------------------------------------------------------------------------------------------------------- */

static int count_devices(int *n, char *err, size_t err_bytes)
{
    cudaError_t e = cudaGetDeviceCount(n);

    if (e == cudaErrorNoDevice)
        *n = 0;
    else if (e != cudaSuccess)
        return fail(-ENODEV, e, "no usable NVIDIA driver", err, err_bytes);
    cudaGetLastError();
    return 0;
}

static int describe(struct mr_k_cuda_device *d, int i, int n, char *err, size_t err_bytes)
{
    struct cudaDeviceProp p;
    size_t free_bytes = 0, total = 0;
    cudaError_t e = cudaGetDeviceProperties(&p, i);

    if (e == cudaSuccess)
        e = cudaSetDevice(i);
    if (e == cudaSuccess)
        e = cudaMemGetInfo(&free_bytes, &total);
    if (e != cudaSuccess) {
        char what[64];

        snprintf(what, sizeof what, "cuda device %d", i);
        return fail(-EIO, e, what, err, err_bytes);
    }
    snprintf(d->name, sizeof d->name, "%.63s", p.name);
    print_uuid(&p.uuid, d->uuid);
    d->free_bytes = free_bytes;
    d->total_bytes = total;
    d->major = p.major;
    d->minor = p.minor;
    d->sms = p.multiProcessorCount;
    for (int j = 0; j < n; j++) {
        int can = i == j;

        if (i != j && cudaDeviceCanAccessPeer(&can, i, j) != cudaSuccess)
            can = 0;
        d->peer[j] = (uint8_t)can;
    }
    return 0;
}

extern "C" int mr_k_cuda_devices(struct mr_k_cuda_device *out, int *n, char *err, size_t err_bytes)
{
    int rc = count_devices(n, err, err_bytes);

    if (rc)
        return rc;
    if (*n > MR_K_CUDA_DEVICES)
        *n = MR_K_CUDA_DEVICES;
    memset(out, 0, (size_t)*n * sizeof *out);
    for (int i = 0; i < *n && !rc; i++)
        rc = describe(&out[i], i, *n, err, err_bytes);
    return rc;
}

static int find_uuid(const char *device, int count, int *index, char *err, size_t err_bytes)
{
    int found = 0;

    for (int i = 0; i < count; i++) {
        struct cudaDeviceProp p;
        char uuid[MR_K_CUDA_UUID];

        if (cudaGetDeviceProperties(&p, i) != cudaSuccess)
            continue;
        print_uuid(&p.uuid, uuid);
        if (strncasecmp(uuid, device, strlen(device)) == 0) {
            *index = i;
            found++;
        }
    }
    if (found == 1)
        return 0;
    snprintf(err, err_bytes, found ? "%d visible devices have a uuid that begins so; write more of it"
                                   : "none of the %d visible devices has this uuid; `millrace doctor` lists them",
             found ? found : count);
    return -ENODEV;
}

extern "C" int mr_k_cuda_resolve(const char *device, int *index, char *err, size_t err_bytes)
{
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    int count = 0, end = 0, rc = count_devices(&count, err, err_bytes);

    if (rc)
        return rc;
    if (strncmp(device, "GPU-", 4) == 0)
        return find_uuid(device, count, index, err, err_bytes);
    if (sscanf(device, "cuda:%d%n", index, &end) != 1 || device[end] || *index < 0) {
        snprintf(err, err_bytes, "\"cuda:N\" or \"GPU-<uuid>\" is wanted");
        return -EINVAL;
    }
    if (*index < count)
        return 0;
    snprintf(err, err_bytes, "there are %d visible devices%s%s%s; `millrace doctor` lists them", count,
             visible ? " (CUDA_VISIBLE_DEVICES=" : "", visible ? visible : "", visible ? ")" : "");
    return -ENODEV;
}

/* ---- arenas -------------------------------------------------------------------------------------------------------------------------- */

extern "C" int mr_k_cuda_use(int device, char *err, size_t err_bytes)
{
    cudaError_t e = cudaSetDevice(device);

    if (e == cudaSuccess)
        e = cudaFree(NULL);
    return e == cudaSuccess ? 0 : fail(-EIO, e, "cudaSetDevice", err, err_bytes);
}

extern "C" int mr_k_cuda_mem_info(uint64_t *free_bytes, uint64_t *total_bytes, char *err, size_t err_bytes)
{
    size_t f = 0, t = 0;
    cudaError_t e = cudaMemGetInfo(&f, &t);

    *free_bytes = f;
    *total_bytes = t;
    return e == cudaSuccess ? 0 : fail(-EIO, e, "cudaMemGetInfo", err, err_bytes);
}

extern "C" int mr_k_cuda_arena_alloc(uint64_t bytes, void **base, uint8_t handle[MR_K_CUDA_HANDLE], char uuid[MR_K_CUDA_UUID], char *err,
                                     size_t err_bytes)
{
    struct cudaDeviceProp p;
    cudaIpcMemHandle_t h;
    cudaError_t e;
    int device = 0;
    void *m = NULL;

    bytes = (bytes + (2u << 20) - 1) & ~(uint64_t)((2u << 20) - 1);    /* whole 2 MiB pages: what is exported holds nothing else */
    e = cudaMalloc(&m, bytes);
    if (e != cudaSuccess)
        return fail(e == cudaErrorMemoryAllocation ? -ENOMEM : -EIO, e, "cudaMalloc", err, err_bytes);
    e = cudaMemset(m, 0, bytes);
    if (e == cudaSuccess)
        e = cudaDeviceSynchronize();
    if (e == cudaSuccess)
        e = cudaIpcGetMemHandle(&h, m);
    if (e == cudaSuccess)
        e = cudaGetDevice(&device);
    if (e == cudaSuccess)
        e = cudaGetDeviceProperties(&p, device);
    if (e != cudaSuccess) {
        cudaFree(m);
        return fail(-EIO, e, "exporting device memory", err, err_bytes);
    }
    memcpy(handle, &h, sizeof h);
    print_uuid(&p.uuid, uuid);
    *base = m;
    return 0;
}

/* The mapping is made for the thread's current device, so that is what a message names: its index means little in a process that sees one
 * device only, its uuid does not. */
static int no_peer(cudaError_t e, char *err, size_t n)
{
    struct cudaDeviceProp p;
    char uuid[MR_K_CUDA_UUID] = "unknown", what[300];
    int device = -1;

    cudaGetLastError();
    if (cudaGetDevice(&device) == cudaSuccess && cudaGetDeviceProperties(&p, device) == cudaSuccess)
        print_uuid(&p.uuid, uuid);
    snprintf(what, sizeof what, "cuda device %d (%s) cannot map the memory of the device that this arena lies on (nvidia-smi topo -p2p r; "
                                "put it on a device with peer access to that one)", device, uuid);
    return fail(-EXDEV, e, what, err, n);
}

extern "C" int mr_k_cuda_arena_open(const uint8_t handle[MR_K_CUDA_HANDLE], void **base, char *err, size_t err_bytes)
{
    cudaIpcMemHandle_t h;
    cudaError_t e;

    memcpy(&h, handle, sizeof h);
    e = cudaIpcOpenMemHandle(base, h, cudaIpcMemLazyEnablePeerAccess);
    if (e == cudaSuccess)
        return 0;
    *base = NULL;
    if (e == cudaErrorPeerAccessUnsupported || e == cudaErrorTooManyPeers)
        return no_peer(e, err, err_bytes);
    return fail(e == cudaErrorInvalidResourceHandle || e == cudaErrorInvalidValue || e == cudaErrorMapBufferObjectFailed ? -ENXIO : -EIO, e,
                "opening an arena of another process", err, err_bytes);
}

extern "C" void mr_k_cuda_arena_close(void *base)
{
    if (base)
        cudaIpcCloseMemHandle(base);
    cudaGetLastError();
}
