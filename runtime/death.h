/* One sentence about how a process ended, from what is known for certain: its exit status, the cgroup's out-of-memory count, our own
 * reason. */
#ifndef MR_RUNTIME_DEATH_H
#define MR_RUNTIME_DEATH_H

#include <stddef.h>
#include <stdint.h>

/* Why we ourselves sent SIGKILL or asked it to leave. */
enum mr_kill_reason { MR_KILL_NONE, MR_KILL_HANG, MR_KILL_STOPPED, MR_KILL_RESTART, MR_KILL_KEEPER, MR_KILL_END };

struct mr_death {
    int code, sig; /* as mr_child_reap gives them */
    enum mr_kill_reason why;
    int drained, acked; /* the row said so at the end */
    int oom;            /* mr_oom_kills went up since the last look */
};

/* "failed: exit code 1", "was killed from outside (SIGKILL)", ...: the text after the actor's name. */
void mr_death_sentence(const struct mr_death *d, char *out, size_t bytes);

/* oom_kill of our cgroup's memory.events, or of the machine where there is none; 0 when neither can be read. */
uint64_t mr_oom_kills(void);

#endif
