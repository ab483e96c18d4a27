/* The config.json of a target: see model_config.h and docs/target-models.md 1, 2.
 *
 * Two architectures, Qwen3 and Llama, dense and plain.  Every key that would change the forward pass and is not implemented is refused
 * by name; keys that only matter for generation or training of the target are ignored.
 */
#include "data/model_config.h"

#include <math.h>
#include <string.h>

#include "base/hash.h"
#include "data/config_pvt.h"

static const struct {
    const char *architecture, *model_type;
    enum mr_arch arch;
} archs[] = {{"Qwen3ForCausalLM", "qwen3", MR_ARCH_QWEN3}, {"LlamaForCausalLM", "llama", MR_ARCH_LLAMA}};

static int read_arch(const struct mr_json *j, struct mr_model_config *c, struct mr_err *err)
{
    const char *name = json_string_value(mr_json_at(j->root, "/architectures/0"));
    const char *type = json_string_value(mr_json_at(j->root, "/model_type"));

    if (!name && !type)
        return mr_json_error(j, "/architectures", err,
                             "is missing, and model_type too; \"Qwen3ForCausalLM\" or \"LlamaForCausalLM\" is wanted");
    for (int i = 0; i < 2; i++) {
        if (name && strcmp(name, archs[i].architecture))
            continue;
        if (!type || !strcmp(type, archs[i].model_type)) {
            c->arch = archs[i].arch;
            return 0;
        }
        if (name)
            return mr_json_error(j, "/model_type", err, "is \"%.60s\", but architectures says \"%s\": they do not belong together", type,
                                 name);
    }
    return mr_json_error(j, name ? "/architectures" : "/model_type", err,
                         "is \"%.80s\", which is not implemented; \"Qwen3ForCausalLM\" or \"LlamaForCausalLM\" is wanted",
                         name ? name : type);
}

/* What would change the forward pass and is not implemented. */
static int refuse_variants(const struct mr_json *j, const struct mr_model_config *c, struct mr_err *err)
{
    json_t *types = mr_json_at(j->root, "/layer_types"), *v;
    size_t i;

    if (mr_cfg_has(j, "/text_config"))
        return mr_json_error(j, "/text_config", err,
                             "a nested text model is not implemented for this architecture: give the text-only checkpoint");
    if (mr_cfg_has(j, "/quantization_config"))
        return mr_json_error(j, "/quantization_config", err, "quantised checkpoints are not implemented: give the bf16, f16 or f32 one");
    if (mr_cfg_must_be(j, "/attention_bias", 0, err) || mr_cfg_must_be(j, "/mlp_bias", 0, err) ||
        mr_cfg_must_be(j, "/use_sliding_window", 0, err))
        return -1;
    if (c->arch == MR_ARCH_LLAMA && mr_cfg_has(j, "/sliding_window"))
        return mr_json_error(j, "/sliding_window", err, "sliding-window attention is not implemented for targets; null is wanted");
    if (!mr_cfg_has(j, "/layer_types"))
        return 0;
    if (!json_is_array(types) || json_array_size(types) != (size_t)c->n_layers)
        return mr_json_error(j, "/layer_types", err, "must have one entry per layer: %d", c->n_layers);
    json_array_foreach(types, i, v) if (!json_is_string(v) || strcmp(json_string_value(v), "full_attention")) return mr_json_error(
        j, "/layer_types", err, "entry %zu is %s%.40s, which is not implemented for targets; \"full_attention\" is wanted", i,
        json_is_string(v) ? "" : "no string", json_is_string(v) ? json_string_value(v) : "");
    return 0;
}

/* Llama files may leave head_dim and num_key_value_heads out: the format defines them then (docs/target-models.md 2). */
static int read_heads(const struct mr_json *j, struct mr_model_config *c, struct mr_err *err)
{
    int llama = c->arch == MR_ARCH_LLAMA;

    if (mr_cfg_int(j, "/num_attention_heads", 1, 1024, &c->n_heads, err))
        return -1;
    c->n_kv_heads = c->n_heads;
    if ((!llama || mr_cfg_has(j, "/num_key_value_heads")) && mr_cfg_int(j, "/num_key_value_heads", 1, 1024, &c->n_kv_heads, err))
        return -1;
    if (c->n_heads % c->n_kv_heads)
        return mr_json_error(j, "/num_key_value_heads", err, "is %d, which does not divide num_attention_heads = %d", c->n_kv_heads,
                             c->n_heads);
    if (!llama || mr_cfg_has(j, "/head_dim")) {
        if (mr_cfg_int(j, "/head_dim", 2, 1024, &c->head_dim, err))
            return -1;
    } else if (c->hidden_size % c->n_heads) {
        return mr_json_error(j, "/head_dim", err, "is missing, and hidden_size %d is no multiple of num_attention_heads %d", c->hidden_size,
                             c->n_heads);
    } else {
        c->head_dim = c->hidden_size / c->n_heads;
    }
    if (c->head_dim % 2)
        return mr_json_error(j, "/head_dim", err, "is %d; an even number is wanted: rotary embedding turns pairs", c->head_dim);
    return 0;
}

/* eos_token_id is a number or a list; whatever else stands there is no concern of the forward pass. */
static void read_special(const struct mr_json *j, struct mr_model_config *c)
{
    json_t *eos = mr_json_at(j->root, "/eos_token_id"), *pad = mr_json_at(j->root, "/pad_token_id"), *v;
    size_t i;

    c->pad = json_is_integer(pad) ? (int)json_integer_value(pad) : -1;
    if (json_is_integer(eos))
        c->eos[c->n_eos++] = (int)json_integer_value(eos);
    json_array_foreach(eos, i, v) if (json_is_integer(v) && c->n_eos < 8) c->eos[c->n_eos++] = (int)json_integer_value(v);
}

static int read_all(const struct mr_json *j, struct mr_model_config *c, struct mr_err *err)
{
    struct mr_cfg_rope r;

    if (read_arch(j, c, err) || mr_cfg_int(j, "/num_hidden_layers", 1, 1024, &c->n_layers, err) || refuse_variants(j, c, err) ||
        mr_cfg_int(j, "/vocab_size", 2, 1 << 24, &c->vocab_size, err) || mr_cfg_int(j, "/hidden_size", 1, 1 << 17, &c->hidden_size, err) ||
        mr_cfg_int(j, "/intermediate_size", 1, 1 << 20, &c->intermediate_size, err) || read_heads(j, c, err) ||
        mr_cfg_int(j, "/max_position_embeddings", 1, 1 << 28, &c->max_position, err) ||
        mr_cfg_positive(j, "/rms_norm_eps", &c->rms_eps, err) || mr_cfg_silu(j, err) ||
        mr_cfg_bool(j, "/tie_word_embeddings", &c->tied, err) || mr_cfg_rope(j, c->max_position, &r, err))
        return -1;
    c->rope_theta = r.theta;
    c->rope_kind = r.kind;
    c->rope_factor = r.factor;
    c->rope_low = r.low;
    c->rope_high = r.high;
    c->rope_orig = r.orig;
    c->embedding_rows = c->vocab_size;
    read_special(j, c);
    return 0;
}

int mr_model_config_synthetic(struct mr_model_config *c, const char *spec, struct mr_err *err)
{
    int H, L, V, end = 0;

    memset(c, 0, sizeof *c);
    if (sscanf(spec, "synthetic:hidden=%d,layers=%d,vocab=%d%n", &H, &L, &V, &end) != 3 || spec[end] || H < 2 || H % 2 || H > 1 << 17 ||
        L < 2 || L > 1024 || V < 2 || V > 1 << 24)
        return mr_err_set(err, MR_EXIT_CONFIG,
                          "/target/checkpoint: \"%s\": the form is synthetic:hidden=H,layers=L,vocab=V with an even H, L >= 2 and "
                          "V >= 2",
                          spec);
    *c = (struct mr_model_config){.arch = MR_ARCH_QWEN3,
                                  .vocab_size = V,
                                  .hidden_size = H,
                                  .intermediate_size = H,
                                  .n_layers = L,
                                  .n_heads = 1,
                                  .n_kv_heads = 1,
                                  .head_dim = H,
                                  .max_position = 1 << 28,
                                  .rms_eps = 1e-6,
                                  .rope_theta = 1e4,
                                  .tied = 1,
                                  .pad = -1,
                                  .embedding_rows = V};
    return 0;
}

int mr_model_random(const char *spec, char *dir, size_t bytes, uint64_t *seed, struct mr_err *err)
{
    const char *from = spec + strlen("random:"), *q;
    unsigned long long n = 0;
    int end = 0;

    if (strncmp(spec, "random:", 7))
        return 0;
    q = strrchr(from, '?');
    if (q && (sscanf(q, "?seed=%llu%n", &n, &end) != 1 || q[end]))
        return mr_err_set(err, MR_EXIT_CONFIG, "/target/checkpoint: \"%s\": the form is random:DIR?seed=N, DIR with a config.json", spec);
    *seed = q ? n : 1;
    if ((size_t)snprintf(dir, bytes, "%.*s", q ? (int)(q - from) : (int)strlen(from), from) >= bytes)
        return mr_err_set(err, MR_EXIT_CONFIG, "/target/checkpoint: \"%s\" is too long", spec);
    return 1;
}

int mr_model_config_load(struct mr_model_config *c, const char *dir, struct mr_err *err)
{
    char config_dir[4096];
    struct mr_json j;
    uint64_t seed;
    int rc;

    memset(c, 0, sizeof *c);
    rc = mr_model_random(dir, config_dir, sizeof config_dir, &seed, err);
    if (rc < 0 || mr_cfg_open(&j, rc ? config_dir : dir, err))
        return -1;
    rc = read_all(&j, c, err);
    mr_json_free(&j);
    return rc;
}

/* The reference computes in f32 and rounds after every operation; the last bit decides nothing, but angles at position 40000 multiply it,
 * so the exponent is taken in f32 as there. */
void mr_model_inv_freq(const struct mr_model_config *c, float *out)
{
    const double two_pi = 6.283185307179586;

    for (int i = 0; i < c->head_dim / 2; i++) {
        float f = 1.0f / powf((float)c->rope_theta, (float)(2 * i) / (float)c->head_dim);

        if (c->rope_kind == 1) {
            f /= (float)c->rope_factor;
        } else if (c->rope_kind == 2) {
            float wl = (float)(two_pi / (double)f), lw = (float)(c->rope_orig / c->rope_low), hw = (float)(c->rope_orig / c->rope_high);

            if (wl > lw) {
                f /= (float)c->rope_factor;
            } else if (wl >= hw) {
                float s = ((float)c->rope_orig / wl - (float)c->rope_low) / (float)(c->rope_high - c->rope_low);

                f = (1 - s) * (f / (float)c->rope_factor) + s * f;
            }
        }
        out[i] = f;
    }
}

uint64_t mr_model_fingerprint(const struct mr_model_config *c, const struct mr_model_files *f)
{
    const double d[] = {c->rms_eps, c->rope_theta, c->rope_factor, c->rope_low, c->rope_high, c->rope_orig};
    const int i[] = {c->arch,       c->vocab_size, c->hidden_size,  c->intermediate_size, c->n_layers, c->n_heads,
                     c->n_kv_heads, c->head_dim,   c->max_position, c->rope_kind,         c->tied,     c->embedding_rows};
    uint64_t h = mr_hash(mr_hash(MR_HASH_INIT, d, sizeof d), i, sizeof i), all = 0;

    if (f && f->random)
        return mr_hash(h, &f->seed, sizeof f->seed);
    /* a sum over tensors, so that how a checkpoint is cut into shards does not matter */
    for (int s = 0; f && s < f->n_shards; s++) {
        for (int k = 0; k < f->shard[s].n; k++) {
            const struct mr_st_tensor *t = &f->shard[s].t[k];
            uint64_t one = mr_hash(MR_HASH_INIT, t->name, strlen(t->name));

            all += mr_hash(mr_hash(one, t->shape, sizeof *t->shape * (size_t)t->n_dims), &t->bytes, sizeof t->bytes);
        }
    }
    return mr_hash(h, &all, sizeof all);
}
