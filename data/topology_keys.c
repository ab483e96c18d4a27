/* What the table of topology keys drives: names, values, output.  See topology_keys.h. */
#include "data/topology_keys.h"

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { LIST = 128 };

/* ---- names ---------------------------------------------------------------------------------------------------------------- */

static const char *last_name(const char *ptr)
{
    return strrchr(ptr, '/') + 1;
}

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
        return mr_json_error(j, ptr, err, "unknown key here; \"%s\" belongs in %.*s", last_name(k->ptr),
                             (int)(strrchr(k->ptr, '/') - k->ptr), k->ptr);
    if ((near = mr_nearest(name, names, n)) != NULL)
        return mr_json_error(j, ptr, err, "unknown key; did you mean \"%s\"?", near);
    if ((k = near_alias(name, section)) != NULL)
        return mr_json_error(j, ptr, err, "unknown key; did you mean \"%s\"?", last_name(k->ptr));
    if ((k = by_alias(name, NULL)) != NULL)
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
    json_object_foreach(v, key, child)
    {
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
    json_array_foreach(v, i, one)
    {
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
    json_object_foreach(j->root, key, v)
    {
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
    const char *prefix = !strncmp(s, "checkpoint:", 11) ? "checkpoint:" : !strncmp(s, "random:", 7) ? "random:" : "";
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
    errno = 0;
    if (!mr_path_absolute(s, out, k->size))
        return 0;
    if (errno == ENOENT)
        return mr_json_error(j, ptr, err, "is relative, and the current directory is gone: cd to another one, or write an absolute path");
    return mr_json_error(j, ptr, err, "is too long as an absolute path; %u bytes are allowed", k->size - 1);
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
        return 0; /* computed by the caller */
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
