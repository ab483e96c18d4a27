/* The learning-rate schedule: see schedule.h.  Linear warm-up that reaches lr at its last update, then a half cosine to zero. */
#include "data/schedule.h"

#include <math.h>

double mr_lr_at(double lr, double warmup_ratio, int constant, unsigned k, unsigned total)
{
    const double pi = 3.14159265358979323846;
    unsigned w = (unsigned)(warmup_ratio * (double)total);

    if (k < w)
        return lr * (double)(k + 1) / (double)w;
    if (constant || total <= w)
        return lr;
    return lr * 0.5 * (1.0 + cos(pi * (double)(k - w) / (double)(total - w)));
}
