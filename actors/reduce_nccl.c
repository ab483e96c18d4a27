/* `nccl`: an all-reduce over the drafters, one communicator per collective epoch.
 *
 * A death moves the epoch; the survivors abort what they have and join the next group when the word is REDUCE again.  Rank 0 makes the group's
 * id and puts it into its state's header, which every drafter can read.  Nobody waits inside the library: joining and summing are polled, and
 * given up when the step word says that a peer has died, or at a deadline, which names who is missing.  An abort has a deadline too: a library
 * that does not let go costs the process, not the run.  Weights and losses are summed from the headers, in rank order, as in the other
 * reductions.  The accumulators stay intact: the sum is out of place, also with bf16 on the wire, which is converted into a buffer of its own.
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

#define DEADLINE_NS 30000000000u
enum { ABORT_MS = 5000, POLL_NS = 100000 };

static int current(const struct mr_reduce *r, uint64_t word)
{
    uint64_t w = mr_step_read(r->env->seg);

    return mr_sw_phase(w) == MR_REDUCE && mr_sw_step(w) == mr_sw_step(word) && mr_sw_cepoch(w) == mr_sw_cepoch(word) &&
           mr_env_check(r->env, 0) == MR_GO_ON;
}

static int end(struct mr_reduce *r, int broken, struct mr_err *err)
{
    struct mr_k_comm *c = r->comm;
    uint64_t t0 = mr_now_ns();

    r->comm = NULL;
    r->comm_epoch = 0;
    if (mr_k_comm_end(c, broken, ABORT_MS))
        return mr_err_set(err, MR_EXIT_CUDA, "%s: NCCL did not let go of its communicator within %d ms", r->env->me->name, ABORT_MS);
    if (c && broken)
        mr_info("communicator given up in %.0f ms", (double)(mr_now_ns() - t0) * 1e-6);
    return 0;
}

/* Who has not come to this sum, as far as their headers say. */
static int late(struct mr_reduce *r, uint64_t word, const char *what, struct mr_err *err)
{
    char list[200] = "";

    for (unsigned i = 0; i < r->env->hdr->n_drafters; i++) {
        struct mr_drafter_view v;
        struct mr_err unused = {0};
        size_t at = strlen(list);

        if (mr_drafter_view_open(&r->env->map, r->env->seg, i, r->mine->P, &v, &unused) || mr_ld(&v.hdr->comm_word) != word)
            snprintf(list + at, sizeof list - at, " drafter/%u", i);
    }
    end(r, 1, err);
    return mr_err_set(err, MR_EXIT_FAILED, "%s: %s of step %u did not end within %u s; not there:%s", r->env->me->name, what, mr_sw_step(word),
                      (unsigned)(DEADLINE_NS / 1000000000u), *list ? list : " nobody");
}

/* Polls until what was started is complete.  0, -ESTALE, or -1 with err; the communicator is gone in the last two cases. */
static int await(struct mr_reduce *r, uint64_t word, const char *what, struct mr_err *err)
{
    const struct timespec pause = {.tv_nsec = POLL_NS};
    uint64_t until = mr_now_ns() + DEADLINE_NS;
    char why[300] = "";
    int rc;

    while ((rc = mr_k_comm_poll(r->comm, why, sizeof why)) == -EINPROGRESS) {
        if (!current(r, word))
            return end(r, 1, err) ? -1 : -ESTALE;
        if (mr_now_ns() > until)
            return late(r, word, what, err);
        nanosleep(&pause, NULL);
    }
    if (!rc)
        return 0;
    if (end(r, 1, err))
        return -1;
    if (!current(r, word))
        return -ESTALE;
    return mr_err_set(err, r->eng->failure, "%s: %s of step %u: %s", r->env->me->name, what, mr_sw_step(word), why);
}

/* ---- the group -------------------------------------------------------------------------------------------------------------- */

/* The id of this epoch's group.  0, -ESTALE, or -1 with err. */
static int group_id(struct mr_reduce *r, uint64_t word, uint8_t id[MR_K_COMM_ID], struct mr_err *err)
{
    const struct timespec pause = {.tv_nsec = POLL_NS};
    uint64_t want = mr_sw_cepoch(word) + 1u, until = mr_now_ns() + DEADLINE_NS;
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
    while (mr_ld(&v.hdr->comm_epoch) != want) {
        if (!current(r, word))
            return -ESTALE;
        if (mr_now_ns() > until)
            return late(r, word, "the making of the group", err);
        nanosleep(&pause, NULL);
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
    r->comm = mr_k_comm_begin(r->eng->k, id, (int)r->env->rank, (int)r->env->hdr->n_drafters, why, sizeof why);
    if (!r->comm)
        return current(r, word) ? mr_err_set(err, MR_EXIT_ENV, "%s: %s", r->env->me->name, why) : -ESTALE;
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
    int rc = 0;

    if (r->wire)
        rc = op->f32_to_act(r->eng->k, r->wire, v->acc, v->P) || op->sync(r->eng->k) ? r->eng->failure : 0;
    if (!rc && mr_k_comm_sum(r->comm, r->wire ? r->wire : v->acc, r->wire ? r->wire : (void *)v->reduced, v->P, r->wire ? MR_K_BF16 : MR_K_F32, why,
                             sizeof why))
        rc = r->eng->failure;
    if (rc)
        return mr_err_set(err, rc, "%s: the sum of step %u: %s", r->env->me->name, mr_sw_step(word), why);
    MR_POINT("reduce.issued");
    rc = await(r, word, "the sum", err);
    if (!rc && r->wire && (op->act_to_f32(r->eng->k, v->reduced, r->wire, v->P) || op->sync(r->eng->k)))
        rc = mr_err_set(err, r->eng->failure, "%s: the sum of step %u could not be converted", r->env->me->name, mr_sw_step(word));
    return rc;
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
    r->sum = sum_nccl;
    r->destroy = destroy;
    if (t->train.bf16_wire)
        r->wire = r->eng->k->op->alloc(r->eng->k, r->mine->P * 2);
    if (t->train.bf16_wire && !r->wire)
        return mr_err_set(err, MR_EXIT_ENV, "%s: no %llu bytes of device memory for gradients in bf16", r->env->me->name,
                          (unsigned long long)r->mine->P * 2);
    return 0;
}
