/* Weights from a checkpoint's number formats to f32, bit by bit: exact for every value, subnormals, infinities and NaN included. */
#include "kernels/cpu/cpu_pvt.h"

static float from_bits(uint32_t u)
{
    float f;

    memcpy(&f, &u, sizeof(f));
    return f;
}

static float from_f16(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exp = h >> 10 & 31u, man = h & 0x3ffu;

    if (exp == 31)
        return from_bits(sign | 0x7f800000u | man << 13);
    if (exp == 0) {
        float f = (float)man * 0x1p-24f;

        return sign ? -f : f;
    }
    return from_bits(sign | (exp + 112) << 23 | man << 13);
}

int mr_kc_load(struct mr_k *k, void *dst, const void *host_src, enum mr_k_dtype dtype, size_t n)
{
    float *d = dst;
    const unsigned char *s = host_src;   /* a checkpoint in a mapping need not be aligned */
    uint16_t h;

    (void)k;
    switch (dtype) {
    case MR_K_F32:
        memcpy(d, s, n * sizeof(*d));
        return 0;
    case MR_K_BF16:
        for (size_t i = 0; i < n; i++) {
            memcpy(&h, s + 2 * i, sizeof(h));
            d[i] = from_bits((uint32_t)h << 16);
        }
        return 0;
    case MR_K_F16:
        for (size_t i = 0; i < n; i++) {
            memcpy(&h, s + 2 * i, sizeof(h));
            d[i] = from_f16(h);
        }
        return 0;
    }
    return -EINVAL;
}
