/* One optimizer step as a drafter sees it (docs/design.md section 6).
 *
 *   COLLECT, REPAIR   place -> item -> gradient -> ACCUMULATED -> record -> DONE; all DONE and all joined: COLLECT -> REDUCE
 *   REDUCE            sum out of place, reduced bit with the epoch read before the sum; the last bit is the commit
 *   COMMITTED         apply -> zero -> free own items (slab word first) -> applied bit; the last bit opens the next step
 *
 * As long as this incarnation lives, the step it is in cannot be left without its own bits; so a step word read at the start of a turn
 * may gain an epoch (a peer died) or go back to REPAIR, but its step holds until the turn ends.
 */
#include <errno.h>
#include <string.h>

#include "actors/drafter_pvt.h"
#include "actors/turns.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/point.h"
#include "ipc/atomic.h"
#include "ipc/item.h"
#include "ipc/slab.h"
#include "ipc/step.h"

/* ---- COLLECT ---------------------------------------------------------------------------------------------------------------- */

/* Nobody else touches the record of a place that we have TAKEN.  Whole, not added to: a death before DONE leaves it to whoever redoes the
 * place. */
static void write_record(const struct mr_drafter *d, unsigned step, unsigned place, const struct mr_batch *b,
                         const struct mr_draft_stats *st)
{
    *mr_record(d->env->seg, step, place) = (struct mr_record){
        .pos = b->pos, .bucket = b->bucket, .drafter = d->env->rank, .tokens = (uint32_t)b->n_tokens, .draft_tokens = st->draft_tokens,
        .n_seqs = (uint32_t)b->n_seqs, .blocks = st->blocks, .accepted = st->accepted, .labels = st->labels, .correct = st->correct,
        .loss_sum = st->loss_sum, .weight_sum = st->weight_sum,
    };
    memcpy(mr_slot_sums_at(d->env->seg, step, place), st->slot, d->env->hdr->block_slots * sizeof *st->slot);
}

static int accumulate(struct mr_drafter *d, unsigned step, unsigned idx, const struct mr_batch *b, struct mr_draft_stats *st)
{
    const struct mr_item *it = &d->env->seg->items[idx];
    struct mr_err err = {0};
    char *slab = mr_arena_base(&d->env->map, d->env->seg, it->arena, it->generation, &err);

    d->v.hdr->acc_step = step + 1u;
    mr_turns_begin(d->env);
    if (!slab || d->eng.accumulate(d->eng.self, b, slab + it->offset, d->v.param[step & 1], d->v.acc, st, &err)) {
        mr_err_prefix(&err, "microbatch %u, step %u", b->pos, step);
        return mr_env_fail(d->env, &err);
    }
    d->v.hdr->acc_weight += st->weight_sum;
    d->v.hdr->acc_loss += st->loss_sum;
    return MR_GO_ON;
}

/* The hidden states went down with their keeper: the microbatch is extracted again, and the place is open for another one. */
static int give_back(struct mr_drafter *d, unsigned step, unsigned place, unsigned idx, uint64_t word)
{
    struct mr_env *e = d->env;
    unsigned pos = mr_w_pos(word);
    int rc = mr_item_requeue(e->seg, idx, &word);

    if (rc)
        return mr_env_lost(e, "DRAFTING to QUEUED", pos, rc);
    MR_POINT("drafter.item.requeued");
    rc = mr_place_give(e->seg, step, place, e->slot, e->inc);
    if (rc)
        return mr_env_lost(e, "place TAKEN to OPEN", pos, rc);
    return MR_GO_ON;
}

static int draft(struct mr_drafter *d, unsigned step, unsigned place, unsigned idx, uint64_t word)
{
    struct mr_env *e = d->env;
    struct mr_batch b = mr_env_batch(e, idx, word);
    struct mr_draft_stats st = {0};
    uint64_t t0 = mr_now_ns();
    int rc;

    if (!mr_arena_current(e->seg, idx))
        return give_back(d, step, place, idx, word);
    rc = accumulate(d, step, idx, &b, &st);
    if (rc != MR_GO_ON)
        return rc;
    MR_POINT("drafter.gradient.added");
    rc = mr_item_accumulated(e->seg, idx, &word);              /* edge E2: host-confirmed */
    if (rc)
        return mr_env_lost(e, "DRAFTING to ACCUMULATED", b.pos, rc);
    MR_POINT("drafter.item.accumulated");
    write_record(d, step, place, &b, &st);
    MR_POINT("drafter.record.written");
    rc = mr_place_done(e->seg, step, place, e->slot, e->inc);  /* edge E5: release */
    if (rc)
        return mr_env_lost(e, "place TAKEN to DONE", b.pos, rc);
    MR_POINT("drafter.place.done");
    mr_env_worked(e, t0, 1, (uint64_t)b.n_tokens, st.draft_tokens);
    mr_turns_unit(e, mr_now_ns() - t0);
    return MR_GO_ON;
}

static int plan_is_sealed(const struct mr_drafter *d, unsigned step)
{
    unsigned epoch = mr_epoch_of_step(d->env->seg, step);

    return mr_ld(&mr_plan_at(d->env->seg, epoch).hdr->epoch) == epoch + 1u;
}

/* A place of the step, then an item for it.  0, -EAGAIN or -ENOENT. */
static int claim(struct mr_drafter *d, unsigned step, struct mr_held *h)
{
    struct mr_env *e = d->env;
    int rc;

    if (e->hdr->deterministic)
        rc = mr_place_claim_det(e->seg, step, e->rank, e->slot, e->inc, &h->place, &h->word);
    else
        rc = mr_place_claim(e->seg, step, e->slot, e->inc, &d->rr, &h->place, &h->word);
    if (rc < 0)
        return rc;
    MR_POINT("drafter.item.claimed");
    h->idx = (unsigned)rc;
    h->valid = 1;
    d->holds = 1;
    mr_env_claimed(e);
    return 0;
}

/* Begins to pull the hidden states of a claimed microbatch here, if they are on another GPU.  1 = they are, 0, or -1 with err.  Stale ones
 * are left to draft(). */
static int pull(struct mr_drafter *d, const struct mr_held *h, struct mr_err *err)
{
    struct mr_env *e = d->env;
    const struct mr_item *it = &e->seg->items[h->idx];
    char *slab;

    if (!d->eng.prefetch || !mr_arena_current(e->seg, h->idx) ||
        e->seg->arenas[it->arena].device == e->topo->actor[e->slot].device_index)
        return 0;
    slab = mr_arena_base(&e->map, e->seg, it->arena, it->generation, err);
    if (!slab)
        return mr_arena_current(e->seg, h->idx) ? -1 : 0;
    return d->eng.prefetch(d->eng.self, slab + it->offset, (int)it->n_tokens, err) ? -1 : 1;
}

/* The microbatch to work on, its hidden states on their way; and, if those are pulled, also the next one, so that its copy runs beside this
 * one's computation.  As claim(); or an exit code in *rc. */
static int take(struct mr_drafter *d, unsigned step, struct mr_held *h, int *rc)
{
    struct mr_err err = {0};
    int got = 0, pulled = 1;

    *rc = MR_GO_ON;
    *h = d->next;
    d->next.valid = 0;
    if (!h->valid) {
        got = claim(d, step, h);
        pulled = got ? 0 : pull(d, h, &err);
    }
    if (pulled > 0 && !claim(d, step, &d->next)) {
        MR_POINT("drafter.next.claimed");
        pulled = pull(d, &d->next, &err);
    }
    if (pulled < 0)
        *rc = mr_env_fail(d->env, &err);
    return got;
}

int mr_drafter_collect(struct mr_drafter *d, uint64_t word, uint32_t seq)
{
    struct mr_env *e = d->env;
    unsigned step = mr_sw_step(word);
    enum mr_wait_reason why = MR_WAIT_REPAIR;
    struct mr_held h;
    int turn, got, rc = MR_GO_ON;

    if (!mr_step_places(e->seg, step)) {
        mr_env_wait(e, seq, MR_WAIT_END);
        return MR_GO_ON;
    }
    if (!plan_is_sealed(d, step)) {
        mr_env_wait(e, seq, MR_WAIT_EPOCH);
        return MR_GO_ON;
    }
    turn = d->next.valid || !mr_turns_taken(e);
    got = turn ? take(d, step, &h, &rc) : -EAGAIN;
    if (turn && (got == 0 || rc != MR_GO_ON))
        return rc != MR_GO_ON ? rc : draft(d, step, h.place, h.idx, h.word);
    if (mr_sw_phase(word) == MR_COLLECT && mr_step_try_reduce(e->seg, word, &why) != -EAGAIN) {
        MR_POINT("drafter.reduce.entered");
        return MR_GO_ON;
    }
    mr_env_wait(e, seq, !turn ? MR_WAIT_TURN : got == -EAGAIN ? MR_WAIT_READY : why);
    return MR_GO_ON;
}

/* ---- REDUCE ----------------------------------------------------------------------------------------------------------------- */

int mr_drafter_reduce(struct mr_drafter *d, uint64_t word, uint32_t seq)
{
    struct mr_env *e = d->env;
    struct mr_err err = {0};
    int rc;

    if (mr_sw_reduced(word) & 1u << e->rank) {
        mr_env_wait(e, seq, MR_WAIT_REDUCE);
        return MR_GO_ON;
    }
    if (d->reduce.collective)
        mr_turns_end(e);                                       /* it waits for others: a target may compute meanwhile */
    else
        mr_turns_begin(e);
    rc = d->reduce.sum(&d->reduce, word, &err);
    if (rc == -ESTALE) {
        mr_env_wait(e, seq, MR_WAIT_PEER);
        return MR_GO_ON;
    }
    if (rc)
        return mr_env_fail(e, &err);
    MR_POINT("drafter.sum.done");
    rc = mr_step_reduced(e->seg, e->rank, word);               /* -ESTALE: a peer died while we summed; all of it again */
    MR_POINT("drafter.reduced.set");
    if (rc == 1)
        mr_env_notify(e);                                      /* mine was the last: the step is committed */
    return MR_GO_ON;
}

/* ---- COMMITTED -------------------------------------------------------------------------------------------------------------- */

int mr_drafter_applied(const struct mr_drafter *d, uint64_t word)
{
    return (mr_sw_applied(word) & 1u << d->env->rank) != 0;
}

int mr_drafter_zero(struct mr_drafter *d)
{
    int rc = d->eng.zero(d->eng.self, d->v.acc);

    d->v.hdr->acc_weight = 0.0;
    d->v.hdr->acc_loss = 0.0;
    d->v.hdr->acc_step = 0;
    if (rc)
        mr_error("zeroing the accumulator failed (%d)", rc);
    return rc ? d->eng.failure : MR_GO_ON;
}

/* Own items of the committed step; those of a dead incarnation were freed by recovery. */
static int free_items(struct mr_drafter *d)
{
    struct mr_env *e = d->env;

    for (unsigned i = 0; i < e->hdr->n_items; i++) {
        uint64_t w = mr_ld(&e->seg->items[i].word);
        unsigned pos = mr_w_pos(w);
        int rc;

        if (mr_w_phase(w) != MR_ACCUMULATED || mr_w_slot(w) != e->slot || mr_w_inc(w) != e->inc)
            continue;
        rc = mr_item_free(e->seg, i, &w);
        if (rc)
            return mr_env_lost(e, "ACCUMULATED to FREE", pos, rc);
        MR_POINT("drafter.item.freed");
    }
    return MR_GO_ON;
}

/* row.note of a drafter: the bits of the last gradient norm before clipping (metrics). */
static void note_norm(struct mr_drafter *d, double norm)
{
    uint64_t bits;

    memcpy(&bits, &norm, sizeof(bits));
    mr_st_relaxed(&d->env->me->note, bits);
}

static int apply(struct mr_drafter *d, unsigned step)
{
    struct mr_err err = {0};
    uint64_t t0 = mr_now_ns();
    double norm;
    int rc;

    if (d->eng.apply(d->eng.self, &d->v, step, d->env->hdr->steps_total, d->v.hdr->reduced_weight, &norm, &err)) {
        mr_err_prefix(&err, "optimizer step %u", step);
        return mr_env_fail(d->env, &err);
    }
    MR_POINT("drafter.apply.done");
    rc = mr_drafter_zero(d);
    MR_POINT("drafter.accumulator.zeroed");
    mr_add_relaxed(&d->env->me->busy_ns, mr_now_ns() - t0);    /* metrics */
    note_norm(d, norm);
    return rc;
}

/* The bit is set with the word read now: recovery of a peer may have moved the epoch while we applied. */
static void set_applied(struct mr_drafter *d, unsigned step)
{
    for (;;) {
        uint64_t w = mr_step_read(d->env->seg);
        int rc;

        if (mr_sw_phase(w) != MR_COMMITTED || mr_sw_step(w) != step || mr_drafter_applied(d, w))
            return;
        rc = mr_step_applied(d->env->seg, d->env->rank, w);
        if (rc == 1)
            mr_env_notify(d->env);                             /* mine was the last: the next step is open */
        if (rc >= 0)
            return;
    }
}

int mr_drafter_commit(struct mr_drafter *d, uint64_t word, uint32_t seq)
{
    unsigned step = mr_sw_step(word);
    int rc;

    if (mr_drafter_applied(d, word)) {
        mr_env_wait(d->env, seq, MR_WAIT_APPLY);
        return MR_GO_ON;
    }
    /* A copy may have become possible since this turn looked for one, of the very state that the apply would overwrite. */
    if (mr_ckpt_blocks_apply(d->env->seg, step) || (d->joined && mr_drafter_ckpt_due(d, word))) {
        mr_env_wait(d->env, seq, MR_WAIT_CKPT);
        return MR_GO_ON;
    }
    mr_turns_begin(d->env);
    rc = apply(d, step);
    if (rc == MR_GO_ON)
        rc = free_items(d);
    if (rc != MR_GO_ON)
        return rc;
    MR_POINT("drafter.items.freed");
    set_applied(d, step);
    d->holds = 0;
    MR_POINT("drafter.applied.set");
    return MR_GO_ON;
}
