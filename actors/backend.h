/* Which kernel table a device name stands for: the one place in the actors that knows the backends. */
#ifndef MR_ACTORS_BACKEND_H
#define MR_ACTORS_BACKEND_H

#include "base/err.h"
#include "kernels/kernels.h"

/* A context on "cpu" (`threads` >= 1) or "cuda:N".  NULL with err: MR_EXIT_CONFIG for another name, MR_EXIT_ENV when the device is not
 * there.  One context per thread. */
struct mr_k *mr_backend_open(const char *device, int threads, int deterministic, struct mr_err *err);
/* NULL is allowed. */
void mr_backend_close(struct mr_k *k);

#endif
