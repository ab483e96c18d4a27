/* The synthetic engines: sleep instead of computing, and make everything that the protocols must not lose or double visible.
 *
 * Target: the microbatch takes us_per_item + us_per_token * tokens, times 1 +- jitter (a hash of the plan position: the same in every run).
 * Its hidden states are a stamp: who this microbatch is.  While the target "computes", the slab carries a torn stamp.
 * Drafter: the stamp must be the one of its microbatch, before and after the sleep; else two items had one slab.  Its gradient adds a
 * small integer at an index that depends on the sample: sums are exact in f32 in any order, so the final parameters tell how often each
 * sample of each epoch was applied (mr_synthetic_expect).  The optimizer is state' = state + reduced; moment m counts the steps.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "actors/actors.h"
#include "base/clock.h"
#include "base/rng.h"

struct synthetic {
    double us_per_token, us_per_item, jitter;
    const struct mr_dlayout *l;  /* drafter */
    unsigned block_slots;        /* drafter: block_size - 1 */
};

struct stamp {
    uint64_t magic, pos, samples;
};
#define STAMP_DONE 0x73796e7468646f6eull
#define STAMP_TORN 0x746f726e746f726eull

static uint64_t hash_samples(const struct mr_batch *b)
{
    uint64_t h = mr_mix64((uint64_t)b->epoch);

    for (int i = 0; i < b->n_seqs; i++)
        h = mr_mix64(h ^ b->sample[i]);
    return h;
}

static void sleep_for(const struct synthetic *s, const struct mr_batch *b)
{
    double u = 2.0 * (double)(mr_mix64(b->pos) >> 11) * 0x1.0p-53 - 1.0;
    double us = (s->us_per_item + s->us_per_token * b->n_tokens) * (1.0 + s->jitter * u);
    uint64_t until = mr_now_ns() + (uint64_t)(us * 1e3);
    struct timespec ts = {.tv_sec = (time_t)(until / 1000000000u), .tv_nsec = (long)(until % 1000000000u)};

    if (us < 1.0)
        return;
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &ts, NULL) == EINTR)
        ;
}

static void destroy(void *self)
{
    free(self);
}

static struct synthetic *create(const struct mr_topology *t, unsigned slot, const struct mr_dlayout *l, struct mr_err *err)
{
    const struct mr_topo_actor *a = &t->actor[slot];
    struct synthetic *s = malloc(sizeof(*s));

    if (!s) {
        mr_err_set(err, MR_EXIT_ENV, "%s/%u: out of memory", mr_kind_name(a->kind), a->index);
        return NULL;
    }
    *s = (struct synthetic){.us_per_token = a->us_per_token, .us_per_item = a->us_per_item, .jitter = a->jitter, .l = l,
                            .block_slots = t->drafter.block_size > 1 ? (unsigned)t->drafter.block_size - 1 : 1};
    return s;
}

/* ---- target ----------------------------------------------------------------------------------------------------------------- */

static int forward(void *self, const struct mr_batch *b, void *slab, struct mr_err *err)
{
    struct stamp st = {.magic = STAMP_TORN, .pos = b->pos, .samples = hash_samples(b)};

    (void)err;
    memcpy(slab, &st, sizeof(st));
    sleep_for(self, b);
    st.magic = STAMP_DONE;
    memcpy(slab, &st, sizeof(st));
    return 0;
}

int mr_synthetic_target_create(struct mr_target_engine *e, const struct mr_topology *t, unsigned slot, struct mr_err *err)
{
    *e = (struct mr_target_engine){.self = create(t, slot, NULL, err), .forward = forward, .destroy = destroy};
    return e->self ? 0 : -1;
}

/* ---- drafter ---------------------------------------------------------------------------------------------------------------- */

static int check_stamp(const struct mr_batch *b, const void *slab, const char *when, struct mr_err *err)
{
    struct stamp st;

    memcpy(&st, slab, sizeof(st));
    if (st.magic == STAMP_DONE && st.pos == b->pos && st.samples == hash_samples(b))
        return 0;
    return mr_err_set(err, MR_EXIT_FAILED, "microbatch %u: %s the drafter's work its slab holds %s of microbatch %llu%s: a slab was lent twice",
                      b->pos, when, st.magic == STAMP_DONE ? "the states" : st.magic == STAMP_TORN ? "an unfinished write" : "garbage",
                      (unsigned long long)st.pos, st.pos == b->pos ? " (other samples)" : "");
}

/* Into the first tensor: the gaps between tensors are in no checkpoint. */
static void add_sample(float *param, const struct mr_dlayout *l, unsigned epoch, uint32_t sample)
{
    uint64_t h = mr_mix64(sample);

    param[l->t[0].offset + h % l->t[0].n] += (float)(1 + mr_mix64(h ^ epoch) % 7);
}

static uint64_t count_labels(const struct mr_batch *b)
{
    uint64_t n = 0;

    for (int i = 0; i < b->n_tokens; i++)
        n += b->mask[i];
    return n;
}

/* Every label has a slot, in turn; the first third of them is right. */
static void fill_slots(struct mr_draft_stats *st, unsigned slots)
{
    for (uint64_t i = 0; i < st->labels; i++) {
        struct mr_slot_sums *at = &st->slot[i % slots];

        at->labels++;
        at->correct += i < st->correct;
        at->loss += 2.0;
    }
}

static int accumulate(void *self, const struct mr_batch *b, const void *slab, const float *param, float *acc, struct mr_draft_stats *st,
                      struct mr_err *err)
{
    struct synthetic *s = self;
    uint64_t labels = count_labels(b);

    (void)param;
    if (check_stamp(b, slab, "before", err))
        return -1;
    sleep_for(s, b);
    if (check_stamp(b, slab, "after", err))
        return -1;
    for (int i = 0; i < b->n_seqs; i++)
        add_sample(acc, s->l, b->epoch, b->sample[i]);
    *st = (struct mr_draft_stats){
        .loss_sum = 2.0 * (double)labels, .weight_sum = (double)labels, .blocks = (uint64_t)b->n_seqs, .accepted = (uint64_t)b->n_seqs / 2,
        .labels = labels, .correct = labels / 3, .draft_tokens = (uint32_t)b->n_seqs,
    };
    fill_slots(st, s->block_slots);
    return 0;
}

static int sum(void *self, const float *const *src, int n, float *dst)
{
    const struct synthetic *s = self;

    for (uint64_t i = 0; i < s->l->P; i++) {
        float x = src[0][i];

        for (int k = 1; k < n; k++)
            x += src[k][i];
        dst[i] = x;
    }
    return 0;
}

static int apply(void *self, const struct mr_drafter_view *v, unsigned step, unsigned steps_total, double weight, double *norm,
                 struct mr_err *err)
{
    unsigned from = step & 1, to = from ^ 1;

    (void)self, (void)steps_total, (void)weight, (void)err;
    *norm = 0.0;
    for (uint64_t i = 0; i < v->P; i++) {
        float g = v->reduced[i];

        v->param[to][i] = v->param[from][i] + g;
        v->m[to][i] = v->m[from][i] + 1.0f;
        v->v[to][i] = v->v[from][i] + g;
        *norm += (double)g * g;
    }
    *norm = sqrt(*norm);
    return 0;
}

static int zero(void *self, float *acc)
{
    const struct synthetic *s = self;

    memset(acc, 0, s->l->P * sizeof(*acc));
    return 0;
}

int mr_synthetic_drafter_create(struct mr_drafter_engine *e, const struct mr_topology *t, const struct mr_dlayout *l, unsigned slot,
                                struct mr_err *err)
{
    *e = (struct mr_drafter_engine){
        .self = create(t, slot, l, err), .accumulate = accumulate, .sum = sum, .apply = apply, .zero = zero, .destroy = destroy,
        .failure = MR_EXIT_FAILED,
    };
    return e->self ? 0 : -1;
}

void mr_synthetic_expect(const struct mr_plan *p, unsigned epoch, const struct mr_dlayout *l, float *param)
{
    for (uint32_t i = 0; i < p->n; i++)
        for (uint32_t k = 0; k < p->entry[i].n_seqs; k++)
            add_sample(param, l, epoch, p->sample[p->entry[i].first_sample + k]);
}
