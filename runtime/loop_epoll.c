/* The event loop on epoll: level-triggered, which satisfies loop.h's "read until EAGAIN" callbacks too. */
#include <errno.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "runtime/loop_pvt.h"

struct epoll_loop {
    int fd;
};

static void *ep_open(int *error)
{
    struct epoll_loop *e = malloc(sizeof *e);

    if (e && (e->fd = epoll_create1(EPOLL_CLOEXEC)) >= 0)
        return e;
    *error = e ? -errno : -ENOMEM;
    free(e);
    return NULL;
}

static void ep_close(void *self)
{
    struct epoll_loop *e = self;

    close(e->fd);
    free(e);
}

static int ep_arm(void *self, int fd, uint64_t tag)
{
    struct epoll_loop *e = self;
    struct epoll_event ev = {.events = EPOLLIN, .data.u64 = tag};

    return epoll_ctl(e->fd, EPOLL_CTL_ADD, fd, &ev) ? -errno : 0;
}

static void ep_disarm(void *self, int fd, uint64_t tag)
{
    struct epoll_loop *e = self;

    (void)tag;
    epoll_ctl(e->fd, EPOLL_CTL_DEL, fd, NULL);
}

static int ep_wait(void *self, int timeout_ms, uint64_t *tags, unsigned char *rearm, int max)
{
    struct epoll_loop *e = self;
    struct epoll_event ev[64];
    int n = epoll_wait(e->fd, ev, max < 64 ? max : 64, timeout_ms);

    (void)rearm;
    if (n < 0)
        return errno == EINTR ? 0 : -errno;
    for (int i = 0; i < n; i++)
        tags[i] = ev[i].data.u64;
    return n;
}

const struct mr_loop_ops mr_loop_epoll = {"epoll", ep_open, ep_close, ep_arm, ep_disarm, ep_wait};
