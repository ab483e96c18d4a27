/* The event loop on io_uring: one multishot poll per descriptor, so that a steady state costs one system call per batch of events.
 *
 * liburing 2.3 and kernel 5.13 suffice.  The ring's own descriptor is CLOEXEC (the kernel makes it so), and the supervisor only forks
 * to exec: no child ever touches the ring.  SQPOLL is not used: a few events a millisecond are not worth a kernel thread.
 */
#include <errno.h>
#include <liburing.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/loop_pvt.h"

enum { ENTRIES = 256 };

struct uring_loop {
    struct io_uring ring;
};

static void *ur_open(int *error)
{
    struct uring_loop *u = calloc(1, sizeof *u);
    struct io_uring_params p = {.flags = IORING_SETUP_COOP_TASKRUN | IORING_SETUP_SINGLE_ISSUER};

    if (!u) {
        *error = -ENOMEM;
        return NULL;
    }
    *error = io_uring_queue_init_params(ENTRIES, &u->ring, &p);
    if (*error == -EINVAL) { /* before 6.0: the two flags are only hints that save interrupts */
        memset(&p, 0, sizeof p);
        *error = io_uring_queue_init_params(ENTRIES, &u->ring, &p);
    }
    if (*error == 0 && !(p.features & IORING_FEAT_RSRC_TAGS)) { /* came with 5.13, as multishot poll did */
        io_uring_queue_exit(&u->ring);
        *error = -EOPNOTSUPP;
    }
    if (*error == 0)
        return u;
    free(u);
    return NULL;
}

static void ur_close(void *self)
{
    struct uring_loop *u = self;

    io_uring_queue_exit(&u->ring);
    free(u);
}

/* A free submission entry; a full queue is submitted first. */
static struct io_uring_sqe *entry(struct uring_loop *u)
{
    struct io_uring_sqe *sqe = io_uring_get_sqe(&u->ring);

    if (!sqe && io_uring_submit(&u->ring) >= 0)
        sqe = io_uring_get_sqe(&u->ring);
    return sqe;
}

static int ur_arm(void *self, int fd, uint64_t tag)
{
    struct uring_loop *u = self;
    struct io_uring_sqe *sqe = entry(u);

    if (!sqe)
        return -EBUSY;
    io_uring_prep_poll_multishot(sqe, fd, POLLIN);
    io_uring_sqe_set_data64(sqe, tag);
    return 0;
}

static void ur_disarm(void *self, int fd, uint64_t tag)
{
    struct uring_loop *u = self;
    struct io_uring_sqe *sqe = entry(u);

    (void)fd;
    if (!sqe)
        return; /* the stale tag is dropped by loop.c all the same */
    io_uring_prep_poll_remove(sqe, tag);
    io_uring_sqe_set_data64(sqe, 0);
    io_uring_submit(&u->ring); /* now: a pending poll keeps the closed file alive */
}

static int wait_one(struct uring_loop *u, int timeout_ms)
{
    struct io_uring_cqe *cqe;
    struct __kernel_timespec ts = {.tv_sec = timeout_ms / 1000, .tv_nsec = (long long)(timeout_ms % 1000) * 1000000};
    int r = io_uring_submit(&u->ring);

    if (r < 0 && r != -EBUSY && r != -EINTR && r != -EAGAIN)
        return r;
    r = timeout_ms < 0 ? io_uring_wait_cqe(&u->ring, &cqe) : io_uring_wait_cqe_timeout(&u->ring, &cqe, &ts);
    return r == -ETIME || r == -EINTR || r == -EAGAIN ? 0 : r;
}

static int ur_wait(void *self, int timeout_ms, uint64_t *tags, unsigned char *rearm, int max)
{
    struct uring_loop *u = self;
    struct io_uring_cqe *cqe;
    int n = 0, r = wait_one(u, timeout_ms);

    if (r < 0)
        return r;
    while (n < max && io_uring_peek_cqe(&u->ring, &cqe) == 0) {
        if (cqe->user_data && cqe->user_data != LIBURING_UDATA_TIMEOUT && cqe->res != -ECANCELED) {
            tags[n] = cqe->user_data;
            rearm[n++] = !(cqe->flags & IORING_CQE_F_MORE);
        }
        io_uring_cqe_seen(&u->ring, cqe);
    }
    return n;
}

const struct mr_loop_ops mr_loop_uring = {"io_uring", ur_open, ur_close, ur_arm, ur_disarm, ur_wait};
