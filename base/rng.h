/* Random numbers that are pure functions of a key, so that every incarnation of every actor draws the same ones.
 *
 * splitmix64 (Steele, Lea, Flood 2014): a counter passed through a finaliser.  Good enough for shuffles, anchors and Gaussian
 * initialisation; not for secrets.
 */
#ifndef MR_BASE_RNG_H
#define MR_BASE_RNG_H

#include <math.h>
#include <stdint.h>

struct mr_rng {
    uint64_t s;
};

static inline uint64_t mr_mix64(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* A stream keyed by up to three numbers, e.g. (seed, epoch, sample id). */
static inline struct mr_rng mr_rng_key(uint64_t a, uint64_t b, uint64_t c)
{
    return (struct mr_rng){mr_mix64(mr_mix64(mr_mix64(a) ^ b) ^ c)};
}

static inline uint64_t mr_rng_u64(struct mr_rng *r)
{
    uint64_t x = mr_mix64(r->s);

    r->s += 0x9e3779b97f4a7c15u;
    return x;
}

/* As if n numbers had been drawn: a stream may be drawn in parts, by several threads. */
static inline void mr_rng_skip(struct mr_rng *r, uint64_t n)
{
    r->s += n * 0x9e3779b97f4a7c15u;
}

/* Uniform in [0, n), n > 0.  Multiply-shift; the bias is below n / 2^64. */
static inline uint64_t mr_rng_below(struct mr_rng *r, uint64_t n)
{
    return (uint64_t)(((unsigned __int128)mr_rng_u64(r) * n) >> 64);
}

/* Uniform in [0, 1). */
static inline double mr_rng_unit(struct mr_rng *r)
{
    return (double)(mr_rng_u64(r) >> 11) * 0x1.0p-53;
}

/* Standard normal, Box-Muller, one value a call (the second is thrown away: state stays one word). */
static inline double mr_rng_normal(struct mr_rng *r)
{
    double u = 1.0 - mr_rng_unit(r), v = mr_rng_unit(r);

    return sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v);
}

#endif
