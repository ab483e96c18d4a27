/* millrace-actor eval: acceptance length, per-position accuracy, loss.
 *
 * Limits: greedy acceptance against the row's own tokens (teacher forced), one row a forward pass, every row's positions at once: for a
 * block size B that computes about B times the row's supervised tokens, in exchange for one large batch instead of a chain of small ones.
 */
#include "actors/eval.h"

#include <getopt.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "actors/actors.h"
#include "actors/backend.h"
#include "actors/dflash.h"
#include "actors/target_model.h"
#include "base/clock.h"

enum { EVAL_CHUNK_ROWS = 512 };

struct eval {
    const struct mr_eval_opts *o;
    struct mr_eval_result *r;
    struct mr_k *k;
    struct mr_model_config target;
    struct mr_drafter_config c;
    struct mr_dlayout l;
    struct mr_frozen frozen;
    struct mr_dataset *data;
    struct mr_target_model *m;
    struct mr_dflash *d;
    float *param;                /* device (P) */
    void *features;              /* device (max_tokens, K H) */
    int max_tokens;
    int32_t *seq, *pos, *argmax;
    float *ce;
};

/* ---- opening ----------------------------------------------------------------------------------------------------------------------- */

static int check_pair(const struct eval *e, struct mr_err *err)
{
    const struct mr_drafter_config *c = &e->c;
    const struct mr_model_config *t = &e->target;

    if (c->hidden_size != t->hidden_size || c->target_hidden != t->hidden_size)
        return mr_err_set(err, MR_EXIT_CONFIG, "%s: hidden_size %d, but the target %s has %d: this drafter belongs to another target",
                          e->o->draft, c->hidden_size, e->o->target, t->hidden_size);
    if (c->vocab_size != t->vocab_size)
        return mr_err_set(err, MR_EXIT_CONFIG, "%s: vocab_size %d, but the target %s has %d: this drafter belongs to another target",
                          e->o->draft, c->vocab_size, e->o->target, t->vocab_size);
    if (c->target_layers != t->n_layers)
        return mr_err_set(err, MR_EXIT_CONFIG,
                          "%s: num_target_layers %d, but the target %s has %d layers: this drafter belongs to another target", e->o->draft,
                          c->target_layers, e->o->target, t->n_layers);
    if (c->mask_token_id < 0 || c->mask_token_id >= t->embedding_rows)
        return mr_err_set(err, MR_EXIT_CONFIG, "%s: mask_token_id %d has no row in the target's embedding (%d rows)", e->o->draft,
                          c->mask_token_id, t->embedding_rows);
    if (c->block_size < 2 || c->block_size > MR_EVAL_SLOTS)
        return mr_err_set(err, MR_EXIT_CONFIG, "%s: block_size %d; 2 to %d can be evaluated", e->o->draft, c->block_size, MR_EVAL_SLOTS);
    return 0;
}

static int open_target(struct eval *e, struct mr_err *err)
{
    struct mr_model_files files;
    int rc;

    if (mr_model_config_load(&e->target, e->o->target, err) || mr_model_files_open(&files, &e->target, e->o->target, err))
        return -1;
    rc = check_pair(e, err);
    if (!rc)
        rc = mr_frozen_load(&e->frozen, e->k, &files, &e->target, 1, err);
    mr_model_files_close(&files);
    return rc;
}

static int open_data(struct eval *e, struct mr_err *err)
{
    const struct mr_dataset_opts o = {.vocab_rows = e->target.vocab_size, .max_tokens = e->target.max_position, .min_tokens = 2};
    uint64_t n;

    e->data = mr_dataset_open(e->o->data, &o, err);
    if (!e->data)
        return -1;
    memcpy(e->r->dropped, mr_dataset_dropped(e->data), sizeof e->r->dropped);
    n = mr_dataset_rows(e->data);
    for (uint64_t i = 0; i < n; i++)
        if (mr_dataset_len(e->data, i) > e->max_tokens)
            e->max_tokens = mr_dataset_len(e->data, i);
    if (!e->max_tokens)
        return mr_err_set(err, MR_EXIT_CONFIG, "%s: not one of its %" PRIu64 " rows can be evaluated", e->o->data, n);
    return 0;
}

static int open_models(struct eval *e, struct mr_err *err)
{
    struct mr_target_model_opts to = {.layers = e->c.layer_ids, .n_layers = e->c.K, .max_tokens = e->max_tokens, .max_seqs = 1};
    struct mr_dflash_opts d = {.max_tokens = e->max_tokens, .max_seqs = 1, .max_blocks = e->max_tokens, .chunk_rows = EVAL_CHUNK_ROWS,
                               .rows = MR_DFLASH_IN_ROW};
    size_t T = (size_t)e->max_tokens, rows = T * (size_t)e->c.block_size;

    e->m = mr_target_model_create(e->k, e->o->target, &to, err);
    if (!e->m)
        return -1;
    e->d = mr_dflash_create(e->k, &e->c, &e->l, &e->frozen, &d, err);
    if (!e->d)
        return -1;
    e->features = e->k->op->alloc(e->k, T * (size_t)e->c.K * (size_t)e->c.target_hidden * (size_t)e->k->act_bytes);
    e->seq = calloc(T, sizeof *e->seq);
    e->pos = malloc(T * sizeof *e->pos);
    e->argmax = malloc(rows * sizeof *e->argmax);
    e->ce = malloc(rows * sizeof *e->ce);
    return e->features && e->seq && e->pos && e->argmax && e->ce ? 0 : mr_err_set(err, MR_EXIT_ENV, "out of memory");
}

static int load_param(struct eval *e, struct mr_err *err)
{
    size_t bytes = e->l.P * sizeof(float);
    float *host = calloc(1, bytes);
    char path[4096];
    int rc = -1;

    snprintf(path, sizeof path, "%s/model.safetensors", e->o->draft);
    e->param = e->k->op->alloc(e->k, bytes);
    if (!host || !e->param)
        mr_err_set(err, MR_EXIT_ENV, "out of memory for the drafter's parameters (%zu bytes)", bytes);
    else if (!mr_drafter_weights_load(&e->l, host, path, err)) {
        rc = e->k->op->h2d(e->k, e->param, host, bytes) || e->k->op->sync(e->k) || mr_dflash_set_param(e->d, e->param);
        if (rc)
            rc = mr_err_set(err, MR_EXIT_FAILED, "loading the drafter to the %s backend failed", e->k->op->name);
    }
    free(host);
    return rc;
}

static int open_all(struct eval *e, struct mr_err *err)
{
    if (mr_drafter_config_load(&e->c, e->o->draft, err))
        return -1;
    if (mr_dlayout_make(&e->l, &e->c))
        return mr_err_set(err, MR_EXIT_ENV, "out of memory");
    e->k = mr_backend_open(e->o->device, e->o->threads, 1, err);
    if (!e->k || open_target(e, err) || open_data(e, err) || open_models(e, err))
        return -1;
    return load_param(e, err);
}

static void close_all(struct eval *e)
{
    mr_dflash_destroy(e->d);
    mr_target_model_destroy(e->m);
    mr_frozen_release(&e->frozen);
    if (e->param)
        e->k->op->release(e->k, e->param);
    if (e->features)
        e->k->op->release(e->k, e->features);
    mr_backend_close(e->k);
    mr_dataset_close(e->data);
    mr_dlayout_free(&e->l);
    free(e->seq);
    free(e->pos);
    free(e->argmax);
    free(e->ce);
}

/* ---- rows -------------------------------------------------------------------------------------------------------------------------- */

void mr_eval_walk(const int32_t *ids, int n, int first, int B, const int32_t *argmax, uint64_t *blocks, uint64_t *advances)
{
    for (int a = first; a < n - 1;) {
        const int32_t *guess = argmax + (size_t)(a - first) * (size_t)B;
        int r = 0, step;

        while (r < B - 1 && a + r + 1 < n && guess[r + 1] == ids[a + r + 1])
            r++;
        step = r + 1 < n - 1 - a ? r + 1 : n - 1 - a;
        *blocks += 1;
        *advances += (uint64_t)step;
        a += step;
    }
}

/* Supervised slots of valid anchors. */
static void count(struct eval *e, const struct mr_row *row, int first)
{
    int B = e->c.block_size;

    for (int a = first; a < row->n - 1; a++) {
        size_t at = (size_t)(a - first) * (size_t)B;

        if (!row->mask[a] || !row->mask[a + 1])
            continue;
        for (int k = 1; k < B && a + k < row->n; k++) {
            if (!row->mask[a + k])
                continue;
            e->r->labels[k]++;
            e->r->correct[k] += e->argmax[at + (size_t)k] == row->ids[a + k];
            e->r->loss_sum += (double)e->ce[at + (size_t)k];
        }
    }
}

static int first_supervised(const struct mr_row *row)
{
    int i = 0;

    while (i < row->n && !row->mask[i])
        i++;
    return i;
}

static int eval_row(struct eval *e, uint64_t i, struct mr_err *err)
{
    struct mr_row row = mr_dataset_row(e->data, i);
    const int32_t cu[2] = {0, row.n};
    int first = first_supervised(&row), rc;
    struct mr_dflash_batch b = {.n_seqs = 1, .n_tokens = row.n, .ids = row.ids, .cu = cu, .mask = row.mask, .features = e->features,
                                .seq = e->seq, .pos = e->pos};
    struct mr_dflash_result unused;

    if (first >= row.n - 1) {
        e->r->dropped[MR_DROP_MASKED]++;
        return 0;
    }
    for (int a = first; a < row.n - 1; a++)
        e->pos[b.n_blocks++] = a;
    rc = mr_target_model_forward(e->m, 1, row.n, row.ids, cu, e->features, NULL);
    if (!rc)
        rc = mr_dflash_forward(e->d, &b, e->argmax, e->ce, &unused);
    if (rc)
        return mr_err_set(err, MR_EXIT_FAILED, "%s: row %" PRIu64 ": the %s backend failed: %s", e->o->data, i, e->k->op->name,
                          strerror(-rc));
    mr_eval_walk(row.ids, row.n, first, e->c.block_size, e->argmax, &e->r->blocks, &e->r->advances);
    count(e, &row, first);
    e->r->rows++;
    e->r->tokens += (uint64_t)row.n;
    return 0;
}

static double accept_len(const struct mr_eval_result *r) { return r->blocks ? (double)r->advances / (double)r->blocks : 0.0; }

int mr_eval(struct mr_eval_result *r, const struct mr_eval_opts *o, struct mr_err *err)
{
    struct eval e = {.o = o, .r = r};
    int rc;

    memset(r, 0, sizeof *r);
    rc = open_all(&e, err);
    r->block_size = e.c.block_size;
    if (!rc) {
        uint64_t n = mr_dataset_rows(e.data);

        n = o->limit && o->limit < n ? o->limit : n;
        for (uint64_t i = 0; !rc && i < n; i++) {
            if (mr_dataset_len(e.data, i))
                rc = eval_row(&e, i, err);
            if (!rc && o->progress)
                o->progress(o->ctx, i + 1, n, accept_len(r));
        }
    }
    close_all(&e);
    return rc;
}

/* ---- the program --------------------------------------------------------------------------------------------------------------------- */

static void total(const struct mr_eval_result *r, uint64_t *labels, uint64_t *correct)
{
    *labels = *correct = 0;
    for (int k = 1; k < r->block_size; k++) {
        *labels += r->labels[k];
        *correct += r->correct[k];
    }
}

static double ratio(double a, uint64_t b) { return b ? a / (double)b : 0.0; }

static void print_json(const struct mr_eval_result *r)
{
    json_t *o = json_object(), *dropped = json_object(), *slots = json_array();
    uint64_t labels, correct;

    total(r, &labels, &correct);
    for (int k = 1; k < r->block_size; k++)
        json_array_append_new(slots, json_real(ratio((double)r->correct[k], r->labels[k])));
    for (int i = 0; i < MR_DROPS; i++)
        json_object_set_new(dropped, mr_drop_name[i], json_integer((json_int_t)r->dropped[i]));
    json_object_set_new(o, "accept_len", json_real(accept_len(r)));
    json_object_set_new(o, "blocks", json_integer((json_int_t)r->blocks));
    json_object_set_new(o, "rows", json_integer((json_int_t)r->rows));
    json_object_set_new(o, "tokens", json_integer((json_int_t)r->tokens));
    json_object_set_new(o, "loss", json_real(ratio(r->loss_sum, labels)));
    json_object_set_new(o, "accuracy", json_real(ratio((double)correct, labels)));
    json_object_set_new(o, "position_accuracy", slots);
    json_object_set_new(o, "dropped", dropped);
    json_dumpf(o, stdout, JSON_COMPACT | JSON_REAL_PRECISION(8));
    putchar('\n');
    json_decref(o);
}

static void print_table(const struct mr_eval_result *r)
{
    uint64_t labels, correct;

    total(r, &labels, &correct);
    printf("acceptance length  %.4f   (%" PRIu64 " tokens in %" PRIu64 " blocks, %" PRIu64 " rows)\n", accept_len(r), r->advances,
           r->blocks, r->rows);
    printf("loss               %.4f   accuracy %.4f   (%" PRIu64 " supervised slots)\n", ratio(r->loss_sum, labels),
           ratio((double)correct, labels), labels);
    printf("accuracy by slot  ");
    for (int k = 1; k < r->block_size; k++)
        printf(" %d: %.3f", k, ratio((double)r->correct[k], r->labels[k]));
    putchar('\n');
    for (int i = 0; i < MR_DROPS; i++)
        if (r->dropped[i])
            printf("rows left out: %" PRIu64 " %s\n", r->dropped[i], mr_drop_name[i]);
}

struct progress {
    uint64_t next_ns;
    int tty;
};

/* A terminal sees a line that is rewritten; anything else a plain line every 10 s. */
static void show(void *ctx, uint64_t done, uint64_t rows, double len)
{
    struct progress *p = ctx;
    uint64_t now = mr_now_ns();

    if (now < p->next_ns && !(p->tty && done == rows))
        return;
    p->next_ns = now + (p->tty ? 200000000u : 10000000000u);
    fprintf(stderr, "%seval: row %" PRIu64 " of %" PRIu64 ", acceptance length so far %.3f%s", p->tty ? "\r" : "", done, rows, len,
            p->tty && done < rows ? "" : "\n");
}

static const char synopsis[] =
    "usage: millrace eval --target DIR --draft DIR --data FILE [--limit N] [--json] [--threads N] [--device cpu|cuda:N]\n";

static int usage(const char *why, const char *what)
{
    if (why)
        fprintf(stderr, "eval: %s%s\n", why, what);
    fputs(synopsis, stderr);
    return MR_EXIT_CONFIG;
}

static int help(void)
{
    printf("%s\n"
           "Acceptance length, loss and accuracy by slot of a drafter, on rows that it was not trained on.\n"
           "  --target DIR    the target's checkpoint\n"
           "  --draft DIR     the drafter: a checkpoint of a run (runs/demo/latest) or an exported one\n"
           "  --data FILE     rows: .safetensors (millrace pack) or .jsonl\n"
           "  --limit N       the first N rows only\n"
           "  --json          one JSON object on stdout\n"
           "  --threads N     of the cpu device; default 1\n"
           "  --device NAME   default cpu\n",
           synopsis);
    return fflush(stdout) ? MR_EXIT_FAILED : MR_EXIT_OK;
}

/* A whole number in [min, max]; -1 when it is none. */
static long long number(const char *s, long long min, long long max)
{
    char *end;
    long long v = strtoll(s, &end, 10);

    return *s && !*end && v >= min && v <= max ? v : -1;
}

enum { PARSED = -1 };

/* PARSED, or the exit code after a usage line or the help. */
static int parse(int argc, char **argv, struct mr_eval_opts *o, int *json)
{
    static const struct option opt[] = {{"target", 1, NULL, 't'}, {"draft", 1, NULL, 'd'}, {"data", 1, NULL, 'f'},
                                        {"limit", 1, NULL, 'n'},  {"json", 0, NULL, 'j'},  {"threads", 1, NULL, 'p'},
                                        {"device", 1, NULL, 'k'}, {"help", 0, NULL, 'h'},  {NULL, 0, NULL, 0}};
    long long v;
    int c;

    optind = 1;
    while ((c = getopt_long(argc, argv, "h", opt, NULL)) != -1) {
        switch (c) {
        case 'h': return help();
        case 't': o->target = optarg; break;
        case 'd': o->draft = optarg; break;
        case 'f': o->data = optarg; break;
        case 'k': o->device = optarg; break;
        case 'j': *json = 1; break;
        case 'n':
        case 'p':
            v = number(optarg, 1, c == 'n' ? INT64_MAX : 1024);
            if (v < 0)
                return usage(c == 'n' ? "--limit wants a whole number of rows, at least 1, not " : "--threads wants 1 to 1024, not ",
                             optarg);
            if (c == 'n')
                o->limit = (uint64_t)v;
            else
                o->threads = (int)v;
            break;
        default: return usage(NULL, NULL);
        }
    }
    if (optind < argc)
        return usage("unexpected argument ", argv[optind]);
    return o->target && o->draft && o->data ? PARSED : usage("--target, --draft and --data are all needed", "");
}

int mr_eval_main(int argc, char **argv)
{
    struct progress p = {.next_ns = mr_now_ns() + 10000000000u, .tty = isatty(STDERR_FILENO)};
    struct mr_eval_opts o = {.device = "cpu", .threads = 1, .progress = show, .ctx = &p};
    struct mr_eval_result r;
    struct mr_err err = {0};
    int json = 0, rc = parse(argc, argv, &o, &json);

    if (rc != PARSED)
        return rc;
    if (p.tty)
        p.next_ns = 0;
    if (mr_eval(&r, &o, &err)) {
        fprintf(stderr, "eval: %s\n", err.msg);
        return err.code;
    }
    if (json)
        print_json(&r);
    else
        print_table(&r);
    return fflush(stdout) ? MR_EXIT_FAILED : MR_EXIT_OK;
}
