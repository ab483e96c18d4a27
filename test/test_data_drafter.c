/* Drafter config and weights: from a topology, to z-lab's config.json and back, the 3 + 11 L names, exact loads. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <math.h>
#include <unistd.h>
#include <cmocka.h>

#include "data/drafter_config.h"
#include "data/safetensors.h"

static char dir[64];

static struct mr_model_config target(void)
{
    return (struct mr_model_config){.vocab_size = 50,
                                    .hidden_size = 16,
                                    .intermediate_size = 24,
                                    .n_layers = 6,
                                    .n_heads = 4,
                                    .n_kv_heads = 2,
                                    .head_dim = 8,
                                    .max_position = 64,
                                    .rms_eps = 1e-6,
                                    .rope_theta = 1e4,
                                    .embedding_rows = 52};
}

static struct mr_topology *topology(void)
{
    static struct mr_topology t;

    memset(&t, 0, sizeof t);
    t.target.n_layers = 2;
    t.target.layers[0] = 1;
    t.target.layers[1] = 4;
    t.drafter.layers = 2;
    t.drafter.block_size = 8;
    t.drafter.mask_token_id = 51;
    t.drafter.causal = -1;
    return &t;
}

static void refused(const struct mr_topology *t, const char *why)
{
    struct mr_drafter_config c;
    struct mr_model_config m = target();
    struct mr_err err = {0};

    assert_int_equal(mr_drafter_config_make(&c, t, &m, &err), -1);
    if (!strstr(err.msg, why))
        fail_msg("message \"%s\" lacks \"%s\"", err.msg, why);
}

static void make(void **state)
{
    struct mr_drafter_config c;
    struct mr_model_config m = target();
    struct mr_err err = {0};
    struct mr_topology *t = topology();

    (void)state;
    m.rope_kind = 2;
    assert_int_equal(mr_drafter_config_make(&c, t, &m, &err), 0);
    assert_int_equal(c.hidden_size, 16);
    assert_int_equal(c.intermediate_size, 24);
    assert_int_equal(c.n_kv_heads, 2);
    assert_int_equal(c.K, 2);
    assert_int_equal(c.layer_ids[1], 4);
    assert_int_equal(c.target_layers, 6);
    t->drafter.hidden_size = 32, refused(t, "the target's is 16");
    t = topology(), t->drafter.mask_token_id = 52, refused(t, "has 52 rows; 0..51");
    t = topology(), t->target.layers[1] = 5, refused(t, "/target/layers/1: is 5, the target's last layer");
    t = topology(), t->target.layers[1] = 6, refused(t, "the target has 6 layers; 0..4");
    t = topology(), t->drafter.num_attention_heads = 5, refused(t, "does not divide num_attention_heads = 5");
    t = topology(), t->drafter.head_dim = 7, refused(t, "even");
}

static void layout(void **state)
{
    struct mr_drafter_config c;
    struct mr_model_config m = target();
    struct mr_dlayout l;
    const char *names[] = {"fc.weight",
                           "hidden_norm.weight",
                           "layers.0.input_layernorm.weight",
                           "layers.0.self_attn.q_proj.weight",
                           "layers.0.self_attn.k_proj.weight",
                           "layers.0.self_attn.v_proj.weight",
                           "layers.0.self_attn.o_proj.weight",
                           "layers.0.self_attn.q_norm.weight",
                           "layers.0.self_attn.k_norm.weight",
                           "layers.0.post_attention_layernorm.weight",
                           "layers.0.mlp.gate_proj.weight",
                           "layers.0.mlp.up_proj.weight",
                           "layers.0.mlp.down_proj.weight"};
    uint64_t at = 0, exact = 0;

    (void)state;
    mr_drafter_config_make(&c, topology(), &m, NULL);
    assert_int_equal(mr_dlayout_make(&l, &c), 0);
    assert_int_equal(l.n, 3 + 11 * 2);
    for (int i = 0; i < 13; i++)
        assert_string_equal(l.t[i].name, names[i]);
    assert_string_equal(l.t[l.layer0 + MR_DP_PER_LAYER + MR_DP_KN].name, "layers.1.self_attn.k_norm.weight");
    assert_string_equal(l.t[l.norm].name, "norm.weight");
    assert_int_equal(l.t[l.fc].cols, 32);
    for (int i = 0; i < l.n; i++) {
        assert_int_equal(l.t[i].offset % 32, 0);
        assert_true(l.t[i].offset >= at);
        at = l.t[i].offset + l.t[i].n;
        exact += l.t[i].n;
    }
    assert_true(at <= l.P);
    /* docs/dflash.md 1.8 */
    assert_int_equal(exact, 2 * 16 * 16 + 2 * 16 + 2 * (16 * 8 * (2 * 4 + 2 * 2) + 3 * 16 * 24 + 2 * 16 + 2 * 8));
    mr_dlayout_free(&l);
}

static void round_trip(int sliding, int causal, int origin)
{
    struct mr_drafter_config c, d;
    struct mr_model_config m = target();
    struct mr_topology *t = topology();
    struct mr_err err = {0};
    char path[96];

    t->drafter.n_sliding = sliding;
    t->drafter.sliding_window = 5;
    t->drafter.causal = causal;
    t->drafter.window_origin = origin;
    assert_int_equal(mr_drafter_config_make(&c, t, &m, &err), 0);
    snprintf(path, sizeof path, "%s/config.json", dir);
    assert_int_equal(mr_drafter_config_save(&c, path, &err), 0);
    if (mr_drafter_config_load(&d, dir, &err))
        fail_msg("%s", err.msg);
    assert_memory_equal(&c, &d, sizeof c);
}

static void config_round_trip(void **state)
{
    json_t *v;
    char path[96];

    (void)state;
    for (int sliding = 0; sliding < 3; sliding++)
        for (int causal = -1; causal < 2; causal++)
            round_trip(sliding, causal, 0);
    round_trip(1, -1, 1);
    round_trip(0, -1, 0);
    snprintf(path, sizeof path, "%s/config.json", dir);
    v = json_load_file(path, 0, NULL);
    assert_int_equal(json_integer_value(json_object_get(v, "block_size")), 8);
    assert_int_equal(json_integer_value(json_object_get(json_object_get(v, "dflash_config"), "block_size")), 8);
    assert_true(json_is_null(json_object_get(v, "rope_scaling")));
    assert_int_equal(json_integer_value(json_object_get(v, "num_target_layers")), 6);
    json_decref(v);
}

static void load_refuses(const char *ptr_key, json_t *value, const char *why)
{
    struct mr_drafter_config c;
    struct mr_err err = {0};
    char path[96];
    json_t *v, *at;
    int inner = !strncmp(ptr_key, "d:", 2);

    round_trip(0, -1, 0);
    snprintf(path, sizeof path, "%s/config.json", dir);
    v = json_load_file(path, 0, NULL);
    at = inner ? json_object_get(v, "dflash_config") : v;
    if (value)
        json_object_set_new(at, ptr_key + 2 * inner, value);
    else
        json_object_del(at, ptr_key + 2 * inner);
    json_dump_file(v, path, 0);
    json_decref(v);
    assert_int_equal(mr_drafter_config_load(&c, dir, &err), -1);
    if (!strstr(err.msg, why))
        fail_msg("%s: message \"%s\" lacks \"%s\"", ptr_key, err.msg, why);
}

static void config_refuses(void **state)
{
    (void)state;
    load_refuses("block_size", json_integer(16), "but dflash_config/block_size is 8");
    load_refuses("d:target_layer_ids", NULL, "target_layer_ids");
    load_refuses("d:target_layer_ids", json_pack("[i]", 6), "0..5 is wanted");
    load_refuses("d:mask_token_id", NULL, "mask_token_id");
    load_refuses("d:projector_type", json_string("domino"), "another kind");
    load_refuses("d:output_multiplier", json_real(2), "not 1");
    load_refuses("rope_theta", json_real(1e6), "another place");
    load_refuses("rope_scaling", json_pack("{s:s,s:f,s:f}", "rope_type", "linear", "factor", 2.0, "rope_theta", 1e4), "another place");
    load_refuses("attention_bias", json_true(), "attention_bias");
    load_refuses("layer_types", json_pack("[s]", "full_attention"), "one entry per layer: 2");
    load_refuses("num_target_layers", NULL, "num_target_layers");
}

/* Both places of block_size: the old one alone, the new one alone. */
static void block_size_places(void **state)
{
    char path[96];
    struct mr_drafter_config c;
    struct mr_err err = {0};

    (void)state;
    for (int old = 0; old < 2; old++) {
        json_t *v;

        round_trip(0, -1, 0);
        snprintf(path, sizeof path, "%s/config.json", dir);
        v = json_load_file(path, 0, NULL);
        json_object_del(old ? json_object_get(v, "dflash_config") : v, "block_size");
        json_dump_file(v, path, 0);
        json_decref(v);
        assert_int_equal(mr_drafter_config_load(&c, dir, &err), 0);
        assert_int_equal(c.block_size, 8);
    }
}

static void weights(void **state)
{
    struct mr_drafter_config c;
    struct mr_model_config m = target();
    struct mr_dlayout l, other;
    struct mr_err err = {0};
    struct mr_st st;
    float *a, *b, *x, *y;
    char path[96];
    uint64_t step = 0;

    (void)state;
    mr_drafter_config_make(&c, topology(), &m, NULL);
    mr_dlayout_make(&l, &c);
    a = calloc(4 * l.P, sizeof *a), b = a + l.P, x = b + l.P, y = x + l.P;
    mr_drafter_init(&l, a, 7, 0.02);
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    assert_int_equal(mr_drafter_weights_save(&l, a, NULL, path, &err), 0);
    assert_int_equal(mr_drafter_weights_load(&l, b, path, &err), 0);
    for (uint64_t i = 0; i < l.P; i++)
        assert_true(b[i] == mr_bf16_f32(mr_bf16(a[i])));
    assert_int_equal(mr_st_open(&st, path, &err), 0);
    assert_int_equal(st.n, l.n);
    assert_string_equal(st.t[0].dtype_name, "BF16");
    mr_st_close(&st);
    c.n_layers = 1;
    mr_dlayout_make(&other, &c);
    assert_int_equal(mr_drafter_weights_load(&other, b, path, &err), -1);
    assert_non_null(strstr(err.msg, "layers.1.input_layernorm.weight: no such parameter"));
    mr_dlayout_free(&other);
    c.n_layers = 2, c.intermediate_size = 25;
    mr_dlayout_make(&other, &c);
    err.code = 0;
    assert_int_equal(mr_drafter_weights_load(&other, NULL, path, &err), -1);
    assert_non_null(strstr(err.msg, "[25,16] is wanted"));
    mr_dlayout_free(&other);

    snprintf(path, sizeof path, "%s/trainer.safetensors", dir);
    mr_drafter_init(&l, b, 8, 1);
    mr_drafter_init(&l, x, 9, 1);
    assert_int_equal(mr_trainer_save(&l, a, b, x, 42, NULL, path, &err), 0);
    err.code = 0;
    assert_int_equal(mr_drafter_weights_load(&l, y, path, &err), -1); /* moments are no drafter weights */
    err.code = 0;
    {
        float *p = calloc(3 * l.P, sizeof *p);

        assert_int_equal(mr_trainer_load(&l, p, p + l.P, p + 2 * l.P, &step, path, &err), 0);
        assert_int_equal(step, 42);
        assert_memory_equal(p, a, 3 * l.P * sizeof *p);
        free(p);
    }
    free(a);
    mr_dlayout_free(&l);
}

static void init(void **state)
{
    struct mr_drafter_config c;
    struct mr_model_config m = target();
    struct mr_dlayout l;
    float *a, *b;
    double sum = 0, sq = 0;
    const struct mr_dparam *p;

    (void)state;
    m.intermediate_size = 2048;
    mr_drafter_config_make(&c, topology(), &m, NULL);
    mr_dlayout_make(&l, &c);
    a = malloc(2 * l.P * sizeof *a), b = a + l.P;
    mr_drafter_init(&l, a, 1, 0.02);
    mr_drafter_init(&l, b, 1, 0.02);
    assert_memory_equal(a, b, l.P * sizeof *a);
    mr_drafter_init(&l, b, 2, 0.02);
    p = &l.t[l.layer0 + MR_DP_GATE];
    assert_true(memcmp(a + p->offset, b + p->offset, p->n * sizeof *a) != 0);
    for (uint64_t i = 0; i < p->n; i++)
        sum += a[p->offset + i], sq += (double)a[p->offset + i] * a[p->offset + i];
    assert_true(fabs(sum / (double)p->n) < 0.02 * 4 / sqrt((double)p->n));
    assert_true(fabs(sqrt(sq / (double)p->n) / 0.02 - 1) < 0.02);
    for (int i = 0; i < 16; i++)
        assert_true(a[l.t[l.norm].offset + (uint64_t)i] == 1.0f);
    assert_true(a[l.t[l.norm].offset + 16] == 0.0f); /* a gap */
    free(a);
    mr_dlayout_free(&l);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(make),
                                       cmocka_unit_test(layout),
                                       cmocka_unit_test(config_round_trip),
                                       cmocka_unit_test(config_refuses),
                                       cmocka_unit_test(block_size_places),
                                       cmocka_unit_test(weights),
                                       cmocka_unit_test(init)};
    int rc;
    char cmd[96];

    strcpy(dir, "/tmp/mr-drafter-XXXXXX");
    if (!mkdtemp(dir))
        return 1;
    rc = cmocka_run_group_tests(tests, NULL, NULL);
    snprintf(cmd, sizeof cmd, "rm -r %s", dir);
    return system(cmd) || rc;
}
