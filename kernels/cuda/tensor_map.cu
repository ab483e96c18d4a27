/* Tensor maps: what the tensor copy engine of Hopper has to know of a matrix.  The driver makes them; its function is looked up at the first use. */
#include "kernels/cuda/ctx.cuh"

#include <cuda.h>

typedef CUresult (*encode_fn)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *,
                              const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                              CUtensorMapFloatOOBfill);

int mr_cuda_tensor_open(struct mr_cuda *c)
{
    cudaDriverEntryPointQueryResult found;
    void *fn = NULL;

    if (c->encode_tiled)
        return 0;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &fn, 12000, cudaEnableDefault, &found) != cudaSuccess ||
        found != cudaDriverEntryPointSuccess) {
        cudaGetLastError();
        return -ENOTSUP;
    }
    c->encode_tiled = fn;
    return 0;
}

int mr_cuda_tensor_map(struct mr_cuda *c, CUtensorMap *map, const void *p, int rows, int cols, int ld, int box_rows, int box_cols)
{
    const cuuint64_t dim[2] = {(cuuint64_t)cols, (cuuint64_t)rows}, stride[1] = {(cuuint64_t)ld * sizeof(bf16)};
    const cuuint32_t box[2] = {(cuuint32_t)box_cols, (cuuint32_t)box_rows}, step[2] = {1, 1};
    CUresult r = ((encode_fn)c->encode_tiled)(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, (void *)p, dim, stride, box, step,
                                              CU_TENSOR_MAP_INTERLEAVE_NONE,
                                              box_cols == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                                              CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);

    return r == CUDA_SUCCESS ? 0 : -EINVAL;
}
