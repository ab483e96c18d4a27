/* What `millrace check` and every start do before any actor exists: read the topology's checkpoint and data, make the plan, and do the
 * arithmetic of memory.  No device is touched. */
#ifndef MR_DATA_CHECK_H
#define MR_DATA_CHECK_H

#include <stdio.h>

#include "data/drafter_config.h"
#include "data/drafter_memory.h"
#include "data/plan.h"
#include "data/target_layout.h"

struct mr_checked {
    struct mr_model_config target;
    struct mr_drafter_config drafter;
    struct mr_dlayout layout;
    struct mr_dataset *data;
    struct mr_plan_opts plan_opts;
    struct mr_epoch *epoch;            /* [epochs + 1]: first_pos, first_step; from the plans of all epochs, not cut by max_steps */
    uint64_t tokens, samples;          /* usable ones: of one epoch */
    uint64_t bucket_n[MR_MAX_BUCKETS]; /* microbatches of epoch 0 per bucket */
    int n_slabs;                       /* on all devices */
    uint64_t slab_bytes;               /* token_budget * (K*H) * element bytes (slab_elem), rounded up to 256 */
    int slab_elem;                     /* 4: f32; 2: bf16, when targets and drafters are on GPUs */
    uint64_t target_fingerprint;       /* mr_model_fingerprint; 0 when synthetic */
    uint64_t target_content;           /* mr_model_content; 0 when synthetic */
    uint32_t max_entries;              /* largest epoch: microbatches, and samples */
    uint64_t max_samples;
    int synthetic;                     /* every target and drafter is synthetic: no checkpoint is read */
};

enum mr_check_parts {
    MR_CHECK_MODEL = 0,                /* always: configs, tensor lists, drafter layout */
    MR_CHECK_DATA = 1,                 /* also open the data set */
    MR_CHECK_PLAN = 2                  /* also make the plans of all epochs (implies DATA) */
};

/* 0 or -1 (MR_EXIT_CONFIG).  *c is freed by mr_checked_free in both cases.  Without DATA, data is NULL; without PLAN, epoch is NULL and
 * the counts of microbatches are 0.  With MODEL alone the cost is that of reading file headers: every actor does it. */
int mr_check(struct mr_checked *c, const struct mr_topology *t, unsigned parts, struct mr_err *err);
void mr_checked_free(struct mr_checked *c);

/* The block of target weights that a keeper holds on device d, a GPU: what the targets and drafters there read (data/target_layout.h), in
 * elements of `elem` bytes (2: bf16).  bytes 0 when they read nothing.  0 or -ENOMEM; free in both cases. */
int mr_check_weights(const struct mr_checked *c, const struct mr_topology *t, int d, int elem, struct mr_tlayout *l);
/* Device memory that the actors on GPU d allocate for themselves beside the keeper's arenas: contexts, libraries, activations. */
uint64_t mr_check_working(const struct mr_checked *c, const struct mr_topology *t, int d);
/* Do drafters on device d read hidden states of targets on other devices? */
int mr_check_pulls(const struct mr_topology *t, int d);
/* Decoder layers that a target must run: up to the highest one that is captured. */
int mr_check_depth(const struct mr_checked *c);
/* Plan, buckets, dropped rows, parameters, slab arithmetic per device.  The shared-memory arithmetic is runtime/shm_plan.h's. */
void mr_check_print(const struct mr_checked *c, const struct mr_topology *t, FILE *f);

#endif
