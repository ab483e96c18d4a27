/* One actor slot: spawn and output.  Its death is supervisor_death.c.
 *
 * The supervisor holds the read end of stdout and stderr, so that the last words of a process outlive it.
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/point.h"
#include "ipc/atomic.h"
#include "ipc/wait.h"
#include "runtime/gpus.h"
#include "runtime/supervisor_pvt.h"

enum { OUTPUT_READS = 16 };

unsigned mr_sup_live(const struct mr_sup *sup)
{
    unsigned n = 0;

    for (unsigned i = 0; i < sup->n_slots; i++)
        n += sup->slot[i].child.pid != 0;
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

void mr_sup_close_output(struct mr_slot *s)
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
            mr_sup_close_output(s);
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

static void prepare_row(struct mr_slot *s)
{
    struct mr_actor_row *row = s->row;

    row->incarnation++;
    row->start_ns = mr_now_ns();
    mr_st(&row->drain, 0);
    mr_st(&row->wait_reason, MR_WAIT_NONE);
    mr_st(&row->state, MR_ACTOR_STARTING);
    s->progress_at_spawn = mr_ld(&row->progress);
    s->steps_at_spawn = mr_ld(&s->sup->seg.hdr->ledger_done);
    s->why = MR_KILL_NONE;
    s->respawn_ns = 0;
    s->running_ns = 0;
    s->n_part = 0;
    s->last_progress = s->progress_at_spawn;
    s->busy_since_ns = row->start_ns;
    s->stopped_since_ns = 0;
}

/* Which GPUs it sees: one, none, or all of ours (actors/backend.h reads the second variable).  Number of assignments in set[]. */
static int gpu_environment(const struct mr_slot *s, char visible[2][160], const char *set[2])
{
    const struct mr_topology *t = s->sup->o->topo;
    char value[128];
    int pinned;

    if (!mr_gpus_visible(t, s->n, getenv("CUDA_VISIBLE_DEVICES"), value, sizeof value, &pinned))
        return 0;
    snprintf(visible[0], sizeof visible[0], "CUDA_VISIBLE_DEVICES=%s", value);
    snprintf(visible[1], sizeof visible[1], "MILLRACE_DEVICE=%s", pinned ? t->actor[s->n].device : "");
    set[0] = visible[0];
    set[1] = visible[1];
    return 2;
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
    char visible[2][160];
    const char *set[2];

    sp.set = set;
    sp.n_set = gpu_environment(s, visible, set);
    snprintf(slot, sizeof slot, "%u", s->n);
    snprintf(inc, sizeof inc, "%u", s->row->incarnation);
    snprintf(event_fd, sizeof event_fd, "%d", sup->event_fd);
    snprintf(death_fd, sizeof death_fd, "%d", sup->death_rd);
    if (mr_spawn(&s->child, &sp, err))
        return -1;
    mr_st(&s->row->pid, s->child.pid);
    MR_POINT("sup.spawn.forked");
    if (mr_loop_add(sup->loop, s->child.pidfd, mr_sup_on_exit, s) ||
        (s->child.out_fd >= 0 && mr_loop_add(sup->loop, s->child.out_fd, on_output, s)))
        mr_sup_fail(sup, MR_EXIT_FAILED, "failed", "the event loop does not take the process of %s", s->row->name);
    return 0;
}

void mr_sup_spawn(struct mr_slot *s)
{
    struct mr_err err = {0};

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
    mr_sup_start_failed(s);
}

void mr_sup_spawn_due(struct mr_sup *sup, uint64_t now)
{
    for (unsigned i = 0; i < sup->n_slots && sup->state != MR_SUP_FAILING; i++)
        if (sup->slot[i].respawn_ns && sup->slot[i].respawn_ns <= now)
            mr_sup_spawn(&sup->slot[i]);
}

int mr_sup_due_ms(const struct mr_sup *sup)
{
    uint64_t first = UINT64_MAX, now = mr_now_ns();

    for (unsigned i = 0; i < sup->n_slots && sup->state != MR_SUP_FAILING; i++)
        if (sup->slot[i].respawn_ns && sup->slot[i].respawn_ns < first)
            first = sup->slot[i].respawn_ns;
    if (first == UINT64_MAX)
        return -1;
    return first <= now ? 0 : (int)((first - now) / 1000000u) + 1;
}

static double ms_between(uint64_t from, uint64_t to)
{
    return to > from ? (double)(to - from) * 1e-6 : 0.0;
}

/* Times of one restart; test/e2e_gpu_drafters.py reads the line.  The claim is the actor's own stamp; an older one is its predecessor's. */
void mr_sup_note_back(struct mr_slot *s)
{
    const struct mr_actor_row *row = s->row;
    uint64_t first = mr_ld(&row->first_claim_ns);

    if (!s->reaped_ns || row->start_ns < s->reaped_ns) /* nothing to say, or in back-off */
        return;
    if (!s->running_ns && mr_ld(&row->state) == MR_ACTOR_RUNNING)
        s->running_ns = mr_now_ns();
    if (first <= row->start_ns)
        return;
    if (!s->running_ns || s->running_ns > first) /* seen late */
        s->running_ns = first;
    mr_runlog(&s->sup->log, MR_LOG_INFO, "supervisor", "%s, incarnation %u: reaped at %.6f s, started after %.1f ms, running after %.1f ms, "
              "first claim after %.1f ms", row->name, row->incarnation, (double)s->reaped_ns * 1e-9, ms_between(s->reaped_ns, row->start_ns),
              ms_between(s->reaped_ns, s->running_ns), ms_between(s->reaped_ns, first));
    s->reaped_ns = 0;
}
