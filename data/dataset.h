/* A data set: rows of token ids with loss masks.
 *
 * Files: JSON lines {"input_ids": [...], "loss_mask": [...]} (slow, kept in memory: for `pack` and small sets), or the packed form that
 * `millrace pack` writes: a safetensors file with `ids` I32 (or U16) [n_tokens], `mask` U8 [n_tokens], `offsets` I64 [n_rows + 1]
 * (mapped, not read: a data set may be larger than memory; U16 ids are widened in memory, `pack` uses them only for small sets).
 * "synthetic:N?min=A&max=B&seed=S" makes N random rows (tests, benches).
 * Rows are numbered from 0 in file order: that number is the sample id everywhere.
 */
#ifndef MR_DATA_DATASET_H
#define MR_DATA_DATASET_H

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

enum mr_drop { MR_DROP_SHORT, MR_DROP_MASKED, MR_DROP_OVERLONG, MR_DROP_BAD, MR_DROPS };
extern const char *const mr_drop_name[MR_DROPS];      /* "too_short", "all_masked", "over_long", "bad_record" */

struct mr_row {
    const int32_t *ids;
    const uint8_t *mask;
    int n;
};
struct mr_dataset;

struct mr_dataset_opts {
    int vocab_rows;          /* ids must be below this: the target's vocab_size, since each may be a label; 0 = not checked */
    int skip_bad;            /* 1: bad records are counted and skipped; 0: the first 10 are reported and loading fails */
    int max_tokens;          /* rows above are dropped (or cut) when > 0 */
    int min_tokens;          /* rows below are dropped; at least 2 */
    int truncate;
    int need_anchor;         /* 1: a row needs two consecutive supervised tokens (else MR_DROP_MASKED) */
};

/* Looks at every token once.  NULL with err (MR_EXIT_CONFIG): unreadable, damaged, or bad records without skip_bad.  A data set in which
 * nothing is usable opens: the counts say why. */
struct mr_dataset *mr_dataset_open(const char *path, const struct mr_dataset_opts *o, struct mr_err *err);
void mr_dataset_close(struct mr_dataset *d);
uint64_t mr_dataset_rows(const struct mr_dataset *d);               /* all rows of the file, dropped ones included */
/* Row i (pointer into the mapping, which lives as long as d); n is mr_dataset_len.  Safe from any thread. */
struct mr_row mr_dataset_row(const struct mr_dataset *d, uint64_t i);
/* Usable length of row i: 0 when it is dropped. */
int mr_dataset_len(const struct mr_dataset *d, uint64_t i);
const uint64_t *mr_dataset_dropped(const struct mr_dataset *d);     /* [MR_DROPS] */
uint64_t mr_dataset_truncated(const struct mr_dataset *d);          /* kept, but cut to max_tokens; kept + all dropped = rows */
uint64_t mr_dataset_blank_lines(const struct mr_dataset *d);        /* JSON lines only; they are no rows */
/* Of all rows as they are in the file (not of the options): the same for a JSON lines file and its packed form. */
uint64_t mr_dataset_fingerprint(const struct mr_dataset *d);

/* millrace pack: JSONL -> packed safetensors, streaming.  `report` (may be NULL) gets one summary line.  Bad records: line and byte of the
 * first 10, or (skip_bad) left out and counted; the rows of OUT are then numbered without them. */
int mr_pack(const char *in, const char *out, int skip_bad, char *report, size_t report_bytes, struct mr_err *err);

#endif
