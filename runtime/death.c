/* How a process ended: see death.h. */
#include "runtime/death.h"

#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"

static const char *code_meaning(int code)
{
    switch (code) {
    case MR_EXIT_CONFIG:
        return " (configuration)";
    case MR_EXIT_ENV:
        return " (environment: device, memory or files)";
    case MR_EXIT_CUDA:
        return " (a CUDA error that spoils the whole process)";
    case MR_EXIT_ORPHAN:
        return " (it believed its supervisor gone)";
    default:
        return "";
    }
}

static const char *signal_meaning(int sig)
{
    switch (sig) {
    case SIGSEGV:
        return "an invalid memory access";
    case SIGBUS:
        return "a mapped file was cut or its memory could not be had: is /dev/shm or a disk full?";
    case SIGILL:
        return "an instruction that this processor does not have";
    case SIGFPE:
        return "an arithmetic fault";
    case SIGABRT:
        return "it gave up on an inner contradiction; the lines above say which";
    default:
        return "from outside";
    }
}

static void killed_sentence(const struct mr_death *d, char *out, size_t bytes)
{
    static const char *const by_us[] = {
        [MR_KILL_HANG] = "was killed by the supervisor: no progress and not waiting",
        [MR_KILL_STOPPED] = "was killed by the supervisor: it stood stopped (SIGSTOP or a debugger)",
        [MR_KILL_RESTART] = "was killed for a restart",
        [MR_KILL_KEEPER] = "was killed because the keeper of its device died: it starts afresh on the next one's memory",
        [MR_KILL_END] = "was killed at the end of the run",
    };

    if (d->why != MR_KILL_NONE)
        snprintf(out, bytes, "%s", by_us[d->why]);
    else if (d->sig == SIGKILL && d->oom)
        snprintf(out, bytes, "was killed by the kernel: out of memory (the oom_kill count of its cgroup, or of the machine, went up)");
    else
        snprintf(out, bytes, "was killed from outside (SIGKILL)");
}

void mr_death_sentence(const struct mr_death *d, char *out, size_t bytes)
{
    if (d->sig == SIGKILL)
        killed_sentence(d, out, bytes);
    else if (d->sig)
        snprintf(out, bytes, "died of SIG%s: %s", sigabbrev_np(d->sig) ? sigabbrev_np(d->sig) : "?", signal_meaning(d->sig));
    else if (d->code == 0 && d->acked)
        snprintf(out, bytes, "acknowledged the end and left");
    else if (d->code == 0 && d->drained)
        snprintf(out, bytes, "left on request");
    else if (d->code == 0)
        snprintf(out, bytes, "left with exit code 0 before the end");
    else
        snprintf(out, bytes, "failed: exit code %d%s", d->code, code_meaning(d->code));
}

static uint64_t oom_of(const char *path)
{
    FILE *f = fopen(path, "re");
    char line[128];
    uint64_t n = 0;

    if (!f) /* no cgroup v2: the whole machine's */
        f = fopen("/proc/vmstat", "re");

    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "oom_kill %" SCNu64, &n) == 1)
            break;
    if (f)
        fclose(f);
    return n;
}

uint64_t mr_oom_kills(void)
{
    FILE *f = fopen("/proc/self/cgroup", "re");
    char line[512], path[700] = "/sys/fs/cgroup/memory.events";

    while (f && fgets(line, sizeof line, f)) {
        line[strcspn(line, "\n")] = 0;
        if (strncmp(line, "0::", 3) == 0) /* cgroup v2; "/" in a container's own namespace */
            snprintf(path, sizeof path, "/sys/fs/cgroup%s/memory.events", strcmp(line + 3, "/") ? line + 3 : "");
    }
    if (f)
        fclose(f);
    return oom_of(path);
}
