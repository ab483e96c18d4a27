/* TensorBoard event files by hand: see tbevents.h.  A protobuf library would be a dependency for forty bytes a step. */
#include "runtime/tbevents.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

enum { EVENT_MAX = 4096, TAG_MAX = 63 };

uint32_t mr_crc32c(const void *p, size_t n)
{
    const unsigned char *b = p;
    uint32_t crc = 0xffffffffu;

    while (n--) {
        crc ^= *b++;
        for (int k = 0; k < 8; k++)
            crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
    }
    return ~crc;
}

/* TFRecord's mask: a checksum of data that holds checksums would be weak otherwise. */
static uint32_t masked(const void *p, size_t n)
{
    uint32_t crc = mr_crc32c(p, n);

    return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

struct buf {
    unsigned char b[EVENT_MAX];
    size_t n;
};

static void put(struct buf *o, const void *p, size_t n)
{
    MR_ASSERT(o->n + n <= sizeof o->b);
    memcpy(o->b + o->n, p, n);
    o->n += n;
}

static void put_varint(struct buf *o, uint64_t v)
{
    do {
        unsigned char c = (unsigned char)((v & 0x7f) | (v > 0x7f ? 0x80 : 0));

        put(o, &c, 1);
        v >>= 7;
    } while (v);
}

enum { VARINT = 0, FIXED64 = 1, BYTES = 2, FIXED32 = 5 }; /* protobuf wire types */

static void put_tag(struct buf *o, unsigned field, unsigned wire)
{
    put_varint(o, field << 3 | wire);
}

static void put_bytes(struct buf *o, unsigned field, const void *p, size_t n)
{
    put_tag(o, field, BYTES);
    put_varint(o, n);
    put(o, p, n);
}

static void put_time(struct buf *o)
{
    struct timeval tv;
    double t;

    gettimeofday(&tv, NULL);
    t = (double)tv.tv_sec + (double)tv.tv_usec * 1e-6;
    put_tag(o, 1, FIXED64);
    put(o, &t, sizeof t);
}

static int write_record(int fd, const struct buf *event)
{
    struct buf out = {.n = 0};
    uint64_t len = event->n;
    uint32_t crc = masked(&len, sizeof len);
    ssize_t w;

    put(&out, &len, sizeof len);
    put(&out, &crc, sizeof crc);
    put(&out, event->b, event->n);
    crc = masked(event->b, event->n);
    put(&out, &crc, sizeof crc);
    w = write(fd, out.b, out.n);
    return w == (ssize_t)out.n ? 0 : w < 0 ? -errno : -ENOSPC;
}

int mr_tb_open(struct mr_tb *tb, const char *dir, struct mr_err *err)
{
    struct buf event = {.n = 0};
    char path[1400], host[64] = "localhost";
    int r;

    gethostname(host, sizeof host - 1);
    snprintf(path, sizeof path, "%s/events.out.tfevents.%lld.%s.%d.millrace", dir, (long long)time(NULL), host, (int)getpid());
    tb->fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (tb->fd < 0)
        return mr_err_set(err, MR_EXIT_ENV, "cannot write %s: %s", mr_err_path(path, 200), strerror(errno));
    put_time(&event);
    put_bytes(&event, 3, "brain.Event:2", strlen("brain.Event:2"));
    r = write_record(tb->fd, &event);
    if (r)
        mr_tb_close(tb);
    return r ? mr_err_set(err, MR_EXIT_ENV, "cannot write %s: %s", mr_err_path(path, 200), strerror(-r)) : 0;
}

void mr_tb_close(struct mr_tb *tb)
{
    if (tb->fd >= 0)
        close(tb->fd);
    tb->fd = -1;
}

int mr_tb_restart(struct mr_tb *tb, uint64_t step)
{
    static const unsigned char start[] = {1 << 3 | VARINT, 1}; /* SessionLog.status = START */
    struct buf event = {.n = 0};

    if (tb->fd < 0)
        return -EBADF;
    put_time(&event);
    put_tag(&event, 2, VARINT);
    put_varint(&event, step);
    put_bytes(&event, 7, start, sizeof start);
    return write_record(tb->fd, &event);
}

static void put_scalar(struct buf *summary, const struct mr_tb_scalar *s)
{
    struct buf value = {.n = 0};
    float x = (float)s->value;

    put_bytes(&value, 1, s->tag, strnlen(s->tag, TAG_MAX));
    put_tag(&value, 2, FIXED32);
    put(&value, &x, sizeof x);
    put_bytes(summary, 1, value.b, value.n);
}

int mr_tb_write(struct mr_tb *tb, uint64_t step, const struct mr_tb_scalar *scalar, int n)
{
    struct buf event = {.n = 0}, summary = {.n = 0};

    if (tb->fd < 0)
        return -EBADF;
    MR_ASSERT(n > 0 && n <= MR_TB_SCALARS);
    for (int i = 0; i < n; i++)
        put_scalar(&summary, &scalar[i]);
    put_time(&event);
    put_tag(&event, 2, VARINT);
    put_varint(&event, step);
    put_bytes(&event, 5, summary.b, summary.n);
    return write_record(tb->fd, &event);
}
