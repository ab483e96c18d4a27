/* The functions of cuBLAS that gemm.cu calls, from libraries that are opened when they are needed instead of linked.
 *
 * Loading libcublasLt means 350,000 relocations and 6,500 constructors: about 0.1 s, for which an actor that takes over from a dead one has
 * no use before its first product.  So mr_cuda_blas_open loads it in a thread, beside the making of the context; the first call here waits
 * for that.  A program that never multiplies (a keeper) never loads it. */
#include "kernels/cuda/ctx.cuh"

#include <cublasLt.h>
#include <cublas_v2.h>
#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>
#include <pthread.h>

struct library {
    const char *soname, *path;         /* as the loader finds it, else where the build found it */
    pthread_mutex_t lock;
    int tried;
    void *handle;
};

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)
static struct library lt = {"libcublasLt.so." TEXT(CUBLAS_VER_MAJOR), MR_CUBLASLT_LIB, PTHREAD_MUTEX_INITIALIZER, 0, NULL};
static struct library blas = {"libcublas.so." TEXT(CUBLAS_VER_MAJOR), MR_CUBLAS_LIB, PTHREAD_MUTEX_INITIALIZER, 0, NULL};

/* Opens it once a process; NULL, and said once, when it is not there. */
static void *opened(struct library *l)
{
    void *h;

    pthread_mutex_lock(&l->lock);
    if (!l->tried) {
        l->tried = 1;
        l->handle = dlopen(l->soname, RTLD_NOW | RTLD_LOCAL);
        if (!l->handle)
            l->handle = dlopen(l->path, RTLD_NOW | RTLD_LOCAL);
        if (!l->handle)
            mr_error("%s cannot be opened: %s; install cuBLAS %d, or add its directory to LD_LIBRARY_PATH", l->soname, dlerror(), CUBLAS_VER_MAJOR);
    }
    h = l->handle;
    pthread_mutex_unlock(&l->lock);
    return h;
}

static void *find(struct library *l, const char *name)
{
    void *h = opened(l), *f = h ? dlsym(h, name) : NULL;

    if (h && !f)
        mr_error("%s has no %s: it is another version than this program was built with", l->soname, name);
    return f;
}

/* ---- beside other work ------------------------------------------------------------------------------------------------------------- */

static void *open_thread(void *unused)
{
    opened(&lt);
    return unused;
}

static pthread_t thread;
static int running;                    /* atomic: the thread was made, and nobody has waited for it */

/* exit() runs what was registered last first: the destructors of a library that is half loaded, before any handler of ours.  So whoever is
 * done with a context waits here; the handler is for a program that leaves without. */
void mr_cuda_blas_wait(void)
{
    if (__atomic_exchange_n(&running, 0, __ATOMIC_ACQ_REL))
        pthread_join(thread, NULL);
}

static void begin(void)
{
    if (pthread_create(&thread, NULL, open_thread, NULL))
        return;                        /* then the first product opens it */
    __atomic_store_n(&running, 1, __ATOMIC_RELEASE);
    atexit(mr_cuda_blas_wait);
}

void mr_cuda_blas_open(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    pthread_once(&once, begin);
}

/* ---- the functions, under their own names, visible in this program alone --------------------------------------------------------------- */

#define HERE extern "C" __attribute__((visibility("hidden")))
#define FORWARD(lib, name, params, args)                               \
    HERE cublasStatus_t name params                                    \
    {                                                                  \
        typedef cublasStatus_t(*fn) params;                            \
        static fn f = (fn)find(&lib, #name);                           \
                                                                       \
        return f ? f args : CUBLAS_STATUS_NOT_INITIALIZED;             \
    }

FORWARD(lt, cublasLtCreate, (cublasLtHandle_t *h), (h))
FORWARD(lt, cublasLtDestroy, (cublasLtHandle_t h), (h))
FORWARD(lt, cublasLtMatmulDescInit_internal, (cublasLtMatmulDesc_t d, size_t n, cublasComputeType_t c, cudaDataType_t s), (d, n, c, s))
FORWARD(lt, cublasLtMatmulDescSetAttribute, (cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t a, const void *p, size_t n), (d, a, p, n))
FORWARD(lt, cublasLtMatrixLayoutInit_internal, (cublasLtMatrixLayout_t l, size_t n, cudaDataType t, uint64_t r, uint64_t c, int64_t ld),
        (l, n, t, r, c, ld))
FORWARD(lt, cublasLtMatmulPreferenceInit_internal, (cublasLtMatmulPreference_t p, size_t n), (p, n))
FORWARD(lt, cublasLtMatmulPreferenceSetAttribute,
        (cublasLtMatmulPreference_t p, cublasLtMatmulPreferenceAttributes_t a, const void *v, size_t n), (p, a, v, n))
FORWARD(lt, cublasLtMatmulAlgoGetHeuristic,
        (cublasLtHandle_t h, cublasLtMatmulDesc_t op, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
         cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t p, int want, cublasLtMatmulHeuristicResult_t r[], int *got),
        (h, op, a, b, c, d, p, want, r, got))
FORWARD(lt, cublasLtMatmulAlgoConfigGetAttribute,
        (const cublasLtMatmulAlgo_t *a, cublasLtMatmulAlgoConfigAttributes_t what, void *v, size_t n, size_t *written), (a, what, v, n, written))
FORWARD(lt, cublasLtMatmul,
        (cublasLtHandle_t h, cublasLtMatmulDesc_t op, const void *alpha, const void *a, cublasLtMatrixLayout_t al, const void *b,
         cublasLtMatrixLayout_t bl, const void *beta, const void *c, cublasLtMatrixLayout_t cl, void *d, cublasLtMatrixLayout_t dl,
         const cublasLtMatmulAlgo_t *algo, void *work, size_t work_bytes, cudaStream_t s),
        (h, op, alpha, a, al, b, bl, beta, c, cl, d, dl, algo, work, work_bytes, s))
FORWARD(blas, cublasCreate_v2, (cublasHandle_t *h), (h))
FORWARD(blas, cublasDestroy_v2, (cublasHandle_t h), (h))
FORWARD(blas, cublasSetStream_v2, (cublasHandle_t h, cudaStream_t s), (h, s))
FORWARD(blas, cublasSetWorkspace_v2, (cublasHandle_t h, void *p, size_t n), (h, p, n))
FORWARD(blas, cublasGemmEx,
        (cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, const void *alpha, const void *a, cudaDataType at,
         int lda, const void *b, cudaDataType bt, int ldb, const void *beta, void *c, cudaDataType ct, int ldc, cublasComputeType_t compute,
         cublasGemmAlgo_t algo),
        (h, ta, tb, m, n, k, alpha, a, at, lda, b, bt, ldb, beta, c, ct, ldc, compute, algo))

HERE const char *cublasGetStatusString(cublasStatus_t s)
{
    typedef const char *(*fn)(cublasStatus_t);
    static fn f = (fn)find(&blas, "cublasGetStatusString");

    return f ? f(s) : "its library is not there";
}
