/* Reductions that read the peers' accumulators.
 *
 * `local` (one drafter): the sum is a copy.  `shm`, and `p2p` on GPUs: every drafter maps the arenas of its peers, in /dev/shm or over CUDA
 * IPC, also on another GPU, and sums the accumulators in rank order; D * P reads each, no message, nobody to wait for, no communicator that
 * a death could break.  A peer that dies meanwhile leaves its memory behind (its keeper's), and the sum is thrown away.  Edge E5: the
 * peers' places are DONE (release) and whoever turned the word to REDUCE has scanned them (acquire); zeroed accumulators are ordered by
 * the applied and joined bits.
 */
#include "actors/reduce_pvt.h"

#include <errno.h>

#include "base/point.h"

/* Every drafter's state.  0; -ESTALE: one is being replaced; -1 with err. */
static int open_views(struct mr_reduce *r, struct mr_drafter_view *v, struct mr_err *err)
{
    int n = (int)r->env->hdr->n_drafters;

    for (int i = 0; i < n; i++) {
        struct mr_err why = {0};

        if (!mr_drafter_view_open(&r->env->map, r->env->seg, (unsigned)i, r->mine->P, &v[i], &why))
            continue;
        if (r->mine->generation)                     /* its keeper has died just now; recovery moves the epoch on */
            return -ESTALE;
        return mr_err_set(err, MR_EXIT_FAILED, "%s: %s", r->env->me->name, why.msg);
    }
    return n;
}

static void sum_headers(struct mr_reduce *r, const struct mr_drafter_view *v, int n, uint64_t word)
{
    double weight = 0.0, loss = 0.0;

    for (int i = 0; i < n; i++) {
        weight += v[i].hdr->acc_weight;
        loss += v[i].hdr->acc_loss;
    }
    MR_POINT("reduce.summed");
    r->mine->hdr->reduced_weight = weight;
    r->mine->hdr->reduced_loss = loss;
    r->mine->hdr->reduced_step = mr_sw_step(word) + 1u;
}

static int sum_views(struct mr_reduce *r, const struct mr_drafter_view *v, int n, uint64_t word, struct mr_err *err)
{
    const float *acc[MR_MAX_DRAFTERS] = {0};
    int rc;

    for (int i = 0; i < n; i++)
        acc[i] = v[i].acc;
    rc = r->eng->sum(r->eng->self, acc, n, r->mine->reduced);
    if (rc)
        return mr_err_set(err, r->eng->failure, "%s: the sum of step %u failed (%d)", r->env->me->name, mr_sw_step(word), rc);
    sum_headers(r, v, n, word);
    return 0;
}

static int sum_local(struct mr_reduce *r, uint64_t word, struct mr_err *err)
{
    return sum_views(r, r->mine, 1, word, err);
}

static int sum_shm(struct mr_reduce *r, uint64_t word, struct mr_err *err)
{
    struct mr_drafter_view v[MR_MAX_DRAFTERS];
    int n = open_views(r, v, err);

    return n < 0 ? n : sum_views(r, v, n, word, err);
}

int mr_reduce_finish(struct mr_reduce *r, uint64_t word, struct mr_err *err)
{
    struct mr_drafter_view v[MR_MAX_DRAFTERS];
    int n = open_views(r, v, err);

    if (n >= 0)
        sum_headers(r, v, n, word);
    return n < 0 ? n : 0;
}

static void nothing(struct mr_reduce *r)
{
    (void)r;
}

int mr_reduce_create(struct mr_reduce *r, struct mr_env *env, const struct mr_drafter_view *mine, const struct mr_drafter_engine *eng,
                     struct mr_err *err)
{
    int local = env->hdr->n_drafters == 1;

    *r = (struct mr_reduce){.name = local ? "local" : eng->put ? "p2p" : "shm", .env = env, .mine = mine, .eng = eng,
                            .sum = local ? sum_local : sum_shm, .destroy = nothing};
    return env->topo->train.reduce == 2 && eng->put ? mr_reduce_nccl(r, err) : 0;
}
