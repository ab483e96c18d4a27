/* The config of a DFlash drafter: from a topology, from and to a checkpoint's config.json (docs/dflash.md 1.6, 2.1).
 *
 * A drafter shares the frozen embedding and head of its target, so its hidden size is the target's; everything else may differ.  The
 * target's RoPE scaling is not inherited: the drafter rotates with plain theta, as every published one does.
 */
#include "data/drafter_config.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "data/config_pvt.h"

/* ---- from a topology ------------------------------------------------------------------------------------------------------ */

static int pick(int wanted, int inherited)
{
    return wanted ? wanted : inherited;
}

static void copy_dims(struct mr_drafter_config *c, const struct mr_topology *t, const struct mr_model_config *target)
{
    *c = (struct mr_drafter_config){
        .hidden_size = pick(t->drafter.hidden_size, target->hidden_size),
        .intermediate_size = pick(t->drafter.intermediate_size, target->intermediate_size),
        .n_layers = t->drafter.layers,
        .n_heads = pick(t->drafter.num_attention_heads, target->n_heads),
        .n_kv_heads = pick(t->drafter.num_key_value_heads, target->n_kv_heads),
        .head_dim = pick(t->drafter.head_dim, target->head_dim),
        .K = t->target.n_layers,
        .target_hidden = target->hidden_size,
        .target_layers = target->n_layers,
        .block_size = t->drafter.block_size,
        .mask_token_id = t->drafter.mask_token_id,
        .vocab_size = target->vocab_size,
        .max_position = pick(t->drafter.max_position_embeddings, target->max_position),
        .rms_eps = t->drafter.rms_norm_eps > 0 ? t->drafter.rms_norm_eps : target->rms_eps,
        .rope_theta = t->drafter.rope_theta > 0 ? t->drafter.rope_theta : target->rope_theta,
        .sliding_window = t->drafter.n_sliding > 0 ? t->drafter.sliding_window : 0,
        .window_origin = t->drafter.window_origin,
    };
    memcpy(c->layer_ids, t->target.layers, sizeof(int) * (size_t)c->K);
    for (int i = 0; i < c->n_layers; i++) {
        c->sliding[i] = i < t->drafter.n_sliding;
        c->causal[i] = t->drafter.causal >= 0 ? (unsigned char)t->drafter.causal : c->sliding[i];
    }
}

int mr_drafter_config_make(struct mr_drafter_config *c, const struct mr_topology *t, const struct mr_model_config *target,
                           struct mr_err *err)
{
    copy_dims(c, t, target);
    if (c->hidden_size != target->hidden_size)
        return mr_json_error(&t->src, "/drafter/hidden_size", err,
                             "is %d, but the target's is %d: embedding and head are shared, so they must be "
                             "equal (leave the key out)",
                             c->hidden_size, target->hidden_size);
    if (c->n_heads % c->n_kv_heads)
        return mr_json_error(&t->src, "/drafter/num_key_value_heads", err, "is %d, which does not divide num_attention_heads = %d",
                             c->n_kv_heads, c->n_heads);
    if (c->head_dim % 2)
        return mr_json_error(&t->src, "/drafter/head_dim", err, "is %d; an even number is wanted: rotary embedding turns pairs",
                             c->head_dim);
    if (c->mask_token_id >= target->embedding_rows)
        return mr_json_error(&t->src, "/drafter/mask_token_id", err, "is %d, but the target's embedding has %d rows; 0..%d is allowed",
                             c->mask_token_id, target->embedding_rows, target->embedding_rows - 1);
    for (int i = 0; i < c->K; i++) {
        char ptr[40];

        snprintf(ptr, sizeof ptr, "/target/layers/%d", i);
        if (c->layer_ids[i] == target->n_layers - 1)
            return mr_json_error(&t->src, ptr, err,
                                 "is %d, the target's last layer: its output means the state after the final norm in one "
                                 "tool and before it in another; 0..%d is allowed",
                                 c->layer_ids[i], target->n_layers - 2);
        if (c->layer_ids[i] >= target->n_layers)
            return mr_json_error(&t->src, ptr, err, "is %d, but the target has %d layers; 0..%d is allowed", c->layer_ids[i],
                                 target->n_layers, target->n_layers - 2);
    }
    return 0;
}

/* ---- from a checkpoint ---------------------------------------------------------------------------------------------------- */

/* An integer that may stand at the top or in dflash_config, or in both when they agree. */
static int either_place(const struct mr_json *j, const char *name, int min, int max, int *out, struct mr_err *err)
{
    char top[64], in[64];
    int a = 0;

    snprintf(top, sizeof top, "/%s", name);
    snprintf(in, sizeof in, "/dflash_config/%s", name);
    if (!mr_cfg_has(j, in))
        return mr_cfg_int(j, top, min, max, out, err);
    if (mr_cfg_int(j, in, min, max, out, err))
        return -1;
    if (mr_cfg_has(j, top) && (mr_cfg_int(j, top, min, max, &a, err) || a != *out))
        return mr_json_error(j, top, err, "is %d, but dflash_config/%s is %d: they must agree", a, name, *out);
    return 0;
}

static int read_layer_ids(const struct mr_json *j, struct mr_drafter_config *c, struct mr_err *err)
{
    json_t *ids = mr_json_at(j->root, "/dflash_config/target_layer_ids");
    char ptr[64];

    if (!json_is_array(ids) || json_array_size(ids) < 1 || json_array_size(ids) > MR_TOPO_LAYERS)
        return mr_json_error(j, "/dflash_config/target_layer_ids", err, "an array of 1..%d target layers is required", MR_TOPO_LAYERS);
    c->K = (int)json_array_size(ids);
    for (int i = 0; i < c->K; i++) {
        snprintf(ptr, sizeof ptr, "/dflash_config/target_layer_ids/%d", i);
        if (mr_cfg_int(j, ptr, 0, c->target_layers - 1, &c->layer_ids[i], err))
            return -1;
    }
    return 0;
}

/* Window and in-block causality per layer: docs/dflash.md 1.6. */
static int read_mask(const struct mr_json *j, struct mr_drafter_config *c, struct mr_err *err)
{
    json_t *types = mr_json_at(j->root, "/layer_types");
    int n_sliding = 0, swa = 0, causal = -1;
    const char *origin = json_string_value(mr_json_at(j->root, "/dflash_config/window_origin"));

    if (mr_cfg_bool(j, "/dflash_config/use_swa", &swa, err) || mr_cfg_bool(j, "/dflash_config/causal", &causal, err) ||
        mr_cfg_bool(j, "/is_causal", &causal, err))
        return -1;
    if (mr_cfg_has(j, "/layer_types") && (!json_is_array(types) || json_array_size(types) != (size_t)c->n_layers))
        return mr_json_error(j, "/layer_types", err, "must have one entry per layer: %d", c->n_layers);
    for (int i = 0; i < c->n_layers; i++) {
        const char *s = types && !json_is_null(types) ? json_string_value(json_array_get(types, (size_t)i)) : "full_attention";

        if (!s || (strcmp(s, "full_attention") && strcmp(s, "sliding_attention")))
            return mr_json_error(j, "/layer_types", err, "entry %d is %.40s; \"full_attention\" or \"sliding_attention\" is wanted", i,
                                 s ? s : "no string");
        c->sliding[i] = swa || !strcmp(s, "sliding_attention");
        c->causal[i] = causal >= 0 ? (unsigned char)causal : c->sliding[i] && !swa;
        n_sliding += c->sliding[i];
    }
    c->window_origin = origin && !strcmp(origin, "anchor");
    if (!n_sliding)
        return 0;
    return mr_cfg_int(j, mr_cfg_has(j, "/dflash_config/swa_window_size") ? "/dflash_config/swa_window_size" : "/sliding_window", 1, 1 << 28,
                      &c->sliding_window, err);
}

/* Relatives of DFlash that need more than its 3 + 11 L tensors, or change what they mean. */
static int refuse_dialects(const struct mr_json *j, struct mr_err *err)
{
    static const char *const keys[] = {"projector_type", "pure_draft_prefix_len", "conv_kernel_size",       "selector_rank",
                                       "markov_rank",    "attention_mode",        "final_logit_softcapping"};
    static const char *const scales[] = {"/dflash_config/input_embedding_scale", "/dflash_config/output_multiplier"};
    char ptr[64];
    double x;

    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        snprintf(ptr, sizeof ptr, "/dflash_config/%s", keys[i]);
        if (mr_cfg_has(j, ptr))
            return mr_json_error(j, ptr, err, "belongs to another kind of drafter, which is not implemented");
    }
    for (int i = 0; i < 2; i++)
        if (mr_cfg_has(j, scales[i]) && (mr_cfg_positive(j, scales[i], &x, err) || x != 1))
            return mr_json_error(j, scales[i], err, "is not 1: scaled drafters are not implemented");
    if (mr_cfg_has(j, "/quantization_config"))
        return mr_json_error(j, "/quantization_config", err, "quantised drafters are not implemented");
    return mr_cfg_must_be(j, "/attention_bias", 0, err) || mr_cfg_must_be(j, "/dflash_config/shift_label", 0, err) ||
                   mr_cfg_must_be(j, "/dflash_config/enable_confidence_head", 0, err) || mr_cfg_silu(j, err)
               ? -1
               : 0;
}

static int read_dims(const struct mr_json *j, struct mr_drafter_config *c, struct mr_err *err)
{
    struct mr_cfg_rope r;

    if (mr_cfg_int(j, "/hidden_size", 1, 1 << 17, &c->hidden_size, err) ||
        mr_cfg_int(j, "/intermediate_size", 1, 1 << 20, &c->intermediate_size, err) ||
        mr_cfg_int(j, "/num_hidden_layers", 1, MR_TOPO_LAYERS, &c->n_layers, err) ||
        mr_cfg_int(j, "/num_attention_heads", 1, 1024, &c->n_heads, err) ||
        mr_cfg_int(j, "/num_key_value_heads", 1, 1024, &c->n_kv_heads, err) || mr_cfg_int(j, "/head_dim", 2, 1024, &c->head_dim, err) ||
        mr_cfg_int(j, "/num_target_layers", 1, 1024, &c->target_layers, err) ||
        mr_cfg_int(j, "/vocab_size", 2, 1 << 24, &c->vocab_size, err) ||
        mr_cfg_int(j, "/max_position_embeddings", 1, 1 << 28, &c->max_position, err) ||
        mr_cfg_positive(j, "/rms_norm_eps", &c->rms_eps, err) || either_place(j, "block_size", 2, MR_MAX_BLOCK, &c->block_size, err) ||
        mr_cfg_int(j, "/dflash_config/mask_token_id", 0, 1 << 24, &c->mask_token_id, err) || mr_cfg_rope(j, c->max_position, &r, err))
        return -1;
    if (c->n_heads % c->n_kv_heads || c->head_dim % 2)
        return mr_json_error(j, "/num_key_value_heads", err, "%d must divide num_attention_heads = %d, and head_dim = %d must be even",
                             c->n_kv_heads, c->n_heads, c->head_dim);
    if (r.kind)
        return mr_json_error(j, "/rope_scaling", err, "scaled RoPE is not implemented for drafters");
    c->rope_theta = r.theta;
    c->target_hidden = c->hidden_size; /* embedding and head are the target's */
    return 0;
}

int mr_drafter_config_load(struct mr_drafter_config *c, const char *dir, struct mr_err *err)
{
    struct mr_json j;
    int rc;

    memset(c, 0, sizeof *c);
    if (mr_cfg_open(&j, dir, err))
        return -1;
    rc = refuse_dialects(&j, err) || read_dims(&j, c, err) || read_layer_ids(&j, c, err) || read_mask(&j, c, err) ? -1 : 0;
    mr_json_free(&j);
    return rc;
}

/* ---- to a checkpoint ------------------------------------------------------------------------------------------------------ */

/* -1: every layer follows the rule "sliding is causal, full is not", else what they all are. */
static int uniform_causality(const struct mr_drafter_config *c)
{
    for (int i = 0; i < c->n_layers; i++)
        if (c->causal[i] != c->sliding[i])
            return c->causal[i];
    return -1;
}

static json_t *dflash_section(const struct mr_drafter_config *c, int causal)
{
    json_t *d = json_pack("{s:i, s:i}", "block_size", c->block_size, "mask_token_id", c->mask_token_id), *ids = json_array();

    for (int i = 0; i < c->K; i++)
        json_array_append_new(ids, json_integer(c->layer_ids[i]));
    json_object_set_new(d, "target_layer_ids", ids);
    if (causal >= 0)
        json_object_set_new(d, "causal", json_boolean(causal));
    if (c->sliding_window && c->window_origin)
        json_object_set_new(d, "window_origin", json_string("anchor"));
    return d;
}

static json_t *layer_types(const struct mr_drafter_config *c)
{
    json_t *types = json_array();

    for (int i = 0; i < c->n_layers; i++)
        json_array_append_new(types, json_string(c->sliding[i] ? "sliding_attention" : "full_attention"));
    return types;
}

/* Keys of both generations of readers: rope_theta and rope_parameters, dtype and torch_dtype, block_size in both places. */
static json_t *config_json(const struct mr_drafter_config *c)
{
    int causal = uniform_causality(c);
    json_t *v = json_pack("{s:[s], s:{s:s}, s:s, s:b, s:f, s:i, s:n, s:n, s:s, s:s}", "architectures", "DFlashDraftModel", "auto_map",
                          "AutoModel", "dflash.DFlashDraftModel", "model_type", "qwen3", "attention_bias", 0, "attention_dropout", 0.0,
                          "block_size", c->block_size, "bos_token_id", "eos_token_id", "dtype", "bfloat16", "torch_dtype", "bfloat16");
    json_t *w = json_pack("{s:i, s:s, s:i, s:f, s:i, s:i, s:i, s:i, s:i, s:i, s:i}", "head_dim", c->head_dim, "hidden_act", "silu",
                          "hidden_size", c->hidden_size, "initializer_range", 0.02, "intermediate_size", c->intermediate_size,
                          "max_position_embeddings", c->max_position, "max_window_layers", c->n_layers, "num_attention_heads", c->n_heads,
                          "num_hidden_layers", c->n_layers, "num_key_value_heads", c->n_kv_heads, "num_target_layers", c->target_layers);
    json_t *x = json_pack("{s:f, s:n, s:f, s:{s:f, s:s}, s:b, s:b, s:b, s:i}", "rms_norm_eps", c->rms_eps, "rope_scaling", "rope_theta",
                          c->rope_theta, "rope_parameters", "rope_theta", c->rope_theta, "rope_type", "default", "tie_word_embeddings", 0,
                          "use_cache", 1, "use_sliding_window", c->sliding_window > 0, "vocab_size", c->vocab_size);

    json_object_set_new(v, "dflash_config", dflash_section(c, causal));
    json_object_update_new(v, w);
    json_object_update_new(v, x);
    json_object_set_new(v, "layer_types", layer_types(c));
    json_object_set_new(v, "sliding_window", c->sliding_window ? json_integer(c->sliding_window) : json_null());
    if (causal >= 0)
        json_object_set_new(v, "is_causal", json_boolean(causal));
    return v;
}

int mr_drafter_config_save(const struct mr_drafter_config *c, const char *path, struct mr_err *err)
{
    json_t *v = config_json(c);
    int rc = mr_json_save(v, path, err);

    json_decref(v);
    return rc;
}
