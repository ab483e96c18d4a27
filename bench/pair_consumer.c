/* The process of `millrace-bench pair` that a drafter stands for: it pulls slabs of an arena and computes beside that.
 *
 *     "begin BYTES", "end"         pulls one slab after the other, two of them in the queue, until the end; its answer: pulls and milliseconds
 *     "chain MS ROUNDS BYTES OWN"  bf16 products (gate+up and down of Qwen3-8B) without a rest, in two segments a round, one of them with
 *                                  pulls: in this process when OWN is 1; else whoever reads the lines sees to it
 *
 * The first line of a chain comes when it is hot (two times 2 MS of products): ms of a pair of products, pairs that are timed in a segment, 0.
 * Then one line a segment, when it ends: its milliseconds, GB/s of its own pulls, and whether pulls belong to the next segment.  The next one
 * is in the queue by then, so the device computes on.  The first part of each segment is not timed (LEAD): the clock follows the power with
 * delay, pulls begin late by an answer and end late by a slab or two.  Order: without, with, with, without, and again. */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/err.h"
#include "bench/pair.h"
#include "kernels/kernels.h"

#define LEAD 0.4                         /* of what is timed */

struct consumer {
    struct mr_k *k, *pulling;            /* the context of the products; that of the pulls, for one thread at a time */
    char *arena;
    uint64_t bytes, at;                  /* of the arena; where the next slab begins */
    struct mr_k_pull *pull;
    void *stage[2];
    int rows, H, I;
    void *x, *m, *gu, *y, *up, *down;    /* (rows, H), (rows, I), (rows, 2 I), (rows, H); weights (2 I, H), (H, I) */
    struct mr_k_mark *from[2 * PAIR_ROUNDS], *to[2 * PAIR_ROUNDS];       /* of each segment */

    pthread_t thread;                    /* pulls */
    int on;
    atomic_int stop;
    uint64_t slab;                       /* bytes */
    int pulls, rc;                       /* of the thread that has ended */
    double ms;
};

/* ---- pulls ----------------------------------------------------------------------------------------------------------------------- */

static int begin_pull(struct consumer *c, int place, uint64_t bytes)
{
    if (c->at + bytes > c->bytes)
        c->at = 0;
    c->at += bytes;
    return mr_k_cuda_pull_begin(c->pulling, c->pull, place, c->stage[place], c->arena + c->at - bytes, bytes);
}

static void *pull_thread(void *arg)
{
    struct consumer *c = arg;
    uint64_t t = mr_now_ns();
    int n = 1, rc = begin_pull(c, 0, c->slab);

    for (; !rc && !atomic_load(&c->stop); n++) {
        rc = begin_pull(c, n % 2, c->slab);
        if (!rc)
            rc = mr_k_cuda_pull_wait(c->pulling, c->pull, (n - 1) % 2);
    }
    c->rc = rc ? rc : mr_k_cuda_pull_wait(c->pulling, c->pull, (n - 1) % 2);
    c->pulls = n;
    c->ms = pair_ms_since(t);
    return NULL;
}

static void pulls_on(struct consumer *c, uint64_t slab)
{
    c->slab = slab;
    atomic_store(&c->stop, 0);
    pair_must(pthread_create(&c->thread, NULL, pull_thread, c), "a thread for pulls");
    c->on = 1;
}

static void pulls_off(struct consumer *c)
{
    if (!c->on)
        pair_fail("no pulls have begun");
    atomic_store(&c->stop, 1);
    pthread_join(c->thread, NULL);
    c->on = 0;
    pair_must(c->rc, "pulling");
}

/* A slab that was pulled is the slab. */
static void check_pull(struct consumer *c, uint64_t bytes)
{
    double there, here;

    pair_must(begin_pull(c, 0, bytes) || mr_k_cuda_pull_wait(c->pulling, c->pull, 0), "a pull");
    pair_must(c->k->op->sumsq(c->k, bytes / 4, (const float *)(void *)(c->arena + c->at - bytes), &there), "reading a slab");
    pair_must(c->k->op->sumsq(c->k, bytes / 4, c->stage[0], &here), "reading a staging place");
    if (there != here || there == 0.0)
        pair_fail("squares in the slab make %g, in its copy %g", there, here);
}

/* ---- the chain ------------------------------------------------------------------------------------------------------------------- */

static void products(struct consumer *c, int pairs)
{
    const struct mr_k_ops *op = c->k->op;

    for (int i = 0; i < pairs; i++) {
        pair_must(op->linear(c->k, c->rows, 2 * c->I, c->H, c->x, c->H, c->up, c->gu, 2 * c->I, 0), "the gate and up product");
        pair_must(op->linear(c->k, c->rows, c->H, c->I, c->m, c->I, c->down, c->y, c->H, 0), "the down product");
    }
}

static void issue(struct consumer *c, int segment, int lead, int timed)
{
    products(c, lead);
    pair_must(mr_k_cuda_mark_set(c->k, c->from[segment]), "a mark");
    products(c, timed);
    pair_must(mr_k_cuda_mark_set(c->k, c->to[segment]), "a mark");
}

/* Milliseconds of a segment that has ended, or that ends now. */
static double ended(struct consumer *c, int segment)
{
    double ms;

    pair_must(mr_k_cuda_mark_wait(c->k, c->to[segment]), "waiting for products");
    pair_must(mr_k_cuda_mark_ms(c->k, c->from[segment], c->to[segment], &ms), "the time of products");
    return ms;
}

static double heat(struct consumer *c, int pairs)
{
    issue(c, 0, 0, pairs);
    return ended(c, 0) / pairs;
}

static int pairs_in(double ms, double pair_ms)
{
    return (int)(ms / (pair_ms > 1e-6 ? pair_ms : 1e-6)) + 1;
}

static void chain(struct consumer *c, double ms, int segments, uint64_t slab, int own)
{
    double pair_ms = heat(c, 4), took, rate;
    int timed, lead;

    for (int i = 0; i < 2; i++)                          /* the clock may have been low at first, and the first estimate too high */
        pair_ms = heat(c, pairs_in(2.0 * ms, pair_ms));
    timed = pairs_in(ms, pair_ms), lead = pairs_in(LEAD * ms, pair_ms);
    issue(c, 0, lead, timed);
    pair_say("ok %.5f %d 0", pair_ms, timed);
    for (int i = 0; i < segments; i++) {
        int with = (i + 1) % 4 == 1 || (i + 1) % 4 == 2;

        if (i + 1 < segments)
            issue(c, i + 1, lead, timed);
        took = ended(c, i);
        rate = 0.0;
        if (c->on) {
            pulls_off(c);
            rate = (double)c->pulls * (double)slab * 1e-6 / c->ms;
        }
        with = with && i + 1 < segments;
        if (with && own)
            pulls_on(c, slab);
        pair_say("ok %.5f %.3f %d", took, rate, with);
    }
}

/* ---- the process ----------------------------------------------------------------------------------------------------------------- */

static void *noise(struct consumer *c, size_t n, float std)
{
    void *p = pair_room(c->k, n * (size_t)c->k->act_bytes);

    pair_must(mr_k_cuda_random(c->k, p, n, n, std), "random numbers");
    return p;
}

static void set_up(struct consumer *c, const char *hex, uint64_t bytes, int scale)
{
    size_t rows, H, I;

    c->k = pair_context();
    c->pulling = pair_context();
    c->arena = pair_open(hex);
    c->bytes = bytes;
    rows = (size_t)(c->rows = PAIR_ROWS / scale), H = (size_t)(c->H = PAIR_H / scale), I = (size_t)(c->I = PAIR_I / scale);
    pair_must(mr_k_cuda_random(c->k, c->arena, 1, bytes / 2, 1.0f), "filling the arena");
    for (int i = 0; i < 2; i++)
        c->stage[i] = pair_room(c->k, PAIR_SLAB_MAX / (unsigned)scale);
    c->x = noise(c, rows * H, 1.0f), c->m = noise(c, rows * I, 1.0f), c->up = noise(c, 2 * I * H, 0.02f), c->down = noise(c, H * I, 0.02f);
    c->gu = noise(c, rows * 2 * I, 1.0f), c->y = noise(c, rows * H, 1.0f);
    if (!(c->pull = mr_k_cuda_pull_create(c->pulling)))
        pair_fail("a stream for pulls cannot be made");
    for (int i = 0; i < 2 * PAIR_ROUNDS; i++)
        if (!(c->from[i] = mr_k_cuda_mark_create(c->k)) || !(c->to[i] = mr_k_cuda_mark_create(c->k)))
            pair_fail("a mark cannot be made");
    pair_must(c->k->op->sync(c->k), "filling the arena");
}

int pair_consumer(const char *hex, uint64_t bytes, int scale)
{
    static struct consumer c;
    char line[PAIR_LINE];

    set_up(&c, hex, bytes, scale);
    check_pull(&c, PAIR_SLAB_MAX / (unsigned)scale);
    pair_say("ok");
    while (fgets(line, sizeof line, stdin)) {
        unsigned long long slab = 0;
        int rounds = 0, own = 0;
        double ms = 0;

        if (sscanf(line, "begin %llu", &slab) == 1 && slab > 0 && slab <= PAIR_SLAB_MAX / (unsigned)scale && !c.on) {
            pulls_on(&c, slab);
            pair_say("ok");
        } else if (sscanf(line, "chain %lf %d %llu %d", &ms, &rounds, &slab, &own) == 4 && rounds > 0 && rounds <= PAIR_ROUNDS && !c.on) {
            chain(&c, ms, 2 * rounds, slab, own);
        } else if (line[0] == 'e') {
            pulls_off(&c);
            pair_say("ok %d %.5f", c.pulls, c.ms);
        } else {
            pair_must(-EINVAL, line);
        }
    }
    return MR_EXIT_OK;
}
