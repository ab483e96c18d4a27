/* millrace doctor: what this machine offers and refuses, one line each, with what it means for a run.  Changes nothing. */
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "runtime/cmd.h"
#include "runtime/gpus.h"
#include "runtime/loop.h"
#include "runtime/spawn.h"

static void line(int ok, const char *what, const char *text)
{
    printf("%-5s %-12s %s\n", ok ? "ok" : "NOTE", what, text);
}

static void look_kernel(void)
{
    struct utsname u;
    char text[300];
    int fd = (int)syscall(SYS_pidfd_open, getpid(), 0);

    uname(&u);
    snprintf(text, sizeof text, "%s; pidfd: %s", u.release, fd >= 0 ? "yes" : strerror(errno));
    line(fd >= 0, "kernel", text);
    if (fd >= 0)
        close(fd);
}

static void look_loop(void)
{
    char why[300];
    struct mr_err err = {0};
    struct mr_loop *l = mr_loop_create(MR_IO_AUTO, why, sizeof why, &err);

    line(l && !why[0], "io_uring", !l ? err.msg : why[0] ? why : "available: the supervisor's event loop uses it");
    mr_loop_destroy(l);
}

static void look_shm(void)
{
    struct statvfs fs;
    char text[300];

    if (statvfs("/dev/shm", &fs)) {
        snprintf(text, sizeof text, "not there (%s): mount a tmpfs on it", strerror(errno));
        line(0, "/dev/shm", text);
        return;
    }
    snprintf(text, sizeof text, "%.0f MiB, %.0f MiB free%s", (double)fs.f_blocks * (double)fs.f_frsize / 1048576.0,
             (double)fs.f_bavail * (double)fs.f_frsize / 1048576.0, access("/dev/shm", W_OK) ? "; NOT writable" : "");
    line(access("/dev/shm", W_OK) == 0 && (double)fs.f_bavail * (double)fs.f_frsize > 256e6, "/dev/shm", text);
}

static void look_limits(void)
{
    struct rlimit files, lock;
    char text[200], locked[40] = "unlimited";

    getrlimit(RLIMIT_NOFILE, &files);
    getrlimit(RLIMIT_MEMLOCK, &lock);
    if (lock.rlim_cur != RLIM_INFINITY)
        snprintf(locked, sizeof locked, "%llu KiB", (unsigned long long)lock.rlim_cur / 1024);
    snprintf(text, sizeof text, "open files %llu, locked memory %s, %ld processors", (unsigned long long)files.rlim_cur, locked,
             sysconf(_SC_NPROCESSORS_ONLN));
    line(files.rlim_cur >= 1024, "limits", text);
}

static void look_actor(void)
{
    char path[4096], text[4200];
    struct mr_err err = {0};
    int bad = mr_actor_path(path, sizeof path, &err);

    snprintf(text, sizeof text, "%s", bad ? err.msg : path);
    line(!bad, "actor", text);
}

static int device_files(void)
{
    DIR *dir = opendir("/dev");
    struct dirent *e;
    int n = 0;

    while (dir && (e = readdir(dir)))
        n += strncmp(e->d_name, "nvidia", 6) == 0 && e->d_name[6] >= '0' && e->d_name[6] <= '9';
    if (dir)
        closedir(dir);
    return n;
}

static void look_peers(const struct mr_gpus *g)
{
    char text[400] = "";
    int missing = 0;

    for (int a = 0; a < g->n; a++)
        for (int b = 0; b < g->n; b++)
            if (a != b && !g->gpu[a].peer[b] && missing++ < 8)
                snprintf(text + strlen(text), sizeof text - strlen(text), "%scuda:%d -> cuda:%d", text[0] ? ", " : "", a, b);
    if (g->n > 1)
        line(!missing, "peer access", missing ? text : "between all GPUs");
    if (missing)
        printf("      %-12s a drafter cannot pull hidden states over these pairs\n", "");
}

/* A process of its own asks: this one never touches CUDA. */
static void look_gpu(void)
{
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    struct mr_err err = {0};
    struct mr_gpus g;
    char text[2300], label[32];
    int files = device_files();

    if (!files) {
        line(1, "gpu", "no NVIDIA device files: runs use the cpu backend");
        return;
    }
    if (mr_gpus_query(&g, &err)) {
        snprintf(text, sizeof text, "%d NVIDIA device files, but: %s", files, err.msg);
        line(0, "gpu", text);
        return;
    }
    for (int i = 0; i < g.n; i++) {
        snprintf(label, sizeof label, "cuda:%d", i);
        snprintf(text, sizeof text, "%s %s, capability %d.%d, %d multiprocessors, %.1f of %.1f GiB free", g.gpu[i].name, g.gpu[i].uuid,
                 g.gpu[i].major, g.gpu[i].minor, g.gpu[i].sms, (double)g.gpu[i].free_bytes / 0x1p30, (double)g.gpu[i].total_bytes / 0x1p30);
        line(g.gpu[i].major >= 8, label, text);
    }
    if (visible) {
        snprintf(text, sizeof text, "CUDA_VISIBLE_DEVICES=%.200s: cuda:N counts within it", visible);
        line(g.n > 0, "gpu", text);
    }
    look_peers(&g);
}

static void say_run(const char *run, int alive, void *arg)
{
    unsigned n;
    char text[300];
    uint64_t bytes = mr_shm_files(run, &n);

    (void)arg;
    snprintf(text, sizeof text, "%s: %s, %u files, %.1f MiB%s", run,
             alive == 1   ? "live"
             : alive == 0 ? "dead"
                          : "cannot tell",
             n, (double)bytes / 1048576.0, alive == 0 ? "; millrace clean removes them" : "");
    line(alive != 0, "run", text);
}

int mr_cmd_doctor(int argc, char **argv)
{
    const struct mr_usage u = {"doctor", "What this machine offers a run: kernel, io_uring, /dev/shm, limits, GPUs, left-overs.\n", NULL, 0,
                               0};
    int n, r = mr_args_parse(&u, argc, argv, NULL, &n);

    if (r)
        return r == MR_ARGS_DONE ? 0 : r;
    look_kernel();
    look_loop();
    look_shm();
    look_limits();
    look_actor();
    look_gpu();
    mr_seg_each(say_run, NULL);
    return 0;
}
