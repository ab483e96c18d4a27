/* millrace-actor bench-target: what a target's forward costs beside its own matrix products.
 *
 *     millrace-actor bench-target --config DIR | --target CHECKPOINT [--device cuda:0] [--layers 1,9,17] [--tokens 16384] [--runs 10] [--json]
 *
 * Three mixes of about the same number of tokens: sequences of 2048, of 3072, and ragged ones of 100 to 3000.  For each: the forward pass up
 * to the highest captured layer with the captures, and its matrix products alone, in turn, so that both see the same clocks; medians.
 * Time is the host's, around issue and sync: what a target in a run would see.  The first forward is given too: it pays for everything that
 * is made on first use.
 */
#include <errno.h>
#include <getopt.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "actors/actors.h"
#include "actors/backend.h"
#include "actors/target_model.h"
#include "base/clock.h"
#include "base/rng.h"

enum { SEQS = 1024, RUNS = 100, LAYERS = 64, MIXES = 3 };

struct mix {
    const char *name;
    int n_seqs, n;
    int32_t cu[SEQS + 1];
    double first_ms, forward_ms, products_ms;
};

struct bench {
    char target[4200];
    const char *device, *layer_list;
    int tokens, runs, json;
    int layers[LAYERS], n_layers, max_len;
    struct mr_k *k;
    struct mr_model_config c;
    struct mr_target_model *m;
    void *features;
    int32_t *ids;
    double load_s;
    struct mix mix[MIXES];
};

/* ---- what is run ---------------------------------------------------------------------------------------------------------------------- */

static void add_seq(struct mix *x, int len)
{
    x->n += len;
    x->cu[++x->n_seqs] = x->n;
}

static void uniform(struct bench *b, struct mix *x, const char *name, int len)
{
    if (len > b->tokens)
        len = b->tokens;
    x->name = name;
    for (int left = b->tokens; left >= len && x->n_seqs < SEQS; left -= len)
        add_seq(x, len);
    b->max_len = len > b->max_len ? len : b->max_len;
}

/* Exactly `tokens` of them: the last sequence takes what is left. */
static void ragged(struct bench *b, struct mix *x)
{
    struct mr_rng r = mr_rng_key(1, 2, 3);

    x->name = "ragged 100-3000";
    while (x->n < b->tokens && x->n_seqs < SEQS) {
        int left = b->tokens - x->n, len = 100 + (int)mr_rng_below(&r, 2901);

        add_seq(x, len < left ? len : left);
    }
    b->max_len = b->max_len > 3000 || b->max_len >= b->tokens ? b->max_len : b->tokens < 3000 ? b->tokens : 3000;
}

/* The layers that a drafter with five of them reads by default (docs/target-models.md 5.3), or those of --layers. */
static int pick_layers(struct bench *b, struct mr_err *err)
{
    int L = b->c.n_layers, n = L >= 8 ? 5 : 1;

    if (b->layer_list) {
        for (const char *s = b->layer_list; *s && b->n_layers < LAYERS; s += *s == ',')
            b->layers[b->n_layers++] = (int)strtol(s, (char **)&s, 10);
        return 0;
    }
    for (int i = 0; i < n; i++)
        b->layers[b->n_layers++] = n == 1 ? L / 2 : (int)lrint(1 + i * (L - 4.0) / (n - 1));
    return b->n_layers ? 0 : mr_err_set(err, MR_EXIT_CONFIG, "--layers: no layer");
}

static int open_bench(struct bench *b, struct mr_err *err)
{
    struct mr_target_model_opts o = {.layers = b->layers, .max_tokens = b->tokens, .max_seqs = SEQS};
    struct mr_rng r = mr_rng_key(4, 5, 6);
    uint64_t t0 = mr_now_ns();

    if (mr_model_config_load(&b->c, b->target, err) || pick_layers(b, err))
        return -1;
    uniform(b, &b->mix[0], "2048 each", 2048);
    uniform(b, &b->mix[1], "3072 each", 3072);
    ragged(b, &b->mix[2]);
    o.n_layers = b->n_layers;
    o.max_positions = b->max_len;
    b->k = mr_backend_open(b->device, 1, 0, err);
    b->m = b->k ? mr_target_model_create(b->k, b->target, &o, err) : NULL;
    if (!b->m)
        return -1;
    b->load_s = (double)(mr_now_ns() - t0) * 1e-9;
    b->features = b->k->op->alloc(b->k, (size_t)b->tokens * (size_t)b->n_layers * (size_t)b->c.hidden_size * (size_t)b->k->act_bytes);
    b->ids = malloc((size_t)b->tokens * sizeof *b->ids);
    if (!b->features || !b->ids)
        return mr_err_set(err, MR_EXIT_ENV, "out of memory for the features of %d tokens", b->tokens);
    for (int i = 0; i < b->tokens; i++)
        b->ids[i] = (int32_t)mr_rng_below(&r, (uint64_t)b->c.vocab_size);
    return 0;
}

/* ---- timing --------------------------------------------------------------------------------------------------------------------------- */

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static int one(struct bench *b, const struct mix *x, int products, double *ms)
{
    uint64_t t0 = mr_now_ns();
    int rc = products ? mr_target_model_products(b->m, x->n) : mr_target_model_issue(b->m, x->n_seqs, x->n, b->ids, x->cu, b->features, NULL);

    if (!rc)
        rc = b->k->op->sync(b->k);
    *ms = (double)(mr_now_ns() - t0) * 1e-6;
    return rc;
}

static int measure(struct bench *b, struct mix *x, struct mr_err *err)
{
    double f[RUNS], p[RUNS], warm;
    int rc = one(b, x, 0, &x->first_ms);

    for (int i = 0; i < 2 && !rc; i++)
        rc = one(b, x, 1, &warm) || one(b, x, 0, &warm);
    for (int i = 0; i < b->runs && !rc; i++) {
        rc = one(b, x, 0, &f[i]);
        if (!rc)
            rc = one(b, x, 1, &p[i]);
    }
    if (rc)
        return mr_err_set(err, MR_EXIT_CUDA, "the forward pass of \"%s\" failed: %s", x->name, strerror(-rc));
    qsort(f, (size_t)b->runs, sizeof *f, by_value);
    qsort(p, (size_t)b->runs, sizeof *p, by_value);
    x->forward_ms = f[b->runs / 2];
    x->products_ms = p[b->runs / 2];
    return 0;
}

/* ---- what is said --------------------------------------------------------------------------------------------------------------------- */

static int depth(const struct bench *b)
{
    int d = 0;

    for (int i = 0; i < b->n_layers; i++)
        d = b->layers[i] + 1 > d ? b->layers[i] + 1 : d;
    return d;
}

static double product_tflop(const struct bench *b, const struct mix *x)
{
    double H = b->c.hidden_size, q = (double)b->c.n_heads * b->c.head_dim, kv = (double)b->c.n_kv_heads * b->c.head_dim;

    return 2.0 * x->n * depth(b) * (H * (q + 2 * kv) + q * H + 3 * H * b->c.intermediate_size) * 1e-12;
}

static long rss_mib(void)
{
    FILE *f = fopen("/proc/self/status", "re");
    char line[128];
    long kib = 0;

    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "VmRSS: %ld", &kib) == 1)
            break;
    if (f)
        fclose(f);
    return kib / 1024;
}

static void print(const struct bench *b)
{
    printf("target %s on %s: layers 0..%d of %d, %d captured, weights ready in %.1f s, host memory %ld MiB\n", b->target, b->device, depth(b) - 1,
           b->c.n_layers, b->n_layers, b->load_s, rss_mib());
    printf("%-16s %7s %6s %10s %10s %10s %10s %8s %9s\n", "mix", "tokens", "seqs", "first ms", "forward ms", "products", "share", "ktok/s",
           "TFLOP/s");
    for (int i = 0; i < MIXES; i++) {
        const struct mix *x = &b->mix[i];

        printf("%-16s %7d %6d %10.1f %10.2f %10.2f %9.1f%% %8.2f %9.1f\n", x->name, x->n, x->n_seqs, x->first_ms, x->forward_ms, x->products_ms,
               100 * x->products_ms / x->forward_ms, x->n / x->forward_ms, product_tflop(b, x) / x->products_ms * 1e3);
    }
    printf("ragged against 2048 each: %.3f of its tokens/s\n",
           b->mix[2].n / b->mix[2].forward_ms / (b->mix[0].n / b->mix[0].forward_ms));
}

static void print_json(const struct bench *b)
{
    json_t *o = json_object(), *list = json_array();

    for (int i = 0; i < MIXES; i++) {
        const struct mix *x = &b->mix[i];
        json_t *m = json_object();

        json_object_set_new(m, "mix", json_string(x->name));
        json_object_set_new(m, "tokens", json_integer(x->n));
        json_object_set_new(m, "sequences", json_integer(x->n_seqs));
        json_object_set_new(m, "first_ms", json_real(x->first_ms));
        json_object_set_new(m, "forward_ms", json_real(x->forward_ms));
        json_object_set_new(m, "products_ms", json_real(x->products_ms));
        json_object_set_new(m, "products_share", json_real(x->products_ms / x->forward_ms));
        json_object_set_new(m, "tokens_per_s", json_real(1e3 * x->n / x->forward_ms));
        json_object_set_new(m, "products_tflops", json_real(product_tflop(b, x) / x->products_ms * 1e3));
        json_array_append_new(list, m);
    }
    json_object_set_new(o, "device", json_string(b->device));
    json_object_set_new(o, "layers", json_integer(depth(b)));
    json_object_set_new(o, "rss_mib", json_integer(rss_mib()));
    json_object_set_new(o, "mixes", list);
    json_dumpf(o, stdout, JSON_INDENT(1));
    printf("\n");
    json_decref(o);
}

static int usage(void)
{
    fprintf(stderr, "usage: millrace-actor bench-target --config DIR | --target CHECKPOINT [--device cpu|cuda:N] [--layers 1,9,17] [--tokens N]\n"
                    "                                   [--runs N] [--json]\n"
                    "  --config DIR   random weights of DIR/config.json      --target DIR   a checkpoint's own\n");
    return MR_EXIT_CONFIG;
}

static int parse(struct bench *b, int argc, char **argv)
{
    static const struct option opt[] = {{"config", 1, NULL, 'c'}, {"target", 1, NULL, 't'}, {"device", 1, NULL, 'd'}, {"layers", 1, NULL, 'l'},
                                        {"tokens", 1, NULL, 'n'}, {"runs", 1, NULL, 'r'},   {"json", 0, NULL, 'j'},   {0}};
    int c;

    *b = (struct bench){.device = "cuda:0", .tokens = 16384, .runs = 10};
    while ((c = getopt_long(argc, argv, "", opt, NULL)) != -1) {
        switch (c) {
        case 'c': snprintf(b->target, sizeof b->target, "random:%s?seed=1", optarg); break;
        case 't': snprintf(b->target, sizeof b->target, "%s", optarg); break;
        case 'd': b->device = optarg; break;
        case 'l': b->layer_list = optarg; break;
        case 'n': b->tokens = atoi(optarg); break;
        case 'r': b->runs = atoi(optarg); break;
        case 'j': b->json = 1; break;
        default: return -1;
        }
    }
    return optind != argc || !b->target[0] || b->tokens < 1 || b->runs < 1 || b->runs > RUNS ? -1 : 0;
}

int mr_bench_target_main(int argc, char **argv)
{
    struct bench *b = malloc(sizeof *b);
    struct mr_err err = {0};
    int rc;

    if (!b || parse(b, argc, argv)) {
        free(b);
        return usage();
    }
    rc = open_bench(b, &err);
    for (int i = 0; i < MIXES && !rc; i++)
        rc = measure(b, &b->mix[i], &err);
    if (!rc && b->json)
        print_json(b);
    else if (!rc)
        print(b);
    else
        fprintf(stderr, "millrace-actor bench-target: %s\n", err.msg);
    mr_target_model_destroy(b->m);
    if (b->features)
        b->k->op->release(b->k, b->features);
    mr_backend_close(b->k);
    free(b->ids);
    free(b);
    return rc ? err.code : MR_EXIT_OK;
}
