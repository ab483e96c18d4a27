/* Writing safetensors: see safetensors.h.
 *
 * Tensors are laid out by element size (widest first), then name, and the header is padded to a multiple of 8, so that every tensor of a
 * file written here is aligned for its type.  The file appears under its name only when it is complete and on disk: PATH.tmp, fsync,
 * rename, fsync of the directory.
 */
#include "data/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct out_tensor {
    char *name;
    enum mr_st_dtype dtype;
    int n_dims;
    uint64_t shape[MR_ST_DIMS];
    uint64_t bytes;
    const void *data;
};

struct mr_st_out {
    struct out_tensor *t;
    int n, room;
    json_t *meta;
    struct mr_st_source source; /* view NULL: host memory */
    int failed; /* an add found no memory: write refuses */
};

static const struct {
    const char *name;
    unsigned bytes;
} out_dtype[MR_ST_OTHER] = {
    [MR_ST_F32] = {"F32", 4}, [MR_ST_BF16] = {"BF16", 2}, [MR_ST_F16] = {"F16", 2},   [MR_ST_F64] = {"F64", 8}, [MR_ST_I64] = {"I64", 8},
    [MR_ST_I32] = {"I32", 4}, [MR_ST_I16] = {"I16", 2},   [MR_ST_I8] = {"I8", 1},     [MR_ST_U8] = {"U8", 1},   [MR_ST_U32] = {"U32", 4},
    [MR_ST_U64] = {"U64", 8}, [MR_ST_U16] = {"U16", 2},   [MR_ST_BOOL] = {"BOOL", 1},
};

struct mr_st_out *mr_st_out_create(void)
{
    struct mr_st_out *o = calloc(1, sizeof *o);

    if (o && !(o->meta = json_object())) {
        free(o);
        return NULL;
    }
    return o;
}

void mr_st_out_add(struct mr_st_out *o, const char *name, enum mr_st_dtype dtype, const uint64_t *shape, int n_dims, const void *data)
{
    struct out_tensor *t;

    MR_ASSERT(dtype < MR_ST_OTHER && n_dims >= 0 && n_dims <= MR_ST_DIMS);
    if (o->n == o->room) {
        int room = o->room ? 2 * o->room : 64;
        struct out_tensor *grown = realloc(o->t, (size_t)room * sizeof *grown);

        if (!grown) {
            o->failed = 1;
            return;
        }
        o->t = grown, o->room = room;
    }
    t = &o->t[o->n];
    *t = (struct out_tensor){.name = strdup(name), .dtype = dtype, .n_dims = n_dims, .bytes = out_dtype[dtype].bytes, .data = data};
    for (int i = 0; i < n_dims; i++)
        t->shape[i] = shape[i], t->bytes *= shape[i];
    if (t->name)
        o->n++;
    else
        o->failed = 1;
}

void mr_st_out_meta(struct mr_st_out *o, const char *key, const char *value)
{
    if (json_object_set_new(o->meta, key, json_string(value)))
        o->failed = 1;
}

void mr_st_out_source(struct mr_st_out *o, const struct mr_st_source *source)
{
    o->source = *source;
}

static int by_width(const void *a, const void *b)
{
    const struct out_tensor *x = a, *y = b;
    int wx = (int)out_dtype[x->dtype].bytes, wy = (int)out_dtype[y->dtype].bytes;

    return wx != wy ? wy - wx : strcmp(x->name, y->name);
}

/* The header text, padded with spaces; NULL when out of memory. */
static char *header_text(const struct mr_st_out *o, size_t *bytes)
{
    json_t *root = json_object();
    uint64_t at = 0;
    char *text, *padded = NULL;

    if (json_object_size(o->meta))
        json_object_set(root, "__metadata__", o->meta);
    for (int i = 0; i < o->n; i++) {
        const struct out_tensor *t = &o->t[i];
        json_t *shape = json_array();

        for (int k = 0; k < t->n_dims; k++)
            json_array_append_new(shape, json_integer((json_int_t)t->shape[k]));
        json_object_set_new(root, t->name,
                            json_pack("{s:s, s:o, s:[I,I]}", "dtype", out_dtype[t->dtype].name, "shape", shape, "data_offsets",
                                      (json_int_t)at, (json_int_t)(at + t->bytes)));
        at += t->bytes;
    }
    text = json_dumps(root, JSON_COMPACT);
    if (text && json_object_size(root) == (size_t)o->n + (json_object_size(o->meta) ? 1 : 0)) {
        size_t n = strlen(text);

        *bytes = (n + 7) / 8 * 8;
        if ((padded = malloc(*bytes + 1)) != NULL) {
            memset(padded, ' ', *bytes);
            memcpy(padded, text, n);
        }
    }
    free(text);
    json_decref(root);
    return padded;
}

static int write_all(int fd, const void *data, uint64_t n)
{
    const char *p = data;

    while (n > 0) {
        ssize_t w = write(fd, p, n > 1u << 30 ? 1u << 30 : n);

        if (w < 0 && errno == EINTR)
            continue;
        if (w < 0)
            return -errno;
        p += w, n -= (uint64_t)w;
    }
    return 0;
}

static int write_tensor(const struct mr_st_out *o, int fd, const struct out_tensor *t)
{
    int rc = 0;

    if (!o->source.view)
        return write_all(fd, t->data, t->bytes);
    for (uint64_t at = 0; at < t->bytes && !rc; at += MR_ST_BLOCK) {
        size_t n = t->bytes - at < MR_ST_BLOCK ? t->bytes - at : MR_ST_BLOCK;
        const void *p = o->source.view(o->source.ctx, (const char *)t->data + at, n);

        rc = p ? write_all(fd, p, n) : -EREMOTEIO;
    }
    return rc;
}

static int write_body(const struct mr_st_out *o, int fd, const char *header, size_t header_bytes)
{
    unsigned char len[8];
    int rc;

    for (int i = 0; i < 8; i++)
        len[i] = (unsigned char)((uint64_t)header_bytes >> 8 * i);
    if ((rc = write_all(fd, len, 8)) || (rc = write_all(fd, header, header_bytes)))
        return rc;
    for (int i = 0; i < o->n; i++)
        if ((rc = write_tensor(o, fd, &o->t[i])))
            return rc;
    return fsync(fd) ? -errno : 0;
}

static int sync_dir(const char *path)
{
    char *copy = strdup(path);
    int fd = copy ? open(dirname(copy), O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1, rc;

    free(copy);
    if (fd < 0)
        return -errno;
    rc = fsync(fd) ? -errno : 0;
    close(fd);
    return rc == -EINVAL ? 0 : rc; /* file systems that cannot sync a directory order the rename themselves */
}

int mr_st_out_write(struct mr_st_out *o, const char *path, struct mr_err *err)
{
    char *tmp = NULL, *header = NULL;
    size_t n = 0;
    int fd = -1, rc = -ENOMEM;

    if (!o->failed) {
        qsort(o->t, (size_t)o->n, sizeof *o->t, by_width);
        header = header_text(o, &n);
    }
    if (header && asprintf(&tmp, "%s.tmp", path) > 0) {
        fd = open(tmp, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
        rc = fd < 0 ? -errno : write_body(o, fd, header, n);
        if (fd >= 0 && close(fd) && !rc)
            rc = -errno;
        if (!rc)
            rc = rename(tmp, path) ? -errno : sync_dir(path);
        if (rc && fd >= 0)
            unlink(tmp);
    }
    free(header);
    free(tmp);
    return rc ? mr_err_set(err, MR_EXIT_ENV, "%s: cannot write: %s", path, strerror(-rc)) : 0;
}

void mr_st_out_free(struct mr_st_out *o)
{
    if (!o)
        return;
    for (int i = 0; i < o->n; i++)
        free(o->t[i].name);
    free(o->t);
    json_decref(o->meta);
    free(o);
}
