/* From a checked topology to segments; see shm_plan.h.
 *
 * Arena numbers: slabs of device d are arena d; the state of drafter r is arena D + r (D devices); the weights of device d are arena
 * D + drafters + d; the header of drafter r, when its state is in GPU memory, is arena 2 D + drafters + r.  What lies in /dev/shm is made
 * here; the others are registered by their keepers, and until then have generation 0.
 * Slabs of a device are in /dev/shm when the device is the cpu, or when every drafter runs on the cpu (a GPU target then converts and
 * copies).
 */
#include "runtime/shm_plan.h"

#include <errno.h>
#include <string.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "ipc/arena.h"

enum { SPARE_BYTES = 1 << 20 }; /* control socket, directory entries, page rounding */

static int is_cuda(const char *device)
{
    return strncmp(device, "cuda", 4) == 0 || strncmp(device, "GPU-", 4) == 0;
}

/* A device holds slabs when a target writes there. */
static int has_target(const struct mr_topology *t, unsigned device)
{
    for (int i = 0; i < t->n_actors; i++)
        if (t->actor[i].kind == MR_TARGET && t->actor[i].device_index == device)
            return 1;
    return 0;
}

static int gpu_drafters(const struct mr_topology *t)
{
    int n = 0;

    for (int i = 0; i < t->n_actors; i++)
        n += t->actor[i].kind == MR_DRAFTER && is_cuda(t->actor[i].device);
    return n;
}

static int slabs_in_shm(const struct mr_topology *t, unsigned device)
{
    return !is_cuda(t->device[device]) || !gpu_drafters(t);
}

int mr_shm_plan_host_slabs(const struct mr_topology *t, int d)
{
    return slabs_in_shm(t, (unsigned)d);
}

static uint64_t slab_arena_bytes(const struct mr_checked *c, const struct mr_topology *t)
{
    return (uint64_t)t->queue.slabs_per_device * c->slab_bytes;
}

int mr_shm_plan_arenas(struct mr_device_arenas *n, const struct mr_checked *c, const struct mr_topology *t, int d, struct mr_err *err)
{
    struct mr_tlayout l;
    int rc;

    *n = (struct mr_device_arenas){0};
    if (!is_cuda(t->device[d]))
        return 0;
    if (has_target(t, (unsigned)d) && !slabs_in_shm(t, (unsigned)d))
        n->slabs = slab_arena_bytes(c, t);
    for (int i = 0; i < t->n_actors; i++)
        if (t->actor[i].kind == MR_DRAFTER && t->actor[i].device_index == (unsigned)d)
            n->drafters += mr_drafter_arena_bytes(c->layout.P);
    rc = mr_check_weights(c, t, d, 2, &l);
    n->weights = l.bytes;
    mr_tlayout_free(&l);
    return rc ? mr_err_set(err, MR_EXIT_ENV, "out of memory") : 0;
}

static unsigned min_u(unsigned a, unsigned b)
{
    return a < b ? a : b;
}

/* Plan position at which `step` begins: what mr_step_first_pos says once the segment exists. */
static unsigned first_pos(const struct mr_checked *c, const struct mr_topology *t, unsigned step)
{
    int e = 0;

    while (e < t->train.epochs && c->epoch[e + 1].first_step <= step)
        e++;
    if (e == t->train.epochs)
        return c->epoch[e].first_pos;
    return c->epoch[e].first_pos + (step - c->epoch[e].first_step) * (unsigned)mr_topo_places(t);
}

/* Items: one for each slab and each target in flight (docs/design.md 4.3), and a few queued ahead so that no target waits for the feeder.
 */
static unsigned item_count(const struct mr_checked *c, const struct mr_topology *t)
{
    unsigned ahead = 8 + 2 * (unsigned)t->n_targets;

    return min_u((unsigned)c->n_slabs + (unsigned)t->n_targets + ahead, MR_MAX_ITEMS);
}

static uint64_t arena_bytes(const struct mr_checked *c, const struct mr_topology *t)
{
    uint64_t sum = 0;

    for (int d = 0; d < t->n_devices; d++)
        if (has_target(t, (unsigned)d) && slabs_in_shm(t, (unsigned)d))
            sum += slab_arena_bytes(c, t);
    for (int i = 0; i < t->n_actors; i++)
        if (t->actor[i].kind == MR_DRAFTER)
            sum += is_cuda(t->actor[i].device) ? sizeof(struct mr_drafter_arena) : mr_drafter_arena_bytes(c->layout.P);
    return sum;
}

void mr_shm_plan_make(struct mr_shm_plan *p, const struct mr_checked *c, const struct mr_topology *t, unsigned first_step)
{
    unsigned all = c->epoch[t->train.epochs].first_step;
    unsigned steps = t->train.max_steps > 0 ? min_u(all, (unsigned)t->train.max_steps) : all;

    *p = (struct mr_shm_plan){0};
    p->seg = (struct mr_seg_params){
        .run = t->run.name,
        .n_actors = (uint32_t)t->n_actors,
        .n_items = item_count(c, t),
        .n_slabs = (uint32_t)c->n_slabs,
        .n_arenas = (uint32_t)(2 * t->n_devices + t->n_drafters + (gpu_drafters(t) ? t->n_drafters : 0)),
        .n_epochs = (uint32_t)t->train.epochs,
        .n_buckets = (uint32_t)t->data.n_buckets,
        .n_targets = (uint32_t)t->n_targets,
        .n_drafters = (uint32_t)t->n_drafters,
        .n_places = (uint32_t)mr_topo_places(t),
        .token_budget = (uint32_t)t->data.token_budget,
        .max_seqs = (uint32_t)c->plan_opts.max_seqs,
        .deterministic = (uint32_t)t->train.deterministic,
        .steps_total = steps,
        .microbatches_total = first_pos(c, t, steps),
        .first_step = first_step,
        .checkpoint_every = (uint32_t)t->train.checkpoint_every_steps,
        .param_count = c->layout.P,
        .seed = t->run.seed,
        .plan_samples_max = c->max_samples,
        .plan_entries_max = c->max_entries,
        .block_slots = (uint32_t)c->drafter.block_size - 1,
    };
    p->arena_bytes = arena_bytes(c, t);
    p->total_bytes = mr_seg_bytes(&p->seg) + p->arena_bytes;
}

int mr_shm_plan_fits(const struct mr_shm_plan *p, struct mr_err *err)
{
    struct statvfs fs;
    uint64_t need = p->total_bytes + SPARE_BYTES, have;

    if (statvfs("/dev/shm", &fs))
        return mr_err_set(err, MR_EXIT_ENV, "/dev/shm: %s: the run keeps its queues there; mount a tmpfs on it", strerror(errno));
    if ((fs.f_flag & ST_RDONLY) || access("/dev/shm", W_OK | X_OK))
        return mr_err_set(err, MR_EXIT_ENV, "/dev/shm is not writable for uid %u: mount it read-write with mode 1777", (unsigned)geteuid());
    have = (uint64_t)fs.f_bavail * fs.f_frsize;
    if (have < need)
        return mr_err_set(
            err, MR_EXIT_ENV,
            "/dev/shm is too small: needed %llu bytes (%llu for slabs and drafter state, %llu for queues and plan), available "
            "%llu; free some (millrace clean), enlarge it (docker run --shm-size=..., mount -o remount,size=... /dev/shm), or "
            "lower /queue/slabs_per_device or /data/token_budget",
            (unsigned long long)need, (unsigned long long)p->arena_bytes, (unsigned long long)(need - p->arena_bytes),
            (unsigned long long)have);
    return 0;
}

static void fill_actors(const struct mr_topology *t, struct mr_seg *s)
{
    for (int i = 0; i < t->n_actors; i++) {
        struct mr_actor_row *row = &s->actors[i];
        const struct mr_topo_actor *a = &t->actor[i];

        snprintf(row->name, sizeof row->name, "%s/%u", mr_kind_name(a->kind), a->index);
        snprintf(row->device, sizeof row->device, "%s", a->device);
        row->kind = a->kind;
        row->index = a->index;
    }
}

static void fill_slabs(const struct mr_checked *c, const struct mr_topology *t, struct mr_seg *s)
{
    unsigned n = 0;

    for (unsigned d = 0; d < (unsigned)t->n_devices; d++)
        for (int i = 0; has_target(t, d) && i < t->queue.slabs_per_device; i++, n++) {
            MR_ASSERT(n < s->hdr->n_slabs);
            s->slabs[n].arena = d;
            s->slabs[n].device = d;
            s->slabs[n].offset = (uint64_t)i * c->slab_bytes;
            s->slabs[n].bytes = c->slab_bytes;
        }
    MR_ASSERT(n == s->hdr->n_slabs);
}

static void arena_row(struct mr_seg *s, unsigned arena, unsigned use, unsigned owner, unsigned device, int in_shm)
{
    s->arenas[arena].use = use;
    s->arenas[arena].owner = owner;
    s->arenas[arena].device = device;
    s->arenas[arena].export_kind = in_shm ? MR_EXPORT_SHM : MR_EXPORT_CUDA_IPC;
}

/* Index of the device's keeper; of the cpu, which has none, the device's own. */
static unsigned keeper_of(const struct mr_topology *t, unsigned device)
{
    for (int i = 0; i < t->n_actors; i++)
        if (t->actor[i].kind == MR_KEEPER && t->actor[i].device_index == device)
            return t->actor[i].index;
    return device;
}

/* State in /dev/shm with its header in front; or in the keeper's memory, and the header apart, where every process can read it. */
static int fill_drafter(const struct mr_checked *c, const struct mr_topology *t, const struct mr_topo_actor *a, struct mr_seg *s,
                        struct mr_err *err)
{
    unsigned nd = (unsigned)t->n_devices, state = nd + a->index, header = 2 * nd + (unsigned)t->n_drafters + a->index;
    uint64_t bytes = mr_drafter_arena_bytes(c->layout.P);

    arena_row(s, state, MR_ARENA_DRAFTER, a->index, a->device_index, !is_cuda(a->device));
    s->arenas[state].bytes = bytes;
    if (!is_cuda(a->device))
        return mr_arena_create_shm(s, state, bytes, err);
    arena_row(s, header, MR_ARENA_HEADER, a->index, a->device_index, 1);
    return mr_arena_create_shm(s, header, sizeof(struct mr_drafter_arena), err);
}

static int fill_arenas(const struct mr_checked *c, const struct mr_topology *t, struct mr_seg *s, struct mr_err *err)
{
    unsigned nd = (unsigned)t->n_devices, weights = nd + (unsigned)t->n_drafters;
    struct mr_device_arenas n;

    for (unsigned d = 0; d < nd; d++) {
        if (mr_shm_plan_arenas(&n, c, t, (int)d, err))
            return -1;
        arena_row(s, d, MR_ARENA_SLABS, keeper_of(t, d), d, slabs_in_shm(t, d));
        arena_row(s, weights + d, MR_ARENA_WEIGHTS, keeper_of(t, d), d, !is_cuda(t->device[d]));
        s->arenas[d].bytes = n.slabs;
        s->arenas[weights + d].bytes = n.weights;
        if (has_target(t, d) && slabs_in_shm(t, d) && mr_arena_create_shm(s, d, slab_arena_bytes(c, t), err))
            return -1;
    }
    for (int i = 0; i < t->n_actors; i++)
        if (t->actor[i].kind == MR_DRAFTER && fill_drafter(c, t, &t->actor[i], s, err))
            return -1;
    return 0;
}

int mr_shm_plan_create(const struct mr_shm_plan *p, const struct mr_checked *c, const struct mr_topology *t, struct mr_seg *s,
                       struct mr_err *err)
{
    if (mr_seg_create(s, &p->seg, err))
        return -1;
    fill_actors(t, s);
    memcpy(s->epochs, c->epoch, ((size_t)t->train.epochs + 1) * sizeof *c->epoch);
    fill_slabs(c, t, s);
    if (fill_arenas(c, t, s, err)) {
        mr_seg_close(s);
        mr_seg_unlink(t->run.name);
        return -1;
    }
    return 0;
}
