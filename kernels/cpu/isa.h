/* The row loops, once per instruction set: the same source (body_*.h) compiled by isa_avx512.c, isa_avx2.c and isa_base.c.
 *
 * Function tables and one look at the processor when a context is created, not target_clones: those resolve through ifuncs, which
 * run before the sanitizers have started and then crash.  All pointers are f32; shapes and meanings as in kernels.h; lengths > 0.
 */
#ifndef MR_KERNELS_CPU_ISA_H
#define MR_KERNELS_CPU_ISA_H

#include <stddef.h>
#include <stdint.h>

/* The visible keys of one query row: columns [lo[0], hi[0]) and [lo[1], hi[1]), in this order, either may be empty. */
struct mr_kc_span {
    int lo[2], hi[2];
};

struct mr_kc_isa {
    const char *name;
    void (*exp)(size_t n, const float *x, float *y);     /* for the tests and for users with rows of their own */
    float (*dot)(int n, const float *a, const float *b);
    void (*scale)(int n, float a, const float *x, float *y);
    void (*add)(size_t n, float *x, const float *y);

    void (*rmsnorm)(int rows, int H, const float *x, const float *w, float eps, float *y, float *rstd);
    void (*add_rmsnorm)(int rows, int H, float *x, const float *d, const float *w, float eps, float *y, float *rstd);
    /* acc_dw (H): scratch */
    void (*rmsnorm_bwd)(int rows, int H, const float *x, const float *w, const float *rstd, const float *dy, float *dx, int acc, float *dw,
                        float *acc_dw);
    void (*head_norm_rope)(int rows, int nh, int hd, float *x, int ldx, const float *w, float eps, const int32_t *pos, const float *cs,
                           float *pre, float *rstd);
    void (*head_norm_rope_bwd)(int rows, int nh, int hd, float *dx, int lddx, const float *pre, const float *w, const float *rstd,
                               const int32_t *pos, const float *cs, float *dw, float *acc_dw);
    void (*swiglu)(int rows, int I, const float *g, const float *u, int ldgu, float *m);
    void (*swiglu_bwd)(int rows, int I, const float *g, const float *u, int ldgu, const float *dm, float *dg, float *du, int lddgu);

    /* s (n) scores -> e^(s - max) at the visible columns, 0 elsewhere.  Returns 1 / sum and *lse (NULL: not
     * wanted); no visible column: 0 and 0. */
    float (*softmax)(float *s, int n, const struct mr_kc_span *vis, float *lse);
    /* s (n) scores -> p = e^(s - lse), dp (n) -> p * (dp - d) * scale, both 0 where not visible. */
    void (*softmax_bwd)(float *s, float *dp, int n, const struct mr_kc_span *vis, float lse, float d, float scale);
    /* z (V) logits -> ce and *argmax (NULL: not wanted).  want: z becomes e^(z - max), minus the sum at the label, and the sum is
     * returned: softmax - onehot = z / sum. */
    float (*ce)(float *z, int V, int label, int want, float *ce, int32_t *argmax);

    double (*sumsq)(size_t n, const float *x);
    void (*sum)(size_t n, const float *const *src, int n_src, float *dst);
    void (*adamw)(size_t n, const float *p, const float *m, const float *v, const float *grad, float scale, float lr, float b1, float b2,
                  float eps, float wd, float bc1, float bc2, float *p2, float *m2, float *v2);
};

#if defined(__x86_64__)
extern const struct mr_kc_isa mr_kc_isa_avx512, mr_kc_isa_avx2;
#endif
extern const struct mr_kc_isa mr_kc_isa_base;

struct mr_k;
/* For tests and benches: this context's loops from now on are those of "avx512", "avx2" or "base".  -ENOTSUP: not on this processor. */
int mr_k_cpu_set_isa(struct mr_k *k, const char *name);
const struct mr_kc_isa *mr_k_cpu_isa(struct mr_k *k);

#endif
