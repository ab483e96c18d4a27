/* The sizes of a drafter's device memory: see drafter_memory.h.  A test compares them with what actors/dflash.c allocates. */
#include "data/drafter_memory.h"

/* Enough rows for the products to run at full speed: on the cpu few enough for the second-level cache. */
enum { CPU_ROWS = 512, GPU_ROWS = 8192, SMS = 160, KEY_TILE = 64 };
#define LOSS_BYTES ((uint64_t)1280 << 20)

static int min_i(long a, long b)
{
    return (int)(a < b ? a : b);
}

struct mr_drafter_chunk mr_drafter_chunk_of(const struct mr_topology *t, int block_size, int max_seqs, int elem)
{
    struct mr_drafter_chunk k = {.max_tokens = t->data.token_budget, .max_seqs = max_seqs, .seq_blocks = t->drafter.anchors};
    int longest = t->data.max_tokens ? t->data.max_tokens : t->data.token_budget;

    k.seq_blocks = min_i(k.seq_blocks, longest - 1);            /* a sample of n tokens has at most n - 1 anchors */
    k.max_blocks = min_i((long)max_seqs * k.seq_blocks, k.max_tokens);
    k.rows = elem == 4 ? CPU_ROWS : GPU_ROWS;
    if (elem != 4 && k.rows < k.seq_blocks * block_size)
        k.rows = k.seq_blocks * block_size;
    return k;
}

/* ---- sums that follow actors/dflash.c ------------------------------------------------------------------------------------------- */

static uint64_t al(uint64_t bytes)
{
    return (bytes + 255) / 256 * 256;
}

struct dims { uint64_t T, R, H, I, L, nh, kv, hd, nq, nk, e; };

static uint64_t context_bytes(const struct dims *d, const struct mr_drafter_config *c, const struct mr_drafter_chunk *k)
{
    uint64_t layer = 2 * al(d->T * 2 * d->nk * d->e) + al(d->T * d->nk * d->e) + al(d->T * d->kv * 4);

    return 4 * al(d->T * d->H * d->e) + al(d->T * 4) + d->L * layer + al((d->T + (uint64_t)c->block_size) * d->hd * 4) +
           al(((uint64_t)k->max_seqs + 1) * 4) + al(d->T * 4) + 2 * al((uint64_t)k->max_blocks * 4);
}

static uint64_t chunk_bytes(const struct dims *d)
{
    uint64_t h = al(d->R * d->H * d->e), q = al(d->R * d->nq * d->e), kv2 = al(d->R * 2 * d->nk * d->e), i = al(d->R * d->I * d->e);
    uint64_t layer = 4 * h + 3 * q + kv2 + al(d->R * d->nk * d->e) + al(d->R * 2 * d->I * d->e) + i + 2 * al(d->R * d->nh * 4) +
                     al(d->R * d->kv * 4) + 2 * al(d->R * 4);
    uint64_t back = 3 * h + 3 * q + kv2 + i + al(d->R * 2 * d->I * d->e);

    return d->L * layer + q + 2 * h + 8 * al(d->R * 4) + back;
}

/* Row statistics of the attention's backward, and partial sums by query head where key heads are few. */
static uint64_t scratch_bytes(const struct dims *d)
{
    uint64_t partial = 2 * (d->nh / d->kv) * 4 * SMS * KEY_TILE * d->hd;

    return (d->R * d->nh + partial) * 4 * 5 / 4;
}

static uint64_t loss_bytes(const struct dims *d, int vocab)
{
    uint64_t row = ((uint64_t)vocab + 7) / 8 * 8 * 4, rows = LOSS_BYTES / row / 128 * 128;

    rows = rows < 128 ? 128 : rows;
    return (rows < d->R ? rows : d->R) * row;
}

void mr_drafter_work_bytes(struct mr_drafter_work *w, const struct mr_drafter_config *c, uint64_t P, const struct mr_drafter_chunk *k, int elem,
                           uint64_t staging)
{
    int blocks = k->rows / c->block_size > 0 ? k->rows / c->block_size : 1;
    struct dims d = {.T = (uint64_t)k->max_tokens, .H = (uint64_t)c->hidden_size, .I = (uint64_t)c->intermediate_size,
                     .L = (uint64_t)c->n_layers, .nh = (uint64_t)c->n_heads, .kv = (uint64_t)c->n_kv_heads, .hd = (uint64_t)c->head_dim,
                     .e = (uint64_t)elem};

    d.R = (uint64_t)(blocks < k->max_blocks ? blocks : k->max_blocks) * (uint64_t)c->block_size;
    d.nq = d.nh * d.hd;
    d.nk = d.kv * d.hd;
    *w = (struct mr_drafter_work){.weights = elem == 4 ? 0 : al(P * d.e), .context = context_bytes(&d, c, k), .chunk = chunk_bytes(&d),
                                  .loss = loss_bytes(&d, c->vocab_size), .scratch = scratch_bytes(&d), .staging = staging};
    w->total = w->weights + w->context + w->chunk + w->loss + w->scratch + w->staging;
}
