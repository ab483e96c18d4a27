/* Where each weight of a target lies in one flat block of memory.
 *
 * The block is made for one kind of element (act of the backend: f32 or bf16) and is what a keeper holds and every incarnation of a target
 * maps; so its size is known to `check` before any device is touched, and loader and users can never disagree about an offset.  Query, key
 * and value are one matrix [q; k; v], gate and up are one matrix [gate; up].  Every tensor is aligned to 256 bytes. */
#ifndef MR_DATA_TARGET_LAYOUT_H
#define MR_DATA_TARGET_LAYOUT_H

#include "data/model_config.h"

enum mr_tl_parts { MR_TL_LAYERS = 1, MR_TL_NORM = 2, MR_TL_EMBED = 4, MR_TL_HEAD = 8 };
#define MR_TL_NONE UINT64_MAX                /* offset of what the block does not hold */

struct mr_tl_layer { uint64_t ln1, qkv, qn, kn, o, ln2, gu, down; };   /* byte offsets; qn, kn: MR_TL_NONE for Llama */
struct mr_tl_tensor { char name[72]; uint64_t offset, n; };            /* a tensor of the checkpoint: byte offset, elements */

struct mr_tlayout {
    int depth, elem;                         /* decoder layers held; bytes of an element */
    unsigned parts;
    struct mr_tl_layer *layer;               /* [depth] */
    uint64_t norm, embed, head;              /* tied: head is the embedding's offset */
    uint64_t bytes;
    struct mr_tl_tensor *t;                  /* [n] what is to be loaded, ascending offsets */
    int n;
};

/* `depth` counts with MR_TL_LAYERS only.  c->embedding_rows must be set.  0 or -ENOMEM; free in both cases. */
int mr_tlayout_make(struct mr_tlayout *l, const struct mr_model_config *c, int depth, unsigned parts, int elem);
void mr_tlayout_free(struct mr_tlayout *l);
/* Of names, places and sizes, with `target` (mr_model_fingerprint) in it.  Never 0. */
uint64_t mr_tlayout_fingerprint(const struct mr_tlayout *l, uint64_t target);

/* Device memory of a target's activations at most, beside the weights, for `max_tokens` tokens in a microbatch (actors/target_model.c). */
uint64_t mr_target_work_bytes(const struct mr_model_config *c, int max_tokens, int max_seqs, int elem);

#endif
