/* millrace-actor bench-target: what a target's forward costs beside its own matrix products.
 *
 *     millrace-actor bench-target --config DIR | --target CHECKPOINT [--device cuda:0] [--layers 1,9,17] [--tokens 16384] [--mix 2048]
 *                                 [--runs 10] [--seconds 3] [--rounds 5] [--burst 2] [--rest 0.5] [--json]
 *
 * Three mixes of about the same number of tokens: sequences of 2048, of 3072, and ragged ones of 100 to 3000; --mix takes those whose name has
 * the word.  For each: the forward pass up to the highest captured layer with the captures, and its matrix products alone, both in the two ways
 * of actors/bench_times.h.  "sustained" has forwards alone, one after the other (tokens/s), and then forward and products in turn, so that both
 * see the same clocks (the share).  Every forward ends with a sync, as in a run.
 * The first forward is given too: it pays for everything that is made on first use.  Lines are printed as they are measured.
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
#include "actors/bench_times.h"
#include "actors/target_model.h"
#include "base/clock.h"
#include "base/rng.h"

enum { SEQS = 1024, LAYERS = 64, MIXES = 3 };

struct mix {
    const char *name;
    int n_seqs, n;
    int32_t cu[SEQS + 1];
    double first_ms;
    struct mr_times alone, forward, products, short_forward, short_products;     /* forward, products: in turn */
};

struct bench {
    char target[4200];
    const char *device, *layer_list, *only;
    int tokens, json;
    struct mr_ways ways;
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

struct unit {
    struct bench *b;
    struct mix *x;
};

static int one(struct bench *b, const struct mix *x, int products, double *ms)
{
    uint64_t t0 = mr_now_ns();
    int rc = products ? mr_target_model_products(b->m, x->n) : mr_target_model_issue(b->m, x->n_seqs, x->n, b->ids, x->cu, b->features, NULL);

    if (!rc)
        rc = b->k->op->sync(b->k);
    *ms = (double)(mr_now_ns() - t0) * 1e-6;
    return rc;
}

static int forward(void *ctx, double *ms)
{
    struct unit *u = ctx;

    return one(u->b, u->x, 0, ms);
}

static int products(void *ctx, double *ms)
{
    struct unit *u = ctx;

    return one(u->b, u->x, 1, ms);
}

/* The forward's time; the products' goes to the mix. */
static int in_turn(void *ctx, double *ms)
{
    struct unit *u = ctx;
    double p;
    int rc = forward(u, ms);

    if (!rc)
        rc = products(u, &p);
    if (!rc)
        mr_times_add(&u->x->products, p);
    return rc;
}

static int measure(struct bench *b, struct mix *x, struct mr_err *err)
{
    struct unit u = {b, x};
    double warm;
    int rc = forward(&u, &x->first_ms);

    for (int i = 0; i < 2 && !rc; i++)
        rc = products(&u, &warm) || forward(&u, &warm);
    if (!rc)
        rc = mr_bench_sustained(&b->ways, forward, &u, &x->alone);
    if (!rc)
        rc = mr_bench_sustained(&b->ways, in_turn, &u, &x->forward);
    for (int i = 0; i < b->ways.rounds && !rc; i++) {
        rc = mr_bench_burst(&b->ways, forward, &u, &x->short_forward);
        if (!rc)
            rc = mr_bench_burst(&b->ways, products, &u, &x->short_products);
    }
    return rc ? mr_err_set(err, MR_EXIT_CUDA, "the forward pass of \"%s\" failed: %s", x->name, strerror(-rc)) : 0;
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

static void print_head(const struct bench *b)
{
    printf("target %s on %s: layers 0..%d of %d, %d captured, weights ready in %.1f s, host memory %ld MiB\n", b->target, b->device, depth(b) - 1,
           b->c.n_layers, b->n_layers, b->load_s, rss_mib());
    printf("sustained: %d at least and %.1f s; short: %d times %d after %.1f s of rest; a sync after each\n", b->ways.runs, b->ways.seconds,
           b->ways.rounds, b->ways.burst, b->ways.rest_s);
    printf("%-16s %-9s %7s %5s %9s %9s %10s %9s %7s %8s %8s\n", "mix", "", "tokens", "seqs", "first ms", "alone ms", "forward ms", "products",
           "share", "ktok/s", "TFLOP/s");
    fflush(stdout);
}

/* tokens/s are those of forwards alone; the share is of times that were measured in turn. */
static void print_way(const struct bench *b, struct mix *x, const char *way, double alone, double forward_ms, double products_ms)
{
    printf("%-16s %-9s %7d %5d %9.1f %9.2f %10.2f %9.2f %6.1f%% %8.2f %8.1f\n", x->name, way, x->n, x->n_seqs, x->first_ms, alone, forward_ms,
           products_ms, 100 * products_ms / forward_ms, x->n / alone, product_tflop(b, x) / products_ms * 1e3);
}

static void print(const struct bench *b, struct mix *x)
{
    print_way(b, x, "sustained", mr_times_median(&x->alone), mr_times_median(&x->forward), mr_times_median(&x->products));
    print_way(b, x, "short", mr_times_median(&x->short_forward), mr_times_median(&x->short_forward), mr_times_median(&x->short_products));
    fflush(stdout);
}

static double rate(struct mix *x)
{
    return x->n / mr_times_median(&x->alone);
}

static void print_tail(struct bench *b)
{
    if (b->mix[0].alone.n && b->mix[2].alone.n)
        printf("ragged against 2048 each: %.3f of its tokens/s\n", rate(&b->mix[2]) / rate(&b->mix[0]));
}

static json_t *way_json(const struct bench *b, const struct mix *x, double alone, double forward_ms, double products_ms)
{
    return json_pack("{s:f, s:f, s:f, s:f, s:f, s:f}", "alone_ms", alone, "forward_ms", forward_ms, "products_ms", products_ms,
                     "products_share", products_ms / forward_ms, "tokens_per_s", 1e3 * x->n / alone,
                     "products_tflops", product_tflop(b, x) / products_ms * 1e3);
}

static json_t *mix_json(const struct bench *b, struct mix *x)
{
    double f = mr_times_median(&x->short_forward);

    return json_pack("{s:s, s:i, s:i, s:f, s:o, s:o}", "mix", x->name, "tokens", x->n, "sequences", x->n_seqs, "first_ms", x->first_ms, "sustained",
                     way_json(b, x, mr_times_median(&x->alone), mr_times_median(&x->forward), mr_times_median(&x->products)), "short",
                     way_json(b, x, f, f, mr_times_median(&x->short_products)));
}

static void print_json(struct bench *b)
{
    json_t *o = json_object(), *list = json_array();

    for (int i = 0; i < MIXES; i++)
        if (b->mix[i].alone.n)
            json_array_append_new(list, mix_json(b, &b->mix[i]));
    json_object_set_new(o, "device", json_string(b->device));
    json_object_set_new(o, "layers", json_integer(depth(b)));
    json_object_set_new(o, "rss_mib", json_integer(rss_mib()));
    json_object_set_new(o, "mixes", list);
    json_dumpf(o, stdout, JSON_COMPACT);
    printf("\n");
    json_decref(o);
}

static int usage(FILE *f, int code)
{
    fprintf(f, "usage: millrace-actor bench-target --config DIR | --target CHECKPOINT [--device cpu|cuda:N] [--layers 1,9,17] [--tokens N]\n"
               "                                   [--mix 2048|3072|ragged] [--runs N] [--seconds S] [--rounds N] [--burst N]\n"
               "                                   [--rest S] [--json]\n"
               "  --config DIR   random weights of DIR/config.json      --target DIR   a checkpoint's own\n");
    return code;
}

static int parse(struct bench *b, int argc, char **argv)
{
    static const struct option opt[] = {{"config", 1, NULL, 'c'}, {"target", 1, NULL, 't'},  {"device", 1, NULL, 'd'}, {"layers", 1, NULL, 'l'},
                                        {"tokens", 1, NULL, 'n'}, {"mix", 1, NULL, 'm'},     {"runs", 1, NULL, 'r'},   {"seconds", 1, NULL, 's'},
                                        {"rounds", 1, NULL, 'o'}, {"rest", 1, NULL, 'p'},    {"burst", 1, NULL, 'u'},  {"json", 0, NULL, 'j'},
                                        {0}};
    int c;

    memset(b, 0, sizeof *b);
    b->device = "cuda:0", b->tokens = 16384, b->only = "", b->ways = mr_ways_default();
    while ((c = getopt_long(argc, argv, "", opt, NULL)) != -1) {
        switch (c) {
        case 'c': snprintf(b->target, sizeof b->target, "random:%s?seed=1", optarg); break;
        case 't': snprintf(b->target, sizeof b->target, "%s", optarg); break;
        case 'd': b->device = optarg; break;
        case 'l': b->layer_list = optarg; break;
        case 'n': b->tokens = atoi(optarg); break;
        case 'm': b->only = optarg; break;
        case 'r': b->ways.runs = atoi(optarg); break;
        case 's': b->ways.seconds = atof(optarg); break;
        case 'o': b->ways.rounds = atoi(optarg); break;
        case 'p': b->ways.rest_s = atof(optarg); break;
        case 'u': b->ways.burst = atoi(optarg); break;
        case 'j': b->json = 1; break;
        default: return -1;
        }
    }
    return optind != argc || !b->target[0] || b->tokens < 1 || b->ways.runs < 1 || b->ways.rounds < 1 || b->ways.burst < 1 || !(b->ways.rest_s >= 0)
               ? -1
               : 0;
}

static int measure_all(struct bench *b, struct mr_err *err)
{
    if (!b->json)
        print_head(b);
    for (int i = 0; i < MIXES; i++) {
        if (!strstr(b->mix[i].name, b->only))
            continue;
        if (measure(b, &b->mix[i], err))
            return -1;
        if (!b->json)
            print(b, &b->mix[i]);
    }
    return 0;
}

int mr_bench_target_main(int argc, char **argv)
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
    rc = open_bench(b, &err) || measure_all(b, &err);
    if (rc)
        fprintf(stderr, "millrace-actor bench-target: %s\n", err.msg);
    else if (b->json)
        print_json(b);
    else
        print_tail(b);
    mr_target_model_destroy(b->m);
    if (b->features)
        b->k->op->release(b->k, b->features);
    mr_backend_close(b->k);
    free(b->ids);
    free(b);
    return rc ? err.code : MR_EXIT_OK;
}
