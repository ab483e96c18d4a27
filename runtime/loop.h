/* The supervisor's event loop: file descriptors that become readable, nothing else.
 *
 * Two implementations of one interface: io_uring (multishot poll) and epoll, the fallback.  Timers are timerfds, signals a signalfd,
 * deaths pidfds, wake-ups an eventfd: so both see the same things.  One thread owns the loop; callbacks run in it and may add and
 * delete descriptors, their own too.
 *
 * A callback must read until EAGAIN (descriptors are non-blocking; a pidfd is deleted instead): multishot poll reports changes, not
 * levels.
 */
#ifndef MR_RUNTIME_LOOP_H
#define MR_RUNTIME_LOOP_H

#include <stddef.h>

#include "base/err.h"

enum mr_io { MR_IO_AUTO, MR_IO_URING, MR_IO_EPOLL };
enum { MR_LOOP_MAX = 1024 }; /* descriptors watched at a time */

struct mr_loop;
typedef void (*mr_loop_fn)(void *arg, int fd);

/* MR_IO_AUTO takes io_uring, or epoll when the kernel refuses it; then `why` (never empty in that case) holds one line that says why.
 * MR_IO_URING fails instead (MR_EXIT_ENV).  NULL with err on failure. */
struct mr_loop *mr_loop_create(enum mr_io want, char *why, size_t why_bytes, struct mr_err *err);
void mr_loop_destroy(struct mr_loop *l);           /* NULL is fine; watched descriptors stay open, they are the caller's */
const char *mr_loop_name(const struct mr_loop *l); /* "io_uring" or "epoll" */

/* Calls fn(arg, fd) whenever fd becomes readable, hangs up or fails.  0, -ENOSPC, or what the kernel said. */
int mr_loop_add(struct mr_loop *l, int fd, mr_loop_fn fn, void *arg);
/* Before close(fd).  An event of fd that was fetched already is dropped. */
void mr_loop_del(struct mr_loop *l, int fd);

/* Waits for events, at most timeout_ms (-1: without end), and runs their callbacks.  Number of callbacks run, or a negative errno. */
int mr_loop_wait(struct mr_loop *l, int timeout_ms);

#endif
