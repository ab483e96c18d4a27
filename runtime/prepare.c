/* From the command line to a checked topology: see prepare.h. */
#include "runtime/prepare.h"

#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>

#include "runtime/gpus.h"

/* "/run/name="NAME"" as one more --set, so that a name from the command line is checked like one from the file. */
static int with_name(const struct mr_arg_list *set, const char *name, struct mr_arg_list *out, char *text, size_t bytes, struct mr_err *err)
{
    *out = *set;
    if (!name)
        return 0;
    if (strpbrk(name, "\"\\") || out->n == MR_ARG_LIST)
        return mr_err_set(err, MR_EXIT_CONFIG, "--name %s: letters, digits, '.', '_' and '-' make a run name", name);
    snprintf(text, bytes, "/run/name=\"%s\"", name);
    out->v[out->n++] = text;
    return 0;
}

int mr_prepare(struct mr_prepared *p, const char *path, const struct mr_arg_list *set, const char *name, struct mr_err *err)
{
    struct mr_arg_list all;
    char text[256];

    memset(p, 0, sizeof *p);
    if (with_name(set, name, &all, text, sizeof text, err))
        return -1;
    if (mr_topology_load(&p->topo, path, all.v, all.n, err))
        return -1;
    p->has_topo = 1;
    p->has_checked = 1; /* freed in both cases, says data/check.h */
    if (mr_check(&p->checked, &p->topo, MR_CHECK_DATA | MR_CHECK_PLAN, err))
        return -1;
    mr_shm_plan_make(&p->shm, &p->checked, &p->topo, 0);
    return 0;
}

void mr_prepared_free(struct mr_prepared *p)
{
    if (p->has_checked)
        mr_checked_free(&p->checked);
    if (p->has_topo)
        mr_topology_free(&p->topo);
    p->has_checked = p->has_topo = 0;
}

void mr_prepared_print(const struct mr_prepared *p, FILE *f)
{
    struct statvfs fs;
    uint64_t have = statvfs("/dev/shm", &fs) ? 0 : (uint64_t)fs.f_bavail * fs.f_frsize;

    mr_check_print(&p->checked, &p->topo, f);
    for (int d = 0; d < p->topo.n_devices; d++)
        if (mr_is_gpu(p->topo.device[d]) && mr_topo_slabs_on(&p->topo, d))
            fprintf(f, "slabs of  %s: %s\n", p->topo.device[d],
                    mr_shm_plan_host_slabs(&p->topo, d) ? "f32 in /dev/shm, because all drafters run on the cpu: its targets convert and copy"
                                                        : "bf16 in its own memory, held by a keeper");
    fprintf(f, "/dev/shm: %.1f MiB needed (%.1f MiB slabs and drafter state, %.1f MiB queues, tokens and plan), %.1f MiB available\n",
            (double)p->shm.total_bytes / 1048576.0, (double)p->shm.arena_bytes / 1048576.0,
            (double)(p->shm.total_bytes - p->shm.arena_bytes) / 1048576.0, (double)have / 1048576.0);
}
