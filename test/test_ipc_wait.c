/* The wait primitive: what it returns, what it accounts, and that no wake-up is lost.
 *
 * A lost wake-up is a sleep that the deadline had to end although the count had moved.  The primitive counts those itself (evc->late), so
 * the stress tests need no clock.  A machine that stops a waker for half a second between its two instructions looks the same, so a
 * handful in tens of thousands of hand-overs is let pass; a hole in the protocol shows in hundreds.
 */
#include "test_ipc.h"

#include <pthread.h>
#include <sys/prctl.h>

#include "base/clock.h"

static struct rig g;

static int make_group(void **state)
{
    (void)state;
    rig_make(&g, 2, 2, 4, 5, 1, 8);
    return 0;
}

static int drop_group(void **state)
{
    (void)state;
    rig_drop(&g);
    return 0;
}

TEST(test_returns)
{
    struct mr_evc *e = &g.s.hdr->evc[MR_TARGET];
    struct mr_actor_row *row = &g.s.actors[1];
    uint32_t seq = mr_evc_read(e);

    assert_int_equal(mr_evc_wait(&g.s, e, seq, 0, row, MR_WAIT_INPUT), -ETIMEDOUT);
    assert_int_equal(mr_evc_wait(&g.s, e, seq, 2, row, MR_WAIT_INPUT), -ETIMEDOUT);
    assert_int_equal(row->wait_reason, MR_WAIT_NONE);
    assert_true(row->wait_ns[MR_WAIT_INPUT] >= 2000000);
    assert_true(row->wait_ns[MR_WAIT_SLAB] == 0);
    mr_evc_bump(e);
    assert_int_equal(mr_evc_wait(&g.s, e, seq, 500, row, MR_WAIT_INPUT), 0);
    seq = mr_evc_read(e);
    assert_int_equal(seq & 1, 0);                       /* the sleeper bit is not part of the count */
    assert_int_equal(mr_evc_wait(&g.s, e, seq, 1, NULL, MR_WAIT_SLAB), -ETIMEDOUT);
    mr_st(&g.s.hdr->abort, 1);
    assert_int_equal(mr_evc_wait(&g.s, e, seq, 500, NULL, MR_WAIT_SLAB), -ECANCELED);
    mr_st(&g.s.hdr->abort, 0);
    mr_evc_bump_all(&g.s);
    assert_int_equal(mr_evc_wait(&g.s, e, seq, 500, NULL, MR_WAIT_SLAB), 0);
}

/* A stall that is taken up again keeps its beginning; progress or another reason starts a new one. */
TEST(test_stall_since)
{
    struct mr_evc *e = &g.s.hdr->evc[MR_TARGET];
    struct mr_actor_row *row = &g.s.actors[2];
    uint64_t since;

    mr_evc_wait(&g.s, e, mr_evc_read(e), 1, row, MR_WAIT_INPUT);
    since = row->wait_since_ns;
    assert_true(since != 0);
    mr_evc_wait(&g.s, e, mr_evc_read(e), 1, row, MR_WAIT_INPUT);
    assert_true(row->wait_since_ns == since);
    mr_evc_wait(&g.s, e, mr_evc_read(e), 1, row, MR_WAIT_SLAB);
    assert_true(row->wait_since_ns > since);
    since = row->wait_since_ns;
    row->progress++;
    mr_evc_wait(&g.s, e, mr_evc_read(e), 1, row, MR_WAIT_SLAB);
    assert_true(row->wait_since_ns > since);
}

TEST(test_names)
{
    for (unsigned i = 0; i < MR_WAIT_REASONS; i++)
        for (unsigned k = 0; k < i; k++)
            assert_string_not_equal(mr_wait_name(i), mr_wait_name(k));
    assert_string_equal(mr_wait_name(MR_WAIT_REASONS), "?");
    assert_string_equal(mr_wait_name(MR_WAIT_CKPT), "ckpt");
    assert_string_equal(mr_wait_name(MR_WAIT_PEER), "peer");
}

/* ---- stress: two threads hand a token to and fro, so every hand-over needs its wake-up ---------------------------------------- */

struct pingpong {
    const struct mr_seg *s;
    struct mr_evc *e[2];
    uint64_t turn, rounds;
};

static void *player(struct pingpong *p, unsigned me)
{
    for (;;) {
        uint32_t seq = mr_evc_read(p->e[me]);
        uint64_t turn = mr_ld(&p->turn);

        if (turn >= p->rounds)
            return NULL;
        if (turn % 2 == me) {
            mr_st(&p->turn, turn + 1);
            mr_evc_bump(p->e[!me]);
            if (turn + 1 >= p->rounds)
                return NULL;
            continue;
        }
        mr_evc_wait(p->s, p->e[me], seq, 500, NULL, MR_WAIT_READY);
    }
}

static void *first(void *p) { return player(p, 0); }
static void *second(void *p) { return player(p, 1); }

static void pingpong(unsigned start_seq)
{
    struct pingpong p = {.s = &g.s, .e = {&g.s.hdr->evc[MR_TARGET], &g.s.hdr->evc[MR_DRAFTER]}, .rounds = 40000};
    pthread_t a, b;

    STRESS();
    mr_st(&p.e[0]->seq, start_seq);
    mr_st(&p.e[1]->seq, start_seq);
    pthread_create(&a, NULL, first, &p);
    pthread_create(&b, NULL, second, &p);
    pthread_join(a, NULL);
    pthread_join(b, NULL);
    assert_int_equal(p.turn, 40000);
    assert_in_range(p.e[0]->late + p.e[1]->late, 0, 3);
}

TEST(test_pingpong) { pingpong(0); }
TEST(test_pingpong_wraps) { pingpong(0u - 20000u); }     /* the count passes 2^32 in the middle */

/* Many sleepers on one count, one waker: everybody sees every generation. */
struct crowd {
    const struct mr_seg *s;
    struct mr_evc *e;
    uint64_t generation, seen[6];
};

struct member {
    struct crowd *c;
    unsigned me;
};

static void *watch(void *arg)
{
    struct member *m = arg;
    struct crowd *c = m->c;
    uint64_t have = 0;

    while (have < 2000) {
        uint32_t seq = mr_evc_read(c->e);
        uint64_t now = mr_ld(&c->generation);

        if (now != have) {
            have = now;
            mr_st(&c->seen[m->me], have);
            continue;
        }
        mr_evc_wait(c->s, c->e, seq, 500, NULL, MR_WAIT_READY);
    }
    return NULL;
}

TEST(test_crowd)
{
    struct crowd c = {.s = &g.s, .e = &g.s.hdr->evc[MR_KEEPER]};
    struct member m[6];
    pthread_t t[6];

    STRESS();
    for (unsigned i = 0; i < 6; i++) {
        m[i] = (struct member){&c, i};
        pthread_create(&t[i], NULL, watch, &m[i]);
    }
    for (uint64_t n = 1; n <= 2000; n++) {
        mr_st(&c.generation, n);
        mr_evc_bump(c.e);
        for (unsigned i = 0; i < 6; i++)
            while (mr_ld(&c.seen[i]) != n)
                sched_yield();
    }
    for (unsigned i = 0; i < 6; i++)
        pthread_join(t[i], NULL);
    assert_in_range(c.e->late, 0, 3);
}

/* ---- death ------------------------------------------------------------------------------------------------------------------ */

static pid_t sleeper(struct mr_evc *e, unsigned ms, uint64_t *done)
{
    pid_t pid = fork();

    if (pid)
        return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    mr_point_init("target/0");
    for (uint32_t seq = mr_evc_read(e); mr_evc_wait(&g.s, e, seq, ms, NULL, MR_WAIT_INPUT) != 0;)
        ;
    mr_st(done, 1);
    _exit(0);
}

static int is_asleep(pid_t pid)
{
    char path[64], buf[512] = {0}, *p;
    FILE *f;

    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    f = fopen(path, "r");
    if (!f)
        return 0;
    p = fgets(buf, sizeof buf, f) ? strrchr(buf, ')') : NULL;
    fclose(f);
    return p && p[2] == 'S';
}

/* A killed sleeper costs the next bump one wake and leaves the word clean; a live one beside it is woken. */
TEST(test_dead_sleeper)
{
    struct mr_evc *e = &g.s.hdr->evc[MR_TARGET];
    uint64_t *done = &g.s.actors[1].note;
    pid_t dead = sleeper(e, 500, done), other = 0;
    int status;

    while (!(mr_ld(&e->seq) & 1) || !is_asleep(dead))
        sched_yield();
    kill(dead, SIGKILL);
    waitpid(dead, NULL, 0);
    assert_int_equal(mr_ld(&e->seq) & 1, 1);
    mr_st(done, 0);
    other = sleeper(e, 500, done);
    while (!is_asleep(other))
        sched_yield();
    mr_evc_bump(e);
    waitpid(other, &status, 0);
    assert_int_equal(status, 0);
    assert_int_equal(mr_ld(done), 1);
    assert_int_equal(mr_ld(&e->seq) & 1, 0);
}

/* A waker killed between its add and its wake: the bump of all that ends a recovery wakes the sleeper; without one, the deadline. */
TEST(test_dead_waker)
{
#ifdef MR_FAULT_POINTS
    static const char *const at[] = {"ipc.evc.added:1", "ipc.evc.cleared:1"};
    struct mr_evc *e = &g.s.hdr->evc[MR_TARGET];
    uint64_t *done = &g.s.actors[1].note;

    e->late = 0;
    for (size_t i = 0; i < 4; i++) {
        pid_t asleep, waker;
        int status;

        mr_st(done, 0);
        asleep = sleeper(e, 500, done);
        while (!(mr_ld(&e->seq) & 1) || !is_asleep(asleep))
            sched_yield();
        waker = fork();
        if (waker == 0) {
            setenv("MR_FAULT", at[i % 2], 1);
            mr_point_init("feeder");
            mr_evc_bump(e);
            _exit(0);
        }
        waitpid(waker, &status, 0);
        assert_true(WIFSIGNALED(status));
        if (i < 2)
            mr_evc_bump_all(&g.s);
        waitpid(asleep, &status, 0);
        assert_int_equal(status, 0);
        assert_int_equal(mr_ld(done), 1);
        assert_int_equal(mr_ld(&e->late), i < 2 ? 0 : i - 1);
    }
#else
    skip();
#endif
}

/* Signals at any moment neither end a wait early nor lose a wake-up. */
static void on_alarm(int sig) { (void)sig; }

TEST(test_signals)
{
    struct mr_evc *e = &g.s.hdr->evc[MR_TARGET];
    struct sigaction sa = {.sa_handler = on_alarm};
    pid_t parent = getpid(), pid;
    uint32_t seq = mr_evc_read(e);
    int rc, status;

    sigaction(SIGUSR1, &sa, NULL);
    pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        for (int i = 0; i < 200; i++) {
            kill(parent, SIGUSR1);
            usleep(100);
        }
        mr_evc_bump(e);
        _exit(0);
    }
    while ((rc = mr_evc_wait(&g.s, e, seq, 500, NULL, MR_WAIT_INPUT)) == -ETIMEDOUT)
        ;
    assert_int_equal(rc, 0);
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
        ;
    assert_int_equal(status, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_returns),   cmocka_unit_test(test_stall_since),    cmocka_unit_test(test_names),
        cmocka_unit_test(test_pingpong),  cmocka_unit_test(test_pingpong_wraps), cmocka_unit_test(test_crowd),
        cmocka_unit_test(test_dead_sleeper), cmocka_unit_test(test_dead_waker),  cmocka_unit_test(test_signals),
    };

    return cmocka_run_group_tests(tests, make_group, drop_group);
}
