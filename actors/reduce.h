/* The reduction of one step: every drafter's accumulator -> this drafter's own `reduced` buffer, OUT OF PLACE (docs/design.md 6.1).
 *
 * Accumulators stay as they are, so a sum that recovery made void is simply made again.  Weights and losses travel in the arena headers
 * and are summed in the same rank order: every replica ends with the same bits.  The caller reads the REDUCE word before and hands it to
 * mr_step_reduced after; a sum whose collective epoch has passed is thrown away there.
 */
#ifndef MR_ACTORS_REDUCE_H
#define MR_ACTORS_REDUCE_H

#include "actors/env.h"

struct mr_reduce {
    const char *name;            /* "local", "shm", "p2p", "nccl" */
    struct mr_env *env;          /* borrowed, as are the two below */
    const struct mr_drafter_view *mine;
    const struct mr_drafter_engine *eng;
    /* Sum for the REDUCE word `word`, host-confirmed on return (edge E3).  0; -ESTALE = a peer's memory is being replaced, look at the
     * step word again; -1 with err.  Blocks for the time of the sum only, never for a peer; nccl: for a peer that lives, up to a deadline. */
    int (*sum)(struct mr_reduce *r, uint64_t word, struct mr_err *err);
    void (*destroy)(struct mr_reduce *r);
    int collective;              /* sum() waits for the peers' */
    struct mr_k_comm *comm;      /* nccl: the group of collective epoch comm_epoch - 1 */
    uint64_t comm_epoch;
    void *wire;                  /* nccl: (P) bf16 when that is what travels */
    int summing;                 /* nccl: a sum was started and is not known complete: the library may write `reduced` */
};

/* Chooses by the number of drafters, their device and /train/reduce.  0 or -1 with err. */
int mr_reduce_create(struct mr_reduce *r, struct mr_env *env, const struct mr_drafter_view *mine, const struct mr_drafter_engine *eng,
                     struct mr_err *err);

#endif
