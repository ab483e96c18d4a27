/* Append-only files of one JSON object a line, each line naming a step: the ledger and metrics/steps.jsonl. */
#ifndef MR_RUNTIME_JSONL_H
#define MR_RUNTIME_JSONL_H

#include <jansson.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

struct mr_jsonl {
    int fd;         /* -1 = not open */
    uint64_t bytes; /* whole lines on disk */
};

/* Opens for appending, creating it (0644).  0 or -1 with err (MR_EXIT_ENV). */
int mr_jsonl_open(struct mr_jsonl *j, const char *path, struct mr_err *err);
void mr_jsonl_close(struct mr_jsonl *j);
/* Appends one line (with its '\n').  All of it or nothing: after a short write the file is cut back.  0 or a negative errno. */
int mr_jsonl_append(struct mr_jsonl *j, const char *line, size_t n);
/* Takes back lines appended after the file was `bytes` long. */
void mr_jsonl_truncate(struct mr_jsonl *j, uint64_t bytes);
int mr_jsonl_sync(struct mr_jsonl *j); /* fdatasync: 0 or a negative errno; -ENOLINK: somebody has removed the file */

/* Keeps the lines of steps < n_steps, atomically (a new file, fsync, rename), and calls fn for every whole line, kept or not.  A torn last
 * line is dropped.  The kept lines must be those of steps 0 .. n_steps - 1, in order, unless `lax`.  A missing file is an empty one. */
typedef void (*mr_jsonl_fn)(const json_t *line, int kept, void *arg);
int mr_jsonl_cut(const char *path, unsigned n_steps, int lax, mr_jsonl_fn fn, void *arg, struct mr_err *err);

/* Writes text to PATH through PATH.tmp, fsync and rename.  0 or -1 with err (MR_EXIT_ENV). */
int mr_write_file(const char *path, const char *text, size_t n, struct mr_err *err);

#endif
