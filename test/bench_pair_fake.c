/* `millrace-bench pair` over the fake devices of fake_cuda.c: its processes, its questions and its checks, on any machine.
 * usage: bench_pair_fake pair ...        the bench
 *        bench_pair_fake one_fails DIR   it, with a device error in one of its processes: one line says so, all other figures are there */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bench/bench.h"

static int complain(const char *what, int n)
{
    fprintf(stderr, "bench_pair_fake: %s (%d)\n", what, n);
    return 1;
}

static int one_fails(const char *dir)
{
    char *argv[] = {"--scale", "1024"}, log[400], sticky[400], line[400];
    int rc, said = 0, figures = 0, without = 0;
    FILE *f;

    snprintf(log, sizeof log, "%s/bench_pair.%d.log", dir, (int)getpid());
    snprintf(sticky, sizeof sticky, "%s/bench_pair.%d.sticky", dir, (int)getpid());
    if (!(f = fopen(sticky, "we")) || fclose(f) || setenv("FAKE_CUDA_STICKY", sticky, 1) || !freopen(log, "we", stdout))
        return complain("cannot write to the directory", 0);
    rc = mr_bench_pair(2, argv);
    unlink(sticky);
    if (!(f = fopen(log, "re")))
        return complain("no output", 0);
    while (fgets(line, sizeof line, f)) {
        said += strstr(line, ": not measured: ") != NULL;
        figures += strncmp(line, "figure", 6) == 0;
        without += strncmp(line, "figure", 6) == 0 && strstr(line, "not measured") != NULL;
    }
    fclose(f);
    unlink(log);
    if (rc != 1)
        return complain("exit code is not 1", rc);
    if (said != 1 || without != 1)
        return complain("not one figure is missing, with one line that says why", said + 100 * without);
    return figures == 27 ? 0 : complain("27 lines of figures are wanted", figures);
}

int main(int argc, char **argv)
{
    if (argc == 3 && !strcmp(argv[1], "one_fails"))
        return one_fails(argv[2]);
    if (argc < 2 || strcmp(argv[1], "pair") != 0)        /* the bench starts its own program with this word first */
        return fprintf(stderr, "usage: bench_pair_fake pair ... | one_fails DIR\n"), 2;
    return mr_bench_pair(argc - 2, argv + 2);
}
