/* The model: messages, views, happens-before and data races (see explore.h). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "test/weak/state.h"

/* ---- happens-before and data races -------------------------------------------------------------------------------------------------- */

int mw_is_shared(const void *p) { return (uintptr_t)p - (uintptr_t)mw_region < MW_REGION; }
unsigned mw_granule_of(const void *p) { return (unsigned)(((uintptr_t)p - (uintptr_t)mw_region) / GRANULE); }

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
    if (!g.modelled || !mw_is_shared(p))
        return;
    for (unsigned i = mw_granule_of(p); i <= mw_granule_of((const char *)p + n - 1); i++)
        plain_granule(i, write, site);
}

static void atomic_granule(const void *p, int write, const void *site)
{
    struct granule *s = touch(mw_granule_of(p));
    const struct know *k = &g.t[g.current].know;

    if (s->written && s->writer != g.current && !knows(k, s->writer, s->written))
        race("atomic access after a plain write", mw_granule_of(p), s->writer, site);
    for (unsigned o = 0; write && o < g.n_threads; o++)
        if (o != g.current && !knows(k, o, s->read[o]))
            race("atomic write after a plain read", mw_granule_of(p), o, site);
    (write ? s->awritten : s->aread)[g.current] = k->clock[g.current];
}

/* ---- locations and messages ------------------------------------------------------------------------------------------------------- */

static uint64_t direct_read(const void *p, unsigned size)
{
    return size == 4 ? *(const volatile uint32_t *)p : *(const volatile uint64_t *)p;
}

static void direct_write(void *p, unsigned size, uint64_t v)
{
    if (size == 4)
        *(volatile uint32_t *)p = (uint32_t)v;
    else
        *(volatile uint64_t *)p = v;
}

int mw_location_of(void *p, unsigned size)
{
    int16_t *at = &g.loc_of[mw_granule_of(p)];
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

    return read_at(l, t->quiet ? first : l->n - 1 - mw_choose(l->n - first), op->acquire);
}

static void do_store(struct location *l, const struct mw_op *op)
{
    unsigned ranks[MSGS], n = 0;

    for (unsigned r = l->n; r > first_visible(l, &g.t[g.current].know); r--)
        if (!followed_by_rmw(l, r - 1))
            ranks[n++] = r;
    write_at(l, ranks[mw_choose(n)], op->value, op->release, NULL);
}

static uint64_t new_value(const struct mw_op *op, uint64_t old)
{
    uint64_t v = op->kind == MW_ADD ? old + op->value : op->kind == MW_OR ? old | op->value : op->value;

    if (op->kind == MW_AND)
        v = old & op->value;
    return op->size == 4 ? (uint32_t)v : v;
}

static uint64_t do_rmw(struct location *l, struct mw_op *op)
{
    unsigned ranks[MSGS], n = 0, rank;
    uint64_t old;

    for (unsigned r = l->n; r-- > first_visible(l, &g.t[g.current].know);)
        if (!followed_by_rmw(l, r) || (op->kind == MW_CAS && l->m[l->order[r]].value != op->want))
            ranks[n++] = r;
    rank = ranks[mw_choose(n)];
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

uint64_t mw_perform(struct mw_op *op)
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

uint64_t mw_direct(struct mw_op *op)
{
    uint64_t old = direct_read(op->p, op->size);

    op->ok = op->kind != MW_CAS || old == op->want;
    if (op->kind != MW_LOAD && op->kind <= MW_SWAP && op->ok)
        direct_write(op->p, op->size, new_value(op, old));
    return old;
}
