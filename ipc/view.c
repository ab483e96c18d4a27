/* Accessors: where the payload of an item, the plan and the epochs lie.  Pure arithmetic on constants of the header.
 *
 * They are also used on read-only mappings of damaged runs, so every index is clipped to what the mapping really has.
 */
#include "ipc/ipc_pvt.h"

uint64_t mr_tok_stride(const struct mr_shm_header *h)
{
    return mr_align_up(4 * (uint64_t)h->token_budget) + mr_align_up(4 * ((uint64_t)h->max_seqs + 1)) +
           mr_align_up(4 * (uint64_t)h->max_seqs) + mr_align_up(h->token_budget);
}

/* .tok, one item: ids | cu | sample | mask, each part aligned to 128. */
struct mr_tok mr_tok_at(const struct mr_seg *s, unsigned item)
{
    const struct mr_shm_header *h = s->hdr;
    char *ids = (char *)s->tok + mr_tok_stride(h) * item;
    char *cu = ids + mr_align_up(4 * (uint64_t)h->token_budget);
    char *sample = cu + mr_align_up(4 * ((uint64_t)h->max_seqs + 1));
    char *mask = sample + mr_align_up(4 * (uint64_t)h->max_seqs);

    return (struct mr_tok){(int32_t *)ids, (int32_t *)cu, (uint32_t *)sample, (uint8_t *)mask};
}

static uint64_t entries_bytes(const struct mr_shm_header *h)
{
    return mr_align_up(sizeof(struct mr_plan_entry) * (uint64_t)h->plan_entries_max);
}

uint64_t mr_plan_stride(const struct mr_shm_header *h)
{
    return sizeof(struct mr_plan_hdr) + entries_bytes(h) + mr_align_up(4 * h->plan_samples_max);
}

struct mr_plan_view mr_plan_at(const struct mr_seg *s, unsigned epoch)
{
    char *p = (char *)s->plan + mr_plan_stride(s->hdr) * (epoch & 1), *entry = p + sizeof(struct mr_plan_hdr);

    return (struct mr_plan_view){(struct mr_plan_hdr *)p, (struct mr_plan_entry *)entry, (uint32_t *)(entry + entries_bytes(s->hdr))};
}

int mr_plan_of_step(const struct mr_seg *s, unsigned step, struct mr_plan_view *v)
{
    unsigned epoch = mr_epoch_of_step(s, step);

    *v = mr_plan_at(s, epoch);
    return epoch < s->hdr->n_epochs && mr_ld(&v->hdr->epoch) == (uint64_t)epoch + 1;
}

/* Last epoch e whose `first` (of position or step) is <= x; n_epochs when x is at or past the end. */
static unsigned epoch_of(const struct mr_seg *s, unsigned x, int by_step)
{
    unsigned lo = 0, hi = s->hdr->n_epochs;

#define FIRST(e) (by_step ? s->epochs[e].first_step : s->epochs[e].first_pos)
    if (x >= FIRST(hi))
        return hi;
    while (hi - lo > 1) {
        unsigned mid = lo + (hi - lo) / 2;

        if (FIRST(mid) <= x)
            lo = mid;
        else
            hi = mid;
    }
#undef FIRST
    return lo;
}

unsigned mr_epoch_of_pos(const struct mr_seg *s, unsigned pos)
{
    return epoch_of(s, pos, 0);
}

unsigned mr_epoch_of_step(const struct mr_seg *s, unsigned step)
{
    return epoch_of(s, step, 1);
}

unsigned mr_step_first_pos(const struct mr_seg *s, unsigned step)
{
    unsigned e = mr_epoch_of_step(s, step);

    if (e == s->hdr->n_epochs)
        return s->epochs[e].first_pos;
    return s->epochs[e].first_pos + (step - s->epochs[e].first_step) * s->hdr->n_places;
}

unsigned mr_step_places(const struct mr_seg *s, unsigned step)
{
    unsigned e = mr_epoch_of_step(s, step), first = mr_step_first_pos(s, step), left;

    if (e == s->hdr->n_epochs || step >= s->hdr->steps_total)   /* max_steps may end the run within an epoch */
        return 0;
    left = s->epochs[e + 1].first_pos - first;      /* a step never spans two epochs */
    return left < s->hdr->n_places ? left : s->hdr->n_places;
}

unsigned mr_committed_at(const struct mr_seg *s, unsigned step)
{
    return mr_step_first_pos(s, step);
}
