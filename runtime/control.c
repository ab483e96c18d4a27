/* The control socket: see control.h. */
#include "runtime/control.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

static int address(struct sockaddr_un *a, const char *run, struct mr_err *err)
{
    int n;

    memset(a, 0, sizeof *a);
    a->sun_family = AF_UNIX;
    n = snprintf(a->sun_path, sizeof a->sun_path, "/dev/shm/millrace-%s.sock", run);
    if (n >= (int)sizeof a->sun_path)
        return mr_err_set(err, MR_EXIT_CONFIG, "run name %s: too long for a socket (%d bytes, at most %zu)", run, n,
                          sizeof a->sun_path - 1);
    return 0;
}

json_t *mr_control_ok(void)
{
    return json_pack("{s:b}", "ok", 1);
}

json_t *mr_control_refuse(const char *fmt, ...)
{
    char msg[1024];
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(msg, sizeof msg, fmt, ap);
    va_end(ap);
    return json_pack("{s:b, s:s}", "ok", 0, "error", msg);
}

static int send_json(int fd, json_t *o)
{
    char *text = o ? json_dumps(o, JSON_COMPACT) : NULL;
    ssize_t w = -1;

    if (text)
        w = send(fd, text, strlen(text), MSG_NOSIGNAL);
    free(text);
    json_decref(o);
    return w < 0 ? -1 : 0;
}

static void drop_client(struct mr_control *c, int fd)
{
    for (int i = 0; i < MR_CONTROL_CLIENTS; i++)
        if (c->client[i] == fd)
            c->client[i] = -1;
    mr_loop_del(c->loop, fd);
    close(fd);
}

static int may_talk(int fd)
{
    struct ucred peer;
    socklen_t n = sizeof peer;

    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &n) == 0 && (peer.uid == geteuid() || peer.uid == 0);
}

static json_t *answer(struct mr_control *c, int fd, const char *buf, size_t n)
{
    json_error_t je;
    json_t *request, *reply;

    if (!may_talk(fd))
        return mr_control_refuse("this run belongs to uid %u", (unsigned)geteuid());
    request = json_loadb(buf, n, JSON_REJECT_DUPLICATES, &je);
    if (!json_is_object(request))
        reply = mr_control_refuse("not a JSON object: %s", request ? "another type" : je.text);
    else
        reply = c->fn(request, c->arg);
    json_decref(request);
    return reply;
}

static void on_client(void *arg, int fd)
{
    struct mr_control *c = arg;
    static char buf[MR_CONTROL_BYTES]; /* one thread, and used up within the call */

    for (;;) {
        ssize_t n = recv(fd, buf, sizeof buf, MSG_DONTWAIT);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == EAGAIN)
            return;
        if (n <= 0 || send_json(fd, answer(c, fd, buf, (size_t)n))) {
            drop_client(c, fd);
            return;
        }
    }
}

static void on_connect(void *arg, int fd)
{
    struct mr_control *c = arg;
    int peer, i;

    while ((peer = accept4(fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK)) >= 0) {
        for (i = 0; i < MR_CONTROL_CLIENTS && c->client[i] >= 0; i++)
            ;
        if (i == MR_CONTROL_CLIENTS || mr_loop_add(c->loop, peer, on_client, c)) {
            send_json(peer, mr_control_refuse("too many clients: at most %d", MR_CONTROL_CLIENTS));
            close(peer);
            continue;
        }
        c->client[i] = peer;
    }
}

int mr_control_open(struct mr_control *c, const char *run, struct mr_loop *loop, mr_control_fn fn, void *arg, struct mr_err *err)
{
    struct sockaddr_un a;

    *c = (struct mr_control){.fd = -1, .loop = loop, .fn = fn, .arg = arg};
    for (int i = 0; i < MR_CONTROL_CLIENTS; i++)
        c->client[i] = -1;
    if (address(&a, run, err))
        return -1;
    c->fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (c->fd >= 0 && unlink(a.sun_path) && errno != ENOENT)
        goto fail;
    if (c->fd < 0 || bind(c->fd, (struct sockaddr *)&a, sizeof a) || chmod(a.sun_path, 0600) || listen(c->fd, 8) ||
        mr_loop_add(loop, c->fd, on_connect, c))
        goto fail;
    return 0;
fail:
    mr_err_set(err, MR_EXIT_ENV, "control socket %s: %s", a.sun_path, strerror(errno));
    mr_control_close(c);
    return -1;
}

void mr_control_close(struct mr_control *c)
{
    for (int i = 0; i < MR_CONTROL_CLIENTS; i++)
        if (c->client[i] >= 0)
            drop_client(c, c->client[i]);
    if (c->fd >= 0) {
        mr_loop_del(c->loop, c->fd);
        close(c->fd);
    }
    c->fd = -1;
}

/* ---- client ----------------------------------------------------------------------------------------------------------------------- */

/* A supervisor that has just died may still take a connection, and resets it. */
static void no_answer(const char *run, const char *why, struct mr_err *err)
{
    mr_err_set(err, MR_EXIT_FAILED, "run %s does not answer: %s; `millrace status %s` says whether it lives", run, why, run);
}

static int connect_to(const char *run, int timeout_ms, struct mr_err *err)
{
    struct timeval tv = {.tv_sec = timeout_ms / 1000, .tv_usec = timeout_ms % 1000 * 1000};
    struct sockaddr_un a;
    int fd;

    if (address(&a, run, err))
        return -1;
    fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd >= 0 && setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &tv, sizeof tv) == 0 &&
        setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &tv, sizeof tv) == 0 && connect(fd, (struct sockaddr *)&a, sizeof a) == 0)
        return fd;
    no_answer(run, strerror(errno), err);
    if (fd >= 0)
        close(fd);
    return -1;
}

static json_t *receive(int fd, const char *run, struct mr_err *err)
{
    char *buf = malloc(MR_CONTROL_BYTES);
    ssize_t n = buf ? recv(fd, buf, MR_CONTROL_BYTES, 0) : -1;
    json_t *reply = n > 0 ? json_loadb(buf, (size_t)n, 0, NULL) : NULL;

    if (!reply)
        no_answer(run, n < 0 ? strerror(errno) : "the connection was closed", err);
    free(buf);
    return reply;
}

json_t *mr_control_call(const char *run, json_t *request, int timeout_ms, struct mr_err *err)
{
    int fd = connect_to(run, timeout_ms, err);
    json_t *reply = NULL;

    if (fd < 0) {
        json_decref(request);
        return NULL;
    }
    if (send_json(fd, request))
        no_answer(run, strerror(errno), err);
    else
        reply = receive(fd, run, err);
    close(fd);
    if (reply && !json_is_true(json_object_get(reply, "ok"))) {
        const char *why = json_string_value(json_object_get(reply, "error"));

        mr_err_set(err, MR_EXIT_FAILED, "%s", why ? why : "refused without a reason");
        json_decref(reply);
        return NULL;
    }
    return reply;
}
