/* millrace-bench ring [--runs N] [--json]: our rings beside their peers, in the same rounds, so that the ratio is measured, not quoted.
 *
 * Latency: ping-pong between two pinned processes, half a round trip.  Throughput: 1 -> 1, 2 -> 2 and 5 -> 3 processes.  In a round every
 * peer runs once and the order rotates, so that drift of the machine hits all of them alike; the table has medians over rounds.
 */
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/err.h"
#include "bench/bench.h"
#include "bench/peers/peer.h"

enum { PEERS_MAX = 16, RUNS_MAX = 99, FIGURES = 5 };

static struct peer *peers;

void mr_bench_peer_add(struct peer *p)
{
    struct peer **at = &peers;

    while (*at && strcmp((*at)->name, p->name) < 0)
        at = &(*at)->next;
    p->next = *at;
    *at = p;
}

void *mr_bench_shared(size_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);

    return p == MAP_FAILED ? NULL : p;
}

void mr_bench_unshare(void *p, size_t bytes)
{
    munmap(p, bytes);
}

void mr_bench_pin(int core)
{
    static cpu_set_t all;
    cpu_set_t one;
    int n;

    if (!CPU_COUNT(&all))
        sched_getaffinity(0, sizeof all, &all);
    n = core % CPU_COUNT(&all);
    CPU_ZERO(&one);
    for (int c = 0; c < CPU_SETSIZE; c++)
        if (CPU_ISSET(c, &all) && n-- == 0)
            CPU_SET(c, &one);
    sched_setaffinity(0, sizeof one, &one);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

void mr_bench_quantiles(double *v, int n, double *median, double *p99)
{
    qsort(v, (size_t)n, sizeof *v, by_value);
    *median = v[n / 2];
    *p99 = v[(int)((double)n * 0.99)];
}

double mr_bench_ns(void)
{
    return (double)mr_now_ns();
}

void mr_bench_relax(unsigned *n)
{
    if (++*n & 127)
#if defined(__x86_64__)
        __builtin_ia32_pause();
#else
        __asm__ volatile("" ::: "memory");
#endif
    else
        sched_yield();
}

int mr_bench_child(void)
{
    int pid = fork();

    if (pid == 0)
        prctl(PR_SET_PDEATHSIG, SIGKILL);
    return pid;
}

int mr_bench_join(const int *pid, int n)
{
    int bad = 0, status;

    for (int i = 0; i < n; i++)
        bad |= waitpid(pid[i], &status, 0) < 0 || status != 0;
    return bad;
}

struct result {
    double v[FIGURES][RUNS_MAX];       /* latency median, p99, 1->1, 2->2, 5->3 */
    int bad;
};

static void run_one(struct peer *p, int round, struct result *r)
{
    int slow = p->flags & PEER_BLOCKS;
    uint64_t n = slow ? 100000 : 1000000;
    static const int shape[3][2] = {{1, 1}, {2, 2}, {5, 3}};

    r->bad |= p->latency(1024, slow ? 10000 : 100000, &r->v[0][round], &r->v[1][round]) != 0;
    for (int i = 0; i < 3; i++)        /* 5 -> 3 oversubscribes a small machine, where some peers crawl: fewer messages */
        r->bad |= p->throughput(1024, shape[i][0], shape[i][1], i == 2 ? n / 20 : n, &r->v[2 + i][round]) != 0;
}

static void print(const struct peer *p, struct result *r, int runs, int json, int first)
{
    double m[FIGURES], ignored;

    for (int i = 0; i < FIGURES; i++)
        mr_bench_quantiles(r->v[i], runs, &m[i], &ignored);
    if (json)
        printf("%s{\"name\":\"%s\",\"one_way_ns\":%.1f,\"p99_ns\":%.1f,\"mps_1_1\":%.3f,\"mps_2_2\":%.3f,\"mps_5_3\":%.3f,\"ok\":%s}",
               first ? "" : ",", p->name, m[0], m[1], m[2], m[3], m[4], r->bad ? "false" : "true");
    else
        printf("%-26s %9.0f %9.0f %9.2f %9.2f %9.2f  %s%s\n", p->name, m[0], m[1], m[2], m[3], m[4], r->bad ? "BAD RESULT " : "", p->note);
}

int mr_bench_ring(int argc, char **argv)
{
    struct peer *list[PEERS_MAX];
    struct result *r = calloc(PEERS_MAX, sizeof *r);
    int runs = 5, json = 0, n = 0, bad = 0;

    for (int i = 0; i < argc; i++) {
        if (!strcmp(argv[i], "--json"))
            json = 1;
        else
            runs = !strcmp(argv[i], "--runs") && i + 1 < argc ? atoi(argv[++i]) : 0;
    }
    if (!r || runs < 1 || runs > RUNS_MAX) {
        fprintf(stderr, "usage: millrace-bench ring [--runs 1..%d] [--json]\n", RUNS_MAX);
        free(r);
        return MR_EXIT_CONFIG;
    }
    for (struct peer *p = peers; p && n < PEERS_MAX; p = p->next)
        list[n++] = p;
    for (int round = 0; round < runs; round++)
        for (int i = 0; i < n; i++)
            run_one(list[(i + round) % n], round, &r[(i + round) % n]);
    if (json)
        printf("[");
    else
        printf("%-26s %9s %9s %9s %9s %9s   (medians of %d rounds; M references/s)\n", "ring", "one-way", "p99 ns", "1->1", "2->2", "5->3", runs);
    for (int i = 0; i < n; i++) {
        print(list[i], &r[i], runs, json, i == 0);
        bad |= r[i].bad;
    }
    printf(json ? "]\n" : "");
    free(r);
    return bad ? MR_EXIT_FAILED : MR_EXIT_OK;
}
