/* The process of `millrace-bench pair` that sums accumulators, as a drafter does at the end of a step.
 *
 *     rank R OWN OTHER N CHUNK   the accumulators' handles, N floats each; OTHER "-": only NCCL is asked for
 *     "local", "sum", "copies", "pull"     both local; one remote; the remote one by copies of CHUNK floats; only the copy
 *     "version", "id", "join ID", "f32", "bf16", "wire", "leave"       NCCL
 *
 * The answer to a sum is its milliseconds.  Every result is checked. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/err.h"
#include "bench/pair.h"
#include "kernels/kernels.h"

enum { JOIN_S = 20 };

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
    pair_must(r->k->op->zero(r->k, r->reduced, r->P * 4) || r->k->op->f32_to_act(r->k, r->wire[0], r->acc[r->me], r->P) ||
                  r->k->op->sync(r->k), "preparing a sum");
}

static double squares(struct rank *r, const float *x)
{
    double sq;

    pair_must(r->k->op->sumsq(r->k, r->P, x, &sq), "a sum of squares");
    return sq;
}

/* Elements are random, so a piece in a wrong place shows. */
static void check(struct rank *r, double want, double tolerance)
{
    double sq = squares(r, r->reduced);

    if (!(sq >= want * (1.0 - tolerance) && sq <= want * (1.0 + tolerance)))
        pair_fail("the sum is wrong: its %zu squares make %.17g and not %.17g", r->P, sq, want);
}

static void sum(struct rank *r, const float *a, const float *b)
{
    const float *src[2] = {a, b};

    pair_must(r->k->op->sum(r->k, r->P, src, 2, r->reduced) || r->k->op->sync(r->k), "the sum");
}

/* The remote accumulator by copies into two places, each added while the next one arrives. */
static void sum_by_copies(struct rank *r)
{
    const size_t n = r->chunk;
    const float *remote = r->acc[1 - r->me];
    size_t first = r->P < n ? r->P : n;

    pair_must(mr_k_cuda_pull_begin(r->k, r->pull, 0, r->stage[0], remote, first * 4), "beginning a copy");
    for (size_t at = 0, p = 0; at < r->P; at += n, p = 1 - p) {
        size_t now = r->P - at < n ? r->P - at : n, left = r->P - at - now, next = left < n ? left : n;
        const float *src[2];

        if (next)
            pair_must(mr_k_cuda_pull_begin(r->k, r->pull, (int)(1 - p), r->stage[1 - p], remote + at + n, next * 4), "beginning a copy");
        src[r->me] = r->acc[r->me] + at;
        src[1 - r->me] = r->stage[p];
        pair_must(mr_k_cuda_pull_use(r->k, r->pull, (int)p) || r->k->op->sum(r->k, now, src, 2, r->reduced + at), "the sum of a copy");
    }
    pair_must(r->k->op->sync(r->k), "the sum by copies");
}

static void pull_all(struct rank *r)
{
    pair_must(mr_k_cuda_pull_begin(r->k, r->pull, 0, r->reduced, r->acc[1 - r->me], r->P * 4) || mr_k_cuda_pull_wait(r->k, r->pull, 0),
              "copying an accumulator");
}

/* Polls as drafters do. */
static void await(struct rank *r, const char *what)
{
    const struct timespec pause = {.tv_nsec = 100000};
    uint64_t until = mr_now_ns() + JOIN_S * 1000000000ull;
    int rc;

    while ((rc = mr_k_comm_poll(r->comm, pair_why, sizeof pair_why)) == -EINPROGRESS) {
        if (mr_now_ns() > until)
            pair_must(-ETIMEDOUT, what);
        nanosleep(&pause, NULL);
    }
    pair_must(rc, what);
}

static void all_reduce(struct rank *r, const void *src, void *dst, enum mr_k_dtype type)
{
    pair_must(mr_k_comm_sum(r->comm, src, dst, r->P, type, pair_why, sizeof pair_why), "starting an all-reduce");
    await(r, "an all-reduce");
}

/* As /train/bf16_wire does it: in place, between two conversions. */
static void all_reduce_wire(struct rank *r)
{
    pair_must(r->k->op->f32_to_act(r->k, r->wire[0], r->acc[r->me], r->P) || r->k->op->sync(r->k), "the conversion to bf16");
    all_reduce(r, r->wire[0], r->wire[0], r->k->act);
    pair_must(r->k->op->act_to_f32(r->k, r->reduced, r->wire[0], r->P) || r->k->op->sync(r->k), "the conversion to f32");
}

static void join(struct rank *r, const char *hex)
{
    uint8_t id[MR_K_COMM_ID];
    uint64_t t = mr_now_ns();

    if (strlen(hex) != 2 * MR_K_COMM_ID)
        pair_fail("\"%.300s\" is not the id of a group", hex);
    for (int i = 0; i < MR_K_COMM_ID; i++) {
        char two[3] = {hex[2 * i], hex[2 * i + 1], 0};

        id[i] = (uint8_t)strtoul(two, NULL, 16);
    }
    r->comm = mr_k_comm_begin(r->k, id, r->me, 2, pair_why, sizeof pair_why);
    if (!r->comm)
        pair_fail("beginning to join: %s", pair_why);
    await(r, "joining");
    pair_say("ok %.4f", pair_ms_since(t));
}

static void make_id(void)
{
    uint8_t id[MR_K_COMM_ID];
    char hex[2 * MR_K_COMM_ID + 1];

    pair_must(mr_k_comm_id(id, pair_why, sizeof pair_why), "making the group's id");
    for (int i = 0; i < MR_K_COMM_ID; i++)
        sprintf(hex + 2 * i, "%02x", id[i]);
    pair_say("%s", hex);
}

static void leave(struct rank *r)
{
    pair_must(mr_k_comm_end(r->comm, 0, 5000), "leaving the group");
    r->comm = NULL;
    pair_say("ok");
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
        pair_must(-EINVAL, line);
    ms = pair_ms_since(t);
    if (!strcmp(line, "bf16"))
        pair_must(r->k->op->act_to_f32(r->k, r->reduced, r->wire[1], r->P), "the conversion to f32");
    check(r, want, tolerance);
    prepare(r);
    pair_say("ok %.4f", ms);
}

/* Numbers that bf16 holds, so that the conversions before a bf16 sum lose nothing.  Element i hashes seed ^ i: the two seeds are far apart,
 * or one accumulator would be the other one with its elements in another order, and have the same squares. */
static void numbers(struct rank *r, int who, void *wire, float *out)
{
    pair_must(mr_k_cuda_random(r->k, wire, (uint64_t)(who + 1) << 40, r->P, 1.0f) || r->k->op->act_to_f32(r->k, out, wire, r->P) ||
                  r->k->op->sync(r->k), "filling an accumulator");
}

/* Fills the accumulator, and makes what a command must give: nothing of the other GPU is read for it. */
static void fill(struct rank *r)
{
    numbers(r, r->me, r->wire[0], r->acc[r->me]);
    numbers(r, 1 - r->me, r->wire[1], r->reduced);
    r->mine = squares(r, r->acc[r->me]);
    r->remote = squares(r, r->reduced);
    sum(r, r->acc[r->me], r->reduced);
    r->both = squares(r, r->reduced);
    if (!(r->mine > 0.0) || !(fabs(r->mine / r->remote - 1.0) > 1e-9) || !(fabs(r->both / (r->mine + r->remote) - 1.0) < 0.05))
        pair_fail("the accumulators are no independent numbers: their squares make %.17g and %.17g, those of the sum %.17g", r->mine, r->remote,
                  r->both);
    prepare(r);
}

int pair_rank(int me, const char *own, const char *other, size_t P, size_t chunk)
{
    struct rank r = {.me = me, .P = P, .chunk = chunk};
    int p2p = strcmp(other, "-") != 0;
    char line[PAIR_LINE];

    r.k = pair_context();
    r.acc[me] = pair_open(own);
    r.acc[1 - me] = p2p ? pair_open(other) : NULL;
    for (int i = 0; i < 2; i++) {
        r.stage[i] = pair_room(r.k, chunk * 4);
        r.wire[i] = pair_room(r.k, P * (size_t)r.k->act_bytes);
    }
    r.reduced = pair_room(r.k, P * 4);
    if (!(r.pull = mr_k_cuda_pull_create(r.k)))
        pair_fail("a stream for copies cannot be made");
    fill(&r);
    pair_say("ok");
    while (fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = 0;
        if (!strcmp(line, "version"))
            pair_say("ok %d", mr_k_comm_version());
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
