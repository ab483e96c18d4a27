/* Lost wake-ups and counters at their end.
 *
 *   waiter     a child waits on an event count and is stopped after instruction k; then the count is bumped, with and without a signal
 *              delivered there; it must come back
 *   waker      a child bumps and is stopped after instruction k; meanwhile another one waits; when the waker goes on, it must come back
 *   sleeper    asleep in the kernel, signals and SIGSTOP/SIGCONT before and after the bump
 *   full/empty feeders and targets over few items, mostly exactly full or exactly empty, all of them under a storm of signals and stopped
 *              at random, the event counts about to wrap
 *   counters   publication and collective epoch at their maximum, in every operation and recovery that would add to them: fatal, no wrap
 * A lost wake-up is a sleep that only the deadline ended although the count had moved (evc->late).  On a machine that stands still for that
 * long it can be a false alarm, so a position counts as lost when it is so in five attempts: a lost wake-up is lost every time.
 */
#include <sched.h>
#include <sys/time.h>

#include "test/stress/ptrace_step.h"
#include "test/test_ipc.h"

enum { ATTEMPTS = 5, SPIN_STRIDE = 41, EVERY_FIRST = 40, EVERY_LAST = 160, TRANSFERS = 60000 };

static struct rig g;
static struct mr_evc *e;
static uint64_t *flag;                    /* the condition: in shared memory */
static uint32_t first_seq;

static int make_group(void **state)
{
    (void)state;
    rig_make(&g, 2, 2, 4, 5, 1, 8);
    e = &g.s.hdr->evc[MR_TARGET];
    flag = &g.s.actors[0].note;
    return 0;
}

static int drop_group(void **state)
{
    (void)state;
    rig_drop(&g);
    return 0;
}

static void nothing(int sig) { (void)sig; }

static void handle(int sig)
{
    struct sigaction sa = {.sa_handler = nothing};    /* no SA_RESTART */

    sigaction(sig, &sa, NULL);
}

static void reset(void)
{
    mr_st(flag, (uint64_t)0);
    mr_st(&e->seq, 0u - 2u);                          /* the next bump wraps */
    mr_st(&e->late, 0u);
}

static int private_memory(uint64_t address)
{
    (void)address;
    return 0;
}

/* As wait.h says. */
static int wait_for_flag(void *arg)
{
    (void)arg;
    for (;;) {
        uint32_t seq = mr_evc_read(e);

        if (mr_ld(flag))
            return 0;
        if (mr_evc_wait(&g.s, e, seq, 500, NULL, MR_WAIT_READY) == -ETIMEDOUT && mr_ld(flag))
            mr_add(&e->late, 1);                      /* slept through it, and has not noticed */
    }
}

static void change(void)
{
    mr_st(flag, (uint64_t)1);
    mr_evc_bump(e);
}

static int change_and_end(void *arg)
{
    (void)arg;
    change();
    return 0;
}

/* ---- the waiter is stopped ----------------------------------------------------------------------------------------------------- */

static int at_syscall(pid_t pid)
{
    struct user_regs_struct r;
    const uint8_t *text;

    ptrace(PTRACE_GETREGS, pid, 0, &r);
    text = (const uint8_t *)(uintptr_t)r.rip;
    return text[0] == 0x0f && text[1] == 0x05 && r.rax == 202;    /* futex: the next instruction sleeps */
}

/* Instructions from the marker to the futex call. */
static long length_of_wait(void)
{
    pid_t pid;
    long n = 0;

    reset();
    pid = step_start(wait_for_flag, NULL);
    while (!at_syscall(pid)) {
        assert_int_equal(step_one(pid, private_memory), STEP_ON);
        n++;
    }
    step_kill(pid);
    return n;
}

/* Runs a traced child from where it is to its second marker. */
static int runs_to_its_end(pid_t pid, int signal)
{
    int sig;

    for (;;) {
        ptrace(PTRACE_CONT, pid, 0, (void *)(intptr_t)signal);
        sig = step_stopped_by(pid);
        if (sig != SIGUSR1)
            break;
        signal = sig;                                 /* one that was sent meanwhile */
    }
    step_kill(pid);
    return sig == SIGTRAP;
}

enum when { NO_SIGNAL, SIGNAL_BEFORE, SIGNAL_AFTER, WHENS };

/* 1 = it came back without the deadline's help.  The clock's reads make the way to the sleep an instruction or two longer or shorter from time
 * to time: k is not walked beyond the sleep, which would last until the deadline while nothing has changed yet. */
static int stopped_waiter(long k, enum when signal)
{
    pid_t pid;

    reset();
    pid = step_start(wait_for_flag, NULL);
    for (long i = 0; i < k && !at_syscall(pid); i++)
        assert_int_equal(step_one(pid, private_memory), STEP_ON);
    if (signal == SIGNAL_BEFORE)
        kill(pid, SIGUSR1);
    change();
    assert_true(runs_to_its_end(pid, signal == SIGNAL_AFTER ? SIGUSR1 : 0));
    return mr_ld(&e->late) == 0;
}

static void never_lost(int (*attempt)(long, enum when), long k, enum when how, const char *what)
{
    for (int i = 0; i < ATTEMPTS; i++)
        if (attempt(k, how))
            return;
    fail_msg("%s: a wake-up is lost at instruction %ld, signal %d", what, k, how);
}

TEST(test_waiter)
{
    long n = length_of_wait(), positions = 0;

    handle(SIGUSR1);
    for (long k = 0; k <= n; k++) {
        if (k >= EVERY_FIRST && k < n - EVERY_LAST && k % SPIN_STRIDE)
            continue;                                 /* the spin goes round and round */
        for (enum when s = NO_SIGNAL; s < WHENS; s++, positions++)
            never_lost(stopped_waiter, k, s, "waiter");
    }
    print_message("waiter: %ld instructions to the sleep, %ld stops\n", n, positions);
}

/* ---- the waker is stopped ------------------------------------------------------------------------------------------------------- */

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

static int is_over(pid_t pid)
{
    siginfo_t info = {0};

    return waitid(P_PID, (id_t)pid, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == pid;
}

/* Waits for the count to differ from what it was before everything began. */
static pid_t waiter(void)
{
    pid_t pid = fork();

    if (pid)
        return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    while (mr_evc_wait(&g.s, e, first_seq, 500, NULL, MR_WAIT_READY) != 0)
        ;
    _exit(0);
}

static void until_asleep(pid_t pid)
{
    while (!is_over(pid) && !is_asleep(pid))
        sched_yield();
}

/* `before`: it sleeps before the waker begins (else it begins when the waker is stopped). */
static int stopped_waker(long k, enum when before)
{
    pid_t sleeper = 0, waker;
    int status;

    reset();
    first_seq = mr_evc_read(e);
    if (before) {
        sleeper = waiter();
        until_asleep(sleeper);
    } else {
        mr_st(&e->seq, mr_ld(&e->seq) | 1);           /* so that the waker takes the long way: somebody slept once */
    }
    waker = step_start(change_and_end, NULL);
    assert_true(step_to(waker, k, private_memory) >= 0);
    if (!before) {
        sleeper = waiter();
        until_asleep(sleeper);
    }
    assert_true(runs_to_its_end(waker, 0));
    waitpid(sleeper, &status, 0);
    assert_int_equal(status, 0);
    return mr_ld(&e->late) == 0;
}

TEST(test_waker)
{
    long n = 0;
    pid_t pid;

    reset();
    mr_st(&e->seq, mr_ld(&e->seq) | 1);
    pid = step_start(change_and_end, NULL);
    while (step_one(pid, private_memory) == STEP_ON)
        n++;
    step_kill(pid);
    for (long k = 0; k <= n; k++)
        for (int before = 0; before < 2; before++)
            never_lost(stopped_waker, k, (enum when)before, "waker");
    print_message("waker: %ld instructions, %ld stops\n", n, 2 * (n + 1));
}

/* ---- asleep ------------------------------------------------------------------------------------------------------------------------ */

static int disturbed_sleeper(long how, enum when unused)
{
    static const int order[][4] = {{0}, {SIGUSR1, 0}, {SIGSTOP, 0, SIGCONT}, {SIGSTOP, SIGCONT, 0}, {SIGUSR1, SIGSTOP, 0, SIGCONT},
                                   {SIGSTOP, SIGUSR1, SIGCONT, 0}, {0, SIGUSR1}};
    const int bump_at[] = {0, 1, 1, 2, 2, 3, 0};
    pid_t pid;
    int status;

    (void)unused;
    reset();
    first_seq = mr_evc_read(e);
    pid = waiter();
    until_asleep(pid);
    for (int i = 0; i < 4; i++) {
        if (i == bump_at[how])
            mr_evc_bump(e);
        if (order[how][i])
            kill(pid, order[how][i]);
        if (order[how][i] && i < bump_at[how])
            usleep(500);
    }
    waitpid(pid, &status, 0);
    assert_int_equal(status, 0);
    return mr_ld(&e->late) == 0;
}

TEST(test_sleeper)
{
    handle(SIGUSR1);
    for (long how = 0; how < 7; how++)
        for (int i = 0; i < 20; i++)
            never_lost(disturbed_sleeper, how, NO_SIGNAL, "sleeper");
}

/* ---- exactly full, exactly empty ----------------------------------------------------------------------------------------------------- */

static void storm(void)
{
    const struct itimerval it = {{0, 300}, {0, 300}};

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    handle(SIGALRM);
    setitimer(ITIMER_REAL, &it, NULL);
}

/* Positions start, start + 2, ...; waits when no item is free. */
static pid_t feeder(struct rig *r, unsigned start)
{
    struct mr_evc *mine = &r->s.hdr->evc[MR_FEEDER];
    pid_t pid = fork();

    if (pid)
        return pid;
    storm();
    for (unsigned pos = start; pos < TRANSFERS; pos += 2) {
        uint64_t w;
        int idx;

        for (;;) {
            uint32_t seq = mr_evc_read(mine);

            idx = mr_item_fill(&r->s, 0, start + 1, pos, &w);
            if (idx >= 0)
                break;
            mr_evc_wait(&r->s, mine, seq, 500, NULL, MR_WAIT_ITEM);
        }
        if (mr_item_queue(&r->s, (unsigned)idx, &w))
            _exit(1);
    }
    _exit(0);
}

/* Claims until all are there; waits when the ring is empty.  seen[]: how often each position was claimed. */
static pid_t target(struct rig *r, unsigned slot, uint64_t *claimed, uint8_t *seen)
{
    struct mr_evc *mine = &r->s.hdr->evc[MR_TARGET];
    pid_t pid = fork();

    if (pid)
        return pid;
    storm();
    while (mr_ld(claimed) < TRANSFERS) {
        uint32_t seq = mr_evc_read(mine);
        uint64_t w;
        int idx = mr_item_extract(&r->s, slot, 1, &w);

        if (idx < 0) {
            if (mr_ld(claimed) < TRANSFERS)
                mr_evc_wait(&r->s, mine, seq, 500, NULL, MR_WAIT_INPUT);
            continue;
        }
        __atomic_fetch_add(&seen[mr_w_pos(w)], 1, __ATOMIC_RELAXED);
        if (!mr_cas(&r->s.items[idx].word, w, mr_w_item(MR_FREE, MR_NO_SLOT, 0, mr_w_pos(w), 1)))
            _exit(1);
        mr_evc_bump(&r->s.hdr->evc[MR_FEEDER]);
        if (mr_add(claimed, 1) + 1 == TRANSFERS)
            mr_evc_bump(mine);
    }
    _exit(0);
}

static unsigned stop_at_random(pid_t *pid, unsigned n)
{
    unsigned stops = 0;

    for (unsigned left = n; left;) {
        unsigned i = (unsigned)rand() % n;

        if (pid[i] && is_over(pid[i])) {
            int status;

            waitpid(pid[i], &status, 0);
            assert_int_equal(status, 0);
            pid[i] = 0;
            left--;
        } else if (pid[i] && rand() % 2) {
            kill(pid[i], SIGSTOP);
            usleep((unsigned)rand() % 2000);
            kill(pid[i], SIGCONT);
            stops++;
        }
        usleep((unsigned)rand() % 300);
    }
    return stops;
}

TEST(test_full_and_empty)
{
    struct rig r;
    pid_t pid[4];
    unsigned stops, late, seed = (unsigned)getpid();
    uint64_t *claimed;
    uint8_t *seen;

    print_message("seed %u\n", seed);
    srand(seed);
    rig_make(&r, 2, 1, 2, 1, 1, TRANSFERS / 8);       /* five items */
    seen = (uint8_t *)r.s.plan;                       /* the plan is not used here */
    assert_true(r.s.plan_bytes > TRANSFERS + 64);
    memset(seen, 0, r.s.plan_bytes);
    claimed = &r.s.actors[1].note;
    for (unsigned k = 0; k < MR_KINDS; k++)
        r.s.hdr->evc[k].seq = 0u - 2000u;
    pid[0] = feeder(&r, 0), pid[1] = feeder(&r, 1);
    pid[2] = target(&r, 1, claimed, seen), pid[3] = target(&r, 2, claimed, seen);
    stops = stop_at_random(pid, 4);
    late = r.s.hdr->evc[MR_FEEDER].late + r.s.hdr->evc[MR_TARGET].late;
    for (unsigned i = 0; i < TRANSFERS; i++)
        assert_int_equal(seen[i], 1);
    assert_int_equal(rig_count(&r, MR_FREE), r.s.hdr->n_items);
    print_message("%u stops, %u sleeps ended by the deadline\n", stops, late);
    assert_true(late <= stops);                       /* a waker that stood between its add and its wake */
    rig_drop(&r);
}

/* ---- counters at their maximum --------------------------------------------------------------------------------------------------- */

/* Item 0 in `phase` with the last publication; its slab is 0. */
static uint64_t last_publication(struct rig *r, enum mr_phase phase, unsigned slot)
{
    uint64_t w = mr_w_item(phase, slot, slot == MR_NO_SLOT ? 0 : 1, 3, MR_PUB_MAX);

    r->s.items[0].generation = 1;
    r->s.items[0].slab = 0;
    r->s.slabs[0].word = mr_w_slab_item(0, 3);
    mr_st(&r->s.items[0].word, w);
    mr_st(&r->s.hdr->fatal, 0u);
    return w;
}

/* Fatal, and the item is where it was. */
static void saturated(struct rig *r, uint64_t w)
{
    assert_int_equal(r->s.hdr->fatal, 1);
    assert_true(mr_ld(&r->s.items[0].word) == w);
    for (unsigned i = 0; i < mr_ring_count(&r->s); i++)
        assert_int_equal(mr_ring_live(&r->s, i), 0);
}

TEST(test_publication)
{
    struct rig r;
    uint64_t w, v;

    rig_make(&r, 1, 1, 2, 4, 1, 8);
    r.s.hdr->cursor = 8;
    v = w = last_publication(&r, MR_FILLING, 0);
    assert_int_equal(mr_item_queue(&r.s, 0, &v), -EOVERFLOW);
    saturated(&r, w);
    w = last_publication(&r, MR_FILLING, 0);
    assert_int_equal(mr_recover_feeder(&r.s, 0, 1).items, 0);
    saturated(&r, w);
    v = w = last_publication(&r, MR_EXTRACTING, 1);
    assert_int_equal(mr_item_ready(&r.s, 0, &v), -EOVERFLOW);
    saturated(&r, w);
    w = last_publication(&r, MR_EXTRACTING, 1);
    assert_int_equal(mr_recover_target(&r.s, 1, 1).items, 0);
    saturated(&r, w);
    w = last_publication(&r, MR_DRAFTING, rig_drafter(&r, 0));
    assert_int_equal(mr_recover_drafter(&r.s, rig_drafter(&r, 0), 1).items, 0);
    saturated(&r, w);
    w = last_publication(&r, MR_ACCUMULATED, rig_drafter(&r, 0));
    assert_int_equal(mr_recover_drafter(&r.s, rig_drafter(&r, 0), 1).items, 0);
    saturated(&r, w);
    last_publication(&r, MR_READY, MR_NO_SLOT);
    w = mr_ld(&r.s.items[0].word);
    assert_int_equal(mr_recover_arena(&r.s, 0).items, 0);
    saturated(&r, w);
    rig_drop(&r);
}

/* The epoch cannot move, so nothing may be given back: a survivor could sum what is not there. */
TEST(test_collective_epoch)
{
    struct rig r;
    unsigned d;

    rig_make(&r, 1, 2, 2, 4, 1, 8);
    d = rig_drafter(&r, 1);
    for (unsigned phase = MR_COLLECT; phase <= MR_HALT; phase++) {
        uint64_t sw = mr_w_step(phase, 0, MR_CEPOCH_MAX, 0, 0), w = mr_w_item(MR_ACCUMULATED, d, 1, 3, 2);
        uint64_t p = mr_w_place(MR_PLACE_DONE, 0, d, 1);

        mr_st(&r.s.hdr->fatal, 0u);
        r.s.step->word = sw;
        r.s.items[0].word = w;
        r.s.places[1].word = p;
        mr_recover_drafter(&r.s, d, 1);
        assert_int_equal(r.s.hdr->fatal, 1);
        assert_true(r.s.step->word == sw && r.s.items[0].word == w && r.s.places[1].word == p);
        assert_int_equal(r.s.actors[d].joined, 1);
    }
    rig_drop(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_waiter),         cmocka_unit_test(test_waker),       cmocka_unit_test(test_sleeper),
        cmocka_unit_test(test_full_and_empty), cmocka_unit_test(test_publication), cmocka_unit_test(test_collective_epoch),
    };

    return cmocka_run_group_tests(tests, make_group, drop_group);
}
