/* Row operations, conversions and the optimizer of the cuda backend against the cpu backend. */
#include "cuda_ref.h"

#include <errno.h>

/* Row lengths: one vector, odd, several vectors a thread (1, 2, 4), beyond the register path. */
static const int lengths[] = {8, 24, 33, 64, 1024, 2048, 4096, 5120, 8192, 8200};
#define N_LENGTHS (sizeof lengths / sizeof *lengths)

static void test_norm(void **state)
{
    (void)state;
    for (size_t i = 0; i < N_LENGTHS; i++) {
        int H = lengths[i], rows = 7;
        size_t n = (size_t)rows * H;
        struct ten x = ten_rnd(n, 1, 1, 2.0), w = ten_rnd(H, 1, 2, 1.0), d = ten_rnd(n, 1, 3, 1.0), y = ten_new(n, 1), r = ten_new(rows, 0);

        BOTH(gpu->op->rmsnorm(gpu, rows, H, x.g, w.g, 1e-6f, y.g, r.g), cpu->op->rmsnorm(cpu, rows, H, x.c, w.c, 1e-6f, y.c, r.c));
        ten_check("rmsnorm", &y, BF16_RMS, BF16_MAX);
        ten_check("rmsnorm rstd", &r, 1e-5, 1e-4);
        /* The sum is rounded to bf16 before it is normalised; give the cpu the rounded sum. */
        for (size_t j = 0; j < n; j++)
            x.c[j] = bf_round(x.c[j] + d.c[j]), d.c[j] = 0.0f;
        BOTH(gpu->op->add_rmsnorm(gpu, rows, H, x.g, d.g, w.g, 1e-5f, y.g, r.g),
             cpu->op->add_rmsnorm(cpu, rows, H, x.c, d.c, w.c, 1e-5f, y.c, r.c));
        ten_check("add_rmsnorm x", &x, 1e-7, 1e-7);
        ten_check("add_rmsnorm", &y, BF16_RMS, BF16_MAX);
        ten_check("add_rmsnorm rstd", &r, 1e-5, 1e-4);
        ten_push(&d);
        BOTH(gpu->op->add_rmsnorm(gpu, rows, H, x.g, d.g, NULL, 1e-5f, NULL, NULL), 0);
        ten_check("add only", &x, 1e-7, 1e-7);
        ten_free(&x), ten_free(&w), ten_free(&d), ten_free(&y), ten_free(&r);
    }
}

static void norm_bwd_case(int rows, int H)
{
    size_t n = (size_t)rows * H;
    struct ten x = ten_rnd(n, 1, 1, 2.0), w = ten_rnd(H, 1, 2, 1.0), dy = ten_rnd(n, 1, 3, 1.0), dx = ten_new(n, 1);
    struct ten dw = ten_rnd(H, 0, 4, 1.0), y = ten_new(n, 1), r = ten_new(rows, 0), dw2 = ten_rnd(H, 0, 4, 1.0);

    cpu->op->rmsnorm(cpu, rows, H, x.c, w.c, 1e-6f, y.c, r.c);
    ten_push(&r);
    BOTH(gpu->op->rmsnorm_bwd(gpu, rows, H, x.g, w.g, r.g, dy.g, dx.g, 0, dw.g),
         cpu->op->rmsnorm_bwd(cpu, rows, H, x.c, w.c, r.c, dy.c, dx.c, 0, dw.c));
    ten_check("rmsnorm_bwd dx", &dx, BF16_RMS, BF16_MAX);
    ten_check("rmsnorm_bwd dw", &dw, 1e-5, 1e-4);
    assert_int_equal(gpu->op->rmsnorm_bwd(gpu, rows, H, x.g, w.g, r.g, dy.g, NULL, 0, dw2.g), 0);
    ten_same("rmsnorm_bwd dw", &dw, &dw2);
    for (size_t i = 0; i < n; i++)
        dx.c[i] = bf_round(dx.c[i]);
    ten_push(&dx);
    BOTH(gpu->op->rmsnorm_bwd(gpu, rows, H, x.g, w.g, r.g, dy.g, dx.g, 1, dw.g),
         cpu->op->rmsnorm_bwd(cpu, rows, H, x.c, w.c, r.c, dy.c, dx.c, 1, dw.c));
    ten_check("rmsnorm_bwd dx acc", &dx, BF16_RMS, BF16_MAX);
    BOTH(gpu->op->rmsnorm_bwd(gpu, rows, H, x.g, w.g, r.g, dy.g, dy.g, 0, dw.g),
         cpu->op->rmsnorm_bwd(cpu, rows, H, x.c, w.c, r.c, dy.c, dy.c, 0, dw.c));
    ten_check("rmsnorm_bwd in place", &dy, BF16_RMS, BF16_MAX);
    ten_free(&x), ten_free(&w), ten_free(&dy), ten_free(&dx), ten_free(&dw), ten_free(&y), ten_free(&r), ten_free(&dw2);
}

static void test_norm_bwd(void **state)
{
    (void)state;
    for (size_t i = 0; i < N_LENGTHS; i++)
        norm_bwd_case(lengths[i] > 4096 ? 15 : 37, lengths[i]);
    if (test_large())
        norm_bwd_case(5000, 4096);
}

/* hd; the tuned path has 16, 32, 64, 128. */
static const int heads[][2] = {{1, 16}, {3, 32}, {4, 64}, {5, 128}, {2, 24}, {3, 6}, {2, 96}, {1, 256}};

static void rope_case(int nh, int hd, int rows, int norm, int rope)
{
    int ldx = nh * hd + 8, max_pos = 50;
    size_t n = (size_t)rows * nh * hd;
    struct ten x = ten_new((size_t)rows * ldx, 1), w = ten_rnd(hd, 1, 2, 1.0), cs = ten_rnd((size_t)max_pos * hd, 0, 3, 1.0);
    struct ten pre = ten_new(n, 1), r = ten_new((size_t)rows * nh, 0), dw = ten_rnd(hd, 0, 5, 1.0), src = ten_rnd(n, 1, 4, 1.5);
    int32_t *pos = malloc((size_t)rows * sizeof *pos), *dpos;

    for (int i = 0; i < rows; i++)
        pos[i] = i * 7 % max_pos;
    for (int i = 0; i < rows; i++)
        memcpy(x.c + (size_t)i * ldx, src.c + (size_t)i * nh * hd, (size_t)(nh * hd) * sizeof(float));
    ten_push(&x);
    dpos = dev_i32(pos, rows);
    BOTH(gpu->op->head_norm_rope(gpu, rows, nh, hd, x.g, ldx, norm ? w.g : NULL, 1e-6f, dpos, rope ? cs.g : NULL, pre.g, r.g),
         cpu->op->head_norm_rope(cpu, rows, nh, hd, x.c, ldx, norm ? w.c : NULL, 1e-6f, pos, rope ? cs.c : NULL, pre.c, r.c));
    ten_check("head_norm_rope", &x, BF16_RMS, BF16_MAX);
    ten_check("head_norm_rope pre", &pre, 0.0, 0.0);
    if (norm)
        ten_check("head_norm_rope rstd", &r, 1e-5, 1e-4);
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < nh * hd; j++)
            x.c[(size_t)i * ldx + j] = src.c[(size_t)(rows - 1 - i) * nh * hd + j];
    ten_push(&x);
    ten_push(&r);
    BOTH(gpu->op->head_norm_rope_bwd(gpu, rows, nh, hd, x.g, ldx, pre.g, norm ? w.g : NULL, r.g, dpos, rope ? cs.g : NULL, dw.g),
         cpu->op->head_norm_rope_bwd(cpu, rows, nh, hd, x.c, ldx, pre.c, norm ? w.c : NULL, r.c, pos, rope ? cs.c : NULL, dw.c));
    ten_check("head_norm_rope_bwd", &x, BF16_RMS, BF16_MAX);
    ten_check("head_norm_rope_bwd dw", &dw, 1e-5, 1e-4);
    gpu->op->release(gpu, dpos);
    free(pos);
    ten_free(&x), ten_free(&w), ten_free(&cs), ten_free(&pre), ten_free(&r), ten_free(&dw), ten_free(&src);
}

static void test_rope(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++) {
        rope_case(heads[i][0], heads[i][1], 13, 1, 1);
        rope_case(heads[i][0], heads[i][1], 90, 1, 0);
        rope_case(heads[i][0], heads[i][1], 33, 0, 1);
    }
    if (test_large())
        rope_case(32, 128, 3000, 1, 1);
}

static void swiglu_case(int rows, int I, int ld, int ldd)
{
    struct ten gu = ten_rnd((size_t)rows * ld + I, 1, 1, 2.0), m = ten_new((size_t)rows * I, 1), dm = ten_rnd((size_t)rows * I, 1, 2, 1.0);
    struct ten d = ten_new((size_t)rows * ldd + I, 1);
    int u = ld >= 2 * I ? I : 0, du = ldd >= 2 * I ? I : 0;

    BOTH(gpu->op->swiglu(gpu, rows, I, gu.g, (char *)gu.g + 2 * u, ld, m.g), cpu->op->swiglu(cpu, rows, I, gu.c, gu.c + u, ld, m.c));
    ten_check("swiglu", &m, BF16_RMS, 2 * BF16_MAX);
    BOTH(gpu->op->swiglu_bwd(gpu, rows, I, gu.g, (char *)gu.g + 2 * u, ld, dm.g, d.g, (char *)d.g + 2 * du, ldd),
         cpu->op->swiglu_bwd(cpu, rows, I, gu.c, gu.c + u, ld, dm.c, d.c, d.c + du, ldd));
    ten_check("swiglu_bwd", &d, BF16_RMS, 2 * BF16_MAX);
    ten_free(&gu), ten_free(&m), ten_free(&dm), ten_free(&d);
}

static void test_swiglu(void **state)
{
    (void)state;
    swiglu_case(5, 64, 128, 128);
    swiglu_case(3, 2056, 4112, 4120);
    swiglu_case(9, 37, 74, 75);
    swiglu_case(4, 24, 50, 48);
}

static void moves_case(int rows, int cols, int lds, int ldd)
{
    struct ten a = ten_rnd((size_t)rows * lds, 1, 1, 1.0), b = ten_new((size_t)rows * ldd, 1), c = ten_new((size_t)5 * cols, 1),
               s = ten_rnd((size_t)5 * cols, 1, 2, 1.0), e = ten_new((size_t)5 * lds, 1);
    int32_t idx[5] = {rows - 1, 0, 3, 1, rows / 2 + 1}, *dev = dev_i32(idx, 5);

    BOTH(gpu->op->copy2d(gpu, rows, cols, a.g, lds, b.g, ldd), cpu->op->copy2d(cpu, rows, cols, a.c, lds, b.c, ldd));
    ten_check("copy2d", &b, 0.0, 0.0);
    BOTH(gpu->op->gather(gpu, 5, cols, a.g, lds, dev, c.g), cpu->op->gather(cpu, 5, cols, a.c, lds, idx, c.c));
    ten_check("gather", &c, 0.0, 0.0);
    BOTH(gpu->op->scatter_add(gpu, 5, cols, s.g, dev, b.g, ldd), cpu->op->scatter_add(cpu, 5, cols, s.c, idx, b.c, ldd));
    ten_check("scatter_add", &b, BF16_RMS, BF16_MAX);
    BOTH(gpu->op->embed(gpu, 5, lds, a.g, dev, e.g), cpu->op->embed(cpu, 5, lds, a.c, idx, e.c));
    ten_check("embed", &e, 0.0, 0.0);
    gpu->op->release(gpu, dev);
    ten_free(&a), ten_free(&b), ten_free(&c), ten_free(&s), ten_free(&e);
}

static void test_moves(void **state)
{
    (void)state;
    moves_case(11, 64, 64, 64);
    moves_case(11, 64, 72, 80);
    moves_case(11, 35, 36, 41);
    moves_case(40, 4096, 4104, 4096);
}

static void test_conversions(void **state)
{
    static const size_t sizes[] = {1, 7, 8, 1000, 4099};

    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        size_t n = sizes[i];
        struct ten f = ten_rnd(n, 0, 1, 3.0), a = ten_new(n, 1), b = ten_rnd(n, 1, 2, 1.0);
        uint16_t *raw = malloc(n * sizeof *raw);

        BOTH(gpu->op->f32_to_act(gpu, a.g, f.g, n), 0);
        for (size_t j = 0; j < n; j++)
            a.c[j] = bf_round(f.c[j]);
        ten_check("f32_to_act", &a, 0.0, 0.0);
        BOTH(gpu->op->add(gpu, n, a.g, b.g), cpu->op->add(cpu, n, a.c, b.c));
        ten_check("add", &a, BF16_RMS, BF16_MAX);
        for (size_t j = 0; j < n; j++)
            raw[j] = (uint16_t)(0x2c00 + j * 3);   /* f16: 2^-4 upwards */
        BOTH(gpu->op->load(gpu, a.g, raw, MR_K_F16, n), cpu->op->load(cpu, a.c, raw, MR_K_F16, n));
        ten_check("load f16", &a, BF16_RMS, BF16_MAX);
        for (size_t j = 0; j < n; j++)
            raw[j] = (uint16_t)(0x3f80 + j % 500);
        BOTH(gpu->op->load(gpu, a.g, raw, MR_K_BF16, n), cpu->op->load(cpu, a.c, raw, MR_K_BF16, n));
        ten_check("load bf16", &a, 0.0, 0.0);
        free(raw);
        ten_free(&f), ten_free(&a), ten_free(&b);
    }
}

static void optimizer_case(size_t n, size_t shift)
{
    struct ten t[4], out[3], sum = ten_new(n + shift, 0);
    float *g[7], *c[7];
    const float *gs[3], *cs[3];
    double ga, ca;

    for (int i = 0; i < 4; i++)
        t[i] = ten_rnd(n + shift, 0, 10 + (uint64_t)i, 0.3);
    for (size_t i = 0; i < n + shift; i++)
        t[2].c[i] *= t[2].c[i];
    ten_push(&t[2]);
    for (int i = 0; i < 3; i++)
        out[i] = ten_new(n + shift, 0);
    for (int i = 0; i < 4; i++)
        g[i] = (float *)t[i].g + shift, c[i] = t[i].c + shift;
    for (int i = 0; i < 3; i++)
        g[4 + i] = (float *)out[i].g + shift, c[4 + i] = out[i].c + shift;
    BOTH(gpu->op->adamw(gpu, n, g[0], g[1], g[2], g[3], 0.25f, 1e-2f, 0.9f, 0.999f, 1e-8f, 0.1f, 0.19f, 0.002f, g[4], g[5], g[6]),
         cpu->op->adamw(cpu, n, c[0], c[1], c[2], c[3], 0.25f, 1e-2f, 0.9f, 0.999f, 1e-8f, 0.1f, 0.19f, 0.002f, c[4], c[5], c[6]));
    ten_check("adamw p", &out[0], 1e-6, 1e-5);
    ten_check("adamw m", &out[1], 1e-6, 1e-5);
    ten_check("adamw v", &out[2], 1e-6, 1e-5);
    for (int i = 0; i < 3; i++) {
        gs[i] = g[i];
        cs[i] = c[i];
    }
    BOTH(gpu->op->sum(gpu, n, gs, 3, (float *)sum.g + shift), cpu->op->sum(cpu, n, cs, 3, sum.c + shift));
    ten_check("sum", &sum, 0.0, 0.0);
    BOTH(gpu->op->sumsq(gpu, n, g[3], &ga), cpu->op->sumsq(cpu, n, c[3], &ca));
    assert_true(fabs(ga - ca) <= 1e-6 * ca);
    for (int i = 0; i < 4; i++)
        ten_free(&t[i]);
    for (int i = 0; i < 3; i++)
        ten_free(&out[i]);
    ten_free(&sum);
}

static void test_optimizer(void **state)
{
    (void)state;
    optimizer_case(1, 0);
    optimizer_case(1023, 0);
    optimizer_case(5000, 0);
    optimizer_case(777, 1);
    if (test_large())
        optimizer_case(3000001, 0);
}

/* Wrong arguments are refused and leave the context usable. */
static void test_refusals(void **state)
{
    struct ten x = ten_rnd(64, 1, 1, 1.0);
    const float *src[1] = {NULL};

    (void)state;
    assert_int_equal(gpu->op->rmsnorm(gpu, -1, 8, x.g, x.g, 1e-6f, x.g, NULL), -EINVAL);
    assert_int_equal(gpu->op->rmsnorm(gpu, 1, 0, x.g, x.g, 1e-6f, x.g, NULL), -EINVAL);
    assert_int_equal(gpu->op->head_norm_rope(gpu, 1, 1, 7, x.g, 8, NULL, 1e-6f, NULL, NULL, NULL, NULL), -EINVAL);
    assert_int_equal(gpu->op->swiglu(gpu, 1, 8, x.g, x.g, 4, x.g), -EINVAL);
    assert_int_equal(gpu->op->copy2d(gpu, 1, 8, x.g, 4, x.g, 8), -EINVAL);
    assert_int_equal(gpu->op->sum(gpu, 8, src, 0, x.g), -EINVAL);
    assert_int_equal(gpu->op->rmsnorm(gpu, 0, 8, x.g, x.g, 1e-6f, x.g, NULL), 0);
    ten_check("untouched", &x, 0.0, 0.0);
    ten_free(&x);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_norm),      cmocka_unit_test(test_norm_bwd),    cmocka_unit_test(test_rope),
        cmocka_unit_test(test_swiglu),    cmocka_unit_test(test_moves),       cmocka_unit_test(test_conversions),
        cmocka_unit_test(test_optimizer), cmocka_unit_test(test_refusals),
    };

    test_open();
    return test_close(cmocka_run_group_tests(tests, NULL, NULL));
}
