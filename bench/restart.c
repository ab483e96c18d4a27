/* millrace-bench restart [--runs N] [--json]: what the death of an actor costs.
 *
 * Starts conf/dispatch.json (synthetic actors: a few MiB each), and N times: picks a target or drafter that holds an item, SIGKILLs it, and
 * watches.  Three times from the kill, medians and 99th percentiles:
 *   reaped    the pidfd is readable: the kernel has taken the address space down (grows with RSS; nobody may reclaim before)
 *   claimable the item's word has left the dead incarnation: it is in a ring again
 *   running   the next incarnation has reported ready
 */
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/clock.h"
#include "bench/bench.h"
#include "bench/load.h"
#include "bench/peers/peer.h"
#include "ipc/atomic.h"

enum { RUNS_MAX = 1000, TIMES = 3 };

/* An item held by an actor that runs: its index, or -1. */
static int held_item(const struct mr_seg *s, unsigned from)
{
    for (unsigned k = 0; k < s->hdr->n_items; k++) {
        unsigned i = (from + k) % s->hdr->n_items;
        uint64_t w = mr_ld(&s->items[i].word);
        unsigned slot = mr_w_slot(w), phase = mr_w_phase(w);

        if ((phase == MR_EXTRACTING || phase == MR_DRAFTING) && slot < s->hdr->n_actors &&
            mr_ld(&s->actors[slot].state) == MR_ACTOR_RUNNING && mr_ld(&s->actors[slot].pid) > 0)
            return (int)i;
    }
    return -1;
}

static int pidfd_open_of(int pid)
{
    return (int)syscall(SYS_pidfd_open, pid, 0);
}

/* One kill; times in ms.  0, or -1 when the actor had let go of the item already. */
static int kill_one(const struct mr_seg *s, int item, double ms[TIMES])
{
    uint64_t held = mr_ld(&s->items[item].word), t0, end;
    struct mr_actor_row *row = &s->actors[mr_w_slot(held)];
    unsigned inc = mr_w_inc(held);
    int pid = mr_ld(&row->pid), fd = pidfd_open_of(pid);
    struct pollfd p = {.fd = fd, .events = POLLIN};

    if (fd < 0)
        return -1;
    t0 = mr_now_ns();
    end = t0 + 10000000000ull;
    if (mr_ld(&s->items[item].word) != held || kill(pid, SIGKILL)) {
        close(fd);
        return -1;
    }
    ms[0] = ms[1] = ms[2] = 0;
    while (mr_now_ns() < end && !(ms[0] && ms[1])) {
        uint64_t w = mr_ld(&s->items[item].word);

        if (!ms[0] && poll(&p, 1, 0) == 1)
            ms[0] = (double)(mr_now_ns() - t0) * 1e-6;
        if (!ms[1] && (mr_w_slot(w) != mr_w_slot(held) || mr_w_inc(w) != inc))
            ms[1] = (double)(mr_now_ns() - t0) * 1e-6;
    }
    while (mr_now_ns() < end && !(mr_ld(&row->incarnation) > inc && mr_ld(&row->state) == MR_ACTOR_RUNNING))
        usleep(200);
    ms[2] = (double)(mr_now_ns() - t0) * 1e-6;
    close(fd);
    return 0;
}

static int run_kills(const struct mr_seg *s, int runs, double (*t)[RUNS_MAX])
{
    int n = 0;

    for (int tries = 0; n < runs && tries < 200 * runs; tries++) {
        int item = held_item(s, (unsigned)tries * 7);
        double ms[TIMES];

        if (item < 0 || kill_one(s, item, ms)) {
            usleep(1000);
            continue;
        }
        for (int i = 0; i < TIMES; i++)
            t[i][n] = ms[i];
        n++;
        usleep(50000);
    }
    return n;
}

int mr_bench_restart(int argc, char **argv)
{
    static double t[TIMES][RUNS_MAX];
    static const char *const name[TIMES] = {"reaped", "claimable", "running"};
    const char *topology = "conf/dispatch.json";
    struct mr_bench_load l;
    struct mr_err err = {0};
    int runs = 100, json = 0, n = 0;

    for (int i = 0; i < argc; i++) {
        if (!strcmp(argv[i], "--json"))
            json = 1;
        else if (!strcmp(argv[i], "--topology") && i + 1 < argc)
            topology = argv[++i];
        else
            runs = !strcmp(argv[i], "--runs") && i + 1 < argc ? atoi(argv[++i]) : 0;
    }
    if (runs < 1 || runs > RUNS_MAX) {
        fprintf(stderr, "usage: millrace-bench restart [--runs 1..%d] [--topology FILE] [--json]\n", RUNS_MAX);
        return MR_EXIT_CONFIG;
    }
    if (mr_bench_load_start(&l, topology, "/restart/max=1000", &err) == 0)
        n = run_kills(&l.seg, runs, t);
    mr_bench_load_stop(&l);
    if (err.code || n < runs) {
        fprintf(stderr, "millrace-bench: %s\n", err.code ? err.msg : "the run ended before all kills were made");
        return MR_EXIT_FAILED;
    }
    printf(json ? "{\"kills\":%d" : "from SIGKILL, %d kills:\n", n);
    for (int i = 0; i < TIMES; i++) {
        double median, p99;

        mr_bench_quantiles(t[i], n, &median, &p99);
        printf(json ? ",\"%s_ms\":[%.3f,%.3f]" : "  %-10s median %8.3f ms   p99 %8.3f ms\n", name[i], median, p99);
    }
    printf(json ? "}\n" : "");
    return MR_EXIT_OK;
}
