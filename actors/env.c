/* The common runtime of the actors: start and end of an incarnation, waiting, waking the supervisor, metrics.
 *
 * Counters in the row are totals over all incarnations of the slot and are read by others while we write: relaxed atomics.  They are
 * metrics, never a truth of the protocol.
 */
#include "actors/env.h"

#include <errno.h>
#include <unistd.h>

#include "actors/actors.h"
#include "actors/backend.h"
#include "actors/turns.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/point.h"
#include "ipc/atomic.h"
#include "ipc/step.h"

static uint64_t entered_ns;

__attribute__((constructor)) static void enter(void)         /* the libraries are loaded */
{
    entered_ns = mr_now_ns();
}

void mr_env_init(struct mr_env *e, struct mr_seg *seg, const struct mr_topology *topo, const struct mr_checked *checked, unsigned slot,
                 unsigned inc, int event_fd)
{
    struct mr_actor_row *me = &seg->actors[slot];

    *e = (struct mr_env){
        .seg = seg, .hdr = seg->hdr, .me = me, .evc = &seg->hdr->evc[me->kind], .topo = topo, .checked = checked, .slot = slot,
        .inc = inc, .rank = me->index, .event_fd = event_fd,
        .main_ns = entered_ns, .init_ns = mr_now_ns(),
        .map = {.open_cuda = mr_backend_arena_open, .close_cuda = mr_backend_arena_close},
    };
    mr_st_relaxed(&me->first_claim_ns, 0);   /* metrics */
    mr_turns_init(e);
}

void mr_env_close(struct mr_env *e)
{
    mr_arena_close_all(&e->map);
}

void mr_env_notify(struct mr_env *e)
{
    uint64_t one = 1;

    if (e->event_fd < 0)
        return;
    while (write(e->event_fd, &one, sizeof(one)) < 0 && errno == EINTR)
        ;                                    /* EAGAIN: the counter is full, so the supervisor has a wake-up pending anyway */
}

void mr_env_running(struct mr_env *e)
{
    MR_POINT("actor.running");
    mr_st(&e->me->state, MR_ACTOR_RUNNING);
    mr_env_notify(e);
}

static void pass_flags_on(struct mr_env *e)
{
    if (mr_ld(&e->hdr->sweep) || mr_ld(&e->hdr->fatal))
        mr_env_notify(e);
}

int mr_env_check(struct mr_env *e, int may_leave)
{
    if (mr_ld(&e->hdr->abort))
        return MR_EXIT_FAILED;
    if (mr_sw_phase(mr_step_read(e->seg)) == MR_FINISHED)
        return MR_EXIT_OK;
    if (may_leave && mr_ld(&e->me->drain))
        return MR_EXIT_OK;
    return MR_GO_ON;
}

int mr_env_leave(struct mr_env *e, int rc)
{
    if (rc != MR_EXIT_OK || mr_sw_phase(mr_step_read(e->seg)) != MR_FINISHED)
        return rc;
    MR_POINT("actor.sentinel.seen");
    mr_st(&e->me->acked, 1);
    MR_POINT("actor.sentinel.acked");
    mr_env_notify(e);
    return rc;
}

void mr_env_wait(struct mr_env *e, uint32_t seq, enum mr_wait_reason why)
{
    pass_flags_on(e);
    mr_turns_end(e);
    mr_arena_close_stale(&e->map, e->seg);                      /* nothing is in flight when an actor parks */
    mr_evc_wait(e->seg, e->evc, seq, MR_PARK_MS, e->me, why);   /* abort and timeout: the caller's loop looks again */
}

void mr_env_claimed(struct mr_env *e)
{
    if (!mr_ld_relaxed(&e->me->first_claim_ns))   /* only we write it */
        mr_st_relaxed(&e->me->first_claim_ns, mr_now_ns());
}

void mr_env_worked(struct mr_env *e, uint64_t t0_ns, uint64_t items, uint64_t tokens, uint64_t draft_tokens)
{
    uint64_t now = mr_now_ns();

    mr_add_relaxed(&e->me->items, items);    /* relaxed: metrics */
    mr_add_relaxed(&e->me->tokens, tokens);
    mr_add_relaxed(&e->me->draft_tokens, draft_tokens);
    mr_add_relaxed(&e->me->busy_ns, now - t0_ns);
    mr_st_relaxed(&e->me->progress_ns, now);
    mr_add(&e->me->progress, 1);
    pass_flags_on(e);
}

struct mr_batch mr_env_batch(const struct mr_env *e, unsigned idx, uint64_t word)
{
    const struct mr_item *it = &e->seg->items[idx];
    struct mr_tok tok = mr_tok_at(e->seg, idx);

    return (struct mr_batch){
        .pos = mr_w_pos(word), .epoch = it->epoch, .bucket = it->bucket, .n_seqs = (int)it->n_seqs, .n_tokens = (int)it->n_tokens,
        .ids = tok.ids, .cu = tok.cu, .mask = tok.mask, .sample = tok.sample,
    };
}

int mr_env_fail(struct mr_env *e, const struct mr_err *err)
{
    (void)e;
    mr_error("%s", err->msg);
    return err->code ? err->code : MR_EXIT_FAILED;
}

int mr_env_lost(struct mr_env *e, const char *what, unsigned pos, int rc)
{
    if (rc == -EOVERFLOW)
        mr_error("microbatch %u: its publication count is at the maximum of %u: it was handed out that often; the run ends", pos,
                 MR_PUB_MAX);
    else
        mr_error("microbatch %u: %s was refused (%d): somebody else changed what this incarnation (%u) holds", pos, what, rc, e->inc);
    mr_env_notify(e);
    return MR_EXIT_FAILED;
}

int mr_actor_run(struct mr_env *e)
{
    switch (e->me->kind) {
    case MR_FEEDER:
        return mr_actor_feeder(e);
    case MR_TARGET:
        return mr_actor_target(e);
    case MR_DRAFTER:
        return mr_actor_drafter(e);
    case MR_KEEPER:
        return mr_actor_keeper(e);
    default:
        mr_error("slot %u is a %s: this build has no such actor", e->slot, mr_kind_name(e->me->kind));
        return MR_EXIT_CONFIG;
    }
}
