/* Target checkpoints: every RoPE schema, everything that is refused by name, tied and untied heads, shards that lie. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <math.h>
#include <unistd.h>
#include <sys/stat.h>
#include <cmocka.h>

#include "base/log.h"
#include "data/model_config.h"

static char dir[64];

static const char qwen[] =
    "{'architectures':['Qwen3ForCausalLM'],'model_type':'qwen3','vocab_size':10,'hidden_size':8,'intermediate_size':12,"
    "'num_hidden_layers':2,'num_attention_heads':4,'num_key_value_heads':2,'head_dim':4,'hidden_act':'silu','max_position_embeddings':64,"
    "'rms_norm_eps':1e-6,'tie_word_embeddings':false,'rope_theta':1000000,'rope_scaling':null,'attention_bias':false,"
    "'use_sliding_window':false,'layer_types':['full_attention','full_attention']}";

static json_t *parse(const char *text)
{
    char buf[2048];
    json_error_t e;
    json_t *v;

    snprintf(buf, sizeof buf, "%s", text);
    for (char *p = buf; *p; p++)
        if (*p == '\'')
            *p = '"';
    v = json_loads(buf, 0, &e);
    if (!v)
        fail_msg("%s: %s", buf, e.text);
    return v;
}

/* qwen with the members of `change` on top; a member "!" lists names to remove. */
static void write_config(const char *change)
{
    json_t *v = parse(qwen), *c = parse(change), *gone = json_object_get(c, "!"), *s;
    char path[96];
    size_t i;

    json_array_foreach(gone, i, s) json_object_del(v, json_string_value(s));
    json_object_del(c, "!");
    json_object_update(v, c);
    snprintf(path, sizeof path, "%s/config.json", dir);
    assert_int_equal(json_dump_file(v, path, JSON_INDENT(1)), 0);
    json_decref(v);
    json_decref(c);
}

static struct mr_model_config good(const char *change)
{
    struct mr_model_config c;
    struct mr_err err = {0};

    write_config(change);
    if (mr_model_config_load(&c, dir, &err))
        fail_msg("%s: %s", change, err.msg);
    return c;
}

static void refused(const char *change, const char *why)
{
    struct mr_model_config c;
    struct mr_err err = {0};

    write_config(change);
    if (!mr_model_config_load(&c, dir, &err))
        fail_msg("accepted: %s", change);
    assert_int_equal(err.code, MR_EXIT_CONFIG);
    if (!strstr(err.msg, why) || !strstr(err.msg, "config.json:"))
        fail_msg("%s\n  message \"%s\"\n  lacks \"%s\" or a position", change, err.msg, why);
}

static void config_reads(void **state)
{
    struct mr_model_config c = good("{}");

    (void)state;
    assert_int_equal(c.arch, MR_ARCH_QWEN3);
    assert_int_equal(c.vocab_size, 10);
    assert_int_equal(c.head_dim, 4);
    assert_int_equal(c.n_kv_heads, 2);
    assert_true(c.rope_theta == 1e6 && c.rms_eps == 1e-6 && c.rope_kind == 0);
    c = good("{'architectures':['LlamaForCausalLM'],'model_type':'llama','!':['head_dim','num_key_value_heads']}");
    assert_int_equal(c.arch, MR_ARCH_LLAMA);
    assert_int_equal(c.head_dim, 2);
    assert_int_equal(c.n_kv_heads, 4);
    good("{'!':['model_type']}");
    good("{'architectures':null}");
    good("{'sliding_window':4096}"); /* not used: use_sliding_window is false */
    good("{'hidden_size':8.0}");
}

static void config_refuses(void **state)
{
    (void)state;
    refused("{'!':['hidden_size']}", "/hidden_size: is missing");
    refused("{'hidden_size':'8'}", "is \"8\"; an integer");
    refused("{'hidden_size':8.5}", "is 8.5");
    refused("{'num_key_value_heads':3}", "does not divide");
    refused("{'!':['head_dim']}", "/head_dim: is missing");
    refused("{'head_dim':5}", "even");
    refused("{'!':['rms_norm_eps']}", "rms_norm_eps");
    refused("{'rms_norm_eps':0}", "> 0");
    refused("{'hidden_act':'gelu'}", "not implemented");
    refused("{'attention_bias':true}", "attention_bias");
    refused("{'mlp_bias':true}", "mlp_bias");
    refused("{'use_sliding_window':true}", "use_sliding_window");
    refused("{'layer_types':['full_attention','sliding_attention']}", "entry 1 is sliding_attention");
    refused("{'layer_types':['full_attention']}", "one entry per layer: 2");
    refused("{'quantization_config':{}}", "quantised");
    refused("{'text_config':{}}", "text-only");
    refused("{'architectures':['MistralForCausalLM']}", "MistralForCausalLM");
    refused("{'architectures':['Qwen3ForCausalLM'],'model_type':'llama'}", "do not belong together");
    refused("{'architectures':['LlamaForCausalLM'],'model_type':'llama','sliding_window':128}", "sliding_window");
}

static void rope_schemas(void **state)
{
    struct mr_model_config c;

    (void)state;
    c = good("{'!':['rope_theta','rope_scaling'],'rope_parameters':{'rope_theta':5e5,'rope_type':'default'}}");
    assert_true(c.rope_theta == 5e5);
    c = good("{'rope_theta':5e5,'rope_parameters':{'rope_theta':500000,'rope_type':'default'}}");
    assert_true(c.rope_theta == 5e5);
    c = good("{'rope_scaling':{'type':'linear','factor':4.0}}");
    assert_true(c.rope_kind == 1 && c.rope_factor == 4);
    c = good("{'rope_scaling':{'rope_type':'llama3','type':'llama3','factor':8,'low_freq_factor':1,'high_freq_factor':4,"
             "'original_max_position_embeddings':32}}");
    assert_true(c.rope_kind == 2 && c.rope_orig == 32);
    c = good("{'rope_scaling':{'rope_type':'llama3','factor':8,'low_freq_factor':1,'high_freq_factor':4}}");
    assert_true(c.rope_orig == 64);
    refused("{'!':['rope_theta']}", "never guessed");
    refused("{'rope_theta':1e4,'rope_parameters':{'rope_theta':1e6,'rope_type':'default'}}", "another place");
    refused("{'rope_parameters':{'rope_theta':1e6}}", "rope_type: is missing");
    refused("{'rope_scaling':{'rope_type':'linear','type':'llama3','factor':2}}", "keep one");
    refused("{'rope_scaling':{'rope_type':'linear','factor':2},'rope_parameters':{'rope_type':'default'}}", "another place");
    refused("{'rope_scaling':{'rope_type':'yarn','factor':4}}", "\"yarn\", which is not implemented");
    refused("{'rope_scaling':{'rope_type':'linear'}}", "factor is 0");
    refused("{'rope_scaling':{'rope_type':'llama3','factor':8,'low_freq_factor':4,'high_freq_factor':1}}", "0 < low < high");
    refused("{'rope_parameters':{'full_attention':{'rope_theta':1e6},'sliding_attention':{'rope_theta':1e4}}}", "per layer type");
    refused("{'partial_rotary_factor':0.5}", "partial rotation");
    refused("{'rope_parameters':{'rope_type':'default','partial_rotary_factor':0.25}}", "partial rotation");
    good("{'partial_rotary_factor':1.0}");
}

static void inv_freq(void **state)
{
    float f[2], g[2];
    struct mr_model_config c = good("{}");

    (void)state;
    mr_model_inv_freq(&c, f);
    assert_true(f[0] == 1.0f && fabsf(f[1] - 1e-3f) < 1e-9f);
    c = good("{'rope_scaling':{'rope_type':'llama3','factor':8,'low_freq_factor':1,'high_freq_factor':4,'original_max_position_embeddings':"
             "64}}");
    mr_model_inv_freq(&c, g);
    assert_true(g[0] == 1.0f);                    /* wave length 6.3 < 64/4 */
    assert_true(fabsf(g[1] - 1e-3f / 8) < 1e-9f); /* wave length 6283 > 64 */
    c.rope_orig = 12566.370614359172;             /* orig / wl = 2: s = 1/3 */
    mr_model_inv_freq(&c, g);
    assert_true(fabsf(g[1] - (2.0f / 3 * 1e-3f / 8 + 1e-3f / 3)) < 1e-8f);
}

/* ---- files ---------------------------------------------------------------------------------------------------------------- */

struct part {
    char name[80];
    uint64_t shape[2];
    int dims;
};

static int parts(struct part *p)
{
    static const struct part layer[] = {
        {"input_layernorm", {8}, 1},     {"self_attn.q_proj", {16, 8}, 2},     {"self_attn.k_proj", {8, 8}, 2},
        {"self_attn.v_proj", {8, 8}, 2}, {"self_attn.o_proj", {8, 16}, 2},     {"self_attn.q_norm", {4}, 1},
        {"self_attn.k_norm", {4}, 1},    {"post_attention_layernorm", {8}, 1}, {"mlp.gate_proj", {12, 8}, 2},
        {"mlp.up_proj", {12, 8}, 2},     {"mlp.down_proj", {8, 12}, 2}};
    int n = 0;

    p[n++] = (struct part){"model.embed_tokens.weight", {10, 8}, 2};
    for (int i = 0; i < 2; i++)
        for (int k = 0; k < 11; k++) {
            p[n] = layer[k];
            snprintf(p[n++].name, sizeof p->name, "model.layers.%d.%.40s.weight", i, layer[k].name);
        }
    p[n++] = (struct part){"model.norm.weight", {8}, 1};
    p[n++] = (struct part){"lm_head.weight", {10, 8}, 2};
    return n;
}

static float zeros[4096];

/* Parts [from, to) into `file`; `skip` is left out, `wide` gets one more row, `rename_to` replaces skip's name when given. */
static void write_file(const char *file, int from, int to, const char *skip, const char *wide, const char *rename_to)
{
    struct part p[40];
    struct mr_st_out *o = mr_st_out_create();
    struct mr_err err = {0};
    char path[128];

    parts(p);
    for (int i = from; i < to; i++) {
        if (wide && !strcmp(wide, p[i].name))
            p[i].shape[0]++;
        if (!skip || strcmp(skip, p[i].name))
            mr_st_out_add(o, p[i].name, MR_ST_F32, p[i].shape, p[i].dims, zeros);
        else if (rename_to)
            mr_st_out_add(o, rename_to, MR_ST_F32, p[i].shape, p[i].dims, zeros);
    }
    snprintf(path, sizeof path, "%s/%s", dir, file);
    if (mr_st_out_write(o, path, &err))
        fail_msg("%s", err.msg);
    mr_st_out_free(o);
}

static void open_ok(const char *change, int rows)
{
    struct mr_model_config c = good(change);
    struct mr_model_files f;
    struct mr_err err = {0};

    if (mr_model_files_open(&f, &c, dir, &err))
        fail_msg("%s", err.msg);
    assert_int_equal(c.embedding_rows, rows);
    mr_model_files_close(&f);
}

static void open_fails(const char *change, const char *why)
{
    struct mr_model_config c = good(change);
    struct mr_model_files f;
    struct mr_err err = {0};

    if (!mr_model_files_open(&f, &c, dir, &err))
        fail_msg("accepted; wanted: %s", why);
    if (!strstr(err.msg, why))
        fail_msg("message \"%s\" lacks \"%s\"", err.msg, why);
}

static void single_file(void **state)
{
    const char *m = "model.safetensors";

    (void)state;
    open_fails("{}", "neither model.safetensors nor");
    write_file(m, 0, 25, NULL, NULL, NULL);
    open_ok("{}", 10);
    open_ok("{'tie_word_embeddings':true}", 10);
    write_file(m, 0, 24, NULL, NULL, NULL);
    open_ok("{'tie_word_embeddings':true}", 10);
    open_fails("{}", "lm_head.weight: missing, and tie_word_embeddings");
    write_file(m, 0, 25, NULL, "model.embed_tokens.weight", NULL);
    open_fails("{}", "lm_head.weight: shape [10,8]; config.json promises [11,8]");
    write_file(m, 0, 24, NULL, "model.embed_tokens.weight", NULL);
    open_ok("{'tie_word_embeddings':true}", 11);
    write_file(m, 0, 25, "model.layers.1.mlp.up_proj.weight", NULL, NULL);
    open_fails("{}", "1 tensors do not fit config.json:\n  model.layers.1.mlp.up_proj.weight: missing");
    write_file(m, 0, 25, "model.norm.weight", NULL, "model.layers.0.self_attn.q_proj.bias");
    open_fails("{}", "q_proj.bias: config.json does not promise it");
    write_file(m, 0, 25, NULL, "model.layers.0.self_attn.q_norm.weight", NULL);
    open_fails("{}", "q_norm.weight: shape [5]; config.json promises [4]");
    write_file(m, 0, 25, NULL, NULL, NULL);
    open_fails("{'num_hidden_layers':1,'layer_types':null}", "model.layers.1");
    open_fails("{'num_hidden_layers':9,'layer_types':null}", "\n  ...");
}

static void write_text(const char *name, const char *text)
{
    char path[128];
    FILE *f;

    snprintf(path, sizeof path, "%s/%s", dir, name);
    f = fopen(path, "w");
    fputs(text, f);
    fclose(f);
}

static void write_index(const char *second)
{
    struct part p[40];
    json_t *root = json_object(), *map = json_object();
    char path[128];
    int n = parts(p);

    for (int i = 0; i < n; i++)
        json_object_set_new(map, p[i].name, json_string(i < 12 ? "a-1.safetensors" : second));
    json_object_set_new(root, "metadata", json_pack("{s:f}", "total_size", 3872.0));
    json_object_set_new(root, "weight_map", map);
    snprintf(path, sizeof path, "%s/model.safetensors.index.json", dir);
    json_dump_file(root, path, 0);
    json_decref(root);
}

/* The index without `name`. */
static void edit_index(const char *name)
{
    char path[128];
    json_t *root;

    snprintf(path, sizeof path, "%s/model.safetensors.index.json", dir);
    root = json_load_file(path, 0, NULL);
    json_object_del(json_object_get(root, "weight_map"), name);
    json_dump_file(root, path, 0);
    json_decref(root);
}

static void shards(void **state)
{
    char path[128], to[128];

    (void)state;
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    unlink(path);
    write_index("a-2.safetensors");
    write_file("a-1.safetensors", 0, 12, NULL, NULL, NULL);
    open_fails("{}", "a-2.safetensors: is missing, but");
    open_fails("{}", "holds 13 tensors");
    write_file("a-2.safetensors", 12, 25, NULL, NULL, NULL);
    open_ok("{}", 10);
    write_file("a-2.safetensors", 12, 25, "model.norm.weight", NULL, NULL);
    open_fails("{}", "model.norm.weight: not in a-2.safetensors");
    write_file("a-2.safetensors", 12, 25, NULL, NULL, NULL);
    edit_index("model.norm.weight");
    open_fails("{}", "model.norm.weight: in a-2.safetensors, but the index does not name it");
    write_index("a-2.safetensors");
    edit_index("lm_head.weight");
    open_fails("{}", "lm_head.weight: in a-2.safetensors, but the index does not name it");
    open_ok("{'tie_word_embeddings':true}", 10);                         /* not needed */
    write_index("a-2.safetensors");
    write_file("a-2.safetensors", 11, 25, NULL, NULL, NULL);
    open_fails("{}", "but the index says a-1.safetensors");
    write_file("a-2.safetensors", 12, 25, NULL, NULL, NULL);
    snprintf(path, sizeof path, "%s/a-2.safetensors", dir);
    assert_int_equal(truncate(path, 700), 0);
    open_fails("{}", "a-2.safetensors");
    snprintf(to, sizeof to, "%s/gone", dir);
    unlink(path);
    assert_int_equal(symlink(to, path), 0);
    open_fails("{}", "symbolic link to nothing");
    write_index("../evil.safetensors");
    open_fails("{}", "only plain file names");
    write_text("model.safetensors.index.json", "{\"weight_map\": {}}");
    open_fails("{}", "at least one entry");
    write_text("model.safetensors.index.json", "version https://git-lfs.github.com/spec/v1\n");
    open_fails("{}", "git lfs pull");
}

static uint64_t content(const char *change)
{
    struct mr_model_config c = good(change);
    struct mr_model_files f;
    struct mr_err err = {0};
    uint64_t h;

    if (mr_model_files_open(&f, &c, dir, &err))
        fail_msg("%s", err.msg);
    h = mr_model_content(&f, &c);
    mr_model_files_close(&f);
    return h;
}

/* The bytes that are read, whatever the files are called and how they are cut. */
static void contents(void **state)
{
    char path[128];
    uint64_t two, one;

    (void)state;
    snprintf(path, sizeof path, "%s/a-2.safetensors", dir);
    unlink(path);
    write_index("a-2.safetensors");
    write_file("a-1.safetensors", 0, 12, NULL, NULL, NULL);
    write_file("a-2.safetensors", 12, 25, NULL, NULL, NULL);
    two = content("{}");
    write_file("model.safetensors", 0, 25, NULL, NULL, NULL);
    one = content("{}");
    assert_true(one && one == two);
    assert_true(content("{'tie_word_embeddings':true}") != one);
    zeros[7] = 1;                                                        /* the last element of a norm */
    write_file("model.safetensors", 0, 25, NULL, NULL, NULL);
    assert_true(content("{}") != one);
    zeros[7] = 0;
    write_file("model.safetensors", 0, 25, NULL, NULL, NULL);
    assert_true(content("{}") == one);
}

static void fingerprints(void **state)
{
    struct mr_model_config c = good("{}"), d = good("{'rope_theta':1e4}");

    (void)state;
    assert_true(mr_model_fingerprint(&c, NULL) == mr_model_fingerprint(&c, NULL));
    assert_true(mr_model_fingerprint(&c, NULL) != mr_model_fingerprint(&d, NULL));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(config_reads), cmocka_unit_test(config_refuses), cmocka_unit_test(rope_schemas),
                                       cmocka_unit_test(inv_freq),     cmocka_unit_test(single_file),    cmocka_unit_test(shards),
                                       cmocka_unit_test(contents), cmocka_unit_test(fingerprints)};
    int rc;
    char cmd[96];

    mr_log_init("test", MR_LOG_ERROR);
    strcpy(dir, "/tmp/mr-model-XXXXXX");
    if (!mkdtemp(dir))
        return 1;
    rc = cmocka_run_group_tests(tests, NULL, NULL);
    snprintf(cmd, sizeof cmd, "rm -r %s", dir);
    return system(cmd) || rc;
}
