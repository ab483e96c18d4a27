/* The drafter engine that computes: a model over a kernel table, as the actor sees it (actors/engine.h).
 *
 * A drafter engine is a DFlash object, the target's frozen embedding and head, and the optimizer; it keeps no training state: parameters,
 * moments and gradients are the caller's (they live in an arena that outlives the actor), so every call is a pure function of its arguments
 * and a new incarnation goes on where the dead one stopped.  On a GPU it computes with working weights in bf16, made from the parameters at
 * the first microbatch of an incarnation and of every step.
 * The anchors of a sample are a pure function of (seed, epoch, sample id): whoever drafts it, and however often, draws the same blocks.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "actors/actors.h"
#include "actors/backend.h"
#include "actors/dflash.h"
#include "actors/target_model.h"
#include "base/clock.h"
#include "base/log.h"
#include "data/drafter_memory.h"
#include "data/safetensors.h"

static int failed(struct mr_err *err, const char *what, const struct mr_k *k, int rc)
{
    return mr_err_set(err, strcmp(k->op->name, "cpu") ? MR_EXIT_CUDA : MR_EXIT_FAILED, "%s on the %s backend failed: %s", what, k->op->name,
                      strerror(-rc));
}

/* ---- drafter --------------------------------------------------------------------------------------------------------------------- */

struct drafter {
    struct mr_k *k;
    const struct mr_topology *t;
    const struct mr_checked *c;
    struct mr_frozen frozen;
    struct mr_tlayout lent;      /* layout of the keeper's weights */
    struct mr_dflash *d;
    int on_gpu, max_blocks, columns;
    int32_t *seq, *pos;          /* (max_blocks) anchors of the microbatch */
    uint64_t P;
    const float *current;        /* parameters that the working weights are made of; NULL: none, or they have changed */
    struct mr_k_reader *reader;  /* made at the first checkpoint, by the copier */
    struct {                     /* hidden states from other GPUs: two places, filled in turn */
        struct mr_k_pull *pull;
        void *buf[2];
        const void *src[2];      /* slab that lies there and was not used yet */
        unsigned next;
    } stage;
};

/* Draws the anchors of all samples.  Returns their number. */
static int draw(struct drafter *x, const struct mr_batch *b)
{
    int n = 0;

    for (int s = 0; s < b->n_seqs; s++) {
        int len = b->cu[s + 1] - b->cu[s], want = x->t->drafter.anchors, got;

        if (want > x->max_blocks - n)
            want = x->max_blocks - n;
        got = mr_anchors(b->mask + b->cu[s], len, want, x->t->run.seed, b->epoch, b->sample[s], x->pos + n);
        for (int i = 0; i < got; i++)
            x->seq[n + i] = s;
        n += got;
    }
    return n;
}

/* Where to read a slab: in place, or from the staging place that it was prefetched into.  The newest first: an older one of the same address is
 * of a microbatch that was given back. */
static int locate(struct drafter *x, const void *slab, const void **features)
{
    *features = slab;
    for (unsigned i = 1; x->stage.pull && i <= 2; i++) {
        unsigned p = (x->stage.next + i) % 2;

        if (x->stage.src[p] != slab)
            continue;
        *features = x->stage.buf[p];
        x->stage.src[p] = NULL;
        return mr_k_cuda_pull_use(x->k, x->stage.pull, (int)p);
    }
    return 0;
}

static int use_param(struct drafter *x, const float *param)
{
    int rc = x->current == param ? 0 : mr_dflash_set_param(x->d, param);

    if (!rc)
        x->current = param;
    return rc;
}

static int drafter_accumulate(void *self, const struct mr_batch *b, const void *slab, const float *param, float *acc,
                              struct mr_draft_stats *st, struct mr_err *err)
{
    struct drafter *x = self;
    struct mr_dflash_batch d = {.n_seqs = b->n_seqs, .n_tokens = b->n_tokens, .ids = b->ids, .cu = b->cu, .mask = b->mask,
                                .seq = x->seq, .pos = x->pos};
    struct mr_dflash_result r;
    int rc;

    d.n_blocks = draw(x, b);
    rc = use_param(x, param);
    if (!rc)
        rc = locate(x, slab, &d.features);
    if (!rc)
        rc = mr_dflash_accumulate(x->d, &d, acc, &r);
    if (rc)
        return failed(err, "drafter forward and backward", x->k, rc);
    *st = (struct mr_draft_stats){.loss_sum = r.loss_sum, .weight_sum = r.weight_sum, .blocks = r.blocks, .accepted = r.accepted,
                                  .labels = r.labels, .correct = r.correct, .draft_tokens = (uint32_t)r.rows};
    memcpy(st->slot, r.slot, sizeof st->slot);
    return 0;
}

static int drafter_sum(void *self, const float *const *src, int n, float *dst)
{
    struct drafter *x = self;
    int rc = x->k->op->sum(x->k, x->P, src, n, dst);

    return rc ? rc : x->k->op->sync(x->k);
}

static int drafter_zero(void *self, float *acc)
{
    struct drafter *x = self;
    int rc = x->k->op->zero(x->k, acc, x->P * sizeof *acc);

    return rc ? rc : x->k->op->sync(x->k);
}

/* A step without a single label moves nothing, not even the moments. */
static int carry_over(struct drafter *x, const struct mr_drafter_view *v, int from)
{
    const struct mr_k_ops *op = x->k->op;
    size_t bytes = x->P * sizeof(float);
    int rc = op->d2d(x->k, v->param[!from], v->param[from], bytes);

    if (!rc)
        rc = op->d2d(x->k, v->m[!from], v->m[from], bytes);
    if (!rc)
        rc = op->d2d(x->k, v->v[!from], v->v[from], bytes);
    return rc ? rc : op->sync(x->k);
}

static int adamw(struct drafter *x, const struct mr_drafter_view *v, unsigned step, unsigned total, double scale)
{
    const struct mr_topology *t = x->t;
    double lr = mr_lr_at(t->train.lr, t->train.warmup_ratio, t->train.constant_lr, step, total);
    float b1 = (float)t->train.beta1, b2 = (float)t->train.beta2;      /* the corrections belong to the rates that the kernel uses */
    double bc1 = 1.0 - pow((double)b1, step + 1.0), bc2 = 1.0 - pow((double)b2, step + 1.0);
    int a = (int)(step % 2), b = !a, rc;

    rc = x->k->op->adamw(x->k, x->P, v->param[a], v->m[a], v->v[a], v->reduced, (float)scale, (float)lr, b1, b2,
                         (float)t->train.eps, (float)t->train.weight_decay, (float)bc1, (float)bc2, v->param[b], v->m[b], v->v[b]);
    return rc ? rc : x->k->op->sync(x->k);
}

static int drafter_apply(void *self, const struct mr_drafter_view *v, unsigned step, unsigned steps_total, double weight, double *norm,
                         struct mr_err *err)
{
    struct drafter *x = self;
    double sumsq, scale, clip = x->t->train.clip;
    int rc;

    *norm = 0.0;
    x->current = NULL;           /* the next state is written where the last but one was */
    if (weight <= 0) {
        rc = carry_over(x, v, (int)(step % 2));
        return rc ? failed(err, "optimizer step", x->k, rc) : 0;
    }
    rc = x->k->op->sumsq(x->k, x->P, v->reduced, &sumsq);
    if (rc)
        return failed(err, "gradient norm", x->k, rc);
    *norm = sqrt(sumsq) / weight;
    if (!isfinite(*norm))
        return mr_err_set(err, MR_EXIT_FAILED,
                          "step %u: the gradient's norm is %f: not one parameter was changed; the learning rate %g is probably "
                          "too high, or the target's hidden states are not finite",
                          step, *norm, x->t->train.lr);
    scale = 1.0 / weight;
    if (clip > 0 && *norm + 1e-6 > clip)
        scale *= clip / (*norm + 1e-6);
    rc = adamw(x, v, step, steps_total, scale);
    return rc ? failed(err, "optimizer step", x->k, rc) : 0;
}

/* ---- GPU --------------------------------------------------------------------------------------------------------------------------- */

static int drafter_put(void *self, float *dst, const float *host, size_t n)
{
    struct drafter *x = self;
    int rc = x->k->op->h2d(x->k, dst, host, n * sizeof *dst);

    x->current = NULL;
    return rc ? rc : x->k->op->sync(x->k);
}

static void *drafter_read_block(void *self, int i)
{
    struct drafter *x = self;

    if (!x->reader)
        x->reader = mr_k_cuda_reader_create(x->k, MR_ST_BLOCKS, MR_ST_BLOCK);
    return x->reader ? mr_k_cuda_reader_block(x->reader, i) : NULL;
}

static int drafter_read(void *self, void *host, const void *src, size_t bytes)
{
    struct drafter *x = self;

    return mr_k_cuda_reader_read(x->reader, host, src, bytes);
}

static int drafter_prefetch(void *self, const void *slab, int n_tokens, struct mr_err *err)
{
    struct drafter *x = self;
    unsigned p = x->stage.next;
    size_t bytes = (size_t)n_tokens * (size_t)x->columns * (size_t)x->k->act_bytes;
    int rc = mr_k_cuda_pull_begin(x->k, x->stage.pull, (int)p, x->stage.buf[p], slab, bytes);

    if (rc)
        return failed(err, "pulling hidden states", x->k, rc);
    x->stage.src[p] = slab;
    x->stage.next = 1 - p;
    return 0;
}

/* ---- life -------------------------------------------------------------------------------------------------------------------------- */

static void drafter_destroy(void *self)
{
    struct drafter *x = self;

    mr_dflash_destroy(x->d);
    mr_frozen_release(&x->frozen);
    mr_tlayout_free(&x->lent);
    if (x->stage.pull)
        mr_k_cuda_pull_destroy(x->k, x->stage.pull);
    for (int i = 0; i < 2 && x->k; i++)
        if (x->stage.buf[i])
            x->k->op->release(x->k, x->stage.buf[i]);
    if (x->reader)
        mr_k_cuda_reader_destroy(x->reader);
    mr_backend_close(x->k);
    free(x->seq);
    free(x->pos);
    free(x);
}

static int load_frozen(struct drafter *x, struct mr_err *err)
{
    struct mr_model_config c;
    struct mr_model_files files;
    int rc;

    if (mr_model_config_load(&c, x->t->target.checkpoint, err) || mr_model_files_open(&files, &c, x->t->target.checkpoint, err))
        return -1;
    rc = mr_frozen_load(&x->frozen, x->k, &files, &c, 1, err);
    mr_model_files_close(&files);
    return rc;
}

/* Embedding and head in the keeper's block of weights.  -1 with err not set: the run is over. */
static int lend_frozen(struct drafter *x, struct mr_env *env, struct mr_err *err)
{
    void *base;

    if (mr_check_weights(x->c, env->topo, (int)env->topo->actor[env->slot].device_index, x->k->act_bytes, &x->lent))
        return mr_err_set(err, MR_EXIT_ENV, "out of memory");
    if (mr_weights_map(env, x->k, &x->lent, &base, err))
        return -1;
    mr_frozen_lend(&x->frozen, x->k, &x->c->target, &x->lent, base);
    return 0;
}

static int open_stage(struct drafter *x, struct mr_err *err)
{
    size_t bytes = (size_t)x->t->data.token_budget * (size_t)x->columns * (size_t)x->k->act_bytes;

    x->stage.pull = mr_k_cuda_pull_create(x->k);
    for (int i = 0; i < 2; i++)
        x->stage.buf[i] = x->k->op->alloc(x->k, bytes);
    if (!x->stage.pull || !x->stage.buf[0] || !x->stage.buf[1])
        return mr_err_set(err, MR_EXIT_ENV, "out of device memory for two staging places of %zu bytes", bytes);
    return 0;
}

static double ms_since(uint64_t *t)
{
    uint64_t now = mr_now_ns(), from = *t;

    *t = now;
    return (double)(now - from) * 1e-6;
}

static int drafter_open(struct drafter *x, struct mr_env *env, unsigned slot, struct mr_err *err)
{
    const struct mr_topology *t = x->t;
    const struct mr_topo_actor *a = &t->actor[slot];
    struct mr_dflash_opts o = {.gamma = t->train.loss_decay, .loss = t->train.loss, .train = 1, .rows = MR_DFLASH_LABELLED};
    struct mr_drafter_chunk chunk;
    uint64_t at = mr_now_ns();
    double context, weights;

    x->k = mr_backend_open(a->device, a->threads, t->train.deterministic, err);
    if (!x->k)
        return -1;
    context = ms_since(&at);
    x->on_gpu = strcmp(x->k->op->name, "cpu") != 0;
    x->columns = x->c->drafter.K * x->c->drafter.target_hidden;
    chunk = mr_drafter_chunk_of(t, x->c->drafter.block_size, x->c->plan_opts.max_seqs, x->k->act_bytes);
    x->max_blocks = chunk.max_blocks;
    x->seq = malloc((size_t)x->max_blocks * sizeof *x->seq);
    x->pos = malloc((size_t)x->max_blocks * sizeof *x->pos);
    if (!x->seq || !x->pos)
        return mr_err_set(err, MR_EXIT_ENV, "out of memory");
    if (x->on_gpu && env ? lend_frozen(x, env, err) : load_frozen(x, err))
        return -1;
    weights = ms_since(&at);
    if (mr_check_pulls(t, (int)a->device_index) && x->on_gpu && open_stage(x, err))
        return -1;
    o.max_tokens = chunk.max_tokens;
    o.max_seqs = chunk.max_seqs;
    o.max_blocks = chunk.max_blocks;
    o.chunk_rows = chunk.rows;
    x->d = mr_dflash_create(x->k, &x->c->drafter, &x->c->layout, &x->frozen, &o, err);
    if (x->d && x->on_gpu && env)
        mr_info("%s: context %.0f ms, weights %.0f ms, activations %.0f ms", a->device, context, weights, ms_since(&at));
    return x->d ? 0 : -1;
}

int mr_model_drafter_create(struct mr_drafter_engine *e, struct mr_env *env, const struct mr_topology *t, const struct mr_checked *c,
                            unsigned slot, struct mr_err *err)
{
    struct drafter *x = calloc(1, sizeof *x);

    if (!x)
        return mr_err_set(err, MR_EXIT_ENV, "out of memory");
    x->t = t;
    x->c = c;
    x->P = c->layout.P;
    if (drafter_open(x, env, slot, err)) {
        drafter_destroy(x);
        return -1;
    }
    *e = (struct mr_drafter_engine){.self = x, .accumulate = drafter_accumulate, .sum = drafter_sum, .apply = drafter_apply,
                                    .zero = drafter_zero, .destroy = drafter_destroy,
                                    .failure = x->on_gpu ? MR_EXIT_CUDA : MR_EXIT_FAILED};
    if (x->on_gpu) {
        e->k = x->k;
        e->put = drafter_put;
        e->read_block = drafter_read_block;
        e->read = drafter_read;
        e->prefetch = x->stage.pull ? drafter_prefetch : NULL;
    }
    return 0;
}
