/* Scenarios: places, the step word, joining, the ledger, and recovery of a drafter against a survivor. */
#include "test/weak/world.h"

static const unsigned phase_shift = 61, step_shift = 37;

static int enter_reduce[MW_THREADS];      /* set anew in every execution */

/* ---- one drafter's part -------------------------------------------------------------------------------------------------------- */

static void accumulate(unsigned d, unsigned step, unsigned place, unsigned pos)
{
    w.pay->acc[d][pos] += 1;
    *mr_record(&w.s, step, place) = (struct mr_record){.pos = pos, .drafter = d};
    MW_CHECK(mr_place_done(&w.s, step, place, DRAFTER0 + d, 1) == 0);
}

/* In REDUCE every place is done and every drafter has joined: what is read here must be ordered. */
static void sum(unsigned d, unsigned drafters, unsigned step)
{
    for (unsigned i = 0; i < ELEMS; i++) {
        w.pay->reduced[d][i] = 0;
        for (unsigned k = 0; k < drafters; k++)
            w.pay->reduced[d][i] += w.pay->acc[k][i];
    }
    for (unsigned k = 0; k < mr_step_places(&w.s, step); k++)
        MW_CHECK(w.pay->reduced[d][mr_record(&w.s, step, k)->pos] == 1);
}

static uint64_t await_phase(unsigned phase, unsigned step)
{
    uint64_t word;

    mw_await(&w.s.step->word, step_shift, (uint64_t)phase << (phase_shift - step_shift) | step);
    word = mr_step_read(&w.s);
    mw_assume(mr_sw_phase(word) == phase && mr_sw_step(word) == step);
    return word;
}

static void reduce_and_apply(unsigned d, unsigned drafters, unsigned step)
{
    uint64_t word = await_phase(MR_REDUCE, step);

    sum(d, drafters, step);
    MW_CHECK(mr_step_reduced(&w.s, d, word) >= 0);
    word = await_phase(MR_COMMITTED, step);
    for (unsigned i = 0; i < ELEMS; i++)
        w.pay->acc[d][i] = 0;
    MW_CHECK(mr_step_applied(&w.s, d, word) >= 0);
}

static int flip(void)
{
    enum mr_wait_reason why;

    return mr_step_try_reduce(&w.s, mr_step_read(&w.s), &why);
}

/* ---- two drafters, two places ---------------------------------------------------------------------------------------------------- */

static void s_two(void)
{
    world_make(2, 2, 2, 2);
    for (unsigned k = 0; k < 2; k++)
        w.s.places[k].word = mr_w_place(MR_PLACE_TAKEN, 0, DRAFTER0 + k, 1);
}
static void part(unsigned d)
{
    accumulate(d, 0, d, d);
    flip();
    reduce_and_apply(d, 2, 0);
}
static void t_part0(void) { part(0); }
static void t_part1(void) { part(1); }

/* Whoever is last flips: nobody waits for ever. */
static void t_done0(void) { accumulate(0, 0, 0, 0), enter_reduce[0] = flip(); }
static void t_done1(void) { accumulate(1, 0, 1, 1), enter_reduce[1] = flip(); }
static void f_flip(void) { MW_CHECK(mr_sw_phase(mr_step_read(&w.s)) == MR_COLLECT || !enter_reduce[0] || !enter_reduce[1]); }

/* The second step has one place, drafter 0 fills it; drafter 1 joins with zeros. */
static void s_two_steps(void)
{
    world_make(2, 2, 2, 2);
    w.s.step->word = mr_w_step(MR_REDUCE, 0, 0, 0, 0);
    for (unsigned k = 0; k < 2; k++) {
        w.s.places[k].word = mr_w_place(MR_PLACE_DONE, 0, DRAFTER0 + k, 1);
        mr_record(&w.s, 0, k)->pos = k;
        w.pay->acc[k][k] = 1;
    }
    w.s.epochs[1].first_pos = 3;
    w.s.hdr->ledger_done = 1;
}
static void t_long0(void)
{
    reduce_and_apply(0, 2, 0);
    await_phase(MR_COLLECT, 1);
    MW_CHECK(mr_place_take(&w.s, 1, 0, DRAFTER0, 1) == 0);
    accumulate(0, 1, 0, 2);
    MW_CHECK(flip() == 0);
    sum(0, 2, 1);
}
static void t_long1(void)
{
    reduce_and_apply(1, 2, 0);
    await_phase(MR_REDUCE, 1);
    sum(1, 2, 1);
}

/* ---- joining ----------------------------------------------------------------------------------------------------------------------- */

static void s_join(void)
{
    s_two();
    w.s.places[0].word = mr_w_place(MR_PLACE_DONE, 0, DRAFTER0, 1);
    w.s.places[1].word = mr_w_place(MR_PLACE_DONE, 0, DRAFTER0, 1);
    mr_record(&w.s, 0, 1)->pos = 1;
    w.pay->acc[0][0] = w.pay->acc[0][1] = 1;
    w.pay->acc[1][0] = 7;                 /* of an incarnation that died */
    w.s.actors[DRAFTER1].joined = 0;
}
static void t_join(void)
{
    for (unsigned i = 0; i < ELEMS; i++)
        w.pay->acc[1][i] = 0;
    mr_step_join(&w.s, DRAFTER1);
}
static void t_flip_sum(void)
{
    if (flip() == 0)
        sum(0, 2, 0);
}

/* ---- the ledger -------------------------------------------------------------------------------------------------------------------- */

/* One drafter, one place: step 0 is committed; record slot 0 is used again in step 2. */
static void s_ledger(void)
{
    world_make(1, 1, 4, 2);
    w.s.step->word = mr_w_step(MR_REDUCE, 0, 0, 0, 0);
    w.s.places[0].word = mr_w_place(MR_PLACE_DONE, 0, DRAFTER0, 1);
}
static void t_supervisor(void)
{
    uint64_t word = mr_step_read(&w.s);

    mw_assume(mr_sw_phase(word) == MR_COMMITTED || mr_sw_step(word) > 0);
    MW_CHECK(mr_record(&w.s, 0, 0)->pos == 0);
    mr_st(&w.s.hdr->ledger_done, (uint64_t)1);
}
static void t_records(void)
{
    *mr_record(&w.s, 0, 0) = (struct mr_record){.pos = 0};
    MW_CHECK(mr_step_reduced(&w.s, 0, mr_step_read(&w.s)) == 1);
    MW_CHECK(mr_step_applied(&w.s, 0, mr_step_read(&w.s)) == 1);
    MW_CHECK(mr_place_take(&w.s, 1, 0, DRAFTER0, 1) == 0);
    *mr_record(&w.s, 1, 0) = (struct mr_record){.pos = 1};
    MW_CHECK(mr_place_done(&w.s, 1, 0, DRAFTER0, 1) == 0);
    mw_await(&w.s.hdr->ledger_done, 0, 1);
    mw_assume(flip() == 0);
    MW_CHECK(mr_step_reduced(&w.s, 0, mr_step_read(&w.s)) == 1);
    MW_CHECK(mr_step_applied(&w.s, 0, mr_step_read(&w.s)) == 1);
    *mr_record(&w.s, 2, 0) = (struct mr_record){.pos = 2};
}

/* ---- places -------------------------------------------------------------------------------------------------------------------------- */

static void s_place(void)
{
    world_make(2, 2, 2, 2);
    w.s.places[0].word = mr_w_place(MR_PLACE_TAKEN, 0, DRAFTER0, 1);
    w.s.places[1].word = mr_w_place(MR_PLACE_DONE, 0, DRAFTER1, 1);
}
static void t_give(void) { MW_CHECK(mr_place_give(&w.s, 0, 0, DRAFTER0, 1) == 0), (void)mr_place_take(&w.s, 0, 0, DRAFTER0, 2); }
static void t_take(void) { enter_reduce[1] = mr_place_take(&w.s, 0, 0, DRAFTER1, 1); }
static void f_place(void)
{
    uint64_t p = mr_ld(&w.s.places[0].word);

    MW_CHECK(mr_pw_state(p) == MR_PLACE_TAKEN && (mr_pw_slot(p) == DRAFTER1) == (enter_reduce[1] == 0));
}

/* ---- a drafter died; the survivor does not know ------------------------------------------------------------------------------------ */

/* Drafter 1 (dead) filled place 1, the survivor place 0; both joined: the survivor may just flip. */
static void s_dead(void)
{
    s_two();
    for (unsigned k = 0; k < 2; k++) {
        w.s.places[k].word = mr_w_place(MR_PLACE_DONE, 0, DRAFTER0 + k, 1);
        world_item(k, MR_ACCUMULATED, DRAFTER0 + k, k, 2);
        mr_record(&w.s, 0, k)->pos = k;
    }
    world_item(2, MR_FREE, MR_NO_SLOT, 0, 0);
    w.s.slabs[2].word = 0;
}
static void t_recover(void) { mr_recover_drafter(&w.s, DRAFTER1, 1); }

/* If the step got through to REDUCE, then in an epoch in which all of it is there. */
static void f_dead(void)
{
    uint64_t word = mr_step_read(&w.s);

    MW_CHECK(mr_sw_cepoch(word) == 1);
    MW_CHECK(mr_sw_phase(word) == MR_COLLECT);      /* drafter 1 has not joined again */
    MW_CHECK(mr_place_state(&w.s, 0, 1) == MR_PLACE_OPEN);
    MW_CHECK(mr_w_phase(mr_ld(&w.s.items[1].word)) == MR_READY);
    MW_CHECK(mr_ring_has(&w.s, MR_RING_READY, 1, mr_ld(&w.s.items[1].word)));
}
static void t_flip(void) { (void)flip(); }

/* The survivor has summed; the dead had set its bit: either the commit or the repair comes first. */
static void s_dead_reduce(void)
{
    s_dead();
    w.s.step->word = mr_w_step(MR_REDUCE, 0, 0, 2, 0);
}
static void t_commit(void) { enter_reduce[0] = mr_step_reduced(&w.s, 0, mr_w_step(MR_REDUCE, 0, 0, 2, 0)); }
static void f_dead_reduce(void)
{
    uint64_t word = mr_step_read(&w.s), item = mr_ld(&w.s.items[1].word);

    MW_CHECK(mr_sw_cepoch(word) == 1);
    MW_CHECK(enter_reduce[0] == 1 ? mr_sw_phase(word) == MR_COMMITTED : mr_sw_phase(word) == MR_COLLECT && enter_reduce[0] < 0);
    MW_CHECK(mr_w_phase(item) == (enter_reduce[0] == 1 ? MR_FREE : MR_READY));
    MW_CHECK((mr_ld(&w.s.slabs[1].word) == 0) == (enter_reduce[0] == 1));
}

/* The dead left a place TAKEN and its item DRAFTING; the survivor looks for work and may redo it. */
static void s_dead_taken(void)
{
    s_dead();
    w.s.places[1].word = mr_w_place(MR_PLACE_TAKEN, 0, DRAFTER1, 1);
    w.s.items[1].word = mr_w_item(MR_DRAFTING, DRAFTER1, 1, 1, 2);
}
static void t_redo(void)
{
    unsigned rr = 0, place = 9;
    uint64_t word;
    int idx;

    mw_await(&mr_ring_at(&w.s, MR_RING_READY)->tail, 0, 1);
    idx = mr_place_claim(&w.s, 0, DRAFTER0, 1, &rr, &place, &word);
    if (idx < 0)
        return;
    MW_CHECK(idx == 1 && place == 1);
    *mr_record(&w.s, 0, 1) = (struct mr_record){.pos = 1};
    MW_CHECK(mr_item_accumulated(&w.s, 1, &word) == 0);
    MW_CHECK(mr_place_done(&w.s, 0, 1, DRAFTER0, 1) == 0);
    MW_CHECK(flip() != 0);                /* drafter 1's next incarnation has not joined */
}

const struct mw_scenario step_scenarios[] = {
    {"step: two drafters finish, who flips", 2, s_two, {t_done0, t_done1}, f_flip, 0},
    {"step: two drafters, collect to commit", 2, s_two, {t_part0, t_part1}, NULL, 0},
    {"step: two drafters, reduce, apply, next step", 2, s_two_steps, {t_long0, t_long1}, NULL, 0},
    {"step: join, flip, sum", 2, s_join, {t_join, t_flip_sum}, NULL, 0},
    {"step: records and the ledger", 2, s_ledger, {t_supervisor, t_records}, NULL, 0},
    {"place: given back and taken", 2, s_place, {t_give, t_take}, f_place, 0},
    {"recovery: a drafter, the survivor flips", 2, s_dead, {t_recover, t_flip}, f_dead, 0},
    {"recovery: a drafter, the survivor commits", 2, s_dead_reduce, {t_recover, t_commit}, f_dead_reduce, 0},
    {"recovery: a drafter, the survivor redoes", 2, s_dead_taken, {t_recover, t_redo}, NULL, 0},
    {NULL, 0, NULL, {NULL}, NULL, 0},
};
