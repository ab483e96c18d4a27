/* millrace stop, restart: requests to a live supervisor over its control socket, then watching the segment, read-only, for the effect. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "ipc/atomic.h"
#include "runtime/cmd.h"
#include "runtime/control.h"

enum { ANSWER_MS = 5000, POLL_MS = 5 };

/* ---- stop ---------------------------------------------------------------------------------------------------------------------------- */

int mr_cmd_stop(int argc, char **argv)
{
    int now = 0, n, r;
    const struct mr_arg args[] = {{.name = "now", .flag = &now}, {.name = NULL}};
    const struct mr_usage u = {"stop [RUN] [--now]",
                               "Ends the run after the current step, with a checkpoint; `run` then exits with 0.\n"
                               "  --now   at once, without one; `run` exits with 143\n",
                               args, 0, 1};
    const char *name = NULL;
    char run[MR_NAME_MAX];
    struct mr_err err = {0};
    json_t *reply;

    r = mr_args_parse(&u, argc, argv, &name, &n);
    if (r)
        return r == MR_ARGS_DONE ? 0 : r;
    if (mr_cmd_pick_run(name, run, &err))
        return mr_cmd_fail(&err);
    reply = mr_control_call(run, json_pack("{s:s, s:b}", "cmd", "stop", "now", now), ANSWER_MS, &err);
    if (!reply)
        return mr_cmd_fail(&err);
    json_decref(reply);
    printf("run %s: %s\n", run, now ? "stopping now" : "stopping after the current step, with a checkpoint");
    return 0;
}

/* ---- restart ------------------------------------------------------------------------------------------------------------------------- */

static struct mr_actor_row *row_named(const struct mr_seg *s, const char *actor)
{
    for (unsigned i = 0; i < s->hdr->n_actors; i++)
        if (strcmp(s->actors[i].name, actor) == 0)
            return &s->actors[i];
    return NULL;
}

/* Until an incarnation after `old` is RUNNING.  0, or 1 when that takes longer than `seconds`. */
static int wait_for_successor(const struct mr_seg *s, const struct mr_actor_row *row, unsigned old, double seconds)
{
    uint64_t end = mr_now_ns() + (uint64_t)(seconds * 1e9);

    while (mr_now_ns() < end) {
        if (row->incarnation > old && mr_ld(&row->state) == MR_ACTOR_RUNNING)
            return 0;
        if (mr_ld(&row->acked) || mr_seg_owner_alive(s->run) != 1)
            return 1;
        usleep(POLL_MS * 1000);
    }
    return 1;
}

/* Reports the successor; `t0` is when the request was sent. */
static int report(const char *run, const char *actor, unsigned old, uint64_t t0, double seconds, struct mr_err *err)
{
    struct mr_seg s = {0};
    struct mr_actor_row *row;

    if (mr_seg_open(&s, run, 0, err))
        return -1;
    row = row_named(&s, actor);
    if (!row || wait_for_successor(&s, row, old, seconds)) {
        mr_seg_close(&s);
        return mr_err_set(err, MR_EXIT_FAILED,
                          "%s has no running successor after %.0f s: it may still be leaving (millrace status %s), or use --kill", actor,
                          seconds, run);
    }
    printf("%s: incarnation %u, pid %d, running after %.3f s\n", actor, row->incarnation, mr_ld(&row->pid),
           (double)(mr_now_ns() - t0) * 1e-9);
    mr_seg_close(&s);
    return 0;
}

int mr_cmd_restart(int argc, char **argv)
{
    int kill = 0, n, r;
    const struct mr_arg args[] = {{.name = "kill", .flag = &kill}, {.name = NULL}};
    const struct mr_usage u = {
        "restart [RUN] ACTOR [--kill]",
        "Hot restart of one actor, e.g. drafter/0, while all others go on.  Without --kill it leaves at its next safe point\n"
        "(a drafter after the current step) and nothing is done twice; --kill is a SIGKILL and the recovery after it.\n",
        args, 1, 2};
    const char *pos[2] = {NULL}, *actor;
    char run[MR_NAME_MAX];
    struct mr_err err = {0};
    json_t *reply;
    unsigned old;
    uint64_t t0;

    r = mr_args_parse(&u, argc, argv, pos, &n);
    if (r)
        return r == MR_ARGS_DONE ? 0 : r;
    actor = pos[n - 1];
    if (mr_cmd_pick_run(n == 2 ? pos[0] : NULL, run, &err))
        return mr_cmd_fail(&err);
    t0 = mr_now_ns();
    reply = mr_control_call(run, json_pack("{s:s, s:s, s:b}", "cmd", "restart", "actor", actor, "kill", kill), ANSWER_MS, &err);
    if (!reply)
        return mr_cmd_fail(&err);
    old = (unsigned)json_integer_value(json_object_get(reply, "incarnation"));
    json_decref(reply);
    return report(run, actor, old, t0, 60.0, &err) ? mr_cmd_fail(&err) : 0;
}
