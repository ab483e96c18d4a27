/* What a build without the CUDA backend says when it is asked for one.  With MR_HAVE_CUDA, kernels/cuda/ defines these two. */
#include "kernels/kernels.h"

#ifndef MR_HAVE_CUDA
#include <stdio.h>

struct mr_k *mr_k_cuda_create(int device, int deterministic, char *err, size_t err_bytes)
{
    (void)deterministic;
    if (err && err_bytes)
        snprintf(err, err_bytes,
                 "this build has no CUDA backend: device cuda:%d was asked for; use \"device\": \"cpu\", or install the CUDA Toolkit and "
                 "configure again with -DMR_CUDA=ON",
                 device);
    return NULL;
}

void mr_k_cuda_destroy(struct mr_k *k)
{
    (void)k;     /* never anything to destroy: create has returned NULL */
}
#endif
