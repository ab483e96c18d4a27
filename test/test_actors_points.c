/* Actors with synthetic engines as forked processes, at every named fault point (base/point.h): killed there, and stopped there while a
 * peer dies.  The run must end as if nothing had happened (actors_sim.h).  Skipped without MR_FAULT_POINTS. */
#ifdef MR_FAULT_POINTS
#include "actors_herd.h"

/* A fork under a sanitizer costs some hundred times more: one passage of each point then. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { PASSAGES = 1 };
#else
enum { PASSAGES = 2 };
#endif

static void small_run(const char *fault, const char *trace, int stop, unsigned *hits)
{
    struct spec s = kill_spec(2, 1);
    struct herd h = {.fault = fault, .trace = trace, .stop = stop};

    s.in_memory = 1;
    s.rows = 36;
    s.ckpt_every = 2;
    s.target_us = s.drafter_us = 50;
    sim_start(&h.m, s, "point");
    run_herd(&h, NULL, NULL);
    sim_check(&h.m);
    *hits = stop ? h.stops : h.deaths;
    sim_close(&h.m);
    sim_remove(&h.m);
}

/* "NAME:NTH:ROLE" of every point that an undisturbed run passes, in every role that passes it.  Made by the first test: a forked actor
 * traces only the points that this process has not passed itself. */
struct point {
    char role[32], name[96];
};

static struct point *all_points(unsigned *n)
{
    static struct point list[512];
    static unsigned count;
    char path[] = "/tmp/millrace-trace-XXXXXX";
    unsigned deaths;
    FILE *f;

    *n = count;
    if (count)
        return list;
    close(mkstemp(path));
    small_run(NULL, path, 0, &deaths);
    assert_int_equal(deaths, 0);
    f = fopen(path, "r");
    assert_non_null(f);
    while (count < 512 && fscanf(f, "%31s %95s", list[count].role, list[count].name) == 2)
        count++;
    fclose(f);
    unlink(path);
    *n = count;
    return list;
}

static unsigned strike(const struct point *p, int nth, int stop)
{
    char fault[160];
    unsigned hits;

    snprintf(fault, sizeof(fault), "%s:%d:%s", p->name, nth, p->role);
    small_run(fault, NULL, stop, &hits);
    return hits != 0;
}

static void killed_at_every_point(void **state)
{
    unsigned n, struck = 0;
    struct point *p = all_points(&n);

    (void)state;
    for (unsigned i = 0; i < n; i++)
        for (int k = 0; k < PASSAGES; k++)
            struck += strike(&p[i], 1 + 2 * k, 0);
    printf("%u points in roles, %u deaths\n", n, struck);
    assert_true(n >= 100 && struck >= n / 2);
}

/* A drafter that stops anywhere, and finds another collective epoch when it goes on: what it read before must not be believed. */
static void stopped_at_every_point(void **state)
{
    unsigned n, struck = 0, tried = 0;
    struct point *p = all_points(&n);

    (void)state;
    for (unsigned i = 0; i < n; i++)
        if (!strcmp(p[i].role, "drafter/0")) {
            for (int k = 0; k < PASSAGES; k++)
                struck += strike(&p[i], 1 + k, 1);
            tried++;
        }
    printf("%u points of drafter/0, %u stops\n", tried, struck);
    assert_true(tried >= 40 && struck >= tried / 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(killed_at_every_point),
        cmocka_unit_test(stopped_at_every_point),
    };

    setvbuf(stdout, NULL, _IOLBF, 0);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
#else
#include <stdio.h>

int main(void)
{
    printf("built without MR_FAULT_POINTS\n");
    return 77;
}
#endif
