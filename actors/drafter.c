/* drafter: the life of one incarnation.
 *
 * Parameters, moments, accumulator and reduced gradient are in an arena that outlives us (docs/design.md section 6.3).  So a new
 * incarnation loads nothing: it maps, applies the committed step that its predecessor may have left unapplied, zeroes the accumulator
 * (void since the death) and joins.  Only the first incarnation makes the parameters.
 *
 * A drain leaves only with an empty accumulator, between the applied bit and the next claim.
 */
#include "actors/drafter_pvt.h"

#include <unistd.h>

#include "actors/actors.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/point.h"
#include "ipc/step.h"

/* Where the time before the first claim went, beside what the engine says about its own part. */
static void tell_start(const struct mr_env *e, uint64_t engine_ns, uint64_t state_ns)
{
    uint64_t at[] = {e->me->start_ns, e->main_ns, e->init_ns, engine_ns, state_ns, mr_now_ns()};
    double ms[5];

    for (int i = 0; i < 5; i++)
        ms[i] = (double)(at[i + 1] - at[i]) * 1e-6;
    mr_info("joined %.0f ms after the start of this incarnation: program %.0f, topology %.0f, engine %.0f, state %.0f, zeroing %.0f",
            (double)(at[5] - at[0]) * 1e-6, ms[0], ms[1], ms[2], ms[3], ms[4]);
}

/* The engine first: mapping the state needs its device.  As mr_drafter_map. */
static int open_drafter(struct mr_drafter *d, uint64_t *engine_ns, struct mr_err *err)
{
    if (mr_drafter_engine_open(&d->eng, d->env, err))
        return -1;
    *engine_ns = mr_now_ns();
    if (mr_drafter_map(d, err))
        return -1;
    if (mr_reduce_create(&d->reduce, d->env, &d->v, &d->eng, err))
        return -1;
    return mr_drafter_init_state(d, err);
}

static void close_drafter(struct mr_drafter *d)
{
    if (d->reduce.destroy)
        d->reduce.destroy(&d->reduce);
    if (d->eng.destroy)
        d->eng.destroy(d->eng.self);
}

/* Before the first claim.  REDUCE needs all joined bits, so nobody sums over the accumulator while it is void. */
static int join(struct mr_drafter *d)
{
    struct mr_env *e = d->env;
    int rc;

    for (;;) {
        uint32_t seq = mr_evc_read(e->evc);
        uint64_t w = mr_step_read(e->seg);

        rc = mr_env_check(e, 0);
        if (rc != MR_GO_ON)
            return rc;
        if (mr_sw_phase(w) != MR_COMMITTED || mr_drafter_applied(d, w))
            break;
        rc = mr_drafter_commit(d, w, seq);        /* the reduced gradient outlived the one who summed it */
        if (rc != MR_GO_ON)
            return rc;
    }
    rc = mr_drafter_zero(d);
    if (rc != MR_GO_ON)
        return rc;
    MR_POINT("drafter.join.zeroed");
    mr_step_join(e->seg, e->slot);
    d->joined = 1;
    MR_POINT("drafter.joined");
    return MR_GO_ON;
}

/* HALT: like COLLECT of the step after the last. */
static int turn(struct mr_drafter *d)
{
    struct mr_env *e = d->env;
    uint32_t seq = mr_evc_read(e->evc);
    uint64_t w = mr_step_read(e->seg);
    unsigned phase = mr_sw_phase(w);
    int rc = mr_env_check(e, !d->holds && phase != MR_REDUCE && phase != MR_COMMITTED);

    if (rc == MR_GO_ON)
        rc = mr_drafter_ckpt(d, w);
    if (rc != MR_GO_ON)
        return rc;
    switch (phase) {
    case MR_COLLECT:
    case MR_REPAIR:
        return mr_drafter_collect(d, w, seq);
    case MR_REDUCE:
        return mr_drafter_reduce(d, w, seq);
    case MR_COMMITTED:
        return mr_drafter_commit(d, w, seq);
    default:
        mr_env_wait(e, seq, MR_WAIT_END);
        return MR_GO_ON;
    }
}

int mr_actor_drafter(struct mr_env *e)
{
    struct mr_drafter d = {.env = e};
    struct mr_err err = {0};
    uint64_t engine_ns, state_ns;
    int rc;

    if (open_drafter(&d, &engine_ns, &err)) {
        rc = err.code ? mr_env_fail(e, &err) : MR_EXIT_OK;
    } else {
        mr_env_running(e);
        state_ns = mr_now_ns();
        rc = join(&d);
        if (rc == MR_GO_ON && d.eng.k)
            tell_start(e, engine_ns, state_ns);
        while (rc == MR_GO_ON)
            rc = turn(&d);
    }
    if (rc == MR_EXIT_CUDA)
        _exit(rc);                                   /* a sticky error: every further call could only fail, or hang */
    if (mr_drafter_ckpt_join(&d) != MR_GO_ON && rc == MR_EXIT_OK)
        rc = MR_EXIT_FAILED;
    close_drafter(&d);
    return mr_env_leave(e, rc);
}
