/* A GPU that is none: everything that kernels.h says about CUDA, on the cpu backend, for tests of keepers, weights and publication on
 * machines without one.  millrace-actor-fake is the actor program linked with this file in the place of kernels/cuda/.
 *
 * What it imitates: memory belongs to the process that allocated it; others open it by handle as long as that process lives, and keep what
 * they have mapped when it dies (memfd, opened through /proc/<pid>/fd).  Work is complete when it is issued; activations are f32, so arenas
 * get twice the bytes asked for.
 *     FAKE_CUDA_DEVICES=N   devices (1)             FAKE_CUDA_FREE=BYTES  free memory of each (64 GiB)
 *     FAKE_CUDA_STICKY=F    whoever removes the file F has a sticky error from then on
 *     FAKE_CUDA_NO_PEER=1   no device can map another one's memory
 *     FAKE_CUDA_COMM_ERRORS=1 sums over ranks do not hang when a peer is gone, they fail
 *     FAKE_CUDA_COMM_STUCK=1  what is aborted does not let go
 *     FAKE_CUDA_LOAD_MS=N   every block of a checkpoint takes so long to arrive on the device */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/log.h"
#include "kernels/kernels.h"

struct fake {
    struct mr_k k;
    struct mr_k_ops ops;
    struct mr_k *cpu;
    int broken;
};

struct mr_k_mark { uint64_t ns; };
struct mr_k_pull { int unused; };

static struct { void *base; size_t bytes; } mapped[256];

static long number(const char *name, long otherwise)
{
    const char *s = getenv(name);

    return s && *s ? atol(s) : otherwise;
}

static int failed(char *err, size_t n, int rc, const char *why)
{
    snprintf(err, n, "%s", why);
    return rc;
}

/* ---- devices --------------------------------------------------------------------------------------------------------------- */

/* What CUDA_VISIBLE_DEVICES leaves: indices or uuids of the fake devices. */
static int visible(int at[MR_K_CUDA_DEVICES])
{
    const char *s = getenv("CUDA_VISIBLE_DEVICES");
    int all = (int)number("FAKE_CUDA_DEVICES", 1), n = 0;

    for (int i = 0; !s && i < all; i++)
        at[n++] = i;
    for (; s && *s; s += strcspn(s, ",") + (s[strcspn(s, ",")] == ',')) {
        int i = strncasecmp(s, "GPU-", 4) ? atoi(s) : (int)strtol(s + 4, NULL, 16);

        if (i < 0 || i >= all || n == MR_K_CUDA_DEVICES)
            break;
        at[n++] = i;
    }
    return n;
}

static void uuid_of(int device, char out[MR_K_CUDA_UUID])
{
    snprintf(out, MR_K_CUDA_UUID, "GPU-%08x-0000-0000-0000-000000000000", device & 0xffff);
}

int mr_k_cuda_devices(struct mr_k_cuda_device *out, int *n, char *err, size_t err_bytes)
{
    int at[MR_K_CUDA_DEVICES];

    (void)err, (void)err_bytes;
    *n = visible(at);
    for (int i = 0; i < *n; i++) {
        out[i] = (struct mr_k_cuda_device){.name = "Fake GPU", .major = 9, .sms = 1, .total_bytes = 64ull << 30};
        out[i].free_bytes = (uint64_t)number("FAKE_CUDA_FREE", 64l << 30);
        uuid_of(at[i], out[i].uuid);
        for (int j = 0; j < *n; j++)
            out[i].peer[j] = i == j || !getenv("FAKE_CUDA_NO_PEER");
    }
    return 0;
}

int mr_k_cuda_resolve(const char *device, int *index, char *err, size_t err_bytes)
{
    int at[MR_K_CUDA_DEVICES], n = visible(at);
    char uuid[MR_K_CUDA_UUID];

    *index = strncmp(device, "cuda:", 5) ? -1 : atoi(device + 5);
    for (int i = 0; i < n && !strncmp(device, "GPU-", 4); i++) {
        uuid_of(at[i], uuid);
        if (!strncasecmp(uuid, device, strlen(device)))
            *index = i;
    }
    return *index >= 0 && *index < n ? 0 : failed(err, err_bytes, -ENODEV, "no such fake device is visible");
}

int mr_k_cuda_use(int device, char *err, size_t err_bytes)
{
    int at[MR_K_CUDA_DEVICES];

    return device < visible(at) ? 0 : failed(err, err_bytes, -EIO, "no such fake device");
}

int mr_k_cuda_mem_info(uint64_t *free_bytes, uint64_t *total_bytes, char *err, size_t err_bytes)
{
    (void)err, (void)err_bytes;
    *free_bytes = (uint64_t)number("FAKE_CUDA_FREE", 64l << 30);
    *total_bytes = 64ull << 30;
    return 0;
}

/* ---- arenas ---------------------------------------------------------------------------------------------------------------- */

static void *map(int fd, size_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

    for (int i = 0; p != MAP_FAILED && i < 256; i++)
        if (!mapped[i].base) {
            mapped[i].base = p;
            mapped[i].bytes = bytes;
            return p;
        }
    return NULL;
}

static void unmap(void *base)
{
    for (int i = 0; base && i < 256; i++)
        if (mapped[i].base == base) {
            munmap(base, mapped[i].bytes);
            mapped[i].base = NULL;
        }
}

int mr_k_cuda_arena_alloc(uint64_t bytes, void **base, uint8_t handle[MR_K_CUDA_HANDLE], char uuid[MR_K_CUDA_UUID], char *err,
                          size_t err_bytes)
{
    int at[MR_K_CUDA_DEVICES], fd = memfd_create("fake-gpu", MFD_CLOEXEC);
    size_t room = 2 * (size_t)bytes;

    if (fd < 0 || ftruncate(fd, (off_t)room) || !(*base = map(fd, room)))
        return failed(err, err_bytes, -ENOMEM, "no memory for the fake device");
    memset(handle, 0, MR_K_CUDA_HANDLE);
    snprintf((char *)handle, MR_K_CUDA_HANDLE, "/proc/%d/fd/%d", (int)getpid(), fd);
    visible(at);
    uuid_of(at[0], uuid);
    return 0;
}

int mr_k_cuda_arena_open(const uint8_t handle[MR_K_CUDA_HANDLE], void **base, char *err, size_t err_bytes)
{
    int fd = open((const char *)handle, O_RDWR | O_CLOEXEC);
    struct stat st;

    *base = NULL;
    if (fd < 0 || fstat(fd, &st))
        return failed(err, err_bytes, -ENXIO, "the fake device's process is gone");
    *base = map(fd, (size_t)st.st_size);
    close(fd);
    return *base ? 0 : failed(err, err_bytes, -EIO, "cannot map");
}

void mr_k_cuda_arena_close(void *base)
{
    unmap(base);
}

static int learn(struct mr_k *k);

/* ---- contexts -------------------------------------------------------------------------------------------------------------- */

static struct fake *of(struct mr_k *k)
{
    return (struct fake *)(void *)k;                     /* k is its first member */
}

struct mr_k *mr_k_cuda_create(int device, int deterministic, char *err, size_t err_bytes)
{
    struct fake *f = calloc(1, sizeof *f);

    if (mr_k_cuda_use(device, err, err_bytes) || !f || !(f->cpu = mr_k_cpu_create(1))) {
        free(f);
        return NULL;
    }
    f->ops = *f->cpu->op;
    f->ops.name = "cuda";
    f->ops.sync = learn;
    f->k = *f->cpu;
    f->k.op = &f->ops;
    f->k.deterministic = deterministic;
    return &f->k;
}

void mr_k_cuda_destroy(struct mr_k *k)
{
    if (!k)
        return;
    mr_k_cpu_destroy(of(k)->cpu);
    free(of(k));
}

void *mr_k_cuda_host_alloc(struct mr_k *k, size_t bytes)
{
    (void)k;
    return calloc(1, bytes);
}

void mr_k_cuda_host_free(struct mr_k *k, void *p)
{
    (void)k;
    free(p);
}

int mr_k_cuda_put(struct mr_k *k, void *dst, const void *src, size_t bytes)
{
    long ms = number("FAKE_CUDA_LOAD_MS", 0);
    struct timespec t = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};

    (void)k;
    if (ms)
        nanosleep(&t, NULL);
    memcpy(dst, src, bytes);
    return 0;
}

struct mr_k_mark *mr_k_cuda_mark_create(struct mr_k *k)
{
    (void)k;
    return calloc(1, sizeof(struct mr_k_mark));
}

void mr_k_cuda_mark_destroy(struct mr_k *k, struct mr_k_mark *m)
{
    (void)k;
    free(m);
}

int mr_k_cuda_mark_set(struct mr_k *k, struct mr_k_mark *m)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    m->ns = (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
    return of(k)->broken ? -EIO : 0;
}

/* Where the host waits for the device, it learns of errors. */
static int learn(struct mr_k *k)
{
    const char *sticky = getenv("FAKE_CUDA_STICKY");

    if (!of(k)->broken && sticky && !unlink(sticky)) {
        of(k)->broken = 1;
        mr_error("cuda device 0: waiting for the device: an illegal memory access was encountered (cudaErrorIllegalAddress)");
    }
    return of(k)->broken ? -EIO : 0;
}

int mr_k_cuda_mark_wait(struct mr_k *k, struct mr_k_mark *m)
{
    (void)m;
    return learn(k);
}

int mr_k_cuda_mark_ms(struct mr_k *k, const struct mr_k_mark *from, const struct mr_k_mark *to, double *ms)
{
    (void)k;
    *ms = (double)(to->ns - from->ns) * 1e-6;
    return 0;
}

struct mr_k_pull *mr_k_cuda_pull_create(struct mr_k *k)
{
    (void)k;
    return calloc(1, sizeof(struct mr_k_pull));
}

void mr_k_cuda_pull_destroy(struct mr_k *k, struct mr_k_pull *p)
{
    (void)k;
    free(p);
}

int mr_k_cuda_pull_begin(struct mr_k *k, struct mr_k_pull *p, int place, void *dst, const void *src, size_t bytes)
{
    (void)k, (void)p, (void)place;
    memcpy(dst, src, bytes);
    return 0;
}

int mr_k_cuda_pull_use(struct mr_k *k, struct mr_k_pull *p, int place)
{
    return (void)k, (void)p, (void)place, 0;
}

int mr_k_cuda_pull_wait(struct mr_k *k, struct mr_k_pull *p, int place)
{
    return (void)k, (void)p, (void)place, 0;
}

struct mr_k_reader { char *block; size_t bytes; };

struct mr_k_reader *mr_k_cuda_reader_create(struct mr_k *k, int n_blocks, size_t block_bytes)
{
    struct mr_k_reader *r = calloc(1, sizeof *r);

    (void)k;
    r->bytes = block_bytes;
    r->block = malloc((size_t)n_blocks * block_bytes);
    return r;
}

void mr_k_cuda_reader_destroy(struct mr_k_reader *r)
{
    if (r)
        free(r->block);
    free(r);
}

void *mr_k_cuda_reader_block(struct mr_k_reader *r, int i)
{
    return r->block + (size_t)i * r->bytes;
}

int mr_k_cuda_reader_read(struct mr_k_reader *r, void *host, const void *src, size_t bytes)
{
    (void)r;
    memcpy(host, src, bytes);
    return 0;
}

/* ---- sums over ranks: a memfd of the rank that made the id; like the real ones, they hang when a peer is gone ------------------ */

enum { COMM_BYTES = 64 << 20 };

struct comm_map { int joined[16]; uint64_t entered[16], left[16]; };     /* joined: pid */

struct mr_k_comm {
    struct comm_map *m;
    int rank, ranks, summing;
    uint64_t round;
    float *dst;
    size_t n, bytes;
};

int mr_k_comm_version(void)
{
    return 1;
}

int mr_k_comm_id(uint8_t id[MR_K_COMM_ID], char *err, size_t err_bytes)
{
    int fd = memfd_create("fake-comm", MFD_CLOEXEC);

    if (fd < 0 || ftruncate(fd, 16l * COMM_BYTES))
        return failed(err, err_bytes, -EIO, "no memfd");
    memset(id, 0, MR_K_COMM_ID);
    snprintf((char *)id, MR_K_COMM_ID, "/proc/%d/fd/%d", (int)getpid(), fd);
    return 0;
}

struct mr_k_comm *mr_k_comm_begin(struct mr_k *k, const uint8_t id[MR_K_COMM_ID], int rank, int ranks, char *err, size_t err_bytes)
{
    struct mr_k_comm *c = calloc(1, sizeof *c);
    int fd = open((const char *)id, O_RDWR | O_CLOEXEC);

    (void)k;
    c->bytes = 16ul * COMM_BYTES;
    c->m = fd < 0 ? MAP_FAILED : mmap(NULL, c->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    c->rank = rank;
    c->ranks = ranks;
    if (fd >= 0)
        close(fd);
    if (c->m == MAP_FAILED) {
        failed(err, err_bytes, 0, "the group's maker is gone");
        free(c);
        return NULL;
    }
    __atomic_store_n(&c->m->joined[rank], (int)getpid(), __ATOMIC_RELEASE);
    return c;
}

static float *comm_slot(const struct mr_k_comm *c, int rank)
{
    return (float *)(void *)((char *)c->m + (size_t)(rank + 1) * COMM_BYTES);
}

int mr_k_comm_sum(struct mr_k_comm *c, const void *src, void *dst, size_t n, enum mr_k_dtype type, char *err, size_t err_bytes)
{
    if (type != MR_K_F32 || n * sizeof(float) > COMM_BYTES)
        return failed(err, err_bytes, -EIO, "the fake device sums f32 only");
    memcpy(comm_slot(c, c->rank), src, n * sizeof(float));
    c->dst = dst;
    c->n = n;
    c->summing = 1;
    __atomic_store_n(&c->m->entered[c->rank], ++c->round, __ATOMIC_RELEASE);
    return 0;
}

static int gone(int pid)
{
    char path[40], text[200] = "", *name_end;
    FILE *f;

    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    if (!(f = fopen(path, "re")))
        return 1;
    text[fread(text, 1, sizeof text - 1, f)] = 0;
    fclose(f);
    name_end = strrchr(text, ')');
    return !name_end || strchr("ZX", name_end[2]);
}

int mr_k_comm_poll(struct mr_k_comm *c, char *err, size_t err_bytes)
{
    for (int r = 0; r < c->ranks && getenv("FAKE_CUDA_COMM_ERRORS"); r++) {
        int pid = __atomic_load_n(&c->m->joined[r], __ATOMIC_ACQUIRE);

        if (pid && gone(pid))
            return failed(err, err_bytes, -EIO, "remote process exited");
    }
    for (int r = 0; r < c->ranks; r++)
        if (c->summing ? __atomic_load_n(&c->m->entered[r], __ATOMIC_ACQUIRE) < c->round : !__atomic_load_n(&c->m->joined[r], __ATOMIC_ACQUIRE))
            return -EINPROGRESS;
    if (c->summing == 1) {
        for (size_t i = 0; i < c->n; i++) {
            float s = comm_slot(c, 0)[i];

            for (int r = 1; r < c->ranks; r++)
                s += comm_slot(c, r)[i];
            c->dst[i] = s;
        }
        c->summing = 2;
        __atomic_store_n(&c->m->left[c->rank], c->round, __ATOMIC_RELEASE);
    }
    for (int r = 0; r < c->ranks && c->summing; r++)     /* nobody overwrites what another one still adds up */
        if (__atomic_load_n(&c->m->left[r], __ATOMIC_ACQUIRE) < c->round)
            return -EINPROGRESS;
    c->summing = 0;
    return 0;
}

int mr_k_comm_end(struct mr_k_comm *c, int broken, unsigned ms)
{
    (void)ms;
    if (broken && getenv("FAKE_CUDA_COMM_STUCK"))
        return -ETIMEDOUT;
    if (c)
        munmap(c->m, c->bytes);
    free(c);
    return 0;
}

int mr_k_cuda_random(struct mr_k *k, void *dst, uint64_t seed, size_t n, float std)
{
    (void)k;
    mr_k_random_f32(dst, seed, 0, n, std);
    return 0;
}
