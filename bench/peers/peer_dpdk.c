/* DPDK rte_ring, MP/MC, 8-byte elements, in memory of our own and without EAL.  Not crash-safe: a producer or consumer that dies between
 * moving the head and the tail stops everybody. */
#include "bench/peers/peer.h"

#include <rte_ring.h>
#include <rte_ring_elem.h>
#include <string.h>
#include <unistd.h>

#define PEER_NAME "DPDK rte_ring MP/MC"
#define PEER_NOTE "a dead process can wedge it"
#define PEER_FLAGS 0

static size_t peer_bytes(unsigned cap)
{
    return (size_t)rte_ring_get_memsize_elem(8, cap * 2) + 4096;
}
static int peer_init(void *r, unsigned cap)
{
    memset(r, 0, peer_bytes(cap));
    return rte_ring_init((struct rte_ring *)r, "bench", cap, RING_F_EXACT_SZ);
}
static int peer_attach(void *r, int consumer, int index, int consumers)
{
    (void)r, (void)consumer, (void)index, (void)consumers;
    return 0;
}
static inline int peer_push(void *r, uint64_t ref)
{
    return rte_ring_enqueue_elem((struct rte_ring *)r, &ref, 8) == 0;
}
static inline int peer_pop(void *r, uint64_t *ref)
{
    return rte_ring_dequeue_elem((struct rte_ring *)r, ref, 8) == 0;
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
