/* The stream of a cuda context, for code that mixes its own asynchronous copies and events with the table's calls (slabs, publication). */
#ifndef MR_KERNELS_CUDA_STREAM_H
#define MR_KERNELS_CUDA_STREAM_H

#include "kernels/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* cudaStream_t of a context made by mr_k_cuda_create; owned by the context, created non-blocking.  Never NULL. */
void *mr_k_cuda_stream(struct mr_k *k);

#ifdef __cplusplus
}
#endif

#endif
