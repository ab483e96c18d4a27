/* What every actor loop has in its hands: the segment, its own row, the topology, the arenas it has mapped, the way to the supervisor.
 *
 * Shape of a loop:
 *     seq = mr_evc_read(env->evc);                          before anything is looked at, so that no wake-up is lost
 *     if ((rc = mr_env_check(env, may_leave)) != MR_GO_ON)  return rc;
 *     if (nothing to do)                                    mr_env_wait(env, seq, why);
 */
#ifndef MR_ACTORS_ENV_H
#define MR_ACTORS_ENV_H

#include <stdint.h>

#include "actors/engine.h"
#include "data/check.h"
#include "ipc/arena.h"
#include "ipc/seg.h"
#include "ipc/wait.h"

enum { MR_GO_ON = -1 };          /* not an exit code: the loop goes on */

struct mr_turns {                /* actors/turns.h */
    int shared;                  /* the other kind is on this GPU too */
    int published;               /* since mr_turns_given was asked last */
    uint64_t unit_ns;            /* what the last unit took, 0 = none yet */
    uint64_t since_ns;           /* of the wait for a turn, 0 = none */
};

struct mr_env {
    struct mr_seg *seg;          /* writable; borrowed */
    struct mr_shm_header *hdr;
    struct mr_actor_row *me;
    struct mr_evc *evc;          /* work event count of my kind */
    const struct mr_topology *topo;
    const struct mr_checked *checked;
    unsigned slot, inc;
    unsigned rank;               /* index within the kind */
    int event_fd;                /* eventfd of the supervisor, -1 = none (tests) */
    struct mr_arena_map map;
    struct mr_turns turn;
    uint64_t main_ns, init_ns;   /* when main was about to be entered, and mr_env_init was: for the log */
};

/* Borrows seg, topo and checked.  The row's incarnation must be `inc` already. */
void mr_env_init(struct mr_env *e, struct mr_seg *seg, const struct mr_topology *topo, const struct mr_checked *checked, unsigned slot,
                 unsigned inc, int event_fd);
/* Unmaps the arenas. */
void mr_env_close(struct mr_env *e);

/* Wakes the supervisor.  Any thread; never blocks. */
void mr_env_notify(struct mr_env *e);
/* Everything is loaded: STARTING -> RUNNING, and the supervisor is told. */
void mr_env_running(struct mr_env *e);

/* MR_GO_ON, or the code to leave with: abort, the sentinel, or a drain when `may_leave`. */
int mr_env_check(struct mr_env *e, int may_leave);
/* Last act of a loop, with the code it leaves with, when nothing is held any more: acknowledges the sentinel if that is the reason.
 * Returns rc. */
int mr_env_leave(struct mr_env *e, int rc);
/* Parks until my kind's event count differs from `seq`, at most MR_PARK_MS; a raised sweep or fatal flag is passed on first. */
void mr_env_wait(struct mr_env *e, uint32_t seq, enum mr_wait_reason why);

/* An item is mine: stamps the first claim of this incarnation. */
void mr_env_claimed(struct mr_env *e);
/* One unit of work done since `t0_ns`: counters, progress, and the flags a push may have raised. */
void mr_env_worked(struct mr_env *e, uint64_t t0_ns, uint64_t items, uint64_t tokens, uint64_t draft_tokens);

/* Item idx as an engine sees it; valid while the caller holds the item. */
struct mr_batch mr_env_batch(const struct mr_env *e, unsigned idx, uint64_t word);

/* Logs the error and returns its exit code. */
int mr_env_fail(struct mr_env *e, const struct mr_err *err);
/* A transition of something I hold was refused.  Only recovery may take it from me, and only after my death: a broken protocol, or a
 * counter at its maximum (-EOVERFLOW).  Logs, and returns MR_EXIT_FAILED. */
int mr_env_lost(struct mr_env *e, const char *what, unsigned pos, int rc);

#endif
