/* Between the files of the JSON reader.  Private to data/. */
#ifndef MR_DATA_JSON_PVT_H
#define MR_DATA_JSON_PVT_H

#include <jansson.h>
#include <stddef.h>

/* One pointer token without its leading '/', "~1" and "~0" decoded; NULL when it does not fit.  *ptr moves behind it. */
const char *mr_json_token(const char **ptr, char *buf, size_t bytes);
/* A token as an array index: digits, no leading zero (RFC 6901).  -1 when it is none: it must not become element 0. */
long mr_json_index(const char *token);
/* json_loadb, but numbers that fit neither int64 nor double become null.  NULL with *e. */
json_t *mr_json_decode_big(const char *text, size_t bytes, size_t flags, json_error_t *e);

#endif
