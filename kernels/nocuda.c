/* What a build without the CUDA backend says when it is asked for one.  With MR_HAVE_CUDA, kernels/cuda/ defines all of these. */
#include "kernels/kernels.h"

#ifndef MR_HAVE_CUDA
#include <errno.h>
#include <stdio.h>

static const char why[] = "this build has no CUDA backend; use \"device\": \"cpu\", or install the CUDA Toolkit and configure again with "
                          "-DMR_CUDA=ON";

static int no(char *err, size_t err_bytes)
{
    if (err && err_bytes)
        snprintf(err, err_bytes, "%s", why);
    return -ENOSYS;
}

struct mr_k *mr_k_cuda_create(int device, int deterministic, char *err, size_t err_bytes)
{
    (void)deterministic;
    if (err && err_bytes)
        snprintf(err, err_bytes, "device cuda:%d: %s", device, why);
    return NULL;
}

int mr_k_cuda_devices(struct mr_k_cuda_device *out, int *n, char *err, size_t err_bytes)
{
    (void)out;
    *n = 0;
    return no(err, err_bytes);
}

int mr_k_cuda_resolve(const char *device, int *index, char *err, size_t err_bytes)
{
    (void)device, (void)index;
    return no(err, err_bytes);
}

int mr_k_cuda_use(int device, char *err, size_t err_bytes)
{
    (void)device;
    return no(err, err_bytes);
}

int mr_k_cuda_mem_info(uint64_t *free_bytes, uint64_t *total_bytes, char *err, size_t err_bytes)
{
    *free_bytes = *total_bytes = 0;
    return no(err, err_bytes);
}

int mr_k_cuda_arena_alloc(uint64_t bytes, void **base, uint8_t handle[MR_K_CUDA_HANDLE], char uuid[MR_K_CUDA_UUID], char *err,
                          size_t err_bytes)
{
    (void)bytes, (void)base, (void)handle, (void)uuid;
    return no(err, err_bytes);
}

int mr_k_cuda_arena_open(const uint8_t handle[MR_K_CUDA_HANDLE], void **base, char *err, size_t err_bytes)
{
    (void)handle;
    *base = NULL;
    return no(err, err_bytes);
}

/* No context exists in such a build, so nobody can have anything to pass to those below. */
void mr_k_cuda_destroy(struct mr_k *k) { (void)k; }
void mr_k_cuda_arena_close(void *base) { (void)base; }
void *mr_k_cuda_host_alloc(struct mr_k *k, size_t bytes) { return (void)k, (void)bytes, NULL; }
void mr_k_cuda_host_free(struct mr_k *k, void *p) { (void)k, (void)p; }
int mr_k_cuda_put(struct mr_k *k, void *dst, const void *src, size_t bytes) { return (void)k, (void)dst, (void)src, (void)bytes, -ENOSYS; }
struct mr_k_mark *mr_k_cuda_mark_create(struct mr_k *k) { return (void)k, NULL; }
void mr_k_cuda_mark_destroy(struct mr_k *k, struct mr_k_mark *m) { (void)k, (void)m; }
int mr_k_cuda_mark_set(struct mr_k *k, struct mr_k_mark *m) { return (void)k, (void)m, -ENOSYS; }
int mr_k_cuda_mark_wait(struct mr_k *k, struct mr_k_mark *m) { return (void)k, (void)m, -ENOSYS; }
struct mr_k_pull *mr_k_cuda_pull_create(struct mr_k *k) { return (void)k, NULL; }
void mr_k_cuda_pull_destroy(struct mr_k *k, struct mr_k_pull *p) { (void)k, (void)p; }
int mr_k_cuda_pull_use(struct mr_k *k, struct mr_k_pull *p, int place) { return (void)k, (void)p, (void)place, -ENOSYS; }
int mr_k_cuda_pull_wait(struct mr_k *k, struct mr_k_pull *p, int place) { return (void)k, (void)p, (void)place, -ENOSYS; }

int mr_k_cuda_mark_ms(struct mr_k *k, const struct mr_k_mark *from, const struct mr_k_mark *to, double *ms)
{
    (void)k, (void)from, (void)to;
    *ms = 0;
    return -ENOSYS;
}

int mr_k_cuda_pull_begin(struct mr_k *k, struct mr_k_pull *p, int place, void *dst, const void *src, size_t bytes)
{
    (void)k, (void)p, (void)place, (void)dst, (void)src, (void)bytes;
    return -ENOSYS;
}

struct mr_k_reader *mr_k_cuda_reader_create(struct mr_k *k, int n_blocks, size_t block_bytes)
{
    (void)k, (void)n_blocks, (void)block_bytes;
    return NULL;
}

void mr_k_cuda_reader_destroy(struct mr_k_reader *r)
{
    (void)r;
}

void *mr_k_cuda_reader_block(struct mr_k_reader *r, int i)
{
    (void)r, (void)i;
    return NULL;
}

int mr_k_cuda_reader_read(struct mr_k_reader *r, void *host, const void *src, size_t bytes)
{
    (void)r, (void)host, (void)src, (void)bytes;
    return -ENOSYS;
}

int mr_k_comm_version(void)
{
    return 0;
}

int mr_k_comm_id(uint8_t id[MR_K_COMM_ID], char *err, size_t err_bytes)
{
    (void)id;
    no(err, err_bytes);
    return -EIO;
}

struct mr_k_comm *mr_k_comm_begin(struct mr_k *k, const uint8_t id[MR_K_COMM_ID], int rank, int ranks, char *err, size_t err_bytes)
{
    (void)k, (void)id, (void)rank, (void)ranks;
    no(err, err_bytes);
    return NULL;
}

int mr_k_comm_sum(struct mr_k_comm *c, const void *src, void *dst, size_t n, enum mr_k_dtype type, char *err, size_t err_bytes)
{
    (void)c, (void)src, (void)dst, (void)n, (void)type;
    no(err, err_bytes);
    return -EIO;
}

int mr_k_comm_poll(struct mr_k_comm *c, char *err, size_t err_bytes)
{
    (void)c;
    no(err, err_bytes);
    return -EIO;
}

int mr_k_comm_end(struct mr_k_comm *c, int broken, unsigned ms)
{
    (void)c, (void)broken, (void)ms;
    return 0;
}

int mr_k_cuda_random(struct mr_k *k, void *dst, uint64_t seed, size_t n, float std)
{
    (void)k, (void)dst, (void)seed, (void)n, (void)std;
    return -ENOSYS;
}
#endif
