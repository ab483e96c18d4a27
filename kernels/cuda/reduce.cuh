/* Column sums in two launches, with a fixed order of additions: every block of a backward kernel writes one row of partial sums
 * (blocks, cols), then one launch adds the rows.  No atomics, so the same inputs give the same bits. */
#ifndef MR_CUDA_REDUCE_CUH
#define MR_CUDA_REDUCE_CUH

#include "kernels/cuda/ctx.cuh"

/* dw (cols) += column sums of partial (rows, cols).  norm.cu */
int mr_cuda_column_sum(struct mr_cuda *c, int rows, int cols, const float *partial, float *dw);

#endif
