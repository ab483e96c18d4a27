/* The flat block of a target's weights: see target_layout.h. */
#include "data/target_layout.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/hash.h"

enum { PER_LAYER = 11, ALIGN = 256 };


static uint64_t aligned(uint64_t n)
{
    return (n + ALIGN - 1) & ~(uint64_t)(ALIGN - 1);
}

/* Room for n elements. */
static uint64_t take(struct mr_tlayout *l, uint64_t n)
{
    uint64_t at = l->bytes;

    l->bytes += aligned(n * (uint64_t)l->elem);
    return at;
}

/* The tensor `layer`.`name` lies at `offset`; returns the offset behind it. */
static uint64_t put(struct mr_tlayout *l, int layer, const char *name, uint64_t offset, uint64_t n)
{
    struct mr_tl_tensor *t = &l->t[l->n++];

    if (layer >= 0)
        snprintf(t->name, sizeof t->name, "model.layers.%d.%s.weight", layer, name);
    else
        snprintf(t->name, sizeof t->name, "%s.weight", name);
    t->offset = offset;
    t->n = n;
    return offset + n * (uint64_t)l->elem;
}

/* A tensor with a place of its own. */
static uint64_t one(struct mr_tlayout *l, int layer, const char *name, uint64_t n)
{
    uint64_t at = take(l, n);

    put(l, layer, name, at, n);
    return at;
}

static void make_layer(struct mr_tlayout *l, const struct mr_model_config *c, int i)
{
    uint64_t H = (uint64_t)c->hidden_size, I = (uint64_t)c->intermediate_size, hd = (uint64_t)c->head_dim, at;
    uint64_t q = (uint64_t)c->n_heads * hd * H, kv = (uint64_t)c->n_kv_heads * hd * H;
    int head_norm = c->arch == MR_ARCH_QWEN3;
    struct mr_tl_layer *y = &l->layer[i];

    y->ln1 = one(l, i, "input_layernorm", H);
    at = y->qkv = take(l, q + 2 * kv);
    at = put(l, i, "self_attn.q_proj", at, q);
    at = put(l, i, "self_attn.k_proj", at, kv);
    put(l, i, "self_attn.v_proj", at, kv);
    y->qn = head_norm ? one(l, i, "self_attn.q_norm", hd) : MR_TL_NONE;
    y->kn = head_norm ? one(l, i, "self_attn.k_norm", hd) : MR_TL_NONE;
    y->o = one(l, i, "self_attn.o_proj", q);
    y->ln2 = one(l, i, "post_attention_layernorm", H);
    at = y->gu = take(l, 2 * I * H);
    at = put(l, i, "mlp.gate_proj", at, I * H);
    put(l, i, "mlp.up_proj", at, I * H);
    y->down = one(l, i, "mlp.down_proj", H * I);
}

int mr_tlayout_make(struct mr_tlayout *l, const struct mr_model_config *c, int depth, unsigned parts, int elem)
{
    uint64_t rows = (uint64_t)c->embedding_rows * (uint64_t)c->hidden_size, vocab = (uint64_t)c->vocab_size * (uint64_t)c->hidden_size;
    int embed = (parts & MR_TL_EMBED) || ((parts & MR_TL_HEAD) && c->tied);

    *l = (struct mr_tlayout){.depth = parts & MR_TL_LAYERS ? depth : 0, .elem = elem, .parts = parts, .norm = MR_TL_NONE,
                             .embed = MR_TL_NONE, .head = MR_TL_NONE};
    l->layer = calloc((size_t)l->depth + 1, sizeof *l->layer);
    l->t = calloc((size_t)l->depth * PER_LAYER + 3, sizeof *l->t);
    if (!l->layer || !l->t)
        return -ENOMEM;
    if (embed)
        l->embed = one(l, -1, "model.embed_tokens", rows);
    for (int i = 0; i < l->depth; i++)
        make_layer(l, c, i);
    if (parts & MR_TL_NORM)
        l->norm = one(l, -1, "model.norm", (uint64_t)c->hidden_size);
    if (parts & MR_TL_HEAD)
        l->head = c->tied ? l->embed : one(l, -1, "lm_head", vocab);
    return 0;
}

void mr_tlayout_free(struct mr_tlayout *l)
{
    free(l->layer);
    free(l->t);
    *l = (struct mr_tlayout){0};
}

uint64_t mr_tlayout_fingerprint(const struct mr_tlayout *l, uint64_t target)
{
    uint64_t h = mr_hash(mr_hash(MR_HASH_INIT, &target, sizeof target), &l->elem, sizeof l->elem);

    for (int i = 0; i < l->n; i++)
        h = mr_hash(h, &l->t[i], sizeof l->t[i]);
    return h ? h : 1;
}

uint64_t mr_target_work_bytes(const struct mr_model_config *c, int max_tokens, int max_seqs, int elem)
{
    uint64_t T = (uint64_t)max_tokens, e = (uint64_t)elem, H = (uint64_t)c->hidden_size, I = (uint64_t)c->intermediate_size;
    uint64_t hd = (uint64_t)c->head_dim, q = (uint64_t)c->n_heads * hd, kv = (uint64_t)c->n_kv_heads * hd;

    return 2 * aligned(T * H * e) + aligned(T * (q + 2 * kv) * e) + aligned(T * q * e) + aligned(T * 2 * I * e) + aligned(T * I * e) +
           aligned(T * hd * 4) + 2 * aligned(T * 4) + aligned(((uint64_t)max_seqs + 1) * 4);
}
