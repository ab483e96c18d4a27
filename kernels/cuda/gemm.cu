/* Matrix products by cuBLASLt: bf16 operands, f32 accumulation, bf16 or f32 result.
 *
 * cuBLAS is column-major, so every row-major product is written as its transpose: y^T = W x^T and so on; no data moves for that.
 * The algorithm for a shape comes from the library's heuristic once and is kept in a direct-mapped table (packed microbatches bring new
 * row counts all the time, so the table must not grow: a collision only costs one more question to the heuristic).  The choice depends on
 * shape, alignment and device alone, and the library's results are then the same bits in every run.  Nothing is timed: a process that takes
 * over from a killed one has no time for that, and a clock would choose differently from run to run.
 * A product for which Lt has no kernel (odd strides) goes to cublasGemmEx, which always has one. */
#include "kernels/cuda/ctx.cuh"

#include <cublasLt.h>
#include <cublas_v2.h>
#include <cstdlib>
#include <cstring>

enum { TABLE = 4096, CANDIDATES = 8 };
static const size_t WORKSPACE = (size_t)64 << 20;

struct product {                       /* D (r,c; ldd) = op(A) (r,k) * op(B) (k,c) [+ D], column-major */
    int32_t r, c, k, lda, ldb, ldd;
    uint8_t trans_a, trans_b, f32_out, acc;
    uint8_t align_a, align_b, align_d, used;
};

struct slot {
    struct product key;
    cublasLtMatmulAlgo_t algo;
    int has_algo;
};

struct mr_cuda_gemms {
    cublasLtHandle_t lt;               /* made at the first product: until then its library is loaded beside other things (blas.cu) */
    cublasHandle_t blas;               /* made when the first odd product asks for it */
    void *workspace;
    struct slot slot[TABLE];
};

static int blas_check(struct mr_cuda *c, cublasStatus_t s, const char *what)
{
    if (s != CUBLAS_STATUS_SUCCESS && !c->err) {
        c->err = -EIO;
        mr_error("cuda device %d: cuBLAS %s: %s", c->device, what, cublasGetStatusString(s));
    }
    return c->err;
}

int mr_cuda_gemm_init(struct mr_cuda *c)
{
    struct mr_cuda_gemms *g = (struct mr_cuda_gemms *)calloc(1, sizeof *g);

    if (!g)
        return -ENOMEM;
    c->gemms = g;
    return mr_cuda_check(c, cudaMalloc(&g->workspace, WORKSPACE), "cuBLAS workspace");
}

void mr_cuda_gemm_destroy(struct mr_cuda *c)
{
    struct mr_cuda_gemms *g = c->gemms;

    if (!g)
        return;
    if (g->lt)
        cublasLtDestroy(g->lt);
    if (g->blas)
        cublasDestroy(g->blas);
    cudaFree(g->workspace);
    free(g);
    c->gemms = NULL;
}

/* log2 of the alignment of p in bytes, at most 8 (256 bytes). */
static uint8_t align_log2(const void *p)
{
    uintptr_t v = (uintptr_t)p | 256;

    return (uint8_t)__builtin_ctzl((unsigned long)v);
}

static uint32_t hash_of(const struct product *p)
{
    const unsigned char *b = (const unsigned char *)p;
    uint32_t h = 2166136261u;

    for (size_t i = 0; i < sizeof *p; i++)
        h = (h ^ b[i]) * 16777619u;
    return (h ^ (h >> 15)) % TABLE;
}

struct layouts {
    cublasLtMatmulDescOpaque_t op;
    cublasLtMatrixLayoutOpaque_t a, b, d;
};

static int describe(struct mr_cuda *c, const struct product *p, struct layouts *l)
{
    cublasOperation_t ta = p->trans_a ? CUBLAS_OP_T : CUBLAS_OP_N, tb = p->trans_b ? CUBLAS_OP_T : CUBLAS_OP_N;

    if (blas_check(c, cublasLtMatmulDescInit(&l->op, CUBLAS_COMPUTE_32F, CUDA_R_32F), "descriptor") ||
        blas_check(c, cublasLtMatmulDescSetAttribute(&l->op, CUBLASLT_MATMUL_DESC_TRANSA, &ta, sizeof ta), "descriptor") ||
        blas_check(c, cublasLtMatmulDescSetAttribute(&l->op, CUBLASLT_MATMUL_DESC_TRANSB, &tb, sizeof tb), "descriptor") ||
        blas_check(c, cublasLtMatrixLayoutInit(&l->a, CUDA_R_16BF, p->trans_a ? p->k : p->r, p->trans_a ? p->r : p->k, p->lda), "layout") ||
        blas_check(c, cublasLtMatrixLayoutInit(&l->b, CUDA_R_16BF, p->trans_b ? p->c : p->k, p->trans_b ? p->k : p->c, p->ldb), "layout") ||
        blas_check(c, cublasLtMatrixLayoutInit(&l->d, p->f32_out ? CUDA_R_32F : CUDA_R_16BF, p->r, p->c, p->ldd), "layout"))
        return c->err;
    return 0;
}

/* The heuristic's first choice is right for a product alone.  In a run of large ones a Hopper is at its power limit, and there kernels with
 * tiles of 128x160, 168x128 and 176x128 do up to 8 % more than the first choice (docs/performance.md).  They are taken where they are
 * offered and the product is large. */
static const cublasLtMatmulHeuristicResult_t *pick(const struct mr_cuda *c, const struct product *p,
                                                   const cublasLtMatmulHeuristicResult_t *res, int n)
{
    enum { TILE_128x160 = 29, TILE_168x128 = 197, TILE_176x128 = 201 };    /* cublasLt.h; older ones do not name the last two */

    if (c->cc != 90 || (double)p->r * p->c * p->k < 2e11)
        return &res[0];
    for (int i = 0; i < n; i++) {
        int tile = 0;

        if (res[i].state != CUBLAS_STATUS_SUCCESS ||
            cublasLtMatmulAlgoConfigGetAttribute(&res[i].algo, CUBLASLT_ALGO_CONFIG_TILE_ID, &tile, sizeof tile, NULL))
            continue;
        if (tile == TILE_128x160 || tile == TILE_168x128 || tile == TILE_176x128)
            return &res[i];
    }
    return &res[0];
}

/* Asks the heuristic for p; leaves has_algo 0 when there is no kernel. */
static int choose(struct mr_cuda *c, struct slot *s, const struct product *p, struct layouts *l)
{
    struct mr_cuda_gemms *g = c->gemms;
    cublasLtMatmulPreferenceOpaque_t pref;
    cublasLtMatmulHeuristicResult_t res[CANDIDATES];
    uint32_t aa = 1u << p->align_a, ab = 1u << p->align_b, ad = 1u << p->align_d;
    int found = 0;
    cublasStatus_t st;

    s->key = *p;
    s->has_algo = 0;
    if (blas_check(c, cublasLtMatmulPreferenceInit(&pref), "preference"))
        return c->err;
    cublasLtMatmulPreferenceSetAttribute(&pref, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &WORKSPACE, sizeof WORKSPACE);
    cublasLtMatmulPreferenceSetAttribute(&pref, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &aa, sizeof aa);
    cublasLtMatmulPreferenceSetAttribute(&pref, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &ab, sizeof ab);
    cublasLtMatmulPreferenceSetAttribute(&pref, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &ad, sizeof ad);
    cublasLtMatmulPreferenceSetAttribute(&pref, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &ad, sizeof ad);
    st = cublasLtMatmulAlgoGetHeuristic(g->lt, &l->op, &l->a, &l->b, &l->d, &l->d, &pref, CANDIDATES, res, &found);
    if (st == CUBLAS_STATUS_SUCCESS && found && res[0].state == CUBLAS_STATUS_SUCCESS) {
        s->algo = pick(c, p, res, found)->algo;
        s->has_algo = 1;
    } else if (st != CUBLAS_STATUS_SUCCESS && st != CUBLAS_STATUS_NOT_SUPPORTED) {
        s->key.used = 0;
        return blas_check(c, st, "heuristic");
    }
    return 0;
}

static int plain_gemm(struct mr_cuda *c, const struct product *p, const void *A, const void *B, void *D)
{
    struct mr_cuda_gemms *g = c->gemms;
    float one = 1.0f, beta = p->acc ? 1.0f : 0.0f;

    if (!g->blas) {
        if (blas_check(c, cublasCreate(&g->blas), "create") || blas_check(c, cublasSetStream(g->blas, c->stream), "stream") ||
            blas_check(c, cublasSetWorkspace(g->blas, g->workspace, WORKSPACE), "workspace"))
            return c->err;
    }
    return blas_check(c, cublasGemmEx(g->blas, p->trans_a ? CUBLAS_OP_T : CUBLAS_OP_N, p->trans_b ? CUBLAS_OP_T : CUBLAS_OP_N, p->r, p->c,
                                      p->k, &one, A, CUDA_R_16BF, p->lda, B, CUDA_R_16BF, p->ldb, &beta, D,
                                      p->f32_out ? CUDA_R_32F : CUDA_R_16BF, p->ldd, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT), "product");
}

static int run(struct mr_cuda *c, struct product *p, const void *A, const void *B, void *D)
{
    struct mr_cuda_gemms *g = c->gemms;
    struct layouts l;
    struct slot *s;
    float one = 1.0f, beta = p->acc ? 1.0f : 0.0f;

    if (c->err)
        return c->err;
    if (p->r < 0 || p->c < 0 || p->k <= 0)
        return -EINVAL;
    if (p->r == 0 || p->c == 0)
        return 0;
    p->align_a = align_log2(A), p->align_b = align_log2(B), p->align_d = align_log2(D), p->used = 1;
    if (!g->lt && blas_check(c, cublasLtCreate(&g->lt), "create"))
        return c->err;
    if (describe(c, p, &l))
        return c->err;
    s = &g->slot[hash_of(p)];
    if (memcmp(&s->key, p, sizeof *p) != 0 && choose(c, s, p, &l))
        return c->err;
    if (!s->has_algo)
        return plain_gemm(c, p, A, B, D);
    return blas_check(c, cublasLtMatmul(g->lt, &l.op, &one, A, &l.a, B, &l.b, &beta, D, &l.d, D, &l.d, &s->algo, g->workspace, WORKSPACE,
                                        c->stream), "product");
}

/* y^T (n,m) = W (as stored: k,n column-major, transposed) * x^T (k,m). */
int mr_cuda_linear(struct mr_k *k, int m, int n, int kk, const void *x, int ldx, const void *W, void *y, int ldy, int acc)
{
    struct product p = {n, m, kk, kk, ldx, ldy, 1, 0, 0, (uint8_t)(acc != 0), 0, 0, 0, 0};

    return run(mr_cuda_of(k), &p, W, x, y);
}

int mr_cuda_linear_f32(struct mr_cuda *c, int m, int n, int kk, const void *x, int ldx, const void *W, float *z, int ldz)
{
    struct product p = {n, m, kk, kk, ldx, ldz, 1, 0, 1, 0, 0, 0, 0, 0};

    return run(c, &p, W, x, z);
}

/* dx^T (k,m) = W (k,n column-major as stored) * dy^T (n,m). */
int mr_cuda_linear_dx(struct mr_k *k, int m, int n, int kk, const void *dy, int ldy, const void *W, void *dx, int ldx, int acc)
{
    struct product p = {kk, m, n, kk, ldy, ldx, 0, 0, 0, (uint8_t)(acc != 0), 0, 0, 0, 0};

    return run(mr_cuda_of(k), &p, W, dy, dx);
}

/* dW^T (k,n) += x^T (k,m) * dy (m,n: as stored n,m column-major, transposed). */
int mr_cuda_linear_dw(struct mr_k *k, int m, int n, int kk, const void *dy, int ldy, const void *x, int ldx, float *dW)
{
    struct product p = {kk, n, m, ldx, ldy, kk, 0, 1, 1, 1, 0, 0, 0, 0};

    if (m == 0)
        return mr_cuda_of(k)->err;
    return run(mr_cuda_of(k), &p, x, dy, dW);
}
