/* Prometheus metrics: see metrics.h. */
#include "runtime/metrics.h"

#include <errno.h>
#include <math.h>
#include <microhttpd.h>
#include <netdb.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "ipc/atomic.h"
#include "ipc/ring.h"
#include "ipc/step.h"
#include "ipc/wait.h"

struct mr_metrics {
    struct MHD_Daemon *daemon;
    struct mr_loop *loop;
    int epoll_fd;
    struct mr_metrics_source src;
};

/* ---- text -------------------------------------------------------------------------------------------------------------------------- */

static void head(FILE *f, const char *name, const char *type, const char *help)
{
    fprintf(f, "# HELP millrace_%s %s\n# TYPE millrace_%s %s\n", name, help, name, type);
}

static void one(FILE *f, const char *name, const char *type, const char *help, double value)
{
    if (!isfinite(value))
        return; /* absent, not zero: there is none yet */
    head(f, name, type, help);
    fprintf(f, "millrace_%s %.17g\n", name, value);
}

static void run_text(const struct mr_metrics_source *src, FILE *f)
{
    const struct mr_totals *t = src->totals;

    one(f, "steps", "counter", "Committed optimizer steps.", t->steps);
    one(f, "steps_planned", "gauge", "Steps of the whole run.", t->steps_total);
    one(f, "microbatches", "counter", "Committed microbatches.", t->items);
    one(f, "microbatches_planned", "gauge", "Microbatches of the whole run.", t->items_total);
    one(f, "microbatches_recomputed", "counter", "Microbatches that a target had to begin again.", t->recomputed);
    one(f, "tokens", "counter", "Tokens of committed microbatches.", (double)t->tokens);
    one(f, "draft_tokens", "counter", "Block rows of committed microbatches.", (double)t->draft_tokens);
    one(f, "loss", "gauge", "Mean loss of the last committed step.", t->has_loss ? t->loss_last : NAN);
    one(f, "accept_proxy", "gauge", "1 + mean number of leading right slots a block, recent steps.", mr_totals_accept(t));
    one(f, "accuracy", "gauge", "Share of right slots, recent steps.", mr_totals_accuracy(t));
    one(f, "tokens_per_second", "gauge", "Committed tokens a second, last seconds.", mr_progress_tokens_per_s(src->progress));
    one(f, "checkpoint_step", "gauge", "Step that `latest` names.", (double)mr_ld(&src->seg->hdr->ckpt_latest));
    one(f, "wall_seconds", "counter", "Wall time of the run, all starts.", mr_totals_wall_s(t));
}

static void slot_text(const struct mr_totals *t, FILE *f, const char *name, const char *help, double (*fn)(const struct mr_slot_sums *))
{
    if (!t->n_slots)
        return; /* no step with a label yet */
    head(f, name, "gauge", help);
    for (unsigned i = 0; i < t->n_slots; i++)
        if (t->slot[i].labels)
            fprintf(f, "millrace_%s{position=\"%u\"} %.9g\n", name, i + 1, fn(&t->slot[i]));
}

typedef double (*row_fn)(const struct mr_actor_row *row);

/* relaxed loads below: metrics, each figure alone */
static double row_restarts(const struct mr_actor_row *row)
{
    return mr_ld_relaxed(&row->restarts);
}
static double row_up(const struct mr_actor_row *row)
{
    return mr_ld_relaxed(&row->state) == MR_ACTOR_RUNNING;
}
static double row_items(const struct mr_actor_row *row)
{
    return (double)mr_ld_relaxed(&row->items);
}
static double row_tokens(const struct mr_actor_row *row)
{
    return (double)mr_ld_relaxed(&row->tokens);
}
static double row_busy(const struct mr_actor_row *row)
{
    return (double)mr_ld_relaxed(&row->busy_ns) * 1e-9;
}

static void actor_text(const struct mr_seg *s, FILE *f, const char *name, const char *type, const char *help, row_fn fn)
{
    head(f, name, type, help);
    for (unsigned i = 0; i < s->hdr->n_actors; i++)
        fprintf(f, "millrace_%s{actor=\"%s\"} %.17g\n", name, s->actors[i].name, fn(&s->actors[i]));
}

static void wait_text(const struct mr_seg *s, FILE *f)
{
    head(f, "actor_wait_seconds", "counter", "Time parked, by what was waited for.");
    for (unsigned i = 0; i < s->hdr->n_actors; i++)
        for (int why = 1; why < MR_WAIT_REASONS; why++) {
            uint64_t ns = mr_ld_relaxed(&s->actors[i].wait_ns[why]);

            if (ns)
                fprintf(f, "millrace_actor_wait_seconds{actor=\"%s\",reason=\"%s\"} %.6f\n", s->actors[i].name, mr_wait_name(why),
                        (double)ns * 1e-9);
        }
}

static void queue_text(const struct mr_seg *s, FILE *f)
{
    static const char *const kind[] = {"free", "target", "item"};
    unsigned slabs[3] = {0};

    head(f, "ring_items", "gauge", "Live entries of a ring; ready rings by bucket and epoch parity.");
    for (unsigned r = 0; r < mr_ring_count(s); r++) {
        if (r < MR_RING_READY)
            fprintf(f, "millrace_ring_items{ring=\"%s\"} %u\n", r == MR_RING_INPUT ? "input" : "retry", mr_ring_live(s, r));
        else
            fprintf(f, "millrace_ring_items{ring=\"ready\",bucket=\"%u\",parity=\"%u\"} %u\n", (r - MR_RING_READY) / 2,
                    (r - MR_RING_READY) & 1, mr_ring_live(s, r));
    }
    for (unsigned i = 0; i < s->hdr->n_slabs; i++) {
        unsigned k = mr_w_slab_kind(mr_ld(&s->slabs[i].word));

        slabs[k < 3 ? k : 0]++;
    }
    head(f, "slabs", "gauge", "Slabs by holder.");
    for (int k = 0; k < 3; k++)
        fprintf(f, "millrace_slabs{holder=\"%s\"} %u\n", kind[k], slabs[k]);
}

void mr_metrics_text(const struct mr_metrics_source *src, FILE *f)
{
    run_text(src, f);
    slot_text(src->totals, f, "position_accuracy", "Share of right slots by position in the block, last committed step.", mr_slot_accuracy);
    slot_text(src->totals, f, "position_loss", "Mean cross-entropy by position in the block, last committed step.", mr_slot_loss);
    actor_text(src->seg, f, "actor_up", "gauge", "1 while an incarnation of the actor is running.", row_up);
    actor_text(src->seg, f, "actor_restarts", "counter", "Deaths of the actor since this start.", row_restarts);
    actor_text(src->seg, f, "actor_microbatches", "counter", "Microbatches done, all incarnations.", row_items);
    actor_text(src->seg, f, "actor_tokens", "counter", "Tokens done, all incarnations.", row_tokens);
    actor_text(src->seg, f, "actor_busy_seconds", "counter", "Time at work.", row_busy);
    wait_text(src->seg, f);
    queue_text(src->seg, f);
}

/* ---- HTTP -------------------------------------------------------------------------------------------------------------------------- */

static enum MHD_Result reply(struct MHD_Connection *con, unsigned status, void *text, size_t n, enum MHD_ResponseMemoryMode mode)
{
    struct MHD_Response *r = MHD_create_response_from_buffer(n, text, mode);
    enum MHD_Result ok;

    if (!r)
        return MHD_NO;
    MHD_add_response_header(r, "Content-Type", "text/plain; version=0.0.4; charset=utf-8");
    ok = MHD_queue_response(con, status, r);
    MHD_destroy_response(r);
    return ok;
}

static enum MHD_Result on_request(void *arg, struct MHD_Connection *con, const char *url, const char *method, const char *version,
                                  const char *data, size_t *data_bytes, void **state)
{
    static char lost[] = "millrace: only GET /metrics is here\n";
    struct mr_metrics *m = arg;
    char *text = NULL;
    size_t n = 0;
    FILE *f;

    (void)version, (void)data, (void)data_bytes, (void)state;
    if (strcmp(method, "GET") || strcmp(url, "/metrics"))
        return reply(con, MHD_HTTP_NOT_FOUND, lost, sizeof lost - 1, MHD_RESPMEM_PERSISTENT);
    f = open_memstream(&text, &n);
    if (!f)
        return MHD_NO;
    mr_metrics_text(&m->src, f);
    fclose(f);
    return reply(con, MHD_HTTP_OK, text, n, MHD_RESPMEM_MUST_FREE);
}

static void on_http(void *arg, int fd)
{
    struct mr_metrics *m = arg;

    (void)fd;
    MHD_run(m->daemon);
}

/* Splits HOST:PORT; the host may be in brackets. */
static int split(const char *where, char *host, size_t bytes, const char **port)
{
    const char *colon = strrchr(where, ':');
    size_t n = colon ? (size_t)(colon - where) : 0;

    if (!colon || !colon[1] || n >= bytes)
        return -1;
    if (n >= 2 && where[0] == '[' && where[n - 1] == ']') {
        where++;
        n -= 2;
    }
    memcpy(host, where, n);
    host[n] = 0;
    *port = colon + 1;
    return 0;
}

/* To be freed with freeaddrinfo; NULL with err. */
static struct addrinfo *address_of(const char *where, struct mr_err *err)
{
    struct addrinfo hint = {.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV | AI_PASSIVE, .ai_socktype = SOCK_STREAM}, *ai = NULL;
    char host[64];
    const char *port;

    if (split(where, host, sizeof host, &port) || getaddrinfo(host[0] ? host : NULL, port, &hint, &ai)) {
        mr_err_set(err, MR_EXIT_CONFIG, "/metrics/listen: \"%s\" is not an address and a port: write for example \"127.0.0.1:9464\"", where);
        return NULL;
    }
    return ai;
}

/* A socket that listens there, or -errno with err. */
static int listen_on(const char *where, struct mr_err *err)
{
    struct addrinfo *ai = address_of(where, err);
    int fd, on = 1, rc = 0;

    if (!ai)
        return -EINVAL;
    fd = socket(ai->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) || bind(fd, ai->ai_addr, ai->ai_addrlen) || listen(fd, 16))
        rc = -errno;
    freeaddrinfo(ai);
    if (!rc)
        return fd;
    mr_err_set(err, MR_EXIT_ENV, "/metrics/listen: cannot listen on %s: %s (%s: --set /metrics/listen='\"127.0.0.1:PORT\"')", where,
               strerror(-rc), rc == -EADDRINUSE || rc == -EACCES ? "another port" : "an address of this machine");
    if (fd >= 0)
        close(fd);
    return rc;
}

int mr_metrics_probe(const char *where, struct mr_err *err)
{
    struct mr_err why = {0};
    int fd = *where ? listen_on(where, &why) : -EADDRINUSE;

    if (fd >= 0)
        close(fd);
    return fd >= 0 || fd == -EADDRINUSE ? 0 : mr_err_set(err, why.code, "%s", why.msg);
}

struct mr_metrics *mr_metrics_open(const char *where, struct mr_loop *loop, struct mr_metrics_source src, struct mr_err *err)
{
    struct mr_metrics *m = calloc(1, sizeof *m);
    int fd = m ? listen_on(where, err) : -1;
    const union MHD_DaemonInfo *info;

    if (fd < 0) {
        free(m);
        return NULL;
    }
    m->loop = loop;
    m->src = src;
    m->epoll_fd = -1;
    m->daemon = MHD_start_daemon(MHD_USE_EPOLL, 0, NULL, NULL, on_request, m, MHD_OPTION_LISTEN_SOCKET, fd, MHD_OPTION_CONNECTION_TIMEOUT,
                                 5u, MHD_OPTION_CONNECTION_LIMIT, 16u, MHD_OPTION_END);
    info = m->daemon ? MHD_get_daemon_info(m->daemon, MHD_DAEMON_INFO_EPOLL_FD) : NULL;
    if (!info || mr_loop_add(loop, info->epoll_fd, on_http, m)) {
        mr_err_set(err, MR_EXIT_ENV, "/metrics/listen: the HTTP server does not start on %s", where);
        if (!m->daemon)
            close(fd);
        mr_metrics_close(m);
        return NULL;
    }
    m->epoll_fd = info->epoll_fd;
    return m;
}

void mr_metrics_close(struct mr_metrics *m)
{
    if (!m)
        return;
    if (m->epoll_fd >= 0)
        mr_loop_del(m->loop, m->epoll_fd);
    if (m->daemon)
        MHD_stop_daemon(m->daemon);
    free(m);
}

void mr_metrics_tick(struct mr_metrics *m)
{
    if (m)
        MHD_run(m->daemon);
}
