/* The processes of `millrace-bench pair` (see pair.h): each is the only one that computes on its GPU while it is asked.
 *
 *     look FROM TO               which devices there are; three lines, then the end
 *     keeper BYTES...            owns arenas and says their handles; "free": MiB that are free on its GPU
 *     open A B                   opens, closes and opens again, one arena after the other
 *     consumer ARENA BYTES N     "pull N BYTES", "chain PAIRS N BYTES"
 *     rank R A0 A1 N CHUNK       "reference"; "sum", "copies", "pull", "local"; "version", "id", "join ID", "f32", "bf16", "wire", "leave"
 */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/err.h"
#include "bench/pair.h"
#include "kernels/kernels.h"

enum { JOIN_S = 25, ARENAS = 4 };

static char why[512];

__attribute__((format(printf, 1, 2))) static void say(const char *fmt, ...)
{
    va_list ap;

    va_start(ap, fmt);
    vprintf(fmt, ap);
    va_end(ap);
    putchar('\n');
    fflush(stdout);
}

/* 0 when the call went well; else the process ends, and says which call it was. */
static void must(int rc, const char *what)
{
    if (!rc)
        return;
    say("error %s failed (%d)%s%s", what, rc, *why ? ": " : "", why);
    exit(MR_EXIT_FAILED);
}

static double ms_since(uint64_t t)
{
    return (double)(mr_now_ns() - t) * 1e-6;
}

static struct mr_k *context(void)
{
    struct mr_k *k = mr_k_cuda_create(0, 0, why, sizeof why);

    must(!k, "a context");
    return k;
}

static void *room(struct mr_k *k, uint64_t bytes)
{
    void *p = k->op->alloc(k, bytes);

    if (!p)
        snprintf(why, sizeof why, "%llu bytes do not fit on the device", (unsigned long long)bytes);
    must(!p, "an allocation");
    return p;
}

static void handle_of(const char *hex, uint8_t handle[MR_K_CUDA_HANDLE])
{
    must(strlen(hex) != 2 * MR_K_CUDA_HANDLE, "reading a handle");
    for (int i = 0; i < MR_K_CUDA_HANDLE; i++) {
        char two[3] = {hex[2 * i], hex[2 * i + 1], 0};

        handle[i] = (uint8_t)strtoul(two, NULL, 16);
    }
}

static void *open_arena(const char *hex)
{
    uint8_t handle[MR_K_CUDA_HANDLE];
    void *base = NULL;

    handle_of(hex, handle);
    must(mr_k_cuda_arena_open(handle, &base, why, sizeof why), "opening an arena");
    return base;
}

/* ---- look, keeper, open ---------------------------------------------------------------------------------------------------------- */

static int role_look(const char *from, const char *to)
{
    struct mr_k_cuda_device d[MR_K_CUDA_DEVICES];
    int n = 0, f = 0, t = 0;

    if (mr_k_cuda_devices(d, &n, why, sizeof why))
        n = 0;                                       /* no driver, or a build without CUDA */
    say("ok %d", n);
    if (n < 2 && strcmp(from, to) != 0)
        return MR_EXIT_OK;
    must(mr_k_cuda_resolve(to, &t, why, sizeof why), to);
    must(mr_k_cuda_resolve(from, &f, why, sizeof why), from);
    say("ok %d %d %d", t, f, d[t].peer[f] && d[f].peer[t]);
    say("%s\n%s\n%s\n%s", d[t].uuid, d[t].name, d[f].uuid, d[f].name);
    return MR_EXIT_OK;
}

static int role_keeper(int n, char **bytes)
{
    uint8_t handle[MR_K_CUDA_HANDLE];
    char uuid[MR_K_CUDA_UUID], text[ARENAS * (2 * MR_K_CUDA_HANDLE + 1) + 1] = "", line[PAIR_LINE];
    uint64_t free_bytes, total;
    void *base;

    must(n > ARENAS, "the number of arenas");
    must(mr_k_cuda_use(0, why, sizeof why), "a keeper's device");
    for (int a = 0; a < n; a++) {
        must(mr_k_cuda_arena_alloc(strtoull(bytes[a], NULL, 10), &base, handle, uuid, why, sizeof why), "an arena's memory");
        strcat(text, a ? " " : "");
        for (int i = 0; i < MR_K_CUDA_HANDLE; i++)
            sprintf(text + strlen(text), "%02x", handle[i]);
    }
    say("%s", text);
    while (fgets(line, sizeof line, stdin)) {
        must(mr_k_cuda_mem_info(&free_bytes, &total, why, sizeof why), "asking for free memory");
        say("ok %llu", (unsigned long long)(free_bytes >> 20));
    }
    return MR_EXIT_OK;
}

static void open_thrice(const char *hex, double ms[3])
{
    uint64_t t = mr_now_ns();
    void *p = open_arena(hex);

    ms[0] = ms_since(t);
    t = mr_now_ns();
    mr_k_cuda_arena_close(p);
    ms[1] = ms_since(t);
    t = mr_now_ns();
    open_arena(hex);
    ms[2] = ms_since(t);
}

static int role_open(const char *a, const char *b)
{
    char line[PAIR_LINE];
    double x[3], y[3];

    must(mr_k_cuda_use(0, why, sizeof why), "a device");
    say("ok");
    if (!fgets(line, sizeof line, stdin))
        return MR_EXIT_OK;
    open_thrice(a, x);
    open_thrice(b, y);
    say("ok %.4f %.4f %.4f %.4f %.4f %.4f", x[0], x[1], x[2], y[0], y[1], y[2]);
    while (fgets(line, sizeof line, stdin))          /* what is open stays open */
        ;
    return MR_EXIT_OK;
}

/* ---- consumer -------------------------------------------------------------------------------------------------------------------- */

struct consumer {
    struct mr_k *k;
    char *arena;
    uint64_t bytes, at;                  /* of the arena; where the next slab begins */
    struct mr_k_pull *pull;
    void *stage[2];
    int rows, H, I;
    void *x, *m, *gu, *y, *up, *down;    /* (rows, H), (rows, I), (rows, 2 I), (rows, H); weights (2 I, H), (H, I) */
    struct mr_k_mark *first, *last;
};

/* All of them are in the queue on return, behind what was issued before. */
static void begin_pulls(struct consumer *c, int n, uint64_t bytes)
{
    for (int i = 0; i < n; i++) {
        if (c->at + bytes > c->bytes)
            c->at = 0;
        must(mr_k_cuda_pull_begin(c->k, c->pull, i % 2, c->stage[i % 2], c->arena + c->at, bytes), "beginning a pull");
        c->at += bytes;
    }
}

static void do_pull(struct consumer *c, int n, uint64_t bytes)
{
    uint64_t t = mr_now_ns();

    begin_pulls(c, n, bytes);
    must(mr_k_cuda_pull_wait(c->k, c->pull, (n - 1) % 2), "waiting for a pull");
    say("ok %.4f", ms_since(t));
}

/* Says the device's time for the chain, the time of all pulls, and how long the chain went on without them.  The pulls are queued first:
 * a pull begins behind the products that are issued before it. */
static void do_chain(struct consumer *c, int pairs, int n, uint64_t bytes)
{
    const struct mr_k_ops *op = c->k->op;
    double chain, pulled = 0.0, rest;
    uint64_t t = mr_now_ns();

    begin_pulls(c, n, bytes);
    must(mr_k_cuda_mark_set(c->k, c->first), "a mark");
    for (int i = 0; i < pairs; i++) {
        must(op->linear(c->k, c->rows, 2 * c->I, c->H, c->x, c->H, c->up, c->gu, 2 * c->I, 0), "the gate and up product");
        must(op->linear(c->k, c->rows, c->H, c->I, c->m, c->I, c->down, c->y, c->H, 0), "the down product");
    }
    must(mr_k_cuda_mark_set(c->k, c->last), "a mark");
    if (n) {
        must(mr_k_cuda_pull_wait(c->k, c->pull, (n - 1) % 2), "waiting for a pull");
        pulled = ms_since(t);
    }
    must(mr_k_cuda_mark_wait(c->k, c->last), "waiting for the chain");
    rest = ms_since(t) - pulled;
    must(mr_k_cuda_mark_ms(c->k, c->first, c->last, &chain), "the chain's time");
    say("ok %.4f %.4f %.4f", chain, pulled, rest);
}

static void *noise(struct consumer *c, size_t n, float std)
{
    void *p = room(c->k, n * (size_t)c->k->act_bytes);

    must(mr_k_cuda_random(c->k, p, n, n, std), "random numbers");
    return p;
}

/* A slab that was pulled is the slab. */
static void check_pull(struct consumer *c, uint64_t bytes)
{
    double there, here;

    do_pull(c, 2, bytes);
    must(c->k->op->sumsq(c->k, bytes / 4, (const float *)(void *)(c->arena + bytes), &there), "reading a slab");
    must(c->k->op->sumsq(c->k, bytes / 4, c->stage[1], &here), "reading a staging place");
    if (there != here || there == 0.0)
        snprintf(why, sizeof why, "squares in the slab make %g, in the copy %g", there, here);
    must(there != here || there == 0.0, "comparing a slab with its copy");
    c->at = 0;
}

static void set_up(struct consumer *c, const char *hex, uint64_t bytes, int scale)
{
    size_t rows, H, I;

    c->k = context();
    c->arena = open_arena(hex);
    c->bytes = bytes;
    rows = (size_t)(c->rows = PAIR_ROWS / scale), H = (size_t)(c->H = PAIR_H / scale), I = (size_t)(c->I = PAIR_I / scale);
    must(mr_k_cuda_random(c->k, c->arena, 1, bytes / 2, 1.0f), "filling the arena");
    for (int i = 0; i < 2; i++)
        c->stage[i] = room(c->k, PAIR_SLAB_MAX / (unsigned)scale);
    c->x = noise(c, rows * H, 1.0f), c->m = noise(c, rows * I, 1.0f), c->up = noise(c, 2 * I * H, 0.02f), c->down = noise(c, H * I, 0.02f);
    c->gu = noise(c, rows * 2 * I, 1.0f), c->y = noise(c, rows * H, 1.0f);
    must(!(c->pull = mr_k_cuda_pull_create(c->k)), "a pull's stream");
    must(!(c->first = mr_k_cuda_mark_create(c->k)) || !(c->last = mr_k_cuda_mark_create(c->k)), "a mark");
    must(c->k->op->sync(c->k), "filling the arena");
}

static int role_consumer(const char *hex, uint64_t bytes, int scale)
{
    struct consumer c = {0};
    char line[PAIR_LINE];

    set_up(&c, hex, bytes, scale);
    check_pull(&c, PAIR_SLAB_MAX / (unsigned)scale);     /* its answer says that all is ready */
    while (fgets(line, sizeof line, stdin)) {
        unsigned long long b = 0;
        int n = 0, pairs = 0;

        if (sscanf(line, "pull %d %llu", &n, &b) == 2 && n > 0 && b <= PAIR_SLAB_MAX)
            do_pull(&c, n, b);
        else if (sscanf(line, "chain %d %d %llu", &pairs, &n, &b) == 3 && b <= PAIR_SLAB_MAX)
            do_chain(&c, pairs, n, b);
        else
            must(-EINVAL, line);
    }
    return MR_EXIT_OK;
}

/* ---- rank ------------------------------------------------------------------------------------------------------------------------ */

struct rank {
    struct mr_k *k;
    int me;
    size_t P, chunk;                         /* elements: of an accumulator, of a staging place */
    float *acc[2], *reduced, *stage[2];      /* acc[1 - me] is on the other GPU */
    void *wire[2];                           /* bf16: mine, the sum */
    struct mr_k_pull *pull;
    struct mr_k_comm *comm;
    double mine, remote, both;               /* squares of what a command must give */
};

/* What every command finds: no sum of the one before, and the accumulator on the wire. */
static void prepare(struct rank *r)
{
    must(r->k->op->zero(r->k, r->reduced, r->P * 4) || r->k->op->f32_to_act(r->k, r->wire[0], r->acc[r->me], r->P) ||
             r->k->op->sync(r->k), "preparing a sum");
}

static double squares(struct rank *r, const float *x)
{
    double sq;

    must(r->k->op->sumsq(r->k, r->P, x, &sq), "a sum of squares");
    return sq;
}

/* Elements are random, so a piece in a wrong place shows. */
static void check(struct rank *r, double want, double tolerance)
{
    double sq = squares(r, r->reduced);
    int bad = !(sq >= want * (1.0 - tolerance) && sq <= want * (1.0 + tolerance));

    if (bad)
        snprintf(why, sizeof why, "%zu squares make %.17g and not %.17g", r->P, sq, want);
    must(bad, "checking a sum");
}

static void sum(struct rank *r, const float *a, const float *b)
{
    const float *src[2] = {a, b};

    must(r->k->op->sum(r->k, r->P, src, 2, r->reduced) || r->k->op->sync(r->k), "the sum");
}

/* The remote accumulator by copies into two places, each added while the next one arrives. */
static void sum_by_copies(struct rank *r)
{
    const size_t n = r->chunk;
    const float *remote = r->acc[1 - r->me];
    size_t first = r->P < n ? r->P : n;

    must(mr_k_cuda_pull_begin(r->k, r->pull, 0, r->stage[0], remote, first * 4), "beginning a copy");
    for (size_t at = 0, p = 0; at < r->P; at += n, p = 1 - p) {
        size_t now = r->P - at < n ? r->P - at : n, left = r->P - at - now, next = left < n ? left : n;
        const float *src[2];

        if (next)
            must(mr_k_cuda_pull_begin(r->k, r->pull, (int)(1 - p), r->stage[1 - p], remote + at + n, next * 4), "beginning a copy");
        src[r->me] = r->acc[r->me] + at;
        src[1 - r->me] = r->stage[p];
        must(mr_k_cuda_pull_use(r->k, r->pull, (int)p) || r->k->op->sum(r->k, now, src, 2, r->reduced + at), "the sum of a copy");
    }
    must(r->k->op->sync(r->k), "the sum by copies");
}

static void pull_all(struct rank *r)
{
    must(mr_k_cuda_pull_begin(r->k, r->pull, 0, r->reduced, r->acc[1 - r->me], r->P * 4) || mr_k_cuda_pull_wait(r->k, r->pull, 0),
         "copying an accumulator");
}

/* Without a kernel that reads the other GPU. */
static void reference(struct rank *r)
{
    r->mine = squares(r, r->acc[r->me]);
    pull_all(r);
    r->remote = squares(r, r->reduced);
    sum(r, r->acc[r->me], r->reduced);
    r->both = squares(r, r->reduced);
    must(r->mine <= 0.0 || r->remote <= 0.0 || r->mine == r->remote, "telling the accumulators apart");
    prepare(r);
    say("ok");
}

/* Polls as drafters do. */
static void await(struct rank *r, const char *what)
{
    const struct timespec pause = {.tv_nsec = 100000};
    uint64_t until = mr_now_ns() + JOIN_S * 1000000000ull;
    int rc;

    while ((rc = mr_k_comm_poll(r->comm, why, sizeof why)) == -EINPROGRESS) {
        if (mr_now_ns() > until)
            must(-ETIMEDOUT, what);
        nanosleep(&pause, NULL);
    }
    must(rc, what);
}

static void all_reduce(struct rank *r, const void *src, void *dst, enum mr_k_dtype type)
{
    must(mr_k_comm_sum(r->comm, src, dst, r->P, type, why, sizeof why), "starting an all-reduce");
    await(r, "an all-reduce");
}

/* As /train/bf16_wire does it: in place, between two conversions. */
static void all_reduce_wire(struct rank *r)
{
    must(r->k->op->f32_to_act(r->k, r->wire[0], r->acc[r->me], r->P) || r->k->op->sync(r->k), "the conversion to bf16");
    all_reduce(r, r->wire[0], r->wire[0], r->k->act);
    must(r->k->op->act_to_f32(r->k, r->reduced, r->wire[0], r->P) || r->k->op->sync(r->k), "the conversion to f32");
}

static void join(struct rank *r, const char *hex)
{
    uint8_t id[MR_K_COMM_ID];
    uint64_t t = mr_now_ns();

    must(strlen(hex) != 2 * MR_K_COMM_ID, "reading the group's id");
    for (int i = 0; i < MR_K_COMM_ID; i++) {
        char two[3] = {hex[2 * i], hex[2 * i + 1], 0};

        id[i] = (uint8_t)strtoul(two, NULL, 16);
    }
    r->comm = mr_k_comm_begin(r->k, id, r->me, 2, why, sizeof why);
    must(!r->comm, "beginning to join");
    await(r, "joining");
    say("ok %.4f", ms_since(t));
}

static void make_id(void)
{
    uint8_t id[MR_K_COMM_ID];
    char hex[2 * MR_K_COMM_ID + 1];

    must(mr_k_comm_id(id, why, sizeof why), "making the group's id");
    for (int i = 0; i < MR_K_COMM_ID; i++)
        sprintf(hex + 2 * i, "%02x", id[i]);
    say("%s", hex);
}

static void leave(struct rank *r)
{
    must(mr_k_comm_end(r->comm, 0, 5000), "leaving the group");
    r->comm = NULL;
    say("ok");
}

/* A timed command: its sum is checked, then the next one is prepared, then comes the answer. */
static void timed(struct rank *r, const char *line)
{
    double want = r->both, tolerance = 0.0, ms;
    uint64_t t = mr_now_ns();

    if (!strcmp(line, "sum"))
        sum(r, r->acc[0], r->acc[1]);
    else if (!strcmp(line, "copies"))
        sum_by_copies(r);
    else if (!strcmp(line, "local"))
        sum(r, r->acc[r->me], r->reduced), want = r->mine;
    else if (!strcmp(line, "pull"))
        pull_all(r), want = r->remote;
    else if (!strcmp(line, "f32"))
        all_reduce(r, r->acc[r->me], r->reduced, MR_K_F32);
    else if (!strcmp(line, "bf16"))
        all_reduce(r, r->wire[0], r->wire[1], r->k->act), tolerance = 1e-3;
    else if (!strcmp(line, "wire"))
        all_reduce_wire(r), tolerance = 1e-3;
    else
        must(-EINVAL, line);
    ms = ms_since(t);
    if (!strcmp(line, "bf16"))
        must(r->k->op->act_to_f32(r->k, r->reduced, r->wire[1], r->P), "the conversion to f32");
    check(r, want, tolerance);
    prepare(r);
    say("ok %.4f", ms);
}

/* Numbers that bf16 holds, so that the conversions before a bf16 sum lose nothing. */
static void fill(struct rank *r)
{
    must(mr_k_cuda_random(r->k, r->wire[0], (uint64_t)r->me + 1, r->P, 1.0f) ||
             r->k->op->act_to_f32(r->k, r->acc[r->me], r->wire[0], r->P) || r->k->op->sync(r->k), "filling an accumulator");
}

static int role_rank(int me, const char *const acc[2], size_t P, size_t chunk)
{
    struct rank r = {.me = me, .P = P, .chunk = chunk};
    char line[PAIR_LINE];

    r.k = context();
    for (int i = 0; i < 2; i++) {
        r.acc[i] = open_arena(acc[i]);
        r.stage[i] = room(r.k, chunk * 4);
        r.wire[i] = room(r.k, P * (size_t)r.k->act_bytes);
    }
    r.reduced = room(r.k, P * 4);
    must(!(r.pull = mr_k_cuda_pull_create(r.k)), "a copy's stream");
    fill(&r);
    say("ok");
    while (fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = 0;
        if (!strcmp(line, "version"))
            say("ok %d", mr_k_comm_version());
        else if (!strcmp(line, "reference"))
            reference(&r);
        else if (!strcmp(line, "id"))
            make_id();
        else if (!strncmp(line, "join ", 5))
            join(&r, line + 5);
        else if (!strcmp(line, "leave"))
            leave(&r);
        else
            timed(&r, line);
    }
    return MR_EXIT_OK;
}

int mr_bench_pair_role(int argc, char **argv)
{
    const char *name = argc ? argv[0] : "";

    if (!strcmp(name, "look") && argc == 3)
        return role_look(argv[1], argv[2]);
    if (!strcmp(name, "keeper") && argc > 1)
        return role_keeper(argc - 1, argv + 1);
    if (!strcmp(name, "open") && argc == 3)
        return role_open(argv[1], argv[2]);
    if (!strcmp(name, "consumer") && argc == 4)
        return role_consumer(argv[1], strtoull(argv[2], NULL, 10), atoi(argv[3]));
    if (!strcmp(name, "rank") && argc == 6)
        return role_rank(atoi(argv[1]), (const char *const[2]){argv[2], argv[3]}, strtoull(argv[4], NULL, 10), strtoull(argv[5], NULL, 10));
    fprintf(stderr, "millrace-bench: no role \"%s\" with %d arguments\n", name, argc - 1);
    return MR_EXIT_CONFIG;
}
