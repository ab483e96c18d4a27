/* Step word, places and the life of items through whole steps, in one process. */
#include "test_ipc.h"

/* Drives one step to its end with all drafters in this thread.  Returns the new step word. */
static uint64_t whole_step(struct rig *r, unsigned *fed, uint8_t *seen)
{
    unsigned step = mr_sw_step(mr_step_read(&r->s)), m = mr_step_places(&r->s, step), rr = 0, done = 0;
    enum mr_wait_reason why;
    uint64_t w;

    for (unsigned turn = 0; done < m; turn++) {
        assert_true(turn < 1000);
        if (*fed < r->s.hdr->microbatches_total && rig_feed(r, *fed) >= 0)
            ++*fed;
        rig_extract(r, rig_target(r, turn % r->T));
        assert_int_equal(mr_step_try_reduce(&r->s, mr_step_read(&r->s), &why), -EAGAIN);
        assert_int_equal(why, MR_WAIT_PLACE);
        done += rig_draft(r, rig_drafter(r, turn % r->D), &rr) >= 0;
    }
    for (unsigned k = 0; k < m; k++)
        seen[mr_record(&r->s, step, k)->pos]++;
    assert_int_equal(rig_draft(r, rig_drafter(r, 0), &rr), -ENOENT);
    mr_st(&r->s.hdr->ledger_done, (uint64_t)step);
    w = mr_step_read(&r->s);
    assert_int_equal(mr_step_try_reduce(&r->s, w, &why), 0);
    assert_int_equal(mr_step_try_reduce(&r->s, w, &why), -ESTALE);
    w = mr_step_read(&r->s);
    assert_int_equal(mr_sw_phase(w), MR_REDUCE);
    for (unsigned d = 0; d < r->D; d++)
        assert_int_equal(mr_step_reduced(&r->s, d, w), d + 1 == r->D);
    assert_int_equal(mr_step_reduced(&r->s, 0, w), -ESTALE);
    w = mr_step_read(&r->s);
    assert_int_equal(mr_sw_phase(w), MR_COMMITTED);
    for (unsigned d = 0; d < r->D; d++) {
        rig_free_own(r, rig_drafter(r, d), 1);
        assert_int_equal(mr_step_applied(&r->s, d, w), d + 1 == r->D);
    }
    assert_int_equal(mr_step_applied(&r->s, 0, w), -ESTALE);
    return mr_step_read(&r->s);
}

TEST(test_two_epochs)
{
    struct rig r;
    uint8_t seen[32] = {0};
    unsigned fed = 0, steps = 0;

    rig_make(&r, 2, 2, 4, 5, 2, 7);
    rig_seal(&r, 1);
    while (mr_step_places(&r.s, mr_sw_step(mr_step_read(&r.s)))) {
        unsigned step = mr_sw_step(mr_step_read(&r.s));
        uint64_t w = whole_step(&r, &fed, seen);

        assert_int_equal(mr_sw_phase(w), MR_COLLECT);
        assert_int_equal(mr_sw_step(w), step + 1);
        steps++;
    }
    assert_int_equal(steps, 4);
    for (unsigned i = 0; i < 14; i++)
        assert_int_equal(seen[i], 1);
    assert_int_equal(rig_count(&r, MR_FREE), r.s.hdr->n_items);
    assert_int_equal(rig_free_slabs(&r), 5);
    assert_int_equal(mr_step_finish(&r.s, mr_w_step(MR_COLLECT, 3, 0, 0, 0)), -ESTALE);
    assert_int_equal(mr_step_finish(&r.s, mr_step_read(&r.s)), 0);
    assert_int_equal(mr_sw_phase(mr_step_read(&r.s)), MR_FINISHED);
    rig_drop(&r);
}

TEST(test_plan_arithmetic)
{
    struct rig r;

    rig_make(&r, 1, 2, 4, 5, 2, 7);
    assert_int_equal(mr_epoch_of_pos(&r.s, 0), 0);
    assert_int_equal(mr_epoch_of_pos(&r.s, 6), 0);
    assert_int_equal(mr_epoch_of_pos(&r.s, 7), 1);
    assert_int_equal(mr_epoch_of_pos(&r.s, 14), 2);
    assert_int_equal(mr_epoch_of_step(&r.s, 1), 0);
    assert_int_equal(mr_epoch_of_step(&r.s, 2), 1);
    assert_int_equal(mr_epoch_of_step(&r.s, 99), 2);
    assert_int_equal(mr_step_places(&r.s, 0), 4);
    assert_int_equal(mr_step_places(&r.s, 1), 3);
    assert_int_equal(mr_step_places(&r.s, 2), 4);
    assert_int_equal(mr_step_places(&r.s, 3), 3);
    assert_int_equal(mr_step_places(&r.s, 4), 0);
    assert_int_equal(mr_step_first_pos(&r.s, 2), 7);
    assert_int_equal(mr_step_first_pos(&r.s, 3), 11);
    assert_int_equal(mr_committed_at(&r.s, 3), 11);
    assert_int_equal(mr_committed_at(&r.s, 4), 14);
    assert_int_equal(mr_place_bucket(&r.s, 0, 1), 1);
    assert_int_equal(mr_place_bucket(&r.s, 1, 0), 0);
    rig_drop(&r);
}

TEST(test_places)
{
    struct rig r;
    unsigned a, b;

    rig_make(&r, 1, 2, 4, 5, 1, 8);
    a = rig_drafter(&r, 0), b = rig_drafter(&r, 1);
    assert_int_equal(mr_place_state(&r.s, 0, 2), MR_PLACE_OPEN);
    assert_int_equal(mr_place_take(&r.s, 0, 2, a, 1), 0);
    assert_int_equal(mr_place_take(&r.s, 0, 2, b, 1), -EAGAIN);
    assert_int_equal(mr_place_give(&r.s, 0, 2, b, 1), -ESTALE);
    assert_int_equal(mr_place_done(&r.s, 0, 2, a, 2), -ESTALE);
    assert_int_equal(mr_place_give(&r.s, 0, 2, a, 1), 0);
    assert_int_equal(mr_place_take(&r.s, 0, 2, b, 1), 0);
    assert_int_equal(mr_place_done(&r.s, 0, 2, b, 1), 0);
    assert_int_equal(mr_place_state(&r.s, 0, 2), MR_PLACE_DONE);
    assert_int_equal(mr_place_state(&r.s, 1, 2), MR_PLACE_OPEN);      /* nobody resets it */
    assert_int_equal(mr_place_take(&r.s, 1, 2, a, 1), 0);
    assert_int_equal(mr_place_take(&r.s, 0, 2, b, 1), -EAGAIN);       /* never backwards */
    rig_drop(&r);
}

/* A place is only taken for a bucket that has an item, the fullest need first. */
TEST(test_claim_choice)
{
    struct rig r;
    unsigned rr = 0, place, d;
    uint64_t w;
    int idx;

    rig_make(&r, 1, 1, 4, 8, 1, 8);
    d = rig_drafter(&r, 0);
    assert_int_equal(mr_place_claim(&r.s, 0, d, 1, &rr, &place, &w), -EAGAIN);
    for (unsigned pos = 0; pos < 6; pos++)
        rig_feed(&r, pos);
    for (unsigned k = 0; k < 6; k++)
        rig_extract(&r, 1);
    idx = mr_place_claim(&r.s, 0, d, 1, &rr, &place, &w);
    assert_true(idx >= 0);
    assert_int_equal(mr_w_pos(w), 1);                                   /* tie: first after bucket 0 */
    assert_int_equal(r.s.items[idx].bucket, 1);
    assert_int_equal(mr_place_bucket(&r.s, 0, place), 1);
    idx = mr_place_claim(&r.s, 0, d, 1, &rr, &place, &w);
    assert_int_equal(mr_w_pos(w), 0);                                   /* bucket 0 needs two, bucket 1 one */
    assert_true(mr_place_claim(&r.s, 0, d, 1, &rr, &place, &w) >= 0);
    assert_true(mr_place_claim(&r.s, 0, d, 1, &rr, &place, &w) >= 0);
    assert_int_equal(mr_place_claim(&r.s, 0, d, 1, &rr, &place, &w), -ENOENT);
    assert_int_equal(mr_place_claim(&r.s, 99, d, 1, &rr, &place, &w), -ENOENT);
    rig_drop(&r);
}

TEST(test_unsealed)
{
    struct rig r;
    unsigned rr = 0, place;
    uint64_t w;

    rig_make(&r, 1, 1, 4, 8, 2, 8);
    assert_int_equal(mr_place_claim(&r.s, 2, rig_drafter(&r, 0), 1, &rr, &place, &w), -EAGAIN);
    rig_drop(&r);
}

TEST(test_deterministic)
{
    struct rig r;
    unsigned place, a, b;
    uint64_t w;

    rig_make(&r, 1, 2, 4, 8, 1, 7);
    a = rig_drafter(&r, 0), b = rig_drafter(&r, 1);
    for (unsigned pos = 0; pos < 4; pos++)
        rig_feed(&r, pos);
    rig_extract(&r, 1);
    assert_int_equal(mr_place_claim_det(&r.s, 0, 1, b, 1, &place, &w), -EAGAIN);    /* position 1 is not ready */
    assert_int_equal(mr_place_state(&r.s, 0, 1), MR_PLACE_OPEN);
    rig_extract(&r, 1), rig_extract(&r, 1), rig_extract(&r, 1);
    assert_true(mr_place_claim_det(&r.s, 0, 1, b, 1, &place, &w) >= 0);
    assert_int_equal(mr_w_pos(w), 1);
    assert_true(mr_place_claim_det(&r.s, 0, 1, b, 1, &place, &w) >= 0);             /* prefetch: the next of mine */
    assert_int_equal(mr_w_pos(w), 3);
    assert_int_equal(mr_place_claim_det(&r.s, 0, 1, b, 1, &place, &w), -ENOENT);
    assert_true(mr_place_claim_det(&r.s, 0, 0, a, 1, &place, &w) >= 0);
    assert_int_equal(mr_w_pos(w), 0);
    assert_int_equal(place, 0);
    /* the cells they left are stale: the ring finds nothing but position 2 */
    assert_int_equal(mr_ring_live(&r.s, mr_ring_ready(1, 0)), 0);
    assert_int_equal(mr_ring_peek(&r.s, mr_ring_ready(1, 0)), 0);
    assert_int_equal(mr_ring_live(&r.s, mr_ring_ready(0, 0)), 1);
    rig_drop(&r);
}

/* Fills and finishes all places of the step, without REDUCE. */
static void fill_step(struct rig *r)
{
    unsigned rr = 0, n = 0;

    for (unsigned pos = 0; pos < r->M; pos++)
        rig_feed(r, pos);
    for (unsigned turn = 0; n < r->M && turn < 100; turn++) {
        rig_extract(r, 1);
        n += rig_draft(r, rig_drafter(r, turn % r->D), &rr) >= 0;
    }
    assert_int_equal(n, r->M);
}

TEST(test_reduce_gates)
{
    enum mr_wait_reason why;
    struct rig r;
    uint64_t w;

    rig_make(&r, 1, 2, 4, 8, 1, 8);
    fill_step(&r);
    w = mr_step_read(&r.s);
    r.s.actors[rig_drafter(&r, 1)].joined = 0;
    assert_int_equal(mr_step_try_reduce(&r.s, w, &why), -EAGAIN);
    assert_int_equal(why, MR_WAIT_PEER);
    mr_step_join(&r.s, rig_drafter(&r, 1));
    assert_int_equal(mr_step_try_reduce(&r.s, w, &why), 0);
    assert_int_equal(mr_step_try_reduce(&r.s, mr_w_step(MR_REPAIR, 0, 0, 0, 0), &why), -EAGAIN);
    assert_int_equal(why, MR_WAIT_REPAIR);
    assert_int_equal(mr_step_try_reduce(&r.s, mr_w_step(MR_COLLECT, 2, 0, 0, 0), &why), -EAGAIN);
    assert_int_equal(why, MR_WAIT_END);
    rig_drop(&r);
}

TEST(test_ledger_gate)
{
    enum mr_wait_reason why;
    struct rig r;
    uint8_t seen[16] = {0};
    unsigned fed = 0, rr = 0, n = 0;

    rig_make(&r, 1, 1, 2, 8, 1, 8);
    whole_step(&r, &fed, seen);
    for (unsigned turn = 0; n < 2 && turn < 100; turn++) {
        if (rig_feed(&r, fed) >= 0)
            fed++;
        rig_extract(&r, 1);
        n += rig_draft(&r, rig_drafter(&r, 0), &rr) >= 0;
    }
    assert_int_equal(mr_step_try_reduce(&r.s, mr_step_read(&r.s), &why), -EAGAIN);
    assert_int_equal(why, MR_WAIT_LEDGER);
    mr_st(&r.s.hdr->ledger_done, (uint64_t)1);
    assert_int_equal(mr_step_try_reduce(&r.s, mr_step_read(&r.s), &why), 0);
    rig_drop(&r);
}

/* A sum that was begun before a repair is refused, and so is a flip that was decided before it. */
TEST(test_repair_fences)
{
    enum mr_wait_reason why;
    struct rig r;
    uint64_t collect, reduce, w;

    rig_make(&r, 1, 2, 4, 8, 1, 8);
    fill_step(&r);
    collect = mr_step_read(&r.s);
    assert_int_equal(mr_step_try_reduce(&r.s, collect, &why), 0);
    reduce = mr_step_read(&r.s);
    assert_int_equal(mr_step_reduced(&r.s, 0, reduce), 0);
    assert_int_equal(mr_step_reduced(&r.s, 0, reduce), 0);              /* twice is once */
    w = mr_step_repair_begin(&r.s);
    assert_int_equal(mr_sw_phase(w), MR_REPAIR);
    assert_int_equal(mr_sw_cepoch(w), 1);
    assert_int_equal(mr_sw_reduced(w), 0);
    assert_int_equal(mr_step_reduced(&r.s, 1, reduce), -ESTALE);
    mr_step_repair_end(&r.s);
    assert_int_equal(mr_step_reduced(&r.s, 1, reduce), -ESTALE);
    assert_int_equal(mr_step_try_reduce(&r.s, collect, &why), -ESTALE); /* the epoch moved */
    assert_int_equal(mr_step_try_reduce(&r.s, mr_step_read(&r.s), &why), 0);
    assert_int_equal(mr_step_reduced(&r.s, 1, reduce), -ESTALE);        /* REDUCE of the same step, another epoch */
    w = mr_step_read(&r.s);
    mr_step_reduced(&r.s, 0, w);
    assert_int_equal(mr_step_reduced(&r.s, 1, w), 1);
    w = mr_step_read(&r.s);
    assert_int_equal(mr_step_applied(&r.s, 1, w), 0);
    w = mr_step_repair_begin(&r.s);
    assert_int_equal(mr_sw_phase(w), MR_COMMITTED);                     /* committed stays committed, applied bits stay */
    assert_int_equal(mr_sw_applied(w), 2);
    assert_int_equal(mr_sw_cepoch(w), 2);
    mr_step_repair_end(&r.s);
    assert_int_equal(mr_sw_phase(mr_step_read(&r.s)), MR_COMMITTED);
    assert_int_equal(mr_step_applied(&r.s, 0, w), 1);
    rig_drop(&r);
}

TEST(test_stop_and_halt)
{
    enum mr_wait_reason why;
    struct rig r;
    uint8_t seen[16] = {0};
    unsigned fed = 0;
    uint64_t w;

    rig_make(&r, 1, 2, 2, 8, 1, 8);
    mr_st(&r.s.hdr->stop, 1);
    w = whole_step(&r, &fed, seen);
    assert_int_equal(mr_sw_phase(w), MR_HALT);
    assert_int_equal(mr_sw_step(w), 1);
    assert_int_equal(mr_step_try_reduce(&r.s, w, &why), -EAGAIN);
    assert_int_equal(why, MR_WAIT_END);
    w = mr_step_repair_begin(&r.s);
    assert_int_equal(w, mr_w_step(MR_HALT, 1, 1, 0, 0));
    mr_step_repair_end(&r.s);
    assert_int_equal(mr_step_read(&r.s), w);
    assert_int_equal(mr_step_finish(&r.s, w), 0);
    assert_int_equal(mr_step_repair_begin(&r.s), mr_w_step(MR_FINISHED, 1, 1, 0, 0));
    rig_drop(&r);
}

TEST(test_epoch_saturates)
{
    struct rig r;

    rig_make(&r, 1, 1, 2, 4, 1, 4);
    r.s.step->word = mr_w_step(MR_COLLECT, 0, MR_CEPOCH_MAX, 0, 0);
    assert_int_equal(mr_step_repair_begin(&r.s), mr_w_step(MR_COLLECT, 0, MR_CEPOCH_MAX, 0, 0));
    assert_int_equal(r.s.hdr->fatal, 1);
    rig_drop(&r);
}

TEST(test_checkpoint_word)
{
    struct rig r;

    rig_make(&r, 1, 2, 2, 4, 1, 20);
    assert_int_equal(mr_ckpt_claim(&r.s, 0, 2, 1), -EAGAIN);            /* nothing to save at step 0 */
    assert_int_equal(mr_ckpt_claim(&r.s, 4, 2, 1), 0);
    assert_int_equal(mr_ckpt_claim(&r.s, 4, 3, 1), -EAGAIN);
    assert_int_equal(mr_ckpt_claim(&r.s, 5, 3, 1), -EAGAIN);
    assert_int_equal(mr_ckpt_blocks_apply(&r.s, 4), 0);
    assert_int_equal(mr_ckpt_blocks_apply(&r.s, 5), 1);
    assert_int_equal(mr_ckpt_blocks_apply(&r.s, 6), 0);
    mr_ckpt_recover(&r.s, 3, 1);
    assert_int_equal(mr_pw_state(r.s.hdr->ckpt), MR_CKPT_COPYING);      /* somebody else's */
    mr_ckpt_recover(&r.s, 2, 1);
    assert_int_equal(mr_pw_state(r.s.hdr->ckpt), MR_CKPT_WANTED);
    assert_int_equal(mr_ckpt_blocks_apply(&r.s, 5), 0);
    assert_int_equal(mr_ckpt_read(&r.s, 4, 2, 1), -ESTALE);
    assert_int_equal(mr_ckpt_done(&r.s, 4, 2, 1), -ESTALE);
    assert_int_equal(mr_ckpt_claim(&r.s, 3, 3, 1), -EAGAIN);
    assert_int_equal(mr_ckpt_claim(&r.s, 4, 3, 1), 0);
    assert_int_equal(mr_ckpt_done(&r.s, 4, 3, 1), -ESTALE);             /* not read yet */
    assert_int_equal(mr_ckpt_read(&r.s, 4, 3, 1), 0);
    assert_int_equal(mr_ckpt_blocks_apply(&r.s, 5), 0);                 /* the state may go */
    r.s.hdr->checkpoint_every = 3;
    assert_int_equal(mr_ckpt_blocks_apply(&r.s, 6), 0);
    assert_int_equal(mr_ckpt_blocks_apply(&r.s, 7), 1);                 /* that of step 6 may not: its checkpoint is due */
    assert_int_equal(mr_ckpt_claim(&r.s, 6, 2, 2), -EAGAIN);            /* its files are still being written */
    mr_ckpt_recover(&r.s, 3, 1);
    assert_int_equal(mr_pw_state(r.s.hdr->ckpt), MR_CKPT_WANTED);
    assert_int_equal(mr_ckpt_claim(&r.s, 6, 3, 2), 0);                  /* 4 is gone: a later one will do */
    assert_int_equal(mr_ckpt_read(&r.s, 6, 3, 2), 0);
    assert_int_equal(mr_ckpt_done(&r.s, 6, 3, 2), 0);
    assert_int_equal(mr_ckpt_claim(&r.s, 6, 2, 2), -EAGAIN);            /* done already */
    assert_int_equal(mr_ckpt_claim(&r.s, 8, 2, 2), 0);
    rig_drop(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_plan_arithmetic), cmocka_unit_test(test_places),       cmocka_unit_test(test_claim_choice),
        cmocka_unit_test(test_unsealed),        cmocka_unit_test(test_deterministic), cmocka_unit_test(test_reduce_gates),
        cmocka_unit_test(test_ledger_gate),     cmocka_unit_test(test_repair_fences), cmocka_unit_test(test_stop_and_halt),
        cmocka_unit_test(test_epoch_saturates), cmocka_unit_test(test_checkpoint_word), cmocka_unit_test(test_two_epochs),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
