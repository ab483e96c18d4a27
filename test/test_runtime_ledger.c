/* Ledger lines from place records and the sealed plan in a real segment. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ipc/atomic.h"
#include "runtime/ledger.h"

enum { M = 4, ITEMS = 10, STEPS = 3, SLOTS = 3 }; /* one epoch of 10 microbatches: the last step has two places */

static int set_up(void **state)
{
    struct mr_seg *s = calloc(1, sizeof *s);
    char run[48];
    struct mr_seg_params p = {
        .run = run,
        .n_actors = 4,
        .n_items = 16,
        .n_slabs = 8,
        .n_arenas = 4,
        .n_epochs = 2,
        .n_buckets = 2,
        .n_targets = 1,
        .n_drafters = 2,
        .n_places = M,
        .token_budget = 64,
        .max_seqs = 8,
        .steps_total = 2 * STEPS,
        .microbatches_total = 2 * ITEMS,
        .param_count = 8,
        .plan_samples_max = 64,
        .plan_entries_max = ITEMS,
        .block_slots = SLOTS,
    };
    struct mr_err err = {0};
    struct mr_plan_view v;

    snprintf(run, sizeof run, "test-%d-ledger", (int)getpid());
    assert_int_equal(mr_seg_create(s, &p, &err), 0);
    for (unsigned e = 0; e <= 2; e++)
        s->epochs[e] = (struct mr_epoch){e * ITEMS, e * STEPS};
    v = mr_plan_at(s, 0);
    for (unsigned i = 0; i < ITEMS; i++) {
        v.entry[i] = (struct mr_plan_entry){.bucket = i & 1, .n_seqs = 2, .n_tokens = 10 + i, .first_sample = 2 * i};
        v.sample[2 * i] = 100 + i;
        v.sample[2 * i + 1] = 200 + i;
    }
    v.hdr->n_entries = ITEMS;
    v.hdr->n_samples = 2 * ITEMS;
    mr_st(&v.hdr->epoch, 1);
    *state = s;
    return 0;
}

static int tear_down(void **state)
{
    struct mr_seg *s = *state;
    char run[MR_NAME_MAX];

    snprintf(run, sizeof run, "%s", s->run);
    mr_seg_close(s);
    mr_seg_unlink(run);
    free(s);
    return 0;
}

static void record(struct mr_seg *s, unsigned step, unsigned place, unsigned pos)
{
    *mr_record(s, step, place) = (struct mr_record){.pos = pos,
                                                    .bucket = pos & 1,
                                                    .drafter = place & 1,
                                                    .tokens = 10 + pos,
                                                    .draft_tokens = 3,
                                                    .n_seqs = 2,
                                                    .blocks = 4,
                                                    .accepted = 2,
                                                    .labels = 8,
                                                    .correct = 5,
                                                    .loss_sum = 6.0,
                                                    .weight_sum = 3.0};
    for (unsigned i = 0; i < SLOTS; i++) /* positions 0 and 2 cancel out, but in plan order only */
        mr_slot_sums_at(s, step, place)[i] = (struct mr_slot_sums){
            .labels = pos + i, .correct = 100 * pos + i, .loss = pos == 0 ? 1e17 : pos == 2 ? -1e17 : 0.5 * pos};
}

static json_t *line_of(struct mr_seg *s, unsigned step, struct mr_step_sums *sums)
{
    char *line;
    size_t n;
    json_t *o;

    assert_int_equal(mr_ledger_line(s, step, &line, &n, sums), 0);
    assert_int_equal(strlen(line), n);
    assert_int_equal(line[n - 1], '\n');
    assert_null(memchr(line, '\n', n - 1));
    o = json_loadb(line, n, JSON_REJECT_DUPLICATES, NULL);
    assert_non_null(o);
    free(line);
    return o;
}

static void test_line(void **state)
{
    struct mr_seg *s = *state;
    struct mr_step_sums sums;
    static const unsigned filled[M] = {7, 0, 5, 2}; /* places were filled out of plan order */
    json_t *o, *items, *item;

    for (unsigned k = 0; k < M; k++)
        record(s, 1, k, filled[k]);
    o = line_of(s, 1, &sums);
    items = json_object_get(o, "items");
    assert_int_equal(json_integer_value(json_object_get(o, "step")), 1);
    assert_int_equal(json_integer_value(json_object_get(o, "epoch")), 0);
    assert_float_equal(json_number_value(json_object_get(o, "loss")), 2.0, 1e-12);
    assert_float_equal(json_number_value(json_object_get(o, "weight")), 12.0, 1e-12);
    assert_int_equal(json_object_size(o), 5);
    assert_int_equal(json_array_size(items), M);
    item = json_array_get(items, 2);
    assert_int_equal(json_integer_value(json_object_get(item, "item")), 5); /* ascending */
    assert_int_equal(json_integer_value(json_object_get(item, "bucket")), 1);
    assert_int_equal(json_integer_value(json_object_get(item, "drafter")), 0);
    assert_int_equal(json_integer_value(json_object_get(item, "tokens")), 15);
    assert_int_equal(json_integer_value(json_array_get(json_object_get(item, "samples"), 1)), 205);
    assert_int_equal(json_object_size(item), 5);
    assert_int_equal(sums.items, M);
    assert_int_equal(sums.tokens, 17 + 10 + 15 + 12);
    assert_int_equal(sums.accepted, 8);
    assert_int_equal(sums.n_slots, SLOTS);
    for (unsigned i = 0; i < SLOTS; i++) {
        assert_int_equal(sums.slot[i].labels, 14 + 4 * i);
        assert_int_equal(sums.slot[i].correct, 1400 + 4 * i);
        assert_true(sums.slot[i].loss == 6.0);
    }
    json_decref(o);
}

static void test_partial_last_step(void **state)
{
    struct mr_seg *s = *state;
    struct mr_step_sums sums;
    json_t *o;

    record(s, 2, 0, 9);
    record(s, 2, 1, 8);
    record(s, 2, 2, 3); /* stale: of an earlier step of this parity */
    o = line_of(s, 2, &sums);
    assert_int_equal(json_array_size(json_object_get(o, "items")), 2);
    assert_int_equal(sums.slot[0].labels, 9 + 8);
    json_decref(o);
}

static void test_no_weight_is_null(void **state)
{
    struct mr_seg *s = *state;
    struct mr_step_sums sums;
    json_t *o;

    for (unsigned k = 0; k < M; k++) {
        record(s, 0, k, k);
        mr_record(s, 0, k)->weight_sum = mr_record(s, 0, k)->loss_sum = 0;
    }
    o = line_of(s, 0, &sums);
    assert_true(json_is_null(json_object_get(o, "loss")));
    assert_true(isnan(mr_step_loss(&sums)));
    json_decref(o);
}

static void test_refuses_what_is_not_of_this_epoch(void **state)
{
    struct mr_seg *s = *state;
    struct mr_step_sums sums;
    char *line = NULL;
    size_t n;

    for (unsigned k = 0; k < M; k++)
        record(s, 0, k, k);
    record(s, 0, 3, ITEMS); /* a position of the next epoch */
    assert_int_equal(mr_ledger_line(s, 0, &line, &n, &sums), -ESTALE);
    assert_null(line);
    record(s, 0, 3, 3);
    mr_st(&mr_plan_at(s, 0).hdr->epoch, 3); /* this half holds epoch 2 by now */
    assert_int_equal(mr_ledger_line(s, 0, &line, &n, &sums), -ESTALE);
    assert_null(line);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_line, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_partial_last_step, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_no_weight_is_null, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_refuses_what_is_not_of_this_epoch, set_up, tear_down),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
