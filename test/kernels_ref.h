/* Plain double-precision references of the kernels, and what the kernel tests share.
 *
 * Every reference is the definition in kernels.h written as loops: no tiles, no stacking, no shared code with the kernels.  Gradients are
 * checked twice: against the analytic gradient in double (every element), and against central differences of the double forward (some
 * elements), so that an error in the analytic reference would show too.
 */
#ifndef MR_TEST_KERNELS_REF_H
#define MR_TEST_KERNELS_REF_H

#include "base/rng.h"
#include "kernels/cpu/isa.h"
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

#define N_ISA 3
static const char *const isa_names[N_ISA] = {"avx512", "avx2", "base"};

/* Runs the body once for every instruction set of this machine, with k a fresh context. */
#define EACH_ISA(k) \
    for (int isa_ = 0; isa_ < N_ISA; isa_++) \
        for (struct mr_k *k = isa_context(isa_); k; mr_k_cpu_destroy(k), k = NULL)

static inline struct mr_k *isa_context(int i)
{
    struct mr_k *k = mr_k_cpu_create(1);

    assert_non_null(k);
    if (mr_k_cpu_set_isa(k, isa_names[i]) == 0)
        return k;
    mr_k_cpu_destroy(k);
    return NULL;
}

static inline float *f_new(size_t n)
{
    float *p = malloc((n + 1) * sizeof(*p));      /* exact but for one: the address sanitizer sees a read behind the end */

    assert_non_null(p);
    memset(p, 0, (n + 1) * sizeof(*p));
    return p;
}

static inline float *f_rnd(size_t n, uint64_t seed, double scale)
{
    struct mr_rng r = mr_rng_key(seed, 7, 7);
    float *p = f_new(n);

    for (size_t i = 0; i < n; i++)
        p[i] = (float)(scale * mr_rng_normal(&r));
    return p;
}

static inline double *d_new(size_t n)
{
    double *p = calloc(n + 1, sizeof(*p));

    assert_non_null(p);
    return p;
}

static inline double *d_of(const float *x, size_t n)
{
    double *p = d_new(n);

    for (size_t i = 0; i < n; i++)
        p[i] = (double)x[i];
    return p;
}

/* Largest error relative to the reference's root mean square (or 1e-30); fails above tol, and on NaN. */
static inline void check_close(const char *what, const float *got, const double *want, size_t n, double tol)
{
    double ss = 0.0, worst = 0.0, rms;
    size_t at = 0;

    for (size_t i = 0; i < n; i++)
        ss += want[i] * want[i];
    rms = n ? sqrt(ss / (double)n) + 1e-30 : 1.0;
    for (size_t i = 0; i < n; i++) {
        double e = fabs((double)got[i] - want[i]) / rms;

        if (!(e <= worst)) {
            worst = e;
            at = i;
        }
    }
    if (!(worst <= tol))
        fail_msg("%s: element %zu of %zu is %.9g, want %.9g (error %.3g of rms %.3g, allowed %.3g)", what, at, n, (double)got[at],
                 want[at], worst, rms, tol);
}

/* Central difference of L at *x. */
static inline double d_diff(double (*L)(void *), void *ctx, double *x)
{
    double keep = *x, h = 1e-5, up, down;

    *x = keep + h;
    up = L(ctx);
    *x = keep - h;
    down = L(ctx);
    *x = keep;
    return (up - down) / (2 * h);
}

/* `grad` (n) against differences at `tries` spread elements of x (n). */
static inline void check_diff(const char *what, double (*L)(void *), void *ctx, double *x, const float *grad, size_t n, int tries)
{
    double ss = 0.0, rms;

    for (size_t i = 0; i < n; i++)
        ss += (double)grad[i] * (double)grad[i];
    rms = sqrt(ss / (double)n);
    for (int t = 0; t < tries; t++) {
        size_t i = (size_t)(mr_mix64((uint64_t)t) % n);
        double d = d_diff(L, ctx, x + i);

        if (!(fabs(d - (double)grad[i]) <= 1e-4 * (rms + 1e-3)))
            fail_msg("%s: gradient %zu of %zu is %.9g, the difference quotient %.9g (rms %.3g)", what, i, n, (double)grad[i], d, rms);
    }
}

static inline double d_dot(const double *a, const double *b, size_t n)
{
    double s = 0.0;

    for (size_t i = 0; i < n; i++)
        s += a[i] * b[i];
    return s;
}

#endif
