/* The supervisor of one run: starts the actors, watches them, gives back what the dead held, writes the ledger, ends the run.
 *
 * One thread, one event loop.  It never computes and never touches a device.  What it knows about the work it reads from the segment;
 * an eventfd that the actors inherit says when to look, and a tick of 100 ms covers the wake-ups that died with their sender. */
#ifndef MR_RUNTIME_SUPERVISOR_H
#define MR_RUNTIME_SUPERVISOR_H

#include "runtime/ledger.h"
#include "runtime/loop.h"
#include "runtime/rundir.h"
#include "runtime/shm_plan.h"

struct mr_sup_opts {
    const struct mr_topology *topo;
    const struct mr_checked *checked;
    const struct mr_shm_plan *shm;
    const struct mr_rundir *dir;
    unsigned first_step; /* > 0: resumed from checkpoint `first_step` */
    unsigned recomputed; /* resume: microbatches of ledger lines that were cut off */
    enum mr_io io;
};

/* Creates the segments, runs to the end, removes them.  Returns the exit code (enum mr_exit); `err` has the first cause unless it is
 * MR_EXIT_OK.  The caller's signal mask is restored. */
int mr_supervise(const struct mr_sup_opts *o, struct mr_err *err);

#endif
