/* Rings of microbatch references: order only.  Truth is the item word (ipc/item.h).
 *
 * Array queue with helping: a push CASes the cell first and then helps the tail; a claim decides on the item word first and then helps
 * the head.  Whoever finds tail or head lagging moves it on, so a process that stops or dies between any two instructions leaves the
 * ring usable by all others (R1).  Cells whose item has moved on are stale; whoever meets one at the head discards it (R2).
 * Any number of pushers and claimers, processes or threads.  Nothing here blocks, allocates, or waits for another process.
 */
#ifndef MR_IPC_RING_H
#define MR_IPC_RING_H

#include "ipc/seg.h"

void mr_ring_init(struct mr_ring *r, unsigned cap, enum mr_phase want);   /* zeroed memory, before anybody else sees it */

/* Appends a hint for publication `word` of item `idx`.  0, or -ENOBUFS when full of live cells: the hint is dropped and hdr->sweep set
 * (R3: the supervisor re-pushes). */
int mr_ring_push(const struct mr_seg *s, unsigned ring, unsigned idx, uint64_t word);

/* Claims the oldest live item: want -> `to`, owner me.  Returns the index and *word = the new item word, or -EAGAIN when empty. */
int mr_ring_claim(const struct mr_seg *s, unsigned ring, enum mr_phase to, unsigned slot, unsigned inc, uint64_t *word);

/* 1 when a live cell is at the head now (stale cells at the head are discarded on the way).  A hint: may be outdated on return. */
int mr_ring_peek(const struct mr_seg *s, unsigned ring);

/* Live cells between head and tail now: for metrics and dumps; O(occupancy), read-only (works on a read-only mapping). */
unsigned mr_ring_live(const struct mr_seg *s, unsigned ring);

/* 1 when some cell between head and tail names this publication of item idx.  Supervisor's R3 scan. */
int mr_ring_has(const struct mr_seg *s, unsigned ring, unsigned idx, uint64_t word);

/* Number of the ready ring of (bucket, epoch). */
static inline unsigned mr_ring_ready(unsigned bucket, unsigned epoch) { return MR_RING_READY + 2 * bucket + (epoch & 1); }

#endif
