/* A small run for the ipc tests: segments with one feeder, some targets and drafters, a plan, registered arenas without memory.
 *
 * Slots: 0 feeder, 1..T targets, T+1..T+D drafters.  Positions go round the buckets; every epoch has the same number of microbatches.
 */
#ifndef TEST_IPC_H
#define TEST_IPC_H

#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>

#include <cmocka.h>

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/point.h"
#include "ipc/arena.h"
#include "ipc/atomic.h"
#include "ipc/dump.h"
#include "ipc/item.h"
#include "ipc/recover.h"
#include "ipc/ring.h"
#include "ipc/seg.h"
#include "ipc/slab.h"
#include "ipc/step.h"
#include "ipc/wait.h"

/* The long parts are left out under MR_TEST_QUICK=1 (valgrind runs). */
#define STRESS() do { if (getenv("MR_TEST_QUICK")) skip(); } while (0)

#define TEST(name) static void name(void **state __attribute__((unused)))

struct rig {
    struct mr_seg s;
    unsigned T, D, M, per_epoch;
    char run[32];
};

static inline unsigned rig_target(const struct rig *r, unsigned i) { return i + 1 + 0 * r->T; }
static inline unsigned rig_drafter(const struct rig *r, unsigned i) { return 1 + r->T + i; }

static inline struct mr_seg_params rig_params(const char *run, unsigned targets, unsigned drafters, unsigned places, unsigned slabs,
                                              unsigned epochs, unsigned per_epoch)
{
    unsigned steps = epochs * ((per_epoch + places - 1) / places);

    return (struct mr_seg_params){.run = run, .n_actors = 1 + targets + drafters, .n_items = slabs + targets + 2, .n_slabs = slabs,
                                  .n_arenas = 1 + drafters, .n_epochs = epochs, .n_buckets = 2, .n_targets = targets, .n_drafters = drafters,
                                  .n_places = places,
                                  .token_budget = 64, .max_seqs = 8, .steps_total = steps, .microbatches_total = epochs * per_epoch,
                                  .param_count = epochs * per_epoch, .plan_samples_max = per_epoch, .plan_entries_max = per_epoch,
                                  .block_slots = 7};
}

static inline void rig_seal(struct rig *r, unsigned epoch)
{
    struct mr_plan_view v = mr_plan_at(&r->s, epoch);

    for (unsigned i = 0; i < r->per_epoch; i++) {
        v.entry[i] = (struct mr_plan_entry){.bucket = i % 2, .n_seqs = 1, .n_tokens = 10, .first_sample = i};
        v.sample[i] = epoch * r->per_epoch + i;
    }
    v.hdr->n_entries = r->per_epoch;
    v.hdr->n_samples = r->per_epoch;
    mr_st(&v.hdr->epoch, (uint64_t)epoch + 1);
    mr_st(&r->s.hdr->plan_epochs, (uint64_t)epoch + 1);
}

static inline void rig_row(struct rig *r, unsigned slot, enum mr_kind kind, unsigned index)
{
    struct mr_actor_row *a = &r->s.actors[slot];

    snprintf(a->name, sizeof a->name, "%.8s/%u", mr_kind_name(kind), index % 1000);
    snprintf(a->device, sizeof a->device, "cpu");
    a->kind = kind;
    a->index = index;
    a->incarnation = 1;
    a->joined = kind == MR_DRAFTER;
}

static inline void rig_make(struct rig *r, unsigned targets, unsigned drafters, unsigned places, unsigned slabs, unsigned epochs,
                            unsigned per_epoch)
{
    static unsigned count;
    struct mr_err err = {0};
    struct mr_seg_params p;

    memset(r, 0, sizeof *r);
    snprintf(r->run, sizeof r->run, "test-%d-%u", (int)getpid(), count++);
    p = rig_params(r->run, targets, drafters, places, slabs, epochs, per_epoch);
    if (mr_seg_create(&r->s, &p, &err))
        fail_msg("%s", err.msg);
    r->T = targets, r->D = drafters, r->M = places, r->per_epoch = per_epoch;
    rig_row(r, 0, MR_FEEDER, 0);
    for (unsigned i = 0; i < targets; i++)
        rig_row(r, rig_target(r, i), MR_TARGET, i);
    for (unsigned i = 0; i < drafters; i++)
        rig_row(r, rig_drafter(r, i), MR_DRAFTER, i);
    for (unsigned i = 0; i < drafters; i++)
        r->s.arenas[1 + i] = (struct mr_arena_row){.use = MR_ARENA_DRAFTER, .owner = i};
    for (unsigned i = 0; i < slabs; i++)
        r->s.slabs[i] = (struct mr_slab){.offset = 4096ull * i, .bytes = 4096};
    for (unsigned e = 0; e <= epochs; e++)
        r->s.epochs[e] = (struct mr_epoch){e * per_epoch, e * ((per_epoch + places - 1) / places)};
    mr_arena_register(&r->s, 0);
    rig_seal(r, 0);
}

static inline void rig_drop(struct rig *r)
{
    mr_seg_close(&r->s);
    mr_seg_unlink(r->run);
}

/* Feeder's part for one position: -EAGAIN or the item. */
static inline int rig_feed(struct rig *r, unsigned pos)
{
    uint64_t w;
    int idx = mr_item_fill(&r->s, 0, 1, pos, &w);

    if (idx < 0)
        return idx;
    r->s.items[idx].bucket = pos % r->per_epoch % 2;
    r->s.items[idx].epoch = pos / r->per_epoch;
    r->s.items[idx].n_seqs = 1;
    r->s.items[idx].n_tokens = 10;
    mr_tok_at(&r->s, (unsigned)idx).ids[0] = (int32_t)pos;
    mr_st(&r->s.hdr->cursor, (uint64_t)pos + 1);
    return mr_item_queue(&r->s, (unsigned)idx, &w) ? -ESTALE : idx;
}

/* Target's part: slab, item, READY.  -EAGAIN or the item. */
static inline int rig_extract(struct rig *r, unsigned slot)
{
    int slab = mr_slab_take(&r->s, 0, slot, 1), idx;
    uint64_t w;

    if (slab < 0)
        return slab;
    idx = mr_item_extract(&r->s, slot, 1, &w);
    if (idx < 0) {
        mr_slab_give(&r->s, (unsigned)slab, slot, 1);
        return idx;
    }
    if (mr_slab_assign(&r->s, (unsigned)slab, slot, 1, (unsigned)idx, mr_w_pos(w)))
        return -ESTALE;
    return mr_item_ready(&r->s, (unsigned)idx, &w) ? -ESTALE : idx;
}

/* Drafter's part up to place DONE.  The item, or what mr_place_claim says. */
static inline int rig_draft(struct rig *r, unsigned slot, unsigned *rr)
{
    unsigned step = mr_sw_step(mr_step_read(&r->s)), place;
    uint64_t w;
    int idx = mr_place_claim(&r->s, step, slot, 1, rr, &place, &w);

    if (idx < 0)
        return idx;
    if (mr_item_accumulated(&r->s, (unsigned)idx, &w))
        return -ESTALE;
    mr_record(&r->s, step, place)->pos = mr_w_pos(w);
    return mr_place_done(&r->s, step, place, slot, 1) ? -ESTALE : idx;
}

/* Drafter's part in COMMITTED: own items free. */
static inline void rig_free_own(struct rig *r, unsigned slot, unsigned inc)
{
    for (unsigned i = 0; i < r->s.hdr->n_items; i++) {
        uint64_t w = mr_ld(&r->s.items[i].word);

        if (mr_w_phase(w) == MR_ACCUMULATED && mr_w_slot(w) == slot && mr_w_inc(w) == inc)
            mr_item_free(&r->s, i, &w);
    }
}

static inline unsigned rig_count(const struct rig *r, enum mr_phase phase)
{
    unsigned n = 0;

    for (unsigned i = 0; i < r->s.hdr->n_items; i++)
        n += mr_w_phase(mr_ld(&r->s.items[i].word)) == phase;
    return n;
}

static inline unsigned rig_free_slabs(const struct rig *r)
{
    unsigned n = 0;

    for (unsigned i = 0; i < r->s.hdr->n_slabs; i++)
        n += mr_ld(&r->s.slabs[i].word) == 0;
    return n;
}

#endif
