/* safetensors files (docs/target-models.md 5.1 has the format and the checks; all of them are made here, before any allocation by a
 * number from the file).  Reading maps the file read-only; tensors may be unaligned, so consumers memcpy. */
#ifndef MR_DATA_SAFETENSORS_H
#define MR_DATA_SAFETENSORS_H

#include <jansson.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "base/err.h"

enum mr_st_dtype { MR_ST_F32, MR_ST_BF16, MR_ST_F16, MR_ST_F64, MR_ST_I64, MR_ST_I32, MR_ST_I16, MR_ST_I8, MR_ST_U8, MR_ST_U32, MR_ST_U64,
                   MR_ST_U16, MR_ST_BOOL, MR_ST_OTHER };
enum { MR_ST_DIMS = 8 };

struct mr_st_tensor {
    char *name;
    enum mr_st_dtype dtype;
    char dtype_name[16];
    int n_dims;
    uint64_t shape[MR_ST_DIMS];
    uint64_t n;                    /* elements */
    uint64_t begin, bytes;         /* begin: offset in the FILE */
};

struct mr_st {
    char *path;
    int fd;
    const unsigned char *map;
    uint64_t file_bytes;
    struct mr_st_tensor *t;        /* sorted by name */
    int n;
    json_t *metadata;              /* object of strings, or NULL */
};

int mr_st_open(struct mr_st *st, const char *path, struct mr_err *err);
void mr_st_close(struct mr_st *st);
const struct mr_st_tensor *mr_st_find(const struct mr_st *st, const char *name);
static inline const void *mr_st_data(const struct mr_st *st, const struct mr_st_tensor *t) { return st->map + t->begin; }
/* Converts F32, BF16, F16 or F64 to f32; dst holds t->n.  -1 for other dtypes. */
int mr_st_to_f32(const struct mr_st *st, const struct mr_st_tensor *t, float *dst, struct mr_err *err);

/* Writer: declare all tensors, then the file is written to PATH.tmp, fsynced and renamed.  Data pointers are borrowed until write; blocks are
 * on their way to the disk while the next ones are got ready (data/file_write.h), so host memory is needed for a few of them, never for all. */
struct mr_st_out;
struct mr_st_out *mr_st_out_create(void);
void mr_st_out_add(struct mr_st_out *o, const char *name, enum mr_st_dtype dtype, const uint64_t *shape, int n_dims, const void *data);
/* The tensor is BF16: `data` (f32), rounded on its way out. */
void mr_st_out_add_rounded(struct mr_st_out *o, const char *name, const uint64_t *shape, int n_dims, const float *data);
void mr_st_out_meta(struct mr_st_out *o, const char *key, const char *value);
/* Where data pointers point to, when that is not host memory: write reads them in pieces of at most MR_ST_BLOCK bytes into the source's own
 * blocks.  read NULL: host memory.  unflushed: the caller sees to fsync of the file and of its directory. */
enum { MR_ST_BLOCK = 8 << 20, MR_ST_BLOCKS = 4 };
struct mr_st_source {
    void *ctx;
    void *(*block)(void *ctx, int i);   /* i < MR_ST_BLOCKS: MR_ST_BLOCK bytes of host memory, the same at every call; NULL: there is none */
    int (*read)(void *ctx, void *host, const void *data, size_t bytes);   /* host: begin of a block; complete on return.  0, or not */
    int unflushed;
};
void mr_st_out_source(struct mr_st_out *o, const struct mr_st_source *source);
/* 0; -1 with err; -1 with err not set: the source failed.  PATH is then what it was before. */
int mr_st_out_write(struct mr_st_out *o, const char *path, struct mr_err *err);
void mr_st_out_free(struct mr_st_out *o);

/* Where vectors are loaded to that are not host memory: dst (n) = host; complete on return.  0, or not. */
struct mr_st_sink {
    void *ctx;
    int (*put)(void *ctx, float *dst, const float *host, size_t n);
};

/* f32 -> bf16, round to nearest even; NaN stays NaN, a quiet one. */
static inline uint16_t mr_bf16(float x)
{
    uint32_t u;

    memcpy(&u, &x, 4);
    return (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? (u >> 16 | 0x40u) : (u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}
float mr_bf16_f32(uint16_t b);

#endif
