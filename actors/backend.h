/* Which kernel table a device name stands for, and how a keeper's memory is opened: the one place in the actors that knows the backends. */
#ifndef MR_ACTORS_BACKEND_H
#define MR_ACTORS_BACKEND_H

#include "base/err.h"
#include "ipc/arena.h"
#include "kernels/kernels.h"

/* Set by the supervisor beside a CUDA_VISIBLE_DEVICES of one entry: the topology's name of that device. */
#define MR_ENV_DEVICE "MILLRACE_DEVICE"

/* "cuda:N" (counted among the entries of CUDA_VISIBLE_DEVICES) or "GPU-<uuid>" -> index for the calls of kernels.h.  0 or -1 with err:
 * MR_EXIT_CONFIG for another name, MR_EXIT_ENV when the device is not there. */
int mr_backend_device(const char *device, int *index, struct mr_err *err);

/* A context on "cpu" (`threads` >= 1) or on a GPU as above.  NULL with err.  One context per thread. */
struct mr_k *mr_backend_open(const char *device, int threads, int deterministic, struct mr_err *err);
/* NULL is allowed. */
void mr_backend_close(struct mr_k *k);

/* mr_arena_open_fn and mr_arena_close_fn of keepers' memory (ctx unused), for the thread's current device: after mr_backend_open. */
void *mr_backend_arena_open(const struct mr_arena_row *row, void *ctx, struct mr_err *err);
void mr_backend_arena_close(void *base, const struct mr_arena_row *row, void *ctx);

#endif
