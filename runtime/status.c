/* The state of a run as JSON and as text: from the segment, read-only, plus what only the supervisor knows (`info`), when it answers.
 *
 * {run, state, step, steps_total, phase, microbatches_committed, microbatches_total, checkpoint, supervisor_pid, loss, accept_proxy,
 *  tokens_per_s, eta_s, restarts, dir, io, slabs:{free,target,item}, actors:[{name, pid, state, incarnation, device, wait, wait_s,
 * restarts, microbatches, tokens, first_claim_s}]}.  `wait` is null while the actor works; first_claim_s is from its spawn to its first
 * claim.
 */
#include <string.h>

#include "base/clock.h"
#include "ipc/atomic.h"
#include "ipc/step.h"
#include "ipc/wait.h"
#include "runtime/cmd.h"

static const char *actor_state(unsigned state)
{
    static const char *const name[] = {"empty", "starting", "running", "dead", "backoff", "done"};

    return state < sizeof name / sizeof name[0] ? name[state] : "?";
}

static const char *run_state(const struct mr_seg *s)
{
    if (mr_seg_owner_alive(s->run) == 0)
        return "dead"; /* its supervisor is gone; millrace clean, then --resume */
    if (mr_ld(&s->hdr->abort))
        return "failing";
    if (mr_sw_phase(mr_step_read(s)) == MR_FINISHED)
        return "finished";
    return mr_ld(&s->hdr->stop) ? "stopping" : "running";
}

/* `orphan`: the supervisor is dead, so the actor is too, whatever its row says: nobody is left to change that. */
static json_t *actor_json(const struct mr_actor_row *row, uint64_t now, int orphan)
{
    unsigned why = mr_ld(&row->wait_reason), was = mr_ld(&row->state), state = orphan && was != MR_ACTOR_DONE ? MR_ACTOR_DEAD : was;
    uint64_t since = mr_ld(&row->wait_since_ns), first = mr_ld(&row->first_claim_ns);
    int parked = why != MR_WAIT_NONE && why < MR_WAIT_REASONS && state == MR_ACTOR_RUNNING, pid = (int)mr_ld(&row->pid);
    int halted = state == MR_ACTOR_RUNNING && pid > 0 && mr_pid_state(pid) == 'T'; /* SIGSTOP: it looks busy from the segment */
    json_t *o = json_pack("{s:s, s:i, s:s, s:i, s:s}", "name", row->name, "pid", pid, "state", halted ? "stopped" : actor_state(state),
                          "incarnation", (int)row->incarnation, "device", row->device);

    json_object_set_new(o, "wait", parked ? json_string(mr_wait_name(why)) : json_null());
    json_object_set_new(o, "wait_s", json_real(parked && since && since < now ? (double)(now - since) * 1e-9 : 0.0));
    json_object_set_new(o, "restarts", json_integer(row->restarts));
    json_object_set_new(o, "microbatches", json_integer((json_int_t)mr_ld_relaxed(&row->items))); /* relaxed: figures for a human */
    json_object_set_new(o, "tokens", json_integer((json_int_t)mr_ld_relaxed(&row->tokens)));
    json_object_set_new(o, "first_claim_s", first > row->start_ns ? json_real((double)(first - row->start_ns) * 1e-9) : json_null());
    return o;
}

static json_t *slabs_json(const struct mr_seg *s)
{
    unsigned n[3] = {0};

    for (unsigned i = 0; i < s->hdr->n_slabs; i++) {
        unsigned k = mr_w_slab_kind(mr_ld(&s->slabs[i].word));

        n[k < 3 ? k : 0]++;
    }
    return json_pack("{s:i, s:i, s:i}", "free", n[MR_SLAB_FREE], "target", n[MR_SLAB_TARGET], "item", n[MR_SLAB_ITEM]);
}

static void add_info(json_t *o, const json_t *info)
{
    static const char *const key[] = {"loss", "accept_proxy", "tokens", "tokens_per_s", "eta_s", "restarts", "wall_s", "dir", "io"};

    for (size_t i = 0; i < sizeof key / sizeof key[0]; i++) {
        json_t *v = json_object_get(info, key[i]);

        json_object_set_new(o, key[i], v ? json_incref(v) : json_null());
    }
}

json_t *mr_status_json(const struct mr_seg *s, const json_t *info)
{
    uint64_t word = mr_step_read(s), now = mr_now_ns();
    unsigned step = mr_sw_step(word);
    json_t *o = json_pack("{s:s, s:s, s:i, s:i, s:s}", "run", s->run, "state", run_state(s), "step", (int)step, "steps_total",
                          (int)s->hdr->steps_total, "phase", mr_step_phase_name(mr_sw_phase(word)));
    json_t *actors = json_array();
    int orphans = mr_seg_owner_alive(s->run) == 0;

    json_object_set_new(o, "microbatches_committed", json_integer(mr_committed_at(s, step)));
    json_object_set_new(o, "microbatches_total", json_integer(s->hdr->microbatches_total));
    json_object_set_new(o, "checkpoint", json_integer((json_int_t)mr_ld(&s->hdr->ckpt_latest)));
    json_object_set_new(o, "supervisor_pid", json_integer(s->hdr->sup_pid));
    add_info(o, info);
    json_object_set_new(o, "slabs", slabs_json(s));
    for (unsigned i = 0; i < s->hdr->n_actors; i++)
        json_array_append_new(actors, actor_json(&s->actors[i], now, orphans));
    json_object_set_new(o, "actors", actors);
    return o;
}

/* ---- text ---------------------------------------------------------------------------------------------------------------------------- */

static const char *str(const json_t *o, const char *key)
{
    const char *v = json_string_value(json_object_get(o, key));

    return v ? v : "-";
}

static long long num(const json_t *o, const char *key)
{
    return (long long)json_integer_value(json_object_get(o, key));
}

static void print_actor(const json_t *a, FILE *f)
{
    char doing[48];

    if (strcmp(str(a, "state"), "running"))
        snprintf(doing, sizeof doing, "%s", str(a, "state"));
    else if (json_is_string(json_object_get(a, "wait")))
        snprintf(doing, sizeof doing, "waits: %s %.1f s", str(a, "wait"), json_number_value(json_object_get(a, "wait_s")));
    else
        snprintf(doing, sizeof doing, "works");
    fprintf(f, "%-12s %-10s %8lld %5lld %9lld %13lld %12lld  %s\n", str(a, "name"), str(a, "device"), num(a, "pid"), num(a, "incarnation"),
            num(a, "restarts"), num(a, "microbatches"), num(a, "tokens"), doing);
}

void mr_status_print(const json_t *o, FILE *f)
{
    const json_t *slabs = json_object_get(o, "slabs"), *a, *loss = json_object_get(o, "loss");
    size_t i;

    fprintf(f, "run %s: %s, step %lld/%lld (%s), microbatches %lld/%lld, checkpoint %lld\n", str(o, "run"), str(o, "state"), num(o, "step"),
            num(o, "steps_total"), str(o, "phase"), num(o, "microbatches_committed"), num(o, "microbatches_total"), num(o, "checkpoint"));
    if (json_is_number(loss))
        fprintf(f, "loss %.4f, %.0f tokens/s, ", json_number_value(loss), json_number_value(json_object_get(o, "tokens_per_s")));
    fprintf(f, "slabs: %lld free, %lld with a target, %lld with an item; events: %s; supervisor pid %lld\n", num(slabs, "free"),
            num(slabs, "target"), num(slabs, "item"), str(o, "io"), num(o, "supervisor_pid"));
    fprintf(f, "%-12s %-10s %8s %5s %9s %13s %12s  %s\n", "actor", "device", "pid", "inc", "restarts", "microbatches", "tokens", "doing");
    json_array_foreach(json_object_get(o, "actors"), i, a) print_actor(a, f);
}
