/* millrace-bench pair [--from cuda:1] [--to cuda:0] [--scale N]: memory over the link between two GPUs.
 *
 * A keeper on each GPU owns the memory, others map it by CUDA IPC, each process on one GPU and seeing no other: as in a run.
 *   slabs    pulled as drafters pull them, alone; and beside a chain of bf16 products (8192 rows, gate+up and down of Qwen3-8B) on the
 *            GPU that pulls.  A round has the chain alone and then, or before, the chain with pulls that last longer than it: the loss is
 *            the median of the rounds' ratios, so both have the clock of one moment.  The rate is from pulls that end before their chain.
 *            Then the same chain on the GPU that is pulled from.
 *   arenas   opened, closed and opened again, in new processes: the first one a process opens, and another one
 *   sums     of two accumulators, one of them on the other GPU, as `p2p` reads it, by one process and by one on each GPU at once; the same
 *            by copies; NCCL.  Every result is checked.
 * --scale divides all sizes.  FROM = TO measures one GPU, without NCCL.  Exit code 77 where there is only one GPU.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/err.h"
#include "bench/bench.h"
#include "bench/pair.h"
#include "kernels/kernels.h"

enum { SKIPPED = 77, TOTAL_S = 85, ANSWER_S = 30, ROUNDS = 7, OPENERS = 6, ARGS = 8, TO = 0, FROM = 1 };
#define HEX (2 * MR_K_CUDA_HANDLE)
#define CHAIN_MS 60.0                                /* divided by the scale, as the bytes of its pulls are */

struct child {
    const char *what;
    pid_t pid;                                       /* 0: not running */
    int to, from;
    char buf[PAIR_LINE], line[PAIR_LINE];
    size_t used;
};

struct pair {
    uint64_t until_ns;
    int scale, same;
    char uuid[2][MR_K_CUDA_UUID], name[2][64];       /* of TO and FROM */
    char small[HEX + 1], large[HEX + 1], acc[2][HEX + 1];
    struct child keeper[2], rank[2], other, owner;       /* owner: computes where the slabs lie */
    struct mr_err err;
};

/* ---- processes ------------------------------------------------------------------------------------------------------------------- */

/* Starts this program again with `pair --role` and the strings up to NULL, on the GPU `uuid` (NULL: all of them).  0 or -1. */
static int start(struct pair *b, struct child *c, const char *what, const char *uuid, ...)
{
    char *argv[ARGS + 4] = {"millrace-bench", "pair", "--role"};
    int in[2], out[2], n = 3;
    va_list ap;

    va_start(ap, uuid);
    while (n < ARGS + 3 && (argv[n] = va_arg(ap, char *)))
        n++;
    va_end(ap);
    *c = (struct child){.what = what};
    if (pipe2(in, O_CLOEXEC))
        return mr_err_set(&b->err, MR_EXIT_ENV, "%s: no pipe: %s", what, strerror(errno));
    if (pipe2(out, O_CLOEXEC)) {
        close(in[0]), close(in[1]);
        return mr_err_set(&b->err, MR_EXIT_ENV, "%s: no pipe: %s", what, strerror(errno));
    }
    fflush(stdout);
    c->pid = fork();
    if (c->pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (uuid)
            setenv("CUDA_VISIBLE_DEVICES", uuid, 1);
        dup2(in[0], STDIN_FILENO);
        dup2(out[1], STDOUT_FILENO);
        execv("/proc/self/exe", argv);
        _exit(127);
    }
    close(in[0]), close(out[1]);
    c->to = in[1];
    c->from = out[0];
    if (c->pid > 0)
        return 0;
    c->pid = 0;
    close(c->to), close(c->from);
    return mr_err_set(&b->err, MR_EXIT_ENV, "%s: cannot fork: %s", what, strerror(errno));
}

/* Ends one: `kindly` by the end of its stdin, with three seconds for it; else, and then, by SIGKILL, with two. */
static void stop(struct child *c, int kindly)
{
    const struct timespec pause = {.tv_nsec = 2000000};

    if (!c->pid)
        return;
    close(c->to);
    for (int i = kindly ? 0 : 1500; i < 2500 && waitpid(c->pid, NULL, WNOHANG) == 0; i++) {
        if (i == 1500)
            kill(c->pid, SIGKILL);
        nanosleep(&pause, NULL);
    }
    close(c->from);
    c->pid = 0;
}

/* The next line, or NULL with err. */
static const char *answer(struct pair *b, struct child *c)
{
    uint64_t until = mr_now_ns() + ANSWER_S * 1000000000ull;
    char *end;

    if (until > b->until_ns)
        until = b->until_ns;
    while (!(end = memchr(c->buf, '\n', c->used))) {
        struct pollfd p = {.fd = c->from, .events = POLLIN};
        uint64_t now = mr_now_ns();
        ssize_t n = 0;

        if (now >= until || (poll(&p, 1, (int)((until - now) / 1000000 + 1)) == 0)) {
            mr_err_set(&b->err, MR_EXIT_FAILED, "%s did not answer within %d s (%d s for everything)", c->what, ANSWER_S, TOTAL_S);
            return NULL;
        }
        if (p.revents)
            n = read(c->from, c->buf + c->used, sizeof c->buf - c->used);
        if (p.revents && n <= 0) {
            mr_err_set(&b->err, MR_EXIT_FAILED, "%s ended without an answer; stderr above may say why", c->what);
            return NULL;
        }
        c->used += (size_t)(n > 0 ? n : 0);
    }
    *end++ = 0;
    snprintf(c->line, sizeof c->line, "%s", c->buf);
    c->used -= (size_t)(end - c->buf);
    memmove(c->buf, end, c->used);
    if (strncmp(c->line, "error", 5) == 0) {
        mr_err_set(&b->err, MR_EXIT_FAILED, "%s: %s", c->what, c->line + 6);
        return NULL;
    }
    return c->line;
}

/* "ok" and n figures.  0, or -1 with err. */
static int figures(struct pair *b, struct child *c, double *v, int n)
{
    const char *at = answer(b, c);

    if (!at)
        return -1;
    at += strncmp(at, "ok", 2) ? 0 : 2;
    for (int i = 0; i < n; i++) {
        char *end;

        v[i] = strtod(at, &end);
        if (end == at)
            return mr_err_set(&b->err, MR_EXIT_FAILED, "%s answered \"%.200s\", %d figures were wanted", c->what, c->line, n);
        at = end;
    }
    return 0;
}

__attribute__((format(printf, 3, 4))) static int tell(struct pair *b, struct child *c, const char *fmt, ...)
{
    char line[PAIR_LINE];
    va_list ap;
    int n;

    va_start(ap, fmt);
    n = vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    MR_ASSERT(n > 0 && n < (int)sizeof line);
    if (write(c->to, line, (size_t)n) != n)
        return mr_err_set(&b->err, MR_EXIT_FAILED, "%s takes no more commands: %s; stderr above may say why", c->what, strerror(errno));
    return 0;
}

static int by_value(const void *a, const void *b)
{
    return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b);
}

static double median(double *v, int n)
{
    qsort(v, (size_t)n, sizeof *v, by_value);
    return v[n / 2];
}

static double rate(double bytes, double ms)
{
    return bytes * 1e-6 / ms;
}

/* ---- slabs ----------------------------------------------------------------------------------------------------------------------- */

static int chain_of(struct pair *b, struct child *c, int pairs, int pulls, uint64_t bytes, double v[3])
{
    return tell(b, c, "chain %d %d %llu\n", pairs, pulls, (unsigned long long)bytes) || figures(b, c, v, 3);
}

static int chain(struct pair *b, int pairs, int pulls, uint64_t bytes, double v[3])
{
    return chain_of(b, &b->other, pairs, pulls, bytes, v);
}

/* Median milliseconds of one pull alone, or -1. */
static double pull_alone(struct pair *b, uint64_t bytes)
{
    int n = (int)((32ull << 30) / (uint64_t)b->scale / bytes);       /* 80 ms at 400 GB/s */
    double ms[ROUNDS];

    for (int i = -1; i < ROUNDS; i++)
        if (tell(b, &b->other, "pull %d %llu\n", n, (unsigned long long)bytes) || figures(b, &b->other, &ms[i < 0 ? 0 : i], 1))
            return -1.0;
    return median(ms, ROUNDS) / n;
}

/* One line of the table: a pull of these bytes, alone and beside `pairs` pairs of products that last chain_ms. */
static int slab_line(struct pair *b, uint64_t bytes, int pairs, double chain_ms)
{
    double alone = pull_alone(b, bytes), loss[ROUNDS], beside[ROUNDS], v[3], w[3];
    int many = (int)(1.4 * chain_ms / alone) + 2, few = (int)(0.6 * chain_ms / alone), short_chain = 0, short_pull = 0;

    if (alone < 0)
        return -1;
    few = few < 1 ? 1 : few;
    for (int i = 0; i < ROUNDS; i++) {
        double *first = i % 2 ? w : v, *second = i % 2 ? v : w;      /* v: the chain alone, w: with pulls */

        if (chain(b, pairs, i % 2 ? many : 0, bytes, first) || chain(b, pairs, i % 2 ? 0 : many, bytes, second))
            return -1;
        loss[i] = 100.0 * (1.0 - v[0] / w[0]);
        short_pull += w[1] < w[0];
        if (chain(b, pairs, few, bytes, w))
            return -1;
        beside[i] = w[1] / few;
        short_chain += w[2] <= 0.1;
    }
    printf("%8.3f GiB %12.1f %14.1f %15.2f", (double)bytes / 0x1p30, rate((double)bytes, alone), rate((double)bytes, median(beside, ROUNDS)),
           median(loss, ROUNDS));
    printf("    (rounds %.2f to %.2f)%s%s\n", loss[0], loss[ROUNDS - 1], short_pull ? " PULLS ENDED BEFORE THE CHAIN" : "",
           short_chain ? " CHAIN ENDED BEFORE THE PULLS" : "");
    fflush(stdout);
    return 0;
}

static int start_consumer(struct pair *b, struct child *c, const char *what, int at)
{
    char bytes[32], scale[16];
    double ready;

    snprintf(bytes, sizeof bytes, "%llu", PAIR_LARGE / (unsigned)b->scale);
    snprintf(scale, sizeof scale, "%d", b->scale);
    return start(b, c, what, b->uuid[at], "consumer", b->large, bytes, scale, NULL) || figures(b, c, &ready, 1);
}

/* The chain where the slabs lie, alone and while they are pulled: the pulls begin before it and end behind it. */
static int owner_line(struct pair *b, uint64_t bytes, int pairs, double chain_ms)
{
    double alone = pull_alone(b, bytes), loss[ROUNDS] = {0}, v[3], w[3], pulls_ms;
    int n = (int)(1.6 * chain_ms / alone) + 4, short_pull = 0;
    int rc = alone < 0 || start_consumer(b, &b->owner, "the consumer on the GPU that is read", FROM) ||
             chain_of(b, &b->owner, pairs, 0, 0, v);                 /* warms up */

    for (int i = 0; i < ROUNDS && !rc; i++) {
        uint64_t t;

        rc = chain_of(b, &b->owner, pairs, 0, 0, v) || tell(b, &b->other, "pull %d %llu\n", n, (unsigned long long)bytes);
        t = mr_now_ns();
        rc = rc || chain_of(b, &b->owner, pairs, 0, 0, w);
        short_pull += !rc && (double)(mr_now_ns() - t) * 1e-6 > alone * n;
        rc = rc || figures(b, &b->other, &pulls_ms, 1);
        loss[i] = rc ? 0.0 : 100.0 * (1.0 - v[0] / w[0]);
    }
    v[0] = median(loss, ROUNDS);
    if (!rc)
        printf("the chain on the GPU that is read loses %.2f %% to pulls of %.3f GiB    (%.2f to %.2f)%s\n", v[0], (double)bytes / 0x1p30,
               loss[0], loss[ROUNDS - 1], short_pull ? " PULLS ENDED BEFORE THE CHAIN" : "");
    fflush(stdout);
    stop(&b->owner, !rc);
    return rc ? -1 : 0;
}

static int slabs(struct pair *b)
{
    uint64_t unit = (1ull << 28) / (uint64_t)b->scale;
    double v[3], flop = 6.0 * (PAIR_ROWS / b->scale) * (double)(PAIR_I / b->scale) * (PAIR_H / b->scale);      /* of a pair */
    int pairs = 4, rc = start_consumer(b, &b->other, "the consumer", TO);

    for (int i = 0; i < 3 && !rc; i++)                   /* the first one warms up; then how many pairs make a chain */
        rc = chain(b, pairs, 0, 0, v);
    if (!rc) {
        pairs = (int)(CHAIN_MS / b->scale * pairs / v[0]) + 1;
        rc = chain(b, pairs, 0, 0, v);
    }
    if (rc)
        return rc;
    printf("\nslabs; the chain is %d products, %.1f ms, %.0f TFLOP/s\n", 2 * pairs, v[0], flop * pairs / v[0] * 1e-9);
    printf("%12s %12s %14s %15s\n", "slab", "alone GB/s", "beside GB/s", "chain loses %");
    for (int i = 0; i < 4 && !rc; i++)
        rc = slab_line(b, unit << i, pairs, v[0]);
    rc = rc || (!b->same && owner_line(b, unit << 2, pairs, v[0]));
    stop(&b->other, !rc);
    return rc;
}

/* ---- arenas ---------------------------------------------------------------------------------------------------------------------- */

static int keepers_free(struct pair *b, double *mib)
{
    return tell(b, &b->keeper[FROM], "free\n") || figures(b, &b->keeper[FROM], mib, 1);
}

static int arenas(struct pair *b)
{
    double t[2][2][3][OPENERS / 2], used[OPENERS];       /* [small, large][first of its process, another][open, close, again] */
    int rc = 0;

    for (int i = 0; i < OPENERS && !rc; i++) {
        double v[6], before, with;

        rc = start(b, &b->other, "an opener", b->uuid[TO], "open", i % 2 ? b->large : b->small, i % 2 ? b->small : b->large, NULL) ||
             figures(b, &b->other, v, 0) || keepers_free(b, &before) || tell(b, &b->other, "go\n") || figures(b, &b->other, v, 6) ||
             keepers_free(b, &with);
        for (int j = 0; j < 6 && !rc; j++)
            t[(i % 2) ^ (j / 3)][j / 3][j % 3][i / 2] = v[j];
        used[i] = rc ? 0.0 : before - with;
        stop(&b->other, !rc);
    }
    if (rc)
        return rc;
    printf("\narenas, ms; medians of %d processes\n%12s %22s %16s %10s %14s\n", OPENERS / 2, "arena", "first of a process", "another one", "closed",
           "opened again");
    for (int a = 0; a < 2; a++)
        printf("%8.2f GiB %22.3f %16.3f %10.3f %14.3f\n", (double)(a ? PAIR_LARGE : PAIR_SMALL) / 0x1p30 / b->scale,
               median(t[a][0][0], OPENERS / 2), median(t[a][1][0], OPENERS / 2), median(t[a][0][1], OPENERS / 2),
               median(t[a][0][2], OPENERS / 2));
    printf("a process that maps both costs the owner's GPU %.0f MiB\n", median(used, OPENERS));
    fflush(stdout);
    return 0;
}

/* ---- sums ------------------------------------------------------------------------------------------------------------------------ */

struct row {
    const char *command, *what;
    int both;                                            /* at once, one process on each GPU; the time is the later one's */
    double ms[ROUNDS];
};

static int run_row(struct pair *b, const struct row *r, double *ms)
{
    double v[2] = {0, 0};
    int n = r->both ? 2 : 1;

    for (int i = 0; i < n; i++)
        if (tell(b, &b->rank[i], "%s\n", r->command))
            return -1;
    for (int i = 0; i < n; i++)
        if (figures(b, &b->rank[i], &v[i], 1))
            return -1;
    *ms = v[0] > v[1] ? v[0] : v[1];
    return 0;
}

static int table(struct pair *b, struct row *rows, int n)
{
    double bytes = 4.0 * (double)(PAIR_PARAMS / (unsigned)b->scale);

    for (int round = -1; round < ROUNDS; round++)        /* the first one warms up */
        for (int i = 0; i < n; i++)
            if (run_row(b, &rows[i], &rows[i].ms[round < 0 ? 0 : round]))
                return -1;
    for (int i = 0; i < n; i++) {
        double ms = median(rows[i].ms, ROUNDS);

        printf("%-44s %-8s %9.3f %9.1f    (%.3f to %.3f)\n", rows[i].what, rows[i].both ? "both" : "one", ms, rate(bytes, ms), rows[i].ms[0],
               rows[i].ms[ROUNDS - 1]);
    }
    fflush(stdout);
    return 0;
}

static int join(struct pair *b)
{
    double v[2] = {0, 0};
    const char *id;

    if (tell(b, &b->rank[TO], "id\n") || !(id = answer(b, &b->rank[TO])) || tell(b, &b->rank[TO], "join %s\n", id) ||
        tell(b, &b->rank[FROM], "join %s\n", id) || figures(b, &b->rank[TO], &v[0], 1) || figures(b, &b->rank[FROM], &v[1], 1))
        return -1;
    printf("NCCL: joined in %.0f and %.0f ms\n", v[0], v[1]);
    return 0;
}

static int nccl(struct pair *b)
{
    static struct row rows[] = {
        {"f32", "NCCL, fp32", 1, {0}},
        {"bf16", "NCCL, bf16", 1, {0}},
        {"wire", "NCCL, bf16, with both conversions", 1, {0}},
    };
    double version;

    if (tell(b, &b->rank[TO], "version\n") || figures(b, &b->rank[TO], &version, 1))
        return -1;
    if (b->same || version <= 0) {
        printf("NCCL: not measured: %s\n", b->same ? "it wants two GPUs" : "this build has none");
        return 0;
    }
    if (join(b) || table(b, rows, (int)(sizeof rows / sizeof *rows)))
        return -1;
    return tell(b, &b->rank[TO], "leave\n") || tell(b, &b->rank[FROM], "leave\n") || figures(b, &b->rank[TO], NULL, 0) ||
           figures(b, &b->rank[FROM], NULL, 0);
}

static int sums(struct pair *b)
{
    static struct row rows[] = {
        {"local", "sum, both local", 0, {0}},
        {"sum", "sum, one remote (p2p)", 0, {0}},
        {"sum", "sum, one remote (p2p)", 1, {0}},
        {"copies", "sum, the remote one by copies of 64 MiB", 0, {0}},
        {"copies", "sum, the remote one by copies of 64 MiB", 1, {0}},
        {"pull", "copy of the remote one, no sum", 0, {0}},
        {"pull", "copy of the remote one, no sum", 1, {0}},
    };
    char n[32], chunk[32];
    int rc = 0;

    snprintf(n, sizeof n, "%llu", PAIR_PARAMS / (unsigned)b->scale);
    snprintf(chunk, sizeof chunk, "%llu", PAIR_CHUNK / (unsigned)b->scale);
    for (int i = 0; i < 2 && !rc; i++)
        rc = start(b, &b->rank[i], i ? "rank 1" : "rank 0", b->uuid[i], "rank", i ? "1" : "0", b->acc[0], b->acc[1], n, chunk, NULL);
    for (int i = 0; i < 2 && !rc; i++)
        rc = figures(b, &b->rank[i], NULL, 0);
    for (int i = 0; i < 2 && !rc; i++)                   /* when both have filled their accumulators */
        rc = tell(b, &b->rank[i], "reference\n") || figures(b, &b->rank[i], NULL, 0);
    if (rc)
        return rc;
    printf("\nsums of two accumulators of %s floats; GB/s: bytes of one accumulator by the time\n%-44s %-8s %9s %9s\n", n, "", "who", "ms", "GB/s");
    rc = table(b, rows, (int)(sizeof rows / sizeof *rows)) || nccl(b);
    for (int i = 0; i < 2; i++)
        stop(&b->rank[i], !rc);
    return rc;
}

/* ---- set-up ---------------------------------------------------------------------------------------------------------------------- */

static int text_line(struct pair *b, char *out, size_t n)
{
    const char *line = answer(b, &b->other);

    if (line)
        snprintf(out, n, "%s", line);
    return line ? 0 : -1;
}

/* 0; 1: only one GPU, all is said; -1 with err. */
static int look(struct pair *b, const char *from, const char *to)
{
    double n, v[3];
    int rc = start(b, &b->other, "the first look at the GPUs", NULL, "look", from, to, NULL) || figures(b, &b->other, &n, 1);

    if (!rc && n < 2 && strcmp(from, to) != 0) {
        stop(&b->other, 1);
        printf("skipped: needs two GPUs, there %s %.0f\n", n == 1.0 ? "is" : "are", n);
        return 1;
    }
    rc = rc || figures(b, &b->other, v, 3);
    for (int i = 0; i < 2 && !rc; i++)
        rc = text_line(b, b->uuid[i], sizeof b->uuid[i]) || text_line(b, b->name[i], sizeof b->name[i]);
    stop(&b->other, !rc);
    if (rc)
        return -1;
    b->same = v[0] == v[1];
    if (v[2] == 0.0)
        return mr_err_set(&b->err, MR_EXIT_ENV, "%s (%s) and %s (%s) have no peer access to each other (nvidia-smi topo -p2p r); name two GPUs that "
                          "have, by --from and --to", from, b->name[FROM], to, b->name[TO]);
    printf("from %s %s %s\nto   %s %s %s%s\n", from, b->name[FROM], b->uuid[FROM], to, b->name[TO], b->uuid[TO],
           b->same ? "   (the same: no link is measured)" : "");
    return 0;
}

/* Splits a keeper's line into its handles. */
static int handles(struct pair *b, struct child *c, char (*const out[])[HEX + 1], int n)
{
    const char *line = answer(b, c);

    if (!line)
        return -1;
    if (strlen(line) != (size_t)n * (HEX + 1) - 1)
        return mr_err_set(&b->err, MR_EXIT_FAILED, "%s answered \"%.200s\", %d handles were wanted", c->what, line, n);
    for (int i = 0; i < n; i++)
        snprintf(*out[i], sizeof *out[i], "%.*s", HEX, line + i * (HEX + 1));
    return 0;
}

static int keepers(struct pair *b)
{
    char acc[32], small[32], large[32];

    snprintf(acc, sizeof acc, "%llu", PAIR_PARAMS / (unsigned)b->scale * 4);
    snprintf(small, sizeof small, "%llu", PAIR_SMALL / (unsigned)b->scale);
    snprintf(large, sizeof large, "%llu", PAIR_LARGE / (unsigned)b->scale);
    return start(b, &b->keeper[TO], "the keeper of the GPU that reads", b->uuid[TO], "keeper", acc, NULL) ||
           start(b, &b->keeper[FROM], "the keeper of the GPU that is read", b->uuid[FROM], "keeper", acc, small, large, NULL) ||
           handles(b, &b->keeper[TO], (char (*const[])[HEX + 1]){&b->acc[TO]}, 1) ||
           handles(b, &b->keeper[FROM], (char (*const[])[HEX + 1]){&b->acc[FROM], &b->small, &b->large}, 3);
}

static int options(struct pair *b, int argc, char **argv, const char **from, const char **to)
{
    for (int i = 0; i < argc; i++)
        if (!strcmp(argv[i], "--from") && i + 1 < argc)
            *from = argv[++i];
        else if (!strcmp(argv[i], "--to") && i + 1 < argc)
            *to = argv[++i];
        else if (!strcmp(argv[i], "--scale") && i + 1 < argc)
            b->scale = atoi(argv[++i]);
        else
            b->scale = 0;
    if (b->scale >= 1 && b->scale <= 1024 && (b->scale & (b->scale - 1)) == 0)
        return 0;
    fprintf(stderr, "usage: millrace-bench pair [--from cuda:1] [--to cuda:0] [--scale 1|2|4|...|1024]\n");
    return -1;
}

int mr_bench_pair(int argc, char **argv)
{
    static struct pair b;
    const char *from = "cuda:1", *to = "cuda:0";
    int rc;

    if (argc > 0 && !strcmp(argv[0], "--role"))
        return mr_bench_pair_role(argc - 1, argv + 1);
    b = (struct pair){.until_ns = mr_now_ns() + TOTAL_S * 1000000000ull, .scale = 1};
    if (options(&b, argc, argv, &from, &to))
        return MR_EXIT_CONFIG;
    signal(SIGPIPE, SIG_IGN);
    rc = look(&b, from, to);
    if (rc > 0)
        return SKIPPED;
    rc = rc || keepers(&b) || arenas(&b) || slabs(&b) || sums(&b);
    stop(&b.other, 0);
    stop(&b.owner, 0);
    for (int i = 0; i < 2; i++)
        stop(&b.rank[i], 0);
    for (int i = 0; i < 2; i++)
        stop(&b.keeper[i], 0);
    if (!rc)
        return MR_EXIT_OK;
    fprintf(stderr, "millrace-bench: %s\n", b.err.msg);
    return b.err.code ? b.err.code : MR_EXIT_FAILED;
}
