/* The learning-rate schedule: a pure function, used by drafters and by the metrics. */
#ifndef MR_DATA_SCHEDULE_H
#define MR_DATA_SCHEDULE_H

/* lr of update `k` (0-based) of `total` (docs/dflash.md 3.4): w = int(ratio * total); k < w: lr (k+1)/w; else constant ? lr :
 * lr/2 (1 + cos(pi (k-w)/(total-w))). */
double mr_lr_at(double lr, double warmup_ratio, int constant, unsigned k, unsigned total);

#endif
