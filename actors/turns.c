/* Whose turn it is on a shared GPU (turns.h). */
#include "actors/turns.h"

#include <string.h>

#include "base/clock.h"
#include "ipc/atomic.h"

#define TURN_UNIT_NS 10000000u       /* a hand-over takes some 0.1 ms */
#define TURN_LIMIT_NS 2000000000u

/* Whom a row's actor may have to wait for: the other kind on the same GPU. */
static int shares(const struct mr_actor_row *me, const struct mr_actor_row *r)
{
    return (r->kind == MR_TARGET || r->kind == MR_DRAFTER) && r->kind != me->kind && strcmp(r->device, me->device) == 0;
}

void mr_turns_init(struct mr_env *e)
{
    mr_st_relaxed(&e->me->computing, 0u);
    e->turn = (struct mr_turns){0};
    if (strcmp(e->me->device, "cpu") == 0 || (e->me->kind != MR_TARGET && e->me->kind != MR_DRAFTER))
        return;
    for (unsigned i = 0; i < e->hdr->n_actors; i++)
        e->turn.shared |= shares(e->me, &e->seg->actors[i]);
}

static int somebody_computes(const struct mr_env *e)
{
    for (unsigned i = 0; i < e->hdr->n_actors; i++)
        if (shares(e->me, &e->seg->actors[i]) && mr_ld_relaxed(&e->seg->actors[i].computing))
            return 1;
    return 0;
}

static int somebody_waits(const struct mr_env *e, enum mr_wait_reason why)
{
    for (unsigned i = 0; i < e->hdr->n_actors; i++)
        if (shares(e->me, &e->seg->actors[i]) && mr_ld_relaxed(&e->seg->actors[i].wait_reason) == (uint32_t)why)
            return 1;
    return 0;
}

int mr_turns_matter(const struct mr_env *e)
{
    return e->turn.shared && e->turn.unit_ns >= TURN_UNIT_NS;
}

int mr_turns_taken(struct mr_env *e)
{
    uint64_t now;

    if (!mr_turns_matter(e) || !somebody_computes(e)) {
        e->turn.since_ns = 0;
        return 0;
    }
    now = mr_now_ns();
    if (!e->turn.since_ns)
        e->turn.since_ns = now;
    return now - e->turn.since_ns < TURN_LIMIT_NS;
}

int mr_turns_given(struct mr_env *e)
{
    int published = e->turn.published;

    e->turn.published = 0;
    return published && mr_turns_matter(e) && (somebody_waits(e, MR_WAIT_READY) || somebody_waits(e, MR_WAIT_TURN));
}

/* Those who wait for a turn look again. */
static void tell(struct mr_env *e)
{
    if (somebody_waits(e, MR_WAIT_TURN))
        mr_evc_bump(&e->hdr->evc[e->me->kind == MR_TARGET ? MR_DRAFTER : MR_TARGET]);
}

void mr_turns_begin(struct mr_env *e)
{
    if (!e->turn.shared || mr_ld_relaxed(&e->me->computing))
        return;
    e->turn.since_ns = 0;
    mr_st_relaxed(&e->me->computing, 1u);
    tell(e);                         /* a target that expects this drafter need not any more */
}

void mr_turns_unit(struct mr_env *e, uint64_t unit_ns)
{
    e->turn.unit_ns = unit_ns;
    e->turn.published = 1;
}

void mr_turns_end(struct mr_env *e)
{
    if (!e->turn.shared || !mr_ld_relaxed(&e->me->computing))
        return;
    mr_st_relaxed(&e->me->computing, 0u);
    tell(e);
}
