/* Kernel tables by device name. */
#include "actors/backend.h"

#include <stdio.h>
#include <string.h>

static struct mr_k *open_cuda(const char *device, int deterministic, struct mr_err *err)
{
    char why[512] = "";
    int index, end = 0;
    struct mr_k *k;

    if (sscanf(device, "cuda:%d%n", &index, &end) != 1 || device[end] || index < 0) {
        mr_err_set(err, MR_EXIT_CONFIG, "device \"%s\": allowed are \"cpu\" and \"cuda:N\"", device);
        return NULL;
    }
    k = mr_k_cuda_create(index, deterministic, why, sizeof why);
    if (!k)
        mr_err_set(err, MR_EXIT_ENV, "device \"%s\": %s", device, why);
    return k;
}

struct mr_k *mr_backend_open(const char *device, int threads, int deterministic, struct mr_err *err)
{
    struct mr_k *k;

    if (strcmp(device, "cpu"))
        return open_cuda(device, deterministic, err);
    k = mr_k_cpu_create(threads);
    if (!k)
        mr_err_set(err, MR_EXIT_ENV, "device \"cpu\": no memory for a context of %d threads", threads);
    return k;
}

void mr_backend_close(struct mr_k *k)
{
    if (!k)
        return;
    if (!strcmp(k->op->name, "cpu"))
        mr_k_cpu_destroy(k);
    else
        mr_k_cuda_destroy(k);
}
