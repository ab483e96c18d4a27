/* The model and the search (see explore.h).  One execution: every thread runs to its first atomic operation; then, again and again, one of
 * the pending operations is chosen and performed, and its thread runs on to its next one.  Each choice is a number on a trail; the search
 * changes the last number that has an alternative and starts anew. */
#include "test/weak/explore.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "test/weak/coroutine.h"

enum { LOCS = 96, MSGS = 48, TRAIL = 4096, STEPS = 600, STACK = 1 << 18, GRANULE = 4, SITES = 512 };

/* What a thread knows, or a message carries. */
struct know {
    uint8_t msg[LOCS];                    /* newest message known, by location */
    uint16_t clock[MW_THREADS + 1];
};

struct message {
    uint64_t value;
    uint8_t rank;                         /* place in modification order */
    uint8_t rmw;                          /* read the message directly before it */
    struct know know;
};

struct location {
    void *p;
    unsigned n, size;
    uint8_t order[MSGS];                  /* modification order: message ids */
    struct message m[MSGS];               /* 0 = what was there at the beginning */
};

enum state { RUNNING, BLOCKED, ENDED };

struct thread {
    struct coroutine co;
    struct know know;
    enum state state;
    struct mw_op *pending;
    int at;                               /* location of the pending operation */
    int quiet;
};

/* Plain and atomic accesses to 4 bytes. */
struct granule {
    uint8_t writer, used;
    uint16_t written, read[MW_THREADS], awritten[MW_THREADS], aread[MW_THREADS];
};

struct choice {
    uint8_t n, taken, scheduling;
    uint8_t enabled, sleep;               /* scheduling: bit masks of threads; sleep grows by what was tried */
};

_Alignas(128) char mw_region[MW_REGION];

static struct {
    const struct mw_scenario *sc;
    const struct mw_mutant *mut;
    struct mw_result *res;
    struct thread t[MW_THREADS];
    struct coroutine main;
    unsigned n_threads, current, n_locs, steps;
    int modelled;                         /* 0: outside of executions, accesses are direct */
    int abandoned;                        /* this execution ends here */
    struct location loc[LOCS];
    int16_t loc_of[MW_REGION / GRANULE];  /* + 1 */
    struct granule granule[MW_REGION / GRANULE];
    unsigned touched[MW_REGION / GRANULE], n_touched;
    struct choice trail[TRAIL];
    unsigned depth, length;
    uint8_t sleep;                        /* threads whose pending operation need not be tried here */
    int random;
    uint64_t rng;
    struct mw_site site[SITES];
    unsigned n_sites;
    char stack[MW_THREADS][STACK];
} g;

/* ---- choices -------------------------------------------------------------------------------------------------------------------- */

static uint64_t next_random(void)
{
    g.rng ^= g.rng << 13;
    g.rng ^= g.rng >> 7;
    g.rng ^= g.rng << 17;
    return g.rng;
}

/* A number below n. */
static unsigned choose(unsigned n)
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

/* ---- happens-before and data races -------------------------------------------------------------------------------------------------- */

static int is_shared(const void *p) { return (uintptr_t)p - (uintptr_t)mw_region < MW_REGION; }
static unsigned granule_of(const void *p) { return (unsigned)(((uintptr_t)p - (uintptr_t)mw_region) / GRANULE); }

static struct granule *touch(unsigned i)
{
    struct granule *s = &g.granule[i];

    if (!s->used) {
        s->used = 1;
        g.touched[g.n_touched++] = i;
    }
    return s;
}

static int knows(const struct know *k, unsigned thread, unsigned clock) { return clock <= k->clock[thread]; }

static void race(const char *what, unsigned granule, unsigned other, const void *site)
{
    unsigned me = g.current;

    mw_fail("data race: %s of %s (offset %u) by thread %u, not ordered with thread %u, at %p", what, mw_classify(granule * GRANULE),
            granule * GRANULE, me, other, site);
}

static void plain_granule(unsigned i, int write, const void *site)
{
    struct granule *s = touch(i);
    const struct know *k = &g.t[g.current].know;

    if (s->written && s->writer != g.current && !knows(k, s->writer, s->written))
        race(write ? "plain write after a write" : "plain read after a write", i, s->writer, site);
    for (unsigned o = 0; o < g.n_threads; o++) {
        if (o == g.current)
            continue;
        if (!knows(k, o, s->awritten[o]))
            race("plain access after an atomic write", i, o, site);
        if (write && (!knows(k, o, s->read[o]) || !knows(k, o, s->aread[o])))
            race("plain write after a read", i, o, site);
    }
    if (write) {
        s->writer = (uint8_t)g.current;
        s->written = k->clock[g.current];
    } else {
        s->read[g.current] = k->clock[g.current];
    }
}

void mw_plain(const void *p, size_t n, int write, const void *site)
{
    if (!g.modelled || !is_shared(p))
        return;
    for (unsigned i = granule_of(p); i <= granule_of((const char *)p + n - 1); i++)
        plain_granule(i, write, site);
}

static void atomic_granule(const void *p, int write, const void *site)
{
    struct granule *s = touch(granule_of(p));
    const struct know *k = &g.t[g.current].know;

    if (s->written && s->writer != g.current && !knows(k, s->writer, s->written))
        race("atomic access after a plain write", granule_of(p), s->writer, site);
    for (unsigned o = 0; write && o < g.n_threads; o++)
        if (o != g.current && !knows(k, o, s->read[o]))
            race("atomic write after a plain read", granule_of(p), o, site);
    (write ? s->awritten : s->aread)[g.current] = k->clock[g.current];
}

/* ---- locations and messages ------------------------------------------------------------------------------------------------------- */

static uint64_t direct_read(const void *p, unsigned size) { return size == 4 ? *(const volatile uint32_t *)p : *(const volatile uint64_t *)p; }

static void direct_write(void *p, unsigned size, uint64_t v)
{
    if (size == 4)
        *(volatile uint32_t *)p = (uint32_t)v;
    else
        *(volatile uint64_t *)p = v;
}

static int location_of(void *p, unsigned size)
{
    int16_t *at = &g.loc_of[granule_of(p)];
    struct location *l;

    if (*at)
        return *at - 1;
    if (g.n_locs == LOCS) {
        fprintf(stderr, "explore: too many locations\n");
        abort();
    }
    l = &g.loc[g.n_locs++];
    l->p = p;
    l->n = 1;
    l->size = size;
    l->order[0] = 0;
    memset(&l->m[0], 0, sizeof l->m[0]);
    l->m[0].value = direct_read(p, size);
    *at = (int16_t)g.n_locs;
    return *at - 1;
}

static void join(struct know *a, const struct know *b)
{
    for (unsigned i = 0; i < g.n_locs; i++)
        if (g.loc[i].m[b->msg[i]].rank > g.loc[i].m[a->msg[i]].rank)
            a->msg[i] = b->msg[i];
    for (unsigned i = 0; i < g.n_threads; i++)
        if (b->clock[i] > a->clock[i])
            a->clock[i] = b->clock[i];
}

static unsigned first_visible(const struct location *l, const struct know *k) { return l->m[k->msg[l - g.loc]].rank; }
static int followed_by_rmw(const struct location *l, unsigned rank) { return rank + 1 < l->n && l->m[l->order[rank + 1]].rmw; }

/* The message at `rank` is read. */
static uint64_t read_at(struct location *l, unsigned rank, int acquire)
{
    struct know *k = &g.t[g.current].know;
    const struct message *m = &l->m[l->order[rank]];

    k->msg[l - g.loc] = l->order[rank];
    if (acquire)
        join(k, &m->know);
    return m->value;
}

/* A new message at `rank`; `from` = the message that a read-modify-write has read, or NULL. */
static void write_at(struct location *l, unsigned rank, uint64_t value, int release, const struct message *from)
{
    struct know *k = &g.t[g.current].know;
    unsigned id = l->n, i = (unsigned)(l - g.loc);
    struct message *m = &l->m[id];

    if (l->n == MSGS) {
        fprintf(stderr, "explore: too many messages\n");
        abort();
    }
    for (unsigned r = l->n; r > rank; r--) {
        l->order[r] = l->order[r - 1];
        l->m[l->order[r]].rank = (uint8_t)r;
    }
    l->n++;
    l->order[rank] = (uint8_t)id;
    m->value = value;
    m->rank = (uint8_t)rank;
    m->rmw = from != NULL;
    k->msg[i] = (uint8_t)id;
    memset(&m->know, 0, sizeof m->know);
    if (release)
        m->know = *k;
    if (from)
        join(&m->know, &from->know);
    m->know.msg[i] = (uint8_t)id;
    if (rank + 1 == l->n)
        direct_write(l->p, l->size, value);
    k->clock[g.current]++;
}

/* ---- operations ------------------------------------------------------------------------------------------------------------------- */

static uint64_t do_load(struct location *l, const struct mw_op *op)
{
    struct thread *t = &g.t[g.current];
    unsigned first = first_visible(l, &t->know);

    return read_at(l, t->quiet ? first : l->n - 1 - choose(l->n - first), op->acquire);
}

static void do_store(struct location *l, const struct mw_op *op)
{
    unsigned ranks[MSGS], n = 0;

    for (unsigned r = l->n; r > first_visible(l, &g.t[g.current].know); r--)
        if (!followed_by_rmw(l, r - 1))
            ranks[n++] = r;
    write_at(l, ranks[choose(n)], op->value, op->release, NULL);
}

static uint64_t new_value(const struct mw_op *op, uint64_t old)
{
    uint64_t v = op->kind == MW_ADD ? old + op->value : op->kind == MW_OR ? old | op->value : op->kind == MW_AND ? old & op->value : op->value;

    return op->size == 4 ? (uint32_t)v : v;
}

static uint64_t do_rmw(struct location *l, struct mw_op *op)
{
    unsigned ranks[MSGS], n = 0, rank;
    uint64_t old;

    for (unsigned r = l->n; r-- > first_visible(l, &g.t[g.current].know);)
        if (!followed_by_rmw(l, r) || (op->kind == MW_CAS && l->m[l->order[r]].value != op->want))
            ranks[n++] = r;
    rank = ranks[choose(n)];
    old = read_at(l, rank, op->acquire);
    op->ok = op->kind != MW_CAS || old == op->want;
    if (op->ok)
        write_at(l, rank + 1, new_value(op, old), op->release, &l->m[l->order[rank]]);
    return old;
}

/* The kernel compares and queues under a lock with full barriers: it sees the newest value, and a wake sees who is queued. */
static uint64_t do_futex(struct location *l, const struct mw_op *op)
{
    uint64_t newest = l->m[l->order[l->n - 1]].value;

    if (op->kind == MW_WAIT) {
        if (newest == op->value)
            g.t[g.current].state = BLOCKED;
        return newest;
    }
    for (unsigned i = 0; i < g.n_threads; i++)
        if (g.t[i].state == BLOCKED && g.t[i].at == l - g.loc)
            g.t[i].state = RUNNING;
    return 0;
}

static uint64_t perform(struct mw_op *op)
{
    struct thread *t = &g.t[g.current];
    struct location *l = &g.loc[t->at];
    uint64_t v = 0;

    if (op->kind == MW_WAIT || op->kind == MW_WAKE)
        return do_futex(l, op);
    if (op->kind == MW_AWAIT)
        return 0;
    atomic_granule(op->p, op->kind != MW_LOAD, op->site);
    if (op->kind == MW_LOAD)
        v = do_load(l, op);
    else if (op->kind == MW_STORE)
        do_store(l, op);
    else
        v = do_rmw(l, op);
    if (op->kind > MW_STORE)
        t->quiet = 0;
    return v;
}

static uint64_t direct(struct mw_op *op)
{
    uint64_t old = direct_read(op->p, op->size);

    op->ok = op->kind != MW_CAS || old == op->want;
    if (op->kind != MW_LOAD && op->kind <= MW_SWAP && op->ok)
        direct_write(op->p, op->size, new_value(op, old));
    return old;
}

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
        return direct(op);
    if (!is_shared(op->p)) {
        fprintf(stderr, "explore: an atomic outside of the region\n");
        abort();
    }
    weaken(op);
    t->at = location_of(op->p, op->size);
    if (!(t->quiet && op->kind == MW_LOAD)) {
        t->pending = op;
        coroutine_switch(&t->co, &g.main);
        t->pending = NULL;
    }
    v = perform(op);
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
        g.loc_of[granule_of(g.loc[i].p)] = 0;
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
