/* The bytes of the shared-memory segments: the only file that may say where a field lies.  docs/shm_format.md is its prose.
 *
 * /dev/shm/millrace-<run>.ctl, sections in this order, each aligned to 128 bytes, offsets in the header:
 *   header | actor rows | items | rings | step block (step word, places, records, slot sums) | slabs | arenas | epochs
 * /dev/shm/millrace-<run>.tok    per item: ids, masks, cu_seqlens, sample ids            (struct mr_tok_shape, ipc/seg.h)
 * /dev/shm/millrace-<run>.plan   per epoch parity: microbatch entries, then sample ids   (struct mr_plan_entry)
 * /dev/shm/millrace-<run>.a<N>   arena N of the cpu backend
 *
 * Rules: fixed-width types only, no pointers, no bool, no size_t.  "word" = 64-bit, changed only by compare-and-swap on the full value
 * (or by the single writer named beside it).  All atomics are GCC __atomic builtins through ipc/atomic.h, never plain accesses.
 * Every field says who writes it.  Counters never wrap: the one that reaches its maximum ends the run.
 */
#ifndef MR_IPC_SHM_LAYOUT_H
#define MR_IPC_SHM_LAYOUT_H

#include <stddef.h>
#include <stdint.h>

#include "base/hash.h"
#include "base/limits.h"
#include "base/plan_types.h"
#include "base/slot_sums.h"

#define MR_SHM_MAGIC 0x454341524c4c494dull /* "MILLRACE" read as little-endian */
#define MR_SHM_MAGIC_NEW 0x0057454e4c4c494dull /* "MILLNEW": the owner is named, the rest is not written yet */
#define MR_SHM_VERSION 2u
#define MR_SHM_ALIGN 128u

/* ---- words -------------------------------------------------------------------------------------------------------------- */

/* Item word: phase 4 | owner slot 8 | owner incarnation 12 | plan position 28 | publication 12 (high to low). */
enum mr_phase { MR_FREE, MR_FILLING, MR_QUEUED, MR_EXTRACTING, MR_READY, MR_DRAFTING, MR_ACCUMULATED, MR_PHASES };
static inline uint64_t mr_w_item(unsigned phase, unsigned slot, unsigned inc, unsigned pos, unsigned pub)
{
    return (uint64_t)phase << 60 | (uint64_t)slot << 52 | (uint64_t)inc << 40 | (uint64_t)pos << 12 | pub;
}
static inline unsigned mr_w_phase(uint64_t w) { return (unsigned)(w >> 60); }
static inline unsigned mr_w_slot(uint64_t w) { return (unsigned)(w >> 52) & 0xffu; }
static inline unsigned mr_w_inc(uint64_t w) { return (unsigned)(w >> 40) & 0xfffu; }
static inline unsigned mr_w_pos(uint64_t w) { return (unsigned)(w >> 12) & MR_POS_MAX; }
static inline unsigned mr_w_pub(uint64_t w) { return (unsigned)w & MR_PUB_MAX; }
/* Ticket: publication 12 | low 12 bits of the plan position.  Names one publication of one item. */
static inline unsigned mr_w_ticket(uint64_t w) { return mr_w_pub(w) << 12 | (mr_w_pos(w) & 0xfffu); }

/* Ring cell: lap 24 | ticket 24 | item index 16. */
static inline uint64_t mr_c_make(unsigned lap, unsigned ticket, unsigned idx)
{
    return (uint64_t)(lap & 0xffffffu) << 40 | (uint64_t)(ticket & 0xffffffu) << 16 | (idx & 0xffffu);
}
static inline unsigned mr_c_lap(uint64_t c) { return (unsigned)(c >> 40); }
static inline unsigned mr_c_ticket(uint64_t c) { return (unsigned)(c >> 16) & 0xffffffu; }
static inline unsigned mr_c_idx(uint64_t c) { return (unsigned)c & 0xffffu; }

/* Slab word: kind 4 | TARGET: slot 8, incarnation 12 in the low 20 bits | ITEM: index 16, plan position 28 in the low 44 bits. */
enum mr_slab_kind { MR_SLAB_FREE, MR_SLAB_TARGET, MR_SLAB_ITEM };
static inline uint64_t mr_w_slab_target(unsigned slot, unsigned inc) { return (uint64_t)MR_SLAB_TARGET << 60 | (uint64_t)slot << 12 | inc; }
static inline uint64_t mr_w_slab_item(unsigned idx, unsigned pos) { return (uint64_t)MR_SLAB_ITEM << 60 | (uint64_t)idx << 28 | pos; }
static inline unsigned mr_w_slab_kind(uint64_t w) { return (unsigned)(w >> 60); }
static inline unsigned mr_w_slab_idx(uint64_t w) { return (unsigned)(w >> 28) & 0xffffu; }
static inline unsigned mr_w_slab_pos(uint64_t w) { return (unsigned)w & MR_POS_MAX; }
static inline unsigned mr_w_slab_slot(uint64_t w) { return (unsigned)(w >> 12) & 0xffu; }
static inline unsigned mr_w_slab_inc(uint64_t w) { return (unsigned)w & 0xfffu; }

/* Seal word of a weights arena: kind 4 | LOADING: slot 8, incarnation 12 in the low 20 bits | SEALED: generation 44.  An empty arena is
 * loaded by exactly one actor; its death, or the keeper's, makes the arena empty again. */
enum mr_seal_kind { MR_SEAL_EMPTY, MR_SEAL_LOADING, MR_SEAL_SEALED };
static inline uint64_t mr_w_seal_loading(unsigned slot, unsigned inc)
{
    return (uint64_t)MR_SEAL_LOADING << 60 | (uint64_t)slot << 12 | inc;
}
static inline uint64_t mr_w_sealed(uint64_t generation) { return (uint64_t)MR_SEAL_SEALED << 60 | (generation & ((1ull << 44) - 1)); }
static inline unsigned mr_w_seal_kind(uint64_t w) { return (unsigned)(w >> 60); }

/* Step word: phase 3 | step 24 | collective epoch 13 | reduced bits 12 | applied bits 12. */
enum mr_step_phase {
    MR_COLLECT,      /* places are being filled */
    MR_REDUCE,       /* everyone sums; the last reduced bit is the commit */
    MR_COMMITTED,    /* everyone applies; the last applied bit opens the next step */
    MR_REPAIR,       /* a drafter died: nobody reduces until its items and places are back */
    MR_HALT,         /* stop requested: like COLLECT of the step after the last (no places); entered instead of COLLECT(s+1) */
    MR_FINISHED      /* the sentinel */
};
#define MR_CEPOCH_MAX ((1u << 13) - 1)
static inline uint64_t mr_w_step(unsigned phase, unsigned step, unsigned cepoch, unsigned reduced, unsigned applied)
{
    return (uint64_t)phase << 61 | (uint64_t)step << 37 | (uint64_t)cepoch << 24 | (uint64_t)reduced << 12 | applied;
}
static inline unsigned mr_sw_phase(uint64_t w) { return (unsigned)(w >> 61); }
static inline unsigned mr_sw_step(uint64_t w) { return (unsigned)(w >> 37) & MR_STEP_MAX; }
static inline unsigned mr_sw_cepoch(uint64_t w) { return (unsigned)(w >> 24) & MR_CEPOCH_MAX; }
static inline unsigned mr_sw_reduced(uint64_t w) { return (unsigned)(w >> 12) & 0xfffu; }
static inline unsigned mr_sw_applied(uint64_t w) { return (unsigned)w & 0xfffu; }

/* Place word: state 4 | step 24 | slot 8 | incarnation 12.  A word of another step reads as OPEN, so nobody ever resets places. */
enum mr_place_state { MR_PLACE_OPEN, MR_PLACE_TAKEN, MR_PLACE_DONE };
static inline uint64_t mr_w_place(unsigned state, unsigned step, unsigned slot, unsigned inc)
{
    return (uint64_t)state << 60 | (uint64_t)step << 20 | (uint64_t)slot << 12 | inc;
}
static inline unsigned mr_pw_state(uint64_t w) { return (unsigned)(w >> 60); }
static inline unsigned mr_pw_step(uint64_t w) { return (unsigned)(w >> 20) & MR_STEP_MAX; }
static inline unsigned mr_pw_slot(uint64_t w) { return (unsigned)(w >> 12) & 0xffu; }
static inline unsigned mr_pw_inc(uint64_t w) { return (unsigned)w & 0xfffu; }

/* Checkpoint word: state 4 | step 24 | slot 8 | incarnation 12 (same packing as a place word). */
enum mr_ckpt_state {
    MR_CKPT_IDLE,       /* {IDLE, N}: checkpoint N is complete on disk (N = 0: none yet) */
    MR_CKPT_WANTED,     /* {WANTED, N}: its copier died; any drafter whose state[N mod 2] is still N copies again */
    MR_CKPT_COPYING,    /* {COPYING, N, slot, incarnation}: apply of step N+1 waits for this copier */
    MR_CKPT_WRITING     /* {WRITING, N, slot, incarnation}: it has read all of state N; what is left is the disk's */
};
static inline int mr_ckpt_has_copier(uint64_t w) { return mr_pw_state(w) == MR_CKPT_COPYING || mr_pw_state(w) == MR_CKPT_WRITING; }

/* ---- header ------------------------------------------------------------------------------------------------------------- */

/* Event count: one futex word per actor kind, plus one that the supervisor's clients may watch.
 * Count and "somebody may sleep" share the word, so no order between two words is needed, and a sleeper that was killed costs its
 * wakers one system call, not one for ever. */
struct mr_evc {
    uint32_t seq;            /* count in steps of 2 | bit 0: somebody may sleep.  Wraps; only equality is ever asked (ipc/wait.c) */
    uint32_t late;           /* sleeps that the deadline ended although the count had moved: a waker died before its wake.  Metrics */
    uint8_t pad[120];
};

struct mr_shm_header {
    /* 0: written by the supervisor before the name is visible to anybody, then constant */
    uint64_t magic;
    uint32_t version;
    uint32_t header_bytes;
    uint64_t layout_hash;        /* MR_LAYOUT_HASH of the creator's build */
    uint64_t run_id;             /* random, unique per start */
    char boot_id[40];            /* /proc/sys/kernel/random/boot_id */
    char run[MR_NAME_MAX];
    int32_t sup_pid;
    uint32_t sup_pidns;          /* inode of its pid namespace: a pid of another namespace proves nothing */
    uint64_t sup_start;          /* field 22 of /proc/<pid>/stat: pid AND start time name a process */
    uint64_t created_ns;         /* CLOCK_MONOTONIC */
    uint64_t total_bytes;
    uint64_t off_actors, off_items, off_rings, off_steps, off_slabs, off_arenas, off_epochs;
    uint64_t ring_bytes;         /* stride of one ring */
    uint32_t n_actors, n_items, n_slabs, n_arenas, n_epochs, n_buckets;
    uint32_t n_targets, n_drafters, n_places;   /* n_places = M = grad_accum * n_drafters */
    uint32_t ring_cap;           /* power of two, >= 4 * n_items */
    uint32_t token_budget;       /* tokens of an item at most */
    uint32_t deterministic;      /* 0 or 1 */
    uint32_t steps_total;        /* of the whole run */
    uint32_t microbatches_total;
    uint32_t first_step;         /* 0, or N when resumed from checkpoint N */
    uint32_t checkpoint_every;   /* steps; 0 = only the final one */
    uint64_t param_count;        /* P of the drafter */
    uint64_t seed;
    uint64_t plan_samples_max;   /* capacity of one parity of .plan, sample ids */
    uint32_t plan_entries_max;   /* capacity of one parity of .plan, entries */
    uint32_t max_seqs;           /* samples of one item at most, <= MR_MAX_SEQS */
    uint32_t block_slots;        /* slots of a block that can be supervised: block_size - 1; < MR_MAX_BLOCK */
    uint8_t pad0[1024 - 332];

    /* 1024: levels that change */
    uint64_t cursor;             /* feeder: plan positions < cursor are filled (single writer: the live feeder; recovery reads) */
    uint64_t plan_epochs;        /* feeder: epochs < this are sealed in .plan (release) */
    uint8_t pad1[112];
    uint64_t ledger_done;        /* supervisor: ledger lines of steps < this are on disk (release) */
    uint64_t ckpt;               /* checkpoint word */
    uint64_t ckpt_latest;        /* supervisor: `latest` points at this step */
    uint64_t tokens_done;        /* supervisor: tokens, and block rows, of the ledger lines written by this start; metrics */
    uint64_t draft_tokens_done;
    uint8_t pad2[88];
    uint32_t abort;              /* supervisor: 1 = every wait returns -ECANCELED, actors exit at once */
    uint32_t stop;               /* supervisor: 1 = the next completed step ends the run (MR_HALT) */
    uint32_t sweep;              /* anyone: 1 = a ring was full, a hint was dropped; the supervisor re-pushes and clears */
    uint32_t fatal;              /* anyone: 1 = a counter reached its maximum: exit code 1 */
    uint8_t pad3[112];
    struct mr_evc evc[MR_KINDS]; /* work event counts, by kind */
    struct mr_evc evc_sup;       /* reserved for tools; the supervisor itself is woken through its eventfd */
    uint8_t pad4[4096 - 1024 - 3 * 128 - (MR_KINDS + 1) * 128];
};

/* ---- actor rows --------------------------------------------------------------------------------------------------------- */

enum mr_actor_state { MR_ACTOR_EMPTY, MR_ACTOR_STARTING, MR_ACTOR_RUNNING, MR_ACTOR_DEAD, MR_ACTOR_BACKOFF, MR_ACTOR_DONE };
enum mr_wait_reason {
    MR_WAIT_NONE, MR_WAIT_INPUT, MR_WAIT_SLAB, MR_WAIT_ITEM, MR_WAIT_READY, MR_WAIT_PLACE, MR_WAIT_REDUCE, MR_WAIT_APPLY,
    MR_WAIT_REPAIR, MR_WAIT_LEDGER, MR_WAIT_CKPT, MR_WAIT_EPOCH, MR_WAIT_END, MR_WAIT_PEER, MR_WAIT_ARENA, MR_WAIT_WEIGHTS,
    MR_WAIT_TURN, MR_WAIT_REASONS
};

struct mr_actor_row {
    /* supervisor writes, while no incarnation runs */
    char name[16];               /* "drafter/1" */
    char device[40];             /* "cpu", "cuda:0", ... */
    uint32_t kind, index;        /* enum mr_kind; index within its kind = rank of a drafter */
    uint32_t incarnation;        /* of the running or last process; 1, 2, ... */
    uint32_t state;              /* enum mr_actor_state; STARTING -> RUNNING by the actor itself (ready message) */
    int32_t pid;
    uint32_t restarts;           /* deaths so far */
    uint64_t start_ns;           /* of this incarnation (spawn) */
    uint8_t pad0[128 - 88];
    /* actor writes (supervisor only in recovery) */
    uint32_t joined;             /* drafter: its accumulator is valid.  Cleared by recovery only */
    uint32_t acked;              /* sentinel acknowledgements: 0 or 1; a slot that acknowledged is not restarted */
    uint32_t drain;              /* supervisor sets: leave at the next safe point; actor exits 0 */
    uint32_t wait_reason;        /* enum mr_wait_reason, 0 = busy */
    uint64_t wait_since_ns;
    uint64_t first_claim_ns;     /* first claim of this incarnation, 0 = none yet */
    uint64_t progress;           /* bumped per finished unit of work, all incarnations; the watchdog and the restart budget read it */
    uint64_t progress_ns;        /* when */
    uint64_t items, tokens, draft_tokens; /* totals over all incarnations, metrics only */
    uint64_t busy_ns;
    uint64_t wait_ns[17];        /* by enum mr_wait_reason */
    uint64_t note;               /* actor's own use */
    uint64_t stall_progress;     /* `progress` and reason at the last wait: a wait that goes on keeps wait_since_ns (ipc/wait.c) */
    uint32_t stall_reason;
    uint32_t computing;          /* 1 = has work on a GPU that it shares.  A courtesy (actors/turns.h); recovery clears it */
    uint8_t pad1[384 - 368];
};

/* ---- items -------------------------------------------------------------------------------------------------------------- */

#define MR_NO_SLAB UINT32_MAX

/* Payload fields are plain: written by the owner named, read only after an acquire of the word that published them. */
struct mr_item {
    uint64_t word;
    uint8_t pad0[56];            /* the word has a cache line of its own */
    /* feeder, in FILLING */
    uint32_t bucket, epoch;
    uint32_t n_seqs, n_tokens;
    /* target, in EXTRACTING, before READY (edge E1) */
    uint32_t slab;               /* index in the slab table; MR_NO_SLAB once the item has left it behind (mr_item_requeue) */
    uint32_t arena;              /* of that slab */
    uint64_t generation;         /* of the arena at that time */
    uint64_t offset, bytes;      /* within the arena */
    uint32_t extractions;        /* how often a target has extracted this microbatch (metrics) */
    uint32_t pad1;
    uint8_t pad2[8];
};

/* ---- rings -------------------------------------------------------------------------------------------------------------- */

/* Ring numbers: 0 input, 1 retry, 2 + 2 * bucket + (epoch & 1) ready. */
enum { MR_RING_INPUT, MR_RING_RETRY, MR_RING_READY };
struct mr_ring {
    uint64_t tail;               /* position of the next push, lags by at most one; free-running, so also the number of pushes */
    uint64_t head_seen;          /* pushers: some earlier value of head, so that a push need not touch the claimers' line */
    uint8_t pad0[112];
    uint64_t head;               /* position of the next claim; free-running */
    uint8_t pad1[120];
    uint32_t mask, shift;        /* cap - 1, log2(cap) */
    uint32_t want;               /* phase an item must be in for its cell to be live */
    uint32_t pad2;
    uint8_t pad3[112];           /* constant line: shared by all caches, never written */
    uint64_t cell[];             /* [cap] */
};

/* ---- step ---------------------------------------------------------------------------------------------------------------- */

/* Record of one filled place: written by the drafter before the place becomes DONE, read by the supervisor for the ledger.  Its slot sums
 * [block_slots] lie apart (mr_slot_sums_at), and are written and read with it. */
struct mr_record {
    uint32_t pos;                /* plan position of the microbatch */
    uint32_t bucket, drafter;    /* drafter = its index */
    uint32_t tokens, draft_tokens;
    uint32_t n_seqs;
    uint64_t blocks;             /* anchors */
    uint64_t accepted;           /* sum over blocks of leading correct slots (accept_proxy = 1 + accepted / blocks) */
    uint64_t labels, correct;    /* supervised slots, and those predicted right */
    double loss_sum;             /* sum of weight * CE */
    double weight_sum;           /* the loss's own denominator */
    uint8_t pad[128 - 72];
};

/* Step block: word | pad | places [M] u64, each alone in 64 bytes | records [2][M], step mod 2 | slot sums [2][M][block_slots]. */
struct mr_step_block {
    uint64_t word;
    uint8_t pad[120];
};
struct mr_place {
    uint64_t word;
    uint8_t pad[56];
};

/* ---- slabs, arenas, epochs ------------------------------------------------------------------------------------------------ */

struct mr_slab {
    uint64_t word;
    uint8_t pad0[56];
    uint32_t arena;              /* supervisor, constant */
    uint32_t device;             /* index of the device among the topology's devices */
    uint64_t offset, bytes;      /* constant */
    uint8_t pad1[40];
};

enum mr_arena_use { MR_ARENA_SLABS, MR_ARENA_WEIGHTS, MR_ARENA_DRAFTER, MR_ARENA_HEADER, MR_ARENA_USES };
enum mr_arena_export { MR_EXPORT_SHM, MR_EXPORT_CUDA_IPC, MR_EXPORT_VMM };
struct mr_arena_row {
    uint64_t generation;         /* 0 = not there; else strictly increasing over the run; stored last, with release (mr_arena_register) */
    uint32_t use;                /* enum mr_arena_use */
    uint32_t owner;              /* drafter index, or keeper index */
    uint32_t export_kind;        /* enum mr_arena_export */
    uint32_t device;
    uint64_t bytes;
    uint8_t handle[64];          /* cudaIpcMemHandle_t, or the shm name of the cpu backend (NUL-terminated) */
    char device_uuid[40];
    uint64_t fingerprint;        /* weights: sealed content, 0 = not sealed */
    uint64_t last_generation;    /* the highest ever used, so that a lost generation never comes back */
    uint64_t seal;               /* weights: seal word; fingerprint is valid when it says SEALED */
    uint8_t pad[256 - 160];
};

/* Epoch table: struct mr_epoch [n_epochs + 1] (base/plan_types.h), supervisor, constant. */
/* Header of one parity of .plan: entries [plan_entries_max], then u32 sample ids [plan_samples_max]. */
struct mr_plan_hdr {
    uint64_t epoch;              /* epoch + 1, 0 = empty; stored last (release) */
    uint32_t n_entries, pad0;
    uint64_t n_samples;
    uint8_t pad[104];
};

/* Drafter arena (f32): header | state[2] {master, m, v} each P | accumulator P | reduced P.  Offsets by ipc/arena.h.
 * On a GPU only the vectors lie in device memory; the header that is used is an arena of its own in /dev/shm (use MR_ARENA_HEADER, owner =
 * the drafter's index), so that every process can read it, and it says of which generation of the device arena it speaks. */
struct mr_drafter_arena {
    uint64_t magic;
    uint64_t param_count;
    uint64_t initialised;        /* 1 = state[first_step mod 2] holds valid parameters (release, once) */
    uint64_t acc_step;           /* debugging: step + 1 that the accumulator belongs to */
    double acc_weight;           /* sum of weights in the accumulator */
    double reduced_weight;       /* sum over drafters, with the reduced gradient */
    double acc_loss, reduced_loss;
    uint64_t reduced_step;       /* step + 1 of the reduced gradient */
    uint64_t generation;         /* of the device arena that all this is about; 0 = /dev/shm */
    uint64_t comm_epoch;         /* nccl, rank 0: collective epoch + 1 that comm_id belongs to; stored last, with release */
    uint8_t comm_id[128];
    uint64_t comm_word;          /* nccl: the REDUCE word whose sum this drafter has come to last */
    uint64_t first_state;        /* the first step whose state has been here: older ones are not, whatever state[] holds */
    uint8_t pad[4096 - 232];
};
#define MR_DRAFTER_MAGIC 0x5245544641524421ull

/* ---- the layout is what it says -------------------------------------------------------------------------------------------- */

#define MR_AT(type, field, off) _Static_assert(offsetof(struct type, field) == (off), #type "." #field)
#define MR_SIZE(type, n) _Static_assert(sizeof(struct type) == (n), "sizeof " #type)
MR_SIZE(mr_evc, 128);
MR_SIZE(mr_shm_header, 4096);
MR_AT(mr_shm_header, layout_hash, 16);
MR_AT(mr_shm_header, boot_id, 32);
MR_AT(mr_shm_header, run, 72);
MR_AT(mr_shm_header, sup_pid, 136);
MR_AT(mr_shm_header, sup_start, 144);
MR_AT(mr_shm_header, total_bytes, 160);
MR_AT(mr_shm_header, off_actors, 168);
MR_AT(mr_shm_header, ring_bytes, 224);
MR_AT(mr_shm_header, n_actors, 232);
MR_AT(mr_shm_header, ring_cap, 268);
MR_AT(mr_shm_header, param_count, 296);
MR_AT(mr_shm_header, plan_entries_max, 320);
MR_AT(mr_shm_header, block_slots, 328);
MR_AT(mr_shm_header, cursor, 1024);
MR_AT(mr_shm_header, ledger_done, 1152);
MR_AT(mr_shm_header, ckpt, 1160);
MR_AT(mr_shm_header, abort, 1280);
MR_AT(mr_shm_header, fatal, 1292);
MR_AT(mr_shm_header, evc, 1408);
MR_AT(mr_shm_header, evc_sup, 1920);
MR_SIZE(mr_actor_row, 384);
MR_AT(mr_actor_row, kind, 56);
MR_AT(mr_actor_row, start_ns, 80);
MR_AT(mr_actor_row, joined, 128);
MR_AT(mr_actor_row, wait_since_ns, 144);
MR_AT(mr_actor_row, wait_ns, 208);
MR_AT(mr_actor_row, stall_progress, 352);
MR_AT(mr_actor_row, computing, 364);
MR_SIZE(mr_item, 128);
MR_AT(mr_item, bucket, 64);
MR_AT(mr_item, slab, 80);
MR_AT(mr_item, generation, 88);
MR_AT(mr_item, extractions, 112);
MR_SIZE(mr_ring, 384);
MR_AT(mr_ring, head_seen, 8);
MR_AT(mr_ring, head, 128);
MR_AT(mr_ring, mask, 256);
MR_AT(mr_ring, cell, 384);
MR_SIZE(mr_record, 128);
MR_AT(mr_record, blocks, 24);
MR_AT(mr_record, loss_sum, 56);
MR_SIZE(mr_slot_sums, 24);
MR_SIZE(mr_step_block, 128);
MR_SIZE(mr_place, 64);
MR_SIZE(mr_slab, 128);
MR_AT(mr_slab, arena, 64);
MR_SIZE(mr_arena_row, 256);
MR_AT(mr_arena_row, handle, 32);
MR_AT(mr_arena_row, fingerprint, 136);
MR_AT(mr_arena_row, last_generation, 144);
MR_AT(mr_arena_row, seal, 152);
MR_SIZE(mr_epoch, 8);
MR_SIZE(mr_plan_entry, 24);
MR_SIZE(mr_plan_hdr, 128);
MR_SIZE(mr_drafter_arena, 4096);
MR_AT(mr_drafter_arena, reduced_step, 64);
MR_AT(mr_drafter_arena, comm_id, 88);

/* Fingerprint of everything above: two builds that disagree about one offset refuse each other's segments. */
static inline uint64_t mr_layout_hash(void)
{
    static const uint32_t at[] = {
        MR_SHM_VERSION, MR_SHM_ALIGN, MR_PHASES, MR_KINDS, MR_WAIT_REASONS, MR_MAX_BUCKETS, MR_RING_READY,
        sizeof(struct mr_shm_header), offsetof(struct mr_shm_header, layout_hash), offsetof(struct mr_shm_header, boot_id),
        offsetof(struct mr_shm_header, sup_pidns), offsetof(struct mr_shm_header, off_actors), offsetof(struct mr_shm_header, n_actors),
        offsetof(struct mr_shm_header, max_seqs), offsetof(struct mr_shm_header, block_slots), offsetof(struct mr_shm_header, cursor),
        offsetof(struct mr_shm_header, ledger_done), offsetof(struct mr_shm_header, abort), offsetof(struct mr_shm_header, evc),
        sizeof(struct mr_actor_row), offsetof(struct mr_actor_row, joined), offsetof(struct mr_actor_row, wait_ns),
        offsetof(struct mr_actor_row, note), offsetof(struct mr_actor_row, stall_reason),
        offsetof(struct mr_actor_row, computing),
        sizeof(struct mr_item), offsetof(struct mr_item, bucket), offsetof(struct mr_item, slab), offsetof(struct mr_item, extractions),
        sizeof(struct mr_ring), offsetof(struct mr_ring, head_seen), offsetof(struct mr_ring, head), offsetof(struct mr_ring, want),
        sizeof(struct mr_record), offsetof(struct mr_record, accepted), offsetof(struct mr_record, weight_sum),
        sizeof(struct mr_slot_sums), offsetof(struct mr_slot_sums, loss),
        sizeof(struct mr_step_block), sizeof(struct mr_place), sizeof(struct mr_slab), offsetof(struct mr_slab, offset),
        sizeof(struct mr_arena_row), offsetof(struct mr_arena_row, handle), offsetof(struct mr_arena_row, last_generation),
        offsetof(struct mr_arena_row, seal),
        sizeof(struct mr_epoch), sizeof(struct mr_plan_entry), sizeof(struct mr_plan_hdr), sizeof(struct mr_drafter_arena),
    };

    return mr_hash(MR_HASH_INIT, at, sizeof at);
}
#define MR_LAYOUT_HASH mr_layout_hash()

#endif
