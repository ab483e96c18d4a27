/* Random weights for benches: a pure function of (seed, index), so that every backend and every incarnation makes the same ones.
 *
 * Uniform instead of normal: what a forward pass costs does not depend on it, and 24 bits of a hash times a constant is exact arithmetic
 * that host and device agree on to the last bit. */
#include "kernels/kernels.h"

#include "base/rng.h"

void mr_k_random_f32(float *host_x, uint64_t seed, uint64_t first, size_t n, float std)
{
    float scale = std * 1.7320508f * 0x1p-23f;

    for (size_t i = 0; i < n; i++)
        host_x[i] = (float)((int32_t)(mr_mix64(seed ^ (first + i)) >> 40) - (1 << 23)) * scale;
}
