/* Sums over ranks by NCCL, without ever waiting inside the library.
 *
 * The communicator is non-blocking: every call may return ncclInProgress, and ncclCommGetAsyncError says when it has taken effect.  Only then is
 * the event behind the operation recorded; the sum is complete when the event has passed and no asynchronous error has shown.  Aborting can
 * block for as long as a peer or the device does, so it runs in a thread of its own, and the caller waits for it no longer than it wants to.
 *
 * The library is opened when it is first asked for, not linked: it is large, and most actors never use it. */
#include "kernels/cuda/ctx.cuh"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#ifdef MR_HAVE_NCCL
#include <dlfcn.h>
#include <nccl.h>
#include <pthread.h>
#include <time.h>

static_assert(sizeof(ncclUniqueId) == MR_K_COMM_ID, "ids travel in a drafter's header");

/* The functions that are used. */
struct nccl {
    decltype(&ncclGetVersion) version;
    decltype(&ncclGetUniqueId) unique_id;
    decltype(&ncclGetErrorString) text;
    decltype(&ncclCommInitRankConfig) init;
    decltype(&ncclAllReduce) all_reduce;
    decltype(&ncclCommGetAsyncError) async_error;
    decltype(&ncclCommFinalize) finalize;
    decltype(&ncclCommDestroy) destroy;
    decltype(&ncclCommAbort) abort;
};

enum phase { JOINING, IDLE, ISSUED, RUNNING, FAILED };

struct mr_k_comm {
    struct nccl f;
    ncclComm_t comm;
    int device;
    enum phase phase;
    cudaStream_t stream;
    cudaEvent_t done;
    pthread_mutex_t lock;
    pthread_cond_t ended;
    int gone, broken, left;            /* left: nobody waits for the end any more, whose thread then frees this */
};

static int fail(struct mr_k_comm *c, const char *what, const char *why, char *err, size_t n)
{
    if (c)
        c->phase = FAILED;
    snprintf(err, n, "%s: %s", what, why);
    return -EIO;
}

static int bad(ncclResult_t r)
{
    return r != ncclSuccess && r != ncclInProgress;
}

template <class F> static int find(void *lib, const char *name, F *f)
{
    *f = (F)dlsym(lib, name);
    return *f ? 0 : -1;
}

/* The library stays open: its threads may outlive a communicator. */
static int open_library(struct nccl *f, char *err, size_t n)
{
    void *lib = dlopen(MR_NCCL_LIB, RTLD_NOW | RTLD_LOCAL);

    if (!lib)
        lib = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (!lib)
        return fail(NULL, "NCCL cannot be opened", dlerror(), err, n);
    if (find(lib, "ncclGetVersion", &f->version) || find(lib, "ncclGetUniqueId", &f->unique_id) ||
        find(lib, "ncclGetErrorString", &f->text) || find(lib, "ncclCommInitRankConfig", &f->init) ||
        find(lib, "ncclAllReduce", &f->all_reduce) || find(lib, "ncclCommGetAsyncError", &f->async_error) ||
        find(lib, "ncclCommFinalize", &f->finalize) || find(lib, "ncclCommDestroy", &f->destroy) || find(lib, "ncclCommAbort", &f->abort))
        return fail(NULL, "NCCL is too old; 2.14 or newer is needed", dlerror(), err, n);
    return 0;
}

extern "C" int mr_k_comm_version(void)
{
    struct nccl f;
    char unused[200];
    int v = 0;

    return open_library(&f, unused, sizeof unused) == 0 && f.version(&v) == ncclSuccess ? v : 0;
}

extern "C" int mr_k_comm_id(uint8_t id[MR_K_COMM_ID], char *err, size_t err_bytes)
{
    struct nccl f;
    ncclUniqueId u;
    ncclResult_t r;

    if (open_library(&f, err, err_bytes))
        return -EIO;
    r = f.unique_id(&u);
    if (r != ncclSuccess)
        return fail(NULL, "ncclGetUniqueId", f.text(r), err, err_bytes);
    memcpy(id, &u, sizeof u);
    return 0;
}

static void release(struct mr_k_comm *c)
{
    if (c->done)
        cudaEventDestroy(c->done);
    if (c->stream)
        cudaStreamDestroy(c->stream);
    pthread_cond_destroy(&c->ended);
    pthread_mutex_destroy(&c->lock);
    free(c);
}

extern "C" struct mr_k_comm *mr_k_comm_begin(struct mr_k *k, const uint8_t id[MR_K_COMM_ID], int rank, int ranks, char *err, size_t err_bytes)
{
    struct mr_k_comm *c = (struct mr_k_comm *)calloc(1, sizeof *c);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclUniqueId u;
    ncclResult_t r;

    if (!c) {
        snprintf(err, err_bytes, "out of memory");
        return NULL;
    }
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->ended, NULL);
    c->device = mr_cuda_of(k)->device;
    memcpy(&u, id, sizeof u);
    config.blocking = 0;
    if (open_library(&c->f, err, err_bytes)) {
        release(c);
        return NULL;
    }
    if (mr_cuda_of(k)->err || cudaStreamCreateWithFlags(&c->stream, cudaStreamNonBlocking) != cudaSuccess ||
        cudaEventCreateWithFlags(&c->done, cudaEventDisableTiming) != cudaSuccess) {
        fail(c, "stream of the communicator", cudaGetErrorString(cudaGetLastError()), err, err_bytes);
        release(c);
        return NULL;
    }
    r = c->f.init(&c->comm, ranks, u, rank, &config);
    if (bad(r)) {
        fail(c, "ncclCommInitRankConfig", c->f.text(r), err, err_bytes);
        release(c);
        return NULL;
    }
    return c;
}

extern "C" int mr_k_comm_sum(struct mr_k_comm *c, const void *src, void *dst, size_t n, enum mr_k_dtype type, char *err, size_t err_bytes)
{
    ncclResult_t r;

    if (c->phase != IDLE)
        return fail(c, "ncclAllReduce", "the communicator is not ready", err, err_bytes);
    r = c->f.all_reduce(src, dst, n, type == MR_K_BF16 ? ncclBfloat16 : ncclFloat32, ncclSum, c->comm, c->stream);
    if (bad(r))
        return fail(c, "ncclAllReduce", c->f.text(r), err, err_bytes);
    c->phase = ISSUED;
    return 0;
}

extern "C" int mr_k_comm_poll(struct mr_k_comm *c, char *err, size_t err_bytes)
{
    ncclResult_t now = ncclSuccess, r = c->phase == FAILED ? ncclInternalError : c->f.async_error(c->comm, &now);
    cudaError_t e;

    if (r != ncclSuccess || bad(now))
        return fail(c, "NCCL", c->f.text(r != ncclSuccess ? r : now), err, err_bytes);
    if (now == ncclInProgress)
        return -EINPROGRESS;
    if (c->phase == JOINING)
        c->phase = IDLE;
    if (c->phase == ISSUED) {
        if (cudaEventRecord(c->done, c->stream) != cudaSuccess)
            return fail(c, "event of the sum", cudaGetErrorString(cudaGetLastError()), err, err_bytes);
        c->phase = RUNNING;
    }
    if (c->phase == IDLE)
        return 0;
    e = cudaEventQuery(c->done);
    if (e == cudaErrorNotReady)
        return -EINPROGRESS;
    if (e != cudaSuccess)
        return fail(c, "sum over the drafters", cudaGetErrorString(e), err, err_bytes);
    c->phase = IDLE;
    return 0;
}

static void *end_thread(void *arg)
{
    struct mr_k_comm *c = (struct mr_k_comm *)arg;
    ncclResult_t now = ncclInProgress;
    int left;

    cudaSetDevice(c->device);
    if (c->broken) {
        c->f.abort(c->comm);
    } else {
        c->f.finalize(c->comm);
        while (c->f.async_error(c->comm, &now) == ncclSuccess && now == ncclInProgress)
            ;
        c->f.destroy(c->comm);
    }
    pthread_mutex_lock(&c->lock);
    c->gone = 1;
    left = c->left;
    pthread_cond_signal(&c->ended);
    pthread_mutex_unlock(&c->lock);
    if (left)
        release(c);
    return NULL;
}

extern "C" int mr_k_comm_end(struct mr_k_comm *c, int broken, unsigned ms)
{
    struct timespec until;
    pthread_t thread;
    int gone;

    if (!c)
        return 0;
    c->broken = broken || c->phase != IDLE;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += ms / 1000 + (until.tv_nsec + (long)(ms % 1000) * 1000000) / 1000000000;
    until.tv_nsec = (until.tv_nsec + (long)(ms % 1000) * 1000000) % 1000000000;
    if (pthread_create(&thread, NULL, end_thread, c))
        return -ETIMEDOUT;
    pthread_mutex_lock(&c->lock);
    while (!c->gone && pthread_cond_timedwait(&c->ended, &c->lock, &until) != ETIMEDOUT)
        ;
    gone = c->gone;
    c->left = !gone;
    if (!gone)
        pthread_detach(thread);
    pthread_mutex_unlock(&c->lock);
    if (!gone)
        return -ETIMEDOUT;
    pthread_join(thread, NULL);
    release(c);
    return 0;
}

#else

static const char why[] = "this build has no NCCL; install it (nccl.h, libnccl) and configure again, or set /train/reduce to \"p2p\"";

extern "C" int mr_k_comm_version(void)
{
    return 0;
}

extern "C" int mr_k_comm_id(uint8_t id[MR_K_COMM_ID], char *err, size_t err_bytes)
{
    (void)id;
    snprintf(err, err_bytes, "%s", why);
    return -EIO;
}

extern "C" struct mr_k_comm *mr_k_comm_begin(struct mr_k *k, const uint8_t id[MR_K_COMM_ID], int rank, int ranks, char *err, size_t err_bytes)
{
    (void)k, (void)id, (void)rank, (void)ranks;
    snprintf(err, err_bytes, "%s", why);
    return NULL;
}

extern "C" int mr_k_comm_sum(struct mr_k_comm *c, const void *src, void *dst, size_t n, enum mr_k_dtype type, char *err, size_t err_bytes)
{
    (void)c, (void)src, (void)dst, (void)n, (void)type;
    snprintf(err, err_bytes, "%s", why);
    return -EIO;
}

extern "C" int mr_k_comm_poll(struct mr_k_comm *c, char *err, size_t err_bytes)
{
    (void)c;
    snprintf(err, err_bytes, "%s", why);
    return -EIO;
}

extern "C" int mr_k_comm_end(struct mr_k_comm *c, int broken, unsigned ms)
{
    (void)c, (void)broken, (void)ms;
    return 0;
}
#endif
