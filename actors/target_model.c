/* Forward pass of a target, up to the highest captured layer.
 *
 * Design.  The residual stream h is one buffer: the o and down products add into it (acc), so no separate sum is ever written.  Weights
 * and activations are each one allocation, carved in a fixed order.
 * Limits.  Full attention, no biases, SwiGLU: data/model_config.c refuses everything else by name.
 */
#include "actors/target_model.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "actors/carve.h"

#define DO(call)           \
    do {                   \
        int rc_ = (call);  \
        if (rc_)           \
            return rc_;    \
    } while (0)

struct layer {                   /* never written */
    const void *ln1;           /* (H) */
    const void *qkv;           /* ((nh + 2 kv) hd, H) */
    const void *qn, *kn;       /* (hd), NULL for Llama */
    const void *o;             /* (H, nh hd) */
    const void *ln2;           /* (H) */
    const void *gu;            /* (2 I, H) */
    const void *down;          /* (H, I) */
};

struct mr_target_model {
    struct mr_k *k;
    struct mr_model_config c;
    int depth;                   /* decoder layers that run */
    int full, max_tokens, max_positions, max_seqs, n_capture;
    int *capture;                /* [n_capture] */
    const void *weights;         /* the block of all weights ... */
    void *own_weights;           /* ... when it is ours */
    void *work;                  /* the allocation of all activations */
    struct layer *layer;         /* [depth] */
    const void *embed;           /* (rows, H) */
    const void *norm, *head;     /* (H), (vocab, H), only when full */
    void *h, *n, *qkv, *o, *gu, *m, *logits;
    float *cs;                   /* RoPE table (max_positions, hd) */
    int32_t *ids, *pos, *cu;
    int32_t *host_pos;
};

static size_t q_cols(const struct mr_model_config *c) { return (size_t)c->n_heads * (size_t)c->head_dim; }
static size_t kv_cols(const struct mr_model_config *c) { return (size_t)c->n_kv_heads * (size_t)c->head_dim; }
static void *at(const struct mr_target_model *m, void *p, size_t n) { return (char *)p + n * (size_t)m->k->act_bytes; }

/* ---- frozen ends -------------------------------------------------------------------------------------------------------------- */

int mr_frozen_load(struct mr_frozen *f, struct mr_k *k, const struct mr_model_files *files, const struct mr_model_config *c, int want_head,
                   struct mr_err *err)
{
    size_t H = (size_t)c->hidden_size, act = (size_t)k->act_bytes;

    *f = (struct mr_frozen){.k = k, .rows = c->embedding_rows, .vocab = c->vocab_size, .H = c->hidden_size, .tied = c->tied};
    f->embed = k->op->alloc(k, (size_t)f->rows * H * act);
    if (want_head)
        f->head = c->tied ? f->embed : k->op->alloc(k, (size_t)f->vocab * H * act);
    if (!f->embed || (want_head && !f->head)) {
        mr_err_set(err, MR_EXIT_ENV, "out of memory for the target's embedding and head (%zu bytes) on the %s backend",
                   ((size_t)f->rows + (size_t)f->vocab) * H * act, k->op->name);
        goto fail;
    }
    if (mr_load_tensor(k, files, "model.embed_tokens.weight", f->embed, (size_t)f->rows * H, err))
        goto fail;
    if (want_head && !c->tied && mr_load_tensor(k, files, "lm_head.weight", f->head, (size_t)f->vocab * H, err))
        goto fail;
    return 0;
fail:
    mr_frozen_release(f);
    return -1;
}

void mr_frozen_lend(struct mr_frozen *f, struct mr_k *k, const struct mr_model_config *c, const struct mr_tlayout *l, const void *block)
{
    char *base = (char *)(uintptr_t)block;

    *f = (struct mr_frozen){.k = k, .rows = c->embedding_rows, .vocab = c->vocab_size, .H = c->hidden_size, .tied = c->tied, .lent = 1,
                            .embed = base + l->embed, .head = base + l->head};
}

void mr_frozen_release(struct mr_frozen *f)
{
    if (f->head && f->head != f->embed && !f->lent)
        f->k->op->release(f->k, f->head);
    if (f->embed && !f->lent)
        f->k->op->release(f->k, f->embed);
    f->embed = f->head = NULL;
}

/* ---- weights -------------------------------------------------------------------------------------------------------------------- */

static const void *in_block(const struct mr_target_model *m, uint64_t offset)
{
    return offset == MR_TL_NONE ? NULL : (const char *)m->weights + offset;
}

static void place_weights(struct mr_target_model *m, const struct mr_tlayout *l)
{
    for (int i = 0; i < m->depth; i++) {
        const struct mr_tl_layer *t = &l->layer[i];

        m->layer[i] = (struct layer){.ln1 = in_block(m, t->ln1), .qkv = in_block(m, t->qkv), .qn = in_block(m, t->qn),
                                     .kn = in_block(m, t->kn), .o = in_block(m, t->o), .ln2 = in_block(m, t->ln2),
                                     .gu = in_block(m, t->gu), .down = in_block(m, t->down)};
    }
    m->embed = in_block(m, l->embed);
    m->norm = in_block(m, l->norm);
    m->head = in_block(m, l->head);
}

/* A block of our own, from the checkpoint. */
static int load_weights(struct mr_target_model *m, const char *dir, struct mr_err *err)
{
    unsigned parts = MR_TL_LAYERS | MR_TL_EMBED | (m->full ? MR_TL_NORM | MR_TL_HEAD : 0);
    struct mr_tlayout l = {0};
    struct mr_model_files files;
    int rc = -1;

    if (mr_model_files_open(&files, &m->c, dir, err))
        return -1;
    if (mr_tlayout_make(&l, &m->c, m->depth, parts, m->k->act_bytes))
        mr_err_set(err, MR_EXIT_ENV, "out of memory");
    else if (!(m->weights = m->own_weights = m->k->op->alloc(m->k, l.bytes)))
        mr_err_set(err, MR_EXIT_ENV, "out of memory for the target's weights (%llu bytes) on the %s backend", (unsigned long long)l.bytes,
                   m->k->op->name);
    else
        rc = mr_weights_load(m->k, &l, &files, m->own_weights, err);
    if (!rc)
        place_weights(m, &l);
    mr_tlayout_free(&l);
    mr_model_files_close(&files);
    return rc;
}

static int set_weights(struct mr_target_model *m, const char *dir, const struct mr_target_model_opts *o, struct mr_err *err)
{
    if (!o->weights)
        return load_weights(m, dir, err);
    MR_ASSERT(o->layout->elem == m->k->act_bytes && o->layout->depth >= m->depth && o->layout->embed != MR_TL_NONE);
    MR_ASSERT(!m->full || (o->layout->norm != MR_TL_NONE && o->layout->head != MR_TL_NONE));
    m->weights = o->weights;
    place_weights(m, o->layout);
    return 0;
}

/* ---- activations --------------------------------------------------------------------------------------------------------------- */

static void carve_work(struct mr_target_model *m, struct mr_carve *v)
{
    const struct mr_model_config *c = &m->c;
    size_t act = (size_t)m->k->act_bytes, T = (size_t)m->max_tokens, H = (size_t)c->hidden_size, I = (size_t)c->intermediate_size;

    m->h = mr_carve_take(v, T * H, act);
    m->n = mr_carve_take(v, T * H, act);
    m->qkv = mr_carve_take(v, T * (q_cols(c) + 2 * kv_cols(c)), act);
    m->o = mr_carve_take(v, T * q_cols(c), act);
    m->gu = mr_carve_take(v, T * 2 * I, act);
    m->m = mr_carve_take(v, T * I, act);
    m->logits = m->full ? mr_carve_take(v, T * (size_t)c->vocab_size, act) : NULL;
    m->cs = mr_carve_take(v, (size_t)m->max_positions * (size_t)c->head_dim, sizeof(float));
    m->ids = mr_carve_take(v, T, sizeof(int32_t));
    m->pos = mr_carve_take(v, T, sizeof(int32_t));
    m->cu = mr_carve_take(v, (size_t)m->max_seqs + 1, sizeof(int32_t));
}

static int fill_rope(struct mr_target_model *m)
{
    size_t n = (size_t)m->max_positions * (size_t)m->c.head_dim;
    float *cs = malloc(n * sizeof *cs), *inv = malloc((size_t)m->c.head_dim / 2 * sizeof *inv);
    int rc = -ENOMEM;

    if (cs && inv) {
        mr_model_inv_freq(&m->c, inv);
        mr_k_rope_table(cs, m->max_positions, m->c.head_dim, inv);
        rc = m->k->op->h2d(m->k, m->cs, cs, n * sizeof *cs);
        if (!rc)
            rc = m->k->op->sync(m->k);
    }
    free(cs);
    free(inv);
    return rc;
}

static int alloc_work(struct mr_target_model *m, struct mr_err *err)
{
    struct mr_carve v = {0};
    int rc;

    carve_work(m, &v);
    m->work = m->k->op->alloc(m->k, v.at);
    m->host_pos = malloc((size_t)m->max_tokens * sizeof *m->host_pos);
    if (!m->work || !m->host_pos)
        return mr_err_set(err, MR_EXIT_ENV, "out of memory for the target's activations: %zu bytes for %d tokens on the %s backend", v.at,
                          m->max_tokens, m->k->op->name);
    v = (struct mr_carve){.base = m->work};
    carve_work(m, &v);
    rc = fill_rope(m);
    return rc ? mr_err_set(err, MR_EXIT_FAILED, "target: RoPE table: %s", strerror(-rc)) : 0;
}

static int set_capture(struct mr_target_model *m, const struct mr_target_model_opts *o, struct mr_err *err)
{
    m->n_capture = o->n_layers;
    m->capture = calloc((size_t)o->n_layers + 1, sizeof *m->capture);
    if (!m->capture)
        return mr_err_set(err, MR_EXIT_ENV, "out of memory");
    m->depth = m->full ? m->c.n_layers : 0;
    for (int j = 0; j < o->n_layers; j++) {
        if (o->layers[j] < 0 || o->layers[j] >= m->c.n_layers)
            return mr_err_set(err, MR_EXIT_CONFIG, "target layer %d is to be captured; this target has layers 0 to %d", o->layers[j],
                              m->c.n_layers - 1);
        m->capture[j] = o->layers[j];
        if (m->depth < o->layers[j] + 1)
            m->depth = o->layers[j] + 1;
    }
    m->layer = calloc((size_t)m->depth + 1, sizeof *m->layer);
    return m->layer ? 0 : mr_err_set(err, MR_EXIT_ENV, "out of memory");
}

struct mr_target_model *mr_target_model_create(struct mr_k *k, const char *dir, const struct mr_target_model_opts *o, struct mr_err *err)
{
    struct mr_target_model *m = calloc(1, sizeof *m);
    int rc = -1;

    if (!m) {
        mr_err_set(err, MR_EXIT_ENV, "out of memory");
        return NULL;
    }
    m->k = k;
    m->full = o->full;
    m->max_tokens = o->max_tokens;
    m->max_positions = o->max_positions ? o->max_positions : o->max_tokens;
    m->max_seqs = o->max_seqs;
    if (!mr_model_config_load(&m->c, dir, err) && !set_capture(m, o, err) && !set_weights(m, dir, o, err) && !alloc_work(m, err))
        rc = k->op->sync(k) ? mr_err_set(err, strcmp(k->op->name, "cpu") ? MR_EXIT_CUDA : MR_EXIT_FAILED,
                                         "%s: the %s backend failed while loading", dir, k->op->name)
                            : 0;
    if (rc) {
        mr_target_model_destroy(m);
        return NULL;
    }
    return m;
}

void mr_target_model_destroy(struct mr_target_model *m)
{
    if (!m)
        return;
    if (m->own_weights)
        m->k->op->release(m->k, m->own_weights);
    if (m->work)
        m->k->op->release(m->k, m->work);
    free(m->host_pos);
    free(m->capture);
    free(m->layer);
    free(m);
}

const struct mr_model_config *mr_target_model_config(const struct mr_target_model *m) { return &m->c; }

/* ---- forward ------------------------------------------------------------------------------------------------------------------- */

/* Host arrays to the device, positions restarting at each sequence. */
static int stage(struct mr_target_model *m, int n_seqs, int n, const int32_t *ids, const int32_t *cu)
{
    for (int s = 0; s < n_seqs; s++)
        if (cu[s + 1] - cu[s] > m->max_positions)
            return -E2BIG;
    for (int s = 0; s < n_seqs; s++)
        for (int t = cu[s]; t < cu[s + 1]; t++)
            m->host_pos[t] = t - cu[s];
    DO(m->k->op->h2d(m->k, m->ids, ids, (size_t)n * sizeof *ids));
    DO(m->k->op->h2d(m->k, m->pos, m->host_pos, (size_t)n * sizeof *ids));
    return m->k->op->h2d(m->k, m->cu, cu, ((size_t)n_seqs + 1) * sizeof *cu);
}

/* h += Wo attention(norm(h)) */
static int attention(struct mr_target_model *m, const struct layer *l, int n_seqs, int n, const int32_t *host_cu)
{
    const struct mr_k_ops *op = m->k->op;
    const struct mr_model_config *c = &m->c;
    int H = c->hidden_size, nh = c->n_heads, kv = c->n_kv_heads, hd = c->head_dim, q = nh * hd, ld = q + 2 * kv * hd;
    float eps = (float)c->rms_eps;
    void *kx = at(m, m->qkv, (size_t)q), *v = at(m, m->qkv, (size_t)(q + kv * hd));

    DO(op->rmsnorm(m->k, n, H, m->h, l->ln1, eps, m->n, NULL));
    DO(op->linear(m->k, n, ld, H, m->n, H, l->qkv, m->qkv, ld, 0));
    DO(op->head_norm_rope(m->k, n, nh, hd, m->qkv, ld, l->qn, eps, m->pos, m->cs, NULL, NULL));
    DO(op->head_norm_rope(m->k, n, kv, hd, kx, ld, l->kn, eps, m->pos, m->cs, NULL, NULL));
    DO(op->attn_causal(m->k, n_seqs, m->cu, host_cu, nh, kv, hd, m->qkv, ld, kx, v, ld, m->o, q));
    return op->linear(m->k, n, H, q, m->o, q, l->o, m->h, H, 1);
}

/* h += Wdown swiglu(Wgu norm(h)) */
static int mlp(struct mr_target_model *m, const struct layer *l, int n)
{
    const struct mr_k_ops *op = m->k->op;
    int H = m->c.hidden_size, I = m->c.intermediate_size;

    DO(op->rmsnorm(m->k, n, H, m->h, l->ln2, (float)m->c.rms_eps, m->n, NULL));
    DO(op->linear_swiglu(m->k, n, I, H, m->n, H, l->gu, m->gu, m->m));
    return op->linear(m->k, n, H, I, m->m, I, l->down, m->h, H, 1);
}

static int capture(struct mr_target_model *m, int layer, int n, void *features)
{
    int H = m->c.hidden_size;

    for (int j = 0; j < m->n_capture; j++)
        if (m->capture[j] == layer && features)
            DO(m->k->op->copy2d(m->k, n, H, m->h, H, at(m, features, (size_t)j * (size_t)H), m->n_capture * H));
    return 0;
}

static int head(struct mr_target_model *m, int n, const struct mr_tap *tap)
{
    int H = m->c.hidden_size, V = m->c.vocab_size;

    DO(m->k->op->rmsnorm(m->k, n, H, m->h, m->norm, (float)m->c.rms_eps, m->n, NULL));
    DO(mr_tap_see(tap, "norm", -1, 0, m->n, n, H));
    DO(m->k->op->linear(m->k, n, V, H, m->n, H, m->head, m->logits, V, 0));
    return mr_tap_see(tap, "logits", -1, 0, m->logits, n, V);
}

int mr_target_model_issue(struct mr_target_model *m, int n_seqs, int n_tokens, const int32_t *ids, const int32_t *cu, void *features,
                          const struct mr_tap *tap)
{
    if (n_seqs < 1 || n_seqs > m->max_seqs || n_tokens < 1 || n_tokens > m->max_tokens)
        return -E2BIG;
    DO(stage(m, n_seqs, n_tokens, ids, cu));
    DO(m->k->op->embed(m->k, n_tokens, m->c.hidden_size, m->embed, m->ids, m->h));
    DO(mr_tap_see(tap, "hidden", -1, 0, m->h, n_tokens, m->c.hidden_size));
    for (int i = 0; i < m->depth; i++) {
        DO(attention(m, &m->layer[i], n_seqs, n_tokens, cu));
        DO(mlp(m, &m->layer[i], n_tokens));
        DO(mr_tap_see(tap, "hidden", i, 0, m->h, n_tokens, m->c.hidden_size));
        DO(capture(m, i, n_tokens, features));
    }
    return m->full ? head(m, n_tokens, tap) : 0;
}

int mr_target_model_forward(struct mr_target_model *m, int n_seqs, int n_tokens, const int32_t *ids, const int32_t *cu, void *features,
                            const struct mr_tap *tap)
{
    DO(mr_target_model_issue(m, n_seqs, n_tokens, ids, cu, features, tap));
    return m->k->op->sync(m->k);
}

int mr_target_model_products(struct mr_target_model *m, int n)
{
    const struct mr_k_ops *op = m->k->op;
    const struct mr_model_config *c = &m->c;
    int H = c->hidden_size, I = c->intermediate_size, q = c->n_heads * c->head_dim, ld = q + 2 * c->n_kv_heads * c->head_dim;

    for (int i = 0; i < m->depth; i++) {
        const struct layer *l = &m->layer[i];

        DO(op->linear(m->k, n, ld, H, m->n, H, l->qkv, m->qkv, ld, 0));
        DO(op->linear(m->k, n, H, q, m->o, q, l->o, m->h, H, 1));
        DO(op->linear(m->k, n, 2 * I, H, m->n, H, l->gu, m->gu, 2 * I, 0));
        DO(op->linear(m->k, n, H, I, m->m, I, l->down, m->h, H, 1));
    }
    return 0;
}
