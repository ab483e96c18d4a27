/* `millrace-bench pair` over the fake devices of fake_cuda.c: its processes, its questions and its checks, on any machine. */
#include <stdio.h>
#include <string.h>

#include "bench/bench.h"

int main(int argc, char **argv)
{
    if (argc < 2 || strcmp(argv[1], "pair") != 0)        /* the bench starts its own program with this word first */
        return fprintf(stderr, "usage: bench_pair_fake pair ...\n"), 2;
    return mr_bench_pair(argc - 2, argv + 2);
}
