/* millrace-actor bench-drafter: what one optimizer step of a drafter costs, without a target.
 *
 *     millrace-actor bench-drafter --config DIR [--device cuda:0] [--layers 5] [--block 16] [--anchors 512] [--tokens 3072] [--seqs 1]
 *                                  [--runs 10] [--seconds 3] [--rounds 5] [--burst 2] [--rest 0.5] [--json]
 *
 * The engine of the drafter actor on random hidden states of the model that DIR/config.json describes: a step is the microbatch's forward and
 * backward, the sum (of one accumulator), the gradient's norm, AdamW from one state to the other, and zeroing.  Times are the host's around
 * calls that return when the device is done, after two steps of warm-up, in the two ways of actors/bench_times.h: medians over some seconds of
 * steps, and bursts of two steps after a rest.
 *
 * Model FLOPs count what the definition asks for, twice a multiplication: products of all block rows, forward and twice that backward; of
 * the context rows, forward and the gradients that exist (none for the hidden states); the head's logits and their gradient for all slots but
 * the first of each block; attention over the visible keys, backward as 2.5 times forward.
 */
#include <getopt.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "actors/actors.h"
#include "actors/backend.h"
#include "actors/bench_times.h"
#include "base/clock.h"
#include "base/rng.h"

enum { WARM = 2, PIECE = 4 << 20 };

enum { WORK, SUM, APPLY, ZERO, PARTS };

struct bench {
    const char *config, *device;
    int layers, block, anchors, tokens, seqs, json;
    struct mr_ways ways;
    struct mr_topology *t;
    struct mr_checked c;
    struct mr_k *k;                       /* for memory; the engine has a context of its own */
    struct mr_drafter_engine eng;
    struct mr_drafter_view v;
    struct mr_drafter_arena header;
    float *state;
    void *features;
    struct mr_batch b;
    unsigned steps;                       /* done: which of the two states is the current one */
    struct mr_err *err;
    struct mr_times part[PARTS], whole, burst;
    uint64_t used_bytes;
};

/* ---- what is run ------------------------------------------------------------------------------------------------------------------ */

static int default_layers(int *id, int depth)
{
    const int n = 5;

    for (int i = 0; i < n; i++)
        id[i] = depth < 8 ? i : (int)(1 + i * (depth - 4.0) / (n - 1) + 0.5);
    return n;
}

static int configure(struct bench *b, struct mr_err *err)
{
    struct mr_topology *t = b->t = calloc(1, sizeof *t);

    if (!t)
        return mr_err_set(err, MR_EXIT_ENV, "out of memory");
    snprintf(t->target.checkpoint, sizeof t->target.checkpoint, "random:%s?seed=1", b->config);
    if (mr_model_config_load(&b->c.target, t->target.checkpoint, err))
        return -1;
    t->run.seed = 1;
    t->target.n_layers = default_layers(t->target.layers, b->c.target.n_layers);
    t->drafter.layers = b->layers;
    t->drafter.block_size = b->block;
    t->drafter.anchors = b->anchors;
    t->drafter.causal = -1;
    t->data.max_tokens = b->tokens;
    t->data.token_budget = b->tokens * b->seqs;
    t->train.lr = 6e-4, t->train.clip = 1.0, t->train.loss_decay = 7.0;
    t->train.beta1 = 0.9, t->train.beta2 = 0.999, t->train.eps = 1e-8, t->train.constant_lr = 1;
    t->n_actors = 1;
    t->actor[0] = (struct mr_topo_actor){.kind = MR_DRAFTER, .engine = strcmp(b->device, "cpu") ? MR_ENGINE_CUDA : MR_ENGINE_CPU, .threads = 1};
    snprintf(t->actor[0].device, sizeof t->actor[0].device, "%s", b->device);
    b->c.plan_opts.max_seqs = b->seqs;
    if (mr_drafter_config_make(&b->c.drafter, t, &b->c.target, err))
        return -1;
    return mr_dlayout_make(&b->c.layout, &b->c.drafter) ? mr_err_set(err, MR_EXIT_ENV, "out of memory") : 0;
}

/* Norms 1, matrices of standard deviation 0.02: one random piece, over and over. */
static int make_state(struct bench *b)
{
    const struct mr_k_ops *op = b->k->op;
    uint64_t P = b->c.layout.P, n = P < PIECE ? P : PIECE;
    float *x = malloc((size_t)PIECE * sizeof *x);
    int rc = x ? 0 : -1;

    for (int i = 0; i < 2; i++) {
        b->v.param[i] = b->state + (uint64_t)(3 * i) * P;
        b->v.m[i] = b->v.param[i] + P;
        b->v.v[i] = b->v.m[i] + P;
    }
    b->v = (struct mr_drafter_view){.hdr = &b->header, .param = {b->v.param[0], b->v.param[1]}, .m = {b->v.m[0], b->v.m[1]},
                                    .v = {b->v.v[0], b->v.v[1]}, .acc = b->state + 6 * P, .reduced = b->state + 7 * P, .P = P};
    if (!rc) {
        mr_k_random_f32(x, 1, 0, n, 0.02f);
        rc = op->h2d(b->k, b->v.param[0], x, n * sizeof *x);
    }
    for (uint64_t at = n; at < P && !rc; at += n)
        rc = op->d2d(b->k, b->v.param[0] + at, b->v.param[0], (P - at < n ? P - at : n) * sizeof *x);
    for (int i = 0; i < PIECE && x; i++)
        x[i] = 1.0f;
    for (int i = 0; i < b->c.layout.n && !rc; i++)
        if (!b->c.layout.t[i].cols)
            rc = op->h2d(b->k, b->v.param[0] + b->c.layout.t[i].offset, x, b->c.layout.t[i].n * sizeof *x);
    if (!rc)
        rc = op->sync(b->k);
    free(x);
    return rc;
}

static int make_features(struct bench *b, size_t n)
{
    int rc;

    if (strcmp(b->device, "cpu")) {
        rc = mr_k_cuda_random(b->k, b->features, 7, n, 1.0f);
        return rc ? rc : b->k->op->sync(b->k);
    }
    mr_k_random_f32(b->features, 7, 0, n, 1.0f);
    return 0;
}

static int make_batch(struct bench *b)
{
    int n = b->tokens * b->seqs;
    int32_t *ids = malloc((size_t)n * sizeof *ids), *cu = malloc(((size_t)b->seqs + 1) * sizeof *cu);
    uint8_t *mask = malloc((size_t)n);
    uint32_t *sample = calloc((size_t)b->seqs, sizeof *sample);
    struct mr_rng r = mr_rng_key(1, 2, 3);

    b->b = (struct mr_batch){.n_seqs = b->seqs, .n_tokens = n, .ids = ids, .cu = cu, .mask = mask, .sample = sample};
    if (!ids || !cu || !mask || !sample)
        return -1;
    for (int i = 0; i < n; i++)
        ids[i] = (int32_t)mr_rng_below(&r, (uint64_t)b->c.target.vocab_size);
    for (int i = 0; i <= b->seqs; i++)
        cu[i] = i * b->tokens;
    for (int i = 0; i < b->seqs; i++)
        sample[i] = (uint32_t)i;
    memset(mask, 1, (size_t)n);
    return 0;
}

static int open_bench(struct bench *b, struct mr_err *err)
{
    size_t n = (size_t)b->tokens * (size_t)b->seqs * 5 * (size_t)b->c.target.hidden_size;

    b->k = mr_backend_open(b->device, 1, 0, err);
    if (!b->k)
        return -1;
    b->state = b->k->op->alloc(b->k, 8 * b->c.layout.P * sizeof *b->state);
    b->features = b->k->op->alloc(b->k, n * (size_t)b->k->act_bytes);
    if (!b->state || !b->features)
        return mr_err_set(err, MR_EXIT_ENV, "out of memory on %s: %.1f GiB of state for %llu parameters, %.1f GiB of hidden states", b->device,
                          (double)b->c.layout.P * 32 / 0x1p30, (unsigned long long)b->c.layout.P, (double)n * b->k->act_bytes / 0x1p30);
    if (make_state(b) || make_features(b, n) || make_batch(b))
        return mr_err_set(err, MR_EXIT_CUDA, "the data could not be made on %s", b->device);
    return mr_drafter_engine_create(&b->eng, b->t, &b->c, 0, err);
}

/* ---- timing ----------------------------------------------------------------------------------------------------------------------- */

static double lap(uint64_t *t)
{
    uint64_t now = mr_now_ns(), from = *t;

    *t = now;
    return (double)(now - from) * 1e-6;
}

static int step(struct bench *b, double ms[PARTS])
{
    const float *src[1] = {b->v.acc};
    uint64_t at = mr_now_ns();
    struct mr_draft_stats st;
    unsigned s = b->steps++;
    double norm;

    if (b->eng.accumulate(b->eng.self, &b->b, b->features, b->v.param[s & 1], b->v.acc, &st, b->err))
        return -1;
    ms[WORK] = lap(&at);
    if (b->eng.sum(b->eng.self, src, 1, b->v.reduced))
        return mr_err_set(b->err, MR_EXIT_CUDA, "the sum failed");
    ms[SUM] = lap(&at);
    if (b->eng.apply(b->eng.self, &b->v, s, 1000000, st.weight_sum, &norm, b->err))
        return -1;
    ms[APPLY] = lap(&at);
    if (b->eng.zero(b->eng.self, b->v.acc))
        return mr_err_set(b->err, MR_EXIT_CUDA, "zeroing failed");
    ms[ZERO] = lap(&at);
    return 0;
}

static int whole_step(void *ctx, double *ms)
{
    double part[PARTS];
    int rc = step(ctx, part);

    *ms = 0;
    for (int p = 0; p < PARTS && !rc; p++)
        *ms += part[p];
    return rc;
}

static int step_in_parts(void *ctx, double *ms)
{
    struct bench *b = ctx;
    double part[PARTS];
    int rc = step(b, part);

    *ms = 0;
    for (int p = 0; p < PARTS && !rc; p++) {
        mr_times_add(&b->part[p], part[p]);
        *ms += part[p];
    }
    return rc;
}

static int measure(struct bench *b, struct mr_err *err)
{
    uint64_t free_bytes, total;
    double warm;
    char why[200];

    b->err = err;
    for (int i = 0; i < WARM; i++)
        if (whole_step(b, &warm))
            return -1;
    if (mr_bench_sustained(&b->ways, step_in_parts, b, &b->whole))
        return -1;
    for (int i = 0; i < b->ways.rounds; i++)
        if (mr_bench_burst(&b->ways, whole_step, b, &b->burst))
            return -1;
    if (strcmp(b->device, "cpu") && !mr_k_cuda_mem_info(&free_bytes, &total, why, sizeof why))
        b->used_bytes = total - free_bytes;
    return 0;
}

/* ---- what is said ----------------------------------------------------------------------------------------------------------------- */

static double model_tflop(const struct bench *b)
{
    const struct mr_drafter_config *c = &b->c.drafter;
    double H = c->hidden_size, q = (double)c->n_heads * c->head_dim, kv = (double)c->n_kv_heads * c->head_dim, L = c->n_layers;
    double T = (double)b->tokens, N = b->anchors < b->tokens - 1 ? b->anchors : b->tokens - 1, R = N * b->block;
    double layer = H * (2 * q + 2 * kv) + 3 * H * c->intermediate_size;
    double context = 4 * T * H * c->K * c->target_hidden + L * 6 * T * H * 2 * kv;
    double attention = L * 3.5 * 4 * R * (T / 2 + b->block) * q, head = 4 * N * (b->block - 1) * H * c->vocab_size;

    return b->seqs * (L * 6 * R * layer + context + attention + head) * 1e-12;
}

static void print(struct bench *b)
{
    static const char *const name[PARTS] = {"forward and backward", "sum", "norm and AdamW", "zero"};
    double tflop = model_tflop(b), whole = mr_times_median(&b->whole), burst = mr_times_median(&b->burst);

    printf("drafter of %s on %s: %d layers, block %d, %d anchors, %d x %d tokens, %.3f G parameters, %.1f TFLOP a step, "
           "device memory in use %.1f GiB\n", b->config, b->device, b->layers, b->block, b->anchors, b->seqs, b->tokens,
           (double)b->c.layout.P * 1e-9, tflop, (double)b->used_bytes / 0x1p30);
    for (int p = 0; p < PARTS; p++)
        printf("  %-22s %9.2f ms\n", name[p], mr_times_median(&b->part[p]));
    printf("  sustained, %d steps:   step %.2f ms, %.1f TFLOP/s (forward and backward alone %.1f), fastest %.2f ms\n", b->whole.n, whole,
           tflop / whole * 1e3, tflop / mr_times_median(&b->part[WORK]) * 1e3, mr_times_best(&b->whole));
    printf("  short, %d times %d steps after %.1f s of rest:   step %.2f ms, %.1f TFLOP/s\n", b->burst.n, b->ways.burst, b->ways.rest_s, burst,
           tflop / burst * 1e3);
}

static void print_json(struct bench *b)
{
    static const char *const name[PARTS] = {"forward_backward_ms", "sum_ms", "apply_ms", "zero_ms"};
    double tflop = model_tflop(b), whole = mr_times_median(&b->whole), burst = mr_times_median(&b->burst);
    json_t *o = json_pack("{s:s, s:i, s:i, s:i, s:i, s:f, s:I, s:{s:i, s:f, s:f}, s:{s:i, s:f, s:f}}", "device", b->device, "layers", b->layers,
                          "anchors", b->anchors, "tokens", b->tokens, "seqs", b->seqs, "model_tflop", tflop, "device_bytes",
                          (json_int_t)b->used_bytes, "sustained", "steps", b->whole.n, "step_ms", whole, "tflops", tflop / whole * 1e3, "short",
                          "bursts", b->burst.n, "step_ms", burst, "tflops", tflop / burst * 1e3);

    for (int p = 0; p < PARTS; p++)
        json_object_set_new(json_object_get(o, "sustained"), name[p], json_real(mr_times_median(&b->part[p])));
    json_dumpf(o, stdout, JSON_COMPACT);
    printf("\n");
    json_decref(o);
}

/* ---- the program ------------------------------------------------------------------------------------------------------------------ */

static int usage(FILE *f, int code)
{
    fprintf(f, "usage: millrace-actor bench-drafter --config DIR [--device cpu|cuda:N] [--layers N] [--block N] [--anchors N] [--tokens N]\n"
               "                                    [--seqs N] [--runs N] [--seconds S] [--rounds N] [--burst N] [--rest S] [--json]\n");
    return code;
}

static int parse(struct bench *b, int argc, char **argv)
{
    static const struct option opt[] = {{"config", 1, NULL, 'c'}, {"device", 1, NULL, 'd'}, {"layers", 1, NULL, 'l'}, {"block", 1, NULL, 'b'},
                                        {"anchors", 1, NULL, 'a'}, {"tokens", 1, NULL, 'n'}, {"seqs", 1, NULL, 's'}, {"runs", 1, NULL, 'r'},
                                        {"seconds", 1, NULL, 'e'}, {"rounds", 1, NULL, 'o'}, {"rest", 1, NULL, 'p'}, {"burst", 1, NULL, 'u'},
                                        {"json", 0, NULL, 'j'}, {0}};
    int c;

    memset(b, 0, sizeof *b);
    b->device = "cuda:0", b->layers = 5, b->block = 16, b->anchors = 512, b->tokens = 3072, b->seqs = 1, b->ways = mr_ways_default();
    while ((c = getopt_long(argc, argv, "", opt, NULL)) != -1) {
        switch (c) {
        case 'c': b->config = optarg; break;
        case 'd': b->device = optarg; break;
        case 'l': b->layers = atoi(optarg); break;
        case 'b': b->block = atoi(optarg); break;
        case 'a': b->anchors = atoi(optarg); break;
        case 'n': b->tokens = atoi(optarg); break;
        case 's': b->seqs = atoi(optarg); break;
        case 'r': b->ways.runs = atoi(optarg); break;
        case 'e': b->ways.seconds = atof(optarg); break;
        case 'o': b->ways.rounds = atoi(optarg); break;
        case 'p': b->ways.rest_s = atof(optarg); break;
        case 'u': b->ways.burst = atoi(optarg); break;
        case 'j': b->json = 1; break;
        default: return -1;
        }
    }
    return optind != argc || !b->config || b->layers < 1 || b->layers > MR_TOPO_LAYERS || b->block < 2 || b->anchors < 1 || b->tokens < 2 ||
                   b->seqs < 1 || b->ways.runs < 1 || b->ways.rounds < 1 || b->ways.burst < 1 || !(b->ways.rest_s >= 0)
               ? -1
               : 0;
}

static void close_bench(struct bench *b)
{
    if (b->eng.destroy)
        b->eng.destroy(b->eng.self);
    if (b->k) {
        b->k->op->release(b->k, b->state);
        b->k->op->release(b->k, b->features);
    }
    mr_backend_close(b->k);
    free((void *)(uintptr_t)b->b.ids);
    free((void *)(uintptr_t)b->b.cu);
    free((void *)(uintptr_t)b->b.mask);
    free((void *)(uintptr_t)b->b.sample);
    mr_dlayout_free(&b->c.layout);
    free(b->t);
}

int mr_bench_drafter_main(int argc, char **argv)
{
    struct bench *b = malloc(sizeof *b);
    struct mr_err err = {0};
    int rc;

    if (argc > 1 && (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h"))) {
        free(b);
        return usage(stdout, MR_EXIT_OK);
    }
    if (!b || parse(b, argc, argv)) {
        free(b);
        return usage(stderr, MR_EXIT_CONFIG);
    }
    rc = configure(b, &err) || open_bench(b, &err) || measure(b, &err);
    if (rc)
        fprintf(stderr, "millrace-actor bench-drafter: %s\n", err.msg);
    else if (b->json)
        print_json(b);
    else
        print(b);
    close_bench(b);
    free(b);
    return rc ? err.code : MR_EXIT_OK;
}
