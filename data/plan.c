/* The plan of an epoch, and the anchors of a sample: see plan.h.
 *
 * Everything here is a pure function of (lengths, options, seed, epoch): a new feeder, a resumed run and `check` make the same plan.  Since
 * samples of one bucket fill microbatches in shuffled order, the microbatches of a bucket are consecutive ranges of one array; the mix then
 * only decides in which order the ranges come.
 */
#include "data/plan.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/limits.h"
#include "base/rng.h"

enum { KEY_SHUFFLE = 0x73687566, KEY_ANCHORS = 0x616e6368 };

/* The samples of one bucket in shuffled order, and the microbatches made of them. */
struct lane {
    uint32_t *sample;
    uint64_t n;
    struct mr_plan_entry *entry; /* first_sample: index into `sample` of this lane */
    uint32_t n_entries, next;
};

static int bucket_of(const struct mr_plan_opts *o, int len)
{
    int b = 0;

    while (b < o->n_buckets - 1 && len > o->buckets[b])
        b++;
    return b;
}

/* Usable rows in shuffled order (Fisher-Yates); NULL when out of memory. */
static uint32_t *shuffled(const struct mr_dataset *d, const struct mr_plan_opts *o, unsigned epoch, uint64_t *n)
{
    const uint64_t rows = mr_dataset_rows(d);
    uint32_t *s = malloc((rows + 1) * sizeof *s);
    struct mr_rng r = mr_rng_key(o->seed, epoch, KEY_SHUFFLE);

    *n = 0;
    for (uint64_t i = 0; s && i < rows; i++)
        if (mr_dataset_len(d, i) > 0)
            s[(*n)++] = (uint32_t)i;
    for (uint64_t i = *n; s && i > 1; i--) {
        uint64_t k = mr_rng_below(&r, i);
        uint32_t x = s[i - 1];

        s[i - 1] = s[k], s[k] = x;
    }
    return s;
}

/* Deals the shuffled rows out to their buckets, keeping the order. */
static int deal(struct lane *lane, const struct mr_dataset *d, const struct mr_plan_opts *o, const uint32_t *s, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        lane[bucket_of(o, mr_dataset_len(d, s[i]))].n++;
    for (int b = 0; b < o->n_buckets; b++) {
        lane[b].sample = malloc((lane[b].n + 1) * sizeof *lane[b].sample);
        lane[b].entry = malloc((lane[b].n + 1) * sizeof *lane[b].entry);
        if (!lane[b].sample || !lane[b].entry)
            return -ENOMEM;
        lane[b].n = 0;
    }
    for (uint64_t i = 0; i < n; i++) {
        struct lane *l = &lane[bucket_of(o, mr_dataset_len(d, s[i]))];

        l->sample[l->n++] = s[i];
    }
    return 0;
}

/* Cuts a lane into microbatches: the next sample opens a new one when it does not fit. */
static void fill(struct lane *l, unsigned bucket, const struct mr_dataset *d, const struct mr_plan_opts *o)
{
    struct mr_plan_entry *e = NULL;

    for (uint64_t i = 0; i < l->n; i++) {
        uint32_t len = (uint32_t)mr_dataset_len(d, l->sample[i]);

        if (!e || e->n_tokens + len > (uint32_t)o->token_budget || e->n_seqs == (uint32_t)o->max_seqs) {
            e = &l->entry[l->n_entries++];
            *e = (struct mr_plan_entry){.bucket = bucket, .first_sample = i};
        }
        e->n_seqs++;
        e->n_tokens += len;
    }
}

static void take(struct mr_plan *p, struct lane *l)
{
    const struct mr_plan_entry *e = &l->entry[l->next++];

    p->entry[p->n] = *e;
    p->entry[p->n++].first_sample = p->n_samples;
    memcpy(p->sample + p->n_samples, l->sample + e->first_sample, e->n_seqs * sizeof *p->sample);
    p->n_samples += e->n_seqs;
}

/* Orders the microbatches: each group has the mix of what is left. */
static void mix(struct mr_plan *p, struct lane *lane, const struct mr_plan_opts *o, uint64_t total)
{
    uint32_t left[MR_MAX_BUCKETS], seats[MR_MAX_BUCKETS];

    while (p->n < total) {
        uint32_t m = total - p->n < (uint64_t)o->M ? (uint32_t)(total - p->n) : (uint32_t)o->M;

        for (int b = 0; b < o->n_buckets; b++)
            left[b] = lane[b].n_entries - lane[b].next;
        mr_apportion(left, o->n_buckets, m, seats);
        for (int b = 0; b < o->n_buckets; b++)
            for (uint32_t i = 0; i < seats[b]; i++)
                take(p, &lane[b]);
        p->steps++;
    }
}

static int make(struct mr_plan *p, struct lane *lane, const struct mr_dataset *d, const struct mr_plan_opts *o, unsigned epoch,
                struct mr_err *err)
{
    uint64_t n, total = 0;
    uint32_t *s = shuffled(d, o, epoch, &n);

    if (!s || deal(lane, d, o, s, n))
        goto no_memory;
    for (int b = 0; b < o->n_buckets; b++) {
        fill(&lane[b], (unsigned)b, d, o);
        total += lane[b].n_entries;
    }
    if (total > MR_POS_MAX) {
        free(s);
        return mr_err_set(err, MR_EXIT_CONFIG, "epoch %u has %llu microbatches; at most %u are allowed: raise data/token_budget", epoch,
                          (unsigned long long)total, MR_POS_MAX);
    }
    p->entry = malloc((total + 1) * sizeof *p->entry);
    p->sample = malloc((n + 1) * sizeof *p->sample);
    if (!p->entry || !p->sample)
        goto no_memory;
    mix(p, lane, o, total);
    free(s);
    return 0;
no_memory:
    free(s);
    return mr_err_set(err, MR_EXIT_ENV, "out of memory for the plan of %llu samples", (unsigned long long)n);
}

int mr_plan_make(struct mr_plan *p, const struct mr_dataset *d, const struct mr_plan_opts *o, unsigned epoch, struct mr_err *err)
{
    struct lane lane[MR_MAX_BUCKETS] = {0};
    int rc;

    MR_ASSERT(o->n_buckets >= 1 && o->n_buckets <= MR_MAX_BUCKETS && o->M >= 1 && o->max_seqs >= 1);
    *p = (struct mr_plan){0};
    rc = make(p, lane, d, o, epoch, err);
    for (int b = 0; b < o->n_buckets; b++) {
        free(lane[b].sample);
        free(lane[b].entry);
    }
    if (rc)
        mr_plan_free(p);
    return rc;
}

void mr_plan_free(struct mr_plan *p)
{
    free(p->entry);
    free(p->sample);
    *p = (struct mr_plan){0};
}

void mr_apportion(const uint32_t *left, int n, uint32_t m, uint32_t *out)
{
    uint64_t rest[MR_MAX_BUCKETS], sum = 0;
    uint32_t seats = 0;

    for (int b = 0; b < n; b++)
        sum += left[b];
    MR_ASSERT(sum > 0 && m <= sum && n <= MR_MAX_BUCKETS);
    for (int b = 0; b < n; b++) {
        out[b] = (uint32_t)((uint64_t)m * left[b] / sum);
        rest[b] = (uint64_t)m * left[b] % sum;
        seats += out[b];
    }
    for (; seats < m; seats++) {
        int best = 0;

        for (int b = 1; b < n; b++)
            if (rest[b] > rest[best])
                best = b;
        out[best]++; /* rest > 0 here, so out[best] stays at most left[best] */
        rest[best] = 0;
    }
}

/* Selection sampling (Knuth, TAOCP 2, algorithm S): one pass, ascending by construction. */
int mr_anchors(const uint8_t *mask, int n, int want, uint64_t seed, unsigned epoch, uint32_t sample, int32_t *out)
{
    struct mr_rng r = mr_rng_key(seed ^ KEY_ANCHORS, epoch, sample);
    int valid = 0, taken = 0;

    for (int i = 0; i + 1 < n; i++)
        valid += mask[i] && mask[i + 1];
    want = want < valid ? want : valid;
    for (int i = 0; i + 1 < n && taken < want; i++) {
        if (!mask[i] || !mask[i + 1])
            continue;
        if (mr_rng_below(&r, (uint64_t)valid--) < (uint64_t)(want - taken))
            out[taken++] = i;
    }
    return taken;
}
