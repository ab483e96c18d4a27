/* SwiGLU, the softmax of attention rows, the cross entropy of one row of logits.  Compiled once per instruction set (isa.h). */
#include "kernels/cpu/vec.h"

static void exp_(size_t len, const float *x, float *y)
{
    for (size_t i = 0; i < len; i += VW) {
        int n = len - i < VW ? (int)(len - i) : VW;

        vput(y + i, vexp(vget(x + i, n), VEXP_LO), n);
    }
}

static void swiglu_(int rows, int I, const float *g, const float *u, int ldgu, float *m)
{
    for (int t = 0; t < rows; t++, g += ldgu, u += ldgu, m += I) {
        VROW(i, I) {
            vf gv = vget(g + i, n);

            vput(m + i, gv * vsigmoid(gv) * vget(u + i, n), n);
        }
    }
}

static void swiglu_bwd_(int rows, int I, const float *g, const float *u, int ldgu, const float *dm, float *dg, float *du, int lddgu)
{
    for (int t = 0; t < rows; t++, g += ldgu, u += ldgu, dm += I, dg += lddgu, du += lddgu) {
        VROW(i, I) {
            vf gv = vget(g + i, n), s = vsigmoid(gv), d = vget(dm + i, n), uv = vget(u + i, n);

            vput(dg + i, d * uv * (s * (1.0f + gv * (1.0f - s))), n);
            vput(du + i, d * (gv * s), n);
        }
    }
}

static void zero_(float *p, int from, int to)
{
    if (to > from)
        memset(p + from, 0, (size_t)(to - from) * sizeof(*p));
}

static float span_max(const float *s, int lo, int hi, float m0)
{
    vf m = vset(m0);
    int i = lo;

    for (; i + VW <= hi; i += VW)
        m = vmax(vld(s + i), m);
    m0 = vmaxall(m);
    for (; i < hi; i++)
        m0 = s[i] > m0 ? s[i] : m0;
    return m0;
}

static vf span_exp(float *s, int lo, int hi, float m)
{
    vf sum = {0};
    int i = lo;

    for (; i + VW <= hi; i += VW) {
        vf e = vexp(vld(s + i) - m, VEXP_SOFT_LO);

        vst(s + i, e);
        sum += e;
    }
    if (i < hi) {
        float t[VW] = {0};
        vf e = vexp(vldn(s + i, hi - i) - m, VEXP_SOFT_LO);

        vstn(s + i, e, hi - i);
        vstn(t, e, hi - i);
        sum += vld(t);
    }
    return sum;
}

static float softmax_(float *s, int n, const struct mr_kc_span *v, float *lse)
{
    int none = v->lo[0] >= v->hi[0] && v->lo[1] >= v->hi[1];
    float m = -INFINITY, sum;

    if (none) {
        zero_(s, 0, n);
        if (lse)
            *lse = 0.0f;
        return 0.0f;
    }
    for (int j = 0; j < 2; j++)
        if (v->lo[j] < v->hi[j])
            m = span_max(s, v->lo[j], v->hi[j], m);
    sum = vsum(span_exp(s, v->lo[0], v->hi[0], m) + span_exp(s, v->lo[1], v->hi[1], m));
    zero_(s, 0, v->lo[0]);
    zero_(s, v->hi[0], v->lo[1]);
    zero_(s, v->hi[1], n);
    if (lse)
        *lse = m + logf(sum);
    return 1.0f / sum;
}

static void softmax_bwd_(float *s, float *dp, int len, const struct mr_kc_span *v, float lse, float d, float scale)
{
    int at = 0;

    for (int j = 0; j < 2; j++) {
        zero_(s, at, v->lo[j]);
        zero_(dp, at, v->lo[j]);
        for (int i = v->lo[j]; i < v->hi[j]; i += VW) {
            int n = imin(VW, v->hi[j] - i);
            vf p = vexp(vget(s + i, n) - lse, VEXP_SOFT_LO);

            vput(s + i, p, n);
            vput(dp + i, p * (vget(dp + i, n) - d) * scale, n);
        }
        at = v->hi[j];
    }
    zero_(s, at, len);
    zero_(dp, at, len);
}

static int32_t first_equal(const float *z, int V, float m)
{
    vf mv = vset(m);
    int i = 0;

    while (i + VW <= V && !vany_eq(vld(z + i), mv))
        i += VW;
    while (i < V && z[i] != m)
        i++;
    return i < V ? i : 0;        /* V: every logit is NaN */
}

/* Sum of e^(z - m) over [lo, hi), stored when want. */
static float ce_piece(float *z, int lo, int hi, float m, int want)
{
    vf s0 = {0}, s1 = {0};
    int i = lo;

    for (; i + 2 * VW <= hi; i += 2 * VW) {
        vf a = vexp(vld(z + i) - m, VEXP_SOFT_LO), b = vexp(vld(z + i + VW) - m, VEXP_SOFT_LO);

        s0 += a;
        s1 += b;
        if (want) {
            vst(z + i, a);
            vst(z + i + VW, b);
        }
    }
    for (; i < hi; i += VW) {
        int n = imin(VW, hi - i);
        float t[VW] = {0};
        vf e = vexp(vget(z + i, n) - m, VEXP_SOFT_LO);

        vput(t, e, n);
        s0 += vld(t);
        if (want)
            vput(z + i, e, n);
    }
    return vsum(s0 + s1);
}

/* Pieces of 1024 are summed in f32 lanes, the pieces in double: the sum over 150,000 words is good to 1e-7 too. */
static float ce_(float *z, int V, int label, int want, float *ce, int32_t *argmax)
{
    float m = span_max(z, 0, V, -INFINITY), zl = z[label];
    double sum = 0.0;

    if (argmax)
        *argmax = first_equal(z, V, m);
    for (int lo = 0; lo < V; lo += 1024)
        sum += (double)ce_piece(z, lo, imin(V, lo + 1024), m, want);
    *ce = (float)(log(sum) + ((double)m - (double)zl));
    if (want)
        z[label] -= (float)sum;
    return (float)sum;
}
