/* libzmq PUSH/PULL over ipc://: unix sockets and one I/O thread a process. */
#include "bench/peers/peer.h"

#include <stdio.h>
#include <unistd.h>
#include <zmq.h>

#define PEER_NAME "ZeroMQ ipc://"
#define PEER_NOTE "sockets; what is in flight dies with its process"
#define PEER_FLAGS PEER_BLOCKS

struct zmq_in_memory {
    int id, hwm, owner;
};
static void *zmq_context;
static void *zmq_socket_of[64];
static int zmq_users;

static size_t peer_bytes(unsigned cap)
{
    (void)cap;
    return 4096;
}
static int peer_init(void *r, unsigned cap)
{
    static int sequence;
    struct zmq_in_memory *h = r;

    h->id = sequence++ & 63;
    h->hwm = (int)cap;
    h->owner = (int)getpid();
    return 0;
}
static void zmq_endpoint(const struct zmq_in_memory *h, int consumer, const char *prefix, char out[128])
{
    snprintf(out, 128, "%s/tmp/millrace-bench-%d-%d-%d", prefix, h->owner, h->id, consumer);
}
static int peer_attach(void *r, int consumer, int index, int consumers)
{
    struct zmq_in_memory *h = r;
    int linger = 1, patience = 2;
    char at[128];
    void *s;

    if (!zmq_context)
        zmq_context = zmq_ctx_new();
    zmq_users++;
    s = zmq_socket_of[h->id] = zmq_socket(zmq_context, consumer ? ZMQ_PULL : ZMQ_PUSH);
    zmq_setsockopt(s, ZMQ_SNDHWM, &h->hwm, sizeof h->hwm);
    zmq_setsockopt(s, ZMQ_RCVHWM, &h->hwm, sizeof h->hwm);
    zmq_setsockopt(s, ZMQ_LINGER, &linger, sizeof linger);
    zmq_setsockopt(s, ZMQ_RCVTIMEO, &patience, sizeof patience);
    if (consumer) {
        zmq_endpoint(h, index, "ipc://", at);
        return zmq_bind(s, at);
    }
    for (int i = 0; i < consumers; i++) {
        zmq_endpoint(h, i, "ipc://", at);
        if (zmq_connect(s, at))
            return -1;
    }
    return 0;
}
static inline int peer_push(void *r, uint64_t ref)
{
    return zmq_send(zmq_socket_of[((struct zmq_in_memory *)r)->id], &ref, 8, 0) == 8;
}
static inline int peer_pop(void *r, uint64_t *ref)
{
    return zmq_recv(zmq_socket_of[((struct zmq_in_memory *)r)->id], ref, 8, 0) == 8;
}
static void peer_detach(void *r)
{
    zmq_close(zmq_socket_of[((struct zmq_in_memory *)r)->id]);
    if (--zmq_users == 0) {
        zmq_ctx_term(zmq_context);
        zmq_context = NULL;
    }
}
static void peer_fini(void *r)
{
    char at[128];

    for (int i = 0; i < PEER_PROCS; i++) {
        zmq_endpoint(r, i, "", at);
        unlink(at);
    }
}
#include "bench/peers/peer_body.h"
