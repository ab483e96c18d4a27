/* Rings of microbatch references: an array queue with helping (see ring.h for the contract).
 *
 * A position (free-running 64-bit) is written exactly once: cell[pos & mask] goes from an older lap to lap(pos) by one CAS.  So a cell
 * that bears lap(pos) IS the content of position pos, whoever looks at it and whenever.  Tail and head only say where to look:
 *
 *   push    t = tail; cell has lap(t) already -> its pusher is slow or dead: help tail to t + 1 and look again;
 *           else CAS the cell (this is the push), then help tail.
 *   claim   h = head; cell has not lap(h) -> empty; else decide by CAS on the ITEM word, and only then help head to h + 1.
 *
 * A process may die between any two of these steps.  Tail lags by at most one cell (a second cell is only written at tail), and head
 * may be one ahead of such a lagging tail; both are helped by whoever comes next.  Head passes a cell only after somebody saw that the
 * cell's publication is over; publications are never repeated, so no live item is passed.
 *
 * Hot path: a push touches tail's line and one cell; a claim touches head's line, one cell and the item.  `head_seen` keeps pushers off
 * head's line until the ring looks full; nothing is counted (tail IS the number of pushes).
 *
 * Memory order (docs/design.md section 6.5): payload is published by the item word's CAS (edge E1), not by the ring.  The cell's CAS
 * (release) comes after it in the pusher, so who meets the cell (acquire) sees that publication or a later word, and never discards a
 * cell as stale because it reads an old word.  Tail and head need no order: each decision is one CAS on one word, from its value.
 *
 * Limits: the lap has 24 bits: a process stopped between its load and its CAS while others push 2^24 laps would be fooled.  The ticket
 * has the low 12 bits of the plan position: a stale cell can name a later publication of the same item slot if it stays in the ring
 * for 4096 positions; then the item may be claimed a little out of order, still once (the item word decides).
 */
#include "ipc/ring.h"

#include <errno.h>

#include "base/point.h"
#include "ipc/ipc_pvt.h"

void mr_ring_init(struct mr_ring *r, unsigned cap, enum mr_phase want)
{
    MR_ASSERT(cap && !(cap & (cap - 1)));
    r->mask = cap - 1;
    r->shift = (uint32_t)__builtin_ctz(cap);
    r->want = want;
}

/* Lap of a position; starts at 1, so that zeroed cells are of no lap; wraps after 2^24. */
static inline unsigned lap_of(const struct mr_ring *r, uint64_t pos)
{
    return ((unsigned)(pos >> r->shift) + 1) & 0xffffffu;
}

static inline int live(const struct mr_ring *r, uint64_t cell, uint64_t word)
{
    return mr_w_phase(word) == r->want && mr_w_ticket(word) == mr_c_ticket(cell);
}

/* The cell of `head`.  1 and *h, *c set, or 0 = empty. */
static inline int head_cell(struct mr_ring *r, uint64_t *h, uint64_t *c)
{
    for (;;) {
        *h = mr_ld(&r->head);
        *c = mr_ld(&r->cell[*h & r->mask]);
        if (mr_c_lap(*c) == lap_of(r, *h))
            return 1;
        if (mr_ld(&r->head) == *h)     /* else others were a whole lap faster than our two loads */
            return 0;
    }
}

/* Discards stale cells at the head.  1 = the cell at the head is live, 0 = empty. */
static int discard_stale(const struct mr_seg *s, struct mr_ring *r)
{
    uint64_t h, c;

    while (head_cell(r, &h, &c)) {
        if (mr_c_idx(c) < s->hdr->n_items && live(r, c, mr_ld(&s->items[mr_c_idx(c)].word)))
            return 1;
        MR_POINT("ipc.ring.stale");
        mr_cas(&r->head, h, h + 1);
    }
    return 0;
}

/* head_seen says that position t does not fit.  1 = it does after all (*seen is fresh), 0 = full of live cells. */
static int make_room(const struct mr_seg *s, struct mr_ring *r, uint64_t t)
{
    for (int tries = 0; tries < 2; tries++) {
        uint64_t h = mr_ld(&r->head);

        mr_st_relaxed(&r->head_seen, h);   /* any earlier head will do: too small a value only leads back here */
        if ((int64_t)(t - h) <= (int64_t)r->mask)
            return 1;
        discard_stale(s, r);
    }
    return 0;
}

int mr_ring_push(const struct mr_seg *s, unsigned ring, unsigned idx, uint64_t word)
{
    struct mr_ring *r = mr_ring_at(s, ring);

    for (;;) {
        uint64_t t = mr_ld(&r->tail), *cell = &r->cell[t & r->mask], c = mr_ld(cell);
        unsigned lap = lap_of(r, t);

        if (mr_c_lap(c) == lap) {
            mr_cas(&r->tail, t, t + 1);        /* help */
            continue;
        }
        if (mr_ld(&r->tail) != t)              /* then c may be of a LATER lap: never write over that */
            continue;
        /* signed: head may be one ahead of a lagging tail; relaxed: any earlier head will do */
        if ((int64_t)(t - mr_ld_relaxed(&r->head_seen)) > (int64_t)r->mask && !make_room(s, r, t)) {
            if (mr_ld(&r->tail) != t)          /* full for a position that is history */
                continue;
            MR_POINT("ipc.ring.full");
            mr_st(&s->hdr->sweep, 1);
            return -ENOBUFS;
        }
        MR_POINT("ipc.ring.push");
        if (!mr_cas(cell, c, mr_c_make(lap, mr_w_ticket(word), idx)))
            continue;
        MR_POINT("ipc.ring.pushed");
        mr_cas(&r->tail, t, t + 1);
        return 0;
    }
}

int mr_ring_claim(const struct mr_seg *s, unsigned ring, enum mr_phase to, unsigned slot, unsigned inc, uint64_t *word)
{
    struct mr_ring *r = mr_ring_at(s, ring);
    uint64_t h, c;

    while (head_cell(r, &h, &c)) {
        unsigned idx = mr_c_idx(c);
        uint64_t w = 0, next = 0;
        int won = 0;

        if (idx < s->hdr->n_items) {           /* a corrupt cell is a stale cell */
            w = mr_ld(&s->items[idx].word);
            next = mr_w_item(to, slot, inc, mr_w_pos(w), mr_w_pub(w));
            MR_POINT("ipc.ring.claim");
            won = live(r, c, w) && mr_cas(&s->items[idx].word, w, next);   /* E1, acquire end: payload may be read from here on */
        }
        MR_POINT("ipc.ring.decided");
        mr_cas(&r->head, h, h + 1);            /* only now: the item has an owner, or its publication is over */
        if (won) {
            *word = next;
            return (int)idx;
        }
    }
    return -EAGAIN;
}

int mr_ring_peek(const struct mr_seg *s, unsigned ring)
{
    return discard_stale(s, mr_ring_at(s, ring));
}

/* ---- read-only walks ----------------------------------------------------------------------------------------------------- */

struct mr_ring_walk mr_ring_walk(const struct mr_seg *s, unsigned ring)
{
    const struct mr_ring *r = mr_ring_at(s, ring);
    uint64_t h = mr_ld(&r->head), n = mr_ld(&r->tail) - h + 1, cap = s->hdr->ring_cap;

    n = (int64_t)n < 0 ? 0 : n < cap ? n : cap;
    return (struct mr_ring_walk){r->cell, h, h + n, (unsigned)__builtin_ctzll(cap), ring < MR_RING_READY ? MR_QUEUED : MR_READY};
}

int mr_ring_step(struct mr_ring_walk *k, uint64_t *cell)
{
    while (k->pos != k->end) {
        uint64_t pos = k->pos++;

        *cell = mr_ld(&k->cell[pos & ((1u << k->shift) - 1)]);
        if (mr_c_lap(*cell) == (((unsigned)(pos >> k->shift) + 1) & 0xffffffu))
            return 1;
    }
    return 0;
}

unsigned mr_ring_live(const struct mr_seg *s, unsigned ring)
{
    struct mr_ring_walk k = mr_ring_walk(s, ring);
    unsigned n = 0;
    uint64_t c;

    while (mr_ring_step(&k, &c))
        n += mr_c_idx(c) < s->hdr->n_items && live(mr_ring_at(s, ring), c, mr_ld(&s->items[mr_c_idx(c)].word));
    return n;
}

int mr_ring_has(const struct mr_seg *s, unsigned ring, unsigned idx, uint64_t word)
{
    struct mr_ring_walk k = mr_ring_walk(s, ring);
    uint64_t c;

    while (mr_ring_step(&k, &c))
        if (mr_c_idx(c) == idx && mr_c_ticket(c) == mr_w_ticket(word))
            return 1;
    return 0;
}
