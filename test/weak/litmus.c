/* Scenarios: litmus tests of the model itself.  Outcomes that C11 forbids must not be found, those that it allows must. */
#include "test/weak/world.h"

static uint64_t *const x = (uint64_t *)mw_region, *const y = (uint64_t *)(mw_region + 128);
static uint32_t *const data = (uint32_t *)(mw_region + 256);
static uint64_t a, b, c, d;

static void s_litmus(void)
{
    world_make(1, 1, 1, 2);
    a = b = c = d = 0;
    *x = *y = 0;
    *data = 0;
}

/* Message passing. */
static void t_data_release(void) { *data = 1, mr_st(x, 1); }
static void t_data_relaxed(void) { *data = 1, mr_st_relaxed(x, 1); }
static void t_acquire_data(void)
{
    if (mr_ld(x))
        MW_CHECK(*data == 1);
}
static void t_relaxed_data(void)
{
    if (mr_ld_relaxed(x))
        MW_CHECK(*data == 1);
}
/* ... through a relaxed read-modify-write of a third thread: the release sequence goes on. */
static void t_add_relaxed(void) { mr_add_relaxed(x, 2); }
static void t_acquire_sequence(void)
{
    if (mr_ld(x) & 1)
        MW_CHECK(*data == 1);
}
/* ... and over a second location: happens-before is transitive. */
static void t_relay(void)
{
    if (mr_ld(x))
        mr_st(y, 1);
}
static void t_acquire_y(void)
{
    if (mr_ld(y))
        MW_CHECK(*data == 1);
}

/* Store buffering, independent reads, two writers in two orders, coherence, atomicity. */
static void t_sb0(void) { mr_st(x, 1), a = mr_ld(y); }
static void t_sb1(void) { mr_st(y, 1), b = mr_ld(x); }
static void f_sb(void) { MW_CHECK(a || b); }
static void t_x1(void) { mr_st(x, 1); }
static void t_y1(void) { mr_st(y, 1); }
static void t_xy(void) { a = mr_ld(x), b = mr_ld(y); }
static void t_yx(void) { c = mr_ld(y), d = mr_ld(x); }
static void f_iriw(void) { MW_CHECK(!(a && !b && c && !d)); }
static void t_22w0(void) { mr_st_relaxed(x, 1), mr_st_relaxed(y, 2); }
static void t_22w1(void) { mr_st_relaxed(y, 1), mr_st_relaxed(x, 2); }
static void f_22w(void) { MW_CHECK(!(mr_ld(x) == 1 && mr_ld(y) == 1)); }
static void t_x12(void) { mr_st_relaxed(x, 1), mr_st_relaxed(x, 2); }
static void t_xx(void) { a = mr_ld_relaxed(x), b = mr_ld_relaxed(x); }
static void f_coherent(void) { MW_CHECK(!(a == 2 && b == 1) && !(a && !b)); }
static void t_inc(void) { mr_add_relaxed(x, 1); }
static void f_inc(void) { MW_CHECK(mr_ld(x) == 3); }
static void t_cas(void)
{
    if (mr_cas(x, 0, 1))
        mr_add_relaxed(y, 1);
}
static void f_cas(void) { MW_CHECK(mr_ld(y) == 1); }

const struct mw_scenario litmus_scenarios[] = {
    {"litmus: message passing", 2, s_litmus, {t_data_release, t_acquire_data}, NULL, 0},
    {"litmus: message passing, relaxed store", 2, s_litmus, {t_data_relaxed, t_acquire_data}, NULL, 1},
    {"litmus: message passing, relaxed load", 2, s_litmus, {t_data_release, t_relaxed_data}, NULL, 1},
    {"litmus: message passing, release sequence", 3, s_litmus, {t_data_release, t_add_relaxed, t_acquire_sequence}, NULL, 0},
    {"litmus: message passing, three threads", 3, s_litmus, {t_data_release, t_relay, t_acquire_y}, NULL, 0},
    {"litmus: store buffering", 2, s_litmus, {t_sb0, t_sb1}, f_sb, 1},
    {"litmus: independent reads of independent writes", 4, s_litmus, {t_x1, t_y1, t_xy, t_yx}, f_iriw, 1},
    {"litmus: two writers, two orders", 2, s_litmus, {t_22w0, t_22w1}, f_22w, 1},
    {"litmus: coherence", 2, s_litmus, {t_x12, t_xx}, f_coherent, 0},
    {"litmus: atomic add", 3, s_litmus, {t_inc, t_inc, t_inc}, f_inc, 0},
    {"litmus: compare and swap, one wins", 3, s_litmus, {t_cas, t_cas, t_cas}, f_cas, 0},
    {NULL, 0, NULL, {NULL}, NULL, 0},
};
