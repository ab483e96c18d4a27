/* Places: the M seats of a step (see step.h).
 *
 * The buckets of the places of step s are those of group s of the plan, so each step has the plan's mix whoever fills it.  A place word
 * names its step; a word of an earlier step reads as OPEN, so nobody resets places and nobody can die half-way through a reset.  A live
 * drafter is never behind the step word (its applied bit is needed to move it), so a word of a LATER step is never met by a place's
 * taker; it would be refused.
 *
 * A place is taken before the item and given back when the ring turns out empty: that way nobody holds an item without a place, which
 * could deadlock (test/model/slabs.pml has the trace as a mutant).
 */
#include <errno.h>

#include "base/point.h"
#include "ipc/ipc_pvt.h"
#include "ipc/item.h"
#include "ipc/ring.h"
#include "ipc/step.h"

static unsigned bucket_at(const struct mr_seg *s, const struct mr_plan_view *v, unsigned step, unsigned k)
{
    unsigned i = mr_step_first_pos(s, step) + k - s->epochs[mr_epoch_of_step(s, step)].first_pos, b;

    if (i >= s->hdr->plan_entries_max)
        return 0;
    b = v->entry[i].bucket;
    return b < s->hdr->n_buckets ? b : 0;
}

unsigned mr_place_bucket(const struct mr_seg *s, unsigned step, unsigned k)
{
    struct mr_plan_view v;

    return mr_plan_of_step(s, step, &v) ? bucket_at(s, &v, step, k) : 0;
}

static enum mr_place_state state_in(uint64_t w, unsigned step)
{
    return mr_pw_step(w) == step ? (enum mr_place_state)mr_pw_state(w) : MR_PLACE_OPEN;
}

enum mr_place_state mr_place_state(const struct mr_seg *s, unsigned step, unsigned k)
{
    return state_in(mr_ld(&s->places[k].word), step);   /* E5, acquire end: DONE -> record and accumulator may be read */
}

int mr_place_take(const struct mr_seg *s, unsigned step, unsigned k, unsigned slot, unsigned inc)
{
    uint64_t w = mr_ld(&s->places[k].word);

    if (state_in(w, step) != MR_PLACE_OPEN || mr_pw_step(w) > step)
        return -EAGAIN;
    MR_POINT("ipc.place.take");
    if (!mr_cas(&s->places[k].word, w, mr_w_place(MR_PLACE_TAKEN, step, slot, inc)))
        return -EAGAIN;
    MR_POINT("ipc.place.taken");
    return 0;
}

/* TAKEN(me) -> `state`, drafters woken: a place opened, or perhaps the last one is done. */
static int leave(const struct mr_seg *s, unsigned step, unsigned k, unsigned slot, unsigned inc, enum mr_place_state state)
{
    if (!mr_cas(&s->places[k].word, mr_w_place(MR_PLACE_TAKEN, step, slot, inc), mr_w_place(state, step, slot, inc)))
        return -ESTALE;
    MR_POINT("ipc.place.left");
    mr_bump_kind(s, MR_DRAFTER);
    return 0;
}

int mr_place_give(const struct mr_seg *s, unsigned step, unsigned k, unsigned slot, unsigned inc)
{
    MR_POINT("ipc.place.give");
    return leave(s, step, k, slot, inc, MR_PLACE_OPEN);
}

int mr_place_done(const struct mr_seg *s, unsigned step, unsigned k, unsigned slot, unsigned inc)
{
    MR_POINT("ipc.place.done");
    /* E5, release end: the record is written and the accumulator holds the item (E2).  The bump also orders two drafters that finish the
     * last two places at the same time: the second one to bump sees both. */
    return leave(s, step, k, slot, inc, MR_PLACE_DONE);
}

/* ---- choosing ------------------------------------------------------------------------------------------------------------ */

struct chooser {
    const struct mr_seg *s;
    struct mr_plan_view plan;
    unsigned step, epoch, m;
    unsigned open[MR_MAX_BUCKETS];       /* open places by bucket; 0 also: tried, nothing there */
};

/* Number of open places; the plan must be readable. */
static unsigned count_open(struct chooser *c)
{
    unsigned n = 0;

    for (unsigned k = 0; k < c->m; k++) {
        if (mr_place_state(c->s, c->step, k) != MR_PLACE_OPEN)
            continue;
        c->open[bucket_at(c->s, &c->plan, c->step, k)]++;
        n++;
    }
    return n;
}

/* The bucket with the most open places among those with a ready item; ties go round robin, first after `last`.  -EAGAIN: none. */
static int choose(struct chooser *c, unsigned last)
{
    for (;;) {
        unsigned n = c->s->hdr->n_buckets, best = 0, most = 0;

        for (unsigned i = 1; i <= n; i++) {
            unsigned b = (last + i) % n;

            if (c->open[b] > most) {
                most = c->open[b];
                best = b;
            }
        }
        if (!most)
            return -EAGAIN;
        if (mr_ring_peek(c->s, mr_ring_ready(best, c->epoch)))
            return (int)best;
        c->open[best] = 0;
    }
}

static int take_in_bucket(struct chooser *c, unsigned bucket, unsigned slot, unsigned inc)
{
    for (unsigned k = 0; k < c->m; k++)
        if (bucket_at(c->s, &c->plan, c->step, k) == bucket && !mr_place_take(c->s, c->step, k, slot, inc))
            return (int)k;
    return -EAGAIN;
}

int mr_place_claim(const struct mr_seg *s, unsigned step, unsigned slot, unsigned inc, unsigned *rr, unsigned *place, uint64_t *word)
{
    struct chooser c = {.s = s, .step = step, .epoch = mr_epoch_of_step(s, step), .m = mr_step_places(s, step)};
    int bucket;

    if (!c.m)
        return -ENOENT;
    if (!mr_plan_of_step(s, step, &c.plan))
        return -EAGAIN;
    if (!count_open(&c))
        return -ENOENT;
    while ((bucket = choose(&c, *rr)) >= 0) {
        int k = take_in_bucket(&c, (unsigned)bucket, slot, inc), idx;

        if (k >= 0) {
            idx = mr_item_draft(s, (unsigned)bucket, c.epoch, slot, inc, word);
            if (idx >= 0) {
                *rr = (unsigned)bucket;
                *place = (unsigned)k;
                return idx;
            }
            mr_place_give(s, step, (unsigned)k, slot, inc);
        }
        c.open[bucket] = 0;
    }
    return -EAGAIN;
}

/* Is the item of this position READY now?  Asked before the place is taken: giving a place back wakes the drafters, also the caller. */
static int ready_at(const struct mr_seg *s, unsigned pos)
{
    unsigned n = s->hdr->n_items;

    for (unsigned k = 0, i = pos % n; k < n; k++, i = i + 1 < n ? i + 1 : 0) {
        uint64_t w = mr_ld(&s->items[i].word);

        if (mr_w_phase(w) == MR_READY && mr_w_pos(w) == pos)
            return 1;
    }
    return 0;
}

int mr_place_claim_det(const struct mr_seg *s, unsigned step, unsigned rank, unsigned slot, unsigned inc, unsigned *place, uint64_t *word)
{
    unsigned m = mr_step_places(s, step), k = rank, pos;
    int idx;

    while (k < m && mr_place_state(s, step, k) != MR_PLACE_OPEN)
        k += s->hdr->n_drafters;
    if (k >= m)
        return -ENOENT;
    pos = mr_step_first_pos(s, step) + k;
    if (!ready_at(s, pos) || mr_place_take(s, step, k, slot, inc))
        return -EAGAIN;
    idx = mr_item_draft_pos(s, pos, slot, inc, word);
    if (idx < 0)
        mr_place_give(s, step, k, slot, inc);
    else
        *place = k;
    return idx;
}
