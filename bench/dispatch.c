/* millrace-bench dispatch [--seconds N] [--json]: do drafters starve?
 *
 * Starts conf/dispatch.json (5 synthetic targets, 3 synthetic drafters with the speeds of a real mix: they sleep instead of computing)
 * twice: as it is (any drafter takes any ready microbatch), and with the static assignment that this replaces (microbatch i belongs to
 * drafter i % D, which is what deterministic mode does).  Idle share of a drafter = its waits / window, whatever it waited for, the
 * barrier at the end of each step included.
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "bench/bench.h"
#include "bench/sample.h"
#include "ipc/atomic.h"
#include "ipc/step.h"

extern char **environ;

struct idle {
    double drafter[MR_MAX_DRAFTERS], worst, microbatches_per_s;
    int drafters;
};

struct load {
    char run[MR_NAME_MAX], dir[64];
    pid_t pid;
};

/* The binary beside this one. */
static int sibling(const char *name, char out[1024])
{
    ssize_t n = readlink("/proc/self/exe", out, 900);
    char *slash;

    if (n <= 0)
        return -1;
    out[n] = 0;
    slash = strrchr(out, '/');
    snprintf(slash + 1, 100, "%s", name);
    return access(out, X_OK);
}

static int start(struct load *l, const char *topology, int fixed, struct mr_err *err)
{
    char exe[1024], set_dir[128], set_fixed[64];
    char *argv[] = {exe, "run", (char *)topology, "--name", l->run, "--set", set_dir, "--set", set_fixed, NULL};
    posix_spawn_file_actions_t fa;
    int e;

    if (sibling("millrace", exe))
        return mr_err_set(err, MR_EXIT_ENV, "the millrace binary is not beside millrace-bench: build target `millrace`");
    snprintf(l->run, sizeof l->run, "bench-dispatch-%d-%d", (int)getpid(), fixed);
    snprintf(l->dir, sizeof l->dir, "/tmp/millrace-bench-%d-%d", (int)getpid(), fixed);
    snprintf(set_dir, sizeof set_dir, "/run/dir=\"%s\"", l->dir);
    snprintf(set_fixed, sizeof set_fixed, "/train/deterministic=%s", fixed ? "true" : "false");
    posix_spawn_file_actions_init(&fa);
    posix_spawn_file_actions_addopen(&fa, 1, "/dev/null", O_WRONLY, 0);
    e = posix_spawn(&l->pid, exe, &fa, NULL, argv, environ);
    posix_spawn_file_actions_destroy(&fa);
    return e ? mr_err_set(err, MR_EXIT_ENV, "%s: %s", exe, strerror(e)) : 0;
}

/* Opens the run once it is in its steady state: the first step is over. */
static int wait_steady(const struct load *l, struct mr_seg *s, struct mr_err *err)
{
    uint64_t end = mr_now_ns() + 60ull * 1000000000u;

    while (mr_now_ns() < end && waitpid(l->pid, NULL, WNOHANG) == 0) {
        struct mr_err quiet = {0};

        if (s->ctl || mr_seg_open(s, l->run, 0, &quiet) == 0)
            if (mr_sw_step(mr_step_read(s)) >= 1)
                return 0;
        usleep(20000);
    }
    return mr_err_set(err, MR_EXIT_FAILED, "run %s did not finish its first step within 60 s", l->run);
}

static void measure(const struct mr_seg *s, double seconds, struct idle *out)
{
    static struct mr_bench_look a, b;
    double window;

    mr_bench_look(s, &a);
    usleep((useconds_t)(seconds * 1e6));
    mr_bench_look(s, &b);
    window = (double)(b.at_ns - a.at_ns);
    out->microbatches_per_s = (double)(b.committed - a.committed) * 1e9 / window;
    for (unsigned i = 0; i < s->hdr->n_actors; i++) {
        double waits = 0;

        if (s->actors[i].kind != MR_DRAFTER || out->drafters == MR_MAX_DRAFTERS)
            continue;
        for (int w = 1; w < MR_WAIT_REASONS; w++)
            waits += (double)(b.actor[i].wait_ns[w] - a.actor[i].wait_ns[w]) / window;
        out->drafter[out->drafters++] = waits;
        out->worst = waits > out->worst ? waits : out->worst;
    }
}

static void remove_dir(const char *dir)
{
    char cmd[128];

    snprintf(cmd, sizeof cmd, "rm -rf -- '%s'", dir);
    if (system(cmd) != 0)
        fprintf(stderr, "millrace-bench: could not remove %s\n", dir);
}

static int one(const char *topology, int fixed, double seconds, struct idle *out, struct mr_err *err)
{
    struct load l = {0};
    struct mr_seg s = {0};
    int r;

    if (start(&l, topology, fixed, err))
        return -1;
    r = wait_steady(&l, &s, err);
    if (r == 0)
        measure(&s, seconds, out);
    kill(l.pid, SIGTERM);
    kill(l.pid, SIGTERM);          /* the second one: now, without a checkpoint */
    waitpid(l.pid, NULL, 0);
    mr_seg_close(&s);
    remove_dir(l.dir);
    return r;
}

static void print(const struct idle *i, const char *name, int json)
{
    printf(json ? "\"%s\":{\"idle\":[" : "%-22s idle of each drafter:", name);
    for (int d = 0; d < i->drafters; d++)
        printf(json ? "%s%.4f" : "%s%.1f%%", json ? (d ? "," : "") : " ", i->drafter[d] * (json ? 1 : 100));
    printf(json ? "],\"worst\":%.4f,\"microbatches_per_s\":%.2f}" : "   worst %.1f%%   %.1f microbatches/s\n", i->worst * (json ? 1 : 100),
           i->microbatches_per_s);
}

int mr_bench_dispatch(int argc, char **argv)
{
    struct idle rings = {0}, fixed = {0};
    struct mr_err err = {0};
    const char *topology = "conf/dispatch.json";
    double seconds = 20;
    int json = 0;

    for (int i = 0; i < argc; i++) {
        if (!strcmp(argv[i], "--json"))
            json = 1;
        else if (!strcmp(argv[i], "--seconds") && i + 1 < argc)
            seconds = atof(argv[++i]);
        else if (!strcmp(argv[i], "--topology") && i + 1 < argc)
            topology = argv[++i];
        else
            seconds = 0;
    }
    if (!(seconds > 0)) {
        fprintf(stderr, "usage: millrace-bench dispatch [--seconds N > 0] [--topology FILE] [--json]\n");
        return MR_EXIT_CONFIG;
    }
    if (one(topology, 0, seconds, &rings, &err) || one(topology, 1, seconds, &fixed, &err)) {
        fprintf(stderr, "millrace-bench: %s\n", err.msg);
        return err.code;
    }
    printf(json ? "{" : "");
    print(&rings, "bucket rings", json);
    printf(json ? "," : "");
    print(&fixed, "static i % D", json);
    printf(json ? "}\n" : "");
    return MR_EXIT_OK;
}
