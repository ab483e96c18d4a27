/* One line of log: see log.h.  Format: "W drafter/1: text" (level letter, who, text). */
#include "base/log.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static char log_who[48] = "millrace";
static enum mr_level log_min = MR_LOG_INFO;

void mr_log_init(const char *who, enum mr_level min)
{
    snprintf(log_who, sizeof log_who, "%s", who);
    log_min = min;
}

void mr_log(enum mr_level level, const char *fmt, ...)
{
    char line[2200];
    int n;
    va_list ap;

    if (level < log_min)
        return;
    n = snprintf(line, sizeof line, "%c %s: ", "DIWE"[level], log_who);
    va_start(ap, fmt);
    n += vsnprintf(line + n, sizeof line - (size_t)n - 1, fmt, ap);
    va_end(ap);
    if (n > (int)sizeof line - 2)
        n = (int)sizeof line - 2;
    line[n++] = '\n';
    ssize_t w = write(STDERR_FILENO, line, (size_t)n);   /* a full pipe or disk must not stop training */
    (void)w;
}
