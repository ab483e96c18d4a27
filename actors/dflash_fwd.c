/* DFlash forward: the context once a microbatch, then block rows chunk by chunk.
 *
 * The residual stream is never copied: a product writes the new stream's buffer and the old stream is added to it in the same pass that
 * computes the next norm.  Every buffer keeps the value that the backward needs.
 */
#include "actors/dflash_pvt.h"

int mr_dflash_mat(const struct mr_dflash *d, const struct dmat *W, int m, const void *x, void *y, int ldy)
{
    for (int i = 0; i < W->n_parts; i++)
        DO(d->k->op->linear(d->k, m, W->part[i].rows, W->cols, x, W->cols, dw(d, W->part[i].off), dat(d, y, (size_t)W->part[i].col), ldy,
                            0));
    return 0;
}

struct mr_k_blocks mr_dflash_blocks(const struct mr_dflash *d)
{
    return (struct mr_k_blocks){.n = d->n, .B = d->c->block_size, .seq = d->blk_seq + d->first, .pos = d->blk_pos + d->first,
                                .host_seq = d->b->seq + d->first, .host_pos = d->b->pos + d->first};
}

struct mr_k_block_mask mr_dflash_mask(const struct mr_dflash *d, int layer)
{
    return (struct mr_k_block_mask){.window = d->c->sliding[layer] ? d->c->sliding_window : 0, .causal = d->c->causal[layer],
                                    .window_origin = d->c->window_origin};
}

int mr_dflash_context_fwd(struct mr_dflash *d)
{
    const struct mr_k_ops *op = d->k->op;
    int n = d->b->n_tokens, H = d->c->hidden_size, kv = d->c->n_kv_heads, hd = d->c->head_dim;
    float eps = (float)d->c->rms_eps;

    d->first = 0;
    DO(mr_dflash_mat(d, &d->fc, n, d->b->features, d->fcout, H));
    DO(dtap(d, "fc", -1, d->fcout, n, H));
    DO(op->rmsnorm(d->k, n, H, d->fcout, dw(d, d->hidden_norm), eps, d->c_norm, d->r_c));
    DO(dtap(d, "ctx", -1, d->c_norm, n, H));
    for (int i = 0; i < d->c->n_layers; i++) {
        struct dcontext *x = &d->ctx[i];

        DO(mr_dflash_mat(d, &d->mats[i].kv, n, d->c_norm, x->kv, 2 * d->nk));
        DO(op->head_norm_rope(d->k, n, kv, hd, x->kv, 2 * d->nk, dw(d, d->mats[i].kn), eps, d->ctx_pos, d->cs, x->k_pre, x->rk));
    }
    return 0;
}

/* o = attention of the chunk's rows; n1 is there */
static int attend(struct mr_dflash *d, int i)
{
    const struct mr_k_ops *op = d->k->op;
    const struct dlayer_mats *w = &d->mats[i];
    struct dlayer *a = &d->layer[i];
    struct mr_k_blocks blocks = mr_dflash_blocks(d);
    struct mr_k_block_mask mask = mr_dflash_mask(d, i);
    int R = d->rows, nh = d->c->n_heads, kv = d->c->n_kv_heads, hd = d->c->head_dim, ld = 2 * d->nk;
    float eps = (float)d->c->rms_eps;

    DO(mr_dflash_mat(d, &w->q, R, a->n1, a->q, d->nq));
    DO(mr_dflash_mat(d, &w->kv, R, a->n1, a->kv, ld));
    DO(op->head_norm_rope(d->k, R, nh, hd, a->q, d->nq, dw(d, w->qn), eps, d->pos, d->cs, a->q_pre, a->rq));
    DO(op->head_norm_rope(d->k, R, kv, hd, a->kv, ld, dw(d, w->kn), eps, d->pos, d->cs, a->k_pre, a->rk));
    return op->attn_block(d->k, &blocks, d->cu, d->b->cu, &mask, nh, kv, hd, a->q, d->ctx[i].kv, dat(d, d->ctx[i].kv, (size_t)d->nk), ld,
                          a->kv, dat(d, a->kv, (size_t)d->nk), ld, a->o, a->lse);
}

/* x_next = x1 + MLP(n2), and y = its norm with weight `w` */
static int mlp(struct mr_dflash *d, int i, int rows, void *x_next, uint64_t w, void *y, float *rstd)
{
    const struct mr_k_ops *op = d->k->op;
    struct dlayer *a = &d->layer[i];
    int H = d->c->hidden_size, I = d->c->intermediate_size;

    DO(mr_dflash_mat(d, &d->mats[i].gu, rows, a->n2, a->gu, 2 * I));
    DO(op->swiglu(d->k, rows, I, a->gu, dat(d, a->gu, (size_t)I), 2 * I, a->m));
    DO(mr_dflash_mat(d, &d->mats[i].down, rows, a->m, x_next, H));
    DO(dtap(d, "mlp", i, x_next, rows, H));
    DO(op->add_rmsnorm(d->k, rows, H, x_next, a->x1, dw(d, w), (float)d->c->rms_eps, y, rstd));
    return dtap(d, "layer", i, x_next, rows, H);
}

/* One layer.  Behind the attention of the last one, only the selected rows go on. */
static int layer_fwd(struct mr_dflash *d, int i)
{
    const struct mr_k_ops *op = d->k->op;
    struct dlayer *a = &d->layer[i], *next = last_layer(d, i) ? NULL : &d->layer[i + 1];
    int H = d->c->hidden_size, rows = next ? d->rows : d->n_sel;
    void *o = a->o, *x0 = a->x0;

    DO(attend(d, i));
    if (!next) {
        DO(op->gather(d->k, rows, d->nq, a->o, d->nq, d->sel, d->o_sel));
        DO(op->gather(d->k, rows, H, a->x0, H, d->sel, d->x_end));
        o = d->o_sel;
        x0 = d->x_end;           /* free until the MLP writes it */
    }
    DO(mr_dflash_mat(d, &d->mats[i].o, rows, o, a->x1, H));
    DO(dtap(d, "attn", i, a->x1, rows, H));
    DO(op->add_rmsnorm(d->k, rows, H, a->x1, x0, dw(d, d->mats[i].ln2), (float)d->c->rms_eps, a->n2, a->r2));
    if (next)
        return mlp(d, i, rows, next->x0, d->mats[i + 1].ln1, next->n1, next->r1);
    return mlp(d, i, rows, d->x_end, d->norm, d->f, d->r_f);
}

int mr_dflash_chunk_fwd(struct mr_dflash *d)
{
    const struct mr_k_ops *op = d->k->op;
    struct dlayer *a = &d->layer[0];
    int H = d->c->hidden_size;

    DO(op->embed(d->k, d->rows, H, d->frozen->embed, d->ids, a->x0));
    DO(op->rmsnorm(d->k, d->rows, H, a->x0, dw(d, d->mats[0].ln1), (float)d->c->rms_eps, a->n1, a->r1));
    for (int i = 0; i < d->c->n_layers; i++)
        DO(layer_fwd(d, i));
    DO(dtap(d, "final", -1, d->f, d->n_sel, H));
    if (!d->logits)
        return 0;
    DO(op->linear(d->k, d->n_sel, d->frozen->vocab, H, d->f, H, d->frozen->head, d->logits, d->frozen->vocab, 0));
    return dtap(d, "logits", -1, d->logits, d->n_sel, d->frozen->vocab);
}
