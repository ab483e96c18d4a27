/* A run that a bench starts for itself: `millrace run` as a child, in a run directory under /tmp that goes away with it. */
#ifndef MR_BENCH_LOAD_H
#define MR_BENCH_LOAD_H

#include <sys/types.h>

#include "ipc/seg.h"

struct mr_bench_load {
    struct mr_seg seg;               /* read-only */
    char run[MR_NAME_MAX], dir[64];
    pid_t pid;
};

/* Starts `topology` with one extra --set and waits (60 s at most) until its first step is over.  0 or -1; stop it in both cases. */
int mr_bench_load_start(struct mr_bench_load *l, const char *topology, const char *set, struct mr_err *err);

/* Interrupts the run (twice: no checkpoint), waits for it, and removes its directory. */
void mr_bench_load_stop(struct mr_bench_load *l);

#endif
