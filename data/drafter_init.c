/* The first parameters of a drafter, drawn by as many threads as the process may run on.
 *
 * The numbers of a tensor are a stream keyed by (seed, tensor), and a stream can be entered at any place (base/rng.h).  So the flat vector
 * is cut into chunks that know nothing of each other: threads take them in turn, and neither their number nor their speed shows in the values.
 * One thread needs 18 ns a number (68 million in 1.25 s, measured), so 19 s for a billion.
 */
#include "data/drafter_config.h"

#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "base/rng.h"
#include "data/safetensors.h"

enum { CHUNK = 1 << 16, CHUNKS_A_THREAD = 8, THREADS_MAX = 64, BLOCK = 8 << 20 };   /* elements; both even */

struct fill {                    /* [from, to) of the flat vector into dst (to - from) */
    const struct mr_dlayout *l;
    float *dst;
    uint64_t from, to, seed;
    double std;
    uint64_t next;               /* atomic: chunk to be taken next */
};

struct team {
    struct fill f;
    pthread_t thread[THREADS_MAX];
    int n;                       /* threads beside the caller's */
};

/* Elements first .. first + n - 1 of a stream of normal numbers; `first` is even.  Box-Muller, both values used. */
static void normal(float *x, uint64_t first, uint64_t n, double std, struct mr_rng r)
{
    mr_rng_skip(&r, first);
    for (uint64_t i = 0; i < n; i += 2) {
        double u = 1.0 - mr_rng_unit(&r), w = 6.283185307179586 * mr_rng_unit(&r), radius = std * sqrt(-2.0 * log(u));

        x[i] = (float)(radius * cos(w));
        if (i + 1 < n)
            x[i + 1] = (float)(radius * sin(w));
    }
}

static void fill_part(const struct fill *f, float *dst, uint64_t from, uint64_t to)
{
    memset(dst, 0, (to - from) * sizeof *dst);       /* the gaps */
    for (int i = 0; i < f->l->n; i++) {
        const struct mr_dparam *p = &f->l->t[i];
        uint64_t a = p->offset > from ? p->offset : from, b = p->offset + p->n < to ? p->offset + p->n : to;

        if (a >= b)
            continue;
        if (p->cols)
            normal(dst + (a - from), a - p->offset, b - a, f->std, mr_rng_key(f->seed, (uint64_t)i, 0x696e6974));
        else
            for (uint64_t k = a; k < b; k++)
                dst[k - from] = 1.0f;
    }
}

static void *work(void *arg)
{
    struct fill *f = arg;

    for (;;) {
        uint64_t at = f->from + __atomic_fetch_add(&f->next, 1, __ATOMIC_RELAXED) * CHUNK;

        if (at >= f->to)
            return NULL;
        fill_part(f, f->dst + (at - f->from), at, f->to - at < CHUNK ? f->to : at + CHUNK);
    }
}

static int processors(void)
{
    cpu_set_t set;

    return sched_getaffinity(0, sizeof set, &set) ? 1 : CPU_COUNT(&set);
}

/* Starts a fill.  It is complete after finish, whose caller takes part in it; threads that cannot be made are not missed. */
static void begin(struct team *t, const struct fill *f)
{
    uint64_t want = (f->to - f->from) / ((uint64_t)CHUNK * CHUNKS_A_THREAD);
    int n = processors() - 1;

    n = n < THREADS_MAX ? n : THREADS_MAX;
    n = (uint64_t)n < want ? n : (int)want;
    t->f = *f;
    for (t->n = 0; t->n < n; t->n++)
        if (pthread_create(&t->thread[t->n], NULL, work, &t->f))
            break;
}

static void finish(struct team *t)
{
    work(&t->f);
    for (int i = 0; i < t->n; i++)
        pthread_join(t->thread[i], NULL);
    t->n = 0;
}

void mr_drafter_init(const struct mr_dlayout *l, float *param, uint64_t seed, double std)
{
    struct team t;

    begin(&t, &(struct fill){.l = l, .dst = param, .to = l->P, .seed = seed, .std = std});
    finish(&t);
}

int mr_drafter_init_to(const struct mr_dlayout *l, float *param, uint64_t seed, double std, const struct mr_st_sink *to, struct mr_err *err)
{
    float *buf = malloc(2 * (size_t)BLOCK * sizeof *buf);
    struct fill f = {.l = l, .dst = buf, .to = l->P < BLOCK ? l->P : BLOCK, .seed = seed, .std = std}, done;
    struct team t;
    int more, rc;

    if (!buf)
        return mr_err_set(err, MR_EXIT_ENV, "out of memory for two blocks of %zu MiB", BLOCK * sizeof *buf >> 20);
    begin(&t, &f);
    do {
        finish(&t);
        done = f;
        f.from = done.to;
        f.to = l->P - f.from < BLOCK ? l->P : f.from + BLOCK;
        f.dst = done.dst == buf ? buf + BLOCK : buf;
        more = f.from < l->P;
        if (more)
            begin(&t, &f);
        rc = to->put(to->ctx, param + done.from, done.dst, done.to - done.from);
    } while (more && !rc);
    if (more)
        finish(&t);
    free(buf);
    return rc ? -1 : 0;
}
