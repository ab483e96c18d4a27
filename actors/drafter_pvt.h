/* Shared by drafter.c (life), drafter_state.c (its state), drafter_step.c (one step) and drafter_ckpt.c (copying out). */
#ifndef MR_ACTORS_DRAFTER_PVT_H
#define MR_ACTORS_DRAFTER_PVT_H

#include <pthread.h>

#include "actors/env.h"
#include "actors/reduce.h"

struct mr_ckpt_job {
    pthread_t thread;
    int active;                  /* thread exists; drafter's own thread only */
    int done;                    /* atomic: set by the copier as its last act */
    int rc;                      /* valid when done */
    struct mr_err err;
    unsigned step;
};

struct mr_held {                 /* a claimed microbatch and its place */
    int valid;
    unsigned place, idx;
    uint64_t word;
};

struct mr_drafter {
    struct mr_env *env;
    struct mr_drafter_engine eng;
    struct mr_drafter_view v;
    struct mr_reduce reduce;
    unsigned rr;                 /* round robin of mr_place_claim */
    int joined;                  /* from here on turns claim checkpoints; before, an apply waits for nothing but a copy that is made */
    int holds;                   /* the accumulator has microbatches of a step that is not applied: no drain now */
    struct mr_held next;         /* prefetched: the next to be worked on, in the same step */
    struct mr_ckpt_job job;
};

/* drafter_step.c: one turn in the phase of `word`; `seq` was read before `word`.  MR_GO_ON or an exit code. */
int mr_drafter_collect(struct mr_drafter *d, uint64_t word, uint32_t seq);
int mr_drafter_reduce(struct mr_drafter *d, uint64_t word, uint32_t seq);
int mr_drafter_commit(struct mr_drafter *d, uint64_t word, uint32_t seq);
int mr_drafter_zero(struct mr_drafter *d);
/* 1 when my applied bit is in `word`. */
int mr_drafter_applied(const struct mr_drafter *d, uint64_t word);

/* drafter_state.c: both may park.  0; -1 with err; -1 with err not set: the run is over. */
/* d->v: the state, once its keeper has registered it. */
int mr_drafter_map(struct mr_drafter *d, struct mr_err *err);
/* The parameters that this incarnation goes on with, where d->v does not hold them. */
int mr_drafter_init_state(struct mr_drafter *d, struct mr_err *err);

/* drafter_ckpt.c */
/* Claims and starts a copy that is due or wanted; reaps a finished one.  MR_GO_ON or an exit code.  Does not block. */
int mr_drafter_ckpt(struct mr_drafter *d, uint64_t word);
/* 1 when the next mr_drafter_ckpt would claim one. */
int mr_drafter_ckpt_due(const struct mr_drafter *d, uint64_t word);
/* Waits for the copier.  MR_GO_ON or its exit code. */
int mr_drafter_ckpt_join(struct mr_drafter *d);

#endif
