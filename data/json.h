/* JSON with positions: jansson, plus where in the file a value stands.
 *
 * Refuses: a byte-order mark in the middle, UTF-16, duplicate keys, comments, trailing text, nesting beyond jansson's limit, and a top
 * level that is no object.  A leading BOM is skipped.  Every refusal is one message with file:line:column (1-based, column in bytes).
 */
#ifndef MR_DATA_JSON_H
#define MR_DATA_JSON_H

#include <jansson.h>

#include "base/err.h"

struct mr_json {
    json_t *root;                      /* an object */
    char *text;                        /* NUL-terminated source, without BOM */
    char *path;                        /* for messages */
    char **set;                        /* "/pointer=JSON" that replaced parts of root after parsing (--set); for messages */
    int n_set;
};

/* Reads and parses a file (a directory, an empty file, an LFS pointer get their own sentences).  0 or -1 (MR_EXIT_CONFIG). */
int mr_json_load(struct mr_json *j, const char *path, struct mr_err *err);
/* The same for callers that judge every value: a number that fits neither int64 nor double reads as null, so that the caller's message about
 * its key comes, with the text that mr_json_source still has. */
int mr_json_load_big(struct mr_json *j, const char *path, struct mr_err *err);
/* As mr_json_load for text that is in memory already (no BOM is skipped); `path` is only for messages. */
int mr_json_parse(struct mr_json *j, const char *text, size_t bytes, const char *path, struct mr_err *err);
void mr_json_free(struct mr_json *j);

/* Writes `v` indented: PATH.tmp, fsync, rename, so that PATH is never half a file.  `v` NULL: out of memory.  0 or -1 (MR_EXIT_ENV). */
int mr_json_save(const json_t *v, const char *path, struct mr_err *err);

/* line:column (1-based, column in bytes) of the KEY that JSON pointer `ptr` ("/train/lr", "/actors/1/kind") names, of the value for an
 * array element; 0 or -ENOENT.  The empty pointer is the root value. */
int mr_json_where(const struct mr_json *j, const char *ptr, int *line, int *column);

/* The value at `ptr` as the user wrote it ("1e3", not 1000.0), cut to `bytes`; from --set, or re-encoded, when the file lacks it. */
void mr_json_source(const struct mr_json *j, const char *ptr, char *out, size_t bytes);

/* Value at a pointer, borrowed; NULL when absent. */
json_t *mr_json_at(json_t *root, const char *ptr);

/* Applies one "/pointer=JSON": the parent must exist or be an object that can be made; an array index may be the array's length.
 * Does not know which keys are valid; numbers as in mr_json_load_big.  0 or -1 (MR_EXIT_CONFIG). */
int mr_json_set(struct mr_json *j, const char *assignment, struct mr_err *err);

/* Error at a pointer: "PATH:LINE:COL: /ptr: <fmt...>".  A value that came from --set is shown as "--set /ptr=...: "; an absent key is
 * placed at its nearest parent that exists.  MR_EXIT_CONFIG.  Returns -1. */
int mr_json_error(const struct mr_json *j, const char *ptr, struct mr_err *err, const char *fmt, ...) __attribute__((format(printf, 4, 5)));

/* Nearest of `n` names by edit distance (case-insensitive), NULL when none is near. */
const char *mr_nearest(const char *name, const char *const *names, int n);

/* What a file that is not what it should be really is, by its first bytes ("a Git LFS pointer: run `git lfs pull`", "gzip data: ..."),
 * or NULL. */
const char *mr_file_kind(const unsigned char *head, size_t n);

#endif
