/* Starting, asking and ending the processes of `millrace-bench pair` (see pair.h). */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "bench/pair.h"

enum { ANSWER_S = 25, ARGS = 8 };

static void child(const char *uuid, int in, int out, char **argv)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (uuid)
        setenv("CUDA_VISIBLE_DEVICES", uuid, 1);
    dup2(in, STDIN_FILENO);
    dup2(out, STDOUT_FILENO);
    execv("/proc/self/exe", argv);
    _exit(127);
}

int pair_start(struct pair_child *c, const char *what, uint64_t until_ns, struct mr_err *err, const char *uuid, ...)
{
    char *argv[ARGS + 4] = {"millrace-bench", "pair", "--role"};
    int in[2], out[2], n = 3;
    va_list ap;

    va_start(ap, uuid);
    while (n < ARGS + 3 && (argv[n] = va_arg(ap, char *)))
        n++;
    va_end(ap);
    *c = (struct pair_child){.what = what, .until_ns = until_ns, .err = err};
    if (pipe2(in, O_CLOEXEC))
        return mr_err_set(err, MR_EXIT_ENV, "%s: no pipe: %s", what, strerror(errno));
    if (pipe2(out, O_CLOEXEC)) {
        close(in[0]), close(in[1]);
        return mr_err_set(err, MR_EXIT_ENV, "%s: no pipe: %s", what, strerror(errno));
    }
    fflush(stdout);
    c->pid = fork();
    if (c->pid == 0)
        child(uuid, in[0], out[1], argv);
    close(in[0]), close(out[1]);
    c->to = in[1];
    c->from = out[0];
    if (c->pid > 0)
        return 0;
    c->pid = 0;
    close(c->to), close(c->from);
    return mr_err_set(err, MR_EXIT_ENV, "%s: cannot fork: %s", what, strerror(errno));
}

void pair_stop(struct pair_child *c, int kindly)
{
    const struct timespec pause = {.tv_nsec = 2000000};

    if (!c->pid)
        return;
    close(c->to);
    for (int i = kindly ? 0 : 1500; i < 2500 && waitpid(c->pid, NULL, WNOHANG) == 0; i++) {
        if (i == 1500)
            kill(c->pid, SIGKILL);
        nanosleep(&pause, NULL);
    }
    close(c->from);
    c->pid = 0;
}

/* Waits until a whole line is in buf. */
static int fill(struct pair_child *c)
{
    uint64_t now = mr_now_ns(), until = now + ANSWER_S * 1000000000ull;

    if (until > c->until_ns)
        until = c->until_ns;
    for (; !memchr(c->buf, '\n', c->used); now = mr_now_ns()) {
        struct pollfd p = {.fd = c->from, .events = POLLIN};
        ssize_t n = 0;

        if (now >= until || (poll(&p, 1, (int)((until - now) / 1000000 + 1)) == 0))
            return mr_err_set(c->err, MR_EXIT_FAILED, "%s did not answer within %d s, or within the time for everything", c->what, ANSWER_S);
        if (p.revents)
            n = read(c->from, c->buf + c->used, sizeof c->buf - c->used);
        if (p.revents && n <= 0)
            return mr_err_set(c->err, MR_EXIT_FAILED, "%s ended without an answer; stderr may say why", c->what);
        c->used += (size_t)(n > 0 ? n : 0);
    }
    return 0;
}

const char *pair_answer(struct pair_child *c)
{
    char *end;

    if (fill(c))
        return NULL;
    end = memchr(c->buf, '\n', c->used);
    *end++ = 0;
    snprintf(c->line, sizeof c->line, "%s", c->buf);
    c->used -= (size_t)(end - c->buf);
    memmove(c->buf, end, c->used);
    if (strncmp(c->line, "error ", 6) != 0)
        return c->line;
    mr_err_set(c->err, MR_EXIT_FAILED, "%s: %s", c->what, c->line + 6);
    return NULL;
}

int pair_figures(struct pair_child *c, double *v, int n)
{
    const char *at = pair_answer(c);

    if (!at)
        return -1;
    at += strncmp(at, "ok", 2) ? 0 : 2;
    for (int i = 0; i < n; i++) {
        char *end;

        v[i] = strtod(at, &end);
        if (end == at)
            return mr_err_set(c->err, MR_EXIT_FAILED, "%s answered \"%.200s\", %d figures were wanted", c->what, c->line, n);
        at = end;
    }
    return 0;
}

int pair_tell(struct pair_child *c, const char *fmt, ...)
{
    char line[PAIR_LINE];
    va_list ap;
    int n;

    va_start(ap, fmt);
    n = vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    MR_ASSERT(n > 0 && n < (int)sizeof line);
    if (write(c->to, line, (size_t)n) != n)
        return mr_err_set(c->err, MR_EXIT_FAILED, "%s takes no more commands: %s; stderr may say why", c->what, strerror(errno));
    return 0;
}
