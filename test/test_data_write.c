/* Files written through io_uring: the same bytes as the plain way, however the kernel behaves; several blocks under way; errors.
 *
 * Linked with --wrap (test/checkpoints.cmake): io_uring_queue_init can be refused, io_uring_submit can hold writes back or shorten them, pwrite can
 * write less than it is asked or fail, fsync can fail, malloc is watched. */
#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>

#include "data/drafter_config.h"
#include "data/file_write.h"
#include "data/safetensors.h"

static char dir[64];

/* ---- the kernel's part ------------------------------------------------------------------------------------------------------ */

static struct {
    int refuse;                  /* no io_uring */
    int shorten;                 /* writes take about a third of what they are asked, the first five times each */
    int op;                      /* io_uring operation in the place of every write; 0: none */
    int hold;                    /* submissions to be held back until one more comes */
    int fail_errno, fsync_errno; /* of pwrite, of fsync */
    unsigned submitted, plain;
    size_t largest;              /* malloc */
} kernel;

int __real_io_uring_queue_init(unsigned n, struct io_uring *ring, unsigned flags);
int __wrap_io_uring_queue_init(unsigned n, struct io_uring *ring, unsigned flags);
int __real_io_uring_submit(struct io_uring *ring);
int __wrap_io_uring_submit(struct io_uring *ring);
ssize_t __real_pwrite(int fd, const void *p, size_t n, off_t at);
ssize_t __wrap_pwrite(int fd, const void *p, size_t n, off_t at);
int __real_fsync(int fd);
int __wrap_fsync(int fd);
void *__real_malloc(size_t n);
void *__wrap_malloc(size_t n);

int __wrap_io_uring_queue_init(unsigned n, struct io_uring *ring, unsigned flags)
{
    return kernel.refuse ? -EPERM : __real_io_uring_queue_init(n, ring, flags);
}

int __wrap_io_uring_submit(struct io_uring *ring)
{
    struct io_uring_sqe *sqe = &ring->sq.sqes[(ring->sq.sqe_tail - 1) & *ring->sq.kring_mask];

    kernel.submitted++;
    if (kernel.shorten && sqe->len > 2 && kernel.submitted % 6)
        sqe->len = sqe->len / 3 + 1;
    if (kernel.op)
        sqe->opcode = (uint8_t)kernel.op;
    if (kernel.hold && kernel.hold--)
        return 1;
    return __real_io_uring_submit(ring) > 0;
}

ssize_t __wrap_pwrite(int fd, const void *p, size_t n, off_t at)
{
    kernel.plain++;
    if (kernel.fail_errno) {
        errno = kernel.fail_errno;
        return -1;
    }
    if (kernel.shorten && kernel.plain % 6 == 1) {
        errno = EINTR;
        return -1;
    }
    return __real_pwrite(fd, p, kernel.shorten && kernel.plain % 6 ? n / 3 + 1 : n, at);
}

int __wrap_fsync(int fd)
{
    errno = kernel.fsync_errno;
    return kernel.fsync_errno ? -1 : __real_fsync(fd);
}

void *__wrap_malloc(size_t n)
{
    kernel.largest = n > kernel.largest ? n : kernel.largest;
    return __real_malloc(n);
}

static int no_ring(void)
{
    struct io_uring ring;

    if (__real_io_uring_queue_init(1, &ring, 0))
        return 1;
    io_uring_queue_exit(&ring);
    return 0;
}

/* ---- what is written -------------------------------------------------------------------------------------------------------- */

enum { BIG = (9 * MR_ST_BLOCK + 4) / 4, ROUNDED = 5 * MR_ST_BLOCK / 4 + 3, SMALL = 17 };

static float *big, *rounded;
static const unsigned char small[SMALL] = "seventeen bytes.";

static float value(uint64_t i)
{
    uint32_t u = (uint32_t)(i * 2654435761u);
    float x;

    memcpy(&x, &u, 4);                               /* any bits: infinities and NaNs too */
    return x;
}

static struct mr_st_out *make_out(void)
{
    struct mr_st_out *o = mr_st_out_create();
    uint64_t n = BIG, r[2] = {ROUNDED, 1}, s = SMALL, none = 0;

    mr_st_out_add(o, "small", MR_ST_U8, &s, 1, small);
    mr_st_out_add_rounded(o, "rounded", r, 2, rounded);
    mr_st_out_add(o, "none", MR_ST_F32, &none, 1, big);
    mr_st_out_add(o, "big", MR_ST_F32, &n, 1, big);
    mr_st_out_meta(o, "format", "pt");
    return o;
}

static unsigned char *slurp(const char *path, size_t *n)
{
    FILE *f = fopen(path, "rb");
    unsigned char *p;
    long end;

    assert_non_null(f);
    fseek(f, 0, SEEK_END);
    end = ftell(f);
    rewind(f);
    p = malloc((size_t)end + 1);
    assert_int_equal(fread(p, 1, (size_t)end, f), end);
    fclose(f);
    *n = (size_t)end;
    return p;
}

/* Byte by byte: the data in the order of the format, each after the other. */
static void check_file(const char *path)
{
    size_t n, at;
    unsigned char *p = slurp(path, &n), *q = __real_malloc((size_t)ROUNDED * 2);

    at = 8 + (p[0] | (size_t)p[1] << 8);
    assert_int_equal(n, at + (size_t)BIG * 4 + (size_t)ROUNDED * 2 + SMALL);
    assert_memory_equal(p + at, big, (size_t)BIG * 4);
    at += (size_t)BIG * 4;
    for (size_t i = 0; i < ROUNDED; i++) {
        uint16_t h = mr_bf16(rounded[i]);

        memcpy(q + 2 * i, &h, 2);
    }
    assert_memory_equal(p + at, q, (size_t)ROUNDED * 2);
    assert_memory_equal(p + at + (size_t)ROUNDED * 2, small, SMALL);
    free(p);
    free(q);
}

/* ---- memory that is not the host's ------------------------------------------------------------------------------------------- */

static struct { char *block[MR_ST_BLOCKS]; int reads, fail_at, no_blocks; } device;

static void *device_block(void *ctx, int i)
{
    (void)ctx;
    if (device.no_blocks)
        return NULL;
    if (!device.block[i])
        device.block[i] = __real_malloc(MR_ST_BLOCK);
    return device.block[i];
}

static int device_read(void *ctx, void *host, const void *data, size_t bytes)
{
    (void)ctx;
    assert_in_range(bytes, 1, MR_ST_BLOCK);
    if (++device.reads == device.fail_at)
        return -EIO;
    memcpy(host, data, bytes);
    return 0;
}

static const struct mr_st_source source = {.block = device_block, .read = device_read};

static void write_one(const char *name, int from_device)
{
    struct mr_st_out *o = make_out();
    struct mr_err err = {0};
    char path[128], tmp[140];

    snprintf(path, sizeof path, "%s/%s", dir, name);
    snprintf(tmp, sizeof tmp, "%s.tmp", path);
    if (from_device)
        mr_st_out_source(o, &source);
    if (mr_st_out_write(o, path, &err))
        fail_msg("%s", err.msg);
    mr_st_out_free(o);
    assert_int_equal(access(tmp, F_OK), -1);
    check_file(path);
    unlink(path);
}

/* ---- tests ------------------------------------------------------------------------------------------------------------------- */

static int reset(void **state)
{
    (void)state;
    memset(&kernel, 0, sizeof kernel);
    device.reads = device.fail_at = device.no_blocks = 0;
    return 0;
}

static void ways(void **state)
{
    (void)state;
    for (int from = 0; from < 2; from++)
        for (int refuse = no_ring(); refuse < 2; refuse++)
            for (int shorten = 0; shorten < 2; shorten++) {
                reset(NULL);
                kernel.refuse = refuse;
                kernel.shorten = shorten;
                write_one("a.safetensors", from);
                assert_true((kernel.plain == 0) == !refuse);
                assert_true((kernel.submitted == 0) == refuse);
            }
}

/* A kernel that knows the ring, but not writes on it: what the ring refuses is written plainly. */
static void old_kernel(void **state)
{
    (void)state;
    if (no_ring())
        skip();
    kernel.op = 200;
    write_one("a.safetensors", 1);
    assert_true(kernel.plain > 0);
}

/* The first three writes never begin before the fourth is asked for: whoever waited for one of them would wait for ever. */
static void several_under_way(void **state)
{
    (void)state;
    if (no_ring())
        skip();
    alarm(120);
    kernel.hold = MR_FW_SLOTS - 1;
    write_one("a.safetensors", 1);
    alarm(0);
    assert_int_equal(kernel.hold, 0);
}

/* Neither rounding nor reading needs memory for more than a block at once. */
static void memory(void **state)
{
    struct mr_st_out *o = make_out();
    struct mr_err err = {0};
    char path[128];

    (void)state;
    snprintf(path, sizeof path, "%s/m.safetensors", dir);
    kernel.largest = 0;
    assert_int_equal(mr_st_out_write(o, path, &err), 0);
    assert_int_equal(kernel.largest, MR_ST_BLOCK);
    mr_st_out_free(o);
    unlink(path);
}

static void fails(const char *path, const char *const *words, int from_device)
{
    struct mr_st_out *o = make_out();
    struct mr_err err = {0};
    char tmp[140], old[8] = "";
    FILE *f;

    snprintf(tmp, sizeof tmp, "%s.tmp", path);
    if (from_device)
        mr_st_out_source(o, &source);
    assert_int_equal(mr_st_out_write(o, path, &err), -1);
    mr_st_out_free(o);
    for (; *words; words++)
        if (!strstr(err.msg, *words))
            fail_msg("message \"%s\" lacks \"%s\"", err.msg, *words);
    assert_int_equal(err.code, MR_EXIT_ENV);
    assert_int_equal(access(tmp, F_OK), -1);         /* nothing left, */
    f = fopen(path, "rb");
    assert_non_null(f);
    assert_int_equal(fread(old, 1, 4, f), 3);        /* and the file of that name is the old one */
    assert_string_equal(old, "old");
    fclose(f);
}

static void put_old(char *path, size_t bytes)
{
    FILE *f;

    snprintf(path, bytes, "%s/e.safetensors", dir);
    f = fopen(path, "wb");
    assert_non_null(f);
    fputs("old", f);
    fclose(f);
}

#define WORDS(...) ((const char *const[]){__VA_ARGS__, NULL})

static void errors(int refuse)
{
    struct rlimit was, now;
    char path[128], tmp[140];

    getrlimit(RLIMIT_FSIZE, &was);
    now = (struct rlimit){(rlim_t)2 * MR_ST_BLOCK + 12345, was.rlim_max};
    put_old(path, sizeof path);
    snprintf(tmp, sizeof tmp, "%s.tmp", path);
    for (int from = 0; from < 2; from++) {
        reset(NULL);
        kernel.refuse = refuse;
        assert_int_equal(symlink("/dev/full", tmp), 0);
        fails(path, WORDS(tmp, "No space left on device", "bytes at 0:", "make room"), from);
        assert_int_equal(symlink("/proc/self/mem", tmp), 0);
        fails(path, WORDS(tmp, "Input/output error", "dmesg"), from);
        setrlimit(RLIMIT_FSIZE, &now);               /* a short write, and nothing at all after it */
        fails(path, WORDS(tmp, "File too large", "ulimit -f"), from);
        setrlimit(RLIMIT_FSIZE, &was);
        kernel.fsync_errno = EIO;
        fails(path, WORDS(tmp, "cannot flush to disk", "Input/output error", "dmesg"), from);
        kernel.fsync_errno = ENOSPC;                 /* file systems that allocate late */
        fails(path, WORDS(tmp, "cannot flush to disk", "No space left on device", "make room"), from);
    }
    unlink(path);
}

static void errors_uring(void **state)
{
    (void)state;
    if (no_ring())
        skip();
    errors(0);
}

static void errors_plain(void **state)
{
    char path[128];

    (void)state;
    errors(1);
    put_old(path, sizeof path);
    reset(NULL);
    kernel.refuse = 1;
    kernel.fail_errno = EDQUOT;
    fails(path, WORDS("e.safetensors.tmp", "quota"), 0);
}

/* Whoever gave the source has the message. */
static void source_fails(void **state)
{
    char path[128];
    struct mr_st_out *o;
    struct mr_err err = {0};

    (void)state;
    put_old(path, sizeof path);
    for (int at = 1; at <= 8; at += 7) {
        reset(NULL);
        device.fail_at = at;
        o = make_out();
        mr_st_out_source(o, &source);
        assert_int_equal(mr_st_out_write(o, path, &err), -1);
        assert_int_equal(err.code, 0);
        mr_st_out_free(o);
    }
    reset(NULL);
    device.no_blocks = 1;
    fails(path, WORDS("no host memory for the 4 blocks of 8 MiB"), 1);
}

/* ---- a drafter's files -------------------------------------------------------------------------------------------------------- */

static int sink_puts, sink_fails;

static int sink_put(void *ctx, float *dst, const float *host, size_t n)
{
    assert_ptr_equal(ctx, &sink_puts);
    assert_in_range(n, 1, 8 << 20);
    if (++sink_puts == sink_fails)
        return -EIO;
    memcpy(dst, host, n * sizeof *dst);
    return 0;
}

static const struct mr_st_sink sink = {&sink_puts, sink_put};

/* Out of memory that is not the host's, and back into such; one tensor is larger than a block. */
static void drafter_files(void **state)
{
    const struct mr_drafter_config c = {.hidden_size = 2048, .intermediate_size = 33, .n_layers = 1, .n_heads = 3, .n_kv_heads = 1, .head_dim = 10,
                                        .K = 3, .target_hidden = 1023};
    struct mr_dlayout l;
    struct mr_err err = {0};
    char path[128];
    uint64_t step = 0;
    float *a, *b;

    (void)state;
    assert_int_equal(mr_dlayout_make(&l, &c), 0);
    assert_true(l.t[l.fc].n * 4 > 2 * MR_ST_BLOCK && l.P != l.t[l.n - 1].offset + l.t[l.n - 1].n - 1);
    a = calloc(6 * l.P, sizeof *a), b = a + 3 * l.P;
    for (int i = 0; i < l.n; i++)
        for (uint64_t k = 0; k < l.t[i].n; k++)
            for (unsigned v = 0; v < 3; v++)
                a[v * l.P + l.t[i].offset + k] = (float)(l.t[i].offset + k + v) * 0x1p-12f;
    snprintf(path, sizeof path, "%s/trainer.safetensors", dir);
    assert_int_equal(mr_trainer_save(&l, a, a + l.P, a + 2 * l.P, 42, &source, path, &err), 0);
    assert_int_equal(mr_trainer_load_to(&l, b, b + l.P, b + 2 * l.P, &sink, &step, path, &err), 0);
    assert_int_equal(step, 42);
    assert_memory_equal(a, b, 3 * l.P * sizeof *a);
    sink_puts = 0, sink_fails = 5;
    assert_int_equal(mr_trainer_load_to(&l, b, b + l.P, b + 2 * l.P, &sink, &step, path, &err), -1);
    assert_int_equal(err.code, 0);
    sink_fails = 0;
    assert_int_equal(mr_drafter_weights_save(&l, a, &source, path, &err), 0);
    memset(b, 0, l.P * sizeof *b);
    assert_int_equal(mr_drafter_weights_load_to(&l, b, &sink, path, &err), 0);
    assert_int_equal(mr_drafter_weights_load(&l, b + l.P, path, &err), 0);
    assert_memory_equal(b, b + l.P, l.P * sizeof *b);
    for (uint64_t i = 0; i < l.P; i++)
        assert_true(b[i] == mr_bf16_f32(mr_bf16(a[i])));
    unlink(path);
    free(a);
    mr_dlayout_free(&l);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(ways, reset),         cmocka_unit_test_setup(old_kernel, reset),
        cmocka_unit_test_setup(several_under_way, reset), cmocka_unit_test_setup(memory, reset),
        cmocka_unit_test_setup(errors_uring, reset), cmocka_unit_test_setup(errors_plain, reset),
        cmocka_unit_test_setup(source_fails, reset), cmocka_unit_test_setup(drafter_files, reset),
    };
    int rc;
    char cmd[96];

    signal(SIGXFSZ, SIG_IGN);                        /* as the supervisor sets it for all */
    big = malloc((size_t)BIG * sizeof *big);
    rounded = malloc((size_t)ROUNDED * sizeof *rounded);
    for (size_t i = 0; i < BIG; i++)
        big[i] = value(i);
    for (size_t i = 0; i < ROUNDED; i++)
        rounded[i] = value(3 * i + 1);
    strcpy(dir, "/tmp/mr-write-XXXXXX");
    if (!mkdtemp(dir))
        return 1;
    rc = cmocka_run_group_tests(tests, NULL, NULL);
    free(big);
    free(rounded);
    for (int i = 0; i < MR_ST_BLOCKS; i++)
        free(device.block[i]);
    snprintf(cmd, sizeof cmd, "rm -r %s", dir);
    return system(cmd) || rc;
}
