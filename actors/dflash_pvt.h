/* What dflash.c, dflash_fwd.c and dflash_bwd.c share.  Shapes: T context rows, R block rows of a chunk, S selected rows of them,
 * H hidden, I MLP width, nq = heads * head_dim, nk = kv heads * head_dim. */
#ifndef MR_ACTORS_DFLASH_PVT_H
#define MR_ACTORS_DFLASH_PVT_H

#include "actors/dflash.h"

#define DO(call)           \
    do {                   \
        int rc_ = (call);  \
        if (rc_)           \
            return rc_;    \
    } while (0)

/* A matrix of the flat vector, or two that are used as one: [k; v], [gate; up].  They are one product when they are adjacent in the
 * vector, else one each, into the columns of the same output. */
struct dmat {
    int rows, cols, n_parts;
    struct { uint64_t off; int rows, col; } part[2];
};

struct dlayer_mats { struct dmat q, kv, o, gu, down; uint64_t ln1, ln2, qn, kn; };   /* offsets in the flat vector */

struct dlayer {                  /* activations of a layer that its backward needs; chunk rows */
    void *x0, *n1;               /* (R,H) residual stream coming in, and its norm */
    void *q, *q_pre;             /* (R,nq) after and before norm and rotation */
    void *kv, *k_pre;            /* (R,2nk) keys (rotated) and values; (R,nk) */
    void *o;                     /* (R,nq) attention output */
    void *x1, *n2;               /* (R,H) residual stream behind the attention, and its norm; last layer: (S,H), as all below */
    void *gu, *m;                /* (R,2I), (R,I) */
    float *r1, *rq, *rk, *lse, *r2;   /* (R), (R,heads), (R,kv heads), (R,heads), (R) */
};

struct dcontext {                /* the context side of a layer */
    void *kv, *k_pre, *dkv;      /* (T,2nk), (T,nk), (T,2nk) */
    float *rk;                   /* (T, kv heads) */
};

struct mr_dflash {
    struct mr_k *k;
    const struct mr_drafter_config *c;
    const struct mr_dlayout *l;
    const struct mr_frozen *frozen;
    struct mr_dflash_opts o;
    int nq, nk, chunk_blocks, R;
    struct dmat fc;
    struct dlayer_mats *mats;    /* [L] */
    uint64_t hidden_norm, norm;

    void *work;                  /* the one allocation of device memory */
    size_t bytes;                /* of it */
    const void *w;               /* parameters as act, (P) */
    void *w_copy;                /* (P) where act is not f32 */
    struct dlayer *layer;        /* [L] (forward only: all the same memory) */
    struct dcontext *ctx;        /* [L] */
    void *fcout, *c_norm;        /* (T,H) before and after hidden_norm */
    float *r_c;                  /* (T) */
    void *o_sel;                 /* (S,nq) */
    void *x_end, *f;             /* (S,H) residual stream behind the last layer, and its norm */
    float *r_f;
    void *logits;                /* (S,V) only with opts.logits */
    void *dx, *dx2, *dn;         /* (R,H) */
    void *dq, *dO, *dO2;         /* (R,nq) */
    void *dkv;                   /* (R,2nk) */
    void *dm, *dgu;              /* (R,I), (R,2I) */
    void *dc, *dc2;              /* (T,H) */
    void *ce_scratch;
    float *cs;                   /* RoPE (max_tokens + B, hd) */
    int32_t *cu, *ctx_pos, *blk_seq, *blk_pos;                   /* device copies */
    int32_t *ids, *pos, *sel, *label, *argmax;                   /* device, chunk */
    float *weight, *ce;

    struct {                     /* host mirrors of a chunk */
        int32_t *ids, *pos, *sel, *label, *argmax, *ctx_pos;
        float *weight, *ce, *decay;
        uint8_t *labelled;
    } h;
    const struct mr_dflash_batch *b;     /* during a call */
    int first, n, rows, n_sel;           /* the chunk: blocks [first, first + n), their rows, selected rows */
};

static inline void *dat(const struct mr_dflash *d, const void *p, size_t n) { return (char *)(uintptr_t)p + n * (size_t)d->k->act_bytes; }
static inline const void *dw(const struct mr_dflash *d, uint64_t off) { return dat(d, d->w, off); }
static inline int last_layer(const struct mr_dflash *d, int i) { return i == d->c->n_layers - 1; }
static inline int dtap(const struct mr_dflash *d, const char *what, int layer, const void *x, int rows, int cols)
{
    return mr_tap_see(d->o.tap, what, layer, d->first * d->c->block_size, x, rows, cols);
}

/* y (m, W->rows; ldy) = x (m, W->cols) W^T */
int mr_dflash_mat(const struct mr_dflash *d, const struct dmat *W, int m, const void *x, void *y, int ldy);
/* dx (m, W->cols) = dy (m, W->rows; ldy) W [+ dx] */
int mr_dflash_mat_dx(const struct mr_dflash *d, const struct dmat *W, int m, const void *dy, int ldy, void *dx, int acc);
/* acc's matrix += dy^T x */
int mr_dflash_mat_dw(const struct mr_dflash *d, const struct dmat *W, int m, const void *dy, int ldy, const void *x, float *acc);

struct mr_k_blocks mr_dflash_blocks(const struct mr_dflash *d);
struct mr_k_block_mask mr_dflash_mask(const struct mr_dflash *d, int layer);

int mr_dflash_context_fwd(struct mr_dflash *d);
int mr_dflash_chunk_fwd(struct mr_dflash *d);              /* up to f (S,H) */
int mr_dflash_chunk_bwd(struct mr_dflash *d, float *acc);  /* from dx2 (S,H) = gradient of f */
int mr_dflash_context_bwd(struct mr_dflash *d, float *acc);

#endif
