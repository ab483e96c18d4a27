/* The death of an actor: reap, recover, tell, decide.
 *
 * A death is proven by the pidfd AND the reap; only then is anything given back (docs/design.md 4.4), and that comes first: what the
 * dead held is claimable again before its last words are read.
 *
 * Budget: a kill counts when the incarnation finished no microbatch and was not parked in a wait when it died; one from outside, and not by
 * the kernel for want of memory, only while it starts.  Kills from outside never end a healthy run, however fast they follow each other, and
 * cost it no back-off.  A failure of its own (an exit, a signal that is no SIGKILL)
 * counts when the run committed no step in that incarnation's life: a thread may fail while the actor is parked, and microbatches that are
 * done again and again are no progress.  More than restart.max counted deaths in a row within restart.window_s end the run.  The first
 * restart is immediate, then restart.backoff_ms, doubling.
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/point.h"
#include "ipc/atomic.h"
#include "ipc/recover.h"
#include "ipc/step.h"
#include "ipc/wait.h"
#include "runtime/supervisor_pvt.h"

enum { BACKOFF_MAX_MS = 10000 };

/* ---- recovery ------------------------------------------------------------------------------------------------------------------------ */

/* A keeper takes the slabs, weights and drafter state of its device with it: the device's other actors start afresh on the next keeper's
 * memory (docs/design.md 4.4). */
static void restart_device(struct mr_slot *keeper)
{
    struct mr_sup *sup = keeper->sup;
    unsigned here = 0, elsewhere = 0;

    for (unsigned i = 0; i < sup->n_slots; i++) {
        struct mr_slot *s = &sup->slot[i];
        int same = strcmp(s->row->device, keeper->row->device) == 0;

        if (s->row->kind == MR_DRAFTER)
            *(same ? &here : &elsewhere) += 1;
        if (same && s != keeper)
            mr_sup_kill(s, MR_KILL_KEEPER);
    }
    if (here && !elsewhere)
        mr_sup_fail(sup, MR_EXIT_FAILED, "failed",
                    "%s died, and with it the only copy of the drafter's state, on %s; --resume goes on from the last "
                    "checkpoint",
                    keeper->row->name, keeper->row->device);
}

static void recover(struct mr_slot *s, struct mr_recovered *r)
{
    MR_POINT("sup.recover.begin");
    *r = mr_recover(&s->sup->seg, s->n, s->row->incarnation);
    MR_POINT("sup.recover.done");
    if (s->row->kind == MR_TARGET || s->row->kind == MR_KEEPER)
        s->sup->totals.recomputed += r->items;
}

/* ---- budget -------------------------------------------------------------------------------------------------------------------------- */

/* Forgets deaths outside the window and remembers this one.  Number that count now. */
static unsigned count_death(struct mr_slot *s, uint64_t now)
{
    uint64_t window = (uint64_t)(s->sup->o->topo->restart.window_s * 1e9);
    unsigned kept = 0;

    for (unsigned i = 0; i < s->n_deaths; i++)
        if (now - s->death_ns[i] <= window)
            s->death_ns[kept++] = s->death_ns[i];
    if (kept == MR_DEATHS_MAX)
        memmove(s->death_ns, s->death_ns + 1, --kept * sizeof s->death_ns[0]);
    s->death_ns[kept++] = now;
    s->n_deaths = kept;
    return kept;
}

enum verdict { NEUTRAL, COUNTS, CLEARS };

/* Looks at the row as the dead left it, so before the recovery.  CLEARS: it had done well, so what came before is forgotten. */
static enum verdict judge(const struct mr_slot *s, const struct mr_death *d)
{
    int own = s->why == MR_KILL_NONE && d->sig != SIGKILL; /* nobody killed it, neither we nor somebody outside */

    if (own)
        return mr_ld(&s->sup->seg.hdr->ledger_done) != s->steps_at_spawn ? CLEARS : COUNTS;
    if (mr_ld(&s->row->progress) != s->progress_at_spawn)
        return CLEARS;
    if (s->why == MR_KILL_RESTART || s->why == MR_KILL_KEEPER)
        return NEUTRAL;
    if (mr_ld(&s->row->state) == MR_ACTOR_STARTING)
        return COUNTS;
    if (s->why == MR_KILL_NONE && !d->oom)
        return NEUTRAL;
    return mr_ld(&s->row->wait_reason) == MR_WAIT_NONE ? COUNTS : NEUTRAL;
}

static void print_tail(struct mr_slot *s)
{
    unsigned first = s->n_tail > MR_TAIL_LINES ? s->n_tail - MR_TAIL_LINES : 0;

    mr_runlog_end_status(&s->sup->log);
    for (unsigned i = first; i < s->n_tail; i++)
        fprintf(stderr, "  %s| %s\n", s->row->name, s->tail[i % MR_TAIL_LINES]);
}

static void give_up(struct mr_slot *s, unsigned deaths)
{
    struct mr_sup *sup = s->sup;

    if (sup->state == MR_SUP_ENDING) { /* all is saved: not worth failing a finished run */
        mr_runlog(&sup->log, MR_LOG_WARN, s->row->name, "died %u times before it acknowledged the end; the run is complete without it",
                  deaths);
        s->done = 1;
        return;
    }
    print_tail(s);
    mr_sup_fail(
        sup, MR_EXIT_FAILED, "failed",
        "%s died %u times within %g s without getting anywhere (restart.max is %d); its last lines are above and in log.jsonl. "
        "When the cause is mended: millrace run ... --resume",
        s->row->name, deaths, sup->o->topo->restart.window_s, sup->o->topo->restart.max);
}

/* Respawns now, later, or never. */
static void restart(struct mr_slot *s, enum verdict verdict)
{
    const struct mr_topology *t = s->sup->o->topo;
    uint64_t now = mr_now_ns();
    unsigned deaths;
    double delay_ms = 0;

    if (verdict == CLEARS)
        s->n_deaths = 0;
    else if (verdict == COUNTS) {
        deaths = count_death(s, now);
        if (deaths > (unsigned)t->restart.max) {
            give_up(s, deaths);
            return;
        }
        if (deaths > 1)
            delay_ms = t->restart.backoff_ms * (double)(1u << (deaths - 2 > 20 ? 20 : deaths - 2));
    }
    if (delay_ms > BACKOFF_MAX_MS)
        delay_ms = BACKOFF_MAX_MS;
    if (delay_ms > 0) {
        mr_st(&s->row->state, MR_ACTOR_BACKOFF);
        s->respawn_ns = now + (uint64_t)(delay_ms * 1e6);
        return;
    }
    mr_sup_spawn(s);
}

static void count_restart(struct mr_slot *s)
{
    s->row->restarts++;
    s->sup->totals.restarts++;
}

void mr_sup_start_failed(struct mr_slot *s)
{
    enum verdict verdict = judge(s, &(struct mr_death){.code = -1});

    mr_st(&s->row->pid, 0);
    mr_st(&s->row->state, MR_ACTOR_DEAD);
    count_restart(s);
    restart(s, verdict);
}

/* ---- death --------------------------------------------------------------------------------------------------------------------------- */

static void say_death(struct mr_slot *s, const struct mr_death *d)
{
    char how[300];
    enum mr_level level = d->acked || d->drained || s->sup->state == MR_SUP_FAILING ? MR_LOG_INFO : MR_LOG_WARN;
    const char *last = s->n_tail ? s->tail[(s->n_tail - 1) % MR_TAIL_LINES] : NULL;
    int quote = level == MR_LOG_WARN && d->sig != SIGKILL && last;

    mr_death_sentence(d, how, sizeof how);
    mr_runlog(&s->sup->log, level, s->row->name, "incarnation %u %s%s%s%s", s->row->incarnation, how, quote ? "; last line: \"" : "",
              quote ? last : "", quote ? "\"" : "");
}

/* What comes after the death of an incarnation whose possessions are given back. */
static void decide(struct mr_slot *s, const struct mr_death *d, enum verdict verdict)
{
    struct mr_sup *sup = s->sup;

    if (d->acked || (sup->state == MR_SUP_ENDING && (sup->killed || s->why == MR_KILL_END))) {
        s->done = 1;
        return;
    }
    if (s->row->kind == MR_KEEPER && sup->state == MR_SUP_RUNNING)
        restart_device(s);
    if (sup->state == MR_SUP_FAILING)
        return;
    if (d->drained) {
        mr_sup_spawn(s);
        return;
    }
    if (d->code == MR_EXIT_CONFIG && sup->state == MR_SUP_RUNNING) {
        print_tail(s);
        mr_sup_fail(sup, MR_EXIT_FAILED, "failed", "%s refuses its configuration (above): a restart would not help; mend it, then --resume",
                    s->row->name);
        return;
    }
    restart(s, verdict);
}

static void close_process(struct mr_slot *s)
{
    mr_loop_del(s->sup->loop, s->child.pidfd);
    mr_sup_read_output(s); /* what it said last is in the pipe still */
    mr_sup_close_output(s);
    mr_child_close(&s->child);
}

static void look_at_oom(struct mr_sup *sup, struct mr_death *d)
{
    uint64_t oom = mr_oom_kills();

    d->oom = oom != sup->oom_kills;
    sup->oom_kills = oom;
}

void mr_sup_on_exit(void *arg, int fd)
{
    struct mr_slot *s = arg;
    struct mr_sup *sup = s->sup;
    struct mr_death d = {.why = s->why};
    struct mr_recovered r = {0};
    enum verdict verdict;

    (void)fd;
    if (mr_child_reap(&s->child, &d.code, &d.sig) == -EAGAIN)
        return; /* not dead: nothing is given back on a suspicion */
    mr_sup_note_back(s); /* while the row is the dead one's */
    s->reaped_ns = mr_now_ns();
    MR_POINT("sup.death.reaped");
    look_at_oom(sup, &d);
    verdict = judge(s, &d);
    d.acked = mr_ld(&s->row->acked) != 0;
    d.drained = d.code == 0 && !d.acked && mr_ld(&s->row->drain);
    mr_st(&s->row->pid, 0);
    mr_st(&s->row->state, d.acked ? MR_ACTOR_DONE : MR_ACTOR_DEAD);
    if (sup->state == MR_SUP_RUNNING && !d.acked)
        recover(s, &r); /* once the step word is FINISHED, nothing is held any more */
    close_process(s);
    if (!d.acked && !d.drained && sup->state != MR_SUP_FAILING)
        count_restart(s);
    say_death(s, &d);
    if (r.items || r.slabs || r.places)
        mr_runlog(&sup->log, MR_LOG_INFO, "supervisor", "%s, incarnation %u: gave back %u microbatches, %u slabs, %u places", s->row->name,
                  s->row->incarnation, r.items, r.slabs, r.places);
    decide(s, &d, verdict);
    mr_sup_advance(sup);
}

void mr_sup_reap(struct mr_sup *sup)
{
    for (unsigned i = 0; i < sup->n_slots; i++)
        if (sup->slot[i].child.pid)
            mr_sup_on_exit(&sup->slot[i], sup->slot[i].child.pidfd);
}
