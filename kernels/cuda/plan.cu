/* Tiles of the attention kernels, planned on the host from the lengths and anchors it has, and kept on the device by content.
 *
 * All layers of a microbatch share a plan (drafters with sliding and full layers have two), so a handful of remembered plans turns 36
 * plannings and copies into one.  Tiles are sorted by work, longest first: the tail of a launch is then made of short ones. */
#include "kernels/cuda/attn.cuh"

#include <climits>
#include <cstdlib>
#include <cstring>

enum { PLANS = 8 };

struct buffer {                        /* grows, never shrinks */
    void *p;
    size_t bytes;
};

struct plan {
    int32_t *key;                      /* what the plan was made from */
    size_t key_len, key_cap;           /* in ints */
    struct buffer dev;
    struct attn_plan out;
    uint64_t used;
};

struct mr_cuda_plans {
    struct plan plan[PLANS];
    uint64_t clock;
    int32_t *key;                      /* the key being looked up */
    size_t key_len, key_cap;
    struct attn_tile *tile;            /* workspace of the planner */
    struct kv_tile *kv;
    size_t tile_cap, kv_cap;
};

int mr_cuda_plan_init(struct mr_cuda *c)
{
    c->plans = (struct mr_cuda_plans *)calloc(1, sizeof *c->plans);
    return c->plans ? 0 : -ENOMEM;
}

void mr_cuda_plan_destroy(struct mr_cuda *c)
{
    struct mr_cuda_plans *s = c->plans;

    if (!s)
        return;
    for (int i = 0; i < PLANS; i++) {
        cudaFree(s->plan[i].dev.p);
        free(s->plan[i].key);
    }
    free(s->key);
    free(s->tile);
    free(s->kv);
    free(s);
    c->plans = NULL;
}

/* Makes *p hold at least n items of `size`; contents are kept. */
static int grow(void **p, size_t *cap, size_t n, size_t size)
{
    void *q;

    if (n <= *cap)
        return 0;
    n += n / 2;
    q = realloc(*p, n * size);
    if (!q)
        return -ENOMEM;
    *p = q;
    *cap = n;
    return 0;
}

/* ---- memory of plans --------------------------------------------------------------------------------------------- */

static int key_add(struct mr_cuda_plans *s, const int32_t *v, size_t n)
{
    if (grow((void **)&s->key, &s->key_cap, s->key_len + n, sizeof *v))
        return -ENOMEM;
    memcpy(s->key + s->key_len, v, n * sizeof *v);
    s->key_len += n;
    return 0;
}

static struct plan *recall(struct mr_cuda_plans *s)
{
    for (int i = 0; i < PLANS; i++) {
        struct plan *p = &s->plan[i];

        if (p->used && p->key_len == s->key_len && memcmp(p->key, s->key, s->key_len * sizeof *s->key) == 0) {
            p->used = ++s->clock;
            return p;
        }
    }
    return NULL;
}

/* Puts the planner's workspace on the device under the current key, in the place of the plan that was used least recently. */
static int remember(struct mr_cuda *c, int n_tiles, int n_kv, struct plan **out)
{
    struct mr_cuda_plans *s = c->plans;
    struct plan *p = &s->plan[0];
    size_t a = n_tiles * sizeof *s->tile, b = n_kv * sizeof *s->kv;

    for (int i = 1; i < PLANS; i++)
        if (s->plan[i].used < p->used)
            p = &s->plan[i];
    p->used = 0;
    if (grow((void **)&p->key, &p->key_cap, s->key_len, sizeof *s->key))
        return -ENOMEM;
    memcpy(p->key, s->key, s->key_len * sizeof *s->key);
    p->key_len = s->key_len;
    if (a + b > p->dev.bytes) {
        cudaFree(p->dev.p);
        p->dev.p = NULL;
        p->dev.bytes = 0;
        if (mr_cuda_check(c, cudaMalloc(&p->dev.p, (a + b) * 3 / 2), "attention plan"))
            return c->err;
        p->dev.bytes = (a + b) * 3 / 2;
    }
    if (mr_cuda_upload(c, p->dev.p, s->tile, a) || mr_cuda_upload(c, (unsigned char *)p->dev.p + a, s->kv, b))
        return c->err;
    p->out.tile = (const struct attn_tile *)p->dev.p;
    p->out.kv = (const struct kv_tile *)((unsigned char *)p->dev.p + a);
    p->out.n_tiles = n_tiles;
    p->out.n_kv = n_kv;
    p->out.n_context = 0;
    for (int i = 0; i < n_kv; i++)
        p->out.n_context += !s->kv[i].own;
    p->used = ++s->clock;
    *out = p;
    return 0;
}

/* ---- order ------------------------------------------------------------------------------------------------------- */

/* Ties by place, so that the order does not depend on the library's qsort. */
static int by_keys(const void *x, const void *y)
{
    const struct attn_tile *a = (const struct attn_tile *)x, *b = (const struct attn_tile *)y;
    int na = a->khi - a->klo, nb = b->khi - b->klo;

    return na != nb ? (na < nb) - (na > nb) : (a->q0 > b->q0) - (a->q0 < b->q0);
}

static int by_queries(const void *x, const void *y)
{
    const struct kv_tile *a = (const struct kv_tile *)x, *b = (const struct kv_tile *)y;

    if (a->nq != b->nq)
        return (a->nq < b->nq) - (a->nq > b->nq);
    if (a->own != b->own)
        return a->own - b->own;
    return (a->row > b->row) - (a->row < b->row);
}

static int add_tile(struct mr_cuda_plans *s, int *n, struct attn_tile t)
{
    if (grow((void **)&s->tile, &s->tile_cap, *n + 1, sizeof t))
        return -ENOMEM;
    s->tile[(*n)++] = t;
    return 0;
}

static int add_kv(struct mr_cuda_plans *s, int *n, struct kv_tile t)
{
    if (grow((void **)&s->kv, &s->kv_cap, *n + 1, sizeof t))
        return -ENOMEM;
    s->kv[(*n)++] = t;
    return 0;
}

/* ---- causal ------------------------------------------------------------------------------------------------------ */

int mr_cuda_plan_causal(struct mr_cuda *c, int n_seqs, const int32_t *host_cu, struct attn_plan *out)
{
    struct mr_cuda_plans *s = c->plans;
    int32_t head[2] = {0, n_seqs};
    struct plan *p;
    int n = 0, e;

    s->key_len = 0;
    if (key_add(s, head, 2) || key_add(s, host_cu, (size_t)n_seqs + 1))
        return -ENOMEM;
    p = recall(s);
    for (int i = 0; i < n_seqs && !p; i++) {
        int first = host_cu[i], len = host_cu[i + 1] - first;

        if (len < 0)
            return -EINVAL;
        for (int at = 0; at < len; at += Q_ROWS) {
            int nq = len - at < Q_ROWS ? len - at : (int)Q_ROWS;

            if (add_tile(s, &n, attn_tile{first + at, nq, first, 0, at + nq, at, 0, 0}))
                return -ENOMEM;
        }
    }
    if (!p) {
        if (n)
            qsort(s->tile, n, sizeof *s->tile, by_keys);
        e = remember(c, n, 0, &p);
        if (e)
            return e;
    }
    *out = p->out;
    return 0;
}

/* ---- blocks ------------------------------------------------------------------------------------------------------ */

/* First context key that any slot of a block anchored at a sees. */
static int window_start(const struct mr_k_block_mask *m, int a)
{
    int lo = m->window == 0 ? 0 : m->window_origin ? a - m->window : a - (m->window - 1);

    return lo < 0 ? 0 : lo;
}

/* First block in [from, to) whose anchor is greater than t. */
static int first_after(const int32_t *pos, int from, int to, int t)
{
    while (from < to) {
        int mid = from + (to - from) / 2;

        if (pos[mid] > t)
            to = mid;
        else
            from = mid + 1;
    }
    return from;
}

/* Tiles of the blocks [j0, j1) of one sequence, whose context starts at row k0. */
static int plan_queries(struct mr_cuda_plans *s, const struct mr_k_blocks *b, const struct mr_k_block_mask *m, int j0, int j1, int k0,
                        int *n, int *n_kv)
{
    int per = Q_ROWS / b->B;           /* whole blocks of a tile */

    for (int j = j0; j < j1; j += per) {
        int end = j + per < j1 ? j + per : j1, q0 = j * b->B, nq = (end - j) * b->B;
        int hi = b->host_pos[end - 1], lo = window_start(m, b->host_pos[j]);

        hi = hi < 0 ? 0 : hi;          /* padding blocks come first, with anchor -1 */
        if (add_tile(s, n, attn_tile{q0, nq, k0, lo < hi ? lo : hi, hi, 0, 0, 0}) ||
            add_kv(s, n_kv, kv_tile{q0, nq, 0, q0, nq, 1, 0, 0}))
            return -ENOMEM;
    }
    return 0;
}

/* Context keys of one sequence in tiles of KV_ROWS, each with the blocks that may see one of them; a tile that nobody sees is left out. */
static int plan_context(struct mr_cuda_plans *s, const struct mr_k_blocks *b, const struct mr_k_block_mask *m, int j0, int j1, int k0,
                        int len, int *n_kv)
{
    for (int t = 0; t < len; t += KV_ROWS) {
        int nk = len - t < KV_ROWS ? len - t : (int)KV_ROWS;
        int from = first_after(b->host_pos, j0, j1, t), to = j1;

        if (m->window)                 /* the last block whose window still reaches key t + nk - 1 */
            to = first_after(b->host_pos, from, j1, t + nk - 1 + m->window - (m->window_origin ? 0 : 1));
        if (from < to && add_kv(s, n_kv, kv_tile{k0 + t, nk, t, from * b->B, (to - from) * b->B, 0, 0, 0}))
            return -ENOMEM;
    }
    return 0;
}

static int plan_all(struct mr_cuda_plans *s, const struct mr_k_blocks *b, const struct mr_k_block_mask *m, const int32_t *host_cu, int *n,
                    int *n_kv)
{
    for (int j = 0, end; j < b->n; j = end) {
        int seq = b->host_seq[j], k0 = host_cu[seq], len = host_cu[seq + 1] - k0;

        for (end = j + 1; end < b->n && b->host_seq[end] == seq; end++)
            if (b->host_pos[end] < b->host_pos[end - 1])
                return -EINVAL;
        if (len < 0 || b->host_pos[end - 1] > len || (end < b->n && b->host_seq[end] < seq))
            return -EINVAL;
        if (plan_queries(s, b, m, j, end, k0, n, n_kv) || plan_context(s, b, m, j, end, k0, len, n_kv))
            return -ENOMEM;
    }
    if (*n)
        qsort(s->tile, *n, sizeof *s->tile, by_keys);
    if (*n_kv)
        qsort(s->kv, *n_kv, sizeof *s->kv, by_queries);
    for (int i = 0, slot = 0; i < *n_kv; i++)
        s->kv[i].slot = s->kv[i].own ? 0 : slot++;
    return 0;
}

int mr_cuda_plan_blocks(struct mr_cuda *c, const struct mr_k_blocks *b, const struct mr_k_block_mask *mask, const int32_t *host_cu,
                        struct attn_plan *out)
{
    struct mr_cuda_plans *s = c->plans;
    int32_t head[6] = {1, b->n, b->B, mask->window, mask->window_origin, 0};
    int seqs = b->n ? b->host_seq[b->n - 1] + 1 : 0, n = 0, n_kv = 0, e;
    struct plan *p;

    if (b->n < 0 || b->B < 1 || b->B > Q_ROWS || mask->window < 0 || (long long)b->n * b->B > INT_MAX)
        return -EINVAL;
    head[5] = seqs;
    s->key_len = 0;
    if (key_add(s, head, 6) || key_add(s, host_cu, (size_t)seqs + 1) || key_add(s, b->host_seq, b->n) || key_add(s, b->host_pos, b->n))
        return -ENOMEM;
    p = recall(s);
    if (!p) {
        e = plan_all(s, b, mask, host_cu, &n, &n_kv);
        if (!e)
            e = remember(c, n, n_kv, &p);
        if (e)
            return e;
    }
    *out = p->out;
    return 0;
}
