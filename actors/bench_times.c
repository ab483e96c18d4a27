#include "actors/bench_times.h"

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

#include "base/clock.h"

struct mr_ways mr_ways_default(void)
{
    return (struct mr_ways){.runs = 10, .rounds = 5, .burst = 2, .seconds = 3.0, .rest_s = 0.5};
}

void mr_times_add(struct mr_times *t, double ms)
{
    if (t->n < MR_BENCH_TIMES)
        t->ms[t->n++] = ms;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

double mr_times_median(struct mr_times *t)
{
    qsort(t->ms, (size_t)t->n, sizeof *t->ms, by_value);
    return t->n ? t->ms[t->n / 2] : 0.0;
}

double mr_times_best(struct mr_times *t)
{
    qsort(t->ms, (size_t)t->n, sizeof *t->ms, by_value);
    return t->n ? t->ms[0] : 0.0;
}

int mr_bench_sustained(const struct mr_ways *w, mr_bench_unit *unit, void *ctx, struct mr_times *t)
{
    uint64_t begin = mr_now_ns();

    for (int i = 0; i < w->runs || (double)(mr_now_ns() - begin) * 1e-9 < w->seconds; i++) {
        double ms;
        int rc = unit(ctx, &ms);

        if (rc)
            return rc;
        mr_times_add(t, ms);
    }
    return 0;
}

int mr_bench_burst(const struct mr_ways *w, mr_bench_unit *unit, void *ctx, struct mr_times *t)
{
    double whole = floor(w->rest_s), ms;
    struct timespec rest = {.tv_sec = (time_t)whole, .tv_nsec = (long)((w->rest_s - whole) * 1e9)};
    uint64_t begin;

    nanosleep(&rest, NULL);
    begin = mr_now_ns();
    for (int i = 0; i < w->burst; i++) {
        int rc = unit(ctx, &ms);

        if (rc)
            return rc;
    }
    mr_times_add(t, (double)(mr_now_ns() - begin) * 1e-6 / w->burst);
    return 0;
}
