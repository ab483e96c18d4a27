/* The step word, places and the checkpoint word: one optimizer step, exactly once (docs/design.md section 6).
 *
 * Order that a drafter must keep:
 *   place TAKEN -> item DRAFTING -> compute -> item ACCUMULATED -> record written -> place DONE
 *   all DONE and all joined -> REDUCE: sum out of place -> reduced bit (the last one commits)
 *   COMMITTED: apply -> zero accumulator -> (host-confirm) -> free own items -> applied bit (the last one opens the next step)
 * `word` parameters are step words read by mr_step_read; each CAS fails with -ESTALE when the word has moved on, then read again.
 */
#ifndef MR_IPC_STEP_H
#define MR_IPC_STEP_H

#include "ipc/seg.h"

uint64_t mr_step_read(const struct mr_seg *s);           /* acquire */

/* Bucket of place k of `step`: the bucket of plan entry first_pos(step) + k.  The epoch's plan must be sealed. */
unsigned mr_place_bucket(const struct mr_seg *s, unsigned step, unsigned k);
/* State of place k as seen in `step` (a word of another step reads as OPEN). */
enum mr_place_state mr_place_state(const struct mr_seg *s, unsigned step, unsigned k);

/* OPEN -> TAKEN(me) of place k.  0 or -EAGAIN. */
int mr_place_take(const struct mr_seg *s, unsigned step, unsigned k, unsigned slot, unsigned inc);
/* TAKEN(me) -> OPEN: the ring turned out empty.  0 or -ESTALE. */
int mr_place_give(const struct mr_seg *s, unsigned step, unsigned k, unsigned slot, unsigned inc);
/* TAKEN(me) -> DONE(me), release (edge E5): the record is written before.  0 or -ESTALE. */
int mr_place_done(const struct mr_seg *s, unsigned step, unsigned k, unsigned slot, unsigned inc);

/* Picks an open place of `step`: the bucket with the most open places among those whose ready ring has an item (ties: after `*rr`
 * round robin), takes it and claims the head of that ring; gives the place back and goes on when the ring turned out empty.
 * Returns the item index, *place and *word set; -EAGAIN when nothing fits now; -ENOENT when no place is open at all. */
int mr_place_claim(const struct mr_seg *s, unsigned step, unsigned slot, unsigned inc, unsigned *rr, unsigned *place, uint64_t *word);
/* Deterministic mode: place k and item first_pos + k, k = rank (mod D), ascending.  Same returns. */
int mr_place_claim_det(const struct mr_seg *s, unsigned step, unsigned rank, unsigned slot, unsigned inc, unsigned *place, uint64_t *word);

/* COLLECT -> REDUCE when all m places are DONE, all D drafters joined and ledger line step-1 is written.  0, -EAGAIN (not yet, or a
 * repair goes on, or no step is left; *why says what is missing: PLACE, PEER, LEDGER, REPAIR, END), -ESTALE (the word has moved on, or
 * its phase is past COLLECT). */
int mr_step_try_reduce(const struct mr_seg *s, uint64_t word, enum mr_wait_reason *why);
/* Sets my reduced bit; `word` is the REDUCE word read BEFORE the sum began (only its epoch and step must still hold).
 * 0 = set, 1 = mine was the last: the step is COMMITTED, -ESTALE = throw the sum away. */
int mr_step_reduced(const struct mr_seg *s, unsigned rank, uint64_t word);
/* Sets my applied bit.  0 = set, 1 = mine was the last: COLLECT(s+1), or HALT(s+1) when a stop was requested; -ESTALE.
 * Bumps drafters, and targets/feeder through freed items. */
int mr_step_applied(const struct mr_seg *s, unsigned rank, uint64_t word);

/* Supervisor: any phase that has no places left -> FINISHED, wakes all.  0 or -ESTALE. */
int mr_step_finish(const struct mr_seg *s, uint64_t word);

/* Supervisor, recovery of a drafter: COLLECT/REDUCE/REPAIR(s,e) -> REPAIR(s,e+1), bits cleared; COMMITTED(s,e) -> COMMITTED(s,e+1), applied
 * bits kept; HALT(s,e) -> HALT(s,e+1): it has no places, so there is nothing to repair, only the epoch must move; FINISHED stays.
 * Returns the new word.  When the epoch is at its maximum: hdr->fatal, and the word stays. */
uint64_t mr_step_repair_begin(const struct mr_seg *s);
/* REPAIR(s,e) -> COLLECT(s,e).  No-op in every other phase. */
void mr_step_repair_end(const struct mr_seg *s);

/* Drafter, once per incarnation: accumulator zeroed and host-confirmed (edge E5), weights rebuilt -> joined, drafters woken. */
void mr_step_join(const struct mr_seg *s, unsigned slot);

/* ---- checkpoint word ------------------------------------------------------------------------------------------------------- */

/* Drafter whose state is N: claims the copy of checkpoint N.  0 = mine, -EAGAIN = somebody else's or done. */
int mr_ckpt_claim(const struct mr_seg *s, unsigned step, unsigned slot, unsigned inc);
/* Copier: state N is read and may be overwritten; its files are not on disk yet.  COPYING -> WRITING, drafters woken.  0 or -ESTALE.  Dies it
 * now, the checkpoint is WANTED again, and is left out where every drafter's state has moved on. */
int mr_ckpt_read(const struct mr_seg *s, unsigned step, unsigned slot, unsigned inc);
/* Copier: directory complete on disk (before the rename of `latest`, which is the supervisor's).  0 or -ESTALE. */
int mr_ckpt_done(const struct mr_seg *s, unsigned step, unsigned slot, unsigned inc);
/* Recovery: COPYING or WRITING by (slot, inc) -> WANTED. */
void mr_ckpt_recover(const struct mr_seg *s, unsigned slot, unsigned inc);
/* Is a checkpoint of this step due by /train/checkpoint_every_steps?  1 = yes. */
int mr_ckpt_periodic(const struct mr_seg *s, unsigned step);
/* Must an apply of `step` (it overwrites state[(step + 1) mod 2]) wait for a copier? 1 = yes: its state is being read, or a checkpoint of it
 * is due and the one before is still on its way to the disk. */
int mr_ckpt_blocks_apply(const struct mr_seg *s, unsigned step);

const char *mr_step_phase_name(enum mr_step_phase p);

#endif
