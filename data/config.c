/* Reading Hugging Face style config files: see config_pvt.h.
 *
 * RoPE is the part that fails in silence: the same model is written in at least three schemas, and a reader that knows only one falls back
 * to theta 10000.  Here every place is read, all that are present must agree, and nothing present is an error.
 */
#include "data/config_pvt.h"

#include <math.h>
#include <string.h>
#include <sys/stat.h>

int mr_cfg_open(struct mr_json *j, const char *dir, struct mr_err *err)
{
    char path[4096];
    struct stat st;

    memset(j, 0, sizeof *j);
    if (stat(dir, &st) || !S_ISDIR(st.st_mode))
        return mr_err_set(err, MR_EXIT_CONFIG, "%s: no such directory; a checkpoint directory with config.json is wanted", dir);
    snprintf(path, sizeof path, "%s/config.json", dir);
    return mr_json_load(j, path, err);
}

int mr_cfg_has(const struct mr_json *j, const char *ptr)
{
    json_t *v = mr_json_at(j->root, ptr);

    return v && !json_is_null(v);
}

static int number(const struct mr_json *j, const char *ptr, const char *wanted, double *out, struct mr_err *err)
{
    json_t *v = mr_json_at(j->root, ptr);
    char seen[60];

    if (!mr_cfg_has(j, ptr))
        return mr_json_error(j, ptr, err, "is missing; %s is required: it is never guessed", wanted);
    if (!json_is_number(v)) {
        mr_json_source(j, ptr, seen, sizeof seen);
        return mr_json_error(j, ptr, err, "is %s; %s is wanted", seen, wanted);
    }
    *out = json_number_value(v);
    return 0;
}

int mr_cfg_int(const struct mr_json *j, const char *ptr, int min, int max, int *out, struct mr_err *err)
{
    char wanted[64], seen[60];
    double x;

    snprintf(wanted, sizeof wanted, "an integer %d..%d", min, max);
    if (number(j, ptr, wanted, &x, err))
        return -1;
    if (!(x >= min && x <= max) || x != floor(x)) {
        mr_json_source(j, ptr, seen, sizeof seen);
        return mr_json_error(j, ptr, err, "is %s; %s is wanted", seen, wanted);
    }
    *out = (int)x;
    return 0;
}

int mr_cfg_positive(const struct mr_json *j, const char *ptr, double *out, struct mr_err *err)
{
    char seen[60];

    if (number(j, ptr, "a number > 0", out, err))
        return -1;
    if (!(*out > 0) || !isfinite(*out)) {
        mr_json_source(j, ptr, seen, sizeof seen);
        return mr_json_error(j, ptr, err, "is %s; a number > 0 is wanted", seen);
    }
    return 0;
}

int mr_cfg_bool(const struct mr_json *j, const char *ptr, int *out, struct mr_err *err)
{
    json_t *v = mr_json_at(j->root, ptr);
    char seen[60];

    if (!mr_cfg_has(j, ptr))
        return 0;
    if (!json_is_boolean(v)) {
        mr_json_source(j, ptr, seen, sizeof seen);
        return mr_json_error(j, ptr, err, "is %s; true or false is wanted", seen);
    }
    *out = json_is_true(v);
    return 0;
}

int mr_cfg_must_be(const struct mr_json *j, const char *ptr, int value, struct mr_err *err)
{
    int seen = value;

    if (mr_cfg_bool(j, ptr, &seen, err))
        return -1;
    if (seen != value)
        return mr_json_error(j, ptr, err, "is %s, which is not implemented; %s is wanted", seen ? "true" : "false",
                             value ? "true" : "false");
    return 0;
}

int mr_cfg_silu(const struct mr_json *j, struct mr_err *err)
{
    const char *s = json_string_value(mr_json_at(j->root, "/hidden_act"));

    if (!s)
        return mr_json_error(j, "/hidden_act", err, "is missing; \"silu\" is required");
    if (strcmp(s, "silu"))
        return mr_json_error(j, "/hidden_act", err, "is \"%.60s\", which is not implemented; \"silu\" is wanted", s);
    return 0;
}

/* ---- RoPE ----------------------------------------------------------------------------------------------------------------- */

/* Sets *to once; a second value from `ptr` must be the same. */
static int agree(const struct mr_json *j, const char *ptr, double value, double *to, struct mr_err *err)
{
    if (*to == 0) {
        *to = value;
        return 0;
    }
    return *to == value ? 0
                        : mr_json_error(j, ptr, err,
                                        "is %.10g, but another place of this file says %.10g: which one was the model trained with? "
                                        "keep one",
                                        value, *to);
}

static int agree_member(const struct mr_json *j, const char *group, const char *name, double *to, struct mr_err *err)
{
    char ptr[96];
    double x;

    snprintf(ptr, sizeof ptr, "%s/%s", group, name);
    if (!mr_cfg_has(j, ptr))
        return 0;
    return mr_cfg_positive(j, ptr, &x, err) || agree(j, ptr, x, to, err) ? -1 : 0;
}

static int rope_kind(const struct mr_json *j, const char *group, int *kind, struct mr_err *err)
{
    static const char *const names[] = {"default", "linear", "llama3"};
    const char *seen[2] = {NULL, NULL};
    char ptr[2][96];

    for (int i = 0; i < 2; i++) {
        snprintf(ptr[i], sizeof ptr[i], "%s/%s", group, i ? "type" : "rope_type");
        seen[i] = json_string_value(mr_json_at(j->root, ptr[i]));
        if (!seen[i] && mr_cfg_has(j, ptr[i]))
            return mr_json_error(j, ptr[i], err, "must be a string");
    }
    if (seen[0] && seen[1] && strcmp(seen[0], seen[1]))
        return mr_json_error(j, ptr[1], err, "is \"%.40s\", but rope_type is \"%.40s\": keep one", seen[1], seen[0]);
    if (!seen[0] && !seen[1])
        return mr_json_error(j, ptr[0], err, "is missing; \"default\", \"linear\" or \"llama3\" is required in %s", group + 1);
    for (int k = 0; k < 3; k++) {
        if (strcmp(seen[0] ? seen[0] : seen[1], names[k]))
            continue;
        if (*kind >= 0 && *kind != k)
            return mr_json_error(j, ptr[seen[0] ? 0 : 1], err, "is \"%s\", but another place of this file says \"%s\": keep one", names[k],
                                 names[*kind]);
        *kind = k;
        return 0;
    }
    return mr_json_error(j, ptr[seen[0] ? 0 : 1], err,
                         "is \"%.40s\", which is not implemented; \"default\", \"linear\" or \"llama3\" is wanted",
                         seen[0] ? seen[0] : seen[1]);
}

/* rope_scaling or rope_parameters */
static int rope_group(const struct mr_json *j, const char *group, struct mr_cfg_rope *r, struct mr_err *err)
{
    const char *key;
    json_t *v, *g = mr_json_at(j->root, group);
    char ptr[96];
    double partial = 0;

    if (!mr_cfg_has(j, group))
        return 0;
    if (!json_is_object(g))
        return mr_json_error(j, group, err, "must be an object or null");
    json_object_foreach(g, key, v) if (json_is_object(v)) return mr_json_error(
        j, group, err, "has settings per layer type (\"%.60s\"), which is not implemented", key);
    if (!mr_cfg_has(j, "/rope_parameters/rope_type") && !mr_cfg_has(j, "/rope_parameters/type") && !strcmp(group, "/rope_parameters") &&
        mr_cfg_has(j, "/rope_scaling"))
        ; /* the other group names the kind for both */
    else if (rope_kind(j, group, &r->kind, err))
        return -1;
    snprintf(ptr, sizeof ptr, "%s/partial_rotary_factor", group);
    if (agree_member(j, group, "partial_rotary_factor", &partial, err))
        return -1;
    if (partial != 0 && partial != 1)
        return mr_json_error(j, ptr, err, "is %.6g: partial rotation is not implemented; 1 is wanted", partial);
    return agree_member(j, group, "rope_theta", &r->theta, err) || agree_member(j, group, "factor", &r->factor, err) ||
                   agree_member(j, group, "low_freq_factor", &r->low, err) || agree_member(j, group, "high_freq_factor", &r->high, err) ||
                   agree_member(j, group, "original_max_position_embeddings", &r->orig, err)
               ? -1
               : 0;
}

static int rope_complete(const struct mr_json *j, int max_position, struct mr_cfg_rope *r, struct mr_err *err)
{
    const char *g = mr_cfg_has(j, "/rope_scaling") ? "/rope_scaling" : "/rope_parameters";

    if (r->theta == 0)
        return mr_json_error(j, "/rope_theta", err,
                             "is missing, and rope_parameters/rope_theta and rope_scaling/rope_theta too; it is required "
                             "and never guessed");
    if (r->kind < 0)
        r->kind = 0;
    if (r->kind == 0)
        return 0;
    if (r->factor < 1)
        return mr_json_error(j, g, err, "factor is %.6g (0 = missing); a number >= 1 is required for scaling", r->factor);
    if (r->kind == 1)
        return 0;
    if (!(r->low > 0 && r->high > r->low))
        return mr_json_error(j, g, err, "low_freq_factor is %.6g and high_freq_factor %.6g (0 = missing); llama3 needs 0 < low < high",
                             r->low, r->high);
    if (r->orig == 0)
        r->orig = max_position; /* the rule of the format itself, not a guess: docs/target-models.md 2 */
    return 0;
}

int mr_cfg_rope(const struct mr_json *j, int max_position, struct mr_cfg_rope *r, struct mr_err *err)
{
    double partial = 0;

    *r = (struct mr_cfg_rope){.kind = -1};
    if (agree_member(j, "", "rope_theta", &r->theta, err) || agree_member(j, "", "partial_rotary_factor", &partial, err))
        return -1;
    if (partial != 0 && partial != 1)
        return mr_json_error(j, "/partial_rotary_factor", err, "is %.6g: partial rotation is not implemented; 1 is wanted", partial);
    if (rope_group(j, "/rope_scaling", r, err) || rope_group(j, "/rope_parameters", r, err))
        return -1;
    return rope_complete(j, max_position, r, err);
}
