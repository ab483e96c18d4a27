/* The plan of an epoch: which samples form which microbatch, in which order, and so the places of every step.
 *
 * A pure function of (lengths, options, seed, epoch): seeded shuffle, bucket by length, fill microbatches of one bucket up to the token
 * budget in shuffled order, then order them so that each group of M consecutive ones has the bucket mix of what is left of the epoch
 * (largest remainder; ties: the lower bucket).  Within a group: ascending bucket, then the order in which they were filled.
 */
#ifndef MR_DATA_PLAN_H
#define MR_DATA_PLAN_H

#include <stdint.h>

#include "base/err.h"
#include "data/dataset.h"
#include "base/plan_types.h"

struct mr_plan_opts {
    const int *buckets;      /* ascending upper bounds */
    int n_buckets;
    int token_budget, max_seqs;
    int M;                   /* microbatches a step */
    uint64_t seed;
};

struct mr_plan {
    struct mr_plan_entry *entry;   /* [n] */
    uint32_t n;
    uint32_t *sample;              /* [n_samples] ids */
    uint64_t n_samples;
    uint32_t steps;                /* ceil(n / M) */
};

int mr_plan_make(struct mr_plan *p, const struct mr_dataset *d, const struct mr_plan_opts *o, unsigned epoch, struct mr_err *err);
void mr_plan_free(struct mr_plan *p);

/* Largest remainder: out[b] of m seats for the counts left[b] (sum > 0, m <= sum); also what tools/ledger_check.py computes:
 * floor(m * left[b] / sum), then the seats that remain to the largest remainders m * left[b] mod sum, ties to the lower b. */
void mr_apportion(const uint32_t *left, int n, uint32_t m, uint32_t *out);

/* Anchors of a sample (docs/dflash.md 3.2): valid positions i in [0, n-2] with mask[i] and mask[i+1]; min(want, valid) of them without
 * replacement, ascending; pure function of (seed, epoch, sample).  Returns the number written to out[want]. */
int mr_anchors(const uint8_t *mask, int n, int want, uint64_t seed, unsigned epoch, uint32_t sample, int32_t *out);

#endif
