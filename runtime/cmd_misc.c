/* millrace clean, pack, inspect, and eval and export, which are the actor program's. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "data/dataset.h"
#include "ipc/dump.h"
#include "runtime/cmd.h"
#include "runtime/spawn.h"

/* ---- clean --------------------------------------------------------------------------------------------------------------------------- */

static void clean_one(const char *run, int alive, void *arg)
{
    int *removed = arg, r;
    char said[400];

    (void)alive; /* judged again, under the lock, at removal */
    r = mr_shm_clean(run, said, sizeof said);
    *removed += r > 0;
    if (said[0])
        printf("%s%s\n", r > 0 ? "" : "left alone: ", said);
}

int mr_cmd_clean(int argc, char **argv)
{
    const struct mr_usage u = {
        "clean", "Removes what runs left in /dev/shm whose supervisor is proven dead (boot, pid and start time); nothing else.\n", NULL, 0,
        0};
    int removed = 0, n, r = mr_args_parse(&u, argc, argv, NULL, &n);

    if (r)
        return r == MR_ARGS_DONE ? 0 : r;
    mr_seg_each(clean_one, &removed);
    if (!removed)
        puts("nothing to remove");
    return 0;
}

/* ---- pack ---------------------------------------------------------------------------------------------------------------------------- */

int mr_cmd_pack(int argc, char **argv)
{
    int skip = 0, n, r;
    const struct mr_arg args[] = {{.name = "skip-bad", .flag = &skip}, {.name = NULL}};
    const struct mr_usage u = {
        "pack IN.jsonl OUT.safetensors [--skip-bad]",
        "JSON lines {\"input_ids\": [...], \"loss_mask\": [...]} to the packed form that runs map instead of parsing.\n"
        "  --skip-bad   counts bad records instead of refusing the file\n",
        args, 2, 2};
    const char *pos[2];
    char report[512];
    struct mr_err err = {0};

    r = mr_args_parse(&u, argc, argv, pos, &n);
    if (r)
        return r == MR_ARGS_DONE ? 0 : r;
    if (mr_pack(pos[0], pos[1], skip, report, sizeof report, &err))
        return mr_cmd_fail(&err);
    puts(report);
    return 0;
}

/* ---- inspect ------------------------------------------------------------------------------------------------------------------------- */

int mr_cmd_inspect(int argc, char **argv)
{
    const struct mr_usage u = {
        "inspect [RUN]", "Prints every shared object of a run (live, or dead and not cleaned yet) from a read-only mapping.\n", NULL, 0, 1};
    const char *name = NULL;
    char run[MR_NAME_MAX];
    struct mr_err err = {0};
    struct mr_seg s = {0};
    int n, r = mr_args_parse(&u, argc, argv, &name, &n);

    if (r)
        return r == MR_ARGS_DONE ? 0 : r;
    if (mr_cmd_pick_run(name, run, &err) || mr_seg_open(&s, run, 0, &err))
        return mr_cmd_fail(&err);
    mr_dump_all(&s, stdout);
    mr_seg_close(&s);
    return 0;
}

/* ---- eval, export -------------------------------------------------------------------------------------------------------------------- */

/* Becomes the actor program: the supervisor's binary links no kernels.  Returns only on failure. */
static int become_actor(int argc, char **argv)
{
    char path[4096];
    struct mr_err err = {0};
    char **args = calloc((size_t)argc + 2, sizeof *args);

    if (!args || mr_actor_path(path, sizeof path, &err)) {
        free(args);
        mr_err_set(&err, MR_EXIT_ENV, "out of memory");
        return mr_cmd_fail(&err);
    }
    setenv("OMP_WAIT_POLICY", "passive", 0); /* as for the actors of a run (spawn.c) */
    args[0] = (char *)"millrace-actor";
    memcpy(args + 1, argv, (size_t)argc * sizeof *argv);
    execv(path, args);
    mr_err_set(&err, MR_EXIT_ENV, "cannot execute %s: %s", mr_err_path(path, 300), strerror(errno));
    free(args);
    return mr_cmd_fail(&err);
}

int mr_cmd_eval(int argc, char **argv)
{
    return become_actor(argc, argv);
}

int mr_cmd_export(int argc, char **argv)
{
    return become_actor(argc, argv);
}
