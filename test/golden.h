/* Helpers of the golden programs: tensors of a golden file as f32, device activations as f32, and comparisons that print one line each. */
#ifndef MR_TEST_GOLDEN_H
#define MR_TEST_GOLDEN_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/safetensors.h"
#include "kernels/kernels.h"

struct golden {
    struct mr_st st;
    int compared, failed;
};

static inline void golden_die(const char *what)
{
    fprintf(stderr, "%s\n", what);
    exit(2);
}

static inline void *golden_alloc(size_t bytes)
{
    void *p = calloc(1, bytes + 1);

    if (!p)
        golden_die("out of memory");
    return p;
}

static inline void golden_open(struct golden *g, const char *path)
{
    struct mr_err err = {0};

    memset(g, 0, sizeof *g);
    if (mr_st_open(&g->st, path, &err))
        golden_die(err.msg);
}

static inline const struct mr_st_tensor *golden_find(const struct golden *g, const char *name) { return mr_st_find(&g->st, name); }

static inline const struct mr_st_tensor *golden_need(const struct golden *g, const char *name)
{
    const struct mr_st_tensor *t = golden_find(g, name);

    if (!t) {
        fprintf(stderr, "%s: tensor %s is missing\n", g->st.path, name);
        exit(2);
    }
    return t;
}

/* Any numeric tensor as f32; free() it.  Integers of the golden sets are small: f32 holds them exactly. */
static inline float *golden_f32(const struct golden *g, const char *name)
{
    const struct mr_st_tensor *t = golden_need(g, name);
    const unsigned char *src = mr_st_data(&g->st, t);
    float *dst = golden_alloc(t->n * sizeof *dst);
    struct mr_err err = {0};

    for (uint64_t i = 0; i < t->n; i++) {
        int64_t i8;
        int32_t i4;

        if (t->dtype == MR_ST_I64) {
            memcpy(&i8, src + 8 * i, 8);
            dst[i] = (float)i8;
        } else if (t->dtype == MR_ST_I32) {
            memcpy(&i4, src + 4 * i, 4);
            dst[i] = (float)i4;
        } else if (t->dtype == MR_ST_U8 || t->dtype == MR_ST_BOOL) {
            dst[i] = (float)src[i];
        } else if (mr_st_to_f32(&g->st, t, dst, &err)) {
            golden_die(err.msg);
        } else {
            break;
        }
    }
    return dst;
}

static inline int32_t *golden_i32(const struct golden *g, const char *name)
{
    float *f = golden_f32(g, name);
    uint64_t n = golden_need(g, name)->n;
    int32_t *dst = golden_alloc(n * sizeof *dst);

    for (uint64_t i = 0; i < n; i++)
        dst[i] = (int32_t)f[i];
    free(f);
    return dst;
}

static inline float golden_scalar(const struct golden *g, const char *name)
{
    float *f = golden_f32(g, name), x = f[0];

    free(f);
    return x;
}

/* n activations of the device as f32 on the host; free() it. */
static inline float *golden_fetch(struct mr_k *k, const void *x, size_t n)
{
    float *host = golden_alloc(n * sizeof *host), *dev = k->op->alloc(k, (n + 1) * sizeof *dev);

    if (!dev || k->op->act_to_f32(k, dev, x, n) || k->op->d2h(k, host, dev, n * sizeof *host) || k->op->sync(k))
        golden_die("reading activations back failed");
    k->op->release(k, dev);
    return host;
}

static inline double golden_rel_rms(const float *x, const float *ref, size_t n)
{
    double d = 0, r = 0;

    for (size_t i = 0; i < n; i++) {
        double e = (double)x[i] - (double)ref[i];

        d += e * e;
        r += (double)ref[i] * (double)ref[i];
    }
    return n ? sqrt(d / (r + 1e-30)) : 0.0;
}

static inline double golden_rms(const float *x, size_t n)
{
    double r = 0;

    for (size_t i = 0; i < n; i++)
        r += (double)x[i] * (double)x[i];
    return n ? sqrt(r / (double)n) : 0.0;
}

static inline double golden_max_abs(const float *x, const float *ref, size_t n)
{
    double m = 0;

    for (size_t i = 0; i < n; i++)
        if (!(fabs((double)x[i] - (double)ref[i]) <= m))
            m = fabs((double)x[i] - (double)ref[i]);
    return m;
}

/* One line and the verdict: NaN never passes. */
static inline void golden_verdict(struct golden *g, const char *what, const char *measure, double error, double allowed)
{
    int ok = error <= allowed;

    printf("%-52s %-8s %.3e  (<= %.0e)  %s\n", what, measure, error, allowed, ok ? "ok" : "FAIL");
    g->compared++;
    g->failed += !ok;
}

static inline int golden_end(struct golden *g)
{
    printf("%d compared, %d failed: %s\n", g->compared, g->failed, g->failed || !g->compared ? "FAIL" : "PASS");
    mr_st_close(&g->st);
    return g->failed || !g->compared;
}

#endif
