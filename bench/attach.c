/* millrace-bench attach [RUN] [--seconds N] [--json]: what a live run does, from its shared memory, read-only.
 *
 * Rates are differences of counters over the window.  "target tokens" passed a target, "draft tokens" are block rows that drafters
 * computed, "committed tokens" are those of microbatches whose ledger line was written within the window: the figure that counts.
 * Busy share of an actor = 1 - waits / window.  Ring and slab occupancy are averages of ten looks a second.
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "bench/bench.h"
#include "bench/sample.h"
#include "ipc/atomic.h"
#include "ipc/ring.h"
#include "ipc/step.h"
#include "ipc/wait.h"

struct occupancy {
    double ring[MR_RING_READY + 2 * MR_MAX_BUCKETS], slab[3];
    unsigned looks;
};

struct options {
    const char *run;
    double seconds;
    int json;
};

static void add_occupancy(const struct mr_seg *s, struct occupancy *o)
{
    for (unsigned r = 0; r < mr_ring_count(s); r++)
        o->ring[r] += mr_ring_live(s, r);
    for (unsigned i = 0; i < s->hdr->n_slabs; i++) {
        unsigned kind = mr_w_slab_kind(mr_ld(&s->slabs[i].word));
        o->slab[kind < 3 ? kind : 0]++;
    }
    o->looks++;
}

static int run_over(const struct mr_seg *s)
{
    return mr_sw_phase(mr_step_read(s)) == MR_FINISHED || mr_ld(&s->hdr->abort) || mr_seg_owner_alive(s->run) != 1;
}

/* Watches until the window is over or the run ends. */
static void watch(const struct mr_seg *s, double seconds, struct occupancy *o)
{
    uint64_t end = mr_now_ns() + (uint64_t)(seconds * 1e9);
    const struct timespec tenth = {0, 100000000};

    while (mr_now_ns() < end && !run_over(s)) {
        add_occupancy(s, o);
        nanosleep(&tenth, NULL);
    }
    if (!o->looks)
        add_occupancy(s, o);
}

static const char *ring_name(unsigned r, char out[32])
{
    if (r < MR_RING_READY)
        snprintf(out, 32, "%s", r == MR_RING_INPUT ? "input" : "retry");
    else
        snprintf(out, 32, "ready/%u%s", (r - MR_RING_READY) / 2, (r - MR_RING_READY) & 1 ? "'" : "");
    return out;
}

struct rates {
    double window, target, draft, committed, microbatches;
};

static struct rates rates_of(const struct mr_seg *s, const struct mr_bench_look *a, const struct mr_bench_look *b)
{
    struct rates r = {.window = (double)(b->at_ns - a->at_ns) * 1e-9};

    for (unsigned i = 0; i < s->hdr->n_actors; i++) {
        if (s->actors[i].kind == MR_TARGET)
            r.target += (double)(b->actor[i].tokens - a->actor[i].tokens);
        if (s->actors[i].kind == MR_DRAFTER)
            r.draft += (double)(b->actor[i].draft_tokens - a->actor[i].draft_tokens);
    }
    r.target /= r.window;
    r.draft /= r.window;
    r.committed = (double)(b->tokens_done - a->tokens_done) / r.window;
    r.microbatches = (double)(b->committed - a->committed) / r.window;
    return r;
}

static double share(uint64_t before, uint64_t after, double window)
{
    double x = after > before ? (double)(after - before) * 1e-9 / window : 0;

    return x > 1 ? 1 : x;
}

static double busy_share(const struct mr_bench_actor *a, const struct mr_bench_actor *b, double window)
{
    double waits = 0;

    for (int w = 1; w < MR_WAIT_REASONS; w++)
        waits += share(a->wait_ns[w], b->wait_ns[w], window);
    return waits > 1 ? 0 : 1 - waits;
}

static void print_text(const struct mr_seg *s, const struct mr_bench_look *a, const struct mr_bench_look *b, const struct occupancy *o)
{
    struct rates r = rates_of(s, a, b);
    char name[32];

    printf("run %s, %.1f s, step %u of %u\n", s->run, r.window, b->step, s->hdr->steps_total);
    printf("tokens/s: committed %.0f, target %.0f, draft %.0f   microbatches/s: %.2f\n", r.committed, r.target, r.draft, r.microbatches);
    for (unsigned i = 0; i < s->hdr->n_actors; i++) {
        const struct mr_bench_actor *x = &a->actor[i], *y = &b->actor[i];

        printf("%-12s busy %5.1f%%  items %6llu  restarts %u  waits:", s->actors[i].name, 100 * busy_share(x, y, r.window),
               (unsigned long long)(y->items - x->items), y->restarts);
        for (int w = 1; w < MR_WAIT_REASONS; w++) {
            double part = share(x->wait_ns[w], y->wait_ns[w], r.window);
            if (part >= 0.0005)
                printf(" %s %.1f%%", mr_wait_name(w), 100 * part);
        }
        printf("\n");
    }
    printf("rings (mean live):");
    for (unsigned k = 0; k < mr_ring_count(s); k++)
        printf(" %s %.1f", ring_name(k, name), o->ring[k] / o->looks);
    printf("\nslabs (mean of %u): free %.1f, at targets %.1f, with items %.1f\n", s->hdr->n_slabs, o->slab[0] / o->looks, o->slab[1] / o->looks,
           o->slab[2] / o->looks);
}

static void print_json(const struct mr_seg *s, const struct mr_bench_look *a, const struct mr_bench_look *b, const struct occupancy *o)
{
    struct rates r = rates_of(s, a, b);
    char name[32];

    printf("{\"run\":\"%s\",\"seconds\":%.3f,\"step\":%u,\"steps_total\":%u,\"committed_tokens_per_s\":%.1f,\"target_tokens_per_s\":%.1f,"
           "\"draft_tokens_per_s\":%.1f,\"microbatches_per_s\":%.3f,\"actors\":[",
           s->run, r.window, b->step, s->hdr->steps_total, r.committed, r.target, r.draft, r.microbatches);
    for (unsigned i = 0; i < s->hdr->n_actors; i++) {
        const struct mr_bench_actor *x = &a->actor[i], *y = &b->actor[i];
        int first = 1;

        printf("%s{\"name\":\"%s\",\"busy\":%.4f,\"items\":%llu,\"restarts\":%u,\"waits\":{", i ? "," : "", s->actors[i].name,
               busy_share(x, y, r.window), (unsigned long long)(y->items - x->items), y->restarts);
        for (int w = 1; w < MR_WAIT_REASONS; w++) {
            double part = share(x->wait_ns[w], y->wait_ns[w], r.window);
            if (part > 0) {
                printf("%s\"%s\":%.4f", first ? "" : ",", mr_wait_name(w), part);
                first = 0;
            }
        }
        printf("}}");
    }
    printf("],\"rings\":{");
    for (unsigned k = 0; k < mr_ring_count(s); k++)
        printf("%s\"%s\":%.2f", k ? "," : "", ring_name(k, name), o->ring[k] / o->looks);
    printf("},\"slabs\":{\"free\":%.2f,\"target\":%.2f,\"item\":%.2f}}\n", o->slab[0] / o->looks, o->slab[1] / o->looks, o->slab[2] / o->looks);
}

static int parse(int argc, char **argv, struct options *o)
{
    for (int i = 0; i < argc; i++) {
        char *end = "";

        if (!strcmp(argv[i], "--json"))
            o->json = 1;
        else if (!strcmp(argv[i], "--seconds") && i + 1 < argc)
            o->seconds = strtod(argv[++i], &end);
        else if (argv[i][0] != '-' && !o->run)
            o->run = argv[i];
        else
            end = "?";
        if (*end || !(o->seconds > 0)) {
            fprintf(stderr, "usage: millrace-bench attach [RUN] [--seconds N > 0] [--json]   (at: %s)\n", argv[i]);
            return -1;
        }
    }
    return 0;
}

int mr_bench_attach(int argc, char **argv)
{
    static struct mr_bench_look before, after;      /* a few hundred KiB: not on the stack */
    struct options o = {.seconds = 10};
    struct occupancy occ = {0};
    struct mr_err err = {0};
    struct mr_seg s = {0};
    char run[MR_NAME_MAX];

    if (parse(argc, argv, &o))
        return MR_EXIT_CONFIG;
    if (mr_bench_find(o.run, run, &err) || mr_seg_open(&s, run, 0, &err)) {
        fprintf(stderr, "millrace-bench: %s\n", err.msg);
        return err.code;
    }
    mr_bench_look(&s, &before);
    watch(&s, o.seconds, &occ);
    mr_bench_look(&s, &after);
    (o.json ? print_json : print_text)(&s, &before, &after, &occ);
    mr_seg_close(&s);
    return MR_EXIT_OK;
}
