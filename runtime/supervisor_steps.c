/* Committed steps: ledger lines, `latest`, the end of the run.  The only writer of ledger.jsonl.
 *
 * Order, so that a death of the supervisor between any two of them loses nothing: steps.jsonl, ledger line, ledger_done; checkpoint N
 * complete and lines < N written, both files on disk, `latest`, ckpt_latest; FINISHED only after the last of all these.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/point.h"
#include "data/schedule.h"
#include "ipc/atomic.h"
#include "ipc/recover.h"
#include "ipc/step.h"
#include "ipc/wait.h"
#include "runtime/supervisor_pvt.h"

#define DISK_WARN_NS 10000000000u

enum { FIXED_SCALARS = 7, SLOT_SCALARS = 18, TAG_BYTES = 24 };
_Static_assert(MR_MAX_BLOCK <= 256, "two scalars for each of positions 1, 2, 4 ... 128 and 255");
_Static_assert(FIXED_SCALARS + SLOT_SCALARS <= MR_TB_SCALARS, "one event a step");

/* Steps whose commit can no longer be undone: those before the step in the word, and that one too once it is COMMITTED. */
static unsigned committed_steps(const struct mr_sup *sup)
{
    uint64_t w = mr_step_read(&sup->seg);

    return mr_sw_step(w) + (mr_sw_phase(w) == MR_COMMITTED);
}

/* A write that failed: training waits for the line (drafters stand in COMMITTED), so say so now and then, and try again at the next tick.
 */
static void disk_trouble(struct mr_sup *sup, const char *what, int r)
{
    uint64_t now = mr_now_ns();

    if (sup->disk_warn_ns && now - sup->disk_warn_ns < DISK_WARN_NS)
        return;
    sup->disk_warn_ns = now;
    mr_runlog(&sup->log, MR_LOG_WARN, "supervisor", "%s in %s cannot be written: %s; the run waits and tries again", what,
              sup->o->dir->path, strerror(-r));
}

static double rate_at(const struct mr_sup *sup, unsigned step)
{
    const struct mr_topology *t = sup->o->topo;

    return mr_lr_at(t->train.lr, t->train.warmup_ratio, t->train.constant_lr, step, sup->seg.hdr->steps_total);
}

static unsigned next_position(unsigned k, unsigned last)
{
    return 2 * k <= last || k == last ? 2 * k : last;
}

/* TensorBoard gets positions 1, 2, 4, 8, ... and the last one: a curve for each of fifteen would be most of the file.  steps.jsonl has all.
 * Returns the number of scalars; their tags are in `tag`. */
static int slot_scalars(const struct mr_step_sums *sums, struct mr_tb_scalar *v, char tag[][TAG_BYTES])
{
    int n = 0;

    for (unsigned k = 1; k <= sums->n_slots; k = next_position(k, sums->n_slots)) {
        const struct mr_slot_sums *at = &sums->slot[k - 1];

        if (!at->labels)
            continue;
        snprintf(tag[n], TAG_BYTES, "train/pos_acc/%u", k);
        snprintf(tag[n + 1], TAG_BYTES, "train/pos_loss/%u", k);
        v[n] = (struct mr_tb_scalar){tag[n], mr_slot_accuracy(at)};
        v[n + 1] = (struct mr_tb_scalar){tag[n + 1], mr_slot_loss(at)};
        n += 2;
    }
    return n;
}

static void write_scalars(struct mr_sup *sup, const struct mr_step_sums *sums)
{
    char tag[SLOT_SCALARS][TAG_BYTES];
    struct mr_tb_scalar v[FIXED_SCALARS + SLOT_SCALARS] = {
        {"train/loss", mr_step_loss(sums)},
        {"train/accept_proxy", sums->blocks ? 1.0 + (double)sums->accepted / (double)sums->blocks : 1.0},
        {"train/accuracy", sums->labels ? (double)sums->correct / (double)sums->labels : 0.0},
        {"train/lr", rate_at(sup, sums->step)},
        {"train/weight", sums->weight_sum},
        {"perf/tokens_per_s", mr_progress_tokens_per_s(&sup->progress)},
        {"perf/restarts", sup->totals.restarts},
    };
    int n = FIXED_SCALARS + slot_scalars(sums, v + FIXED_SCALARS, tag);

    if (mr_tb_write(&sup->tb, sums->step, v, n))
        sup->log.lost++; /* metrics never stop a run */
}

/* steps.jsonl before the ledger: a ledger line then always has its sums.  A line whose ledger line failed is written again; resume takes
 * the cut. */
static int write_step(struct mr_sup *sup, unsigned step)
{
    struct mr_totals before = sup->totals;
    struct mr_step_sums sums;
    char *line, *stats = NULL;
    size_t n, n_stats = 0;
    uint64_t stats_at = sup->steps.bytes;
    int r = mr_ledger_line(&sup->seg, step, &line, &n, &sums);

    if (r)
        return r;
    mr_totals_add(&sup->totals, &sums);
    stats = mr_totals_line(&sup->totals, &sums, rate_at(sup, step), &n_stats);
    r = stats ? mr_jsonl_append(&sup->steps, stats, n_stats) : -ENOMEM;
    if (r == 0) {
        r = mr_jsonl_append(&sup->ledger, line, n);
        if (r)
            mr_jsonl_truncate(&sup->steps, stats_at);
    }
    free(stats);
    free(line);
    if (r) {
        sup->totals = before;
        return r;
    }
    MR_POINT("sup.ledger.written");
    mr_st(&sup->seg.hdr->tokens_done, mr_ld(&sup->seg.hdr->tokens_done) + sums.tokens);
    mr_st(&sup->seg.hdr->draft_tokens_done, mr_ld(&sup->seg.hdr->draft_tokens_done) + sums.draft_tokens);
    write_scalars(sup, &sums);
    return 0;
}

static void write_ledger(struct mr_sup *sup)
{
    struct mr_shm_header *hdr = sup->seg.hdr;
    unsigned done = (unsigned)mr_ld(&hdr->ledger_done), end = committed_steps(sup);
    int r = 0, moved = 0;

    while (done < end && (r = write_step(sup, done)) == 0) {
        mr_st(&hdr->ledger_done, ++done);
        MR_POINT("sup.ledger.done");
        moved = 1;
    }
    if (moved) {
        sup->disk_warn_ns = 0;
        mr_evc_bump(&hdr->evc[MR_DRAFTER]); /* REDUCE of the next step may start */
        mr_evc_bump(&hdr->evc[MR_FEEDER]);  /* an epoch may be sealed */
    }
    if (r == -ESTALE)
        mr_sup_fail(sup, MR_EXIT_FAILED, "failed",
                    "step %u: its records or its plan are gone from shared memory before the ledger line was written; "
                    "this is a defect of millrace. --resume goes on from the last checkpoint",
                    done);
    else if (r)
        disk_trouble(sup, "ledger.jsonl", r);
}

/* Both files are on disk, and still there. */
static int sync_lines(struct mr_sup *sup)
{
    const char *name = "metrics/steps.jsonl";
    int r = mr_jsonl_sync(&sup->steps);

    if (r == 0) {
        name = "ledger.jsonl";
        r = mr_jsonl_sync(&sup->ledger);
    }
    if (r == -ENOLINK)
        mr_sup_fail(sup, MR_EXIT_FAILED, "failed",
                    "%s/%s was removed while the run wrote it: its lines are lost, and no checkpoint can be resumed without them; "
                    "start again, with a new run.dir",
                    sup->o->dir->path, name);
    return r;
}

/* Checkpoint N is complete: make it `latest`, once the ledger has all lines < N. */
static void publish_checkpoint(struct mr_sup *sup)
{
    struct mr_shm_header *hdr = sup->seg.hdr;
    uint64_t word = mr_ld(&hdr->ckpt);
    unsigned n = mr_pw_step(word);
    int r;

    if (mr_pw_state(word) != MR_CKPT_IDLE || n <= mr_ld(&hdr->ckpt_latest) || mr_ld(&hdr->ledger_done) < n)
        return;
    r = sync_lines(sup);
    if (r == -ENOLINK)
        return;
    if (r == 0) {
        MR_POINT("sup.ledger.synced");
        r = mr_rundir_set_latest(sup->o->dir, n);
    }
    if (r == -ENOENT) {
        mr_sup_fail(sup, MR_EXIT_FAILED, "failed",
                    "checkpoints/step-%u is not there though its copier said that it is complete; --resume goes on from the "
                    "checkpoint before",
                    n);
        return;
    }
    if (r) {
        disk_trouble(sup, "latest", r);
        return;
    }
    MR_POINT("sup.latest.switched");
    mr_st(&hdr->ckpt_latest, n);
    mr_runlog(&sup->log, MR_LOG_INFO, "supervisor", "checkpoint %u is complete: latest -> checkpoints/step-%u", n, n);
    mr_rundir_prune(sup->o->dir, n, sup->o->topo->train.keep_checkpoints);
    mr_evc_bump_all(&sup->seg);
}

/* All applied, written and saved?  Then the sentinel. */
static void finish(struct mr_sup *sup)
{
    struct mr_shm_header *hdr = sup->seg.hdr;
    uint64_t w = mr_step_read(&sup->seg);
    unsigned step = mr_sw_step(w), phase = mr_sw_phase(w);

    if (!(phase == MR_HALT || (phase == MR_COLLECT && step == hdr->steps_total)))
        return;
    if (mr_ld(&hdr->ledger_done) != step || mr_ld(&hdr->ckpt_latest) != step)
        return;
    MR_POINT("sup.finish.begin");
    if (mr_step_finish(&sup->seg, w))
        return; /* a recovery moved the word: look again */
    MR_POINT("sup.finish.done");
    sup->state = MR_SUP_ENDING;
    sup->ending_ns = mr_now_ns();
    sup->status = step == hdr->steps_total ? "completed" : "stopped";
    mr_evc_bump_all(&sup->seg);
}

void mr_sup_advance(struct mr_sup *sup)
{
    struct mr_shm_header *hdr = sup->seg.hdr;

    if (sup->state != MR_SUP_RUNNING)
        return;
    if (mr_ld(&hdr->fatal)) {
        mr_sup_fail(sup, MR_EXIT_FAILED, "failed",
                    "a counter in shared memory is at its maximum (publications of a microbatch, or collective epochs: too "
                    "many restarts); --resume starts them anew from the last checkpoint");
        return;
    }
    if (mr_ld(&hdr->sweep)) {
        mr_recover_rings(&sup->seg); /* clears the flag, in the one way that loses no hint */
        mr_evc_bump_all(&sup->seg);
    }
    write_ledger(sup);
    if (sup->state == MR_SUP_RUNNING)
        publish_checkpoint(sup);
    if (sup->state == MR_SUP_RUNNING)
        finish(sup);
}
