/* The plan: for many shapes of data, every sample exactly once, budgets kept, every group's mix the apportionment of what was left; and the
 * anchors: valid, distinct, ascending, uniform, a pure function of their key. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <math.h>
#include <cmocka.h>

#include "base/limits.h"
#include "data/plan.h"
#include "data/schedule.h"

/* Largest remainder, written the slow way: the same as plan.h says, with sorting by hand. */
static void slow_apportion(const uint32_t *left, int n, uint32_t m, uint32_t *out)
{
    uint64_t sum = 0;
    uint32_t seats = 0;
    int used[MR_MAX_BUCKETS] = {0};

    for (int b = 0; b < n; b++)
        sum += left[b];
    for (int b = 0; b < n; b++)
        seats += out[b] = (uint32_t)(left[b] * (uint64_t)m / sum);
    while (seats < m) {
        int best = -1;

        for (int b = n - 1; b >= 0; b--)
            if (!used[b] && (best < 0 || left[b] * (uint64_t)m % sum >= left[best] * (uint64_t)m % sum))
                best = b;
        used[best] = 1;
        out[best]++;
        seats++;
    }
}

static void check_plan(const struct mr_plan *p, const struct mr_dataset *d, const struct mr_plan_opts *o)
{
    const uint64_t rows = mr_dataset_rows(d);
    unsigned char *seen = calloc(rows, 1);
    uint32_t left[MR_MAX_BUCKETS] = {0}, want[MR_MAX_BUCKETS];
    uint64_t at = 0, usable = 0;

    for (uint64_t i = 0; i < rows; i++)
        usable += mr_dataset_len(d, i) > 0;
    assert_int_equal(p->n_samples, usable);
    assert_int_equal(p->steps, (p->n + (unsigned)o->M - 1) / (unsigned)o->M);
    for (uint32_t k = 0; k < p->n; k++) {
        const struct mr_plan_entry *e = &p->entry[k];
        uint32_t tokens = 0;

        assert_int_equal(e->first_sample, at);
        assert_in_range(e->n_seqs, 1, o->max_seqs);
        for (uint32_t i = 0; i < e->n_seqs; i++) {
            uint32_t s = p->sample[at++];
            int len = mr_dataset_len(d, s);

            assert_int_equal(seen[s]++, 0);
            assert_true(len > 0 && len <= o->buckets[e->bucket] && (e->bucket == 0 || len > o->buckets[e->bucket - 1]));
            tokens += (uint32_t)len;
        }
        assert_int_equal(tokens, e->n_tokens);
        assert_true(tokens <= (uint32_t)o->token_budget);
        left[e->bucket]++;
    }
    assert_int_equal(at, usable);
    for (uint32_t k = 0; k < p->n;) {
        uint32_t m = p->n - k < (uint32_t)o->M ? p->n - k : (uint32_t)o->M, have[MR_MAX_BUCKETS] = {0};

        slow_apportion(left, o->n_buckets, m, want);
        for (uint32_t i = 0; i < m; i++, k++) {
            have[p->entry[k].bucket]++;
            assert_true(i == 0 || p->entry[k].bucket >= p->entry[k - 1].bucket);
        }
        assert_memory_equal(have, want, sizeof(uint32_t) * (size_t)o->n_buckets);
        for (int b = 0; b < o->n_buckets; b++)
            left[b] -= have[b];
    }
    free(seen);
}

static void property(void **state)
{
    static const int buckets[4][4] = {{64, 0, 0, 0}, {16, 64, 0, 0}, {20, 30, 40, 64}, {10, 11, 63, 64}};
    static const int n_buckets[4] = {1, 2, 4, 4};

    (void)state;
    for (int i = 0; i < 96; i++) {
        char spec[80];
        struct mr_dataset_opts dopt = {.min_tokens = i % 5 == 0 ? 20 : 2};
        struct mr_plan_opts o = {.buckets = buckets[i % 4],
                                 .n_buckets = n_buckets[i % 4],
                                 .token_budget = 64 + 37 * (i % 7),
                                 .max_seqs = i % 3 ? 1024 : 2,
                                 .M = 1 + i % 13,
                                 .seed = (uint64_t)i};
        struct mr_dataset *d;
        struct mr_plan p;
        struct mr_err err = {0};

        snprintf(spec, sizeof spec, "synthetic:%d?min=%d&max=64&seed=%d", 1 + i * i % 700, 2 + i % 40, i);
        d = mr_dataset_open(spec, &dopt, &err);
        assert_non_null(d);
        assert_int_equal(mr_plan_make(&p, d, &o, (unsigned)i % 3, &err), 0);
        check_plan(&p, d, &o);
        mr_plan_free(&p);
        mr_dataset_close(d);
    }
}

static void pure_function(void **state)
{
    const int buckets[] = {64};
    struct mr_dataset_opts dopt = {0};
    struct mr_plan_opts o = {.buckets = buckets, .n_buckets = 1, .token_budget = 200, .max_seqs = 9, .M = 4, .seed = 5};
    struct mr_err err = {0};
    struct mr_dataset *d = mr_dataset_open("synthetic:300?min=5&max=64&seed=1", &dopt, &err);
    struct mr_plan a, b, c;
    int same = 0;

    (void)state;
    mr_plan_make(&a, d, &o, 1, &err);
    mr_plan_make(&b, d, &o, 1, &err);
    mr_plan_make(&c, d, &o, 2, &err);
    assert_int_equal(a.n, b.n);
    assert_memory_equal(a.sample, b.sample, a.n_samples * sizeof *a.sample);
    assert_memory_equal(a.entry, b.entry, a.n * sizeof *a.entry);
    for (uint64_t i = 0; i < 300; i++)
        same += a.sample[i] == c.sample[i];
    assert_true(same < 20); /* another epoch, another order */
    for (uint64_t i = 0, fixed = 0; i < 300; i++) {
        fixed += a.sample[i] == i;
        assert_true(fixed < 20); /* and not the file's */
    }
    mr_plan_free(&a);
    mr_plan_free(&b);
    mr_plan_free(&c);
    mr_dataset_close(d);
}

/* Known cases: exact shares, ties to the lower bucket, empty buckets get nothing. */
static void apportion(void **state)
{
    uint32_t out[4];

    (void)state;
    mr_apportion((uint32_t[]){50, 30, 20}, 3, 10, out);
    assert_memory_equal(out, ((uint32_t[]){5, 3, 2}), 12);
    mr_apportion((uint32_t[]){1, 1, 1}, 3, 2, out);
    assert_memory_equal(out, ((uint32_t[]){1, 1, 0}), 12);
    mr_apportion((uint32_t[]){0, 7, 0, 1}, 4, 4, out);
    assert_memory_equal(out, ((uint32_t[]){0, 4, 0, 0}), 16); /* 3.5 and 0.5: a tie, so the lower bucket */
    mr_apportion((uint32_t[]){3, 1, 2}, 3, 6, out);
    assert_memory_equal(out, ((uint32_t[]){3, 1, 2}), 12);
    mr_apportion((uint32_t[]){4000000000u, 4000000000u}, 2, 4096, out);
    assert_memory_equal(out, ((uint32_t[]){2048, 2048}), 8);
}

static void anchors(void **state)
{
    uint8_t mask[40] = {0};
    int32_t out[40], again[40], hits[40] = {0};

    (void)state;
    for (int i = 10; i < 30; i++)
        mask[i] = 1;
    mask[20] = 0; /* 10..18 and 21..28 are valid: 9 + 8 */
    for (unsigned e = 0; e < 3000; e++) {
        int n = mr_anchors(mask, 40, 5, 7, e, 3, out);

        assert_int_equal(n, 5);
        for (int i = 0; i < n; i++) {
            assert_true(mask[out[i]] && mask[out[i] + 1]);
            assert_true(i == 0 || out[i] > out[i - 1]);
            hits[out[i]]++;
        }
    }
    for (int i = 0; i < 40; i++) /* 3000 * 5 / 17 = 882, sigma 25 */
        assert_true(mask[i] && i < 39 && mask[i + 1] ? abs(hits[i] - 882) < 150 : hits[i] == 0);
    assert_int_equal(mr_anchors(mask, 40, 100, 7, 0, 3, out), 17);
    assert_int_equal(mr_anchors(mask, 40, 5, 7, 4, 9, out), 5);
    mr_anchors(mask, 40, 5, 7, 4, 9, again);
    assert_memory_equal(out, again, 5 * sizeof *out);
    assert_int_equal(mr_anchors(mask, 11, 5, 7, 0, 0, out), 0); /* only the last token is supervised */
    assert_int_equal(mr_anchors(mask, 1, 5, 7, 0, 0, out), 0);
    assert_int_equal(mr_anchors(mask, 12, 5, 7, 0, 0, out), 1);
    assert_int_equal(out[0], 10);
}

static void schedule(void **state)
{
    (void)state;
    assert_true(mr_lr_at(1, 0.1, 0, 0, 100) == 0.1);
    assert_true(mr_lr_at(1, 0.1, 0, 9, 100) == 1.0);
    assert_true(mr_lr_at(1, 0.1, 0, 10, 100) == 1.0);
    assert_true(fabs(mr_lr_at(1, 0.1, 0, 55, 100) - 0.5) < 1e-12);
    assert_true(mr_lr_at(1, 0.1, 0, 99, 100) > 0 && mr_lr_at(1, 0.1, 0, 99, 100) < 1e-3);
    assert_true(mr_lr_at(1, 0.1, 1, 99, 100) == 1.0);
    assert_true(mr_lr_at(2, 0.0, 0, 0, 10) == 2.0);
    assert_true(mr_lr_at(1, 1.0, 0, 9, 10) == 1.0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(property), cmocka_unit_test(pure_function), cmocka_unit_test(apportion),
                                       cmocka_unit_test(anchors), cmocka_unit_test(schedule)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
