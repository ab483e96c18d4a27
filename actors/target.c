/* target: input ring -> forward -> slab -> ready ring.
 *
 * The order is load-bearing (docs/design.md section 4.3): slab FREE -> TARGET(me), THEN an item, retry ring before input ring; forward;
 * slab TARGET(me) -> ITEM(..), THEN item READY.  The other orders deadlock, or let a dead target's slab be handed out twice.  A target
 * without an item keeps its slab: it will need one for the next item anyway.
 *
 * With an engine that computes behind our back (GPU) two microbatches are in flight: the second one is claimed and begun before the first
 * one is waited for and published, so the device has work while the host does its part.  Nothing is ever waited for with a microbatch in
 * flight but that microbatch: when no slab or item is to be had, what is in flight is published first.
 *
 * Where drafters compute on the same GPU it is one microbatch at a time, and in turns with them (turns.h).
 *
 * A drain leaves between items, so nothing but the slab has to go back.
 */
#include <errno.h>
#include <unistd.h>

#include "actors/actors.h"
#include "actors/turns.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/point.h"
#include "ipc/atomic.h"
#include "ipc/item.h"
#include "ipc/slab.h"

enum { GIVEN_MS = 2 };           /* a wake-up takes less */

struct flight {                  /* a microbatch whose forward has begun */
    unsigned idx;
    uint64_t word, generation, t0_ns;
    struct mr_batch b;
    int slab;
};

struct target {
    struct mr_env *env;
    struct mr_target_engine eng;
    unsigned device;
    int slab;                    /* in hand, for the next item; -1 = none */
    struct flight flight[2];
    unsigned oldest, n, depth;   /* in flight now, and at most */
    uint64_t idle_ns;            /* when the engine was last known to be without our work */
};

/* Forward of the item in hand into the slab in hand: begun, or (engines without halves) done. */
static int begin(struct target *t, unsigned idx, uint64_t word)
{
    struct mr_env *e = t->env;
    const struct mr_slab *slab = &e->seg->slabs[t->slab];
    unsigned place = (t->oldest + t->n) % 2;
    struct flight *f = &t->flight[place];
    struct mr_err err = {0};
    char *base = mr_arena_base(&e->map, e->seg, slab->arena, 0, &err);
    int rc = -1;

    *f = (struct flight){.idx = idx, .word = word, .t0_ns = mr_now_ns(), .b = mr_env_batch(e, idx, word), .slab = t->slab,
                         .generation = e->map.at[slab->arena].generation};
    e->seg->items[idx].extractions++;
    if (mr_turns_matter(e))                          /* two in flight at a time would have no end that a drafter could wait for */
        mr_turns_begin(e);
    if (base && t->eng.begin)
        rc = t->eng.begin(t->eng.self, place, &f->b, base + slab->offset, &err);
    else if (base)
        rc = t->eng.forward(t->eng.self, &f->b, base + slab->offset, &err);
    if (rc) {
        mr_err_prefix(&err, "microbatch %u, slab %d", f->b.pos, t->slab);
        return mr_env_fail(e, &err);
    }
    MR_POINT("target.forward.begun");
    t->slab = -1;
    t->n++;
    return MR_GO_ON;
}

static void say_first(const struct target *t)
{
    const struct mr_actor_row *me = t->env->me;

    if (t->eng.begin && mr_ld_relaxed(&me->note) != t->env->inc)
        mr_info("first microbatch published %.0f ms after the start", (double)(mr_now_ns() - me->start_ns) * 1e-6);
    mr_st_relaxed(&t->env->me->note, (uint64_t)t->env->inc);
}

/* The oldest in flight: waited for, then slab and item are handed on. */
static int publish(struct target *t)
{
    struct mr_env *e = t->env;
    struct flight *f = &t->flight[t->oldest];
    uint64_t since = f->t0_ns > t->idle_ns ? f->t0_ns : t->idle_ns;
    struct mr_err err = {0};
    int rc;

    if (t->eng.begin && t->eng.finish(t->eng.self, t->oldest, &err)) {
        mr_err_prefix(&err, "microbatch %u, slab %d", f->b.pos, f->slab);
        return mr_env_fail(e, &err);
    }
    MR_POINT("target.forward.done");
    mr_turns_unit(e, mr_now_ns() - since);
    if (t->n == 1)
        mr_turns_end(e);                             /* before READY, which wakes the drafters */
    rc = mr_slab_assign(e->seg, (unsigned)f->slab, e->slot, e->inc, f->idx, f->b.pos);
    if (!rc && e->seg->items[f->idx].generation != f->generation)
        rc = -ESTALE;                                /* the keeper was replaced meanwhile: we wrote into memory that is no more */
    if (rc)
        return mr_env_lost(e, "slab to item", f->b.pos, rc);
    MR_POINT("target.slab.assigned");
    rc = mr_item_ready(e->seg, f->idx, &f->word);    /* edge E1: release */
    if (rc)
        return mr_env_lost(e, "EXTRACTING to READY", f->b.pos, rc);
    MR_POINT("target.item.ready");
    t->oldest = (t->oldest + 1) % 2;
    t->n--;
    mr_env_worked(e, since, 1, (uint64_t)f->b.n_tokens, 0);
    t->idle_ns = mr_now_ns();
    say_first(t);
    return MR_GO_ON;
}

/* Takes a slab, then an item, and begins.  -EAGAIN: *why is not to be had now. */
static int claim(struct target *t, enum mr_wait_reason *why)
{
    struct mr_env *e = t->env;
    uint64_t word;
    int idx;

    *why = MR_WAIT_SLAB;
    if (t->slab < 0) {
        t->slab = mr_slab_take(e->seg, t->device, e->slot, e->inc);
        if (t->slab < 0)
            return -EAGAIN;
        MR_POINT("target.slab.taken");
    }
    *why = MR_WAIT_INPUT;
    idx = mr_item_extract(e->seg, e->slot, e->inc, &word);
    if (idx < 0)
        return -EAGAIN;
    MR_POINT("target.item.claimed");
    mr_env_claimed(e);
    return begin(t, (unsigned)idx, word);
}

/* Whether to begin another forward now. */
static int wants(struct target *t, enum mr_wait_reason *why)
{
    struct mr_env *e = t->env;

    if (mr_turns_taken(e)) {
        *why = MR_WAIT_TURN;
        return 0;
    }
    return t->n < (mr_turns_matter(e) ? 1u : t->depth) && !mr_ld(&e->me->drain);
}

static int turn(struct target *t)
{
    struct mr_env *e = t->env;
    uint32_t seq = mr_evc_read(e->evc);
    enum mr_wait_reason why = MR_WAIT_INPUT;
    int rc = mr_env_check(e, t->n == 0);

    if (rc != MR_GO_ON)
        return rc;
    if (t->n == 0 && mr_turns_given(e)) {
        mr_evc_wait(e->seg, e->evc, seq, GIVEN_MS, e->me, MR_WAIT_TURN);
        return MR_GO_ON;
    }
    rc = wants(t, &why) ? claim(t, &why) : -EAGAIN;
    if (rc == MR_GO_ON && t->n < t->depth)
        return rc;
    if (rc != MR_GO_ON && rc != -EAGAIN)
        return rc;
    if (t->n)
        return publish(t);
    mr_env_wait(e, seq, why);
    return MR_GO_ON;
}

int mr_actor_target(struct mr_env *e)
{
    struct target t = {.env = e, .device = e->topo->actor[e->slot].device_index, .slab = -1};
    struct mr_err err = {0};
    int rc;

    if (mr_target_engine_open(&t.eng, e, &err))      /* without an error: the run was over before we had our weights */
        return err.code ? mr_env_fail(e, &err) : mr_env_leave(e, MR_EXIT_OK);
    t.depth = t.eng.begin ? 2 : 1;
    mr_env_running(e);
    do
        rc = turn(&t);
    while (rc == MR_GO_ON);
    if (rc == MR_EXIT_CUDA)
        _exit(rc);                                   /* a sticky error: every further call could only fail, or hang */
    if (rc == MR_EXIT_OK && t.slab >= 0)         /* after an error an item may be in hand: recovery must queue it before the slab is free */
        mr_slab_give(e->seg, (unsigned)t.slab, e->slot, e->inc);
    t.eng.destroy(t.eng.self);
    return mr_env_leave(e, rc);
}
