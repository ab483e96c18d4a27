/* millrace run: from a topology to an exit code.
 *
 * Everything that can be refused is refused before the first segment exists: configuration, data, room in /dev/shm, the run directory, the
 * name.  What a dead run of the same name left in /dev/shm is removed, with a sentence; a live one is never touched.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/point.h"
#include "data/json.h"
#include "runtime/gpus.h"
#include "runtime/metrics.h"
#include "runtime/prepare.h"
#include "runtime/spawn.h"
#include "runtime/supervisor.h"
#include "runtime/totals.h"

struct request {
    const char *topo, *name;
    struct mr_arg_list set;
    int resume;
    enum mr_io io;
};

static int parse_io(const char *text, enum mr_io *io)
{
    static const char *const name[] = {"auto", "uring", "epoll"};
    const char *near;

    for (int i = 0; i < 3; i++)
        if (!text || strcmp(text, name[i]) == 0) {
            *io = text ? (enum mr_io)i : MR_IO_AUTO;
            return 0;
        }
    near = mr_nearest(text, name, 3);
    fprintf(stderr, "millrace: --io %s: auto, uring or epoll%s%s%s\n", text, near ? "; did you mean " : "", near ? near : "",
            near ? "?" : "");
    return MR_EXIT_CONFIG;
}

static int free_the_name(const char *run, struct mr_err *err)
{
    char said[400];
    int r = mr_shm_clean(run, said, sizeof said);

    if (r > 0)
        printf("millrace: %s\n", said);
    if (r >= 0)
        return 0;
    if (mr_seg_owner_alive(run) != 1)
        return mr_err_set(err, MR_EXIT_ENV, "/run/name: %s; or choose another name (--name RUN)", said);
    return mr_err_set(err, MR_EXIT_CONFIG, "/run/name: %s: choose another name (--name RUN), or stop it first (millrace stop %s)", said, run);
}

/* Fresh: run.json.  Resume: where to go on. */
static int place_in_dir(struct mr_resume *at, const struct request *q, const struct mr_prepared *p, const struct mr_rundir *d, int *resumed,
                        struct mr_err *err)
{
    char path[MR_PATH + 64];
    FILE *f = fopen(mr_rundir_file(d, "run.json", path), "re");

    memset(at, 0, sizeof *at);
    *resumed = q->resume && f;
    if (f)
        fclose(f);
    if (*resumed)
        return mr_resume(at, d, p, err);
    if (q->resume && access(mr_rundir_file(d, "latest", path), F_OK) == 0)
        return mr_err_set(err, MR_EXIT_CONFIG,
                          "--resume: %s has a checkpoint but no run.json, which says what it belongs to: restore that file, or "
                          "start a new run.dir",
                          d->path);
    if (q->resume)
        printf("millrace: --resume: %s has no run yet, so it starts from the beginning\n", d->path);
    return mr_rundir_write_identity(d, &p->topo, &p->checked, err);
}

/* A summary of an earlier start that did not get to the end. */
static int was_interrupted(const char *path)
{
    json_t *o = json_load_file(path, 0, NULL);
    const char *status = json_string_value(json_object_get(o, "status"));
    int r = !status || strcmp(status, "completed");

    json_decref(o);
    return r;
}

/* A supervisor that died between the last checkpoint and its summary left everything that the summary is made of. */
static int mend_summary(const struct mr_prepared *p, const struct mr_rundir *d, unsigned steps, struct mr_err *err)
{
    struct mr_totals *t;
    char path[MR_PATH + 64];
    struct stat st;
    int r;

    if (stat(mr_rundir_file(d, "summary.json", path), &st) == 0 && !was_interrupted(path))
        return 0;
    t = malloc(sizeof *t);
    if (!t)
        return mr_err_set(err, MR_EXIT_ENV, "out of memory");
    mr_totals_init(t, p->shm.seg.steps_total, p->shm.seg.microbatches_total);
    r = mr_totals_resume(t, mr_rundir_file(d, "metrics/steps.jsonl", path), steps, err);
    t->start_ns = mr_now_ns();
    if (r == 0)
        r = mr_summary_write(t, mr_rundir_file(d, "summary.json", path), "completed", (unsigned)p->topo.train.epochs, &p->checked, err);
    free(t);
    return r;
}

static int go(const struct request *q, struct mr_prepared *p, const struct mr_rundir *d, struct mr_err *err)
{
    struct mr_sup_opts o = {.topo = &p->topo, .checked = &p->checked, .shm = &p->shm, .dir = d, .io = q->io};
    struct mr_resume at;
    int resumed;

    if (place_in_dir(&at, q, p, d, &resumed, err))
        return err->code;
    if (at.complete) {
        printf("run %s is complete at step %u: nothing is left to do (%s/summary.json)\n", p->topo.run.name, at.first_step, d->path);
        return mend_summary(p, d, at.first_step, err) ? err->code : 0;
    }
    if (mr_rundir_has_room(d, &p->checked, resumed ? 1 : mr_rundir_checkpoints(&p->topo, p->shm.seg.steps_total), err))
        return err->code;
    if (resumed)
        printf("resuming run %s at step %u of %u%s; %u microbatches committed after it will be done again\n", p->topo.run.name,
               at.first_step, p->shm.seg.steps_total, at.first_step ? "" : " (no checkpoint yet)", at.recomputed);
    mr_shm_plan_make(&p->shm, &p->checked, &p->topo, at.first_step);
    o.first_step = at.first_step;
    o.recomputed = at.recomputed;
    printf("run %s: %u actors, %u microbatches in %u steps, directory %s\n", p->topo.run.name, p->shm.seg.n_actors,
           p->shm.seg.microbatches_total, p->shm.seg.steps_total, d->path);
    fflush(stdout);
    return mr_supervise(&o, err);
}

static int run(const struct request *q, struct mr_err *err)
{
    struct mr_prepared p;
    struct mr_rundir d = {.lock_fd = -1};
    char actor[4096];
    int code;

    if (mr_prepare(&p, q->topo, &q->set, q->name, err) || mr_shm_plan_fits(&p.shm, err) ||
        mr_metrics_probe(p.topo.metrics.listen, err) || mr_actor_path(actor, sizeof actor, err) ||
        mr_gpus_prepare(&p.topo, &p.checked, stdout, err) || free_the_name(p.topo.run.name, err) ||
        mr_rundir_possible(p.topo.run.dir, &p.checked, q->resume ? 1 : mr_rundir_checkpoints(&p.topo, p.shm.seg.steps_total), err) ||
        mr_rundir_open(&d, p.topo.run.dir, q->resume, err)) {
        code = err->code;
    } else {
        mr_prepared_print(&p, stdout);
        code = go(q, &p, &d, err);
    }
    mr_rundir_close(&d);
    mr_prepared_free(&p);
    return code;
}

int mr_cmd_run(int argc, char **argv)
{
    struct request q = {.topo = NULL};
    const char *io = NULL;
    const struct mr_arg args[] = {{.name = "set", .list = &q.set},
                                  {.name = "resume", .flag = &q.resume},
                                  {.name = "name", .value = &q.name},
                                  {.name = "io", .value = &io},
                                  {.name = NULL}};
    const struct mr_usage u = {
        "run TOPO.json [--set /pointer=value]... [--resume] [--name RUN] [--io auto|uring|epoll]",
        "Trains.  The first Ctrl-C (or SIGTERM, or millrace stop) ends the run after the current step with a checkpoint; the second at "
        "once.\n"
        "  --set /pointer=value   replaces a key; the value is JSON\n"
        "  --resume               goes on from the last checkpoint in /run/dir; a complete run says so and exits 0\n"
        "  --name RUN             overrides /run/name\n"
        "  --io auto|uring|epoll  the supervisor's event loop; auto takes io_uring where the kernel permits it\n"
        "Exit codes: 0 completed or stopped with a checkpoint; 1 failed; 2 configuration; 3 environment; 130/143 interrupted.\n",
        args, 1, 1};
    struct mr_err err = {0};
    int n, r = mr_args_parse(&u, argc, argv, &q.topo, &n);

    if (r)
        return r == MR_ARGS_DONE ? 0 : r;
    if (parse_io(io, &q.io))
        return MR_EXIT_CONFIG;
    mr_point_init("supervisor");
    r = run(&q, &err);
    if (r)
        mr_cmd_fail(&err);
    return r;
}
