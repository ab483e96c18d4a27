/* golden_dflash DIR [DEVICE]: compares a drafter's forward, backward and first optimizer step with reference vectors.
 *
 * DIR holds config.json (the drafter's), meta.json ({"gamma", "loss"?}) and golden.safetensors, in one of two layouts (docs/dflash.md 8):
 *   rows    in.{input_ids,loss_mask,target_hidden} (N,S..), in.{anchors,keep} (N,n), target.{embed_tokens,lm_head}.weight, w.*, act.*,
 *           out.{loss,loss_num,loss_den,acc}, g.*, opt.{lr0,grad_norm}, w1.*, m1.*
 *   ragged  s{i}.{input_ids,loss_mask,anchors,features,hidden,logits}, embed, head (else: embed), param.*, grad.*, loss, loss_sum, weight_sum,
 *           yard.* (what bf16 costs PyTorch's gradients, relative rms; said beside ours when we compute in bf16)
 * "loss" in meta.json is "ce" or "dpace" when it is a string; else the golden denominator says it: D-PACE divides by the samples.
 * The gradient is computed twice: all blocks in one chunk, and in chunks of two blocks.  Exit code 0: all within tolerance.
 */
#include <jansson.h>

#include "actors/backend.h"
#include "actors/dflash.h"
#include "test/golden.h"

enum { MAX_SEQS = 64, MAX_SEEN = 256 };

struct set {
    struct golden g;
    struct mr_k *k;
    struct mr_drafter_config c;
    struct mr_dlayout l;
    struct mr_frozen frozen;
    int ragged;                      /* layout */
    const char *param, *grad;        /* name prefixes */
    double gamma;
    int loss;
    int low;                         /* bf16 somewhere: low tolerances */
    /* the batch */
    int n_seqs, n_tokens, n_blocks, n_slots;    /* n_slots: block places of a row in the golden file, padded ones included */
    int32_t cu[MAX_SEQS + 1], *ids, *seq, *pos, *place;
    uint8_t *mask;
    float *features;                 /* host */
    void *dev_features;
    float *weights;                  /* (P) device */
    /* what the tap saw */
    struct { char name[64]; int cols; float *x; } seen[MAX_SEEN];
    int n_seen;
};

/* ---- reading a set ------------------------------------------------------------------------------------------------------------ */

static void read_meta(struct set *s, const char *dir)
{
    char path[4096];
    json_error_t e;
    json_t *root, *gamma, *loss;

    snprintf(path, sizeof path, "%s/meta.json", dir);
    root = json_load_file(path, 0, &e);
    if (!root)
        golden_die(e.text);
    gamma = json_object_get(root, "gamma");
    loss = json_object_get(root, "loss");
    s->gamma = json_is_number(gamma) ? json_number_value(gamma) : 0.0;
    s->loss = json_is_string(loss) ? !strncmp(json_string_value(loss), "dpace", 5) : -1;
    json_decref(root);
}

static void add_row(struct set *s, int n, const int32_t *ids, const float *mask, const float *features)
{
    size_t F = (size_t)s->c.K * (size_t)s->c.target_hidden, old = (size_t)s->n_tokens, all = old + (size_t)n;

    if (s->n_seqs == MAX_SEQS)
        golden_die("more sequences than this program holds");
    s->ids = realloc(s->ids, (all + 1) * sizeof *s->ids);
    s->mask = realloc(s->mask, all + 1);
    s->features = realloc(s->features, (all * F + 1) * sizeof *s->features);
    if (!s->ids || !s->mask || !s->features)
        golden_die("out of memory");
    memcpy(s->ids + old, ids, (size_t)n * sizeof *ids);
    memcpy(s->features + old * F, features, (size_t)n * F * sizeof *features);
    for (int t = 0; t < n; t++)
        s->mask[old + (size_t)t] = mask[t] > 0.5f;
    s->n_tokens += n;
    s->cu[++s->n_seqs] = s->n_tokens;
}

static void add_block(struct set *s, int seq, int pos, int place)
{
    size_t n = (size_t)s->n_blocks + 1;

    s->seq = realloc(s->seq, n * sizeof *s->seq);
    s->pos = realloc(s->pos, n * sizeof *s->pos);
    s->place = realloc(s->place, n * sizeof *s->place);
    if (!s->seq || !s->pos || !s->place)
        golden_die("out of memory");
    s->seq[s->n_blocks] = seq;
    s->pos[s->n_blocks] = pos;
    s->place[s->n_blocks++] = place;
}

static void read_rows(struct set *s)
{
    const struct mr_st_tensor *t = golden_need(&s->g, "in.input_ids"), *a = golden_need(&s->g, "in.anchors");
    int N = (int)t->shape[0], S = (int)t->shape[1];
    int32_t *ids = golden_i32(&s->g, "in.input_ids"), *anchors = golden_i32(&s->g, "in.anchors");
    float *mask = golden_f32(&s->g, "in.loss_mask"), *features = golden_f32(&s->g, "in.target_hidden"),
          *keep = golden_f32(&s->g, "in.keep");
    size_t F = (size_t)s->c.K * (size_t)s->c.target_hidden;

    s->n_slots = (int)a->shape[1];
    for (int r = 0; r < N; r++) {
        size_t at = (size_t)r * (size_t)S;

        add_row(s, S, ids + at, mask + at, features + at * F);
        for (int j = 0; j < s->n_slots; j++)
            if (keep[r * s->n_slots + j] > 0.5f)
                add_block(s, r, anchors[r * s->n_slots + j], j);
    }
    free(ids);
    free(anchors);
    free(mask);
    free(features);
    free(keep);
}

static void read_ragged(struct set *s)
{
    for (int i = 0;; i++) {
        char name[5][64];
        static const char *const what[5] = {"input_ids", "loss_mask", "anchors", "features", "hidden"};
        int32_t *ids, *anchors;
        float *mask, *features;

        for (int j = 0; j < 5; j++)
            snprintf(name[j], sizeof name[j], "s%d.%s", i, what[j]);
        if (!golden_find(&s->g, name[0]))
            return;
        ids = golden_i32(&s->g, name[0]);
        mask = golden_f32(&s->g, name[1]);
        anchors = golden_i32(&s->g, name[2]);
        features = golden_f32(&s->g, name[3]);
        add_row(s, (int)golden_need(&s->g, name[0])->n, ids, mask, features);
        for (int j = 0; j < (int)golden_need(&s->g, name[2])->n; j++)
            add_block(s, i, anchors[j], j);
        free(ids);
        free(anchors);
        free(mask);
        free(features);
    }
}

static void *to_device(struct set *s, const float *x, size_t n)
{
    void *p = s->k->op->alloc(s->k, (n + 1) * (size_t)s->k->act_bytes);

    if (!p || s->k->op->load(s->k, p, x, MR_K_F32, n) || s->k->op->sync(s->k))
        golden_die("loading a tensor failed");
    return p;
}

static void read_frozen(struct set *s)
{
    const char *embed = s->ragged ? "embed" : "target.embed_tokens.weight", *own = golden_find(&s->g, "head") ? "head" : "embed";
    const char *head = s->ragged ? own : "target.lm_head.weight";
    const struct mr_st_tensor *t = golden_need(&s->g, embed), *h = golden_need(&s->g, head);
    float *e = golden_f32(&s->g, embed), *w = golden_f32(&s->g, head);

    s->frozen = (struct mr_frozen){.k = s->k, .rows = (int)t->shape[0], .vocab = (int)h->shape[0], .H = (int)t->shape[1]};
    s->frozen.embed = to_device(s, e, t->n);
    s->frozen.head = to_device(s, w, h->n);
    free(e);
    free(w);
}

static void read_weights(struct set *s)
{
    float *flat = golden_alloc(s->l.P * sizeof *flat);

    for (int i = 0; i < s->l.n; i++) {
        char name[128];
        float *x;

        snprintf(name, sizeof name, "%s%s", s->param, s->l.t[i].name);
        x = golden_f32(&s->g, name);
        if (golden_need(&s->g, name)->n != s->l.t[i].n)
            golden_die("a weight has another size than the config says");
        s->low |= golden_need(&s->g, name)->dtype == MR_ST_BF16;
        memcpy(flat + s->l.t[i].offset, x, s->l.t[i].n * sizeof *x);
        free(x);
    }
    s->weights = s->k->op->alloc(s->k, s->l.P * sizeof *flat);
    if (!s->weights || s->k->op->h2d(s->k, s->weights, flat, s->l.P * sizeof *flat) || s->k->op->sync(s->k))
        golden_die("loading the weights failed");
    free(flat);
}

static void open_set(struct set *s, const char *dir, const char *device)
{
    struct mr_err err = {0};
    char path[4096];

    snprintf(path, sizeof path, "%s/golden.safetensors", dir);
    golden_open(&s->g, path);
    s->ragged = !golden_find(&s->g, "in.input_ids");
    s->param = s->ragged ? "param." : "w.";
    s->grad = s->ragged ? "grad." : "g.";
    s->k = mr_backend_open(device, 1, 1, &err);
    if (!s->k && err.code == MR_EXIT_ENV) {
        printf("skipped: %s\n", err.msg);
        exit(77);
    }
    if (!s->k || mr_drafter_config_load(&s->c, dir, &err) || mr_dlayout_make(&s->l, &s->c))
        golden_die(err.msg);
    s->low = s->k->act_bytes != 4;
    read_meta(s, dir);
    read_frozen(s);
    read_weights(s);
    if (s->ragged)
        read_ragged(s);
    else
        read_rows(s);
    if (!s->n_seqs)
        golden_die("no sequences in the set");
    s->dev_features = to_device(s, s->features, (size_t)s->n_tokens * (size_t)s->c.K * (size_t)s->c.target_hidden);
}

/* ---- comparing ------------------------------------------------------------------------------------------------------------------ */

static int see(void *ctx, const char *what, int layer, int first_row, const void *x, int rows, int cols)
{
    struct set *s = ctx;
    int i = s->n_seen++;

    if (i == MAX_SEEN || first_row)
        golden_die("more activations than this program holds");
    if (layer >= 0 && !strcmp(what, "layer"))
        snprintf(s->seen[i].name, sizeof s->seen[i].name, "layer%d", layer);
    else if (layer >= 0)
        snprintf(s->seen[i].name, sizeof s->seen[i].name, "layer%d.%s", layer, what);
    else
        snprintf(s->seen[i].name, sizeof s->seen[i].name, "%s", what);
    s->seen[i].cols = cols;
    s->seen[i].x = golden_fetch(s->k, x, (size_t)rows * (size_t)cols);
    return 0;
}

/* Block rows as the golden file has them against ours: `ref` gets the golden rows in our order.  Returns 0 when there is no such tensor. */
static int golden_rows(struct set *s, const char *what, int cols, float *ref)
{
    size_t block = (size_t)s->c.block_size * (size_t)cols;
    int found = 0;

    for (int i = 0, j = 0; i < s->n_seqs; i++) {
        char name[96];
        float *x;
        size_t row = s->ragged ? 0 : (size_t)i * (size_t)s->n_slots * block;

        if (s->ragged)
            snprintf(name, sizeof name, "s%d.%s", i, !strcmp(what, "final") ? "hidden" : what);
        else
            snprintf(name, sizeof name, "act.%s", what);
        if (!golden_find(&s->g, name))
            return 0;
        x = golden_f32(&s->g, name);
        for (; j < s->n_blocks && s->seq[j] == i; j++, found++)
            memcpy(ref + (size_t)j * block, x + row + (size_t)s->place[j] * block, block * sizeof *x);
        free(x);
    }
    return found;
}

static double largest(const float *x, size_t n)
{
    double m = 0;

    for (size_t i = 0; i < n; i++)
        m = fmax(m, fabs((double)x[i]));
    return m;
}

static void compare_seen(struct set *s, int at)
{
    const char *what = s->seen[at].name;
    int context = !strcmp(what, "fc") || !strcmp(what, "ctx");
    size_t n = (size_t)s->seen[at].cols * (size_t)(context ? s->n_tokens : s->n_blocks * s->c.block_size);
    float *ref = golden_alloc(n * sizeof *ref);
    char name[96];
    int have;

    snprintf(name, sizeof name, "act.%s", what);
    if (context) {
        float *x = (have = !s->ragged && golden_find(&s->g, name)) ? golden_f32(&s->g, name) : NULL;

        if (x)
            memcpy(ref, x, n * sizeof *x);
        free(x);
    } else {
        have = golden_rows(s, what, s->seen[at].cols, ref);
    }
    if (have && s->low && !strcmp(what, "logits"))       /* of logits of about 4; larger ones have larger steps between them */
        golden_verdict(&s->g, name, "max abs", golden_max_abs(s->seen[at].x, ref, n), fmax(8e-2, 1e-2 * largest(ref, n)));
    else if (have)
        golden_verdict(&s->g, name, "rel rms", golden_rel_rms(s->seen[at].x, ref, n), s->low ? 2e-2 : 1e-5);
    free(ref);
}

static struct mr_dflash_batch batch_of(const struct set *s)
{
    return (struct mr_dflash_batch){.n_seqs = s->n_seqs, .n_tokens = s->n_tokens, .n_blocks = s->n_blocks, .ids = s->ids, .cu = s->cu,
                                    .mask = s->mask, .features = s->dev_features, .seq = s->seq, .pos = s->pos};
}

static struct mr_dflash *make(const struct set *s, int train, int chunk_blocks, enum mr_dflash_rows rows, const struct mr_tap *tap)
{
    struct mr_dflash_opts o = {.max_tokens = s->n_tokens, .max_seqs = s->n_seqs, .max_blocks = s->n_blocks, .train = train, .rows = rows,
                               .chunk_rows = chunk_blocks * s->c.block_size, .gamma = s->gamma, .loss = s->loss == 1, .logits = tap != NULL,
                               .tap = tap};
    struct mr_err err = {0};
    struct mr_dflash *d = mr_dflash_create(s->k, &s->c, &s->l, &s->frozen, &o, &err);

    if (!d || mr_dflash_set_param(d, s->weights))
        golden_die(err.msg);
    return d;
}

static void compare_activations(struct set *s)
{
    struct mr_tap tap = {see, s};
    struct mr_dflash *d = make(s, 0, s->n_blocks, MR_DFLASH_ALL, &tap);
    struct mr_dflash_batch b = batch_of(s);
    struct mr_dflash_result r;

    if (mr_dflash_forward(d, &b, NULL, NULL, &r))
        golden_die("forward failed");
    for (int i = 0; i < s->n_seen; i++) {
        compare_seen(s, i);
        free(s->seen[i].x);
    }
    mr_dflash_destroy(d);
}

static void compare_scalar(struct set *s, const char *what, double x, const char *rows, const char *ragged, double allowed)
{
    const char *name = s->ragged ? ragged : rows;

    if (name && golden_find(&s->g, name)) {
        double ref = (double)golden_scalar(&s->g, name);

        golden_verdict(&s->g, what, "relative", fabs(x - ref) / (fabs(ref) + 1e-30), allowed);
    }
}

/* What a set says that bf16 costs PyTorch's gradient of this tensor; 0: nothing */
static double yardstick(const struct set *s, const char *tensor)
{
    char name[128];

    snprintf(name, sizeof name, "yard.%s", tensor);
    return s->low && golden_find(&s->g, name) ? (double)golden_scalar(&s->g, name) : 0.0;
}

/* acc / weight_sum against the golden gradient of the mean loss, tensor by tensor */
static void compare_gradients(struct set *s, const float *acc, double weight_sum, const char *how)
{
    double ratio = 0, d = 0, r = 0;
    const char *at = "";

    for (int i = 0; i < s->l.n; i++) {
        const struct mr_dparam *t = &s->l.t[i];
        char name[128], line[160];
        float *ref, *x = golden_alloc(t->n * sizeof *x);
        double error, size, yard = yardstick(s, t->name);

        snprintf(name, sizeof name, "%s%s", s->grad, t->name);
        ref = golden_f32(&s->g, name);
        for (uint64_t j = 0; j < t->n; j++)
            x[j] = (float)((double)acc[t->offset + j] / weight_sum);
        snprintf(line, sizeof line, "%s %s", how, name);
        error = golden_rel_rms(x, ref, t->n);
        size = golden_rms(ref, t->n);
        golden_verdict(&s->g, line, "rel rms", error, s->low ? 5e-2 : 1e-4);
        d += error * error * size * size * (double)t->n;
        r += size * size * (double)t->n;
        if (yard > 0 && error / yard > ratio)
            ratio = error / yard, at = t->name;
        free(ref);
        free(x);
    }
    printf("%s: all gradients as one vector, relative rms %.1e", how, sqrt(d / (r + 1e-30)));
    if (ratio > 0)
        printf("; each at most %.2f of what bf16 costs PyTorch (%s)", ratio, at);
    printf("\n");
}

/* The loss and gradient in chunks of `chunk_blocks`; returns the accumulator (device). */
static float *compare_training(struct set *s, int chunk_blocks, const char *how, double *weight_sum)
{
    struct mr_dflash *d = make(s, 1, chunk_blocks, MR_DFLASH_LABELLED, NULL);
    struct mr_dflash_batch b = batch_of(s);
    struct mr_dflash_result r;
    float *acc = s->k->op->alloc(s->k, s->l.P * sizeof *acc), *host = golden_alloc(s->l.P * sizeof *host);
    double tol = s->low ? 5e-3 : 1e-5;

    if (!acc || mr_dflash_accumulate(d, &b, acc, &r) || s->k->op->d2h(s->k, host, acc, s->l.P * sizeof *host) || s->k->op->sync(s->k))
        golden_die("forward and backward failed");
    compare_scalar(s, "loss", r.loss_sum / r.weight_sum, "out.loss", "loss", tol);
    compare_scalar(s, "loss numerator", r.loss_sum, "out.loss_num", "loss_sum", tol);
    compare_scalar(s, "loss denominator", r.weight_sum, "out.loss_den", "weight_sum", tol);
    compare_scalar(s, "accuracy", (double)r.correct / (double)r.labels, "out.acc", NULL, s->low ? 0.1 : 1e-6);
    compare_gradients(s, host, r.weight_sum, how);
    *weight_sum = r.weight_sum;
    mr_dflash_destroy(d);
    free(host);
    return acc;
}

/* The first AdamW step on fp32 masters, clip 1.  Compared is what the step changed, where the gradient is not mere noise: the first
 * update is lr times the gradient's sign. */
static void compare_step(struct set *s, const float *acc, double weight_sum)
{
    float *st[5], *host = golden_alloc(s->l.P * sizeof *host), *old = golden_alloc(s->l.P * sizeof *old);
    double sumsq, norm, num = 0, den = 0;
    float lr;

    if (!golden_find(&s->g, "opt.lr0") || s->low)
        goto out;
    for (int i = 0; i < 5; i++)
        st[i] = s->k->op->alloc(s->k, s->l.P * sizeof(float));
    lr = golden_scalar(&s->g, "opt.lr0");
    if (s->k->op->sumsq(s->k, s->l.P, acc, &sumsq))
        golden_die("sumsq failed");
    norm = sqrt(sumsq) / weight_sum;
    compare_scalar(s, "gradient norm", norm, "opt.grad_norm", NULL, 1e-5);
    if (s->k->op->adamw(s->k, s->l.P, s->weights, st[0], st[1], acc, (float)(fmin(1.0, 1.0 / (norm + 1e-6)) / weight_sum), lr, 0.9f, 0.999f,
                        1e-8f, 0.0f, 1.0f - 0.9f, 1.0f - 0.999f, st[2], st[3], st[4]) ||
        s->k->op->d2h(s->k, host, st[2], s->l.P * sizeof *host) || s->k->op->d2h(s->k, old, s->weights, s->l.P * sizeof *old) ||
        s->k->op->sync(s->k))
        golden_die("adamw failed");
    for (int i = 0; i < s->l.n; i++) {
        char name[128];
        float *m1;

        snprintf(name, sizeof name, "m1.%s", s->l.t[i].name);
        m1 = golden_f32(&s->g, name);
        for (uint64_t j = 0; j < s->l.t[i].n; j++) {
            uint64_t at = s->l.t[i].offset + j;

            num += pow((double)host[at] - (double)m1[j], 2);
            den += pow((double)m1[j] - (double)old[at], 2);
        }
        free(m1);
    }
    golden_verdict(&s->g, "first optimizer step, all parameters", "rel rms", sqrt(num / den), 1e-3);
    for (int i = 0; i < 5; i++)
        s->k->op->release(s->k, st[i]);
out:
    free(host);
    free(old);
}

/* Which loss a set without a word about it was made with. */
static void guess_loss(struct set *s)
{
    const char *den = s->ragged ? "weight_sum" : "out.loss_den";

    if (s->loss < 0)
        s->loss = golden_find(&s->g, den) && fabs((double)golden_scalar(&s->g, den) - s->n_seqs) < 1e-6;
}

static void close_set(struct set *s, float *acc)
{
    s->k->op->release(s->k, acc);
    s->k->op->release(s->k, s->weights);
    s->k->op->release(s->k, s->dev_features);
    mr_frozen_release(&s->frozen);
    mr_dlayout_free(&s->l);
    mr_backend_close(s->k);
    free(s->ids);
    free(s->mask);
    free(s->features);
    free(s->seq);
    free(s->pos);
    free(s->place);
}

int main(int argc, char **argv)
{
    static struct set s;
    double weight_sum;
    float *acc;

    if (argc < 2 || argc > 3) {
        fprintf(stderr, "usage: golden_dflash DIR [cpu | cuda:N]\n");
        return 2;
    }
    open_set(&s, argv[1], argc > 2 ? argv[2] : "cpu");
    guess_loss(&s);
    printf("%d sequences, %d blocks of %d, loss %s, gamma %g, %s\n", s.n_seqs, s.n_blocks, s.c.block_size, s.loss ? "dpace" : "ce", s.gamma,
           s.low ? "bf16" : "fp32");
    compare_activations(&s);
    acc = compare_training(&s, 2, "chunked", &weight_sum);
    s.k->op->release(s.k, acc);
    acc = compare_training(&s, s.n_blocks, "whole", &weight_sum);
    compare_step(&s, acc, weight_sum);
    close_set(&s, acc);
    return golden_end(&s.g);
}
