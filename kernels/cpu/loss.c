/* Cross entropy against the frozen head, a chunk of rows at a time.
 *
 * A chunk's logits fit in a second-level cache: one product makes them, one pass of rows turns them into ce and e^(z - max), one product
 * into dx; the softmax's division and the weight are applied to the H numbers of dx instead of the V of the logits.  Rows with label -1
 * are left out before the first product, so a caller that needs nothing from a row (slot 0 of a block) does not pay for it.
 */
#include "kernels/cpu/cpu_pvt.h"

#define CHUNK_FLOATS (256 * 1024)        /* of logits: 1 MiB */
#define CHUNK_MIN 32                     /* rows, however large the vocabulary */
#define CHUNK_MAX 256

struct chunk {
    int H, V, n, row[CHUNK_MAX];         /* rows of x in this chunk */
    float by[CHUNK_MAX];
    float *x, *z, *dx;                   /* (n, H), (n, V), (n, H) */
};

static int chunk_rows(int V)
{
    int n = CHUNK_FLOATS / V;

    n = n < CHUNK_MIN ? CHUNK_MIN : n;
    return n > CHUNK_MAX ? CHUNK_MAX : n;
}

size_t mr_kc_ce_scratch(struct mr_k *k, int n, int H, int V)
{
    size_t rows = (size_t)chunk_rows(V);

    (void)k;
    (void)n;
    return (2 * mr_kc_pad(rows * (size_t)H) + rows * (size_t)V) * sizeof(float);
}

/* Fills a chunk from row i on; returns the first row that is not in it.  Left-out rows get their zeros here. */
static int fill(struct chunk *c, int i, int n, int most, const float *x, const int32_t *labels, float *ce, int32_t *argmax, float *dx)
{
    for (c->n = 0; i < n && c->n < most; i++) {
        size_t at = (size_t)i * (size_t)c->H;

        if (labels[i] >= 0) {
            memcpy(c->x + (size_t)c->n * (size_t)c->H, x + at, (size_t)c->H * sizeof(*x));
            c->row[c->n++] = i;
            continue;
        }
        ce[i] = 0.0f;
        if (argmax)
            argmax[i] = -1;
        if (dx)
            memset(dx + at, 0, (size_t)c->H * sizeof(*dx));
    }
    return i;
}

static void put_dx(struct mr_kc *k, const struct chunk *c, float *dx)
{
    for (int j = 0; j < c->n; j++) {
        float *d = dx + (size_t)c->row[j] * (size_t)c->H;

        if (c->by[j] == 0.0f)
            memset(d, 0, (size_t)c->H * sizeof(*d));     /* not 0 * NaN: a row without weight must not matter */
        else
            k->isa->scale(c->H, c->by[j], c->dx + (size_t)j * (size_t)c->H, d);
    }
}

static int do_chunk(struct mr_kc *k, struct chunk *c, const float *W, const int32_t *labels, const float *weight, float *ce,
                    int32_t *argmax, float *dx)
{
    int rc = mr_kc_gemm(k, 'N', 'T', c->n, c->V, c->H, 1.0f, c->x, c->H, W, c->H, 0.0f, c->z, c->V);

    if (rc)
        return rc;
    for (int j = 0; j < c->n; j++) {
        int i = c->row[j];
        float sum = k->isa->ce(c->z + (size_t)j * (size_t)c->V, c->V, labels[i], dx != NULL, ce + i, argmax ? argmax + i : NULL);

        c->by[j] = dx && weight[i] != 0.0f ? weight[i] / sum : 0.0f;
    }
    if (!dx)
        return 0;
    rc = mr_kc_gemm(k, 'N', 'N', c->n, c->H, c->V, 1.0f, c->z, c->V, W, c->H, 0.0f, c->dx, c->H);
    if (!rc)
        put_dx(k, c, dx);
    return rc;
}

int mr_kc_ce(struct mr_k *k, int n, int H, int V, const void *x, const void *W, const int32_t *labels, const float *weight, void *scratch,
             float *ce, int32_t *argmax, void *dx)
{
    int most = chunk_rows(V), rc = 0;
    struct chunk c = {.H = H, .V = V, .x = scratch};

    c.dx = c.x + mr_kc_pad((size_t)most * (size_t)H);
    c.z = c.dx + mr_kc_pad((size_t)most * (size_t)H);
    for (int i = 0; i < n; i++)
        if (labels[i] >= V)
            return -EINVAL;
    for (int i = 0; i < n && !rc;) {
        i = fill(&c, i, n, most, x, labels, ce, argmax, dx);
        rc = c.n ? do_chunk(mr_kc(k), &c, W, labels, weight, ce, argmax, dx) : 0;
    }
    return rc;
}
