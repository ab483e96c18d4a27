/* The event loop's table of watches and its dispatch; the waiting itself is loop_uring.c or loop_epoll.c.
 *
 * Events are fetched in batches and dispatched by tag; a callback that deletes a watch later in the same batch makes that tag stale.
 */
#include "runtime/loop.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/loop_pvt.h"

enum { BATCH = 64 };

struct watch {
    int fd; /* -1 = free */
    uint32_t generation;
    mr_loop_fn fn;
    void *arg;
};

struct mr_loop {
    const struct mr_loop_ops *ops;
    void *self;
    struct watch watch[MR_LOOP_MAX];
};

static const char *refusal(int error)
{
    switch (-error) {
    case EPERM:
    case EACCES:
        return "the kernel does not permit it: a container's seccomp profile, or the sysctl kernel.io_uring_disabled";
    case ENOSYS:
        return "the kernel or the sandbox does not have it";
    case ENOMEM:
        return "not enough locked memory (ulimit -l)";
    case EOPNOTSUPP:
        return "the kernel is older than 5.13: no multishot poll";
    default:
        return strerror(-error);
    }
}

/* Opens the backend that `want` asks for; in auto mode any refusal means epoll. */
static int open_backend(struct mr_loop *l, enum mr_io want, char *why, size_t why_bytes, struct mr_err *err)
{
    int error = 0;

    if (why_bytes)
        why[0] = 0;
    if (want != MR_IO_EPOLL) {
        l->ops = &mr_loop_uring;
        if ((l->self = l->ops->open(&error)))
            return 0;
        if (want == MR_IO_URING)
            return mr_err_set(err, MR_EXIT_ENV, "--io uring: io_uring is refused: %s; run with --io auto or --io epoll", refusal(error));
        snprintf(why, why_bytes, "io_uring is refused (%s): the supervisor uses epoll, nothing else changes", refusal(error));
    }
    l->ops = &mr_loop_epoll;
    if ((l->self = l->ops->open(&error)))
        return 0;
    return mr_err_set(err, MR_EXIT_ENV, "epoll_create1: %s", strerror(-error));
}

struct mr_loop *mr_loop_create(enum mr_io want, char *why, size_t why_bytes, struct mr_err *err)
{
    struct mr_loop *l = calloc(1, sizeof *l);

    if (!l) {
        mr_err_set(err, MR_EXIT_ENV, "out of memory");
        return NULL;
    }
    for (int i = 0; i < MR_LOOP_MAX; i++)
        l->watch[i] = (struct watch){.fd = -1, .generation = 1};
    if (open_backend(l, want, why, why_bytes, err)) {
        free(l);
        return NULL;
    }
    return l;
}

void mr_loop_destroy(struct mr_loop *l)
{
    if (!l)
        return;
    l->ops->close(l->self);
    free(l);
}

const char *mr_loop_name(const struct mr_loop *l)
{
    return l->ops->name;
}

static uint64_t tag_of(const struct mr_loop *l, int i)
{
    return (uint64_t)l->watch[i].generation << 32 | (uint32_t)i;
}

static int find(const struct mr_loop *l, int fd)
{
    for (int i = 0; i < MR_LOOP_MAX; i++)
        if (l->watch[i].fd == fd)
            return i;
    return -1;
}

int mr_loop_add(struct mr_loop *l, int fd, mr_loop_fn fn, void *arg)
{
    int i = find(l, -1), r;

    MR_ASSERT(fd >= 0 && find(l, fd) < 0);
    if (i < 0)
        return -ENOSPC;
    l->watch[i].fd = fd;
    l->watch[i].fn = fn;
    l->watch[i].arg = arg;
    r = l->ops->arm(l->self, fd, tag_of(l, i));
    if (r)
        l->watch[i].fd = -1;
    return r;
}

void mr_loop_del(struct mr_loop *l, int fd)
{
    int i = find(l, fd);

    MR_ASSERT(fd >= 0);
    if (i < 0)
        return;
    l->ops->disarm(l->self, fd, tag_of(l, i));
    l->watch[i].fd = -1;
    l->watch[i].generation++;
}

int mr_loop_wait(struct mr_loop *l, int timeout_ms)
{
    uint64_t tags[BATCH];
    unsigned char rearm[BATCH] = {0};
    int n = l->ops->wait(l->self, timeout_ms, tags, rearm, BATCH), ran = 0;

    for (int k = 0; k < n; k++) {
        int i = (int)(uint32_t)tags[k];
        struct watch *w = &l->watch[i];

        if (i >= MR_LOOP_MAX || w->fd < 0 || tag_of(l, i) != tags[k])
            continue;
        w->fn(w->arg, w->fd);
        ran++;
        /* After the callback: a level that is still there is reported at once by the fresh poll. */
        if (rearm[k] && w->fd >= 0 && tag_of(l, i) == tags[k])
            l->ops->arm(l->self, w->fd, tags[k]);
    }
    return n < 0 ? n : ran;
}
