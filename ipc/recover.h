/* Recovery: what the supervisor does for a dead incarnation.  Call ONLY after the process is reaped (proven death), never by time; only
 * the supervisor, one call at a time (it is the only one who frees what another one left).
 *
 * Every function is idempotent and may itself be interrupted and run again.  None blocks.  After it: mr_recover_rings, then
 * mr_evc_bump_all, then spawn the next incarnation.  The table is docs/design.md section 4.4.
 */
#ifndef MR_IPC_RECOVER_H
#define MR_IPC_RECOVER_H

#include "ipc/seg.h"

struct mr_recovered {
    unsigned items, slabs, places;         /* given back */
};

/* Dispatches on the row's kind; includes rings and bump.  A keeper: all arenas on its device (mr_recover_arena). */
struct mr_recovered mr_recover(const struct mr_seg *s, unsigned slot, unsigned inc);

/* FILLING of the dead feeder: position behind the cursor -> QUEUED and pushed, else FREE. */
struct mr_recovered mr_recover_feeder(const struct mr_seg *s, unsigned slot, unsigned inc);
/* EXTRACTING -> QUEUED and pushed to the retry ring, THEN slabs TARGET(dead) and ITEM(those) -> FREE. */
struct mr_recovered mr_recover_target(const struct mr_seg *s, unsigned slot, unsigned inc);
/* REPAIR / COMMITTED, items, places, joined bit, checkpoint intent (docs/design.md section 6.2, steps 1 to 3). */
struct mr_recovered mr_recover_drafter(const struct mr_seg *s, unsigned slot, unsigned inc);
/* Loss of an arena generation (a keeper): the row is unregistered, READY items there -> QUEUED + retry, their slabs FREE (they can be
 * taken once the next generation is registered); items of live drafters stay.  Reap and recover the GPU's other actors first. */
struct mr_recovered mr_recover_arena(const struct mr_seg *s, unsigned arena);
/* Slabs ITEM(..) whose item has moved on without them (mr_item_requeue, an interrupted recovery) -> FREE.  Number freed. */
unsigned mr_recover_slabs(const struct mr_seg *s);
/* R3: clears hdr->sweep, frees the slabs above, re-pushes every QUEUED or READY item without a live cell, in plan order.  Number pushed.
 * Call when hdr->sweep is set and after every recovery; any time is safe. */
unsigned mr_recover_rings(const struct mr_seg *s);

#endif
