/* The life of an item: one compare-and-swap per transition (see item.h).
 *
 * The word says everything that must not be lost: phase, owner, plan position, publication.  Rings are told afterwards (a hint that is
 * lost with its pusher is found again by mr_recover_rings), event counts last (covered by deadlines).  Words without an owner (FREE,
 * QUEUED, READY) bear slot MR_NO_SLOT.
 *
 * QUEUED with publication 1 has never been extracted: it belongs to the input ring, behind what the feeder published before it.  Later
 * publications belong to the retry ring, which targets empty first.  (A new item in the retry ring would overtake the plan and could
 * take the slab that an earlier step needs: deadlock.)
 */
#include "ipc/item.h"

#include <errno.h>

#include "base/point.h"
#include "ipc/arena.h"
#include "ipc/ipc_pvt.h"
#include "ipc/ring.h"
#include "ipc/slab.h"

int mr_fatal(const struct mr_seg *s)
{
    mr_st(&s->hdr->fatal, 1);
    return -EOVERFLOW;
}

/* `*word` -> next.  0 or -ESTALE. */
static int move(const struct mr_seg *s, unsigned idx, uint64_t *word, uint64_t next)
{
    if (!mr_cas(&s->items[idx].word, *word, next))
        return -ESTALE;
    *word = next;
    return 0;
}

int mr_item_publish(const struct mr_seg *s, unsigned idx, enum mr_phase phase, uint64_t *word)
{
    if (mr_w_pub(*word) >= MR_PUB_MAX)
        return mr_fatal(s);
    return move(s, idx, word, mr_w_item(phase, MR_NO_SLOT, 0, mr_w_pos(*word), mr_w_pub(*word) + 1));
}

/* The ring of a QUEUED word. */
static unsigned queue_ring(uint64_t word)
{
    return mr_w_pub(word) == 1 ? MR_RING_INPUT : MR_RING_RETRY;
}

/* For a caller that does not hold the item (recovery): bucket and epoch may be rewritten while we read them.  Then the word has moved
 * on and the caller's check of it fails; the reads are racy on purpose and the result is clipped. */
MR_RACY unsigned mr_item_ring(const struct mr_seg *s, unsigned idx, uint64_t word)
{
    unsigned bucket = s->items[idx].bucket, epoch = s->items[idx].epoch;

    if (mr_w_phase(word) != MR_READY)
        return queue_ring(word);
    return mr_ring_ready(bucket < s->hdr->n_buckets ? bucket : 0, epoch);
}

int mr_item_retry(const struct mr_seg *s, unsigned idx, uint64_t *word)
{
    int rc = mr_item_publish(s, idx, MR_QUEUED, word);

    if (rc)
        return rc;
    MR_POINT("ipc.item.requeued");
    mr_ring_push(s, MR_RING_RETRY, idx, *word);
    mr_bump_kind(s, MR_TARGET);
    return 0;
}

/* ---- feeder -------------------------------------------------------------------------------------------------------------- */

int mr_item_fill(const struct mr_seg *s, unsigned slot, unsigned inc, unsigned pos, uint64_t *word)
{
    unsigned n = s->hdr->n_items;

    for (unsigned k = 0, idx = pos % n; k < n; k++, idx = idx + 1 < n ? idx + 1 : 0) {
        uint64_t w = mr_ld(&s->items[idx].word);

        if (mr_w_phase(w) != MR_FREE)
            continue;
        MR_POINT("ipc.item.fill");
        /* The new position is part of the claim: a position in a second field could be the last user's (see docs/design.md 4.1). */
        if (!move(s, idx, &w, mr_w_item(MR_FILLING, slot, inc, pos, 0))) {
            MR_POINT("ipc.item.filling");
            *word = w;
            return (int)idx;
        }
    }
    return -EAGAIN;
}

int mr_item_queue(const struct mr_seg *s, unsigned idx, uint64_t *word)
{
    int rc = mr_item_publish(s, idx, MR_QUEUED, word);

    if (rc)
        return rc;
    MR_POINT("ipc.item.queued");
    mr_ring_push(s, queue_ring(*word), idx, *word);
    MR_POINT("ipc.item.queue_pushed");
    mr_bump_kind(s, MR_TARGET);
    return 0;
}

/* ---- target -------------------------------------------------------------------------------------------------------------- */

int mr_item_extract(const struct mr_seg *s, unsigned slot, unsigned inc, uint64_t *word)
{
    int idx = mr_ring_claim(s, MR_RING_RETRY, MR_EXTRACTING, slot, inc, word);

    if (idx < 0)
        idx = mr_ring_claim(s, MR_RING_INPUT, MR_EXTRACTING, slot, inc, word);
    if (idx >= 0)
        MR_POINT("ipc.item.extracting");
    return idx;
}

int mr_item_ready(const struct mr_seg *s, unsigned idx, uint64_t *word)
{
    unsigned ring = mr_ring_ready(s->items[idx].bucket, s->items[idx].epoch);   /* read while we hold it */
    int rc;

    MR_POINT("ipc.item.extracted");
    rc = mr_item_publish(s, idx, MR_READY, word);   /* E1, release end: hidden states and payload fields were written before */
    if (rc)
        return rc;
    MR_POINT("ipc.item.ready");
    mr_ring_push(s, ring, idx, *word);              /* stale already when a claim by position was faster */
    MR_POINT("ipc.item.ready_pushed");
    mr_bump_kind(s, MR_DRAFTER);
    return 0;
}

/* ---- drafter ------------------------------------------------------------------------------------------------------------- */

int mr_item_draft(const struct mr_seg *s, unsigned bucket, unsigned epoch, unsigned slot, unsigned inc, uint64_t *word)
{
    int idx = mr_ring_claim(s, mr_ring_ready(bucket, epoch), MR_DRAFTING, slot, inc, word);

    if (idx >= 0)
        MR_POINT("ipc.item.drafting");
    return idx;
}

int mr_item_draft_pos(const struct mr_seg *s, unsigned pos, unsigned slot, unsigned inc, uint64_t *word)
{
    unsigned n = s->hdr->n_items;

    /* Starts where mr_item_fill put it, unless slots were taken. */
    for (unsigned k = 0, idx = pos % n; k < n; k++, idx = idx + 1 < n ? idx + 1 : 0) {
        uint64_t w = mr_ld(&s->items[idx].word);

        if (mr_w_phase(w) != MR_READY || mr_w_pos(w) != pos)
            continue;
        if (move(s, idx, &w, mr_w_item(MR_DRAFTING, slot, inc, pos, mr_w_pub(w))))   /* E1, acquire end */
            return -EAGAIN;
        MR_POINT("ipc.item.drafting_pos");
        *word = w;
        return (int)idx;
    }
    return -EAGAIN;
}

int mr_item_accumulated(const struct mr_seg *s, unsigned idx, uint64_t *word)
{
    uint64_t w = *word;

    MR_POINT("ipc.item.accumulate");
    /* E2, release end: the accumulator holds it, host-confirmed.  Acquire end: recovery and reduce, through this word or the place. */
    return move(s, idx, word, mr_w_item(MR_ACCUMULATED, mr_w_slot(w), mr_w_inc(w), mr_w_pos(w), mr_w_pub(w)));
}

int mr_item_free(const struct mr_seg *s, unsigned idx, uint64_t *word)
{
    uint64_t w = *word;

    MR_POINT("ipc.item.free");
    /* E4: apply and zero are host-confirmed by now.  Slab first: an item that is FREE owns nothing, so the other order could leak.
     * -ESTALE here means that a first attempt died between the two. */
    mr_slab_free(s, s->items[idx].slab, idx, mr_w_pos(w));
    MR_POINT("ipc.item.slab_freed");
    if (move(s, idx, word, mr_w_item(MR_FREE, MR_NO_SLOT, 0, mr_w_pos(w), mr_w_pub(w))))
        return -ESTALE;
    MR_POINT("ipc.item.freed");
    mr_bump_kind(s, MR_FEEDER);
    return 0;
}

int mr_item_requeue(const struct mr_seg *s, unsigned idx, uint64_t *word)
{
    int rc;

    if (mr_ld(&s->items[idx].word) != *word)
        return -ESTALE;
    /* The slab word stays for the supervisor's sweep: if two could free it, one of them might be late and hit its next use.  The item
     * names no slab any more, so the sweep can tell this one from that of the next extraction, which may have begun by then. */
    s->items[idx].slab = MR_NO_SLAB;
    rc = mr_item_retry(s, idx, word);
    if (!rc)
        mr_st(&s->hdr->sweep, 1);
    return rc;
}

const char *mr_phase_name(enum mr_phase p)
{
    static const char *const name[] = {"free", "filling", "queued", "extracting", "ready", "drafting", "accumulated"};

    _Static_assert(sizeof name / sizeof name[0] == MR_PHASES, "one name per phase");
    return (unsigned)p < MR_PHASES ? name[p] : "?";
}
