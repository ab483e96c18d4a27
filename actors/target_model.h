/* Target models: the forward pass of Qwen3 and Llama checkpoints over a kernel table (docs/target-models.md 1, 2, 4).
 *
 * A microbatch is sequences packed back to back; positions restart at each, no padding exists.  Only the layers up to the highest
 * captured one run.  Query, key and value weights are one matrix [q; k; v] in memory, gate and up are one matrix [gate; up]: fewer,
 * larger products (data/target_layout.h).  One model object per thread; it owns its activations, allocated once at create for the largest
 * microbatch, and its weights, unless they are lent to it (a keeper's).
 */
#ifndef MR_ACTORS_TARGET_MODEL_H
#define MR_ACTORS_TARGET_MODEL_H

#include <stdint.h>

#include "actors/tap.h"
#include "actors/weights.h"
#include "base/err.h"
#include "data/model_config.h"
#include "kernels/kernels.h"

/* The frozen ends of a target, which its drafter shares: embedding (rows, H) and head (vocab, H).  Tied: the same memory. */
struct mr_frozen {
    struct mr_k *k;
    void *embed, *head;          /* act; head NULL when it was not asked for */
    int rows, vocab, H, tied;
    int lent;                    /* embed and head are someone else's memory */
};

/* Loads them from an open checkpoint.  0 or -1 with err; on failure nothing is left allocated. */
int mr_frozen_load(struct mr_frozen *f, struct mr_k *k, const struct mr_model_files *files, const struct mr_model_config *c, int want_head,
                   struct mr_err *err);
/* Those of a complete block of weights laid out by `l`, with MR_TL_EMBED and MR_TL_HEAD: borrowed, never written. */
void mr_frozen_lend(struct mr_frozen *f, struct mr_k *k, const struct mr_model_config *c, const struct mr_tlayout *l, const void *block);
void mr_frozen_release(struct mr_frozen *f);

struct mr_target_model_opts {
    const int *layers;           /* captured decoder layers; column block j of the features is the output of layer layers[j] */
    int n_layers;
    int max_tokens, max_seqs;    /* of one microbatch */
    int max_positions;           /* longest sequence; 0 = max_tokens */
    int full;                    /* 1: run all layers, the final norm and the head, and show them to the tap */
    const void *weights;         /* NULL: loaded here.  Else a complete block laid out by `layout`, with MR_TL_LAYERS and MR_TL_EMBED at least: */
    const struct mr_tlayout *layout;     /* the weights are borrowed and never written, the layout is read by create only */
};

struct mr_target_model;

/* Reads the config of the checkpoint directory; loads the weights from it, unless opts has them.  `k` is borrowed and must outlive the model. */
struct mr_target_model *mr_target_model_create(struct mr_k *k, const char *dir, const struct mr_target_model_opts *o, struct mr_err *err);
void mr_target_model_destroy(struct mr_target_model *m);
const struct mr_model_config *mr_target_model_config(const struct mr_target_model *m);

/* features (n_tokens, n_layers * H) act, device memory: written; NULL only with `full`.  ids (n_tokens) and cu (n_seqs + 1) are host
 * memory.  The device work is complete on return.  The tap (may be NULL) sees "hidden" with layer -1 (embeddings), 0.. (outputs of the
 * decoder layers), and when `full`: "norm" and "logits".  0, or a negative errno (-E2BIG: larger than opts said). */
int mr_target_model_forward(struct mr_target_model *m, int n_seqs, int n_tokens, const int32_t *ids, const int32_t *cu, void *features,
                            const struct mr_tap *tap);

/* The same without waiting: on a GPU the work is only issued.  ids and cu may change on return; features may not be read, nor the model
 * destroyed, before the device has come this far. */
int mr_target_model_issue(struct mr_target_model *m, int n_seqs, int n_tokens, const int32_t *ids, const int32_t *cu, void *features,
                          const struct mr_tap *tap);
/* For measurements: issues only the matrix products of a forward pass of n_tokens.  The activations hold garbage afterwards. */
int mr_target_model_products(struct mr_target_model *m, int n_tokens);

#endif
