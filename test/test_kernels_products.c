/* Products, weight loading, memory, loss and optimizer of the cpu kernels against plain double loops. */
#include "kernels_ref.h"

#include <dirent.h>
#include <errno.h>
#include <pthread.h>

/* y (m,n) = x (m,k; ldx) W (n,k)^T */
static void ref_linear(int m, int n, int kk, const double *x, int ldx, const double *W, double *y)
{
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++)
            y[(size_t)i * n + j] = d_dot(x + (size_t)i * ldx, W + (size_t)j * kk, (size_t)kk);
}

/* Checks y (rows, cols; ld) against want (rows, cols) + acc * old, and that what lies between the rows is as it was. */
static void check_rows(const char *what, const float *y, const float *old, const double *want, int rows, int cols, int ld, int acc)
{
    float *got = f_new((size_t)rows * cols);
    double *w = d_new((size_t)rows * cols);

    for (int i = 0; i < rows; i++) {
        for (int j = 0; j < cols; j++) {
            got[(size_t)i * cols + j] = y[(size_t)i * ld + j];
            w[(size_t)i * cols + j] = want[(size_t)i * cols + j] + (acc ? (double)old[(size_t)i * ld + j] : 0.0);
        }
        if (ld > cols)
            assert_memory_equal(y + (size_t)i * ld + cols, old + (size_t)i * ld + cols, (size_t)(ld - cols) * sizeof(*y));
    }
    check_close(what, got, w, (size_t)rows * cols, 5e-6);
    free(got);
    free(w);
}

static void linear_case(struct mr_k *k, int m, int n, int kk, int acc)
{
    int ldx = kk + 5, ldy = n + 3;
    float *x = f_rnd((size_t)m * ldx, 1, 1.0), *W = f_rnd((size_t)n * kk, 2, 1.0), *y = f_rnd((size_t)m * ldy, 3, 1.0);
    float *x0 = f_rnd((size_t)m * ldx, 1, 1.0), *y0 = f_rnd((size_t)m * ldy, 3, 1.0), *dW = f_rnd((size_t)n * kk, 4, 1.0);
    float *dW0 = f_rnd((size_t)n * kk, 4, 1.0);
    double *rx = d_of(x, (size_t)m * ldx), *rW = d_of(W, (size_t)n * kk), *rdy = d_of(y, (size_t)m * ldy), *r = d_new((size_t)m * n);
    double *rdx = d_new((size_t)m * kk), *rdW = d_new((size_t)n * kk);

    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++)
            for (int l = 0; l < kk; l++) {
                rdx[(size_t)i * kk + l] += rdy[(size_t)i * ldy + j] * rW[(size_t)j * kk + l];
                rdW[(size_t)j * kk + l] += rdy[(size_t)i * ldy + j] * rx[(size_t)i * ldx + l];
            }
    assert_int_equal(k->op->linear_dw(k, m, n, kk, y, ldy, x, ldx, dW), 0);
    check_rows("linear_dw", dW, dW0, rdW, n, kk, kk, 1);
    ref_linear(m, n, kk, rx, ldx, rW, r);
    assert_int_equal(k->op->linear(k, m, n, kk, x, ldx, W, y, ldy, acc), 0);
    check_rows("linear", y, y0, r, m, n, ldy, acc);
    memcpy(y, y0, (size_t)m * ldy * sizeof(*y));
    assert_int_equal(k->op->linear_dx(k, m, n, kk, y, ldy, W, x, ldx, acc), 0);
    check_rows("linear_dx", x, x0, rdx, m, kk, ldx, acc);
    free(x), free(W), free(y), free(x0), free(y0), free(dW), free(dW0);
    free(rx), free(rW), free(rdy), free(r), free(rdx), free(rdW);
}

static void test_linear(void **state)
{
    static const int shape[][3] = {{1, 1, 1}, {3, 17, 9}, {70, 40, 33}, {37, 128, 128}, {256, 64, 96}};
    struct mr_k *k = mr_k_cpu_create(1);
    float y = 3.0f;

    (void)state;
    for (size_t i = 0; i < sizeof(shape) / sizeof(*shape); i++)
        for (int acc = 0; acc < 2; acc++)
            linear_case(k, shape[i][0], shape[i][1], shape[i][2], acc);
    assert_int_equal(k->op->linear(k, 0, 4, 4, &y, 4, &y, &y, 4, 0), 0);
    assert_true(y == 3.0f);
    mr_k_cpu_destroy(k);
}

/* The same product twice, in other memory, and on another thread of the same context. */
struct again {
    struct mr_k *k;
    const float *x, *W;
    float *y;
};

static void *run_again(void *p)
{
    struct again *a = p;

    a->k->op->linear(a->k, 517, 384, 128, a->x, 128, a->W, a->y, 384, 0);
    return NULL;
}

static void test_repeat(void **state)
{
    size_t n = 517 * 384;
    float *x = f_rnd(517 * 128 + 3, 1, 1.0), *W = f_rnd(384 * 128, 2, 1.0), *y = f_new(n), *z = f_new(n + 1), *x2 = f_new(517 * 128 + 64);

    (void)state;
    for (int threads = 1; threads <= 2; threads++) {
        struct mr_k *k = mr_k_cpu_create(threads);
        struct again a = {k, x, W, y}, b = {k, x2 + 1, W, z + 1};
        pthread_t t;

        memcpy(x2 + 1, x, 517 * 128 * sizeof(*x));
        run_again(&a);
        for (int i = 0; i < 5; i++) {
            memset(z, 0, (n + 1) * sizeof(*z));
            if (i % 2) {
                assert_int_equal(pthread_create(&t, NULL, run_again, &b), 0);
                pthread_join(t, NULL);
            } else {
                run_again(&b);
            }
            assert_memory_equal(y, z + 1, n * sizeof(*y));
        }
        mr_k_cpu_destroy(k);
    }
    free(x), free(W), free(y), free(z), free(x2);
}

/* With one thread a context starts none: nothing of the process spins beside its actor. */
static int threads_of_process(void)
{
    DIR *d = opendir("/proc/self/task");
    int n = 0;

    assert_non_null(d);
    while (readdir(d))
        n++;
    closedir(d);
    return n;
}

static void test_no_threads(void **state)
{
    float *x = f_rnd(517 * 128, 1, 1.0), *W = f_rnd(384 * 128, 2, 1.0), *y = f_new(517 * 384);
    int before = threads_of_process();
    struct again a = {mr_k_cpu_create(1), x, W, y};

    (void)state;
    run_again(&a);
    assert_int_equal(threads_of_process(), before);
    mr_k_cpu_destroy(a.k);
    free(x), free(W), free(y);
}

static void test_memory(void **state)
{
    struct mr_k *k = mr_k_cpu_create(1);
    float host[40], back[40], *p;

    (void)state;
    assert_string_equal(k->op->name, "cpu");
    assert_int_equal(k->act_bytes, 4);
    p = k->op->alloc(k, sizeof(host));
    assert_true(p && (uintptr_t)p % 256 == 0);
    for (int i = 0; i < 40; i++) {
        assert_true(p[i] == 0.0f);
        host[i] = (float)i;
    }
    assert_int_equal(k->op->h2d(k, p, host, sizeof(host)), 0);
    assert_int_equal(k->op->d2d(k, p + 20, p, 20 * sizeof(*p)), 0);
    assert_int_equal(k->op->d2h(k, back, p, sizeof(back)), 0);
    assert_int_equal(k->op->sync(k), 0);
    assert_true(back[3] == 3.0f && back[23] == 3.0f);
    assert_int_equal(k->op->f32_to_act(k, p, host, 40), 0);
    assert_int_equal(k->op->zero(k, p, 4), 0);
    assert_int_equal(k->op->act_to_f32(k, back, p, 40), 0);
    assert_true(back[0] == 0.0f && back[39] == 39.0f);
    k->op->release(k, p);
    p = k->op->alloc(k, 0);
    assert_non_null(p);
    k->op->release(k, p);
    assert_null(k->op->alloc(k, SIZE_MAX - 3));
    mr_k_cpu_destroy(k);
    mr_k_cpu_destroy(NULL);
}

static void test_load(void **state)
{
    struct mr_k *k = mr_k_cpu_create(1);
    uint16_t bf[5] = {0x3f80, 0xc049, 0x0001, 0x7f80, 0x7fc0}, h[8] = {0x3c00, 0xc248, 0x0001, 0x83ff, 0x7bff, 0x7c00, 0x7e00, 0x8000};
    float f[2] = {1.5f, -2.25f}, out[8];
    unsigned char odd[17];

    (void)state;
    assert_int_equal(k->op->load(k, out, f, MR_K_F32, 2), 0);
    assert_true(out[0] == 1.5f && out[1] == -2.25f);
    assert_int_equal(k->op->load(k, out, bf, MR_K_BF16, 5), 0);
    assert_true(out[0] == 1.0f && out[1] == -3.140625f && out[2] == 0x1p-133f && isinf(out[3]) && isnan(out[4]));
    memcpy(odd + 1, h, sizeof(h));
    assert_int_equal(k->op->load(k, out, odd + 1, MR_K_F16, 8), 0);
    assert_true(out[0] == 1.0f && out[1] == -3.140625f && out[2] == 0x1p-24f && out[3] == -1023 * 0x1p-24f && out[4] == 65504.0f);
    assert_true(isinf(out[5]) && isnan(out[6]) && out[7] == 0.0f && signbit(out[7]));
    assert_int_equal(k->op->load(k, out, f, (enum mr_k_dtype)99, 1), -EINVAL);
    mr_k_cpu_destroy(k);
}

/* ---- loss ---- */

struct ce_case {
    int n, H, V;
    double *x;
    const double *W;
    const int32_t *labels;
    const float *weight;
};

/* ce, argmax and the gradient by x, in double; any may be NULL. */
static double ref_ce(const struct ce_case *c, double *ce, int32_t *argmax, double *dx)
{
    double *z = d_new((size_t)c->V), L = 0.0;

    for (int i = 0; i < c->n; i++) {
        double m = -INFINITY, sum = 0.0, one;
        int best = 0;

        if (c->labels[i] < 0)
            continue;
        ref_linear(1, c->V, c->H, c->x + (size_t)i * c->H, c->H, c->W, z);
        for (int v = 0; v < c->V; v++)
            if (z[v] > m) {
                m = z[v];
                best = v;
            }
        for (int v = 0; v < c->V; v++)
            sum += exp(z[v] - m);
        one = log(sum) + m - z[c->labels[i]];
        L += (double)c->weight[i] * one;
        if (ce)
            ce[i] = one;
        if (argmax)
            argmax[i] = best;
        for (int v = 0; dx && v < c->V; v++)
            for (int j = 0; j < c->H; j++)
                dx[(size_t)i * c->H + j] += (exp(z[v] - m) / sum - (v == c->labels[i])) * (double)c->weight[i] * c->W[(size_t)v * c->H + j];
    }
    free(z);
    return L;
}

static double ce_loss(void *p)
{
    return ref_ce(p, NULL, NULL, NULL);
}

static void ce_case(struct mr_k *k, int n, int H, int V, double scale)
{
    size_t nx = (size_t)n * H;
    float *x = f_rnd(nx, 31, scale), *W = f_rnd((size_t)V * H, 32, 0.3), *weight = f_new((size_t)n), *ce = f_new((size_t)n),
          *dx = f_rnd(nx, 5, 1.0);
    double *rx = d_of(x, nx), *rW = d_of(W, (size_t)V * H), *rce = d_new((size_t)n), *rdx = d_new(nx);
    int32_t *labels = calloc((size_t)n, 4), *am = calloc((size_t)n, 4), *ram = calloc((size_t)n, 4);
    struct ce_case c = {n, H, V, rx, rW, labels, weight};
    void *scratch = malloc(k->op->ce_scratch(k, n, H, V));

    for (int i = 0; i < n; i++) {
        labels[i] = i % 7 == 3 ? -1 : (int32_t)(mr_mix64((uint64_t)i) % (uint64_t)V);
        weight[i] = i % 5 == 0 ? 0.0f : 0.25f + (float)(i % 3);
        ram[i] = -1;
    }
    ref_ce(&c, rce, ram, rdx);
    assert_int_equal(k->op->ce(k, n, H, V, x, W, labels, weight, scratch, ce, NULL, NULL), 0);
    check_close("ce only", ce, rce, (size_t)n, 2e-6);
    memset(ce, 0, (size_t)n * sizeof(*ce));
    assert_int_equal(k->op->ce(k, n, H, V, x, W, labels, weight, scratch, ce, am, dx), 0);
    check_close("ce", ce, rce, (size_t)n, 2e-6);
    check_close("ce dx", dx, rdx, nx, 1e-5);
    check_diff("ce dx", ce_loss, &c, rx, dx, nx, 8);
    assert_memory_equal(am, ram, (size_t)n * sizeof(*am));
    for (int i = 0; i < n; i++)
        for (int j = 0; j < H && (labels[i] < 0 || weight[i] == 0.0f); j++)
            assert_true(dx[(size_t)i * H + j] == 0.0f);
    labels[0] = V;
    assert_int_equal(k->op->ce(k, n, H, V, x, W, labels, weight, scratch, ce, am, dx), -EINVAL);
    free(x), free(W), free(weight), free(ce), free(dx), free(rx), free(rW), free(rce), free(rdx), free(labels), free(am), free(ram);
    free(scratch);
}

static void test_ce(void **state)
{
    (void)state;
    EACH_ISA(k) {
        ce_case(k, 1, 16, 11, 1.0);
        ce_case(k, 37, 33, 501, 1.0);
        ce_case(k, 9, 24, 3001, 10.0);       /* nearly certain rows */
        ce_case(k, 300, 8, 1100, 1.0);       /* several chunks */
    }
}

/* A NaN in one row is that row's affair; with weight 0 it is nobody's. */
static void test_ce_nan(void **state)
{
    float x[3 * 4] = {1, 2, 3, 4, NAN, 0, 0, 0, 4, 3, 2, 1}, W[5 * 4], ce[3], w[3] = {1, 0, 1}, dx[3 * 4];
    int32_t labels[3] = {1, 2, 3}, am[3];

    (void)state;
    for (int i = 0; i < 20; i++)
        W[i] = (float)(i % 7) * 0.1f;
    EACH_ISA(k) {
        void *scratch = malloc(k->op->ce_scratch(k, 3, 4, 5));

        assert_int_equal(k->op->ce(k, 3, 4, 5, x, W, labels, w, scratch, ce, am, dx), 0);
        assert_true(isfinite(ce[0]) && isnan(ce[1]) && isfinite(ce[2]));
        for (int i = 0; i < 12; i++)
            assert_true(isfinite(dx[i]) && (i / 4 != 1 || dx[i] == 0.0f));
        w[1] = 1.0f;
        assert_int_equal(k->op->ce(k, 3, 4, 5, x, W, labels, w, scratch, ce, am, dx), 0);
        assert_true(isnan(dx[5]) && isfinite(dx[0]));
        w[1] = 0.0f;
        free(scratch);
    }
}

/* ---- optimizer ---- */

static void test_sums(void **state)
{
    size_t n = 1003;
    float *a = f_rnd(n, 41, 1.0), *b = f_rnd(n, 42, 1.0), *c = f_rnd(n, 43, 1.0), *dst = f_new(n);
    const float *src[3] = {a, b, c};
    double want = 0.0, got;

    (void)state;
    for (size_t i = 0; i < n; i++)
        want += (double)a[i] * (double)a[i];
    EACH_ISA(k) {
        assert_int_equal(k->op->sumsq(k, n, a, &got), 0);
        assert_true(fabs(got - want) <= 1e-12 * want);
        assert_int_equal(k->op->sum(k, n, src, 3, dst), 0);
        for (size_t i = 0; i < n; i++)
            assert_true(dst[i] == (a[i] + b[i]) + c[i]);
        assert_int_equal(k->op->add(k, n, dst, a), 0);
        for (size_t i = 0; i < n; i++)
            assert_true(dst[i] == ((a[i] + b[i]) + c[i]) + a[i]);
        assert_int_equal(k->op->sum(k, n, src, 0, dst), -EINVAL);
    }
    free(a), free(b), free(c), free(dst);
}

static void test_adamw(void **state)
{
    size_t n = 517;
    float *p[2] = {f_rnd(n, 51, 0.1), f_new(n)}, *m[2] = {f_new(n), f_new(n)}, *v[2] = {f_new(n), f_new(n)}, *g = f_rnd(n, 52, 3.0);
    double *rp = d_new(n), *rm = d_new(n), *rv = d_new(n), scale = 0.3, lr = 1e-2, wd = 0.1;
    double b2 = (double)0.999f;          /* what the kernel is given: 1 - b2 differs from 0.001 in the fifth digit */

    (void)state;
    EACH_ISA(k) {
        memset(m[0], 0, n * sizeof(float)), memset(v[0], 0, n * sizeof(float));
        free(p[0]), free(rp), free(rm), free(rv);
        p[0] = f_rnd(n, 51, 0.1), rp = d_of(p[0], n), rm = d_new(n), rv = d_new(n);
        for (int t = 1; t <= 4; t++) {
            int from = (t - 1) & 1, to = t & 1;
            double bc1 = 1 - pow(0.9, t), bc2 = 1 - pow(b2, t);

            assert_int_equal(k->op->adamw(k, n, p[from], m[from], v[from], g, (float)scale, (float)lr, 0.9f, 0.999f, 1e-8f, (float)wd,
                                          (float)bc1, (float)bc2, p[to], m[to], v[to]), 0);
            for (size_t i = 0; i < n; i++) {
                double gg = (double)g[i] * scale;

                rm[i] = 0.9 * rm[i] + 0.1 * gg;
                rv[i] = b2 * rv[i] + (1 - b2) * gg * gg;
                rp[i] = rp[i] * (1 - lr * wd) - lr * (rm[i] / bc1) / (sqrt(rv[i] / bc2) + 1e-8);
            }
            check_close("adamw p", p[to], rp, n, 1e-5);
            check_close("adamw m", m[to], rm, n, 1e-5);
            check_close("adamw v", v[to], rv, n, 1e-5);
        }
    }
    for (int i = 0; i < 2; i++)
        free(p[i]), free(m[i]), free(v[i]);
    free(g), free(rp), free(rm), free(rv);
}

static void test_nocuda(void **state)
{
    char err[200] = "";

    (void)state;
#ifdef MR_HAVE_CUDA
    skip();
#endif
    assert_null(mr_k_cuda_create(0, 0, err, sizeof(err)));
    assert_non_null(strstr(err, "this build has no CUDA backend"));
    assert_null(mr_k_cuda_create(0, 0, NULL, 0));
    mr_k_cuda_destroy(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_no_threads),
        cmocka_unit_test(test_linear),
        cmocka_unit_test(test_repeat),
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_load),
        cmocka_unit_test(test_ce),
        cmocka_unit_test(test_ce_nan),
        cmocka_unit_test(test_sums),
        cmocka_unit_test(test_adamw),
        cmocka_unit_test(test_nocuda),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
