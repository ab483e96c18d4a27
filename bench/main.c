/* millrace-bench: measures.  `attach` watches a live run; the others make their own load.  Ratios within one run are what counts. */
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "bench/bench.h"

static const struct {
    const char *name, *what;
    int (*main)(int argc, char **argv);
} command[] = {
    {"attach", "[RUN] [--seconds N] [--json]   tokens/s, busy and wait shares, rings, slabs of a live run", mr_bench_attach},
    {"dispatch", "[--seconds N] [--json]         idle share of drafters: bucket rings against a static i % D assignment", mr_bench_dispatch},
    {"ring", "[--runs N] [--json]            latency and throughput of the rings, beside their peers", mr_bench_ring},
    {"restart", "[--runs N] [--json]            from SIGKILL of an actor to its items being claimable again", mr_bench_restart},
    {"kernels", "[--json] [--threads N]         the cpu kernels at the demo's shapes", mr_bench_kernels},
    {"target", "--config DIR [--device D] ...  a target's forward pass beside its own matrix products", mr_bench_target},
    {"drafter", "--config DIR [--device D] ...  a drafter's whole optimizer step, without a target", mr_bench_drafter},
    {"pair", "[--from cuda:1] [--to cuda:0]  memory over the link between two GPUs: pulls, arenas, sums", mr_bench_pair},
#ifdef MR_HAVE_CUDA
    {"cuda", "[NAME] [--device N]            the cuda kernels at the shapes of Qwen3-8B", mr_bench_cuda},
#endif
};
enum { COMMANDS = sizeof command / sizeof command[0] };

static int usage(FILE *f, int code)
{
    fprintf(f, "usage: millrace-bench COMMAND ...\n");
    for (int i = 0; i < COMMANDS; i++)
        fprintf(f, "  %-9s %s\n", command[i].name, command[i].what);
    return code;
}

static int asks_for_help(const char *arg)
{
    return !strcmp(arg, "--help") || !strcmp(arg, "-h");
}

static int start(int i, int argc, char **argv)
{
    const int itself = command[i].main == mr_bench_target || command[i].main == mr_bench_drafter; /* these have more options than a line */

    if (argc == 0 || itself || !asks_for_help(argv[0]))
        return command[i].main(argc, argv);
    printf("usage: millrace-bench %s %s\n", command[i].name, command[i].what);
    return MR_EXIT_OK;
}

int main(int argc, char **argv)
{
    if (argc >= 2 && asks_for_help(argv[1]))
        return usage(stdout, MR_EXIT_OK);
    for (int i = 0; argc >= 2 && i < COMMANDS; i++)
        if (!strcmp(argv[1], command[i].name))
            return start(i, argc - 2, argv + 2);
    if (argc >= 2)
        fprintf(stderr, "millrace-bench: no command \"%s\"\n", argv[1]);
    return usage(stderr, MR_EXIT_CONFIG);
}
