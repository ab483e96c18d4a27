/* Signals and control requests.
 *
 * SIGINT, SIGTERM and SIGHUP: the first one ends the run after the current step, with a checkpoint; the second ends it now (130 or 143);
 * the third kills at once.  `millrace stop [--now]` are the first and the second.
 */
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "base/clock.h"
#include "ipc/atomic.h"
#include "ipc/step.h"
#include "ipc/wait.h"
#include "runtime/supervisor_pvt.h"

void mr_sup_fail(struct mr_sup *sup, int exit_code, const char *status, const char *fmt, ...)
{
    char msg[1900];
    va_list ap;

    if (sup->state != MR_SUP_RUNNING)
        return; /* the first cause stands */
    va_start(ap, fmt);
    vsnprintf(msg, sizeof msg, fmt, ap);
    va_end(ap);
    mr_err_set(&sup->cause, exit_code, "%s", msg);
    mr_runlog(&sup->log, MR_LOG_INFO, "supervisor", "the run ends (%s): %s", status, msg);
    sup->state = MR_SUP_FAILING;
    sup->exit_code = exit_code;
    sup->status = status;
    sup->ending_ns = mr_now_ns();
    mr_st(&sup->seg.hdr->abort, 1);
    mr_evc_bump_all(&sup->seg);
    for (unsigned i = 0; i < sup->n_slots; i++) {
        sup->slot[i].respawn_ns = 0;
        mr_child_signal(&sup->slot[i].child, SIGTERM);
    }
}

static void stop_gently(struct mr_sup *sup, const char *who)
{
    if (sup->state != MR_SUP_RUNNING || mr_ld(&sup->seg.hdr->stop))
        return;
    mr_st(&sup->seg.hdr->stop, 1);
    mr_evc_bump_all(&sup->seg);
    mr_runlog_say(&sup->log, "%s: stopping after the current step, with a checkpoint (once more: stop now)", who);
}

static void stop_now(struct mr_sup *sup, int sig)
{
    const char *kept = mr_ld(&sup->seg.hdr->ckpt_latest) ? "--resume goes on from the last checkpoint" : "there is no checkpoint yet";

    mr_sup_fail(sup, sig == SIGINT ? MR_EXIT_INT : MR_EXIT_TERM, "interrupted", "stopped at once, before a checkpoint; %s", kept);
}

void mr_sup_on_signal(void *arg, int fd)
{
    struct mr_sup *sup = arg;
    struct signalfd_siginfo si;

    while (read(fd, &si, sizeof si) == (ssize_t)sizeof si) {
        sup->signals++;
        if (sup->signals == 1)
            stop_gently(sup, si.ssi_signo == SIGINT ? "SIGINT" : si.ssi_signo == SIGHUP ? "SIGHUP" : "SIGTERM");
        else if (sup->signals == 2)
            stop_now(sup, (int)si.ssi_signo);
        else
            for (unsigned i = 0; i < sup->n_slots; i++)
                mr_sup_kill(&sup->slot[i], MR_KILL_END);
    }
}

/* ---- requests ------------------------------------------------------------------------------------------------------------------------ */

static json_t *on_info(struct mr_sup *sup)
{
    json_t *o = mr_control_ok();
    double eta = mr_progress_eta_s(&sup->progress, &sup->totals), accept = mr_totals_accept(&sup->totals);

    json_object_set_new(o, "dir", json_string(sup->o->dir->path));
    json_object_set_new(o, "io", json_string(mr_loop_name(sup->loop)));
    json_object_set_new(o, "loss", sup->totals.has_loss ? json_real(sup->totals.loss_last) : json_null());
    json_object_set_new(o, "accept_proxy", accept == accept ? json_real(accept) : json_null());
    json_object_set_new(o, "tokens", json_integer((json_int_t)sup->totals.tokens));
    json_object_set_new(o, "tokens_per_s", json_real(mr_progress_tokens_per_s(&sup->progress)));
    json_object_set_new(o, "eta_s", eta >= 0 ? json_real(eta) : json_null());
    json_object_set_new(o, "restarts", json_integer(sup->totals.restarts));
    json_object_set_new(o, "wall_s", json_real(mr_totals_wall_s(&sup->totals)));
    return o;
}

static json_t *on_stop(struct mr_sup *sup, const json_t *request)
{
    if (sup->state != MR_SUP_RUNNING)
        return mr_control_refuse("the run is ending already");
    if (json_is_true(json_object_get(request, "now")))
        stop_now(sup, SIGTERM);
    else
        stop_gently(sup, "millrace stop");
    return mr_control_ok();
}

static struct mr_slot *slot_named(struct mr_sup *sup, const char *name)
{
    for (unsigned i = 0; name && i < sup->n_slots; i++)
        if (strcmp(sup->slot[i].row->name, name) == 0)
            return &sup->slot[i];
    return NULL;
}

static json_t *no_such_actor(struct mr_sup *sup, const char *name)
{
    const char *names[MR_MAX_ACTORS], *near;

    for (unsigned i = 0; i < sup->n_slots; i++)
        names[i] = sup->slot[i].row->name;
    near = name ? mr_nearest(name, names, (int)sup->n_slots) : NULL;
    return mr_control_refuse("run %s has no actor \"%s\"%s%s%s; millrace status lists them", sup->seg.run, name ? name : "",
                             near ? ": did you mean " : "", near ? near : "", near ? "?" : "");
}

static json_t *on_restart(struct mr_sup *sup, const json_t *request)
{
    const char *name = json_string_value(json_object_get(request, "actor"));
    int kill = json_is_true(json_object_get(request, "kill"));
    struct mr_slot *s = slot_named(sup, name);
    unsigned incarnation;
    json_t *o;

    if (!s)
        return no_such_actor(sup, name);
    if (sup->state != MR_SUP_RUNNING || s->done)
        return mr_control_refuse("the run is ending: nothing is restarted any more");
    incarnation = s->row->incarnation;
    if (!s->child.pid) {
        s->n_deaths = 0;
        mr_sup_spawn(s); /* it stood in back-off: now */
    } else if (kill) {
        mr_sup_kill(s, MR_KILL_RESTART);
    } else {
        mr_st(&s->row->drain, 1);
        mr_evc_bump(&sup->seg.hdr->evc[s->row->kind]);
    }
    mr_runlog(&sup->log, MR_LOG_INFO, "supervisor", "%s is restarted on request (%s)", name, kill ? "SIGKILL" : "drain");
    o = mr_control_ok();
    json_object_set_new(o, "incarnation", json_integer(incarnation));
    return o;
}

json_t *mr_sup_on_request(const json_t *request, void *arg)
{
    struct mr_sup *sup = arg;
    const char *cmd = json_string_value(json_object_get(request, "cmd"));

    if (cmd && strcmp(cmd, "info") == 0)
        return on_info(sup);
    if (cmd && strcmp(cmd, "stop") == 0)
        return on_stop(sup, request);
    if (cmd && strcmp(cmd, "restart") == 0)
        return on_restart(sup, request);
    return mr_control_refuse("unknown command \"%s\": info, stop and restart are known", cmd ? cmd : "");
}
