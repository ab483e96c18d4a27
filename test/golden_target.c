/* golden_target DIR [--device cpu|cuda:N]: compares a target's forward pass with reference vectors.
 *
 * DIR holds fp32/ and or bf16/ (Hugging Face checkpoints) and goldens.safetensors: s{i}.input_ids (T), s{i}.hidden_states (L+1,T,H) as
 * Hugging Face numbers them (0 embeddings, j the output of layer j-1, L behind the final norm), s{i}.prenorm (T,H), s{i}.logits (T,V).
 * Every sequence is run alone and all are run packed into one microbatch; features are captured in a model that stops early.
 * Exit code 0: all within tolerance; 77: the device is not there.  The parameters of such sets are representable in bf16, so the fp32 vectors
 * serve both checkpoints.
 * Tolerance: f32 backends 1e-5.  bf16 backends: 1.5 times what the reference implementation loses when it computes in bf16, vector by
 * vector: bf16.s{i}.hidden_mid (T,H: hidden_states[2]), last_hidden (T,H), logits.  And packed against alone, both on the device.
 */
#include <unistd.h>

#include "actors/backend.h"
#include "actors/target_model.h"
#include "test/golden.h"

enum { MAX_SEQS = 64, MAX_LAYERS = 256 };

struct run {
    struct golden *g;
    struct mr_k *k;
    int n_seqs, n_tokens;
    int len[MAX_SEQS];
    int32_t cu[MAX_SEQS + 1];
    int32_t *ids;
    const char *ckpt;
    float *alone[MAX_SEQS];          /* logits of each sequence run alone */
    /* what the tap collects */
    float *seen[MAX_LAYERS + 3];     /* [0] embeddings, [1..L] layer outputs, [L+1] final norm, [L+2] logits */
    int n_layers;
};

static int see(void *ctx, const char *what, int layer, int first_row, const void *x, int rows, int cols)
{
    struct run *r = ctx;
    int at = !strcmp(what, "hidden") ? layer + 1 : !strcmp(what, "norm") ? r->n_layers + 1 : r->n_layers + 2;

    (void)first_row;
    free(r->seen[at]);
    r->seen[at] = golden_fetch(r->k, x, (size_t)rows * (size_t)cols);
    return 0;
}

/* What the reference loses in bf16 in `vector` of sequence s, whose f32 values are ref; times 1.5. */
static double tolerance(struct run *r, int s, const char *vector, const float *ref, size_t n)
{
    char name[64];
    double e;
    float *x;

    if (r->k->act_bytes == 4)
        return 1e-5;
    snprintf(name, sizeof name, "bf16.s%d.%s", s, vector);
    if (!golden_find(r->g, name))
        return 3e-2;
    x = golden_f32(r->g, name);
    e = golden_rel_rms(x, ref, n);
    free(x);
    return 1.5 * e;
}

static void verdict(struct run *r, const char *mode, const char *name, double e, double tol)
{
    char line[128];

    snprintf(line, sizeof line, "%s %s %s", r->ckpt, mode, name);
    golden_verdict(r->g, line, "rel rms", e, tol);
}

static void compare_hidden(struct run *r, const char *mode, int s, int row0, int H)
{
    int L = r->n_layers, mid = L < 2 ? L : 2;
    size_t TH = (size_t)r->len[s] * (size_t)H;
    double e[MAX_LAYERS + 1], worst = 0, tol_mid, tol_last;
    char name[64];
    float *ref;

    snprintf(name, sizeof name, "s%d.hidden_states", s);
    ref = golden_f32(r->g, name);
    tol_mid = tolerance(r, s, "hidden_mid", ref + (size_t)mid * TH, TH);
    tol_last = tolerance(r, s, "last_hidden", ref + (size_t)L * TH, TH);
    for (int j = 0; j <= L; j++) {
        e[j] = golden_rel_rms(r->seen[j == L ? L + 1 : j] + (size_t)row0 * (size_t)H, ref + (size_t)j * TH, TH);
        worst = e[j] > worst || isnan(e[j]) ? e[j] : worst;
    }
    free(ref);
    snprintf(name, sizeof name, "s%d.hidden_states[%d]", s, mid);
    verdict(r, mode, name, e[mid], tol_mid);
    snprintf(name, sizeof name, "s%d.hidden_states, worst layer", s);
    verdict(r, mode, name, worst, fmax(tol_mid, tol_last));
    snprintf(name, sizeof name, "s%d.prenorm", s);
    ref = golden_f32(r->g, name);
    verdict(r, mode, name, golden_rel_rms(r->seen[L] + (size_t)row0 * (size_t)H, ref, TH), tol_last);
    free(ref);
}

/* Sequence `s` of the golden file against rows `row0`.. of what was seen.  The logits of a sequence run alone are kept for the packed run. */
static void compare(struct run *r, const char *mode, int s, int row0, int H, int V)
{
    size_t n = (size_t)r->len[s] * (size_t)V;
    const float *x = r->seen[r->n_layers + 2] + (size_t)row0 * (size_t)V;
    char name[64];
    float *ref;
    double tol;

    compare_hidden(r, mode, s, row0, H);
    snprintf(name, sizeof name, "s%d.logits", s);
    ref = golden_f32(r->g, name);
    tol = tolerance(r, s, "logits", ref, n);
    verdict(r, mode, name, golden_rel_rms(x, ref, n), tol);
    free(ref);
    if (!r->alone[s]) {
        r->alone[s] = golden_alloc(n * sizeof *x);
        memcpy(r->alone[s], x, n * sizeof *x);
        return;
    }
    snprintf(name, sizeof name, "s%d.logits, packed against alone", s);
    verdict(r, mode, name, golden_rel_rms(x, r->alone[s], n), tol);
    free(r->alone[s]);
    r->alone[s] = NULL;
}

static void forward(struct run *r, struct mr_target_model *m, int n_seqs, int n, const int32_t *ids, const int32_t *cu, void *features)
{
    struct mr_tap tap = {see, r};
    int rc = mr_target_model_forward(m, n_seqs, n, ids, cu, features, &tap);

    if (rc)
        golden_die(strerror(-rc));
}

/* The features of a model that runs no further than it must: layers L-2 and 0, in this order. */
static void captured(struct run *r, const char *dir, int H)
{
    const int layers[2] = {r->n_layers > 1 ? r->n_layers - 2 : 0, 0};
    struct mr_target_model_opts o = {.layers = layers, .n_layers = 2, .max_tokens = r->n_tokens, .max_seqs = r->n_seqs};
    struct mr_err err = {0};
    struct mr_target_model *m = mr_target_model_create(r->k, dir, &o, &err);
    size_t n = (size_t)r->n_tokens * 2 * (size_t)H;
    void *features = r->k->op->alloc(r->k, n * (size_t)r->k->act_bytes);
    double worst = 0, tol = r->k->act_bytes == 4 ? 3e-5 : 0;
    float *got;

    if (!m || !features)
        golden_die(err.msg);
    forward(r, m, r->n_seqs, r->n_tokens, r->ids, r->cu, features);
    got = golden_fetch(r->k, features, n);
    for (int s = 0; s < r->n_seqs; s++) {
        char name[64];
        float *ref;

        snprintf(name, sizeof name, "s%d.hidden_states", s);
        ref = golden_f32(r->g, name);
        if (r->k->act_bytes == 2)      /* one token may lose more than all together */
            tol = fmax(tol, 3 * tolerance(r, s, "last_hidden", ref + (size_t)r->n_layers * (size_t)r->len[s] * (size_t)H,
                                          (size_t)r->len[s] * (size_t)H));
        for (int t = 0; t < r->len[s]; t++)
            for (int j = 0; j < 2; j++) {
                const float *x = got + ((size_t)(r->cu[s] + t) * 2 + (size_t)j) * (size_t)H;
                double e = golden_rel_rms(x, ref + ((size_t)(layers[j] + 1) * (size_t)r->len[s] + (size_t)t) * (size_t)H, (size_t)H);

                worst = e > worst || isnan(e) ? e : worst;
            }
        free(ref);
    }
    golden_verdict(r->g, "captured features, packed, worst token", "rel rms", worst, tol);
    free(got);
    r->k->op->release(r->k, features);
    mr_target_model_destroy(m);
}

static void run_checkpoint(struct run *r, const char *dir)
{
    struct mr_target_model_opts o = {.max_tokens = r->n_tokens, .max_seqs = r->n_seqs, .full = 1};
    struct mr_err err = {0};
    struct mr_target_model *m = mr_target_model_create(r->k, dir, &o, &err);
    int H, V;

    if (!m)
        golden_die(err.msg);
    H = mr_target_model_config(m)->hidden_size;
    V = mr_target_model_config(m)->vocab_size;
    r->n_layers = mr_target_model_config(m)->n_layers;
    if (r->n_layers > MAX_LAYERS)
        golden_die("more layers than this program holds");
    for (int s = 0; s < r->n_seqs; s++) {
        const int32_t cu[2] = {0, r->len[s]};

        forward(r, m, 1, r->len[s], r->ids + r->cu[s], cu, NULL);
        compare(r, "alone ", s, 0, H, V);
    }
    forward(r, m, r->n_seqs, r->n_tokens, r->ids, r->cu, NULL);
    for (int s = 0; s < r->n_seqs; s++)
        compare(r, "packed", s, r->cu[s], H, V);
    mr_target_model_destroy(m);
    captured(r, dir, H);
}

static void read_sequences(struct run *r)
{
    char name[64];

    for (; r->n_seqs < MAX_SEQS; r->n_seqs++) {
        const struct mr_st_tensor *t;

        snprintf(name, sizeof name, "s%d.input_ids", r->n_seqs);
        t = golden_find(r->g, name);
        if (!t)
            break;
        r->len[r->n_seqs] = (int)t->n;
        r->cu[r->n_seqs + 1] = r->cu[r->n_seqs] + (int)t->n;
    }
    if (!r->n_seqs)
        golden_die("goldens.safetensors has no s0.input_ids");
    r->n_tokens = r->cu[r->n_seqs];
    r->ids = golden_alloc((size_t)r->n_tokens * sizeof *r->ids);
    for (int s = 0; s < r->n_seqs; s++) {
        int32_t *ids;

        snprintf(name, sizeof name, "s%d.input_ids", s);
        ids = golden_i32(r->g, name);
        memcpy(r->ids + r->cu[s], ids, (size_t)r->len[s] * sizeof *ids);
        free(ids);
    }
}

static int usage(void)
{
    fprintf(stderr, "usage: golden_target DIR [--device cpu|cuda:N|GPU-uuid]\n");
    return 2;
}

int main(int argc, char **argv)
{
    static const char *const ckpt[] = {"fp32", "bf16"};
    struct golden g;
    struct mr_err err = {0};
    struct run r = {.g = &g};
    const char *device = argc == 4 ? argv[3] : "cpu";
    char path[4096];

    if (argc != 2 && (argc != 4 || strcmp(argv[2], "--device")))
        return usage();
    snprintf(path, sizeof path, "%s/goldens.safetensors", argv[1]);
    golden_open(&g, path);
    r.k = mr_backend_open(device, 1, 1, &err);
    if (!r.k && err.code == MR_EXIT_ENV) {
        printf("skipped: %s\n", err.msg);
        return 77;
    }
    if (!r.k)
        golden_die(err.msg);
    read_sequences(&r);
    for (size_t i = 0; i < sizeof ckpt / sizeof ckpt[0]; i++) {
        snprintf(path, sizeof path, "%s/%s/config.json", argv[1], ckpt[i]);
        if (access(path, R_OK))
            continue;
        snprintf(path, sizeof path, "%s/%s", argv[1], ckpt[i]);
        r.ckpt = ckpt[i];
        run_checkpoint(&r, path);
    }
    for (size_t i = 0; i < sizeof r.seen / sizeof r.seen[0]; i++)
        free(r.seen[i]);
    free(r.ids);
    mr_backend_close(r.k);
    return golden_end(&g);
}
