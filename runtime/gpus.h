/* GPUs, seen from the side that never touches CUDA: what `millrace-actor devices` reports from a process of its own, whether a topology's
 * devices are among them and have the room, and what an actor is to see of them. */
#ifndef MR_RUNTIME_GPUS_H
#define MR_RUNTIME_GPUS_H

#include <stdint.h>
#include <stdio.h>

#include "data/check.h"

enum { MR_GPUS = 16 };

struct mr_gpu {
    char name[64], uuid[48];
    uint64_t free_bytes, total_bytes;
    int major, minor, sms;
    int peer[MR_GPUS];           /* peer[j]: it can map the memory of GPU j */
};

struct mr_gpus {
    struct mr_gpu gpu[MR_GPUS];  /* in the order of CUDA_VISIBLE_DEVICES: cuda:0, cuda:1, ... */
    int n, nccl;                 /* version of the actor program's NCCL, 0 = it has none */
};

/* Starts the actor program and reads its report; blocks for at most a minute.  0 (also without any GPU) or -1 with err (MR_EXIT_ENV). */
int mr_gpus_query(struct mr_gpus *g, struct mr_err *err);

/* Parses the report (for tests).  0 or -1 with err. */
int mr_gpus_parse(struct mr_gpus *g, const char *text, struct mr_err *err);

/* "cuda:N" or "GPU-<beginning of a uuid>" -> index, or -1. */
int mr_gpus_find(const struct mr_gpus *g, const char *device);

/* All GPUs of the topology are there, none twice, new enough, reachable by those that pull hidden states from them, and with room for
 * what lies there.  `p` gets the arithmetic.  0 or -1 with err: MR_EXIT_CONFIG for what the topology says twice, else MR_EXIT_ENV. */
int mr_gpus_check(const struct mr_gpus *g, const struct mr_topology *t, const struct mr_checked *c, FILE *f, struct mr_err *err);

/* The same with a query, when the topology has a GPU at all; else nothing happens. */
int mr_gpus_prepare(const struct mr_topology *t, const struct mr_checked *c, FILE *f, struct mr_err *err);

/* What the actor of `slot` is to see: CUDA_VISIBLE_DEVICES, given ours (NULL: not set).  1 = `out` is its value ("": none; `pinned` is 1
 * when that is the slot's device and nothing else), 0 = leave the environment as it is: it maps memory of several GPUs. */
int mr_gpus_visible(const struct mr_topology *t, unsigned slot, const char *ours, char *out, size_t bytes, int *pinned);

static inline int mr_is_gpu(const char *device) { return device[0] != 'c' || device[1] != 'p'; }   /* "cpu", or a GPU's name */

#endif
