/* Arenas: memory that outlives the actors.  One interface, two implementations: `shm` (cpu backend, created by the supervisor as a file
 * in /dev/shm) and `cuda_ipc` (a keeper's cudaMalloc; see kernels/).  Consumers name {arena, generation}; a mapping is opened once per
 * generation and cached.  This file knows the registry and the shm kind; a CUDA opener is passed in as a function. */
#ifndef MR_IPC_ARENA_H
#define MR_IPC_ARENA_H

#include "ipc/seg.h"

/* Supervisor: creates /dev/shm/millrace-<run>.a<arena> of `bytes` (posix_fallocate, zeroed) and registers generation 1.
 * Row fields use, owner, device are the caller's, set before.  MR_EXIT_ENV when /dev/shm is too small (needed, available). */
int mr_arena_create_shm(const struct mr_seg *s, unsigned arena, uint64_t bytes, struct mr_err *err);

/* Whoever exported the memory (supervisor or keeper), when every other field of the row is written: the next generation becomes
 * current (release), slabs in it may be taken again.  Returns it.  A death before it leaves the arena unregistered. */
uint64_t mr_arena_register(const struct mr_seg *s, unsigned arena);

/* Weights: exactly one actor loads an arena of `generation`.  1 = sealed: map it, and never write; 0 = empty, and the caller's to load
 * now (EMPTY -> LOADING(me)); -EAGAIN = somebody loads; -ESTALE = that generation is no more.  Bumps nothing. */
int mr_arena_load(const struct mr_seg *s, unsigned arena, uint64_t generation, unsigned slot, unsigned inc);
/* The loader, when every byte is there (host-confirmed): LOADING(me) -> SEALED, wakes all.  0, or -ESTALE: the keeper died meanwhile. */
int mr_arena_seal(const struct mr_seg *s, unsigned arena, uint64_t generation, uint64_t fingerprint, unsigned slot, unsigned inc);
/* Keeper, before it registers a new generation: the arena is empty. */
void mr_arena_unseal(const struct mr_seg *s, unsigned arena);
/* Recovery of any actor: LOADING(slot, inc) -> EMPTY.  Number of arenas. */
unsigned mr_arena_recover_loader(const struct mr_seg *s, unsigned slot, unsigned inc);

/* 1 when the hidden states of item `idx`, which the caller holds, are still there: their arena generation is the current one. */
int mr_arena_current(const struct mr_seg *s, unsigned idx);

/* Opener of one export kind: maps the row's handle; returns the base address (host or device) or NULL with err. */
typedef void *(*mr_arena_open_fn)(const struct mr_arena_row *row, void *ctx, struct mr_err *err);
typedef void (*mr_arena_close_fn)(void *base, const struct mr_arena_row *row, void *ctx);

struct mr_arena_view { void *base; uint64_t generation; uint64_t bytes; uint32_t export_kind; };

/* Per-process cache of opened arenas; zeroed by the owner, one thread.  The mapping of the generation before the current one is kept:
 * work on it may still be in flight when the next one is opened. */
struct mr_arena_map {
    struct mr_arena_view at[MR_MAX_ARENAS], was[MR_MAX_ARENAS];
    mr_arena_open_fn open_cuda;            /* NULL: a cuda arena is refused */
    mr_arena_close_fn close_cuda;
    void *ctx;
};

/* Base address of `arena` at `generation` (0 = the current one); opened at first use, re-opened when the generation moved.
 * NULL with err when it is not registered, or the generation asked for is not current (-> the caller's item is stale). */
void *mr_arena_base(struct mr_arena_map *m, const struct mr_seg *s, unsigned arena, uint64_t generation, struct mr_err *err);
void mr_arena_close_all(struct mr_arena_map *m);
/* Closes mappings of slab arenas whose generation is no longer current: as long as somebody maps a dead keeper's memory, the device does
 * not get it back for the next keeper.  Only when no work on them is in flight. */
void mr_arena_close_stale(struct mr_arena_map *m, const struct mr_seg *s);

/* Views into a drafter arena (struct mr_drafter_arena, then f32 blocks, each aligned to 128 bytes). */
struct mr_drafter_view {
    struct mr_drafter_arena *hdr;
    float *param[2], *m[2], *v[2];         /* state[step mod 2], each (P) f32 */
    float *acc, *reduced;                  /* (P) f32 */
    uint64_t P;
    uint64_t generation;                   /* of the device arena; 0 = in /dev/shm, which nobody's death takes */
};
uint64_t mr_drafter_arena_bytes(uint64_t param_count);
struct mr_drafter_view mr_drafter_view_at(void *base, uint64_t param_count);

/* Arena index of drafter `rank`'s state, or -ENOENT. */
int mr_arena_of_drafter(const struct mr_seg *s, unsigned rank);
/* The state of drafter `rank` at the arena's current generation, mapped through `m`: header and vectors in /dev/shm, or the vectors in device
 * memory and the header in an arena of its own.  0; -1 with err: not registered now, or not to be opened (its keeper is dead). */
int mr_drafter_view_open(struct mr_arena_map *m, const struct mr_seg *s, unsigned rank, uint64_t param_count, struct mr_drafter_view *v,
                         struct mr_err *err);
/* Do the vectors hold what the header says?  No: they went down with a keeper, or were never made. */
int mr_drafter_view_valid(const struct mr_drafter_view *v);

#endif
