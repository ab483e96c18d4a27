/* The segments of a run: sizes, creation, opening (see seg.h; the bytes are in shm_layout.h).
 *
 * The offsets of all sections follow from the counts by one function, place_sections().  The creator stores them in the header; whoever
 * opens computes them again and compares, so a header with any damaged count or offset is refused before it is used.
 *
 * Creation: .ctl first (that reserves the run's name), then .tok and .plan, then everything in them, then the magic.  A file gets its
 * name only when it is allocated and, for .ctl, says who owns it (O_TMPFILE, then linkat, which like O_EXCL never replaces a name): a
 * creator that dies at any instruction leaves nothing that nobody dares to remove.  Whoever owns .ctl owns all names of the run:
 * left-overs without a .ctl are removed on the way.
 */
#include "ipc/seg.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/point.h"
#include "ipc/ipc_pvt.h"
#include "ipc/ring.h"

/* ---- sizes --------------------------------------------------------------------------------------------------------------- */

static uint32_t ring_cap_of(uint32_t n_items)
{
    uint32_t cap = 16;

    while (cap < 4 * n_items)      /* per item a live cell, its duplicate, a stale one and its duplicate */
        cap *= 2;
    return cap;
}

/* Offsets, strides and total from the counts. */
static void place_sections(struct mr_shm_header *h)
{
    uint64_t at = sizeof *h;

    h->header_bytes = sizeof *h;
    h->ring_cap = ring_cap_of(h->n_items);
    h->ring_bytes = mr_align_up(sizeof(struct mr_ring) + 8 * (uint64_t)h->ring_cap);
    h->off_actors = at;
    at += mr_align_up(h->n_actors * sizeof(struct mr_actor_row));
    h->off_items = at;
    at += mr_align_up(h->n_items * sizeof(struct mr_item));
    h->off_rings = at;
    at += (MR_RING_READY + 2 * (uint64_t)h->n_buckets) * h->ring_bytes;
    h->off_steps = at;
    at += sizeof(struct mr_step_block) + mr_align_up(h->n_places * sizeof(struct mr_place)) +
          2 * (uint64_t)h->n_places * sizeof(struct mr_record) +
          mr_align_up(2 * (uint64_t)h->n_places * h->block_slots * sizeof(struct mr_slot_sums));
    h->off_slabs = at;
    at += mr_align_up(h->n_slabs * sizeof(struct mr_slab));
    h->off_arenas = at;
    at += mr_align_up(h->n_arenas * sizeof(struct mr_arena_row));
    h->off_epochs = at;
    at += mr_align_up(((uint64_t)h->n_epochs + 1) * sizeof(struct mr_epoch));
    h->total_bytes = at;
}

/* Name of the first count that is out of range, or NULL.  The limits keep all later arithmetic far from overflow. */
static const char *bad_count(const struct mr_shm_header *h)
{
    const struct { const char *name; uint64_t value, min, max; } limit[] = {
        {"n_actors", h->n_actors, 1, MR_MAX_ACTORS},       {"n_items", h->n_items, 1, MR_MAX_ITEMS},
        {"n_slabs", h->n_slabs, 1, MR_MAX_ITEMS},          {"n_arenas", h->n_arenas, 0, MR_MAX_ARENAS},
        {"n_epochs", h->n_epochs, 1, 1u << 20},            {"n_buckets", h->n_buckets, 1, MR_MAX_BUCKETS},
        {"n_targets", h->n_targets, 0, MR_MAX_ACTORS},     {"n_drafters", h->n_drafters, 1, MR_MAX_DRAFTERS},
        {"n_places", h->n_places, 1, MR_MAX_PLACES},       {"token_budget", h->token_budget, 1, 1u << 26},
        {"max_seqs", h->max_seqs, 1, MR_MAX_SEQS},         {"steps_total", h->steps_total, 0, MR_STEP_MAX - 2},
        {"microbatches_total", h->microbatches_total, 0, MR_POS_MAX}, {"first_step", h->first_step, 0, h->steps_total},
        {"plan_samples_max", h->plan_samples_max, 0, 1ull << 36}, {"plan_entries_max", h->plan_entries_max, 0, MR_POS_MAX},
        {"deterministic", h->deterministic, 0, 1},         {"block_slots", h->block_slots, 0, MR_MAX_BLOCK - 1},
    };

    for (size_t i = 0; i < sizeof limit / sizeof limit[0]; i++)
        if (limit[i].value < limit[i].min || limit[i].value > limit[i].max)
            return limit[i].name;
    return NULL;
}

static void header_of(struct mr_shm_header *h, const struct mr_seg_params *p)
{
    *h = (struct mr_shm_header){
        .version = MR_SHM_VERSION, .layout_hash = MR_LAYOUT_HASH,
        .n_actors = p->n_actors, .n_items = p->n_items, .n_slabs = p->n_slabs, .n_arenas = p->n_arenas, .n_epochs = p->n_epochs,
        .n_buckets = p->n_buckets, .n_targets = p->n_targets, .n_drafters = p->n_drafters, .n_places = p->n_places,
        .token_budget = p->token_budget, .max_seqs = p->max_seqs, .deterministic = p->deterministic, .steps_total = p->steps_total,
        .microbatches_total = p->microbatches_total, .first_step = p->first_step, .checkpoint_every = p->checkpoint_every,
        .param_count = p->param_count, .seed = p->seed, .plan_samples_max = p->plan_samples_max, .plan_entries_max = p->plan_entries_max,
        .block_slots = p->block_slots,
    };
    place_sections(h);
}

static uint64_t tok_bytes(const struct mr_shm_header *h)
{
    return mr_tok_stride(h) * h->n_items;
}

static uint64_t plan_bytes(const struct mr_shm_header *h)
{
    return 2 * mr_plan_stride(h);
}

uint64_t mr_seg_bytes(const struct mr_seg_params *p)
{
    struct mr_shm_header h;

    header_of(&h, p);
    return h.total_bytes + tok_bytes(&h) + plan_bytes(&h);
}

/* ---- creation ------------------------------------------------------------------------------------------------------------ */

static uint64_t available(void)
{
    struct statvfs v;

    return statvfs(MR_SHM_DIR, &v) ? 0 : (uint64_t)v.f_bavail * v.f_frsize;
}

static int no_room(const char *path, uint64_t bytes, int e, struct mr_err *err)
{
    return mr_err_set(err, MR_EXIT_ENV, "cannot allocate %s: %s; %llu bytes needed, %llu available in " MR_SHM_DIR
                      "; free some (`millrace clean`), enlarge it (docker: --shm-size), or use fewer or smaller slabs",
                      path, strerror(e), (unsigned long long)bytes, (unsigned long long)available());
}

/* A file without a name yet, or (old kernels, no /proc) with it already. */
static int open_new(const char *path, int *named)
{
    int f = open(MR_SHM_DIR, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);

    *named = f < 0;
    return f >= 0 ? f : open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
}

/* Gives the complete file its name; like O_EXCL, never over another one. */
static int give_name(int f, const char *path)
{
    char self[32];

    snprintf(self, sizeof self, "/proc/self/fd/%d", f);
    return linkat(AT_FDCWD, self, AT_FDCWD, path, AT_SYMLINK_FOLLOW) ? errno : 0;
}

static int cannot_create(const char *path, int e, struct mr_err *err)
{
    if (e == EEXIST)
        return mr_err_set(err, MR_EXIT_ENV, "%s exists already: a run of this name is live, or died; choose another name, or "
                          "`millrace clean`", path);
    return mr_err_set(err, MR_EXIT_ENV, "cannot create %s: %s; /dev/shm must be a writable tmpfs", path, strerror(e));
}

static int reserve(int f, uint64_t bytes)
{
    /* Asked first, because a container that runs out of memory inside fallocate kills the process instead of failing the call. */
    int rc = available() < bytes ? ENOSPC : posix_fallocate(f, 0, (off_t)bytes);

    while (rc == EINTR)
        rc = posix_fallocate(f, 0, (off_t)bytes);
    return rc;
}

int mr_shm_create(const char *path, uint64_t bytes, const void *head, size_t head_bytes, int *fd, struct mr_err *err)
{
    int named, f = open_new(path, &named), rc;

    if (f < 0)
        return cannot_create(path, errno, err);
    MR_POINT("ipc.seg.created");
    rc = reserve(f, bytes);
    if (rc) {
        no_room(path, bytes, rc, err);
    } else {
        if (head_bytes && pwrite(f, head, head_bytes, 0) != (ssize_t)head_bytes)
            rc = EIO;
        MR_POINT("ipc.seg.allocated");
        if (!rc && !named)
            rc = give_name(f, path);
        if (rc)
            cannot_create(path, rc, err);
    }
    if (rc && named)
        unlink(path);
    if (rc || !fd)
        close(f);
    else
        *fd = f;
    return rc ? -1 : 0;
}

/* Maps `fd` and closes it. */
static void *map_fd(int fd, uint64_t bytes, int writable, const char *path, struct mr_err *err)
{
    void *p = mmap(NULL, bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0);

    close(fd);
    if (p != MAP_FAILED)
        return p;
    mr_err_set(err, MR_EXIT_ENV, "cannot map %llu bytes of %s: %s", (unsigned long long)bytes, path, strerror(errno));
    return NULL;
}

static void *create_map(const char *run, const char *suffix, uint64_t bytes, const void *head, size_t head_bytes, struct mr_err *err)
{
    char path[MR_PATH_MAX];
    int fd;

    mr_shm_path(path, run, suffix);
    return mr_shm_create(path, bytes, head, head_bytes, &fd, err) ? NULL : map_fd(fd, bytes, 1, path, err);
}

/* Pointers into the mappings. */
static void set_pointers(struct mr_seg *s)
{
    char *base = s->ctl;
    struct mr_shm_header *h = s->ctl;

    s->hdr = h;
    s->actors = (struct mr_actor_row *)(base + h->off_actors);
    s->items = (struct mr_item *)(base + h->off_items);
    s->step = (struct mr_step_block *)(base + h->off_steps);
    s->places = (struct mr_place *)(s->step + 1);
    s->records = (struct mr_record *)((char *)s->places + mr_align_up(h->n_places * sizeof(struct mr_place)));
    s->slot_sums = (struct mr_slot_sums *)(s->records + 2 * (size_t)h->n_places);
    s->slabs = (struct mr_slab *)(base + h->off_slabs);
    s->arenas = (struct mr_arena_row *)(base + h->off_arenas);
    s->epochs = (struct mr_epoch *)(base + h->off_epochs);
}

static void set_owner(struct mr_shm_header *h, const char *run)
{
    h->magic = MR_SHM_MAGIC_NEW;
    snprintf(h->run, sizeof h->run, "%s", run);
    mr_boot_id(h->boot_id);
    h->sup_pid = getpid();
    h->sup_pidns = mr_pid_namespace();
    h->sup_start = mr_pid_start(getpid());
    h->created_ns = mr_now_ns();
    if (getrandom(&h->run_id, sizeof h->run_id, 0) != (ssize_t)sizeof h->run_id)
        h->run_id = h->created_ns ^ (uint64_t)h->sup_pid << 40;
}

/* Everything in the fresh (zeroed) segment that is not zero; the magic last. */
static void fill(struct mr_seg *s, const struct mr_shm_header *h)
{
    set_pointers(s);
    for (unsigned i = 0; i < mr_ring_count(s); i++)
        mr_ring_init(mr_ring_at(s, i), h->ring_cap, i < MR_RING_READY ? MR_QUEUED : MR_READY);
    s->step->word = mr_w_step(MR_COLLECT, h->first_step, 0, 0, 0);
    s->hdr->ledger_done = h->first_step;
    s->hdr->ckpt = mr_w_place(MR_CKPT_IDLE, h->first_step, 0, 0);
    s->hdr->ckpt_latest = h->first_step;
    MR_POINT("ipc.seg.filled");
    mr_st(&s->hdr->magic, MR_SHM_MAGIC);
}

int mr_seg_create(struct mr_seg *s, const struct mr_seg_params *p, struct mr_err *err)
{
    struct mr_shm_header h;
    const char *bad;

    memset(s, 0, sizeof *s);
    if (!mr_run_name_ok(p->run))
        return mr_err_set(err, MR_EXIT_CONFIG, "run name \"%s\": allowed are 1 to 48 of A-Z a-z 0-9 . _ -, but not \".\" or \"..\"",
                          p->run ? p->run : "");
    header_of(&h, p);
    bad = bad_count(&h);
    if (bad)
        return mr_err_set(err, MR_EXIT_CONFIG, "run %s: %s is out of range (base/limits.h)", p->run, bad);
    snprintf(s->run, sizeof s->run, "%s", p->run);
    s->writable = 1;
    s->ctl_bytes = h.total_bytes;
    s->tok_bytes = tok_bytes(&h);
    s->plan_bytes = plan_bytes(&h);
    set_owner(&h, p->run);
    s->ctl = create_map(p->run, "ctl", s->ctl_bytes, &h, sizeof h, err);
    if (!s->ctl)
        return -1;                        /* the name may be somebody else's: touch nothing */
    mr_shm_remove(p->run, 0);
    s->tok = create_map(p->run, "tok", s->tok_bytes, NULL, 0, err);
    s->plan = s->tok ? create_map(p->run, "plan", s->plan_bytes, NULL, 0, err) : NULL;
    if (!s->plan) {
        mr_seg_close(s);
        mr_seg_unlink(p->run);
        return -1;
    }
    fill(s, &h);
    return 0;
}

/* ---- opening ------------------------------------------------------------------------------------------------------------- */

static void *open_map(const char *run, const char *suffix, int writable, size_t *bytes, struct mr_err *err)
{
    char path[MR_PATH_MAX];
    struct stat st = {0};
    int fd;

    mr_shm_path(path, run, suffix);
    fd = open(path, (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK); /* a pipe is not waited for */
    if (fd < 0 && errno == ENOENT) {
        mr_err_set(err, MR_EXIT_ENV, "run %s: %s is not there: the run is over, or its files were removed from " MR_SHM_DIR
                   " while it lived (by hand; by systemd-logind at logout, see RemoveIPC in logind.conf)", run, path);
        return NULL;
    }
    if (fd < 0) {
        mr_err_set(err, MR_EXIT_ENV, "run %s: cannot open %s: %s; `millrace status` lists the live runs", run, path, strerror(errno));
        return NULL;
    }
    if (fstat(fd, &st) || !S_ISREG(st.st_mode) || st.st_size < (off_t)MR_SHM_ALIGN) {
        mr_err_set(err, MR_EXIT_ENV, "run %s: %s is not a segment (%lld bytes); `millrace clean` removes what dead runs left", run, path,
                   (long long)st.st_size);
        close(fd);
        return NULL;
    }
    *bytes = (size_t)st.st_size;
    return map_fd(fd, *bytes, writable, path, err);
}

static int refuse(const char *run, struct mr_err *err, const char *what, uint64_t seen, uint64_t allowed)
{
    return mr_err_set(err, MR_EXIT_ENV, "run %s: its .ctl segment is damaged, unfinished or of another build: %s is %#llx, expected %#llx; "
                      "use the build that started the run, or `millrace clean`",
                      run, what, (unsigned long long)seen, (unsigned long long)allowed);
}

/* A private copy of the header: nothing in it is used before all of it is checked. */
static int check_header(const char *run, const struct mr_shm_header *h, size_t ctl_bytes, struct mr_err *err)
{
    struct mr_shm_header want;
    const char *bad;

    if (h->magic != MR_SHM_MAGIC)
        return refuse(run, err, "magic", h->magic, MR_SHM_MAGIC);
    if (h->version != MR_SHM_VERSION)
        return refuse(run, err, "version", h->version, MR_SHM_VERSION);
    if (h->layout_hash != MR_LAYOUT_HASH)
        return refuse(run, err, "layout hash", h->layout_hash, MR_LAYOUT_HASH);
    if (memchr(h->run, 0, sizeof h->run) == NULL || strcmp(h->run, run))
        return refuse(run, err, "run name", (uint8_t)h->run[0], (uint8_t)run[0]);
    bad = bad_count(h);
    if (bad)
        return refuse(run, err, bad, 1, 0);
    memcpy(&want, h, sizeof want);
    place_sections(&want);
    if (memcmp(&want, h, sizeof want))
        return refuse(run, err, "a section offset", h->total_bytes, want.total_bytes);
    if (h->total_bytes != ctl_bytes)
        return refuse(run, err, "file size", ctl_bytes, h->total_bytes);
    return 0;
}

static int check_rings(const struct mr_seg *s, struct mr_err *err)
{
    for (unsigned i = 0; i < mr_ring_count(s); i++) {
        const struct mr_ring *r = mr_ring_at(s, i);

        if (r->mask != s->hdr->ring_cap - 1 || r->shift != (uint32_t)__builtin_ctz(s->hdr->ring_cap) ||
            r->want != (i < MR_RING_READY ? MR_QUEUED : MR_READY))
            return refuse(s->run, err, "a ring mask", r->mask, s->hdr->ring_cap - 1);
    }
    return 0;
}

static int open_ctl(struct mr_seg *s, struct mr_err *err)
{
    struct mr_shm_header h;

    s->ctl = open_map(s->run, "ctl", s->writable, &s->ctl_bytes, err);
    if (!s->ctl)
        return -1;
    if (s->ctl_bytes < sizeof h)
        return refuse(s->run, err, "file size", s->ctl_bytes, sizeof h);
    h.magic = mr_ld((uint64_t *)s->ctl);           /* acquire: pairs with the store that ends fill() */
    memcpy((char *)&h + 8, (char *)s->ctl + 8, sizeof h - 8);
    if (check_header(s->run, &h, s->ctl_bytes, err))
        return -1;
    set_pointers(s);
    return check_rings(s, err);
}

static int open_rest(struct mr_seg *s, struct mr_err *err)
{
    s->tok = open_map(s->run, "tok", s->writable, &s->tok_bytes, err);
    if (!s->tok)
        return -1;
    if (s->tok_bytes != tok_bytes(s->hdr))
        return refuse(s->run, err, ".tok size", s->tok_bytes, tok_bytes(s->hdr));
    s->plan = open_map(s->run, "plan", s->writable, &s->plan_bytes, err);
    if (!s->plan)
        return -1;
    if (s->plan_bytes != plan_bytes(s->hdr))
        return refuse(s->run, err, ".plan size", s->plan_bytes, plan_bytes(s->hdr));
    return 0;
}

int mr_seg_open(struct mr_seg *s, const char *run, int writable, struct mr_err *err)
{
    memset(s, 0, sizeof *s);
    if (!mr_run_name_ok(run))
        return mr_err_set(err, MR_EXIT_CONFIG, "run name \"%s\": allowed are 1 to 48 of A-Z a-z 0-9 . _ -", run ? run : "");
    snprintf(s->run, sizeof s->run, "%s", run);
    s->writable = writable;
    if (!open_ctl(s, err) && !open_rest(s, err))
        return 0;
    mr_seg_close(s);
    return -1;
}

void mr_seg_close(struct mr_seg *s)
{
    if (s->ctl)
        munmap(s->ctl, s->ctl_bytes);
    if (s->tok)
        munmap(s->tok, s->tok_bytes);
    if (s->plan)
        munmap(s->plan, s->plan_bytes);
    memset(s, 0, sizeof *s);
}
