/* What `millrace check` and every start compute before any actor exists: see check.h. */
#include "data/check.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "base/limits.h"

/* ---- models --------------------------------------------------------------------------------------------------------------- */

static int check_target(struct mr_checked *c, const struct mr_topology *t, struct mr_err *err)
{
    struct mr_model_files f;

    if (!strncmp(t->target.checkpoint, "synthetic:", 10)) {
        c->synthetic = 1;
        return mr_model_config_synthetic(&c->target, t->target.checkpoint, err);
    }
    if (mr_model_config_load(&c->target, t->target.checkpoint, err) || mr_model_files_open(&f, &c->target, t->target.checkpoint, err))
        return -1;
    c->target_fingerprint = mr_model_fingerprint(&c->target, &f);
    c->target_content = mr_model_content(&f, &c->target);
    mr_model_files_close(&f);
    return 0;
}

/* A drafter to start from must read the same target layers and have the same parameters; block size and window may differ. */
static int check_init(const struct mr_checked *c, const struct mr_topology *t, struct mr_err *err)
{
    const char *dir = t->drafter.init + strlen("checkpoint:");
    struct mr_drafter_config from;
    char path[MR_PATH + 32];

    if (!strcmp(t->drafter.init, "normal"))
        return 0;
    if (mr_drafter_config_load(&from, dir, err))
        return -1;
    if (from.K != c->drafter.K || memcmp(from.layer_ids, c->drafter.layer_ids, sizeof(int) * (size_t)from.K) ||
        from.target_layers != c->drafter.target_layers)
        return mr_json_error(&t->src, "/drafter/init", err,
                             "%s was trained on other layers of a target with %d layers; here target/layers and the "
                             "target's %d layers are wanted",
                             dir, from.target_layers, c->drafter.target_layers);
    if (from.mask_token_id != c->drafter.mask_token_id)
        return mr_json_error(&t->src, "/drafter/mask_token_id", err, "is %d, but %s was trained with %d", c->drafter.mask_token_id, dir,
                             from.mask_token_id);
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    return mr_drafter_weights_load(&c->layout, NULL, path, err);
}

static int check_models(struct mr_checked *c, const struct mr_topology *t, struct mr_err *err)
{
    if (check_target(c, t, err) || mr_drafter_config_make(&c->drafter, t, &c->target, err))
        return -1;
    if (mr_dlayout_make(&c->layout, &c->drafter))
        return mr_err_set(err, MR_EXIT_ENV, "out of memory");
    if (t->data.max_tokens > c->target.max_position)
        return mr_json_error(&t->src, "/data/max_tokens", err, "is %d, but the target knows positions below max_position_embeddings = %d",
                             t->data.max_tokens, c->target.max_position);
    return check_init(c, t, err);
}

/* What the attention of the cuda backend can do. */
static int check_heads(const struct mr_checked *c, const struct mr_topology *t, struct mr_err *err)
{
    for (int i = 0; i < t->n_actors; i++)
        if (t->actor[i].kind == MR_DRAFTER && t->actor[i].engine == MR_ENGINE_CUDA && (c->drafter.head_dim % 8 || c->drafter.head_dim > 128))
            return mr_json_error(&t->src, "/drafter/head_dim", err, "is %d; on a GPU a multiple of 8, at most 128, is wanted", c->drafter.head_dim);
    return 0;
}

/* ---- slabs ---------------------------------------------------------------------------------------------------------------- */

static void slab_arithmetic(struct mr_checked *c, const struct mr_topology *t)
{
    int gpu_targets = 0, gpu_drafters = 0;

    for (int i = 0; i < t->n_actors; i++) {
        gpu_targets |= t->actor[i].kind == MR_TARGET && t->actor[i].engine == MR_ENGINE_CUDA;
        gpu_drafters |= t->actor[i].kind == MR_DRAFTER && t->actor[i].engine == MR_ENGINE_CUDA;
    }
    c->slab_elem = gpu_targets && gpu_drafters ? 2 : 4;
    c->n_slabs = mr_topo_slabs(t);
    c->slab_bytes = (uint64_t)t->data.token_budget * (uint64_t)c->drafter.K * (uint64_t)c->target.hidden_size * (uint64_t)c->slab_elem;
    c->slab_bytes = (c->slab_bytes + 255) / 256 * 256;
}

int mr_check_depth(const struct mr_checked *c)
{
    int depth = 0;

    for (int i = 0; i < c->drafter.K; i++)
        depth = c->drafter.layer_ids[i] + 1 > depth ? c->drafter.layer_ids[i] + 1 : depth;
    return depth;
}

int mr_check_weights(const struct mr_checked *c, const struct mr_topology *t, int d, int elem, struct mr_tlayout *l)
{
    unsigned parts = 0;

    for (int i = 0; i < t->n_actors; i++) {
        const struct mr_topo_actor *a = &t->actor[i];

        if (a->device_index != (unsigned)d || a->engine != MR_ENGINE_CUDA)
            continue;
        parts |= a->kind == MR_TARGET ? MR_TL_LAYERS | MR_TL_EMBED : a->kind == MR_DRAFTER ? MR_TL_EMBED | MR_TL_HEAD : 0;
    }
    return mr_tlayout_make(l, &c->target, mr_check_depth(c), parts, elem);
}

int mr_check_pulls(const struct mr_topology *t, int d)
{
    for (int i = 0; i < t->n_actors; i++)
        if (t->actor[i].kind == MR_TARGET && t->actor[i].device_index != (unsigned)d)
            return 1;
    return 0;
}

/* A CUDA context with cuBLAS and its workspace, measured: 0.6 GiB on an H200. */
#define MR_CONTEXT_BYTES ((uint64_t)640 << 20)

static void drafter_work(struct mr_drafter_work *w, struct mr_drafter_chunk *k, const struct mr_checked *c, const struct mr_topology *t, int d)
{
    *k = mr_drafter_chunk_of(t, c->drafter.block_size, c->plan_opts.max_seqs, 2);
    mr_drafter_work_bytes(w, &c->drafter, c->layout.P, k, 2,
                          (mr_check_pulls(t, d) ? 2 * c->slab_bytes : 0) + (t->train.bf16_wire ? 2 * c->layout.P : 0));
}

uint64_t mr_check_working(const struct mr_checked *c, const struct mr_topology *t, int d)
{
    uint64_t features = (uint64_t)t->data.token_budget * (uint64_t)c->drafter.K * (uint64_t)c->target.hidden_size, sum = 0;

    for (int i = 0; i < t->n_actors; i++) {
        const struct mr_topo_actor *a = &t->actor[i];

        if (a->device_index != (unsigned)d || a->engine != MR_ENGINE_CUDA || a->kind == MR_KEEPER)
            continue;
        sum += MR_CONTEXT_BYTES;
        if (a->kind == MR_TARGET)
            sum += mr_target_work_bytes(&c->target, t->data.token_budget, c->plan_opts.max_seqs, 2) + (c->slab_elem == 4 ? 6 * features : 0);
        if (a->kind == MR_DRAFTER) {
            struct mr_drafter_chunk k;
            struct mr_drafter_work w;

            drafter_work(&w, &k, c, t, d);
            sum += w.total;
        }
    }
    return sum;
}

/* ---- data and plan -------------------------------------------------------------------------------------------------------- */

static int check_data(struct mr_checked *c, const struct mr_topology *t, struct mr_err *err)
{
    const struct mr_dataset_opts o = {.vocab_rows = c->target.vocab_size,
                                      .skip_bad = t->data.skip_bad,
                                      .max_tokens = t->data.max_tokens,
                                      .min_tokens = t->data.min_tokens,
                                      .truncate = t->data.truncate,
                                      .need_anchor = 1};
    const uint64_t *drop;

    c->data = mr_dataset_open(t->data.train, &o, err);
    if (!c->data)
        return -1;
    for (uint64_t i = 0; i < mr_dataset_rows(c->data); i++) {
        int n = mr_dataset_len(c->data, i);

        c->samples += n > 0;
        c->tokens += (uint64_t)n;
    }
    drop = mr_dataset_dropped(c->data);
    if (!c->samples)
        return mr_json_error(&t->src, "/data/train", err,
                             "no usable row: of %llu rows %llu too short, %llu all masked (no two supervised tokens in a "
                             "row), %llu over max_tokens = %d, %llu bad records",
                             (unsigned long long)mr_dataset_rows(c->data), (unsigned long long)drop[MR_DROP_SHORT],
                             (unsigned long long)drop[MR_DROP_MASKED], (unsigned long long)drop[MR_DROP_OVERLONG], t->data.max_tokens,
                             (unsigned long long)drop[MR_DROP_BAD]);
    return 0;
}

/* Adds epoch e to the table; the limits are those of the words in shared memory. */
static int check_epoch(struct mr_checked *c, const struct mr_topology *t, int e, struct mr_err *err)
{
    struct mr_plan p;
    uint64_t pos, step;

    if (mr_plan_make(&p, c->data, &c->plan_opts, (unsigned)e, err))
        return -1;
    pos = (uint64_t)c->epoch[e].first_pos + p.n;
    step = (uint64_t)c->epoch[e].first_step + p.steps;
    for (uint32_t i = 0; e == 0 && i < p.n; i++)
        c->bucket_n[p.entry[i].bucket]++;
    c->max_entries = p.n > c->max_entries ? p.n : c->max_entries;
    c->max_samples = p.n_samples > c->max_samples ? p.n_samples : c->max_samples;
    mr_plan_free(&p);
    if (pos > MR_POS_MAX)
        return mr_json_error(&t->src, "/data/token_budget", err,
                             "epochs 0..%d have %llu microbatches; a run has at most %u: raise it, or run fewer "
                             "epochs",
                             e, (unsigned long long)pos, MR_POS_MAX);
    if (step > MR_STEP_MAX)
        return mr_json_error(&t->src, "/train/grad_accum", err,
                             "epochs 0..%d have %llu steps; a run has at most %u: raise it, or run fewer epochs", e,
                             (unsigned long long)step, MR_STEP_MAX);
    c->epoch[e + 1] = (struct mr_epoch){.first_pos = (uint32_t)pos, .first_step = (uint32_t)step};
    return 0;
}

/* A bound that needs no plan: a million epochs are refused at once and not after a million plans. */
static int check_bound(const struct mr_checked *c, const struct mr_topology *t, struct mr_err *err)
{
    const uint64_t budget = (uint64_t)t->data.token_budget, M = (uint64_t)mr_topo_places(t), epochs = (uint64_t)t->train.epochs;
    const uint64_t items = (c->tokens + budget - 1) / budget, steps = (items + M - 1) / M;

    if (epochs * items <= MR_POS_MAX && epochs * steps <= MR_STEP_MAX)
        return 0;
    return mr_json_error(
        &t->src, "/train/epochs", err, "is %llu: at least %llu microbatches and %llu steps in all; a run has at most %u and %u",
        (unsigned long long)epochs, (unsigned long long)(epochs * items), (unsigned long long)(epochs * steps), MR_POS_MAX, MR_STEP_MAX);
}

static int check_plan(struct mr_checked *c, const struct mr_topology *t, struct mr_err *err)
{
    if (check_bound(c, t, err))
        return -1;
    c->epoch = calloc((size_t)t->train.epochs + 1, sizeof *c->epoch);
    if (!c->epoch)
        return mr_err_set(err, MR_EXIT_ENV, "out of memory for %d epochs", t->train.epochs);
    for (int e = 0; e < t->train.epochs; e++)
        if (check_epoch(c, t, e, err))
            return -1;
    return 0;
}

int mr_check(struct mr_checked *c, const struct mr_topology *t, unsigned parts, struct mr_err *err)
{
    int seqs = t->data.token_budget / t->data.min_tokens, most = t->data.max_samples ? t->data.max_samples : MR_MAX_SEQS;

    memset(c, 0, sizeof *c);
    if (check_models(c, t, err) || check_heads(c, t, err))
        return -1;
    slab_arithmetic(c, t);
    c->plan_opts = (struct mr_plan_opts){.buckets = t->data.buckets,
                                         .n_buckets = t->data.n_buckets,
                                         .token_budget = t->data.token_budget,
                                         .max_seqs = seqs < most ? seqs : most,
                                         .M = mr_topo_places(t),
                                         .seed = t->run.seed};
    if ((parts & (MR_CHECK_DATA | MR_CHECK_PLAN)) && check_data(c, t, err))
        return -1;
    return parts & MR_CHECK_PLAN ? check_plan(c, t, err) : 0;
}

void mr_checked_free(struct mr_checked *c)
{
    mr_dlayout_free(&c->layout);
    mr_dataset_close(c->data);
    free(c->epoch);
    memset(c, 0, sizeof *c);
}

/* ---- the table ------------------------------------------------------------------------------------------------------------ */

static double mib(uint64_t bytes)
{
    return (double)bytes / 1048576.0;
}

static void print_models(const struct mr_checked *c, const struct mr_topology *t, FILE *f)
{
    uint64_t n = 0;

    for (int i = 0; i < c->layout.n; i++)
        n += c->layout.t[i].n;
    fprintf(f, "target    %s, %d layers, hidden %d, %d ids (%d embedding rows), %s head; reads layers",
            c->synthetic                      ? "synthetic"
            : c->target.arch == MR_ARCH_QWEN3 ? "Qwen3"
                                              : "Llama",
            c->target.n_layers, c->target.hidden_size, c->target.vocab_size, c->target.embedding_rows, c->target.tied ? "tied" : "own");
    for (int i = 0; i < c->drafter.K; i++)
        fprintf(f, "%s%d", i ? "," : " ", c->drafter.layer_ids[i]);
    fprintf(f, "\ndrafter   %d layers, block %d, mask token %d, %d anchors a sample; %llu parameters, state 8 x %.1f = %.1f MiB each\n",
            c->drafter.n_layers, c->drafter.block_size, c->drafter.mask_token_id, t->drafter.anchors, (unsigned long long)n,
            mib(c->layout.P * 4), mib(c->layout.P * 32));
    for (int i = 0; i <= c->target.n_eos; i++)
        if (c->drafter.mask_token_id == (i < c->target.n_eos ? c->target.eos[i] : c->target.pad))
            fprintf(f, "warning   mask token %d is the target's %s token: acceptance suffers; an unused id is better\n",
                    c->drafter.mask_token_id, i < c->target.n_eos ? "end" : "padding");
}

static void print_data(const struct mr_checked *c, FILE *f)
{
    const uint64_t *drop = mr_dataset_dropped(c->data);
    uint64_t lost = 0;

    for (int i = 0; i < MR_DROPS; i++)
        lost += drop[i];
    fprintf(f, "data      %llu rows = %llu kept (%llu truncated) + %llu dropped", (unsigned long long)mr_dataset_rows(c->data),
            (unsigned long long)c->samples, (unsigned long long)mr_dataset_truncated(c->data), (unsigned long long)lost);
    for (int i = 0; i < MR_DROPS; i++)
        fprintf(f, "%s%s %llu", i ? ", " : " (", mr_drop_name[i], (unsigned long long)drop[i]);
    fprintf(f, "); %llu tokens", (unsigned long long)c->tokens);
    if (mr_dataset_blank_lines(c->data))
        fprintf(f, "; %llu blank lines", (unsigned long long)mr_dataset_blank_lines(c->data));
    fprintf(f, "\n");
}

static void print_plan(const struct mr_checked *c, const struct mr_topology *t, FILE *f)
{
    const struct mr_epoch end = c->epoch[t->train.epochs], first = c->epoch[1];
    unsigned steps = t->train.max_steps && (unsigned)t->train.max_steps < end.first_step ? (unsigned)t->train.max_steps : end.first_step;

    fprintf(f, "plan      %d epoch%s, %u steps of %d microbatches (grad_accum %d x %d drafters), %u microbatches in all\n", t->train.epochs,
            t->train.epochs > 1 ? "s" : "", steps, mr_topo_places(t), t->train.grad_accum, t->n_drafters, end.first_pos);
    if (steps < end.first_step)
        fprintf(f, "          max_steps %d ends the run before the %u steps of all epochs\n", t->train.max_steps, end.first_step);
    fprintf(f, "          epoch 0: %.1f samples and %.0f tokens a step, %.1f samples and %.0f tokens a microbatch (budget %d)\n",
            (double)c->samples / first.first_step, (double)c->tokens / first.first_step, (double)c->samples / first.first_pos,
            (double)c->tokens / first.first_pos, t->data.token_budget);
    fprintf(f, "buckets  ");
    for (int b = 0; b < t->data.n_buckets; b++)
        fprintf(f, " <=%d: %llu%s", t->data.buckets[b], (unsigned long long)c->bucket_n[b],
                b + 1 < t->data.n_buckets ? "," : " microbatches\n");
}

static void print_slabs(const struct mr_checked *c, const struct mr_topology *t, FILE *f)
{
    const int M = mr_topo_places(t), per = t->queue.slabs_per_device;

    for (int d = 0; d < t->n_devices; d++) {
        int targets = 0, drafters = 0;

        for (int i = 0; i < t->n_actors; i++) {
            targets += t->actor[i].device_index == (unsigned)d && t->actor[i].kind == MR_TARGET;
            drafters += t->actor[i].device_index == (unsigned)d && t->actor[i].kind == MR_DRAFTER;
        }
        fprintf(f, "device    %s: %d targets, %d drafters", t->device[d], targets, drafters);
        if (mr_topo_slabs_on(t, d))
            fprintf(f, "; %d slabs x %.2f MiB (%d tokens x %d layers x %d x %d bytes) = %.1f MiB", per, mib(c->slab_bytes),
                    t->data.token_budget, c->drafter.K, c->target.hidden_size, c->slab_elem, mib(c->slab_bytes * (uint64_t)per));
        fprintf(f, "\n");
    }
    fprintf(f, "slabs     %d, a step holds %d", c->n_slabs, M);
    if (c->n_slabs < M + 1)
        fprintf(f, "; warning: below %d + 1, so targets stop until a step is applied", M);
    else if (c->n_slabs < 2 * M)
        fprintf(f, "; note: below 2 x %d, so targets sometimes wait for drafters", M);
    fprintf(f, "\n");
}

/* Every drafter of GPU d has this much; what its keeper holds for it comes first. */
static void print_drafter(const struct mr_checked *c, const struct mr_topology *t, int d, int n, FILE *f)
{
    uint64_t one = c->layout.P * 4;
    struct mr_drafter_chunk k;
    struct mr_drafter_work w;

    drafter_work(&w, &k, c, t, d);
    fprintf(f, "memory    %s, each of %d drafters: parameters and moments 2 x 3 x %.1f, accumulator %.1f, reduced gradient %.1f = %.1f MiB with the "
               "keeper;\n",
            t->device[d], n, mib(one), mib(one), mib(one), mib(8 * one));
    fprintf(f, "          working weights %.1f, context of %d tokens %.1f, chunk of %d block rows %.1f, loss %.1f, kernels %.1f, staging %.1f, "
               "context and libraries %.1f = %.1f MiB its own\n",
            mib(w.weights), k.max_tokens, mib(w.context), k.rows, mib(w.chunk), mib(w.loss), mib(w.scratch), mib(w.staging),
            mib(MR_CONTEXT_BYTES), mib(w.total + MR_CONTEXT_BYTES));
}

static void print_memory(const struct mr_checked *c, const struct mr_topology *t, FILE *f)
{
    for (int d = 0; d < t->n_devices; d++) {
        int n = 0;

        for (int i = 0; i < t->n_actors; i++)
            n += t->actor[i].kind == MR_DRAFTER && t->actor[i].engine == MR_ENGINE_CUDA && t->actor[i].device_index == (unsigned)d;
        if (n)
            print_drafter(c, t, d, n, f);
    }
}

void mr_check_print(const struct mr_checked *c, const struct mr_topology *t, FILE *f)
{
    fprintf(f, "run       %s in %s\n", t->run.name, t->run.dir);
    print_models(c, t, f);
    if (c->data)
        print_data(c, f);
    if (c->epoch)
        print_plan(c, t, f);
    print_slabs(c, t, f);
    print_memory(c, t, f);
}
