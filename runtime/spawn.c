/* Starting an actor process; see spawn.h.
 *
 * fork and exec instead of posix_spawn, because the parent-death signal must be set in the child, and its re-check (the parent may have
 * died before prctl) too.  Between fork and exec only async-signal-safe calls are made.  The error of a failed exec travels through a
 * CLOEXEC pipe: end of file without a byte means that exec has happened.
 */
#include "runtime/spawn.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

#define THREAD_VARS 3
static const char *const thread_var[THREAD_VARS] = {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"};

/* Threads that wait for the others of their team sleep: a machine runs more actors than one, and a spinning thread takes the processor
 * from the very one it waits for (30 times slower, measured with 2 actors of 2 threads on 2 busy cores). */
static const char sleep_not_spin[] = "OMP_WAIT_POLICY=passive";

struct env {
    char text[THREAD_VARS][40];
    char **list; /* [n + THREAD_VARS + 1 + n_set + 1] */
};

static int is_thread_var(const char *entry)
{
    for (int i = 0; i < THREAD_VARS; i++) {
        size_t n = strlen(thread_var[i]);

        if (strncmp(entry, thread_var[i], n) == 0 && entry[n] == '=')
            return 1;
    }
    return 0;
}

static int is_set(const struct mr_spawn *sp, const char *entry)
{
    for (int i = 0; i < sp->n_set; i++) {
        size_t n = strcspn(sp->set[i], "=") + 1;

        if (strncmp(entry, sp->set[i], n) == 0)
            return 1;
    }
    return 0;
}

static int env_make(struct env *e, const struct mr_spawn *sp)
{
    size_t n = 0, k = 0;
    int threads = sp->threads;

    while (environ[n])
        n++;
    e->list = calloc(n + THREAD_VARS + 1 + (size_t)sp->n_set + 1, sizeof *e->list);
    if (!e->list)
        return -ENOMEM;
    for (size_t i = 0; i < n; i++)
        if ((!threads || !is_thread_var(environ[i])) && !is_set(sp, environ[i]))
            e->list[k++] = environ[i];
    for (int i = 0; i < sp->n_set; i++)
        e->list[k++] = (char *)(uintptr_t)sp->set[i];
    for (int i = 0; threads && i < THREAD_VARS; i++) {
        snprintf(e->text[i], sizeof e->text[i], "%s=%d", thread_var[i], threads);
        e->list[k++] = e->text[i];
    }
    if (threads && !getenv("OMP_WAIT_POLICY")) /* the user may know better */
        e->list[k++] = (char *)(uintptr_t)sleep_not_spin;
    return 0;
}

/* In the child: never returns.  What it reports through `error_fd` is an errno. */
static void child(const struct mr_spawn *sp, char **envp, int out_fd, int error_fd, pid_t parent)
{
    sigset_t none;
    int null_fd = open("/dev/null", O_RDONLY | O_CLOEXEC), e;

    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent)
        _exit(MR_EXIT_ORPHAN);
    signal(SIGINT, SIG_IGN);
    signal(SIGQUIT, SIG_IGN);
    signal(SIGHUP, SIG_IGN);
    signal(SIGPIPE, SIG_DFL);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    if (null_fd < 0 || dup2(null_fd, STDIN_FILENO) < 0 || dup2(out_fd, STDOUT_FILENO) < 0 || dup2(out_fd, STDERR_FILENO) < 0)
        goto fail;
    for (int i = 0; i < sp->n_keep; i++) /* our own table since the fork: the parent's flags stay as they are */
        if (fcntl(sp->keep[i], F_SETFD, 0))
            goto fail;
    execve(sp->path, sp->argv, envp);
fail:
    e = errno;
    while (write(error_fd, &e, sizeof e) < 0 && errno == EINTR)
        ;
    _exit(127);
}

/* 0, or the errno that the child sent. */
static int exec_error(int fd)
{
    int e = 0;
    ssize_t n;

    do
        n = read(fd, &e, sizeof e);
    while (n < 0 && errno == EINTR);
    return n == (ssize_t)sizeof e ? e : 0;
}

static int failed(struct mr_err *err, const char *what, const char *path, int e)
{
    return mr_err_set(err, MR_EXIT_ENV, "%s %s: %s", what, mr_err_path(path, 200), strerror(e));
}

/* The parent's half after fork: exec's verdict, then the pidfd. */
static int adopt(struct mr_child *c, const struct mr_spawn *sp, pid_t pid, int error_fd, struct mr_err *err)
{
    int e = exec_error(error_fd);

    if (e) {
        waitpid(pid, NULL, 0);
        return failed(err, "cannot execute", sp->path, e);
    }
    /* Not yet reaped, so the pid cannot have been re-used. */
    c->pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
    if (c->pidfd < 0) {
        e = errno;
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
        return failed(err, "pidfd_open (kernel 5.3 or newer is needed) for", sp->path, e);
    }
    c->pid = pid;
    return 0;
}

int mr_spawn(struct mr_child *c, const struct mr_spawn *sp, struct mr_err *err)
{
    int out[2] = {-1, -1}, error[2] = {-1, -1}, r = -1;
    struct env env = {.list = NULL};
    pid_t pid, parent = getpid();

    *c = (struct mr_child){.pidfd = -1, .out_fd = -1};
    if (env_make(&env, sp) || pipe2(out, O_CLOEXEC) || pipe2(error, O_CLOEXEC)) {
        failed(err, "no pipe or memory to start", sp->path, errno);
        goto done;
    }
    pid = fork();
    if (pid == 0)
        child(sp, env.list, out[1], error[1], parent);
    if (pid < 0) {
        failed(err, "cannot fork for", sp->path, errno);
        goto done;
    }
    close(error[1]);
    error[1] = -1;
    r = adopt(c, sp, pid, error[0], err);
    if (r == 0 && fcntl(out[0], F_SETFL, O_NONBLOCK) == 0) {
        c->out_fd = out[0];
        out[0] = -1;
    }
done:
    for (int i = 0; i < 2; i++) {
        if (out[i] >= 0)
            close(out[i]);
        if (error[i] >= 0)
            close(error[i]);
    }
    free(env.list);
    return r;
}

int mr_child_signal(const struct mr_child *c, int sig)
{
    if (c->pidfd < 0)
        return -ESRCH;
    return syscall(SYS_pidfd_send_signal, c->pidfd, sig, NULL, 0) ? -errno : 0;
}

int mr_child_reap(struct mr_child *c, int *code, int *sig)
{
    siginfo_t si = {.si_pid = 0};

    if (c->pidfd < 0)
        return -ECHILD;
    if (waitid(P_PIDFD, (id_t)c->pidfd, &si, WEXITED | WNOHANG))
        return -errno;
    if (si.si_pid == 0)
        return -EAGAIN;
    *code = si.si_code == CLD_EXITED ? si.si_status : -1;
    *sig = si.si_code == CLD_EXITED ? 0 : si.si_status;
    c->pid = 0;
    return 0;
}

void mr_child_close(struct mr_child *c)
{
    if (c->pidfd >= 0)
        close(c->pidfd);
    if (c->out_fd >= 0)
        close(c->out_fd);
    c->pidfd = c->out_fd = -1;
}

int mr_actor_path(char *out, size_t bytes, struct mr_err *err)
{
    const char *env = getenv("MILLRACE_ACTOR");
    char self[4096];
    ssize_t n;
    char *slash;

    if (env && *env) {
        snprintf(out, bytes, "%s", env);
    } else {
        n = readlink("/proc/self/exe", self, sizeof self - 1);
        if (n < 0)
            return mr_err_set(err, MR_EXIT_ENV, "/proc/self/exe: %s: is /proc mounted?", strerror(errno));
        self[n] = 0;
        slash = strrchr(self, '/');
        snprintf(out, bytes, "%.*s/millrace-actor", slash ? (int)(slash - self) : 0, self);
    }
    if (access(out, X_OK))
        return mr_err_set(err, MR_EXIT_ENV, "the actor program %s: %s; it belongs beside millrace, or set MILLRACE_ACTOR to its path",
                          mr_err_path(out, 300), strerror(errno));
    return 0;
}
