/* Topologies: the documented example, every kind of wrong key and value with its position, --set, relations, resolved output, and that the
 * schema and conf/README.md say what the key table says. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>

#include "data/topology.h"
#include "data/topology_keys.h"

static char dir[64], path[96];

/* The example of docs/design.md section 9, with a hole for each section's end. */
static const char example[] =
    "{ \"run\":    {\"name\": \"gsm\", \"dir\": \"runs/gsm\", \"seed\": 1},\n"
    "  \"target\": {\"checkpoint\": \"demo/target\", \"layers\": [1,2,3]},\n"
    "  \"drafter\":{\"layers\": 2, \"block_size\": 8, \"mask_token_id\": 1, \"anchors\": 32},\n"
    "  \"data\":   {\"train\": \"demo/train.safetensors\", \"max_tokens\": 512, \"buckets\": [128,192,256,512], \"token_budget\": 1664},\n"
    "  \"train\":  {\"epochs\": 1, \"grad_accum\": 1, \"lr\": 2e-3, \"warmup_ratio\": 0.04, \"clip\": 1.0, \"loss_decay\": 4.0, "
    "\"checkpoint_every_steps\": 200},\n"
    "  \"queue\":  {\"slabs_per_device\": 8},\n"
    "  \"actors\": [ {\"kind\": \"feeder\"}, {\"kind\": \"target\", \"device\": \"cpu\", \"count\": 2}, {\"kind\": \"drafter\", "
    "\"device\": \"cpu\", "
    "\"count\": 2} ],\n"
    "  \"restart\":{\"max\": 5, \"window_s\": 60, \"backoff_ms\": 50, \"hang_s\": 120}, \"metrics\": {\"listen\": \"127.0.0.1:9464\"} }\n";

static void put(const char *text, size_t n)
{
    FILE *f = fopen(path, "wb");

    assert_non_null(f);
    fwrite(text, 1, n, f);
    fclose(f);
}

/* The example with the first `from` replaced by `to`. */
static void edit(const char *from, const char *to)
{
    char buf[4096];
    const char *at = strstr(example, from);

    if (!at)
        fail_msg("no \"%s\" in the example", from);
    snprintf(buf, sizeof buf, "%.*s%s%s", (int)(at - example), example, to, at + strlen(from));
    put(buf, strlen(buf));
}

static void load_fails(const char *const *set, int n_set, const char *why)
{
    struct mr_topology t;
    struct mr_err err = {0};

    if (!mr_topology_load(&t, path, set, n_set, &err))
        fail_msg("accepted; wanted: %s", why);
    assert_int_equal(err.code, MR_EXIT_CONFIG);
    if (!strstr(err.msg, why))
        fail_msg("message \"%s\"\n  lacks \"%s\"", err.msg, why);
    if (strstr(err.msg, "\n"))
        fail_msg("more than one line: %s", err.msg);
}

static void edit_fails(const char *from, const char *to, const char *why)
{
    edit(from, to);
    load_fails(NULL, 0, why);
}

static void set_fails(const char *assignment, const char *why)
{
    put(example, strlen(example));
    load_fails(&assignment, 1, why);
}

static struct mr_topology load(const char *const *set, int n_set)
{
    struct mr_topology t;
    struct mr_err err = {0};

    if (mr_topology_load(&t, path, set, n_set, &err))
        fail_msg("%s", err.msg);
    return t;
}

static void example_loads(void **state)
{
    struct mr_topology t;
    char want[MR_PATH];

    (void)state;
    put(example, strlen(example));
    t = load(NULL, 0);
    assert_string_equal(t.run.name, "gsm");
    assert_true(getcwd(want, sizeof want - 16) != NULL);
    strcat(want, "/runs/gsm");
    assert_string_equal(t.run.dir, want);
    assert_int_equal(t.target.n_layers, 3);
    assert_int_equal(t.target.layers[2], 3);
    assert_int_equal(t.data.n_buckets, 4);
    assert_true(t.train.lr == 2e-3 && t.train.beta2 == 0.999 && t.train.loss_decay == 4);
    assert_int_equal(t.n_actors, 5);
    assert_int_equal(t.n_devices, 1);
    assert_int_equal(t.n_keepers, 0);
    assert_int_equal(t.actor[0].kind, MR_FEEDER);
    assert_int_equal(t.actor[4].kind, MR_DRAFTER);
    assert_int_equal(t.actor[4].index, 1);
    assert_int_equal(t.actor[4].engine, MR_ENGINE_CPU);
    assert_int_equal(t.drafter.causal, -1);
    assert_string_equal(t.drafter.init, "normal");
    assert_int_equal(mr_topo_places(&t), 2);
    assert_int_equal(mr_topo_slabs(&t), 8);
    mr_topology_free(&t);
}

static void bom_and_crlf(void **state)
{
    char buf[4096] = "\xef\xbb\xbf", *to = buf + 3;
    struct mr_topology t;

    (void)state;
    for (const char *p = example; *p; p++) {
        if (*p == '\n')
            *to++ = '\r';
        *to++ = *p;
    }
    put(buf, (size_t)(to - buf));
    t = load(NULL, 0);
    assert_int_equal(t.n_actors, 5);
    mr_topology_free(&t);
}

static void unknown_keys(void **state)
{
    (void)state;
    edit_fails("\"lr\"", "\"learning_rat\"", ":5:44: /train/learning_rat: unknown key; did you mean \"lr\"?");
    edit_fails("\"lr\"", "\"learning_rate\"", "the key for this is \"lr\"");
    edit_fails("\"actors\"", "\"Actors\"", ":7:3: /Actors: unknown key; did you mean \"actors\"?");
    edit_fails("\"epochs\"", "\"epcohs\"", "did you mean \"epochs\"?");
    edit_fails("{\"slabs_per_device\": 8}", "{\"lr\": 1}", "/queue/lr: unknown key here; \"lr\" belongs in /train");
    edit_fails("{ \"run\"", "{ \"lr\": 1, \"run\"", "\"lr\" belongs in /train");
    edit_fails("{ \"run\"", "{ \"zzzzzzz\": 1, \"run\"", "the keys here are: run, target,");
    edit_fails("\"count\": 2}", "\"cuont\": 2}", "/actors/1/cuont: unknown key; did you mean \"count\"?");
    edit_fails("{\"kind\": \"feeder\"}", "{\"kind\": \"feeder\", \"gpu\": 0}",
               "/actors/0/gpu: unknown key; the key for this is \"device\"");
    edit_fails("{\"listen\": \"127.0.0.1:9464\"}", "3", ":8:74: /metrics: must be an object");
}

static void syntax(void **state)
{
    char deep[7000];

    (void)state;
    edit_fails("\"seed\": 1", "\"seed\": 1, \"seed\": 2", ":1:59: duplicate key \"seed\", first at 1:48: keep one of them");
    edit_fails("[1,2,3]}", "[1,2,3],}", "remove the comma before it");
    edit_fails("{ \"run\"", "{ // x\n \"run\"", ":1:3: not valid JSON: ");
    edit_fails("{ \"run\"", "{ // x\n \"run\"", "JSON has no comments");
    edit_fails("2e-3", "NaN", ":5:50: not valid JSON");
    edit_fails("2e-3", "NaN", "no NaN and no Infinity");
    edit_fails("\"gsm\"", "\"g\\u0000m\"", "not valid JSON");
    edit_fails("\"gsm\"", "'gsm'", "double quotes");
    edit_fails("9464\"} }\n", "9464\"} ", "the file ends in the middle");
    edit_fails("9464\"} }\n", "9464\"} } {}", "not valid JSON: end of file expected");
    edit_fails("  \"target\"", "\xef\xbb\xbf \"target\"", ":2:1: not valid JSON");
    edit_fails("  \"target\"", "\xef\xbb\xbf \"target\"", "byte-order mark in the middle");
    put("", 0);
    load_fails(NULL, 0, "is empty");
    put("[]", 2);
    load_fails(NULL, 0, ":1:1: the top level must be an object");
    put("{\0}", 3);
    load_fails(NULL, 0, ":1:2: a NUL byte");
    put("\xff\xfe{\0}\0", 6);
    load_fails(NULL, 0, "UTF-16");
    put("version https://git-lfs.github.com/spec/v1\n", 43);
    load_fails(NULL, 0, "git lfs pull");
    memset(deep, '[', sizeof deep);
    memcpy(deep, "{\"a\":", 5);
    put(deep, sizeof deep);
    load_fails(NULL, 0, "2048 levels");
}

static void other_files(void **state)
{
    struct mr_topology t;
    struct mr_err err = {0};

    (void)state;
    assert_int_equal(mr_topology_load(&t, dir, NULL, 0, &err), -1);
    assert_non_null(strstr(err.msg, "is a directory"));
    err.code = 0;
    assert_int_equal(mr_topology_load(&t, "/nonexistent.json", NULL, 0, &err), -1);
    assert_non_null(strstr(err.msg, "No such file"));
    assert_int_equal(err.code, MR_EXIT_CONFIG);
}

static void values(void **state)
{
    (void)state;
    edit_fails("1664", "1e3", ":4:98: /data/token_budget: is 1e3; an integer 2..16777216 (digits only) is wanted");
    edit_fails("1664", "1664.0", "is 1664.0; an integer");
    edit_fails("1664", "\"1664\"", "is \"1664\"; an integer");
    edit_fails("1664", "9223372036854775807", "is 9223372036854775807; an integer 2..16777216 is wanted");
    edit_fails("1664", "9223372036854775808", ":4:98: /data/token_budget: is 9223372036854775808; an integer 2..16777216 is wanted");
    edit_fails("\"seed\": 1", "\"seed\": 9223372036854775808", "is 9223372036854775808; an integer 0..9223372036854775807 is wanted");
    edit_fails("[1,2,3]", "[1,2,-9223372036854775809]", "/target/layers/2: is -9223372036854775809; an integer 0..1022 is wanted");
    edit_fails("\"lr\": 2e-3", "\"lr\": 1e999", ":5:44: /train/lr: is 1e999; a number above 0, at most 10, is wanted");
    edit_fails("\"gsm\"", "99999999999999999999", "/run/name: is 99999999999999999999; a string");
    edit_fails("\"lr\": 2e-3", "\"lr\": 0", "/train/lr: is 0; a number above 0, at most 10, is wanted");
    edit_fails("\"lr\": 2e-3, ", "", ":5:3: /train/lr: is missing; it is required");
    edit_fails("0.04", "1.5", "is 1.5; a number 0..1 is wanted");
    edit_fails("\"seed\": 1", "\"seed\": -1", "is -1; an integer 0..9223372036854775807");
    edit_fails("[1,2,3]", "[1,2,3.0]", ":2:58: /target/layers/2: is 3.0");
    edit_fails("[1,2,3]", "[]", "is []; an array of 1..32 integers");
    edit_fails("[1,2,3]", "[1,3,2]", "/target/layers/2: is 2 after 3; strictly ascending");
    edit_fails("[1,2,3]", "[1,1]", "is 1 after 1");
    edit_fails("\"gsm\"", "\"g/sm\"", "/run/name: is \"g/sm\"; a letter or digit");
    edit_fails("\"gsm\"", "\"\"", "is empty");
    edit_fails("\"gsm\"", "\"n234567890123456789012345678901234567890123456789\"", "/run/name: is \"n234");
    edit_fails("\"kind\": \"target\"", "\"kind\": \"trgt\"",
               "is \"trgt\"; one of \"feeder\", \"target\", \"drafter\", \"keeper\" is wanted");
    edit_fails("\"device\": \"cpu\", \"count\": 2}, ", "\"device\": \"gpu:0\"}, ", "/actors/1/device: is \"gpu:0\"; \"cpu\", \"cuda:N\"");
    edit_fails("127.0.0.1:9464", "9464", "HOST:PORT");
    edit_fails("127.0.0.1:9464", "x:99999", "HOST:PORT");
    edit_fails("127.0.0.1:9464", "localhost:9464", "/metrics/listen: is \"localhost:9464\"; HOST must be a numeric address");
    edit_fails("127.0.0.1:9464", "127.0.0.256:9464", "HOST must be a numeric address");
    edit_fails("127.0.0.1:9464", "::1:9464", "HOST must be a numeric address");
    edit_fails("127.0.0.1:9464", "127.0.0.1:+94", "HOST:PORT");
    edit_fails("127.0.0.1:9464", "[]:9464", "HOST must be a numeric address");
    edit_fails("\"block_size\": 8", "\"block_size\": 1", "is 1; an integer 2..256");
    edit_fails("\"hang_s\": 120", "\"hang_s\": null", "is null; a number above 0");
    edit_fails("\"anchors\": 32", "\"causal\": \"maybe\"", "one of \"by_layer\", \"never\", \"always\"");
    edit_fails("\"anchors\": 32", "\"init\": \"zeros\"", "\"normal\" or \"checkpoint:DIR\" is wanted");
    edit_fails("{\"kind\": \"feeder\"}", "3", "/actors/0: must be an object");
    edit_fails("\"lr\": 2e-3", "\"lr\": [\n1,\n2]", "/train/lr: is [ 1, 2]; a number");
}

static void relations(void **state)
{
    (void)state;
    edit_fails("1664", "500", "/data/token_budget: is 500, but one sample may have max_tokens = 512");
    edit_fails("192,256,512]", "192,256,500]", "samples of 501..512 tokens have no bucket");
    edit_fails("192,256,512]", "256,192,512]", "is 192 after 256");
    edit_fails(
        "\"slabs_per_device\": 8", "\"slabs_per_device\": 1",
        "/queue/slabs_per_device: a step needs >= 2 slabs: grad_accum 1 x 2 drafters; has 1 = slabs_per_device 1 x 1 device that targets "
        "write to (cpu)");
    edit_fails("\"grad_accum\": 1", "\"grad_accum\": 5", "a step needs >= 10 slabs: grad_accum 5 x 2 drafters; has 8");
    edit_fails("\"grad_accum\": 1", "\"grad_accum\": 4096",
               "a step would have 8192 microbatches: grad_accum 4096 x 2 drafters; at most 4096");
    edit_fails("\"slabs_per_device\": 8", "\"slabs_per_device\": 4095", "4095 slabs + 2 targets = 4097 items; at most 4096");
    edit_fails("{\"kind\": \"feeder\"}, ", "", "has 0 feeders; exactly one");
    edit_fails("{\"kind\": \"feeder\"}", "{\"kind\": \"feeder\", \"count\": 2}", "has 2 feeders; exactly one");
    edit_fails("\"count\": 2} ]", "\"count\": 13} ]", "has 13 drafters; at most 12");
    edit_fails(", {\"kind\": \"drafter\", \"device\": \"cpu\", \"count\": 2}", "", "has 2 targets and 0 drafters");
    edit_fails("\"count\": 2} ]", "\"count\": 128} ]", "more than 128 actors");
    edit_fails("\"anchors\": 32", "\"sliding_layers\": 1", "sliding_window is 0");
    edit_fails("\"anchors\": 32", "\"sliding_layers\": 1, \"sliding_window\": 7", "shorter than a block of 8");
    edit_fails("\"anchors\": 32", "\"sliding_layers\": 3, \"sliding_window\": 8", "is 3, but there are 2 layers");
    edit_fails("\"anchors\": 32", "\"num_attention_heads\": 4, \"num_key_value_heads\": 3", "does not divide num_attention_heads = 4");
    edit_fails("\"max_tokens\": 512", "\"max_tokens\": 512, \"min_tokens\": 513", "no sample can be used");
    edit_fails("\"device\": \"cpu\", \"count\": 2}, ", "\"engine\": \"synthetic\"}, ", "all or none is wanted");
    edit_fails("\"demo/target\"", "\"synthetic:hidden=8,layers=4,vocab=10\"", "is synthetic, but the actors are not");
    edit_fails("{\"kind\": \"feeder\"}", "{\"kind\": \"feeder\"}, {\"kind\": \"keeper\"}", "keepers hold GPU memory");
}

static void set_values(void **state)
{
    const char *set[] = {"/train/lr=1e-4", "/run/name=\"x\"", "/actors/1/count=3", "/data/buckets=[512]", "/train/deterministic=true"};
    struct mr_topology t;

    (void)state;
    put(example, strlen(example));
    t = load(set, 5);
    assert_true(t.train.lr == 1e-4);
    assert_string_equal(t.run.name, "x");
    assert_int_equal(t.n_targets, 3);
    assert_int_equal(t.data.n_buckets, 1);
    assert_int_equal(t.train.deterministic, 1);
    mr_topology_free(&t);
    put("{}", 2);
    load_fails((const char *[]){"/train/lr=1"}, 1, "/run/name: is missing");
    set_fails("/train/lr=0.0", "--set /train/lr=0.0: /train/lr: is 0.0; a number above 0");
    set_fails("/data/token_budget=9223372036854775808", "/data/token_budget: is 9223372036854775808; an integer 2..16777216 is wanted");
    set_fails("/train/lr=-1e999", "/train/lr: is -1e999; a number above 0");
    set_fails("/train/lrr=1", "--set /train/lrr=1: /train/lrr: unknown key; did you mean \"lr\"?");
    set_fails("/run/name=x", "a string needs its quotes");
    set_fails("train/lr=1", "the form is");
    set_fails("/train/lr", "the form is");
    set_fails("/actors/9/count=1", "there is no place for it");
    set_fails("/run/name/x=1", "there is no place for it");
    set_fails("/actors/x/count=1", "there is no place for it"); /* not the first actor */
    set_fails("/actors/-/count=1", "there is no place for it");
    set_fails("/actors/01/count=1", "there is no place for it");
    set_fails("/actors/1x={\"kind\":\"target\"}", "there is no place for it");
    set_fails("/run/seed={\"a\":1,\"a\":2}", "duplicate");
}

static void defaults(void **state)
{
    const char *min =
        "{\"run\":{\"name\":\"a\"},\"target\":{\"checkpoint\":\"/t\",\"layers\":[1]},\"drafter\":{\"layers\":1,\"block_size\":16,"
        "\"mask_token_id\":0},\"data\":{\"train\":\"./d.jsonl\"},\"train\":{\"lr\":1},\"actors\":[{\"kind\":\"drafter\",\"count\":3},"
        "{\"kind\":\"target\"},{\"kind\":\"feeder\"}]}";
    struct mr_topology t;

    (void)state;
    put(min, strlen(min));
    t = load(NULL, 0);
    assert_non_null(strstr(t.run.dir, "/runs/a"));
    assert_string_equal(t.target.checkpoint, "/t");
    assert_null(strstr(t.data.train, "./"));
    assert_int_equal(t.data.buckets[0], 3072);
    assert_int_equal(t.data.token_budget, 3072);
    assert_true(t.train.loss_decay == 7);
    assert_int_equal(t.queue.slabs_per_device, 6);
    assert_int_equal(t.actor[0].kind, MR_FEEDER);
    assert_int_equal(t.actor[1].kind, MR_TARGET);
    mr_topology_free(&t);
}

/* Relative paths mean nothing in a directory that was removed. */
static void lost_directory(void **state)
{
    char gone[96], was[512];

    (void)state;
    put(example, strlen(example));
    snprintf(gone, sizeof gone, "%s/gone", dir);
    assert_non_null(getcwd(was, sizeof was));
    assert_true(!mkdir(gone, 0700) && !chdir(gone) && !rmdir(gone));
    load_fails(NULL, 0, "the current directory is gone");
    assert_int_equal(chdir(was), 0);
}

static void gpus(void **state)
{
    struct mr_topology t;
    const char *two[] = {
        "/actors=[{\"kind\":\"feeder\"},{\"kind\":\"target\",\"device\":\"cuda:0\",\"count\":2},{\"kind\":\"target\",\"device\":"
        "\"cuda:1\"},{\"kind\":\"drafter\",\"device\":\"cuda:1\"}]"};
    const char *mixed[] = {"/actors=[{\"kind\":\"feeder\"},{\"kind\":\"target\",\"device\":\"GPU-01234567-89ab\"},{\"kind\":\"drafter\"}]"};

    (void)state;
    put(example, strlen(example));
    t = load(two, 1);
    assert_int_equal(t.n_devices, 2);
    assert_int_equal(t.n_keepers, 2);
    assert_int_equal(t.actor[5].kind, MR_KEEPER);
    assert_string_equal(t.actor[6].device, "cuda:1");
    assert_int_equal(mr_topo_slabs(&t), 16);
    mr_topology_free(&t);
    t = load(mixed, 1);
    assert_int_equal(t.n_keepers, 1);
    assert_int_equal(mr_topo_slabs(&t), 8); /* only where the target is */
    assert_int_equal(mr_topo_slabs_on(&t, 1), 0);
    mr_topology_free(&t);
    edit_fails("[ {\"kind\": \"feeder\"},", "[ {\"kind\": \"feeder\"}, {\"kind\": \"keeper\", \"device\": \"cuda:0\", \"count\": 2},",
               "two keepers on cuda:0");
}

static void round_trip(const char *const *set, int n_set)
{
    struct mr_topology a = load(set, n_set), b;
    struct mr_err err = {0};

    assert_int_equal(mr_topology_save(&a, path, &err), 0);
    b = load(NULL, 0);
    mr_json_free(&a.src);
    mr_json_free(&b.src);
    assert_memory_equal(&a, &b, sizeof a);
}

static void resolved(void **state)
{
    const char *set[] = {"/actors/1/device=\"cuda:3\"",     "/actors/2/device=\"cuda:4\"",   "/drafter/init=\"checkpoint:d\"",
                         "/train/lr=0.1234567890123456789", "/run/seed=9223372036854775807", "/drafter/causal=\"always\"",
                         "/train/loss=\"dpace\"",           "/train/schedule=\"constant\""};
    const char *syn[] = {"/actors/1/engine=\"synthetic\"",
                         "/actors/2/engine=\"synthetic\"",
                         "/actors/2/us_per_token=0.3",
                         "/actors/2/jitter=0.1",
                         "/target/checkpoint=\"synthetic:hidden=8,layers=5,vocab=100\"",
                         "/data/train=\"synthetic:100?min=10&max=20&seed=1\""};

    (void)state;
    put(example, strlen(example));
    round_trip(NULL, 0);
    put(example, strlen(example));
    round_trip(set, 8);
    put(example, strlen(example));
    round_trip(syn, 6);
}

static void demo_loads(void **state)
{
    struct mr_topology t;
    struct mr_err err = {0};

    (void)state;
    if (mr_topology_load(&t, MR_SOURCE_DIR "/conf/demo.json", NULL, 0, &err))
        fail_msg("%s", err.msg);
    mr_topology_free(&t);
}

/* ---- documentation -------------------------------------------------------------------------------------------------------- */

static json_t *schema_of(json_t *schema, const char *ptr)
{
    char part[80];
    json_t *at = schema;

    while (*ptr && at) {
        size_t n = strcspn(ptr + 1, "/");

        snprintf(part, sizeof part, "%.*s", (int)n, ptr + 1);
        at = !strcmp(part, "N") ? json_object_get(at, "items") : json_object_get(json_object_get(at, "properties"), part);
        ptr += n + 1;
    }
    return at;
}

static int required_in(json_t *schema, const char *ptr)
{
    char up[80];
    json_t *list, *v;
    size_t i;

    snprintf(up, sizeof up, "%.*s", (int)(strrchr(ptr, '/') - ptr), ptr);
    list = json_object_get(schema_of(schema, up), "required");
    json_array_foreach(list, i, v) if (!strcmp(json_string_value(v), strrchr(ptr, '/') + 1)) return 1;
    return 0;
}

static void compare_default(const struct mr_key *k, json_t *v)
{
    json_t *want = k->dflt ? json_loads(k->dflt, JSON_DECODE_ANY, NULL) : NULL, *have = json_object_get(v, "default");

    if (json_is_number(want) && json_is_number(have))
        assert_true(json_number_value(want) == json_number_value(have));
    else if (want ? !json_equal(want, have) : have != NULL)
        fail_msg("%s: the schema has another default", k->ptr);
    json_decref(want);
}

static void compare_values(const struct mr_key *k, json_t *v)
{
    char all[200] = "";
    json_t *s;
    size_t i;

    json_array_foreach(json_object_get(v, "enum"), i, s)
        snprintf(all + strlen(all), sizeof all - strlen(all), "%s%s", i ? "|" : "", json_string_value(s));
    assert_string_equal(all, k->values ? k->values : "");
}

static void schema_says_the_same(void **state)
{
    static const char *const types[] = {"integer", "integer", "number", "string", "string", "string", "boolean", "array"};
    json_t *schema = json_load_file(MR_SOURCE_DIR "/conf/topology.schema.json", 0, NULL);
    int n = 0;
    const char *name;
    json_t *section;

    (void)state;
    assert_non_null(schema);
    for (int i = 0; i < mr_n_keys; i++) {
        const struct mr_key *k = &mr_keys[i];
        json_t *v = schema_of(schema, k->ptr), *range = k->type == MR_KEY_INTS ? json_object_get(v, "items") : v;

        if (!v)
            fail_msg("%s is not in conf/topology.schema.json", k->ptr);
        assert_string_equal(json_string_value(json_object_get(v, "type")), types[k->type]);
        assert_int_equal(required_in(schema, k->ptr), k->required);
        compare_default(k, v);
        compare_values(k, v);
        if (k->type == MR_KEY_INT || k->type == MR_KEY_REAL || k->type == MR_KEY_INTS) {
            assert_true(json_number_value(json_object_get(range, k->above ? "exclusiveMinimum" : "minimum")) == k->min);
            assert_true(json_number_value(json_object_get(range, "maximum")) == k->max);
        }
    }
    json_object_foreach(json_object_get(schema, "properties"), name, section)
    {
        json_t *in = json_object_get(section, "items") ? json_object_get(section, "items") : section;

        assert_true(json_is_false(json_object_get(in, "additionalProperties")));
        n += (int)json_object_size(json_object_get(in, "properties"));
    }
    assert_int_equal(n, mr_n_keys);
    json_decref(schema);
}

static void readme_says_the_same(void **state)
{
    static char text[1 << 16];
    FILE *f = fopen(MR_SOURCE_DIR "/conf/README.md", "r");
    int rows = 0;

    (void)state;
    assert_non_null(f);
    assert_true(fread(text, 1, sizeof text - 1, f) > 0);
    fclose(f);
    for (int i = 0; i < mr_n_keys; i++) {
        char row[120], def[80];
        const char *at, *end;

        snprintf(row, sizeof row, "| `%s` |", mr_keys[i].ptr);
        if (!(at = strstr(text, row)))
            fail_msg("no row \"%s\" in conf/README.md", row);
        end = strchr(at, '\n');
        snprintf(def, sizeof def, mr_keys[i].required ? "| required |" : mr_keys[i].dflt ? "| `%s` |" : "| computed |", mr_keys[i].dflt);
        if (!strstr(at, def) || strstr(at, def) > end)
            fail_msg("the row of %s lacks \"%s\"", mr_keys[i].ptr, def);
        if (!strstr(at, mr_keys[i].doc) || strstr(at, mr_keys[i].doc) > end)
            fail_msg("the row of %s lacks \"%s\"", mr_keys[i].ptr, mr_keys[i].doc);
    }
    for (const char *p = text; (p = strstr(p, "\n| `/")) != NULL; p++)
        rows++;
    assert_int_equal(rows, mr_n_keys);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(example_loads),
                                       cmocka_unit_test(bom_and_crlf),
                                       cmocka_unit_test(unknown_keys),
                                       cmocka_unit_test(syntax),
                                       cmocka_unit_test(other_files),
                                       cmocka_unit_test(values),
                                       cmocka_unit_test(relations),
                                       cmocka_unit_test(set_values),
                                       cmocka_unit_test(defaults),
                                       cmocka_unit_test(lost_directory),
                                       cmocka_unit_test(gpus),
                                       cmocka_unit_test(resolved),
                                       cmocka_unit_test(demo_loads),
                                       cmocka_unit_test(schema_says_the_same),
                                       cmocka_unit_test(readme_says_the_same)};
    int rc;
    char cmd[96];

    strcpy(dir, "/tmp/mr-topo-XXXXXX");
    if (!mkdtemp(dir))
        return 1;
    snprintf(path, sizeof path, "%s/t.json", dir);
    rc = cmocka_run_group_tests(tests, NULL, NULL);
    snprintf(cmd, sizeof cmd, "rm -r %s", dir);
    return system(cmd) || rc;
}
