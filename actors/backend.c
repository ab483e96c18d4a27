/* Kernel tables by device name; arenas of keepers by handle. */
#include "actors/backend.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int mr_backend_device(const char *device, int *index, struct mr_err *err)
{
    const char *pinned = getenv(MR_ENV_DEVICE);
    char why[512] = "";
    int rc;

    if (strncmp(device, "cuda:", 5) && strncmp(device, "GPU-", 4))
        return mr_err_set(err, MR_EXIT_CONFIG, "device \"%s\": allowed are \"cpu\", \"cuda:N\" and \"GPU-<uuid>\"", device);
    rc = mr_k_cuda_resolve(pinned && !strcmp(pinned, device) ? "cuda:0" : device, index, why, sizeof why);
    if (!rc)
        return 0;
    return mr_err_set(err, rc == -EINVAL ? MR_EXIT_CONFIG : MR_EXIT_ENV, "device \"%s\": %s", device, why);
}

static struct mr_k *open_cuda(const char *device, int deterministic, struct mr_err *err)
{
    char why[512] = "";
    int index;
    struct mr_k *k;

    if (mr_backend_device(device, &index, err))
        return NULL;
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

void *mr_backend_arena_open(const struct mr_arena_row *row, void *ctx, struct mr_err *err)
{
    char why[300] = "";
    void *base = NULL;
    int rc = mr_k_cuda_arena_open(row->handle, &base, why, sizeof why);

    (void)ctx;
    if (rc)
        mr_err_set(err, MR_EXIT_ENV, "generation %llu on %.40s, %llu bytes: %s%s", (unsigned long long)row->generation, row->device_uuid,
                   (unsigned long long)row->bytes, why,
                   rc == -ENXIO ? "; its keeper is dead, or this device cannot map that one's memory (millrace doctor)" : "");
    return base;
}

void mr_backend_arena_close(void *base, const struct mr_arena_row *row, void *ctx)
{
    (void)row, (void)ctx;
    mr_k_cuda_arena_close(base);
}
