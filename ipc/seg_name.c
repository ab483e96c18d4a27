/* Names in /dev/shm: which runs have any, whether their owner lives, and how names are removed (see seg.h).
 *
 * Names of run R: millrace-R.ctl, .tok, .plan, .sock, .a0, .a1, ...  The part after the last dot is the kind, so R may have dots.
 *
 * "Proven dead" never rests on a pid alone: same boot, same pid namespace, and no process with that pid AND that start time.  The first
 * 152 bytes of .ctl (up to the owner's start time) keep their meaning in all versions, so that another build can clean up too.
 *
 * Removal takes .ctl last: as long as it exists, nobody can create a run of that name.  mr_seg_clean holds a lock on the .ctl it has
 * judged and checks that the name still leads to it, so it can never hit a successor.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/point.h"
#include "ipc/ipc_pvt.h"

enum { YOUNG_S = 10, OWNER_BYTES = offsetof(struct mr_shm_header, created_ns), ALIVE = 1, DEAD = 0, UNKNOWN = -1 };

#define PREFIX "millrace-"

void mr_shm_path(char path[MR_PATH_MAX], const char *run, const char *suffix)
{
    snprintf(path, MR_PATH_MAX, MR_SHM_DIR "/" PREFIX "%.48s.%.16s", run, suffix);
}

int mr_run_name_ok(const char *run)
{
    size_t n = run ? strlen(run) : 0;

    if (n < 1 || n > 48 || !strcmp(run, ".") || !strcmp(run, ".."))
        return 0;
    return strspn(run, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-") == n;
}

/* ---- processes ----------------------------------------------------------------------------------------------------------- */

static ssize_t read_file(const char *path, char *buf, size_t size)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n;

    if (fd < 0)
        return -1;
    n = read(fd, buf, size - 1);
    close(fd);
    buf[n > 0 ? n : 0] = 0;
    return n;
}

void mr_boot_id(char id[40])
{
    memset(id, 0, 40);
    read_file("/proc/sys/kernel/random/boot_id", id, 40);
    id[strcspn(id, "\n")] = 0;
}

uint32_t mr_pid_namespace(void)
{
    struct stat st;

    return stat("/proc/self/ns/pid", &st) ? 0 : (uint32_t)st.st_ino;
}

/* Start time of a process, its state letter and number of threads.  0 = no such process. */
static uint64_t pid_stat(int pid, char *state, long *threads)
{
    char path[64], buf[1024], *p;
    unsigned long long start = 0;

    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    if (pid <= 0 || read_file(path, buf, sizeof buf) <= 0 || (p = strrchr(buf, ')')) == NULL)   /* the name may contain anything */
        return 0;
    if (sscanf(p + 1, " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %ld %*d %llu", state, threads, &start) != 3)
        return 0;
    return start;
}

uint64_t mr_pid_start(int pid)
{
    char state;
    long threads;

    return pid_stat(pid, &state, &threads);
}

char mr_pid_state(int pid)
{
    char state;
    long threads;

    return pid_stat(pid, &state, &threads) ? state : '?';
}

/* ---- is the owner alive? --------------------------------------------------------------------------------------------------- */

static int is_old(const struct stat *st)
{
    return time(NULL) - st->st_mtime > YOUNG_S;
}

static int owner_of_fd(int fd)
{
    struct mr_shm_header h;
    struct stat st;
    char boot[40];
    uint64_t start;
    long threads = 0;
    char state = 0;

    if (fstat(fd, &st))
        return UNKNOWN;
    if (pread(fd, &h, OWNER_BYTES, 0) != OWNER_BYTES || (h.magic != MR_SHM_MAGIC && h.magic != MR_SHM_MAGIC_NEW))
        return is_old(&st) ? DEAD : UNKNOWN;       /* not ours, damaged, or (without O_TMPFILE) being created */
    mr_boot_id(boot);
    if (memcmp(boot, h.boot_id, sizeof boot))
        return DEAD;
    if (h.sup_pidns != mr_pid_namespace())
        return UNKNOWN;                            /* another container that shares /dev/shm */
    start = pid_stat(h.sup_pid, &state, &threads);
    if ((state == 'Z' && threads <= 1) || state == 'X')
        return DEAD;                               /* a zombie without threads does nothing any more, reaped or not */
    return start && start == h.sup_start ? ALIVE : DEAD;
}

int mr_seg_owner_alive(const char *run)
{
    char path[MR_PATH_MAX];
    int fd, alive;

    if (!mr_run_name_ok(run))
        return UNKNOWN;
    mr_shm_path(path, run, "ctl");
    fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);     /* a pipe of that name is not waited for */
    if (fd < 0)
        return errno == ENOENT ? DEAD : UNKNOWN;   /* without .ctl nobody owns the name */
    alive = owner_of_fd(fd);
    close(fd);
    return alive;
}

/* ---- enumeration --------------------------------------------------------------------------------------------------------- */

static int is_kind(const char *suffix)
{
    if (!strcmp(suffix, "ctl") || !strcmp(suffix, "tok") || !strcmp(suffix, "plan") || !strcmp(suffix, "sock"))
        return 1;
    if (suffix[0] != 'a' || !suffix[1] || strlen(suffix) > 4)
        return 0;
    return suffix[1 + strspn(suffix + 1, "0123456789")] == 0;
}

/* "millrace-<run>.<kind>" -> run and kind; 0 when the name is not one of ours. */
static int split(const char *name, char run[MR_NAME_MAX], const char **kind)
{
    const char *dot = strrchr(name, '.');
    size_t n;

    if (strncmp(name, PREFIX, sizeof PREFIX - 1) || !dot || !is_kind(dot + 1))
        return 0;
    name += sizeof PREFIX - 1;
    n = (size_t)(dot - name);
    if (dot < name || n < 1 || n >= MR_NAME_MAX)
        return 0;
    memcpy(run, name, n);
    run[n] = 0;
    *kind = dot + 1;
    return mr_run_name_ok(run);
}

void mr_shm_remove(const char *run, int ctl)
{
    char path[MR_PATH_MAX], found[MR_NAME_MAX];
    const char *kind;
    struct dirent *d;
    DIR *dir = opendir(MR_SHM_DIR);

    while (dir && (d = readdir(dir)) != NULL) {
        if (!split(d->d_name, found, &kind) || strcmp(found, run) || !strcmp(kind, "ctl"))
            continue;
        mr_shm_path(path, run, kind);
        unlink(path);
        MR_POINT("ipc.seg.unlinked");
    }
    if (dir)
        closedir(dir);
    if (!ctl)
        return;
    mr_shm_path(path, run, "ctl");
    unlink(path);
}

void mr_seg_unlink(const char *run)
{
    if (mr_run_name_ok(run))
        mr_shm_remove(run, 1);
}

/* Names without a .ctl: create it, which makes the name ours, and remove everything. */
static int clean_orphans(const char *run, const char *path)
{
    int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);

    if (fd < 0)
        return UNKNOWN;
    mr_shm_remove(run, 1);
    close(fd);
    return DEAD;
}

int mr_seg_clean(const char *run)
{
    char path[MR_PATH_MAX];
    struct stat judged, now;
    int fd, alive = UNKNOWN;

    if (!mr_run_name_ok(run))
        return UNKNOWN;
    mr_shm_path(path, run, "ctl");
    fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0)
        return errno == ENOENT ? clean_orphans(run, path) : UNKNOWN;
    if (!flock(fd, LOCK_EX | LOCK_NB) && !fstat(fd, &judged) && !stat(path, &now) && judged.st_ino == now.st_ino)
        alive = owner_of_fd(fd);
    if (alive == DEAD)
        mr_shm_remove(run, 1);
    close(fd);
    return alive;
}

void mr_seg_each(void (*fn)(const char *run, int alive, void *arg), void *arg)
{
    char (*runs)[MR_NAME_MAX] = NULL, run[MR_NAME_MAX];
    size_t n = 0, size = 0, i;
    const char *kind;
    struct dirent *d;
    DIR *dir = opendir(MR_SHM_DIR);

    /* Collected first: `fn` may remove names, which would disturb readdir. */
    while (dir && (d = readdir(dir)) != NULL) {
        if (!split(d->d_name, run, &kind))
            continue;
        for (i = 0; i < n && strcmp(runs[i], run); i++)
            ;
        if (i < n)
            continue;
        if (n == size) {
            void *more = realloc(runs, (size = size ? 2 * size : 16) * sizeof *runs);

            if (!more)
                break;
            runs = more;
        }
        memcpy(runs[n++], run, sizeof run);
    }
    if (dir)
        closedir(dir);
    for (i = 0; i < n; i++)
        fn(runs[i], mr_seg_owner_alive(runs[i]), arg);
    free(runs);
}
