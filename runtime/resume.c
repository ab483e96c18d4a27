/* Resume: `latest` says where to go on, and everything else is cut to match (docs/design.md 6.3).
 *
 * Checkpoint N holds the effect of steps < N.  So the ledger keeps the lines of those steps, checkpoints newer than N are removed (their
 * steps will be done again), and the feeder publishes every microbatch that is in no kept line.
 *
 * Slabs: drafters may have committed microbatches ahead of the plan (they take any ready one of a bucket).  x of them at or after the
 * first position of step N+1 mean that up to x slabs can be held by microbatches which step N does not want: M + x slabs are needed.
 */
#include <string.h>

#include "base/point.h"
#include "data/safetensors.h"
#include "runtime/ledger.h"
#include "runtime/prepare.h"

static unsigned first_pos_after(const struct mr_prepared *p, unsigned step)
{
    struct mr_shm_plan at;
    struct mr_topology t = p->topo;

    /* The planner knows how many microbatches lie before a step: ask it for a run that ends there. */
    t.train.max_steps = (int)step + 1;
    mr_shm_plan_make(&at, &p->checked, &t, 0);
    return at.seg.microbatches_total;
}

static int check_slabs(const struct mr_prepared *p, unsigned step, const struct mr_ledger_cut *cut, struct mr_err *err)
{
    unsigned first = first_pos_after(p, step), ahead = 0, places = (unsigned)mr_topo_places(&p->topo);

    for (unsigned pos = first; pos < cut->n_pos; pos++)
        ahead += cut->committed[pos];
    if ((unsigned)p->checked.n_slabs >= places + ahead)
        return 0;
    return mr_err_set(err, MR_EXIT_CONFIG,
                      "/queue/slabs_per_device: --resume at step %u needs %u slabs: %u for a step and %u for microbatches that were "
                      "committed ahead of the "
                      "plan; the topology gives %d. Raise it at least to what the run had before",
                      step, places + ahead, places, ahead, p->checked.n_slabs);
}

/* The drafters read it minutes later, each for itself; a cut or foreign file is named here, before any of them is started. */
static int check_trainer(const struct mr_rundir *d, const struct mr_prepared *p, struct mr_err *err)
{
    char path[MR_PATH + 64];
    struct mr_st st;
    int n;

    if (mr_st_open(&st, mr_rundir_file(d, "latest/trainer.safetensors", path), err))
        return mr_rundir_damaged(d, err);
    n = st.n;
    mr_st_close(&st);
    if (n == 3 * p->checked.layout.n)
        return 0;
    return mr_err_set(err, MR_EXIT_CONFIG, "--resume: %s has %d tensors; the drafter's weights and moments are %d: it belongs to another run",
                      path, n, 3 * p->checked.layout.n);
}

int mr_resume(struct mr_resume *r, const struct mr_rundir *d, const struct mr_prepared *p, struct mr_err *err)
{
    char path[MR_PATH + 64];
    struct mr_ledger_cut cut;
    int bad;

    memset(r, 0, sizeof *r);
    if (mr_rundir_check_identity(d, &p->topo, &p->checked, err) || mr_rundir_resume_step(d, &r->first_step, err))
        return -1;
    if (r->first_step >= p->shm.seg.steps_total) {
        r->complete = 1;
        return 0;
    }
    if (r->first_step && check_trainer(d, p, err))
        return -1;
    MR_POINT("sup.resume.before_cut");
    bad = mr_ledger_cut(mr_rundir_file(d, "ledger.jsonl", path), r->first_step, p->shm.seg.microbatches_total, &cut, err);
    if (!bad)
        bad = check_slabs(p, r->first_step, &cut, err);
    r->recomputed = cut.dropped_items;
    mr_ledger_cut_free(&cut);
    if (!bad)
        mr_rundir_drop_unpublished(d, r->first_step);
    return bad;
}
