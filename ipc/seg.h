/* The segments of a run: create, open, close, remove.
 *
 * A `struct mr_seg` is this process's view: pointers into its own mappings.  The supervisor creates; actors, `status` and the bench
 * open.  Nothing here blocks.  Death of the creator half-way leaves a name without a valid header (magic is written last), which open
 * refuses and mr_seg_clean removes.
 */
#ifndef MR_IPC_SEG_H
#define MR_IPC_SEG_H

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "ipc/shm_layout.h"

struct mr_seg {
    char run[MR_NAME_MAX];
    int writable;
    void *ctl, *tok, *plan;                /* mappings */
    size_t ctl_bytes, tok_bytes, plan_bytes;
    struct mr_shm_header *hdr;
    struct mr_actor_row *actors;           /* [hdr->n_actors] */
    struct mr_item *items;                 /* [hdr->n_items] */
    struct mr_step_block *step;
    struct mr_place *places;               /* [hdr->n_places] */
    struct mr_record *records;             /* [2][hdr->n_places], use mr_record() */
    struct mr_slot_sums *slot_sums;        /* [2][hdr->n_places][hdr->block_slots], use mr_slot_sums_at() */
    struct mr_slab *slabs;                 /* [hdr->n_slabs] */
    struct mr_arena_row *arenas;           /* [hdr->n_arenas] */
    struct mr_epoch *epochs;               /* [hdr->n_epochs + 1] */
};

/* What the supervisor decides before it creates the segments.  All counts are checked by data/topology.h against MR_MAX_*. */
struct mr_seg_params {
    const char *run;                       /* [A-Za-z0-9._-]{1,48} */
    uint32_t n_actors, n_items, n_slabs, n_arenas, n_epochs, n_buckets;
    uint32_t n_targets, n_drafters, n_places;
    uint32_t token_budget, max_seqs;
    uint32_t deterministic, steps_total, microbatches_total, first_step, checkpoint_every;
    uint64_t param_count, seed;
    uint64_t plan_samples_max;
    uint32_t plan_entries_max;
    uint32_t block_slots;                  /* block_size - 1; 0 = no figures by slot */
};

/* Bytes of the three segments together, for the /dev/shm arithmetic of `check`. */
uint64_t mr_seg_bytes(const struct mr_seg_params *p);

/* Creates .ctl, .tok and .plan (O_EXCL, 0600, posix_fallocate, so a full /dev/shm fails here and not as SIGBUS later) and maps them
 * read-write.  The step word is COLLECT(first_step, 0); everything else is zero / FREE.  The caller then fills actor rows, slabs,
 * arenas and epochs.  Errors: MR_EXIT_ENV with needed and available bytes; a name that exists: see mr_seg_owner_alive. */
int mr_seg_create(struct mr_seg *s, const struct mr_seg_params *p, struct mr_err *err);

/* Maps an existing run.  `writable` 0 maps read-only (bench, status, inspect: safe on a corrupt or truncated segment: every offset is
 * checked against the file size, magic, version and layout hash before use). */
int mr_seg_open(struct mr_seg *s, const char *run, int writable, struct mr_err *err);

/* Unmaps.  Accepts a half-built or zeroed object. */
void mr_seg_close(struct mr_seg *s);

/* Removes every name of the run from /dev/shm (.ctl last, .sock and arenas included).  Only the owner, or mr_seg_clean. */
void mr_seg_unlink(const char *run);

/* mr_seg_unlink, but only when the owner is proven dead, under a lock so that it never hits the successor of the same name.
 * Returns what mr_seg_owner_alive says (0 = removed). */
int mr_seg_clean(const char *run);

/* 1 = the supervisor recorded in the header lives (same boot id, pid exists, same start time), 0 = proven dead (or no valid header and
 * the file is older than 10 s), -1 = cannot tell (foreign uid, unreadable). */
int mr_seg_owner_alive(const char *run);

/* Calls `fn(run, alive, arg)` for each run that has a name in /dev/shm; alive as above. */
void mr_seg_each(void (*fn)(const char *run, int alive, void *arg), void *arg);

/* pid start time in clock ticks, from /proc/<pid>/stat; 0 when there is none. */
uint64_t mr_pid_start(int pid);
/* State letter there: R S D T t Z ..., '?' when it cannot be read. */
char mr_pid_state(int pid);

static inline struct mr_ring *mr_ring_at(const struct mr_seg *s, unsigned ring)
{
    return (struct mr_ring *)((char *)s->ctl + s->hdr->off_rings + (uint64_t)ring * s->hdr->ring_bytes);
}
static inline unsigned mr_ring_count(const struct mr_seg *s) { return MR_RING_READY + 2 * s->hdr->n_buckets; }
static inline struct mr_record *mr_record(const struct mr_seg *s, unsigned step, unsigned place)
{
    return &s->records[(size_t)(step & 1) * s->hdr->n_places + place];
}
/* Of the same place: [hdr->block_slots], slot k in entry k - 1. */
static inline struct mr_slot_sums *mr_slot_sums_at(const struct mr_seg *s, unsigned step, unsigned place)
{
    return &s->slot_sums[((size_t)(step & 1) * s->hdr->n_places + place) * s->hdr->block_slots];
}

/* ---- .tok: the payload of item i --------------------------------------------------------------------------------------------- */

struct mr_tok {
    int32_t *ids;             /* [token_budget] */
    int32_t *cu;              /* [max_seqs + 1], cu[0] = 0, cu[n_seqs] = n_tokens */
    uint32_t *sample;         /* [max_seqs] sample ids */
    uint8_t *mask;            /* [token_budget], 1 = supervised */
};
struct mr_tok mr_tok_at(const struct mr_seg *s, unsigned item);

/* ---- .plan ---------------------------------------------------------------------------------------------------------------- */

struct mr_plan_view {
    struct mr_plan_hdr *hdr;
    struct mr_plan_entry *entry;   /* [plan_entries_max] */
    uint32_t *sample;              /* [plan_samples_max] */
};
/* The parity slot of `epoch`; sealed for it only when hdr->epoch == epoch + 1 (acquire). */
struct mr_plan_view mr_plan_at(const struct mr_seg *s, unsigned epoch);

/* Epoch that holds plan position `pos` / step `step`; number of places m of `step` (0 at and after steps_total). */
unsigned mr_epoch_of_pos(const struct mr_seg *s, unsigned pos);
unsigned mr_epoch_of_step(const struct mr_seg *s, unsigned step);
unsigned mr_step_places(const struct mr_seg *s, unsigned step);
/* First plan position of `step`: first_pos[e] + (step - first_step[e]) * M. */
unsigned mr_step_first_pos(const struct mr_seg *s, unsigned step);
/* Microbatches committed when the step word is at `step` in COLLECT: the completion counter (a prefix sum, not a second truth). */
unsigned mr_committed_at(const struct mr_seg *s, unsigned step);

#endif
