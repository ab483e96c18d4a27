/* keeper: holds the memory of one GPU that must outlive the actors there (docs/design.md section 7).
 *
 * It allocates what the registry's rows of its device ask for, exports each arena, registers it, and then only stays: no kernel, no stream,
 * no library runs in this process, so nothing that goes wrong in a computation can take the memory with it.
 * All or nothing: before the first allocation the sum is compared with what is free.  Memory of processes that have just died comes back a
 * little later, so a sum that does not fit is looked at again for some seconds before it is refused, arena by arena.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "actors/actors.h"
#include "actors/backend.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/point.h"
#include "ipc/atomic.h"

#define PATIENCE_NS 10000000000u
enum { RETRY_MS = 100, SLACK = 64 << 20 };           /* page tables and rounding of the driver */

struct keeper {
    struct mr_env *env;
    unsigned arena[MR_MAX_ARENAS];                   /* numbers of ours */
    unsigned n;
    uint64_t bytes, working;                         /* sum of ours; what the others on this device will allocate themselves */
};

static void find_arenas(struct keeper *k)
{
    const struct mr_seg *s = k->env->seg;
    unsigned device = k->env->topo->actor[k->env->slot].device_index;

    for (unsigned i = 0; i < s->hdr->n_arenas; i++)
        if (s->arenas[i].device == device && s->arenas[i].export_kind == MR_EXPORT_CUDA_IPC && s->arenas[i].bytes) {
            k->arena[k->n++] = i;
            k->bytes += s->arenas[i].bytes;
        }
    k->working = mr_check_working(k->env->checked, k->env->topo, (int)device);
}

static double gib(uint64_t bytes)
{
    return (double)bytes / 0x1p30;
}

static int refuse(const struct keeper *k, uint64_t free_bytes, uint64_t total, struct mr_err *err)
{
    static const char *const use[MR_ARENA_USES] = {"slabs", "weights", "drafter state", "header"};
    const struct mr_seg *s = k->env->seg;
    char list[600] = "";

    for (unsigned i = 0; i < k->n; i++) {
        const struct mr_arena_row *row = &s->arenas[k->arena[i]];
        size_t at = strlen(list);

        snprintf(list + at, sizeof list - at, "%s%s %.2f GiB", i ? " + " : "", row->use < MR_ARENA_USES ? use[row->use] : "?", gib(row->bytes));
    }
    /* The first time it is the configuration; later something else has taken the memory, and it may come back. */
    return mr_err_set(err, k->env->inc == 1 ? MR_EXIT_CONFIG : MR_EXIT_ENV,
                      "%s: %.2f GiB are needed: %s, + %.2f GiB for the contexts and activations of its actors; %.2f of %.2f GiB are free; lower "
                      "/queue/slabs_per_device or /data/token_budget, or end what else runs there",
                      k->env->me->device, gib(k->bytes + k->working), list, gib(k->working), gib(free_bytes), gib(total));
}

static int wait_for_room(const struct keeper *k, struct mr_err *err)
{
    const struct timespec pause = {.tv_nsec = RETRY_MS * 1000000};
    uint64_t free_bytes, total, until = mr_now_ns() + PATIENCE_NS;
    char why[300] = "";

    for (;;) {
        if (mr_k_cuda_mem_info(&free_bytes, &total, why, sizeof why))
            return mr_err_set(err, MR_EXIT_CUDA, "%s: %s", k->env->me->device, why);
        if (free_bytes >= k->bytes + k->working + SLACK)
            return 0;
        if (mr_now_ns() > until || mr_env_check(k->env, 0) != MR_GO_ON)
            return refuse(k, free_bytes, total, err);
        nanosleep(&pause, NULL);
    }
}

static int export_arena(struct keeper *k, unsigned i, struct mr_err *err)
{
    struct mr_arena_row *row = &k->env->seg->arenas[k->arena[i]];
    char uuid[MR_K_CUDA_UUID] = "", why[300] = "";
    void *base;
    int rc = mr_k_cuda_arena_alloc(row->bytes, &base, row->handle, uuid, why, sizeof why);

    _Static_assert(sizeof row->handle == MR_K_CUDA_HANDLE, "the row's handle is what kernels.h exports");
    if (rc)
        return mr_err_set(err, rc == -ENOMEM ? MR_EXIT_ENV : MR_EXIT_CUDA, "%s: arena %u, %llu bytes: %s", k->env->me->device, k->arena[i],
                          (unsigned long long)row->bytes, why);
    MR_POINT("keeper.arena.allocated");
    memcpy(row->device_uuid, uuid, sizeof row->device_uuid);     /* 40 characters, without the 0 */
    mr_arena_unseal(k->env->seg, k->arena[i]);
    mr_arena_register(k->env->seg, k->arena[i]);
    MR_POINT("keeper.arena.registered");
    return 0;
}

static int open_keeper(struct keeper *k, struct mr_err *err)
{
    char why[300] = "";
    int device;

    find_arenas(k);
    if (mr_backend_device(k->env->me->device, &device, err))
        return -1;
    if (mr_k_cuda_use(device, why, sizeof why))
        return mr_err_set(err, MR_EXIT_ENV, "%s: %s", k->env->me->device, why);
    if (wait_for_room(k, err))
        return -1;
    for (unsigned i = 0; i < k->n; i++)
        if (export_arena(k, i, err))
            return -1;
    return 0;
}

int mr_actor_keeper(struct mr_env *e)
{
    struct keeper k = {.env = e};
    struct mr_err err = {0};
    int rc;

    if (open_keeper(&k, &err))
        return mr_env_fail(e, &err);
    mr_info("%s: %u arenas, %.2f GiB", e->me->device, k.n, gib(k.bytes));
    mr_env_running(e);
    for (;;) {
        uint32_t seq = mr_evc_read(e->evc);

        rc = mr_env_check(e, 1);
        if (rc != MR_GO_ON)
            break;
        mr_env_wait(e, seq, MR_WAIT_END);
    }
    return mr_env_leave(e, rc);                      /* the memory goes with the process: others may still have it mapped */
}
