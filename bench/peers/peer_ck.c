/* Concurrency Kit ck_ring, MPMC, typed 8-byte entries.  Not crash-safe. */
#include "bench/peers/peer.h"

#include <ck_ring.h>
#include <string.h>
#include <unistd.h>

#define PEER_NAME "Concurrency Kit ck_ring"
#define PEER_NOTE "a dead producer wedges it"
#define PEER_FLAGS 0

struct ref {
    uint64_t v;
};
CK_RING_PROTOTYPE(ref, ref)
struct ck_in_memory {
    ck_ring_t ring __attribute__((aligned(128)));
    struct ref cell[] __attribute__((aligned(128)));
};

static size_t peer_bytes(unsigned cap)
{
    return sizeof(struct ck_in_memory) + cap * sizeof(struct ref);
}
static int peer_init(void *r, unsigned cap)
{
    memset(r, 0, peer_bytes(cap));
    ck_ring_init(&((struct ck_in_memory *)r)->ring, cap);
    return 0;
}
static int peer_attach(void *r, int consumer, int index, int consumers)
{
    (void)r, (void)consumer, (void)index, (void)consumers;
    return 0;
}
static inline int peer_push(void *r, uint64_t ref)
{
    struct ck_in_memory *q = r;
    struct ref e = {ref};

    return CK_RING_ENQUEUE_MPMC(ref, &q->ring, q->cell, &e);
}
static inline int peer_pop(void *r, uint64_t *ref)
{
    struct ck_in_memory *q = r;
    struct ref e;

    if (!CK_RING_DEQUEUE_MPMC(ref, &q->ring, q->cell, &e))
        return 0;
    *ref = e.v;
    return 1;
}
static void peer_detach(void *r)
{
    (void)r;
}
static void peer_fini(void *r)
{
    (void)r;
}
#include "bench/peers/peer_body.h"
