/* What model.c (what an operation may do) and explore.c (which one is next) share. */
#ifndef TEST_WEAK_STATE_H
#define TEST_WEAK_STATE_H

#include "test/weak/coroutine.h"
#include "test/weak/explore.h"

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

struct mw_state {
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
};
extern struct mw_state g;

unsigned mw_choose(unsigned n);           /* a number below n: a choice of the search */

/* model.c */
unsigned mw_granule_of(const void *p);
int mw_is_shared(const void *p);
int mw_location_of(void *p, unsigned size);
uint64_t mw_perform(struct mw_op *op);    /* the pending operation of the current thread */
uint64_t mw_direct(struct mw_op *op);     /* no model: plain memory */

#endif
