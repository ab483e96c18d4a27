/* See world.h. */
#include "test/weak/world.h"

#include <stdio.h>

struct world w;

static uintptr_t used;

static void *take(size_t n)
{
    void *p = mw_region + used;

    used = (used + n + 127) & ~(uintptr_t)127;
    if (used > MW_REGION)
        __builtin_trap();
    return p;
}

static void header(unsigned drafters, unsigned places, unsigned steps, unsigned cap)
{
    struct mr_shm_header *h = take(sizeof *h);

    *h = (struct mr_shm_header){.n_actors = ACTORS, .n_items = ITEMS, .n_slabs = SLABS, .n_arenas = ARENAS, .n_epochs = 1, .n_buckets = 1,
                                .n_targets = 2, .n_drafters = drafters, .n_places = places, .ring_cap = cap, .steps_total = steps,
                                .microbatches_total = steps * places, .plan_entries_max = steps * places, .token_budget = 32, .max_seqs = 1,
                                .ring_bytes = (sizeof(struct mr_ring) + 8 * cap + 127) & ~127u};
    w.s = (struct mr_seg){.hdr = h, .ctl = h, .writable = 1};
}

static void plan(unsigned entries)
{
    struct mr_plan_view v;

    w.s.plan = take(2 * (sizeof(struct mr_plan_hdr) + 24 * entries + 256));
    v = mr_plan_at(&w.s, 0);
    for (unsigned i = 0; i < entries; i++)
        v.entry[i] = (struct mr_plan_entry){.bucket = 0, .n_seqs = 1, .n_tokens = 1};
    v.hdr->n_entries = entries;
    v.hdr->epoch = 1;
}

void world_make(unsigned drafters, unsigned places, unsigned steps, unsigned cap)
{
    used = 0;
    header(drafters, places, steps, cap);
    w.s.actors = take(sizeof(struct mr_actor_row) * ACTORS);
    w.s.items = take(sizeof(struct mr_item) * ITEMS);
    w.s.hdr->off_rings = used;
    take(w.s.hdr->ring_bytes * mr_ring_count(&w.s));
    for (unsigned i = 0; i < mr_ring_count(&w.s); i++)
        mr_ring_init(mr_ring_at(&w.s, i), cap, i < MR_RING_READY ? MR_QUEUED : MR_READY);
    w.s.step = take(sizeof *w.s.step);
    w.s.places = take(sizeof(struct mr_place) * places);
    w.s.records = take(sizeof(struct mr_record) * 2 * places);
    w.s.slabs = take(sizeof(struct mr_slab) * SLABS);
    w.s.arenas = take(sizeof(struct mr_arena_row) * ARENAS);
    w.s.epochs = take(sizeof(struct mr_epoch) * 2);
    w.s.epochs[1] = (struct mr_epoch){.first_pos = steps * places, .first_step = steps};
    w.s.arenas[0].generation = w.s.arenas[0].last_generation = 1;
    for (unsigned i = 0; i < ACTORS; i++) {
        w.s.actors[i].kind = i == FEEDER ? MR_FEEDER : i <= TARGET1 ? MR_TARGET : i < DRAFTER0 + drafters ? MR_DRAFTER : MR_KEEPER;
        w.s.actors[i].index = i >= DRAFTER0 ? i - DRAFTER0 : 0;
        w.s.actors[i].incarnation = 1;
        w.s.actors[i].joined = i >= DRAFTER0 && i < DRAFTER0 + drafters;
    }
    plan(steps * places);
    w.pay = take(sizeof *w.pay);
}

uint64_t world_item(unsigned idx, enum mr_phase phase, unsigned slot, unsigned pos, unsigned pub)
{
    struct mr_item *it = &w.s.items[idx];

    it->word = mr_w_item(phase, slot, slot == MR_NO_SLOT ? 0 : 1, pos, pub);
    it->generation = 1;
    w.pay->tok[idx] = pos + 100;
    if (phase < MR_READY)
        return it->word;
    it->slab = idx;
    w.s.slabs[idx].word = mr_w_slab_item(idx, pos);
    w.pay->hidden[idx] = pos + 200;
    return it->word;
}

void world_ring_at(unsigned ring, uint64_t pos)
{
    struct mr_ring *r = mr_ring_at(&w.s, ring);

    r->head = r->tail = r->head_seen = pos;
    for (uint64_t i = pos; i < pos + r->mask + 1; i++)       /* what the lap before has left there */
        r->cell[i & r->mask] = mr_c_make((unsigned)(i >> r->shift) & 0xffffffu, 0xffffff, 0);
}

static int in(uintptr_t offset, const void *p, size_t n) { return offset - ((uintptr_t)p - (uintptr_t)mw_region) < n; }

static const char *in_ring(uintptr_t offset, unsigned ring)
{
    const struct mr_ring *r = mr_ring_at(&w.s, ring);

    if (in(offset, &r->tail, 8))
        return "ring tail";
    if (in(offset, &r->head_seen, 8))
        return "ring head_seen";
    return in(offset, &r->head, 8) ? "ring head" : in(offset, r->cell, 8 * w.s.hdr->ring_cap) ? "ring cell" : "ring constants";
}

static const char *in_header(uintptr_t offset)
{
    const struct mr_shm_header *h = w.s.hdr;

    if (in(offset, &h->cursor, 8))
        return "cursor";
    if (in(offset, &h->ledger_done, 8))
        return "ledger_done";
    if (in(offset, &h->ckpt, 8))
        return "checkpoint word";
    if (in(offset, &h->sweep, 4))
        return "sweep";
    return in(offset, h->evc, sizeof h->evc + sizeof h->evc_sup) ? "event count" : "header";
}

static const char *in_tables(uintptr_t offset)
{
    for (unsigned i = 0; i < ITEMS; i++)
        if (in(offset, &w.s.items[i], sizeof w.s.items[i]))
            return in(offset, &w.s.items[i].word, 8) ? "item word" : "item payload";
    for (unsigned i = 0; i < SLABS; i++)
        if (in(offset, &w.s.slabs[i], sizeof w.s.slabs[i]))
            return in(offset, &w.s.slabs[i].word, 8) ? "slab word" : "slab constants";
    for (unsigned i = 0; i < ACTORS; i++)
        if (in(offset, &w.s.actors[i].joined, 4))
            return "joined flag";
    if (in(offset, w.s.arenas, sizeof *w.s.arenas))
        return in(offset, &w.s.arenas[0].generation, 8) ? "arena generation" : "arena row";
    return NULL;
}

const char *mw_classify(uintptr_t offset)
{
    const char *name = in_tables(offset);
    const struct payload *p = w.pay;

    if (name)
        return name;
    if (in(offset, w.s.hdr, sizeof *w.s.hdr))
        return in_header(offset);
    for (unsigned i = 0; i < mr_ring_count(&w.s); i++)
        if (in(offset, mr_ring_at(&w.s, i), w.s.hdr->ring_bytes))
            return in_ring(offset, i);
    if (in(offset, w.s.step, sizeof *w.s.step))
        return "step word";
    if (in(offset, w.s.places, sizeof(struct mr_place) * w.s.hdr->n_places))
        return "place word";
    if (in(offset, w.s.records, 2 * sizeof(struct mr_record) * w.s.hdr->n_places))
        return "place record";
    if (in(offset, w.s.plan, 8))
        return "plan epoch";
    if (in(offset, p->tok, sizeof p->tok))
        return "tokens";
    if (in(offset, p->hidden, sizeof p->hidden))
        return "hidden states";
    if (in(offset, p->acc, sizeof p->acc))
        return "accumulator";
    return in(offset, p->flag, sizeof p->flag) ? "condition" : "other memory";
}
