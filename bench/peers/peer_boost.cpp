// Boost.Lockfree queue with fixed capacity (Michael-Scott list over an index pool) in shared memory.  Never wedges, but a dead process
// leaks its slot or takes its message along.
#include "bench/peers/peer.h"

#include <boost/lockfree/queue.hpp>
#include <cstring>
#include <new>
#include <unistd.h>

#define PEER_NAME "Boost.Lockfree queue"
#define PEER_NOTE "a dead process leaks a slot or loses its message"
#define PEER_FLAGS 0

typedef boost::lockfree::queue<uint64_t, boost::lockfree::capacity<1024>> boost_queue;

static size_t peer_bytes(unsigned)
{
    return sizeof(boost_queue) + 4096;
}
static int peer_init(void *r, unsigned cap)
{
    memset(r, 0, peer_bytes(cap));
    new (r) boost_queue();
    return 0;
}
static int peer_attach(void *, int, int, int)
{
    return 0;
}
static inline int peer_push(void *r, uint64_t ref)
{
    return static_cast<boost_queue *>(r)->push(ref);
}
static inline int peer_pop(void *r, uint64_t *ref)
{
    return static_cast<boost_queue *>(r)->pop(*ref);
}
static void peer_detach(void *)
{
}
static void peer_fini(void *)
{
}
#include "bench/peers/peer_body.h"
