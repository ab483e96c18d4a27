/* Turns on a shared GPU (actors/turns.h): who waits for whom, who is woken, and that nobody waits for ever. */
#include "actors_sim.h"

#include <pthread.h>
#include <time.h>

#include "actors/turns.h"

enum { LONG_NS = 50000000, SHORT_NS = 1000000 };

struct pair {
    struct sim m;
    struct mr_env target, drafter;
};

static struct mr_env env_of(struct sim *m, enum mr_kind kind, const char *device)
{
    struct mr_env e;

    for (unsigned i = 0; i < m->seg.hdr->n_actors; i++) {
        struct mr_actor_row *r = &m->seg.actors[i];

        if (r->kind != kind)
            continue;
        snprintf(r->device, sizeof r->device, "%s", device);
        mr_env_init(&e, &m->seg, &m->topo, &m->checked, i, 1, -1);
        return e;
    }
    fail_msg("no %s", mr_kind_name(kind));
    return e;
}

static void start(struct pair *p, const char *target, const char *drafter)
{
    struct spec s = {.D = 1, .T = 1, .accum = 1, .epochs = 1, .rows = 8, .slabs = 2, .max_steps = 1, .seed = 1, .in_memory = 1};

    sim_start(&p->m, s, "turns");
    p->target = env_of(&p->m, MR_TARGET, target);
    p->drafter = env_of(&p->m, MR_DRAFTER, drafter);
    mr_turns_init(&p->target);                       /* the drafter's device is known only now */
}

static void stop(struct pair *p)
{
    mr_env_close(&p->target);
    mr_env_close(&p->drafter);
    sim_close(&p->m);
    sim_remove(&p->m);
}

static void each_waits_for_the_other_kind(void **state)
{
    struct pair p;
    (void)state;

    start(&p, "cuda:0", "cuda:0");
    mr_turns_begin(&p.drafter);
    assert_false(mr_turns_taken(&p.target));         /* nothing is known of its units yet */
    mr_turns_unit(&p.target, LONG_NS);
    mr_turns_unit(&p.drafter, LONG_NS);
    assert_true(mr_turns_taken(&p.target));
    mr_turns_end(&p.drafter);
    assert_false(mr_turns_taken(&p.target));
    mr_turns_begin(&p.target);
    assert_true(mr_turns_taken(&p.drafter));
    mr_turns_unit(&p.drafter, SHORT_NS);
    assert_false(mr_turns_taken(&p.drafter));        /* not worth a hand-over */
    stop(&p);
}

static void elsewhere_nobody_waits(void **state)
{
    static const char *const device[][2] = {{"cuda:0", "cuda:1"}, {"cpu", "cpu"}, {"cuda:0", "cpu"}};
    (void)state;

    for (int i = 0; i < 3; i++) {
        struct pair p;

        start(&p, device[i][0], device[i][1]);
        mr_turns_unit(&p.target, LONG_NS);
        mr_turns_begin(&p.drafter);
        assert_false(mr_turns_taken(&p.target));
        assert_false(mr_turns_matter(&p.target));
        stop(&p);
    }
}

static void whoever_waits_is_woken(void **state)
{
    struct pair p;
    uint32_t seq;
    (void)state;

    start(&p, "cuda:0", "cuda:0");
    mr_turns_begin(&p.drafter);
    seq = mr_evc_read(p.target.evc);
    p.target.me->wait_reason = MR_WAIT_INPUT;
    mr_turns_end(&p.drafter);
    assert_int_equal(mr_evc_read(p.target.evc), seq);
    mr_turns_begin(&p.drafter);
    p.target.me->wait_reason = MR_WAIT_TURN;
    mr_turns_end(&p.drafter);
    assert_int_not_equal(mr_evc_read(p.target.evc), seq);
    mr_turns_begin(&p.drafter);                      /* parking ends a turn as well */
    mr_env_wait(&p.drafter, mr_evc_read(p.drafter.evc) - 2u, MR_WAIT_PLACE);
    assert_int_equal(p.drafter.me->computing, 0);
    stop(&p);
}

static void a_target_lets_a_waiting_drafter_go_first_once(void **state)
{
    struct pair p;
    (void)state;

    start(&p, "cuda:0", "cuda:0");
    mr_turns_unit(&p.target, LONG_NS);
    p.drafter.me->wait_reason = MR_WAIT_PLACE;       /* at the end of its step: the target goes on */
    assert_false(mr_turns_given(&p.target));
    mr_turns_unit(&p.target, LONG_NS);
    p.drafter.me->wait_reason = MR_WAIT_READY;
    assert_true(mr_turns_given(&p.target));
    assert_false(mr_turns_given(&p.target));
    mr_turns_unit(&p.target, LONG_NS);
    p.drafter.me->wait_reason = MR_WAIT_TURN;
    assert_true(mr_turns_given(&p.target));
    stop(&p);
}

static void the_dead_and_the_stopped_are_not_waited_for(void **state)
{
    struct pair p;
    (void)state;

    start(&p, "cuda:0", "cuda:0");
    mr_turns_unit(&p.target, LONG_NS);
    mr_turns_begin(&p.drafter);
    assert_true(mr_turns_taken(&p.target));
    mr_recover(&p.m.seg, p.drafter.slot, 1);
    assert_false(mr_turns_taken(&p.target));
    p.drafter.me->computing = 1;                     /* stopped */
    assert_true(mr_turns_taken(&p.target));
    p.target.turn.since_ns -= 3000000000u;
    assert_false(mr_turns_taken(&p.target));
    stop(&p);
}

/* ---- a target whose engine computes behind its back --------------------------------------------------------------------------------- */

static struct {
    struct mr_env *env;
    unsigned begun, finished;            /* microbatches */
    unsigned beside;                     /* begun while another one was in flight */
    unsigned said[2];                    /* of those finished: computing was [0] not said, [1] said */
} seen;

static int begin_one(void *self, unsigned place, const struct mr_batch *b, void *slab, struct mr_err *err)
{
    (void)self, (void)place, (void)b, (void)slab, (void)err;
    seen.beside += seen.begun > __atomic_load_n(&seen.finished, __ATOMIC_RELAXED);
    seen.begun++;
    return 0;
}

static int finish_one(void *self, unsigned place, struct mr_err *err)
{
    const struct timespec unit = {.tv_nsec = 12000000};

    (void)self, (void)place, (void)err;
    nanosleep(&unit, NULL);
    seen.said[seen.env->me->computing]++;
    __atomic_fetch_add(&seen.finished, 1, __ATOMIC_RELAXED);
    return 0;
}

int __real_mr_target_engine_open(struct mr_target_engine *e, struct mr_env *env, struct mr_err *err);
int __wrap_mr_target_engine_open(struct mr_target_engine *e, struct mr_env *env, struct mr_err *err);

int __wrap_mr_target_engine_open(struct mr_target_engine *e, struct mr_env *env, struct mr_err *err)
{
    int rc = __real_mr_target_engine_open(e, env, err);

    e->begin = begin_one;
    e->finish = finish_one;
    seen.env = env;
    return rc;
}

static void *run_actor(void *env)
{
    return (void *)(intptr_t)mr_actor_run(env);
}

static struct mr_env *env_made(struct sim *m, struct mr_env *e, enum mr_kind kind, const char *device)
{
    *e = env_of(m, kind, device);
    return e;
}

/* Until it has filled all slabs, with nobody to use them. */
static void fill_the_slabs(const char *target, const char *drafter)
{
    struct spec s = {.D = 1, .T = 1, .accum = 1, .epochs = 1, .rows = 40, .slabs = 6, .seed = 1, .in_memory = 1};
    struct mr_env env[3];
    pthread_t thread[2];
    void *rc;
    struct sim m;

    memset(&seen, 0, sizeof(seen));
    sim_start(&m, s, "turns");
    env_made(&m, &env[0], MR_DRAFTER, drafter);
    env_made(&m, &env[1], MR_FEEDER, "cpu");
    env_made(&m, &env[2], MR_TARGET, target);
    for (int i = 0; i < 2; i++)
        assert_int_equal(pthread_create(&thread[i], NULL, run_actor, &env[i + 1]), 0);
    while (__atomic_load_n(&seen.finished, __ATOMIC_RELAXED) < 6) {
        sim_watch(&m);
        usleep(200);
    }
    for (int i = 0; i < 2; i++)
        mr_st(&env[i + 1].me->drain, 1);
    mr_evc_bump_all(&m.seg);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(pthread_join(thread[i], &rc), 0);
        assert_int_equal((intptr_t)rc, MR_EXIT_OK);
    }
    assert_int_equal(env[2].me->computing, 0);
    for (int i = 0; i < 3; i++)
        mr_env_close(&env[i]);
    sim_close(&m);
    sim_remove(&m);
}

/* As long as it does not know how long its units last, it works as if it were alone, and nobody waits for it: with two in flight and slabs
 * enough, "I compute" would not end. */
static void a_target_takes_turns_from_its_second_unit_on(void **state)
{
    (void)state;
    fill_the_slabs("cuda:0", "cuda:0");
    assert_int_equal(seen.begun, 6);
    assert_int_equal(seen.beside, 1);
    assert_int_equal(seen.said[0], 2);
    assert_int_equal(seen.said[1], 4);
}

static void a_target_alone_has_two_in_flight(void **state)
{
    (void)state;
    fill_the_slabs("cuda:0", "cuda:1");
    assert_int_equal(seen.begun, 6);
    assert_int_equal(seen.beside, 5);
    assert_int_equal(seen.said[0], 6);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_waits_for_the_other_kind),
        cmocka_unit_test(elsewhere_nobody_waits),
        cmocka_unit_test(whoever_waits_is_woken),
        cmocka_unit_test(a_target_lets_a_waiting_drafter_go_first_once),
        cmocka_unit_test(the_dead_and_the_stopped_are_not_waited_for),
        cmocka_unit_test(a_target_takes_turns_from_its_second_unit_on),
        cmocka_unit_test(a_target_alone_has_two_in_flight),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
