/* Atomic access to shared memory: GCC __atomic builtins under short names.
 *
 * The words of the protocols are plain uint64_t in shared memory, so that the layout file stays free of C11 _Atomic qualifiers and a
 * read-only mapping can be read too.  Default order is acquire for loads, release for stores, acq_rel for CAS; a relaxed access says in
 * one line why it may be.  seq_cst only where two words are compared with each other (named at the place).
 */
#ifndef MR_IPC_ATOMIC_H
#define MR_IPC_ATOMIC_H

#include <stdint.h>

#define mr_ld(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)
#define mr_ld_relaxed(p) __atomic_load_n((p), __ATOMIC_RELAXED)
#define mr_st(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)
#define mr_st_relaxed(p, v) __atomic_store_n((p), (v), __ATOMIC_RELAXED)
#define mr_add(p, v) __atomic_fetch_add((p), (v), __ATOMIC_ACQ_REL)
#define mr_swap(p, v) __atomic_exchange_n((p), (v), __ATOMIC_ACQ_REL)
#define mr_add_relaxed(p, v) __atomic_fetch_add((p), (v), __ATOMIC_RELAXED)

/* 1 when *p was `want` and is now `next`. */
static inline int mr_cas(uint64_t *p, uint64_t want, uint64_t next)
{
    return __atomic_compare_exchange_n(p, &want, next, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

#endif
