/* Recovery: what a dead incarnation held goes back (see recover.h; the table is docs/design.md 4.4, drafters 6.2).
 *
 * Rules that must hold, each with what goes wrong without it:
 *   - a drafter's step word moves to REPAIR, or is found COMMITTED, by ONE CAS before anything is scanned (else an item is counted twice);
 *   - a target's item is QUEUED and PUSHED before its slab is freed (else the slab goes to a later item, and the run deadlocks);
 *   - an item becomes READY only if its arena generation is current (else a drafter reads what is not there);
 *   - joined flags are cleared only after the collective epoch has moved (else somebody sums a void accumulator).
 *
 * Every function finds its work by looking at the words, never from notes of its own, so it can be interrupted anywhere and run again.
 * Stores of the dead are visible: it was reaped, and the kernel's exit path orders them before that.
 */
#include "ipc/recover.h"

#include <errno.h>
#include <stdlib.h>

#include "base/point.h"
#include "ipc/arena.h"
#include "ipc/ipc_pvt.h"
#include "ipc/item.h"
#include "ipc/ring.h"
#include "ipc/slab.h"
#include "ipc/step.h"

/* ---- finding what somebody holds ----------------------------------------------------------------------------------------- */

/* Items in plan order, as position << 16 | index. */
struct list {
    unsigned n;
    uint64_t at[MR_MAX_ITEMS];
};

static int by_position(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return (x > y) - (x < y);
}

static void add(struct list *l, unsigned idx, uint64_t word)
{
    l->at[l->n++] = (uint64_t)mr_w_pos(word) << 16 | idx;
}

static void in_plan_order(struct list *l)
{
    qsort(l->at, l->n, sizeof l->at[0], by_position);
}

static unsigned index_of(const struct list *l, unsigned k)
{
    return (unsigned)l->at[k] & 0xffffu;
}

static int is_held(uint64_t w, enum mr_phase phase, unsigned slot, unsigned inc)
{
    return mr_w_phase(w) == phase && mr_w_slot(w) == slot && mr_w_inc(w) == inc;
}

/* Items in `phase` with this owner; nobody's: MR_NO_SLOT, 0. */
static void find(const struct mr_seg *s, struct list *l, enum mr_phase phase, unsigned slot, unsigned inc)
{
    l->n = 0;
    for (unsigned i = 0; i < s->hdr->n_items; i++) {
        uint64_t w = mr_ld(&s->items[i].word);

        if (is_held(w, phase, slot, inc))
            add(l, i, w);
    }
    in_plan_order(l);
}

/* ---- feeder -------------------------------------------------------------------------------------------------------------- */

struct mr_recovered mr_recover_feeder(const struct mr_seg *s, unsigned slot, unsigned inc)
{
    struct mr_recovered r = {0};
    uint64_t cursor = mr_ld(&s->hdr->cursor);
    struct list l;

    find(s, &l, MR_FILLING, slot, inc);
    for (unsigned k = 0; k < l.n; k++) {
        unsigned idx = index_of(&l, k);
        uint64_t w = mr_ld(&s->items[idx].word);

        MR_POINT("ipc.recover.feeder");
        /* The cursor moves past an item when its payload is complete, and only then. */
        if (mr_w_pos(w) < cursor)
            r.items += !mr_item_queue(s, idx, &w);
        else
            r.items += (unsigned)mr_cas(&s->items[idx].word, w, mr_w_item(MR_FREE, MR_NO_SLOT, 0, mr_w_pos(w), 0));
    }
    return r;
}

/* ---- target -------------------------------------------------------------------------------------------------------------- */

/* Slabs ITEM(i, pos) of the dead's items -> TARGET(dead): still taken, but no longer found through the item.  So an interrupted recovery
 * never has to guess whether a slab belongs to the item's old or new extraction. */
static void mark_slabs(const struct mr_seg *s, unsigned slot, unsigned inc)
{
    for (unsigned i = 0; i < s->hdr->n_slabs; i++) {
        uint64_t b = mr_ld(&s->slabs[i].word), w;
        unsigned idx = mr_w_slab_idx(b);

        if (mr_w_slab_kind(b) != MR_SLAB_ITEM || idx >= s->hdr->n_items)
            continue;
        w = mr_ld(&s->items[idx].word);
        if (is_held(w, MR_EXTRACTING, slot, inc) && mr_w_pos(w) == mr_w_slab_pos(b))
            mr_cas(&s->slabs[i].word, b, mr_w_slab_target(slot, inc));
        MR_POINT("ipc.recover.slab_marked");
    }
}

struct mr_recovered mr_recover_target(const struct mr_seg *s, unsigned slot, unsigned inc)
{
    struct mr_recovered r = {0};
    struct list l;

    mark_slabs(s, slot, inc);
    find(s, &l, MR_EXTRACTING, slot, inc);
    for (unsigned k = 0; k < l.n; k++) {
        uint64_t w = mr_ld(&s->items[index_of(&l, k)].word);

        MR_POINT("ipc.recover.target");
        r.items += !mr_item_retry(s, index_of(&l, k), &w);
    }
    MR_POINT("ipc.recover.target_items");
    for (unsigned i = 0; i < s->hdr->n_slabs; i++)
        r.slabs += !mr_slab_give(s, i, slot, inc);
    return r;
}

/* ---- drafter ------------------------------------------------------------------------------------------------------------- */

static void free_committed(const struct mr_seg *s, unsigned slot, unsigned inc, struct mr_recovered *r)
{
    struct list l;

    find(s, &l, MR_DRAFTING, slot, inc);
    MR_ASSERT(l.n == 0);           /* its place is TAKEN, so the step could not have been committed */
    find(s, &l, MR_ACCUMULATED, slot, inc);
    for (unsigned k = 0; k < l.n; k++) {
        uint64_t w = mr_ld(&s->items[index_of(&l, k)].word);

        MR_POINT("ipc.recover.committed");
        r->items += !mr_item_free(s, index_of(&l, k), &w);
    }
}

/* -> READY, or QUEUED when its hidden states are gone. */
static int give_back(const struct mr_seg *s, unsigned idx)
{
    uint64_t w = mr_ld(&s->items[idx].word);
    unsigned slab = s->items[idx].slab, pos = mr_w_pos(w);
    int rc;

    MR_POINT("ipc.recover.drafter");
    if (mr_arena_current(s, idx))
        return mr_item_ready(s, idx, &w);
    s->items[idx].slab = MR_NO_SLAB;               /* as in mr_item_requeue, should we be interrupted before the slab is free */
    rc = mr_item_retry(s, idx, &w);
    if (!rc)
        mr_slab_free(s, slab, idx, pos);
    return rc;
}

static void undo_uncommitted(const struct mr_seg *s, unsigned step, unsigned slot, unsigned inc, struct mr_recovered *r)
{
    static const enum mr_phase held[2] = {MR_DRAFTING, MR_ACCUMULATED};
    unsigned m = mr_step_places(s, step);
    struct list l;

    for (int p = 0; p < 2; p++) {
        find(s, &l, held[p], slot, inc);
        for (unsigned k = 0; k < l.n; k++)
            r->items += !give_back(s, index_of(&l, k));
    }
    for (unsigned k = 0; k < m; k++) {
        uint64_t w = mr_ld(&s->places[k].word);

        if (mr_place_state(s, step, k) == MR_PLACE_OPEN || mr_pw_slot(w) != slot || mr_pw_inc(w) != inc)
            continue;
        MR_POINT("ipc.recover.place");
        r->places += (unsigned)mr_cas(&s->places[k].word, w, mr_w_place(MR_PLACE_OPEN, step, slot, inc));
    }
}

struct mr_recovered mr_recover_drafter(const struct mr_seg *s, unsigned slot, unsigned inc)
{
    struct mr_recovered r = {0};
    uint64_t w = mr_step_repair_begin(s);          /* 1: committed or not, decided by one CAS */

    if (mr_ld(&s->hdr->fatal))
        return r;
    MR_POINT("ipc.recover.begun");
    if (s->actors[slot].incarnation == inc)
        mr_st(&s->actors[slot].joined, 0);
    if (mr_sw_phase(w) == MR_COMMITTED)            /* 2 */
        free_committed(s, slot, inc, &r);
    else if (mr_sw_phase(w) != MR_FINISHED)
        undo_uncommitted(s, mr_sw_step(w), slot, inc, &r);
    mr_step_repair_end(s);                         /* 3 */
    mr_ckpt_recover(s, slot, inc);
    return r;
}

/* ---- arenas, slabs --------------------------------------------------------------------------------------------------------- */

/* Payload of an item that we do not hold: good only if the word is still `w` afterwards (the CAS of the requeue says so). */
MR_RACY static struct mr_item peek_item(const struct mr_seg *s, unsigned idx)
{
    struct mr_item it = {.slab = s->items[idx].slab, .arena = s->items[idx].arena};

    return it;
}

/* READY -> QUEUED and pushed, then its slab -> FREE. */
static int take_back(const struct mr_seg *s, unsigned idx, uint64_t w, struct mr_recovered *r)
{
    unsigned slab = peek_item(s, idx).slab, pos = mr_w_pos(w);

    if (mr_w_phase(w) != MR_READY || mr_item_retry(s, idx, &w))
        return -EAGAIN;                            /* a drafter was faster */
    MR_POINT("ipc.recover.taken_back");
    r->items++;
    r->slabs += !mr_slab_free(s, slab, idx, pos);
    return 0;
}

struct mr_recovered mr_recover_arena(const struct mr_seg *s, unsigned arena)
{
    struct mr_recovered r = {0};
    struct list l;

    mr_st(&s->arenas[arena].generation, 0);        /* first: nobody may take a slab of it, or make an item READY there, from here on */
    MR_POINT("ipc.recover.arena");
    find(s, &l, MR_READY, MR_NO_SLOT, 0);
    for (unsigned k = 0; k < l.n; k++) {
        unsigned idx = index_of(&l, k);
        uint64_t w = mr_ld(&s->items[idx].word);

        if (peek_item(s, idx).arena == arena)
            take_back(s, idx, w, &r);
    }
    r.slabs += mr_recover_slabs(s);
    return r;
}

/* Is ITEM(idx, pos) in this slab left over?  The item's own slab field says which one is its: written before a slab becomes ITEM, cleared
 * before an item that leaves its slab behind is queued again.  It counts only while the word stands still. */
static int is_orphan(const struct mr_seg *s, unsigned slab, uint64_t b)
{
    unsigned idx = mr_w_slab_idx(b), phase, own;
    uint64_t w;

    if (mr_w_slab_kind(b) != MR_SLAB_ITEM || idx >= s->hdr->n_items)
        return 0;
    do {
        w = mr_ld(&s->items[idx].word);
        own = peek_item(s, idx).slab;
    } while (mr_ld(&s->items[idx].word) != w);     /* others moved it on: look again, there may be no later sweep */
    phase = mr_w_phase(w);
    if (mr_w_pos(w) != mr_w_slab_pos(b))
        return 1;
    return own != slab || (phase != MR_EXTRACTING && phase != MR_READY && phase != MR_DRAFTING && phase != MR_ACCUMULATED);
}

unsigned mr_recover_slabs(const struct mr_seg *s)
{
    unsigned n = 0;

    for (unsigned i = 0; i < s->hdr->n_slabs; i++) {
        uint64_t b = mr_ld(&s->slabs[i].word);

        if (is_orphan(s, i, b))
            n += !mr_slab_free(s, i, mr_w_slab_idx(b), mr_w_slab_pos(b));
    }
    return n;
}

/* ---- rings (R3) ------------------------------------------------------------------------------------------------------------ */

/* Marks the items that have a cell for the publication in word[]. */
static void mark_cells(const struct mr_seg *s, unsigned ring, const uint64_t *word, uint8_t *has)
{
    struct mr_ring_walk k = mr_ring_walk(s, ring);
    uint64_t cell;

    while (mr_ring_step(&k, &cell)) {
        unsigned idx = mr_c_idx(cell);

        if (idx < s->hdr->n_items && mr_w_ticket(word[idx]) == mr_c_ticket(cell) && mr_w_phase(word[idx]) == k.want)
            has[idx] = 1;
    }
}

unsigned mr_recover_rings(const struct mr_seg *s)
{
    uint64_t word[MR_MAX_ITEMS];
    uint8_t has[MR_MAX_ITEMS];
    struct list l;
    unsigned n = 0;

    l.n = 0;
    /* Before the scan: a hint dropped during it sets the flag again.  Not a store: that one could take effect after the scan has read an
     * old item word, and wipe out the flag that the item's pusher has set meanwhile.  What a swap wipes out, it has acquired. */
    mr_swap(&s->hdr->sweep, 0u);
    mr_recover_slabs(s);
    for (unsigned i = 0; i < s->hdr->n_items; i++) {
        word[i] = mr_ld(&s->items[i].word);        /* words before cells: a cell written since can only make us push too little, */
        has[i] = 0;
    }
    for (unsigned i = 0; i < mr_ring_count(s); i++)
        mark_cells(s, i, word, has);               /* and its pusher lives; a cell passed since means that the word moved on */
    for (unsigned i = 0; i < s->hdr->n_items; i++)
        if (!has[i] && (mr_w_phase(word[i]) == MR_QUEUED || mr_w_phase(word[i]) == MR_READY))
            add(&l, i, word[i]);
    in_plan_order(&l);
    for (unsigned k = 0; k < l.n; k++) {
        unsigned idx = index_of(&l, k), ring = mr_item_ring(s, idx, word[idx]);

        if (mr_ld(&s->items[idx].word) != word[idx])
            continue;
        MR_POINT("ipc.recover.push");
        n += !mr_ring_push(s, ring, idx, word[idx]);
    }
    if (n) {
        mr_bump_kind(s, MR_TARGET);
        mr_bump_kind(s, MR_DRAFTER);
    }
    return n;
}

/* ---- all of it --------------------------------------------------------------------------------------------------------------- */

static void sum(struct mr_recovered *a, struct mr_recovered b)
{
    a->items += b.items;
    a->slabs += b.slabs;
    a->places += b.places;
}

/* Everything on the device of this keeper.  (Of slabs and weights the row's owner is the keeper; of drafter state, the drafter.) */
static struct mr_recovered recover_keeper(const struct mr_seg *s, unsigned index)
{
    struct mr_recovered r = {0};
    unsigned device = UINT32_MAX;

    for (unsigned i = 0; i < s->hdr->n_arenas; i++)
        if (s->arenas[i].use != MR_ARENA_DRAFTER && s->arenas[i].owner == index && s->arenas[i].export_kind != MR_EXPORT_SHM)
            device = s->arenas[i].device;
    for (unsigned i = 0; i < s->hdr->n_arenas; i++)
        if (s->arenas[i].device == device && s->arenas[i].export_kind != MR_EXPORT_SHM)
            sum(&r, mr_recover_arena(s, i));
    return r;
}

struct mr_recovered mr_recover(const struct mr_seg *s, unsigned slot, unsigned inc)
{
    struct mr_actor_row *row = &s->actors[slot];
    struct mr_recovered r = {0};

    switch (row->kind) {
    case MR_FEEDER:
        r = mr_recover_feeder(s, slot, inc);
        break;
    case MR_TARGET:
        r = mr_recover_target(s, slot, inc);
        break;
    case MR_DRAFTER:
        r = mr_recover_drafter(s, slot, inc);
        break;
    case MR_KEEPER:
        r = recover_keeper(s, row->index);
        break;
    default:
        break;
    }
    mr_arena_recover_loader(s, slot, inc);
    mr_st_relaxed(&row->wait_reason, (uint32_t)MR_WAIT_NONE);
    mr_st_relaxed(&row->wait_since_ns, (uint64_t)0);
    mr_st_relaxed(&row->computing, 0u);
    mr_recover_rings(s);
    mr_evc_bump_all(s);
    return r;
}
