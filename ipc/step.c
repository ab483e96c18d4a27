/* The step word: one optimizer step, exactly once; and the checkpoint word (see step.h).
 *
 * All decisions about a step are compare-and-swaps on ONE word {phase, step, collective epoch, reduced bits, applied bits}:
 *   - "committed or not" is decided by the CAS that sets the last reduced bit, against the CAS of recovery to REPAIR: one of them fails;
 *   - "next step" is decided by the CAS that sets the last applied bit;
 *   - bits are per drafter, never counts, so doing it twice is harmless.
 * The order of accumulators, items and bits around these CASes is the drafter's (step.h); recovery is in recover.c.
 */
#include "ipc/step.h"

#include <errno.h>

#include "base/point.h"
#include "ipc/ipc_pvt.h"

uint64_t mr_step_read(const struct mr_seg *s)
{
    return mr_ld(&s->step->word);          /* acquire end of E3 (COMMITTED: all sums are complete) and E4 (COLLECT: all accumulators zero) */
}

static int move(const struct mr_seg *s, uint64_t word, uint64_t next)
{
    if (!mr_cas(&s->step->word, word, next))
        return -ESTALE;
    MR_POINT("ipc.step.moved");
    mr_bump_kind(s, MR_DRAFTER);
    return 0;
}

static unsigned all_bits(const struct mr_seg *s)
{
    return (1u << s->hdr->n_drafters) - 1;
}

void mr_step_join(const struct mr_seg *s, unsigned slot)
{
    MR_POINT("ipc.step.join");
    mr_st(&s->actors[slot].joined, 1);     /* E5, release end: the accumulator is zero, host-confirmed */
    MR_POINT("ipc.step.joined");
    mr_bump_kind(s, MR_DRAFTER);
}

static int all_done(const struct mr_seg *s, unsigned step, unsigned m)
{
    for (unsigned k = 0; k < m; k++)
        if (mr_place_state(s, step, k) != MR_PLACE_DONE)
            return 0;
    return 1;
}

static int all_joined(const struct mr_seg *s)
{
    unsigned n = 0;

    for (unsigned i = 0; i < s->hdr->n_actors; i++)
        n += s->actors[i].kind == MR_DRAFTER && mr_ld(&s->actors[i].joined);   /* E5, acquire end */
    return n == s->hdr->n_drafters;
}

/* What keeps COLLECT(step) from REDUCE; MR_WAIT_NONE = nothing. */
static enum mr_wait_reason missing(const struct mr_seg *s, unsigned step)
{
    unsigned m = mr_step_places(s, step);

    if (!m)
        return MR_WAIT_END;
    if (!all_done(s, step, m))
        return MR_WAIT_PLACE;
    if (!all_joined(s))
        return MR_WAIT_PEER;
    /* Record slots are reused every second step: line step - 1 must be out of them before step + 1 can begin. */
    return mr_ld(&s->hdr->ledger_done) < step ? MR_WAIT_LEDGER : MR_WAIT_NONE;
}

int mr_step_try_reduce(const struct mr_seg *s, uint64_t word, enum mr_wait_reason *why)
{
    unsigned step = mr_sw_step(word), phase = mr_sw_phase(word);

    *why = phase == MR_COLLECT ? missing(s, step) : phase == MR_REPAIR ? MR_WAIT_REPAIR : MR_WAIT_END;
    if (phase == MR_REDUCE || phase == MR_COMMITTED)
        return -ESTALE;
    if (*why != MR_WAIT_NONE)
        return -EAGAIN;
    MR_POINT("ipc.step.reduce");
    /* From the word read BEFORE the scan: recovery moves the epoch before it reopens a place or clears a joined flag, so a scan that saw
     * an old one fails here. */
    return move(s, word, mr_w_step(MR_REDUCE, step, mr_sw_cepoch(word), 0, 0));
}

int mr_step_reduced(const struct mr_seg *s, unsigned rank, uint64_t word)
{
    for (;;) {
        uint64_t w = mr_step_read(s);
        unsigned bits = mr_sw_reduced(w) | 1u << rank, step = mr_sw_step(w), e = mr_sw_cepoch(w);
        int last = bits == all_bits(s);

        if (mr_sw_phase(w) != MR_REDUCE || step != mr_sw_step(word) || e != mr_sw_cepoch(word))
            return -ESTALE;
        if (bits == mr_sw_reduced(w))
            return 0;
        MR_POINT("ipc.step.reduced");
        /* E3, release end: the sum is complete and host-confirmed.  The last bit IS the commit. */
        if (!move(s, w, mr_w_step(last ? MR_COMMITTED : MR_REDUCE, step, e, last ? 0 : bits, 0)))
            return last;
    }
}

int mr_step_applied(const struct mr_seg *s, unsigned rank, uint64_t word)
{
    for (;;) {
        uint64_t w = mr_step_read(s), next;
        unsigned bits = mr_sw_applied(w) | 1u << rank, step = mr_sw_step(w), e = mr_sw_cepoch(w);
        int last = bits == all_bits(s);

        /* The epoch may have moved (a peer died): the step is committed all the same. */
        if (mr_sw_phase(w) != MR_COMMITTED || step != mr_sw_step(word))
            return -ESTALE;
        if (bits == mr_sw_applied(w))
            return 0;
        next = last ? mr_w_step(mr_ld(&s->hdr->stop) ? MR_HALT : MR_COLLECT, step + 1, e, 0, 0) : mr_w_step(MR_COMMITTED, step, e, 0, bits);
        MR_POINT("ipc.step.applied");
        if (!move(s, w, next))             /* E4, release end: applied, zeroed, own items free */
            return last;
    }
}

int mr_step_finish(const struct mr_seg *s, uint64_t word)
{
    unsigned phase = mr_sw_phase(word), step = mr_sw_step(word);

    if (phase != MR_HALT && !(phase == MR_COLLECT && mr_step_places(s, step) == 0))
        return -ESTALE;
    MR_POINT("ipc.step.finish");
    if (!mr_cas(&s->step->word, word, mr_w_step(MR_FINISHED, step, mr_sw_cepoch(word), 0, 0)))
        return -ESTALE;
    mr_evc_bump_all(s);
    return 0;
}

/* ---- recovery of a drafter (docs/design.md section 6.2, steps 1 and 3) ------------------------------------------------------ */

static uint64_t repaired(uint64_t w)
{
    unsigned step = mr_sw_step(w), e = mr_sw_cepoch(w) + 1;

    switch (mr_sw_phase(w)) {
    case MR_COLLECT:
    case MR_REDUCE:
    case MR_REPAIR:
        return mr_w_step(MR_REPAIR, step, e, 0, 0);
    case MR_COMMITTED:
        return mr_w_step(MR_COMMITTED, step, e, 0, mr_sw_applied(w));
    case MR_HALT:
        return mr_w_step(MR_HALT, step, e, 0, 0);
    default:
        return w;
    }
}

uint64_t mr_step_repair_begin(const struct mr_seg *s)
{
    for (;;) {
        uint64_t w = mr_step_read(s);

        if (mr_sw_phase(w) == MR_FINISHED)
            return w;
        if (mr_sw_cepoch(w) >= MR_CEPOCH_MAX) {
            mr_fatal(s);
            return w;
        }
        MR_POINT("ipc.step.repair");
        if (!move(s, w, repaired(w)))
            return repaired(w);
    }
}

void mr_step_repair_end(const struct mr_seg *s)
{
    uint64_t w = mr_step_read(s);

    MR_POINT("ipc.step.repair_end");
    if (mr_sw_phase(w) == MR_REPAIR)       /* nobody else leaves REPAIR, so this cannot fail */
        move(s, w, mr_w_step(MR_COLLECT, mr_sw_step(w), mr_sw_cepoch(w), 0, 0));
}

const char *mr_step_phase_name(enum mr_step_phase p)
{
    static const char *const name[] = {"collect", "reduce", "committed", "repair", "halt", "finished"};

    return (unsigned)p < sizeof name / sizeof name[0] ? name[p] : "?";
}

/* ---- checkpoint word -------------------------------------------------------------------------------------------------------- */

int mr_ckpt_claim(const struct mr_seg *s, unsigned step, unsigned slot, unsigned inc)
{
    uint64_t w = mr_ld(&s->hdr->ckpt);
    unsigned state = mr_pw_state(w), last = mr_pw_step(w);

    /* IDLE(N): N is on disk, so only a later one is wanted.  WANTED(N): its copier died, N itself or a later one will do. */
    if (!(state == MR_CKPT_IDLE && last < step) && !(state == MR_CKPT_WANTED && last <= step))
        return -EAGAIN;
    MR_POINT("ipc.ckpt.claim");
    if (!mr_cas(&s->hdr->ckpt, w, mr_w_place(MR_CKPT_COPYING, step, slot, inc)))
        return -EAGAIN;
    MR_POINT("ipc.ckpt.claimed");
    return 0;
}

static int ckpt_turn(const struct mr_seg *s, uint64_t word, uint64_t next)
{
    if (!mr_cas(&s->hdr->ckpt, word, next))
        return -ESTALE;
    mr_bump_kind(s, MR_DRAFTER);
    return 0;
}

int mr_ckpt_read(const struct mr_seg *s, unsigned step, unsigned slot, unsigned inc)
{
    MR_POINT("ipc.ckpt.read");
    return ckpt_turn(s, mr_w_place(MR_CKPT_COPYING, step, slot, inc), mr_w_place(MR_CKPT_WRITING, step, slot, inc));
}

int mr_ckpt_done(const struct mr_seg *s, unsigned step, unsigned slot, unsigned inc)
{
    MR_POINT("ipc.ckpt.done");
    return ckpt_turn(s, mr_w_place(MR_CKPT_WRITING, step, slot, inc), mr_w_place(MR_CKPT_IDLE, step, 0, 0));
}

void mr_ckpt_recover(const struct mr_seg *s, unsigned slot, unsigned inc)
{
    uint64_t w = mr_ld(&s->hdr->ckpt);

    if (mr_ckpt_has_copier(w) && mr_pw_slot(w) == slot && mr_pw_inc(w) == inc)
        ckpt_turn(s, w, mr_w_place(MR_CKPT_WANTED, mr_pw_step(w), 0, 0));
}

int mr_ckpt_periodic(const struct mr_seg *s, unsigned step)
{
    return s->hdr->checkpoint_every && step % s->hdr->checkpoint_every == 0;
}

int mr_ckpt_blocks_apply(const struct mr_seg *s, unsigned step)
{
    uint64_t w = mr_ld(&s->hdr->ckpt);
    unsigned last = mr_pw_step(w), old = step - 1;

    /* Apply of `step` makes state step + 1 where state step - 1 was. */
    if (step == 0)
        return 0;
    if (mr_pw_state(w) == MR_CKPT_WRITING)               /* nobody could claim the copy of `old` yet */
        return old > last && mr_ckpt_periodic(s, old);
    return mr_pw_state(w) == MR_CKPT_COPYING && last == old;
}
