/* Writing safetensors: see safetensors.h.
 *
 * Tensors are laid out by element size (widest first), then name, and the header is padded to a multiple of 8, so that every tensor of a
 * file written here is aligned for its type.  The file appears under its name only when it is complete and on disk: PATH.tmp, fsync,
 * rename, fsync of the directory; the two fsyncs are left to whoever asks for that.
 * Host memory is written from where it lies.  What must be read from elsewhere or rounded goes through MR_ST_BLOCKS blocks: while one is made,
 * the others are on their way to the disk.
 */
#include "data/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "data/file_write.h"

_Static_assert((int)MR_ST_BLOCKS == (int)MR_FW_SLOTS, "a block for each write that is on its way");

struct out_tensor {
    char *name;
    enum mr_st_dtype dtype;
    int n_dims;
    uint64_t shape[MR_ST_DIMS];
    uint64_t bytes;
    const void *data;
    int rounded;                 /* data is f32 */
};

struct mr_st_out {
    struct out_tensor *t;
    int n, room;
    json_t *meta;
    struct mr_st_source source;  /* read NULL: host memory */
    char *block[MR_ST_BLOCKS];   /* own ones, for what is rounded from host memory; made at need */
    int failed;                  /* an add found no memory: write refuses */
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

static void add(struct mr_st_out *o, const char *name, enum mr_st_dtype dtype, const uint64_t *shape, int n_dims, const void *data, int rounded)
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
    *t = (struct out_tensor){.name = strdup(name), .dtype = dtype, .n_dims = n_dims, .bytes = out_dtype[dtype].bytes, .data = data,
                             .rounded = rounded};
    for (int i = 0; i < n_dims; i++)
        t->shape[i] = shape[i], t->bytes *= shape[i];
    if (t->name)
        o->n++;
    else
        o->failed = 1;
}

void mr_st_out_add(struct mr_st_out *o, const char *name, enum mr_st_dtype dtype, const uint64_t *shape, int n_dims, const void *data)
{
    add(o, name, dtype, shape, n_dims, data, 0);
}

void mr_st_out_add_rounded(struct mr_st_out *o, const char *name, const uint64_t *shape, int n_dims, const float *data)
{
    add(o, name, MR_ST_BF16, shape, n_dims, data, 1);
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

/* The file's beginning: length of the header text, and that text padded with spaces; NULL when out of memory. */
static char *header_of(const struct mr_st_out *o, size_t *bytes)
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
        size_t n = strlen(text), room = (n + 7) / 8 * 8;

        *bytes = 8 + room;
        if ((padded = malloc(*bytes)) != NULL) {
            for (int i = 0; i < 8; i++)
                padded[i] = (char)((uint64_t)room >> 8 * i);
            memset(padded + 8, ' ', room);
            memcpy(padded + 8, text, n);
        }
    }
    free(text);
    json_decref(root);
    return padded;
}

/* dst (bf16) = src (f32), n of each; both may begin at the same place. */
static void round_block(void *dst, const void *src, size_t n)
{
    enum { CHUNK = 1024 };
    float x[CHUNK] = {0};
    uint16_t h[CHUNK];

    for (size_t at = 0; at < n; at += CHUNK) {
        size_t m = n - at < CHUNK ? n - at : CHUNK;

        memcpy(x, (const char *)src + at * sizeof *x, m * sizeof *x);
        for (size_t i = 0; i < CHUNK; i++)           /* a constant count: vector code without a tail */
            h[i] = mr_bf16(x[i]);
        memcpy((char *)dst + at * sizeof *h, h, m * sizeof *h);
    }
}

static void *own_block(struct mr_st_out *o, int i)
{
    if (!o->block[i])
        o->block[i] = malloc(MR_ST_BLOCK);
    return o->block[i];
}

static int no_block(const char *path, struct mr_err *err)
{
    return mr_err_set(err, MR_EXIT_ENV, "%s: no host memory for the %d blocks of %d MiB that it is written from", path, MR_ST_BLOCKS,
                      MR_ST_BLOCK >> 20);
}

/* `bytes` at `at` of what t->data is, as they are in the file: a pointer that stays valid while `slot` is on its way.  *out: how many bytes
 * it has become.  NULL when there is no block, or the source failed. */
static const void *piece(struct mr_st_out *o, const struct out_tensor *t, uint64_t at, size_t bytes, int slot, size_t *out, int *no_room)
{
    const char *src = (const char *)t->data + at;
    int device = o->source.read != NULL;
    void *b;

    *out = t->rounded ? bytes / 2 : bytes;
    if (!device && !t->rounded)
        return src;
    b = device ? o->source.block(o->source.ctx, slot) : own_block(o, slot);
    *no_room = !b;
    if (!b || (device && o->source.read(o->source.ctx, b, src, bytes)))
        return NULL;
    if (t->rounded)
        round_block(b, device ? b : src, bytes / sizeof(float));
    return b;
}

static int write_tensor(struct mr_st_out *o, struct mr_fw *w, const struct out_tensor *t, const char *path, struct mr_err *err)
{
    uint64_t total = t->rounded ? 2 * t->bytes : t->bytes;

    for (uint64_t at = 0; at < total; at += MR_ST_BLOCK) {
        size_t n = total - at < MR_ST_BLOCK ? total - at : MR_ST_BLOCK, out;
        int slot = mr_fw_slot(w, err), no_room = 0;
        const void *p;

        if (slot < 0)
            return -1;
        p = piece(o, t, at, n, slot, &out, &no_room);
        if (!p)
            return no_room ? no_block(path, err) : -1;
        if (mr_fw_put(w, slot, p, out, err))
            return -1;
    }
    return 0;
}

static int write_body(struct mr_st_out *o, struct mr_fw *w, const char *header, size_t header_bytes, const char *path, struct mr_err *err)
{
    int slot = mr_fw_slot(w, err);

    if (slot < 0 || mr_fw_put(w, slot, header, header_bytes, err))
        return -1;
    for (int i = 0; i < o->n; i++)
        if (write_tensor(o, w, &o->t[i], path, err))
            return -1;
    return 0;
}

/* The whole file under the name `tmp`; what a failure leaves is removed. */
static int write_file(struct mr_st_out *o, const char *tmp, const char *header, size_t header_bytes, struct mr_err *err)
{
    struct mr_fw *w = mr_fw_create(tmp, err);
    int rc = w ? write_body(o, w, header, header_bytes, tmp, err) : -1;

    if (w && mr_fw_close(w, !rc && !o->source.unflushed, err))
        rc = -1;
    if (w && rc)
        unlink(tmp);
    return rc;
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
    int rc, e;

    if (!o->failed) {
        qsort(o->t, (size_t)o->n, sizeof *o->t, by_width);
        header = header_of(o, &n);
    }
    if (!header || asprintf(&tmp, "%s.tmp", path) < 0) {
        tmp = NULL;
        rc = mr_err_set(err, MR_EXIT_ENV, "%s: out of memory, or a name given twice", path);
    } else {
        rc = write_file(o, tmp, header, n, err);
        if (!rc) {
            e = rename(tmp, path) ? -errno : o->source.unflushed ? 0 : sync_dir(path);
            rc = e ? mr_err_set(err, MR_EXIT_ENV, "%s: cannot take its name: %s", path, strerror(-e)) : 0;
        }
    }
    free(header);
    free(tmp);
    return rc;
}

void mr_st_out_free(struct mr_st_out *o)
{
    if (!o)
        return;
    for (int i = 0; i < o->n; i++)
        free(o->t[i].name);
    for (int i = 0; i < MR_ST_BLOCKS; i++)
        free(o->block[i]);
    free(o->t);
    json_decref(o->meta);
    free(o);
}
