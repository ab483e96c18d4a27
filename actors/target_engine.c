/* The target engine that computes: a target model over a kernel table, as the actor sees it (actors/engine.h).
 *
 * On a GPU the work of two microbatches is in the stream at once: the activations are one set, used in stream order, and what differs is the
 * slab and a mark behind the work.  Slabs are the keeper's bf16 memory, written by the captures themselves; or, when all drafters are on the
 * cpu, f32 in /dev/shm: then the features are converted on the device, copied into a pinned buffer, and from there into the slab when the
 * mark has passed.  A slab is complete before finish returns: nobody else ever waits for this process's GPU work. */
#include <stdlib.h>
#include <string.h>

#include "actors/actors.h"
#include "actors/backend.h"
#include "actors/target_model.h"
#include "base/clock.h"
#include "base/log.h"

struct flight {
    struct mr_k_mark *done;
    float *host;                 /* pinned, only with host slabs */
    void *slab;
    size_t bytes;
};

struct target {
    struct mr_k *k;
    struct mr_tlayout layout;
    struct mr_target_model *m;
    int on_gpu, columns;         /* of a slab row: K * H */
    void *features;              /* only with host slabs: (max_tokens, columns) act, and f32 */
    float *f32;
    struct flight flight[2];
};

static int failed(struct mr_err *err, const struct mr_k *k, int rc)
{
    return mr_err_set(err, strcmp(k->op->name, "cpu") ? MR_EXIT_CUDA : MR_EXIT_FAILED, "target forward on the %s backend failed: %s",
                      k->op->name, strerror(-rc));
}

static int forward(void *self, const struct mr_batch *b, void *slab, struct mr_err *err)
{
    struct target *t = self;
    int rc = mr_target_model_forward(t->m, b->n_seqs, b->n_tokens, b->ids, b->cu, slab, NULL);

    return rc ? failed(err, t->k, rc) : 0;
}

/* ---- GPU ------------------------------------------------------------------------------------------------------------------------------ */

static int begin(void *self, unsigned place, const struct mr_batch *b, void *slab, struct mr_err *err)
{
    struct target *t = self;
    struct flight *f = &t->flight[place];
    size_t n = (size_t)b->n_tokens * (size_t)t->columns;
    int rc = mr_target_model_issue(t->m, b->n_seqs, b->n_tokens, b->ids, b->cu, f->host ? t->features : slab, NULL);

    f->slab = slab;
    f->bytes = n * sizeof(float);
    if (!rc && f->host)
        rc = t->k->op->act_to_f32(t->k, t->f32, t->features, n);
    if (!rc && f->host)
        rc = t->k->op->d2h(t->k, f->host, t->f32, f->bytes);
    if (!rc)
        rc = mr_k_cuda_mark_set(t->k, f->done);
    return rc ? failed(err, t->k, rc) : 0;
}

static int finish(void *self, unsigned place, struct mr_err *err)
{
    struct target *t = self;
    struct flight *f = &t->flight[place];
    int rc = mr_k_cuda_mark_wait(t->k, f->done);

    if (rc)
        return failed(err, t->k, rc);
    if (f->host)
        memcpy(f->slab, f->host, f->bytes);
    return 0;
}

static int gpu_forward(void *self, const struct mr_batch *b, void *slab, struct mr_err *err)
{
    return begin(self, 0, b, slab, err) || finish(self, 0, err) ? -1 : 0;
}

/* ---- life ----------------------------------------------------------------------------------------------------------------------------- */

static void destroy(void *self)
{
    struct target *t = self;

    mr_target_model_destroy(t->m);
    if (t->features)
        t->k->op->release(t->k, t->features);
    if (t->f32)
        t->k->op->release(t->k, t->f32);
    for (int i = 0; i < 2 && t->k && t->on_gpu; i++) {
        mr_k_cuda_host_free(t->k, t->flight[i].host);
        mr_k_cuda_mark_destroy(t->k, t->flight[i].done);
    }
    mr_backend_close(t->k);
    mr_tlayout_free(&t->layout);
    free(t);
}

static int open_flights(struct target *t, size_t max_tokens, int host_slabs, struct mr_err *err)
{
    size_t n = max_tokens * (size_t)t->columns;

    if (host_slabs) {
        t->features = t->k->op->alloc(t->k, n * (size_t)t->k->act_bytes);
        t->f32 = t->k->op->alloc(t->k, n * sizeof *t->f32);
        if (!t->features || !t->f32)
            return mr_err_set(err, MR_EXIT_ENV, "out of device memory for %zu bytes of hidden states on their way to the cpu",
                              n * (sizeof *t->f32 + (size_t)t->k->act_bytes));
    }
    for (int i = 0; i < 2; i++) {
        t->flight[i].done = mr_k_cuda_mark_create(t->k);
        if (host_slabs)
            t->flight[i].host = mr_k_cuda_host_alloc(t->k, n * sizeof(float));
        if (!t->flight[i].done || (host_slabs && !t->flight[i].host))
            return mr_err_set(err, MR_EXIT_ENV, "no %zu bytes of pinned host memory for hidden states; lower /data/token_budget, or move the "
                                                "drafters to a GPU", n * sizeof(float));
    }
    return 0;
}

/* The keeper's weights.  -1 with err not set: the run is over. */
static int lent_weights(struct target *t, struct mr_env *env, const struct mr_checked *c, struct mr_target_model_opts *o, struct mr_err *err)
{
    void *base;

    if (mr_check_weights(c, env->topo, (int)env->topo->actor[env->slot].device_index, t->k->act_bytes, &t->layout))
        return mr_err_set(err, MR_EXIT_ENV, "out of memory");
    if (mr_weights_map(env, t->k, &t->layout, &base, err))
        return -1;
    o->weights = base;
    o->layout = &t->layout;
    return 0;
}

static double ms_since(uint64_t *t)
{
    uint64_t now = mr_now_ns(), from = *t;

    *t = now;
    return (double)(now - from) * 1e-6;
}

static int open_target(struct target *x, struct mr_env *env, const struct mr_topology *t, const struct mr_checked *c, unsigned slot,
                       struct mr_err *err)
{
    const struct mr_topo_actor *a = &t->actor[slot];
    struct mr_target_model_opts o = {.layers = c->drafter.layer_ids, .n_layers = c->drafter.K, .max_tokens = t->data.token_budget,
                                     .max_positions = t->data.max_tokens, .max_seqs = c->plan_opts.max_seqs};
    uint64_t at = mr_now_ns();
    double context, weights;

    x->k = mr_backend_open(a->device, a->threads, t->train.deterministic, err);
    if (!x->k)
        return -1;
    x->on_gpu = strcmp(x->k->op->name, "cpu") != 0;
    x->columns = c->drafter.K * c->target.hidden_size;
    context = ms_since(&at);
    if (x->on_gpu && env && lent_weights(x, env, c, &o, err))
        return -1;
    weights = ms_since(&at);
    x->m = mr_target_model_create(x->k, t->target.checkpoint, &o, err);
    if (!x->m || (x->on_gpu && open_flights(x, (size_t)o.max_tokens, c->slab_elem == 4, err)))
        return -1;
    if (x->on_gpu)
        mr_info("%s: context %.0f ms, weights %.0f ms, activations %.0f ms", a->device, context, weights, ms_since(&at));
    return 0;
}

int mr_model_target_create(struct mr_target_engine *e, struct mr_env *env, const struct mr_topology *t, const struct mr_checked *c,
                           unsigned slot, struct mr_err *err)
{
    struct target *x = calloc(1, sizeof *x);

    if (!x)
        return mr_err_set(err, MR_EXIT_ENV, "out of memory");
    if (open_target(x, env, t, c, slot, err)) {
        destroy(x);
        return -1;
    }
    *e = (struct mr_target_engine){.self = x, .forward = x->on_gpu ? gpu_forward : forward, .destroy = destroy};
    if (x->on_gpu) {
        e->begin = begin;
        e->finish = finish;
    }
    return 0;
}
