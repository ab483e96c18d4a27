/* The RoPE table, on the host, for every backend.
 *
 * The angle is a product in f32, as Hugging Face computes it: at position 40,000 the rounding of the angle is visible in the fourth
 * digit of the cosine, so a "better" angle in double would not agree with the model that was trained. */
#include "kernels/kernels.h"

#include <math.h>

void mr_k_rope_table(float *host_cs, int max_pos, int hd, const float *host_inv_freq)
{
    int half = hd / 2;

    for (int t = 0; t < max_pos; t++) {
        float *row = host_cs + (size_t)t * (size_t)hd;

        for (int j = 0; j < half; j++) {
            float a = (float)t * host_inv_freq[j];

            row[j] = (float)cos((double)a);
            row[half + j] = (float)sin((double)a);
        }
    }
}
