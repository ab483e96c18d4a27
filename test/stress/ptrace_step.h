/* Single-stepping a child between two int3 markers, for tests that stop, signal or kill a process after instruction k.
 *
 * The child calls step_run(fn, arg); the parent sees the first marker with step_start and goes on one instruction at a time.  A `rep`
 * string instruction on private memory counts as one (a memset of a few KiB would be thousands of traps that change nothing); one on
 * shared memory traps at every iteration, because there each iteration can be seen by others.
 */
#ifndef TEST_PTRACE_STEP_H
#define TEST_PTRACE_STEP_H

#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/types.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

enum step_result { STEP_ON, STEP_END, STEP_BROKEN };

/* In the child: stop, fn(arg), stop, exit with fn's value (clipped). */
static inline void step_run(int (*fn)(void *), void *arg)
{
    int rc;

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    ptrace(PTRACE_TRACEME, 0, 0, 0);
    __asm__ volatile("int3" : : : "memory");
    rc = fn(arg);
    __asm__ volatile("int3" : : : "memory");
    _exit(rc < 0 ? 99 : rc > 90 ? 90 : rc);
}

static inline int step_stopped_by(pid_t pid)
{
    int status;

    if (waitpid(pid, &status, 0) != pid)
        return -1;
    return WIFSTOPPED(status) ? WSTOPSIG(status) : -1;
}

/* A stepped child that stands behind its first marker; or -1. */
static inline pid_t step_start(int (*fn)(void *), void *arg)
{
    pid_t pid = fork();

    if (pid == 0)
        step_run(fn, arg);
    if (pid < 0 || step_stopped_by(pid) != SIGTRAP)
        return -1;
    return pid;
}

static inline void step_kill(pid_t pid)
{
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
}

/* `rep movs/stos` at b: number of its bytes, else 0. */
static inline unsigned step_is_rep(const uint8_t *b)
{
    unsigned n = 1;

    if (b[0] != 0xf3)
        return 0;
    n += b[1] >= 0x48 && b[1] <= 0x4f;
    return b[n] == 0xa4 || b[n] == 0xa5 || b[n] == 0xaa || b[n] == 0xab ? n + 1 : 0;
}

/* Runs over a `rep` with a breakpoint behind it. */
static inline enum step_result step_over(pid_t pid, struct user_regs_struct *g, unsigned len)
{
    void *at = (void *)(uintptr_t)(g->rip + len);
    long text = ptrace(PTRACE_PEEKTEXT, pid, at, 0);

    ptrace(PTRACE_POKETEXT, pid, at, (text & ~0xffl) | 0xcc);
    ptrace(PTRACE_CONT, pid, 0, 0);
    if (step_stopped_by(pid) != SIGTRAP)
        return STEP_BROKEN;
    ptrace(PTRACE_POKETEXT, pid, at, text);
    ptrace(PTRACE_GETREGS, pid, 0, g);
    g->rip--;
    ptrace(PTRACE_SETREGS, pid, 0, g);
    return STEP_ON;
}

/* One instruction; `shared(address)` says whether others see what is there.  STEP_END: the second marker is next, nothing was done. */
static inline enum step_result step_one(pid_t pid, int (*shared)(uint64_t))
{
    struct user_regs_struct g;
    const uint8_t *text;
    unsigned rep;

    ptrace(PTRACE_GETREGS, pid, 0, &g);
    text = (const uint8_t *)(uintptr_t)g.rip;      /* the child was forked from us: its text is ours */
    if (*text == 0xcc)
        return STEP_END;
    rep = step_is_rep(text);
    if (rep && !shared(g.rdi))
        return step_over(pid, &g, rep);
    ptrace(PTRACE_SINGLESTEP, pid, 0, 0);
    return step_stopped_by(pid) == SIGTRAP ? STEP_ON : STEP_BROKEN;
}

/* Up to k instructions; the number done, less than k when the marker was met, or -1. */
static inline long step_to(pid_t pid, long k, int (*shared)(uint64_t))
{
    for (long i = 0; i < k; i++) {
        enum step_result r = step_one(pid, shared);

        if (r != STEP_ON)
            return r == STEP_END ? i : -1;
    }
    return k;
}

#endif
