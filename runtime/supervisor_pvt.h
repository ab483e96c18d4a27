/* The supervisor's parts, between its files:
 *   supervisor.c         set-up, the loop, tear-down
 *   supervisor_slots.c   one slot: spawn and output
 *   supervisor_death.c   its death: recovery, budget and back-off
 *   supervisor_steps.c   committed steps: ledger lines, `latest`, the end
 *   supervisor_watch.c   the tick: hangs, stalls, due respawns, deadlines, progress
 *   supervisor_ctl.c     signals and control requests: stop, restart, info; the failing end
 */
#ifndef MR_RUNTIME_SUPERVISOR_PVT_H
#define MR_RUNTIME_SUPERVISOR_PVT_H

#include "runtime/control.h"
#include "runtime/death.h"
#include "runtime/metrics.h"
#include "runtime/runlog.h"
#include "runtime/spawn.h"
#include "runtime/supervisor.h"
#include "runtime/tbevents.h"

enum {
    MR_TICK_MS = 100,
    MR_TAIL_LINES = 20,
    MR_TAIL_BYTES = 400, /* a longer line is kept cut */
    MR_DEATHS_MAX = 64   /* of a slot, remembered for the budget */
};

struct mr_sup;

struct mr_slot {
    struct mr_sup *sup;
    unsigned n; /* slot number */
    struct mr_actor_row *row;
    struct mr_child child; /* pid 0 = no process */
    int done;              /* acknowledged the end, or given up after it */
    uint64_t respawn_ns;   /* 0 = no respawn due */
    uint64_t progress_at_spawn, steps_at_spawn;
    uint64_t death_ns[MR_DEATHS_MAX];
    unsigned n_deaths;       /* that count, in a row, newest last; within the window */
    enum mr_kill_reason why; /* we killed this incarnation */
    /* what its restart took; 0 = nothing to say */
    uint64_t reaped_ns, running_ns; /* death of the incarnation before; this one was seen to run */
    /* hang watch */
    uint64_t last_progress, busy_since_ns, stopped_since_ns;
    /* output */
    char tail[MR_TAIL_LINES][MR_TAIL_BYTES];
    unsigned n_tail; /* lines ever */
    char part[2200]; /* a line that has no end yet */
    size_t n_part;
};

enum mr_sup_state {
    MR_SUP_RUNNING,
    MR_SUP_ENDING, /* the step word is FINISHED: everything is saved; waiting for acknowledgements */
    MR_SUP_FAILING /* abort is set: waiting for the actors to be gone */
};

struct mr_sup {
    const struct mr_sup_opts *o;
    struct mr_seg seg;
    int has_seg;
    struct mr_loop *loop;
    struct mr_runlog log;
    struct mr_jsonl ledger, steps;
    struct mr_tb tb;
    struct mr_totals totals;
    struct mr_progress progress;
    struct mr_control control;
    struct mr_metrics *metrics;
    int event_fd, signal_fd, timer_fd, death_rd, death_wr;
    char actor_path[4096], topo_path[MR_PATH + 64];
    struct mr_slot slot[MR_MAX_ACTORS];
    unsigned n_slots;
    enum mr_sup_state state;
    int exit_code;
    struct mr_err cause; /* first cause of a failing run */
    const char *status;  /* of summary.json */
    unsigned signals;    /* SIGINT and SIGTERM so far */
    uint64_t ending_ns;  /* when RUNNING was left */
    int killed;          /* the deadline has passed: SIGKILL was sent to all */
    uint64_t oom_kills;
    uint64_t disk_warn_ns; /* last "no space" message */
    uint64_t moved_ns;     /* when anything in the run last made progress */
    uint64_t moved_sum;
    uint64_t next_stall_ns;
    unsigned ticks;
};

/* slots */
void mr_sup_spawn(struct mr_slot *s);
void mr_sup_spawn_due(struct mr_sup *sup, uint64_t now);
void mr_sup_read_output(struct mr_slot *s);
void mr_sup_close_output(struct mr_slot *s);
void mr_sup_kill(struct mr_slot *s, enum mr_kill_reason why);
unsigned mr_sup_live(const struct mr_sup *sup);     /* processes that exist */
int mr_sup_due_ms(const struct mr_sup *sup);        /* until the next respawn that is due; -1 = none */
void mr_sup_note_back(struct mr_slot *s);           /* one line when a restarted incarnation has claimed: where the time went */

/* death */
void mr_sup_on_exit(void *arg, int fd);             /* of a slot's pidfd */
void mr_sup_reap(struct mr_sup *sup);               /* the same for all, without waiting for the loop */
void mr_sup_start_failed(struct mr_slot *s);        /* a start that fails is a death like any other: same budget */

/* steps: everything that a look at the segment can move on */
void mr_sup_advance(struct mr_sup *sup);

/* watch */
void mr_sup_tick(struct mr_sup *sup);

/* ctl */
void mr_sup_on_signal(void *arg, int fd);
json_t *mr_sup_on_request(const json_t *request, void *arg);
/* The run fails: the first cause is kept, abort is set, all actors are asked to go. */
void mr_sup_fail(struct mr_sup *sup, int exit_code, const char *status, const char *fmt, ...) __attribute__((format(printf, 4, 5)));

#endif
