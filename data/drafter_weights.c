/* A drafter's parameters: the flat vector, and its two files (docs/dflash.md 2.2).  drafter_init.c has what they are at first.
 *
 * The flat vector is what reduce and optimizer see; tensor boundaries matter only to the model and to the files.  Offsets are multiples of
 * ALIGN elements so that vector loads never straddle tensors; the gaps are zero at the start and every update of a zero gradient keeps
 * them.
 */
#include "data/drafter_config.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "data/safetensors.h"

enum { ALIGN = 32, LISTED = 10 };

/* ---- layout --------------------------------------------------------------------------------------------------------------- */

static void add(struct mr_dlayout *l, const char *name, int rows, int cols)
{
    struct mr_dparam *p = &l->t[l->n++];

    snprintf(p->name, sizeof p->name, "%s.weight", name);
    p->offset = l->P;
    p->rows = rows;
    p->cols = cols;
    p->n = (uint64_t)rows * (uint64_t)(cols ? cols : 1);
    l->P += (p->n + ALIGN - 1) / ALIGN * ALIGN;
}

static void add_layer(struct mr_dlayout *l, const struct mr_drafter_config *c, int layer)
{
    const int H = c->hidden_size, q = c->n_heads * c->head_dim, kv = c->n_kv_heads * c->head_dim, I = c->intermediate_size;
    const struct {
        const char *name;
        int rows, cols;
    } part[MR_DP_PER_LAYER] = {
        [MR_DP_LN1] = {"input_layernorm", H, 0},
        [MR_DP_Q] = {"self_attn.q_proj", q, H},
        [MR_DP_K] = {"self_attn.k_proj", kv, H},
        [MR_DP_V] = {"self_attn.v_proj", kv, H},
        [MR_DP_O] = {"self_attn.o_proj", H, q},
        [MR_DP_QN] = {"self_attn.q_norm", c->head_dim, 0},
        [MR_DP_KN] = {"self_attn.k_norm", c->head_dim, 0},
        [MR_DP_LN2] = {"post_attention_layernorm", H, 0},
        [MR_DP_GATE] = {"mlp.gate_proj", I, H},
        [MR_DP_UP] = {"mlp.up_proj", I, H},
        [MR_DP_DOWN] = {"mlp.down_proj", H, I},
    };
    char name[64];

    for (int i = 0; i < MR_DP_PER_LAYER; i++) {
        snprintf(name, sizeof name, "layers.%d.%s", layer, part[i].name);
        add(l, name, part[i].rows, part[i].cols);
    }
}

int mr_dlayout_make(struct mr_dlayout *l, const struct mr_drafter_config *c)
{
    *l = (struct mr_dlayout){.t = calloc((size_t)(3 + MR_DP_PER_LAYER * c->n_layers), sizeof *l->t)};
    if (!l->t)
        return -ENOMEM;
    l->fc = l->n;
    add(l, "fc", c->hidden_size, c->K * c->target_hidden);
    l->hidden_norm = l->n;
    add(l, "hidden_norm", c->hidden_size, 0);
    l->layer0 = l->n;
    for (int i = 0; i < c->n_layers; i++)
        add_layer(l, c, i);
    l->norm = l->n;
    add(l, "norm", c->hidden_size, 0);
    return 0;
}

void mr_dlayout_free(struct mr_dlayout *l)
{
    free(l->t);
    *l = (struct mr_dlayout){0};
}

/* ---- reading -------------------------------------------------------------------------------------------------------------- */

/* One tensor of the file against the layout; "" or what is wrong. */
static void judge(const struct mr_st *st, const struct mr_dparam *p, const char *name, char *msg, size_t bytes)
{
    const struct mr_st_tensor *t = mr_st_find(st, name);

    *msg = 0;
    if (!t)
        snprintf(msg, bytes, "%s: missing", name);
    else if (t->dtype != MR_ST_F32 && t->dtype != MR_ST_BF16 && t->dtype != MR_ST_F16)
        snprintf(msg, bytes, "%s: type %s; F32, BF16 or F16 is wanted", name, t->dtype_name);
    else if (t->n_dims != (p->cols ? 2 : 1) || t->shape[0] != (uint64_t)p->rows || (p->cols && t->shape[1] != (uint64_t)p->cols))
        snprintf(msg, bytes, "%s: %d dimensions, %llu x %llu; [%d,%d] is wanted", name, t->n_dims, (unsigned long long)t->shape[0],
                 (unsigned long long)(t->n_dims > 1 ? t->shape[1] : 1), p->rows, p->cols);
}

static int is_ours(const struct mr_dlayout *l, const char *name, const char *const *suffix, int n_suffix)
{
    for (int i = 0; i < l->n; i++) {
        size_t n = strlen(l->t[i].name);

        if (strncmp(name, l->t[i].name, n))
            continue;
        for (int k = 0; k < n_suffix; k++)
            if (!strcmp(name + n, suffix[k]))
                return 1;
    }
    return 0;
}

/* Exactly the layout's names, each with every suffix. */
static int check_names(const struct mr_dlayout *l, const struct mr_st *st, const char *const *suffix, int n_suffix, struct mr_err *err)
{
    char list[1400] = "", msg[200], name[96];
    int n = 0;

    for (int i = 0; i < l->n * n_suffix + st->n; i++) {
        *msg = 0;
        if (i < l->n * n_suffix) {
            snprintf(name, sizeof name, "%s%s", l->t[i / n_suffix].name, suffix[i % n_suffix]);
            judge(st, &l->t[i / n_suffix], name, msg, sizeof msg);
        } else if (!is_ours(l, st->t[i - l->n * n_suffix].name, suffix, n_suffix)) {
            snprintf(msg, sizeof msg, "%.120s: no such parameter", st->t[i - l->n * n_suffix].name);
        }
        if (*msg && n++ < LISTED)
            snprintf(list + strlen(list), sizeof list - strlen(list), "\n  %s", msg);
    }
    return n ? mr_err_set(err, MR_EXIT_CONFIG, "%s: %d tensors do not fit the drafter's config:%s%s", st->path, n, list,
                          n > LISTED ? "\n  ..." : "")
             : 0;
}

enum { LOAD_BLOCK = 4 << 20 };   /* elements */

/* One tensor to `to`, in blocks: out of the mapped file where it holds aligned f32, else converted in `buf`. */
static int put_tensor(const struct mr_st *st, const struct mr_st_tensor *t, float *dst, const struct mr_st_sink *to, float *buf, struct mr_err *err)
{
    const char *src = mr_st_data(st, t);
    int direct = t->dtype == MR_ST_F32 && (uintptr_t)src % sizeof(float) == 0;
    uint64_t width = t->n ? t->bytes / t->n : 0;

    for (uint64_t at = 0; at < t->n; at += LOAD_BLOCK) {
        uint64_t n = t->n - at < LOAD_BLOCK ? t->n - at : LOAD_BLOCK;
        struct mr_st_tensor part = *t;

        part.begin += at * width;
        part.bytes = n * width;
        part.n = n;
        if (!direct && mr_st_to_f32(st, &part, buf, err))
            return -1;
        if (to->put(to->ctx, dst + at, direct ? (const float *)(const void *)(src + at * width) : buf, n))
            return -1;
    }
    return 0;
}

static int read_vector(const struct mr_dlayout *l, const struct mr_st *st, const char *suffix, float *dst, const struct mr_st_sink *to,
                       struct mr_err *err)
{
    float *buf = to ? malloc(LOAD_BLOCK * sizeof *buf) : NULL;
    char name[96];
    int rc = 0;

    if (to && !buf)
        return mr_err_set(err, MR_EXIT_ENV, "%s: out of memory", st->path);
    if (!to)
        memset(dst, 0, l->P * sizeof *dst);
    for (int i = 0; i < l->n && !rc; i++) {
        const struct mr_st_tensor *t;

        snprintf(name, sizeof name, "%s%s", l->t[i].name, suffix);
        t = mr_st_find(st, name);
        rc = to ? put_tensor(st, t, dst + l->t[i].offset, to, buf, err) : mr_st_to_f32(st, t, dst + l->t[i].offset, err);
    }
    free(buf);
    return rc ? -1 : 0;
}

static const char *const weights_suffix[] = {""};
static const char *const trainer_suffix[] = {"", ".exp_avg", ".exp_avg_sq"};

int mr_drafter_weights_load_to(const struct mr_dlayout *l, float *param, const struct mr_st_sink *to, const char *path, struct mr_err *err)
{
    struct mr_st st;
    int rc;

    if (mr_st_open(&st, path, err))
        return -1;
    rc = check_names(l, &st, weights_suffix, 1, err);
    if (!rc && param)
        rc = read_vector(l, &st, "", param, to, err);
    mr_st_close(&st);
    return rc;
}

int mr_drafter_weights_load(const struct mr_dlayout *l, float *param, const char *path, struct mr_err *err)
{
    return mr_drafter_weights_load_to(l, param, NULL, path, err);
}

int mr_trainer_load_to(const struct mr_dlayout *l, float *param, float *m, float *v, const struct mr_st_sink *to, uint64_t *step,
                       const char *path, struct mr_err *err)
{
    float *const part[3] = {param, m, v};
    struct mr_st st;
    const char *s;
    char *end = NULL;
    int rc;

    if (mr_st_open(&st, path, err))
        return -1;
    s = json_string_value(json_object_get(st.metadata, "step"));
    *step = s ? strtoull(s, &end, 10) : 0;
    if (!s || end == s || *end)
        rc = mr_err_set(err, MR_EXIT_CONFIG, "%s: the metadata has no \"step\": no trainer state of millrace", path);
    else
        rc = check_names(l, &st, trainer_suffix, 3, err);
    for (int k = 0; k < 3 && !rc; k++)
        rc = read_vector(l, &st, trainer_suffix[k], part[k], to, err);
    mr_st_close(&st);
    return rc;
}

int mr_trainer_load(const struct mr_dlayout *l, float *param, float *m, float *v, uint64_t *step, const char *path, struct mr_err *err)
{
    return mr_trainer_load_to(l, param, m, v, NULL, step, path, err);
}

/* ---- writing -------------------------------------------------------------------------------------------------------------- */

/* MR_ST_BF16: rounded on the way. */
static void add_tensor(struct mr_st_out *o, const struct mr_dparam *p, const char *suffix, enum mr_st_dtype dtype, const float *data)
{
    uint64_t shape[2] = {(uint64_t)p->rows, (uint64_t)p->cols};
    int dims = p->cols ? 2 : 1;
    char name[96];

    snprintf(name, sizeof name, "%s%s", p->name, suffix);
    if (dtype == MR_ST_BF16)
        mr_st_out_add_rounded(o, name, shape, dims, data);
    else
        mr_st_out_add(o, name, dtype, shape, dims, data);
}

int mr_drafter_weights_save(const struct mr_dlayout *l, const float *param, const struct mr_st_source *from, const char *path,
                            struct mr_err *err)
{
    struct mr_st_out *o = mr_st_out_create();
    int rc;

    if (!o)
        return mr_err_set(err, MR_EXIT_ENV, "%s: out of memory", path);
    for (int i = 0; i < l->n; i++)
        add_tensor(o, &l->t[i], "", MR_ST_BF16, param + l->t[i].offset);
    if (from)
        mr_st_out_source(o, from);
    mr_st_out_meta(o, "format", "pt");
    rc = mr_st_out_write(o, path, err);
    mr_st_out_free(o);
    return rc;
}

int mr_trainer_save(const struct mr_dlayout *l, const float *param, const float *m, const float *v, uint64_t step,
                    const struct mr_st_source *from, const char *path, struct mr_err *err)
{
    const float *part[3] = {param, m, v};
    struct mr_st_out *o = mr_st_out_create();
    char text[24];
    int rc;

    if (!o)
        return mr_err_set(err, MR_EXIT_ENV, "%s: out of memory", path);
    for (int i = 0; i < l->n; i++)
        for (int k = 0; k < 3; k++)
            add_tensor(o, &l->t[i], trainer_suffix[k], MR_ST_F32, part[k] + l->t[i].offset);
    if (from)
        mr_st_out_source(o, from);
    snprintf(text, sizeof text, "%llu", (unsigned long long)step);
    mr_st_out_meta(o, "step", text);
    rc = mr_st_out_write(o, path, err);
    mr_st_out_free(o);
    return rc;
}
