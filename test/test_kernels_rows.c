/* Row operations of the cpu kernels: exp, embedding and copies, norms, RoPE, SwiGLU, forward and backward, on every instruction set. */
#include "kernels_ref.h"

static void ref_norm(int rows, int H, const double *x, const double *w, double eps, double *y)
{
    for (int t = 0; t < rows; t++) {
        const double *r = x + (size_t)t * H;
        double s = 1.0 / sqrt(d_dot(r, r, (size_t)H) / H + eps);

        for (int i = 0; i < H; i++)
            y[(size_t)t * H + i] = r[i] * s * (w ? w[i] : 1.0);
    }
}

static void ref_norm_bwd(int rows, int H, const double *x, const double *w, double eps, const double *dy, double *dx, double *dw)
{
    for (int t = 0; t < rows; t++) {
        const double *r = x + (size_t)t * H, *d = dy + (size_t)t * H;
        double s = 1.0 / sqrt(d_dot(r, r, (size_t)H) / H + eps), m = 0.0;

        for (int i = 0; i < H; i++)
            m += d[i] * w[i] * r[i] / H;
        for (int i = 0; i < H; i++) {
            dx[(size_t)t * H + i] = s * (d[i] * w[i] - r[i] * s * s * m);
            dw[i] += d[i] * r[i] * s;
        }
    }
}

/* dir 1: forward, -1: the inverse */
static void ref_rope(int rows, int nh, int hd, double *x, const int32_t *pos, const float *cs, double dir)
{
    for (int t = 0; t < rows; t++)
        for (int h = 0; h < nh; h++)
            for (int i = 0; i < hd / 2; i++) {
                double *a = x + ((size_t)t * nh + h) * hd + i, *b = a + hd / 2, x0 = *a, x1 = *b;
                double c = (double)cs[(size_t)pos[t] * hd + i], s = dir * (double)cs[(size_t)pos[t] * hd + hd / 2 + i];

                *a = x0 * c - x1 * s;
                *b = x1 * c + x0 * s;
            }
}

static void test_exp(void **state)
{
    enum { N = 200003 };
    float *x = f_new(N), *y = f_new(N);

    (void)state;
    for (int i = 0; i < N; i++)
        x[i] = -87.0f + (float)i * (175.3f / N);
    EACH_ISA(k) {
        const struct mr_kc_isa *isa = mr_k_cpu_isa(k);
        double worst = 0.0;
        float odd[6] = {-INFINITY, -1e30f, -87.01f, NAN, 0.0f, 1e30f}, out[6];

        isa->exp(N, x, y);
        for (int i = 0; i < N; i++) {
            double want = exp((double)x[i]), e = fabs((double)y[i] - want) / want;

            worst = e > worst ? e : worst;
        }
        if (!(worst <= 2e-7))
            fail_msg("%s: exp is wrong by %.3g", isa->name, worst);
        isa->exp(6, odd, out);
        assert_true(out[0] == 0.0f && out[1] == 0.0f && out[2] == 0.0f && isnan(out[3]) && out[4] == 1.0f);
        assert_true(out[5] > 2e38f && isfinite(out[5]));
    }
    free(x);
    free(y);
}

static void test_move(void **state)
{
    enum { ROWS = 7, COLS = 21, LDS = 30, LDD = 25 };
    float *src = f_rnd(9 * LDS, 1, 1.0), *dst = f_rnd(9 * LDD, 2, 1.0), *old = f_new(9 * LDD), *out = f_new(ROWS * COLS);
    int32_t idx[ROWS] = {8, 0, 3, 2, 7, 1, 5};

    (void)state;
    EACH_ISA(k) {
        memcpy(old, dst, 9 * LDD * sizeof(*old));
        assert_int_equal(k->op->gather(k, ROWS, COLS, src, LDS, idx, out), 0);
        for (int i = 0; i < ROWS; i++)
            assert_memory_equal(out + i * COLS, src + idx[i] * LDS, COLS * sizeof(float));
        assert_int_equal(k->op->scatter_add(k, ROWS, COLS, out, idx, dst, LDD), 0);
        for (int i = 0; i < ROWS; i++)
            for (int j = 0; j < LDD; j++)
                assert_true(dst[idx[i] * LDD + j] == old[idx[i] * LDD + j] + (j < COLS ? out[i * COLS + j] : 0.0f));
        assert_memory_equal(dst + 4 * LDD, old + 4 * LDD, LDD * sizeof(float));
        memcpy(dst, old, 9 * LDD * sizeof(*old));
        assert_int_equal(k->op->copy2d(k, ROWS, COLS, src, LDS, dst, LDD), 0);
        for (int i = 0; i < ROWS; i++) {
            assert_memory_equal(dst + i * LDD, src + i * LDS, COLS * sizeof(float));
            assert_memory_equal(dst + i * LDD + COLS, old + i * LDD + COLS, (LDD - COLS) * sizeof(float));
        }
        assert_int_equal(k->op->embed(k, ROWS, LDS, src, idx, dst), 0);
        assert_memory_equal(dst + 2 * LDS, src + 3 * LDS, LDS * sizeof(float));
    }
    free(src);
    free(dst);
    free(old);
    free(out);
}

struct norm_case {
    int rows, H;
    double eps, *x, *w, *c;              /* L = sum c * norm(x; w) */
};

static double norm_loss(void *p)
{
    struct norm_case *n = p;
    double *y = d_new((size_t)n->rows * n->H), L;

    ref_norm(n->rows, n->H, n->x, n->w, n->eps, y);
    L = d_dot(y, n->c, (size_t)n->rows * n->H);
    free(y);
    return L;
}

static void norm_case(struct mr_k *k, int rows, int H)
{
    size_t n = (size_t)rows * H;
    float *x = f_rnd(n, 3, 1.5), *d = f_rnd(n, 4, 0.7), *w = f_rnd((size_t)H, 5, 1.0), *y = f_new(n), *rstd = f_new((size_t)rows);
    float *dy = f_rnd(n, 6, 1.0), *dx = f_rnd(n, 8, 1.0), *dw = f_rnd((size_t)H, 9, 1.0), *dx0 = f_rnd(n, 8, 1.0);
    double *rx, *rw = d_of(w, (size_t)H), *ry = d_new(n), *rdx = d_new(n), *rdw = d_of(dw, (size_t)H), *rdy = d_of(dy, n);
    struct norm_case nc;

    for (size_t i = 0; i < n; i++)
        x[i] += d[i];
    rx = d_of(x, n);
    ref_norm(rows, H, rx, rw, 1e-6, ry);
    assert_int_equal(k->op->rmsnorm(k, rows, H, x, w, 1e-6f, y, rstd), 0);
    check_close("rmsnorm", y, ry, n, 2e-6);
    for (size_t i = 0; i < n; i++)
        x[i] -= d[i];
    assert_int_equal(k->op->add_rmsnorm(k, rows, H, x, d, w, 1e-6f, y, rstd), 0);
    check_close("add_rmsnorm", y, ry, n, 4e-6);
    check_close("add_rmsnorm x", x, rx, n, 1e-6);
    memset(y, 0, n * sizeof(*y));
    assert_int_equal(k->op->rmsnorm(k, rows, H, x, w, 1e-6f, y, rstd), 0);
    ref_norm_bwd(rows, H, rx, rw, 1e-6, rdy, rdx, rdw);
    assert_int_equal(k->op->rmsnorm_bwd(k, rows, H, x, w, rstd, dy, dx, 0, dw), 0);
    check_close("rmsnorm_bwd dx", dx, rdx, n, 1e-5);
    check_close("rmsnorm_bwd dw", dw, rdw, (size_t)H, 1e-5);
    nc = (struct norm_case){rows, H, 1e-6, rx, rw, rdy};
    check_diff("rmsnorm_bwd dx", norm_loss, &nc, rx, dx, n, 12);
    memset(dw, 0, (size_t)H * sizeof(*dw));
    assert_int_equal(k->op->rmsnorm_bwd(k, rows, H, x, w, rstd, dy, dx0, 1, dw), 0);
    check_diff("rmsnorm_bwd dw", norm_loss, &nc, rw, dw, (size_t)H, 8);
    memcpy(y, dy, n * sizeof(*y));
    assert_int_equal(k->op->rmsnorm_bwd(k, rows, H, x, w, rstd, y, y, 0, dw), 0);
    assert_memory_equal(y, dx, n * sizeof(*y));                      /* in place */
    free(dx);
    dx = f_rnd(n, 8, 1.0);
    for (size_t i = 0; i < n; i++)
        rdx[i] += (double)dx[i];
    check_close("rmsnorm_bwd acc", dx0, rdx, n, 1e-5);
    assert_int_equal(k->op->rmsnorm_bwd(k, rows, H, x, w, rstd, dy, NULL, 0, dw), 0);
    assert_int_equal(k->op->add_rmsnorm(k, rows, H, x, d, w, 1e-6f, NULL, NULL), 0);
    for (size_t i = 0; i < n; i++)
        rx[i] += (double)d[i];
    check_close("add only", x, rx, n, 1e-6);
    free(x), free(d), free(w), free(y), free(rstd), free(dy), free(dx), free(dw), free(dx0);
    free(rx), free(rw), free(ry), free(rdx), free(rdw), free(rdy);
}

static void test_norm(void **state)
{
    static const int shape[][2] = {{1, 8}, {5, 33}, {9, 128}, {130, 96}, {3, 1000}, {2, 4096}};

    (void)state;
    EACH_ISA(k)
        for (size_t i = 0; i < sizeof(shape) / sizeof(*shape); i++)
            norm_case(k, shape[i][0], shape[i][1]);
}

struct rope_case {
    int rows, nh, hd, rope;
    double *x, *w, *c;
    const int32_t *pos;
    const float *cs;
};

static void ref_head(const struct rope_case *r, double *y)
{
    size_t n = (size_t)r->rows * r->nh * r->hd;

    if (r->w)
        ref_norm(r->rows * r->nh, r->hd, r->x, r->w, 1e-6, y);
    else
        memcpy(y, r->x, n * sizeof(*y));
    if (r->cs)
        ref_rope(r->rows, r->nh, r->hd, y, r->pos, r->cs, 1.0);
}

static double head_loss(void *p)
{
    struct rope_case *r = p;
    size_t n = (size_t)r->rows * r->nh * r->hd;
    double *y = d_new(n), L;

    ref_head(r, y);
    L = d_dot(y, r->c, n);
    free(y);
    return L;
}

static void pack(double *dst, const float *src, int rows, int cols, int ld)
{
    for (int t = 0; t < rows; t++)
        for (int j = 0; j < cols; j++)
            dst[(size_t)t * cols + j] = (double)src[(size_t)t * ld + j];
}

static void pack_f(float *dst, const float *src, int rows, int cols, int ld)
{
    for (int t = 0; t < rows; t++)
        memcpy(dst + (size_t)t * cols, src + (size_t)t * ld, (size_t)cols * sizeof(*dst));
}

static void head_case(struct mr_k *k, int rows, int nh, int hd, int norm, int rope)
{
    int cols = nh * hd, ld = cols + 13;
    size_t n = (size_t)rows * cols;
    float *x = f_rnd((size_t)rows * ld, 11, 1.0), *w = f_rnd((size_t)hd, 12, 1.0), *cs = f_new((size_t)(50 * hd)), *pre = f_new(n);
    float *rstd = f_new((size_t)(rows * nh)), *dx = f_rnd((size_t)rows * ld, 13, 1.0), *dw = f_rnd((size_t)hd, 14, 1.0),
          *inv = f_new((size_t)hd);
    float *flat = f_new(n), *xin = f_new(n), tail = x[cols];
    double *rx = d_new(n), *ry = d_new(n), *rw = d_of(w, (size_t)hd), *rd = d_new(n), *rdx = d_new(n), *rdw = d_of(dw, (size_t)hd);
    int32_t *pos = calloc((size_t)rows, sizeof(*pos));
    struct rope_case rc = {rows, nh, hd, rope, rx, norm ? rw : NULL, rd, pos, rope ? cs : NULL};

    for (int i = 0; i < hd / 2; i++)
        inv[i] = (float)pow(10000.0, -2.0 * i / hd);
    mr_k_rope_table(cs, 50, hd, inv);
    for (int t = 0; t < rows; t++)
        pos[t] = (t * 7) % 50;
    pack(rx, x, rows, cols, ld);
    pack_f(xin, x, rows, cols, ld);
    pack(rd, dx, rows, cols, ld);
    ref_head(&rc, ry);
    assert_int_equal(k->op->head_norm_rope(k, rows, nh, hd, x, ld, norm ? w : NULL, 1e-6f, pos, rope ? cs : NULL, pre, rstd), 0);
    pack_f(flat, x, rows, cols, ld);
    check_close("head_norm_rope", flat, ry, n, 2e-6);
    assert_memory_equal(pre, xin, n * sizeof(*pre));
    assert_true(x[cols] == tail);
    assert_int_equal(k->op->head_norm_rope_bwd(k, rows, nh, hd, dx, ld, pre, norm ? w : NULL, rstd, pos, rope ? cs : NULL, dw), 0);
    pack_f(flat, dx, rows, cols, ld);
    check_diff("head_norm_rope_bwd dx", head_loss, &rc, rx, flat, n, 12);
    memcpy(ry, rd, n * sizeof(*ry));
    if (rope)
        ref_rope(rows, nh, hd, ry, pos, cs, -1.0);
    if (norm)
        ref_norm_bwd(rows * nh, hd, rx, rw, 1e-6, ry, rdx, rdw);
    check_close("head_norm_rope_bwd dx", flat, norm ? rdx : ry, n, 1e-5);
    check_close("head_norm_rope_bwd dw", dw, rdw, (size_t)hd, 1e-5);
    if (norm) {
        float *dw2 = f_new((size_t)hd);

        free(dx);
        dx = f_rnd((size_t)rows * ld, 13, 1.0);
        assert_int_equal(k->op->head_norm_rope_bwd(k, rows, nh, hd, dx, ld, pre, w, rstd, pos, rope ? cs : NULL, dw2), 0);
        check_diff("head_norm_rope_bwd dw", head_loss, &rc, rw, dw2, (size_t)hd, 6);
        free(dw2);
    }
    free(x), free(w), free(cs), free(pre), free(rstd), free(dx), free(dw), free(inv), free(flat), free(xin), free(pos);
    free(rx), free(ry), free(rw), free(rd), free(rdx), free(rdw);
}

static void test_head_norm_rope(void **state)
{
    static const int hds[] = {16, 24, 32, 64, 128, 10};

    (void)state;
    EACH_ISA(k)
        for (size_t i = 0; i < sizeof(hds) / sizeof(*hds); i++)
            for (int mode = 0; mode < 4; mode++)
                head_case(k, i == 2 ? 140 : 6, 1 + (int)i % 3, hds[i], mode & 1, mode >> 1);
}

struct glu_case {
    size_t n;
    double *g, *u, *c;
};

static double glu_loss(void *p)
{
    struct glu_case *s = p;
    double L = 0.0;

    for (size_t i = 0; i < s->n; i++)
        L += s->c[i] * s->u[i] * s->g[i] / (1.0 + exp(-s->g[i]));
    return L;
}

static void glu_case(struct mr_k *k, int rows, int I)
{
    int ld = 2 * I + 3;
    size_t n = (size_t)rows * I;
    float *gu = f_rnd((size_t)rows * ld, 21, 3.0), *m = f_new(n), *dm = f_rnd(n, 22, 1.0), *dgu = f_rnd((size_t)rows * ld, 23, 1.0),
          *flat = f_new(n);
    double *g = d_new(n), *u = d_new(n), *rm = d_new(n), *rdm = d_of(dm, n), *rg = d_new(n), *ru = d_new(n);
    struct glu_case gc = {n, g, u, rdm};

    pack(g, gu, rows, I, ld);
    pack(u, gu + I, rows, I, ld);
    for (size_t i = 0; i < n; i++) {
        double s = 1.0 / (1.0 + exp(-g[i]));

        rm[i] = g[i] * s * u[i];
        rg[i] = rdm[i] * u[i] * s * (1.0 + g[i] * (1.0 - s));
        ru[i] = rdm[i] * g[i] * s;
    }
    assert_int_equal(k->op->swiglu(k, rows, I, gu, gu + I, ld, m), 0);
    check_close("swiglu", m, rm, n, 2e-6);
    assert_int_equal(k->op->swiglu_bwd(k, rows, I, gu, gu + I, ld, dm, dgu, dgu + I, ld), 0);
    pack_f(flat, dgu, rows, I, ld);
    check_close("swiglu dg", flat, rg, n, 2e-6);
    check_diff("swiglu dg", glu_loss, &gc, g, flat, n, 10);
    pack_f(flat, dgu + I, rows, I, ld);
    check_close("swiglu du", flat, ru, n, 2e-6);
    check_diff("swiglu du", glu_loss, &gc, u, flat, n, 10);
    free(gu), free(m), free(dm), free(dgu), free(flat), free(g), free(u), free(rm), free(rdm), free(rg), free(ru);
}

static void test_swiglu(void **state)
{
    float big[4] = {-200.0f, -80.0f, 100.0f, 0.0f}, one[4] = {1.0f, 1.0f, 1.0f, 1.0f}, m[4];

    (void)state;
    EACH_ISA(k) {
        glu_case(k, 1, 5);
        glu_case(k, 9, 96);
        glu_case(k, 3, 385);
        assert_int_equal(k->op->swiglu(k, 1, 4, big, one, 4, m), 0);
        assert_true(fabsf(m[0]) < 1e-30f && fabsf(m[1]) < 1e-30f && m[2] == 100.0f && m[3] == 0.0f);
    }
}

/* Product and activation in one call: the bits of the two calls. */
static void test_linear_swiglu(void **state)
{
    enum { ROWS = 7, I = 13, K = 29, LD = K + 2 };

    (void)state;
    EACH_ISA(k) {
        float *x = f_rnd((size_t)ROWS * LD, 31, 1.0), *w = f_rnd((size_t)2 * I * K, 32, 1.0), *gu = f_new((size_t)ROWS * 2 * I);
        float *m = f_new((size_t)ROWS * I), *want = f_new((size_t)ROWS * I);

        assert_int_equal(k->op->linear(k, ROWS, 2 * I, K, x, LD, w, gu, 2 * I, 0), 0);
        assert_int_equal(k->op->swiglu(k, ROWS, I, gu, gu + I, 2 * I, want), 0);
        assert_int_equal(k->op->linear_swiglu(k, ROWS, I, K, x, LD, w, gu, m), 0);
        assert_memory_equal(m, want, sizeof(float) * ROWS * I);
        free(x), free(w), free(gu), free(m), free(want);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exp),
        cmocka_unit_test(test_move),
        cmocka_unit_test(test_norm),
        cmocka_unit_test(test_head_norm_rope),
        cmocka_unit_test(test_swiglu),
        cmocka_unit_test(test_linear_swiglu),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
