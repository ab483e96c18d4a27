/* What the files of ipc/ share with each other and with nobody else. */
#ifndef MR_IPC_PVT_H
#define MR_IPC_PVT_H

#include "ipc/atomic.h"
#include "ipc/seg.h"
#include "ipc/wait.h"

/* ---- names in /dev/shm ---- */

#define MR_SHM_DIR "/dev/shm"
enum { MR_PATH_MAX = 128 };
/* "/dev/shm/millrace-<run>.<suffix>" */
void mr_shm_path(char path[MR_PATH_MAX], const char *run, const char *suffix);
/* 1 when `run` is [A-Za-z0-9._-]{1,48} and neither "." nor "..". */
int mr_run_name_ok(const char *run);
uint32_t mr_pid_namespace(void);
void mr_boot_id(char id[40]);
/* Creates a file of `bytes`, all allocated now, zero but for `head`; it has its name only once it is complete.  EEXIST, ENOSPC, ... as
 * messages; on failure the name is not there (unless it was).  *fd gets the descriptor, or it is closed when fd is NULL. */
int mr_shm_create(const char *path, uint64_t bytes, const void *head, size_t head_bytes, int *fd, struct mr_err *err);
/* Removes the names of the run, .ctl only when `ctl` is set (it comes last). */
void mr_shm_remove(const char *run, int ctl);

/* Bytes of one item in .tok, of one parity in .plan. */
uint64_t mr_tok_stride(const struct mr_shm_header *h);
uint64_t mr_plan_stride(const struct mr_shm_header *h);
static inline uint64_t mr_align_up(uint64_t n) { return (n + MR_SHM_ALIGN - 1) & ~(uint64_t)(MR_SHM_ALIGN - 1); }

/* Reads plain payload that its owner may be writing: for dumps and for recovery, which check or clip what they got. */
#define MR_RACY __attribute__((noinline, no_sanitize("thread")))

/* ---- shared objects ---- */

/* A counter reached its maximum: the run must end.  Returns -EOVERFLOW. */
int mr_fatal(const struct mr_seg *s);

/* `word` -> {phase, nobody, next publication} in one CAS: the only way to QUEUED and READY.  0, -ESTALE, -EOVERFLOW. */
int mr_item_publish(const struct mr_seg *s, unsigned idx, enum mr_phase phase, uint64_t *word);
/* Publication -> QUEUED, pushed to the retry ring, targets bumped. */
int mr_item_retry(const struct mr_seg *s, unsigned idx, uint64_t *word);
/* The ring a published word belongs to. */
unsigned mr_item_ring(const struct mr_seg *s, unsigned idx, uint64_t word);

/* Read-only walk over the cells between head and tail (one past it: the cell of a pusher that has not helped the tail yet counts).
 * Bounds come from the header, which was checked at open, never from the ring: the run may be a damaged one. */
struct mr_ring_walk {
    const uint64_t *cell;
    uint64_t pos, end;
    unsigned shift, want;
};
struct mr_ring_walk mr_ring_walk(const struct mr_seg *s, unsigned ring);
/* 1 and the next cell that was written for its position, or 0 = end. */
int mr_ring_step(struct mr_ring_walk *k, uint64_t *cell);

/* Is the plan of the epoch of `step` there to be read?  1 = yes, and *v is it. */
int mr_plan_of_step(const struct mr_seg *s, unsigned step, struct mr_plan_view *v);

static inline void mr_bump_kind(const struct mr_seg *s, enum mr_kind k) { mr_evc_bump(&s->hdr->evc[k]); }

#endif
