/* Actors with synthetic engines as forked processes, killed with SIGKILL and drained at random times.  After each death: reaped, recovered
 * (ipc/recover.h), next incarnation.  The run must end as if nothing had happened (actors_sim.h).
 *
 * MR_TEST_SEED=N repeats a random run; the seed is printed first. */
#include "actors_herd.h"

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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_kills),
        cmocka_unit_test(random_kills_deterministic),
        cmocka_unit_test(random_kills_many_checkpoints),
    };

    setvbuf(stdout, NULL, _IOLBF, 0);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
