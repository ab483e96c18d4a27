/* Data sets: see dataset.h.
 *
 * Opening looks at every token once, because nothing later can: ids go straight into an embedding gather, and a row without two consecutive
 * supervised tokens has no anchor.  What is found is counted by reason; kept + dropped = rows.  The packed form is read through its
 * mapping, so memory stays bounded by the page cache and 4 bytes a row.
 */
#include "data/dataset_pvt.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/clock.h"
#include "base/hash.h"
#include "base/log.h"
#include "base/rng.h"

const char *const mr_drop_name[MR_DROPS] = {"too_short", "all_masked", "over_long", "bad_record"};

enum { LISTED = 10 };

/* ---- packed --------------------------------------------------------------------------------------------------------------- */

static const struct mr_st_tensor *packed_tensor(const struct mr_dataset *d, const char *name, const char *types, struct mr_err *err)
{
    const struct mr_st_tensor *t = mr_st_find(&d->st, name);

    if (!t)
        mr_err_set(err, MR_EXIT_CONFIG,
                   "%s: no tensor \"%s\": this is no packed data set (millrace pack IN.jsonl OUT.safetensors makes one)", d->path, name);
    else if (!strstr(types, t->dtype_name) || t->n_dims != 1)
        mr_err_set(err, MR_EXIT_CONFIG, "%s: \"%s\" is %s with %d dimensions; %s with one is wanted", d->path, name, t->dtype_name,
                   t->n_dims, types);
    else
        return t;
    return NULL;
}

/* The tensor where it lies when it is aligned and of the wanted width, else a copy. */
static const void *aligned(const struct mr_dataset *d, const struct mr_st_tensor *t, size_t width, void **own)
{
    const char *p = mr_st_data(&d->st, t);

    if ((uintptr_t)p % width == 0)
        return p;
    *own = malloc(t->bytes + 1);
    return *own ? memcpy(*own, p, t->bytes) : NULL;
}

static const int32_t *packed_ids(struct mr_dataset *d, const struct mr_st_tensor *t)
{
    const char *p = mr_st_data(&d->st, t);
    int32_t *ids;
    uint16_t x;

    if (t->dtype == MR_ST_I32)
        return aligned(d, t, sizeof(int32_t), &d->own_ids);
    ids = d->own_ids = malloc(t->n * sizeof *ids + 1);
    for (uint64_t i = 0; ids && i < t->n; i++)
        memcpy(&x, p + 2 * i, 2), ids[i] = x;
    return ids;
}

static int check_offsets(const struct mr_dataset *d, struct mr_err *err)
{
    if (d->offset[0] != 0)
        return mr_err_set(err, MR_EXIT_CONFIG, "%s: offsets[0] is %lld; 0 is wanted", d->path, (long long)d->offset[0]);
    for (uint64_t i = 0; i < d->rows; i++)
        if (d->offset[i + 1] < d->offset[i] || d->offset[i + 1] > (int64_t)d->tokens)
            return mr_err_set(err, MR_EXIT_CONFIG, "%s: row %llu is tokens %lld..%lld of %llu: the offsets are damaged", d->path,
                              (unsigned long long)i, (long long)d->offset[i], (long long)d->offset[i + 1], (unsigned long long)d->tokens);
    if ((uint64_t)d->offset[d->rows] != d->tokens)
        return mr_err_set(err, MR_EXIT_CONFIG, "%s: the offsets end at %lld, but there are %llu tokens", d->path,
                          (long long)d->offset[d->rows], (unsigned long long)d->tokens);
    return 0;
}

int mr_dataset_open_packed(struct mr_dataset *d, struct mr_err *err)
{
    const struct mr_st_tensor *ids, *mask, *offsets;

    if (mr_st_open(&d->st, d->path, err))
        return -1;
    d->packed = 1;
    if (!(ids = packed_tensor(d, "ids", "I32 or U16", err)) || !(mask = packed_tensor(d, "mask", "U8", err)) ||
        !(offsets = packed_tensor(d, "offsets", "I64", err)))
        return -1;
    if (ids->n != mask->n || !offsets->n)
        return mr_err_set(err, MR_EXIT_CONFIG, "%s: %llu ids, %llu mask entries, %llu offsets do not belong together", d->path,
                          (unsigned long long)ids->n, (unsigned long long)mask->n, (unsigned long long)offsets->n);
    madvise((void *)d->st.map, d->st.file_bytes, MADV_SEQUENTIAL);
    d->rows = offsets->n - 1;
    d->tokens = ids->n;
    d->ids = packed_ids(d, ids);
    d->mask = mr_st_data(&d->st, mask);
    d->offset = aligned(d, offsets, sizeof(int64_t), &d->own_offset);
    d->len = calloc(d->rows + 1, sizeof *d->len);
    if (!d->ids || !d->offset || !d->len)
        return mr_err_set(err, MR_EXIT_ENV, "%s: out of memory for %llu rows", d->path, (unsigned long long)d->rows);
    return check_offsets(d, err);
}

/* ---- synthetic ------------------------------------------------------------------------------------------------------------ */

struct synthetic {
    unsigned long long n, min, max, seed;
};

/* "synthetic:N?min=A&max=B&seed=S" */
static int parse_synthetic(const char *s, struct synthetic *g)
{
    char *end;

    *g = (struct synthetic){.min = 64, .max = 512, .seed = 1};
    g->n = strtoull(s + strlen("synthetic:"), &end, 10);
    for (char sep = '?'; *end == sep; sep = '&') {
        const char *key = end + 1;
        unsigned long long *to = !strncmp(key, "min=", 4)    ? &g->min
                                 : !strncmp(key, "max=", 4)  ? &g->max
                                 : !strncmp(key, "seed=", 5) ? &g->seed
                                                             : NULL;

        if (!to)
            return -1;
        *to = strtoull(strchr(key, '=') + 1, &end, 10);
    }
    return *end || g->n < 1 || g->min < 2 || g->max < g->min || g->max > 1 << 24 || g->n > UINT32_MAX ? -1 : 0;
}

int mr_dataset_open_synthetic(struct mr_dataset *d, const struct mr_dataset_opts *o, struct mr_err *err)
{
    struct synthetic g;
    int64_t *offset;
    int32_t *ids;
    uint8_t *mask;

    if (parse_synthetic(d->path, &g))
        return mr_err_set(err, MR_EXIT_CONFIG, "%s: the form is synthetic:N?min=A&max=B&seed=S with N >= 1 rows of 2 <= A..B tokens",
                          d->path);
    offset = d->own_offset = malloc((g.n + 1) * sizeof *offset);
    d->len = calloc(g.n + 1, sizeof *d->len);
    if (!offset || !d->len)
        return mr_err_set(err, MR_EXIT_ENV, "%s: out of memory", d->path);
    offset[0] = 0;
    for (uint64_t i = 0; i < g.n; i++) {
        struct mr_rng r = mr_rng_key(g.seed, i, 1);

        offset[i + 1] = offset[i] + (int64_t)(g.min + mr_rng_below(&r, g.max - g.min + 1));
    }
    d->rows = g.n;
    d->tokens = (uint64_t)offset[g.n];
    ids = d->own_ids = malloc(d->tokens * sizeof *ids);
    mask = d->own_mask = malloc(d->tokens);
    if (!ids || !mask)
        return mr_err_set(err, MR_EXIT_ENV, "%s: out of memory for %llu tokens", d->path, (unsigned long long)d->tokens);
    for (uint64_t i = 0; i < g.n; i++) {
        struct mr_rng r = mr_rng_key(g.seed, i, 2);

        for (int64_t k = offset[i]; k < offset[i + 1]; k++) {
            ids[k] = (int32_t)mr_rng_below(&r, o->vocab_rows ? (uint64_t)o->vocab_rows : 1000);
            mask[k] = k - offset[i] >= (offset[i + 1] - offset[i]) / 4; /* a quarter is prompt; two tokens at least are not */
        }
    }
    d->ids = ids;
    d->mask = mask;
    d->offset = offset;
    return 0;
}

/* ---- judging -------------------------------------------------------------------------------------------------------------- */

struct judge {
    const struct mr_dataset_opts *o;
    char list[1500];
    int listed;
    uint64_t bad;
};

/* Packed rows are checked here; JSON lines were when they were read. */
static int bad_row(const struct mr_dataset *d, struct judge *g, uint64_t row)
{
    const int32_t limit = g->o->vocab_rows ? g->o->vocab_rows : INT32_MAX;
    const int32_t *ids = d->ids + d->offset[row];
    const uint8_t *mask = d->mask + d->offset[row];
    int64_t n = d->offset[row + 1] - d->offset[row], i = 0;
    size_t used = strlen(g->list);

    if (d->len[row] < 0)
        return 1;
    while (i < n && (uint32_t)ids[i] < (uint32_t)limit && mask[i] <= 1)
        i++;
    if (i == n && n <= INT32_MAX)
        return 0;
    g->bad++;
    if (g->listed++ >= LISTED)
        return 1;
    if (n > INT32_MAX)
        snprintf(g->list + used, sizeof g->list - used, "\n  row %llu: %lld tokens", (unsigned long long)row, (long long)n);
    else if (mask[i] > 1)
        snprintf(g->list + used, sizeof g->list - used, "\n  row %llu: mask[%lld] is %d; 0 or 1 is wanted", (unsigned long long)row,
                 (long long)i, mask[i]);
    else
        snprintf(g->list + used, sizeof g->list - used, "\n  row %llu: ids[%lld] is %d; ids are 0..%d (the rows of the target's head)",
                 (unsigned long long)row, (long long)i, ids[i], limit - 1);
    return 1;
}

static int has_anchor(const uint8_t *mask, int n)
{
    for (int i = 0; i + 1 < n; i++)
        if (mask[i] && mask[i + 1])
            return 1;
    return 0;
}

/* Usable length, or -1 - reason. */
static int judge_row(struct mr_dataset *d, struct judge *g, uint64_t row)
{
    int64_t n = d->offset[row + 1] - d->offset[row];
    const int cut = g->o->max_tokens > 0 && n > g->o->max_tokens, min = g->o->min_tokens > 2 ? g->o->min_tokens : 2;

    if (bad_row(d, g, row))
        return -1 - MR_DROP_BAD;
    if (n < min)
        return -1 - MR_DROP_SHORT;
    if (cut && !g->o->truncate)
        return -1 - MR_DROP_OVERLONG;
    n = cut ? g->o->max_tokens : n;
    if (g->o->need_anchor && !has_anchor(d->mask + d->offset[row], (int)n))
        return -1 - MR_DROP_MASKED;
    d->truncated += (uint64_t)cut;
    return (int)n;
}

/* Of the rows as they are, so that a file and its packed form have the same. */
static uint64_t hash_row(const struct mr_dataset *d, uint64_t h, uint64_t row)
{
    uint64_t n = (uint64_t)(d->offset[row + 1] - d->offset[row]);
    const int32_t *ids = d->ids + d->offset[row];
    const uint8_t *mask = d->mask + d->offset[row];

    h = (h ^ n) * 0x100000001b3u;
    for (uint64_t i = 0; i < n; i++)
        h = (h ^ ((uint64_t)(uint32_t)ids[i] << 1 | mask[i])) * 0x100000001b3u;
    return h;
}

static int judge_all(struct mr_dataset *d, const struct mr_dataset_opts *o, struct mr_err *err)
{
    struct judge g = {.o = o};
    uint64_t next_note = mr_now_ns() + 10000000000u;

    d->fingerprint = MR_HASH_INIT;
    for (uint64_t i = 0; i < d->rows; i++) {
        int n = judge_row(d, &g, i);

        if (n < 0)
            d->dropped[-1 - n]++;
        d->len[i] = n < 0 ? 0 : n;
        d->fingerprint = hash_row(d, d->fingerprint, i);
        if (i % 4096 == 0 && mr_now_ns() > next_note) {
            mr_info("%s: checked %llu of %llu rows", d->path, (unsigned long long)i, (unsigned long long)d->rows);
            next_note += 10000000000u;
        }
    }
    if (g.bad && !o->skip_bad)
        return mr_err_set(err, MR_EXIT_CONFIG, "%s: %llu bad rows (numbered from 0; on_bad_record \"skip\" counts them instead):%s",
                          d->path, (unsigned long long)g.bad, g.list);
    if (g.bad)
        mr_warn("%s: %llu bad rows skipped, the first ones:%s", d->path, (unsigned long long)g.bad, g.list);
    return 0;
}

/* ---- the interface -------------------------------------------------------------------------------------------------------- */

static int ends_with(const char *s, const char *end)
{
    size_t n = strlen(s), m = strlen(end);

    return n >= m && !strcmp(s + n - m, end);
}

static int open_any(struct mr_dataset *d, const struct mr_dataset_opts *o, struct mr_err *err)
{
    int rc;

    if (!strncmp(d->path, "synthetic:", 10))
        rc = mr_dataset_open_synthetic(d, o, err);
    else if (ends_with(d->path, ".safetensors"))
        rc = mr_dataset_open_packed(d, err);
    else
        rc = mr_dataset_open_jsonl(d, o, err);
    if (!rc && d->rows > UINT32_MAX)
        rc = mr_err_set(err, MR_EXIT_CONFIG, "%s: %llu rows; at most %u are allowed", d->path, (unsigned long long)d->rows, UINT32_MAX);
    return rc ? rc : judge_all(d, o, err);
}

struct mr_dataset *mr_dataset_open(const char *path, const struct mr_dataset_opts *o, struct mr_err *err)
{
    struct mr_dataset *d = calloc(1, sizeof *d);

    if (!d || !(d->path = strdup(path)))
        mr_err_set(err, MR_EXIT_ENV, "%s: out of memory", path);
    else if (!open_any(d, o, err))
        return d;
    mr_dataset_close(d);
    return NULL;
}

void mr_dataset_close(struct mr_dataset *d)
{
    if (!d)
        return;
    if (d->packed)
        mr_st_close(&d->st);
    free(d->own_ids);
    free(d->own_mask);
    free(d->own_offset);
    free(d->len);
    free(d->path);
    free(d);
}

uint64_t mr_dataset_rows(const struct mr_dataset *d)
{
    return d->rows;
}

struct mr_row mr_dataset_row(const struct mr_dataset *d, uint64_t i)
{
    MR_ASSERT(i < d->rows);
    return (struct mr_row){.ids = d->ids + d->offset[i], .mask = d->mask + d->offset[i], .n = d->len[i]};
}

int mr_dataset_len(const struct mr_dataset *d, uint64_t i)
{
    MR_ASSERT(i < d->rows);
    return d->len[i];
}

const uint64_t *mr_dataset_dropped(const struct mr_dataset *d)
{
    return d->dropped;
}
uint64_t mr_dataset_truncated(const struct mr_dataset *d)
{
    return d->truncated;
}
uint64_t mr_dataset_blank_lines(const struct mr_dataset *d)
{
    return d->blank;
}
uint64_t mr_dataset_fingerprint(const struct mr_dataset *d)
{
    return d->fingerprint;
}
