/* Reading safetensors: see safetensors.h and docs/target-models.md 5.1.
 *
 * Order matters: the file's size is known first, the header length is compared with it and with the cap before anything is allocated by
 * it, and every tensor's range is proven to tile the data exactly (no hole, no overlap, no trailing byte) before a pointer is handed
 * out.  All arithmetic on numbers from the file is checked in 64 bits.
 * Limit: at most MR_ST_DIMS dimensions.
 */
#include "data/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/json.h"

enum { HEADER_MAX = 100000000 };

static const struct {
    const char *name;
    enum mr_st_dtype dtype;
    unsigned bits;
} dtypes[] = {
    {"F32", MR_ST_F32, 32},
    {"BF16", MR_ST_BF16, 16},
    {"F16", MR_ST_F16, 16},
    {"F64", MR_ST_F64, 64},
    {"I64", MR_ST_I64, 64},
    {"I32", MR_ST_I32, 32},
    {"I16", MR_ST_I16, 16},
    {"I8", MR_ST_I8, 8},
    {"U8", MR_ST_U8, 8},
    {"U32", MR_ST_U32, 32},
    {"U64", MR_ST_U64, 64},
    {"U16", MR_ST_U16, 16},
    {"BOOL", MR_ST_BOOL, 8},
    {"F8_E5M2", MR_ST_OTHER, 8},
    {"F8_E4M3", MR_ST_OTHER, 8},
    {"F8_E8M0", MR_ST_OTHER, 8},
    {"F8_E4M3FNUZ", MR_ST_OTHER, 8},
    {"F8_E5M2FNUZ", MR_ST_OTHER, 8},
    {"C64", MR_ST_OTHER, 64},
    {"F4", MR_ST_OTHER, 4},
    {"F6_E2M3", MR_ST_OTHER, 6},
    {"F6_E3M2", MR_ST_OTHER, 6},
};
enum { N_DTYPES = sizeof dtypes / sizeof *dtypes };

static int bad(const struct mr_st *st, const char *name, struct mr_err *err, const char *what)
{
    return mr_err_set(err, MR_EXIT_CONFIG, "%s: tensor \"%.200s\": %s: the file is damaged or no safetensors file", st->path, name, what);
}

/* A plain non-negative integer; 1.0, -1 and 1e3 are refused. */
static int plain_uint(const json_t *v, uint64_t *out)
{
    if (!json_is_integer(v) || json_integer_value(v) < 0)
        return -1;
    *out = (uint64_t)json_integer_value(v);
    return 0;
}

static int parse_shape(const struct mr_st *st, struct mr_st_tensor *t, const json_t *shape, struct mr_err *err)
{
    if (!json_is_array(shape))
        return bad(st, t->name, err, "no \"shape\" array");
    if (json_array_size(shape) > MR_ST_DIMS)
        return bad(st, t->name, err, "more than 8 dimensions");
    t->n_dims = (int)json_array_size(shape);
    t->n = 1;
    for (int i = 0; i < t->n_dims; i++) {
        if (plain_uint(json_array_get(shape, (size_t)i), &t->shape[i]))
            return bad(st, t->name, err, "\"shape\" must hold plain non-negative integers");
        if (__builtin_mul_overflow(t->n, t->shape[i], &t->n))
            return bad(st, t->name, err, "the product of \"shape\" overflows 64 bits");
    }
    return 0;
}

/* dtype x shape against data_offsets; begin and end stay relative to the data here. */
static int parse_extent(const struct mr_st *st, struct mr_st_tensor *t, const json_t *offsets, unsigned bits, struct mr_err *err)
{
    uint64_t end, total;
    char what[160];

    if (!json_is_array(offsets) || json_array_size(offsets) != 2 || plain_uint(json_array_get(offsets, 0), &t->begin) ||
        plain_uint(json_array_get(offsets, 1), &end))
        return bad(st, t->name, err, "\"data_offsets\" must be two plain non-negative integers");
    if (end < t->begin)
        return bad(st, t->name, err, "\"data_offsets\" end before they begin");
    t->bytes = end - t->begin;
    if (__builtin_mul_overflow(t->n, (uint64_t)bits, &total))
        return bad(st, t->name, err, "shape x dtype overflows 64 bits");
    if (total % 8)
        return bad(st, t->name, err, "shape x dtype is no whole number of bytes");
    if (total / 8 != t->bytes) {
        snprintf(what, sizeof what, "shape x %s needs %llu bytes, data_offsets give %llu", t->dtype_name, (unsigned long long)total / 8,
                 (unsigned long long)t->bytes);
        return bad(st, t->name, err, what);
    }
    return 0;
}

static int parse_tensor(const struct mr_st *st, struct mr_st_tensor *t, const char *name, const json_t *v, struct mr_err *err)
{
    const char *dtype = json_string_value(json_object_get(v, "dtype"));
    int d = 0;
    char what[120];

    t->name = strdup(name);
    if (!t->name)
        return mr_err_set(err, MR_EXIT_ENV, "%s: out of memory", st->path);
    if (!dtype)
        return bad(st, name, err, "no \"dtype\" string");
    while (d < N_DTYPES && strcmp(dtypes[d].name, dtype))
        d++;
    if (d == N_DTYPES) {
        snprintf(what, sizeof what, "unknown dtype \"%.40s\"", dtype);
        return bad(st, name, err, what);
    }
    t->dtype = dtypes[d].dtype;
    snprintf(t->dtype_name, sizeof t->dtype_name, "%s", dtype);
    if (parse_shape(st, t, json_object_get(v, "shape"), err))
        return -1;
    return parse_extent(st, t, json_object_get(v, "data_offsets"), dtypes[d].bits, err);
}

static int parse_metadata(struct mr_st *st, json_t *v, struct mr_err *err)
{
    const char *key;
    json_t *s;

    if (!json_is_object(v))
        return mr_err_set(err, MR_EXIT_CONFIG, "%s: \"__metadata__\" must be an object of strings", st->path);
    json_object_foreach(v, key, s) if (!json_is_string(s)) return mr_err_set(
        err, MR_EXIT_CONFIG, "%s: \"__metadata__\": \"%.100s\" must be a string", st->path, key);
    st->metadata = json_incref(v);
    return 0;
}

static int by_extent(const void *a, const void *b)
{
    const struct mr_st_tensor *x = a, *y = b;

    if (x->begin != y->begin)
        return x->begin < y->begin ? -1 : 1;
    return x->bytes < y->bytes ? -1 : x->bytes > y->bytes;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct mr_st_tensor *)a)->name, ((const struct mr_st_tensor *)b)->name);
}

/* The tensors must tile [0, data_bytes) exactly; then begin becomes an offset in the file. */
static int check_tiling(struct mr_st *st, uint64_t data_start, struct mr_err *err)
{
    uint64_t at = 0, data_bytes = st->file_bytes - data_start;
    char what[160];

    qsort(st->t, (size_t)st->n, sizeof *st->t, by_extent);
    for (int i = 0; i < st->n; i++) {
        struct mr_st_tensor *t = &st->t[i];

        if (t->begin != at || t->bytes > data_bytes - at) {
            snprintf(what, sizeof what, "its data is bytes %llu..%llu, but the previous tensor ends at %llu and the data at %llu",
                     (unsigned long long)t->begin, (unsigned long long)(t->begin + t->bytes), (unsigned long long)at,
                     (unsigned long long)data_bytes);
            return bad(st, t->name, err, what);
        }
        at += t->bytes;
        t->begin += data_start;
    }
    if (at != data_bytes)
        return mr_err_set(err, MR_EXIT_CONFIG, "%s: %llu bytes follow the last tensor: the file is damaged", st->path,
                          (unsigned long long)(data_bytes - at));
    qsort(st->t, (size_t)st->n, sizeof *st->t, by_name);
    return 0;
}

static int parse_header(struct mr_st *st, json_t *root, uint64_t data_start, struct mr_err *err)
{
    const char *key;
    json_t *v;

    st->t = calloc(json_object_size(root) + 1, sizeof *st->t);
    if (!st->t)
        return mr_err_set(err, MR_EXIT_ENV, "%s: out of memory", st->path);
    json_object_foreach(root, key, v)
    {
        if (!strcmp(key, "__metadata__")) {
            if (parse_metadata(st, v, err))
                return -1;
        } else if (parse_tensor(st, &st->t[st->n++], key, v, err)) {
            return -1;
        }
    }
    return check_tiling(st, data_start, err);
}

/* Header length: little-endian, judged before anything is allocated by it. */
static int header_bytes(const struct mr_st *st, uint64_t *n, struct mr_err *err)
{
    const char *kind = mr_file_kind(st->map, st->file_bytes);

    if (st->file_bytes < 8)
        return mr_err_set(err, MR_EXIT_CONFIG, "%s: %llu bytes; a safetensors file has at least 8: was the download cut?", st->path,
                          (unsigned long long)st->file_bytes);
    *n = 0;
    for (int i = 7; i >= 0; i--)
        *n = *n << 8 | st->map[i];
    if (*n > st->file_bytes - 8 && kind) /* only then: a good length may look like another format's magic */
        return mr_err_set(err, MR_EXIT_CONFIG, "%s: this is %s", st->path, kind);
    if (*n > HEADER_MAX)
        return mr_err_set(err, MR_EXIT_CONFIG, "%s: the header claims %llu bytes, allowed are %d: no safetensors file", st->path,
                          (unsigned long long)*n, HEADER_MAX);
    if (*n > st->file_bytes - 8)
        return mr_err_set(err, MR_EXIT_CONFIG,
                          "%s: the header claims %llu bytes, the file has %llu after its first 8: was the download cut?", st->path,
                          (unsigned long long)*n, (unsigned long long)(st->file_bytes - 8));
    return 0;
}

/* O_NONBLOCK: a FIFO is refused below and must not hang the open; regular files do not care. */
static int map_file(struct mr_st *st, struct mr_err *err)
{
    struct stat sb;

    st->fd = open(st->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (st->fd < 0 || fstat(st->fd, &sb) < 0)
        return mr_err_set(err, MR_EXIT_CONFIG, "%s: cannot open: %s", st->path, strerror(errno));
    if (!S_ISREG(sb.st_mode))
        return mr_err_set(err, MR_EXIT_CONFIG, "%s: %s; a safetensors file is wanted", st->path,
                          S_ISDIR(sb.st_mode) ? "is a directory" : "is no regular file");
    if (sb.st_size == 0)
        return mr_err_set(err, MR_EXIT_CONFIG, "%s: the file is empty; a safetensors file has at least 8 bytes", st->path);
    st->file_bytes = (uint64_t)sb.st_size;
    st->map = mmap(NULL, st->file_bytes, PROT_READ, MAP_SHARED, st->fd, 0);
    if (st->map == MAP_FAILED) {
        st->map = NULL;
        return mr_err_set(err, MR_EXIT_ENV, "%s: cannot map %llu bytes: %s", st->path, (unsigned long long)st->file_bytes, strerror(errno));
    }
    return 0;
}

int mr_st_open(struct mr_st *st, const char *path, struct mr_err *err)
{
    json_error_t e;
    json_t *root = NULL;
    uint64_t n = 0;
    int rc = -1;

    memset(st, 0, sizeof *st);
    st->fd = -1;
    st->path = strdup(path);
    if (!st->path || map_file(st, err) || header_bytes(st, &n, err))
        goto out;
    root = json_loadb((const char *)st->map + 8, n, JSON_REJECT_DUPLICATES, &e);
    if (!json_is_object(root))
        mr_err_set(err, MR_EXIT_CONFIG, "%s: byte %lld: header of %llu bytes: %s: the file is damaged or no safetensors file", path,
                   8ll + (root ? 0 : e.position), (unsigned long long)n, root ? "no JSON object" : e.text);
    else
        rc = parse_header(st, root, 8 + n, err);
out:
    json_decref(root);
    if (rc)
        mr_st_close(st);
    return rc;
}

void mr_st_close(struct mr_st *st)
{
    for (int i = 0; i < st->n; i++)
        free(st->t[i].name);
    free(st->t);
    json_decref(st->metadata);
    if (st->map)
        munmap((void *)st->map, st->file_bytes);
    if (st->fd > 0 || (st->fd == 0 && st->path))
        close(st->fd);
    free(st->path);
    memset(st, 0, sizeof *st);
    st->fd = -1;
}

const struct mr_st_tensor *mr_st_find(const struct mr_st *st, const char *name)
{
    struct mr_st_tensor key = {.name = (char *)name};

    return st->n ? bsearch(&key, st->t, (size_t)st->n, sizeof *st->t, by_name) : NULL;
}

/* ---- conversions ---------------------------------------------------------------------------------------------------------- */

float mr_bf16_f32(uint16_t b)
{
    uint32_t u = (uint32_t)b << 16;
    float x;

    memcpy(&x, &u, 4);
    return x;
}

static float f16_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, e = h >> 10 & 31u, m = h & 1023u, u;
    float x;

    if (e == 0) {
        x = (float)m * 0x1.0p-24f;
        return sign ? -x : x;
    }
    u = sign | (e == 31 ? 0x7f800000u : (e + 112) << 23) | m << 13;
    memcpy(&x, &u, 4);
    return x;
}

int mr_st_to_f32(const struct mr_st *st, const struct mr_st_tensor *t, float *dst, struct mr_err *err)
{
    const unsigned char *p = mr_st_data(st, t);
    uint16_t h;
    double d;

    switch (t->dtype) {
    case MR_ST_F32:
        memcpy(dst, p, t->bytes);
        return 0;
    case MR_ST_BF16:
        for (uint64_t i = 0; i < t->n; i++)
            memcpy(&h, p + 2 * i, 2), dst[i] = mr_bf16_f32(h);
        return 0;
    case MR_ST_F16:
        for (uint64_t i = 0; i < t->n; i++)
            memcpy(&h, p + 2 * i, 2), dst[i] = f16_f32(h);
        return 0;
    case MR_ST_F64:
        for (uint64_t i = 0; i < t->n; i++)
            memcpy(&d, p + 8 * i, 8), dst[i] = (float)d;
        return 0;
    default:
        return mr_err_set(err, MR_EXIT_CONFIG, "%s: tensor \"%s\" is %s; F32, BF16, F16 or F64 is wanted", st->path, t->name,
                          t->dtype_name);
    }
}
