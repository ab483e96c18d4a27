/* The life of an item: FREE -> FILLING -> QUEUED -> EXTRACTING -> READY -> DRAFTING -> ACCUMULATED -> FREE.
 *
 * Every transition is ONE compare-and-swap on the item's word.  `word` parameters are the exact word the caller holds; on success *word
 * is the new one.  0 = done, -ESTALE = the word is another one (we were declared dead, or somebody else was faster): touch nothing.
 * -EOVERFLOW = the publication count is at its maximum: hdr->fatal is set, the run ends with exit code 1.
 * All are lock-free and may be called from any process that holds the item; they bump the event count of whoever may now go on.
 */
#ifndef MR_IPC_ITEM_H
#define MR_IPC_ITEM_H

#include "ipc/seg.h"

/* Feeder: finds a FREE item and claims it for plan position `pos` (publication 0 in the same CAS).  Index or -EAGAIN. */
int mr_item_fill(const struct mr_seg *s, unsigned slot, unsigned inc, unsigned pos, uint64_t *word);
/* Feeder: FILLING -> QUEUED, pushed to the input ring.  Tokens, lengths, masks are written and the cursor is past `pos` already. */
int mr_item_queue(const struct mr_seg *s, unsigned idx, uint64_t *word);
/* Target: claims from the retry ring first, then from the input ring: QUEUED -> EXTRACTING.  Index or -EAGAIN.  Hold a slab first. */
int mr_item_extract(const struct mr_seg *s, unsigned slot, unsigned inc, uint64_t *word);
/* Target: EXTRACTING -> READY, pushed to the ready ring of its bucket and epoch.  Slab word is ITEM(..) already (edge E1: release). */
int mr_item_ready(const struct mr_seg *s, unsigned idx, uint64_t *word);
/* Drafter: claims the head of the ready ring of (bucket, epoch): READY -> DRAFTING (edge E1: acquire).  Index or -EAGAIN. */
int mr_item_draft(const struct mr_seg *s, unsigned bucket, unsigned epoch, unsigned slot, unsigned inc, uint64_t *word);
/* Drafter, deterministic mode: claims the READY item with plan position `pos`, wherever its cell is (it becomes stale).  Index or
 * -EAGAIN. */
int mr_item_draft_pos(const struct mr_seg *s, unsigned pos, unsigned slot, unsigned inc, uint64_t *word);
/* Drafter: DRAFTING -> ACCUMULATED (edge E2: host-confirmed). */
int mr_item_accumulated(const struct mr_seg *s, unsigned idx, uint64_t *word);
/* Drafter (or recovery), step committed and applied: slab word first, then the item -> FREE. */
int mr_item_free(const struct mr_seg *s, unsigned idx, uint64_t *word);

/* Drafter: the hidden states are gone (mr_arena_current says 0): DRAFTING -> QUEUED, pushed to the retry ring; hdr->sweep is set, so
 * that the supervisor frees its slab word.  The caller gives its place back. */
int mr_item_requeue(const struct mr_seg *s, unsigned idx, uint64_t *word);

const char *mr_phase_name(enum mr_phase p);

#endif
