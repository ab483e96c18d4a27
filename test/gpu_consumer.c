/* gpu_consumer: real keepers, feeder and targets, and a test consumer in the place of the drafters, all on GPUs.
 *
 *     gpu_consumer --actor PATH --topology FILE --items N [--kills K] [--rss MIB] [--set /pointer=value]... [--wide]
 *     --wide: slabs for f32 activations, those of the fake device
 *
 * The parent is the supervisor: it makes the segments, starts the actors, gives back what the dead held, and never touches CUDA.  The consumer
 * is this program again: it pulls every slab through double-buffered copies, looks at the first and the last row, and frees the microbatch.
 * Checked: every plan position of N comes exactly once; hidden states are finite and not all zero; after K SIGKILLs of targets each new
 * incarnation publishes; a target's resident memory stays below --rss: no hidden state passes through the host.  One line a figure. */
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "actors/backend.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/rng.h"
#include "ipc/atomic.h"
#include "ipc/item.h"
#include "ipc/recover.h"
#include "ipc/wait.h"
#include "runtime/shm_plan.h"
#include "runtime/spawn.h"

#define LIMIT_NS 400000000000u

static void need(int ok, const char *what, const struct mr_err *err)
{
    if (ok)
        return;
    fprintf(stderr, "FAILED: %s%s%s\n", what, err ? ": " : "", err ? err->msg : "");
    exit(1);
}

static void pause_ms(int ms)
{
    nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000}, NULL);
}

/* ---- the consumer --------------------------------------------------------------------------------------------------------------- */

struct consumer {
    struct mr_seg seg;
    struct mr_arena_map map;
    struct mr_k *k;
    struct mr_k_pull *pull;
    void *stage[2];
    float *f32;                  /* device: two rows */
    unsigned slot, columns, n;
    unsigned char *seen;
    struct { int idx; uint64_t word; } held[2];
};

static int claim(struct consumer *c, uint64_t *word)
{
    for (unsigned b = 0; b < c->seg.hdr->n_buckets; b++) {
        int idx = mr_item_draft(&c->seg, b, 0, c->slot, 1, word);

        if (idx >= 0)
            return idx;
    }
    return -EAGAIN;
}

static void look_at(struct consumer *c, const void *stage, unsigned tokens)
{
    const struct mr_k_ops *op = c->k->op;
    size_t row = c->columns * (size_t)c->k->act_bytes;
    float *host = calloc(2 * (size_t)c->columns, sizeof *host);
    double sum = 0;

    need(!op->act_to_f32(c->k, c->f32, stage, c->columns) &&
         !op->act_to_f32(c->k, c->f32 + c->columns, (const char *)stage + (tokens - 1) * row, c->columns) &&
         !op->d2h(c->k, host, c->f32, 2 * sizeof(float) * c->columns) && !op->sync(c->k), "reading the staging place", NULL);
    for (unsigned i = 0; i < 2 * c->columns; i++)
        sum += fabs(host[i]);
    need(isfinite(sum) && sum > 0, "hidden states are not finite, or all zero", NULL);
    free(host);
}

/* The oldest pull is complete: look, then free slab and item. */
static void finish(struct consumer *c, int place)
{
    int idx = c->held[place].idx;
    unsigned pos = mr_w_pos(c->held[place].word), tokens = c->seg.items[idx].n_tokens;

    need(!mr_k_cuda_pull_use(c->k, c->pull, place) && !mr_k_cuda_pull_wait(c->k, c->pull, place), "pull", NULL);
    look_at(c, c->stage[place], tokens);
    need(!c->seen[pos]++, "a microbatch came twice", NULL);
    need(!mr_item_accumulated(&c->seg, (unsigned)idx, &c->held[place].word) && !mr_item_free(&c->seg, (unsigned)idx, &c->held[place].word),
         "freeing", NULL);
    mr_add_relaxed(&c->seg.actors[c->slot].items, 1);
    mr_add_relaxed(&c->seg.actors[c->slot].tokens, tokens);
    c->n++;
}

static int begin(struct consumer *c, int place, int idx, uint64_t word)
{
    const struct mr_item *it = &c->seg.items[idx];
    struct mr_err err = {0};
    char *base;

    if (!mr_arena_current(&c->seg, (unsigned)idx))
        return mr_item_requeue(&c->seg, (unsigned)idx, &word);
    base = mr_arena_base(&c->map, &c->seg, it->arena, it->generation, &err);
    need(base != NULL, "arena", &err);
    c->held[place].idx = idx;
    c->held[place].word = word;
    need(!mr_k_cuda_pull_begin(c->k, c->pull, place, c->stage[place], base + it->offset,
                               (size_t)it->n_tokens * c->columns * (size_t)c->k->act_bytes), "pull", NULL);
    return 1;
}

static void consume(struct consumer *c, unsigned items)
{
    int pending = -1, place = 0;

    while (c->n < items && !mr_ld(&c->seg.hdr->abort)) {
        struct mr_evc *evc = &c->seg.hdr->evc[MR_DRAFTER];
        uint32_t seq = mr_evc_read(evc);
        uint64_t word;
        int idx = claim(c, &word), begun = idx >= 0 ? begin(c, place, idx, word) : 0;

        if (pending >= 0)
            finish(c, pending);
        pending = begun ? place : -1;
        place = begun ? !place : place;
        if (!begun && idx < 0)
            mr_evc_wait(&c->seg, evc, seq, 100, NULL, MR_WAIT_READY);
    }
    if (pending >= 0)
        finish(c, pending);
}

static int consumer_main(char **argv)
{
    struct consumer c = {.slot = (unsigned)atoi(argv[3]), .columns = (unsigned)atoi(argv[4])};
    struct mr_err err = {0};
    uint64_t slab;

    mr_log_init("consumer", MR_LOG_INFO);
    need(!mr_seg_open(&c.seg, argv[2], 1, &err), "segment", &err);
    c.k = mr_backend_open(argv[6], 1, 0, &err);
    need(c.k != NULL, "context", &err);
    c.map.open_cuda = mr_backend_arena_open;
    c.map.close_cuda = mr_backend_arena_close;
    slab = c.seg.slabs[0].bytes * (uint64_t)c.k->act_bytes / 2;
    c.pull = mr_k_cuda_pull_create(c.k);
    c.stage[0] = c.k->op->alloc(c.k, slab);
    c.stage[1] = c.k->op->alloc(c.k, slab);
    c.f32 = c.k->op->alloc(c.k, 2 * sizeof(float) * c.columns);
    c.seen = calloc(c.seg.hdr->microbatches_total + 1u, 1);
    need(c.pull && c.stage[0] && c.stage[1] && c.f32 && c.seen, "memory", NULL);
    consume(&c, (unsigned)atoi(argv[5]));
    for (unsigned i = 0; i < c.n && !mr_ld(&c.seg.hdr->abort); i++)
        need(c.seen[i] || c.n < c.seg.hdr->microbatches_total, "a microbatch is missing", NULL);
    mr_arena_close_all(&c.map);
    return 0;
}

/* ---- the supervisor --------------------------------------------------------------------------------------------------------------- */

struct sup {
    const char *actor, *self;
    struct mr_topology t;
    struct mr_checked c;
    struct mr_seg seg;
    struct mr_child child[MR_MAX_ACTORS];
    char dir[64], topo_path[96];
    int event_fd, death[2], items, kills, wide;
    long rss_limit;
    int over;                    /* the consumer has all it wants */
    unsigned deaths, expected;   /* deaths; those that we caused */
    double worst_ms, sum_ms;
};

static void spawn(struct sup *s, unsigned slot)
{
    struct mr_actor_row *row = &s->seg.actors[slot];
    char n[16], inc[16], event_fd[16], death_fd[16], columns[16], items[16];
    char *actor[] = {(char *)"millrace-actor", (char *)"--run", s->seg.run, (char *)"--slot", n, (char *)"--incarnation", inc,
                     (char *)"--topology", s->topo_path, (char *)"--event-fd", event_fd, (char *)"--death-fd", death_fd, NULL};
    char *consumer[] = {(char *)"gpu_consumer", (char *)"--consume", s->seg.run, n, columns, items, row->device, NULL};
    int keep[] = {s->event_fd, s->death[0]}, drafter = row->kind == MR_DRAFTER;
    struct mr_spawn sp = {.path = drafter ? s->self : s->actor, .argv = drafter ? consumer : actor, .keep = keep, .n_keep = 2};
    struct mr_err err = {0};

    row->incarnation++;
    row->start_ns = mr_now_ns();
    mr_st(&row->state, MR_ACTOR_STARTING);
    snprintf(n, sizeof n, "%u", slot);
    snprintf(inc, sizeof inc, "%u", row->incarnation);
    snprintf(event_fd, sizeof event_fd, "%d", s->event_fd);
    snprintf(death_fd, sizeof death_fd, "%d", s->death[0]);
    snprintf(columns, sizeof columns, "%d", s->c.drafter.K * s->c.target.hidden_size);
    snprintf(items, sizeof items, "%d", s->items);
    need(!mr_spawn(&s->child[slot], &sp, &err), "spawn", &err);
}

static void print_output(struct sup *s, unsigned slot)
{
    char buf[4096];
    ssize_t n;

    while (s->child[slot].out_fd >= 0 && (n = read(s->child[slot].out_fd, buf, sizeof buf - 1)) > 0) {
        buf[n] = 0;
        fputs(buf, stderr);
    }
}

/* Reaps the dead, gives back, starts again.  1 when the consumer has ended. */
static int look_after(struct sup *s)
{
    int code, sig;

    for (unsigned i = 0; i < s->seg.hdr->n_actors; i++) {
        if (!s->child[i].pid)
            continue;
        print_output(s, i);
        if (mr_child_reap(&s->child[i], &code, &sig) == -EAGAIN)
            continue;
        print_output(s, i);
        mr_child_close(&s->child[i]);
        s->child[i].pid = 0;
        if (s->seg.actors[i].kind == MR_DRAFTER) {
            need(code == 0, "the consumer failed", NULL);
            s->over = 1;
            continue;
        }
        need(++s->deaths <= s->expected, s->seg.actors[i].name, NULL);
        mr_recover(&s->seg, i, s->seg.actors[i].incarnation);
        spawn(s, i);
    }
    if (mr_ld(&s->seg.hdr->sweep))
        mr_recover_rings(&s->seg);
    need(!mr_ld(&s->seg.hdr->fatal), "a counter is at its maximum", NULL);
    return s->over;
}

static uint64_t consumed(const struct sup *s)
{
    uint64_t n = 0;

    for (unsigned i = 0; i < s->seg.hdr->n_actors; i++)
        n += s->seg.actors[i].kind == MR_DRAFTER ? mr_ld(&s->seg.actors[i].items) : 0;
    return n;
}

/* SIGKILL to a target in the middle of its work, until its next incarnation has published. */
static int kill_one(struct sup *s, struct mr_rng *r)
{
    unsigned slot = 1 + (unsigned)mr_rng_below(r, (uint64_t)s->t.n_targets);
    struct mr_actor_row *row = &s->seg.actors[slot];
    uint64_t before, t0;

    if (mr_ld(&row->state) != MR_ACTOR_RUNNING)
        return 0;
    s->expected++;
    mr_child_signal(&s->child[slot], SIGKILL);
    t0 = mr_now_ns();
    while (s->deaths < s->expected)
        look_after(s);
    before = mr_ld(&row->progress);
    while (mr_ld(&row->progress) == before) {
        need(mr_now_ns() - t0 < 60000000000u, "the new target publishes nothing", NULL);
        need(!look_after(s), "the run was over before a killed target was back: more --items", NULL);
        pause_ms(1);
    }
    t0 = mr_now_ns() - t0;
    s->sum_ms += (double)t0 * 1e-6;
    s->worst_ms = (double)t0 * 1e-6 > s->worst_ms ? (double)t0 * 1e-6 : s->worst_ms;
    return 1;
}

static long memory_kib(pid_t pid, const char *field)
{
    char path[64], line[128];
    long kib = 0;
    FILE *f;

    snprintf(path, sizeof path, "/proc/%d/status", (int)pid);
    f = fopen(path, "re");
    while (f && fgets(line, sizeof line, f))
        if (!strncmp(line, field, strlen(field)))
            kib = atol(line + strlen(field));
    if (f)
        fclose(f);
    return kib;
}

static void report(const struct sup *s, double seconds)
{
    uint64_t tokens = 0;

    for (unsigned i = 0; i < s->seg.hdr->n_actors; i++) {
        const struct mr_actor_row *row = &s->seg.actors[i];
        long rss = memory_kib(s->child[i].pid, "VmRSS:") / 1024, file = memory_kib(s->child[i].pid, "RssShmem:") / 1024;

        tokens += row->kind == MR_DRAFTER ? row->tokens : 0;
        if (row->kind != MR_TARGET)
            continue;
        printf("%s: %llu microbatches, resident %ld MiB, of which shared memory %ld MiB, busy %.1f %%\n", row->name,
               (unsigned long long)row->items, rss, file, 100e-9 * (double)row->busy_ns / seconds);
        need(!s->rss_limit || rss < s->rss_limit, "a target's resident memory is over the limit", NULL);
    }
    printf("consumed %llu microbatches, %.2f M tokens in %.1f s: %.1f ktok/s, slab %.1f MiB\n", (unsigned long long)consumed(s),
           (double)tokens * 1e-6, seconds, (double)tokens / seconds * 1e-3, (double)s->c.slab_bytes / 0x1p20);
    if (s->expected)
        printf("%u SIGKILLs: to the first published microbatch of the next incarnation %.0f ms mean, %.0f ms worst\n", s->expected,
               s->sum_ms / s->expected, s->worst_ms);
}

static void watch(struct sup *s)
{
    struct mr_rng r = mr_rng_key(7, 8, 9);
    uint64_t start = 0, until = mr_now_ns() + LIMIT_NS;
    unsigned done = 0;
    int reported = 0;

    for (;;) {
        need(mr_now_ns() < until, "not done within 400 s", NULL);
        if (look_after(s))
            break;
        if (!start && consumed(s))
            start = mr_now_ns();
        if (done < (unsigned)s->kills && consumed(s) > (uint64_t)s->items * done / (unsigned)(s->kills + 1))
            done += (unsigned)kill_one(s, &r);
        if (!reported && consumed(s) + 2 >= (uint64_t)s->items && (reported = 1))
            report(s, (double)(mr_now_ns() - start) * 1e-9);
        pause_ms(2);
    }
    need(done == (unsigned)s->kills, "the run was over before all kills", NULL);
}

static void stop(struct sup *s)
{
    mr_st(&s->seg.hdr->abort, 1);
    mr_evc_bump_all(&s->seg);
    for (unsigned i = 0; i < s->seg.hdr->n_actors; i++) {
        struct pollfd p = {.fd = s->child[i].pidfd, .events = POLLIN};
        int code, sig;

        if (!s->child[i].pid)
            continue;
        mr_child_signal(&s->child[i], SIGKILL);
        poll(&p, 1, 5000);
        mr_child_reap(&s->child[i], &code, &sig);
        mr_child_close(&s->child[i]);
    }
}

static struct sup *current;

static void clean_up(void)
{
    if (!current || !current->seg.hdr)
        return;
    stop(current);
    mr_seg_unlink(current->seg.run);
    unlink(current->topo_path);
    rmdir(current->dir);
}

static void set_up(struct sup *s, const char *topology, const char *const *set, int n_set)
{
    struct mr_shm_plan p;
    struct mr_err err = {0};
    char name[64];
    const char *all[16];

    snprintf(name, sizeof name, "/run/name=\"test-%d-consumer\"", (int)getpid());
    snprintf(s->dir, sizeof s->dir, "/tmp/mr-consumer-XXXXXX");
    need(mkdtemp(s->dir) != NULL, "mkdtemp", NULL);
    snprintf(s->topo_path, sizeof s->topo_path, "%s/topology.json", s->dir);
    for (int i = 0; i < n_set; i++)
        all[i] = set[i];
    all[n_set] = name;
    need(!mr_topology_load(&s->t, topology, all, n_set + 1, &err) && !mr_check(&s->c, &s->t, MR_CHECK_DATA | MR_CHECK_PLAN, &err) &&
         !mr_topology_save(&s->t, s->topo_path, &err), "topology", &err);
    s->c.slab_bytes *= s->wide ? 2 : 1;
    mr_shm_plan_make(&p, &s->c, &s->t, 0);
    need(!mr_shm_plan_fits(&p, &err) && !mr_shm_plan_create(&p, &s->c, &s->t, &s->seg, &err), "segments", &err);
    need((unsigned)s->items <= s->seg.hdr->microbatches_total, "the data set has fewer microbatches than --items", NULL);
    s->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    need(s->event_fd >= 0 && !pipe2(s->death, O_CLOEXEC), "descriptors", NULL);
}

int main(int argc, char **argv)
{
    static const struct option opt[] = {{"actor", 1, NULL, 'a'}, {"topology", 1, NULL, 't'}, {"items", 1, NULL, 'n'}, {"kills", 1, NULL, 'k'},
                                        {"rss", 1, NULL, 'r'},   {"set", 1, NULL, 's'},      {"wide", 0, NULL, 'w'}, {0}};
    static struct sup s = {.self = "/proc/self/exe", .items = 20};
    const char *topology = NULL, *set[15];
    int c, n_set = 0;

    if (argc == 7 && !strcmp(argv[1], "--consume"))
        return consumer_main(argv);
    while ((c = getopt_long(argc, argv, "", opt, NULL)) != -1) {
        switch (c) {
        case 'a': s.actor = optarg; break;
        case 't': topology = optarg; break;
        case 'n': s.items = atoi(optarg); break;
        case 'k': s.kills = atoi(optarg); break;
        case 'r': s.rss_limit = atol(optarg); break;
        case 'w': s.wide = 1; break;
        case 's': set[n_set < 14 ? n_set++ : n_set] = optarg; break;
        default: return 2;
        }
    }
    if (!s.actor || !topology || s.items < 1)
        return 2;
    current = &s;
    atexit(clean_up);
    set_up(&s, topology, set, n_set);
    for (unsigned i = 0; i < s.seg.hdr->n_actors; i++)
        spawn(&s, i);
    watch(&s);
    printf("ok\n");
    return 0;
}
