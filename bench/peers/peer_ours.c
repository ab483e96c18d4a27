/* millrace: publish an item (its word becomes READY, then the hint is pushed) and claim it (decided on the word, then the head is helped).
 * The reference travels as the item's payload.  Each producer has a share of the items; an item is free again when its consumer's CAS
 * says so, which is more work a hop than a plain ring does: it is what lets any process die at any instruction. */
#include "bench/peers/peer.h"

#include <string.h>
#include <unistd.h>

#include "ipc/atomic.h"
#include "ipc/ring.h"
#include "ipc/seg.h"

#define PEER_NAME "millrace ring + item word"
#define PEER_NOTE "any process may die at any instruction"
#define PEER_FLAGS 0

enum { OUR_ITEMS = 1024, OUR_SHARE = OUR_ITEMS / PEER_PROCS, OUR_CAP = 4 * OUR_ITEMS };

struct our_memory {
    struct mr_shm_header hdr;
    struct mr_item item[OUR_ITEMS];
    struct mr_ring ring;               /* cells follow */
};

/* What this process knows of up to two rings. */
static struct our_view {
    struct mr_seg seg;
    unsigned first, next, pos;
} our_view[2];

static size_t peer_bytes(unsigned cap)
{
    (void)cap;
    return sizeof(struct our_memory) + OUR_CAP * sizeof(uint64_t);
}
static int peer_init(void *r, unsigned cap)
{
    struct our_memory *m = r;

    (void)cap;
    memset(r, 0, peer_bytes(cap));
    m->hdr.n_items = OUR_ITEMS;
    m->hdr.off_rings = offsetof(struct our_memory, ring);
    mr_ring_init(&m->ring, OUR_CAP, MR_READY);
    memset(our_view, 0, sizeof our_view);
    return 0;
}
static int peer_attach(void *r, int consumer, int index, int consumers)
{
    struct our_memory *m = r;
    struct our_view *v = our_view[0].seg.ctl ? &our_view[1] : &our_view[0];

    (void)consumers;
    v->seg.ctl = r;
    v->seg.hdr = &m->hdr;
    v->seg.items = m->item;
    v->seg.writable = 1;
    v->first = consumer ? 0 : (unsigned)index * OUR_SHARE;
    return 0;
}
static inline struct our_view *our_view_of(const void *r)
{
    return our_view[0].seg.ctl == r ? &our_view[0] : &our_view[1];
}
static inline int peer_push(void *r, uint64_t ref)
{
    struct our_view *v = our_view_of(r);
    unsigned idx = v->first + v->next;
    struct mr_item *it = &v->seg.items[idx];
    uint64_t was = mr_ld(&it->word), word;

    if (mr_w_phase(was) != MR_FREE)
        return 0;
    it->offset = ref;
    word = mr_w_item(MR_READY, MR_NO_SLOT, 0, ++v->pos & MR_POS_MAX, 1);
    if (!mr_cas(&it->word, was, word))
        return 0;
    mr_ring_push(&v->seg, 0, idx, word);
    v->next = (v->next + 1) % OUR_SHARE;
    return 1;
}
static inline int peer_pop(void *r, uint64_t *ref)
{
    struct our_view *v = our_view_of(r);
    uint64_t word;
    int idx = mr_ring_claim(&v->seg, 0, MR_DRAFTING, 1, 1, &word);

    if (idx < 0)
        return 0;
    *ref = v->seg.items[idx].offset;
    mr_cas(&v->seg.items[idx].word, word, mr_w_item(MR_FREE, MR_NO_SLOT, 0, mr_w_pos(word), mr_w_pub(word)));
    return 1;
}
static void peer_detach(void *r)
{
    our_view_of(r)->seg.ctl = NULL;
}
static void peer_fini(void *r)
{
    (void)r;
}
#include "bench/peers/peer_body.h"
