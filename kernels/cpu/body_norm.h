/* Norms and rotary positions.  Compiled once per instruction set (isa.h).
 *
 * Sums over a row go into four vectors of lanes and then a tree: at H = 4096 that is at most 64 additions one after another, so the
 * mean square is as good as a pairwise sum.  Sums over rows (gradients of norm weights) are collected 64 rows at a time in scratch before
 * they are added to the gradient, for the same reason.
 */
#include "kernels/cpu/vec.h"

#define DW_ROWS 64

static float dot_(int len, const float *a, const float *b)
{
    vf s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0};
    int i = 0;

    for (; i + 4 * VW <= len; i += 4 * VW) {
        s0 += vld(a + i) * vld(b + i);
        s1 += vld(a + i + VW) * vld(b + i + VW);
        s2 += vld(a + i + 2 * VW) * vld(b + i + 2 * VW);
        s3 += vld(a + i + 3 * VW) * vld(b + i + 3 * VW);
    }
    for (; i + VW <= len; i += VW)
        s0 += vld(a + i) * vld(b + i);
    if (i < len)
        s1 += vldn(a + i, len - i) * vldn(b + i, len - i);
    return vsum((s0 + s1) + (s2 + s3));
}

/* sum of a*b*c */
static float dot3(int len, const float *a, const float *b, const float *c)
{
    vf s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0};
    int i = 0;

    for (; i + 4 * VW <= len; i += 4 * VW) {
        s0 += vld(a + i) * vld(b + i) * vld(c + i);
        s1 += vld(a + i + VW) * vld(b + i + VW) * vld(c + i + VW);
        s2 += vld(a + i + 2 * VW) * vld(b + i + 2 * VW) * vld(c + i + 2 * VW);
        s3 += vld(a + i + 3 * VW) * vld(b + i + 3 * VW) * vld(c + i + 3 * VW);
    }
    for (; i + VW <= len; i += VW)
        s0 += vld(a + i) * vld(b + i) * vld(c + i);
    if (i < len)
        s1 += vldn(a + i, len - i) * vldn(b + i, len - i) * vldn(c + i, len - i);
    return vsum((s0 + s1) + (s2 + s3));
}

static void scale_(int len, float a, const float *x, float *y)
{
    VROW(i, len)
        vput(y + i, a * vget(x + i, n), n);
}

static void add_(size_t len, float *x, const float *y)
{
    size_t i = 0;

    for (; i + VW <= len; i += VW)
        vst(x + i, vld(x + i) + vld(y + i));
    for (; i < len; i++)
        x[i] += y[i];
}

static void norm_row(int H, const float *x, const float *w, float r, float *y)
{
    VROW(i, H)
        vput(y + i, vget(x + i, n) * r * vget(w + i, n), n);
}

static void rmsnorm_(int rows, int H, const float *x, const float *w, float eps, float *y, float *rstd)
{
    for (int t = 0; t < rows; t++, x += H, y += H) {
        float r = 1.0f / sqrtf(dot_(H, x, x) / (float)H + eps);

        norm_row(H, x, w, r, y);
        if (rstd)
            rstd[t] = r;
    }
}

static void add_rmsnorm_(int rows, int H, float *x, const float *d, const float *w, float eps, float *y, float *rstd)
{
    for (int t = 0; t < rows; t++, x += H, d += H) {
        float r;

        VROW(i, H)
            vput(x + i, vget(x + i, n) + vget(d + i, n), n);
        if (!y && !rstd)
            continue;
        r = 1.0f / sqrtf(dot_(H, x, x) / (float)H + eps);
        if (rstd)
            rstd[t] = r;
        if (y)
            norm_row(H, x, w, r, y + (size_t)t * H);
    }
}

/* One row of the backward: dx NULL or written (acc: added to), dw (n) added to.  k = rstd^2 * mean(dy*w*x).  In place dx == dy works. */
static void norm_bwd_row(int H, const float *x, const float *w, float r, float k, const float *dy, float *dx, int acc, float *dw)
{
    VROW(i, H) {
        vf xv = vget(x + i, n), d = vget(dy + i, n), v;

        vput(dw + i, vget(dw + i, n) + d * xv * r, n);
        if (!dx)
            continue;
        v = r * (d * vget(w + i, n) - xv * k);
        vput(dx + i, acc ? vget(dx + i, n) + v : v, n);
    }
}

static void flush_dw(int len, float *dw, float *part)
{
    if (dw)
        add_((size_t)len, dw, part);
    memset(part, 0, (size_t)len * sizeof(*part));
}

static void rmsnorm_bwd_(int rows, int H, const float *x, const float *w, const float *rstd, const float *dy, float *dx, int acc, float *dw,
                         float *part)
{
    memset(part, 0, (size_t)H * sizeof(*part));
    for (int t = 0; t < rows; t++) {
        size_t o = (size_t)t * (size_t)H;
        float r = rstd[t], k = dx ? r * r * dot3(H, dy + o, w, x + o) / (float)H : 0.0f;

        norm_bwd_row(H, x + o, w, r, k, dy + o, dx ? dx + o : NULL, acc, part);
        if (t % DW_ROWS == DW_ROWS - 1)
            flush_dw(H, dw, part);
    }
    flush_dw(H, dw, part);
}

/* (a, b) -> (a cos - b sin, b cos + a sin) over the two halves; dir -1 turns back. */
static void rope_row(int half, float *x, const float *cs, float dir)
{
    VROW(i, half) {
        vf c = vget(cs + i, n), s = dir * vget(cs + half + i, n), a = vget(x + i, n), b = vget(x + half + i, n);

        vput(x + i, a * c - b * s, n);
        vput(x + half + i, b * c + a * s, n);
    }
}

static void head_norm_rope_(int rows, int nh, int hd, float *x, int ldx, const float *w, float eps, const int32_t *pos, const float *cs,
                            float *pre, float *rstd)
{
    for (int t = 0; t < rows; t++) {
        const float *c = cs ? cs + (size_t)pos[t] * (size_t)hd : NULL;
        float *row = x + (size_t)t * (size_t)ldx;

        if (pre)
            memcpy(pre + (size_t)t * (size_t)(nh * hd), row, (size_t)(nh * hd) * sizeof(*row));
        for (int h = 0; h < nh; h++) {
            float *v = row + h * hd;

            if (w) {
                float r = 1.0f / sqrtf(dot_(hd, v, v) / (float)hd + eps);

                norm_row(hd, v, w, r, v);
                if (rstd)
                    rstd[(size_t)t * (size_t)nh + (size_t)h] = r;
            }
            if (c)
                rope_row(hd / 2, v, c, 1.0f);
        }
    }
}

static void head_norm_rope_bwd_(int rows, int nh, int hd, float *dx, int lddx, const float *pre, const float *w, const float *rstd,
                                const int32_t *pos, const float *cs, float *dw, float *part)
{
    memset(part, 0, (size_t)hd * sizeof(*part));
    for (int t = 0; t < rows; t++) {
        const float *c = cs ? cs + (size_t)pos[t] * (size_t)hd : NULL;

        for (int h = 0; h < nh; h++) {
            size_t at = (size_t)t * (size_t)nh + (size_t)h;
            float *v = dx + (size_t)t * (size_t)lddx + h * hd, r, k;

            if (c)
                rope_row(hd / 2, v, c, -1.0f);
            if (!w)
                continue;
            r = rstd[at];
            k = r * r * dot3(hd, v, w, pre + at * (size_t)hd) / (float)hd;
            norm_bwd_row(hd, pre + at * (size_t)hd, w, r, k, v, v, 0, part);
        }
        if (w && t % DW_ROWS == DW_ROWS - 1)
            flush_dw(hd, dw, part);
    }
    if (w)
        flush_dw(hd, dw, part);
}
