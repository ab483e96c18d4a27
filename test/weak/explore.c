/* The search (see explore.h; the model is model.c).  One execution: every thread runs to its first atomic operation; then, again and again,
 * one of the pending operations is chosen and performed, and its thread runs on to its next one.  Each choice is a number on a trail; the
 * search changes the last number that has an alternative and starts anew. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COROUTINE_CODE
#include "test/weak/state.h"

_Alignas(128) char mw_region[MW_REGION];
struct mw_state g;

/* ---- choices -------------------------------------------------------------------------------------------------------------------- */

static uint64_t next_random(void)
{
    g.rng ^= g.rng << 13;
    g.rng ^= g.rng >> 7;
    g.rng ^= g.rng << 17;
    return g.rng;
}

/* A number below n. */
unsigned mw_choose(unsigned n)
{
    struct choice *c = &g.trail[g.depth];

    if (n == 1)
        return 0;
    if (g.random)
        return (unsigned)(next_random() % n);
    if (g.depth == g.length) {
        if (g.length + 1 >= TRAIL)
            abort();
        *c = (struct choice){.n = (uint8_t)n};
        g.length++;
    }
    g.depth++;
    return c->taken;
}

/* Moves the trail to the next execution; 0 = there is none. */
static int backtrack(void)
{
    while (g.length) {
        struct choice *c = &g.trail[g.length - 1];

        if (c->scheduling) {
            unsigned left;

            c->sleep |= (uint8_t)(1u << c->taken);
            left = c->enabled & ~c->sleep;
            if (left) {
                c->taken = (uint8_t)__builtin_ctz(left);
                return 1;
            }
        } else if (c->taken + 1u < c->n) {
            c->taken++;
            return 1;
        }
        g.length--;
    }
    return 0;
}

/* ---- failures -------------------------------------------------------------------------------------------------------------------- */

static void abandon(void)
{
    g.abandoned = 1;
    if (g.modelled)
        coroutine_switch(&g.t[g.current].co, &g.main);
}

void mw_fail(const char *fmt, ...)
{
    va_list ap;

    va_start(ap, fmt);
    if (!g.res->failed)
        vsnprintf(g.res->why, sizeof g.res->why, fmt, ap);
    va_end(ap);
    g.res->failed = 1;
    abandon();
}

void mw_assume(int cond)
{
    if (!cond)
        abandon();
}

void mw_quiet(void) { g.t[g.current].quiet = 1; }

/* ---- weakening ------------------------------------------------------------------------------------------------------------------- */

static void note_site(const struct mw_op *op, const char *location)
{
    unsigned i = 0;

    while (i < g.n_sites && (g.site[i].at != op->site || g.site[i].location != location))
        i++;
    if (i == SITES)
        return;
    if (i == g.n_sites)
        g.site[g.n_sites++] = (struct mw_site){op->site, location, 0};
    g.site[i].can |= (op->acquire ? MW_ACQUIRE : 0) | (op->release ? MW_RELEASE : 0);
}

static void weaken(struct mw_op *op)
{
    const char *location = mw_classify((uintptr_t)op->p - (uintptr_t)mw_region);

    if (op->kind > MW_SWAP)
        return;
    if (!g.mut) {
        note_site(op, location);
        return;
    }
    if (g.mut->location ? strcmp(g.mut->location, location) != 0 : g.mut->site != op->site)
        return;
    if (g.mut->weaken & MW_ACQUIRE)
        op->acquire = 0;
    if (g.mut->weaken & MW_RELEASE)
        op->release = 0;
}

/* ---- threads ---------------------------------------------------------------------------------------------------------------------- */

uint64_t mw_atomic(struct mw_op *op)
{
    struct thread *t = &g.t[g.current];
    uint64_t v;

    if (!g.modelled)
        return mw_direct(op);
    if (!mw_is_shared(op->p)) {
        fprintf(stderr, "explore: an atomic outside of the region\n");
        abort();
    }
    weaken(op);
    t->at = mw_location_of(op->p, op->size);
    if (!(t->quiet && op->kind == MW_LOAD)) {
        t->pending = op;
        coroutine_switch(&t->co, &g.main);
        t->pending = NULL;
    }
    v = mw_perform(op);
    if (t->state == BLOCKED)
        coroutine_switch(&t->co, &g.main);   /* until a wake */
    return v;
}

void mw_await(const uint64_t *p, unsigned shift, uint64_t want)
{
    struct mw_op op = {.kind = MW_AWAIT, .size = 8, .p = (void *)p, .value = want, .want = shift};

    if (g.modelled)
        mw_atomic(&op);
}

static int writes(const struct mw_op *op) { return op->kind != MW_LOAD && op->kind != MW_AWAIT; }

static int independent(const struct thread *a, const struct thread *b)
{
    if (!a->pending || !b->pending)
        return 0;
    return a->at != b->at || (!writes(a->pending) && !writes(b->pending));
}

static int is_enabled(const struct thread *t)
{
    const struct location *l = &g.loc[t->at];

    if (t->state != RUNNING)
        return 0;
    if (!t->pending || t->pending->kind != MW_AWAIT)
        return 1;
    return l->m[l->order[l->n - 1]].value >> t->pending->want == t->pending->value;
}

static void thread_main(void *arg)
{
    unsigned i = (unsigned)(uintptr_t)arg;

    g.sc->thread[i]();
    g.t[i].state = ENDED;
    coroutine_switch(&g.t[i].co, &g.main);
    abort();
}

static void run(unsigned i)
{
    g.current = i;
    coroutine_switch(&g.main, &g.t[i].co);
}

/* The next thread, or -1: none is left, or all that are need not be tried. */
static int schedule(void)
{
    struct choice *c = &g.trail[g.depth];
    unsigned enabled = 0, awake;

    for (unsigned i = 0; i < g.n_threads; i++)
        enabled |= (unsigned)is_enabled(&g.t[i]) << i;
    if (!enabled) {
        for (unsigned i = 0; i < g.n_threads; i++) {
            if (g.t[i].state != ENDED) {
                g.modelled = 0;
                mw_fail("deadlock: thread %u %s %s", i, g.t[i].state == BLOCKED ? "sleeps on" : "waits for",
                        mw_classify((uintptr_t)g.loc[g.t[i].at].p - (uintptr_t)mw_region));
            }
        }
        return -1;
    }
    awake = enabled & ~(unsigned)g.sleep;
    if (g.random) {
        unsigned n = (unsigned)(next_random() % (unsigned)__builtin_popcount(enabled));

        while (n--)
            enabled &= enabled - 1;
        return __builtin_ctz(enabled);
    }
    if (g.depth == g.length) {
        if (!awake)
            return -1;
        if (g.length + 1 >= TRAIL)
            abort();
        *c = (struct choice){.scheduling = 1, .enabled = (uint8_t)enabled, .sleep = g.sleep, .taken = (uint8_t)__builtin_ctz(awake)};
        g.length++;
    }
    g.depth++;
    g.sleep = c->sleep;
    return c->taken;
}

static void forget(void)
{
    for (unsigned i = 0; i < g.n_touched; i++)
        memset(&g.granule[g.touched[i]], 0, sizeof g.granule[0]);
    for (unsigned i = 0; i < g.n_locs; i++)
        g.loc_of[mw_granule_of(g.loc[i].p)] = 0;
    g.n_touched = g.n_locs = 0;
}

static void start(const char *region)
{
    memcpy(mw_region, region, MW_REGION);
    forget();
    g.depth = 0;
    g.sleep = 0;
    g.steps = 0;
    g.abandoned = 0;
    g.n_threads = g.sc->n_threads;
    memset(g.t, 0, sizeof g.t);
    g.modelled = 1;
    for (unsigned i = 0; i < g.n_threads; i++) {
        for (unsigned k = 0; k < g.n_threads; k++)
            g.t[i].know.clock[k] = k == i;
        coroutine_make(&g.t[i].co, g.stack[i], STACK, thread_main, (void *)(uintptr_t)i);
    }
    for (unsigned i = 0; i < g.n_threads && !g.abandoned; i++)
        run(i);
}

static void execute(const char *region)
{
    start(region);
    while (!g.abandoned) {
        unsigned asleep = 0;
        int t = schedule();

        if (t < 0)
            break;
        for (unsigned i = 0; i < g.n_threads; i++)
            if ((g.sleep >> i & 1) && (int)i != t && independent(&g.t[i], &g.t[t]))
                asleep |= 1u << i;
        g.sleep = (uint8_t)asleep;
        run((unsigned)t);
        g.res->events++;
        if (++g.steps > STEPS)
            break;                           /* a poll that goes round for ever: of no interest */
    }
    g.modelled = 0;
    g.res->executions++;
    for (unsigned i = 0; i < g.n_threads; i++)
        if (g.t[i].state != ENDED)
            return;
    if (g.abandoned || g.res->failed)
        return;
    g.res->finished++;
    if (g.sc->finish)
        g.sc->finish();
}

struct mw_result mw_explore(const struct mw_scenario *sc, const struct mw_mutant *mut, uint64_t budget, uint64_t walks, uint64_t seed)
{
    static char region[MW_REGION];
    struct mw_result res = {0};

    g.sc = sc;
    g.mut = mut;
    g.res = &res;
    g.modelled = 0;
    memset(mw_region, 0, MW_REGION);
    sc->setup();
    memcpy(region, mw_region, MW_REGION);
    g.random = 0;
    g.length = 0;
    do
        execute(region);
    while (!res.failed && !(res.complete = !backtrack()) && res.executions < budget);
    g.random = 1;
    g.rng = seed | 1;
    for (uint64_t i = 0; i < walks && !res.failed && !res.complete; i++)
        execute(region);
    g.modelled = 0;
    forget();
    return res;
}

unsigned mw_sites(const struct mw_site **list)
{
    *list = g.site;
    return g.n_sites;
}
