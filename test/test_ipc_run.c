/* Whole miniature runs with everybody at once: as threads (also under tsan) and as processes that are killed at random moments and at
 * random fault points.  Every microbatch must end up in the parameters of every drafter exactly once, and in exactly one ledger line. */
#include "test_ipc_run.h"

#include <pthread.h>
#include <sys/prctl.h>

static enum mr_kind kind_of(struct mini *m, unsigned slot) { return (enum mr_kind)m->r.s.actors[slot].kind; }

static void play(struct mini *m, unsigned slot)
{
    struct mr_evc *e = &m->r.s.hdr->evc[kind_of(m, slot)];

    for (;;) {
        uint32_t seq = mr_evc_read(e);

        if (mini_finished(m) && !m->local[slot].copying)
            return;
        if (!mini_turn(m, slot))
            mr_evc_wait(&m->r.s, e, seq, 50, &m->r.s.actors[slot], MR_WAIT_READY);
    }
}

struct player {
    struct mini *m;
    unsigned slot;
};

static void *thread(void *arg)
{
    struct player *p = arg;

    play(p->m, p->slot);
    return NULL;
}

static void run_threads(unsigned det, unsigned slabs)
{
    struct mini *m = mini_make(2, 3, 6, slabs, 2, 31, det);
    struct player p[6];
    pthread_t t[6];
    FILE *null = fopen("/dev/null", "w");

    for (unsigned i = 0; i < 6; i++) {
        p[i] = (struct player){m, i};
        pthread_create(&t[i], NULL, thread, &p[i]);
    }
    while (!mini_finished(m)) {
        if (!supervisor_turn(m))
            usleep(200);
        mr_dump_all(&m->r.s, null);
    }
    for (unsigned i = 0; i < 6; i++)
        pthread_join(t[i], NULL);
    fclose(null);
    mini_check(m);
    mini_drop(m);
}

TEST(test_threads) { run_threads(0, 8); }
TEST(test_threads_exact_slabs) { run_threads(0, 6); }      /* as many slabs as places: the tightest run that must not deadlock */
TEST(test_threads_deterministic) { run_threads(1, 6); }

/* ---- processes ------------------------------------------------------------------------------------------------------------- */

/* Points that actors of each kind pass, for deaths at an exact place. */
static const char *const points[] = {
    "ipc.item.filling", "test.feeder.written", "test.feeder.cursor", "ipc.item.queued", "ipc.ring.pushed", "ipc.item.queue_pushed",
    "ipc.slab.taken", "ipc.ring.decided", "ipc.item.extracting", "ipc.slab.assign", "ipc.slab.assigned", "ipc.item.ready",
    "ipc.item.ready_pushed",
    "ipc.place.taken", "ipc.item.drafting", "ipc.item.drafting_pos", "test.drafter.added", "test.drafter.accumulated", "ipc.place.left",
    "ipc.step.reduce", "ipc.step.moved", "test.drafter.summed", "ipc.step.reduced", "test.drafter.half_applied", "test.drafter.apply_done",
    "test.drafter.zeroed", "ipc.item.slab_freed", "ipc.item.freed", "ipc.step.applied", "ipc.ckpt.claimed", "test.drafter.boot_zeroed",
    "ipc.step.joined", "ipc.evc.added", "ipc.evc.cleared", "ipc.evc.announced",
};

static pid_t spawn(struct mini *m, unsigned slot)
{
    unsigned doom = (unsigned)rand() % 3;
    char fault[96];
    pid_t pid;

    snprintf(fault, sizeof fault, "%s:%d", points[(unsigned)rand() % (sizeof points / sizeof points[0])], 1 + rand() % 4);
    memset(&m->local[slot], 0, sizeof m->local[slot]);
    pid = fork();
    if (pid)
        return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (doom)
        setenv("MR_FAULT", fault, 1);
    else
        unsetenv("MR_FAULT");
    mr_point_init(m->r.s.actors[slot].name);
    play(m, slot);
    _exit(0);
}

static void bury(struct mini *m, unsigned slot, pid_t *pid)
{
    struct mr_actor_row *row = &m->r.s.actors[slot];

    mr_recover(&m->r.s, slot, row->incarnation);
    row->incarnation++;
    *pid = spawn(m, slot);
}

/* All actors that have died by themselves.  Number. */
static unsigned reap(struct mini *m, pid_t *pid, unsigned n)
{
    unsigned dead = 0;
    int status;

    for (unsigned i = 0; i < n; i++) {
        if (pid[i] <= 0 || waitpid(pid[i], &status, WNOHANG) != pid[i])
            continue;
        pid[i] = 0;
        if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
            continue;                                       /* it has seen FINISHED */
        assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
        bury(m, i, &pid[i]);
        dead++;
    }
    return dead;
}

static unsigned run_killed(unsigned seed, unsigned det, unsigned slabs)
{
    struct mini *m = mini_make(2, 2, 4, slabs, 2, 41, det);
    unsigned n = 5, kills = 0;
    pid_t pid[5];

    srand(seed);
    for (unsigned i = 0; i < n; i++)
        pid[i] = spawn(m, i);
    while (!mini_finished(m)) {
        unsigned v = (unsigned)rand() % n;

        while (supervisor_turn(m))
            ;
        usleep((unsigned)rand() % 400);
        if (rand() % 8 == 0 && pid[v] > 0)
            kill(pid[v], SIGKILL);
        kills += reap(m, pid, n);
    }
    for (unsigned i = 0; i < n; i++) {
        if (pid[i] > 0) {
            kill(pid[i], SIGKILL);
            waitpid(pid[i], NULL, 0);
            mr_recover(&m->r.s, i, m->r.s.actors[i].incarnation);
        }
    }
    mini_check(m);
    mini_drop(m);
    return kills;
}

static void many(unsigned det, unsigned slabs, unsigned runs)
{
    unsigned seed = (unsigned)getpid() * 16, kills = 0;

    STRESS();
    print_message("seeds %u to %u\n", seed, seed + runs - 1);
    for (unsigned i = 0; i < runs; i++)
        kills += run_killed(seed + i, det, slabs);
    print_message("%u deaths\n", kills);
    assert_true(kills > 0);
}

TEST(test_killed) { many(0, 6, 60); }
TEST(test_killed_exact_slabs) { many(0, 4, 60); }
TEST(test_killed_deterministic) { many(1, 4, 60); }

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_threads), cmocka_unit_test(test_threads_exact_slabs), cmocka_unit_test(test_threads_deterministic),
        cmocka_unit_test(test_killed),  cmocka_unit_test(test_killed_exact_slabs),  cmocka_unit_test(test_killed_deterministic),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
