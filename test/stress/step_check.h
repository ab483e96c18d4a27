/* What must be true of a miniature run when a dead incarnation has been recovered, and when the run has gone on to its end.
 *
 * Everything is judged from the words: each microbatch behind the cursor is committed, or is in exactly one item; each QUEUED or READY item
 * has its cell; each slab belongs to whom its word names; nothing names the dead any more.
 */
#ifndef TEST_STEP_CHECK_H
#define TEST_STEP_CHECK_H

#include <stdarg.h>

#include "test/test_ipc_run.h"

enum verdict { V_OK, V_LOST, V_LEAK, V_STUCK, V_DUP, VERDICTS };

static char verdict_why[256];

__attribute__((format(printf, 2, 3))) static enum verdict bad(enum verdict v, const char *fmt, ...)
{
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(verdict_why, sizeof verdict_why, fmt, ap);
    va_end(ap);
    return v;
}

/* ---- after a recovery ------------------------------------------------------------------------------------------------------ */

static int owns(uint64_t w, unsigned slot, unsigned inc)
{
    unsigned p = mr_w_phase(w);

    return (p == MR_FILLING || p == MR_EXTRACTING || p == MR_DRAFTING || p == MR_ACCUMULATED) && mr_w_slot(w) == slot && mr_w_inc(w) == inc;
}

/* Nothing names the dead. */
static enum verdict check_dead(struct mini *m, unsigned slot, unsigned inc)
{
    struct mr_seg *s = &m->r.s;
    uint64_t sw = mr_step_read(s), c = mr_ld(&s->hdr->ckpt);

    for (unsigned i = 0; i < s->hdr->n_items; i++)
        if (owns(mr_ld(&s->items[i].word), slot, inc))
            return bad(V_LEAK, "item %u is still %s by the dead", i, mr_phase_name(mr_w_phase(s->items[i].word)));
    for (unsigned i = 0; i < s->hdr->n_slabs; i++)
        if (mr_ld(&s->slabs[i].word) == mr_w_slab_target(slot, inc))
            return bad(V_LEAK, "slab %u is still the dead's", i);
    for (unsigned k = 0; k < mr_step_places(s, mr_sw_step(sw)); k++) {
        uint64_t w = mr_ld(&s->places[k].word);

        if (mr_sw_phase(sw) != MR_COMMITTED && mr_place_state(s, mr_sw_step(sw), k) != MR_PLACE_OPEN && mr_pw_slot(w) == slot &&
            mr_pw_inc(w) == inc)
            return bad(V_LEAK, "place %u is still the dead's", k);
    }
    if (mr_ckpt_has_copier(c) && mr_pw_slot(c) == slot && mr_pw_inc(c) == inc)
        return bad(V_LEAK, "the checkpoint is still copied by the dead");
    if (s->actors[slot].kind == MR_DRAFTER && s->actors[slot].joined)
        return bad(V_DUP, "the accumulator of the dead counts as valid");
    return V_OK;
}

/* Is position `pos` in a committed step?  By the ledger, or by the records of steps whose line is not written yet. */
static int is_committed(struct mini *m, unsigned pos)
{
    struct mr_seg *s = &m->r.s;
    uint64_t w = mr_step_read(s);
    unsigned end = mr_sw_step(w) + (mr_sw_phase(w) == MR_COMMITTED);

    if (m->line_of[pos])
        return 1;
    for (unsigned step = (unsigned)mr_ld(&s->hdr->ledger_done); step < end; step++)
        for (unsigned k = 0; k < mr_step_places(s, step); k++)
            if (mr_record(s, step, k)->pos == pos)
                return 1;
    return 0;
}

/* Each microbatch is exactly where it must be. */
static enum verdict check_positions(struct mini *m)
{
    struct mr_seg *s = &m->r.s;
    uint64_t cursor = mr_ld(&s->hdr->cursor);

    for (unsigned pos = 0; pos < m->total; pos++) {
        unsigned n = 0, acc = 0;

        for (unsigned i = 0; i < s->hdr->n_items; i++) {
            uint64_t w = mr_ld(&s->items[i].word);

            n += mr_w_phase(w) != MR_FREE && mr_w_pos(w) == pos;
            acc += mr_w_phase(w) == MR_ACCUMULATED && mr_w_pos(w) == pos;
        }
        if (pos >= cursor ? n != 0 : is_committed(m, pos) ? n != acc || (n && mr_sw_phase(mr_step_read(s)) != MR_COMMITTED) : n > 1)
            return bad(V_DUP, "microbatch %u is in %u items, %s", pos, n, is_committed(m, pos) ? "and committed" : "not committed");
        if (pos < cursor && !n && !is_committed(m, pos))
            return bad(V_LOST, "microbatch %u is nowhere", pos);
    }
    return V_OK;
}

static enum verdict check_items(struct mini *m)
{
    struct mr_seg *s = &m->r.s;

    for (unsigned i = 0; i < s->hdr->n_items; i++) {
        uint64_t w = mr_ld(&s->items[i].word);
        const struct mr_item *it = &s->items[i];
        unsigned p = mr_w_phase(w), has;

        has = (p == MR_QUEUED && (mr_ring_has(s, MR_RING_INPUT, i, w) || mr_ring_has(s, MR_RING_RETRY, i, w))) ||
              (p == MR_READY && mr_ring_has(s, mr_ring_ready(it->bucket, it->epoch), i, w));
        if ((p == MR_QUEUED || p == MR_READY) && !has && !mr_ld(&s->hdr->sweep))   /* a full ring: swept again when it has room */
            return bad(V_LOST, "item %u is %s without a cell", i, mr_phase_name(p));
        if (p != MR_READY && p != MR_DRAFTING && p != MR_ACCUMULATED)
            continue;
        if (mr_ld(&s->slabs[it->slab].word) != mr_w_slab_item(i, mr_w_pos(w)))
            return bad(V_DUP, "item %u is %s and its slab %u is not its own", i, mr_phase_name(p), it->slab);
        if (p == MR_READY && !mr_arena_current(s, i))
            return bad(V_DUP, "item %u is ready in an arena that is gone", i);
    }
    return V_OK;
}

static enum verdict check_slabs(struct mini *m)
{
    struct mr_seg *s = &m->r.s;

    for (unsigned i = 0; i < s->hdr->n_slabs; i++) {
        uint64_t b = mr_ld(&s->slabs[i].word), w;
        unsigned p;

        if (mr_w_slab_kind(b) != MR_SLAB_ITEM)
            continue;
        w = mr_ld(&s->items[mr_w_slab_idx(b)].word);
        p = mr_w_phase(w);
        if (mr_w_pos(w) != mr_w_slab_pos(b) || (p != MR_EXTRACTING && p != MR_READY && p != MR_DRAFTING && p != MR_ACCUMULATED))
            return bad(V_LEAK, "slab %u is held for item %u, which is %s", i, mr_w_slab_idx(b), mr_phase_name(p));
    }
    return V_OK;
}

/* In a step that is not committed, a drafter has as many places DONE as items ACCUMULATED. */
static enum verdict check_places(struct mini *m)
{
    struct mr_seg *s = &m->r.s;
    uint64_t sw = mr_step_read(s);
    unsigned step = mr_sw_step(sw);

    if (mr_sw_phase(sw) == MR_COMMITTED || mr_sw_phase(sw) == MR_FINISHED)
        return V_OK;
    for (unsigned d = 0; d < m->r.D; d++) {
        unsigned slot = rig_drafter(&m->r, d), done = 0, acc = 0;

        for (unsigned k = 0; k < mr_step_places(s, step); k++)
            done += mr_place_state(s, step, k) == MR_PLACE_DONE && mr_pw_slot(mr_ld(&s->places[k].word)) == slot;
        for (unsigned i = 0; i < s->hdr->n_items; i++)
            acc += mr_w_phase(mr_ld(&s->items[i].word)) == MR_ACCUMULATED && mr_w_slot(mr_ld(&s->items[i].word)) == slot;
        if (done != acc)
            return bad(done > acc ? V_LOST : V_LEAK, "drafter %u has %u places done and %u items accumulated", d, done, acc);
    }
    return V_OK;
}

static enum verdict check_recovered(struct mini *m, unsigned slot, unsigned inc)
{
    enum verdict v = check_dead(m, slot, inc);

    v = v ? v : check_positions(m);
    v = v ? v : check_items(m);
    v = v ? v : check_slabs(m);
    v = v ? v : check_places(m);
    return v ? v : m->r.s.hdr->fatal ? bad(V_STUCK, "fatal is set") : V_OK;
}

/* ---- at the end ------------------------------------------------------------------------------------------------------------- */

static enum verdict check_trained(struct mini *m)
{
    unsigned steps = m->r.s.hdr->steps_total;

    if (m->bad)
        return bad(V_DUP, "%u surprises, e.g. a wrong token or a wrong hidden state", (unsigned)m->bad);
    for (unsigned i = 0; i < m->total; i++) {
        if (m->line_of[i] < 1 || m->line_of[i] > steps)
            return bad(V_LOST, "microbatch %u is in no ledger line", i);
        for (unsigned d = 0; d < m->r.D; d++) {
            float got = m->view[d].param[steps & 1][i];

            if (got != 1.0f)
                return bad(got < 1.0f ? V_LOST : V_DUP, "drafter %u trained microbatch %u %g times", d, i, (double)got);
        }
    }
    return V_OK;
}

/* Each ring: several laps of push and claim, then its full capacity. */
static enum verdict check_ring(struct mini *m, unsigned ring)
{
    struct mr_seg *s = &m->r.s;
    unsigned cap = s->hdr->ring_cap, n = s->hdr->n_items, phase = ring < MR_RING_READY ? MR_QUEUED : MR_READY, got = 0;
    unsigned to = ring < MR_RING_READY ? MR_EXTRACTING : MR_DRAFTING;
    uint64_t w, v;

    for (unsigned i = 0; i < 3 * cap; i++) {
        w = mr_w_item(phase, MR_NO_SLOT, 0, 1000 + i, 7);
        mr_st(&s->items[i % n].word, w);
        if (mr_ring_push(s, ring, i % n, w))
            return bad(V_STUCK, "ring %u takes nothing any more", ring);
        if (mr_ring_claim(s, ring, to, 1, 9, &v) != (int)(i % n) || mr_w_pos(v) != 1000 + i)
            return bad(V_STUCK, "ring %u gives nothing, or another item", ring);
    }
    w = mr_w_item(phase, MR_NO_SLOT, 0, 9000, 7);
    mr_st(&s->items[0].word, w);
    while (got <= cap && mr_ring_push(s, ring, 0, w) == 0)
        got++;
    if (got != cap)
        return bad(V_LEAK, "ring %u has room for %u cells of %u", ring, got, cap);
    mr_st(&s->items[0].word, mr_w_item(MR_FREE, MR_NO_SLOT, 0, 0, 0));
    return V_OK;
}

static enum verdict check_finished(struct mini *m)
{
    enum verdict v;

    if (!mini_finished(m))
        return bad(V_STUCK, "the run does not go on");
    v = check_trained(m);
    if (v)
        return v;
    if (rig_count(&m->r, MR_FREE) != m->r.s.hdr->n_items || rig_free_slabs(&m->r) != m->r.s.hdr->n_slabs)
        return bad(V_LEAK, "%u items and %u slabs are free at the end", rig_count(&m->r, MR_FREE), rig_free_slabs(&m->r));
    for (unsigned i = 0; i < mr_ring_count(&m->r.s); i++)
        if (mr_ring_live(&m->r.s, i))
            return bad(V_LEAK, "ring %u has live cells at the end", i);
    for (unsigned i = 0; i < mr_ring_count(&m->r.s) && !v; i++)
        v = check_ring(m, i);
    return v;
}

#endif
