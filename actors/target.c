/* target: input ring -> forward -> slab -> ready ring.
 *
 * The order is load-bearing (docs/design.md section 4.3): slab FREE -> TARGET(me), THEN an item, retry ring before input ring; forward;
 * slab TARGET(me) -> ITEM(..), THEN item READY.  The other orders deadlock, or let a dead target's slab be handed out twice.  A target
 * without an item keeps its slab: it will need one for the next item anyway.
 *
 * A drain leaves between items, so nothing but the slab has to go back.
 */
#include <errno.h>

#include "actors/actors.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/point.h"
#include "ipc/atomic.h"
#include "ipc/item.h"
#include "ipc/slab.h"

struct target {
    struct mr_env *env;
    struct mr_target_engine eng;
    unsigned device;
    int slab;                    /* -1 = none in hand */
};

/* Forward of the item in hand into the slab in hand, then both are handed on. */
static int extract(struct target *t, unsigned idx, uint64_t word)
{
    struct mr_env *e = t->env;
    const struct mr_slab *slab = &e->seg->slabs[t->slab];
    struct mr_batch b = mr_env_batch(e, idx, word);
    struct mr_err err = {0};
    uint64_t t0 = mr_now_ns();
    char *base = mr_arena_base(&e->map, e->seg, slab->arena, 0, &err);
    uint64_t generation;
    int rc;

    e->seg->items[idx].extractions++;
    if (!base || t->eng.forward(t->eng.self, &b, base + slab->offset, &err)) {
        mr_err_prefix(&err, "microbatch %u, slab %d", b.pos, t->slab);
        return mr_env_fail(e, &err);
    }
    MR_POINT("target.forward.done");
    generation = e->map.at[slab->arena].generation;
    rc = mr_slab_assign(e->seg, (unsigned)t->slab, e->slot, e->inc, idx, b.pos);
    if (!rc && e->seg->items[idx].generation != generation)
        rc = -ESTALE;                                /* the keeper was replaced meanwhile: we wrote into memory that is no more */
    if (rc)
        return mr_env_lost(e, "slab to item", b.pos, rc);
    t->slab = -1;
    MR_POINT("target.slab.assigned");
    rc = mr_item_ready(e->seg, idx, &word);          /* edge E1: release */
    if (rc)
        return mr_env_lost(e, "EXTRACTING to READY", b.pos, rc);
    MR_POINT("target.item.ready");
    mr_env_worked(e, t0, 1, (uint64_t)b.n_tokens, 0);
    return MR_GO_ON;
}

static int turn(struct target *t)
{
    struct mr_env *e = t->env;
    uint32_t seq = mr_evc_read(e->evc);
    int rc = mr_env_check(e, 1);
    uint64_t word;

    if (rc != MR_GO_ON)
        return rc;
    if (t->slab < 0) {
        t->slab = mr_slab_take(e->seg, t->device, e->slot, e->inc);
        if (t->slab < 0) {
            mr_env_wait(e, seq, MR_WAIT_SLAB);
            return MR_GO_ON;
        }
        MR_POINT("target.slab.taken");
    }
    rc = mr_item_extract(e->seg, e->slot, e->inc, &word);
    if (rc < 0) {
        mr_env_wait(e, seq, MR_WAIT_INPUT);
        return MR_GO_ON;
    }
    MR_POINT("target.item.claimed");
    mr_env_claimed(e);
    return extract(t, (unsigned)rc, word);
}

int mr_actor_target(struct mr_env *e)
{
    struct target t = {.env = e, .device = e->topo->actor[e->slot].device_index, .slab = -1};
    struct mr_err err = {0};
    int rc;

    if (mr_target_engine_create(&t.eng, e->topo, e->checked, e->slot, &err))
        return mr_env_fail(e, &err);
    mr_env_running(e);
    do
        rc = turn(&t);
    while (rc == MR_GO_ON);
    if (rc == MR_EXIT_OK && t.slab >= 0)         /* after an error an item may be in hand: recovery must queue it before the slab is free */
        mr_slab_give(e->seg, (unsigned)t.slab, e->slot, e->inc);
    t.eng.destroy(t.eng.self);
    return mr_env_leave(e, rc);
}
