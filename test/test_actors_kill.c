/* Actors with synthetic engines as forked processes, killed with SIGKILL: at random times, and at every named fault point.
 * After each death: reaped, recovered (ipc/recover.h), next incarnation.  The run must end as if nothing had happened (actors_sim.h).
 *
 * MR_TEST_SEED=N repeats a random run; the seed is printed first. */
#include "actors_sim.h"

#include <errno.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "base/point.h"
#include "base/rng.h"

struct child {
    pid_t pid;                           /* 0 = none */
    unsigned inc;
};

struct herd {
    struct sim m;
    struct child child[MR_MAX_ACTORS];
    unsigned deaths;
    /* points: the first incarnation of each slot carries the fault, later ones do not */
    const char *fault, *trace;
    int stop;                            /* the fault stops the actor, see meanwhile() */
    unsigned stops;
};

static void be_actor(struct herd *h, unsigned slot)
{
    struct sim *m = &h->m;
    struct mr_env env;
    int rc;

    prctl(PR_SET_PDEATHSIG, SIGKILL);    /* a failed assertion leaves the test, and with it the actors */
    unsetenv("MR_FAULT");
    unsetenv("MR_FAULT_STOP");
    unsetenv("MR_FAULT_TRACE");
    if (h->fault && h->child[slot].inc == 1)
        setenv("MR_FAULT", h->fault, 1);
    if (h->stop)
        setenv("MR_FAULT_STOP", "1", 1);
    if (h->trace)
        setenv("MR_FAULT_TRACE", h->trace, 1);
    mr_point_init(m->seg.actors[slot].name);
    mr_env_init(&env, &m->seg, &m->topo, &m->checked, slot, h->child[slot].inc, -1);
    rc = mr_actor_run(&env);
    _exit(rc);
}

static void spawn(struct herd *h, unsigned slot)
{
    struct mr_actor_row *row = &h->m.seg.actors[slot];
    struct child *c = &h->child[slot];

    c->inc++;
    mr_st(&row->drain, 0);
    mr_st(&row->incarnation, c->inc);
    mr_st(&row->state, MR_ACTOR_STARTING);
    fflush(NULL);
    c->pid = fork();
    assert_int_not_equal(c->pid, -1);
    if (!c->pid)
        be_actor(h, slot);
}

static void kill_all(struct herd *h)
{
    for (unsigned i = 0; i < h->m.seg.hdr->n_actors; i++)
        if (h->child[i].pid) {
            kill(h->child[i].pid, SIGKILL);
            waitpid(h->child[i].pid, NULL, 0);
        }
}

static void bury(struct herd *h, unsigned slot, int status)
{
    struct mr_actor_row *row = &h->m.seg.actors[slot];

    h->child[slot].pid = 0;
    if (mr_ld(&row->acked))
        return;                          /* it may have been killed between the acknowledgement and its exit */
    if (!WIFSIGNALED(status) && WEXITSTATUS(status) != MR_EXIT_OK) {
        kill_all(h);
        fail_msg("%s exited with %d", row->name, WEXITSTATUS(status));
    }
    mr_recover(&h->m.seg, slot, h->child[slot].inc);
    row->restarts++;
    h->deaths++;
    spawn(h, slot);
}

static void meanwhile(struct herd *h, unsigned stopped);

static unsigned reap(struct herd *h)
{
    unsigned alive = 0;

    for (unsigned i = 0; i < h->m.seg.hdr->n_actors; i++) {
        int status;

        if (h->child[i].pid && waitpid(h->child[i].pid, &status, WNOHANG | WUNTRACED) == h->child[i].pid) {
            if (WIFSTOPPED(status))
                meanwhile(h, i);
            else
                bury(h, i, status);
        }
        alive += h->child[i].pid != 0;
    }
    return alive;
}

static void watch(struct herd *h)
{
    if (mr_now_ns() >= h->m.deadline_ns)
        kill_all(h);
    sim_watch(&h->m);
}

/* An actor stands still at its fault point: a drafter other than it dies, is recovered and comes back; then it goes on, with whatever it
 * had read before. */
static void meanwhile(struct herd *h, unsigned stopped)
{
    unsigned peer = h->m.seg.hdr->n_actors - 1;
    int status;

    h->stops++;
    if (h->child[peer].pid) {
        kill(h->child[peer].pid, SIGKILL);
        waitpid(h->child[peer].pid, &status, 0);
        bury(h, peer, status);
    }
    for (int i = 0; i < 100 && h->child[peer].pid && !mr_ld(&h->m.seg.actors[peer].joined); i++) {
        sim_round(&h->m);
        usleep(500);
    }
    for (int i = 0; i < 10; i++) {
        sim_round(&h->m);
        usleep(500);
    }
    kill(h->child[stopped].pid, SIGCONT);
}

/* `each` is called once a round, may kill. */
static void run_herd(struct herd *h, void (*each)(struct herd *, struct mr_rng *), struct mr_rng *rng)
{
    for (unsigned i = 0; i < h->m.seg.hdr->n_actors; i++)
        spawn(h, i);
    for (;;) {
        int finished = sim_round(&h->m);
        unsigned alive = reap(h);

        if (finished && !alive)
            return;
        if (each)
            each(h, rng);
        watch(h);
        usleep(100);
    }
}

static struct spec kill_spec(int D, int T)
{
    return (struct spec){
        .D = D, .T = T, .accum = 2, .epochs = 3, .rows = 120, .slabs = 2 * D + 2, .ckpt_every = 3, .target_us = 300, .drafter_us = 300, .seed = 5,
    };
}

/* ---- random kills --------------------------------------------------------------------------------------------------------------- */

/* About one kill in 3 ms of wall time; a slot that has acknowledged may be hit too. */
static void sometimes(struct herd *h, struct mr_rng *rng)
{
    unsigned slot = (unsigned)mr_rng_below(rng, h->m.seg.hdr->n_actors);
    pid_t pid = h->child[slot].pid;

    if (mr_rng_below(rng, 15) || !pid)
        return;
    if (mr_rng_below(rng, 4) == 0)
        mr_st(&h->m.seg.actors[slot].drain, 1);
    else
        kill(pid, SIGKILL);
}

static uint64_t test_seed(void)
{
    const char *text = getenv("MR_TEST_SEED");
    uint64_t seed = text ? strtoull(text, NULL, 10) : mr_now_ns() ^ (uint64_t)getpid() << 32;

    printf("MR_TEST_SEED=%llu\n", (unsigned long long)seed);
    return seed;
}

static void random_run(struct spec spec, uint64_t seed, const char *tag)
{
    struct mr_rng rng = mr_rng_key(seed, (uint64_t)spec.D, (uint64_t)spec.T);
    struct herd h = {0};

    sim_start(&h.m, spec, tag);
    run_herd(&h, sometimes, &rng);
    assert_int_equal(h.m.end, h.m.seg.hdr->steps_total);
    sim_check(&h.m);
    printf("%u drafters, %u targets: %u steps, %u deaths\n", spec.D, spec.T, h.m.end, h.deaths);
    sim_close(&h.m);
    sim_remove(&h.m);
}

static void random_kills(void **state)
{
    uint64_t seed = test_seed();

    (void)state;
    for (int D = 1; D <= 3; D++)
        for (int T = 1; T <= 2; T++)
            random_run(kill_spec(D, T), seed, "kill");
}

static void random_kills_deterministic(void **state)
{
    uint64_t seed = test_seed();

    (void)state;
    for (int D = 1; D <= 3; D++) {
        struct spec s = kill_spec(D, 2);

        s.deterministic = 1;
        random_run(s, seed, "killdet");
    }
}

static void random_kills_many_checkpoints(void **state)
{
    struct spec s = kill_spec(2, 1);

    (void)state;
    s.ckpt_every = 1;
    s.rows = 80;
    random_run(s, test_seed(), "killckpt");
}

#ifdef MR_FAULT_POINTS
/* ---- every fault point ---------------------------------------------------------------------------------------------------------- */

static void small_run(const char *fault, const char *trace, int stop, unsigned *hits)
{
    struct spec s = kill_spec(2, 1);
    struct herd h = {.fault = fault, .trace = trace, .stop = stop};

    s.epochs = 3;
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
        struck += strike(&p[i], 1, 0) + strike(&p[i], 3, 0);
    printf("%u points in roles, %u deaths\n", n, struck);
    assert_true(n >= 100 && struck >= n);
}

/* A drafter that stops anywhere, and finds another collective epoch when it goes on: what it read before must not be believed. */
static void stopped_at_every_point(void **state)
{
    unsigned n, struck = 0, tried = 0;
    struct point *p = all_points(&n);

    (void)state;
    for (unsigned i = 0; i < n; i++)
        if (!strcmp(p[i].role, "drafter/0")) {
            struck += strike(&p[i], 1, 1) + strike(&p[i], 2, 1);
            tried++;
        }
    printf("%u points of drafter/0, %u stops\n", tried, struck);
    assert_true(tried >= 40 && struck >= tried);
}

#endif

int main(void)
{
    const struct CMUnitTest tests[] = {
#ifdef MR_FAULT_POINTS
        cmocka_unit_test(killed_at_every_point),
        cmocka_unit_test(stopped_at_every_point),
#endif
        cmocka_unit_test(random_kills),
        cmocka_unit_test(random_kills_deterministic),
        cmocka_unit_test(random_kills_many_checkpoints),
    };

    setvbuf(stdout, NULL, _IOLBF, 0);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
