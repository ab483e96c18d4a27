/* train_demo TOPO.json [DIR] [STEPS]: a whole run in one process and one thread, without rings, slabs or recovery.
 *
 * It is what the actors compute, in plan order, and nothing else: for profiling the models and kernels, and as the yardstick of what
 * the runtime costs.  The first target and the first drafter of the topology compute.  DIR, when given, receives a drafter checkpoint.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "actors/actors.h"
#include "base/clock.h"
#include "data/plan.h"

struct trainer {
    struct mr_topology t;
    struct mr_checked c;
    struct mr_target_engine target;
    struct mr_drafter_engine drafter;
    struct mr_drafter_view v;
    struct mr_batch b;
    int32_t *ids, *cu;
    uint8_t *mask;
    void *slab;
    float *block;
    uint64_t ns[3];              /* target, drafter, optimizer */
    uint64_t tokens, draft_tokens;
    double loss, weight;         /* of the step */
    double last20;               /* mean loss of the last 20 steps */
    struct mr_err err;
};

static void die(const struct trainer *x, const char *what)
{
    fprintf(stderr, "train_demo: %s%s%s\n", what, x->err.code ? ": " : "", x->err.msg);
    exit(1);
}

static void *take(const struct trainer *x, size_t bytes)
{
    void *p = aligned_alloc(256, (bytes + 255) & ~(size_t)255);

    if (!p)
        die(x, "out of memory");
    return memset(p, 0, bytes);
}

static unsigned slot_of(const struct trainer *x, enum mr_kind kind)
{
    for (int i = 0; i < x->t.n_actors; i++)
        if (x->t.actor[i].kind == kind)
            return (unsigned)i;
    die(x, "the topology has no such actor");
    return 0;
}

static void open_all(struct trainer *x, const char *topology)
{
    uint64_t P;
    size_t T;

    if (mr_topology_load(&x->t, topology, NULL, 0, &x->err) || mr_check(&x->c, &x->t, MR_CHECK_PLAN, &x->err))
        die(x, "topology");
    P = x->v.P = x->c.layout.P;
    T = (size_t)x->t.data.token_budget;
    x->block = take(x, 8 * P * sizeof(float));
    for (int i = 0; i < 2; i++) {
        x->v.param[i] = x->block + (size_t)i * P;
        x->v.m[i] = x->block + (size_t)(2 + i) * P;
        x->v.v[i] = x->block + (size_t)(4 + i) * P;
    }
    x->v.acc = x->block + 6 * P;
    x->v.reduced = x->block + 7 * P;
    mr_drafter_init(&x->c.layout, x->v.param[0], x->t.run.seed, x->t.drafter.init_std);
    x->ids = take(x, T * sizeof *x->ids);
    x->mask = take(x, T);
    x->cu = take(x, ((size_t)x->c.plan_opts.max_seqs + 1) * sizeof *x->cu);
    x->slab = take(x, x->c.slab_bytes);
    if (mr_target_engine_create(&x->target, &x->t, &x->c, slot_of(x, MR_TARGET), &x->err) ||
        mr_drafter_engine_create(&x->drafter, &x->t, &x->c, slot_of(x, MR_DRAFTER), &x->err))
        die(x, "engine");
}

static void fill_batch(struct trainer *x, const struct mr_plan *p, uint32_t pos, unsigned epoch)
{
    const struct mr_plan_entry *e = &p->entry[pos];

    x->b = (struct mr_batch){.pos = pos, .epoch = epoch, .bucket = e->bucket, .n_seqs = (int)e->n_seqs, .ids = x->ids, .cu = x->cu,
                             .mask = x->mask, .sample = p->sample + e->first_sample};
    for (int s = 0; s < x->b.n_seqs; s++) {
        struct mr_row row = mr_dataset_row(x->c.data, x->b.sample[s]);

        memcpy(x->ids + x->b.n_tokens, row.ids, (size_t)row.n * sizeof *row.ids);
        memcpy(x->mask + x->b.n_tokens, row.mask, (size_t)row.n);
        x->b.n_tokens += row.n;
        x->cu[s + 1] = x->b.n_tokens;
    }
}

static void microbatch(struct trainer *x, unsigned step)
{
    struct mr_draft_stats st;
    uint64_t t0 = mr_now_ns(), t1;

    if (x->target.forward(x->target.self, &x->b, x->slab, &x->err))
        die(x, "target");
    t1 = mr_now_ns();
    if (x->drafter.accumulate(x->drafter.self, &x->b, x->slab, x->v.param[step % 2], x->v.acc, &st, &x->err))
        die(x, "drafter");
    x->ns[0] += t1 - t0;
    x->ns[1] += mr_now_ns() - t1;
    x->tokens += (uint64_t)x->b.n_tokens;
    x->draft_tokens += st.draft_tokens;
    x->loss += st.loss_sum;
    x->weight += st.weight_sum;
}

static void optimizer(struct trainer *x, unsigned step, unsigned steps)
{
    const float *src[1] = {x->v.acc};
    uint64_t t0 = mr_now_ns();
    double norm;

    if (x->drafter.sum(x->drafter.self, src, 1, x->v.reduced) ||
        x->drafter.apply(x->drafter.self, &x->v, step, steps, x->weight, &norm, &x->err) || x->drafter.zero(x->drafter.self, x->v.acc))
        die(x, "optimizer");
    x->ns[2] += mr_now_ns() - t0;
    if (step % 50 == 0 || step + 1 == steps)
        fprintf(stderr, "step %u of %u  loss %.4f  gradient norm %.3f  %.0f tokens/s\n", step + 1, steps, x->loss / x->weight, norm,
                (double)x->tokens / (1e-9 * (double)(x->ns[0] + x->ns[1] + x->ns[2])));
    if (step + 20 >= steps)
        x->last20 += x->loss / x->weight / 20;
    x->loss = x->weight = 0;
}

static void save(struct trainer *x, const char *dir, unsigned step)
{
    char path[4096];

    mkdir(dir, 0777);
    snprintf(path, sizeof path, "%s/config.json", dir);
    if (mr_drafter_config_save(&x->c.drafter, path, &x->err))
        die(x, "save");
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    if (mr_drafter_weights_save(&x->c.layout, x->v.param[step % 2], NULL, path, &x->err))
        die(x, "save");
}

int main(int argc, char **argv)
{
    static struct trainer x;
    unsigned step = 0, steps, last;
    uint32_t M;

    if (argc < 2 || argc > 4) {
        fprintf(stderr, "usage: train_demo TOPO.json [DIR] [STEPS]\n");
        return 2;
    }
    open_all(&x, argv[1]);
    M = (uint32_t)mr_topo_places(&x.t);
    steps = x.c.epoch[x.t.train.epochs].first_step;
    last = argc > 3 ? (unsigned)atoi(argv[3]) : steps;
    for (unsigned e = 0; e < (unsigned)x.t.train.epochs && step < last; e++) {
        struct mr_plan p;

        if (mr_plan_make(&p, x.c.data, &x.c.plan_opts, e, &x.err))
            die(&x, "plan");
        for (uint32_t i = 0; i < p.n && step < last; i++) {
            fill_batch(&x, &p, i, e);
            microbatch(&x, step);
            if ((i + 1) % M == 0 || i + 1 == p.n)
                optimizer(&x, step++, steps);
        }
        mr_plan_free(&p);
    }
    printf("mean loss of the last 20 steps: %.4f\n", x.last20);
    printf("%llu tokens, %llu draft tokens; per 1000 tokens: target %.4f s, drafter %.4f s, optimizer %.4f s; %.0f tokens/s\n",
           (unsigned long long)x.tokens, (unsigned long long)x.draft_tokens, 1e-6 * (double)x.ns[0] / (double)x.tokens,
           1e-6 * (double)x.ns[1] / (double)x.tokens, 1e-6 * (double)x.ns[2] / (double)x.tokens,
           (double)x.tokens / (1e-9 * (double)(x.ns[0] + x.ns[1] + x.ns[2])));
    if (argc > 2)
        save(&x, argv[2], step);
    x.target.destroy(x.target.self);
    x.drafter.destroy(x.drafter.self);
    mr_checked_free(&x.c);
    mr_topology_free(&x.t);
    free(x.block);
    free(x.ids);
    free(x.mask);
    free(x.cu);
    free(x.slab);
    return 0;
}
