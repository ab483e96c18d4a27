/* millrace-actor: the process of one incarnation of one slot, exec'd by the supervisor; also `eval` and `export`.
 *
 *     millrace-actor --run NAME --slot N --incarnation I --topology FILE --event-fd FD --death-fd FD
 *
 * An actor must not outlive its supervisor: the GPU memory it holds would be lost to the next run.  Three guards, none of which is enough
 * alone: the parent-death signal (lost when the parent died before it was set: so the parent is compared with the segment header after),
 * and the death pipe, whose write end only the supervisor has.  A thread that blocks in read sees its end also in the middle of a long
 * computation, and with a parent that is no longer ours.
 *
 * Signals of the terminal are the supervisor's business; only SIGKILL ends an actor from outside.
 */
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "actors/actors.h"
#include "base/log.h"
#include "base/point.h"
#include "ipc/atomic.h"

struct args {
    const char *run, *topology;
    int slot, incarnation, event_fd, death_fd;
};

static int usage(void)
{
    fprintf(stderr, "usage: millrace-actor --run NAME --slot N --incarnation I --topology FILE [--event-fd FD] [--death-fd FD]\n"
                    "       millrace-actor eval|export|devices|bench-target|bench-drafter ...\n"
                    "It is started by `millrace run`.\n");
    return MR_EXIT_CONFIG;
}

static int parse_int(const char *text, int *out)
{
    char *end;
    long v;

    errno = 0;
    v = strtol(text, &end, 10);
    if (errno || end == text || *end || v < 0 || v > INT32_MAX)
        return -1;
    *out = (int)v;
    return 0;
}

static int parse_args(struct args *a, int argc, char **argv)
{
    static const struct option opt[] = {
        {"run", required_argument, NULL, 'r'},
        {"slot", required_argument, NULL, 's'},
        {"incarnation", required_argument, NULL, 'i'},
        {"topology", required_argument, NULL, 't'},
        {"event-fd", required_argument, NULL, 'e'},
        {"death-fd", required_argument, NULL, 'd'},
        {0},
    };
    int c, rc = 0;

    *a = (struct args){.slot = -1, .incarnation = -1, .event_fd = -1, .death_fd = -1};
    while ((c = getopt_long(argc, argv, "", opt, NULL)) != -1) {
        switch (c) {
        case 'r': a->run = optarg; break;
        case 't': a->topology = optarg; break;
        case 's': rc |= parse_int(optarg, &a->slot); break;
        case 'i': rc |= parse_int(optarg, &a->incarnation); break;
        case 'e': rc |= parse_int(optarg, &a->event_fd); break;
        case 'd': rc |= parse_int(optarg, &a->death_fd); break;
        default: return -1;
        }
    }
    return rc || optind != argc || !a->run || !a->topology || a->slot < 0 || a->incarnation < 1 ? -1 : 0;
}

/* ---- descriptors and signals ------------------------------------------------------------------------------------------------ */

/* Nothing but 0..2 and the two descriptors crosses the exec, and nothing at all would cross another one. */
static void own_descriptors(const struct args *a)
{
    int lo = a->event_fd < a->death_fd ? a->event_fd : a->death_fd;
    int hi = a->event_fd < a->death_fd ? a->death_fd : a->event_fd;
    unsigned from = 3;

    if (lo >= 3) {
        if (lo > 3)
            close_range(from, (unsigned)lo - 1, 0);
        from = (unsigned)lo + 1;
    }
    if (hi >= 3 && hi > lo) {
        if (from < (unsigned)hi)
            close_range(from, (unsigned)hi - 1, 0);
        from = (unsigned)hi + 1;
    }
    close_range(from, ~0u, 0);
    if (a->event_fd >= 0)
        fcntl(a->event_fd, F_SETFD, FD_CLOEXEC);
    if (a->death_fd >= 0)
        fcntl(a->death_fd, F_SETFD, FD_CLOEXEC);
}

static void *watch_supervisor(void *arg)
{
    int fd = (int)(intptr_t)arg;
    char byte;
    ssize_t n;

    do
        n = read(fd, &byte, 1);
    while (n > 0 || (n < 0 && errno == EINTR));
    _exit(MR_EXIT_ORPHAN);                       /* end of the pipe: no write end lives */
}

static int guard_against_orphanhood(const struct args *a, const struct mr_seg *seg)
{
    pthread_t thread;

    if (prctl(PR_SET_PDEATHSIG, SIGKILL) || getppid() != seg->hdr->sup_pid) {
        mr_error("the supervisor of run %s (pid %d) is not the parent of this process (%d): it is gone, or this was started by hand", a->run,
                 seg->hdr->sup_pid, (int)getppid());
        return MR_EXIT_ORPHAN;
    }
    if (a->death_fd < 0)
        return 0;
    if (pthread_create(&thread, NULL, watch_supervisor, (void *)(intptr_t)a->death_fd)) {
        mr_error("cannot start the thread that watches the supervisor");
        return MR_EXIT_ENV;
    }
    pthread_detach(thread);
    return 0;
}

static void leave_signals_to_supervisor(void)
{
    static const int sig[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGPIPE};

    for (size_t i = 0; i < sizeof(sig) / sizeof(*sig); i++)
        signal(sig[i], SIG_IGN);
}

/* ---- one incarnation ---------------------------------------------------------------------------------------------------------- */

static int check_row(const struct args *a, const struct mr_seg *seg)
{
    if ((unsigned)a->slot >= seg->hdr->n_actors) {
        mr_error("run %s has %u slots, there is no slot %d", a->run, seg->hdr->n_actors, a->slot);
        return MR_EXIT_CONFIG;
    }
    if (mr_ld(&seg->actors[a->slot].incarnation) != (unsigned)a->incarnation) {
        mr_error("%s is at incarnation %u, this process was started as %d: it came too late", seg->actors[a->slot].name,
                 seg->actors[a->slot].incarnation, a->incarnation);
        return MR_EXIT_FAILED;
    }
    return 0;
}

/* Does `now` differ from what run.json has at `ptr`?  A key that is not there was written by an older version. */
static int differs(const struct mr_json *then, const char *ptr, uint64_t now)
{
    const char *was = json_string_value(mr_json_at(then->root, ptr));
    char text[24];

    snprintf(text, sizeof(text), "%016llx", (unsigned long long)now);
    return was && strcmp(was, text);
}

/* Files may have been replaced since the run was started: hidden states of two targets, or a plan of two data sets, would be good for
 * neither.  run.json has what the supervisor saw. */
static int same_files(const struct mr_topology *t, const struct mr_checked *c, struct mr_err *err)
{
    struct mr_err none = {0};
    struct mr_json then;
    char path[MR_PATH + 16];
    int rc = 0;

    snprintf(path, sizeof(path), "%s/run.json", t->run.dir);
    if (mr_json_load(&then, path, &none))
        return 0;                            /* nothing to compare with: --resume will say that it is lost */
    if (differs(&then, "/drafter/target_weights", c->target_content))
        rc = mr_err_set(err, MR_EXIT_CONFIG, "%s: the bytes of its tensors are not those that this run was started with (%s): restore the checkpoint",
                        t->target.checkpoint, path);
    else if (c->data && differs(&then, "/data", mr_dataset_fingerprint(c->data)))
        rc = mr_err_set(err, MR_EXIT_CONFIG, "%s: the rows are not those that this run was started with (%s): restore the file", t->data.train, path);
    mr_json_free(&then);
    return rc;
}

static int run_actor(const struct args *a, struct mr_seg *seg)
{
    static const unsigned parts[MR_KINDS] = {[MR_FEEDER] = MR_CHECK_DATA, [MR_TARGET] = MR_CHECK_MODEL, [MR_DRAFTER] = MR_CHECK_MODEL};
    struct mr_topology topo;
    struct mr_checked checked;
    struct mr_err err = {0};
    struct mr_env env;
    int rc;

    if (mr_topology_load(&topo, a->topology, NULL, 0, &err)) {
        mr_error("%s", err.msg);
        return err.code;
    }
    if (mr_check(&checked, &topo, parts[seg->actors[a->slot].kind], &err) || same_files(&topo, &checked, &err)) {
        mr_error("%s", err.msg);
        rc = err.code;
    } else {
        mr_env_init(&env, seg, &topo, &checked, (unsigned)a->slot, (unsigned)a->incarnation, a->event_fd);
        rc = mr_actor_run(&env);
        mr_env_close(&env);
    }
    mr_checked_free(&checked);
    mr_topology_free(&topo);
    return rc;
}

static int actor_main(int argc, char **argv)
{
    struct args a;
    struct mr_seg seg;
    struct mr_err err = {0};
    int rc;

    if (parse_args(&a, argc, argv))
        return usage();
    own_descriptors(&a);
    leave_signals_to_supervisor();
    mr_log_init("actor", MR_LOG_INFO);
    if (mr_seg_open(&seg, a.run, 1, &err)) {
        mr_error("%s", err.msg);
        return err.code;
    }
    rc = check_row(&a, &seg);
    if (!rc) {
        mr_log_init(seg.actors[a.slot].name, MR_LOG_INFO);
        mr_point_init(seg.actors[a.slot].name);
        rc = guard_against_orphanhood(&a, &seg);
    }
    if (!rc)
        rc = run_actor(&a, &seg);
    mr_seg_close(&seg);
    return rc;
}

int main(int argc, char **argv)
{
    if (argc > 1 && !strcmp(argv[1], "eval"))
        return mr_eval_main(argc - 1, argv + 1);
    if (argc > 1 && !strcmp(argv[1], "export"))
        return mr_export_main(argc - 1, argv + 1);
    if (argc > 1 && !strcmp(argv[1], "bench-target"))
        return mr_bench_target_main(argc - 1, argv + 1);
    if (argc > 1 && !strcmp(argv[1], "bench-drafter"))
        return mr_bench_drafter_main(argc - 1, argv + 1);
    if (argc > 1 && !strcmp(argv[1], "devices"))
        return mr_devices_main(argc - 1, argv + 1);
    return actor_main(argc, argv);
}
