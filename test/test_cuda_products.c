/* Matrix products, those of an MLP with its activation, and the chunked cross-entropy of the cuda backend against the cpu backend. */
#include "cuda_ref.h"

#include <errno.h>

/* m, n, k, additions to the strides of x and y */
static const int shapes[][5] = {{1, 1, 8, 0, 0},    {5, 3, 16, 0, 0},   {33, 40, 24, 8, 16}, {64, 64, 64, 0, 0},
                                {17, 129, 35, 1, 3}, {2, 130, 256, 8, 8}, {100, 16, 7, 0, 1},  {63, 8, 129, 0, 0}};
static const int large[][5] = {{3000, 4096, 512, 0, 0}, {1999, 1024, 4096, 64, 0}, {4096, 1000, 1000, 8, 8}};

/* f32 accumulation in another order: errors grow like sqrt(k) * 2^-24, far below the rounding of a bf16 result.
 * Where the product is added to y, some of cuBLAS's kernels round it to bf16 before the addition: a second rounding, of 2^-8 of a product
 * that is at most six times its rms, which here is half the rms of the sum. */
#define ACC_MAX (6.0 / 2.0 / 256.0 + BF16_MAX)

static void product_case(const int s[5])
{
    int m = s[0], n = s[1], kk = s[2], ldx = kk + s[3], ldy = n + s[4];
    struct ten x = ten_rnd((size_t)m * ldx, 1, 1, 1.0), w = ten_rnd((size_t)n * kk, 1, 2, 1.0), y = ten_new((size_t)m * ldy, 1);
    struct ten dy = ten_rnd((size_t)m * ldy, 1, 3, 1.0), dx = ten_new((size_t)m * ldx, 1), dw = ten_rnd((size_t)n * kk, 0, 4, 1.0);

    for (int acc = 0; acc < 2; acc++) {
        BOTH(gpu->op->linear(gpu, m, n, kk, x.g, ldx, w.g, y.g, ldy, acc), cpu->op->linear(cpu, m, n, kk, x.c, ldx, w.c, y.c, ldy, acc));
        ten_check("linear", &y, BF16_RMS, acc ? ACC_MAX : BF16_MAX);
        BOTH(gpu->op->linear_dx(gpu, m, n, kk, dy.g, ldy, w.g, dx.g, ldx, acc),
             cpu->op->linear_dx(cpu, m, n, kk, dy.c, ldy, w.c, dx.c, ldx, acc));
        ten_check("linear_dx", &dx, BF16_RMS, acc ? ACC_MAX : BF16_MAX);
        for (size_t i = 0; i < y.n; i++)
            y.c[i] = bf_round(y.c[i]);
        for (size_t i = 0; i < dx.n; i++)
            dx.c[i] = bf_round(dx.c[i]);
        ten_push(&y);
        ten_push(&dx);
        BOTH(gpu->op->linear_dw(gpu, m, n, kk, dy.g, ldy, x.g, ldx, dw.g), cpu->op->linear_dw(cpu, m, n, kk, dy.c, ldy, x.c, ldx, dw.c));
        ten_check("linear_dw", &dw, 1e-5, 1e-4);
    }
    ten_free(&x), ten_free(&w), ten_free(&y), ten_free(&dy), ten_free(&dx), ten_free(&dw);
}

static void test_products(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        product_case(shapes[i]);
    for (size_t i = 0; i < sizeof large / sizeof *large && test_large(); i++)
        product_case(large[i]);
    assert_int_equal(gpu->op->linear(gpu, 0, 8, 8, NULL, 8, NULL, NULL, 8, 0), 0);
    assert_int_equal(gpu->op->linear(gpu, 8, 8, 0, NULL, 8, NULL, NULL, 8, 0), -EINVAL);
    assert_int_equal(gpu->op->linear_dw(gpu, 0, 8, 8, NULL, 8, NULL, 8, NULL), 0);
}

/* Pointers that are only 2, 4, 8 bytes aligned. */
static void test_alignment(void **state)
{
    int m = 24, n = 40, kk = 32;

    (void)state;
    for (int off = 1; off <= 4; off *= 2) {
        struct ten x = ten_rnd((size_t)m * kk + off, 1, 1, 1.0), w = ten_rnd((size_t)n * kk + off, 1, 2, 1.0);
        struct ten y = ten_new((size_t)m * n + off, 1);

        BOTH(gpu->op->linear(gpu, m, n, kk, (char *)x.g + 2 * off, kk, (char *)w.g + 2 * off, (char *)y.g + 2 * off, n, 0),
             cpu->op->linear(cpu, m, n, kk, x.c + off, kk, w.c + off, y.c + off, n, 0));
        ten_check("linear, odd pointers", &y, BF16_RMS, BF16_MAX);
        ten_free(&x), ten_free(&w), ten_free(&y);
    }
}

/* ---- gate, up and SwiGLU ---- */

/* As two operations there are two more roundings, of gate and of up: 2^-8 of an element each, and an element may be thirty times the rms. */
#define TWO_RMS 4e-3
#define TWO_MAX (2.0 * 30.0 / 256.0)

/* rows, I, k, addition to the stride of x, scale of gate and up */
static const int mlps[][5] = {{1, 8, 8, 0, 1}, {37, 40, 24, 8, 1}, {5, 3, 16, 1, 4}, {70, 192, 64, 0, 1}};
static const int mlps_large[][5] = {
    {2049, 1536, 256, 8, 1}, {1024, 3264, 64, 0, 4}, {4400, 960, 320, 0, 1}, {1300, 2304, 128, 0, 40}, {9000, 384, 192, 0, 1},    /* in one kernel */
    {1000, 3264, 64, 0, 1}, {1024, 768, 256, 0, 1}, {2049, 1600, 256, 0, 1}, {2048, 1536, 200, 0, 1}, {2049, 1536, 64, 4, 1},     /* not */
};

/* Where it is done in one kernel (Hopper, many rows), nothing is written to the scratch, which was zero. */
static int one_kernel(const void *gu)
{
    uint16_t v[64], any = 0;

    assert_int_equal(gpu->op->d2h(gpu, v, gu, sizeof v), 0);
    assert_int_equal(gpu->op->sync(gpu), 0);
    for (size_t i = 0; i < sizeof v / sizeof *v; i++)
        any |= v[i];
    if (getenv("MR_TEST_VERBOSE"))
        printf("  %s:\n", any ? "product, then SwiGLU" : "one kernel");
    return !any;
}

static void mlp_case(const int s[5])
{
    int rows = s[0], I = s[1], kk = s[2], ldx = kk + s[3], one;
    size_t n = (size_t)(rows + 3) * I;                     /* three rows that must not be written */
    struct ten x = ten_rnd((size_t)rows * ldx, 1, 1, 1.0), w = ten_rnd((size_t)2 * I * kk, 1, 2, s[4] / sqrt(kk));
    struct ten m = ten_new(n, 1), again = ten_new(n, 1);
    void *gu = gpu->op->alloc(gpu, (size_t)rows * 2 * I * 2 + 128);
    float *cpu_gu = malloc((size_t)rows * 2 * I * sizeof *cpu_gu);

    assert_true(gu && cpu_gu);
    BOTH(gpu->op->linear_swiglu(gpu, rows, I, kk, x.g, ldx, w.g, gu, m.g),
         cpu->op->linear_swiglu(cpu, rows, I, kk, x.c, ldx, w.c, cpu_gu, m.c));
    one = one_kernel(gu);
    ten_check("linear_swiglu", &m, one ? BF16_RMS : TWO_RMS, one ? BF16_MAX : TWO_MAX);
    assert_int_equal(gpu->op->linear_swiglu(gpu, rows, I, kk, x.g, ldx, w.g, gu, again.g), 0);
    ten_same("linear_swiglu", &m, &again);
    gpu->op->release(gpu, gu), free(cpu_gu);
    ten_free(&x), ten_free(&w), ten_free(&m), ten_free(&again);
}

static void test_mlp(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof mlps / sizeof *mlps; i++)
        mlp_case(mlps[i]);
    for (size_t i = 0; i < sizeof mlps_large / sizeof *mlps_large && test_large(); i++)
        mlp_case(mlps_large[i]);
    assert_int_equal(gpu->op->linear_swiglu(gpu, 0, 8, 8, NULL, 8, NULL, NULL, NULL), 0);
    assert_int_equal(gpu->op->linear_swiglu(gpu, 8, 8, 0, NULL, 8, NULL, NULL, NULL), -EINVAL);
    assert_int_equal(gpu->op->linear_swiglu(gpu, 8, 8, 8, NULL, 4, NULL, NULL, NULL), -EINVAL);
}

enum { BIG_T = 16384, BIG_I = 12288, BIG_K = 4096 };      /* an MLP of Qwen3-8B */

struct big {
    struct ten x, w;
    void *gu, *m, *again;                                  /* (T, 2 I), (T + 1, I) */
};

/* Every 37th row and the last against the cpu backend. */
static void big_check(struct big *b, int rows, int one)
{
    int n = (rows - 1) / 37 + 2;
    struct ten some = ten_new((size_t)n * BIG_I, 1);
    float *x = malloc((size_t)n * BIG_K * sizeof *x), *gu = malloc((size_t)n * 2 * BIG_I * sizeof *gu);
    int32_t *at = malloc((size_t)n * sizeof *at), *dev;

    assert_true(x && gu && at);
    for (int i = 0; i < n; i++) {
        at[i] = i < n - 1 ? i * 37 : rows - 1;
        memcpy(x + (size_t)i * BIG_K, b->x.c + (size_t)at[i] * BIG_K, BIG_K * sizeof *x);
    }
    dev = dev_i32(at, (size_t)n);
    BOTH(gpu->op->gather(gpu, n, BIG_I, b->m, BIG_I, dev, some.g),
         cpu->op->linear_swiglu(cpu, n, BIG_I, BIG_K, x, BIG_K, b->w.c, gu, some.c));
    ten_check("linear_swiglu, sampled", &some, one ? BF16_RMS : TWO_RMS, one ? BF16_MAX : TWO_MAX);
    gpu->op->release(gpu, dev);
    free(x), free(gu), free(at);
    ten_free(&some);
}

/* The same bits four times, and nothing behind the last row. */
static void big_repeat(struct big *b, int rows)
{
    size_t row = (size_t)BIG_I * 2, bytes = (size_t)(rows + 1) * row;
    unsigned char *first = malloc(bytes), *then = malloc(bytes);

    assert_true(first && then);
    assert_int_equal(gpu->op->d2h(gpu, first, b->m, bytes), 0);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(gpu->op->zero(gpu, b->again, bytes), 0);
        assert_int_equal(gpu->op->linear_swiglu(gpu, rows, BIG_I, BIG_K, b->x.g, BIG_K, b->w.g, b->gu, b->again), 0);
        assert_int_equal(gpu->op->d2h(gpu, then, b->again, bytes), 0);
        assert_int_equal(gpu->op->sync(gpu), 0);
        if (memcmp(first, then, bytes) != 0)
            fail_msg("linear_swiglu of %d rows: two runs with the same inputs differ", rows);
    }
    for (size_t i = 0; i < row; i++)
        if (first[(size_t)rows * row + i])
            fail_msg("linear_swiglu of %d rows wrote behind the last one", rows);
    free(first), free(then);
}

static void test_mlp_big(void **state)
{
    static const int rows[] = {1000, 1024, 2049, BIG_T};
    struct big b = {0};

    (void)state;
    if (!test_large())
        return;
    b.x = ten_rnd((size_t)BIG_T * BIG_K, 1, 1, 1.0), b.w = ten_rnd((size_t)2 * BIG_I * BIG_K, 1, 2, 0.02);
    b.gu = gpu->op->alloc(gpu, (size_t)BIG_T * 2 * BIG_I * 2);
    b.m = gpu->op->alloc(gpu, (size_t)(BIG_T + 1) * BIG_I * 2), b.again = gpu->op->alloc(gpu, (size_t)(BIG_T + 1) * BIG_I * 2);
    assert_true(b.gu && b.m && b.again);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        assert_int_equal(gpu->op->zero(gpu, b.gu, 128), 0);
        assert_int_equal(gpu->op->zero(gpu, b.m, (size_t)(rows[i] + 1) * BIG_I * 2), 0);
        assert_int_equal(gpu->op->linear_swiglu(gpu, rows[i], BIG_I, BIG_K, b.x.g, BIG_K, b.w.g, b.gu, b.m), 0);
        big_check(&b, rows[i], one_kernel(b.gu));
        big_repeat(&b, rows[i]);
    }
    gpu->op->release(gpu, b.gu), gpu->op->release(gpu, b.m), gpu->op->release(gpu, b.again);
    ten_free(&b.x), ten_free(&b.w);
}

/* ---- loss ---- */

/* The gradient is rounded to bf16 twice: as the gradient of a logit, and as the result. */
static void ce_case(int n, int H, int V)
{
    struct ten x = ten_rnd((size_t)n * H, 1, 1, 1.0), w = ten_rnd((size_t)V * H, 1, 2, 2.0 / sqrt(H)), weight = ten_rnd(n, 0, 3, 1.0);
    struct ten ce = ten_new(n, 0), dx = ten_new((size_t)n * H, 1), top = ten_new(n, 0), ce2 = ten_new(n, 0);
    size_t scratch_bytes = gpu->op->ce_scratch(gpu, n, H, V);
    void *scratch = gpu->op->alloc(gpu, scratch_bytes), *cpu_scratch = malloc(cpu->op->ce_scratch(cpu, n, H, V) + 64);
    int32_t *label = malloc((size_t)n * sizeof *label), *dev, *cpu_top = malloc((size_t)n * sizeof *cpu_top), *dev_top = dev_i32(label, n);
    struct mr_rng r = mr_rng_key(9, 9, 9);

    for (int i = 0; i < n; i++) {
        label[i] = i % 13 == 5 ? -1 : (int32_t)mr_rng_below(&r, (uint64_t)V);
        weight.c[i] = i % 7 == 2 ? 0.0f : fabsf(weight.c[i]);
    }
    ten_push(&weight);
    dev = dev_i32(label, n);
    BOTH(gpu->op->ce(gpu, n, H, V, x.g, w.g, dev, weight.g, scratch, ce.g, dev_top, dx.g),
         cpu->op->ce(cpu, n, H, V, x.c, w.c, label, weight.c, cpu_scratch, ce.c, cpu_top, dx.c));
    ten_check("ce", &ce, 1e-5, 1e-4);
    ten_check("ce dx", &dx, 4e-3, 3e-2);
    assert_int_equal(gpu->op->ce(gpu, n, H, V, x.g, w.g, dev, NULL, scratch, ce2.g, NULL, NULL), 0);
    ten_same("ce without gradient", &ce, &ce2);
    assert_int_equal(gpu->op->d2h(gpu, top.c, dev_top, (size_t)n * sizeof(int32_t)), 0);
    assert_int_equal(gpu->op->sync(gpu), 0);
    for (int i = 0, off = 0; i < n; i++) {
        int32_t got;

        memcpy(&got, top.c + i, sizeof got);
        off += got != cpu_top[i];      /* two logits that differ by less than an f32 rounding may swap */
        if (off > 1 + n / 500 || (label[i] < 0 && got != -1))
            fail_msg("argmax of row %d is %d, want %d", i, got, cpu_top[i]);
    }
    gpu->op->release(gpu, scratch), gpu->op->release(gpu, dev), gpu->op->release(gpu, dev_top);
    free(cpu_scratch), free(label), free(cpu_top);
    ten_free(&x), ten_free(&w), ten_free(&weight), ten_free(&ce), ten_free(&dx), ten_free(&top), ten_free(&ce2);
}

static void test_ce(void **state)
{
    (void)state;
    ce_case(5, 16, 7);
    ce_case(40, 32, 129);
    ce_case(9, 24, 5003);
    ce_case(3, 8, 20001);
    if (test_large()) {
        ce_case(4500, 64, 4099);       /* three chunks */
        ce_case(200, 256, 151936);
    }
}

/* Scores far above what exp can hold. */
static void test_ce_large(void **state)
{
    struct ten x = ten_new(2 * 8, 1), w = ten_new(16 * 8, 1), ce = ten_new(2, 0), weight = ten_new(2, 0), dx = ten_new(16, 1);
    int32_t label[2] = {3, 15}, *dev = dev_i32(label, 2);
    void *scratch = gpu->op->alloc(gpu, gpu->op->ce_scratch(gpu, 2, 8, 16));

    (void)state;
    for (int i = 0; i < 16; i++)
        x.c[i] = 64.0f;
    for (int i = 0; i < 128; i++)
        w.c[i] = i / 8 == 3 ? 4.0f : i / 8 == 15 ? 2.0f : -4.0f;
    weight.c[0] = weight.c[1] = 1.0f;
    ten_push(&x), ten_push(&w), ten_push(&weight);
    ce.c[0] = 0.0f, ce.c[1] = 1024.0f;
    for (int i = 0; i < 16; i++)
        dx.c[i] = i < 8 ? 0.0f : 2.0f;                 /* W[3] - W[15] */
    assert_int_equal(gpu->op->ce(gpu, 2, 8, 16, x.g, w.g, dev, weight.g, scratch, ce.g, NULL, dx.g), 0);
    ten_check("ce of large scores", &ce, 0.0, 0.0);
    ten_check("gradient of large scores", &dx, 0.0, 0.0);
    gpu->op->release(gpu, scratch), gpu->op->release(gpu, dev);
    ten_free(&x), ten_free(&w), ten_free(&ce), ten_free(&weight), ten_free(&dx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_products),
        cmocka_unit_test(test_alignment),
        cmocka_unit_test(test_mlp),
        cmocka_unit_test(test_mlp_big),
        cmocka_unit_test(test_ce),
        cmocka_unit_test(test_ce_large),
    };

    test_open();
    return test_close(cmocka_run_group_tests(tests, NULL, NULL));
}
