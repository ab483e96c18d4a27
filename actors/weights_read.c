/* Checkpoint files -> GPU: blocks read by io_uring into pinned buffers, copied on from there.
 *
 * A ring of DEPTH buffers.  Each goes round: read (several are in flight, in any order) -> copy to the device, issued the moment its read is
 * complete -> free when the copy's mark has passed.  The file side is kept busy as long as buffers are free, the device side as long as reads
 * complete; neither waits for the other's latency.  Where io_uring is refused (containers), pread takes its place, one block at a time.
 * A tensor whose type is the backend's own is copied as it is; others are converted by the table's load.
 * Limits: plain buffered reads: the page cache is what makes the second target of a machine fast. */
#include "actors/weights_pvt.h"

#include <errno.h>
#include <liburing.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"

enum { DEPTH = 8, BLOCK = 16 << 20 };
#define LINE_NS 2000000000u

struct block {                   /* one buffer and what it is used for now */
    char *buf;
    struct mr_k_mark *copied;
    const struct mr_st *st;
    char *dst;
    uint64_t at;                 /* in the file */
    size_t bytes, got;
    size_t n;                    /* elements */
    enum mr_k_dtype dtype;
    int reading;
};

struct cursor {                  /* next block of the layout */
    int tensor;
    uint64_t done;               /* elements of that tensor */
};

struct load {
    struct mr_k *k;
    const struct mr_tlayout *l;
    const struct mr_model_files *files;
    char *base;
    struct block b[DEPTH];
    int n_blocks;                /* DEPTH, or as many as a small checkpoint fills */
    struct cursor next;
    struct io_uring ring;
    int uring, reading;          /* reads in flight */
    int ready[DEPTH], n_ready;   /* without io_uring: blocks that pread has filled */
    uint64_t bytes, total, begun_ns, line_ns;
};

static int cuda_failed(const char *what, int rc, struct mr_err *err)
{
    return mr_err_set(err, rc == -EIO ? MR_EXIT_CUDA : MR_EXIT_ENV, "loading weights: %s: %s", what, strerror(-rc));
}

/* ---- progress ------------------------------------------------------------------------------------------------------------------------- */

static void say(struct load *s, int last)
{
    uint64_t now = mr_now_ns();
    double t = (double)(now - s->begun_ns) * 1e-9, rate = t > 0 ? (double)s->bytes / t : 0;

    if (!last && now - s->line_ns < LINE_NS)
        return;
    s->line_ns = now;
    if (last)
        mr_info("weights: %.2f GiB in %.2f s, %.2f GiB/s (%s)", (double)s->bytes / 0x1p30, t, rate / 0x1p30, s->uring ? "io_uring" : "pread");
    else
        mr_info("weights: %.1f of %.1f GiB, %.2f GiB/s, %.0f s left", (double)s->bytes / 0x1p30, (double)s->total / 0x1p30, rate / 0x1p30,
                rate > 0 ? (double)(s->total - s->bytes) / rate : 0.0);
}

/* ---- reading -------------------------------------------------------------------------------------------------------------------------- */

static int bad_read(const struct block *b, int rc, struct mr_err *err)
{
    return mr_err_set(err, MR_EXIT_ENV, "%s: reading %zu bytes at %llu: %s", b->st->path, b->bytes - b->got,
                      (unsigned long long)(b->at + b->got), rc ? strerror(-rc) : "the file ends there: it was cut while the run was live");
}

static int pread_all(struct block *b, struct mr_err *err)
{
    while (b->got < b->bytes) {
        ssize_t n = pread(b->st->fd, b->buf + b->got, b->bytes - b->got, (off_t)(b->at + b->got));

        if (n <= 0 && !(n < 0 && errno == EINTR))
            return bad_read(b, n < 0 ? -errno : 0, err);
        b->got += n > 0 ? (size_t)n : 0;
    }
    return 0;
}

static int start_read(struct load *s, struct block *b, struct mr_err *err)
{
    struct io_uring_sqe *sqe;
    int rc;

    if (!s->uring) {
        s->ready[s->n_ready++] = (int)(b - s->b);
        return pread_all(b, err);
    }
    sqe = io_uring_get_sqe(&s->ring);
    MR_ASSERT(sqe);                                  /* as many entries as blocks */
    io_uring_prep_read(sqe, b->st->fd, b->buf + b->got, (unsigned)(b->bytes - b->got), b->at + b->got);
    io_uring_sqe_set_data(sqe, b);
    rc = io_uring_submit(&s->ring);
    return rc < 0 ? bad_read(b, rc, err) : 0;
}

/* A block whose bytes are all there; NULL with err. */
static struct block *wait_read(struct load *s, struct mr_err *err)
{
    if (!s->uring)
        return &s->b[s->ready[--s->n_ready]];
    for (;;) {
        struct io_uring_cqe *cqe;
        struct block *b;
        int rc = io_uring_wait_cqe(&s->ring, &cqe);

        if (rc == -EINTR)
            continue;
        if (rc < 0) {
            mr_err_set(err, MR_EXIT_ENV, "loading weights: io_uring: %s", strerror(-rc));
            return NULL;
        }
        b = io_uring_cqe_get_data(cqe);
        rc = cqe->res;
        io_uring_cqe_seen(&s->ring, cqe);
        b->got += rc > 0 ? (size_t)rc : 0;
        if (b->got == b->bytes)
            return b;
        if (rc <= 0 && rc != -EINTR && rc != -EAGAIN) {
            bad_read(b, rc, err);
            return NULL;
        }
        if (start_read(s, b, err))
            return NULL;
    }
}

/* ---- blocks --------------------------------------------------------------------------------------------------------------------------- */

/* The next block of the layout into `b`.  1 = there is none left; -1 with err. */
static int plan_block(struct load *s, struct block *b, struct mr_err *err)
{
    const struct mr_tl_tensor *t = &s->l->t[s->next.tensor];
    const struct mr_st_tensor *from;
    size_t elem = 4, left;

    if (s->next.tensor == s->l->n)
        return 1;
    from = mr_weights_find(s->files, t->name, t->n, &b->st, err);
    if (!from || mr_weights_dtype(from->dtype, &b->dtype, &elem))
        return -1;
    left = (size_t)(t->n - s->next.done);
    b->n = left < BLOCK / elem ? left : BLOCK / elem;
    b->bytes = b->n * elem;
    b->got = 0;
    b->at = from->begin + s->next.done * elem;
    b->dst = s->base + t->offset + s->next.done * (uint64_t)s->k->act_bytes;
    s->next.done += b->n;
    if (s->next.done == t->n)
        s->next = (struct cursor){s->next.tensor + 1, 0};
    return 0;
}

static int to_device(struct load *s, struct block *b, struct mr_err *err)
{
    int rc = b->dtype == s->k->act ? mr_k_cuda_put(s->k, b->dst, b->buf, b->bytes) : s->k->op->load(s->k, b->dst, b->buf, b->dtype, b->n);

    if (!rc)
        rc = mr_k_cuda_mark_set(s->k, b->copied);
    s->bytes += b->bytes;
    say(s, 0);
    return rc ? cuda_failed("copy to the device", rc, err) : 0;
}

/* Fills every free buffer.  A buffer whose copy is still under way is waited for only when it is the next in turn. */
static int pump(struct load *s, struct mr_err *err)
{
    for (int i = 0;; i = (i + 1) % s->n_blocks) {
        struct block *b = &s->b[i], *full;
        int rc = 0;

        if (b->reading) {                            /* the ring is full of reads, or the one in turn is: take what comes */
            full = wait_read(s, err);
            if (!full)
                return -1;
            full->reading = 0;
            s->reading--;
            if (to_device(s, full, err))
                return -1;
            if (b->reading) {                        /* it was another one: look at this one again */
                i = (i + s->n_blocks - 1) % s->n_blocks;
                continue;
            }
        }
        rc = mr_k_cuda_mark_wait(s->k, b->copied);
        if (rc)
            return cuda_failed("copy to the device", rc, err);
        rc = plan_block(s, b, err);
        if (rc < 0)
            return -1;
        if (rc && !s->reading)
            return 0;
        if (rc)
            continue;
        b->reading = 1;
        s->reading++;
        if (start_read(s, b, err))
            return -1;
    }
}

static int sum_bytes(struct load *s, struct mr_err *err)
{
    for (int i = 0; i < s->l->n; i++) {
        const struct mr_st *st;
        const struct mr_st_tensor *t = mr_weights_find(s->files, s->l->t[i].name, s->l->t[i].n, &st, err);

        if (!t)
            return -1;
        s->total += t->bytes / t->n * s->l->t[i].n;
    }
    return 0;
}

static int open_load(struct load *s, struct mr_err *err)
{
    if (sum_bytes(s, err))
        return -1;
    s->n_blocks = s->total / BLOCK + 1 < DEPTH ? (int)(s->total / BLOCK + 1) : DEPTH;
    for (int i = 0; i < s->n_blocks; i++) {
        s->b[i].buf = mr_k_cuda_host_alloc(s->k, BLOCK);
        s->b[i].copied = mr_k_cuda_mark_create(s->k);
        if (!s->b[i].buf || !s->b[i].copied)
            return mr_err_set(err, MR_EXIT_ENV, "loading weights: no %d MiB of pinned host memory (ulimit -l, container limits?)",
                              s->n_blocks * (BLOCK >> 20));
    }
    s->uring = io_uring_queue_init(DEPTH, &s->ring, 0) == 0;
    return 0;
}

static void close_load(struct load *s)
{
    struct io_uring_cqe *cqe;

    for (; s->uring && s->reading; s->reading--)     /* after an error: no read may end in a buffer that is gone */
        if (io_uring_wait_cqe(&s->ring, &cqe) == 0)
            io_uring_cqe_seen(&s->ring, cqe);
    if (s->uring)
        io_uring_queue_exit(&s->ring);
    for (int i = 0; i < s->n_blocks; i++) {
        mr_k_cuda_host_free(s->k, s->b[i].buf);
        if (s->b[i].copied)
            mr_k_cuda_mark_destroy(s->k, s->b[i].copied);
    }
}

int mr_weights_read(struct mr_k *k, const struct mr_tlayout *l, const struct mr_model_files *files, void *base, struct mr_err *err)
{
    struct load s = {.k = k, .l = l, .files = files, .base = base, .begun_ns = mr_now_ns()};
    int rc;

    s.line_ns = s.begun_ns;
    rc = open_load(&s, err);
    if (!rc)
        rc = pump(&s, err);
    if (!rc) {
        rc = k->op->sync(k);
        if (rc)
            cuda_failed("copy to the device", rc, err);
        else
            say(&s, 1);
    }
    close_load(&s);
    return rc ? -1 : 0;
}
