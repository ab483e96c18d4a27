/* What a run has in /dev/shm, and removing it once its owner is proven dead; see cmd.h.
 *
 * Removal never touches a live run: ipc/seg.h judges by boot, pid and start time.  The actors of a killed supervisor need a moment to
 * notice (death pipe); they are waited for, so that a successor does not share a run directory with them.
 */
#include <ctype.h>
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ipc/atomic.h"
#include "runtime/cmd.h"
#include "runtime/death.h"

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

int mr_shm_clean(const char *run, char *said, size_t bytes)
{
    unsigned n;
    uint64_t size = mr_shm_files(run, &n);
    int alive = mr_seg_owner_alive(run);

    said[0] = 0;
    if (n == 0)
        return 0;
    if (alive == 0)
        for (int ms = 0; ms < WAIT_MS && actors_left(run); ms += STEP_MS)
            usleep(STEP_MS * 1000);
    if (alive == 0)
        alive = mr_seg_clean(run);
    if (alive == 0)
        snprintf(said, bytes, "run %s: its supervisor is gone; removed %u files, %llu bytes, from /dev/shm", run, n,
                 (unsigned long long)size);
    else if (alive == 1)
        snprintf(said, bytes, "run %s is live", run);
    else
        snprintf(said, bytes, "run %s: cannot tell whether its supervisor lives (another user, another container, or just starting)", run);
    return alive == 0 ? 1 : -1;
}
