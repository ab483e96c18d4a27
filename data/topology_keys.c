/* The table of topology keys and what it drives: see topology_keys.h. */
#include "data/topology_keys.h"

#include <limits.h>
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define T(member) offsetof(struct mr_topology, member)
#define A(member) offsetof(struct mr_actor_entry, member)
#define INT_KEY(p, at, lo, hi) .ptr = p, .type = MR_KEY_INT, .offset = at, .min = lo, .max = hi
#define REAL_KEY(p, at, lo, hi) .ptr = p, .type = MR_KEY_REAL, .offset = at, .min = lo, .max = hi
#define PATH_KEY(p, at) .ptr = p, .type = MR_KEY_PATH, .offset = at, .size = MR_PATH
#define ENUM_KEY(p, at, v) .ptr = p, .type = MR_KEY_ENUM, .offset = at, .values = v

const struct mr_key mr_keys[] = {
    {.ptr = "/run/name", .type = MR_KEY_STRING, .offset = T(run.name), .size = MR_NAME_MAX, .required = 1, .alias = "run_name|id",
     .doc = "Name of the run: letters, digits, '.', '_', '-'; part of the names in /dev/shm."},
    {PATH_KEY("/run/dir", T(run.dir)), .alias = "output|output_dir|out", .doc = "Run directory. Default: runs/NAME."},
    {.ptr = "/run/seed", .type = MR_KEY_U64, .offset = T(run.seed), .min = 0, .max = 9223372036854775807.0, .dflt = "1", .alias = "random_seed",
     .doc = "Seed of shuffle, anchors and initialisation."},

    {PATH_KEY("/target/checkpoint", T(target.checkpoint)), .required = 1, .alias = "model|path|dir",
     .doc = "Directory of the target: config.json and safetensors. \"synthetic:hidden=H,layers=L,vocab=V\" when all targets and drafters are synthetic."},
    {.ptr = "/target/layers", .type = MR_KEY_INTS, .offset = T(target.layers), .size = MR_TOPO_LAYERS, .offset_n = T(target.n_layers),
     .min = 0, .max = 1022, .required = 1, .alias = "target_layer_ids|layer_ids",
     .doc = "Target layers (0-based, ascending) whose outputs the drafter reads; the last layer is not allowed."},

    {INT_KEY("/drafter/layers", T(drafter.layers), 1, MR_TOPO_LAYERS), .required = 1, .alias = "num_hidden_layers|n_layers", .doc = "Layers of the drafter."},
    {INT_KEY("/drafter/block_size", T(drafter.block_size), 2, 256), .required = 1, .alias = "block", .doc = "Tokens of a block, the anchor included."},
    {INT_KEY("/drafter/mask_token_id", T(drafter.mask_token_id), 0, 1 << 24), .required = 1, .alias = "mask_id|mask_token",
     .doc = "Token id of the slots to be predicted; serving must use the same one."},
    {INT_KEY("/drafter/anchors", T(drafter.anchors), 1, 65536), .dflt = "512", .alias = "num_anchors|max_anchors",
     .doc = "Blocks drawn per sample and epoch, at most."},
    {INT_KEY("/drafter/hidden_size", T(drafter.hidden_size), 0, 1 << 17), .dflt = "0", .doc = "0 = the target's; must equal it."},
    {INT_KEY("/drafter/intermediate_size", T(drafter.intermediate_size), 0, 1 << 20), .dflt = "0", .doc = "Width of the MLP; 0 = the target's."},
    {INT_KEY("/drafter/num_attention_heads", T(drafter.num_attention_heads), 0, 1024), .dflt = "0", .alias = "heads|n_heads",
     .doc = "Query heads; 0 = the target's."},
    {INT_KEY("/drafter/num_key_value_heads", T(drafter.num_key_value_heads), 0, 1024), .dflt = "0", .alias = "kv_heads|n_kv_heads",
     .doc = "Key/value heads; must divide the query heads; 0 = the target's."},
    {INT_KEY("/drafter/head_dim", T(drafter.head_dim), 0, 1024), .dflt = "0", .doc = "Width of a head, even; 0 = the target's."},
    {REAL_KEY("/drafter/rope_theta", T(drafter.rope_theta), 0, 1e12), .dflt = "0", .doc = "Base of the rotary embedding; 0 = the target's. The target's scaling is not inherited."},
    {REAL_KEY("/drafter/rms_norm_eps", T(drafter.rms_norm_eps), 0, 0.1), .dflt = "0", .doc = "Epsilon of the norms; 0 = the target's."},
    {INT_KEY("/drafter/max_position_embeddings", T(drafter.max_position_embeddings), 0, 1 << 28), .dflt = "0",
     .doc = "Written into the drafter's config; 0 = the target's."},
    {INT_KEY("/drafter/sliding_window", T(drafter.sliding_window), 0, 1 << 28), .dflt = "0", .doc = "Window of the sliding layers in tokens; at least block_size; 0 = none."},
    {INT_KEY("/drafter/sliding_layers", T(drafter.n_sliding), 0, MR_TOPO_LAYERS), .dflt = "0", .doc = "The first so many layers use the window."},
    {ENUM_KEY("/drafter/causal", T(drafter.causal), "by_layer|never|always"), .first = -1, .dflt = "\"by_layer\"", .alias = "is_causal",
     .doc = "Attention inside a block: by_layer = causal in sliding layers, both ways in full ones."},
    {ENUM_KEY("/drafter/window_origin", T(drafter.window_origin), "query|anchor"), .dflt = "\"query\"",
     .doc = "Where the window is measured from."},
    {PATH_KEY("/drafter/init", T(drafter.init)), .dflt = "\"normal\"", .alias = "checkpoint|init_from",
     .doc = "\"normal\" = N(0, init_std), or \"checkpoint:DIR\" = a drafter to start from."},
    {REAL_KEY("/drafter/init_std", T(drafter.init_std), 0, 1), .above = 1, .dflt = "0.02", .alias = "initializer_range",
     .doc = "Standard deviation of \"normal\"."},

    {PATH_KEY("/data/train", T(data.train)), .required = 1, .alias = "path|file|dataset",
     .doc = "Training rows: .safetensors (millrace pack), .jsonl, or \"synthetic:N?min=A&max=B&seed=S\"."},
    {INT_KEY("/data/max_tokens", T(data.max_tokens), 2, 1 << 24), .dflt = "3072", .alias = "max_length|max_len|seq_len|max_seq_len",
     .doc = "Longest sample in tokens; on_overlong says what happens to longer ones."},
    {INT_KEY("/data/min_tokens", T(data.min_tokens), 2, 1 << 24), .dflt = "2", .alias = "min_length", .doc = "Shorter samples are dropped and counted."},
    {.ptr = "/data/buckets", .type = MR_KEY_INTS, .offset = T(data.buckets), .size = MR_MAX_BUCKETS, .offset_n = T(data.n_buckets), .min = 2,
     .max = 1 << 24, .doc = "Upper bounds of the length buckets in tokens, ascending, the last at least max_tokens. Default: [max_tokens]."},
    {INT_KEY("/data/token_budget", T(data.token_budget), 2, 1 << 24), .alias = "batch_tokens|max_batch_tokens|batch_size",
     .doc = "Most tokens of a microbatch; at least max_tokens. Default: max_tokens."},
    {ENUM_KEY("/data/on_bad_record", T(data.skip_bad), "stop|skip"), .dflt = "\"stop\"", .alias = "skip_bad",
     .doc = "stop = report the first 10 bad records and refuse; skip = count them."},
    {ENUM_KEY("/data/on_overlong", T(data.truncate), "drop|truncate"), .dflt = "\"drop\"", .alias = "truncate",
     .doc = "What happens to samples above max_tokens."},

    {INT_KEY("/train/epochs", T(train.epochs), 1, 1 << 20), .dflt = "1", .alias = "num_epochs", .doc = "Passes over the data."},
    {INT_KEY("/train/grad_accum", T(train.grad_accum), 1, MR_MAX_PLACES), .dflt = "1", .alias = "gradient_accumulation_steps|accum",
     .doc = "Microbatches per drafter and step: a step has grad_accum x drafters."},
    {INT_KEY("/train/max_steps", T(train.max_steps), 0, MR_STEP_MAX), .dflt = "0", .alias = "steps", .doc = "Stop after so many steps; 0 = all of the epochs."},
    {REAL_KEY("/train/lr", T(train.lr), 0, 10), .above = 1, .required = 1, .alias = "learning_rate", .doc = "Peak learning rate."},
    {REAL_KEY("/train/warmup_ratio", T(train.warmup_ratio), 0, 1), .dflt = "0.04", .alias = "warmup|warmup_steps", .doc = "Share of all steps with a rising rate."},
    {REAL_KEY("/train/clip", T(train.clip), 0, 1e9), .above = 1, .dflt = "1.0", .alias = "max_grad_norm|grad_clip", .doc = "Largest gradient norm."},
    {REAL_KEY("/train/loss_decay", T(train.loss_decay), 0, 1e6), .alias = "gamma|decay",
     .doc = "Slot k weighs exp(-(k-1)/loss_decay); 0 = no decay. Default by block_size: up to 8: 4, up to 12: 5, else 7."},
    {REAL_KEY("/train/weight_decay", T(train.weight_decay), 0, 1), .dflt = "0.0", .alias = "wd", .doc = "AdamW weight decay."},
    {REAL_KEY("/train/beta1", T(train.beta1), 0, 0.99999), .dflt = "0.9", .doc = "AdamW beta 1."},
    {REAL_KEY("/train/beta2", T(train.beta2), 0, 0.999999), .dflt = "0.999", .doc = "AdamW beta 2."},
    {REAL_KEY("/train/eps", T(train.eps), 0, 1), .above = 1, .dflt = "1e-8", .alias = "adam_eps", .doc = "AdamW epsilon."},
    {ENUM_KEY("/train/loss", T(train.loss), "ce|dpace"), .dflt = "\"ce\"", .alias = "loss_type", .doc = "ce = cross entropy with decay; dpace = D-PACE weights."},
    {ENUM_KEY("/train/schedule", T(train.constant_lr), "cosine|constant"), .dflt = "\"cosine\"", .alias = "lr_scheduler|scheduler",
     .doc = "Rate after the warm-up."},
    {INT_KEY("/train/checkpoint_every_steps", T(train.checkpoint_every_steps), 0, MR_STEP_MAX), .dflt = "1000", .alias = "save_steps|checkpoint_every",
     .doc = "Steps between checkpoints; 0 = only the final one."},
    {INT_KEY("/train/keep_checkpoints", T(train.keep_checkpoints), 1, 1 << 20), .dflt = "3", .alias = "keep|save_total_limit", .doc = "Newest checkpoints kept."},
    {.ptr = "/train/deterministic", .type = MR_KEY_BOOL, .offset = T(train.deterministic), .dflt = "false",
     .doc = "true = item k of a step goes to drafter k mod D: the same weights bit for bit, whatever dies."},

    {INT_KEY("/queue/slabs_per_device", T(queue.slabs_per_device), 1, MR_MAX_ITEMS), .alias = "slabs|slots|depth",
     .doc = "Places for hidden states per device that targets write to; all together at least grad_accum x drafters. Default: 2 x that."},

    {INT_KEY("/restart/max", T(restart.max), 0, 1 << 20), .dflt = "5", .alias = "max_restarts|retries",
     .doc = "Deaths of a slot without a finished microbatch, within window_s, before the run fails."},
    {REAL_KEY("/restart/window_s", T(restart.window_s), 0, 1e6), .above = 1, .dflt = "60", .alias = "window", .doc = "Window of the restart budget in seconds."},
    {REAL_KEY("/restart/backoff_ms", T(restart.backoff_ms), 0, 1e6), .dflt = "50", .alias = "backoff", .doc = "First delay before a restart in milliseconds; doubles."},
    {REAL_KEY("/restart/hang_s", T(restart.hang_s), 0, 1e6), .above = 1, .dflt = "120", .alias = "hang|timeout|timeout_s",
     .doc = "An actor without progress for so many seconds is killed and restarted."},

    {.ptr = "/metrics/listen", .type = MR_KEY_STRING, .offset = T(metrics.listen), .size = 64, .dflt = "\"\"", .alias = "port|address",
     .doc = "HOST:PORT of the Prometheus endpoint; \"\" = off."},

    {ENUM_KEY("/actors/N/kind", A(kind), "feeder|target|drafter|keeper"), .required = 1, .alias = "type|role",
     .doc = "feeder, target or drafter; keepers of GPUs are added by themselves."},
    {.ptr = "/actors/N/device", .type = MR_KEY_STRING, .offset = A(device), .size = 40, .dflt = "\"cpu\"", .alias = "gpu|cuda",
     .doc = "\"cpu\", \"cuda:N\" or \"GPU-uuid\"."},
    {INT_KEY("/actors/N/count", A(count), 1, MR_MAX_ACTORS), .dflt = "1", .alias = "num|n|replicas", .doc = "So many actors of this entry."},
    {ENUM_KEY("/actors/N/engine", A(engine), "model|synthetic"), .dflt = "\"model\"", .doc = "synthetic = sleeps instead of computing."},
    {INT_KEY("/actors/N/threads", A(threads), 1, 1024), .dflt = "1", .doc = "Threads of a cpu actor."},
    {REAL_KEY("/actors/N/us_per_token", A(us_per_token), 0, 1e9), .dflt = "0", .doc = "synthetic: microseconds per token."},
    {REAL_KEY("/actors/N/us_per_item", A(us_per_item), 0, 1e9), .dflt = "0", .doc = "synthetic: microseconds per microbatch."},
    {REAL_KEY("/actors/N/jitter", A(jitter), 0, 1), .dflt = "0", .doc = "synthetic: times vary by 1 +- jitter."},
};
const int mr_n_keys = sizeof mr_keys / sizeof *mr_keys;

enum { LIST = 128 };

/* ---- names ---------------------------------------------------------------------------------------------------------------- */

static const char *last_name(const char *ptr) { return strrchr(ptr, '/') + 1; }

static int in_section(const struct mr_key *k, const char *section)
{
    size_t n = strlen(section);

    return !strncmp(k->ptr, section, n) && k->ptr[n] == '/' && !strchr(k->ptr + n + 1, '/');
}

/* "/train/learning_rate" is what somebody tried: the key that has it as an alias, in `section` or (NULL) anywhere. */
static const struct mr_key *by_alias(const char *name, const char *section)
{
    size_t n = strlen(name);

    for (int i = 0; i < mr_n_keys; i++) {
        if (!mr_keys[i].alias || (section && !in_section(&mr_keys[i], section)))
            continue;
        for (const char *p = mr_keys[i].alias; p; p = strchr(p, '|') ? strchr(p, '|') + 1 : NULL)
            if (!strncasecmp(p, name, n) && (p[n] == 0 || p[n] == '|'))
                return &mr_keys[i];
    }
    return NULL;
}

/* The keys (or aliases) of `section` ("" = the sections themselves), as a list of names. */
static int names_in(const char *section, const char **names)
{
    static const char *const sections[] = {"run", "target", "drafter", "data", "train", "queue", "actors", "restart", "metrics"};
    int n = 0;

    if (!*section) {
        memcpy(names, sections, sizeof sections);
        return (int)(sizeof sections / sizeof *sections);
    }
    for (int i = 0; i < mr_n_keys; i++)
        if (in_section(&mr_keys[i], section))
            names[n++] = last_name(mr_keys[i].ptr);
    return n;
}

static const struct mr_key *elsewhere(const char *name)
{
    for (int i = 0; i < mr_n_keys; i++)
        if (!strcasecmp(last_name(mr_keys[i].ptr), name))
            return &mr_keys[i];
    return NULL;
}

/* The alias list can be misspelt too: "learning_rat" is nearest to an alias of lr. */
static const struct mr_key *near_alias(const char *name, const char *section)
{
    char word[64];

    for (int i = 0; i < mr_n_keys; i++) {
        if (!mr_keys[i].alias || !in_section(&mr_keys[i], section))
            continue;
        for (const char *p = mr_keys[i].alias; p; p = strchr(p, '|') ? strchr(p, '|') + 1 : NULL) {
            const char *one = word;

            snprintf(word, sizeof word, "%.*s", (int)strcspn(p, "|"), p);
            if (mr_nearest(name, &one, 1))
                return &mr_keys[i];
        }
    }
    return NULL;
}

/* `section`: table form ("/actors/N"); `where`: the real pointer of the object ("/actors/1"). */
static int unknown(const struct mr_json *j, const char *section, const char *where, const char *name, struct mr_err *err)
{
    const char *names[LIST], *near;
    char ptr[400], all[1000] = "";
    const struct mr_key *k;
    int n = names_in(section, names);

    snprintf(ptr, sizeof ptr, "%s/%.200s", where, name);
    if ((k = by_alias(name, section)) != NULL)
        return mr_json_error(j, ptr, err, "unknown key; the key for this is \"%s\"", last_name(k->ptr));
    if ((k = elsewhere(name)) != NULL && !in_section(k, section))
        return mr_json_error(j, ptr, err, "unknown key here; it belongs one place over: %s", k->ptr);
    if ((near = mr_nearest(name, names, n)) != NULL)
        return mr_json_error(j, ptr, err, "unknown key; did you mean \"%s\"?", near);
    if ((k = near_alias(name, section)) != NULL || (k = by_alias(name, NULL)) != NULL)
        return mr_json_error(j, ptr, err, "unknown key; did you mean %s?", k->ptr);
    for (int i = 0; i < n; i++)
        snprintf(all + strlen(all), sizeof all - strlen(all), "%s%s", i ? ", " : "", names[i]);
    return mr_json_error(j, ptr, err, "unknown key; the keys here are: %s", all);
}

static int check_object(const struct mr_json *j, json_t *v, const char *section, const char *where, struct mr_err *err)
{
    const char *key, *names[LIST];
    json_t *child;
    int n = names_in(section, names), i;

    if (!json_is_object(v))
        return mr_json_error(j, where, err, "must be an object { ... }");
    json_object_foreach (v, key, child) {
        for (i = 0; i < n && strcmp(names[i], key); i++)
            ;
        if (i == n)
            return unknown(j, section, where, key, err);
    }
    return 0;
}

static int check_actors(const struct mr_json *j, json_t *v, struct mr_err *err)
{
    char where[40];
    json_t *one;
    size_t i;

    if (!json_is_array(v))
        return mr_json_error(j, "/actors", err, "must be an array [ {...}, ... ]");
    json_array_foreach (v, i, one) {
        snprintf(where, sizeof where, "/actors/%zu", i);
        if (check_object(j, one, "/actors/N", where, err))
            return -1;
    }
    return 0;
}

int mr_keys_check_names(const struct mr_json *j, struct mr_err *err)
{
    const char *key;
    char section[80];
    json_t *v;

    if (check_object(j, j->root, "", "", err))
        return -1;
    json_object_foreach (j->root, key, v) {
        snprintf(section, sizeof section, "/%s", key);
        if (!strcmp(key, "actors") ? check_actors(j, v, err) : check_object(j, v, section, section, err))
            return -1;
    }
    return 0;
}

/* ---- values --------------------------------------------------------------------------------------------------------------- */

static int wrong(const struct mr_json *j, const char *ptr, const char *wanted, struct mr_err *err)
{
    char seen[80];

    mr_json_source(j, ptr, seen, sizeof seen);
    return mr_json_error(j, ptr, err, "is %s; %s is wanted", seen, wanted);
}

/* Integers are written as integers: 8.0 and 1e3 are refused, because a size that is not exact is a mistake. */
static int integer(const struct mr_json *j, const char *ptr, const json_t *v, const struct mr_key *k, json_int_t *out, struct mr_err *err)
{
    char wanted[96];

    snprintf(wanted, sizeof wanted, "an integer %.0f..%.0f", k->min, k->max);
    if (k->type == MR_KEY_U64)
        snprintf(wanted, sizeof wanted, "an integer 0..%lld", (long long)INT64_MAX);
    if (json_is_real(v))
        strcat(wanted, " (digits only)");
    if (!json_is_integer(v))
        return wrong(j, ptr, wanted, err);
    *out = json_integer_value(v);
    if (*out < (json_int_t)k->min || (k->type != MR_KEY_U64 && *out > (json_int_t)k->max))
        return wrong(j, ptr, wanted, err);
    return 0;
}

static int real(const struct mr_json *j, const char *ptr, const json_t *v, const struct mr_key *k, double *out, struct mr_err *err)
{
    char wanted[96];

    snprintf(wanted, sizeof wanted, k->above ? "a number above %g, at most %g," : "a number %g..%g", k->min, k->max);
    if (!json_is_number(v))
        return wrong(j, ptr, wanted, err);
    *out = json_number_value(v);
    if (!isfinite(*out) || *out > k->max || (k->above ? *out <= k->min : *out < k->min))
        return wrong(j, ptr, wanted, err);
    return 0;
}

static int enumeration(const struct mr_json *j, const char *ptr, const json_t *v, const struct mr_key *k, int *out, struct mr_err *err)
{
    char wanted[128] = "one of ";
    const char *s = json_string_value(v);
    int value = k->first;

    for (const char *p = k->values; p; p = strchr(p, '|') ? strchr(p, '|') + 1 : NULL, value++) {
        size_t n = strcspn(p, "|");

        if (s && strlen(s) == n && !strncmp(s, p, n)) {
            *out = value;
            return 0;
        }
        snprintf(wanted + strlen(wanted), sizeof wanted - strlen(wanted), "%s\"%.*s\"", p == k->values ? "" : ", ", (int)n, p);
    }
    return wrong(j, ptr, wanted, err);
}

int mr_path_absolute(const char *s, char *out, size_t bytes)
{
    const char *prefix = !strncmp(s, "checkpoint:", 11) ? "checkpoint:" : "";
    char cwd[MR_PATH];
    int n;

    s += strlen(prefix);
    if (*s == '/' || !*s || !strncmp(s, "synthetic:", 10) || (!*prefix && !strcmp(s, "normal")))
        n = snprintf(out, bytes, "%s%s", prefix, s);
    else if (getcwd(cwd, sizeof cwd))
        n = snprintf(out, bytes, "%s%s/%s", prefix, cwd, !strncmp(s, "./", 2) ? s + 2 : s);
    else
        return -1;
    return n < (int)bytes ? 0 : -1;
}

static int string(const struct mr_json *j, const char *ptr, const json_t *v, const struct mr_key *k, char *out, struct mr_err *err)
{
    const char *s = json_string_value(v);
    char wanted[64];

    snprintf(wanted, sizeof wanted, "a string of at most %u bytes", k->size - 1);
    if (!s || strlen(s) >= k->size)
        return wrong(j, ptr, wanted, err);
    if (k->required && !*s)
        return mr_json_error(j, ptr, err, "is empty");
    if (k->type != MR_KEY_PATH) {
        strcpy(out, s);
        return 0;
    }
    return mr_path_absolute(s, out, k->size) ? mr_json_error(j, ptr, err, "is too long as an absolute path; %u bytes are allowed", k->size - 1) : 0;
}

static int integers(const struct mr_json *j, const char *ptr, json_t *v, const struct mr_key *k, int *out, int *n, struct mr_err *err)
{
    char wanted[80], one[200];
    json_int_t x;

    snprintf(wanted, sizeof wanted, "an array of 1..%u integers", k->size);
    if (!json_is_array(v) || json_array_size(v) < 1 || json_array_size(v) > k->size)
        return wrong(j, ptr, wanted, err);
    *n = (int)json_array_size(v);
    for (int i = 0; i < *n; i++) {
        snprintf(one, sizeof one, "%s/%d", ptr, i);
        if (integer(j, one, json_array_get(v, (size_t)i), k, &x, err))
            return -1;
        out[i] = (int)x;
    }
    return 0;
}

static int parse_value(const struct mr_json *j, const char *ptr, json_t *v, const struct mr_key *k, char *base, struct mr_err *err)
{
    void *at = base + k->offset;
    json_int_t x;

    switch (k->type) {
    case MR_KEY_INT:
    case MR_KEY_U64:
        if (integer(j, ptr, v, k, &x, err))
            return -1;
        if (k->type == MR_KEY_INT)
            *(int *)at = (int)x;
        else
            *(uint64_t *)at = (uint64_t)x;
        return 0;
    case MR_KEY_REAL:
        return real(j, ptr, v, k, at, err);
    case MR_KEY_ENUM:
        return enumeration(j, ptr, v, k, at, err);
    case MR_KEY_BOOL:
        if (!json_is_boolean(v))
            return wrong(j, ptr, "true or false", err);
        *(int *)at = json_is_true(v);
        return 0;
    case MR_KEY_INTS:
        return integers(j, ptr, v, k, at, (int *)(void *)(base + k->offset_n), err);
    default:
        return string(j, ptr, v, k, at, err);
    }
}

static int parse_default(const struct mr_json *j, const char *ptr, const struct mr_key *k, char *base, struct mr_err *err)
{
    json_t *v;
    int rc;

    if (!k->dflt)
        return 0;                                /* computed by the caller */
    v = json_loads(k->dflt, JSON_DECODE_ANY, NULL);
    rc = parse_value(j, ptr, v, k, base, err);
    json_decref(v);
    return rc;
}

int mr_keys_parse(const struct mr_json *j, const char *section, void *base, struct mr_err *err)
{
    int actor = !strncmp(section, "/actors/", 8);
    char ptr[128];

    for (int i = 0; i < mr_n_keys; i++) {
        const struct mr_key *k = &mr_keys[i];
        json_t *v;

        if (actor != !strncmp(k->ptr, "/actors/", 8))
            continue;
        snprintf(ptr, sizeof ptr, "%s%s", section, actor ? k->ptr + 9 : k->ptr);
        v = mr_json_at(j->root, ptr);
        if (!v && k->required)
            return mr_json_error(j, ptr, err, "is missing; it is required: %s", k->doc);
        if (v ? parse_value(j, ptr, v, k, base, err) : parse_default(j, ptr, k, base, err))
            return -1;
    }
    return 0;
}

/* ---- output --------------------------------------------------------------------------------------------------------------- */

static json_t *enum_json(const struct mr_key *k, int value)
{
    const char *p = k->values;

    for (int i = k->first; i < value; i++)
        p = strchr(p, '|') + 1;
    return json_stringn(p, strcspn(p, "|"));
}

static json_t *value_json(const struct mr_key *k, const char *base)
{
    const void *at = base + k->offset;
    json_t *list;

    switch (k->type) {
    case MR_KEY_INT:
        return json_integer(*(const int *)at);
    case MR_KEY_U64:
        return json_integer((json_int_t) * (const uint64_t *)at);
    case MR_KEY_REAL:
        return json_real(*(const double *)at);
    case MR_KEY_ENUM:
        return enum_json(k, *(const int *)at);
    case MR_KEY_BOOL:
        return json_boolean(*(const int *)at);
    case MR_KEY_INTS:
        list = json_array();
        for (int i = 0; i < *(const int *)(const void *)(base + k->offset_n); i++)
            json_array_append_new(list, json_integer(((const int *)at)[i]));
        return list;
    default:
        return json_string(at);
    }
}

void mr_keys_write(json_t *root, const void *base, int actor)
{
    char section[40];

    for (int i = 0; i < mr_n_keys; i++) {
        const struct mr_key *k = &mr_keys[i];
        json_t *to = root;

        if (actor != !strncmp(k->ptr, "/actors/", 8))
            continue;
        if (!actor) {
            snprintf(section, sizeof section, "%.*s", (int)strcspn(k->ptr + 1, "/"), k->ptr + 1);
            if (!(to = json_object_get(root, section)))
                json_object_set_new(root, section, to = json_object());
        }
        json_object_set_new(to, last_name(k->ptr), value_json(k, base));
    }
}
