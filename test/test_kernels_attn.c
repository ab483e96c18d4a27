/* Causal and block attention of the cpu kernels, forward and backward, against the definition in double. */
#include "kernels_ref.h"

#include <errno.h>

static const int32_t seqs[] = {0, 1, 10, 47, 117};       /* lengths 1, 9, 37, 70 */
#define N_SEQ 4
#define N_TOK 117

/* One query against n keys with a visibility mark each: o (hd), and with dO the gradients, added. */
struct one {
    int n, hd;
    const unsigned char *see;
    const double **k, **v;               /* (n) rows of hd */
    double **dk, **dv;
};

static double ref_one(const struct one *a, const double *q, double *o, const double *dO, double *dq)
{
    double *p = d_new((size_t)a->n), m = -INFINITY, sum = 0.0, dd = 0.0, scale = 1.0 / sqrt(a->hd);

    memset(o, 0, (size_t)a->hd * sizeof(*o));
    for (int t = 0; t < a->n; t++) {
        p[t] = a->see[t] ? d_dot(q, a->k[t], (size_t)a->hd) * scale : -INFINITY;
        m = p[t] > m ? p[t] : m;
    }
    if (m == -INFINITY) {
        free(p);
        return 0.0;
    }
    for (int t = 0; t < a->n; t++)
        sum += p[t] = a->see[t] ? exp(p[t] - m) : 0.0;
    for (int t = 0; t < a->n; t++) {
        p[t] /= sum;
        for (int i = 0; i < a->hd; i++)
            o[i] += p[t] * a->v[t][i];
    }
    for (int t = 0; dO && t < a->n; t++)
        dd += p[t] * d_dot(dO, a->v[t], (size_t)a->hd);
    for (int t = 0; dO && t < a->n; t++) {
        double ds = p[t] * (d_dot(dO, a->v[t], (size_t)a->hd) - dd) * scale;

        for (int i = 0; i < a->hd; i++) {
            dq[i] += ds * a->k[t][i];
            a->dk[t][i] += ds * q[i];
            a->dv[t][i] += p[t] * dO[i];
        }
    }
    free(p);
    return m + log(sum);
}

static void causal_case(struct mr_k *k, int nh, int kv, int hd)
{
    int ldq = nh * hd + 4, ldkv = 2 * kv * hd + 1, ldo = nh * hd + 2;
    float *q = f_rnd((size_t)N_TOK * ldq, 61, 1.5), *kvx = f_rnd((size_t)N_TOK * ldkv, 62, 1.5), *o = f_rnd((size_t)N_TOK * ldo, 63, 1.0);
    double *rq = d_of(q, (size_t)N_TOK * ldq), *rkv = d_of(kvx, (size_t)N_TOK * ldkv), *ro = d_of(o, (size_t)N_TOK * ldo);
    unsigned char see[N_TOK];
    const double *kr[N_TOK], *vr[N_TOK];
    float *o2 = f_new((size_t)N_TOK * ldo);

    memset(see, 1, sizeof(see));
    memcpy(o2, o, (size_t)N_TOK * ldo * sizeof(*o));
    for (int s = 0; s < N_SEQ; s++)
        for (int h = 0; h < nh; h++)
            for (int t = seqs[s]; t < seqs[s + 1]; t++) {
                struct one a = {t - seqs[s] + 1, hd, see, kr, vr, NULL, NULL};

                for (int u = 0; u < a.n; u++) {
                    kr[u] = rkv + (size_t)(seqs[s] + u) * ldkv + h / (nh / kv) * hd;
                    vr[u] = kr[u] + kv * hd;
                }
                ref_one(&a, rq + (size_t)t * ldq + h * hd, ro + (size_t)t * ldo + h * hd, NULL, NULL);
            }
    assert_int_equal(k->op->attn_causal(k, N_SEQ, seqs, seqs, nh, kv, hd, q, ldq, kvx, kvx + kv * hd, ldkv, o, ldo), 0);
    check_close("attn_causal", o, ro, (size_t)N_TOK * ldo, 5e-6);
    assert_int_equal(k->op->attn_causal(k, N_SEQ, seqs, seqs, nh, kv, hd, q, ldq, kvx, kvx + kv * hd, ldkv, o2, ldo), 0);
    assert_memory_equal(o, o2, (size_t)N_TOK * ldo * sizeof(*o));
    free(q), free(kvx), free(o), free(rq), free(rkv), free(ro), free(o2);
}

static void test_causal(void **state)
{
    static const int shape[][3] = {{1, 1, 16}, {4, 2, 32}, {4, 1, 24}, {2, 2, 64}, {8, 2, 128}};

    (void)state;
    EACH_ISA(k) {
        for (size_t i = 0; i < sizeof(shape) / sizeof(*shape); i++)
            causal_case(k, shape[i][0], shape[i][1], shape[i][2]);
        assert_int_equal(k->op->attn_causal(k, 0, seqs, seqs, 3, 2, 16, NULL, 1, NULL, NULL, 1, NULL, 1), -EINVAL);
    }
}

/* Long sequences take fewer rows at a time; some of their queries, against the definition. */
enum { LONG = 5000, LONG_HD = 16, LONG_B = 8 };

static void check_long(const float *x, const float *got, const float *q, int n_ctx, int n_blk, const float *blk, const char *what)
{
    static unsigned char see[LONG + LONG_B];
    static const double *kr[LONG + LONG_B], *vr[LONG + LONG_B];
    double *rx = d_of(x, LONG * 2 * LONG_HD), *rb = d_of(blk, LONG_B * 2 * LONG_HD), *rq = d_of(q, LONG_HD), o[LONG_HD];
    struct one a = {n_ctx + n_blk, LONG_HD, see, kr, vr, NULL, NULL};

    memset(see, 1, sizeof(see));
    for (int t = 0; t < a.n; t++) {
        kr[t] = t < n_ctx ? rx + (size_t)t * 2 * LONG_HD : rb + (size_t)(t - n_ctx) * 2 * LONG_HD;
        vr[t] = kr[t] + LONG_HD;
    }
    ref_one(&a, rq, o, NULL, NULL);
    check_close(what, got, o, LONG_HD, 1e-5);
    free(rx), free(rb), free(rq);
}

static void test_long(void **state)
{
    enum { NB = 12, NQ = LONG * 2 * LONG_HD, STEP = LONG / NB };
    float *q = f_rnd(NQ, 81, 1.0), *x = f_rnd(LONG * 2 * LONG_HD, 82, 1.0), *bx = f_rnd(NB * LONG_B * 2 * LONG_HD, 83, 1.0), *o = f_new(NQ);
    int32_t cu[2] = {0, LONG}, seq[NB] = {0}, pos[NB];
    struct mr_k_blocks b = {NB, LONG_B, seq, pos, seq, pos};
    struct mr_k_block_mask mask = {0, 0, 0};
    struct mr_k *k = mr_k_cpu_create(1);

    (void)state;
    assert_int_equal(k->op->attn_causal(k, 1, cu, cu, 2, 1, LONG_HD, q, 2 * LONG_HD, x, x + LONG_HD, 2 * LONG_HD, o, 2 * LONG_HD), 0);
    for (int i = 0; i < 2 * LONG; i += 777)
        check_long(x, o + i * LONG_HD, q + i * LONG_HD, i / 2 + 1, 0, bx, "attn_causal, long");
    for (int j = 0; j < NB; j++)
        pos[j] = j * STEP + 3;
    assert_int_equal(
        k->op->attn_block(k, &b, cu, cu, &mask, 2, 1, LONG_HD, q, x, x + LONG_HD, 2 * LONG_HD, bx, bx + LONG_HD, 2 * LONG_HD, o, NULL), 0);
    for (int i = 0; i < 2 * NB * LONG_B; i += 13) {
        int j = i / 2 / LONG_B;

        check_long(x, o + i * LONG_HD, q + i * LONG_HD, pos[j], LONG_B, bx + j * LONG_B * 2 * LONG_HD, "attn_block, long");
    }
    mr_k_cpu_destroy(k);
    free(q), free(x), free(bx), free(o);
}

/* ---- blocks ---- */

struct blocks_case {
    int n, B, nh, kv, hd;
    int32_t seq[64], pos[64];
    struct mr_k_block_mask mask;
    double *q, *c, *b;                   /* (nB, nh*hd), (N_TOK, 2*kv*hd), (nB, 2*kv*hd): keys, then values */
    double *dO, *o, *lse, *dq, *dc, *db; /* gradients NULL: forward only */
};

static void block_query(struct blocks_case *a, int j, int oq, int h)
{
    int T = seqs[a->seq[j] + 1] - seqs[a->seq[j]], w = a->kv * a->hd, off = h / (a->nh / a->kv) * a->hd, n = T + a->B;
    size_t row = (size_t)(j * a->B + oq), qat = row * (size_t)(a->nh * a->hd) + (size_t)(h * a->hd);
    const double *kr[N_TOK + 64], *vr[N_TOK + 64];
    double *dk[N_TOK + 64], *dv[N_TOK + 64], none;
    unsigned char see[N_TOK + 64];
    struct one one = {n, a->hd, see, kr, vr, dk, dv};

    for (int t = 0; t < n; t++) {
        size_t at = t < T ? (size_t)(seqs[a->seq[j]] + t) : (size_t)(j * a->B + t - T);
        size_t col = at * (size_t)(2 * w) + (size_t)off;

        kr[t] = (t < T ? a->c : a->b) + col;
        vr[t] = kr[t] + w;
        dk[t] = a->dq ? (t < T ? a->dc : a->db) + col : &none;
        dv[t] = dk[t] + w;
        see[t] = t < T ? t < a->pos[j] : !a->mask.causal || t - T <= oq;
        if (t < T && a->mask.window && a->mask.window_origin)
            see[t] &= t >= a->pos[j] - a->mask.window;
        else if (t < T && a->mask.window)
            see[t] &= t >= a->pos[j] + oq - (a->mask.window - 1);
        see[t] &= a->pos[j] >= 0;
    }
    a->lse[row * (size_t)a->nh + (size_t)h] = ref_one(&one, a->q + qat, a->o + qat, a->dq ? a->dO + qat : NULL, a->dq ? a->dq + qat : NULL);
}

static double block_loss(void *p)
{
    struct blocks_case f = *(struct blocks_case *)p;
    size_t nq = (size_t)(f.n * f.B * f.nh * f.hd);
    double L;

    f.o = d_new(nq);
    f.lse = d_new((size_t)(f.n * f.B * f.nh));
    f.dq = NULL;
    for (int j = 0; j < f.n; j++)
        for (int oq = 0; oq < f.B; oq++)
            for (int h = 0; h < f.nh; h++)
                block_query(&f, j, oq, h);
    L = d_dot(f.o, f.dO, nq);
    free(f.o);
    free(f.lse);
    return L;
}

static int by_anchor(const void *a, const void *b)
{
    const int32_t *x = a, *y = b;

    return x[0] != y[0] ? (x[0] > y[0]) - (x[0] < y[0]) : (x[1] > y[1]) - (x[1] < y[1]);
}

/* Random anchors, some at 0, some -1 (padding), one at its sequence's end. */
static void draw_anchors(struct blocks_case *a, uint64_t seed)
{
    struct mr_rng r = mr_rng_key(seed, 1, 2);
    int32_t pair[64][2];

    for (int j = 0; j < a->n; j++) {
        pair[j][0] = j < 2 ? 0 : (int32_t)mr_rng_below(&r, N_SEQ);
        pair[j][1] = j % 9 == 4 ? -1 : (int32_t)mr_rng_below(&r, (uint64_t)(seqs[pair[j][0] + 1] - seqs[pair[j][0]]));
        if (j % 7 == 1)
            pair[j][1] = 0;
    }
    qsort(pair, (size_t)a->n, sizeof(pair[0]), by_anchor);
    for (int j = 0; j < a->n; j++) {
        a->seq[j] = pair[j][0];
        a->pos[j] = pair[j][1];
    }
}

/* The right answers, and the kernel's into f32 arrays laid out like them but for the row strides ldc, ldb. */
static void block_run(struct mr_k *k, struct blocks_case *a)
{
    int w = a->kv * a->hd, ldc = 2 * w + 3, ldb = 2 * w + 5, nB = a->n * a->B;
    size_t nq = (size_t)(nB * a->nh * a->hd), nl = (size_t)(nB * a->nh), nc = (size_t)N_TOK * ldc, nb = (size_t)nB * ldb;
    struct mr_k_blocks b = {a->n, a->B, a->seq, a->pos, a->seq, a->pos};
    float *q = f_rnd(nq, 71, 1.5), *c = f_rnd(nc, 72, 1.5), *bk = f_rnd(nb, 73, 1.5), *dO = f_rnd(nq, 74, 1.0), *o = f_rnd(nq, 75, 1.0);
    float *lse = f_new(nl), *dq = f_rnd(nq, 76, 1.0), *dc = f_rnd(nc, 77, 1.0), *db = f_rnd(nb, 78, 1.0),
          *fc = f_new((size_t)N_TOK * 2 * w);
    float *fb = f_new((size_t)nB * 2 * w), *o2 = f_new(nq), *dc0 = f_rnd(nc, 77, 1.0), *dq2 = f_new(nq), *db0 = f_rnd(nb, 78, 1.0);

    a->q = d_of(q, nq), a->dO = d_of(dO, nq), a->o = d_new(nq), a->lse = d_new(nl), a->dq = d_new(nq);
    a->c = d_new((size_t)N_TOK * 2 * w), a->b = d_new((size_t)nB * 2 * w), a->dc = d_new((size_t)N_TOK * 2 * w),
    a->db = d_new((size_t)nB * 2 * w);
    for (int t = 0; t < N_TOK; t++)
        for (int i = 0; i < 2 * w; i++)
            a->c[t * 2 * w + i] = (double)c[t * ldc + i];
    for (int t = 0; t < nB; t++)
        for (int i = 0; i < 2 * w; i++)
            a->b[t * 2 * w + i] = (double)bk[t * ldb + i];
    for (int j = 0; j < a->n; j++)
        for (int oq = 0; oq < a->B; oq++)
            for (int h = 0; h < a->nh; h++)
                block_query(a, j, oq, h);
    assert_int_equal(k->op->attn_block(k, &b, seqs, seqs, &a->mask, a->nh, a->kv, a->hd, q, c, c + w, ldc, bk, bk + w, ldb, o, lse), 0);
    check_close("attn_block", o, a->o, nq, 5e-6);
    check_close("attn_block lse", lse, a->lse, nl, 5e-6);
    assert_int_equal(k->op->attn_block(k, &b, seqs, seqs, &a->mask, a->nh, a->kv, a->hd, q, c, c + w, ldc, bk, bk + w, ldb, o2, NULL), 0);
    assert_memory_equal(o, o2, nq * sizeof(*o));
    assert_int_equal(k->op->attn_block_bwd(k, &b, seqs, seqs, &a->mask, a->nh, a->kv, a->hd, q, c, c + w, ldc, bk, bk + w, ldb, o, lse, dO,
                                           dq, dc, dc + w, ldc, db, db + w, ldb),
                     0);
    for (int t = 0; t < N_TOK; t++)
        for (int i = 0; i < ldc; i++) {
            if (i >= 2 * w)
                assert_true(dc[t * ldc + i] == dc0[t * ldc + i]);
            else
                fc[t * 2 * w + i] = (float)((double)dc[t * ldc + i] - (double)dc0[t * ldc + i]);
        }
    for (int t = 0; t < nB; t++) {
        memcpy(fb + t * 2 * w, db + t * ldb, (size_t)(2 * w) * sizeof(*fb));
        assert_memory_equal(db + t * ldb + 2 * w, db0 + t * ldb + 2 * w, (size_t)(ldb - 2 * w) * sizeof(*db));
    }
    check_close("attn_block_bwd dq", dq, a->dq, nq, 2e-5);
    check_close("attn_block_bwd dc", fc, a->dc, (size_t)(N_TOK * 2 * w), 2e-5);
    check_close("attn_block_bwd db", fb, a->db, (size_t)(nB * 2 * w), 2e-5);
    check_diff("attn_block_bwd dq", block_loss, a, a->q, dq, nq, 3);
    check_diff("attn_block_bwd dc", block_loss, a, a->c, fc, (size_t)(N_TOK * 2 * w), 3);
    check_diff("attn_block_bwd db", block_loss, a, a->b, fb, (size_t)(nB * 2 * w), 3);
    for (int j = 0; j < a->n; j++)
        for (int i = 0; i < a->B * a->nh * a->hd && a->pos[j] < 0; i++) {
            size_t at = (size_t)(j * a->B * a->nh * a->hd + i);

            assert_true(o[at] == 0.0f && dq[at] == 0.0f);
        }
    assert_int_equal(k->op->attn_block_bwd(k, &b, seqs, seqs, &a->mask, a->nh, a->kv, a->hd, q, c, c + w, ldc, bk, bk + w, ldb, o, lse, dO,
                                           dq2, dc0, dc0 + w, ldc, db0, db0 + w, ldb), 0);
    assert_memory_equal(dq, dq2, nq * sizeof(*dq));
    assert_memory_equal(dc, dc0, nc * sizeof(*dc));
    assert_memory_equal(db, db0, nb * sizeof(*db));
    free(q), free(c), free(bk), free(dO), free(o), free(lse), free(dq), free(dc), free(db), free(fc), free(fb), free(o2), free(dc0),
        free(dq2);
    free(db0), free(a->q), free(a->c), free(a->b), free(a->dO), free(a->o), free(a->lse), free(a->dq), free(a->dc), free(a->db);
}

static void test_block_shapes(void **state)
{
    static const int shape[][5] = {{1, 8, 1, 1, 16},   {33, 8, 4, 2, 32},  {20, 5, 4, 1, 24},
                                   {11, 16, 2, 2, 64}, {7, 10, 4, 2, 128}, {40, 1, 2, 1, 16}};

    (void)state;
    EACH_ISA(k)
        for (size_t i = 0; i < sizeof(shape) / sizeof(*shape); i++) {
            struct blocks_case a = {.n = shape[i][0], .B = shape[i][1], .nh = shape[i][2], .kv = shape[i][3], .hd = shape[i][4]};

            draw_anchors(&a, i);
            block_run(k, &a);
        }
}

static void test_block_masks(void **state)
{
    static const int windows[] = {0, 1, 6, 30, 1000};

    (void)state;
    EACH_ISA(k)
        for (int i = 0; i < 20; i++) {
            struct blocks_case a = {.n = 17, .B = 8, .nh = 4, .kv = 2, .hd = 16, .mask = {windows[i % 5], i / 5 & 1, i / 10}};

            draw_anchors(&a, 100 + (uint64_t)i);
            block_run(k, &a);
        }
}

/* Sums of many large scores: the softmax must be taken relative to the maximum, and blocks without context only see themselves. */
static void test_block_large(void **state)
{
    float q[8 * 16], kx[8 * 16], v[8 * 16], o[8 * 16], lse[8], ctx[16] = {0};
    int32_t seq[1] = {0}, pos[1] = {0}, cu[2] = {0, 1};
    struct mr_k_blocks b = {1, 8, seq, pos, seq, pos};
    struct mr_k_block_mask mask = {0, 1, 0};

    (void)state;
    for (int i = 0; i < 8 * 16; i++) {
        q[i] = 30.0f;
        kx[i] = 30.0f - (float)(i / 16);
        v[i] = (float)(i / 16 + 1);
    }
    EACH_ISA(k) {
        assert_int_equal(k->op->attn_block(k, &b, cu, cu, &mask, 1, 1, 16, q, ctx, ctx, 16, kx, v, 16, o, lse), 0);
        for (int i = 0; i < 8 * 16; i++)
            assert_true(o[i] == 1.0f);           /* the first key's score is 120 above the next one's */
        pos[0] = 2;                              /* an anchor behind the sequence's end */
        assert_int_equal(k->op->attn_block(k, &b, cu, cu, &mask, 1, 1, 16, q, ctx, ctx, 16, kx, v, 16, o, lse), -EINVAL);
        pos[0] = 0;
        b.n = 0;
        assert_int_equal(k->op->attn_block(k, &b, cu, cu, &mask, 1, 1, 16, q, ctx, ctx, 16, kx, v, 16, o, lse), 0);
        b.n = 1;
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_causal),
        cmocka_unit_test(test_block_shapes),
        cmocka_unit_test(test_block_masks),
        cmocka_unit_test(test_block_large),
        cmocka_unit_test(test_long),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
