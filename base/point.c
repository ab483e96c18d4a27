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

enum { SEEN_MAX = 256, FAULTS_MAX = 4 };

static struct fault {
    char name[64];
    long n;
    atomic_long passed;
} point_fault[FAULTS_MAX];

static char point_role[48] = "?";
static const char *_Atomic point_seen[SEEN_MAX];

/* "NAME:N[:ROLE]"; a fault of another role keeps an empty name. */
static void parse(struct fault *f, const char *spec, const char *role)
{
    char want[48] = "";

    if (sscanf(spec, "%63[^:]:%ld:%47[^,]", f->name, &f->n, want) < 2 || strncmp(role, want, strlen(want)) != 0)
        f->name[0] = 0;
}

void mr_point_init(const char *role)
{
    const char *spec = getenv("MR_FAULT");

    snprintf(point_role, sizeof point_role, "%s", role);
    for (int i = 0; i < FAULTS_MAX; i++) {
        point_fault[i].name[0] = 0;
        if (spec && *spec)
            parse(&point_fault[i], spec, role);
        spec = spec ? strchr(spec, ',') : NULL;
        spec = spec ? spec + 1 : NULL;
    }
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
static void die(int k)
{
    const char *once = getenv("MR_FAULT_ONCE");
    char path[512];

    snprintf(path, sizeof path, "%s.%d", once ? once : "", k);
    if (!once || open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600) >= 0)
        raise(getenv("MR_FAULT_STOP") ? SIGSTOP : SIGKILL);
}

static void remember(const char *name)
{
    for (int i = 0; i < SEEN_MAX; i++) {
        const char *at = atomic_load(&point_seen[i]), *none = NULL;

        if (at == name || (at && strcmp(at, name) == 0))
            return;
        if (!at && atomic_compare_exchange_strong(&point_seen[i], &none, name)) {
            trace(name);
            return;
        }
    }
}

void mr_point_hit(const char *name)
{
    remember(name);
    for (int k = 0; k < FAULTS_MAX; k++) {
        struct fault *f = &point_fault[k];

        if (f->name[0] && strcmp(name, f->name) == 0 && atomic_fetch_add(&f->passed, 1) + 1 == f->n)
            die(k);
    }
}
#endif
