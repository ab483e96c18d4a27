/* Slabs: FREE | TARGET(slot, incarnation) | ITEM(index, plan position).  A slab is freed only by CAS from the exact word of its holder. */
#ifndef MR_IPC_SLAB_H
#define MR_IPC_SLAB_H

#include "ipc/seg.h"

/* Target: takes a FREE slab on `device` whose arena is registered (FREE -> TARGET(me)).  Index or -EAGAIN.  Take it BEFORE an item. */
int mr_slab_take(const struct mr_seg *s, unsigned device, unsigned slot, unsigned inc);
/* Target: gives it back unused.  0 or -ESTALE. */
int mr_slab_give(const struct mr_seg *s, unsigned slab, unsigned slot, unsigned inc);
/* Target: TARGET(me) -> ITEM(idx, pos), and writes slab, arena, generation, offset, bytes into the item.  BEFORE READY.  0 or -ESTALE. */
int mr_slab_assign(const struct mr_seg *s, unsigned slab, unsigned slot, unsigned inc, unsigned idx, unsigned pos);
/* ITEM(idx, pos) -> FREE, bumps targets.  0, or -ESTALE (freed already: harmless). */
int mr_slab_free(const struct mr_seg *s, unsigned slab, unsigned idx, unsigned pos);

#endif
