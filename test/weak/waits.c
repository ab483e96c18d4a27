/* Scenarios: the event count.  Time stands still, so a wake-up that is lost is a deadlock. */
#include "test/weak/world.h"

static void s_wait(void) { world_make(1, 1, 1, 2); }

static struct mr_evc *evc(void) { return &w.s.hdr->evc[MR_DRAFTER]; }

/* As wait.h says: count, condition, wait. */
static void sleep_until(unsigned flags)
{
    for (;;) {
        uint32_t seq = mr_evc_read(evc());
        unsigned i = 0;

        while (i < flags && mr_ld(&w.pay->flag[i]))
            i++;
        if (i == flags)
            return;
        mw_quiet();                       /* the spin before the sleep sees nothing new */
        mr_evc_wait(&w.s, evc(), seq, 500, NULL, MR_WAIT_READY);
    }
}
static void change(unsigned i)
{
    mr_st(&w.pay->flag[i], (uint64_t)1);
    mr_evc_bump(evc());
}
static void t_sleep1(void) { sleep_until(1); }
static void t_sleep2(void) { sleep_until(2); }
static void t_wake0(void) { change(0); }
static void t_wake1(void) { change(1); }
static void t_wake01(void) { change(0), change(1); }

/* The other order: the bump may be all that the sleeper ever hears. */
static void t_bump_first(void)
{
    mr_evc_bump(evc());
    mr_st(&w.pay->flag[0], (uint64_t)1);
}

/* A sleeper that reads the count after its condition. */
static void t_count_late(void)
{
    for (;;) {
        uint64_t set = mr_ld(&w.pay->flag[0]);
        uint32_t seq = mr_evc_read(evc());

        if (set)
            return;
        mw_quiet();
        mr_evc_wait(&w.s, evc(), seq, 500, NULL, MR_WAIT_READY);
    }
}
static void t_wake_all(void)
{
    mr_st(&w.pay->flag[0], (uint64_t)1);
    mr_evc_bump_all(&w.s);
}

static void s_wrap(void)
{
    s_wait();
    evc()->seq = 0u - 2u;
}

const struct mw_scenario wait_scenarios[] = {
    {"wait: one sleeper, one waker", 2, s_wait, {t_sleep1, t_wake0}, NULL, 0},
    {"wait: one sleeper, one waker, the count wraps", 2, s_wrap, {t_sleep1, t_wake0}, NULL, 0},
    {"wait: one sleeper, two wakers", 3, s_wait, {t_sleep2, t_wake0, t_wake1}, NULL, 0},
    {"wait: one sleeper, two changes", 2, s_wait, {t_sleep2, t_wake01}, NULL, 0},
    {"wait: two sleepers, one waker", 3, s_wait, {t_sleep1, t_sleep1, t_wake0}, NULL, 0},
    {"wait: one sleeper, bump of all", 2, s_wait, {t_sleep1, t_wake_all}, NULL, 0},
    {"wait: MUTANT bump before the change", 2, s_wait, {t_sleep1, t_bump_first}, NULL, 1},
    {"wait: MUTANT count read after the condition", 2, s_wait, {t_count_late, t_wake0}, NULL, 1},
    {NULL, 0, NULL, {NULL}, NULL, 0},
};
