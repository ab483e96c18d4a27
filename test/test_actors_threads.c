/* Whole runs with synthetic engines, every actor a thread of this process over a real segment: the form that the thread sanitizer sees.
 * Shapes: 1..3 drafters, 1..3 targets, several epochs, partial last steps, deterministic or not, stop, resume, drain of feeder and targets. */
#include "actors_sim.h"

#include <pthread.h>

#include "runtime/rundir.h"

struct actor {
    struct sim *m;
    struct mr_arena_map *map;
    unsigned slot, inc;
    pthread_t thread;
    int rc, alive, done;
};

static void *actor_thread(void *arg)
{
    struct actor *a = arg;
    struct mr_env env;

    mr_env_init(&env, &a->m->seg, &a->m->topo, &a->m->checked, a->slot, a->inc, -1);
    env.map = *a->map;                   /* one address for the same bytes, or the thread sanitizer takes them for different ones */
    a->rc = mr_actor_run(&env);
    __atomic_store_n(&a->done, 1, __ATOMIC_RELEASE);
    return NULL;
}

static void spawn(struct actor *a)
{
    struct mr_actor_row *row = &a->m->seg.actors[a->slot];

    a->inc++;
    a->done = 0;
    a->alive = 1;
    mr_st(&row->drain, 0);
    mr_st(&row->incarnation, a->inc);
    mr_st(&row->state, MR_ACTOR_STARTING);
    assert_int_equal(pthread_create(&a->thread, NULL, actor_thread, a), 0);
}

/* An exit without acknowledgement is a drain: recovered and started again, like the supervisor does. */
static unsigned reap(struct actor *a, unsigned n)
{
    unsigned alive = 0;

    for (unsigned i = 0; i < n; i++) {
        struct mr_actor_row *row = &a[i].m->seg.actors[i];

        if (a[i].alive && __atomic_load_n(&a[i].done, __ATOMIC_ACQUIRE)) {
            pthread_join(a[i].thread, NULL);
            a[i].alive = 0;
            assert_int_equal(a[i].rc, MR_EXIT_OK);
            if (!mr_ld(&row->acked)) {
                mr_recover(&a->m->seg, i, a[i].inc);
                row->restarts++;
                spawn(&a[i]);
            }
        }
        alive += (unsigned)a[i].alive;
    }
    return alive;
}

/* Now and then asks a feeder or target to leave. */
static void maybe_drain(struct sim *m, unsigned round)
{
    unsigned slot = round / 64 % (1u + (unsigned)m->spec.T);

    if (round % 64 == 0)
        mr_st(&m->seg.actors[slot].drain, 1);
}

static void run_threads(struct sim *m, int drains)
{
    unsigned n = m->seg.hdr->n_actors, round = 0;
    struct actor *a = calloc(n, sizeof(*a));
    struct mr_arena_map map = {0};
    struct mr_err err = {0};

    for (unsigned i = 0; i < m->seg.hdr->n_arenas; i++)
        if (mr_ld(&m->seg.arenas[i].generation) && !mr_arena_base(&map, &m->seg, i, 0, &err))
            fail_msg("%s", err.msg);
    for (unsigned i = 0; i < n; i++) {
        a[i].m = m;
        a[i].map = &map;
        a[i].slot = i;
        spawn(&a[i]);
    }
    while (!sim_round(m) || reap(a, n)) {
        if (!m->end)
            reap(a, n);
        if (drains && !m->end)
            maybe_drain(m, ++round);
        sim_watch(m);
        usleep(200);
    }
    mr_arena_close_all(&map);
    free(a);
}

static void whole_run(struct spec spec, const char *tag)
{
    struct sim m;

    sim_start(&m, spec, tag);
    run_threads(&m, 0);
    assert_int_equal(m.end, m.seg.hdr->steps_total);
    sim_check(&m);
    sim_close(&m);
    sim_remove(&m);
}

static struct spec base_spec(int D, int T)
{
    return (struct spec){
        .D = D, .T = T, .accum = 2, .epochs = 3, .rows = 90, .slabs = 2 * D + 2, .ckpt_every = 3, .target_us = 200, .drafter_us = 200, .seed = 7,
    };
}

static void every_shape(void **state)
{
    (void)state;
    for (int D = 1; D <= 3; D++)
        for (int T = 1; T <= 3; T++)
            whole_run(base_spec(D, T), "shape");
}

/* M slabs are enough (docs/design.md section 5): slower, never stuck. */
static void fewest_slabs(void **state)
{
    struct spec s = base_spec(2, 3);

    (void)state;
    s.slabs = 4;
    whole_run(s, "slabs");
}

static void deterministic(void **state)
{
    (void)state;
    for (int D = 1; D <= 3; D++) {
        struct spec s = base_spec(D, 2);

        s.deterministic = 1;
        whole_run(s, "det");
    }
}

/* More drafters than microbatches in the last step: one of them joins with zeros. */
static void drafter_without_a_place(void **state)
{
    struct spec s = base_spec(3, 1);

    (void)state;
    s.accum = 1;
    s.rows = 40;
    whole_run(s, "zeros");
}

static void every_step_a_checkpoint(void **state)
{
    struct spec s = base_spec(2, 2);

    (void)state;
    s.ckpt_every = 1;
    s.rows = 40;
    whole_run(s, "ckpt");
}

int __real_mr_ckpt_done(const struct mr_seg *s, unsigned step, unsigned slot, unsigned inc);
int __wrap_mr_ckpt_done(const struct mr_seg *s, unsigned step, unsigned slot, unsigned inc);
static unsigned linger_us;

/* A copier that loses its processor as soon as it has woken those who wait for it. */
int __wrap_mr_ckpt_done(const struct mr_seg *s, unsigned step, unsigned slot, unsigned inc)
{
    int rc = __real_mr_ckpt_done(s, step, slot, inc);

    usleep(linger_us);
    return rc;
}

static void no_checkpoint_is_left_out(void **state)
{
    struct spec s = base_spec(1, 1);
    struct sim m;
    char path[160];

    (void)state;
    s.ckpt_every = 1;
    s.rows = 30;
    s.epochs = 1;
    linger_us = 20000;
    sim_start(&m, s, "left-out");
    run_threads(&m, 0);
    linger_us = 0;
    for (unsigned step = 1; step <= m.end; step++) {
        snprintf(path, sizeof(path), "%s/checkpoints/step-%u", m.dir, step);
        if (access(path, F_OK))
            fail_msg("no checkpoint %u", step);
    }
    sim_check(&m);
    sim_close(&m);
    sim_remove(&m);
}

static void max_steps(void **state)
{
    struct spec s = base_spec(2, 2);
    struct sim m;

    (void)state;
    s.max_steps = 5;
    sim_start(&m, s, "max");
    run_threads(&m, 0);
    assert_int_equal(m.end, 5);
    sim_check(&m);
    sim_close(&m);
    sim_remove(&m);
}

static void drained_feeder_and_targets(void **state)
{
    struct spec s = base_spec(2, 3);
    struct sim m;

    (void)state;
    sim_start(&m, s, "drain");
    run_threads(&m, 1);
    sim_check(&m);
    sim_close(&m);
    sim_remove(&m);
}

static void stop_and_resume(void **state)
{
    struct spec s = base_spec(2, 2);
    struct mr_rundir dir = {.lock_fd = -1};
    struct mr_ledger_cut cut;
    struct mr_err err = {0};
    struct sim m;
    char path[160];
    unsigned halted, kept, total, *line;

    (void)state;
    s.ckpt_every = 2;
    s.stop_at = 6;
    sim_start(&m, s, "resume");
    run_threads(&m, 0);
    halted = m.end;
    total = m.checked.epoch[s.epochs].first_pos;
    assert_in_range(halted, 7, m.seg.hdr->steps_total);
    sim_check(&m);
    line = m.line;
    m.line = NULL;
    sim_close(&m);

    /* From a checkpoint before the last one: later ledger lines and the later checkpoint must both be overtaken.  The one of an odd step will
     * not be made again; it goes now, as with --resume: other microbatches may have their turn in that step. */
    kept = halted - 1 - (halted - 1) % 2;
    m.spec.stop_at = 0;
    m.spec.first_step = kept;
    m.end = 0;
    snprintf(path, sizeof(path), "%s/ledger.jsonl", m.dir);
    sim_must(mr_ledger_cut(path, kept, total, &cut, &err), &err);
    snprintf(dir.path, sizeof(dir.path), "%s", m.dir);
    if (halted % 2)
        assert_int_equal(mr_rundir_drop_unpublished(&dir, kept), 1);
    sim_open(&m);
    mr_st(&m.seg.hdr->ckpt, mr_w_place(MR_CKPT_IDLE, kept, 0, 0));
    mr_st(&m.seg.hdr->ledger_done, kept);
    for (unsigned i = 0; i < total; i++)
        m.line[i] = cut.committed[i] ? line[i] : 0;
    mr_ledger_cut_free(&cut);
    free(line);
    run_threads(&m, 0);
    assert_int_equal(m.end, m.seg.hdr->steps_total);
    sim_check(&m);
    sim_close(&m);
    sim_remove(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_shape),           cmocka_unit_test(fewest_slabs),
        cmocka_unit_test(deterministic),         cmocka_unit_test(drafter_without_a_place),
        cmocka_unit_test(every_step_a_checkpoint), cmocka_unit_test(max_steps),
        cmocka_unit_test(drained_feeder_and_targets), cmocka_unit_test(stop_and_resume),
        cmocka_unit_test(no_checkpoint_is_left_out),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
