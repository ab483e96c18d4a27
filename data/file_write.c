/* Files by io_uring: see file_write.h.
 *
 * Every write is forced onto a worker of the kernel (IOSQE_ASYNC).  Without that, file systems that can take a buffered write without sleeping
 * copy it into the page cache inside the submission: the caller, who wants to fill the next block meanwhile, would do the copying after all.
 * A short write is continued where it stopped; one that takes nothing is an error.
 * Limits: buffered writes and one fsync at the end.  O_DIRECT would spare the copy, but demands aligned sizes and offsets.
 */
#include "data/file_write.h"

#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"

struct slot {
    const char *data;
    size_t bytes, done;
    uint64_t at;                 /* in the file */
    int busy;
};

struct mr_fw {
    int fd, uring, broken;
    struct io_uring ring;
    char *path;
    uint64_t end;                /* bytes put so far */
    unsigned next;
    struct slot s[MR_FW_SLOTS];
};

/* ---- errors ----------------------------------------------------------------------------------------------------------------- */

static const char *advice(int e)
{
    switch (e) {
    case ENOSPC:
        return ": make room on that file system, or write to another one";
    case EDQUOT:
        return ": the user's quota on that file system is used up";
    case EFBIG:
        return ": a limit on file sizes (ulimit -f), or the file system's own";
    case EIO:
        return ": the device or the file server behind that path fails; the kernel's log (dmesg) says how";
    case EROFS:
        return ": mount it writable, or write to another file system";
    default:
        return "";
    }
}

static int bad_write(struct mr_fw *w, const struct slot *s, int e, struct mr_err *err)
{
    w->broken = 1;
    return mr_err_set(err, MR_EXIT_ENV, "%s: cannot write %zu bytes at %llu: %s%s", w->path, s->bytes - s->done,
                      (unsigned long long)(s->at + s->done), strerror(e), advice(e));
}

/* ---- one block -------------------------------------------------------------------------------------------------------------- */

static int pwrite_all(struct mr_fw *w, struct slot *s, struct mr_err *err)
{
    while (s->done < s->bytes) {
        ssize_t n = pwrite(w->fd, s->data + s->done, s->bytes - s->done, (off_t)(s->at + s->done));

        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return bad_write(w, s, n ? errno : EIO, err);
        s->done += (size_t)n;
    }
    s->busy = 0;
    return 0;
}

static int start_write(struct mr_fw *w, struct slot *s, struct mr_err *err)
{
    struct io_uring_sqe *sqe;
    int rc;

    s->busy = 1;
    if (!w->uring)
        return pwrite_all(w, s, err);
    sqe = io_uring_get_sqe(&w->ring);
    MR_ASSERT(sqe);                                  /* as many entries as slots */
    io_uring_prep_write(sqe, w->fd, s->data + s->done, (unsigned)(s->bytes - s->done), s->at + s->done);
    io_uring_sqe_set_flags(sqe, IOSQE_ASYNC);
    io_uring_sqe_set_data(sqe, s);
    do
        rc = io_uring_submit(&w->ring);
    while (rc == -EINTR || rc == -EAGAIN);
    if (rc >= 0)
        return 0;
    s->busy = 0;                                     /* never begun */
    return bad_write(w, s, -rc, err);
}

/* Takes one completion.  *res: what the kernel said of the slot returned.  NULL: the ring itself failed. */
static struct slot *take(struct mr_fw *w, int *res)
{
    struct io_uring_cqe *cqe;
    struct slot *s;
    int rc;

    do
        rc = io_uring_wait_cqe(&w->ring, &cqe);
    while (rc == -EINTR || rc == -EAGAIN);
    *res = rc;
    if (rc < 0)
        return NULL;
    s = io_uring_cqe_get_data(cqe);
    *res = cqe->res;
    io_uring_cqe_seen(&w->ring, cqe);
    return s;
}

/* Waits for one write to come back, and sends on what is left of it. */
static int reap(struct mr_fw *w, struct mr_err *err)
{
    int res;
    struct slot *s = take(w, &res);

    if (!s) {
        w->broken = 1;
        return mr_err_set(err, MR_EXIT_ENV, "%s: io_uring: %s", w->path, strerror(-res));
    }
    s->busy = 0;
    if (res == -EINVAL || res == -EOPNOTSUPP)        /* a kernel that has the ring, but not this operation */
        return pwrite_all(w, s, err);
    if (res <= 0 && res != -EINTR && res != -EAGAIN)
        return bad_write(w, s, res ? -res : EIO, err);
    s->done += res > 0 ? (size_t)res : 0;
    return s->done < s->bytes ? start_write(w, s, err) : 0;
}

/* ---- the file --------------------------------------------------------------------------------------------------------------- */

static void open_ring(struct mr_fw *w)
{
    static int said;
    int rc = io_uring_queue_init(MR_FW_SLOTS, &w->ring, 0);

    w->uring = rc == 0;
    if (rc && !__atomic_exchange_n(&said, 1, __ATOMIC_RELAXED))
        mr_info("io_uring is refused here (%s): files are written by pwrite", strerror(-rc));
}

struct mr_fw *mr_fw_create(const char *path, struct mr_err *err)
{
    struct mr_fw *w = calloc(1, sizeof *w);
    int e;

    if (!w || !(w->path = strdup(path))) {
        free(w);
        mr_err_set(err, MR_EXIT_ENV, "%s: out of memory", path);
        return NULL;
    }
    w->fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (w->fd < 0) {
        e = errno;
        mr_err_set(err, MR_EXIT_ENV, "%s: cannot create: %s%s", path, strerror(e), advice(e));
        free(w->path);
        free(w);
        return NULL;
    }
    open_ring(w);
    return w;
}

int mr_fw_slot(struct mr_fw *w, struct mr_err *err)
{
    unsigned i = w->next++ % MR_FW_SLOTS;

    while (w->s[i].busy && !w->broken)
        if (reap(w, err))
            return -1;
    return w->broken ? -1 : (int)i;
}

int mr_fw_put(struct mr_fw *w, int slot, const void *data, size_t bytes, struct mr_err *err)
{
    struct slot *s = &w->s[slot];

    MR_ASSERT(!s->busy && bytes <= MR_FW_MAX);
    if (w->broken)
        return -1;
    *s = (struct slot){.data = data, .bytes = bytes, .at = w->end};
    w->end += bytes;
    return bytes ? start_write(w, s, err) : 0;
}

/* Nothing is on its way any more: after an error too, no write may read from a block that is gone. */
static void settle(struct mr_fw *w, struct mr_err *err)
{
    int res;

    for (int i = 0; i < MR_FW_SLOTS && w->uring; i++)
        while (w->s[i].busy) {
            struct slot *s;

            if (!w->broken) {
                reap(w, err);
                continue;
            }
            s = take(w, &res);
            if (!s)
                return;
            s->busy = 0;
        }
}

int mr_fw_close(struct mr_fw *w, int flush, struct mr_err *err)
{
    int failed;

    settle(w, err);
    if (w->uring)
        io_uring_queue_exit(&w->ring);
    if (!w->broken && flush && fsync(w->fd)) {
        w->broken = 1;
        mr_err_set(err, MR_EXIT_ENV, "%s: cannot flush to disk: %s%s", w->path, strerror(errno), advice(errno));
    }
    if (close(w->fd) && !w->broken) {
        w->broken = 1;
        mr_err_set(err, MR_EXIT_ENV, "%s: cannot close: %s%s", w->path, strerror(errno), advice(errno));
    }
    failed = w->broken;
    free(w->path);
    free(w);
    return failed ? -1 : 0;
}
