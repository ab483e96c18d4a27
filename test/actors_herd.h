/* Synthetic actors as forked processes: spawn, reap, recover (ipc/recover.h), next incarnation.  Fault points: base/point.h. */
#ifndef MR_TEST_ACTORS_HERD_H
#define MR_TEST_ACTORS_HERD_H

#include "actors_sim.h"

#include <errno.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "base/point.h"
#include "base/rng.h"

struct child {
    pid_t pid;                           /* 0 = none */
    unsigned inc;
};

struct herd {
    struct sim m;
    struct child child[MR_MAX_ACTORS];
    unsigned deaths;
    /* points: the first incarnation of each slot carries the fault, later ones do not */
    const char *fault, *trace;
    int stop;                            /* the fault stops the actor, see meanwhile() */
    unsigned stops;
};

static void be_actor(struct herd *h, unsigned slot)
{
    struct sim *m = &h->m;
    struct mr_env env;
    int rc;

    prctl(PR_SET_PDEATHSIG, SIGKILL);    /* a failed assertion leaves the test, and with it the actors */
    unsetenv("MR_FAULT");
    unsetenv("MR_FAULT_STOP");
    unsetenv("MR_FAULT_TRACE");
    if (h->fault && h->child[slot].inc == 1)
        setenv("MR_FAULT", h->fault, 1);
    if (h->stop)
        setenv("MR_FAULT_STOP", "1", 1);
    if (h->trace)
        setenv("MR_FAULT_TRACE", h->trace, 1);
    mr_point_init(m->seg.actors[slot].name);
    mr_env_init(&env, &m->seg, &m->topo, &m->checked, slot, h->child[slot].inc, -1);
    rc = mr_actor_run(&env);
    _exit(rc);
}

static void spawn(struct herd *h, unsigned slot)
{
    struct mr_actor_row *row = &h->m.seg.actors[slot];
    struct child *c = &h->child[slot];

    c->inc++;
    mr_st(&row->drain, 0);
    mr_st(&row->incarnation, c->inc);
    mr_st(&row->state, MR_ACTOR_STARTING);
    fflush(NULL);
    c->pid = fork();
    assert_int_not_equal(c->pid, -1);
    if (!c->pid)
        be_actor(h, slot);
}

static void kill_all(struct herd *h)
{
    for (unsigned i = 0; i < h->m.seg.hdr->n_actors; i++)
        if (h->child[i].pid) {
            kill(h->child[i].pid, SIGKILL);
            waitpid(h->child[i].pid, NULL, 0);
        }
}

static void bury(struct herd *h, unsigned slot, int status)
{
    struct mr_actor_row *row = &h->m.seg.actors[slot];

    h->child[slot].pid = 0;
    if (mr_ld(&row->acked))
        return;                          /* it may have been killed between the acknowledgement and its exit */
    if (!WIFSIGNALED(status) && WEXITSTATUS(status) != MR_EXIT_OK) {
        kill_all(h);
        fail_msg("%s exited with %d", row->name, WEXITSTATUS(status));
    }
    mr_recover(&h->m.seg, slot, h->child[slot].inc);
    row->restarts++;
    h->deaths++;
    spawn(h, slot);
}

static void meanwhile(struct herd *h, unsigned stopped);

static unsigned reap(struct herd *h)
{
    unsigned alive = 0;

    for (unsigned i = 0; i < h->m.seg.hdr->n_actors; i++) {
        int status;

        if (h->child[i].pid && waitpid(h->child[i].pid, &status, WNOHANG | WUNTRACED) == h->child[i].pid) {
            if (WIFSTOPPED(status))
                meanwhile(h, i);
            else
                bury(h, i, status);
        }
        alive += h->child[i].pid != 0;
    }
    return alive;
}

static void watch(struct herd *h)
{
    if (mr_now_ns() >= h->m.deadline_ns)
        kill_all(h);
    sim_watch(&h->m);
}

/* An actor stands still at its fault point: a drafter other than it dies, is recovered and comes back; then it goes on, with whatever it
 * had read before. */
static void meanwhile(struct herd *h, unsigned stopped)
{
    unsigned peer = h->m.seg.hdr->n_actors - 1;
    int status;

    h->stops++;
    if (h->child[peer].pid) {
        kill(h->child[peer].pid, SIGKILL);
        waitpid(h->child[peer].pid, &status, 0);
        bury(h, peer, status);
    }
    for (int i = 0; i < 100 && h->child[peer].pid && !mr_ld(&h->m.seg.actors[peer].joined); i++) {
        sim_round(&h->m);
        usleep(500);
    }
    for (int i = 0; i < 10; i++) {
        sim_round(&h->m);
        usleep(500);
    }
    kill(h->child[stopped].pid, SIGCONT);
}

/* `each` is called once a round, may kill. */
static void run_herd(struct herd *h, void (*each)(struct herd *, struct mr_rng *), struct mr_rng *rng)
{
    for (unsigned i = 0; i < h->m.seg.hdr->n_actors; i++)
        spawn(h, i);
    for (;;) {
        int finished = sim_round(&h->m);
        unsigned alive = reap(h);

        if (finished && !alive)
            return;
        if (each)
            each(h, rng);
        watch(h);
        usleep(100);
    }
}

static struct spec kill_spec(int D, int T)
{
    return (struct spec){
        .D = D, .T = T, .accum = 2, .epochs = 3, .rows = 120, .slabs = 2 * D + 2, .ckpt_every = 3, .target_us = 300, .drafter_us = 300, .seed = 5,
    };
}

#endif
