/* One vector of floats, as wide as the instruction set that the including file is compiled for.
 *
 * Arithmetic is GCC's vector extension (+ - * /, contracted into fused multiply-adds where the machine has them); the few things that
 * it has no operator for are below, with intrinsics for x86 and plain loops for everything else.  No operation here depends on
 * anything but its operands: sums over lanes have one fixed order, so results repeat bit for bit.
 * Private to the isa_*.c files: everything is static and takes the target of the file that includes it.
 */
#ifndef MR_KERNELS_CPU_VEC_H
#define MR_KERNELS_CPU_VEC_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define VB 64
#elif defined(__AVX2__)
#define VB 32
#else
#define VB 16
#endif
#define VW (VB / 4)

typedef float vf __attribute__((vector_size(VB)));
typedef int32_t vi __attribute__((vector_size(VB)));
typedef uint32_t vu __attribute__((vector_size(VB)));
typedef double vd __attribute__((vector_size(2 * VB)));
typedef float vfu __attribute__((vector_size(VB), aligned(4), may_alias));

static inline vf vset(float x)
{
    return x - (vf){0};      /* minus zero, not plus: keeps the sign of -0 */
}

static inline vf vld(const float *p)
{
    return *(const vfu *)p;
}

static inline void vst(float *p, vf v)
{
    *(vfu *)p = v;
}

/* The first n < VW lanes; the others are 0, and their memory is not touched. */
static inline vf vldn(const float *p, int n)
{
#if defined(__AVX512F__)
    return (vf)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1u), p);
#else
    vf v = {0};

    for (int i = 0; i < n; i++)
        v[i] = p[i];
    return v;
#endif
}

static inline void vstn(float *p, vf v, int n)
{
#if defined(__AVX512F__)
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1u), (__m512)v);
#else
    for (int i = 0; i < n; i++)
        p[i] = v[i];
#endif
}

/* max(a, b) and min(a, b); when a is NaN the answer is b, when b is NaN it is NaN. */
static inline vf vmax(vf a, vf b)
{
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
    return (vf)_mm_max_ps((__m128)a, (__m128)b);
#else
    vi m = a > b;

    return (vf)(((vi)a & m) | ((vi)b & ~m));
#endif
}

static inline vf vmin(vf a, vf b)
{
#if defined(__AVX512F__)
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
    return (vf)_mm_min_ps((__m128)a, (__m128)b);
#else
    vi m = a < b;

    return (vf)(((vi)a & m) | ((vi)b & ~m));
#endif
}

/* r where x >= lo or x is NaN, else exactly 0, whatever r holds there. */
static inline vf vzero_below(vf x, float lo, vf r)
{
#if defined(__AVX512F__)
    return (vf)_mm512_maskz_mov_ps(_mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(lo), _CMP_NLT_UQ), (__m512)r);
#else
    return (vf)((vi)r & ~(vi)(x < vset(lo)));
#endif
}

static inline int vany_eq(vf a, vf b)
{
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_EQ_OQ) != 0;
#elif defined(__AVX2__)
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_EQ_OQ)) != 0;
#elif defined(__SSE2__)
    return _mm_movemask_ps(_mm_cmpeq_ps((__m128)a, (__m128)b)) != 0;
#else
    vi m = a == b;
    int any = 0;

    for (int i = 0; i < VW; i++)
        any |= m[i];
    return any != 0;
#endif
}

static inline vf vsqrt(vf a)
{
#if defined(__AVX512F__)
    return (vf)_mm512_sqrt_ps((__m512)a);
#elif defined(__AVX2__)
    return (vf)_mm256_sqrt_ps((__m256)a);
#elif defined(__SSE2__)
    return (vf)_mm_sqrt_ps((__m128)a);
#else
    for (int i = 0; i < VW; i++)
        a[i] = sqrtf(a[i]);
    return a;
#endif
}

/* Over all lanes, as a tree. */
static inline float vsum(vf a)
{
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)a);
#else
    float t[VW];

    memcpy(t, &a, sizeof(t));
    for (int w = VW / 2; w >= 1; w /= 2)
        for (int i = 0; i < w; i++)
            t[i] += t[i + w];
    return t[0];
#endif
}

static inline float vmaxall(vf a)
{
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)a);
#else
    float m = a[0];

    for (int i = 1; i < VW; i++)
        m = a[i] > m ? a[i] : m;
    return m;
#endif
}

/* e^x, relative error below 2e-7, for x in [lo, 88.3]; exactly 0 below lo (>= -87, so that no result is subnormal: those cost a
 * hundred cycles each on many processors); constant above 88.3; NaN stays NaN.
 * e^x = 2^n e^r with n = round(x / ln 2): the rounding is done by adding 1.5 * 2^23, which also leaves n in the low bits of the sum.
 * The polynomial is Cephes' (Moshier) for e^r on |r| <= ln2 / 2. */
static inline vf vexp(vf x, float lo)
{
    vf c = vmin(vset(88.3f), x), t = c * 1.44269504f + 12582912.0f, n = t - 12582912.0f;
    vf r = (c - n * 0.693359375f) - n * -2.12194440e-4f, p;
    vu e = ((vu)t << 23) + (127u << 23);

    p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    return vzero_below(x, lo, p * (vf)e);
}
#define VEXP_LO (-87.0f)
/* For probabilities: what is below 1e-30 of the maximum is 0, so that products of two small ones do not become subnormal either. */
#define VEXP_SOFT_LO (-69.0f)

static inline vf vsigmoid(vf x)
{
    return 1.0f / (1.0f + vexp(-x, VEXP_LO));
}

static inline int imin(int a, int b)
{
    return a < b ? a : b;
}

/* For each vector of a row: a full one, and at most one cut one at the end.  n is the number of valid lanes. */
#define VROW(i, len) for (int i = 0, n = imin(VW, (len)); i < (len); i += VW, n = imin(VW, (len) - i))

static inline vf vget(const float *p, int n)
{
    return n == VW ? vld(p) : vldn(p, n);
}

static inline void vput(float *p, vf v, int n)
{
    if (n == VW)
        vst(p, v);
    else
        vstn(p, v, n);
}

#endif
