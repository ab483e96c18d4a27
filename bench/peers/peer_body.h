/* The measured loops; see peer.h.  Included once at the end of each peer's file. */

struct body_line {
    uint64_t v;
    char pad[120];
};
struct body_ctl {
    struct body_line ready, go, fail, got[PEER_PROCS], sum[PEER_PROCS];
};
#define BODY_LD(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)
#define BODY_ST(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)

static inline void body_push(void *r, uint64_t ref)
{
    for (unsigned n = 0; !peer_push(r, ref);)
        mr_bench_relax(&n);
}

static inline uint64_t body_pop(void *r)
{
    uint64_t ref = 0;

    for (unsigned n = 0; !peer_pop(r, &ref);)
        mr_bench_relax(&n);
    return ref;
}

static void body_meet(struct body_ctl *c, uint64_t all)
{
    unsigned n = 0;

    __atomic_add_fetch(&c->ready.v, 1, __ATOMIC_ACQ_REL);
    while (BODY_LD(&c->ready.v) < all)
        mr_bench_relax(&n);
}

static int body_echo(void *ab, void *ba, struct body_ctl *c, int iterations)
{
    mr_bench_pin(1);
    if (peer_attach(ab, 1, 0, 1) || peer_attach(ba, 0, 0, 1))
        return 2;
    body_meet(c, 2);
    for (int i = 0; i < iterations; i++)
        body_push(ba, body_pop(ab) + 1);
    body_meet(c, 4);
    peer_detach(ab);
    peer_detach(ba);
    return 0;
}

static int body_latency(unsigned cap, int iterations, double *median, double *p99)
{
    size_t bytes = peer_bytes(cap);
    void *ab = mr_bench_shared(bytes), *ba = mr_bench_shared(bytes);
    struct body_ctl *c = (struct body_ctl *)mr_bench_shared(sizeof *c);
    double *half = (double *)mr_bench_shared((size_t)iterations * sizeof *half);
    int warm = iterations / 10, bad = 0, pid;

    if (!ab || !ba || !c || !half || peer_init(ab, cap) || peer_init(ba, cap))
        return -1;
    if ((pid = mr_bench_child()) == 0)
        _exit(body_echo(ab, ba, c, iterations + warm));
    mr_bench_pin(0);
    if (peer_attach(ab, 0, 0, 1) || peer_attach(ba, 1, 0, 1))
        return -1;
    body_meet(c, 2);
    for (int i = 0; i < iterations + warm; i++) {
        uint64_t ref = 2 * (uint64_t)i + 1;
        double t = mr_bench_ns();

        body_push(ab, ref);
        bad |= body_pop(ba) != ref + 1;
        if (i >= warm)
            half[i - warm] = (mr_bench_ns() - t) / 2;
    }
    body_meet(c, 4);
    bad |= mr_bench_join(&pid, 1);
    peer_detach(ab);
    peer_detach(ba);
    peer_fini(ab);
    peer_fini(ba);
    mr_bench_quantiles(half, iterations, median, p99);
    mr_bench_unshare(ab, bytes);
    mr_bench_unshare(ba, bytes);
    mr_bench_unshare(c, sizeof *c);
    mr_bench_unshare(half, (size_t)iterations * sizeof *half);
    return bad ? -1 : 0;
}

static int body_consumer(void *r, struct body_ctl *c, int index, int np, int nc, uint64_t n)
{
    uint64_t ref, sum = 0, got = 0;
    unsigned w = 0;

    mr_bench_pin(np + index);
    if (peer_attach(r, 1, index, nc))
        return 2;
    body_meet(c, (uint64_t)(np + nc + 1));
    for (;;) {
        uint64_t all = 0;

        if (peer_pop(r, &ref)) {
            sum += ref;
            got++;
            w = 0;
            continue;
        }
        BODY_ST(&c->got[index].v, got);
        for (int i = 0; i < nc; i++)
            all += BODY_LD(&c->got[i].v);
        if (all >= n)
            break;
        mr_bench_relax(&w);
    }
    BODY_ST(&c->sum[index].v, sum);
    peer_detach(r);
    return 0;
}

static int body_producer(void *r, struct body_ctl *c, int index, int np, int nc, uint64_t each)
{
    uint64_t all = 0;
    unsigned w = 0;

    mr_bench_pin(index);
    if (peer_attach(r, 0, index, nc))
        return 2;
    body_meet(c, (uint64_t)(np + nc + 1));
    for (uint64_t i = 0; i < each; i++)
        body_push(r, (uint64_t)index * each + i + 1);
    while (all < each * (uint64_t)np) {        /* a kernel queue must not lose what is in flight when its writer leaves */
        all = 0;
        for (int i = 0; i < nc; i++)
            all += BODY_LD(&c->got[i].v);
        mr_bench_relax(&w);
    }
    peer_detach(r);
    return 0;
}

static int body_throughput(unsigned cap, int np, int nc, uint64_t n, double *mps)
{
    size_t bytes = peer_bytes(cap);
    void *r = mr_bench_shared(bytes);
    struct body_ctl *c = (struct body_ctl *)mr_bench_shared(sizeof *c);
    int pid[2 * PEER_PROCS], k = 0, bad;
    uint64_t each = n / (uint64_t)np, sum = 0;
    double t;

    n = each * (uint64_t)np;
    if (!r || !c || peer_init(r, cap))
        return -1;
    for (int i = 0; i < nc; i++)
        if ((pid[k++] = mr_bench_child()) == 0)
            _exit(body_consumer(r, c, i, np, nc, n));
    for (int i = 0; i < np; i++)
        if ((pid[k++] = mr_bench_child()) == 0)
            _exit(body_producer(r, c, i, np, nc, each));
    body_meet(c, (uint64_t)(np + nc + 1));
    t = mr_bench_ns();
    bad = mr_bench_join(pid, k);
    *mps = (double)n / (mr_bench_ns() - t) * 1e3;
    for (int i = 0; i < nc; i++)
        sum += c->sum[i].v;
    bad |= sum != n * (n + 1) / 2;
    peer_fini(r);
    mr_bench_unshare(r, bytes);
    mr_bench_unshare(c, sizeof *c);
    return bad ? -1 : 0;
}

static struct peer body_peer = {PEER_NAME, PEER_NOTE, PEER_FLAGS, body_latency, body_throughput, 0};
__attribute__((constructor)) static void body_add(void)
{
    mr_bench_peer_add(&body_peer);
}
