/* What a target or drafter actor computes with: the seam between the protocols (actors/target.c, drafter.c) and the models.
 *
 * Engines: `model` over any kernel table (actors/model_engine.c: cpu and cuda), `synthetic` (actors/synthetic.c: sleeps, and makes
 * integer-valued "gradients" whose sum shows exactly which samples were applied).  One engine object per actor thread.
 */
#ifndef MR_ACTORS_ENGINE_H
#define MR_ACTORS_ENGINE_H

#include <stdint.h>

#include "base/err.h"
#include "base/limits.h"
#include "base/slot_sums.h"
#include "data/check.h"
#include "data/schedule.h"
#include "ipc/arena.h"

/* A microbatch as an engine sees it: host arrays in the .tok segment, hidden states in a slab. */
struct mr_batch {
    unsigned pos, epoch, bucket;
    int n_seqs, n_tokens;
    const int32_t *ids, *cu;         /* (n_tokens), (n_seqs + 1) */
    const uint8_t *mask;             /* (n_tokens) */
    const uint32_t *sample;          /* (n_seqs) */
};

struct mr_env;
struct mr_k;

struct mr_target_engine {
    void *self;
    /* Hidden states of `b` into slab (n_tokens, K*H) of the slab's element type; host-confirmed complete on return (edge E1).  0 or -1. */
    int (*forward)(void *self, const struct mr_batch *b, void *slab, struct mr_err *err);
    /* GPUs; NULL where forward has to do.  The same in two halves, so that the next microbatch runs while this one is published: begin
     * issues the work for `place` (0 or 1; not begun, or finished), finish waits until it is complete.  Oldest first. */
    int (*begin)(void *self, unsigned place, const struct mr_batch *b, void *slab, struct mr_err *err);
    int (*finish)(void *self, unsigned place, struct mr_err *err);
    void (*destroy)(void *self);
};

struct mr_draft_stats {              /* goes into the place record, and its slot sums */
    double loss_sum, weight_sum;
    uint64_t blocks, accepted, labels, correct;
    uint32_t draft_tokens;           /* block rows computed */
    struct mr_slot_sums slot[MR_MAX_BLOCK - 1];  /* slot k of all blocks in entry k - 1 */
};

/* The vectors of a state are "device memory": host memory on the cpu, and then the functions that say so are NULL. */
struct mr_drafter_engine {
    void *self;
    struct mr_k *k;              /* GPUs: what it computes with */
    int failure;                 /* exit code of a failed call that sets no err: MR_EXIT_CUDA on a GPU */
    /* acc (P) += numerator gradients of `b` at parameters `param` (P); host-confirmed on return (edge E2).  Never writes param or slab. */
    int (*accumulate)(void *self, const struct mr_batch *b, const void *slab, const float *param, float *acc, struct mr_draft_stats *st,
                      struct mr_err *err);
    /* dst (P) = src[0] + ... + src[n-1] in this order (the reduction of backend `shm` and `local`) */
    int (*sum)(void *self, const float *const *src, int n, float *dst);
    /* state[s mod 2] -> state[(s+1) mod 2]: gradient = reduced / weight (weight 0: state copied), clip, AdamW with the lr of update
     * `step` of `steps_total`.  *norm gets the gradient norm before clipping.  Host-confirmed on return (edge E4). */
    int (*apply)(void *self, const struct mr_drafter_view *v, unsigned step, unsigned steps_total, double weight, double *norm, struct mr_err *err);
    int (*zero)(void *self, float *acc);
    /* GPUs: dst (n, device) = host memory; complete on return. */
    int (*put)(void *self, float *dst, const float *host, size_t n);
    /* GPUs: for the checkpoint copier, from a thread of its own, on a stream of its own, while the others of these calls run. */
    /* Pinned host memory of MR_ST_BLOCK bytes, i < MR_ST_BLOCKS, the same at every call; NULL when there is none. */
    void *(*read_block)(void *self, int i);
    /* host (the begin of such a block) = `bytes` of device memory, at most MR_ST_BLOCK; complete on return.  0 or not. */
    int (*read)(void *self, void *host, const void *src, size_t bytes);
    /* Where hidden states lie on other GPUs: begins to copy the slab of a claimed microbatch to this device, into the staging place that is
     * not in use; at most one prefetched slab beside the one in work.  The accumulate that names this slab takes it from there. */
    int (*prefetch)(void *self, const void *slab, int n_tokens, struct mr_err *err);
    void (*destroy)(void *self);
};

/* The topology slot decides engine, device and threads.  Loads weights.  0 or -1 with err. */
int mr_target_engine_create(struct mr_target_engine *e, const struct mr_topology *t, const struct mr_checked *c, unsigned slot, struct mr_err *err);
/* The same for an actor: weights on a GPU are its keeper's.  -1 with err not set: the run is over. */
int mr_target_engine_open(struct mr_target_engine *e, struct mr_env *env, struct mr_err *err);
int mr_drafter_engine_create(struct mr_drafter_engine *e, const struct mr_topology *t, const struct mr_checked *c, unsigned slot, struct mr_err *err);
/* The same for an actor: embedding and head on a GPU are its keeper's.  -1 with err not set: the run is over. */
int mr_drafter_engine_open(struct mr_drafter_engine *e, struct mr_env *env, struct mr_err *err);

#endif
