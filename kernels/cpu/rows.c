/* Operations on rows: thin calls into the instruction set's loops, and the pure data movement. */
#include "kernels/cpu/cpu_pvt.h"

static size_t at(int row, int ld)
{
    return (size_t)row * (size_t)ld;
}

int mr_kc_copy2d(struct mr_k *k, int rows, int cols, const void *src, int lds, void *dst, int ldd)
{
    const float *s = src;
    float *d = dst;

    (void)k;
    for (int i = 0; i < rows; i++)
        memcpy(d + at(i, ldd), s + at(i, lds), (size_t)cols * sizeof(*d));
    return 0;
}

int mr_kc_gather(struct mr_k *k, int n, int cols, const void *src, int lds, const int32_t *idx, void *dst)
{
    const float *s = src;
    float *d = dst;

    (void)k;
    for (int i = 0; i < n; i++)
        memcpy(d + at(i, cols), s + at(idx[i], lds), (size_t)cols * sizeof(*d));
    return 0;
}

int mr_kc_embed(struct mr_k *k, int n, int H, const void *table, const int32_t *ids, void *out)
{
    return mr_kc_gather(k, n, H, table, H, ids, out);
}

int mr_kc_scatter_add(struct mr_k *k, int n, int cols, const void *src, const int32_t *idx, void *dst, int ldd)
{
    const float *s = src;
    float *d = dst;

    for (int i = 0; i < n; i++)
        mr_kc(k)->isa->add((size_t)cols, d + at(idx[i], ldd), s + at(i, cols));
    return 0;
}

int mr_kc_rmsnorm(struct mr_k *k, int rows, int H, const void *x, const void *w, float eps, void *y, float *rstd)
{
    mr_kc(k)->isa->rmsnorm(rows, H, x, w, eps, y, rstd);
    return 0;
}

int mr_kc_add_rmsnorm(struct mr_k *k, int rows, int H, void *x, const void *d, const void *w, float eps, void *y, float *rstd)
{
    mr_kc(k)->isa->add_rmsnorm(rows, H, x, d, w, eps, y, rstd);
    return 0;
}

int mr_kc_rmsnorm_bwd(struct mr_k *k, int rows, int H, const void *x, const void *w, const float *rstd, const void *dy, void *dx, int acc,
                      float *dw)
{
    float *part = mr_kc_scratch(mr_kc(k), (size_t)H);

    if (!part)
        return -ENOMEM;
    mr_kc(k)->isa->rmsnorm_bwd(rows, H, x, w, rstd, dy, dx, acc, dw, part);
    return 0;
}

int mr_kc_head_norm_rope(struct mr_k *k, int rows, int nh, int hd, void *x, int ldx, const void *w, float eps, const int32_t *pos,
                         const float *cs, void *pre, float *rstd)
{
    if (cs && hd % 2)
        return -EINVAL;
    mr_kc(k)->isa->head_norm_rope(rows, nh, hd, x, ldx, w, eps, pos, cs, pre, rstd);
    return 0;
}

int mr_kc_head_norm_rope_bwd(struct mr_k *k, int rows, int nh, int hd, void *dx, int lddx, const void *pre, const void *w,
                             const float *rstd, const int32_t *pos, const float *cs, float *dw)
{
    float *part = mr_kc_scratch(mr_kc(k), (size_t)hd);

    if (!part)
        return -ENOMEM;
    if (cs && hd % 2)
        return -EINVAL;
    mr_kc(k)->isa->head_norm_rope_bwd(rows, nh, hd, dx, lddx, pre, w, rstd, pos, cs, dw, part);
    return 0;
}

int mr_kc_linear_swiglu(struct mr_k *k, int rows, int I, int kk, const void *x, int ldx, const void *W, void *gu, void *m)
{
    int e = mr_kc_linear(k, rows, 2 * I, kk, x, ldx, W, gu, 2 * I, 0);

    return e ? e : mr_kc_swiglu(k, rows, I, gu, (const float *)gu + I, 2 * I, m);
}

int mr_kc_swiglu(struct mr_k *k, int rows, int I, const void *g, const void *u, int ldgu, void *m)
{
    mr_kc(k)->isa->swiglu(rows, I, g, u, ldgu, m);
    return 0;
}

int mr_kc_swiglu_bwd(struct mr_k *k, int rows, int I, const void *g, const void *u, int ldgu, const void *dm, void *dg, void *du, int lddgu)
{
    mr_kc(k)->isa->swiglu_bwd(rows, I, g, u, ldgu, dm, dg, du, lddgu);
    return 0;
}

int mr_kc_add(struct mr_k *k, size_t n, void *x, const void *y)
{
    mr_kc(k)->isa->add(n, x, y);
    return 0;
}

int mr_kc_sumsq(struct mr_k *k, size_t n, const float *x, double *host_out)
{
    *host_out = mr_kc(k)->isa->sumsq(n, x);
    return 0;
}

int mr_kc_sum(struct mr_k *k, size_t n, const float *const *src, int n_src, float *dst)
{
    if (n_src < 1)
        return -EINVAL;
    mr_kc(k)->isa->sum(n, src, n_src, dst);
    return 0;
}

int mr_kc_adamw(struct mr_k *k, size_t n, const float *p, const float *m, const float *v, const float *grad, float scale, float lr,
                float b1, float b2, float eps, float wd, float bc1, float bc2, float *p2, float *m2, float *v2)
{
    mr_kc(k)->isa->adamw(n, p, m, v, grad, scale, lr, b1, b2, eps, wd, bc1, bc2, p2, m2, v2);
    return 0;
}
