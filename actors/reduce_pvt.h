/* Shared by reduce.c and reduce_nccl.c. */
#ifndef MR_ACTORS_REDUCE_PVT_H
#define MR_ACTORS_REDUCE_PVT_H

#include "actors/reduce.h"
#include "kernels/kernels.h"

/* Weights and losses of all headers, in rank order, into mine; then the sum of `word`'s step is there.  As sum. */
int mr_reduce_finish(struct mr_reduce *r, uint64_t word, struct mr_err *err);
/* Makes *r, which mr_reduce_create has filled, an all-reduce.  0 or -1 with err. */
int mr_reduce_nccl(struct mr_reduce *r, struct mr_err *err);

#endif
