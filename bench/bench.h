/* millrace-bench: one sub-command a file.  Each takes what follows its name on the command line and returns an exit code (enum mr_exit).
 * A bench never changes a run: `attach` maps it read-only, the others start their own. */
#ifndef MR_BENCH_BENCH_H
#define MR_BENCH_BENCH_H

int mr_bench_attach(int argc, char **argv);
int mr_bench_dispatch(int argc, char **argv);
int mr_bench_ring(int argc, char **argv);
int mr_bench_kernels(int argc, char **argv);
int mr_bench_restart(int argc, char **argv);
int mr_bench_cuda(int argc, char **argv);
int mr_bench_pair(int argc, char **argv);
int mr_bench_target(int argc, char **argv);
int mr_bench_drafter(int argc, char **argv);

#endif
