/* Starting an actor process: fork, exec, pidfd.
 *
 * The child inherits exactly: stdin from /dev/null, stdout and stderr into a pipe whose read end the caller gets, and the descriptors in
 * `keep`, under the same numbers.  Everything else of ours is CLOEXEC.  It has no blocked signals, ignores SIGINT, SIGQUIT and SIGHUP
 * (those are the supervisor's to interpret), is the leader of a process group of its own, and dies with its parent.
 */
#ifndef MR_RUNTIME_SPAWN_H
#define MR_RUNTIME_SPAWN_H

#include <stddef.h>
#include <sys/types.h>

#include "base/err.h"

struct mr_child {
    pid_t pid;  /* 0 = none */
    int pidfd;  /* readable when it is dead; -1 = none */
    int out_fd; /* its stdout and stderr, non-blocking; -1 = none */
};

struct mr_spawn {
    const char *path; /* the program */
    char *const *argv;
    const int *keep; /* descriptors it inherits */
    int n_keep;
    int threads; /* OMP_NUM_THREADS and its kin; 0 = leave the environment alone */
    const char *const *set; /* "NAME=value", in place of what the environment says */
    int n_set;
};

/* 0, or -1 with err (MR_EXIT_ENV); the errno of a failed exec comes back too.  Blocks until the exec has happened. */
int mr_spawn(struct mr_child *c, const struct mr_spawn *sp, struct mr_err *err);

/* Signals through the pidfd, so that a re-used pid is never hit.  0 or a negative errno (-ESRCH: dead already). */
int mr_child_signal(const struct mr_child *c, int sig);

/* Reaps a dead child: *code = exit code (-1 when a signal ended it), *sig = that signal or 0.  0, -EAGAIN (still alive), or a negative
 * errno. The descriptors stay open until mr_child_close. */
int mr_child_reap(struct mr_child *c, int *code, int *sig);
void mr_child_close(struct mr_child *c);

/* Path of the actor program: $MILLRACE_ACTOR, else millrace-actor beside this program.  0 or -1 with err (MR_EXIT_ENV). */
int mr_actor_path(char *out, size_t bytes, struct mr_err *err);

#endif
