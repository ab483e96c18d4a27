/* Config and parameter layout of a DFlash drafter (docs/dflash.md 2).  One flat vector of P parameters; tensors in this order:
 * fc, hidden_norm, then per layer input_layernorm, q, k, v, o, q_norm, k_norm, post_attention_layernorm, gate, up, down, then norm. */
#ifndef MR_DATA_DRAFTER_CONFIG_H
#define MR_DATA_DRAFTER_CONFIG_H

#include <stdint.h>

#include "base/err.h"
#include "data/model_config.h"
#include "data/topology.h"

struct mr_drafter_config {
    int hidden_size, intermediate_size, n_layers, n_heads, n_kv_heads, head_dim;
    int K, target_hidden, target_layers;           /* captured layers, the target's hidden size and depth */
    int layer_ids[MR_TOPO_LAYERS];
    int block_size, mask_token_id, vocab_size, max_position;
    double rms_eps, rope_theta;
    int sliding_window;                            /* 0 = none */
    unsigned char sliding[MR_TOPO_LAYERS];         /* per layer */
    unsigned char causal[MR_TOPO_LAYERS];          /* per layer, in-block */
    int window_origin;                             /* 0 query, 1 anchor */
};

enum mr_dp { MR_DP_LN1, MR_DP_Q, MR_DP_K, MR_DP_V, MR_DP_O, MR_DP_QN, MR_DP_KN, MR_DP_LN2, MR_DP_GATE, MR_DP_UP, MR_DP_DOWN,
             MR_DP_PER_LAYER };

struct mr_dparam {
    char name[72];               /* checkpoint name, "layers.0.self_attn.q_proj.weight" */
    uint64_t offset;             /* in the flat vector */
    uint64_t n;
    int rows, cols;              /* cols 0: a vector of rows */
};
struct mr_dlayout {
    struct mr_dparam *t;
    int n;                       /* 3 + 11 L */
    uint64_t P;                  /* total; offsets are multiples of 32 elements, gaps are zero and stay zero */
    int fc, hidden_norm, layer0, norm;   /* indices in t; layer i tensor j is layer0 + i * MR_DP_PER_LAYER + j */
};

/* From the topology and the target's config.  MR_EXIT_CONFIG with the arithmetic when they do not fit. */
int mr_drafter_config_make(struct mr_drafter_config *c, const struct mr_topology *t, const struct mr_model_config *target,
                             struct mr_err *err);
/* From a z-lab checkpoint directory (both places of block_size, both rope schemas). */
int mr_drafter_config_load(struct mr_drafter_config *c, const char *dir, struct mr_err *err);
/* Writes config.json as z-lab and SGLang and vLLM read it (docs/dflash.md 2.1). */
int mr_drafter_config_save(const struct mr_drafter_config *c, const char *path, struct mr_err *err);

int mr_dlayout_make(struct mr_dlayout *l, const struct mr_drafter_config *c);     /* 0 or -ENOMEM */
void mr_dlayout_free(struct mr_dlayout *l);

/* model.safetensors of a drafter <-> flat f32 vector (P).  Writing rounds to bf16.  Reading demands exactly the names and shapes; with
 * param NULL that is all it does.  `from`, `to`: NULL, or how vectors are read and loaded that are not host memory (data/safetensors.h);
 * neither needs host memory for more than a few blocks.  Errors as there: -1 with err not set when `from` or `to` failed. */
struct mr_st_source;
struct mr_st_sink;
int mr_drafter_weights_save(const struct mr_dlayout *l, const float *param, const struct mr_st_source *from, const char *path,
                            struct mr_err *err);
int mr_drafter_weights_load(const struct mr_dlayout *l, float *param, const char *path, struct mr_err *err);
/* _to: the gaps of the vectors are the caller's: zero. */
int mr_drafter_weights_load_to(const struct mr_dlayout *l, float *param, const struct mr_st_sink *to, const char *path, struct mr_err *err);
/* trainer.safetensors: per tensor NAME (f32 master), NAME.exp_avg, NAME.exp_avg_sq. */
int mr_trainer_save(const struct mr_dlayout *l, const float *param, const float *m, const float *v, uint64_t step,
                    const struct mr_st_source *from, const char *path, struct mr_err *err);
int mr_trainer_load(const struct mr_dlayout *l, float *param, float *m, float *v, uint64_t *step, const char *path, struct mr_err *err);
int mr_trainer_load_to(const struct mr_dlayout *l, float *param, float *m, float *v, const struct mr_st_sink *to, uint64_t *step,
                       const char *path, struct mr_err *err);

/* N(0, std) for matrices, ones for norms, zero in the gaps; a pure function of seed and tensor index, whatever the number of threads: as many
 * as the process may run on, fewer when they are not to be had. */
void mr_drafter_init(const struct mr_dlayout *l, float *param, uint64_t seed, double std);
/* The same, block by block: the next one is drawn while the last one is put.  Errors as above, and for want of memory. */
int mr_drafter_init_to(const struct mr_dlayout *l, float *param, uint64_t seed, double std, const struct mr_st_sink *to, struct mr_err *err);

#endif
