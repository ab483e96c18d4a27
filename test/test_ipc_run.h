/* A complete miniature run for the ipc tests: feeder, targets, drafters and supervisor as state machines whose `turn` does a little work.
 *
 * What is computed shows what was trained: microbatch p adds 1 to gradient element p, so at the end every drafter's parameters must be all
 * ones.  What an actor remembers between turns lies in `struct local`, in shared memory: a test can kill the process that plays an actor
 * and let another one go on with the others.  All of it is made before the first fork, so pointers hold in every process.
 */
#ifndef TEST_IPC_RUN_H
#define TEST_IPC_RUN_H

#include <sched.h>
#include <sys/mman.h>

#include "test_ipc.h"

enum { MINI_ACTORS = 8, MINI_POS = 512, MINI_SUP = MINI_ACTORS };

struct local {
    uint32_t started, held, has_slab, summed, copying, writing;
    unsigned idx, place, step, slab, rr;
    uint64_t word, sum_word;
};

struct mini {
    struct rig r;
    struct mr_arena_map map;
    char *slab_base;
    struct mr_drafter_view view[MR_MAX_DRAFTERS];
    struct local local[MINI_ACTORS];
    unsigned det, total, current;          /* current: who is having a turn */
    uint64_t bad;
    uint32_t line_of[MINI_POS];            /* ledger: step + 1 by position */
};

#define MINI_BAD(m, cond) ((cond) ? (void)mr_add(&(m)->bad, 1) : (void)0)

static inline struct mini *mini_make(unsigned targets, unsigned drafters, unsigned places, unsigned slabs, unsigned epochs,
                                     unsigned per_epoch, unsigned det)
{
    struct mini *m = mmap(NULL, sizeof *m, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    struct mr_err err = {0};

    assert_true(m != MAP_FAILED && 1 + targets + drafters <= MINI_ACTORS && epochs * per_epoch <= MINI_POS && epochs <= 2);
    rig_make(&m->r, targets, drafters, places, slabs, epochs, per_epoch);
    if (epochs > 1)
        rig_seal(&m->r, 1);
    m->det = det;
    m->total = epochs * per_epoch;
    if (mr_arena_create_shm(&m->r.s, 0, 4096ull * slabs, &err))
        fail_msg("%s", err.msg);
    m->slab_base = mr_arena_base(&m->map, &m->r.s, 0, 0, &err);
    assert_non_null(m->slab_base);
    for (unsigned d = 0; d < drafters; d++) {
        if (mr_arena_create_shm(&m->r.s, 1 + d, mr_drafter_arena_bytes(m->total), &err))
            fail_msg("%s", err.msg);
        assert_int_equal(mr_arena_of_drafter(&m->r.s, d), 1 + d);
        m->view[d] = mr_drafter_view_at(mr_arena_base(&m->map, &m->r.s, 1 + d, 0, &err), m->total);
        m->r.s.actors[rig_drafter(&m->r, d)].joined = 0;
    }
    return m;
}

static inline void mini_drop(struct mini *m)
{
    mr_arena_close_all(&m->map);
    rig_drop(&m->r);
    munmap(m, sizeof *m);
}

static inline unsigned mini_inc(struct mini *m, unsigned slot) { return m->r.s.actors[slot].incarnation; }

/* ---- feeder, target ------------------------------------------------------------------------------------------------------- */

static inline int feeder_turn(struct mini *m, unsigned slot)
{
    struct mr_seg *s = &m->r.s;
    unsigned pos = (unsigned)mr_ld(&s->hdr->cursor);
    uint64_t w;
    int idx;

    if (pos >= m->total)
        return 0;
    idx = mr_item_fill(s, slot, mini_inc(m, slot), pos, &w);
    if (idx < 0)
        return 0;
    s->items[idx].bucket = pos % m->r.per_epoch % 2;
    s->items[idx].epoch = pos / m->r.per_epoch;
    s->items[idx].n_seqs = 1;
    s->items[idx].n_tokens = 10;
    mr_tok_at(s, (unsigned)idx).ids[0] = (int32_t)pos;
    MR_POINT("test.feeder.written");
    mr_st(&s->hdr->cursor, (uint64_t)pos + 1);
    MR_POINT("test.feeder.cursor");
    MINI_BAD(m, mr_item_queue(s, (unsigned)idx, &w));
    return 1;
}

static inline int target_turn(struct mini *m, unsigned slot)
{
    struct local *l = &m->local[slot];
    struct mr_seg *s = &m->r.s;
    unsigned inc = mini_inc(m, slot);
    int rc;

    if (l->held) {
        unsigned pos = mr_w_pos(l->word);

        MINI_BAD(m, mr_tok_at(s, l->idx).ids[0] != (int32_t)pos);
        *(uint32_t *)(m->slab_base + s->slabs[l->slab].offset) = pos + 1;
        l->held = l->has_slab = 0;
        MINI_BAD(m, mr_slab_assign(s, l->slab, slot, inc, l->idx, pos));
        MINI_BAD(m, mr_item_ready(s, l->idx, &l->word));
        return 1;
    }
    rc = mr_slab_take(s, 0, slot, inc);
    if (rc < 0)
        return 0;
    l->slab = (unsigned)rc;
    rc = mr_item_extract(s, slot, inc, &l->word);
    if (rc < 0) {
        MINI_BAD(m, mr_slab_give(s, l->slab, slot, inc));
        return 0;
    }
    l->idx = (unsigned)rc;
    l->held = 1;
    return 1;
}

/* ---- drafter ---------------------------------------------------------------------------------------------------------------- */

static inline void drafter_zero(struct mini *m, unsigned rank)
{
    memset(m->view[rank].acc, 0, 4 * m->total);
}

static inline void drafter_apply(struct mini *m, unsigned slot, uint64_t w)
{
    unsigned rank = m->r.s.actors[slot].index, step = mr_sw_step(w);
    struct mr_drafter_view *v = &m->view[rank];

    for (unsigned i = 0; i < m->total; i++) {
        v->param[(step + 1) & 1][i] = v->param[step & 1][i] + v->reduced[i];
        if (i == m->total / 2)
            MR_POINT("test.drafter.half_applied");
    }
    MR_POINT("test.drafter.apply_done");
    drafter_zero(m, rank);
    MR_POINT("test.drafter.zeroed");
    rig_free_own(&m->r, slot, mini_inc(m, slot));
    MINI_BAD(m, mr_step_applied(&m->r.s, rank, w) < 0);
}

static inline int drafter_boot(struct mini *m, unsigned slot, uint64_t w)
{
    unsigned rank = m->r.s.actors[slot].index;

    if (mr_sw_phase(w) == MR_COMMITTED && !(mr_sw_applied(w) >> rank & 1)) {
        drafter_apply(m, slot, w);
        return 1;
    }
    drafter_zero(m, rank);
    MR_POINT("test.drafter.boot_zeroed");
    mr_step_join(&m->r.s, slot);
    m->local[slot].started = 1;
    return 1;
}

static inline int drafter_item(struct mini *m, unsigned slot)
{
    struct local *l = &m->local[slot];
    struct mr_seg *s = &m->r.s;
    unsigned inc = mini_inc(m, slot), pos = mr_w_pos(l->word), rank = s->actors[slot].index;

    l->held = 0;
    if (!mr_arena_current(s, l->idx)) {
        MINI_BAD(m, mr_item_requeue(s, l->idx, &l->word));
        MINI_BAD(m, mr_place_give(s, l->step, l->place, slot, inc));
        return 1;
    }
    MINI_BAD(m, *(uint32_t *)(m->slab_base + s->items[l->idx].offset) != pos + 1);
    MINI_BAD(m, s->items[l->idx].bucket != mr_place_bucket(s, l->step, l->place));
    m->view[rank].acc[pos] += 1;
    MR_POINT("test.drafter.added");
    MINI_BAD(m, mr_item_accumulated(s, l->idx, &l->word));
    MR_POINT("test.drafter.accumulated");
    *mr_record(s, l->step, l->place) = (struct mr_record){.pos = pos, .bucket = s->items[l->idx].bucket, .drafter = rank};
    MINI_BAD(m, mr_place_done(s, l->step, l->place, slot, inc));
    return 1;
}

static inline int drafter_claim(struct mini *m, unsigned slot, uint64_t w)
{
    struct local *l = &m->local[slot];
    struct mr_seg *s = &m->r.s;
    enum mr_wait_reason why;
    int idx;

    l->step = mr_sw_step(w);
    if (m->det)
        idx = mr_place_claim_det(s, l->step, s->actors[slot].index, slot, mini_inc(m, slot), &l->place, &l->word);
    else
        idx = mr_place_claim(s, l->step, slot, mini_inc(m, slot), &l->rr, &l->place, &l->word);
    if (idx < 0)
        return mr_sw_phase(w) == MR_COLLECT && mr_step_try_reduce(s, w, &why) == 0;
    l->idx = (unsigned)idx;
    l->held = 1;
    return 1;
}

static inline int drafter_sum(struct mini *m, unsigned slot, uint64_t w)
{
    unsigned rank = m->r.s.actors[slot].index;

    for (unsigned i = 0; i < m->total; i++) {
        m->view[rank].reduced[i] = 0;
        for (unsigned d = 0; d < m->r.D; d++)
            m->view[rank].reduced[i] += m->view[d].acc[i];
    }
    MR_POINT("test.drafter.summed");
    m->local[slot].sum_word = w;
    m->local[slot].summed = 1;
    return 1;
}

/* Checkpoints at every second step and at the end: state `step` must hold exactly the committed microbatches. */
static inline int drafter_copy(struct mini *m, unsigned slot, uint64_t w)
{
    struct local *l = &m->local[slot];
    unsigned step = mr_sw_step(w), sum = 0, inc = mini_inc(m, slot);

    if (l->writing) {
        step = l->writing;
        l->writing = 0;
        MINI_BAD(m, mr_ckpt_done(&m->r.s, step, slot, inc));
        return 1;
    }
    if (l->copying) {
        step = l->copying;
        for (unsigned i = 0; i < m->total; i++)
            sum += (unsigned)m->view[m->r.s.actors[slot].index].param[step & 1][i];
        MINI_BAD(m, sum != mr_committed_at(&m->r.s, step));
        l->copying = 0;
        l->writing = step;
        MINI_BAD(m, mr_ckpt_read(&m->r.s, step, slot, inc));
        return 1;
    }
    if (mr_sw_phase(w) != MR_COLLECT || (step % 2 && mr_step_places(&m->r.s, step)) || mr_ckpt_claim(&m->r.s, step, slot, inc))
        return 0;
    l->copying = step;
    return 1;
}

static inline int drafter_turn(struct mini *m, unsigned slot)
{
    struct local *l = &m->local[slot];
    unsigned rank = m->r.s.actors[slot].index;
    uint64_t w = mr_step_read(&m->r.s);

    if (!l->started)
        return drafter_boot(m, slot, w);
    if (l->held)
        return drafter_item(m, slot);
    if (l->summed) {
        l->summed = 0;
        mr_step_reduced(&m->r.s, rank, l->sum_word);
        return 1;
    }
    if (drafter_copy(m, slot, w))
        return 1;
    switch (mr_sw_phase(w)) {
    case MR_COLLECT:
    case MR_REPAIR:
        return drafter_claim(m, slot, w);
    case MR_REDUCE:
        return mr_sw_reduced(w) >> rank & 1 ? 0 : drafter_sum(m, slot, w);
    case MR_COMMITTED:
        if (mr_sw_applied(w) >> rank & 1 || mr_ckpt_blocks_apply(&m->r.s, mr_sw_step(w)))
            return 0;
        drafter_apply(m, slot, w);
        return 1;
    default:
        return 0;
    }
}

/* ---- supervisor ------------------------------------------------------------------------------------------------------------- */

static inline int supervisor_ledger(struct mini *m)
{
    struct mr_seg *s = &m->r.s;
    uint64_t w = mr_step_read(s);
    unsigned line = (unsigned)mr_ld(&s->hdr->ledger_done), places;

    if (!(mr_sw_step(w) > line || (mr_sw_step(w) == line && mr_sw_phase(w) == MR_COMMITTED)) || !mr_step_places(s, line))
        return 0;
    places = mr_step_places(s, line);
    for (unsigned k = 0; k < places; k++) {
        unsigned pos = mr_record(s, line, k)->pos;

        MINI_BAD(m, pos >= m->total || (m->line_of[pos] && m->line_of[pos] != line + 1));
        if (pos < m->total)
            m->line_of[pos] = line + 1;
    }
    mr_st(&s->hdr->ledger_done, (uint64_t)line + 1);
    mr_evc_bump(&s->hdr->evc[MR_DRAFTER]);
    return 1;
}

static inline int supervisor_turn(struct mini *m)
{
    struct mr_seg *s = &m->r.s;
    uint64_t w = mr_step_read(s);

    if (supervisor_ledger(m))
        return 1;
    if (mr_ld(&s->hdr->sweep)) {
        mr_recover_rings(s);
        return 1;
    }
    if (mr_sw_phase(w) == MR_COLLECT && !mr_step_places(s, mr_sw_step(w)) && mr_ld(&s->hdr->ledger_done) == mr_sw_step(w) &&
        mr_ld(&s->hdr->ckpt) == mr_w_place(MR_CKPT_IDLE, mr_sw_step(w), 0, 0))
        return mr_step_finish(s, w) == 0;
    return 0;
}

static inline int mini_turn(struct mini *m, unsigned slot)
{
    if (slot == 0)
        return feeder_turn(m, slot);
    return slot <= m->r.T ? target_turn(m, slot) : drafter_turn(m, slot);
}

static inline int mini_finished(struct mini *m) { return mr_sw_phase(mr_step_read(&m->r.s)) == MR_FINISHED; }

/* What must hold at the end. */
static inline void mini_check(struct mini *m)
{
    unsigned steps = m->r.s.hdr->steps_total;

    assert_int_equal(m->bad, 0);
    assert_true(mini_finished(m));
    assert_int_equal(rig_count(&m->r, MR_FREE), m->r.s.hdr->n_items);
    assert_int_equal(rig_free_slabs(&m->r), m->r.s.hdr->n_slabs);
    for (unsigned i = 0; i < m->total; i++) {
        assert_true(m->line_of[i] >= 1 && m->line_of[i] <= steps);
        for (unsigned d = 0; d < m->r.D; d++)
            assert_true(m->view[d].param[steps & 1][i] == 1.0f);
    }
    assert_int_equal(m->r.s.hdr->fatal, 0);
    for (unsigned i = 0; i < mr_ring_count(&m->r.s); i++)
        assert_int_equal(mr_ring_live(&m->r.s, i), 0);
}

#endif
