/* POSIX message queue: the kernel's own.  Survives the death of its users, costs two system calls a message. */
#include "bench/peers/peer.h"

#include <errno.h>
#include <fcntl.h>
#include <mqueue.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#define PEER_NAME "POSIX mq"
#define PEER_NOTE "kernel; 10 messages deep by default"
#define PEER_FLAGS PEER_BLOCKS

struct mq_in_memory {
    char name[64];
};
static struct {
    void *mem;
    mqd_t q;
} mq_open_now[4];

static size_t peer_bytes(unsigned cap)
{
    (void)cap;
    return 4096;
}
static int peer_init(void *r, unsigned cap)
{
    static int sequence;
    struct mq_in_memory *m = r;
    struct mq_attr a = {.mq_maxmsg = 10, .mq_msgsize = 8};
    mqd_t q;

    (void)cap;
    snprintf(m->name, sizeof m->name, "/millrace-bench-%d-%d", (int)getpid(), sequence++);
    q = mq_open(m->name, O_CREAT | O_EXCL | O_RDWR, 0600, &a);
    return q == (mqd_t)-1 ? -1 : mq_close(q);
}
static int peer_attach(void *r, int consumer, int index, int consumers)
{
    (void)consumer, (void)index, (void)consumers;
    for (int i = 0; i < 4; i++)
        if (!mq_open_now[i].mem) {
            mq_open_now[i].mem = r;
            mq_open_now[i].q = mq_open(((struct mq_in_memory *)r)->name, O_RDWR);
            return mq_open_now[i].q == (mqd_t)-1;
        }
    return -1;
}
static mqd_t mq_of(void *r)
{
    int i = 0;

    while (mq_open_now[i].mem != r)
        i++;
    return mq_open_now[i].q;
}
static inline int peer_push(void *r, uint64_t ref)
{
    return mq_send(mq_of(r), (char *)&ref, 8, 0) == 0;
}
static inline int peer_pop(void *r, uint64_t *ref)
{
    struct timespec t;

    clock_gettime(CLOCK_REALTIME, &t);
    t.tv_nsec += 2000000;
    if (t.tv_nsec >= 1000000000)
        t.tv_sec++, t.tv_nsec -= 1000000000;
    return mq_timedreceive(mq_of(r), (char *)ref, 8, NULL, &t) == 8;
}
static void peer_detach(void *r)
{
    for (int i = 0; i < 4; i++)
        if (mq_open_now[i].mem == r) {
            mq_close(mq_open_now[i].q);
            mq_open_now[i].mem = NULL;
        }
}
static void peer_fini(void *r)
{
    mq_unlink(((struct mq_in_memory *)r)->name);
}
#include "bench/peers/peer_body.h"
