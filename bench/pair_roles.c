/* The processes of `millrace-bench pair` (see pair.h): each is the only one that computes on its GPU while it is asked.
 *
 *     look FROM TO               which devices there are; three lines, then the end
 *     keeper BYTES...            owns arenas and says their handles; "free": MiB that are free on its GPU
 *     open A B                   opens, closes and opens again, one arena after the other
 *     consumer ARENA BYTES N     pair_consumer.c
 *     rank R OWN OTHER N CHUNK   pair_rank.c
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/err.h"
#include "bench/pair.h"
#include "kernels/kernels.h"

enum { ARENAS = 4 };

char pair_why[512];

static void line(const char *begin, const char *fmt, va_list ap)
{
    fputs(begin, stdout);
    vprintf(fmt, ap);
    putchar('\n');
    fflush(stdout);
}

void pair_say(const char *fmt, ...)
{
    va_list ap;

    va_start(ap, fmt);
    line("", fmt, ap);
    va_end(ap);
}

void pair_fail(const char *fmt, ...)
{
    va_list ap;

    va_start(ap, fmt);
    line("error ", fmt, ap);
    va_end(ap);
    exit(MR_EXIT_FAILED);
}

void pair_must(int rc, const char *what)
{
    if (rc)
        pair_fail("%s failed%s%s%s%s", what, rc < 0 ? ": " : "", rc < 0 ? strerror(-rc) : "", *pair_why ? ": " : "", pair_why);
}

double pair_ms_since(uint64_t ns)
{
    return (double)(mr_now_ns() - ns) * 1e-6;
}

struct mr_k *pair_context(void)
{
    struct mr_k *k = mr_k_cuda_create(0, 0, pair_why, sizeof pair_why);

    if (!k)
        pair_fail("%s", pair_why);
    return k;
}

void *pair_room(struct mr_k *k, uint64_t bytes)
{
    void *p = k->op->alloc(k, bytes);

    if (!p)
        pair_fail("%llu bytes do not fit on the device", (unsigned long long)bytes);
    return p;
}

void *pair_open(const char *hex)
{
    uint8_t handle[MR_K_CUDA_HANDLE];
    void *base = NULL;

    if (strlen(hex) != 2 * MR_K_CUDA_HANDLE)
        pair_fail("\"%.200s\" is not a handle", hex);
    for (int i = 0; i < MR_K_CUDA_HANDLE; i++) {
        char two[3] = {hex[2 * i], hex[2 * i + 1], 0};

        handle[i] = (uint8_t)strtoul(two, NULL, 16);
    }
    pair_must(mr_k_cuda_arena_open(handle, &base, pair_why, sizeof pair_why), "opening an arena");
    return base;
}

/* ---- look, keeper, open ---------------------------------------------------------------------------------------------------------- */

static int role_look(const char *from, const char *to)
{
    struct mr_k_cuda_device d[MR_K_CUDA_DEVICES];
    int n = 0, f = 0, t = 0;

    if (mr_k_cuda_devices(d, &n, pair_why, sizeof pair_why))
        n = 0;                                       /* no driver, or a build without CUDA */
    pair_say("ok %d", n);
    if (n < 2 && strcmp(from, to) != 0)
        return MR_EXIT_OK;
    pair_must(mr_k_cuda_resolve(to, &t, pair_why, sizeof pair_why), to);
    pair_must(mr_k_cuda_resolve(from, &f, pair_why, sizeof pair_why), from);
    pair_say("ok %d %d %d", t, f, d[t].peer[f] && d[f].peer[t]);
    pair_say("%s\n%s\n%s\n%s", d[t].uuid, d[t].name, d[f].uuid, d[f].name);
    return MR_EXIT_OK;
}

static int role_keeper(int n, char **bytes)
{
    uint8_t handle[MR_K_CUDA_HANDLE];
    char uuid[MR_K_CUDA_UUID], text[ARENAS * (2 * MR_K_CUDA_HANDLE + 1) + 1] = "", line[PAIR_LINE];
    uint64_t free_bytes, total;
    void *base;

    if (n > ARENAS)
        pair_fail("%d arenas, at most %d", n, ARENAS);
    pair_must(mr_k_cuda_use(0, pair_why, sizeof pair_why), "a keeper's device");
    for (int a = 0; a < n; a++) {
        pair_must(mr_k_cuda_arena_alloc(strtoull(bytes[a], NULL, 10), &base, handle, uuid, pair_why, sizeof pair_why), "an arena's memory");
        strcat(text, a ? " " : "");
        for (int i = 0; i < MR_K_CUDA_HANDLE; i++)
            sprintf(text + strlen(text), "%02x", handle[i]);
    }
    pair_say("%s", text);
    while (fgets(line, sizeof line, stdin)) {
        pair_must(mr_k_cuda_mem_info(&free_bytes, &total, pair_why, sizeof pair_why), "asking for free memory");
        pair_say("ok %llu", (unsigned long long)(free_bytes >> 20));
    }
    return MR_EXIT_OK;
}

static void open_thrice(const char *hex, double ms[3])
{
    uint64_t t = mr_now_ns();
    void *p = pair_open(hex);

    ms[0] = pair_ms_since(t);
    t = mr_now_ns();
    mr_k_cuda_arena_close(p);
    ms[1] = pair_ms_since(t);
    t = mr_now_ns();
    pair_open(hex);
    ms[2] = pair_ms_since(t);
}

static int role_open(const char *a, const char *b)
{
    char line[PAIR_LINE];
    double x[3], y[3];

    pair_must(mr_k_cuda_use(0, pair_why, sizeof pair_why), "a device");
    pair_say("ok");
    if (!fgets(line, sizeof line, stdin))
        return MR_EXIT_OK;
    open_thrice(a, x);
    open_thrice(b, y);
    pair_say("ok %.4f %.4f %.4f %.4f %.4f %.4f", x[0], x[1], x[2], y[0], y[1], y[2]);
    while (fgets(line, sizeof line, stdin))          /* what is open stays open */
        ;
    return MR_EXIT_OK;
}

int mr_bench_pair_role(int argc, char **argv)
{
    const char *name = argc ? argv[0] : "";

    if (!strcmp(name, "look") && argc == 3)
        return role_look(argv[1], argv[2]);
    if (!strcmp(name, "keeper") && argc > 1)
        return role_keeper(argc - 1, argv + 1);
    if (!strcmp(name, "open") && argc == 3)
        return role_open(argv[1], argv[2]);
    if (!strcmp(name, "consumer") && argc == 4)
        return pair_consumer(argv[1], strtoull(argv[2], NULL, 10), atoi(argv[3]));
    if (!strcmp(name, "rank") && argc == 6)
        return pair_rank(atoi(argv[1]), argv[2], argv[3], strtoull(argv[4], NULL, 10), strtoull(argv[5], NULL, 10));
    fprintf(stderr, "millrace-bench: no role \"%s\" with %d arguments\n", name, argc - 1);
    return MR_EXIT_CONFIG;
}
