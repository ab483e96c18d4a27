/* Attention of a drafter layer: blocks of queries against their sequence's context before the anchor, and against themselves.
 *
 * The blocks of a sequence are sorted by anchor and share its context keys, so consecutive blocks form a *group*: about GROUP_ROWS stacked
 * query rows (blocks x slots x the heads of one key head) against context rows [lo, largest anchor) and against the block rows of all the
 * group's blocks.  That is two products for the scores, side by side in one row of columns
 *     [ context lo..hi, padded to 16 | block slots of the group's blocks ]
 * one pass of softmax rows over each row's two visible spans (everything else becomes exactly 0), two products for the output.  The
 * block-diagonal part wastes (blocks - 1)/blocks of a small product, which is cheaper than many tiny ones.
 * The backward recomputes the probabilities from lse and is products of the same shapes; a context row collects its gradient from every
 * group, in their order, so the bits repeat.
 * Limits: scores of one group are held for all its context (fewer blocks a group when the context is long).
 */
#include "kernels/cpu/cpu_pvt.h"

#include <limits.h>
#include <math.h>

#define GROUP_ROWS 64
#define GROUP_FLOATS (256 * 1024)        /* of scores */

/* What does not change during one call. */
struct call {
    struct mr_kc *c;
    const struct mr_k_blocks *b;
    const int32_t *host_cu;
    const struct mr_k_block_mask *mask;
    int nh, kv, g, hd, ldc, ldb;
    float scale;
    const float *q, *ck, *cv, *bk, *bv;
};

struct group {
    int j0, nb;                          /* blocks [j0, j0 + nb), all of one sequence */
    int lo, hi;                          /* context positions that any of its rows sees */
    int m, rows, nctx, pad, nblk, ld;    /* stacked rows g * rows, rows = nb * B; columns: nctx, padded to pad, then nblk; ld in all */
    size_t ctx0;                         /* context row of position lo */
    float *q, *o, *s, *inv, *dO, *dp, *dq;
};

/* First context position that slot oq of a block at `pos` sees; never beyond pos. */
static int first_key(const struct mr_k_block_mask *mask, int pos, int oq)
{
    int lo = 0;

    if (mask->window > 0)
        lo = mask->window_origin ? pos - mask->window : pos + oq - (mask->window - 1);
    if (lo < 0)
        lo = 0;
    return lo < pos ? lo : pos;
}

static struct mr_kc_span row_span(const struct call *a, const struct group *gr, int r)
{
    int B = a->b->B, j = r / B, oq = r % B, pos = a->b->host_pos[gr->j0 + j], blk = gr->pad + j * B;

    if (pos < 0)
        return (struct mr_kc_span){{0, 0}, {0, 0}};
    return (struct mr_kc_span){{first_key(a->mask, pos, oq) - gr->lo, blk}, {pos - gr->lo, blk + (a->mask->causal ? oq + 1 : B)}};
}

/* Takes blocks from j0 on, at most `most`, of one sequence.  Returns 0 or -EINVAL for an anchor behind the end of its sequence. */
static int make_group(const struct call *a, struct group *gr, int j0, int most)
{
    const int32_t *pos = a->b->host_pos, *seq = a->b->host_seq;
    int base = a->host_cu[seq[j0]], T = a->host_cu[seq[j0] + 1] - base;

    gr->j0 = j0;
    gr->nb = gr->hi = 0;
    gr->lo = INT_MAX;
    for (int j = j0; j < a->b->n && j < j0 + most && seq[j] == seq[j0]; j++, gr->nb++) {
        int lo = first_key(a->mask, pos[j], 0);

        if (pos[j] > T)
            return -EINVAL;
        if (pos[j] < 0)
            continue;
        gr->lo = lo < gr->lo ? lo : gr->lo;
        gr->hi = pos[j] > gr->hi ? pos[j] : gr->hi;
    }
    if (gr->lo > gr->hi)                 /* padding only */
        gr->lo = 0;
    gr->ctx0 = (size_t)(base + gr->lo);
    gr->nctx = gr->hi - gr->lo;
    gr->pad = (int)mr_kc_pad((size_t)gr->nctx);
    gr->rows = gr->nblk = gr->nb * a->b->B;
    gr->m = a->g * gr->rows;
    gr->ld = gr->pad + (int)mr_kc_pad((size_t)gr->nblk);
    return 0;
}

/* Blocks in a group, for the longest context of the call. */
static int group_blocks(const struct call *a, int longest)
{
    int per = a->g * a->b->B, n = GROUP_ROWS / per;

    while (n > 1 && (size_t)(n * per) * (size_t)(longest + n * a->b->B) > GROUP_FLOATS)
        n /= 2;
    return n < 1 ? 1 : n;
}

static int longest_context(const struct call *a)
{
    int most = 0;

    for (int j = 0; j < a->b->n; j++)
        most = a->b->host_pos[j] > most ? a->b->host_pos[j] : most;
    return most;
}

static int carve(const struct call *a, struct group *gr, int blocks, int longest, int bwd)
{
    size_t rows = (size_t)(blocks * a->b->B), m = (size_t)a->g * rows, qo = mr_kc_pad(m * (size_t)a->hd);
    size_t s = m * (mr_kc_pad((size_t)longest) + mr_kc_pad(rows)), inv = mr_kc_pad(m);
    float *p = mr_kc_scratch(a->c, (bwd ? 3 : 2) * qo + (bwd ? 2 : 1) * s + inv);

    if (!p)
        return -ENOMEM;
    gr->inv = p;
    gr->q = p + inv;
    gr->o = gr->dO = gr->q + qo;
    gr->s = gr->o + qo;
    gr->dp = gr->s + s;
    gr->dq = gr->dp + s;
    return 0;
}

/* out (m, ld) = alpha * x (m, hd) * [context rows | block rows]^T, for key head i */
static int to_keys(const struct call *a, const struct group *gr, int i, float alpha, const float *x, const float *ctx, const float *blk,
                   float *out)
{
    const float *cx = ctx + gr->ctx0 * (size_t)a->ldc + (size_t)(i * a->hd);
    const float *bx = blk + (size_t)(gr->j0 * a->b->B) * (size_t)a->ldb + (size_t)(i * a->hd);
    int rc = mr_kc_gemm(a->c, 'N', 'T', gr->m, gr->nctx, a->hd, alpha, x, a->hd, cx, a->ldc, 0.0f, out, gr->ld);

    return rc ? rc : mr_kc_gemm(a->c, 'N', 'T', gr->m, gr->nblk, a->hd, alpha, x, a->hd, bx, a->ldb, 0.0f, out + gr->pad, gr->ld);
}

/* out (m, hd) = s (m, ld) * [context rows | block rows] */
static int from_keys(const struct call *a, const struct group *gr, int i, const float *s, const float *ctx, const float *blk, float *out)
{
    const float *cx = ctx + gr->ctx0 * (size_t)a->ldc + (size_t)(i * a->hd);
    const float *bx = blk + (size_t)(gr->j0 * a->b->B) * (size_t)a->ldb + (size_t)(i * a->hd);
    int rc = mr_kc_gemm(a->c, 'N', 'N', gr->m, a->hd, gr->nblk, 1.0f, s + gr->pad, gr->ld, bx, a->ldb, 0.0f, out, a->hd);

    return rc ? rc : mr_kc_gemm(a->c, 'N', 'N', gr->m, a->hd, gr->nctx, 1.0f, s, gr->ld, cx, a->ldc, 1.0f, out, a->hd);
}

/* context rows += s^T x, block rows = s^T x */
static int keys_grad(const struct call *a, const struct group *gr, int i, const float *s, const float *x, float *dctx, int lddc,
                     float *dblk, int lddb)
{
    float *dc = dctx + gr->ctx0 * (size_t)lddc + (size_t)(i * a->hd);
    float *db = dblk + (size_t)(gr->j0 * a->b->B) * (size_t)lddb + (size_t)(i * a->hd);
    int rc = mr_kc_gemm(a->c, 'T', 'N', gr->nctx, a->hd, gr->m, 1.0f, s, gr->ld, x, a->hd, 1.0f, dc, lddc);

    return rc ? rc : mr_kc_gemm(a->c, 'T', 'N', gr->nblk, a->hd, gr->m, 1.0f, s + gr->pad, gr->ld, x, a->hd, 0.0f, db, lddb);
}

/* Where key head i's group of query heads starts in the (nB, nh*hd) arrays. */
static size_t q_at(const struct call *a, const struct group *gr, int i)
{
    return (size_t)(gr->j0 * a->b->B) * (size_t)(a->nh * a->hd) + (size_t)(i * a->g * a->hd);
}

/* And in the (nB, nh) array lse, for stacked row r. */
static size_t lse_at(const struct call *a, const struct group *gr, int i, int r)
{
    return (size_t)(gr->j0 * a->b->B + r % gr->rows) * (size_t)a->nh + (size_t)(i * a->g + r / gr->rows);
}

static int forward(const struct call *a, struct group *gr, int i, float *o, float *lse)
{
    int ldq = a->nh * a->hd, rc;

    mr_kc_stack(gr->q, a->q + q_at(a, gr, i), gr->rows, ldq, a->g, a->hd);
    rc = to_keys(a, gr, i, a->scale, gr->q, a->ck, a->bk, gr->s);
    if (rc)
        return rc;
    for (int r = 0; r < gr->m; r++) {
        struct mr_kc_span vis = row_span(a, gr, r % gr->rows);

        gr->inv[r] = a->c->isa->softmax(gr->s + (size_t)r * (size_t)gr->ld, gr->ld, &vis, lse ? lse + lse_at(a, gr, i, r) : NULL);
    }
    rc = from_keys(a, gr, i, gr->s, a->cv, a->bv, gr->o);
    if (rc)
        return rc;
    mr_kc_unstack(a->c, o + q_at(a, gr, i), gr->o, gr->rows, ldq, a->g, a->hd, gr->inv);
    return 0;
}

struct grads {
    const float *o, *lse, *dO;
    float *dq, *dck, *dcv, *dbk, *dbv;
    int lddc, lddb;
};

/* Scores and dP -> probabilities and dS, row by row. */
static void probabilities(const struct call *a, struct group *gr, int i, const struct grads *d)
{
    const float *o = d->o + q_at(a, gr, i);

    for (int r = 0; r < gr->m; r++) {
        struct mr_kc_span vis = row_span(a, gr, r % gr->rows);
        size_t row = (size_t)r * (size_t)gr->ld, at = (size_t)(r % gr->rows) * (size_t)(a->nh * a->hd) + (size_t)(r / gr->rows * a->hd);
        float dd = a->c->isa->dot(a->hd, gr->dO + (size_t)r * (size_t)a->hd, o + at);

        a->c->isa->softmax_bwd(gr->s + row, gr->dp + row, gr->ld, &vis, d->lse[lse_at(a, gr, i, r)], dd, a->scale);
    }
}

static int backward(const struct call *a, struct group *gr, int i, const struct grads *d)
{
    int ldq = a->nh * a->hd, rc;

    mr_kc_stack(gr->q, a->q + q_at(a, gr, i), gr->rows, ldq, a->g, a->hd);
    mr_kc_stack(gr->dO, d->dO + q_at(a, gr, i), gr->rows, ldq, a->g, a->hd);
    if ((rc = to_keys(a, gr, i, a->scale, gr->q, a->ck, a->bk, gr->s)) || (rc = to_keys(a, gr, i, 1.0f, gr->dO, a->cv, a->bv, gr->dp)))
        return rc;
    probabilities(a, gr, i, d);
    if ((rc = from_keys(a, gr, i, gr->dp, a->ck, a->bk, gr->dq)) ||
        (rc = keys_grad(a, gr, i, gr->dp, gr->q, d->dck, d->lddc, d->dbk, d->lddb)) ||
        (rc = keys_grad(a, gr, i, gr->s, gr->dO, d->dcv, d->lddc, d->dbv, d->lddb)))
        return rc;
    mr_kc_unstack(a->c, d->dq + q_at(a, gr, i), gr->dq, gr->rows, ldq, a->g, a->hd, NULL);
    return 0;
}

/* All groups, all key heads: forward when d is NULL. */
static int each_group(const struct call *a, float *o, float *lse, const struct grads *d)
{
    int longest = longest_context(a), blocks = group_blocks(a, longest), rc;
    struct group gr;

    if (a->b->n <= 0)
        return 0;
    if (a->nh % a->kv)
        return -EINVAL;
    rc = carve(a, &gr, blocks, longest, d != NULL);
    for (int j = 0; j < a->b->n && !rc; j += gr.nb) {
        rc = make_group(a, &gr, j, blocks);
        for (int i = 0; i < a->kv && !rc; i++)
            rc = d ? backward(a, &gr, i, d) : forward(a, &gr, i, o, lse);
    }
    return rc;
}

int mr_kc_attn_block(struct mr_k *k, const struct mr_k_blocks *b, const int32_t *cu, const int32_t *host_cu,
                     const struct mr_k_block_mask *mask, int nh, int kv, int hd, const void *q, const void *ck, const void *cv, int ldc,
                     const void *bk, const void *bv, int ldb, void *o, float *lse)
{
    struct call a = {.c = mr_kc(k), .b = b, .host_cu = host_cu, .mask = mask, .nh = nh, .kv = kv, .g = nh / kv, .hd = hd, .ldc = ldc,
                     .ldb = ldb, .scale = 1.0f / sqrtf((float)hd), .q = q, .ck = ck, .cv = cv, .bk = bk, .bv = bv};

    (void)cu;
    return each_group(&a, o, lse, NULL);
}

int mr_kc_attn_block_bwd(struct mr_k *k, const struct mr_k_blocks *b, const int32_t *cu, const int32_t *host_cu,
                         const struct mr_k_block_mask *mask, int nh, int kv, int hd, const void *q, const void *ck, const void *cv, int ldc,
                         const void *bk, const void *bv, int ldb, const void *o, const float *lse, const void *dO, void *dq, void *dck,
                         void *dcv, int lddc, void *dbk, void *dbv, int lddb)
{
    struct call a = {.c = mr_kc(k), .b = b, .host_cu = host_cu, .mask = mask, .nh = nh, .kv = kv, .g = nh / kv, .hd = hd, .ldc = ldc,
                     .ldb = ldb, .scale = 1.0f / sqrtf((float)hd), .q = q, .ck = ck, .cv = cv, .bk = bk, .bv = bv};
    struct grads d = {.o = o, .lse = lse, .dO = dO, .dq = dq, .dck = dck, .dcv = dcv, .dbk = dbk, .dbv = dbv, .lddc = lddc, .lddb = lddb};

    (void)cu;
    return each_group(&a, NULL, NULL, &d);
}
