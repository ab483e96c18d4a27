/* A file written front to back, in blocks of which several are on their way to the disk at once: by io_uring, so that whoever fills the next
 * block does not wait for the last one; by pwrite, one block after the other, where io_uring is refused (one log line a process says so).
 *
 * A slot is the place of one block that is on its way.  One thread at a time.  Errors are MR_EXIT_ENV and name the path, the bytes, the cause
 * and what to do; after one, every call but close returns -1.  What was written until then stays in the file: its owner removes it. */
#ifndef MR_DATA_FILE_WRITE_H
#define MR_DATA_FILE_WRITE_H

#include <stddef.h>

#include "base/err.h"

enum { MR_FW_SLOTS = 4, MR_FW_MAX = 1 << 30 };     /* bytes of one put */

struct mr_fw;

/* Creates `path`, or empties it.  NULL with err. */
struct mr_fw *mr_fw_create(const char *path, struct mr_err *err);
/* 0 .. MR_FW_SLOTS - 1: the slots in turn.  Blocks until the bytes last put there have been taken.  -1 with err. */
int mr_fw_slot(struct mr_fw *w, struct mr_err *err);
/* `data` (bytes, at most MR_FW_MAX) follows what was put before.  It is the caller's, and must not change until mr_fw_slot names `slot` again,
 * or close returns.  0, or -1 with err. */
int mr_fw_put(struct mr_fw *w, int slot, const void *data, size_t bytes, struct mr_err *err);
/* Blocks until nothing is on its way, and, when `flush`, until all of it is on the disk; closes and frees.  0; -1 with err, also when an error
 * came before. */
int mr_fw_close(struct mr_fw *w, int flush, struct mr_err *err);

#endif
