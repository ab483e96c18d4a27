/* The drafter engine that computes: a model over a kernel table, as the actor sees it (actors/engine.h).
 *
 * A drafter engine is a DFlash object, the target's frozen embedding and head, and the optimizer; it
 * keeps no training state: parameters, moments and gradients are the caller's (they live in an arena that outlives the actor), so every
 * call is a pure function of its arguments and a new incarnation goes on where the dead one stopped.
 * The anchors of a sample are a pure function of (seed, epoch, sample id): whoever drafts it, and however often, draws the same blocks.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "actors/actors.h"
#include "actors/backend.h"
#include "actors/dflash.h"
#include "actors/target_model.h"

/* Block rows computed at a time: enough for the products to run at full speed, few enough to stay in the second-level cache. */
enum { CPU_CHUNK_ROWS = 512, CUDA_CHUNK_ROWS = 8192 };

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
    struct mr_dflash *d;
    int max_blocks;
    int32_t *seq, *pos;          /* (max_blocks) anchors of the microbatch */
    uint64_t P;
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

static int drafter_accumulate(void *self, const struct mr_batch *b, const void *slab, const float *param, float *acc,
                              struct mr_draft_stats *st, struct mr_err *err)
{
    struct drafter *x = self;
    struct mr_dflash_batch d = {.n_seqs = b->n_seqs, .n_tokens = b->n_tokens, .ids = b->ids, .cu = b->cu, .mask = b->mask, .features = slab,
                                .seq = x->seq, .pos = x->pos};
    struct mr_dflash_result r;
    int rc;

    d.n_blocks = draw(x, b);
    rc = mr_dflash_set_param(x->d, param);
    if (!rc)
        rc = mr_dflash_accumulate(x->d, &d, acc, &r);
    if (rc)
        return failed(err, "drafter forward and backward", x->k, rc);
    *st = (struct mr_draft_stats){.loss_sum = r.loss_sum, .weight_sum = r.weight_sum, .blocks = r.blocks, .accepted = r.accepted,
                                  .labels = r.labels, .correct = r.correct, .draft_tokens = (uint32_t)r.rows};
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

static void drafter_destroy(void *self)
{
    struct drafter *x = self;

    mr_dflash_destroy(x->d);
    mr_frozen_release(&x->frozen);
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

static int drafter_open(struct drafter *x, const struct mr_topo_actor *a, struct mr_err *err)
{
    const struct mr_topology *t = x->t;
    struct mr_dflash_opts o = {.max_tokens = t->data.token_budget, .max_seqs = x->c->plan_opts.max_seqs, .gamma = t->train.loss_decay,
                               .loss = t->train.loss, .train = 1, .rows = MR_DFLASH_LABELLED};
    long blocks = (long)o.max_seqs * t->drafter.anchors;

    /* A sample of n tokens has at most n - 1 anchors. */
    x->max_blocks = o.max_blocks = blocks < o.max_tokens ? (int)blocks : o.max_tokens;
    x->seq = malloc((size_t)x->max_blocks * sizeof *x->seq);
    x->pos = malloc((size_t)x->max_blocks * sizeof *x->pos);
    if (!x->seq || !x->pos)
        return mr_err_set(err, MR_EXIT_ENV, "out of memory");
    x->k = mr_backend_open(a->device, a->threads, t->train.deterministic, err);
    if (!x->k || load_frozen(x, err))
        return -1;
    o.chunk_rows = x->k->act_bytes == 4 ? CPU_CHUNK_ROWS : CUDA_CHUNK_ROWS;
    x->d = mr_dflash_create(x->k, &x->c->drafter, &x->c->layout, &x->frozen, &o, err);
    return x->d ? 0 : -1;
}

int mr_model_drafter_create(struct mr_drafter_engine *e, const struct mr_topology *t, const struct mr_checked *c, unsigned slot,
                            struct mr_err *err)
{
    struct drafter *x = calloc(1, sizeof *x);

    if (!x)
        return mr_err_set(err, MR_EXIT_ENV, "out of memory");
    x->t = t;
    x->c = c;
    x->P = c->layout.P;
    if (drafter_open(x, &t->actor[slot], err)) {
        drafter_destroy(x);
        return -1;
    }
    *e = (struct mr_drafter_engine){.self = x, .accumulate = drafter_accumulate, .sum = drafter_sum, .apply = drafter_apply,
                                    .zero = drafter_zero, .destroy = drafter_destroy};
    return 0;
}
