/* Hugging Face config.json of a target, and the set of tensors it promises.  Qwen3 and Llama (docs/target-models.md 1, 2, 5).
 * What a config does not say is never guessed: required keys have no default.  Anything not implemented is refused by name. */
#ifndef MR_DATA_MODEL_CONFIG_H
#define MR_DATA_MODEL_CONFIG_H

#include <stdint.h>

#include "base/err.h"
#include "data/safetensors.h"

enum mr_arch { MR_ARCH_QWEN3, MR_ARCH_LLAMA };

struct mr_model_config {
    enum mr_arch arch;
    int vocab_size, hidden_size, intermediate_size, n_layers, n_heads, n_kv_heads, head_dim, max_position;
    double rms_eps, rope_theta;
    int rope_kind;               /* 0 default, 1 linear, 2 llama3 */
    double rope_factor, rope_low, rope_high, rope_orig;
    int tied;
    int eos[8], n_eos, pad;      /* from config.json, -1 = none: only to warn of a mask token that is one of them */
    int embedding_rows;          /* rows of embed_tokens in the file (>= vocab_size is possible); set by mr_model_files_open */
};

/* `dir` may be "random:DIR?seed=N" here and in mr_model_files_open: the config of DIR, with weights that are a function of the seed (for
 * measurements; mr_model_files then has no shards). */
int mr_model_config_load(struct mr_model_config *c, const char *dir, struct mr_err *err);
/* 1: `spec` is of that form, and dir (bytes long) and seed are set; 0: it is a plain directory; -1 with err. */
int mr_model_random(const char *spec, char *dir, size_t bytes, uint64_t *seed, struct mr_err *err);
/* "synthetic:hidden=H,layers=L,vocab=V": the dimensions of a target that computes nothing.  0 or -1. */
int mr_model_config_synthetic(struct mr_model_config *c, const char *spec, struct mr_err *err);

/* inv_freq (head_dim / 2) f32, with the config's scaling. */
void mr_model_inv_freq(const struct mr_model_config *c, float *out);

/* The files of a checkpoint directory: model.safetensors, or the shards of its index.  Every tensor that the config promises is found
 * exactly once with its shape and a float type, or the open fails naming up to 10 of them; surplus tensors are listed in a warning unless
 * known.  Afterwards c->embedding_rows is set, and the head (lm_head.weight, or the embedding when c->tied) has as many rows: with c->tied
 * the embedding is the head even when the file holds an lm_head.weight too. */
struct mr_model_files {
    struct mr_st *shard;
    int n_shards;
    int random;                  /* no files: weights are made from `seed` */
    uint64_t seed;
};
int mr_model_files_open(struct mr_model_files *f, struct mr_model_config *c, const char *dir, struct mr_err *err);
void mr_model_files_close(struct mr_model_files *f);
/* Finds a tensor (shape checked already for promised ones). NULL when absent. */
const struct mr_st_tensor *mr_model_find(const struct mr_model_files *f, const char *name, const struct mr_st **st);

/* Fingerprint of config + tensor names, shapes and sizes (not the bytes): "does this drafter belong to this target". */
uint64_t mr_model_fingerprint(const struct mr_model_config *c, const struct mr_model_files *f);
/* Of the bytes of the tensors that are read, wherever they lie and however they are cut into files: 1 KiB of each, at four places (a page or
 * two a tensor, so that every start can afford it).  Another training of the same model has another one; a flipped bit may not. */
uint64_t mr_model_content(const struct mr_model_files *f, const struct mr_model_config *c);

#endif
