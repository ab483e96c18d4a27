/* What a run says: see runlog.h. */
#include "runtime/runlog.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

int mr_runlog_open(struct mr_runlog *l, const char *path, struct mr_err *err)
{
    *l = (struct mr_runlog){.tty = isatty(STDOUT_FILENO)};
    l->fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (l->fd < 0)
        return mr_err_set(err, MR_EXIT_ENV, "cannot write %s: %s", mr_err_path(path, 200), strerror(errno));
    return 0;
}

void mr_runlog_close(struct mr_runlog *l)
{
    mr_runlog_end_status(l);
    if (l->fd >= 0)
        close(l->fd);
    l->fd = -1;
}

/* An actor's line may hold any bytes; JSON text must be UTF-8. */
static json_t *text_of(const char *msg)
{
    json_t *s = json_string(msg);
    char *clean;

    if (s || !(clean = strdup(msg)))
        return s;
    for (unsigned char *p = (unsigned char *)clean; *p; p++)
        if (*p >= 0x80)
            *p = '?';
    s = json_string(clean);
    free(clean);
    return s;
}

static void append(struct mr_runlog *l, enum mr_level level, const char *actor, const char *msg)
{
    static const char *const name[] = {"debug", "info", "warn", "error"};
    struct timespec now;
    json_t *o;
    char *line;
    size_t n;

    if (l->fd < 0)
        return;
    clock_gettime(CLOCK_REALTIME, &now);
    o = json_pack("{s:f, s:s, s:s, s:o}", "t", (double)now.tv_sec + (double)(now.tv_nsec / 1000000) * 1e-3, "level", name[level], "actor",
                  actor, "msg", text_of(msg));
    line = o ? json_dumps(o, JSON_COMPACT | JSON_PRESERVE_ORDER | JSON_REAL_PRECISION(13)) : NULL;
    json_decref(o);
    if (!line)
        return;
    n = strlen(line);
    line[n] = '\n'; /* in place of the NUL: one write, one line */
    if (write(l->fd, line, n + 1) != (ssize_t)(n + 1))
        l->lost++;
    free(line);
}

void mr_runlog_end_status(struct mr_runlog *l)
{
    if (l->line_shown)
        fputs("\n", stdout);
    fflush(stdout);
    l->line_shown = 0;
}

/* Wipes the status line; it is drawn again at the next tick. */
static void clear_status(struct mr_runlog *l)
{
    if (l->line_shown)
        fputs("\r\033[K", stdout);
    fflush(stdout);
    l->line_shown = 0;
}

void mr_runlog_write(struct mr_runlog *l, enum mr_level level, const char *actor, const char *msg)
{
    append(l, level, actor, msg);
    if (level < MR_LOG_WARN)
        return;
    clear_status(l);
    fprintf(stderr, "%s: %s\n", actor, msg);
}

void mr_runlog(struct mr_runlog *l, enum mr_level level, const char *actor, const char *fmt, ...)
{
    char msg[2200];
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(msg, sizeof msg, fmt, ap);
    va_end(ap);
    mr_runlog_write(l, level, actor, msg);
}

void mr_runlog_say(struct mr_runlog *l, const char *fmt, ...)
{
    char msg[2200];
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(msg, sizeof msg, fmt, ap);
    va_end(ap);
    append(l, MR_LOG_INFO, "supervisor", msg);
    clear_status(l);
    puts(msg);
    fflush(stdout);
}

void mr_runlog_status(struct mr_runlog *l, const char *line)
{
    if (l->tty) {
        struct winsize size = {.ws_col = 0};

        ioctl(STDOUT_FILENO, TIOCGWINSZ, &size);
        clear_status(l);
        printf("%.*s", size.ws_col > 1 ? size.ws_col - 1 : 200, line); /* a wrapped line could not be wiped */
        l->line_shown = 1;
    } else {
        puts(line);
    }
    fflush(stdout);
}
