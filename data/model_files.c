/* The weight files of a target: see model_config.h and docs/target-models.md 5.2.
 *
 * The expected set comes from the config, never from the files found: each promised tensor must be in the shard that the index names (or in
 * the single file), once, with its shape and a float type.  So a missing shard, a renamed tensor or another model's index is an error here
 * and not noise in the output.
 */
#include "data/model_config.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/hash.h"
#include "base/log.h"
#include "data/config_pvt.h"

enum { LISTED = 10 };

/* A message that grows by one line per finding, up to LISTED. */
struct findings {
    char text[1400];
    int n;
};

static void found(struct findings *f, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static void found(struct findings *f, const char *fmt, ...)
{
    size_t used = strlen(f->text);
    va_list ap;

    if (f->n++ >= LISTED)
        return;
    va_start(ap, fmt);
    used += (size_t)snprintf(f->text + used, sizeof f->text - used, "\n  ");
    if (used < sizeof f->text)
        vsnprintf(f->text + used, sizeof f->text - used, fmt, ap);
    va_end(ap);
}

/* ---- shards --------------------------------------------------------------------------------------------------------------- */

static int add_shard(struct mr_model_files *f, const char *path, struct mr_err *err)
{
    struct mr_st *grown = realloc(f->shard, (size_t)(f->n_shards + 1) * sizeof *grown);

    if (!grown)
        return mr_err_set(err, MR_EXIT_ENV, "%s: out of memory", path);
    f->shard = grown;
    if (mr_st_open(&f->shard[f->n_shards], path, err))
        return -1;
    f->n_shards++;
    return 0;
}

static int shard_by_name(const struct mr_model_files *f, const char *dir, const char *name)
{
    size_t n = strlen(dir);

    for (int i = 0; i < f->n_shards; i++)
        if (!strcmp(f->shard[i].path + n + 1, name))
            return i;
    return -1;
}

/* How many tensors the index puts into `name`: says how bad a missing shard is. */
static int tensors_in(json_t *map, const char *name)
{
    const char *key, *s;
    json_t *v;
    int n = 0;

    json_object_foreach(map, key, v) n += (s = json_string_value(v)) != NULL && !strcmp(s, name);
    return n;
}

static int open_named(struct mr_model_files *f, const char *dir, const char *name, const struct mr_json *index, json_t *map,
                      struct mr_err *err)
{
    char path[4096];
    struct stat st;

    if (!*name || strchr(name, '/') || !strcmp(name, "..") || !strcmp(name, "."))
        return mr_json_error(index, "/weight_map", err, "names the file \"%.200s\"; only plain file names beside the index are allowed",
                             name);
    snprintf(path, sizeof path, "%s/%s", dir, name);
    if (stat(path, &st)) {
        int broken = !lstat(path, &st) && S_ISLNK(st.st_mode);

        return mr_err_set(err, MR_EXIT_CONFIG, "%s: %s, but %s says that it holds %d tensors: fetch it again", path,
                          broken ? "is a symbolic link to nothing" : "is missing", index->path, tensors_in(map, name));
    }
    return add_shard(f, path, err);
}

static int open_index(struct mr_model_files *f, const char *dir, const struct mr_json *index, struct mr_err *err)
{
    json_t *map = mr_json_at(index->root, "/weight_map"), *v;
    const char *key;

    if (!json_is_object(map) || !json_object_size(map))
        return mr_json_error(index, "/weight_map", err, "must be an object { tensor: file } with at least one entry");
    json_object_foreach(map, key, v)
    {
        if (!json_is_string(v))
            return mr_json_error(index, "/weight_map", err, "tensor \"%.200s\": a file name is wanted", key);
        if (shard_by_name(f, dir, json_string_value(v)) < 0 && open_named(f, dir, json_string_value(v), index, map, err))
            return -1;
    }
    return 0;
}

static int promised(const struct mr_model_config *c, const char *name)
{
    int layer, n = 0;

    if (!strcmp(name, "model.embed_tokens.weight") || !strcmp(name, "model.norm.weight") || !strcmp(name, "lm_head.weight"))
        return 1;
    if (strstr(name, "rotary_emb.inv_freq")) /* old files; computed here */
        return 1;
    return sscanf(name, "model.layers.%d.%n", &layer, &n) == 1 && n > 0 && layer >= 0 && layer < c->n_layers;
}

/* Promised, and read. */
static int needed(const struct mr_model_config *c, const char *name)
{
    return promised(c, name) && !strstr(name, "rotary_emb.inv_freq") && !(c->tied && !strcmp(name, "lm_head.weight"));
}

/* A tensor that the model needs and the index does not name.  docs/target-models.md 5.2 wants it named, because loaders that go by the index
 * take it for missing and make one up. */
static void find_unnamed(const struct mr_model_files *f, const struct mr_model_config *c, const char *dir, json_t *map, struct findings *bad)
{
    for (int s = 0; s < f->n_shards; s++)
        for (int i = 0; i < f->shard[s].n; i++) {
            const char *name = f->shard[s].t[i].name;

            if (needed(c, name) && !json_object_get(map, name))
                found(bad, "%s: in %s, but the index does not name it", name, f->shard[s].path + strlen(dir) + 1);
        }
}

/* Each name of the index is in its shard, and in no other; each tensor that is needed is in the index. */
static int check_index(const struct mr_model_files *f, const struct mr_model_config *c, const char *dir, const struct mr_json *index,
                       struct mr_err *err)
{
    struct findings bad = {0};
    const char *key;
    json_t *v, *map = mr_json_at(index->root, "/weight_map");
    double claimed = json_number_value(mr_json_at(index->root, "/metadata/total_size")), bytes = 0;

    json_object_foreach(map, key, v)
    {
        int home = shard_by_name(f, dir, json_string_value(v));

        for (int i = 0; i < f->n_shards; i++) {
            const struct mr_st_tensor *t = mr_st_find(&f->shard[i], key);

            if (i == home && !t)
                found(&bad, "%s: not in %s", key, json_string_value(v));
            else if (i != home && t)
                found(&bad, "%s: in %s, but the index says %s", key, f->shard[i].path + strlen(dir) + 1, json_string_value(v));
            bytes += t ? (double)t->bytes : 0;
        }
    }
    find_unnamed(f, c, dir, map, &bad);
    if (bad.n)
        return mr_err_set(err, MR_EXIT_CONFIG, "%s: %d tensors are not where the index says (files of different revisions?):%s",
                          index->path, bad.n, bad.text);
    if (claimed > 0 && claimed != bytes)
        mr_warn("%s: total_size is %.0f, the tensors have %.0f bytes", index->path, claimed, bytes);
    return 0;
}

static int open_files(struct mr_model_files *f, const struct mr_model_config *c, const char *dir, struct mr_err *err)
{
    char path[4096];
    struct stat st;
    struct mr_json index;
    int rc;

    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    if (!stat(path, &st))
        return add_shard(f, path, err);
    if (!lstat(path, &st))
        return mr_err_set(err, MR_EXIT_CONFIG, "%s: is a symbolic link to nothing: fetch it again", path);
    snprintf(path, sizeof path, "%s/model.safetensors.index.json", dir);
    if (stat(path, &st))
        return mr_err_set(err, MR_EXIT_CONFIG,
                          "%s: neither model.safetensors nor model.safetensors.index.json is there (pickled .bin files are "
                          "not read: convert them)",
                          dir);
    if (mr_json_load(&index, path, err))
        return -1;
    rc = open_index(f, dir, &index, err);
    if (!rc)
        rc = check_index(f, c, dir, &index, err);
    mr_json_free(&index);
    return rc;
}

const struct mr_st_tensor *mr_model_find(const struct mr_model_files *f, const char *name, const struct mr_st **st)
{
    for (int i = 0; i < f->n_shards; i++) {
        const struct mr_st_tensor *t = mr_st_find(&f->shard[i], name);

        if (t) {
            if (st)
                *st = &f->shard[i];
            return t;
        }
    }
    return NULL;
}

/* ---- promises ------------------------------------------------------------------------------------------------------------- */

/* cols 0: a vector */
static const struct mr_st_tensor *expect(const struct mr_model_files *f, struct findings *bad, const char *name, int rows, int cols)
{
    const struct mr_st_tensor *t = mr_model_find(f, name, NULL);
    int dims = cols ? 2 : 1;
    char want[40], seen[120] = "[";

    if (!t) {
        found(bad, "%s: missing", name);
        return NULL;
    }
    if (t->dtype != MR_ST_F32 && t->dtype != MR_ST_BF16 && t->dtype != MR_ST_F16) {
        found(bad, "%s: type %s; F32, BF16 or F16 is wanted (quantised?)", name, t->dtype_name);
        return NULL;
    }
    if (t->n_dims == dims && t->shape[0] == (uint64_t)rows && (!cols || t->shape[1] == (uint64_t)cols))
        return t;
    for (int i = 0; i < t->n_dims; i++)
        snprintf(seen + strlen(seen), sizeof seen - strlen(seen), "%s%llu", i ? "," : "", (unsigned long long)t->shape[i]);
    snprintf(want, sizeof want, cols ? "[%d,%d]" : "[%d]", rows, cols);
    found(bad, "%s: shape %s]; config.json promises %s", name, seen, want);
    return NULL;
}

static void expect_layer(const struct mr_model_files *f, const struct mr_model_config *c, int layer, struct findings *bad)
{
    const int H = c->hidden_size, q = c->n_heads * c->head_dim, kv = c->n_kv_heads * c->head_dim, qwen = c->arch == MR_ARCH_QWEN3;
    const struct {
        const char *name;
        int rows, cols;
    } part[] = {{"input_layernorm", H, 0},
                {"self_attn.q_proj", q, H},
                {"self_attn.k_proj", kv, H},
                {"self_attn.v_proj", kv, H},
                {"self_attn.o_proj", H, q},
                {"post_attention_layernorm", H, 0},
                {"mlp.gate_proj", c->intermediate_size, H},
                {"mlp.up_proj", c->intermediate_size, H},
                {"mlp.down_proj", H, c->intermediate_size},
                {"self_attn.q_norm", c->head_dim, 0},
                {"self_attn.k_norm", c->head_dim, 0}};
    char name[128];

    for (int i = 0; i < (qwen ? 11 : 9); i++) {
        snprintf(name, sizeof name, "model.layers.%d.%s.weight", layer, part[i].name);
        expect(f, bad, name, part[i].rows, part[i].cols);
    }
}

/* The embedding decides how many ids there are: at least vocab_size rows, often more. */
static void expect_embedding(const struct mr_model_files *f, struct mr_model_config *c, struct findings *bad)
{
    const struct mr_st_tensor *t = mr_model_find(f, "model.embed_tokens.weight", NULL);
    int rows = t && t->n_dims == 2 && t->shape[0] >= (uint64_t)c->vocab_size && t->shape[0] <= 1u << 24 ? (int)t->shape[0] : c->vocab_size;

    if (expect(f, bad, "model.embed_tokens.weight", rows, c->hidden_size))
        c->embedding_rows = rows;
}

/* Equal where sampled: the files of tied models often hold the head a second time. */
static int same_bytes(const struct mr_model_files *f, const char *a, const char *b)
{
    const struct mr_st *sa = NULL, *sb = NULL;
    const struct mr_st_tensor *ta = mr_model_find(f, a, &sa), *tb = mr_model_find(f, b, &sb);
    uint64_t step, chunk = 4096;

    MR_ASSERT(ta && tb);
    if (ta->bytes != tb->bytes)
        return 0;
    step = ta->bytes > 256 * chunk ? ta->bytes / 256 : chunk;
    for (uint64_t at = 0; at < ta->bytes; at += step) {
        uint64_t n = ta->bytes - at < chunk ? ta->bytes - at : chunk;

        if (memcmp((const char *)mr_st_data(sa, ta) + at, (const char *)mr_st_data(sb, tb) + at, n))
            return 0;
    }
    return 1;
}

/* Four cases of tied x present. */
static void expect_head(const struct mr_model_files *f, const struct mr_model_config *c, struct findings *bad)
{
    int present = mr_model_find(f, "lm_head.weight", NULL) != NULL;

    if (!c->tied && !present)
        found(bad, "lm_head.weight: missing, and tie_word_embeddings is not true (a random head would be useless)");
    else if (!c->tied)
        expect(f, bad, "lm_head.weight", c->embedding_rows, c->hidden_size);
    else if (present && !same_bytes(f, "lm_head.weight", "model.embed_tokens.weight"))
        mr_warn("%s: lm_head.weight differs from the embedding, but tie_word_embeddings is true: the embedding is used as the head",
                f->shard[0].path);
}

static void warn_surplus(const struct mr_model_files *f, const struct mr_model_config *c, const char *dir)
{
    struct findings extra = {0};

    for (int s = 0; s < f->n_shards; s++)
        for (int i = 0; i < f->shard[s].n; i++)
            if (!promised(c, f->shard[s].t[i].name))
                found(&extra, "%s", f->shard[s].t[i].name);
    if (extra.n)
        mr_warn("%s: %d tensors that config.json does not promise are not used:%s", dir, extra.n, extra.text);
}

/* A tensor that is in a layer and has no place in the architecture (a bias, a scale) changes the forward pass: refuse. */
static void refuse_strangers(const struct mr_model_files *f, const struct mr_model_config *c, struct findings *bad)
{
    static const char *const parts[] = {
        "input_layernorm.weight",  "post_attention_layernorm.weight", "self_attn.q_proj.weight", "self_attn.k_proj.weight",
        "self_attn.v_proj.weight", "self_attn.o_proj.weight",         "mlp.gate_proj.weight",    "mlp.up_proj.weight",
        "mlp.down_proj.weight",    "self_attn.q_norm.weight",         "self_attn.k_norm.weight"};
    const int n_parts = c->arch == MR_ARCH_QWEN3 ? 11 : 9;

    for (int s = 0; s < f->n_shards; s++) {
        for (int i = 0; i < f->shard[s].n; i++) {
            const char *name = f->shard[s].t[i].name;
            int layer, at = 0, k = 0;

            if (sscanf(name, "model.layers.%d.%n", &layer, &at) != 1 || !at || strstr(name, "rotary_emb.inv_freq"))
                continue;
            while (k < n_parts && strcmp(name + at, parts[k]))
                k++;
            if (k == n_parts || layer < 0 || layer >= c->n_layers)
                found(bad, "%s: config.json does not promise it", name);
        }
    }
}

/* ---- content -------------------------------------------------------------------------------------------------------------- */

enum { SAMPLES = 4, PIECE = 256 };

/* SAMPLES pieces of a large tensor, evenly spread, the first and the last bytes among them; all of a small one.  Piece i, of *n bytes. */
static const char *piece(const char *p, uint64_t bytes, uint64_t i, uint64_t *n)
{
    if (bytes <= SAMPLES * PIECE) {
        *n = i ? 0 : bytes;
        return p;
    }
    *n = PIECE;
    return p + (bytes - PIECE) / (SAMPLES - 1) * i + (i == SAMPLES - 1 ? (bytes - PIECE) % (SAMPLES - 1) : 0);
}

static uint64_t sample(uint64_t h, const char *p, uint64_t bytes)
{
    for (uint64_t i = 0, n; i < SAMPLES; i++) {
        const char *at = piece(p, bytes, i, &n);

        if (n)
            h = mr_hash(h, at, n);
    }
    return h;
}

/* The pages of all pieces, asked for at once: one after the other, each would be waited for (398 tensors, 300 MB of which nothing is in
 * memory: 165 ms, and 13 ms so, measured on a virtual disk). */
static uint64_t ask(uint64_t h, const char *p, uint64_t bytes)
{
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);

    for (uint64_t i = 0, n; i < SAMPLES; i++) {
        uintptr_t at = (uintptr_t)piece(p, bytes, i, &n), from = at & ~(page - 1);

        if (n)
            madvise((void *)from, at + n - from, MADV_WILLNEED);     /* refused: then they are waited for */
    }
    return h;
}

/* A sum over tensors, so that how a checkpoint is cut into shards does not matter. */
static uint64_t over_tensors(const struct mr_model_files *f, const struct mr_model_config *c,
                             uint64_t (*fn)(uint64_t h, const char *p, uint64_t bytes))
{
    uint64_t all = 0;

    for (int s = 0; s < f->n_shards; s++)
        for (int i = 0; i < f->shard[s].n; i++) {
            const struct mr_st_tensor *t = &f->shard[s].t[i];

            if (needed(c, t->name))
                all += fn(mr_hash(MR_HASH_INIT, t->name, strlen(t->name)), mr_st_data(&f->shard[s], t), t->bytes);
        }
    return all;
}

uint64_t mr_model_content(const struct mr_model_files *f, const struct mr_model_config *c)
{
    over_tensors(f, c, ask);
    return (f->random ? f->seed : 0) + over_tensors(f, c, sample);
}

int mr_model_files_open(struct mr_model_files *f, struct mr_model_config *c, const char *dir, struct mr_err *err)
{
    struct findings bad = {0};
    char config_dir[4096];

    *f = (struct mr_model_files){0};
    f->random = mr_model_random(dir, config_dir, sizeof config_dir, &f->seed, err);
    if (f->random)
        return f->random < 0 ? -1 : 0;       /* nothing is read: the config promises, and the seed keeps */
    if (open_files(f, c, dir, err))
        goto fail;
    expect_embedding(f, c, &bad);
    for (int i = 0; i < c->n_layers; i++)
        expect_layer(f, c, i, &bad);
    expect(f, &bad, "model.norm.weight", c->hidden_size, 0);
    if (!bad.n)
        expect_head(f, c, &bad);
    refuse_strangers(f, c, &bad);
    if (bad.n) {
        mr_err_set(err, MR_EXIT_CONFIG, "%s: %d tensors do not fit config.json:%s%s", dir, bad.n, bad.text,
                   bad.n > LISTED ? "\n  ..." : "");
        goto fail;
    }
    warn_surplus(f, c, dir);
    return 0;
fail:
    mr_model_files_close(f);
    return -1;
}

void mr_model_files_close(struct mr_model_files *f)
{
    for (int i = 0; i < f->n_shards; i++)
        mr_st_close(&f->shard[i]);
    free(f->shard);
    *f = (struct mr_model_files){0};
}
