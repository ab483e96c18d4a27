/* DFlash drafters: memory, the plan of a chunk, the loss, and the order of forward and backward (dflash_fwd.c, dflash_bwd.c).
 *
 * Limits: no attention biases, plain RoPE over the whole head, CE or D-PACE.
 */
#include "actors/dflash.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "actors/carve.h"
#include "actors/dflash_pvt.h"

/* ---- create ---------------------------------------------------------------------------------------------------------------------- */

static struct dmat mat1(const struct mr_dparam *t)
{
    return (struct dmat){.rows = t->rows, .cols = t->cols, .n_parts = 1, .part = {{t->offset, t->rows, 0}}};
}

/* Two matrices of the same width as one; tensors are padded in the flat vector, so they are adjacent only when no padding lies between. */
static struct dmat mat2(const struct mr_dparam *a, const struct mr_dparam *b)
{
    struct dmat m = mat1(a);

    m.rows += b->rows;
    if (a->offset + a->n == b->offset) {
        m.part[0].rows = m.rows;
    } else {
        m.part[1].off = b->offset;
        m.part[1].rows = b->rows;
        m.part[1].col = a->rows;
        m.n_parts = 2;
    }
    return m;
}

static void place_params(struct mr_dflash *d)
{
    const struct mr_dparam *t = d->l->t;

    d->fc = mat1(&t[d->l->fc]);
    d->hidden_norm = t[d->l->hidden_norm].offset;
    d->norm = t[d->l->norm].offset;
    for (int i = 0; i < d->c->n_layers; i++) {
        const struct mr_dparam *p = &t[d->l->layer0 + i * MR_DP_PER_LAYER];

        d->mats[i] = (struct dlayer_mats){.q = mat1(&p[MR_DP_Q]), .kv = mat2(&p[MR_DP_K], &p[MR_DP_V]), .o = mat1(&p[MR_DP_O]),
                                          .gu = mat2(&p[MR_DP_GATE], &p[MR_DP_UP]), .down = mat1(&p[MR_DP_DOWN]),
                                          .ln1 = p[MR_DP_LN1].offset, .ln2 = p[MR_DP_LN2].offset, .qn = p[MR_DP_QN].offset,
                                          .kn = p[MR_DP_KN].offset};
    }
}

static void carve_layer(struct mr_dflash *d, struct dlayer *a, struct mr_carve *v)
{
    size_t act = (size_t)d->k->act_bytes, R = (size_t)d->R, H = (size_t)d->c->hidden_size, I = (size_t)d->c->intermediate_size;
    size_t nh = (size_t)d->c->n_heads, kv = (size_t)d->c->n_kv_heads, nq = (size_t)d->nq, nk = (size_t)d->nk, f = sizeof(float);

    *a = (struct dlayer){.x0 = mr_carve_take(v, R * H, act)};
    a->n1 = mr_carve_take(v, R * H, act);
    a->q = mr_carve_take(v, R * nq, act);
    a->kv = mr_carve_take(v, R * 2 * nk, act);
    a->o = mr_carve_take(v, R * nq, act);
    a->x1 = mr_carve_take(v, R * H, act);
    a->n2 = mr_carve_take(v, R * H, act);
    a->gu = mr_carve_take(v, R * 2 * I, act);
    a->m = mr_carve_take(v, R * I, act);
    a->lse = mr_carve_take(v, R * nh, f);
    if (!d->o.train)
        return;
    a->q_pre = mr_carve_take(v, R * nq, act);
    a->k_pre = mr_carve_take(v, R * nk, act);
    a->r1 = mr_carve_take(v, R, f);
    a->rq = mr_carve_take(v, R * nh, f);
    a->rk = mr_carve_take(v, R * kv, f);
    a->r2 = mr_carve_take(v, R, f);
}

static void carve_context(struct mr_dflash *d, struct mr_carve *v)
{
    size_t act = (size_t)d->k->act_bytes, T = (size_t)d->o.max_tokens, H = (size_t)d->c->hidden_size, nk = (size_t)d->nk;
    int train = d->o.train;

    d->fcout = mr_carve_take(v, T * H, act);
    d->c_norm = mr_carve_take(v, T * H, act);
    d->r_c = train ? mr_carve_take(v, T, sizeof(float)) : NULL;
    for (int i = 0; i < d->c->n_layers; i++) {
        struct dcontext *x = &d->ctx[i];

        x->kv = mr_carve_take(v, T * 2 * nk, act);
        x->k_pre = train ? mr_carve_take(v, T * nk, act) : NULL;
        x->dkv = train ? mr_carve_take(v, T * 2 * nk, act) : NULL;
        x->rk = train ? mr_carve_take(v, T * (size_t)d->c->n_kv_heads, sizeof(float)) : NULL;
    }
    d->dc = train ? mr_carve_take(v, T * H, act) : NULL;
    d->dc2 = train ? mr_carve_take(v, T * H, act) : NULL;
    d->cs = mr_carve_take(v, (T + (size_t)d->c->block_size) * (size_t)d->c->head_dim, sizeof(float));
    d->cu = mr_carve_take(v, (size_t)d->o.max_seqs + 1, sizeof(int32_t));
    d->ctx_pos = mr_carve_take(v, T, sizeof(int32_t));
    d->blk_seq = mr_carve_take(v, (size_t)d->o.max_blocks, sizeof(int32_t));
    d->blk_pos = mr_carve_take(v, (size_t)d->o.max_blocks, sizeof(int32_t));
}

static void carve_backward(struct mr_dflash *d, struct mr_carve *v)
{
    size_t act = (size_t)d->k->act_bytes, R = (size_t)d->R, H = (size_t)d->c->hidden_size, I = (size_t)d->c->intermediate_size;
    size_t nq = (size_t)d->nq, nk = (size_t)d->nk;

    d->dx = mr_carve_take(v, R * H, act);
    d->dx2 = mr_carve_take(v, R * H, act);
    d->dn = mr_carve_take(v, R * H, act);
    d->dq = mr_carve_take(v, R * nq, act);
    d->dO = mr_carve_take(v, R * nq, act);
    d->dO2 = mr_carve_take(v, R * nq, act);
    d->dkv = mr_carve_take(v, R * 2 * nk, act);
    d->dm = mr_carve_take(v, R * I, act);
    d->dgu = mr_carve_take(v, R * 2 * I, act);
}

static void carve_all(struct mr_dflash *d, struct mr_carve *v)
{
    size_t act = (size_t)d->k->act_bytes, R = (size_t)d->R, H = (size_t)d->c->hidden_size, i4 = sizeof(int32_t);
    int V = d->frozen->vocab;

    d->w_copy = d->k->act_bytes == 4 ? NULL : mr_carve_take(v, d->l->P, act);
    carve_context(d, v);
    for (int i = 0; i < d->c->n_layers; i++) {
        if (i == 0 || d->o.train)
            carve_layer(d, &d->layer[i], v);
        else
            d->layer[i] = d->layer[0];
    }
    d->o_sel = mr_carve_take(v, R * (size_t)d->nq, act);
    d->x_end = mr_carve_take(v, R * H, act);
    d->f = mr_carve_take(v, R * H, act);
    d->r_f = d->o.train ? mr_carve_take(v, R, sizeof(float)) : NULL;
    d->logits = d->o.logits ? mr_carve_take(v, R * (size_t)V, act) : NULL;
    d->ids = mr_carve_take(v, R, i4);
    d->pos = mr_carve_take(v, R, i4);
    d->sel = mr_carve_take(v, R, i4);
    d->label = mr_carve_take(v, R, i4);
    d->argmax = mr_carve_take(v, R, i4);
    d->weight = mr_carve_take(v, R, sizeof(float));
    d->ce = mr_carve_take(v, R, sizeof(float));
    d->ce_scratch = mr_carve_take(v, d->k->op->ce_scratch(d->k, d->R, d->c->hidden_size, V), 1);
    if (d->o.train)
        carve_backward(d, v);
}

static int alloc_host(struct mr_dflash *d)
{
    size_t R = (size_t)d->R, i4 = sizeof(int32_t);

    d->h.ids = malloc(R * i4);
    d->h.pos = malloc(R * i4);
    d->h.sel = malloc(R * i4);
    d->h.label = malloc(R * i4);
    d->h.argmax = malloc(R * i4);
    d->h.ctx_pos = malloc((size_t)d->o.max_tokens * i4);
    d->h.weight = malloc(R * sizeof(float));
    d->h.ce = malloc(R * sizeof(float));
    d->h.decay = malloc((size_t)d->c->block_size * sizeof(float));
    d->h.labelled = malloc(R);
    return d->h.ids && d->h.pos && d->h.sel && d->h.label && d->h.argmax && d->h.ctx_pos && d->h.weight && d->h.ce && d->h.decay &&
                   d->h.labelled
               ? 0
               : -ENOMEM;
}

static int fill_tables(struct mr_dflash *d)
{
    const struct mr_model_config rope = {.head_dim = d->c->head_dim, .rope_theta = d->c->rope_theta, .rope_factor = 1.0};
    int B = d->c->block_size, hd = d->c->head_dim, n = d->o.max_tokens + B, rc = -ENOMEM;
    float *cs = malloc((size_t)n * (size_t)hd * sizeof *cs), *inv = malloc((size_t)hd / 2 * sizeof *inv);

    if (cs && inv) {
        mr_model_inv_freq(&rope, inv);
        mr_k_rope_table(cs, n, hd, inv);
        rc = d->k->op->h2d(d->k, d->cs, cs, (size_t)n * (size_t)hd * sizeof *cs);
        if (!rc)
            rc = d->k->op->sync(d->k);
    }
    free(cs);
    free(inv);
    for (int k = 0; k < B; k++)
        d->h.decay[k] = d->o.gamma > 0 && k > 1 ? (float)exp(-(k - 1) / d->o.gamma) : 1.0f;
    return rc;
}

static int build(struct mr_dflash *d, struct mr_err *err)
{
    struct mr_carve v = {0};
    int B = d->c->block_size;

    d->chunk_blocks = d->o.chunk_rows / B > 0 ? d->o.chunk_rows / B : 1;
    if (d->chunk_blocks > d->o.max_blocks)
        d->chunk_blocks = d->o.max_blocks;
    d->R = d->chunk_blocks * B;
    d->mats = calloc((size_t)d->c->n_layers, sizeof *d->mats);
    d->layer = calloc((size_t)d->c->n_layers, sizeof *d->layer);
    d->ctx = calloc((size_t)d->c->n_layers, sizeof *d->ctx);
    if (!d->mats || !d->layer || !d->ctx || alloc_host(d))
        return mr_err_set(err, MR_EXIT_ENV, "out of memory for the drafter");
    place_params(d);
    carve_all(d, &v);
    d->bytes = v.at;
    d->work = d->k->op->alloc(d->k, v.at);
    if (!d->work)
        return mr_err_set(err, MR_EXIT_ENV,
                          "out of memory for the drafter's activations: %zu bytes for %d tokens and %d block rows on the %s backend", v.at,
                          d->o.max_tokens, d->R, d->k->op->name);
    v = (struct mr_carve){.base = d->work};
    carve_all(d, &v);
    if (fill_tables(d))
        return mr_err_set(err, MR_EXIT_FAILED, "drafter: RoPE table could not be made on the %s backend", d->k->op->name);
    return 0;
}

struct mr_dflash *mr_dflash_create(struct mr_k *k, const struct mr_drafter_config *c, const struct mr_dlayout *l,
                                   const struct mr_frozen *frozen, const struct mr_dflash_opts *o, struct mr_err *err)
{
    struct mr_dflash *d = calloc(1, sizeof *d);

    if (!d) {
        mr_err_set(err, MR_EXIT_ENV, "out of memory for the drafter");
        return NULL;
    }
    d->k = k;
    d->c = c;
    d->l = l;
    d->frozen = frozen;
    d->o = *o;
    d->nq = c->n_heads * c->head_dim;
    d->nk = c->n_kv_heads * c->head_dim;
    if (frozen->H != c->hidden_size)
        mr_err_set(err, MR_EXIT_CONFIG,
                   "the drafter's hidden_size is %d, the target's is %d: they share embedding and head, so they must be equal",
                   c->hidden_size, frozen->H);
    else if (c->block_size < 2 || c->block_size > MR_MAX_BLOCK)
        mr_err_set(err, MR_EXIT_CONFIG, "the drafter's block_size is %d; 2 to %d are possible", c->block_size, (int)MR_MAX_BLOCK);
    else if (!build(d, err))
        return d;
    mr_dflash_destroy(d);
    return NULL;
}

void mr_dflash_destroy(struct mr_dflash *d)
{
    if (!d)
        return;
    if (d->work)
        d->k->op->release(d->k, d->work);
    free(d->h.ids);
    free(d->h.pos);
    free(d->h.sel);
    free(d->h.label);
    free(d->h.argmax);
    free(d->h.ctx_pos);
    free(d->h.weight);
    free(d->h.ce);
    free(d->h.decay);
    free(d->h.labelled);
    free(d->mats);
    free(d->layer);
    free(d->ctx);
    free(d);
}

size_t mr_dflash_bytes(const struct mr_dflash *d)
{
    return d->bytes;
}

int mr_dflash_set_param(struct mr_dflash *d, const float *param)
{
    d->w = d->w_copy ? d->w_copy : (const void *)param;
    return d->w_copy ? d->k->op->f32_to_act(d->k, d->w_copy, param, d->l->P) : 0;
}

/* ---- what a chunk computes --------------------------------------------------------------------------------------------------------- */

static int stage_batch(struct mr_dflash *d, const struct mr_dflash_batch *b)
{
    const struct mr_k_ops *op = d->k->op;
    size_t i4 = sizeof(int32_t);

    if (b->n_seqs < 1 || b->n_seqs > d->o.max_seqs || b->n_tokens < 1 || b->n_tokens > d->o.max_tokens || b->n_blocks > d->o.max_blocks)
        return -E2BIG;
    d->b = b;
    for (int s = 0; s < b->n_seqs; s++)
        for (int t = b->cu[s]; t < b->cu[s + 1]; t++)
            d->h.ctx_pos[t] = t - b->cu[s];
    DO(op->h2d(d->k, d->ctx_pos, d->h.ctx_pos, (size_t)b->n_tokens * i4));
    DO(op->h2d(d->k, d->cu, b->cu, ((size_t)b->n_seqs + 1) * i4));
    DO(op->h2d(d->k, d->blk_seq, b->seq, (size_t)b->n_blocks * i4));
    return op->h2d(d->k, d->blk_pos, b->pos, (size_t)b->n_blocks * i4);
}

/* Row of block slot k standing at token t (in the packed batch) of a sequence that ends before `end`. */
static void plan_row(struct mr_dflash *d, int row, int k, int t, int end)
{
    int in_row = k > 0 && t < end, labelled = in_row && d->b->mask[t];

    d->h.ids[row] = k == 0 ? d->b->ids[t] : d->c->mask_token_id;
    if (d->o.rows == MR_DFLASH_ALL || (d->o.rows == MR_DFLASH_IN_ROW && in_row) || labelled) {
        int s = d->n_sel++;

        d->h.sel[s] = row;
        d->h.label[s] = in_row ? d->b->ids[t] : 0;
        d->h.labelled[s] = (uint8_t)labelled;
        d->h.weight[s] = labelled ? d->h.decay[k] : 0.0f;
    }
}

/* Blocks of the chunk that begins with block `first`.  Where the context's gradients are kept in 16 bits, a chunk ends with a sequence if it
 * can: what several chunks add to one sequence would be rounded at each of them. */
static int chunk_from(const struct mr_dflash *d, int first)
{
    const int32_t *seq = d->b->seq + first;
    int left = d->b->n_blocks - first, n = left < d->chunk_blocks ? left : d->chunk_blocks, whole = n;

    if (!d->o.train || d->k->act_bytes == 4 || n == left)
        return n;
    while (whole > 0 && seq[whole - 1] == seq[whole])
        whole--;
    return whole > 0 ? whole : n;
}

static int plan_chunk(struct mr_dflash *d, int first)
{
    const struct mr_k_ops *op = d->k->op;
    const struct mr_dflash_batch *b = d->b;
    int B = d->c->block_size;

    d->first = first;
    d->n = chunk_from(d, first);
    d->rows = d->n * B;
    d->n_sel = 0;
    for (int j = 0; j < d->n; j++) {
        int s = b->seq[first + j], a = b->pos[first + j];

        for (int k = 0; k < B; k++) {
            d->h.pos[j * B + k] = a + k;
            plan_row(d, j * B + k, k, b->cu[s] + a + k, b->cu[s + 1]);
        }
    }
    DO(op->h2d(d->k, d->ids, d->h.ids, (size_t)d->rows * sizeof(int32_t)));
    DO(op->h2d(d->k, d->pos, d->h.pos, (size_t)d->rows * sizeof(int32_t)));
    DO(op->h2d(d->k, d->sel, d->h.sel, (size_t)d->n_sel * sizeof(int32_t)));
    DO(op->h2d(d->k, d->label, d->h.label, (size_t)d->n_sel * sizeof(int32_t)));
    return op->h2d(d->k, d->weight, d->h.weight, (size_t)d->n_sel * sizeof(float));
}

/* ---- loss -------------------------------------------------------------------------------------------------------------------------- */

void mr_dflash_dpace(int n, const float *ce, const uint8_t *labelled, float *weight)
{
    double P = 1.0, R = 0.0;

    for (int i = 0; i < n; i++) {
        if (labelled[i])
            P *= 0.5 * exp(-(double)ce[i]) + 0.5;
        weight[i] = (float)P;
    }
    for (int i = n - 1; i >= 0; i--) {
        if (labelled[i])
            R += weight[i];
        weight[i] = labelled[i] ? (float)R : 0.0f;
    }
}

/* One past the last selected row of the block that selected row s belongs to. */
static int block_end(const struct mr_dflash *d, int s)
{
    int B = d->c->block_size, block = d->h.sel[s] / B;

    while (s < d->n_sel && d->h.sel[s] / B == block)
        s++;
    return s;
}

/* D-PACE weighs a slot by how sure the drafter is of the slots before it, so it needs ce first. */
static int dpace_weights(struct mr_dflash *d)
{
    const struct mr_k_ops *op = d->k->op;
    size_t bytes = (size_t)d->n_sel * sizeof(float);

    DO(op->ce(d->k, d->n_sel, d->c->hidden_size, d->frozen->vocab, d->f, d->frozen->head, d->label, d->weight, d->ce_scratch, d->ce, NULL,
              NULL));
    DO(op->d2h(d->k, d->h.ce, d->ce, bytes));
    DO(op->sync(d->k));
    for (int s = 0, e; s < d->n_sel; s = e) {
        e = block_end(d, s);
        mr_dflash_dpace(e - s, d->h.ce + s, d->h.labelled + s, d->h.weight + s);
    }
    return op->h2d(d->k, d->weight, d->h.weight, bytes);
}

/* ce, argmax and, into dx2, the gradient of f. */
static int loss(struct mr_dflash *d, int want_dx)
{
    const struct mr_k_ops *op = d->k->op;

    if (d->o.loss)
        DO(dpace_weights(d));
    return op->ce(d->k, d->n_sel, d->c->hidden_size, d->frozen->vocab, d->f, d->frozen->head, d->label, d->weight, d->ce_scratch, d->ce,
                  d->argmax, want_dx ? d->dx2 : NULL);
}

/* The host's copies of ce and argmax.  Last in a chunk: a copy to the host may wait for all that was issued before it. */
static int fetch(struct mr_dflash *d)
{
    DO(d->k->op->d2h(d->k, d->h.ce, d->ce, (size_t)d->n_sel * sizeof(float)));
    DO(d->k->op->d2h(d->k, d->h.argmax, d->argmax, (size_t)d->n_sel * sizeof(int32_t)));
    return d->k->op->sync(d->k);     /* the host arrays are free again */
}

/* Selected row s, a supervised slot (so never slot 0), goes into the figures of its place in the block. */
static void score_slot(const struct mr_dflash *d, int s, int hit, struct mr_dflash_result *r)
{
    struct mr_slot_sums *at = &r->slot[d->h.sel[s] % d->c->block_size - 1];

    at->labels++;
    at->correct += (uint64_t)hit;
    at->loss += (double)d->h.ce[s];
}

/* Accepted: correct slots in front of the first wrong one; unsupervised slots neither end the run nor count. */
static void score(const struct mr_dflash *d, struct mr_dflash_result *r)
{
    for (int s = 0, e; s < d->n_sel; s = e) {
        int run = 1;

        e = block_end(d, s);
        for (int i = s; i < e; i++) {
            int hit = d->h.argmax[i] == d->h.label[i];

            if (!d->h.labelled[i])
                continue;
            run &= hit;
            r->accepted += (uint64_t)run;
            r->correct += (uint64_t)hit;
            r->labels++;
            score_slot(d, i, hit, r);
            r->loss_sum += (double)d->h.ce[i] * (double)d->h.weight[i];
            if (!d->o.loss)
                r->weight_sum += (double)d->h.weight[i];
        }
    }
    r->blocks += (uint64_t)d->n;
    r->rows += (uint64_t)d->rows;
}

/* ---- the two calls ------------------------------------------------------------------------------------------------------------------ */

static int begin(struct mr_dflash *d, const struct mr_dflash_batch *b, struct mr_dflash_result *r)
{
    *r = (struct mr_dflash_result){0};
    DO(stage_batch(d, b));
    if (d->o.loss)
        r->weight_sum = b->n_seqs;       /* D-PACE is a mean over samples */
    return b->n_blocks ? mr_dflash_context_fwd(d) : 0;
}

int mr_dflash_accumulate(struct mr_dflash *d, const struct mr_dflash_batch *b, float *acc, struct mr_dflash_result *r)
{
    size_t kv_bytes = (size_t)b->n_tokens * 2 * (size_t)d->nk * (size_t)d->k->act_bytes;

    if (!d->o.train)
        return -EINVAL;
    DO(begin(d, b, r));
    for (int i = 0; b->n_blocks && i < d->c->n_layers; i++)
        DO(d->k->op->zero(d->k, d->ctx[i].dkv, kv_bytes));
    for (int first = 0; first < b->n_blocks; first += d->n) {
        DO(plan_chunk(d, first));
        if (d->n_sel) {
            DO(mr_dflash_chunk_fwd(d));
            DO(loss(d, 1));
            DO(mr_dflash_chunk_bwd(d, acc));
        }
        DO(fetch(d));
        score(d, r);
    }
    if (b->n_blocks)
        DO(mr_dflash_context_bwd(d, acc));
    return d->k->op->sync(d->k);
}

/* Selected rows back to their places in the caller's arrays. */
static void hand_out(const struct mr_dflash *d, int32_t *argmax, float *ce)
{
    size_t row0 = (size_t)d->first * (size_t)d->c->block_size;

    for (int i = 0; i < d->rows; i++) {
        if (argmax)
            argmax[row0 + (size_t)i] = -1;
        if (ce)
            ce[row0 + (size_t)i] = 0.0f;
    }
    for (int s = 0; s < d->n_sel; s++) {
        if (argmax)
            argmax[row0 + (size_t)d->h.sel[s]] = d->h.argmax[s];
        if (ce)
            ce[row0 + (size_t)d->h.sel[s]] = d->h.ce[s];
    }
}

int mr_dflash_forward(struct mr_dflash *d, const struct mr_dflash_batch *b, int32_t *argmax, float *ce, struct mr_dflash_result *r)
{
    DO(begin(d, b, r));
    for (int first = 0; first < b->n_blocks; first += d->n) {
        DO(plan_chunk(d, first));
        if (d->n_sel) {
            DO(mr_dflash_chunk_fwd(d));
            DO(loss(d, 0));
        }
        DO(fetch(d));
        score(d, r);
        hand_out(d, argmax, ce);
    }
    return 0;
}
