/* Matrix products of the cpu backend: oneDNN's dnnl_sgemm, or any CBLAS.
 *
 * Threads.  oneDNN of the distributions runs on OpenMP.  omp_set_num_threads is per calling thread, and with a count of 1 oneDNN calls
 * its kernel directly: no parallel region, hence no worker threads that could spin.  It is set before each product (a store into
 * thread-local memory), so that a context may move between threads and contexts with different counts may share one.  It is looked up with
 * dlsym, so that neither header nor library of an OpenMP runtime is needed here and a oneDNN built without one works too.
 * With more than one thread the OpenMP runtime's own waiting applies (GOMP_SPINCOUNT, OMP_WAIT_POLICY): more threads than free cores make a
 * product tens of times slower, because each waits at a barrier for one that is not running.
 * OpenBLAS has one count for the whole process: the context created last wins.  It starts its workers when it is loaded, and they sleep.
 *
 * Same bits from run to run: both libraries split a product by shape and thread count only.
 */
#include "kernels/cpu/cpu_pvt.h"

#include <dlfcn.h>

#if defined(MR_GEMM_ONEDNN)
#include <oneapi/dnnl/dnnl.h>

void mr_kc_gemm_init(struct mr_kc *c)
{
    *(void **)&c->set_threads = dlsym(RTLD_DEFAULT, "omp_set_num_threads");
}

int mr_kc_gemm(struct mr_kc *c, char ta, char tb, int m, int n, int kk, float alpha, const float *A, int lda, const float *B, int ldb,
               float beta, float *C, int ldc)
{
    dnnl_status_t rc;

    if (m <= 0 || n <= 0 || kk <= 0)
        return 0;
    if (c->set_threads)
        c->set_threads(c->threads);
    rc = dnnl_sgemm(ta, tb, m, n, kk, alpha, A, lda, B, ldb, beta, C, ldc);
    if (rc == dnnl_success)
        return 0;
    return rc == dnnl_out_of_memory ? -ENOMEM : -EINVAL;
}

#elif defined(MR_GEMM_CBLAS)
#include <cblas.h>

void mr_kc_gemm_init(struct mr_kc *c)
{
    void (*set)(int) = NULL;

    *(void **)&set = dlsym(RTLD_DEFAULT, "openblas_set_num_threads");
    if (set)
        set(c->threads);
}

int mr_kc_gemm(struct mr_kc *c, char ta, char tb, int m, int n, int kk, float alpha, const float *A, int lda, const float *B, int ldb,
               float beta, float *C, int ldc)
{
    (void)c;
    if (m <= 0 || n <= 0 || kk <= 0)
        return 0;
    cblas_sgemm(CblasRowMajor, ta == 'T' ? CblasTrans : CblasNoTrans, tb == 'T' ? CblasTrans : CblasNoTrans, m, n, kk, alpha, A, lda, B,
                ldb, beta, C, ldc);
    return 0;
}

#else
#error "define MR_GEMM_ONEDNN or MR_GEMM_CBLAS: which library computes the matrix products"
#endif

int mr_kc_linear(struct mr_k *k, int m, int n, int kk, const void *x, int ldx, const void *W, void *y, int ldy, int acc)
{
    return mr_kc_gemm(mr_kc(k), 'N', 'T', m, n, kk, 1.0f, x, ldx, W, kk, acc ? 1.0f : 0.0f, y, ldy);
}

int mr_kc_linear_dx(struct mr_k *k, int m, int n, int kk, const void *dy, int ldy, const void *W, void *dx, int ldx, int acc)
{
    return mr_kc_gemm(mr_kc(k), 'N', 'N', m, kk, n, 1.0f, dy, ldy, W, kk, acc ? 1.0f : 0.0f, dx, ldx);
}

int mr_kc_linear_dw(struct mr_k *k, int m, int n, int kk, const void *dy, int ldy, const void *x, int ldx, float *dW)
{
    return mr_kc_gemm(mr_kc(k), 'T', 'N', n, kk, m, 1.0f, dy, ldy, x, ldx, 1.0f, dW, kk);
}
