/* The topology: one JSON file that says what a run is.  conf/README.md documents every key; conf/topology.schema.json is its schema.
 *
 * Loading checks types, ranges, unknown and duplicate keys (nearest valid key), and every relation between keys that needs no file.
 * mr_check (data/check.h) then adds what needs the checkpoint and the data.  The resolved topology (defaults filled in, --set applied,
 * paths absolute) is written to the run directory; actors read that file with the same code.
 */
#ifndef MR_DATA_TOPOLOGY_H
#define MR_DATA_TOPOLOGY_H

#include <stdint.h>

#include "base/err.h"
#include "data/json.h"
#include "base/limits.h"

enum mr_engine { MR_ENGINE_CPU, MR_ENGINE_CUDA, MR_ENGINE_SYNTHETIC };

struct mr_topo_actor {           /* one entry per SLOT (count expanded), in slot order: feeder, targets, drafters, keepers */
    enum mr_kind kind;
    unsigned index;
    enum mr_engine engine;       /* from device, or "synthetic" */
    char device[40];             /* "cpu", "cuda:0", "GPU-<uuid>" */
    unsigned device_index;       /* among mr_topology.device[]; 0 for the feeder, which uses none */
    int threads;                 /* cpu: 1 by default */
    double us_per_token;         /* synthetic: time of a microbatch = us_per_item + us_per_token * tokens, times 1 +- jitter */
    double us_per_item;
    double jitter;
};

enum { MR_TOPO_LAYERS = 32, MR_TOPO_DEVICES = 16, MR_PATH = 1024 };

struct mr_topology {
    struct mr_json src;          /* for messages (mr_json_error(&t->src, "/train/lr", ...)); all NULL in a struct that was not loaded */
    struct { char name[MR_NAME_MAX]; char dir[MR_PATH]; uint64_t seed; } run;
    struct { char checkpoint[MR_PATH]; int layers[MR_TOPO_LAYERS]; int n_layers; } target;
    struct {
        int layers, block_size, mask_token_id, anchors;
        /* 0 = take the target's */
        int hidden_size, intermediate_size, num_attention_heads, num_key_value_heads, head_dim;
        double rope_theta, rms_norm_eps;
        int max_position_embeddings;
        int sliding_window;              /* 0 = none */
        int n_sliding;                   /* first n layers are sliding_attention */
        int causal;                      /* -1 = by layer: sliding -> causal, full -> not */
        int window_origin;               /* 0 query, 1 anchor */
        char init[MR_PATH];              /* "normal" or "checkpoint:DIR" (absolute) */
        double init_std;                 /* 0.02 */
    } drafter;
    struct {
        char train[MR_PATH];             /* .safetensors, .jsonl or "synthetic:N?min=..&max=..&seed=.." */
        int max_tokens, min_tokens;
        int buckets[MR_MAX_BUCKETS], n_buckets;   /* ascending upper bounds, last >= max_tokens */
        int token_budget, max_samples;            /* max_samples 0 = MR_MAX_SEQS */
        int skip_bad;                    /* on_bad_record: "stop" (0) or "skip" (1) */
        int truncate;                    /* on_overlong: "drop" (0) or "truncate" (1) */
    } data;
    struct {
        int epochs, grad_accum, max_steps;        /* max_steps 0 = all */
        double lr, warmup_ratio, clip, loss_decay, weight_decay, beta1, beta2, eps;
        int loss;                                 /* 0 = "ce", 1 = "dpace" */
        int constant_lr;                          /* schedule: "cosine" (0) or "constant" (1) */
        int checkpoint_every_steps, keep_checkpoints;
        int deterministic;
        int reduce;                               /* "auto" (0), "p2p" (1), "nccl" (2) */
        int bf16_wire;                            /* reduce_wire: "fp32" (0), "bf16" (1) */
    } train;
    struct { int slabs_per_device; } queue;
    struct { int max; double window_s; double backoff_ms; double hang_s; } restart;
    struct { char listen[64]; } metrics;
    struct mr_topo_actor actor[MR_MAX_ACTORS];
    int n_actors, n_targets, n_drafters, n_keepers;
    char device[MR_TOPO_DEVICES][40];             /* of targets, drafters and keepers, in order of first use */
    int n_devices;
};

/* Loads PATH, applies `set` ("/pointer=JSON", copied), fills defaults, checks.  A keeper is added for every CUDA device that a target or
 * drafter uses and that has none.  0 or -1 (MR_EXIT_CONFIG).  On success *t is owned by the caller (mr_topology_free); on failure nothing
 * is left to free. */
int mr_topology_load(struct mr_topology *t, const char *path, const char *const *set, int n_set, struct mr_err *err);
void mr_topology_free(struct mr_topology *t);

/* The resolved topology as JSON, one entry per slot: loading it gives the same struct.  Writes PATH atomically. */
int mr_topology_save(const struct mr_topology *t, const char *path, struct mr_err *err);

/* Does device[d] have slabs?  When a target runs there.  (Those of a GPU whose drafters all run on the cpu lie in /dev/shm.) */
int mr_topo_slabs_on(const struct mr_topology *t, int d);
/* Slabs of the whole run: slabs_per_device times the devices above. */
int mr_topo_slabs(const struct mr_topology *t);

/* M = grad_accum * drafters. */
static inline int mr_topo_places(const struct mr_topology *t) { return t->train.grad_accum * t->n_drafters; }

#endif
