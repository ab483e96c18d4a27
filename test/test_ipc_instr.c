/* Death and pauses between any two INSTRUCTIONS, by single-stepping a child with ptrace (x86-64).
 *
 * kill:   a miniature run is played by one process, which is killed after k instructions; the actor whose turn it was is recovered and
 *         another process plays on.  By default positions are drawn at random (the seed is printed); MR_TEST_FULL=1 takes every one.
 * recovery: the same for the instructions of mr_recover itself, run again after its death.
 * pause:  a pusher or claimer stops after k instructions, the ring turns once round under others, then it goes on.
 */
#include "test_ipc_run.h"

#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)

#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/user.h>

/* A child stops here: before what is tested, and after it. */
static __attribute__((noinline)) void mark(void)
{
    __asm__ volatile("int3");
}

static int wait_stop(pid_t pid)
{
    int status;

    if (waitpid(pid, &status, 0) != pid)
        return -1;
    return WIFSTOPPED(status) ? WSTOPSIG(status) : -1;
}

static unsigned long rip_of(pid_t pid)
{
    return (unsigned long)ptrace(PTRACE_PEEKUSER, pid, (void *)offsetof(struct user_regs_struct, rip), 0);
}

/* Runs the traced child to its next mark(). */
static int to_mark(pid_t pid)
{
    ptrace(PTRACE_CONT, pid, 0, 0);
    return wait_stop(pid) == SIGTRAP;
}

#ifdef MR_FAULT_POINTS
static long code_at(pid_t pid, unsigned long at)
{
    return ptrace(PTRACE_PEEKTEXT, pid, (void *)at, 0);
}

/* Fault points are no part of what is tested: from the entry of one, run to its return. */
static void skip_point(pid_t pid)
{
    struct user_regs_struct g;
    unsigned long back;
    long code;

    if (rip_of(pid) != (unsigned long)mr_point_hit)
        return;
    ptrace(PTRACE_GETREGS, pid, 0, &g);
    back = (unsigned long)code_at(pid, g.rsp);
    code = code_at(pid, back);
    ptrace(PTRACE_POKETEXT, pid, (void *)back, (void *)((code & ~0xffl) | 0xcc));
    ptrace(PTRACE_CONT, pid, 0, 0);
    assert_int_equal(wait_stop(pid), SIGTRAP);
    ptrace(PTRACE_POKETEXT, pid, (void *)back, (void *)code);
    ptrace(PTRACE_GETREGS, pid, 0, &g);
    g.rip = back;
    ptrace(PTRACE_SETREGS, pid, 0, &g);
}
#else
static void skip_point(pid_t pid)
{
    (void)pid;
}
#endif

/* Steps at most `limit` instructions, stopping before the next mark().  Number done. */
static long steps(pid_t pid, long limit)
{
    long n = 0;

    for (; n < limit; n++) {
        skip_point(pid);
        if (rip_of(pid) == (unsigned long)mark)
            break;
        ptrace(PTRACE_SINGLESTEP, pid, 0, 0);
        assert_int_equal(wait_stop(pid), SIGTRAP);
    }
    return n;
}

static void finish(pid_t pid)
{
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
}

/* ---- kill -------------------------------------------------------------------------------------------------------------------- */

/* Actor (or MINI_SUP) of turn t, round robin, the supervisor first. */
static unsigned actor_of(struct mini *m, unsigned t)
{
    unsigned n = 2 + m->r.T + m->r.D, i = t % n;

    return i ? i - 1 : MINI_SUP;
}

static void one_turn(struct mini *m, unsigned t)
{
    m->current = actor_of(m, t);
    if (m->current == MINI_SUP)
        supervisor_turn(m);
    else
        mini_turn(m, m->current);
}

static void play_from(struct mini *m, unsigned t, unsigned turns)
{
    for (unsigned end = t + turns; t < end && !mini_finished(m); t++)
        one_turn(m, t);
}

/* A child that stands before the instructions of turn t (or of recovery after `t` turns with the actor of turn t dead). */
static pid_t victim(struct mini *m, unsigned t, int recovery)
{
    pid_t pid = fork();

    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        ptrace(PTRACE_TRACEME, 0, 0, 0);
        play_from(m, 0, t);
        mark();
        if (recovery)
            mr_recover(&m->r.s, actor_of(m, t), 1);
        else
            one_turn(m, t);
        mark();
        _exit(0);
    }
    assert_int_equal(wait_stop(pid), SIGTRAP);
    return pid;
}

/* A plain child plays to the end. */
static void play_on(struct mini *m)
{
    pid_t pid = fork();
    int status;

    if (pid == 0) {
        alarm(20);
        play_from(m, 0, 3000);
        _exit(0);
    }
    waitpid(pid, &status, 0);
    assert_int_equal(status, 0);
}

static struct mini *small_run(unsigned det) { return mini_make(2, 2, 3, 3, 1, 7, det); }

/* Turns of a whole run that do not stop in front of an already FINISHED one. */
static unsigned turns_of_run(unsigned det)
{
    struct mini *m = small_run(det);
    unsigned t = 0;

    while (!mini_finished(m))
        one_turn(m, t++);
    mini_drop(m);
    return t;
}

static void death_at(unsigned det, unsigned t, long k, int recovery)
{
    struct mini *m = small_run(det);
    pid_t pid = victim(m, t, recovery);
    unsigned dead = actor_of(m, t);

    steps(pid, k);
    finish(pid);
    if (dead != MINI_SUP) {
        mr_recover(&m->r.s, dead, 1);
        memset(&m->local[dead], 0, sizeof m->local[dead]);
        m->r.s.actors[dead].incarnation++;
    }
    play_on(m);
    if (m->bad || !mini_finished(m)) {
        mr_dump_all(&m->r.s, stderr);
        fail_msg("turn %u, actor %u, after %ld instructions%s", t, dead, k, recovery ? " of recovery" : "");
    }
    mini_check(m);
    mini_drop(m);
}

static long length_of(unsigned det, unsigned t, int recovery)
{
    struct mini *m = small_run(det);
    pid_t pid = victim(m, t, recovery);
    long n = steps(pid, 1000000);

    finish(pid);
    mini_drop(m);
    return n;
}

/* All positions of a turn, or `some` of them at random. */
static unsigned deaths_in_turn(unsigned det, unsigned t, int recovery, unsigned some)
{
    long n = length_of(det, t, recovery);
    unsigned done = 0;

    for (; !some && done <= n; done++)
        death_at(det, t, done, recovery);
    for (; done < some; done++)
        death_at(det, t, rand() % (n + 1), recovery);
    return done;
}

static void deaths(unsigned det, int recovery, unsigned samples)
{
    unsigned turns = turns_of_run(det), seed = (unsigned)getpid(), done = 0;
    int full = getenv("MR_TEST_FULL") != NULL;

    STRESS();
    srand(seed);
    for (unsigned i = 0; full ? i < turns : done < samples; i++) {
        unsigned t = full ? i : (unsigned)rand() % turns;

        if (!recovery || t % 6)            /* nobody recovers a supervisor */
            done += deaths_in_turn(det, t, recovery, full ? 0 : 4);
    }
    print_message("%u turns, seed %u, %u positions%s\n", turns, seed, done, full ? " (all)" : "");
}

TEST(test_kill) { deaths(0, 0, 400); }
TEST(test_kill_deterministic) { deaths(1, 0, 100); }
TEST(test_kill_recovery) { deaths(0, 1, 150); }

/* ---- pause ------------------------------------------------------------------------------------------------------------------ */

enum { IN = MR_RING_INPUT };

/* Takes what is there; counts claims per publication (position). */
static void claim_all(struct rig *r, uint8_t *claimed)
{
    uint64_t w;

    while (mr_ring_claim(&r->s, IN, MR_EXTRACTING, 1, 1, &w) >= 0)
        claimed[mr_w_pos(w)]++;
}

static void publish(struct rig *r, unsigned idx, unsigned pos)
{
    uint64_t w = mr_w_item(MR_QUEUED, MR_NO_SLOT, 0, pos, 1);

    mr_st(&r->s.items[idx].word, w);
    assert_int_equal(mr_ring_push(&r->s, IN, idx, w), 0);
}

/* Position 1 is the victim's, positions from 2 on are ours.  1 = position k exists. */
static int paused_at(long k, int pushing, unsigned laps)
{
    uint8_t *claimed = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    struct rig r;
    unsigned pos = 2, cap;
    pid_t pid;
    long n;

    rig_make(&r, 1, 1, 2, 4, 1, 8);
    cap = r.s.hdr->ring_cap;
    if (!pushing)
        publish(&r, 0, 1);
    pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        ptrace(PTRACE_TRACEME, 0, 0, 0);
        mark();
        if (pushing) {
            publish(&r, 0, 1);
        } else {
            uint64_t w;

            if (mr_ring_claim(&r.s, IN, MR_EXTRACTING, 2, 1, &w) >= 0)
                claimed[mr_w_pos(w)]++;
        }
        mark();
        _exit(0);
    }
    assert_int_equal(wait_stop(pid), SIGTRAP);
    n = steps(pid, k);
    for (unsigned i = 0; i < laps * cap + 3; i++) {
        publish(&r, 1 + i % 3, pos++);
        claim_all(&r, claimed);
    }
    publish(&r, 1, pos++);                 /* one of ours is in the ring while it goes on */
    assert_true(to_mark(pid));
    claim_all(&r, claimed);
    if (mr_ring_live(&r.s, IN))
        fail_msg("live cell left behind: paused after %ld", k);
    for (unsigned p = 1; p < pos; p++)
        if (claimed[p] != 1)
            fail_msg("position %u claimed %u times: paused after %ld, %u laps", p, claimed[p], k, laps);
    finish(pid);
    rig_drop(&r);
    munmap(claimed, 4096);
    return n == k;
}

static void pauses(int pushing)
{
    long k = 0;

    STRESS();
    for (; paused_at(k, pushing, 1); k++)
        paused_at(k, pushing, 0);
    print_message("%ld positions\n", k);
    assert_true(k > 20);
}

TEST(test_paused_push) { pauses(1); }
TEST(test_paused_claim) { pauses(0); }

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_paused_push), cmocka_unit_test(test_paused_claim),  cmocka_unit_test(test_kill),
        cmocka_unit_test(test_kill_deterministic), cmocka_unit_test(test_kill_recovery),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

#else
int main(void)
{
    puts("skipped: single-stepping needs x86-64 and a build without sanitizers");
    return 77;
}
#endif
