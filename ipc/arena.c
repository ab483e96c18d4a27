/* Arenas: the registry's users, and the `shm` kind (see arena.h).
 *
 * A row is written by its exporter and then made current by storing the generation (release); a reader copies the row between two
 * acquire loads of the generation, so a copy is of one generation or refused.  The shm kind is a file in /dev/shm, created by the
 * supervisor, so nothing of it dies with an actor.
 */
#include "ipc/arena.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "base/point.h"
#include "ipc/ipc_pvt.h"

uint64_t mr_arena_register(const struct mr_seg *s, unsigned arena)
{
    struct mr_arena_row *row = &s->arenas[arena];
    uint64_t g = mr_ld(&row->last_generation) + 1;

    mr_st(&row->last_generation, g);
    MR_POINT("ipc.arena.register");
    mr_st(&row->generation, g);
    mr_evc_bump_all(s);
    return g;
}

/* ---- weights ------------------------------------------------------------------------------------------------------------- */

int mr_arena_load(const struct mr_seg *s, unsigned arena, uint64_t generation, unsigned slot, unsigned inc)
{
    struct mr_arena_row *row = &s->arenas[arena];
    uint64_t w = mr_ld(&row->seal);

    if (!generation || mr_ld(&row->generation) != generation)
        return -ESTALE;
    if (mr_w_seal_kind(w) == MR_SEAL_SEALED)
        return w == mr_w_sealed(generation) ? 1 : -ESTALE;
    if (w == mr_w_seal_loading(slot, inc))
        return 0;
    return w == 0 && mr_cas(&row->seal, 0, mr_w_seal_loading(slot, inc)) ? 0 : -EAGAIN;
}

int mr_arena_seal(const struct mr_seg *s, unsigned arena, uint64_t generation, uint64_t fingerprint, unsigned slot, unsigned inc)
{
    struct mr_arena_row *row = &s->arenas[arena];

    /* The keeper empties the word before it registers, so a seal of the generation before cannot land on the new one: the word of this
     * incarnation is gone then, and no other incarnation ever writes the same. */
    if (mr_ld(&row->generation) != generation)
        return -ESTALE;
    mr_st(&row->fingerprint, fingerprint);
    MR_POINT("ipc.arena.seal");
    if (!mr_cas(&row->seal, mr_w_seal_loading(slot, inc), mr_w_sealed(generation)))
        return -ESTALE;
    mr_evc_bump_all(s);
    return 0;
}

void mr_arena_unseal(const struct mr_seg *s, unsigned arena)
{
    mr_st(&s->arenas[arena].seal, 0);
    mr_st(&s->arenas[arena].fingerprint, 0);
}

unsigned mr_arena_recover_loader(const struct mr_seg *s, unsigned slot, unsigned inc)
{
    unsigned n = 0;

    for (unsigned i = 0; i < s->hdr->n_arenas; i++)
        n += (unsigned)mr_cas(&s->arenas[i].seal, mr_w_seal_loading(slot, inc), 0);
    return n;
}

int mr_arena_current(const struct mr_seg *s, unsigned idx)
{
    const struct mr_item *it = &s->items[idx];
    uint64_t g = it->arena < s->hdr->n_arenas ? mr_ld(&s->arenas[it->arena].generation) : 0;

    return g && g == it->generation;
}

int mr_arena_create_shm(const struct mr_seg *s, unsigned arena, uint64_t bytes, struct mr_err *err)
{
    struct mr_arena_row *row = &s->arenas[arena];
    char suffix[16], path[MR_PATH_MAX];

    MR_ASSERT(arena < s->hdr->n_arenas && bytes);
    snprintf(suffix, sizeof suffix, "a%u", arena);
    mr_shm_path(path, s->run, suffix);
    if (mr_shm_create(path, bytes, NULL, 0, NULL, err))
        return -1;
    row->export_kind = MR_EXPORT_SHM;
    row->bytes = bytes;
    memset(row->handle, 0, sizeof row->handle);
    snprintf((char *)row->handle, sizeof row->handle, "millrace-%.48s.%.4s", s->run, suffix);
    mr_arena_register(s, arena);
    return 0;
}

/* ---- consumers ----------------------------------------------------------------------------------------------------------- */

/* A consistent copy of the row at the current generation; 0 = not registered. */
static uint64_t read_row(const struct mr_arena_row *row, struct mr_arena_row *copy)
{
    for (int tries = 0; tries < 3; tries++) {
        uint64_t g = mr_ld(&row->generation);

        if (!g)
            return 0;
        *copy = *row;
        copy->generation = g;
        if (mr_ld(&row->generation) == g)
            return g;
    }
    return 0;
}

static void *open_shm(const struct mr_seg *s, const struct mr_arena_row *row, struct mr_err *err)
{
    int prot = s->writable ? PROT_READ | PROT_WRITE : PROT_READ, fd;
    char path[MR_PATH_MAX];
    struct stat st;
    void *base;

    snprintf(path, sizeof path, MR_SHM_DIR "/%.*s", (int)sizeof row->handle - 1, (const char *)row->handle);
    fd = open(path, (s->writable ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0) {
        mr_err_set(err, MR_EXIT_FAILED, "cannot open arena %s: %s; was /dev/shm cleaned while the run was live?", path, strerror(errno));
        return NULL;
    }
    if (fstat(fd, &st) || st.st_size < 0 || (uint64_t)st.st_size < row->bytes) {
        mr_err_set(err, MR_EXIT_FAILED, "arena %s has %lld bytes, %llu are registered; start the run again", path, (long long)st.st_size,
                   (unsigned long long)row->bytes);
        close(fd);
        return NULL;
    }
    base = mmap(NULL, row->bytes, prot, MAP_SHARED, fd, 0);
    close(fd);
    if (base != MAP_FAILED)
        return base;
    mr_err_set(err, MR_EXIT_FAILED, "cannot map %llu bytes of arena %s: %s", (unsigned long long)row->bytes, path, strerror(errno));
    return NULL;
}

static void close_view(struct mr_arena_map *m, struct mr_arena_view *v)
{
    struct mr_arena_row row = {.generation = v->generation, .bytes = v->bytes, .export_kind = v->export_kind};

    if (v->base && v->export_kind == MR_EXPORT_SHM)
        munmap(v->base, v->bytes);
    else if (v->base && m->close_cuda)
        m->close_cuda(v->base, &row, m->ctx);
    *v = (struct mr_arena_view){0};
}

static void *open_row(struct mr_arena_map *m, const struct mr_seg *s, const struct mr_arena_row *row, unsigned arena, struct mr_err *err)
{
    if (row->export_kind == MR_EXPORT_SHM)
        return open_shm(s, row, err);
    if (m->open_cuda)
        return m->open_cuda(row, m->ctx, err);
    mr_err_set(err, MR_EXIT_ENV, "arena %u lies in GPU memory (export kind %u), and this process has no CUDA; "
               "use a build with the cuda backend", arena, row->export_kind);
    return NULL;
}

void *mr_arena_base(struct mr_arena_map *m, const struct mr_seg *s, unsigned arena, uint64_t generation, struct mr_err *err)
{
    struct mr_arena_row row;
    struct mr_arena_view *v;
    uint64_t g;
    void *base;

    MR_ASSERT(arena < MR_MAX_ARENAS);
    v = &m->at[arena];
    g = arena < s->hdr->n_arenas ? mr_ld(&s->arenas[arena].generation) : 0;
    if (g && g == v->generation && (!generation || generation == g))
        return v->base;
    g = arena < s->hdr->n_arenas ? read_row(&s->arenas[arena], &row) : 0;
    if (!g || (generation && generation != g)) {
        mr_err_set(err, MR_EXIT_FAILED, "arena %u: generation %llu asked for, current is %llu (0 = not registered)", arena,
                   (unsigned long long)generation, (unsigned long long)g);
        return NULL;
    }
    base = open_row(m, s, &row, arena, err);
    if (!base)
        return NULL;
    close_view(m, &m->was[arena]);
    m->was[arena] = *v;
    *v = (struct mr_arena_view){base, g, row.bytes, row.export_kind};
    return base;
}

void mr_arena_close_all(struct mr_arena_map *m)
{
    for (unsigned i = 0; i < MR_MAX_ARENAS; i++) {
        close_view(m, &m->at[i]);
        close_view(m, &m->was[i]);
    }
}

void mr_arena_close_stale(struct mr_arena_map *m, const struct mr_seg *s)
{
    for (unsigned i = 0; i < s->hdr->n_arenas; i++) {
        uint64_t g = s->arenas[i].use == MR_ARENA_SLABS ? mr_ld(&s->arenas[i].generation) : 0;

        if (s->arenas[i].use != MR_ARENA_SLABS)
            continue;
        close_view(m, &m->was[i]);
        if (m->at[i].base && m->at[i].generation != g)
            close_view(m, &m->at[i]);
    }
}

/* ---- drafter arenas -------------------------------------------------------------------------------------------------------- */

static uint64_t block_bytes(uint64_t param_count)
{
    return (4 * param_count + MR_SHM_ALIGN - 1) & ~(uint64_t)(MR_SHM_ALIGN - 1);
}

uint64_t mr_drafter_arena_bytes(uint64_t param_count)
{
    return sizeof(struct mr_drafter_arena) + 8 * block_bytes(param_count);
}

struct mr_drafter_view mr_drafter_view_at(void *base, uint64_t param_count)
{
    char *p = (char *)base + sizeof(struct mr_drafter_arena);
    uint64_t n = block_bytes(param_count);
    struct mr_drafter_view v = {.hdr = base, .P = param_count};

    for (int k = 0; k < 2; k++) {
        v.param[k] = (float *)(p + (3 * (uint64_t)k + 0) * n);
        v.m[k] = (float *)(p + (3 * (uint64_t)k + 1) * n);
        v.v[k] = (float *)(p + (3 * (uint64_t)k + 2) * n);
    }
    v.acc = (float *)(p + 6 * n);
    v.reduced = (float *)(p + 7 * n);
    return v;
}

static int find_use(const struct mr_seg *s, unsigned use, unsigned owner)
{
    for (unsigned i = 0; i < s->hdr->n_arenas; i++)
        if (s->arenas[i].use == use && s->arenas[i].owner == owner)
            return (int)i;
    return -ENOENT;
}

int mr_arena_of_drafter(const struct mr_seg *s, unsigned rank)
{
    return find_use(s, MR_ARENA_DRAFTER, rank);
}

int mr_drafter_view_open(struct mr_arena_map *m, const struct mr_seg *s, unsigned rank, uint64_t param_count, struct mr_drafter_view *v,
                         struct mr_err *err)
{
    int state = mr_arena_of_drafter(s, rank), header = find_use(s, MR_ARENA_HEADER, rank);
    void *base;

    if (state < 0)
        return mr_err_set(err, MR_EXIT_FAILED, "the segment has no state arena for drafter/%u", rank);
    base = mr_arena_base(m, s, (unsigned)state, 0, err);
    if (!base)
        return -1;
    *v = mr_drafter_view_at(base, param_count);
    if (m->at[state].export_kind == MR_EXPORT_SHM)
        return 0;
    if (header < 0)
        return mr_err_set(err, MR_EXIT_FAILED, "the state of drafter/%u is in device memory, and the segment has no header for it", rank);
    v->generation = m->at[state].generation;
    v->hdr = mr_arena_base(m, s, (unsigned)header, 0, err);
    return v->hdr ? 0 : -1;
}

int mr_drafter_view_valid(const struct mr_drafter_view *v)
{
    return mr_ld(&v->hdr->initialised) && mr_ld(&v->hdr->generation) == v->generation;
}
