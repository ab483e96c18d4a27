/* Acceptance length of a drafter on held-out rows, without a generation loop (docs/design.md 9).
 *
 * Every position from a row's first supervised token on is tried as an anchor, in one batched forward pass.  Then the row is walked as a
 * server would: from the block at the first supervised token, r leading correct slots advance by r + 1 (the target's own token counts),
 * cut at the row's end.  accept_len = sum of advances / number of blocks, over all rows.  Loss and accuracy are over all supervised slots
 * of all valid anchors (an anchor and its successor are supervised), each slot with weight 1.
 */
#ifndef MR_ACTORS_EVAL_H
#define MR_ACTORS_EVAL_H

#include <stdint.h>

#include "base/err.h"
#include "data/dataset.h"

enum { MR_EVAL_SLOTS = 64 };         /* largest block size that can be evaluated */

struct mr_eval_opts {
    const char *target, *draft, *data;   /* checkpoint directories and a data set (data/dataset.h) */
    const char *device;                  /* "cpu" or "cuda:N" */
    int threads;
    uint64_t limit;                      /* rows; 0 = all */
    void (*progress)(void *ctx, uint64_t done, uint64_t rows, double accept_len);   /* NULL, or called after every row */
    void *ctx;
};

struct mr_eval_result {
    uint64_t rows, tokens;               /* evaluated rows and all their tokens */
    uint64_t blocks, advances;           /* of the walk */
    uint64_t labels[MR_EVAL_SLOTS], correct[MR_EVAL_SLOTS];   /* per slot, index 1.. */
    double loss_sum;
    int block_size;
    uint64_t dropped[MR_DROPS];
};

/* 0 or -1 with err.  Reads files only. */
int mr_eval(struct mr_eval_result *r, const struct mr_eval_opts *o, struct mr_err *err);

/* One row's walk: `argmax` ((n - 1 - first) * B) are the predictions of the blocks at first, first + 1, ... n - 2.  Adds to *blocks and
 * *advances. */
void mr_eval_walk(const int32_t *ids, int n, int first, int B, const int32_t *argmax, uint64_t *blocks, uint64_t *advances);

#endif
