/* Two looks at a live run, and what happened between them. */
#ifndef MR_BENCH_SAMPLE_H
#define MR_BENCH_SAMPLE_H

#include <stdint.h>

#include "ipc/seg.h"

struct mr_bench_actor {
    uint64_t busy_ns, wait_ns[MR_WAIT_REASONS], items, tokens, draft_tokens;
    uint32_t restarts;
};

struct mr_bench_look {
    uint64_t at_ns;
    unsigned step, committed;
    uint64_t tokens_done, draft_tokens_done;
    struct mr_bench_actor actor[MR_MAX_ACTORS];
};

/* Reads all counters of the run now.  Counters of different actors are not read at one instant. */
void mr_bench_look(const struct mr_seg *s, struct mr_bench_look *look);

/* Finds the run to attach to: `name`, or the only live one.  0, or -1 with err (MR_EXIT_CONFIG: none, or several with their names). */
int mr_bench_find(const char *name, char run[MR_NAME_MAX], struct mr_err *err);

#endif
