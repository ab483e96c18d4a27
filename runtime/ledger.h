/* The ledger: one line per committed step, written by the supervisor alone, from the place records (docs/design.md 6.3 and 9). */
#ifndef MR_RUNTIME_LEDGER_H
#define MR_RUNTIME_LEDGER_H

#include "base/slot_sums.h"
#include "ipc/seg.h"
#include "runtime/jsonl.h"

/* Sums over the places of one step. */
struct mr_step_sums {
    unsigned step, epoch, items;
    uint64_t tokens, draft_tokens, blocks, accepted, labels, correct;
    double loss_sum, weight_sum;
    unsigned n_slots;                           /* block_size - 1 */
    struct mr_slot_sums slot[MR_MAX_BLOCK - 1]; /* [n_slots], slot k of all blocks in entry k - 1 */
};

/* The line of committed step `step`, with '\n'; *line is malloc'ed.  0, -ENOMEM, or -ESTALE: its plan or records are no longer in the
 * segment (a broken protocol: the run must end). */
int mr_ledger_line(const struct mr_seg *s, unsigned step, char **line, size_t *n, struct mr_step_sums *sums);

/* What resume learns while it cuts the ledger to the lines of steps < n_steps. */
struct mr_ledger_cut {
    unsigned char *committed; /* [n_pos], 1 = this plan position is in a kept line; malloc'ed */
    unsigned n_pos;
    unsigned items, dropped_items, dropped_lines;
    int duplicate; /* a position that two kept lines have, or -1 */
};
int mr_ledger_cut(const char *path, unsigned n_steps, unsigned n_pos, struct mr_ledger_cut *c, struct mr_err *err);
void mr_ledger_cut_free(struct mr_ledger_cut *c);

/* mean loss of a step; NaN when its weight is 0 */
double mr_step_loss(const struct mr_step_sums *sums);
/* A number as JSON: null when it is not finite. */
void mr_json_number(FILE *f, const char *key, double x);

#endif
