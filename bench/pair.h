/* The two halves of `millrace-bench pair`: what its processes do (pair_roles.c), and who starts them, asks them and prints (pair.c).
 *
 * A process is this program with `pair --role NAME ...`; it sees one GPU only (CUDA_VISIBLE_DEVICES, as actors do), answers each line of its
 * stdin with one line, "ok" and figures or "error" and a message, and ends with its stdin. */
#ifndef MR_BENCH_PAIR_H
#define MR_BENCH_PAIR_H

enum { PAIR_LINE = 1024 };

/* The sizes of a drafter for Qwen3-8B; `--scale N` divides them. */
enum { PAIR_H = 4096, PAIR_I = 12288, PAIR_ROWS = 8192 };
#define PAIR_SLAB_MAX (2ull << 30)
#define PAIR_SMALL (2ull << 30)
#define PAIR_LARGE (20ull << 30)
#define PAIR_PARAMS 1050000000ull
#define PAIR_CHUNK (16ull << 20)         /* floats */

/* argv: NAME and its arguments.  Returns the exit code. */
int mr_bench_pair_role(int argc, char **argv);

#endif
