/* Turns on a shared GPU (actors/turns.h): who waits for whom, who is woken, and that nobody waits for ever. */
#include "actors_sim.h"

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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_waits_for_the_other_kind),
        cmocka_unit_test(elsewhere_nobody_waits),
        cmocka_unit_test(whoever_waits_is_woken),
        cmocka_unit_test(a_target_lets_a_waiting_drafter_go_first_once),
        cmocka_unit_test(the_dead_and_the_stopped_are_not_waited_for),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
