/* What the tests of the cuda kernels share: the same data on both backends, and comparisons.
 *
 * Reference is the cpu backend (f32), which has its own tests against double.  Both sides get the same bf16 values, so that differences
 * are the kernels' own: f32 arithmetic in another order, the rounding of results to bf16, and of probabilities inside the attention.
 * Rounding to nearest bf16 has a relative error of at most 2^-8 and about 1.7e-3 rms over random values.  Each check gives two tolerances,
 * both over the rms of the reference: for the rms of the difference, and for the largest difference, from which for bf16 results the
 * largest rounding error of that very element (2^-8 of it) is taken off first.
 * Outputs are NaN before each call.  Environment: MR_TEST_SMALL leaves the large cases out. */
#ifndef MR_TEST_CUDA_REF_H
#define MR_TEST_CUDA_REF_H

#include "base/rng.h"
#include "kernels/kernels.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define BF16_RMS 2.5e-3   /* one rounding to bf16, with some margin */
#define BF16_MAX 1e-3     /* beyond the rounding of the element itself: f32 differences only */

static struct mr_k *gpu, *cpu;

struct ten {              /* a tensor on both backends: activations (bf16 on the device) or f32 */
    size_t n;
    int act;
    void *g;
    float *c;
};

static inline float bf_round(float f)
{
    uint32_t u;

    memcpy(&u, &f, sizeof u);
    u = (u + 0x7fff + (u >> 16 & 1)) & 0xffff0000u;
    memcpy(&f, &u, sizeof f);
    return f;
}

static inline void ten_push(struct ten *t)
{
    if (t->act)
        assert_int_equal(gpu->op->load(gpu, t->g, t->c, MR_K_F32, t->n), 0);
    else
        assert_int_equal(gpu->op->h2d(gpu, t->g, t->c, t->n * sizeof(float)), 0);
}

static inline struct ten ten_new(size_t n, int act)
{
    struct ten t = {n, act, gpu->op->alloc(gpu, n * (act ? 2 : 4)), malloc((n + 1) * sizeof(float))};

    assert_non_null(t.g);
    assert_non_null(t.c);
    for (size_t i = 0; i < n; i++)
        t.c[i] = NAN;
    ten_push(&t);
    return t;
}

/* Normal values; act: rounded to bf16 on both sides. */
static inline struct ten ten_rnd(size_t n, int act, uint64_t seed, double scale)
{
    struct ten t = ten_new(n, act);
    struct mr_rng r = mr_rng_key(seed, 3, 3);

    for (size_t i = 0; i < n; i++) {
        t.c[i] = (float)(scale * mr_rng_normal(&r));
        if (act)
            t.c[i] = bf_round(t.c[i]);
    }
    ten_push(&t);
    return t;
}

static inline void ten_free(struct ten *t)
{
    gpu->op->release(gpu, t->g);
    free(t->c);
    t->g = t->c = NULL;
}

/* The device's values as f32; the caller frees. */
static inline float *ten_pull(const struct ten *t)
{
    float *out = malloc((t->n + 1) * sizeof *out), *tmp = NULL;

    assert_non_null(out);
    if (t->act) {
        tmp = gpu->op->alloc(gpu, t->n * sizeof *out);
        assert_non_null(tmp);
        assert_int_equal(gpu->op->act_to_f32(gpu, tmp, t->g, t->n), 0);
    }
    assert_int_equal(gpu->op->d2h(gpu, out, tmp ? (void *)tmp : t->g, t->n * sizeof *out), 0);
    assert_int_equal(gpu->op->sync(gpu), 0);
    gpu->op->release(gpu, tmp);
    return out;
}

/* Device against cpu.  Elements that are NaN on the cpu side (padding of strided rows) must still be NaN on the device. */
static inline void ten_check(const char *what, const struct ten *t, double rms_tol, double max_tol)
{
    float *got = ten_pull(t);
    double ss = 0.0, ee = 0.0, worst = 0.0, rms;
    size_t at = 0, n = 0;

    for (size_t i = 0; i < t->n; i++) {
        double e = fabs((double)got[i] - (double)t->c[i]);

        if (isnan(t->c[i])) {
            if (!isnan(got[i]))
                fail_msg("%s: element %zu of %zu was written: %.9g", what, i, t->n, (double)got[i]);
            continue;
        }
        n++;
        ss += (double)t->c[i] * (double)t->c[i];
        ee += e * e;
        if (t->act)
            e -= fabs((double)t->c[i]) / 256.0;
        if (!(e <= worst)) {
            worst = isnan(e) ? INFINITY : e;
            at = i;
        }
    }
    rms = n ? sqrt(ss / (double)n) + 1e-30 : 1.0;
    ee = n ? sqrt(ee / (double)n) / rms : 0.0;
    if (getenv("MR_TEST_VERBOSE"))
        printf("  %-28s rms %.2e (%.1e)  max %.2e (%.1e)\n", what, ee, rms_tol, worst / rms, max_tol);
    if (!(ee <= rms_tol) || !(worst / rms <= max_tol))
        fail_msg("%s: rms error %.3g (allowed %.3g), worst %.3g (allowed %.3g): element %zu of %zu is %.9g, want %.9g", what, ee, rms_tol,
                 worst / rms, max_tol, at, t->n, (double)got[at], (double)t->c[at]);
    free(got);
}

/* Same bits on the device? */
static inline void ten_same(const char *what, const struct ten *a, const struct ten *b)
{
    float *x = ten_pull(a), *y = ten_pull(b);

    if (memcmp(x, y, a->n * sizeof *x) != 0)
        fail_msg("%s: two runs with the same inputs differ", what);
    free(x);
    free(y);
}

static inline int32_t *dev_i32(const int32_t *v, size_t n)
{
    int32_t *p = gpu->op->alloc(gpu, n * sizeof *p);

    assert_non_null(p);
    assert_int_equal(gpu->op->h2d(gpu, p, v, n * sizeof *p), 0);
    return p;
}

static inline int test_large(void)
{
    return getenv("MR_TEST_SMALL") == NULL;
}

/* Contexts for main(); exits 77 when there is no device. */
static inline void test_open(void)
{
    char err[256] = "";

    gpu = mr_k_cuda_create(0, 1, err, sizeof err);
    if (!gpu) {
        printf("skipped: %s\n", err);
        exit(77);
    }
    cpu = mr_k_cpu_create(1);
    if (!cpu)
        exit(1);
}

static inline int test_close(int failed)
{
    mr_k_cuda_destroy(gpu);
    mr_k_cpu_destroy(cpu);
    return failed;
}

#define BOTH(call_gpu, call_cpu) \
    do { \
        assert_int_equal(call_gpu, 0); \
        assert_int_equal(call_cpu, 0); \
        assert_int_equal(gpu->op->sync(gpu), 0); \
    } while (0)

#endif
