/* The operations that are killed: for each, how a miniature run gets to where the victim performs it, and the call.
 *
 * The run: 2 targets (slots 1, 2), 2 drafters (3, 4), 3 places a step, 6 slabs, 10 microbatches in 4 steps.  When an operation begins, the
 * others hold things too: target 2 extracts an item, a drafter has one accumulated, another one drafting.
 */
#ifndef TEST_STEP_OPS_H
#define TEST_STEP_OPS_H

#include "test/test_ipc_run.h"

enum { T1 = 1, T2 = 2, D1 = 3, D2 = 4, DET = 1, WHOLE = 2 };

struct scene {
    struct mini *m;
    struct mr_seg *s;
    unsigned inc, idx, slab, place, step, ring, rr;
    uint64_t word, sw;
};

struct op {
    const char *name;
    unsigned slot;                       /* the victim */
    int flags;                           /* DET: deterministic run; WHOLE: a whole turn of an actor, for the full variant */
    void (*prep)(struct scene *);
    int (*act)(struct scene *);
    int want;                            /* of act; 1 = any index */
    void (*redo)(struct scene *);        /* recovery functions as victims: run again instead of mr_recover */
    unsigned absent;                     /* bit mask of slots that have no process until then */
};

/* ---- getting there ---------------------------------------------------------------------------------------------------------- */

#define MUST(cond) ((cond) ? (void)0 : (fprintf(stderr, "%s:%d: cannot set up: %s\n", __FILE__, __LINE__, #cond), exit(2)))

static void turn(struct scene *c, unsigned slot) { MUST(mini_turn(c->m, slot)); }

/* All do their turns, `who` (a bit mask) excepted, until `until` holds after one of them. */
static void go_on(struct scene *c, unsigned not_who, int (*until)(struct scene *))
{
    for (unsigned i = 0; i < 1000; i++) {
        unsigned slot = i % 6;

        if (slot == 5)
            supervisor_turn(c->m);
        else if (!(not_who >> slot & 1))
            mini_turn(c->m, slot);
        if (until(c))
            return;
    }
    MUST(!"reached");
}

static void base(struct scene *c, unsigned fed)
{
    turn(c, D1), turn(c, D2);                              /* zero, join */
    for (unsigned i = 0; i < fed; i++)
        turn(c, 0);
    for (unsigned i = 0; i < 6; i++)
        turn(c, T1);                                       /* three are READY */
    turn(c, T2);                                           /* EXTRACTING */
    turn(c, D1), turn(c, D1);                              /* ACCUMULATED, place DONE */
    turn(c, D2);                                           /* DRAFTING, place TAKEN */
    MUST(c->m->local[T2].held && c->m->local[D2].held && !c->m->local[D1].held);
}

/* Recovered, and its next incarnation is there. */
static void dies(struct scene *c, unsigned slot)
{
    mr_recover(c->s, slot, c->s->actors[slot].incarnation++);
    memset(&c->m->local[slot], 0, sizeof c->m->local[slot]);
}

static void p_base(struct scene *c) { base(c, 6); }

static unsigned phase_of(struct scene *c) { return mr_sw_phase(mr_step_read(c->s)); }
static unsigned step_of(struct scene *c) { return mr_sw_step(mr_step_read(c->s)); }

/* ---- feeder ------------------------------------------------------------------------------------------------------------------- */

static void p_filling(struct scene *c)
{
    int idx = mr_item_fill(c->s, 0, 1, (unsigned)c->s->hdr->cursor, &c->word);

    MUST(idx >= 0);
    c->idx = (unsigned)idx;
    c->s->items[idx].bucket = mr_w_pos(c->word) % 2;
    c->s->items[idx].epoch = 0;
    mr_tok_at(c->s, c->idx).ids[0] = (int32_t)mr_w_pos(c->word);
    mr_st(&c->s->hdr->cursor, (uint64_t)mr_w_pos(c->word) + 1);
}

static void p_filled(struct scene *c) { base(c, 6), p_filling(c); }

static void p_published(struct scene *c)
{
    uint64_t w = mr_w_item(MR_QUEUED, MR_NO_SLOT, 0, mr_w_pos(c->word), 1);

    MUST(mr_cas(&c->s->items[c->idx].word, c->word, w));
    c->word = w;
    c->ring = MR_RING_INPUT;
}

static void p_push(struct scene *c) { p_filled(c), p_published(c); }

static void p_push_lagging_tail(struct scene *c)
{
    p_push(c);
    mr_ring_at(c->s, MR_RING_INPUT)->tail--;
}

/* The ring is full of cells whose publication is over. */
static void fill_stale(struct scene *c, unsigned leave)
{
    struct mr_ring *r = mr_ring_at(c->s, MR_RING_INPUT);
    uint64_t w = mr_w_item(MR_QUEUED, MR_NO_SLOT, 0, 0, 1);

    while (r->tail - r->head < c->s->hdr->ring_cap - leave)
        MUST(mr_ring_push(c->s, MR_RING_INPUT, 0, w) == 0);
}

static void p_push_full_stale(struct scene *c) { base(c, 4), fill_stale(c, 0), p_filling(c), p_published(c); }
static void p_push_full(struct scene *c) { base(c, 6), fill_stale(c, 0), p_filling(c), p_published(c); }

static int a_fill(struct scene *c) { return mr_item_fill(c->s, 0, c->inc, (unsigned)c->s->hdr->cursor, &c->word); }
static int a_queue(struct scene *c) { return mr_item_queue(c->s, c->idx, &c->word); }
static int a_push(struct scene *c) { return mr_ring_push(c->s, c->ring, c->idx, c->word); }

static void p_sleeper(struct scene *c) { base(c, 6), c->s->hdr->evc[MR_TARGET].seq |= 1; }
static int a_bump(struct scene *c) { return mr_evc_bump(&c->s->hdr->evc[MR_TARGET]), 0; }

/* ---- target ------------------------------------------------------------------------------------------------------------------- */

static void take_slab(struct scene *c)
{
    int slab = mr_slab_take(c->s, 0, T1, 1);

    MUST(slab >= 0);
    c->slab = (unsigned)slab;
    c->ring = MR_RING_INPUT;
}

static void p_slab(struct scene *c) { base(c, 6), take_slab(c); }
static void p_lagging_head(struct scene *c) { p_slab(c), mr_ring_at(c->s, MR_RING_INPUT)->head--; }
static void p_stale_head(struct scene *c) { base(c, 4), fill_stale(c, c->s->hdr->ring_cap - 3), turn(c, 0), take_slab(c); }

static void p_retry(struct scene *c)
{
    base(c, 6), dies(c, T2);
    take_slab(c);
}

static void p_extracting(struct scene *c)
{
    int idx;

    p_slab(c);
    idx = mr_item_extract(c->s, T1, 1, &c->word);
    MUST(idx >= 0);
    c->idx = (unsigned)idx;
    *(uint32_t *)(c->m->slab_base + c->s->slabs[c->slab].offset) = mr_w_pos(c->word) + 1;
}

static void p_assigned(struct scene *c)
{
    p_extracting(c);
    MUST(mr_slab_assign(c->s, c->slab, T1, 1, c->idx, mr_w_pos(c->word)) == 0);
}

/* As many slabs as places, all in use: the two other places of the step are done, the last one needs the victim's item. */
static void p_exact_slabs(struct scene *c)
{
    int idx;

    c->s->slabs[3].device = c->s->slabs[4].device = c->s->slabs[5].device = 9;     /* nobody writes there */
    turn(c, D1), turn(c, D2);
    for (unsigned i = 0; i < 6; i++)
        turn(c, 0);
    take_slab(c);
    idx = mr_item_extract(c->s, T1, 1, &c->word);
    MUST(idx >= 0 && mr_w_pos(c->word) == 0);
    c->idx = (unsigned)idx;
    *(uint32_t *)(c->m->slab_base + c->s->slabs[c->slab].offset) = 1;
    MUST(mr_slab_assign(c->s, c->slab, T1, 1, c->idx, 0) == 0);
    for (unsigned i = 0; i < 4; i++)
        turn(c, T2);
    turn(c, D1), turn(c, D1), turn(c, D2), turn(c, D2);
    MUST(rig_count(&c->m->r, MR_ACCUMULATED) == 2 && rig_free_slabs(&c->m->r) == 3);
}

static void p_push_ready(struct scene *c)
{
    uint64_t w;

    p_assigned(c);
    w = mr_w_item(MR_READY, MR_NO_SLOT, 0, mr_w_pos(c->word), mr_w_pub(c->word) + 1);
    MUST(mr_cas(&c->s->items[c->idx].word, c->word, w));
    c->word = w;
    c->ring = mr_ring_ready(c->s->items[c->idx].bucket, 0);
}

static int a_slab_take(struct scene *c) { return mr_slab_take(c->s, 0, T1, c->inc); }
static int a_slab_give(struct scene *c) { return mr_slab_give(c->s, c->slab, T1, c->inc); }
static int a_extract(struct scene *c) { return mr_item_extract(c->s, T1, c->inc, &c->word); }
static int a_assign(struct scene *c) { return mr_slab_assign(c->s, c->slab, T1, c->inc, c->idx, mr_w_pos(c->word)); }
static int a_ready(struct scene *c) { return mr_item_ready(c->s, c->idx, &c->word); }
static int a_claim(struct scene *c) { return mr_ring_claim(c->s, MR_RING_INPUT, MR_EXTRACTING, T1, c->inc, &c->word); }

/* ---- drafter ------------------------------------------------------------------------------------------------------------------ */

static void take_place(struct scene *c)
{
    for (c->place = 0; mr_place_take(c->s, 0, c->place, D1, 1); c->place++)
        MUST(c->place < 3);
}

static void p_place(struct scene *c) { base(c, 6), take_place(c); }

static void p_drafting(struct scene *c)
{
    struct local *l;

    base(c, 6), turn(c, D1);
    l = &c->m->local[D1];
    MUST(l->held);
    c->idx = l->idx, c->place = l->place, c->word = l->word, c->step = l->step;
    c->m->view[0].acc[mr_w_pos(c->word)] += 1;
}

static void p_accumulated(struct scene *c)
{
    p_drafting(c);
    MUST(mr_item_accumulated(c->s, c->idx, &c->word) == 0);
    *mr_record(c->s, 0, c->place) = (struct mr_record){.pos = mr_w_pos(c->word), .bucket = c->s->items[c->idx].bucket};
}

/* The arena is lost and registered again while drafter D2 reads it. */
static void p_gone(struct scene *c)
{
    base(c, 6);
    mr_recover_arena(c->s, 0);
    mr_arena_register(c->s, 0);
    c->idx = c->m->local[D2].idx, c->word = c->m->local[D2].word;
}

/* A keeper died: the other processes of its device, here the targets, are reaped and recovered first. */
static void p_keeper(struct scene *c) { base(c, 6), dies(c, T1), dies(c, T2); }
static void p_arena(struct scene *c) { p_keeper(c), mr_recover_arena(c->s, 0); }

static int a_place_take(struct scene *c)
{
    unsigned k = 0;

    while (mr_place_take(c->s, 0, k, D1, c->inc))
        if (++k == 3)
            return -1;
    return 0;
}
static int a_place_give(struct scene *c) { return mr_place_give(c->s, 0, c->place, D1, c->inc); }
static int a_place_done(struct scene *c) { return mr_place_done(c->s, 0, c->place, D1, c->inc); }
static int a_place_claim(struct scene *c) { return mr_place_claim(c->s, 0, D1, c->inc, &c->rr, &c->place, &c->word); }
static int a_draft(struct scene *c) { return mr_item_draft(c->s, mr_place_bucket(c->s, 0, c->place), 0, D1, c->inc, &c->word); }
static int a_accumulated(struct scene *c) { return mr_item_accumulated(c->s, c->idx, &c->word); }
static int a_requeue(struct scene *c) { return mr_item_requeue(c->s, c->idx, &c->word); }

/* Deterministic: D1 has position 0, D2 position 1; position 2 is D1's next. */
static int a_draft_pos(struct scene *c) { return mr_item_draft_pos(c->s, 2, D1, c->inc, &c->word); }
static int a_claim_det(struct scene *c) { return mr_place_claim_det(c->s, 0, 0, D1, c->inc, &c->place, &c->word); }

/* ---- the step word ------------------------------------------------------------------------------------------------------------- */

static void p_unjoined(struct scene *c)
{
    base(c, 6), dies(c, D2);
    drafter_zero(c->m, 1);
}

static int all_done(struct scene *c)
{
    for (unsigned k = 0; k < mr_step_places(c->s, 1); k++)
        if (mr_place_state(c->s, 1, k) != MR_PLACE_DONE)
            return 0;
    return mr_ld(&c->s->hdr->ledger_done) == 1;
}
static int both_summed(struct scene *c) { return step_of(c) == 1 && c->m->local[D1].summed && c->m->local[D2].summed; }
static int one_reduced(struct scene *c) { return step_of(c) == 1 && mr_sw_reduced(mr_step_read(c->s)) == 2 && c->m->local[D1].summed; }
static int committed(struct scene *c) { return step_of(c) == 1 && phase_of(c) == MR_COMMITTED; }
static int other_applied(struct scene *c) { return committed(c) && mr_sw_applied(mr_step_read(c->s)) == 2; }
static int second(struct scene *c) { return step_of(c) == 2 && phase_of(c) == MR_COLLECT; }
static int copying(struct scene *c) { return c->m->local[D1].copying == 2; }
static int writing(struct scene *c) { return c->m->local[D1].writing == 2; }
static int reducing(struct scene *c) { return step_of(c) == 1 && phase_of(c) == MR_REDUCE && !c->m->local[D1].summed; }

static void read_sw(struct scene *c) { c->sw = mr_step_read(c->s); }
static void p_all_done(struct scene *c) { go_on(c, 0, all_done), read_sw(c), MUST(phase_of(c) == MR_COLLECT); }
static void p_reducing(struct scene *c) { go_on(c, 0, reducing); }
static void p_summed(struct scene *c) { go_on(c, 0, both_summed), read_sw(c), MUST(mr_sw_reduced(c->sw) == 0); }
static void p_one_reduced(struct scene *c)
{
    go_on(c, 0, both_summed), read_sw(c);
    turn(c, D2);
    MUST(one_reduced(c));
}
static void p_committed(struct scene *c) { go_on(c, 0, committed), read_sw(c); }

static void apply_and_zero(struct scene *c)
{
    for (unsigned i = 0; i < c->m->total; i++)
        c->m->view[0].param[0][i] = c->m->view[0].param[1][i] + c->m->view[0].reduced[i];
    drafter_zero(c->m, 0);
}

static void p_applied_not_freed(struct scene *c)
{
    p_committed(c), apply_and_zero(c);
    for (c->idx = 0;; c->idx++) {
        MUST(c->idx < c->s->hdr->n_items);
        c->word = c->s->items[c->idx].word;
        if (mr_w_phase(c->word) == MR_ACCUMULATED && mr_w_slot(c->word) == D1)
            return;
    }
}
static void p_freed(struct scene *c) { p_committed(c), apply_and_zero(c), rig_free_own(&c->m->r, D1, 1); }
static void p_last_apply(struct scene *c) { p_committed(c), turn(c, D2), MUST(other_applied(c)); }
static void p_last_freed(struct scene *c) { p_last_apply(c), apply_and_zero(c), rig_free_own(&c->m->r, D1, 1); }
static void p_second(struct scene *c) { go_on(c, 0, second); }
static void p_copying(struct scene *c) { p_second(c), turn(c, D1), MUST(copying(c)); }
static void p_writing(struct scene *c) { p_copying(c), turn(c, D1), MUST(writing(c)); }

static int a_join(struct scene *c) { return mr_step_join(c->s, D2), 0; }
static int a_try_reduce(struct scene *c)
{
    enum mr_wait_reason why;

    return mr_step_try_reduce(c->s, c->sw, &why);
}
static int a_reduced(struct scene *c) { return mr_step_reduced(c->s, 0, c->sw); }
static int a_applied(struct scene *c) { return mr_step_applied(c->s, 0, c->sw); }
static int a_free(struct scene *c) { return mr_item_free(c->s, c->idx, &c->word); }
static int a_slab_free(struct scene *c) { return mr_slab_free(c->s, c->s->items[c->idx].slab, c->idx, mr_w_pos(c->word)); }
static int a_ckpt_claim(struct scene *c) { return mr_ckpt_claim(c->s, 2, D1, c->inc); }
static int a_ckpt_read(struct scene *c) { return mr_ckpt_read(c->s, 2, D1, c->inc); }
static int a_ckpt_done(struct scene *c) { return mr_ckpt_done(c->s, 2, D1, c->inc); }

/* ---- recovery functions that the supervisor is killed in and runs again --------------------------------------------------------- */

static int a_lose_arena(struct scene *c) { return mr_recover_arena(c->s, 0), 0; }
static void r_lose_arena(struct scene *c) { mr_recover_arena(c->s, 0), mr_recover_rings(c->s), mr_arena_register(c->s, 0); }
static int a_register(struct scene *c) { return mr_arena_register(c->s, 0), 0; }
static void r_register(struct scene *c) { mr_arena_register(c->s, 0), mr_recover_rings(c->s); }
static void p_unswept(struct scene *c) { p_gone(c), turn(c, D2); }
static int a_sweep(struct scene *c) { return mr_recover_rings(c->s), 0; }
static void r_sweep(struct scene *c) { mr_recover_rings(c->s); }

/* ---- whole turns ---------------------------------------------------------------------------------------------------------------- */

static void p_boot(struct scene *c) { c->m->current = 0; }
static void p_boot_committed(struct scene *c) { p_committed(c), dies(c, D1); }
static void p_turn_drafting(struct scene *c) { base(c, 6), turn(c, D1); }
static void p_turn_extracting(struct scene *c) { base(c, 6), turn(c, T1); }
static void p_turn_gone(struct scene *c) { p_gone(c); }
static int a_feeder(struct scene *c) { return mini_turn(c->m, 0); }
static int a_target(struct scene *c) { return mini_turn(c->m, T1); }
static int a_drafter(struct scene *c) { return mini_turn(c->m, D1); }
static int a_drafter2(struct scene *c) { return mini_turn(c->m, D2); }

static const struct op ops[] = {
    {"ring push", 0, 0, p_push, a_push, 0, NULL, 0},
    {"ring push, tail lags", 0, 0, p_push_lagging_tail, a_push, 0, NULL, 0},
    {"ring push, full of stale cells", 0, 0, p_push_full_stale, a_push, 0, NULL, 0},
    {"ring push, full of live cells", 0, 0, p_push_full, a_push, -ENOBUFS, NULL, 0},
    {"ring push, ready ring", T1, 0, p_push_ready, a_push, 0, NULL, 0},
    {"ring claim", T1, 0, p_slab, a_claim, 1, NULL, 0},
    {"ring claim, head lags", T1, 0, p_lagging_head, a_claim, 1, NULL, 0},
    {"ring claim, stale cells", T1, 0, p_stale_head, a_claim, 1, NULL, 0},
    {"item fill", 0, 0, p_base, a_fill, 1, NULL, 0},
    {"item queue", 0, 0, p_filled, a_queue, 0, NULL, 0},
    {"item extract, input ring", T1, 0, p_slab, a_extract, 1, NULL, 0},
    {"item extract, retry ring", T1, 0, p_retry, a_extract, 1, NULL, 0},
    {"item ready", T1, 0, p_assigned, a_ready, 0, NULL, 0},
    {"item ready, exact slabs", T1, 0, p_exact_slabs, a_ready, 0, NULL, 0},
    {"item draft", D1, 0, p_place, a_draft, 1, NULL, 0},
    {"item draft_pos", D1, DET, p_place, a_draft_pos, 1, NULL, 0},
    {"item accumulated", D1, 0, p_drafting, a_accumulated, 0, NULL, 0},
    {"item requeue", D2, 0, p_gone, a_requeue, 0, NULL, 0},
    {"item free", D1, 0, p_applied_not_freed, a_free, 0, NULL, 0},
    {"slab take", T1, 0, p_base, a_slab_take, 1, NULL, 0},
    {"slab give", T1, 0, p_slab, a_slab_give, 0, NULL, 0},
    {"slab assign", T1, 0, p_extracting, a_assign, 0, NULL, 0},
    {"slab free", D1, 0, p_applied_not_freed, a_slab_free, 0, NULL, 0},
    {"place take", D1, 0, p_base, a_place_take, 0, NULL, 0},
    {"place give", D1, 0, p_place, a_place_give, 0, NULL, 0},
    {"place done", D1, 0, p_accumulated, a_place_done, 0, NULL, 0},
    {"place claim", D1, 0, p_base, a_place_claim, 1, NULL, 0},
    {"place claim, deterministic", D1, DET, p_base, a_claim_det, 1, NULL, 0},
    {"step join", D2, 0, p_unjoined, a_join, 0, NULL, 0},
    {"step try_reduce", D1, 0, p_all_done, a_try_reduce, 0, NULL, 0},
    {"step reduced", D1, 0, p_summed, a_reduced, 0, NULL, 0},
    {"step reduced, the commit", D1, 0, p_one_reduced, a_reduced, 1, NULL, 0},
    {"step applied", D1, 0, p_freed, a_applied, 0, NULL, 0},
    {"step applied, the last", D1, 0, p_last_freed, a_applied, 1, NULL, 0},
    {"checkpoint claim", D1, 0, p_second, a_ckpt_claim, 0, NULL, 0},
    {"checkpoint read", D1, 0, p_copying, a_ckpt_read, 0, NULL, 0},
    {"checkpoint done", D1, 0, p_writing, a_ckpt_done, 0, NULL, 0},
    {"evc bump, a sleeper", 0, 0, p_sleeper, a_bump, 0, NULL, 0},
    {"arena register", T1, 0, p_arena, a_register, 0, r_register, 1u << T1 | 1u << T2},
    {"recover_arena", T1, 0, p_keeper, a_lose_arena, 0, r_lose_arena, 1u << T1 | 1u << T2},
    {"recover_rings, orphan slab", T1, 0, p_unswept, a_sweep, 0, r_sweep, 0},
    {"turn: feeder", 0, WHOLE, p_base, a_feeder, 1, NULL, 0},
    {"turn: target, slab and claim", T1, WHOLE, p_base, a_target, 1, NULL, 0},
    {"turn: target, publish", T1, WHOLE, p_turn_extracting, a_target, 1, NULL, 0},
    {"turn: drafter, first boot", D1, WHOLE, p_boot, a_drafter, 1, NULL, 0},
    {"turn: drafter, boot and apply", D1, WHOLE, p_boot_committed, a_drafter, 1, NULL, 0},
    {"turn: drafter, claim", D1, WHOLE, p_base, a_drafter, 1, NULL, 0},
    {"turn: drafter, accumulate", D1, WHOLE, p_turn_drafting, a_drafter, 1, NULL, 0},
    {"turn: drafter, hidden states gone", D2, WHOLE, p_turn_gone, a_drafter2, 1, NULL, 0},
    {"turn: drafter, flip to reduce", D1, WHOLE, p_all_done, a_drafter, 1, NULL, 0},
    {"turn: drafter, sum", D1, WHOLE, p_reducing, a_drafter, 1, NULL, 0},
    {"turn: drafter, commit", D1, WHOLE, p_one_reduced, a_drafter, 1, NULL, 0},
    {"turn: drafter, apply", D1, WHOLE, p_committed, a_drafter, 1, NULL, 0},
    {"turn: drafter, last apply", D1, WHOLE, p_last_apply, a_drafter, 1, NULL, 0},
    {"turn: drafter, copy", D1, WHOLE, p_copying, a_drafter, 1, NULL, 0},
    {"turn: drafter, checkpoint on disk", D1, WHOLE, p_writing, a_drafter, 1, NULL, 0},
};

#endif
