/* Changing and writing JSON: mr_json_set and mr_json_save of json.h. */
#include "data/json.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "data/json_pvt.h"

/* ---- --set ---------------------------------------------------------------------------------------------------------------- */

/* Puts v (consumed) under `name` of parent; an array takes its length as "append". */
static int set_member(json_t *parent, const char *name, json_t *v)
{
    size_t i = (size_t)mr_json_index(name);

    if (json_is_object(parent))
        return json_object_set_new(parent, name, v);
    if (json_is_array(parent) && i < json_array_size(parent))
        return json_array_set_new(parent, i, v);
    if (json_is_array(parent) && i == json_array_size(parent))
        return json_array_append_new(parent, v);
    json_decref(v);
    return -1;
}

/* The container that holds the last token of ptr, intermediate objects made; *name gets that token. */
static json_t *set_parent(json_t *root, const char *ptr, char *name, size_t bytes)
{
    json_t *at = root;

    for (;;) {
        json_t *next;
        char up[16];

        if (!mr_json_token(&ptr, name, bytes))
            return NULL;
        if (!*ptr)
            return at;
        snprintf(up, sizeof up, "/%.14s", name);
        next = json_is_array(at) ? mr_json_at(at, up) : json_object_get(at, name);
        if (!next && (!json_is_object(at) || json_object_set_new(at, name, next = json_object())))
            return NULL;
        at = next;
    }
}

static int remember_set(struct mr_json *j, const char *assignment)
{
    char **grown = realloc(j->set, (size_t)(j->n_set + 1) * sizeof *grown);

    if (grown)
        j->set = grown;
    if (!grown || !(j->set[j->n_set] = strdup(assignment)))
        return -ENOMEM;
    j->n_set++;
    return 0;
}

int mr_json_set(struct mr_json *j, const char *assignment, struct mr_err *err)
{
    char ptr[512], name[256];
    size_t n = strcspn(assignment, "=");
    json_error_t e;
    json_t *v, *parent;

    if (assignment[0] != '/' || assignment[n] != '=' || n >= sizeof ptr || n < 2)
        return mr_err_set(err, MR_EXIT_CONFIG, "--set %.200s: the form is /section/key=JSON, e.g. --set /train/lr=1e-3", assignment);
    snprintf(ptr, sizeof ptr, "%.*s", (int)n, assignment);
    v = mr_json_decode_big(assignment + n + 1, strlen(assignment + n + 1), JSON_DECODE_ANY | JSON_REJECT_DUPLICATES, &e);
    if (!v)
        return mr_err_set(err, MR_EXIT_CONFIG,
                          "--set %.200s: the value is not valid JSON (%s); a string needs its quotes: --set '%.100s=\"...\"'", assignment,
                          e.text, ptr);
    parent = set_parent(j->root, ptr, name, sizeof name);
    if (!parent)
        json_decref(v);
    if (!parent || set_member(parent, name, v))
        return mr_err_set(err, MR_EXIT_CONFIG,
                          "--set %.200s: there is no place for it: its parent is no object and no array with that index", assignment);
    return remember_set(j, assignment) ? mr_err_set(err, MR_EXIT_ENV, "out of memory") : 0;
}

/* ---- writing -------------------------------------------------------------------------------------------------------------- */

static int write_text(const char *tmp, const char *text, size_t n)
{
    int fd = open(tmp, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666), rc = 0;
    ssize_t w;

    if (fd < 0)
        return -errno;
    for (; n > 0; text += w, n -= (size_t)w) {
        w = write(fd, text, n);
        if (w < 0 && errno != EINTR) {
            rc = -errno;
            break;
        }
        w = w < 0 ? 0 : w;
    }
    if (!rc && fsync(fd))
        rc = -errno;
    if (close(fd) && !rc)
        rc = -errno;
    return rc;
}

/* 15 digits show every number as people write it (1e-06); 17 only when some value needs them to come back the same. */
static char *dump(const json_t *v)
{
    char *text = json_dumps(v, JSON_INDENT(2) | JSON_REAL_PRECISION(15));
    json_t *back = text ? json_loads(text, JSON_DECODE_ANY, NULL) : NULL;

    if (!json_equal(v, back)) {
        free(text);
        text = json_dumps(v, JSON_INDENT(2) | JSON_REAL_PRECISION(17));
    }
    json_decref(back);
    return text;
}

int mr_json_save(const json_t *v, const char *path, struct mr_err *err)
{
    char *text = v ? dump(v) : NULL, *tmp = NULL;
    int rc = -ENOMEM;

    if (text && asprintf(&tmp, "%s.tmp", path) > 0) {
        size_t n = strlen(text);

        text[n] = '\n'; /* over the NUL: the length is what counts */
        rc = write_text(tmp, text, n + 1);
        if (!rc)
            rc = rename(tmp, path) ? -errno : 0;
        if (rc)
            unlink(tmp);
    }
    free(text);
    free(tmp);
    return rc ? mr_err_set(err, MR_EXIT_ENV, "%s: cannot write: %s", path, strerror(-rc)) : 0;
}
