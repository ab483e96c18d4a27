/* The supervisor: set-up, loop, tear-down; see supervisor.h and supervisor_pvt.h for the parts.
 *
 * Order at the start: signals are blocked and have their descriptor BEFORE the first segment exists, so that a SIGTERM at any moment of
 * the start goes the orderly way.  The write end of the death pipe is CLOEXEC and only here: when we die, every actor reads its end.
 */
#include "runtime/supervisor.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/point.h"
#include "ipc/atomic.h"
#include "ipc/step.h"
#include "runtime/supervisor_pvt.h"

static void on_wake(void *arg, int fd)
{
    struct mr_sup *sup = arg;
    uint64_t n;

    while (read(fd, &n, sizeof n) > 0)
        ;
    mr_sup_advance(sup);
    for (unsigned i = 0; i < sup->n_slots; i++)
        mr_sup_note_back(&sup->slot[i]);
}

static void on_timer(void *arg, int fd)
{
    struct mr_sup *sup = arg;
    uint64_t n;

    while (read(fd, &n, sizeof n) > 0)
        ;
    mr_sup_tick(sup);
}

/* ---- set-up -------------------------------------------------------------------------------------------------------------------------- */

static int open_descriptors(struct mr_sup *sup, const sigset_t *signals, struct mr_err *err)
{
    struct itimerspec every = {.it_interval.tv_nsec = MR_TICK_MS * 1000000, .it_value.tv_nsec = MR_TICK_MS * 1000000};
    int death[2];

    sup->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    sup->signal_fd = signalfd(-1, signals, SFD_CLOEXEC | SFD_NONBLOCK);
    sup->timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    if (pipe2(death, O_CLOEXEC) == 0) {
        sup->death_rd = death[0];
        sup->death_wr = death[1];
    }
    if (sup->event_fd < 0 || sup->signal_fd < 0 || sup->timer_fd < 0 || sup->death_wr < 0 ||
        timerfd_settime(sup->timer_fd, 0, &every, NULL))
        return mr_err_set(err, MR_EXIT_ENV, "no descriptors for the supervisor: %s (ulimit -n?)", strerror(errno));
    return 0;
}

static int open_loop(struct mr_sup *sup, struct mr_err *err)
{
    char why[300];
    int r;

    sup->loop = mr_loop_create(sup->o->io, why, sizeof why, err);
    if (!sup->loop)
        return -1;
    if (why[0])
        mr_runlog_write(&sup->log, MR_LOG_WARN, "supervisor", why);
    r = mr_loop_add(sup->loop, sup->signal_fd, mr_sup_on_signal, sup);
    if (r == 0)
        r = mr_loop_add(sup->loop, sup->event_fd, on_wake, sup);
    if (r == 0)
        r = mr_loop_add(sup->loop, sup->timer_fd, on_timer, sup);
    return r ? mr_err_set(err, MR_EXIT_ENV, "the event loop does not start: %s", strerror(-r)) : 0;
}

static int open_files(struct mr_sup *sup, struct mr_err *err)
{
    const struct mr_rundir *d = sup->o->dir;
    char path[MR_PATH + 64];

    if (mr_runlog_open(&sup->log, mr_rundir_file(d, "log.jsonl", path), err))
        return -1;
    if (mr_jsonl_open(&sup->ledger, mr_rundir_file(d, "ledger.jsonl", path), err) ||
        mr_jsonl_open(&sup->steps, mr_rundir_file(d, "metrics/steps.jsonl", path), err) ||
        mr_tb_open(&sup->tb, mr_rundir_file(d, "metrics", path), err))
        return -1;
    if (sup->o->first_step)
        mr_tb_restart(&sup->tb, sup->o->first_step); /* a failure is not the run's */
    mr_rundir_file(d, "topology.json", sup->topo_path);
    return mr_topology_save(sup->o->topo, sup->topo_path, err);
}

static int open_segments(struct mr_sup *sup, struct mr_err *err)
{
    const struct mr_sup_opts *o = sup->o;

    if (mr_shm_plan_create(o->shm, o->checked, o->topo, &sup->seg, err))
        return -1;
    sup->has_seg = 1;
    mr_st(&sup->seg.hdr->ledger_done, o->first_step);
    mr_st(&sup->seg.hdr->ckpt_latest, o->first_step);
    mr_st(&sup->seg.hdr->ckpt, mr_w_place(MR_CKPT_IDLE, o->first_step, 0, 0));
    sup->n_slots = sup->seg.hdr->n_actors;
    for (unsigned i = 0; i < sup->n_slots; i++) {
        sup->slot[i].sup = sup;
        sup->slot[i].n = i;
        sup->slot[i].row = &sup->seg.actors[i];
    }
    return 0;
}

/* An address that is no address is the user's mistake; a port that is taken is not worth a training run. */
static int open_metrics(struct mr_sup *sup, struct mr_err *err)
{
    const char *listen = sup->o->topo->metrics.listen;
    struct mr_metrics_source src = {&sup->seg, &sup->totals, &sup->progress};
    struct mr_err why = {0};

    if (!listen[0] || (sup->metrics = mr_metrics_open(listen, sup->loop, src, &why)))
        return 0;
    if (why.code == MR_EXIT_CONFIG)
        return mr_err_set(err, why.code, "%s", why.msg);
    mr_runlog(&sup->log, MR_LOG_WARN, "supervisor", "%s; the run goes on without /metrics", why.msg);
    return 0;
}

static int open_services(struct mr_sup *sup, struct mr_err *err)
{
    if (mr_control_open(&sup->control, sup->seg.run, sup->loop, mr_sup_on_request, sup, err))
        return -1;
    return open_metrics(sup, err);
}

static int take_up_totals(struct mr_sup *sup, struct mr_err *err)
{
    char path[MR_PATH + 64];

    mr_totals_init(&sup->totals, sup->o->shm->seg.steps_total, sup->o->shm->seg.microbatches_total);
    if (mr_totals_resume(&sup->totals, mr_rundir_file(sup->o->dir, "metrics/steps.jsonl", path), sup->o->first_step, err))
        return -1;
    sup->totals.recomputed += sup->o->recomputed;
    return 0;
}

static int set_up(struct mr_sup *sup, const sigset_t *signals, struct mr_err *err)
{
    if (take_up_totals(sup, err) || open_files(sup, err) || open_descriptors(sup, signals, err) || open_loop(sup, err))
        return -1;
    if (mr_actor_path(sup->actor_path, sizeof sup->actor_path, err))
        return -1;
    MR_POINT("sup.segments.before");
    if (open_segments(sup, err))
        return -1;
    MR_POINT("sup.segments.created");
    return open_services(sup, err);
}

/* ---- loop ---------------------------------------------------------------------------------------------------------------------------- */

static int over(const struct mr_sup *sup)
{
    if (sup->state == MR_SUP_RUNNING || mr_sup_live(sup))
        return 0;
    for (unsigned i = 0; sup->state == MR_SUP_ENDING && i < sup->n_slots; i++)
        if (!sup->slot[i].done)
            return 0;
    return 1;
}

static void run(struct mr_sup *sup)
{
    sup->oom_kills = mr_oom_kills();
    for (unsigned i = 0; i < sup->n_slots && sup->state == MR_SUP_RUNNING; i++)
        mr_sup_spawn(&sup->slot[i]);
    MR_POINT("sup.spawned");
    while (!over(sup)) {
        int r = mr_loop_wait(sup->loop, mr_sup_due_ms(sup));

        mr_sup_spawn_due(sup, mr_now_ns());
        if (r >= 0)
            continue;
        mr_sup_fail(sup, MR_EXIT_FAILED, "failed", "the event loop (%s) fails: %s", mr_loop_name(sup->loop), strerror(-r));
        usleep(MR_TICK_MS * 1000); /* the end is then driven by polling */
        mr_sup_reap(sup);
        mr_sup_tick(sup);
    }
}

static void write_summary(struct mr_sup *sup)
{
    struct mr_err err = {0};
    char path[MR_PATH + 64];
    unsigned step = (unsigned)mr_ld(&sup->seg.hdr->ledger_done), epochs = 0;

    while (epochs < sup->seg.hdr->n_epochs && sup->seg.epochs[epochs + 1].first_step <= step)
        epochs++;
    if (mr_summary_write(&sup->totals, mr_rundir_file(sup->o->dir, "summary.json", path), sup->status, epochs, sup->o->checked, &err))
        mr_runlog(&sup->log, MR_LOG_WARN, "supervisor", "%s", err.msg);
}

static void say_end(struct mr_sup *sup)
{
    char line[256];
    unsigned acked = 0;

    for (unsigned i = 0; i < sup->n_slots; i++)
        acked += mr_ld(&sup->slot[i].row->acked) != 0;
    mr_progress_sample(&sup->progress, &sup->totals, mr_now_ns() + 1000000000u);
    mr_progress_line(&sup->progress, &sup->totals, sup->totals.restarts, line, sizeof line);
    if (sup->state == MR_SUP_ENDING) {
        mr_runlog_status(&sup->log, line);
        mr_runlog_end_status(&sup->log);
        mr_runlog_say(&sup->log, "%s: %u of %u microbatches in %u steps, %.1f s; %u of %u actors acknowledged the end; results in %s",
                      sup->status, sup->totals.items, sup->totals.items_total, sup->totals.steps, mr_totals_wall_s(&sup->totals), acked,
                      sup->n_slots, sup->o->dir->path);
    }
}

/* ---- tear-down: accepts what set_up left half-built ------------------------------------------------------------------------------------
 */

static void close_fd(int fd)
{
    if (fd >= 0)
        close(fd);
}

static void tear_down(struct mr_sup *sup)
{
    mr_metrics_close(sup->metrics);
    if (sup->control.loop)
        mr_control_close(&sup->control);
    if (sup->has_seg) {
        char name[MR_NAME_MAX];

        snprintf(name, sizeof name, "%s", sup->seg.run);
        mr_seg_close(&sup->seg);
        mr_seg_unlink(name);
    }
    mr_loop_destroy(sup->loop);
    close_fd(sup->death_wr);
    close_fd(sup->death_rd);
    close_fd(sup->timer_fd);
    close_fd(sup->signal_fd);
    close_fd(sup->event_fd);
    mr_tb_close(&sup->tb);
    mr_jsonl_close(&sup->steps);
    mr_jsonl_close(&sup->ledger);
    mr_runlog_close(&sup->log);
}

static struct mr_sup *create(const struct mr_sup_opts *o)
{
    struct mr_sup *sup = calloc(1, sizeof *sup);

    if (!sup)
        return NULL;
    sup->o = o;
    sup->log.fd = sup->ledger.fd = sup->steps.fd = sup->tb.fd = -1;
    sup->event_fd = sup->signal_fd = sup->timer_fd = sup->death_rd = sup->death_wr = -1;
    for (unsigned i = 0; i < MR_MAX_ACTORS; i++)
        sup->slot[i].child = (struct mr_child){.pidfd = -1, .out_fd = -1};
    return sup;
}

int mr_supervise(const struct mr_sup_opts *o, struct mr_err *err)
{
    struct mr_sup *sup = create(o);
    sigset_t signals, before;
    int code;

    if (!sup) {
        mr_err_set(err, MR_EXIT_ENV, "out of memory");
        return MR_EXIT_ENV;
    }
    sigemptyset(&signals);
    sigaddset(&signals, SIGINT);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGHUP);
    sigprocmask(SIG_BLOCK, &signals, &before);
    signal(SIGPIPE, SIG_IGN); /* a reader of ours that goes away */
    signal(SIGXFSZ, SIG_IGN); /* a file-size limit is a full disk: the write says so */
    mr_point_init("supervisor");
    if (set_up(sup, &signals, err)) {
        code = err->code;
    } else {
        run(sup);
        write_summary(sup);
        say_end(sup);
        code = sup->exit_code;
        if (code)
            mr_err_set(err, code, "%s", sup->cause.msg);
    }
    tear_down(sup);
    free(sup);
    sigprocmask(SIG_SETMASK, &before, NULL);
    return code;
}
