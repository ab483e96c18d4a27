/* Weights of a target: from a checkpoint (or a seed) into one flat block of device memory, and where that block comes from. */
#ifndef MR_ACTORS_WEIGHTS_H
#define MR_ACTORS_WEIGHTS_H

#include "data/target_layout.h"
#include "kernels/kernels.h"

struct mr_env;

/* dst (act, on the device) = the tensor `name`, n elements.  -1 with err when it is absent, too small (lm_head may have more rows than are
 * used, nothing else may be larger) or of a dtype without a conversion. */
int mr_load_tensor(struct mr_k *k, const struct mr_model_files *files, const char *name, void *dst, size_t n, struct mr_err *err);

/* Every tensor of `l` into the block at `base` (l->bytes of k's device).  Complete on return.  On a GPU: large blocks, several in flight, read
 * by io_uring into pinned memory and copied on from there; with lines of progress.  0 or -1 with err. */
int mr_weights_load(struct mr_k *k, const struct mr_tlayout *l, const struct mr_model_files *files, void *base, struct mr_err *err);

/* The block of this actor's device, which its keeper holds.  The first one to come loads and seals it; all others wait, and map it.  The
 * fingerprint must be that of `l` and the topology's checkpoint.  Parks while the keeper has not registered it or another actor loads.
 * *base is never written by the caller.  0 or -1 with err, also on abort; -1 with err not set: the run is finished. */
int mr_weights_map(struct mr_env *e, struct mr_k *k, const struct mr_tlayout *l, void **base, struct mr_err *err);

#endif
