/* From a checked topology to segments: sizes, the /dev/shm arithmetic, and the filled tables (actor rows, slabs, arenas, epochs). */
#ifndef MR_RUNTIME_SHM_PLAN_H
#define MR_RUNTIME_SHM_PLAN_H

#include "data/check.h"
#include "ipc/seg.h"

struct mr_shm_plan {
    struct mr_seg_params seg;
    uint64_t arena_bytes;      /* cpu backend: slab arenas + drafter arenas in /dev/shm */
    uint64_t total_bytes;      /* segments + arenas */
};

/* What device d's keeper is to hold; all 0 on the cpu.  0 or -1 with err. */
struct mr_device_arenas { uint64_t slabs, weights, drafters; };
int mr_shm_plan_arenas(struct mr_device_arenas *n, const struct mr_checked *c, const struct mr_topology *t, int d, struct mr_err *err);
/* 1: the slabs of device d are f32 in /dev/shm; 0: bf16 in the device's own memory. */
int mr_shm_plan_host_slabs(const struct mr_topology *t, int d);

void mr_shm_plan_make(struct mr_shm_plan *p, const struct mr_checked *c, const struct mr_topology *t, unsigned first_step);
/* Refuses (MR_EXIT_ENV, needed and available bytes, what to do) when /dev/shm is too small, missing or not writable. */
int mr_shm_plan_fits(const struct mr_shm_plan *p, struct mr_err *err);
/* Creates segments and cpu arenas and fills every table.  On failure nothing is left in /dev/shm. */
int mr_shm_plan_create(const struct mr_shm_plan *p, const struct mr_checked *c, const struct mr_topology *t, struct mr_seg *s, struct mr_err *err);

#endif
