/* JSON with positions: see json.h.
 *
 * jansson parses and judges; a small scanner then walks the source again, only when a message needs a position, so that the common path
 * pays nothing.  The scanner trusts its input: it runs on text that jansson has accepted (or on the part before jansson's error).
 * Limit: the whole file is read; files above MAX_BYTES are refused (configs and indexes are far below).
 */
#include "data/json.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/json_pvt.h"

enum { MAX_BYTES = 256 << 20, MAX_DEPTH = 64 };

/* ---- the scanner ---------------------------------------------------------------------------------------------------------- */

static const char *skip_space(const char *p)
{
    while (*p == ' ' || *p == '\t' || *p == '\n' || *p == '\r')
        p++;
    return p;
}

/* p at the opening quote; returns the byte after the closing one. */
static const char *skip_string(const char *p)
{
    for (p++; *p && *p != '"'; p++)
        if (*p == '\\' && p[1])
            p++;
    return *p ? p + 1 : p;
}

/* Skips one value of any kind; nesting is counted, not recursed into. */
static const char *skip_value(const char *p)
{
    int depth = 0;

    do {
        p = skip_space(p);
        if (*p == '"') {
            p = skip_string(p);
        } else if (*p == '{' || *p == '[') {
            depth++, p++;
        } else if (*p == '}' || *p == ']') {
            depth--, p++;
        } else if (*p == ',' || *p == ':') {
            p++;
        } else {
            while (*p && !strchr(",:]}[{ \t\r\n\"", *p))
                p++;
        }
    } while (depth > 0 && *p);
    return p;
}

/* Does the quoted key at p equal the n bytes of name?  Escapes are decoded by jansson. */
static int key_is(const char *p, const char *end, const char *name, size_t n)
{
    json_t *s;
    int same;

    if (!memchr(p, '\\', (size_t)(end - p)))
        return (size_t)(end - p) == n + 2 && !memcmp(p + 1, name, n);
    s = json_loadb(p, (size_t)(end - p), JSON_DECODE_ANY, NULL);
    same = s && json_string_length(s) == n && !memcmp(json_string_value(s), name, n);
    json_decref(s);
    return same;
}

const char *mr_json_token(const char **ptr, char *buf, size_t bytes)
{
    size_t n = 0;
    const char *p = *ptr + 1;

    for (; *p && *p != '/'; p++) {
        char c = *p;

        if (c == '~' && (p[1] == '0' || p[1] == '1'))
            c = *++p == '0' ? '~' : '/';
        if (n + 1 >= bytes)
            return NULL;
        buf[n++] = c;
    }
    buf[n] = 0;
    *ptr = p;
    return buf;
}

long mr_json_index(const char *token)
{
    size_t n = strspn(token, "0123456789");

    return n == 0 || n > 9 || token[n] || (*token == '0' && n > 1) ? -1 : strtol(token, NULL, 10);
}

/* Member `name` of the object at p: its key's position, *value its value's; NULL when absent. */
static const char *find_member(const char *p, const char *name, const char **value)
{
    size_t n = strlen(name);

    for (p = skip_space(p + 1); *p == '"';) {
        const char *key = p, *end = skip_string(p);

        *value = skip_space(skip_space(end) + 1);
        if (key_is(key, end, name, n))
            return key;
        p = skip_space(skip_value(*value));
        if (*p == ',')
            p = skip_space(p + 1);
    }
    return NULL;
}

static const char *find_element(const char *p, const char *index)
{
    long i = mr_json_index(index);

    for (p = skip_space(p + 1); i >= 0 && *p && *p != ']'; i--) {
        if (i == 0)
            return p;
        p = skip_space(skip_value(p));
        if (*p == ',')
            p = skip_space(p + 1);
    }
    return NULL;
}

/* Position of the key (or element) that ptr names, *value of its value; NULL when absent. */
static const char *locate(const char *text, const char *ptr, const char **value)
{
    char name[256];
    const char *at = skip_space(text);

    *value = at;
    while (*ptr == '/') {
        const char *p = *value;

        if (!mr_json_token(&ptr, name, sizeof name))
            return NULL;
        if (*p == '{')
            at = find_member(p, name, value);
        else if (*p == '[')
            at = *value = find_element(p, name);
        else
            return NULL;
        if (!at)
            return NULL;
    }
    return at;
}

static void line_column(const char *text, const char *at, int *line, int *column)
{
    const char *start = text;

    *line = 1;
    for (const char *p = text; p < at; p++)
        if (*p == '\n')
            ++*line, start = p + 1;
    *column = (int)(at - start) + 1;
}

/* The innermost object that is open at `at`, or NULL: to find the first of two equal keys. */
static const char *open_object(const char *text, const char *at)
{
    const char *stack[MAX_DEPTH];
    int depth = 0;

    for (const char *p = text; p < at;) {
        if (*p == '"') {
            p = skip_string(p);
            continue;
        }
        if (*p == '{' || *p == '[') {
            if (depth == MAX_DEPTH)
                return NULL;
            stack[depth++] = p;
        } else if ((*p == '}' || *p == ']') && depth > 0) {
            depth--;
        }
        p++;
    }
    return depth > 0 ? stack[depth - 1] : NULL;
}

/* ---- parse errors --------------------------------------------------------------------------------------------------------- */

/* Start of the token that jansson complains about: its position is behind the token. */
static const char *error_token(const char *text, size_t bytes, const json_error_t *e)
{
    const char *at = text + (e->position < 0 ? 0 : (size_t)e->position > bytes ? bytes : (size_t)e->position);
    const char *near = strstr(e->text, " near '");
    size_t n = near ? strlen(near) - 8 : 0;

    if (n > 0 && (size_t)(at - text) >= n && !memcmp(at - n, near + 7, n))
        return at - n;
    return at;
}

static const char *parse_hint(const char *text, const char *at, const json_error_t *e)
{
    const char *before = at;

    while (before > text && isspace((unsigned char)before[-1]))
        before--;
    if (!strncmp(at, "\xef\xbb\xbf", 3))
        return "; a byte-order mark in the middle: were two files joined? remove it";
    if (*at == '/' || *at == '#')
        return "; JSON has no comments: remove it";
    if ((*at == '}' || *at == ']') && before > text && before[-1] == ',')
        return "; remove the comma before it";
    if (*at == '\'')
        return "; JSON strings need double quotes";
    if (!strncasecmp(at, "nan", 3) || !strncasecmp(at, "inf", 3) || !strncasecmp(at, "-inf", 4) || !strncasecmp(at, "-nan", 4))
        return "; JSON has no NaN and no Infinity: write a finite number";
    if (strstr(e->text, "too big"))
        return "; allowed are -9223372036854775808..9223372036854775807";
    if (strstr(e->text, "\\u0000"))
        return "; a string cannot hold a NUL";
    if (strstr(e->text, "maximum parsing depth"))
        return "; the limit is 2048 levels";
    if (strstr(e->text, "premature end") || !*at)
        return "; the file ends in the middle: was it cut?";
    return "";
}

static int duplicate_error(const char *text, const char *path, const char *at, struct mr_err *err)
{
    const char *key = at, *object, *first, *value;
    char name[128];
    int line, col, line1, col1;

    /* at: behind the second key, or at it */
    if (*key != '"') {
        for (key = at - 2; key > text && !(*key == '"' && key[-1] != '\\'); key--)
            ;
    }
    snprintf(name, sizeof name, "%.*s", (int)(skip_string(key) - key - 2 > 100 ? 100 : skip_string(key) - key - 2), key + 1);
    line_column(text, key, &line, &col);
    object = open_object(text, key);
    first = object ? find_member(object, name, &value) : NULL;
    if (!first || first >= key)
        return mr_err_set(err, MR_EXIT_CONFIG, "%s:%d:%d: duplicate key \"%s\": keep one of them", path, line, col, name);
    line_column(text, first, &line1, &col1);
    return mr_err_set(err, MR_EXIT_CONFIG, "%s:%d:%d: duplicate key \"%s\", first at %d:%d: keep one of them", path, line, col, name, line1,
                      col1);
}

static int parse_error(const char *text, size_t bytes, const char *path, const json_error_t *e, struct mr_err *err)
{
    const char *at = error_token(text, bytes, e);
    int line, col;

    if (json_error_code(e) == json_error_duplicate_key)
        return duplicate_error(text, path, at, err);
    line_column(text, at, &line, &col);
    return mr_err_set(err, MR_EXIT_CONFIG, "%s:%d:%d: not valid JSON: %s%s", path, line, col, e->text, parse_hint(text, at, e));
}

/* The number that jansson calls too big -> null, padded.  Its position is behind the token. */
static int blank_number(char *text, const json_error_t *e)
{
    char *end = text + e->position, *at = end;

    if (json_error_code(e) != json_error_numeric_overflow)
        return -1;
    while (at > text && strchr("0123456789+-.eE", at[-1]))
        at--;
    if (end - at < 4)
        return -1;
    memset(at, ' ', (size_t)(end - at));
    memcpy(at, "null", 4);
    return 0;
}

json_t *mr_json_decode_big(const char *text, size_t bytes, size_t flags, json_error_t *e)
{
    json_t *v = json_loadb(text, bytes, flags, e);
    char *copy = v || json_error_code(e) != json_error_numeric_overflow ? NULL : malloc(bytes + 1);

    if (!copy)
        return v;
    memcpy(copy, text, bytes);
    copy[bytes] = 0;
    while (!v && !blank_number(copy, e))
        v = json_loadb(copy, bytes, flags, e);
    free(copy);
    return v;
}

static int parse(struct mr_json *j, const char *text, size_t bytes, const char *path, int big, struct mr_err *err)
{
    const size_t flags = JSON_REJECT_DUPLICATES | JSON_DECODE_ANY;
    json_error_t e;
    int line, col;

    memset(j, 0, sizeof *j);
    j->path = strdup(path);
    j->text = malloc(bytes + 1);
    if (!j->path || !j->text)
        return mr_err_set(err, MR_EXIT_ENV, "%s: out of memory for %zu bytes", path, bytes);
    memcpy(j->text, text, bytes);
    j->text[bytes] = 0;
    if (memchr(text, 0, bytes)) {
        line_column(j->text, j->text + strlen(j->text), &line, &col);
        return mr_err_set(err, MR_EXIT_CONFIG, "%s:%d:%d: a NUL byte: this is no JSON text", path, line, col);
    }
    j->root = big ? mr_json_decode_big(j->text, bytes, flags, &e) : json_loadb(j->text, bytes, flags, &e);
    if (!j->root)
        return parse_error(j->text, bytes, path, &e, err);
    if (!json_is_object(j->root)) {
        line_column(j->text, skip_space(j->text), &line, &col);
        return mr_err_set(err, MR_EXIT_CONFIG, "%s:%d:%d: the top level must be an object { ... }", path, line, col);
    }
    return 0;
}

int mr_json_parse(struct mr_json *j, const char *text, size_t bytes, const char *path, struct mr_err *err)
{
    return parse(j, text, bytes, path, 0, err);
}

/* ---- files ---------------------------------------------------------------------------------------------------------------- */

/* The whole file, NUL-terminated, to be freed by the caller; NULL with err set. */
static char *slurp(const char *path, size_t *bytes, struct mr_err *err)
{
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a FIFO is refused below, not waited for */
    char *text = NULL;
    size_t n = 0;

    if (fd < 0 || fstat(fd, &st) < 0) {
        mr_err_set(err, MR_EXIT_CONFIG, "%s: cannot open: %s", path, strerror(errno));
    } else if (!S_ISREG(st.st_mode)) {
        mr_err_set(err, MR_EXIT_CONFIG, "%s: %s; a JSON file is wanted", path,
                   S_ISDIR(st.st_mode) ? "is a directory" : "is no regular file");
    } else if (st.st_size == 0) {
        mr_err_set(err, MR_EXIT_CONFIG, "%s: the file is empty; a JSON object is wanted", path);
    } else if (st.st_size > MAX_BYTES) {
        mr_err_set(err, MR_EXIT_CONFIG, "%s: %lld bytes; a JSON file of at most %d bytes is wanted", path, (long long)st.st_size,
                   MAX_BYTES);
    } else if ((text = malloc((size_t)st.st_size + 1)) != NULL) {
        ssize_t r = 1;

        while (n < (size_t)st.st_size && (r = read(fd, text + n, (size_t)st.st_size - n)) > 0)
            n += (size_t)r;
        text[n] = 0;
        if (r < 0) {
            mr_err_set(err, MR_EXIT_CONFIG, "%s: cannot read: %s", path, strerror(errno));
            free(text);
            text = NULL;
        }
    } else {
        mr_err_set(err, MR_EXIT_ENV, "%s: out of memory for %lld bytes", path, (long long)st.st_size);
    }
    if (fd >= 0)
        close(fd);
    *bytes = n;
    return text;
}

static int load(struct mr_json *j, const char *path, int big, struct mr_err *err)
{
    size_t n, bom;
    char *text;
    const char *kind;
    int rc;

    memset(j, 0, sizeof *j);
    if (!(text = slurp(path, &n, err)))
        return -1;
    kind = mr_file_kind((unsigned char *)text, n);
    bom = n >= 3 && !memcmp(text, "\xef\xbb\xbf", 3) ? 3 : 0;
    if (kind)
        rc = mr_err_set(err, MR_EXIT_CONFIG, "%s: this is %s", path, kind);
    else
        rc = parse(j, text + bom, n - bom, path, big, err);
    free(text);
    if (rc)
        mr_json_free(j);
    return rc;
}

int mr_json_load(struct mr_json *j, const char *path, struct mr_err *err)
{
    return load(j, path, 0, err);
}

int mr_json_load_big(struct mr_json *j, const char *path, struct mr_err *err)
{
    return load(j, path, 1, err);
}

void mr_json_free(struct mr_json *j)
{
    json_decref(j->root);
    free(j->text);
    free(j->path);
    for (int i = 0; i < j->n_set; i++)
        free(j->set[i]);
    free(j->set);
    memset(j, 0, sizeof *j);
}

/* ---- positions and messages ----------------------------------------------------------------------------------------------- */

int mr_json_where(const struct mr_json *j, const char *ptr, int *line, int *column)
{
    const char *value, *at = j->text ? locate(j->text, ptr, &value) : NULL;

    if (!at)
        return -ENOENT;
    line_column(j->text, at, line, column);
    return 0;
}

json_t *mr_json_at(json_t *v, const char *ptr)
{
    char name[256];

    while (v && *ptr == '/') {
        if (!mr_json_token(&ptr, name, sizeof name))
            return NULL;
        if (json_is_array(v))
            v = json_array_get(v, (size_t)mr_json_index(name)); /* -1: above every size */
        else
            v = json_object_get(v, name);
    }
    return v;
}

/* The last --set that wrote ptr or something around it, or NULL. */
static const char *set_for(const struct mr_json *j, const char *ptr)
{
    for (int i = j->n_set - 1; i >= 0; i--) {
        size_t n = strcspn(j->set[i], "=");

        if (!strncmp(j->set[i], ptr, n) && (ptr[n] == 0 || ptr[n] == '/'))
            return j->set[i];
    }
    return NULL;
}

void mr_json_source(const struct mr_json *j, const char *ptr, char *out, size_t bytes)
{
    const char *value, *set = set_for(j, ptr), *at = set || !j->text ? NULL : locate(j->text, ptr, &value);
    json_t *v = at ? NULL : mr_json_at(j->root, ptr);
    char *s = v ? json_dumps(v, JSON_ENCODE_ANY | JSON_COMPACT) : NULL;

    if (at)
        snprintf(out, bytes, "%.*s", (int)(skip_value(value) - value), value);
    else if (set && strlen(ptr) == strcspn(set, "="))
        snprintf(out, bytes, "%s", set + strcspn(set, "=") + 1);
    else
        snprintf(out, bytes, "%s", s ? s : "nothing");
    for (char *p = out; *p; p++) /* messages have one line */
        if ((unsigned char)*p < ' ')
            *p = ' ';
    free(s);
}

/* "PATH:LINE:COL" of ptr, or of its nearest parent that is in the file; "--set ..." when the command line wrote it. */
static void place(const struct mr_json *j, const char *ptr, char *out, size_t bytes)
{
    char up[512];
    const char *set = set_for(j, ptr);
    int line, col;

    snprintf(up, sizeof up, "%s", ptr);
    if (set) {
        snprintf(out, bytes, "--set %.200s", set);
        return;
    }
    while (mr_json_where(j, up, &line, &col)) {
        char *slash = strrchr(up, '/');

        if (!slash) {
            snprintf(out, bytes, "%s", j->path ? j->path : "topology");
            return;
        }
        *slash = 0;
    }
    snprintf(out, bytes, "%s:%d:%d", mr_err_path(j->path, 300), line, col);
}

int mr_json_error(const struct mr_json *j, const char *ptr, struct mr_err *err, const char *fmt, ...)
{
    char msg[1200], where[400];
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(msg, sizeof msg, fmt, ap);
    va_end(ap);
    place(j, ptr, where, sizeof where);
    return mr_err_set(err, MR_EXIT_CONFIG, "%s: %.300s%s%s", where, ptr, *ptr ? ": " : "", msg);
}
