/* From the command line to a checked topology: what `check` and `run` share. */
#ifndef MR_RUNTIME_PREPARE_H
#define MR_RUNTIME_PREPARE_H

#include "runtime/cmd.h"
#include "runtime/rundir.h"
#include "runtime/shm_plan.h"

struct mr_prepared {
    struct mr_topology topo;
    struct mr_checked checked;
    struct mr_shm_plan shm; /* first_step is 0 here */
    int has_topo, has_checked;
};

/* Loads, checks against checkpoint and data, plans the shared memory.  `name` (may be NULL) overrides /run/name.  0 or -1 with err; free in
 * both cases. */
int mr_prepare(struct mr_prepared *p, const char *path, const struct mr_arg_list *set, const char *name, struct mr_err *err);
void mr_prepared_free(struct mr_prepared *p);
/* Plan, buckets, slabs (data/check.h), then the /dev/shm arithmetic. */
void mr_prepared_print(const struct mr_prepared *p, FILE *f);

/* `run --resume`: where to go on, with the ledger cut to match. */
struct mr_resume {
    unsigned first_step; /* 0: no checkpoint yet, everything anew */
    unsigned recomputed; /* microbatches of the ledger lines that were cut off */
    int complete;        /* nothing is left to do */
};
int mr_resume(struct mr_resume *r, const struct mr_rundir *d, const struct mr_prepared *p, struct mr_err *err);

#endif
