/* What a run has done so far: the sums behind the progress line, /metrics, summary.json, and metrics/steps.jsonl from which a resume takes
 * them up again. */
#ifndef MR_RUNTIME_TOTALS_H
#define MR_RUNTIME_TOTALS_H

#include "data/check.h"
#include "runtime/ledger.h"

enum { MR_RECENT_MAX = 512 };

struct mr_totals {
    unsigned steps, steps_total, items, items_total;
    uint64_t tokens, draft_tokens;
    double loss_first, loss_last, weight_last;
    int has_loss;
    unsigned restarts;    /* deaths of actors, over all starts of the run */
    unsigned recomputed;  /* microbatches whose extraction had to be done, or begun, again */
    double wall_before_s; /* of earlier starts */
    uint64_t start_ns;    /* of this start */
    unsigned window;      /* accept_proxy is over the last `window` steps: a tenth of the run, at most MR_RECENT_MAX */
    struct {
        uint64_t blocks, accepted, labels, correct;
    } recent[MR_RECENT_MAX];
    unsigned n_slots;
    struct mr_slot_sums slot[MR_MAX_BLOCK - 1]; /* [n_slots] of the last step that had a label */
};

void mr_totals_init(struct mr_totals *t, unsigned steps_total, unsigned items_total);
void mr_totals_add(struct mr_totals *t, const struct mr_step_sums *sums);
double mr_totals_wall_s(const struct mr_totals *t);
double mr_totals_accept(const struct mr_totals *t);   /* 1 + accepted / blocks; NaN before the first block */
double mr_totals_accuracy(const struct mr_totals *t); /* right slots / supervised slots, 0..1; NaN before the first */

/* Share of right slots, and mean cross-entropy, at one position of the block; NaN when nothing was supervised there. */
double mr_slot_accuracy(const struct mr_slot_sums *slot);
double mr_slot_loss(const struct mr_slot_sums *slot);

/* The line of metrics/steps.jsonl for the step just added; malloc'ed; NULL without memory. */
char *mr_totals_line(const struct mr_totals *t, const struct mr_step_sums *sums, double lr, size_t *n);
/* Cuts metrics/steps.jsonl to steps < n_steps and adds what stays. */
int mr_totals_resume(struct mr_totals *t, const char *path, unsigned n_steps, struct mr_err *err);

/* summary.json (docs/design.md 9).  `epochs`: whole passes over the data that are committed. */
int mr_summary_write(const struct mr_totals *t, const char *path, const char *status, unsigned epochs, const struct mr_checked *c,
                     struct mr_err *err);

#endif
