/* The inside of a data set.  Private to data/. */
#ifndef MR_DATA_DATASET_PVT_H
#define MR_DATA_DATASET_PVT_H

#include "data/dataset.h"
#include "data/safetensors.h"

struct mr_dataset {
    char *path;
    uint64_t rows, tokens;
    const int32_t *ids;              /* [tokens] */
    const uint8_t *mask;             /* [tokens] */
    const int64_t *offset;           /* [rows + 1] */
    int32_t *len;                    /* [rows] usable length; 0 = dropped; before judging: -1 = bad record */
    void *own_ids, *own_mask, *own_offset;      /* what is in memory and not in the mapping */
    struct mr_st st;                 /* packed: the mapping */
    int packed;
    uint64_t dropped[MR_DROPS], truncated, blank, fingerprint;
};

/* ---- JSON lines ---- */

struct mr_jsonl_row {
    const int32_t *ids;              /* NULL: a bad record that is skipped */
    const uint8_t *mask;
    size_t n;
};

struct mr_jsonl_stats {
    uint64_t rows, bad, blank;       /* rows: with the bad ones */
};

/* Calls fn for every record in file order.  vocab_rows 0: ids are only checked to be plain.  skip_bad 0: the first 10 bad records are an
 * error with file:line:byte each (byte of the file, from 0).  fn returns 0, or -1 to stop (it has set err). */
int mr_jsonl_read(const char *path, int vocab_rows, int skip_bad, int (*fn)(void *arg, const struct mr_jsonl_row *row, struct mr_err *err),
                  void *arg, struct mr_jsonl_stats *stats, struct mr_err *err);

/* ---- the three kinds; each fills ids, mask, offset, len (0 or -1) ---- */

int mr_dataset_open_jsonl(struct mr_dataset *d, const struct mr_dataset_opts *o, struct mr_err *err);
int mr_dataset_open_packed(struct mr_dataset *d, struct mr_err *err);
int mr_dataset_open_synthetic(struct mr_dataset *d, const struct mr_dataset_opts *o, struct mr_err *err);

#endif
