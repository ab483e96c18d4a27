/* The tick: hangs, stalls, due respawns, deadlines of the end, progress.
 *
 * Hang: an actor that is not parked in a wait and finishes nothing for restart.hang_s is killed and so recovered; loading at the start
 * gets ten times as long.  A stopped process (SIGSTOP, debugger) looks like a parked one from the segment, so its process state is
 * read as well: stopped for hang_s is killed too.  Nothing is ever reclaimed by time: only killed by time (docs/design.md 4.4).
 * Stall: when nothing in the whole run moves for STALL_NS, one line says who waits for what since when.
 */
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "ipc/atomic.h"
#include "ipc/step.h"
#include "ipc/wait.h"
#include "runtime/supervisor_pvt.h"

#define STALL_NS 15000000000u
#define ENDING_NS 5000000000u      /* an actor that does not see the sentinel by then is killed */
#define FAILING_NS 2000000000u     /* SIGTERM, then this long, then SIGKILL */
#define UNKILLABLE_NS 15000000000u /* SIGKILL had no effect: a process in a kernel call that does not return */
#define PLAIN_LINE_NS 10000000000u
#define FIRST_LINE_NS 1500000000u
#define REDRAW_NS 250000000u
enum { START_FACTOR = 10, LOOK_TICKS = 10 };

/* Nanoseconds from `then` to `now`.  0 when then is the later one: a tick's `now` is older than a process that the tick itself started. */
static uint64_t since(uint64_t now, uint64_t then)
{
    return now > then ? now - then : 0;
}

/* ---- hangs --------------------------------------------------------------------------------------------------------------------------- */

/* Once a second: reading /proc ten times as often would only cost. */
static void look_for_stopped(struct mr_slot *s, uint64_t now)
{
    char state;

    if (s->sup->ticks % LOOK_TICKS)
        return;
    state = mr_pid_state(s->child.pid);
    if (state != 'T' && state != 't')
        s->stopped_since_ns = 0;
    else if (!s->stopped_since_ns)
        s->stopped_since_ns = now;
}

static void watch_slot(struct mr_slot *s, uint64_t now)
{
    const struct mr_topology *t = s->sup->o->topo;
    uint64_t progress = mr_ld(&s->row->progress), hang_ns = (uint64_t)(t->restart.hang_s * 1e9), limit_ns, busy_ns, stopped_ns;
    int starting = mr_ld(&s->row->state) == MR_ACTOR_STARTING;

    if (!s->child.pid || s->why != MR_KILL_NONE || hang_ns == 0)
        return;
    if (progress != s->last_progress || mr_ld(&s->row->wait_reason) != MR_WAIT_NONE) {
        s->last_progress = progress;
        s->busy_since_ns = now;
    }
    look_for_stopped(s, now);
    limit_ns = hang_ns * (starting ? START_FACTOR : 1);
    busy_ns = since(now, s->busy_since_ns);
    stopped_ns = s->stopped_since_ns ? since(now, s->stopped_since_ns) : 0;
    if (stopped_ns > hang_ns || (s->stopped_since_ns && busy_ns > limit_ns)) {
        mr_runlog(&s->sup->log, MR_LOG_WARN, s->row->name, "pid %d stands stopped (SIGSTOP or a debugger) and has finished nothing for %.0f s "
                  "(restart.hang_s %g): killing it", s->child.pid, (double)(busy_ns > stopped_ns ? busy_ns : stopped_ns) * 1e-9,
                  t->restart.hang_s);
        mr_sup_kill(s, MR_KILL_STOPPED);
    } else if (busy_ns > limit_ns) {
        mr_runlog(&s->sup->log, MR_LOG_WARN, s->row->name,
                  "pid %d is not waiting and has finished nothing for %.0f s (restart.hang_s %g%s): killing it", s->child.pid,
                  (double)busy_ns * 1e-9, t->restart.hang_s, starting ? ", ten times that while starting" : "");
        mr_sup_kill(s, MR_KILL_HANG);
    }
}

/* ---- stalls -------------------------------------------------------------------------------------------------------------------------- */

static const char *state_name(unsigned state)
{
    static const char *const name[] = {"empty", "starting", "running", "dead", "in back-off", "done"};

    return state < sizeof name / sizeof name[0] ? name[state] : "?";
}

static void describe_slot(FILE *f, const struct mr_slot *s, uint64_t now)
{
    unsigned why = mr_ld(&s->row->wait_reason), state = mr_ld(&s->row->state);
    uint64_t parked_ns = mr_ld(&s->row->wait_since_ns);

    fprintf(f, "; %s ", s->row->name);
    if (state != MR_ACTOR_RUNNING)
        fprintf(f, "is %s", state_name(state));
    else if (why != MR_WAIT_NONE)
        fprintf(f, "waits for %s since %.1f s", mr_wait_name(why), parked_ns ? (double)since(now, parked_ns) * 1e-9 : 0.0);
    else
        fprintf(f, "works since %.1f s", (double)since(now, s->busy_since_ns) * 1e-9);
    if (s->child.pid)
        fprintf(f, " (pid %d, %c)", s->child.pid, mr_pid_state(s->child.pid));
}

/* A large checkpoint takes longer than a step; at the end of a run everybody waits for it. */
static int describe_ckpt(FILE *f, struct mr_sup *sup)
{
    uint64_t word = mr_ld(&sup->seg.hdr->ckpt);

    if (!mr_ckpt_has_copier(word))
        return 0;
    fprintf(f, "%s writes checkpoint %u; else ", sup->seg.actors[mr_pw_slot(word)].name, mr_pw_step(word));
    return 1;
}

static void stall_report(struct mr_sup *sup, uint64_t now)
{
    char text[2100];
    FILE *f = fmemopen(text, sizeof text, "w");
    uint64_t w = mr_step_read(&sup->seg);
    int ckpt;

    if (!f)
        return;
    ckpt = describe_ckpt(f, sup);
    fprintf(f, "nothing has moved for %.0f s at step %u (%s)", (double)since(now, sup->moved_ns) * 1e-9, mr_sw_step(w),
            mr_step_phase_name(mr_sw_phase(w)));
    for (unsigned i = 0; i < sup->n_slots; i++)
        describe_slot(f, &sup->slot[i], now);
    fputc(0, f);
    fclose(f);
    text[sizeof text - 1] = 0;
    mr_runlog_write(&sup->log, ckpt ? MR_LOG_INFO : MR_LOG_WARN, "supervisor", text);
}

/* An actor that loads its model moves too; its own deadline is watch_slot's. */
static void watch_stall(struct mr_sup *sup, uint64_t now)
{
    uint64_t sum = mr_step_read(&sup->seg);
    int starting = 0;

    for (unsigned i = 0; i < sup->n_slots; i++) {
        sum = sum * 31 + mr_ld(&sup->slot[i].row->progress) + sup->slot[i].row->incarnation;
        starting |= mr_ld(&sup->slot[i].row->state) == MR_ACTOR_STARTING;
    }
    if (sum != sup->moved_sum || !sup->moved_ns || starting) {
        sup->moved_sum = sum;
        sup->moved_ns = now;
        sup->next_stall_ns = now + STALL_NS;
        return;
    }
    if (now < sup->next_stall_ns)
        return;
    stall_report(sup, now);
    sup->next_stall_ns = now + 2 * since(now, sup->moved_ns); /* 15 s, 45 s, ...: named, not repeated for hours */
}

/* ---- the end ------------------------------------------------------------------------------------------------------------------------- */

static void kill_all(struct mr_sup *sup)
{
    sup->killed = 1;
    for (unsigned i = 0; i < sup->n_slots; i++) {
        struct mr_slot *s = &sup->slot[i];

        if (sup->state == MR_SUP_ENDING && s->child.pid)
            mr_runlog(&sup->log, MR_LOG_WARN, s->row->name,
                      "has not acknowledged the end within %u s: killing it; the run is complete without it",
                      (unsigned)(ENDING_NS / 1000000000u));
        mr_sup_kill(s, MR_KILL_END);
        if (!s->child.pid)
            s->done = 1;
    }
}

static void watch_end(struct mr_sup *sup, uint64_t now)
{
    uint64_t limit = sup->state == MR_SUP_ENDING ? ENDING_NS : FAILING_NS;

    if (!sup->killed && since(now, sup->ending_ns) > limit)
        kill_all(sup);
    if (since(now, sup->ending_ns) < UNKILLABLE_NS)
        return;
    for (unsigned i = 0; i < sup->n_slots; i++) {
        struct mr_slot *s = &sup->slot[i];

        if (!s->child.pid)
            continue;
        mr_runlog(&sup->log, MR_LOG_ERROR, s->row->name,
                  "pid %d does not die (process state %c): it hangs inside the kernel, and its device is unusable "
                  "until it returns; leaving it behind",
                  s->child.pid, mr_pid_state(s->child.pid));
        mr_loop_del(sup->loop, s->child.pidfd);
        if (s->child.out_fd >= 0)
            mr_loop_del(sup->loop, s->child.out_fd);
        mr_child_close(&s->child);
        s->child.pid = 0;
        s->done = 1;
    }
}

/* ---- tick ---------------------------------------------------------------------------------------------------------------------------- */

static void show_progress(struct mr_sup *sup, uint64_t now)
{
    char line[256];

    mr_progress_sample(&sup->progress, &sup->totals, now);
    if (since(now, sup->totals.start_ns) < FIRST_LINE_NS)
        return; /* without a rate yet */
    if (since(now, sup->progress.shown_ns) < (sup->log.tty ? REDRAW_NS : PLAIN_LINE_NS))
        return;
    sup->progress.shown_ns = now;
    mr_progress_line(&sup->progress, &sup->totals, sup->totals.restarts, line, sizeof line);
    mr_runlog_status(&sup->log, line);
}

void mr_sup_tick(struct mr_sup *sup)
{
    uint64_t now = mr_now_ns();

    sup->ticks++;
    mr_sup_advance(sup);
    mr_sup_spawn_due(sup, now);
    for (unsigned i = 0; i < sup->n_slots; i++)
        mr_sup_read_output(&sup->slot[i]);
    if (sup->state == MR_SUP_RUNNING) {
        for (unsigned i = 0; i < sup->n_slots; i++) {
            mr_sup_note_back(&sup->slot[i]);
            watch_slot(&sup->slot[i], now);
        }
        watch_stall(sup, now);
        show_progress(sup, now);
    } else {
        watch_end(sup, now);
    }
    mr_metrics_tick(sup->metrics);
}
