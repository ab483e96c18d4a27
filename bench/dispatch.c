/* millrace-bench dispatch [--seconds N] [--json]: do drafters starve?
 *
 * Starts conf/dispatch.json (5 synthetic targets, 3 synthetic drafters with the speeds of a real mix: they sleep instead of computing)
 * twice: as it is (any drafter takes any ready microbatch), and with the static assignment that this replaces (microbatch i belongs to
 * drafter i % D, which is what deterministic mode does).  Idle share of a drafter = its waits / window, whatever it waited for, the
 * barrier at the end of each step included.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bench/bench.h"
#include "bench/load.h"
#include "bench/sample.h"

struct idle {
    double drafter[MR_MAX_DRAFTERS], worst, microbatches_per_s;
    int drafters;
};

static void measure(const struct mr_seg *s, double seconds, struct idle *out)
{
    static struct mr_bench_look a, b;
    double window;

    mr_bench_look(s, &a);
    usleep((useconds_t)(seconds * 1e6));
    mr_bench_look(s, &b);
    window = (double)(b.at_ns - a.at_ns);
    out->microbatches_per_s = (double)(b.committed - a.committed) * 1e9 / window;
    for (unsigned i = 0; i < s->hdr->n_actors; i++) {
        double waits = 0;

        if (s->actors[i].kind != MR_DRAFTER || out->drafters == MR_MAX_DRAFTERS)
            continue;
        for (int w = 1; w < MR_WAIT_REASONS; w++)
            waits += (double)(b.actor[i].wait_ns[w] - a.actor[i].wait_ns[w]) / window;
        out->drafter[out->drafters++] = waits;
        out->worst = waits > out->worst ? waits : out->worst;
    }
}

static int one(const char *topology, int fixed, double seconds, struct idle *out, struct mr_err *err)
{
    const char *set = fixed ? "/train/deterministic=true" : "/train/deterministic=false";
    struct mr_bench_load l;
    int r = mr_bench_load_start(&l, topology, set, err);

    if (r == 0)
        measure(&l.seg, seconds, out);
    mr_bench_load_stop(&l);
    return r;
}

static void print(const struct idle *i, const char *name, int json)
{
    printf(json ? "\"%s\":{\"idle\":[" : "%-22s idle of each drafter:", name);
    for (int d = 0; d < i->drafters; d++)
        printf(json ? "%s%.4f" : "%s%.1f%%", json ? (d ? "," : "") : " ", i->drafter[d] * (json ? 1 : 100));
    printf(json ? "],\"worst\":%.4f,\"microbatches_per_s\":%.2f}" : "   worst %.1f%%   %.1f microbatches/s\n", i->worst * (json ? 1 : 100),
           i->microbatches_per_s);
}

int mr_bench_dispatch(int argc, char **argv)
{
    struct idle rings = {0}, fixed = {0};
    struct mr_err err = {0};
    const char *topology = "conf/dispatch.json";
    double seconds = 20;
    int json = 0;

    for (int i = 0; i < argc; i++) {
        if (!strcmp(argv[i], "--json"))
            json = 1;
        else if (!strcmp(argv[i], "--seconds") && i + 1 < argc)
            seconds = atof(argv[++i]);
        else if (!strcmp(argv[i], "--topology") && i + 1 < argc)
            topology = argv[++i];
        else
            seconds = 0;
    }
    if (!(seconds > 0)) {
        fprintf(stderr, "usage: millrace-bench dispatch [--seconds N > 0] [--topology FILE] [--json]\n");
        return MR_EXIT_CONFIG;
    }
    if (one(topology, 0, seconds, &rings, &err) || one(topology, 1, seconds, &fixed, &err)) {
        fprintf(stderr, "millrace-bench: %s\n", err.msg);
        return err.code;
    }
    printf(json ? "{" : "");
    print(&rings, "bucket rings", json);
    printf(json ? "," : "");
    print(&fixed, "static i % D", json);
    printf(json ? "}\n" : "");
    return MR_EXIT_OK;
}
