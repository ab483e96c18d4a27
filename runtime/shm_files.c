/* What a run has in /dev/shm, and removing it once its owner is proven dead; see cmd.h.
 *
 * Removal never touches a live run: ipc/seg.h judges by boot, pid and start time.  The actors of a killed supervisor need a moment to
 * notice (death pipe); they are waited for, so that a successor does not share a run directory with them.
 */
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ipc/atomic.h"
#include "runtime/cmd.h"

enum { WAIT_MS = 3000, STEP_MS = 20 };

static int is_suffix(const char *s)
{
    static const char *const fixed[] = {"ctl", "tok", "plan", "sock"};

    for (size_t i = 0; i < sizeof fixed / sizeof fixed[0]; i++)
        if (strcmp(s, fixed[i]) == 0)
            return 1;
    return s[0] == 'a' && isdigit((unsigned char)s[1]) && strspn(s + 1, "0123456789") == strlen(s + 1);
}

uint64_t mr_shm_files(const char *run, unsigned *n)
{
    DIR *dir = opendir("/dev/shm");
    struct dirent *e;
    char prefix[MR_NAME_MAX + 16];
    uint64_t bytes = 0;
    struct stat st;

    *n = 0;
    snprintf(prefix, sizeof prefix, "millrace-%s.", run);
    while (dir && (e = readdir(dir))) {
        if (strncmp(e->d_name, prefix, strlen(prefix)) || !is_suffix(e->d_name + strlen(prefix)))
            continue;
        if (fstatat(dirfd(dir), e->d_name, &st, AT_SYMLINK_NOFOLLOW) == 0) {
            bytes += (uint64_t)st.st_blocks * 512;
            ++*n;
        }
    }
    if (dir)
        closedir(dir);
    return bytes;
}

/* ---- what has the name of a .ctl and is none ------------------------------------------------------------------------------------- */

static const char *kind_of(mode_t mode)
{
    return S_ISLNK(mode) ? "a symbolic link" : S_ISDIR(mode) ? "a directory" : S_ISFIFO(mode) ? "a pipe" : S_ISSOCK(mode) ? "a socket" : "a device";
}

/* Does it begin as a segment does?  Of any version: its owner can be judged then. */
static int has_magic(const char *path, int *no_access)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    uint64_t magic = 0;
    ssize_t n = fd < 0 ? -1 : pread(fd, &magic, sizeof magic, 0);

    *no_access = fd < 0 && errno == EACCES;
    if (fd >= 0)
        close(fd);
    return n == sizeof magic && (magic == MR_SHM_MAGIC || magic == MR_SHM_MAGIC_NEW);
}

enum mr_shm_odd mr_shm_odd(const char *run, char *said, size_t bytes)
{
    char path[MR_NAME_MAX + 32];
    struct stat st;
    int no_access;

    snprintf(path, sizeof path, "/dev/shm/millrace-%s.ctl", run);
    if (lstat(path, &st))
        return MR_SHM_FINE;
    if (!S_ISREG(st.st_mode)) {
        snprintf(said, bytes, "run %s: %s is %s, which no run makes: remove it by hand (rm %s%s)", run, path, kind_of(st.st_mode),
                 S_ISDIR(st.st_mode) ? "-r " : "", path);
        return MR_SHM_FOREIGN;
    }
    if (has_magic(path, &no_access))
        return MR_SHM_FINE;
    if (no_access) {
        snprintf(said, bytes, "run %s: %s belongs to uid %u and has mode %04o: only that user can look at the run, or remove what it left", run,
                 path, st.st_uid, st.st_mode & 07777);
        return MR_SHM_FOREIGN;
    }
    snprintf(said, bytes, "run %s: %s (%lld bytes) is no segment of a run: %s", run, path, (long long)st.st_size,
             "10 s after its last change `millrace clean` removes it");
    return MR_SHM_GARBAGE;
}

/* ---- removal ------------------------------------------------------------------------------------------------------------------------- */

static int is_actor(int pid)
{
    char path[40], name[32] = "";
    FILE *f;

    snprintf(path, sizeof path, "/proc/%d/comm", pid);
    f = fopen(path, "re");
    if (f && !fgets(name, sizeof name, f))
        name[0] = 0;
    if (f)
        fclose(f);
    return strncmp(name, "millrace-actor", 14) == 0 && mr_pid_state(pid) != 'Z';
}

/* Actors of a dead supervisor that are still there. */
static int actors_left(const char *run)
{
    struct mr_err err = {0};
    struct mr_seg s = {0};
    int n = 0;

    if (mr_seg_open(&s, run, 0, &err))
        return 0;
    for (unsigned i = 0; i < s.hdr->n_actors; i++) {
        int pid = mr_ld(&s.actors[i].pid);

        n += pid > 0 && is_actor(pid);
    }
    mr_seg_close(&s);
    return n;
}

/* Why nothing may be removed. */
static void say_why_not(const char *run, int alive, char *said, size_t bytes)
{
    if (alive == 1)
        snprintf(said, bytes, "run %s is live", run);
    else if (mr_shm_odd(run, said, bytes) == MR_SHM_FINE)
        snprintf(said, bytes,
                 "run %s: cannot tell whether its supervisor lives, in another container: look there; if that is gone for good, remove "
                 "/dev/shm/millrace-%s.* by hand",
                 run, run);
}

int mr_shm_clean(const char *run, char *said, size_t bytes)
{
    unsigned n, left;
    uint64_t size = mr_shm_files(run, &n);
    int alive = mr_seg_owner_alive(run);
    enum mr_shm_odd odd;

    said[0] = 0;
    if (n == 0)
        return 0;
    odd = mr_shm_odd(run, said, bytes);
    if (odd == MR_SHM_FOREIGN)
        return -1;
    if (alive == 0)
        for (int ms = 0; ms < WAIT_MS && actors_left(run); ms += STEP_MS)
            usleep(STEP_MS * 1000);
    if (alive == 0)
        alive = mr_seg_clean(run);
    if (alive) {
        say_why_not(run, alive, said, bytes);
        return -1;
    }
    mr_shm_files(run, &left);
    if (left)
        snprintf(said, bytes, "run %s: its supervisor is gone, but %u of its %u files cannot be removed (another user's?): remove them by hand, "
                 "/dev/shm/millrace-%s.*",
                 run, left, n, run);
    else
        snprintf(said, bytes, "run %s: %s; removed %u file%s, %llu bytes, from /dev/shm", run,
                 odd ? "no supervisor owns its name" : "its supervisor is gone", n, n == 1 ? "" : "s", (unsigned long long)size);
    return left ? -1 : 1;
}
