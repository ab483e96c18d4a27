/* DFlash drafters: forward and backward over a kernel table (docs/dflash.md 1, 3).
 *
 * A microbatch is sequences packed back to back, and blocks: block j stands at position pos[j] (the anchor) of sequence seq[j].  Keys of
 * a block row are the context rows strictly before the anchor and the block's own rows.  Context work (fc, and each layer's keys and
 * values) is done once a microbatch; block rows are computed in chunks of whole blocks, so memory does not grow with the number of
 * anchors, and the context's key and value gradients add up over the chunks (with 16-bit activations a chunk is whole sequences, as long
 * as one fits in: nothing is then added up in 16 bits).  Only supervised slots reach the head; behind the last
 * layer's attention nothing else is computed at all.
 * Embedding and head are the target's and frozen; the target's hidden states get no gradient.
 * The order of every sum is fixed by the microbatch alone: same inputs, same bits (on cuda: with k->deterministic).
 * One object per thread; all memory is allocated at create.  Nothing here blocks but the device.
 */
#ifndef MR_ACTORS_DFLASH_H
#define MR_ACTORS_DFLASH_H

#include <stddef.h>
#include <stdint.h>

#include "actors/tap.h"
#include "actors/target_model.h"
#include "base/limits.h"
#include "base/slot_sums.h"
#include "data/drafter_config.h"

enum mr_dflash_rows {            /* which block rows go through the rest of the last layer and the head */
    MR_DFLASH_LABELLED,          /* slots k >= 1 whose token exists and is supervised: training */
    MR_DFLASH_IN_ROW,            /* slots k >= 1 whose token exists: evaluation */
    MR_DFLASH_ALL                /* all, also slot 0: comparing activations */
};

struct mr_dflash_opts {
    int max_tokens, max_seqs, max_blocks;    /* of one microbatch */
    int chunk_rows;                          /* block rows computed at a time (at least one block) */
    double gamma;                            /* CE decay exp(-(k-1)/gamma); 0 = none */
    int loss;                                /* 0 = CE, 1 = D-PACE */
    int train;                               /* 0: no backward memory, accumulate is refused */
    enum mr_dflash_rows rows;
    int logits;                              /* 1: logits exist, for the tap */
    const struct mr_tap *tap;                /* NULL, or borrowed: sees "fc", "ctx", "attn" i, "mlp" i, "layer" i, "final", "logits" */
};

/* Host arrays, but for the features. */
struct mr_dflash_batch {
    int n_seqs, n_tokens, n_blocks;
    const int32_t *ids, *cu;                 /* (n_tokens), (n_seqs + 1) */
    const uint8_t *mask;                     /* (n_tokens) */
    const void *features;                    /* (n_tokens, K * target_hidden) act, on the device; never written */
    const int32_t *seq, *pos;                /* (n_blocks), sorted by seq, then pos; pos counts within the sequence */
};

struct mr_dflash_result {
    double loss_sum, weight_sum;             /* numerator and denominator of the loss */
    uint64_t blocks, accepted, labels, correct, rows;
    struct mr_slot_sums slot[MR_MAX_BLOCK - 1];  /* [block_size - 1] used: slot k in entry k - 1; they add up to labels and correct */
};

struct mr_dflash;

/* `k`, `c`, `l` and `frozen` (with head) are borrowed and must outlive the object.  NULL with err. */
struct mr_dflash *mr_dflash_create(struct mr_k *k, const struct mr_drafter_config *c, const struct mr_dlayout *l,
                                   const struct mr_frozen *frozen, const struct mr_dflash_opts *o, struct mr_err *err);
void mr_dflash_destroy(struct mr_dflash *d);
/* Device memory that it holds. */
size_t mr_dflash_bytes(const struct mr_dflash *d);

/* The parameters (P) f32, device memory, of the calls that follow.  A backend with f32 activations reads them where they are; others
 * make their working copy here, so call it again after `param` has changed. */
int mr_dflash_set_param(struct mr_dflash *d, const float *param);

/* acc (P) f32 device += numerator gradients of the batch; *r is overwritten.  Device work is complete on return.
 * 0, or a negative errno: -E2BIG when the batch is larger than opts said, -EINVAL when the object is not for training. */
int mr_dflash_accumulate(struct mr_dflash *d, const struct mr_dflash_batch *b, float *acc, struct mr_dflash_result *r);

/* Forward only.  argmax (n_blocks * B) and ce (n_blocks * B), host memory, may be NULL: -1 and 0 in rows that opts.rows leaves out. */
int mr_dflash_forward(struct mr_dflash *d, const struct mr_dflash_batch *b, int32_t *argmax, float *ce, struct mr_dflash_result *r);

/* D-PACE weights (docs/dflash.md 3.5, alpha 0.5) of one block: ce[n] and labelled[n] of its slots in order, weight[n] is written. */
void mr_dflash_dpace(int n, const float *ce, const uint8_t *labelled, float *weight);

#endif
