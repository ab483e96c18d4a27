/* The state of a drafter: mapping it, making it at the start of a run, and getting it back after a keeper's death.
 *
 * On the cpu it lies in /dev/shm and is never lost.  On a GPU it is its keeper's, and the header, which is in /dev/shm, says of which
 * generation of that memory it speaks: a header of another generation means that the state went down with a keeper.  It then comes from a
 * peer, whose state of the current step is the same bit for bit (docs/design.md section 4.4).  That one holds still: state[s mod 2] is
 * overwritten only when step s + 1 is applied, and neither the step in COLLECT nor the committed one can be left without us.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "actors/drafter_pvt.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/point.h"
#include "data/safetensors.h"
#include "ipc/atomic.h"
#include "ipc/step.h"

#define OPEN_PATIENCE_NS 10000000000u      /* a handle that cannot be opened: its keeper is dead, and the supervisor replaces it */
#define KEEPER_PATIENCE_NS 300000000000u

/* ---- mapping ---------------------------------------------------------------------------------------------------------------- */

static int registered(const struct mr_seg *s, unsigned rank)
{
    int arena = mr_arena_of_drafter(s, rank);

    return arena < 0 || mr_ld(&s->arenas[arena].generation) != 0;
}

/* An end that was not our doing: -1 with err, or without it when the run is over. */
static int leave(int rc, struct mr_err *err)
{
    return rc ? mr_err_set(err, rc, "the run is ending") : -1;
}

int mr_drafter_map(struct mr_drafter *d, struct mr_err *err)
{
    struct mr_env *e = d->env;
    uint64_t P = e->hdr->param_count, since = mr_now_ns(), failing_since = since;

    if (e->checked->layout.P != P)
        return mr_err_set(err, MR_EXIT_FAILED, "%s: the drafter of this topology has %llu parameters, the running segment is for %llu",
                          e->me->name, (unsigned long long)e->checked->layout.P, (unsigned long long)P);
    for (;;) {
        uint32_t seq = mr_evc_read(e->evc);
        int rc = mr_env_check(e, 0), there = registered(e->seg, e->rank);
        uint64_t now = mr_now_ns();

        if (rc != MR_GO_ON)
            return leave(rc, err);
        if (there && !mr_drafter_view_open(&e->map, e->seg, e->rank, P, &d->v, err))
            return 0;
        if (!d->eng.put || now - (there ? failing_since : since) > (there ? OPEN_PATIENCE_NS : KEEPER_PATIENCE_NS))
            return err->code ? -1 : mr_err_set(err, MR_EXIT_ENV, "%s: its keeper has not made memory for the state", e->me->name);
        if (!there)
            failing_since = now;
        *err = (struct mr_err){0};
        mr_env_wait(e, seq, MR_WAIT_ARENA);
    }
}

/* ---- the state a run starts from -------------------------------------------------------------------------------------------- */

/* The state of step `first` from its checkpoint, into state[k].  `to`: how, when that is not host memory. */
static int load_resumed(struct mr_drafter *d, unsigned first, unsigned k, const struct mr_st_sink *to, struct mr_err *err)
{
    char path[MR_PATH + 128];
    uint64_t step = 0;

    snprintf(path, sizeof(path), "%s/checkpoints/step-%u/trainer.safetensors", d->env->topo->run.dir, first);
    if (mr_trainer_load_to(&d->env->checked->layout, d->v.param[k], d->v.m[k], d->v.v[k], to, &step, path, err))
        return -1;
    if (step != first)
        return mr_err_set(err, MR_EXIT_CONFIG, "%s: it says step %llu, but the run resumes at step %u; the directory was renamed or mixed up",
                          path, (unsigned long long)step, first);
    return 0;
}

static int make_first(struct mr_drafter *d, unsigned k, const struct mr_st_sink *to, struct mr_err *err)
{
    static const char from[] = "checkpoint:";
    const struct mr_env *e = d->env;
    const struct mr_dlayout *l = &e->checked->layout;
    const char *init = e->topo->drafter.init;
    char path[MR_PATH + 128];

    if (e->hdr->first_step)
        return load_resumed(d, e->hdr->first_step, k, to, err);
    if (e->checked->synthetic)
        return 0;                                /* zeros: the final parameters then are what was added */
    if (!strncmp(init, from, sizeof(from) - 1)) {
        snprintf(path, sizeof(path), "%s/model.safetensors", init + sizeof(from) - 1);
        return mr_drafter_weights_load_to(l, d->v.param[k], to, path, err);
    }
    if (to)
        return mr_drafter_init_to(l, d->v.param[k], e->topo->run.seed, e->topo->drafter.init_std, to, err);
    mr_drafter_init(l, d->v.param[k], e->topo->run.seed, e->topo->drafter.init_std);
    return 0;
}

/* Zeros come from the device itself: the moments of a first step, and the gaps between tensors. */
static int zero_state(struct mr_drafter *d, unsigned k)
{
    int rc = d->eng.zero(d->eng.self, d->v.param[k]);

    if (!rc)
        rc = d->eng.zero(d->eng.self, d->v.m[k]);
    return rc ? rc : d->eng.zero(d->eng.self, d->v.v[k]);
}

static int make_state(struct mr_drafter *d, struct mr_err *err)
{
    const struct mr_st_sink device = {d->eng.self, d->eng.put}, *to = d->eng.put ? &device : NULL;
    unsigned k = d->env->hdr->first_step & 1;

    d->v.hdr->first_state = d->env->hdr->first_step;
    if ((to && zero_state(d, k)) || make_first(d, k, to, err))
        return mr_err_set(err, d->eng.failure, "the state could not be copied to %s", d->env->me->device);
    return 0;
}

/* ---- from a peer ------------------------------------------------------------------------------------------------------------ */

static int copy(struct mr_drafter *d, float *dst, const float *src)
{
    return d->eng.sum(d->eng.self, &src, 1, dst);
}

/* State of step `step`, and the reduced gradient when it is committed. */
static int copy_state(struct mr_drafter *d, const struct mr_drafter_view *from, unsigned step, int committed)
{
    unsigned k = step & 1;
    int rc = copy(d, d->v.param[k], from->param[k]);

    d->v.hdr->first_state = step;
    if (!rc)
        rc = copy(d, d->v.m[k], from->m[k]);
    if (!rc)
        rc = copy(d, d->v.v[k], from->v[k]);
    if (rc || !committed)
        return rc;
    d->v.hdr->reduced_weight = from->hdr->reduced_weight;
    d->v.hdr->reduced_loss = from->hdr->reduced_loss;
    d->v.hdr->reduced_step = from->hdr->reduced_step;
    return copy(d, d->v.reduced, from->reduced);
}

/* 1 = copied, 0 = nobody has it, -1 with err. */
static int restore(struct mr_drafter *d, unsigned step, int committed, struct mr_err *err)
{
    struct mr_env *e = d->env;

    for (unsigned r = 0; r < e->hdr->n_drafters; r++) {
        struct mr_drafter_view v;
        struct mr_err unused = {0};

        if (r == e->rank || mr_drafter_view_open(&e->map, e->seg, r, d->v.P, &v, &unused) || !mr_drafter_view_valid(&v))
            continue;
        if (committed && v.hdr->reduced_step != step + 1u)
            continue;
        if (copy_state(d, &v, step, committed))
            return mr_err_set(err, d->eng.failure, "copying the state of drafter/%u failed", r);
        mr_info("state of step %u restored from drafter/%u", step, r);
        return 1;
    }
    return 0;
}

/* The state that this drafter must have now: made when the run has not got any further than its start, else a peer's. */
static int find_state(struct mr_drafter *d, struct mr_err *err)
{
    struct mr_env *e = d->env;

    for (;;) {
        uint32_t seq = mr_evc_read(e->evc);
        uint64_t w = mr_step_read(e->seg);
        int rc = mr_env_check(e, 0), committed = mr_sw_phase(w) == MR_COMMITTED;

        if (rc != MR_GO_ON)
            return leave(rc, err);
        if (mr_sw_step(w) == e->hdr->first_step && !committed)
            return make_state(d, err);
        if (!committed || !mr_drafter_applied(d, w)) {
            rc = restore(d, mr_sw_step(w), committed, err);
            if (rc)
                return rc < 0 ? -1 : 0;
            return mr_err_set(err, MR_EXIT_CONFIG, "the state of step %u went down with a keeper, and no peer has a copy of it; --resume goes on "
                                                   "from the last checkpoint", mr_sw_step(w));
        }
        mr_env_wait(e, seq, MR_WAIT_APPLY);      /* our bit is set: the peers' next state is soon the current one */
    }
}

/* Any incarnation may find the state half made by a dead one: it is made again. */
int mr_drafter_init_state(struct mr_drafter *d, struct mr_err *err)
{
    struct mr_drafter_arena *h = d->v.hdr;

    if (mr_drafter_view_valid(&d->v)) {
        if (h->magic == MR_DRAFTER_MAGIC && h->param_count == d->v.P)
            return 0;
        return mr_err_set(err, MR_EXIT_FAILED, "%s: its state arena holds something else (magic %llx, %llu parameters; wanted %llx, %llu)",
                          d->env->me->name, (unsigned long long)h->magic, (unsigned long long)h->param_count,
                          (unsigned long long)MR_DRAFTER_MAGIC, (unsigned long long)d->v.P);
    }
    mr_st(&h->initialised, 0);
    mr_st(&h->generation, d->v.generation);
    if (find_state(d, err))
        return -1;
    MR_POINT("drafter.state.made");
    h->magic = MR_DRAFTER_MAGIC;
    h->param_count = d->v.P;
    mr_st(&h->initialised, 1);
    MR_POINT("drafter.state.initialised");
    return 0;
}
