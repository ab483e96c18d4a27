/* millrace-bench pair [--from cuda:1] [--to cuda:0] [--scale N]: memory over the link between two GPUs.
 *
 * A keeper on each GPU owns the memory, others map it by CUDA IPC, each process on one GPU and seeing no other: as in a run.
 *   arenas   opened, closed and opened again, in new processes: the first one a process opens, and another one
 *   sums     of two accumulators, one of them on the other GPU, as `p2p` reads it, by one process and by one on each GPU at once; the same
 *            by copies; NCCL.  Every result is checked.
 *   slabs    pulled as drafters pull them, alone; and beside a chain of bf16 products (8192 rows, gate+up and down of Qwen3-8B) on the
 *            GPU that pulls; then the same chain on the GPU that is pulled from.  The chain is hot before it is timed and has no rest until
 *            its end (pair_consumer.c): nine rounds of a segment with pulls and one without, order alternating, each timed for 250 ms.  The
 *            loss is the median of the rounds' ratios, with the quartiles.  A line without any pulls says what such a figure is worth.
 * A figure that cannot be measured has a line that says why, and does not stop the others.  Figures and goals come again at the end.
 * --scale divides all sizes.  FROM = TO measures one GPU, without NCCL.  Exit code 77 where there is only one GPU, 1 when a figure failed.
 */
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "bench/bench.h"
#include "bench/pair.h"
#include "kernels/kernels.h"

enum { SKIPPED = 77, TOTAL_S = 85, LINE_S = 14, ROUNDS = PAIR_ROUNDS, OPENERS = 6, TO = 0, FROM = 1, FIGURES = 48 };
#define HEX (2 * MR_K_CUDA_HANDLE)
#define TIMED_MS 255.0                               /* of a segment; these two are divided by the scale */
#define WARM_MS 100.0
#define PULL_GOAL 350.0                              /* GB/s */

struct figure {
    char what[64], value[80], goal[16];
    const char *met;
};

struct pair {
    uint64_t until_ns;
    int scale, same, failed, n_figures;
    char uuid[2][MR_K_CUDA_UUID], name[2][64];       /* of TO and FROM */
    char small[HEX + 1], large[HEX + 1], acc[2][HEX + 1];
    struct pair_child keeper[2], rank[2], other, owner;          /* owner: computes where the slabs lie */
    struct mr_err err;
    struct figure figure[FIGURES];
};

/* ---- figures --------------------------------------------------------------------------------------------------------------------- */

__attribute__((format(printf, 3, 4))) static struct figure *figure(struct pair *b, const char *what, const char *fmt, ...)
{
    struct figure *f = &b->figure[b->n_figures < FIGURES ? b->n_figures++ : FIGURES - 1];
    va_list ap;

    snprintf(f->what, sizeof f->what, "%s", what);
    va_start(ap, fmt);
    vsnprintf(f->value, sizeof f->value, fmt, ap);
    va_end(ap);
    snprintf(f->goal, sizeof f->goal, "-");
    f->met = "";
    return f;
}

/* Goals are for whole sizes and a link. */
static void at_least(struct pair *b, struct figure *f, double value, double goal)
{
    if (b->scale > 1 || b->same)
        return;
    snprintf(f->goal, sizeof f->goal, ">= %.0f", goal);
    f->met = value >= goal ? "met" : "NOT MET";
}

/* One line says why there is no figure; those that come later are measured all the same. */
static void no_figure(struct pair *b, const char *what)
{
    printf("%s: not measured: %s\n", what, b->err.msg);
    fflush(stdout);
    figure(b, what, "not measured");
    b->err = (struct mr_err){0};
    b->failed++;
}

/* Lines as tools/device_lib.sh collects them. */
static void print_figures(const struct pair *b)
{
    putchar('\n');
    for (int i = 0; i < b->n_figures; i++) {
        const struct figure *f = &b->figure[i];

        printf("figure\t%-54s\t%-44s\t%s\t%s\n", f->what, f->value, f->goal, f->met);
    }
    fflush(stdout);
}

static int by_value(const void *a, const void *b)
{
    return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b);
}

/* Sorts. */
static double median(double *v, int n)
{
    qsort(v, (size_t)n, sizeof *v, by_value);
    return v[n / 2];
}

static double rate(double bytes, double ms)
{
    return bytes * 1e-6 / ms;
}

static void sleep_ms(double ms)
{
    const struct timespec t = {.tv_sec = (time_t)(ms / 1e3), .tv_nsec = (long)((ms - 1e3 * (double)(time_t)(ms / 1e3)) * 1e6)};

    nanosleep(&t, NULL);
}

/* ---- slabs ----------------------------------------------------------------------------------------------------------------------- */

static int consumer(struct pair *b, struct pair_child *c, const char *what, int at)
{
    char bytes[32], scale[16];

    snprintf(bytes, sizeof bytes, "%llu", PAIR_LARGE / (unsigned)b->scale);
    snprintf(scale, sizeof scale, "%d", b->scale);
    return pair_start(c, what, b->until_ns, &b->err, b->uuid[at], "consumer", b->large, bytes, scale, NULL) || pair_figures(c, NULL, 0);
}

static int pulls_begin(struct pair_child *c, uint64_t bytes)
{
    return pair_tell(c, "begin %llu\n", (unsigned long long)bytes) || pair_figures(c, NULL, 0);
}

static int pulls_end(struct pair_child *c, uint64_t bytes, double *gbs)
{
    double v[2];

    if (pair_tell(c, "end\n") || pair_figures(c, v, 2))
        return -1;
    *gbs = rate((double)bytes * v[0], v[1]);
    return 0;
}

static int pulls_alone(struct pair *b, uint64_t bytes, double *gbs)
{
    double v[ROUNDS];

    for (int i = -1; i < ROUNDS; i++) {                  /* the first one warms up */
        if (pulls_begin(&b->other, bytes))
            return -1;
        sleep_ms(WARM_MS / b->scale);
        if (pulls_end(&b->other, bytes, &v[i < 0 ? 0 : i]))
            return -1;
    }
    *gbs = median(v, ROUNDS);
    return 0;
}

enum who { NOBODY, ITSELF, OTHER };                      /* pulls beside the chain */

struct chain {
    double loss[ROUNDS], without, with, gbs;             /* %, sorted; median ms of what is timed; GB/s of the pulls */
    int pairs;
};

static int chain(struct pair *b, struct pair_child *c, enum who who, uint64_t bytes, struct chain *out)
{
    double v[3], ms[2 * ROUNDS], gbs[ROUNDS], without[ROUNDS], with[ROUNDS];
    int on = 0, n = 0, rc = pair_tell(c, "chain %f %d %llu %d\n", TIMED_MS / b->scale, ROUNDS, (unsigned long long)bytes, who == ITSELF) ||
                           pair_figures(c, v, 3);

    out->pairs = rc ? 0 : (int)v[1];
    for (int i = 0; i < 2 * ROUNDS && !rc; i++) {
        rc = pair_figures(c, v, 3);
        ms[i] = v[0];
        if (!rc && on) {
            if (who == OTHER)
                rc = pulls_end(&b->other, bytes, &v[1]);
            gbs[n++] = v[1];
        }
        on = !rc && v[2] > 0.0;
        if (on && who == OTHER)
            rc = pulls_begin(&b->other, bytes);
    }
    if (rc)
        return -1;
    for (int i = 0; i < ROUNDS; i++) {                   /* without, with; with, without */
        without[i] = ms[2 * i + i % 2];
        with[i] = ms[2 * i + 1 - i % 2];
        out->loss[i] = 100.0 * (1.0 - without[i] / with[i]);
    }
    out->without = median(without, ROUNDS), out->with = median(with, ROUNDS), out->gbs = median(gbs, n);
    median(out->loss, ROUNDS);
    return 0;
}

static void loss_figure(struct pair *b, const struct chain *c, const char *what)
{
    figure(b, what, "%.2f %% (quartiles %.2f, %.2f)", c->loss[ROUNDS / 2], c->loss[ROUNDS / 4], c->loss[ROUNDS - 1 - ROUNDS / 4]);
}

static void chain_line(struct pair *b, const char *what, const char *alone, const char *beside, const struct chain *c)
{
    double flop = 6.0 * (PAIR_ROWS / b->scale) * (double)(PAIR_I / b->scale) * (PAIR_H / b->scale) * c->pairs;

    printf("%16s %10s %11s %9.2f %16.2f to %.2f %15.1f %10.0f\n", what, alone, beside, c->loss[ROUNDS / 2], c->loss[ROUNDS / 4],
           c->loss[ROUNDS - 1 - ROUNDS / 4], c->without, flop / c->without * 1e-9);
    fflush(stdout);
}

static int time_left(struct pair *b)
{
    if (mr_now_ns() + LINE_S * 1000000000ull / (unsigned)b->scale < b->until_ns)
        return 0;
    return mr_err_set(&b->err, MR_EXIT_FAILED, "left out: not enough of the %d s is left", TOTAL_S);
}

/* One line of the table; 0 bytes: no pulls at all. */
static int slab_line(struct pair *b, uint64_t bytes, const char *size)
{
    char what[64], alone_text[16] = "-", beside[16] = "-";
    double alone = 0.0;
    struct chain c;

    if (time_left(b) || (!b->other.pid && consumer(b, &b->other, "the consumer", TO)) || (bytes && pulls_alone(b, bytes, &alone)) ||
        chain(b, &b->other, bytes ? ITSELF : NOBODY, bytes ? bytes : 1, &c))
        return -1;
    if (bytes) {
        snprintf(alone_text, sizeof alone_text, "%.1f", alone);
        snprintf(beside, sizeof beside, "%.1f", c.gbs);
        snprintf(what, sizeof what, "pulls of %s, alone", size);
        at_least(b, figure(b, what, "%.1f GB/s", alone), alone, PULL_GOAL);
        snprintf(what, sizeof what, "pulls of %s, beside products", size);
        at_least(b, figure(b, what, "%.1f GB/s", c.gbs), c.gbs, PULL_GOAL);
    }
    snprintf(what, sizeof what, bytes ? "products lose to pulls of %s" : "products lose to %s (what is noise)", size);
    loss_figure(b, &c, what);
    chain_line(b, size, alone_text, beside, &c);
    return 0;
}

/* The chain where the slabs lie, alone and while they are pulled. */
static int owner_line(struct pair *b, uint64_t bytes, const char *size)
{
    char what[64], beside[16];
    struct chain c;

    if (time_left(b) || (!b->other.pid && consumer(b, &b->other, "the consumer", TO)) ||
        consumer(b, &b->owner, "the consumer on the GPU that is read", FROM) || chain(b, &b->owner, OTHER, bytes, &c))
        return -1;
    snprintf(what, sizeof what, "products on the GPU that is read lose, %.20s", size);
    snprintf(beside, sizeof beside, "%.1f", c.gbs);
    loss_figure(b, &c, what);
    chain_line(b, "owner, the same", "-", beside, &c);
    return 0;
}

static void slabs(struct pair *b)
{
    char size[32];

    printf("\nslabs; the chain on the GPU that pulls, and its loss, of %d rounds; owner: on the GPU that is pulled from\n", ROUNDS);
    printf("%16s %10s %11s %9s %22s %17s %10s\n", "slab", "alone GB/s", "beside GB/s", "loses %", "quartiles", "without pulls ms", "TFLOP/s");
    for (int i = -1; i < 5; i++) {                       /* none, four sizes, the owner */
        uint64_t bytes = i < 0 ? 0 : (1ull << 28 << (i == 4 ? 2 : i)) / (unsigned)b->scale;
        int rc;

        if (i == 4 && b->same)
            break;
        snprintf(size, sizeof size, i < 0 ? "no pulls" : "%.4g GiB", (double)bytes / 0x1p30);
        rc = i == 4 ? owner_line(b, bytes, size) : slab_line(b, bytes, size);
        if (rc) {
            no_figure(b, i == 4 ? "products on the GPU that is read" : size);
            pair_stop(&b->other, 0);
        }
    }
    pair_stop(&b->owner, 1);
    pair_stop(&b->other, 1);
}

/* ---- arenas ---------------------------------------------------------------------------------------------------------------------- */

static int keepers_free(struct pair *b, double *mib)
{
    return pair_tell(&b->keeper[FROM], "free\n") || pair_figures(&b->keeper[FROM], mib, 1);
}

static int open_arenas(struct pair *b, double t[2][2][3][OPENERS / 2], double used[OPENERS])
{
    int rc = 0;

    for (int i = 0; i < OPENERS && !rc; i++) {
        double v[6], before, with;

        rc = pair_start(&b->other, "an opener", b->until_ns, &b->err, b->uuid[TO], "open", i % 2 ? b->large : b->small,
                        i % 2 ? b->small : b->large, NULL) ||
             pair_figures(&b->other, v, 0) || keepers_free(b, &before) || pair_tell(&b->other, "go\n") || pair_figures(&b->other, v, 6) ||
             keepers_free(b, &with);
        for (int j = 0; j < 6 && !rc; j++)
            t[(i % 2) ^ (j / 3)][j / 3][j % 3][i / 2] = v[j];
        used[i] = rc ? 0.0 : before - with;
        pair_stop(&b->other, !rc);
    }
    return rc;
}

static void arenas(struct pair *b)
{
    double t[2][2][3][OPENERS / 2], used[OPENERS];       /* [small, large][first of its process, another][open, close, again] */
    char what[64];

    if (open_arenas(b, t, used)) {
        no_figure(b, "arenas");
        return;
    }
    printf("\narenas, ms; medians of %d processes\n%12s %22s %16s %10s %14s\n", OPENERS / 2, "arena", "first of a process", "another one", "closed",
           "opened again");
    for (int a = 0; a < 2; a++) {
        double gib = (double)(a ? PAIR_LARGE : PAIR_SMALL) / 0x1p30 / b->scale, first = median(t[a][0][0], OPENERS / 2);
        double another = median(t[a][1][0], OPENERS / 2);

        printf("%8.2f GiB %22.3f %16.3f %10.3f %14.3f\n", gib, first, another, median(t[a][0][1], OPENERS / 2), median(t[a][0][2], OPENERS / 2));
        snprintf(what, sizeof what, "arena of %.4g GiB opened", gib);
        figure(b, what, "first of a process %.1f ms, another one %.2f ms", first, another);
    }
    printf("a process that maps both costs the owner's GPU %.0f MiB\n", median(used, OPENERS));
    fflush(stdout);
}

/* ---- sums ------------------------------------------------------------------------------------------------------------------------ */

struct row {
    const char *command, *what;
    int both;                                            /* at once, one process on each GPU; the time is the later one's */
};

static int join(struct pair *b, double v[2])
{
    const char *id;

    return pair_tell(&b->rank[TO], "id\n") || !(id = pair_answer(&b->rank[TO])) || pair_tell(&b->rank[TO], "join %s\n", id) ||
           pair_tell(&b->rank[FROM], "join %s\n", id) || pair_figures(&b->rank[TO], &v[0], 1) || pair_figures(&b->rank[FROM], &v[1], 1);
}

/* Both processes, with their accumulators filled; `nccl`: they map nothing of each other, and have joined, in joined[] ms. */
static int ranks(struct pair *b, int nccl, double joined[2])
{
    char n[32], chunk[32];
    int rc = 0;

    if (b->rank[TO].pid && b->rank[FROM].pid)
        return 0;
    snprintf(n, sizeof n, "%llu", PAIR_PARAMS / (unsigned)b->scale);
    snprintf(chunk, sizeof chunk, "%llu", PAIR_CHUNK / (unsigned)b->scale);
    for (int i = 0; i < 2 && !rc; i++)
        rc = pair_start(&b->rank[i], i ? "rank 1" : "rank 0", b->until_ns, &b->err, b->uuid[i], "rank", i ? "1" : "0", b->acc[i],
                        nccl ? "-" : b->acc[1 - i], n, chunk, NULL);
    for (int i = 0; i < 2 && !rc; i++)
        rc = pair_figures(&b->rank[i], NULL, 0);
    return rc || (nccl && join(b, joined)) ? -1 : 0;
}

static int run_row(struct pair *b, const struct row *r, double *ms)
{
    double v[2] = {0, 0};
    int n = r->both ? 2 : 1;

    for (int i = 0; i < n; i++)
        if (pair_tell(&b->rank[i], "%s\n", r->command))
            return -1;
    for (int i = 0; i < n; i++)
        if (pair_figures(&b->rank[i], &v[i], 1))
            return -1;
    *ms = v[0] > v[1] ? v[0] : v[1];
    return 0;
}

static int row(struct pair *b, const struct row *r, int nccl)
{
    uint64_t t;
    double joined[2], v[ROUNDS], bytes = 4.0 * (double)(PAIR_PARAMS / (unsigned)b->scale), ms;
    char what[64];

    if (ranks(b, nccl, joined))
        return -1;
    t = mr_now_ns();
    do                                                   /* warms up */
        if (run_row(b, r, &v[0]))
            return -1;
    while ((double)(mr_now_ns() - t) * 1e-6 < WARM_MS / b->scale);
    for (int i = 0; i < ROUNDS; i++)
        if (run_row(b, r, &v[i]))
            return -1;
    ms = median(v, ROUNDS);
    printf("%-44s %-8s %9.3f %9.1f    (%.3f to %.3f)\n", r->what, r->both ? "both" : "one", ms, rate(bytes, ms), v[0], v[ROUNDS - 1]);
    fflush(stdout);
    snprintf(what, sizeof what, "%s%s", r->what, r->both ? ", both at once" : "");
    figure(b, what, "%.2f ms, %.0f GB/s", ms, rate(bytes, ms));
    return 0;
}

static void rows(struct pair *b, const struct row *r, int n, int nccl)
{
    char what[64];

    for (int i = 0; i < n; i++)
        if (row(b, &r[i], nccl)) {
            snprintf(what, sizeof what, "%s%s", r[i].what, r[i].both ? ", both at once" : "");
            no_figure(b, what);
            for (int j = 0; j < 2; j++)                  /* the next one begins with new processes */
                pair_stop(&b->rank[j], 0);
        }
}

static void sums(struct pair *b)
{
    static const struct row p2p[] = {
        {"local", "sum, both local", 0},
        {"sum", "sum, one remote (p2p)", 0},
        {"sum", "sum, one remote (p2p)", 1},
        {"copies", "sum, the remote one by copies of 64 MiB", 0},
        {"copies", "sum, the remote one by copies of 64 MiB", 1},
        {"pull", "copy of the remote one, no sum", 0},
        {"pull", "copy of the remote one, no sum", 1},
    };

    printf("\nsums of two accumulators of %llu floats; GB/s: bytes of one accumulator by the time\n%-44s %-8s %9s %9s\n",
           PAIR_PARAMS / (unsigned)b->scale, "", "who", "ms", "GB/s");
    rows(b, p2p, (int)(sizeof p2p / sizeof *p2p), 0);
    for (int i = 0; i < 2; i++)
        pair_stop(&b->rank[i], 1);
}

static void nccl(struct pair *b)
{
    static const struct row all[] = {
        {"f32", "NCCL, fp32", 1},
        {"bf16", "NCCL, bf16", 1},
        {"wire", "NCCL, bf16, with both conversions", 1},
    };
    double joined[2];
    int version = mr_k_comm_version();

    if (b->same || version <= 0) {
        printf("NCCL: left out: %s\n", b->same ? "it wants two GPUs" : "this build has none, or it cannot be opened");
        return;
    }
    if (ranks(b, 1, joined)) {
        no_figure(b, "NCCL: joining");
        for (int i = 0; i < 2; i++)
            pair_stop(&b->rank[i], 0);
        return;
    }
    printf("NCCL %d: joined in %.0f and %.0f ms\n", version, joined[0], joined[1]);
    figure(b, "NCCL: joining", "%.0f ms", joined[0] > joined[1] ? joined[0] : joined[1]);
    rows(b, all, (int)(sizeof all / sizeof *all), 1);
    if (b->rank[TO].pid && b->rank[FROM].pid &&
        (pair_tell(&b->rank[TO], "leave\n") || pair_tell(&b->rank[FROM], "leave\n") || pair_figures(&b->rank[TO], NULL, 0) ||
         pair_figures(&b->rank[FROM], NULL, 0)))
        no_figure(b, "NCCL: leaving");
    for (int i = 0; i < 2; i++)
        pair_stop(&b->rank[i], 1);
}

/* ---- set-up ---------------------------------------------------------------------------------------------------------------------- */

static int text_line(struct pair *b, char *out, size_t n)
{
    const char *line = pair_answer(&b->other);

    if (line)
        snprintf(out, n, "%s", line);
    return line ? 0 : -1;
}

/* 0; 1: only one GPU, all is said; -1 with err. */
static int look(struct pair *b, const char *from, const char *to)
{
    double n, v[3];
    int rc = pair_start(&b->other, "the first look at the GPUs", b->until_ns, &b->err, NULL, "look", from, to, NULL) ||
             pair_figures(&b->other, &n, 1);

    if (!rc && n < 2 && strcmp(from, to) != 0) {
        pair_stop(&b->other, 1);
        printf("skipped: needs two GPUs, there %s %.0f\n", n == 1.0 ? "is" : "are", n);
        return 1;
    }
    rc = rc || pair_figures(&b->other, v, 3);
    for (int i = 0; i < 2 && !rc; i++)
        rc = text_line(b, b->uuid[i], sizeof b->uuid[i]) || text_line(b, b->name[i], sizeof b->name[i]);
    pair_stop(&b->other, !rc);
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
static int handles(struct pair *b, struct pair_child *c, char (*const out[])[HEX + 1], int n)
{
    const char *line = pair_answer(c);

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
    struct pair_child *to = &b->keeper[TO], *from = &b->keeper[FROM];
    char acc[32], small[32], large[32];

    snprintf(acc, sizeof acc, "%llu", PAIR_PARAMS / (unsigned)b->scale * 4);
    snprintf(small, sizeof small, "%llu", PAIR_SMALL / (unsigned)b->scale);
    snprintf(large, sizeof large, "%llu", PAIR_LARGE / (unsigned)b->scale);
    return pair_start(to, "the keeper of the GPU that reads", b->until_ns, &b->err, b->uuid[TO], "keeper", acc, NULL) ||
           pair_start(from, "the keeper of the GPU that is read", b->until_ns, &b->err, b->uuid[FROM], "keeper", acc, small, large, NULL) ||
           handles(b, to, (char (*const[])[HEX + 1]){&b->acc[TO]}, 1) ||
           handles(b, from, (char (*const[])[HEX + 1]){&b->acc[FROM], &b->small, &b->large}, 3);
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
    if (rc == 0 && (rc = keepers(&b)) == 0) {
        arenas(&b);
        sums(&b);
        nccl(&b);
        slabs(&b);
        print_figures(&b);
    }
    pair_stop(&b.other, 0);
    for (int i = 0; i < 2; i++)
        pair_stop(&b.keeper[i], 0);
    if (rc)
        fprintf(stderr, "millrace-bench: %s\n", b.err.msg);
    else if (b.failed)
        fprintf(stderr, "millrace-bench: %d figures could not be measured; the lines above say why\n", b.failed);
    return rc ? (b.err.code ? b.err.code : MR_EXIT_FAILED) : b.failed ? MR_EXIT_FAILED : MR_EXIT_OK;
}
