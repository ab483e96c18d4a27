/* Scenarios: rings, the life of an item, slabs, the plan, arenas. */
#include "test/weak/world.h"

static int got[MW_THREADS];               /* what each thread claimed; set anew by it in every execution */

static void none(void)
{
    for (unsigned i = 0; i < MW_THREADS; i++)
        got[i] = -1;
}

/* ---- roles ------------------------------------------------------------------------------------------------------------------- */

static void feed(unsigned idx)
{
    uint64_t word = mr_w_item(MR_FILLING, FEEDER, 1, idx, 0);

    w.s.items[idx].n_tokens = 1;
    w.pay->tok[idx] = idx + 100;
    mr_st(&w.s.hdr->cursor, (uint64_t)idx + 1);
    MW_CHECK(mr_item_queue(&w.s, idx, &word) == 0);
}

static int extract(unsigned slot, uint64_t *word)
{
    int idx = mr_item_extract(&w.s, slot, 1, word);

    if (idx < 0)
        return idx;
    MW_CHECK(w.s.items[idx].n_tokens == 1);
    MW_CHECK(w.pay->tok[idx] == mr_w_pos(*word) + 100);
    return idx;
}

static void publish(unsigned slot, unsigned slab, int idx, uint64_t *word)
{
    w.pay->hidden[slab] = mr_w_pos(*word) + 200;
    MW_CHECK(mr_slab_assign(&w.s, slab, slot, 1, (unsigned)idx, mr_w_pos(*word)) == 0);
    MW_CHECK(mr_item_ready(&w.s, (unsigned)idx, word) == 0);
}

static void read_item(int idx, uint64_t word)
{
    MW_CHECK(w.s.items[idx].n_tokens == 1);
    MW_CHECK(w.pay->tok[idx] == mr_w_pos(word) + 100);
    MW_CHECK(w.pay->hidden[w.s.items[idx].slab] == mr_w_pos(word) + 200);
}

/* Every item of `mask` was claimed by exactly one thread or can still be claimed from the ring. */
static void all_once(unsigned ring, unsigned mask)
{
    unsigned seen = 0;
    uint64_t word;
    int idx;

    for (unsigned i = 0; i < MW_THREADS; i++) {
        if (got[i] < 0)
            continue;
        MW_CHECK(!(seen >> got[i] & 1));
        seen |= 1u << got[i];
    }
    while ((idx = mr_ring_claim(&w.s, ring, ring < MR_RING_READY ? MR_EXTRACTING : MR_DRAFTING, TARGET0, 9, &word)) >= 0) {
        MW_CHECK(!(seen >> idx & 1));
        seen |= 1u << idx;
    }
    MW_CHECK(seen == mask);
}

/* ---- queue -> extract -> ready -> draft ---------------------------------------------------------------------------------------- */

static void s_filling(void)
{
    world_make(1, 1, 4, 4), none();
    world_item(0, MR_FILLING, FEEDER, 0, 0);
    world_item(1, MR_FILLING, FEEDER, 1, 0);
    w.pay->tok[0] = w.pay->tok[1] = 0;
    w.s.slabs[0].word = mr_w_slab_target(TARGET0, 1);
}

static void t_feed0(void) { feed(0); }
static void t_extract(void)
{
    uint64_t word;

    got[1] = extract(TARGET0, &word);
}
static void f_queue(void) { all_once(MR_RING_INPUT, 1); }

static void t_relay(void)
{
    uint64_t word;
    int idx;

    mw_await(&mr_ring_at(&w.s, MR_RING_INPUT)->tail, 0, 1);
    idx = extract(TARGET0, &word);
    mw_assume(idx == 0);
    publish(TARGET0, 0, idx, &word);
}
static void t_draft(void)
{
    uint64_t word;
    int idx;

    mw_await(&mr_ring_at(&w.s, MR_RING_READY)->tail, 0, 1);
    idx = mr_item_draft(&w.s, 0, 0, DRAFTER0, 1, &word);
    mw_assume(idx == 0);
    read_item(idx, word);
}

/* ---- rings ----------------------------------------------------------------------------------------------------------------------- */

/* Items 0, 1, 2 are published; the threads push their cells. */
static void s_published(void)
{
    world_make(1, 1, 4, 4), none();
    for (unsigned i = 0; i < 3; i++)
        world_item(i, MR_QUEUED, MR_NO_SLOT, i, 1);
    world_ring_at(MR_RING_INPUT, 4ull * 0xffffff - 2);   /* over the wrap of the lap */
}

static void push(unsigned i) { MW_CHECK(mr_ring_push(&w.s, MR_RING_INPUT, i, mr_w_item(MR_QUEUED, MR_NO_SLOT, 0, i, 1)) == 0); }
static void claim(unsigned thread)
{
    uint64_t word;

    got[thread] = mr_ring_claim(&w.s, MR_RING_INPUT, MR_EXTRACTING, TARGET0, thread + 1, &word);
}
static void t_push0(void) { push(0); }
static void t_push1(void) { push(1); }
static void t_push01(void) { push(0), push(1); }
static void t_claim1(void) { claim(1); }
static void t_claim2(void) { claim(2); }
static void f_ring0(void) { all_once(MR_RING_INPUT, 1); }
static void f_ring01(void) { all_once(MR_RING_INPUT, 3); }

/* One cell is in, and its pusher died before it helped the tail. */
static void s_lagging(void)
{
    s_published();
    push(2);
    mr_ring_at(&w.s, MR_RING_INPUT)->tail--;
}
static void f_ring02(void) { all_once(MR_RING_INPUT, 5); }
static void f_ring012(void) { all_once(MR_RING_INPUT, 7); }

/* Two cells only, both stale: pushers must discard them while a claimer does. */
static void s_stale(void)
{
    world_make(1, 1, 4, 2), none();
    for (unsigned i = 0; i < 3; i++)
        world_item(i, MR_QUEUED, MR_NO_SLOT, i, 1);
    for (unsigned i = 0; i < 2; i++)
        MW_CHECK(mr_ring_push(&w.s, MR_RING_INPUT, 2, mr_w_item(MR_QUEUED, MR_NO_SLOT, 0, 7, 1)) == 0);
}

/* Full of live duplicates: a hint is dropped, sweep is set; meanwhile the supervisor sweeps. */
static void s_full(void)
{
    world_make(1, 1, 4, 2), none();
    world_item(0, MR_QUEUED, MR_NO_SLOT, 0, 1);
    world_item(1, MR_EXTRACTING, TARGET1, 1, 1);
    world_item(2, MR_FREE, MR_NO_SLOT, 0, 0);
    w.s.hdr->sweep = 1;
    for (unsigned i = 0; i < 2; i++)
        MW_CHECK(mr_ring_push(&w.s, MR_RING_RETRY, 0, w.s.items[0].word) == 0);
}
static void t_drop(void)
{
    uint64_t word = mr_w_item(MR_QUEUED, MR_NO_SLOT, 0, 1, 2);

    if (mr_cas(&w.s.items[1].word, mr_w_item(MR_EXTRACTING, TARGET1, 1, 1, 1), word))
        mr_ring_push(&w.s, MR_RING_RETRY, 1, word);
}
static void t_sweep(void) { mr_recover_rings(&w.s); }
static void t_sweep_store(void)
{
    mr_st(&w.s.hdr->sweep, 0u);
    mr_recover_rings(&w.s);
}
static void f_swept(void)
{
    MW_CHECK(mr_ld(&w.s.hdr->sweep) || mr_ring_has(&w.s, MR_RING_RETRY, 1, w.s.items[1].word));
}

/* ---- two ways to one item -------------------------------------------------------------------------------------------------------- */

static void s_ready(void)
{
    world_make(2, 2, 2, 4), none();
    world_item(0, MR_READY, MR_NO_SLOT, 0, 2);
    w.s.items[0].n_tokens = 1;
    MW_CHECK(mr_ring_push(&w.s, MR_RING_READY, 0, w.s.items[0].word) == 0);
}
static void t_draft_ring(void)
{
    uint64_t word;

    got[0] = mr_item_draft(&w.s, 0, 0, DRAFTER0, 1, &word);
    if (got[0] >= 0)
        read_item(got[0], word);
}
static void t_draft_pos(void)
{
    uint64_t word;

    got[1] = mr_item_draft_pos(&w.s, 0, DRAFTER1, 1, &word);
    if (got[1] >= 0)
        read_item(got[1], word);
}
static void s_extracted(void)
{
    world_make(2, 2, 2, 4), none();
    world_item(0, MR_EXTRACTING, TARGET0, 0, 1);
    w.s.items[0].n_tokens = 1;
    w.s.slabs[0].word = mr_w_slab_target(TARGET0, 1);
}
static void t_ready(void)
{
    uint64_t word = mr_w_item(MR_EXTRACTING, TARGET0, 1, 0, 1);

    publish(TARGET0, 0, 0, &word);
}
static void f_one_drafts(void)
{
    MW_CHECK((got[0] == 0) + (got[1] == 0) == 1);
    MW_CHECK(mr_ring_live(&w.s, MR_RING_READY) == 0);
}

/* ---- slabs and items come back ----------------------------------------------------------------------------------------------------- */

static void s_used(void)
{
    world_make(1, 1, 4, 4), none();
    world_item(0, MR_ACCUMULATED, DRAFTER0, 0, 2);
    w.s.items[0].n_tokens = 1;
    for (unsigned i = 1; i < ITEMS; i++)
        world_item(i, MR_QUEUED, MR_NO_SLOT, i + 50, 1);
    for (unsigned i = 1; i < SLABS; i++)
        w.s.slabs[i].word = mr_w_slab_target(TARGET1, 1);
}
static void t_free(void)
{
    uint64_t word = w.s.items[0].word;

    word = mr_w_item(MR_ACCUMULATED, DRAFTER0, 1, 0, 2);
    read_item(0, word);
    MW_CHECK(mr_item_free(&w.s, 0, &word) == 0);
}
static void t_take_slab(void)
{
    int slab = mr_slab_take(&w.s, 0, TARGET0, 1);

    if (slab >= 0)
        w.pay->hidden[slab] = 1;
}
static void t_fill(void)
{
    uint64_t word;
    int idx = mr_item_fill(&w.s, FEEDER, 1, 3, &word);

    if (idx < 0)
        return;
    w.pay->tok[idx] = 3;
    w.s.items[idx].n_tokens = 2;
}

/* ---- hidden states gone: requeue, re-extraction and sweep at once -------------------------------------------------------------------- */

static void s_gone(void)
{
    world_make(1, 1, 4, 4), none();
    world_item(0, MR_DRAFTING, DRAFTER0, 0, 2);
    w.s.items[0].n_tokens = 1;
    w.s.slabs[1].word = mr_w_slab_target(TARGET0, 1);
    w.s.arenas[0].generation = 2;
}
static void t_requeue(void)
{
    uint64_t word = mr_w_item(MR_DRAFTING, DRAFTER0, 1, 0, 2);

    MW_CHECK(mr_item_requeue(&w.s, 0, &word) == 0);
}
static void t_again(void)
{
    uint64_t word;
    int idx = extract(TARGET0, &word);

    if (idx >= 0)
        publish(TARGET0, 1, idx, &word);
}
static void f_slab_back(void)
{
    if (mr_ld(&w.s.hdr->sweep))
        mr_recover_rings(&w.s);
    MW_CHECK(mr_ld(&w.s.slabs[0].word) == 0);
    MW_CHECK(mr_w_slab_kind(mr_ld(&w.s.slabs[1].word)) != MR_SLAB_FREE);
}

/* ---- plan, arena ------------------------------------------------------------------------------------------------------------------- */

static void s_unsealed(void)
{
    s_ready();
    mr_plan_at(&w.s, 0).hdr->epoch = 0;
}
static void t_seal(void)
{
    struct mr_plan_view v = mr_plan_at(&w.s, 0);

    v.entry[0].bucket = 0;
    v.entry[1].bucket = 0;
    mr_st(&v.hdr->epoch, (uint64_t)1);
}
static void t_place(void)
{
    unsigned rr = 0, place;
    uint64_t word;
    int idx = mr_place_claim(&w.s, 0, DRAFTER0, 1, &rr, &place, &word);

    if (idx >= 0)
        read_item(idx, word);
}

static void s_unregistered(void)
{
    world_make(1, 1, 4, 4), none();
    w.s.arenas[0].generation = 0;
}
static void t_register(void)
{
    w.s.arenas[0].bytes = 4096;
    w.s.arenas[0].handle[0] = 7;
    mr_arena_register(&w.s, 0);
}
static void t_use_arena(void)
{
    int slab = mr_slab_take(&w.s, 0, TARGET0, 1);

    if (slab < 0)
        return;
    MW_CHECK(w.s.arenas[0].bytes == 4096);
    MW_CHECK(w.s.arenas[0].handle[0] == 7);
}

const struct mw_scenario item_scenarios[] = {
    {"item: queue, extract", 2, s_filling, {t_feed0, t_extract}, f_queue, 0},
    {"item: queue, extract, ready, draft", 3, s_filling, {t_feed0, t_relay, t_draft}, NULL, 0},
    {"item: ready, draft by position", 2, s_extracted, {t_ready, t_draft_pos}, NULL, 0},
    {"item: draft from the ring and by position", 2, s_ready, {t_draft_ring, t_draft_pos}, f_one_drafts, 0},
    {"item: free, fill again", 2, s_used, {t_free, t_fill}, NULL, 0},
    {"item: requeue, sweep, extract again", 3, s_gone, {t_requeue, t_again, t_sweep}, f_slab_back, 0},
    {"slab: free, take again", 2, s_used, {t_free, t_take_slab}, NULL, 0},
    {"ring: push, claim", 2, s_published, {t_push0, t_claim1}, f_ring0, 0},
    {"ring: two pushers", 2, s_published, {t_push0, t_push1}, f_ring01, 0},
    {"ring: two pushers, one claimer", 3, s_published, {t_push0, t_claim1, t_push1}, f_ring01, 0},
    {"ring: one pusher, two claimers", 3, s_published, {t_push01, t_claim1, t_claim2}, f_ring01, 0},
    {"ring: push, claim, tail lags", 2, s_lagging, {t_push0, t_claim1}, f_ring02, 0},
    {"ring: two pushers, one claimer, tail lags", 3, s_lagging, {t_push0, t_claim1, t_push1}, f_ring012, 0},
    {"ring: two pushers, full of stale cells", 2, s_stale, {t_push0, t_push1}, f_ring01, 0},
    {"ring: pusher and claimer, full of stale cells", 2, s_stale, {t_push01, t_claim1}, f_ring01, 0},
    {"ring: a dropped hint against a sweep", 2, s_full, {t_drop, t_sweep}, f_swept, 0},
    {"ring: MUTANT the sweep flag is cleared by a store", 2, s_full, {t_drop, t_sweep_store}, f_swept, 1},
    {"plan: seal, claim a place", 2, s_unsealed, {t_seal, t_place}, NULL, 0},
    {"arena: register, take a slab", 2, s_unregistered, {t_register, t_use_arena}, NULL, 0},
    {NULL, 0, NULL, {NULL}, NULL, 0},
};
