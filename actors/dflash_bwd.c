/* DFlash backward (docs/dflash.md 3.7b), chunk by chunk, then once for the context.
 *
 * dx is the gradient of the residual stream and is updated in place from the top down: each sublayer adds its own input gradient to it.
 * Weight gradients go straight into the flat accumulator.  Frozen ends: no gradient flows into the embedding or the features, so the
 * first layer's stream gradient and fc's input gradient are never formed.
 */
#include "actors/dflash_pvt.h"

int mr_dflash_mat_dx(const struct mr_dflash *d, const struct dmat *W, int m, const void *dy, int ldy, void *dx, int acc)
{
    for (int i = 0; i < W->n_parts; i++)
        DO(d->k->op->linear_dx(d->k, m, W->part[i].rows, W->cols, dat(d, dy, (size_t)W->part[i].col), ldy, dw(d, W->part[i].off), dx,
                               W->cols, acc || i > 0));
    return 0;
}

int mr_dflash_mat_dw(const struct mr_dflash *d, const struct dmat *W, int m, const void *dy, int ldy, const void *x, float *acc)
{
    for (int i = 0; i < W->n_parts; i++)
        DO(d->k->op->linear_dw(d->k, m, W->part[i].rows, W->cols, dat(d, dy, (size_t)W->part[i].col), ldy, x, W->cols,
                               acc + W->part[i].off));
    return 0;
}

/* dx (rows,H): gradient of the stream behind the MLP -> gradient of x1 */
static int mlp_bwd(struct mr_dflash *d, int i, int rows, void *dx, float *acc)
{
    const struct mr_k_ops *op = d->k->op;
    const struct dlayer_mats *w = &d->mats[i];
    struct dlayer *a = &d->layer[i];
    int H = d->c->hidden_size, I = d->c->intermediate_size;
    size_t up = (size_t)I;

    DO(mr_dflash_mat_dw(d, &w->down, rows, dx, H, a->m, acc));
    DO(mr_dflash_mat_dx(d, &w->down, rows, dx, H, d->dm, 0));
    DO(op->swiglu_bwd(d->k, rows, I, a->gu, dat(d, a->gu, up), 2 * I, d->dm, d->dgu, dat(d, d->dgu, up), 2 * I));
    DO(mr_dflash_mat_dw(d, &w->gu, rows, d->dgu, 2 * I, a->n2, acc));
    DO(mr_dflash_mat_dx(d, &w->gu, rows, d->dgu, 2 * I, d->dn, 0));
    return op->rmsnorm_bwd(d->k, rows, H, a->x1, dw(d, w->ln2), a->r2, d->dn, dx, 1, acc + w->ln2);
}

/* From dO (R,nq), gradient of the attention's output, to dq, dkv (rotated back, before the norm) and the context's dkv. */
static int attend_bwd(struct mr_dflash *d, int i, const void *dO, float *acc)
{
    const struct mr_k_ops *op = d->k->op;
    const struct dlayer_mats *w = &d->mats[i];
    struct dlayer *a = &d->layer[i];
    struct dcontext *x = &d->ctx[i];
    struct mr_k_blocks blocks = mr_dflash_blocks(d);
    struct mr_k_block_mask mask = mr_dflash_mask(d, i);
    int nh = d->c->n_heads, kv = d->c->n_kv_heads, hd = d->c->head_dim, ld = 2 * d->nk;
    size_t v = (size_t)d->nk;

    DO(op->attn_block_bwd(d->k, &blocks, d->cu, d->b->cu, &mask, nh, kv, hd, a->q, x->kv, dat(d, x->kv, v), ld, a->kv, dat(d, a->kv, v), ld,
                          a->o, a->lse, dO, d->dq, x->dkv, dat(d, x->dkv, v), ld, d->dkv, dat(d, d->dkv, v), ld));
    DO(op->head_norm_rope_bwd(d->k, d->rows, nh, hd, d->dq, d->nq, a->q_pre, dw(d, w->qn), a->rq, d->pos, d->cs, acc + w->qn));
    return op->head_norm_rope_bwd(d->k, d->rows, kv, hd, d->dkv, ld, a->k_pre, dw(d, w->kn), a->rk, d->pos, d->cs, acc + w->kn);
}

/* From dq, dkv to the projections' weights and to the stream: dx += d x0 (layer 0: the norm's weight only). */
static int project_bwd(struct mr_dflash *d, int i, void *dx, float *acc)
{
    const struct dlayer_mats *w = &d->mats[i];
    struct dlayer *a = &d->layer[i];
    int R = d->rows, ld = 2 * d->nk;

    DO(mr_dflash_mat_dw(d, &w->q, R, d->dq, d->nq, a->n1, acc));
    DO(mr_dflash_mat_dw(d, &w->kv, R, d->dkv, ld, a->n1, acc));
    DO(mr_dflash_mat_dx(d, &w->q, R, d->dq, d->nq, d->dn, 0));
    DO(mr_dflash_mat_dx(d, &w->kv, R, d->dkv, ld, d->dn, 1));
    return d->k->op->rmsnorm_bwd(d->k, R, d->c->hidden_size, a->x0, dw(d, w->ln1), a->r1, d->dn, i > 0 ? dx : NULL, 1, acc + w->ln1);
}

/* dst (R,cols) = src (S,cols) in the selected rows, zero elsewhere */
static int spread(struct mr_dflash *d, const void *src, int cols, void *dst)
{
    DO(d->k->op->zero(d->k, dst, (size_t)d->rows * (size_t)cols * (size_t)d->k->act_bytes));
    return d->k->op->scatter_add(d->k, d->n_sel, cols, src, d->sel, dst, cols);
}

int mr_dflash_chunk_bwd(struct mr_dflash *d, float *acc)
{
    int H = d->c->hidden_size, L = d->c->n_layers;

    DO(d->k->op->rmsnorm_bwd(d->k, d->n_sel, H, d->x_end, dw(d, d->norm), d->r_f, d->dx2, d->dx, 0, acc + d->norm));
    for (int i = L - 1; i >= 0; i--) {
        int last = last_layer(d, i), rows = last ? d->n_sel : d->rows;
        void *dO = d->dO;

        DO(mlp_bwd(d, i, rows, d->dx, acc));
        DO(mr_dflash_mat_dw(d, &d->mats[i].o, rows, d->dx, H, last ? d->o_sel : d->layer[i].o, acc));
        DO(mr_dflash_mat_dx(d, &d->mats[i].o, rows, d->dx, H, dO, 0));
        if (last) {
            void *t = d->dx;

            DO(spread(d, d->dx, H, d->dx2));
            DO(spread(d, dO, d->nq, d->dO2));
            d->dx = d->dx2;
            d->dx2 = t;
            dO = d->dO2;
        }
        DO(attend_bwd(d, i, dO, acc));
        DO(project_bwd(d, i, d->dx, acc));
    }
    return 0;
}

int mr_dflash_context_bwd(struct mr_dflash *d, float *acc)
{
    const struct mr_k_ops *op = d->k->op;
    int n = d->b->n_tokens, H = d->c->hidden_size, kv = d->c->n_kv_heads, hd = d->c->head_dim, ld = 2 * d->nk;

    for (int i = 0; i < d->c->n_layers; i++) {
        const struct dlayer_mats *w = &d->mats[i];
        struct dcontext *x = &d->ctx[i];

        DO(op->head_norm_rope_bwd(d->k, n, kv, hd, x->dkv, ld, x->k_pre, dw(d, w->kn), x->rk, d->ctx_pos, d->cs, acc + w->kn));
        DO(mr_dflash_mat_dw(d, &w->kv, n, x->dkv, ld, d->c_norm, acc));
        DO(mr_dflash_mat_dx(d, &w->kv, n, x->dkv, ld, d->dc, i > 0));
    }
    DO(op->rmsnorm_bwd(d->k, n, H, d->fcout, dw(d, d->hidden_norm), d->r_c, d->dc, d->dc2, 0, acc + d->hidden_norm));
    return mr_dflash_mat_dw(d, &d->fc, n, d->dc2, H, d->b->features, acc);
}
