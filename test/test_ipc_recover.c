/* Recovery: each row of the table by itself, then a sweep that kills at every passage of every fault point, also inside recovery. */
#include "test_ipc_run.h"

#include <sys/prctl.h>

/* ---- the rows of the table ------------------------------------------------------------------------------------------------- */

TEST(test_feeder)
{
    struct mr_recovered got;
    struct rig r;
    uint64_t w;
    int a, b;

    rig_make(&r, 1, 1, 2, 6, 1, 8);
    a = mr_item_fill(&r.s, 0, 1, 0, &w);
    mr_st(&r.s.hdr->cursor, (uint64_t)1);                /* behind the cursor: complete */
    b = mr_item_fill(&r.s, 0, 1, 1, &w);                 /* at the cursor: perhaps half written */
    got = mr_recover(&r.s, 0, 2);
    assert_int_equal(got.items, 0);                      /* another incarnation's */
    got = mr_recover(&r.s, 0, 1);
    assert_int_equal(got.items, 2);
    assert_int_equal(r.s.items[a].word, mr_w_item(MR_QUEUED, MR_NO_SLOT, 0, 0, 1));
    assert_int_equal(mr_w_phase(r.s.items[b].word), MR_FREE);
    assert_int_equal(mr_ring_live(&r.s, MR_RING_INPUT), 1);
    assert_int_equal(mr_recover(&r.s, 0, 1).items, 0);
    assert_int_equal(mr_ring_live(&r.s, MR_RING_INPUT), 1);
    rig_drop(&r);
}

/* H5: a slot that is claimed again must not be taken for its last microbatch. */
TEST(test_feeder_stale_position)
{
    struct rig r;
    uint64_t w;
    int a;

    rig_make(&r, 1, 1, 2, 6, 1, 8);
    r.s.items[5].word = mr_w_item(MR_FREE, MR_NO_SLOT, 0, 5, 2);
    mr_st(&r.s.hdr->cursor, (uint64_t)6);
    for (unsigned i = 0; i < 5; i++)
        r.s.items[i].word = mr_w_item(MR_QUEUED, MR_NO_SLOT, 0, i, 1);
    a = mr_item_fill(&r.s, 0, 1, 6, &w);
    assert_true(a >= 0);
    mr_recover(&r.s, 0, 1);
    assert_int_equal(mr_w_phase(r.s.items[a].word), MR_FREE);
    rig_drop(&r);
}

TEST(test_target)
{
    struct mr_recovered got;
    struct rig r;
    uint64_t w;
    int held, bare, idx;

    rig_make(&r, 2, 1, 2, 6, 1, 8);
    for (unsigned i = 0; i < 4; i++)
        rig_feed(&r, i);
    held = mr_slab_take(&r.s, 0, 1, 1);
    bare = mr_slab_take(&r.s, 0, 1, 1);
    idx = mr_item_extract(&r.s, 1, 1, &w);
    assert_int_equal(mr_slab_assign(&r.s, (unsigned)held, 1, 1, (unsigned)idx, mr_w_pos(w)), 0);
    rig_extract(&r, 2);                                  /* another target's work stays */
    got = mr_recover(&r.s, 1, 1);
    assert_int_equal(got.items, 1);
    assert_int_equal(got.slabs, 2);
    assert_int_equal(r.s.slabs[bare].word, 0);
    assert_int_equal(rig_free_slabs(&r), 5);
    assert_int_equal(rig_count(&r, MR_READY), 1);
    assert_int_equal(mr_item_ready(&r.s, (unsigned)idx, &w), -ESTALE);      /* a zombie publishes nothing */
    assert_int_equal(mr_ring_live(&r.s, MR_RING_RETRY), 1);
    assert_int_equal(mr_item_extract(&r.s, 2, 1, &w), idx);                 /* retry before input */
    rig_drop(&r);
}

TEST(test_drafter_uncommitted)
{
    struct mr_recovered got;
    struct rig r;
    unsigned rr = 0, place, a, b;
    uint64_t w;

    rig_make(&r, 1, 2, 4, 8, 1, 8);
    a = rig_drafter(&r, 0), b = rig_drafter(&r, 1);
    for (unsigned i = 0; i < 4; i++)
        rig_feed(&r, i);
    for (unsigned i = 0; i < 4; i++)
        rig_extract(&r, 1);
    assert_true(rig_draft(&r, a, &rr) >= 0);
    assert_true(rig_draft(&r, b, &rr) >= 0);
    assert_true(mr_place_claim(&r.s, 0, a, 1, &rr, &place, &w) >= 0);
    mr_ckpt_claim(&r.s, 2, a, 1);
    got = mr_recover(&r.s, a, 1);
    assert_int_equal(got.items, 2);
    assert_int_equal(got.places, 2);
    assert_int_equal(mr_step_read(&r.s), mr_w_step(MR_COLLECT, 0, 1, 0, 0));
    assert_int_equal(r.s.actors[a].joined, 0);
    assert_int_equal(r.s.actors[b].joined, 1);
    assert_int_equal(rig_count(&r, MR_READY), 3);
    assert_int_equal(rig_count(&r, MR_ACCUMULATED), 1);
    assert_int_equal(mr_pw_state(r.s.hdr->ckpt), MR_CKPT_WANTED);
    assert_true(rig_draft(&r, b, &rr) >= 0 && rig_draft(&r, b, &rr) >= 0 && rig_draft(&r, b, &rr) >= 0);
    assert_int_equal(rig_draft(&r, b, &rr), -ENOENT);
    rig_drop(&r);
}

TEST(test_drafter_committed)
{
    struct mr_recovered got;
    enum mr_wait_reason why;
    struct rig r;
    unsigned rr = 0, a, b, n = 0;
    uint64_t w;

    rig_make(&r, 1, 2, 2, 8, 1, 8);
    a = rig_drafter(&r, 0), b = rig_drafter(&r, 1);
    for (unsigned i = 0; i < 2; i++)
        rig_feed(&r, i), rig_extract(&r, 1);
    n += rig_draft(&r, a, &rr) >= 0;
    n += rig_draft(&r, b, &rr) >= 0;
    assert_int_equal(n, 2);
    assert_int_equal(mr_step_try_reduce(&r.s, mr_step_read(&r.s), &why), 0);
    w = mr_step_read(&r.s);
    mr_step_reduced(&r.s, 0, w);
    mr_step_reduced(&r.s, 1, w);
    got = mr_recover(&r.s, a, 1);
    assert_int_equal(got.items, 1);
    assert_int_equal(got.places, 0);
    assert_int_equal(mr_step_read(&r.s), mr_w_step(MR_COMMITTED, 0, 1, 0, 0));
    assert_int_equal(rig_count(&r, MR_ACCUMULATED), 1);
    assert_int_equal(rig_count(&r, MR_READY), 0);
    assert_int_equal(mr_recover(&r.s, a, 1).items, 0);
    rig_drop(&r);
}

/* H7: a live drafter keeps what it has; what was READY is extracted again; nothing stale becomes READY. */
TEST(test_arena_lost)
{
    struct mr_recovered got;
    struct rig r;
    unsigned rr = 0, place, a, b;
    uint64_t w, v;
    int idx, idx2;

    rig_make(&r, 1, 2, 4, 8, 1, 8);
    a = rig_drafter(&r, 0), b = rig_drafter(&r, 1);
    for (unsigned i = 0; i < 6; i++)
        rig_feed(&r, i);
    for (unsigned i = 0; i < 4; i++)
        rig_extract(&r, 1);
    assert_true(rig_draft(&r, a, &rr) >= 0);
    idx = mr_place_claim(&r.s, 0, b, 1, &rr, &place, &w);
    assert_true(idx >= 0);
    got = mr_recover_arena(&r.s, 0);
    assert_int_equal(got.items, 2);
    assert_int_equal(got.slabs, 2);
    assert_int_equal(rig_count(&r, MR_ACCUMULATED), 1);
    assert_int_equal(rig_count(&r, MR_DRAFTING), 1);
    assert_int_equal(mr_slab_take(&r.s, 0, 1, 1), -EAGAIN);              /* nothing to take until it is registered again */
    assert_int_equal(mr_arena_current(&r.s, (unsigned)idx), 0);
    /* one drafter dies: its item goes to be extracted again, not to READY */
    got = mr_recover(&r.s, a, 1);
    assert_int_equal(got.items, 1);
    assert_int_equal(rig_count(&r, MR_READY), 0);
    assert_true(mr_arena_register(&r.s, 0) == 2);                        /* never an old generation again */
    assert_int_equal(mr_arena_current(&r.s, (unsigned)idx), 0);
    /* the other one sees that its hidden states are gone */
    v = w;
    assert_int_equal(mr_item_requeue(&r.s, (unsigned)idx, &w), 0);
    assert_int_equal(mr_place_give(&r.s, 0, place, b, 1), 0);
    assert_int_equal(r.s.hdr->sweep, 1);
    mr_recover_rings(&r.s);
    assert_int_equal(rig_free_slabs(&r), 8);
    assert_int_equal(mr_ring_live(&r.s, MR_RING_RETRY), 4);
    assert_int_equal(mr_ring_live(&r.s, MR_RING_INPUT), 2);
    idx2 = rig_extract(&r, 1);
    assert_true(idx2 >= 0 && mr_arena_current(&r.s, (unsigned)idx2));
    assert_int_equal(mr_item_requeue(&r.s, (unsigned)idx, &v), -ESTALE);
    rig_drop(&r);
}

TEST(test_keeper)
{
    struct rig r;

    rig_make(&r, 1, 1, 2, 4, 1, 8);
    r.s.actors[0].kind = MR_KEEPER;
    r.s.arenas[0].export_kind = MR_EXPORT_CUDA_IPC;
    r.s.arenas[1].export_kind = MR_EXPORT_CUDA_IPC;
    mr_arena_register(&r.s, 1);
    rig_feed(&r, 0);
    rig_extract(&r, 1);
    assert_int_equal(mr_recover(&r.s, 0, 1).items, 1);
    assert_true(r.s.arenas[0].generation == 0 && r.s.arenas[1].generation == 0);
    rig_drop(&r);
}

TEST(test_orphan_slabs)
{
    struct rig r;
    uint64_t w;
    int idx, slab;

    rig_make(&r, 1, 1, 2, 4, 1, 8);
    rig_feed(&r, 0);
    idx = rig_extract(&r, 1);
    assert_int_equal(mr_recover_slabs(&r.s), 0);
    slab = mr_slab_take(&r.s, 0, 1, 1);
    r.s.slabs[slab].word = mr_w_slab_item((unsigned)idx, 0);             /* left over from an earlier extraction */
    assert_int_equal(mr_recover_slabs(&r.s), 1);
    assert_int_equal(rig_free_slabs(&r), 3);
    w = r.s.items[idx].word;
    r.s.items[idx].word = mr_w_item(MR_EXTRACTING, 1, 1, 0, 2);          /* not known yet which one is the new one */
    assert_int_equal(mr_recover_slabs(&r.s), 0);
    r.s.items[idx].word = mr_w_item(MR_READY, MR_NO_SLOT, 0, 4, 2);      /* the item is another microbatch by now */
    assert_int_equal(mr_recover_slabs(&r.s), 1);
    r.s.items[idx].word = w;
    rig_drop(&r);
}

TEST(test_publication_saturates)
{
    struct rig r;
    uint64_t w;
    int idx;

    rig_make(&r, 1, 1, 2, 4, 1, 8);
    rig_feed(&r, 0);
    idx = mr_item_extract(&r.s, 1, 1, &w);
    w = r.s.items[idx].word = mr_w_item(MR_EXTRACTING, 1, 1, 0, MR_PUB_MAX - 1);
    assert_int_equal(mr_item_ready(&r.s, (unsigned)idx, &w), 0);
    assert_int_equal(mr_w_pub(w), MR_PUB_MAX);
    assert_int_equal(mr_item_draft(&r.s, 0, 0, rig_drafter(&r, 0), 1, &w), idx);
    assert_int_equal(mr_item_requeue(&r.s, (unsigned)idx, &w), -EOVERFLOW);
    assert_int_equal(r.s.hdr->fatal, 1);
    assert_int_equal(mr_w_phase(r.s.items[idx].word), MR_DRAFTING);      /* never wraps: it stays */
    rig_drop(&r);
}

/* ---- the sweep --------------------------------------------------------------------------------------------------------------
 *
 * One process plays everybody, turn by turn in a fixed order; it is killed at passage n of point P, for all P and n.  Then the actor whose
 * turn it was is recovered (or all of them: a second series), possibly by a recovery that is itself killed and run again, and another
 * process plays on to the end. */

#ifdef MR_FAULT_POINTS

static void play_all(struct mini *m)
{
    unsigned n = 1 + m->r.T + m->r.D, idle = 0;

    while (!mini_finished(m) && idle < 3) {
        unsigned did = (unsigned)supervisor_turn(m);

        for (unsigned i = 0; i < n; i++) {
            m->current = i;
            did += (unsigned)mini_turn(m, i);
        }
        m->current = MINI_SUP;
        idle = did ? 0 : idle + 1;
    }
}

static void recover_dead(struct mini *m, int everybody)
{
    unsigned n = 1 + m->r.T + m->r.D;

    for (unsigned i = 0; i < n; i++)
        if (everybody || i == m->current)
            mr_recover(&m->r.s, i, mini_inc(m, i));
}

/* The next incarnations of whom recover_dead recovered. */
static void reincarnate(struct mini *m, int everybody)
{
    unsigned n = 1 + m->r.T + m->r.D;

    for (unsigned i = 0; i < n; i++) {
        if (!everybody && i != m->current)
            continue;
        memset(&m->local[i], 0, sizeof m->local[i]);
        m->r.s.actors[i].incarnation++;
    }
}

/* Runs fn(m, arg) in a child with this fault and trace.  1 = it was killed at the point. */
static int in_child(struct mini *m, void (*fn)(struct mini *, int), int arg, const char *fault, const char *trace)
{
    pid_t pid = fork();
    int status;

    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        fault ? setenv("MR_FAULT", fault, 1) : unsetenv("MR_FAULT");
        trace ? setenv("MR_FAULT_TRACE", trace, 1) : unsetenv("MR_FAULT_TRACE");
        mr_point_init("all");
        alarm(20);
        fn(m, arg);
        _exit(0);
    }
    waitpid(pid, &status, 0);
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)
        return 1;
    if (status)
        fail_msg("child ended with status %#x after fault %s", status, fault ? fault : "-");
    return 0;
}

static void play_child(struct mini *m, int arg)
{
    (void)arg;
    play_all(m);
}

static struct mini *small_run(int series)
{
    return mini_make(2, 2, 3, 3 + (unsigned)(series & 1), 1, 7, (unsigned)series >> 1 & 1);
}

/* One run that is killed there and goes on.  0 = the point was not passed n times. */
static int killed_at(const char *fault, const char *recovery_fault, int series, int everybody, int *recovery_died)
{
    struct mini *m = small_run(series);
    int died = in_child(m, play_child, 0, fault, NULL);

    if (died) {
        *recovery_died = recovery_fault && in_child(m, recover_dead, everybody, recovery_fault, NULL);
        recover_dead(m, everybody);
        reincarnate(m, everybody);
        in_child(m, play_child, 0, NULL, NULL);
    }
    if (m->bad || !mini_finished(m)) {
        mr_dump_all(&m->r.s, stderr);
        fail_msg("after %s, recovery %s, series %d, %s recovered", fault, recovery_fault ? recovery_fault : "whole", series,
                 everybody ? "all" : "one");
    }
    mini_check(m);
    mini_drop(m);
    return died;
}

struct points {
    unsigned n;
    char name[128][64];
};
static struct points in_run, in_recovery;

/* Names of the points that a traced child passes.  A point is traced once a process, and children inherit that, so this comes first. */
static void points_of(struct points *pts, int recovery)
{
    struct mini *m = small_run(0);
    char path[] = "/tmp/test-ipc-trace-XXXXXX", line[160];
    int fd = mkstemp(path);
    FILE *f;

    assert_true(fd >= 0);
    close(fd);
    if (recovery) {
        assert_int_equal(in_child(m, play_child, 0, "ipc.step.reduced:2", NULL), 1);
        in_child(m, recover_dead, 1, NULL, path);
    } else {
        in_child(m, play_child, 0, NULL, path);
    }
    f = fopen(path, "r");
    assert_non_null(f);
    while (fgets(line, sizeof line, f) && pts->n < 128)
        pts->n += sscanf(line, "%*s %63s", pts->name[pts->n]) == 1;
    fclose(f);
    unlink(path);
    mini_drop(m);
}

static int find_points(void **state)
{
    (void)state;
    points_of(&in_run, 0);
    points_of(&in_recovery, 1);
    return in_run.n > 30 && in_recovery.n > 10 ? 0 : -1;
}

static void sweep(int series, int everybody)
{
    unsigned n = in_run.n, deaths = 0;
    int ignored;

    STRESS();
    for (unsigned p = 0; p < n; p++) {
        for (unsigned k = 1;; k++) {
            char fault[96];

            snprintf(fault, sizeof fault, "%.63s:%u", in_run.name[p], k);
            if (!killed_at(fault, NULL, series, everybody, &ignored))
                break;
            deaths++;
        }
    }
    print_message("%u points, %u deaths\n", n, deaths);
    assert_true(deaths > n);
}

TEST(test_sweep_one) { sweep(0, 0); }
TEST(test_sweep_one_spare_slab) { sweep(1, 0); }
TEST(test_sweep_one_deterministic) { sweep(2, 0); }
TEST(test_sweep_all) { sweep(0, 1); }

/* Recovery of everybody, killed at every passage of each of its points, after deaths at chosen moments. */
TEST(test_sweep_recovery)
{
    static const char *const first[] = {"ipc.item.filling:5", "test.feeder.cursor:6", "ipc.slab.assigned:4", "ipc.item.extracting:3",
                                        "test.drafter.added:2", "ipc.item.drafting:3", "ipc.step.reduce:1", "ipc.step.reduced:2",
                                        "test.drafter.half_applied:1", "test.drafter.zeroed:1", "ipc.item.slab_freed:2",
                                        "ipc.ckpt.claimed:1"};
    unsigned n = in_recovery.n, deaths = 0;

    STRESS();
    for (size_t i = 0; i < sizeof first / sizeof first[0]; i++) {
        for (unsigned p = 0; p < n; p++) {
            int recovery_died = 1;

            for (unsigned k = 1; recovery_died; k++) {
                char fault[96];

                snprintf(fault, sizeof fault, "%.63s:%u", in_recovery.name[p], k);
                assert_int_equal(killed_at(first[i], fault, 0, 1, &recovery_died), 1);
                deaths += (unsigned)recovery_died;
            }
        }
    }
    print_message("%u points, %u deaths of recovery\n", n, deaths);
    assert_true(deaths > n);
}

#else
static int find_points(void **state)
{
    (void)state;
    return 0;
}
#endif

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_feeder),          cmocka_unit_test(test_feeder_stale_position), cmocka_unit_test(test_target),
        cmocka_unit_test(test_drafter_uncommitted), cmocka_unit_test(test_drafter_committed), cmocka_unit_test(test_arena_lost),
        cmocka_unit_test(test_keeper),          cmocka_unit_test(test_orphan_slabs),
        cmocka_unit_test(test_publication_saturates),
#ifdef MR_FAULT_POINTS
        cmocka_unit_test(test_sweep_one),       cmocka_unit_test(test_sweep_one_spare_slab),
        cmocka_unit_test(test_sweep_one_deterministic), cmocka_unit_test(test_sweep_all), cmocka_unit_test(test_sweep_recovery),
#endif
    };

    return cmocka_run_group_tests(tests, find_points, NULL);
}
