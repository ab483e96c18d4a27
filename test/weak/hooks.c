/* What gcc -fsanitize=thread calls, answered by the model (see explore.h); and the two libc functions whose answers must not depend on
 * the moment: futex calls become model operations, time stands still (so no deadline ever passes: a lost wake-up is a deadlock). */
#include <errno.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>

#include "test/weak/explore.h"

#pragma GCC diagnostic ignored "-Wmissing-prototypes"
#pragma GCC diagnostic ignored "-Wbuiltin-declaration-mismatch"

#define SITE __builtin_return_address(0)

static int acquires(int mo) { return mo == __ATOMIC_ACQUIRE || mo == __ATOMIC_CONSUME || mo == __ATOMIC_ACQ_REL || mo == __ATOMIC_SEQ_CST; }
static int releases(int mo) { return mo == __ATOMIC_RELEASE || mo == __ATOMIC_ACQ_REL || mo == __ATOMIC_SEQ_CST; }

static uint64_t simple(enum mw_kind kind, unsigned size, volatile void *p, uint64_t v, int mo, const void *site)
{
    struct mw_op op = {.kind = kind, .size = size, .p = (void *)p, .value = v, .acquire = acquires(mo), .release = releases(mo),
                       .site = site};

    return mw_atomic(&op);
}

static int cas(unsigned size, volatile void *p, uint64_t *want, uint64_t v, int mo, const void *site)
{
    struct mw_op op = {.kind = MW_CAS, .size = size, .p = (void *)p, .value = v, .want = *want, .acquire = acquires(mo),
                       .release = releases(mo), .site = site};

    *want = mw_atomic(&op);
    return op.ok;
}

#define RMW(bits, type, name, kind) \
    type __tsan_atomic##bits##_##name(volatile type *p, type v, int mo) { return (type)simple(kind, bits / 8, p, (uint64_t)v, mo, SITE); }

#define ATOMICS(bits, type)                                                                                         \
    type __tsan_atomic##bits##_load(const volatile type *p, int mo)                                                 \
    {                                                                                                               \
        return (type)simple(MW_LOAD, bits / 8, (volatile void *)p, 0, mo, SITE);                                    \
    }                                                                                                               \
    void __tsan_atomic##bits##_store(volatile type *p, type v, int mo) { simple(MW_STORE, bits / 8, p, v, mo, SITE); } \
    RMW(bits, type, fetch_add, MW_ADD)                                                                              \
    RMW(bits, type, fetch_or, MW_OR)                                                                                \
    RMW(bits, type, fetch_and, MW_AND)                                                                              \
    RMW(bits, type, exchange, MW_SWAP)                                                                              \
    int __tsan_atomic##bits##_compare_exchange_strong(volatile type *p, type *want, type v, int mo, int fail)       \
    {                                                                                                               \
        uint64_t w = *want;                                                                                         \
        int ok = cas(bits / 8, p, &w, (uint64_t)v, mo, SITE);                                                       \
                                                                                                                    \
        (void)fail;                                                                                                 \
        *want = (type)w;                                                                                            \
        return ok;                                                                                                  \
    }

ATOMICS(32, uint32_t)
ATOMICS(64, uint64_t)

#define PLAIN(n)                                                            \
    void __tsan_read##n(void *p) { mw_plain(p, n, 0, SITE); }               \
    void __tsan_write##n(void *p) { mw_plain(p, n, 1, SITE); }              \
    void __tsan_unaligned_read##n(void *p) { mw_plain(p, n, 0, SITE); }     \
    void __tsan_unaligned_write##n(void *p) { mw_plain(p, n, 1, SITE); }
PLAIN(1)
PLAIN(2)
PLAIN(4)
PLAIN(8)
PLAIN(16)
void __tsan_read_range(void *p, unsigned long n) { mw_plain(p, n, 0, SITE); }
void __tsan_write_range(void *p, unsigned long n) { mw_plain(p, n, 1, SITE); }
void __tsan_init(void) {}
void __tsan_func_entry(void *pc) { (void)pc; }
void __tsan_func_exit(void) {}
void __tsan_atomic_thread_fence(int mo) { (void)mo; abort(); }      /* nothing uses one: the model has none */

/* The only caller is ipc/wait.c. */
long syscall(long number, ...)
{
    uint32_t *p;
    va_list ap;
    int op;
    uint32_t v;

    va_start(ap, number);
    p = va_arg(ap, uint32_t *);
    op = va_arg(ap, int);
    v = va_arg(ap, uint32_t);
    va_end(ap);
    if (number != SYS_futex)
        abort();
    if (op == FUTEX_WAKE)
        return (long)simple(MW_WAKE, 4, p, 0, __ATOMIC_RELAXED, SITE);
    if (simple(MW_WAIT, 4, p, v, __ATOMIC_RELAXED, SITE) == v)
        return 0;
    errno = EAGAIN;
    return -1;
}

int clock_gettime(clockid_t clock, struct timespec *ts)
{
    (void)clock;
    *ts = (struct timespec){1, 0};
    return 0;
}
