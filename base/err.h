/* Errors that a user will read.
 *
 * Two kinds of failure exist in millrace.  Mechanisms (rings, futexes, mappings) return 0 or a negative errno.  Everything that can
 * fail because of what a user gave us takes a `struct mr_err *` as its last parameter, returns 0 or -1, and fills it with one
 * message that has five parts: what, where (file:line:column, JSON pointer, actor, device), the value seen, what is allowed, what
 * to do.  The FIRST error wins: mr_err_set on an error that is already set changes nothing, so clean-up code cannot hide the cause.
 */
#ifndef MR_BASE_ERR_H
#define MR_BASE_ERR_H

#include <stdarg.h>

/* Exit codes of every millrace program (docs/design.md section 9). */
enum mr_exit {
    MR_EXIT_OK = 0,
    MR_EXIT_FAILED = 1,       /* the run failed */
    MR_EXIT_CONFIG = 2,       /* usage or configuration */
    MR_EXIT_ENV = 3,          /* missing device, /dev/shm too small, ... */
    MR_EXIT_CUDA = 4,         /* actors only: sticky CUDA error, the supervisor restarts the process */
    MR_EXIT_ORPHAN = 5,       /* actors only: the supervisor is gone */
    MR_EXIT_INT = 130,        /* interrupted without a checkpoint */
    MR_EXIT_TERM = 143
};

struct mr_err {
    int code;                 /* 0 = no error, else an enum mr_exit */
    char msg[2044];           /* without a trailing newline */
};

/* Sets `err` unless it is set already.  `err` may be NULL.  Always returns -1, so that `return mr_err_set(...)` reads well. */
int mr_err_set(struct mr_err *err, int code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

/* Puts "prefix: " in front of a message that is set: the caller's "where".  Returns -1. */
int mr_err_prefix(struct mr_err *err, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* Shortens a path for a message: cut from the left, so that the file's own name survives.  Returns a pointer into `path`. */
const char *mr_err_path(const char *path, int max);

/* An assertion about OUR mistakes, never about input.  Stays on in release builds. */
#define MR_ASSERT(x) ((x) ? (void)0 : mr_assert_failed(__FILE__, __LINE__, #x))
void mr_assert_failed(const char *file, int line, const char *what) __attribute__((noreturn));

#endif
