/* The two ways in which bench-target and bench-drafter measure; the Python programs of tools/ that they are compared with do the same.
 *
 * A GPU that works at full load meets its power limit after some 100 ms, and its clock drops (docs/performance.md).  So there are two figures:
 *   sustained   one unit of work after the other for some seconds; the median unit
 *   short       a burst of few units after a rest; the median burst, per unit
 * A unit is timed on the host, around issue and sync: what an actor in a run would see.  One thread; times are in ms.
 */
#ifndef MR_ACTORS_BENCH_TIMES_H
#define MR_ACTORS_BENCH_TIMES_H

enum { MR_BENCH_TIMES = 4096 };

struct mr_times {
    double ms[MR_BENCH_TIMES];
    int n;
};

struct mr_ways {
    int runs, rounds, burst;         /* sustained: units at least; short: bursts, and units in each */
    double seconds, rest_s;          /* sustained: seconds at least; short: pause before a burst */
};

/* 10 units and 3 s; 5 bursts of 2 after 0.5 s. */
struct mr_ways mr_ways_default(void);

/* One unit: its time in *ms.  0, or an error that ends the measurement and is returned by it. */
typedef int mr_bench_unit(void *ctx, double *ms);

int mr_bench_sustained(const struct mr_ways *w, mr_bench_unit *unit, void *ctx, struct mr_times *t);
/* One burst: adds one time to *t. */
int mr_bench_burst(const struct mr_ways *w, mr_bench_unit *unit, void *ctx, struct mr_times *t);

/* Forgotten when there are MR_BENCH_TIMES already. */
void mr_times_add(struct mr_times *t, double ms);
/* Sort *t; 0 when it is empty. */
double mr_times_median(struct mr_times *t);
double mr_times_best(struct mr_times *t);

#endif
