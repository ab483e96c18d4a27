/* Sums and AdamW over flat parameter arrays.  Compiled once per instruction set (isa.h). */
#include "kernels/cpu/vec.h"

static double sumsq_(size_t len, const float *x)
{
    vd s0 = {0}, s1 = {0};
    double s = 0.0;
    size_t i = 0;

    for (; i + 2 * VW <= len; i += 2 * VW) {
        vd a = __builtin_convertvector(vld(x + i), vd), b = __builtin_convertvector(vld(x + i + VW), vd);

        s0 += a * a;
        s1 += b * b;
    }
    s0 += s1;
    for (int j = 0; j < VW; j++)
        s += s0[j];
    for (; i < len; i++)
        s += (double)x[i] * (double)x[i];
    return s;
}

static void sum_(size_t len, const float *const *src, int n_src, float *dst)
{
    size_t i = 0;

    for (; i + VW <= len; i += VW) {
        vf s = vld(src[0] + i);

        for (int j = 1; j < n_src; j++)
            s += vld(src[j] + i);
        vst(dst + i, s);
    }
    for (; i < len; i++) {
        float s = src[0][i];

        for (int j = 1; j < n_src; j++)
            s += src[j][i];
        dst[i] = s;
    }
}

static void adamw_(size_t len, const float *p, const float *m, const float *v, const float *grad, float scale, float lr, float b1, float b2,
                   float eps, float wd, float bc1, float bc2, float *p2, float *m2, float *v2)
{
    float keep = 1.0f - lr * wd;

    for (size_t i = 0; i < len; i += VW) {
        int n = len - i < VW ? (int)(len - i) : VW;
        vf g = vget(grad + i, n) * scale, mv, vv, d;

        mv = b1 * vget(m + i, n) + (1.0f - b1) * g;
        vv = b2 * vget(v + i, n) + (1.0f - b2) * (g * g);
        d = lr * (mv / bc1) / (vsqrt(vv / bc2) + eps);
        vput(m2 + i, mv, n);
        vput(v2 + i, vv, n);
        vput(p2 + i, vget(p + i, n) * keep - d, n);
    }
}
