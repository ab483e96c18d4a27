/* Loading weights: tensor by tensor from mapped files (cpu), or by blocks through actors/weights_read.c (GPU); made from a seed where the
 * checkpoint is "random:..."; and the arena of a keeper that holds them for all incarnations.
 *
 * A sealed block is never written again.  One that was loaded half by an actor that died is loaded anew from its start: nothing about it is
 * believed. */
#include "actors/weights.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "actors/env.h"
#include "actors/weights_pvt.h"
#include "base/clock.h"
#include "base/hash.h"
#include "base/log.h"
#include "base/point.h"
#include "ipc/atomic.h"

#define OPEN_PATIENCE_NS 10000000000u      /* a handle that cannot be opened: the keeper is dead, and the supervisor replaces it */
#define KEEPER_PATIENCE_NS 300000000000u
enum { FILL = 1 << 16 };

static int device_failed(const struct mr_k *k, const char *what, int rc, struct mr_err *err)
{
    return mr_err_set(err, rc == -EIO ? MR_EXIT_CUDA : MR_EXIT_FAILED, "%s to the %s backend failed: %s", what, k->op->name, strerror(-rc));
}

int mr_weights_dtype(enum mr_st_dtype t, enum mr_k_dtype *out, size_t *bytes)
{
    switch (t) {
    case MR_ST_F32:
        *out = MR_K_F32;
        *bytes = 4;
        return 0;
    case MR_ST_BF16:
        *out = MR_K_BF16;
        *bytes = 2;
        return 0;
    case MR_ST_F16:
        *out = MR_K_F16;
        *bytes = 2;
        return 0;
    default:
        return -EINVAL;
    }
}

/* ---- from a seed --------------------------------------------------------------------------------------------------------------------- */

/* Norms are ones: with random ones, a deep model's activations would grow or die. */
static int random_host(struct mr_k *k, uint64_t seed, int ones, char *dst, size_t n)
{
    float *x = malloc(FILL * sizeof *x);
    int rc = x ? 0 : -ENOMEM;

    for (size_t at = 0; at < n && !rc; at += FILL) {
        size_t m = n - at < FILL ? n - at : FILL;

        mr_k_random_f32(x, seed, at, m, 0.02f);
        for (size_t i = 0; ones && i < m; i++)
            x[i] = 1.0f;
        rc = k->op->load(k, dst + at * (size_t)k->act_bytes, x, MR_K_F32, m);
    }
    free(x);
    return rc;
}

static int load_random(struct mr_k *k, uint64_t seed, const char *name, void *dst, size_t n, struct mr_err *err)
{
    const char *tail = strstr(name, "norm.weight");
    int rc;

    seed = mr_hash(seed ^ MR_HASH_INIT, name, strlen(name));
    if (tail || !strcmp(k->op->name, "cpu"))
        rc = random_host(k, seed, tail != NULL, dst, n);
    else
        rc = mr_k_cuda_random(k, dst, seed, n, 0.02f);
    return rc ? device_failed(k, "making random weights", rc, err) : 0;
}

/* ---- from files ---------------------------------------------------------------------------------------------------------------------- */

const struct mr_st_tensor *mr_weights_find(const struct mr_model_files *files, const char *name, size_t n, const struct mr_st **st,
                                           struct mr_err *err)
{
    const struct mr_st_tensor *t = mr_model_find(files, name, st);
    enum mr_k_dtype dtype;
    size_t bytes;

    if (!t)
        mr_err_set(err, MR_EXIT_CONFIG, "target checkpoint: tensor %s is missing", name);
    else if (t->n != n && (t->n < n || strcmp(name, "lm_head.weight")))
        mr_err_set(err, MR_EXIT_CONFIG, "%s: tensor %s has %llu elements, the config says %zu", (*st)->path, name, (unsigned long long)t->n, n);
    else if (mr_weights_dtype(t->dtype, &dtype, &bytes))
        mr_err_set(err, MR_EXIT_CONFIG, "%s: tensor %s has dtype %s; F32, BF16 and F16 can be loaded", (*st)->path, name, t->dtype_name);
    else
        return t;
    return NULL;
}

/* A safetensors file may place a tensor at any byte; kernels may rely on the alignment of its elements. */
static int load_unaligned(struct mr_k *k, void *dst, const void *src, enum mr_k_dtype dtype, size_t n, size_t bytes)
{
    void *copy = malloc(n * bytes + 1);
    int rc;

    if (!copy)
        return -ENOMEM;
    memcpy(copy, src, n * bytes);
    rc = k->op->load(k, dst, copy, dtype, n);
    if (!rc)
        rc = k->op->sync(k);
    free(copy);
    return rc;
}

int mr_load_tensor(struct mr_k *k, const struct mr_model_files *files, const char *name, void *dst, size_t n, struct mr_err *err)
{
    const struct mr_st *st = NULL;
    const struct mr_st_tensor *t;
    enum mr_k_dtype dtype = MR_K_F32;
    size_t bytes = 4;
    char what[256];
    int rc;

    if (files->random)
        return load_random(k, files->seed, name, dst, n, err);
    t = mr_weights_find(files, name, n, &st, err);
    if (!t)
        return -1;
    mr_weights_dtype(t->dtype, &dtype, &bytes);
    if ((uintptr_t)mr_st_data(st, t) % bytes)
        rc = load_unaligned(k, dst, mr_st_data(st, t), dtype, n, bytes);
    else
        rc = k->op->load(k, dst, mr_st_data(st, t), dtype, n);
    snprintf(what, sizeof what, "%s: loading tensor %s", mr_err_path(st->path, 120), name);
    return rc ? device_failed(k, what, rc, err) : 0;
}

int mr_weights_load(struct mr_k *k, const struct mr_tlayout *l, const struct mr_model_files *files, void *base, struct mr_err *err)
{
    int rc;

    if (!files->random && strcmp(k->op->name, "cpu"))
        return mr_weights_read(k, l, files, base, err);
    for (int i = 0; i < l->n; i++)
        if (mr_load_tensor(k, files, l->t[i].name, (char *)base + l->t[i].offset, l->t[i].n, err))
            return -1;
    rc = k->op->sync(k);
    return rc ? device_failed(k, "loading weights", rc, err) : 0;
}

/* ---- from the keeper ------------------------------------------------------------------------------------------------------------------ */

static int arena_of(const struct mr_env *e)
{
    unsigned device = e->topo->actor[e->slot].device_index;

    for (unsigned i = 0; i < e->hdr->n_arenas; i++)
        if (e->seg->arenas[i].use == MR_ARENA_WEIGHTS && e->seg->arenas[i].device == device)
            return (int)i;
    return -ENOENT;
}

static int another_target(const struct mr_env *e, struct mr_err *err)
{
    return mr_err_set(err, MR_EXIT_CONFIG, "%s: the checkpoint is not the one that was loaded at the start of this run: restore it",
                      e->topo->target.checkpoint);
}

static uint64_t print_of(const struct mr_env *e, const struct mr_tlayout *l)
{
    return mr_tlayout_fingerprint(l, mr_hash(e->checked->target_fingerprint, &e->checked->target_content, sizeof(uint64_t)));
}

/* This actor is the one that loads. */
static int load_and_seal(struct mr_env *e, struct mr_k *k, const struct mr_tlayout *l, unsigned arena, struct mr_err *err)
{
    struct mr_arena_view v = e->map.at[arena];
    struct mr_model_config c;
    struct mr_model_files files;
    int rc;

    MR_POINT("weights.load.begin");
    if (mr_model_config_load(&c, e->topo->target.checkpoint, err) || mr_model_files_open(&files, &c, e->topo->target.checkpoint, err))
        return -1;
    if (mr_model_content(&files, &c) != e->checked->target_content)      /* replaced since this process looked */
        rc = another_target(e, err);
    else
        rc = mr_weights_load(k, l, &files, v.base, err);
    mr_model_files_close(&files);
    MR_POINT("weights.loaded");
    if (rc)
        return -1;
    rc = mr_arena_seal(e->seg, arena, v.generation, print_of(e, l), e->slot, e->inc);
    MR_POINT("weights.sealed");
    return rc;                                      /* 0 or -ESTALE: the keeper died while we loaded */
}

/* 0 = *base is complete; 1 = look again, after a park if *why says for what; -1 with err. */
static int try_map(struct mr_env *e, struct mr_k *k, const struct mr_tlayout *l, unsigned arena, void **base, enum mr_wait_reason *why,
                   struct mr_err *trouble, struct mr_err *err)
{
    const struct mr_arena_row *row = &e->seg->arenas[arena];
    int rc;

    *why = MR_WAIT_ARENA;
    if (!mr_ld(&row->generation))
        return 1;
    *base = mr_arena_base(&e->map, e->seg, arena, 0, trouble);
    if (!*base)
        return 1;
    if (e->map.at[arena].bytes < l->bytes / (uint64_t)l->elem * 2)     /* rows are sized for bf16; the fake device of the tests is wider */
        return mr_err_set(err, MR_EXIT_FAILED, "the keeper holds %llu bytes for weights, %llu are needed: another build's segment?",
                          (unsigned long long)e->map.at[arena].bytes, (unsigned long long)l->bytes);
    rc = mr_arena_load(e->seg, arena, e->map.at[arena].generation, e->slot, e->inc);
    *why = rc == -EAGAIN ? MR_WAIT_WEIGHTS : MR_WAIT_NONE;
    if (rc == 0)
        rc = load_and_seal(e, k, l, arena, err);
    else if (rc == 1 && mr_ld(&row->fingerprint) == print_of(e, l))
        rc = 0;
    else if (rc == 1)
        return another_target(e, err);
    return rc == 0 ? 0 : err->code ? -1 : 1;
}

/* How long it makes sense to wait; sets err when that is over. */
static int out_of_patience(const struct mr_env *e, unsigned arena, uint64_t since, uint64_t failing_since, const struct mr_err *trouble,
                           struct mr_err *err)
{
    uint64_t now = mr_now_ns();

    if (trouble->code && now - failing_since > OPEN_PATIENCE_NS)
        return mr_err_set(err, MR_EXIT_ENV, "the keeper's memory cannot be mapped: %s", trouble->msg);
    if (now - since > KEEPER_PATIENCE_NS)
        return mr_err_set(err, MR_EXIT_ENV, "keeper/%u has not made the weights of %s available within %u s; its own lines say why",
                          e->seg->arenas[arena].owner, e->me->device, (unsigned)(KEEPER_PATIENCE_NS / 1000000000u));
    return 0;
}

int mr_weights_map(struct mr_env *e, struct mr_k *k, const struct mr_tlayout *l, void **base, struct mr_err *err)
{
    uint64_t since = mr_now_ns(), failing_since = since;
    int arena = arena_of(e), rc;

    if (arena < 0)
        return mr_err_set(err, MR_EXIT_FAILED, "%s: the segment has no weights arena for %s", e->me->name, e->me->device);
    for (;;) {
        uint32_t seq = mr_evc_read(e->evc);
        enum mr_wait_reason why;
        struct mr_err trouble = {0};

        rc = mr_env_check(e, 0);
        if (rc != MR_GO_ON)
            return rc ? mr_err_set(err, rc, "the run is ending") : -1;
        rc = try_map(e, k, l, (unsigned)arena, base, &why, &trouble, err);
        if (rc <= 0)
            return rc;
        if (!trouble.code)
            failing_since = mr_now_ns();
        if (out_of_patience(e, (unsigned)arena, since, failing_since, &trouble, err))
            return -1;
        if (why != MR_WAIT_NONE)
            mr_env_wait(e, seq, why);
    }
}
