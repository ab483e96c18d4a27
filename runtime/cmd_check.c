/* millrace check: everything that can be known before a process is started. */
#include "runtime/gpus.h"
#include "runtime/metrics.h"
#include "runtime/prepare.h"

int mr_cmd_check(int argc, char **argv)
{
    struct mr_arg_list set = {.n = 0};
    const struct mr_arg args[] = {{.name = "set", .list = &set}, {.name = NULL}};
    const struct mr_usage u = {
        "check TOPO.json [--set /pointer=value]...",
        "Reads the topology, the target's checkpoint and the data; prints the plan, the buckets and the memory arithmetic.\n"
        "  --set /pointer=value   replaces a key; the value is JSON: --set /train/lr=1e-3 --set '/run/name=\"a\"'\n"
        "Exit code 0: a run would start; 2: something in the files is wrong; 3: this machine does not have what it needs.\n",
        args, 1, 1};
    struct mr_prepared p;
    struct mr_err err = {0};
    const char *path;
    int n, r = mr_args_parse(&u, argc, argv, &path, &n);

    if (r)
        return r == MR_ARGS_DONE ? 0 : r;
    r = mr_prepare(&p, path, &set, NULL, &err);
    if (r == 0) {
        mr_prepared_print(&p, stdout);
        r = mr_shm_plan_fits(&p.shm, &err) || mr_metrics_probe(p.topo.metrics.listen, &err) ||
                    mr_rundir_possible(p.topo.run.dir, &p.checked, mr_rundir_checkpoints(&p.topo, p.shm.seg.steps_total), &err) ||
                    mr_gpus_prepare(&p.topo, &p.checked, stdout, &err)
                ? -1
                : 0;
    }
    mr_prepared_free(&p);
    return r ? mr_cmd_fail(&err) : 0;
}
