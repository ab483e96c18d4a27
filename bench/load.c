/* A run that a bench starts for itself: see load.h. */
#include "bench/load.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "ipc/step.h"

extern char **environ;

/* The binary beside this one. */
static int sibling(const char *name, char out[1024])
{
    ssize_t n = readlink("/proc/self/exe", out, 900);

    if (n <= 0)
        return -1;
    out[n] = 0;
    snprintf(strrchr(out, '/') + 1, 100, "%s", name);
    return access(out, X_OK);
}

static int spawn(struct mr_bench_load *l, const char *topology, const char *set, struct mr_err *err)
{
    static int sequence;
    char exe[1024], set_dir[128];
    char *argv[] = {exe, "run", (char *)topology, "--name", l->run, "--set", set_dir, "--set", (char *)set, NULL};
    posix_spawn_file_actions_t fa;
    int e;

    if (sibling("millrace", exe))
        return mr_err_set(err, MR_EXIT_ENV, "the millrace binary is not beside millrace-bench: build target `millrace`");
    snprintf(l->run, sizeof l->run, "bench-%d-%d", (int)getpid(), ++sequence);
    snprintf(l->dir, sizeof l->dir, "/tmp/millrace-bench-%d-%d", (int)getpid(), sequence);
    snprintf(set_dir, sizeof set_dir, "/run/dir=\"%s\"", l->dir);
    posix_spawn_file_actions_init(&fa);
    posix_spawn_file_actions_addopen(&fa, 1, "/dev/null", O_WRONLY, 0);
    posix_spawn_file_actions_adddup2(&fa, 1, 2);       /* deaths are what is being measured: the log of the run has them */
    e = posix_spawn(&l->pid, exe, &fa, NULL, argv, environ);
    posix_spawn_file_actions_destroy(&fa);
    if (e)
        l->pid = 0;
    return e ? mr_err_set(err, MR_EXIT_ENV, "%s: %s", exe, strerror(e)) : 0;
}

int mr_bench_load_start(struct mr_bench_load *l, const char *topology, const char *set, struct mr_err *err)
{
    uint64_t end = mr_now_ns() + 60ull * 1000000000u;

    memset(l, 0, sizeof *l);
    if (spawn(l, topology, set, err))
        return -1;
    while (mr_now_ns() < end) {
        struct mr_err quiet = {0};

        if (waitpid(l->pid, NULL, WNOHANG) != 0) {
            l->pid = 0;
            return mr_err_set(err, MR_EXIT_FAILED, "run %s ended at its start: try `millrace run %s`", l->run, topology);
        }
        if ((l->seg.ctl || mr_seg_open(&l->seg, l->run, 0, &quiet) == 0) && mr_sw_step(mr_step_read(&l->seg)) >= 1)
            return 0;
        usleep(20000);
    }
    return mr_err_set(err, MR_EXIT_FAILED, "run %s did not finish its first step within 60 s", l->run);
}

void mr_bench_load_stop(struct mr_bench_load *l)
{
    char cmd[128];

    if (l->pid) {
        kill(l->pid, SIGTERM);
        usleep(200000);
        kill(l->pid, SIGTERM);
        waitpid(l->pid, NULL, 0);
    }
    mr_seg_close(&l->seg);
    snprintf(cmd, sizeof cmd, "rm -rf -- '%s'", l->dir);
    if (l->dir[0] && system(cmd) != 0)
        fprintf(stderr, "millrace-bench: could not remove %s\n", l->dir);
}
