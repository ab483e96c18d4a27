/* A ring under measurement: ours or a peer.  One translation unit defines PEER_NAME, PEER_NOTE, PEER_FLAGS and the static functions below,
 * then includes peer_body.h, so that push and pop are inlined into the measured loops.
 *
 *   size_t peer_bytes(unsigned cap);                        shared memory that it needs
 *   int    peer_init(void *mem, unsigned cap);              parent, before any fork
 *   int    peer_attach(void *mem, int consumer, int index, int consumers);   each process
 *   int    peer_push(void *mem, uint64_t ref);              1 done, 0 full
 *   int    peer_pop(void *mem, uint64_t *ref);              1 done, 0 empty
 *   void   peer_detach(void *mem);   void peer_fini(void *mem);
 *
 * What travels is a 64-bit reference, as in millrace: the payload lies elsewhere.
 */
#ifndef MR_BENCH_PEER_H
#define MR_BENCH_PEER_H

#include <stddef.h>
#include <stdint.h>

enum { PEER_BLOCKS = 1 };      /* push and pop sleep in the kernel: fewer iterations, no spin policy */
enum { PEER_PROCS = 8 };

struct peer {
    const char *name, *note;
    int flags;
    /* One-way time in ns between two pinned processes: median and 99th percentile of half round trips.  0 or -1. */
    int (*latency)(unsigned cap, int iterations, double *median, double *p99);
    /* Million references a second, `np` producers to `nc` consumers, contents checked.  0 or -1. */
    int (*throughput)(unsigned cap, int np, int nc, uint64_t n, double *mps);
    struct peer *next;
};

#ifdef __cplusplus
extern "C" {
#endif
void mr_bench_peer_add(struct peer *p);               /* called by constructors */
void *mr_bench_shared(size_t bytes);                  /* MAP_SHARED, inherited by forks; NULL when there is no memory */
void mr_bench_unshare(void *p, size_t bytes);
void mr_bench_pin(int core);                          /* modulo the cores that this process may use */
void mr_bench_quantiles(double *v, int n, double *median, double *p99);
double mr_bench_ns(void);
void mr_bench_relax(unsigned *n);                     /* the one wait policy: 128 pauses, then yield */
int mr_bench_child(void);                             /* fork whose child dies with the parent; 0 in the child */
int mr_bench_join(const int *pid, int n);             /* 0 when all exited 0 */
#ifdef __cplusplus
}
#endif

#endif
