/* The GPUs of a topology: see gpus.h. */
#include "runtime/gpus.h"

#include <errno.h>
#include <jansson.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "base/clock.h"
#include "ipc/arena.h"
#include "runtime/shm_plan.h"
#include "runtime/spawn.h"

enum { REPORT_BYTES = 1 << 16 };
#define PATIENCE_NS 60000000000u
#define SLACK ((uint64_t)64 << 20)       /* as the keeper counts */

/* ---- the report ------------------------------------------------------------------------------------------------------------------------ */

static void take_gpu(struct mr_gpu *g, const json_t *o)
{
    const char *name = json_string_value(json_object_get(o, "name")), *uuid = json_string_value(json_object_get(o, "uuid"));
    const json_t *peers = json_object_get(o, "peers");

    snprintf(g->name, sizeof g->name, "%s", name ? name : "?");
    snprintf(g->uuid, sizeof g->uuid, "%s", uuid ? uuid : "?");
    g->free_bytes = (uint64_t)json_integer_value(json_object_get(o, "free"));
    g->total_bytes = (uint64_t)json_integer_value(json_object_get(o, "total"));
    g->major = (int)json_integer_value(json_object_get(o, "major"));
    g->minor = (int)json_integer_value(json_object_get(o, "minor"));
    g->sms = (int)json_integer_value(json_object_get(o, "sms"));
    for (size_t i = 0; i < json_array_size(peers) && i < MR_GPUS; i++)
        g->peer[i] = (int)json_integer_value(json_array_get(peers, i));
}

int mr_gpus_parse(struct mr_gpus *g, const char *text, struct mr_err *err)
{
    const char *at = text[0] == '{' ? text : strstr(text, "\n{");
    json_t *o = at ? json_loads(at, JSON_DISABLE_EOF_CHECK, NULL) : NULL, *list = json_object_get(o, "devices");
    const char *why = json_string_value(json_object_get(o, "error"));
    int rc = 0;

    memset(g, 0, sizeof *g);
    for (size_t i = 0; i < json_array_size(list) && i < MR_GPUS; i++)
        take_gpu(&g->gpu[g->n++], json_array_get(list, i));
    g->nccl = (int)json_integer_value(json_object_get(o, "nccl"));
    if (why)
        rc = mr_err_set(err, MR_EXIT_ENV, "%s", why);
    else if (!json_is_array(list))
        rc = mr_err_set(err, MR_EXIT_ENV, "`millrace-actor devices` reported nothing that can be read: \"%.300s\"", text);
    json_decref(o);
    return rc;
}

static int read_report(struct mr_child *c, char *text, struct mr_err *err)
{
    uint64_t until = mr_now_ns() + PATIENCE_NS;
    size_t n = 0;

    for (;;) {
        struct pollfd p = {.fd = c->out_fd, .events = POLLIN};
        uint64_t now = mr_now_ns();
        ssize_t got;

        if (now > until || poll(&p, 1, (int)((until - now) / 1000000u) + 1) == 0)
            return mr_err_set(err, MR_EXIT_ENV, "`millrace-actor devices` has not answered within %u s: the NVIDIA driver hangs (nvidia-smi?)",
                              (unsigned)(PATIENCE_NS / 1000000000u));
        got = read(c->out_fd, text + n, REPORT_BYTES - 1 - n);
        if (got == 0 || n == REPORT_BYTES - 1)
            break;
        n += got > 0 ? (size_t)got : 0;
    }
    text[n] = 0;
    return 0;
}

int mr_gpus_query(struct mr_gpus *g, struct mr_err *err)
{
    char path[4096], *text = malloc(REPORT_BYTES);
    char *argv[] = {(char *)"millrace-actor", (char *)"devices", NULL};
    struct mr_spawn sp = {.path = path, .argv = argv};
    struct mr_child c = {.pidfd = -1, .out_fd = -1};
    struct pollfd p;
    int code, sig, rc = -1;

    memset(g, 0, sizeof *g);
    if (!text)
        mr_err_set(err, MR_EXIT_ENV, "out of memory");
    else if (!mr_actor_path(path, sizeof path, err) && !mr_spawn(&c, &sp, err))
        rc = read_report(&c, text, err) ? -1 : mr_gpus_parse(g, text, err);
    if (c.pidfd >= 0) {
        mr_child_signal(&c, SIGKILL);                /* it has said what it knows */
        p = (struct pollfd){.fd = c.pidfd, .events = POLLIN};
        while (poll(&p, 1, -1) < 0 && errno == EINTR)
            ;
        mr_child_reap(&c, &code, &sig);
    }
    mr_child_close(&c);
    free(text);
    return rc;
}

/* ---- names ------------------------------------------------------------------------------------------------------------------------------ */

int mr_gpus_find(const struct mr_gpus *g, const char *device)
{
    int found = -1;

    if (strncmp(device, "cuda:", 5) == 0)
        return atoi(device + 5) < g->n ? atoi(device + 5) : -1;
    for (int i = 0; i < g->n; i++)
        if (strncasecmp(g->gpu[i].uuid, device, strlen(device)) == 0)
            found = found < 0 ? i : MR_GPUS;
    return found < MR_GPUS ? found : -1;
}

static int not_there(const struct mr_gpus *g, const char *device, struct mr_err *err)
{
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    char list[1200] = "";

    for (int i = 0; i < g->n; i++) {
        size_t at = strlen(list);

        snprintf(list + at, sizeof list - at, "%scuda:%d = %s %s", i ? ", " : ": ", i, g->gpu[i].name, g->gpu[i].uuid);
    }
    return mr_err_set(err, MR_EXIT_ENV, "/actors: device \"%s\" is not there; %d GPU%s visible%s%s%s%s", device, g->n, g->n == 1 ? " is" : "s are",
                      list, visible ? " (CUDA_VISIBLE_DEVICES=" : "", visible ? visible : "", visible ? ")" : "");
}

/* Index of each of the topology's devices; -1 for the cpu. */
static int find_all(const struct mr_gpus *g, const struct mr_topology *t, int *index, struct mr_err *err)
{
    for (int d = 0; d < t->n_devices; d++) {
        index[d] = -1;
        if (!mr_is_gpu(t->device[d]))
            continue;
        index[d] = mr_gpus_find(g, t->device[d]);
        if (index[d] < 0)
            return not_there(g, t->device[d], err);
        for (int e = 0; e < d; e++)
            if (index[e] == index[d])
                return mr_json_error(&t->src, "/actors", err, "\"%s\" and \"%s\" are the same GPU (%s %s): use one name for it", t->device[e],
                                     t->device[d], g->gpu[index[d]].name, g->gpu[index[d]].uuid);
        if (g->gpu[index[d]].major < 8)
            return mr_err_set(err, MR_EXIT_ENV, "/actors: \"%s\" is a %s with compute capability %d.%d; 8.0 or newer is needed (bf16 matrix "
                                                "instructions)",
                              t->device[d], g->gpu[index[d]].name, g->gpu[index[d]].major, g->gpu[index[d]].minor);
    }
    return 0;
}

static int has(const struct mr_topology *t, int d, enum mr_kind kind)
{
    for (int i = 0; i < t->n_actors; i++)
        if (t->actor[i].kind == kind && t->actor[i].device_index == (unsigned)d)
            return 1;
    return 0;
}

/* Drafters map the slabs of every GPU that has targets, and the state of every GPU that has drafters. */
static int check_peers(const struct mr_gpus *g, const struct mr_topology *t, const int *index, struct mr_err *err)
{
    for (int a = 0; a < t->n_devices; a++)
        for (int b = 0; b < t->n_devices; b++)
            if (a != b && index[a] >= 0 && index[b] >= 0 && has(t, a, MR_DRAFTER) && (has(t, b, MR_TARGET) || has(t, b, MR_DRAFTER)) &&
                !g->gpu[index[a]].peer[index[b]])
                return mr_err_set(err, MR_EXIT_ENV,
                                  "/actors: the drafters on %s (%s) read hidden states or gradients on %s (%s), but those two GPUs have no peer "
                                  "access to each other (nvidia-smi topo -p2p r); put targets and drafters on GPUs that have, or on the same one",
                                  t->device[a], g->gpu[index[a]].name, t->device[b], g->gpu[index[b]].name);
    return 0;
}

/* ---- room ------------------------------------------------------------------------------------------------------------------------------- */

static double gib(uint64_t bytes)
{
    return (double)bytes / 0x1p30;
}

static int check_room(const struct mr_gpu *g, const struct mr_topology *t, const struct mr_checked *c, int d, FILE *f, struct mr_err *err)
{
    struct mr_device_arenas n;
    uint64_t working = mr_check_working(c, t, d), need;

    if (mr_shm_plan_arenas(&n, c, t, d, err))
        return -1;
    need = n.slabs + n.weights + n.drafters + working + SLACK;
    fprintf(f, "gpu       %s = %s %s: %.2f GiB slabs + %.2f GiB weights + %.2f GiB drafter state + %.2f GiB contexts and activations = %.2f "
               "GiB of %.2f GiB free\n",
            t->device[d], g->name, g->uuid, gib(n.slabs), gib(n.weights), gib(n.drafters), gib(working + SLACK), gib(need),
            gib(g->free_bytes));
    if (need <= g->free_bytes)
        return 0;
    return mr_err_set(err, MR_EXIT_ENV,
                      "%s (%s) is too small: %.2f GiB are needed (%.2f slabs, %.2f weights, %.2f drafter state, %.2f contexts and activations), "
                      "%.2f of %.2f GiB are free; lower /queue/slabs_per_device or /data/token_budget, or end what else runs there",
                      t->device[d], g->name, gib(need), gib(n.slabs), gib(n.weights), gib(n.drafters), gib(working + SLACK),
                      gib(g->free_bytes), gib(g->total_bytes));
}

int mr_gpus_check(const struct mr_gpus *g, const struct mr_topology *t, const struct mr_checked *c, FILE *f, struct mr_err *err)
{
    int index[MR_TOPO_DEVICES];

    if (find_all(g, t, index, err) || check_peers(g, t, index, err))
        return -1;
    if (t->train.reduce == 2 && !g->nccl)
        return mr_err_set(err, MR_EXIT_ENV, "/train/reduce: is \"nccl\", but this build has no NCCL; use \"p2p\", or install NCCL and configure "
                                            "again");
    for (int d = 0; d < t->n_devices; d++)
        if (index[d] >= 0 && check_room(&g->gpu[index[d]], t, c, d, f, err))
            return -1;
    return 0;
}

/* GPUs that an actor really uses: synthetic ones only bear the name. */
static int n_gpus(const struct mr_topology *t)
{
    unsigned seen = 0;

    for (int i = 0; i < t->n_actors; i++)
        if (t->actor[i].engine == MR_ENGINE_CUDA)
            seen |= 1u << t->actor[i].device_index;
    return __builtin_popcount(seen);
}

int mr_gpus_prepare(const struct mr_topology *t, const struct mr_checked *c, FILE *f, struct mr_err *err)
{
    struct mr_gpus *g;
    int rc;

    if (!n_gpus(t))
        return 0;
    g = malloc(sizeof *g);
    if (!g)
        return mr_err_set(err, MR_EXIT_ENV, "out of memory");
    rc = mr_gpus_query(g, err);
    if (!rc)
        rc = mr_gpus_check(g, t, c, f, err);
    free(g);
    return rc;
}

/* ---- what an actor sees ------------------------------------------------------------------------------------------------------------------- */

/* Entry n of a comma-separated list, without blanks.  0 or -1. */
static int nth_entry(const char *list, int n, char *out, size_t bytes)
{
    for (; n > 0; n--) {
        list = strchr(list, ',');
        if (!list++)
            return -1;
    }
    list += strspn(list, " ");
    snprintf(out, bytes, "%.*s", (int)strcspn(list, ", "), list);
    return out[0] ? 0 : -1;
}

int mr_gpus_visible(const struct mr_topology *t, unsigned slot, const char *ours, char *out, size_t bytes, int *pinned)
{
    const struct mr_topo_actor *a = &t->actor[slot];

    *pinned = 0;
    out[0] = 0;
    if (!n_gpus(t))
        return 0;
    if (a->engine != MR_ENGINE_CUDA || a->kind == MR_FEEDER)
        return 1;                                    /* a context on a GPU that it does not use would cost 0.5 GiB there */
    if (a->kind == MR_DRAFTER && n_gpus(t) > 1)
        return 0;
    *pinned = 1;
    if (strncmp(a->device, "cuda:", 5))
        snprintf(out, bytes, "%s", a->device);
    else if (!ours)
        snprintf(out, bytes, "%s", a->device + 5);
    else if (nth_entry(ours, atoi(a->device + 5), out, bytes))
        return *pinned = 0;                          /* its own message says it best */
    return 1;
}
