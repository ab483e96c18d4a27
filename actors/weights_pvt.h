/* Shared by weights.c and weights_read.c. */
#ifndef MR_ACTORS_WEIGHTS_PVT_H
#define MR_ACTORS_WEIGHTS_PVT_H

#include "actors/weights.h"

/* The kernel dtype of a file's, and its bytes.  0 or -EINVAL. */
int mr_weights_dtype(enum mr_st_dtype t, enum mr_k_dtype *out, size_t *bytes);
/* The tensor, checked against n; NULL with err. */
const struct mr_st_tensor *mr_weights_find(const struct mr_model_files *files, const char *name, size_t n, const struct mr_st **st,
                                           struct mr_err *err);
/* mr_weights_load for a GPU (weights_read.c). */
int mr_weights_read(struct mr_k *k, const struct mr_tlayout *l, const struct mr_model_files *files, void *base, struct mr_err *err);

#endif
