/* Errors that a user will read: see err.h. */
#include "base/err.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int mr_err_set(struct mr_err *err, int code, const char *fmt, ...)
{
    va_list ap;

    if (!err || err->code)
        return -1;
    err->code = code;
    va_start(ap, fmt);
    vsnprintf(err->msg, sizeof err->msg, fmt, ap);
    va_end(ap);
    return -1;
}

int mr_err_prefix(struct mr_err *err, const char *fmt, ...)
{
    char head[512], all[sizeof err->msg];
    va_list ap;

    if (!err || !err->code)
        return -1;
    va_start(ap, fmt);
    vsnprintf(head, sizeof head, fmt, ap);
    va_end(ap);
    snprintf(all, sizeof all, "%s: %.1500s", head, err->msg);
    memcpy(err->msg, all, sizeof all);
    return -1;
}

const char *mr_err_path(const char *path, int max)
{
    size_t n = strlen(path);

    return n > (size_t)max ? path + (n - (size_t)max) : path;
}

void mr_assert_failed(const char *file, int line, const char *what)
{
    fprintf(stderr, "%s:%d: assertion failed: %s (a bug in millrace, please report)\n", file, line, what);
    abort();
}
