/* The halves of `millrace-bench pair`: what its processes do (pair_roles.c, pair_consumer.c, pair_rank.c), who starts and asks them
 * (pair_ask.c), and who asks what and prints (pair.c).
 *
 * A process is this program with `pair --role NAME ...`; it sees one GPU only (CUDA_VISIBLE_DEVICES, as actors do), answers each line of its
 * stdin with one line, "ok" and figures or "error" and a message, and ends with its stdin.  "chain" has several lines as its answer. */
#ifndef MR_BENCH_PAIR_H
#define MR_BENCH_PAIR_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "base/err.h"

struct mr_k;

enum { PAIR_LINE = 1024, PAIR_ROUNDS = 9 };

/* The sizes of a drafter for Qwen3-8B; `--scale N` divides them.  The elements of an accumulator are a multiple of 4096, as of a real one. */
enum { PAIR_H = 4096, PAIR_I = 12288, PAIR_ROWS = 8192 };
#define PAIR_SLAB_MAX (2ull << 30)
#define PAIR_SMALL (2ull << 30)
#define PAIR_LARGE (20ull << 30)
#define PAIR_PARAMS 1050673152ull
#define PAIR_CHUNK (16ull << 20)         /* floats */

/* argv: NAME and its arguments.  Returns the exit code. */
int mr_bench_pair_role(int argc, char **argv);

/* ---- inside a process (pair_roles.c) ----------------------------------------------------------------------------------------------- */

extern char pair_why[512];               /* what a call of kernels.h says */

__attribute__((format(printf, 1, 2))) void pair_say(const char *fmt, ...);
/* Says "error" and the text; the process ends. */
__attribute__((format(printf, 1, 2), noreturn)) void pair_fail(const char *fmt, ...);
/* Nothing when rc is 0; else as pair_fail, with the call, its code and pair_why. */
void pair_must(int rc, const char *what);
double pair_ms_since(uint64_t ns);
struct mr_k *pair_context(void);
void *pair_room(struct mr_k *k, uint64_t bytes);
void *pair_open(const char *hex);

int pair_consumer(const char *hex, uint64_t bytes, int scale);                                     /* pair_consumer.c */
int pair_rank(int me, const char *own, const char *other, size_t P, size_t chunk);                 /* pair_rank.c */

/* ---- asking processes (pair_ask.c): 0, or -1 with a message in err ------------------------------------------------------------------ */

struct pair_child {
    const char *what;
    pid_t pid;                           /* 0: not running */
    int to, from;
    char buf[PAIR_LINE], line[PAIR_LINE];
    size_t used;
    uint64_t until_ns;                   /* nobody waits for an answer beyond this */
    struct mr_err *err;
};

/* Starts this program again with `pair --role` and the strings up to NULL, on the GPU `uuid` (NULL: all of them). */
int pair_start(struct pair_child *c, const char *what, uint64_t until_ns, struct mr_err *err, const char *uuid, ...);
/* Ends one: `kindly` by the end of its stdin, with three seconds for it; else, and then, by SIGKILL, with two. */
void pair_stop(struct pair_child *c, int kindly);
__attribute__((format(printf, 2, 3))) int pair_tell(struct pair_child *c, const char *fmt, ...);
/* The next line, or NULL with err. */
const char *pair_answer(struct pair_child *c);
/* "ok" and n figures. */
int pair_figures(struct pair_child *c, double *v, int n);

#endif
