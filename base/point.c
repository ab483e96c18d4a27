/* Named fault points: see point.h.  Empty unless MR_FAULT_POINTS is defined. */
#include "base/point.h"

#ifdef MR_FAULT_POINTS
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SEEN_MAX = 256 };

static char point_role[48] = "?";
static char point_name[96];
static long point_n;
static atomic_long point_passed;
static const char *_Atomic point_seen[SEEN_MAX];

void mr_point_init(const char *role)
{
    const char *spec = getenv("MR_FAULT");
    char want[48] = "";

    snprintf(point_role, sizeof point_role, "%s", role);
    point_name[0] = 0;
    if (spec && sscanf(spec, "%95[^:]:%ld:%47s", point_name, &point_n, want) >= 2 && strncmp(role, want, strlen(want)) != 0)
        point_name[0] = 0;
}

/* First passage of a point in this process: one O_APPEND write, so lines of several processes do not mix. */
static void trace(const char *name)
{
    const char *path = getenv("MR_FAULT_TRACE");
    char line[160];
    int fd, n;

    if (!path || (fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600)) < 0)
        return;
    n = snprintf(line, sizeof line, "%s %s\n", point_role, name);
    ssize_t w = write(fd, line, (size_t)n);
    (void)w;
    close(fd);
}

/* MR_FAULT_ONCE: the first process that gets here dies, its successor does not. */
static void die(void)
{
    const char *once = getenv("MR_FAULT_ONCE");

    if (!once || open(once, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600) >= 0)
        raise(SIGKILL);
}

void mr_point_hit(const char *name)
{
    for (int i = 0; i < SEEN_MAX; i++) {
        const char *at = atomic_load(&point_seen[i]), *none = NULL;

        if (at == name || (at && strcmp(at, name) == 0))
            break;
        if (!at && atomic_compare_exchange_strong(&point_seen[i], &none, name)) {
            trace(name);
            break;
        }
    }
    if (point_name[0] && strcmp(name, point_name) == 0 && atomic_fetch_add(&point_passed, 1) + 1 == point_n)
        die();
}
#endif
