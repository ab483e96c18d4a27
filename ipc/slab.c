/* Slab words: FREE -> TARGET(me) -> ITEM(index, position) -> FREE (see slab.h).
 *
 * Every change is one CAS from the exact word of the holder, so freeing twice, or freeing what somebody else has taken since, cannot
 * happen.  ITEM bears the plan position and not the ticket: the ticket changes when the item is published again.
 */
#include "ipc/slab.h"

#include <errno.h>

#include "base/point.h"
#include "ipc/ipc_pvt.h"

int mr_slab_take(const struct mr_seg *s, unsigned device, unsigned slot, unsigned inc)
{
    for (unsigned i = 0; i < s->hdr->n_slabs; i++) {
        struct mr_slab *b = &s->slabs[i];

        if (b->device != device || mr_ld(&b->word) != 0 || b->arena >= s->hdr->n_arenas || !mr_ld(&s->arenas[b->arena].generation))
            continue;
        MR_POINT("ipc.slab.take");
        if (mr_cas(&b->word, 0, mr_w_slab_target(slot, inc))) {
            MR_POINT("ipc.slab.taken");
            return (int)i;
        }
    }
    return -EAGAIN;
}

static int to_free(const struct mr_seg *s, unsigned slab, uint64_t word)
{
    if (slab >= s->hdr->n_slabs || !mr_cas(&s->slabs[slab].word, word, 0))
        return -ESTALE;
    MR_POINT("ipc.slab.freed");
    mr_bump_kind(s, MR_TARGET);
    return 0;
}

int mr_slab_give(const struct mr_seg *s, unsigned slab, unsigned slot, unsigned inc)
{
    return to_free(s, slab, mr_w_slab_target(slot, inc));
}

int mr_slab_assign(const struct mr_seg *s, unsigned slab, unsigned slot, unsigned inc, unsigned idx, unsigned pos)
{
    struct mr_slab *b = &s->slabs[slab];
    struct mr_item *it = &s->items[idx];
    uint64_t generation = mr_ld(&s->arenas[b->arena].generation);

    if (!generation)
        return -ESTALE;                    /* the arena is lost: what was written there is, too */
    /* The fields belong to the holder of the item, who is the caller; READY publishes them (edge E1). */
    it->slab = slab;
    it->arena = b->arena;
    it->generation = generation;
    it->offset = b->offset;
    it->bytes = b->bytes;
    MR_POINT("ipc.slab.assign");
    if (!mr_cas(&b->word, mr_w_slab_target(slot, inc), mr_w_slab_item(idx, pos)))
        return -ESTALE;
    MR_POINT("ipc.slab.assigned");
    return 0;
}

int mr_slab_free(const struct mr_seg *s, unsigned slab, unsigned idx, unsigned pos)
{
    return to_free(s, slab, mr_w_slab_item(idx, pos));
}
