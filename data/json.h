/* JSON with positions: jansson, plus where in the file a value stands.
 *
 * Refuses: a BOM in the middle, UTF-16, duplicate keys, comments, trailing text, nesting beyond jansson's limit.  A leading BOM is skipped.
 * Every refusal is one message with file:line:column.
 */
#ifndef MR_DATA_JSON_H
#define MR_DATA_JSON_H

#include <jansson.h>

#include "base/err.h"

struct mr_json {
    json_t *root;
    char *text;          /* NUL-terminated source, without BOM */
    char *path;          /* for messages */
};

/* Reads and parses a file (a directory, an empty file, an LFS pointer get their own sentences).  0 or -1 (MR_EXIT_CONFIG). */
int mr_json_load(struct mr_json *j, const char *path, struct mr_err *err);
void mr_json_free(struct mr_json *j);

/* line:column (1-based, column in bytes) of the KEY that JSON pointer `ptr` ("/train/lr", "/actors/1/kind") names; 0 or -ENOENT.
 * The empty pointer is the root value. */
int mr_json_where(const struct mr_json *j, const char *ptr, int *line, int *column);

/* Error at a pointer: "PATH:LINE:COL: /ptr: <fmt...>"; falls back to PATH when the value came from --set.  Returns -1. */
int mr_json_error(const struct mr_json *j, const char *ptr, struct mr_err *err, const char *fmt, ...) __attribute__((format(printf, 4, 5)));

/* Nearest of `n` names by edit distance (case-insensitive), NULL when none is near. */
const char *mr_nearest(const char *name, const char *const *names, int n);

#endif
