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

struct layer {
    void *ln1;           /* (H) */
    void *qkv;           /* ((nh + 2 kv) hd, H) */
    void *qn, *kn;       /* (hd), NULL for Llama */
    void *o;             /* (H, nh hd) */
    void *ln2;           /* (H) */
    void *gu;            /* (2 I, H) */
    void *down;          /* (H, I) */
};

struct mr_target_model {
    struct mr_k *k;
    struct mr_model_config c;
    int depth;                   /* decoder layers that run */
    int full, max_tokens, max_seqs, n_capture;
    int *capture;                /* [n_capture] */
    struct mr_frozen frozen;
    void *weights, *work;        /* the two allocations */
    struct layer *layer;         /* [depth] */
    void *norm;                  /* (H), only when full */
    void *h, *n, *qkv, *o, *gu, *m, *logits;
    float *cs;                   /* RoPE table (max_tokens, hd) */
    int32_t *ids, *pos, *cu;
    int32_t *host_pos;
};

static size_t q_cols(const struct mr_model_config *c) { return (size_t)c->n_heads * (size_t)c->head_dim; }
static size_t kv_cols(const struct mr_model_config *c) { return (size_t)c->n_kv_heads * (size_t)c->head_dim; }
static void *at(const struct mr_target_model *m, void *p, size_t n) { return (char *)p + n * (size_t)m->k->act_bytes; }

/* ---- loading ------------------------------------------------------------------------------------------------------------------- */

static int k_dtype(enum mr_st_dtype t, enum mr_k_dtype *out, size_t *bytes)
{
    switch (t) {
    case MR_ST_F32:
        *out = MR_K_F32;
        *bytes = 4;
        return 0;
    case MR_ST_BF16:
        *out = MR_K_BF16;
        *bytes = 2;
        return 0;
    case MR_ST_F16:
        *out = MR_K_F16;
        *bytes = 2;
        return 0;
    default:
        return -EINVAL;
    }
}

/* A safetensors file may place a tensor at any byte; kernels may rely on the alignment of its elements. */
static int load_unaligned(struct mr_k *k, void *dst, const void *src, enum mr_k_dtype dtype, size_t n, size_t bytes)
{
    void *copy = malloc(n * bytes + 1);
    int rc;

    if (!copy)
        return -ENOMEM;
    memcpy(copy, src, n * bytes);
    rc = k->op->load(k, dst, copy, dtype, n);
    if (!rc)
        rc = k->op->sync(k);
    free(copy);
    return rc;
}

int mr_load_tensor(struct mr_k *k, const struct mr_model_files *files, const char *name, void *dst, size_t n, struct mr_err *err)
{
    const struct mr_st *st;
    const struct mr_st_tensor *t = mr_model_find(files, name, &st);
    enum mr_k_dtype dtype;
    size_t bytes;
    int rc;

    if (!t)
        return mr_err_set(err, MR_EXIT_CONFIG, "target checkpoint: tensor %s is missing", name);
    if (t->n != n)
        return mr_err_set(err, MR_EXIT_CONFIG, "%s: tensor %s has %llu elements, the config says %zu", st->path, name,
                          (unsigned long long)t->n, n);
    if (k_dtype(t->dtype, &dtype, &bytes))
        return mr_err_set(err, MR_EXIT_CONFIG, "%s: tensor %s has dtype %s; F32, BF16 and F16 can be loaded", st->path, name,
                          t->dtype_name);
    if ((uintptr_t)mr_st_data(st, t) % bytes)
        rc = load_unaligned(k, dst, mr_st_data(st, t), dtype, n, bytes);
    else
        rc = k->op->load(k, dst, mr_st_data(st, t), dtype, n);
    if (rc)
        return mr_err_set(err, MR_EXIT_FAILED, "%s: loading tensor %s to the %s backend failed: %s", st->path, name, k->op->name,
                          strerror(-rc));
    return 0;
}

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

void mr_frozen_release(struct mr_frozen *f)
{
    if (f->head && f->head != f->embed)
        f->k->op->release(f->k, f->head);
    if (f->embed)
        f->k->op->release(f->k, f->embed);
    f->embed = f->head = NULL;
}

static void carve_weights(struct mr_target_model *m, struct mr_carve *v)
{
    const struct mr_model_config *c = &m->c;
    size_t act = (size_t)m->k->act_bytes, H = (size_t)c->hidden_size, I = (size_t)c->intermediate_size, hd = (size_t)c->head_dim;
    int head_norm = c->arch == MR_ARCH_QWEN3;

    for (int i = 0; i < m->depth; i++) {
        struct layer *l = &m->layer[i];

        l->ln1 = mr_carve_take(v, H, act);
        l->qkv = mr_carve_take(v, (q_cols(c) + 2 * kv_cols(c)) * H, act);
        l->qn = head_norm ? mr_carve_take(v, hd, act) : NULL;
        l->kn = head_norm ? mr_carve_take(v, hd, act) : NULL;
        l->o = mr_carve_take(v, H * q_cols(c), act);
        l->ln2 = mr_carve_take(v, H, act);
        l->gu = mr_carve_take(v, 2 * I * H, act);
        l->down = mr_carve_take(v, H * I, act);
    }
    m->norm = m->full ? mr_carve_take(v, H, act) : NULL;
}

static int load_layer(struct mr_target_model *m, const struct mr_model_files *f, int i, struct mr_err *err)
{
    const struct mr_model_config *c = &m->c;
    struct layer *l = &m->layer[i];
    size_t H = (size_t)c->hidden_size, I = (size_t)c->intermediate_size, hd = (size_t)c->head_dim, q = q_cols(c), kv = kv_cols(c);
    const struct {
        const char *name;
        void *dst;
        size_t n;
    } part[] = {
        {"input_layernorm", l->ln1, H},
        {"self_attn.q_proj", l->qkv, q * H},
        {"self_attn.k_proj", at(m, l->qkv, q * H), kv * H},
        {"self_attn.v_proj", at(m, l->qkv, (q + kv) * H), kv * H},
        {"self_attn.q_norm", l->qn, hd},
        {"self_attn.k_norm", l->kn, hd},
        {"self_attn.o_proj", l->o, H * q},
        {"post_attention_layernorm", l->ln2, H},
        {"mlp.gate_proj", l->gu, I * H},
        {"mlp.up_proj", at(m, l->gu, I * H), I * H},
        {"mlp.down_proj", l->down, H * I},
    };

    for (size_t j = 0; j < sizeof part / sizeof part[0]; j++) {
        char name[128];

        if (!part[j].dst)                 /* Llama has no per-head norms */
            continue;
        snprintf(name, sizeof name, "model.layers.%d.%s.weight", i, part[j].name);
        if (mr_load_tensor(m->k, f, name, part[j].dst, part[j].n, err))
            return -1;
    }
    return 0;
}

static int load_weights(struct mr_target_model *m, const struct mr_model_files *f, struct mr_err *err)
{
    struct mr_carve v = {0};

    carve_weights(m, &v);
    m->weights = m->k->op->alloc(m->k, v.at);
    if (!m->weights)
        return mr_err_set(err, MR_EXIT_ENV, "out of memory for the target's weights (%zu bytes) on the %s backend", v.at, m->k->op->name);
    v = (struct mr_carve){.base = m->weights};
    carve_weights(m, &v);
    for (int i = 0; i < m->depth; i++)
        if (load_layer(m, f, i, err))
            return -1;
    if (m->full && mr_load_tensor(m->k, f, "model.norm.weight", m->norm, (size_t)m->c.hidden_size, err))
        return -1;
    return mr_frozen_load(&m->frozen, m->k, f, &m->c, m->full, err);
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
    m->cs = mr_carve_take(v, T * (size_t)c->head_dim, sizeof(float));
    m->ids = mr_carve_take(v, T, sizeof(int32_t));
    m->pos = mr_carve_take(v, T, sizeof(int32_t));
    m->cu = mr_carve_take(v, (size_t)m->max_seqs + 1, sizeof(int32_t));
}

static int fill_rope(struct mr_target_model *m)
{
    size_t n = (size_t)m->max_tokens * (size_t)m->c.head_dim;
    float *cs = malloc(n * sizeof *cs), *inv = malloc((size_t)m->c.head_dim / 2 * sizeof *inv);
    int rc = -ENOMEM;

    if (cs && inv) {
        mr_model_inv_freq(&m->c, inv);
        mr_k_rope_table(cs, m->max_tokens, m->c.head_dim, inv);
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
    struct mr_model_files files = {0};
    int rc = -1;

    if (!m) {
        mr_err_set(err, MR_EXIT_ENV, "out of memory");
        return NULL;
    }
    m->k = k;
    m->full = o->full;
    m->max_tokens = o->max_tokens;
    m->max_seqs = o->max_seqs;
    if (!mr_model_config_load(&m->c, dir, err) && !mr_model_files_open(&files, &m->c, dir, err)) {
        if (!set_capture(m, o, err) && !load_weights(m, &files, err) && !alloc_work(m, err))
            rc = k->op->sync(k) ? mr_err_set(err, MR_EXIT_FAILED, "%s: the %s backend failed while loading", dir, k->op->name) : 0;
        mr_model_files_close(&files);
    }
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
    mr_frozen_release(&m->frozen);
    if (m->weights)
        m->k->op->release(m->k, m->weights);
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
    DO(op->linear(m->k, n, 2 * I, H, m->n, H, l->gu, m->gu, 2 * I, 0));
    DO(op->swiglu(m->k, n, I, m->gu, at(m, m->gu, (size_t)I), 2 * I, m->m));
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
    DO(m->k->op->linear(m->k, n, V, H, m->n, H, m->frozen.head, m->logits, V, 0));
    return mr_tap_see(tap, "logits", -1, 0, m->logits, n, V);
}

int mr_target_model_forward(struct mr_target_model *m, int n_seqs, int n_tokens, const int32_t *ids, const int32_t *cu, void *features,
                            const struct mr_tap *tap)
{
    if (n_seqs < 1 || n_seqs > m->max_seqs || n_tokens < 1 || n_tokens > m->max_tokens)
        return -E2BIG;
    DO(stage(m, n_seqs, n_tokens, ids, cu));
    DO(m->k->op->embed(m->k, n_tokens, m->c.hidden_size, m->frozen.embed, m->ids, m->h));
    DO(mr_tap_see(tap, "hidden", -1, 0, m->h, n_tokens, m->c.hidden_size));
    for (int i = 0; i < m->depth; i++) {
        DO(attention(m, &m->layer[i], n_seqs, n_tokens, cu));
        DO(mlp(m, &m->layer[i], n_tokens));
        DO(mr_tap_see(tap, "hidden", i, 0, m->h, n_tokens, m->c.hidden_size));
        DO(capture(m, i, n_tokens, features));
    }
    if (m->full)
        DO(head(m, n_tokens, tap));
    return m->k->op->sync(m->k);
}
