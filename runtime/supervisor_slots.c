/* One actor slot: spawn, output, death, recovery, restart policy.
 *
 * A death is proven by the pidfd AND the reap; only then is anything given back (docs/design.md 4.4).  Order on a death: reap, read
 * what is left in the output pipe, say how it died, recover, decide.
 *
 * Budget: a death counts when the incarnation finished no microbatch and was not parked in a wait when it died.  A parked actor did not
 * crash: somebody killed it, and kills from outside never end a healthy run.  More than restart.max counted deaths in a row within
 * restart.window_s end the run.  The first restart is immediate, then restart.backoff_ms, doubling.
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/point.h"
#include "ipc/atomic.h"
#include "ipc/recover.h"
#include "ipc/step.h"
#include "ipc/wait.h"
#include "runtime/supervisor_pvt.h"

enum { BACKOFF_MAX_MS = 10000, OUTPUT_READS = 16 };

unsigned mr_sup_live(const struct mr_sup *sup)
{
    unsigned n = 0;

    for (unsigned i = 0; i < sup->n_slots; i++)
        n += sup->slot[i].child.pid != 0;
    return n;
}

unsigned mr_sup_restarts(const struct mr_sup *sup)
{
    unsigned n = 0;

    for (unsigned i = 0; i < sup->n_slots; i++)
        n += sup->slot[i].row->restarts;
    return n;
}

void mr_sup_kill(struct mr_slot *s, enum mr_kill_reason why)
{
    if (!s->child.pid)
        return;
    if (s->why == MR_KILL_NONE)
        s->why = why;
    mr_child_signal(&s->child, SIGKILL);
}

/* ---- output -------------------------------------------------------------------------------------------------------------------------- */

static void keep_tail(struct mr_slot *s, const char *text)
{
    char *to = s->tail[s->n_tail++ % MR_TAIL_LINES];
    size_t n = strnlen(text, MR_TAIL_BYTES - 1);

    memcpy(to, text, n);
    to[n] = 0;
}

/* "W drafter/1: text" is base/log.h's; anything else came from a library. */
static void take_line(struct mr_slot *s, char *line)
{
    const char *at = strchr("DIWE", line[0]);
    size_t n = strlen(s->row->name);
    enum mr_level level = MR_LOG_INFO;
    char *text = line;

    if (!line[0])
        return;
    if (line[1] == ' ' && at && strncmp(line + 2, s->row->name, n) == 0 && strncmp(line + 2 + n, ": ", 2) == 0) {
        level = (enum mr_level)(at - "DIWE");
        text = line + 2 + n + 2;
    }
    keep_tail(s, text);
    mr_runlog_write(&s->sup->log, level, s->row->name, text);
}

static void take_bytes(struct mr_slot *s, const char *buf, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (buf[i] != '\n' && s->n_part < sizeof s->part - 1) {
            s->part[s->n_part++] = buf[i] ? buf[i] : '?';
            continue;
        }
        s->part[s->n_part] = 0;
        take_line(s, s->part);
        s->n_part = 0;
        if (buf[i] != '\n')
            s->part[s->n_part++] = buf[i];
    }
}

static void close_output(struct mr_slot *s)
{
    if (s->child.out_fd < 0)
        return;
    mr_loop_del(s->sup->loop, s->child.out_fd);
    close(s->child.out_fd);
    s->child.out_fd = -1;
    if (s->n_part) {
        s->part[s->n_part] = 0;
        take_line(s, s->part);
        s->n_part = 0;
    }
}

/* At most OUTPUT_READS buffers a call, so that a chatty actor cannot hold up the others; the tick comes back for the rest. */
static void on_output(void *arg, int fd)
{
    struct mr_slot *s = arg;
    char buf[4096];

    for (int i = 0; i < OUTPUT_READS; i++) {
        ssize_t n = read(fd, buf, sizeof buf);

        if (n > 0) {
            take_bytes(s, buf, (size_t)n);
        } else if (n == 0 || (errno != EINTR && errno != EAGAIN)) {
            close_output(s);
            return;
        } else if (errno == EAGAIN) {
            return;
        }
    }
}

void mr_sup_read_output(struct mr_slot *s)
{
    if (s->child.out_fd >= 0)
        on_output(s, s->child.out_fd);
}

/* ---- spawn --------------------------------------------------------------------------------------------------------------------------- */

static void on_exit_of(void *arg, int fd);
static void after_death(struct mr_slot *s, const struct mr_death *d);

static void prepare_row(struct mr_slot *s)
{
    struct mr_actor_row *row = s->row;

    row->incarnation++;
    row->start_ns = mr_now_ns();
    mr_st(&row->drain, 0);
    mr_st(&row->wait_reason, MR_WAIT_NONE);
    mr_st(&row->state, MR_ACTOR_STARTING);
    s->progress_at_spawn = mr_ld(&row->progress);
    s->why = MR_KILL_NONE;
    s->respawn_ns = 0;
    s->n_part = 0;
    s->last_progress = s->progress_at_spawn;
    s->busy_since_ns = row->start_ns;
    s->stopped_since_ns = 0;
}

static int start_process(struct mr_slot *s, struct mr_err *err)
{
    struct mr_sup *sup = s->sup;
    char slot[16], inc[16], event_fd[16], death_fd[16];
    char *argv[] = {(char *)"millrace-actor",
                    (char *)"--run",
                    sup->seg.run,
                    (char *)"--slot",
                    slot,
                    (char *)"--incarnation",
                    inc,
                    (char *)"--topology",
                    sup->topo_path,
                    (char *)"--event-fd",
                    event_fd,
                    (char *)"--death-fd",
                    death_fd,
                    NULL};
    int keep[] = {sup->event_fd, sup->death_rd};
    struct mr_spawn sp = {.path = sup->actor_path, .argv = argv, .keep = keep, .n_keep = 2, .threads = sup->o->topo->actor[s->n].threads};

    snprintf(slot, sizeof slot, "%u", s->n);
    snprintf(inc, sizeof inc, "%u", s->row->incarnation);
    snprintf(event_fd, sizeof event_fd, "%d", sup->event_fd);
    snprintf(death_fd, sizeof death_fd, "%d", sup->death_rd);
    if (mr_spawn(&s->child, &sp, err))
        return -1;
    mr_st(&s->row->pid, s->child.pid);
    MR_POINT("sup.spawn.forked");
    if (mr_loop_add(sup->loop, s->child.pidfd, on_exit_of, s) ||
        (s->child.out_fd >= 0 && mr_loop_add(sup->loop, s->child.out_fd, on_output, s)))
        mr_sup_fail(sup, MR_EXIT_FAILED, "failed", "the event loop does not take the process of %s", s->row->name);
    return 0;
}

static void count_restart(struct mr_slot *s)
{
    s->row->restarts++;
    s->sup->totals.restarts++;
}

void mr_sup_spawn(struct mr_slot *s)
{
    struct mr_err err = {0};
    struct mr_death d = {.code = -1};

    if (s->row->incarnation >= MR_INC_MAX) {
        mr_sup_fail(s->sup, MR_EXIT_FAILED, "failed",
                    "%s was started %u times, which is the maximum; --resume goes on from the last checkpoint", s->row->name,
                    s->row->incarnation);
        return;
    }
    prepare_row(s);
    if (start_process(s, &err) == 0)
        return;
    mr_runlog(&s->sup->log, MR_LOG_ERROR, s->row->name, "cannot be started: %s", err.msg);
    keep_tail(s, err.msg);
    count_restart(s);
    after_death(s, &d); /* a start that fails is a death like any other: same budget */
}

void mr_sup_spawn_due(struct mr_sup *sup, uint64_t now)
{
    for (unsigned i = 0; i < sup->n_slots && sup->state != MR_SUP_FAILING; i++)
        if (sup->slot[i].respawn_ns && sup->slot[i].respawn_ns <= now)
            mr_sup_spawn(&sup->slot[i]);
}

/* ---- death --------------------------------------------------------------------------------------------------------------------------- */

static void recover(struct mr_slot *s)
{
    struct mr_recovered r;

    if (mr_sw_phase(mr_step_read(&s->sup->seg)) == MR_FINISHED)
        return; /* nothing is held any more */
    MR_POINT("sup.recover.begin");
    r = mr_recover(&s->sup->seg, s->n, s->row->incarnation);
    MR_POINT("sup.recover.done");
    if (s->row->kind == MR_TARGET || s->row->kind == MR_KEEPER)
        s->sup->totals.recomputed += r.items;
    mr_runlog(&s->sup->log, MR_LOG_INFO, "supervisor", "%s, incarnation %u: gave back %u microbatches, %u slabs, %u places", s->row->name,
              s->row->incarnation, r.items, r.slabs, r.places);
}

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

/* Looks at the row as the dead left it. */
static int counts(const struct mr_slot *s)
{
    if (s->why == MR_KILL_RESTART)
        return 0;
    return mr_ld(&s->row->wait_reason) == MR_WAIT_NONE || mr_ld(&s->row->state) == MR_ACTOR_STARTING;
}

static void print_tail(struct mr_slot *s)
{
    unsigned first = s->n_tail > MR_TAIL_LINES ? s->n_tail - MR_TAIL_LINES : 0;

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
    mr_runlog_end_status(&sup->log);
    print_tail(s);
    mr_sup_fail(
        sup, MR_EXIT_FAILED, "failed",
        "%s died %u times within %g s without finishing a microbatch (restart.max is %d); its last lines are above and in log.jsonl. "
        "When the cause is mended: millrace run ... --resume",
        s->row->name, deaths, sup->o->topo->restart.window_s, sup->o->topo->restart.max);
}

/* Respawns now, later, or never.  `counted`: this death counts unless the incarnation finished a microbatch. */
static void restart(struct mr_slot *s, int counted)
{
    const struct mr_topology *t = s->sup->o->topo;
    uint64_t now = mr_now_ns();
    unsigned deaths;
    double delay_ms = 0;

    if (mr_ld(&s->row->progress) != s->progress_at_spawn)
        s->n_deaths = 0;
    else if (counted) {
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

static void after_death(struct mr_slot *s, const struct mr_death *d)
{
    struct mr_sup *sup = s->sup;
    int counted = counts(s);

    mr_st(&s->row->pid, 0);
    mr_st(&s->row->state, d->acked ? MR_ACTOR_DONE : MR_ACTOR_DEAD);
    if (d->acked) {
        s->done = 1;
        return;
    }
    if (sup->state == MR_SUP_FAILING)
        return;
    recover(s);
    if (sup->state == MR_SUP_ENDING && (sup->killed || s->why == MR_KILL_END)) {
        s->done = 1;
        return;
    }
    if (d->drained) {
        mr_sup_spawn(s);
        return;
    }
    if (d->code == MR_EXIT_CONFIG && sup->state == MR_SUP_RUNNING) {
        mr_runlog_end_status(&sup->log);
        print_tail(s);
        mr_sup_fail(sup, MR_EXIT_FAILED, "failed", "%s refuses its configuration (above): a restart would not help; mend it, then --resume",
                    s->row->name);
        return;
    }
    restart(s, counted);
}

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

static void on_exit_of(void *arg, int fd)
{
    struct mr_slot *s = arg;
    struct mr_death d = {.why = s->why};
    uint64_t oom;
    int r = mr_child_reap(&s->child, &d.code, &d.sig);

    (void)fd;
    if (r == -EAGAIN)
        return; /* not dead: nothing is given back on a suspicion */
    MR_POINT("sup.death.reaped");
    oom = mr_oom_kills();
    d.oom = oom != s->sup->oom_kills;
    s->sup->oom_kills = oom;
    d.acked = mr_ld(&s->row->acked) != 0;
    d.drained = d.code == 0 && !d.acked && mr_ld(&s->row->drain);
    mr_loop_del(s->sup->loop, s->child.pidfd);
    mr_sup_read_output(s); /* what it said last is in the pipe still */
    close_output(s);
    mr_child_close(&s->child);
    if (!d.acked && !d.drained && s->sup->state != MR_SUP_FAILING)
        count_restart(s);
    say_death(s, &d);
    after_death(s, &d);
    mr_sup_advance(s->sup);
}

void mr_sup_reap(struct mr_sup *sup)
{
    for (unsigned i = 0; i < sup->n_slots; i++)
        if (sup->slot[i].child.pid)
            on_exit_of(&sup->slot[i], sup->slot[i].child.pidfd);
}
