/* An explorer of weak memory: runs small scenarios of the real ipc/ code under every order that C11 allows it (within the limits below).
 *
 * The code under test is compiled with -fsanitize=thread, and the program answers the compiler's calls itself (hooks.c) in place of the
 * tsan runtime: each atomic access, with the memory order that the source says, comes to the model; each plain access to the shared region
 * is checked for data races.  So the sources are untouched, and an order can be weakened at run time, to see whether anybody notices.
 *
 * The model is the view-based operational one of the "promising" line of work, without promises:
 *   - each location has all its stores as messages in modification order; each thread has a view, the newest message of each location that
 *     it knows of, and may read any message that is not older than that;
 *   - a release store carries the writer's view, an acquire load takes over the view of what it reads; a read-modify-write reads the
 *     message directly before its own, and passes that one's view on (release sequence);
 *   - an atomic store may go anywhere in modification order behind what its thread knows, except between a read-modify-write and what that
 *     one has read;
 *   - happens-before is tracked with vector clocks in the same messages; two plain accesses, or a plain and an atomic one, to one place
 *     that are not ordered by it, one of them a write, are a data race: an error.
 * Not in the model: load buffering of relaxed loads (no protocol decision is made from one), seq_cst beyond acq_rel (nothing uses it).
 *
 * Search: depth first over scheduling x reads-from x modification order, stateless (each execution starts anew), with sleep sets, so that
 * orders of independent accesses are not tried twice; when a scenario does not end within its budget, random walks follow.
 */
#ifndef TEST_WEAK_EXPLORE_H
#define TEST_WEAK_EXPLORE_H

#include <stddef.h>
#include <stdint.h>

enum { MW_THREADS = 4, MW_REGION = 1 << 16, MW_NAMES = 24 };

struct mw_scenario {
    const char *name;
    unsigned n_threads;
    void (*setup)(void);               /* builds the region, in the open: no model yet */
    void (*thread[MW_THREADS])(void);
    void (*finish)(void);              /* all threads have ended: what must be true */
    int must_fail;                     /* a mutant of the code itself */
};

/* The region all threads share; zeroed before setup. */
extern _Alignas(128) char mw_region[MW_REGION];

/* For scenarios. */
__attribute__((format(printf, 1, 2))) void mw_fail(const char *fmt, ...);   /* this execution is wrong */
void mw_assume(int cond);              /* 0: this execution is of no interest (e.g. a poll that read an old value) */
void mw_quiet(void);                   /* until this thread's next read-modify-write its loads are not choices: they read what it knows */
/* Blocks until the newest value at *p satisfies (v >> shift) == want.  The caller then reads it, and may read an older one. */
void mw_await(const uint64_t *p, unsigned shift, uint64_t want);
#define MW_CHECK(cond) ((cond) ? (void)0 : mw_fail("%s, line %d: %s", __func__, __LINE__, #cond))

/* ---- driving ---------------------------------------------------------------------------------------------------------------- */

enum mw_weaken { MW_ACQUIRE = 1, MW_RELEASE = 2 };
struct mw_mutant {
    const char *location;              /* name that mw_classify gives, NULL = none */
    const void *site;                  /* or: one call site */
    int weaken;                        /* MW_ACQUIRE | MW_RELEASE: what is taken away */
};

struct mw_result {
    uint64_t executions, finished, events;   /* finished: all threads ended, nothing was assumed away */
    int complete, failed;
    char why[512];
};

/* Explores at most `budget` executions depth first, then `walks` random ones.  Stops at the first failure. */
struct mw_result mw_explore(const struct mw_scenario *sc, const struct mw_mutant *mut, uint64_t budget, uint64_t walks, uint64_t seed);

/* Name of the kind of location an address in the region is; given by the scenarios. */
const char *mw_classify(uintptr_t offset);

/* Call sites of atomics that were met, with what they do: for the per-site report. */
struct mw_site {
    const void *at;
    const char *location;
    int can;                           /* MW_ACQUIRE | MW_RELEASE: orders that it has */
};
unsigned mw_sites(const struct mw_site **list);

/* ---- between hooks.c and explore.c ------------------------------------------------------------------------------------------- */

enum mw_kind { MW_LOAD, MW_STORE, MW_CAS, MW_ADD, MW_OR, MW_AND, MW_SWAP, MW_WAIT, MW_WAKE, MW_AWAIT, MW_NONE };
struct mw_op {
    enum mw_kind kind;
    unsigned size;                     /* 4 or 8 */
    void *p;
    uint64_t value, want;              /* operand; CAS: expected */
    int acquire, release;
    const void *site;
    int ok;                            /* out, CAS */
};
/* Performs the operation; its result is the value read. */
uint64_t mw_atomic(struct mw_op *op);
void mw_plain(const void *p, size_t n, int write, const void *site);

#endif
