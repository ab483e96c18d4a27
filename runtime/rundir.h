/* The run directory: what is where, who may use it, `latest`, and which checkpoints stay (docs/design.md 9).
 *
 *   topology.json run.json log.jsonl ledger.jsonl summary.json latest -> checkpoints/step-N
 *   checkpoints/step-N/{config.json,model.safetensors,trainer.safetensors,state.json}     metrics/{events...,steps.jsonl}
 *
 * `latest` is the commit point of a checkpoint: whatever it does not name is not there.  A lock on `.lock` keeps two supervisors apart.
 */
#ifndef MR_RUNTIME_RUNDIR_H
#define MR_RUNTIME_RUNDIR_H

#include <stddef.h>

#include "data/check.h"

struct mr_rundir {
    char path[MR_PATH];
    int lock_fd; /* -1 = not open */
};

/* Makes the directory, takes the lock and probes that files can be written.  A directory with a run in it is refused unless `resume`
 * (MR_EXIT_CONFIG); one that is in use by another supervisor always. */
int mr_rundir_open(struct mr_rundir *d, const char *path, int resume, struct mr_err *err);
void mr_rundir_close(struct mr_rundir *d);
/* Is there room for n checkpoints?  Asked before anything is computed: MR_EXIT_ENV with needed and available bytes. */
int mr_rundir_has_room(const struct mr_rundir *d, const struct mr_checked *c, unsigned n, struct mr_err *err);
/* Checkpoints that can be on disk at a time: one more than are kept, while the next one is written. */
unsigned mr_rundir_checkpoints(const struct mr_topology *t, unsigned steps);
/* Could a run be made at `path`?  What exists of the path is a directory that we may write in, with room for n checkpoints (one, when a run
 * is there already).  Makes nothing.  0 or -1 (MR_EXIT_ENV). */
int mr_rundir_possible(const char *path, const struct mr_checked *c, unsigned n, struct mr_err *err);
/* "PATH/NAME" into out[MR_PATH + 64]; returns out. */
char *mr_rundir_file(const struct mr_rundir *d, const char *name, char *out);

/* The step of `latest`'s state.json; 0 when there is no `latest` yet.  -1 with err when it is there and damaged. */
int mr_rundir_resume_step(const struct mr_rundir *d, unsigned *step, struct mr_err *err);
/* Makes "file X: what" in err a message about a damaged `latest`, with the checkpoint to go back to.  Returns -1. */
int mr_rundir_damaged(const struct mr_rundir *d, struct mr_err *err);
/* Points `latest` at checkpoints/step-N, atomically and durably.  0 or a negative errno (-ENOENT: no such checkpoint). */
int mr_rundir_set_latest(const struct mr_rundir *d, unsigned step);
/* Removes the oldest checkpoints beyond `keep` (0 = keep all), never `latest`, never one in the making.  Number removed. */
int mr_rundir_prune(const struct mr_rundir *d, unsigned latest, int keep);
/* Resume: removes checkpoints newer than `latest` and half-made ones: they belong to steps that will be done again.  Number removed. */
int mr_rundir_drop_unpublished(const struct mr_rundir *d, unsigned latest);

/* run.json: what the plan and the meaning of the weights are functions of.  Written by a fresh start; a resume compares and refuses
 * (MR_EXIT_CONFIG) with the key that differs. */
int mr_rundir_write_identity(const struct mr_rundir *d, const struct mr_topology *t, const struct mr_checked *c, struct mr_err *err);
int mr_rundir_check_identity(const struct mr_rundir *d, const struct mr_topology *t, const struct mr_checked *c, struct mr_err *err);

#endif
