/* `nccl`: an all-reduce over the drafters, one communicator per collective epoch.
 *
 * A death moves the epoch; the survivors abort what they have and join the next group when the word is REDUCE again.  Rank 0 makes the group's
 * id and puts it into its state's header, which every drafter can read.  Nobody waits inside the library: joining and summing are polled, and
 * given up when the step word says that a peer has died.  A peer's death can show as an error of the library before the supervisor has reaped
 * it: so an error is believed to be our own only when the word has not moved SETTLE_NS later.
 *
 * A peer that does not come, or that stands stopped inside the sum, is named in the log; it is the supervisor that replaces it
 * (restart.hang_s), and that moves the word.  Meanwhile we wait with a reason, so the supervisor does not take us for the one that hangs.  When
 * all are there, none is stopped, and the library still gets nowhere for DEADLINE_NS, the process leaves: a new one has a new library.
 *
 * An abort has a deadline too: a library that does not let go of a sum in flight costs the process, not the run; one without work is left
 * behind.  Weights and losses are summed from the headers, in rank order, as in the other reductions.  The accumulators stay intact: the sum
 * is out of place, also with bf16 on the wire, which is converted into a buffer of its own.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "actors/reduce_pvt.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/point.h"
#include "ipc/atomic.h"
#include "ipc/step.h"

#define SETTLE_NS 2000000000u
#define DEADLINE_NS 30000000000u
#define SHORT_NS 20000000u       /* a sum that takes no longer is polled often */
#define LOOK_NS 500000000u
enum { ABORT_MS = 5000, IDLE_ABORT_MS = 1500, POLL_NS = 100000, POLL_MS = 1 };

static int current(const struct mr_reduce *r, uint64_t word)
{
    uint64_t w = mr_step_read(r->env->seg);

    return mr_sw_phase(w) == MR_REDUCE && mr_sw_step(w) == mr_sw_step(word) && mr_sw_cepoch(w) == mr_sw_cepoch(word) &&
           mr_env_check(r->env, 0) == MR_GO_ON;
}

static int end(struct mr_reduce *r, int broken, struct mr_err *err)
{
    struct mr_k_comm *c = r->comm;
    unsigned limit = r->summing || !broken ? ABORT_MS : IDLE_ABORT_MS;
    uint64_t t0 = mr_now_ns();

    r->comm = NULL;
    r->comm_epoch = 0;
    if (mr_k_comm_end(c, broken, limit)) {
        if (r->summing)                              /* it may still write `reduced` */
            return mr_err_set(err, MR_EXIT_CUDA, "%s: NCCL did not let go of its communicator within %u ms", r->env->me->name, limit);
        mr_warn("NCCL did not let go of a communicator without work within %u ms: it is left behind", limit);
    } else if (c && broken) {
        mr_info("communicator given up in %.0f ms", (double)(mr_now_ns() - t0) * 1e-6);
    }
    r->summing = 0;
    return 0;
}

/* ---- waiting for peers ------------------------------------------------------------------------------------------------------ */

struct patience { uint64_t begun, look, all_there; int told; };

static struct patience begin_waiting(void)
{
    uint64_t now = mr_now_ns();

    return (struct patience){.begun = now, .look = now + LOOK_NS, .all_there = now};
}

/* A little while: the reason is seen by the supervisor and by `status`. */
static void rest(const struct mr_reduce *r, const struct patience *p, uint32_t seq)
{
    const struct timespec pause = {.tv_nsec = POLL_NS};

    if (mr_now_ns() - p->begun < SHORT_NS)
        nanosleep(&pause, NULL);
    else
        mr_evc_wait(r->env->seg, r->env->evc, seq, POLL_MS, r->env->me, MR_WAIT_PEER);
}

static const struct mr_actor_row *row_of(const struct mr_env *e, unsigned rank)
{
    for (unsigned i = 0; i < e->hdr->n_actors; i++)
        if (e->seg->actors[i].kind == MR_DRAFTER && e->seg->actors[i].index == rank)
            return &e->seg->actors[i];
    return e->me;
}

/* Whom this sum waits for, as far as headers and processes say: those that have not come, and those that are stopped.  Number of them. */
static int missing(const struct mr_reduce *r, uint64_t word, char *list, size_t bytes)
{
    int n = 0;

    *list = 0;
    for (unsigned i = 0; i < r->env->hdr->n_drafters; i++) {
        const struct mr_actor_row *row = row_of(r->env, i);
        int pid = mr_ld(&row->pid), away, stopped;
        char state = mr_pid_state(pid);
        struct mr_drafter_view v;
        struct mr_err unused = {0};
        size_t at = strlen(list);

        away = mr_drafter_view_open(&r->env->map, r->env->seg, i, r->mine->P, &v, &unused) || mr_ld(&v.hdr->comm_word) != word;
        stopped = state == 'T' || state == 't';
        if (!away && !stopped)
            continue;
        n++;
        snprintf(list + at, bytes - at, "%s%s (pid %d) %s", at ? ", " : "", row->name, pid, stopped ? "stands stopped" : "has not come");
    }
    return n;
}

/* 0 = wait on; -1 with err: it is no use, and the communicator is gone. */
static int look_around(struct mr_reduce *r, uint64_t word, const char *what, struct patience *p, struct mr_err *err)
{
    uint64_t hang_ns = (uint64_t)(r->env->topo->restart.hang_s * 1e9), now = mr_now_ns();
    unsigned step = mr_sw_step(word);
    char list[600];
    int n;

    if (now < p->look)
        return 0;
    p->look = now + LOOK_NS;
    n = missing(r, word, list, sizeof list);
    if (n)
        p->all_there = now;
    if (n && !p->told && now - p->begun >= (hang_ns / 2 < DEADLINE_NS ? hang_ns / 2 : DEADLINE_NS)) {
        mr_warn("%s of step %u has waited for %.1f s: %s; who stays so for restart.hang_s (%g s) is replaced", what, step,
                (double)(now - p->begun) * 1e-9, list, r->env->topo->restart.hang_s);
        p->told = 1;
    }
    if (now - p->all_there < DEADLINE_NS && now - p->begun < 2 * hang_ns + DEADLINE_NS)
        return 0;
    end(r, 1, err);
    return mr_err_set(err, MR_EXIT_FAILED, "%s: %s of step %u did not end within %.0f s; missing: %s", r->env->me->name, what, step,
                      (double)(now - p->begun) * 1e-9, n ? list : "nobody");
}

/* After an error that may be a peer's death: 1 = it was, the word has moved. */
static int overtaken(const struct mr_reduce *r, uint64_t word)
{
    struct patience p = begin_waiting();

    while (mr_now_ns() - p.begun < SETTLE_NS) {
        uint32_t seq = mr_evc_read(r->env->evc);

        if (!current(r, word))
            return 1;
        rest(r, &p, seq);
    }
    return 0;
}

/* What to return for an error: -ESTALE, or -1 with err.  The communicator is gone. */
static int judge(struct mr_reduce *r, uint64_t word, int code, const char *what, const char *why, struct mr_err *err)
{
    if (r->comm && end(r, 1, err))
        return -1;
    if (overtaken(r, word))
        return -ESTALE;
    return mr_err_set(err, code, "%s: %s of step %u: %s", r->env->me->name, what, mr_sw_step(word), why);
}

/* Polls until what was started is complete.  0, -ESTALE, or -1 with err; the communicator is gone in the last two cases. */
static int await(struct mr_reduce *r, uint64_t word, const char *what, struct mr_err *err)
{
    struct patience p = begin_waiting();
    char why[300] = "";
    int rc;

    for (;;) {
        uint32_t seq = mr_evc_read(r->env->evc);

        rc = mr_k_comm_poll(r->comm, why, sizeof why);
        if (rc == 0)
            return 0;
        if (rc != -EINPROGRESS)
            return judge(r, word, r->eng->failure, what, why, err);
        if (!current(r, word))
            return end(r, 1, err) ? -1 : -ESTALE;
        if (look_around(r, word, what, &p, err))
            return -1;
        rest(r, &p, seq);
    }
}

/* ---- the group -------------------------------------------------------------------------------------------------------------- */

/* The id of this epoch's group.  0, -ESTALE, or -1 with err. */
static int group_id(struct mr_reduce *r, uint64_t word, uint8_t id[MR_K_COMM_ID], struct mr_err *err)
{
    struct patience p = begin_waiting();
    uint64_t want = mr_sw_cepoch(word) + 1u;
    struct mr_drafter_view v;
    char why[300] = "";

    if (mr_drafter_view_open(&r->env->map, r->env->seg, 0, r->mine->P, &v, err))
        return -ESTALE;                              /* its keeper has died just now */
    if (r->env->rank == 0) {
        if (mr_k_comm_id(id, why, sizeof why))
            return mr_err_set(err, MR_EXIT_ENV, "%s: %s", r->env->me->name, why);
        memcpy(v.hdr->comm_id, id, MR_K_COMM_ID);
        MR_POINT("reduce.id.made");
        mr_st(&v.hdr->comm_epoch, want);
        return 0;
    }
    for (;;) {
        uint32_t seq = mr_evc_read(r->env->evc);

        if (mr_ld(&v.hdr->comm_epoch) == want)
            break;
        if (!current(r, word))
            return -ESTALE;
        if (look_around(r, word, "the making of the group", &p, err))
            return -1;
        rest(r, &p, seq);
    }
    memcpy(id, v.hdr->comm_id, MR_K_COMM_ID);
    return 0;
}

static int join(struct mr_reduce *r, uint64_t word, struct mr_err *err)
{
    uint8_t id[MR_K_COMM_ID];
    uint64_t t0 = mr_now_ns();
    char why[300] = "";
    int rc;

    if (r->comm && r->comm_epoch == mr_sw_cepoch(word) + 1u)
        return 0;
    if (r->comm && end(r, 1, err))
        return -1;
    rc = group_id(r, word, id, err);
    if (rc)
        return rc;
    MR_POINT("reduce.id.known");
    r->comm = mr_k_comm_begin(r->eng->k, id, (int)r->env->rank, (int)r->env->hdr->n_drafters, why, sizeof why);
    if (!r->comm)
        return judge(r, word, MR_EXIT_ENV, "joining the group", why, err);
    MR_POINT("reduce.joining");
    rc = await(r, word, "joining the group", err);
    if (rc)
        return rc;
    r->comm_epoch = mr_sw_cepoch(word) + 1u;
    mr_info("group of epoch %u: %u drafters, %.0f ms", mr_sw_cepoch(word), r->env->hdr->n_drafters, (double)(mr_now_ns() - t0) * 1e-6);
    return 0;
}

/* ---- the sum ---------------------------------------------------------------------------------------------------------------- */

static int all_reduce(struct mr_reduce *r, uint64_t word, struct mr_err *err)
{
    const struct mr_k_ops *op = r->eng->k->op;
    const struct mr_drafter_view *v = r->mine;
    char why[300] = "";
    int rc;

    if (r->wire && (op->f32_to_act(r->eng->k, r->wire, v->acc, v->P) || op->sync(r->eng->k)))
        return mr_err_set(err, r->eng->failure, "%s: the gradients of step %u could not be converted", r->env->me->name, mr_sw_step(word));
    r->summing = 1;
    if (mr_k_comm_sum(r->comm, r->wire ? r->wire : v->acc, r->wire ? r->wire : (void *)v->reduced, v->P, r->wire ? MR_K_BF16 : MR_K_F32, why,
                      sizeof why))
        return judge(r, word, r->eng->failure, "the sum", why, err);
    MR_POINT("reduce.issued");
    rc = await(r, word, "the sum", err);
    if (rc)
        return rc;
    r->summing = 0;
    if (r->wire && (op->act_to_f32(r->eng->k, v->reduced, r->wire, v->P) || op->sync(r->eng->k)))
        return mr_err_set(err, r->eng->failure, "%s: the sum of step %u could not be converted", r->env->me->name, mr_sw_step(word));
    return 0;
}

static int sum_nccl(struct mr_reduce *r, uint64_t word, struct mr_err *err)
{
    int rc;

    mr_st(&r->mine->hdr->comm_word, word);
    rc = join(r, word, err);
    if (!rc)
        rc = all_reduce(r, word, err);
    return rc ? rc : mr_reduce_finish(r, word, err);
}

static void destroy(struct mr_reduce *r)
{
    struct mr_err unused = {0};

    if (r->comm)
        end(r, 0, &unused);
    if (r->wire)
        r->eng->k->op->release(r->eng->k, r->wire);
}

int mr_reduce_nccl(struct mr_reduce *r, struct mr_err *err)
{
    const struct mr_topology *t = r->env->topo;

    if (r->env->inc == 1 && !mr_k_comm_version()) /* a later one does not load the library before it needs it */
        return mr_err_set(err, MR_EXIT_CONFIG, "/train/reduce: is \"nccl\", and this program finds no NCCL; use \"p2p\"");
    r->name = "nccl";
    r->collective = 1;
    r->sum = sum_nccl;
    r->destroy = destroy;
    if (t->train.bf16_wire)
        r->wire = r->eng->k->op->alloc(r->eng->k, r->mine->P * 2);
    if (t->train.bf16_wire && !r->wire)
        return mr_err_set(err, MR_EXIT_ENV, "%s: no %llu bytes of device memory for gradients in bf16", r->env->me->name,
                          (unsigned long long)r->mine->P * 2);
    return 0;
}
