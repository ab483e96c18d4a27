/* Causal self-attention of the targets.
 *
 * Per sequence and key head, tiles of queries against all keys up to the tile's last: one product for the scores, one pass of softmax
 * rows, one product with the values.  The query heads that share a key head are stacked under one another, so that a product has about
 * TILE_ROWS rows whatever the head counts.  Keys behind a row's own position are computed and thrown away: at most tile/2 a row.
 * Limits: the scores of one tile are held for all its keys (scratch: rows * longest sequence), with fewer rows for long sequences.
 */
#include "kernels/cpu/cpu_pvt.h"

#include <math.h>

#define TILE_ROWS 64                     /* of stacked queries: enough for the product library to run at full speed */
#define TILE_FLOATS (256 * 1024)         /* of scores: 1 MiB stays in a second-level cache */

void mr_kc_stack(float *dst, const float *src, int rows, int ld, int g, int hd)
{
    for (int h = 0; h < g; h++)
        for (int r = 0; r < rows; r++, dst += hd)
            memcpy(dst, src + (size_t)r * (size_t)ld + (size_t)(h * hd), (size_t)hd * sizeof(*dst));
}

void mr_kc_unstack(struct mr_kc *c, float *dst, const float *src, int rows, int ld, int g, int hd, const float *by)
{
    for (int h = 0; h < g; h++)
        for (int r = 0; r < rows; r++, src += hd)
            c->isa->scale(hd, by ? *by++ : 1.0f, src, dst + (size_t)r * (size_t)ld + (size_t)(h * hd));
}

struct tile {
    int g, hd, t0, rows, ld;             /* stacked rows: g * rows; score columns: ld, of which t0 + rows are keys */
    float *q, *o, *s, *inv;
};

static int tile_rows(int g, int T)
{
    int rows = TILE_ROWS / g;

    while (rows > 16 && (size_t)g * (size_t)rows * (size_t)T > TILE_FLOATS)
        rows /= 2;
    return rows < 16 ? 16 : rows;
}

static void softmax_tile(struct mr_kc *c, struct tile *t)
{
    for (int i = 0; i < t->g * t->rows; i++) {
        int n = t->t0 + i % t->rows + 1;
        struct mr_kc_span vis = {{0, n}, {n, n}};

        t->inv[i] = c->isa->softmax(t->s + (size_t)i * (size_t)t->ld, t->ld, &vis, NULL);
    }
}

/* q, o at the tile's first row and head; kx, v at the sequence's first row and the key head. */
static int do_tile(struct mr_kc *c, struct tile *t, const float *q, int ldq, const float *kx, const float *v, int ldkv, float *o, int ldo)
{
    int m = t->g * t->rows, keys = t->t0 + t->rows, rc;

    mr_kc_stack(t->q, q, t->rows, ldq, t->g, t->hd);
    rc = mr_kc_gemm(c, 'N', 'T', m, keys, t->hd, 1.0f / sqrtf((float)t->hd), t->q, t->hd, kx, ldkv, 0.0f, t->s, t->ld);
    if (rc)
        return rc;
    softmax_tile(c, t);
    rc = mr_kc_gemm(c, 'N', 'N', m, t->hd, keys, 1.0f, t->s, t->ld, v, ldkv, 0.0f, t->o, t->hd);
    if (rc)
        return rc;
    mr_kc_unstack(c, o, t->o, t->rows, ldo, t->g, t->hd, t->inv);
    return 0;
}

static int carve(struct mr_kc *c, struct tile *t, int T)
{
    size_t m = (size_t)t->g * (size_t)tile_rows(t->g, T), qo = mr_kc_pad(m * (size_t)t->hd);
    float *p = mr_kc_scratch(c, 2 * qo + m * mr_kc_pad((size_t)T) + mr_kc_pad(m));

    if (!p)
        return -ENOMEM;
    t->q = p;
    t->o = p + qo;
    t->inv = p + 2 * qo;
    t->s = t->inv + mr_kc_pad(m);
    return 0;
}

int mr_kc_attn_causal(struct mr_k *k, int n_seqs, const int32_t *cu, const int32_t *host_cu, int nh, int kv, int hd, const void *q, int ldq,
                      const void *kx, const void *v, int ldkv, void *o, int ldo)
{
    struct mr_kc *c = mr_kc(k);
    struct tile t = {.g = nh / kv, .hd = hd};

    (void)cu;
    if (nh % kv)
        return -EINVAL;
    for (int s = 0; s < n_seqs; s++) {
        int T = host_cu[s + 1] - host_cu[s], step = tile_rows(t.g, T), rc = carve(c, &t, T);

        for (int i = 0; i < kv && !rc; i++) {
            const float *ki = (const float *)kx + (size_t)host_cu[s] * (size_t)ldkv + (size_t)(i * hd);
            const float *vi = (const float *)v + (size_t)host_cu[s] * (size_t)ldkv + (size_t)(i * hd);

            for (t.t0 = 0; t.t0 < T && !rc; t.t0 += step) {
                size_t row = (size_t)(host_cu[s] + t.t0), col = (size_t)(i * t.g * hd);

                t.rows = T - t.t0 < step ? T - t.t0 : step;
                t.ld = (int)mr_kc_pad((size_t)(t.t0 + t.rows));
                rc = do_tile(c, &t, (const float *)q + row * (size_t)ldq + col, ldq, ki, vi, ldkv, (float *)o + row * (size_t)ldo + col,
                             ldo);
            }
        }
        if (rc)
            return rc;
    }
    return 0;
}
