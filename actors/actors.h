/* The actors: what the binary millrace-actor can be.  One call = one incarnation of one slot; the return value is the exit code.
 *
 * No actor has a global: everything hangs on its `struct mr_env`, so that several actors also run as threads of one process over one
 * segment (that is how the thread sanitizer sees them).  An actor may be SIGKILLed at any instruction; what it held is given back by
 * ipc/recover.h.  Actors never fork: a child would keep the dead actor's GPU context alive (docs/design.md section 12).
 *
 * Return values: MR_EXIT_OK after the sentinel (row.acked is set) or after a drain (it is not); MR_EXIT_FAILED on abort or on an error
 * that was logged; another enum mr_exit where the error said so.
 */
#ifndef MR_ACTORS_ACTORS_H
#define MR_ACTORS_ACTORS_H

#include "actors/engine.h"
#include "actors/env.h"

/* Data set -> plan -> items in the input ring, from hdr->cursor on.  Stays until the sentinel. */
int mr_actor_feeder(struct mr_env *e);
/* Input ring -> forward -> slab -> ready ring. */
int mr_actor_target(struct mr_env *e);
/* Ready rings -> gradients -> reduce -> commit -> optimizer; copies checkpoints out. */
int mr_actor_drafter(struct mr_env *e);
/* Allocates and exports the arenas of a GPU, and holds them until the end. */
int mr_actor_keeper(struct mr_env *e);
/* The one that the slot's kind names. */
int mr_actor_run(struct mr_env *e);

/* ---- synthetic engines (actors/synthetic.c) -------------------------------------------------------------------------------- */

int mr_synthetic_target_create(struct mr_target_engine *e, const struct mr_topology *t, unsigned slot, struct mr_err *err);
/* Borrows the layout. */
int mr_synthetic_drafter_create(struct mr_drafter_engine *e, const struct mr_topology *t, const struct mr_dlayout *l, unsigned slot,
                                struct mr_err *err);
/* Adds to param (P) what the synthetic drafters add when every microbatch of `p` is applied exactly once in `epoch`.  Integers below
 * 2^24: exact in f32, whatever the order.  Only the layout's first tensor changes. */
void mr_synthetic_expect(const struct mr_plan *p, unsigned epoch, const struct mr_dlayout *l, float *param);

/* ---- engines over a kernel table (actors/target_engine.c, model_engine.c) -------------------------------------------------- */

/* `env` (may be NULL): on a GPU, the weights are the keeper's (actors/weights.h), else private.  -1 with err not set: the run is over. */
int mr_model_target_create(struct mr_target_engine *e, struct mr_env *env, const struct mr_topology *t, const struct mr_checked *c,
                           unsigned slot, struct mr_err *err);
int mr_model_drafter_create(struct mr_drafter_engine *e, struct mr_env *env, const struct mr_topology *t, const struct mr_checked *c,
                            unsigned slot, struct mr_err *err);

/* ---- one-shot programs in the same binary ---------------------------------------------------------------------------------- */

/* argv[0] is the sub-command's name.  Return the exit code. */
int mr_eval_main(int argc, char **argv);
int mr_export_main(int argc, char **argv);
int mr_devices_main(int argc, char **argv);
int mr_bench_target_main(int argc, char **argv);
int mr_bench_drafter_main(int argc, char **argv);

#endif
