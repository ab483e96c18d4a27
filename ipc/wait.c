/* The wait primitive: an event count in one futex word (see wait.h for how to use it).
 *
 * Word = count in steps of 2 | bit 0 "somebody may sleep".  A waiter sets bit 0 by an atomic or, and sleeps only if the count is still
 * the one it read before it looked at its condition.  A waker adds 2; when bit 0 was set it clears it and wakes everybody.  Both are
 * read-modify-writes of ONE word, so they have a total order:
 *   add before or  -> the or returns a changed count: the waiter does not sleep;
 *   or before add  -> the add returns bit 0: the waker wakes, and a waiter that has not reached the kernel yet finds a changed word there.
 * The add is a release and the reads of the count are acquires (edge W1): what was changed before the bump is seen after it.
 *
 * Limits: a waker killed between its add and its wake leaves sleepers behind; the deadline (MR_PARK_MS) and the wake of all that ends
 * every recovery cover that.  The count wraps after 2^31 bumps: a waiter would have to be stopped for exactly so many, and would then
 * sleep MR_PARK_MS too long.  Futexes are shared ones (no FUTEX_PRIVATE_FLAG): the word is in memory of several processes.
 */
#include "ipc/wait.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/point.h"
#include "ipc/atomic.h"

enum { SLEEPERS = 1u, SPINS = 128 };

static inline void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

uint32_t mr_evc_read(const struct mr_evc *e)
{
    return mr_ld(&e->seq) & ~(uint32_t)SLEEPERS;   /* W1, acquire end */
}

static void wake_all(struct mr_evc *e)
{
    syscall(SYS_futex, &e->seq, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void mr_evc_bump(struct mr_evc *e)
{
    if (!(mr_add(&e->seq, 2) & SLEEPERS))          /* W1, release end */
        return;
    MR_POINT("ipc.evc.added");
    __atomic_fetch_and(&e->seq, ~(uint32_t)SLEEPERS, __ATOMIC_ACQ_REL);
    MR_POINT("ipc.evc.cleared");
    wake_all(e);
}

void mr_evc_bump_all(const struct mr_seg *s)
{
    /* Wakes even where bit 0 is clear: a waker may have died between clearing it and its wake. */
    for (unsigned k = 0; k <= MR_KINDS; k++) {
        struct mr_evc *e = k < MR_KINDS ? &s->hdr->evc[k] : &s->hdr->evc_sup;

        mr_add(&e->seq, 2);
        wake_all(e);
    }
}

/* 0 = the count moved, 1 = not yet, -ECANCELED. */
static int look(const struct mr_seg *s, const struct mr_evc *e, uint32_t seq)
{
    if (mr_ld(&s->hdr->abort))
        return -ECANCELED;
    return mr_evc_read(e) == seq;
}

static int park(const struct mr_seg *s, struct mr_evc *e, uint32_t seq, uint64_t until_ns)
{
    const struct timespec at = {(time_t)(until_ns / 1000000000u), (long)(until_ns % 1000000000u)};
    int rc;

    while ((rc = look(s, e, seq)) == 1) {
        if (mr_now_ns() >= until_ns)
            return -ETIMEDOUT;
        MR_POINT("ipc.evc.park");
        if ((__atomic_fetch_or(&e->seq, SLEEPERS, __ATOMIC_ACQ_REL) & ~(uint32_t)SLEEPERS) != seq)
            continue;
        MR_POINT("ipc.evc.announced");
        /* Absolute deadline: EINTR and spurious wake-ups just go round. */
        rc = (int)syscall(SYS_futex, &e->seq, FUTEX_WAIT_BITSET, seq | SLEEPERS, &at, NULL, FUTEX_BITSET_MATCH_ANY);
        if (rc < 0 && errno == ETIMEDOUT && mr_evc_read(e) != seq)
            mr_add_relaxed(&e->late, 1);           /* relaxed: a statistic */
    }
    return rc;
}

static int spin_then_park(const struct mr_seg *s, struct mr_evc *e, uint32_t seq, uint64_t until_ns)
{
    for (int i = 0; i < SPINS; i++) {
        int rc = look(s, e, seq);

        if (rc != 1)
            return rc;
        relax();
    }
    return park(s, e, seq, until_ns);
}

/* Row fields are relaxed: one writer, and readers only display them. */
static void begin_wait(struct mr_actor_row *me, enum mr_wait_reason why, uint64_t now)
{
    uint64_t progress = mr_ld_relaxed(&me->progress);

    /* A wait that is taken up again without progress in between is one stall, with one beginning. */
    if (mr_ld_relaxed(&me->stall_reason) != (uint32_t)why || mr_ld_relaxed(&me->stall_progress) != progress ||
        !mr_ld_relaxed(&me->wait_since_ns)) {
        mr_st_relaxed(&me->stall_reason, (uint32_t)why);
        mr_st_relaxed(&me->stall_progress, progress);
        mr_st_relaxed(&me->wait_since_ns, now);
    }
    mr_st_relaxed(&me->wait_reason, (uint32_t)why);
}

static void end_wait(struct mr_actor_row *me, enum mr_wait_reason why, uint64_t begun)
{
    mr_st_relaxed(&me->wait_ns[why], mr_ld_relaxed(&me->wait_ns[why]) + (mr_now_ns() - begun));
    mr_st_relaxed(&me->wait_reason, (uint32_t)MR_WAIT_NONE);
}

int mr_evc_wait(const struct mr_seg *s, struct mr_evc *e, uint32_t seq, unsigned timeout_ms, struct mr_actor_row *me,
                enum mr_wait_reason why)
{
    uint64_t now = mr_now_ns();
    int rc;

    if (timeout_ms > MR_PARK_MS)
        timeout_ms = MR_PARK_MS;
    if (me)
        begin_wait(me, why, now);
    rc = spin_then_park(s, e, seq, now + (uint64_t)timeout_ms * 1000000u);
    if (me)
        end_wait(me, why, now);
    return rc;
}

const char *mr_wait_name(enum mr_wait_reason why)
{
    static const char *const name[] = {"busy", "input", "slab", "item", "ready", "place", "reduce", "apply",
                                       "repair", "ledger", "ckpt", "epoch", "end", "peer", "arena", "weights",
                                       "turn"};

    _Static_assert(sizeof name / sizeof name[0] == MR_WAIT_REASONS, "one name per reason");
    return (unsigned)why < MR_WAIT_REASONS ? name[why] : "?";
}
