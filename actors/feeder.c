/* feeder: data set -> plan of an epoch -> .plan -> items in the input ring, in plan order.
 *
 * The plan is a pure function of (seed, epoch, data), so a new incarnation makes it again and goes on at hdr->cursor.  Per microbatch:
 * FILL (the claim carries the plan position) -> tokens, masks, lengths -> cursor past it -> QUEUED.  Recovery publishes a FILLING item
 * behind the cursor and frees one that is not; so the cursor moves only when the payload is complete.
 *
 * When may epoch e be sealed?  Its half of .plan and its ready rings are those of epoch e-2.  They are free when ledger lines of ALL
 * steps of e-2 are on disk: ledger_done >= first_step(e-1).  That condition suffices:
 *   - the supervisor reads sample ids only of lines it has not written yet;
 *   - a drafter reads place buckets only in COLLECT or REPAIR of a step, and that step cannot be committed without this drafter's own
 *     reduced bit, which it sets after it has stopped reading; line s exists only after the commit of s;
 *   - a committed step has no item left in a ready ring, so no cell of e-2 can be taken for one of e.
 * It is necessary for the first point.  It also keeps the feeder at most one epoch ahead of the step word.
 *
 * Resume: drafters take any ready item of a bucket, so what is committed is not a prefix of the plan.  The positions in ledger lines of
 * steps < first_step are marked in the plan and skipped.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "actors/actors.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/point.h"
#include "ipc/atomic.h"
#include "ipc/item.h"
#include "ipc/step.h"

struct feeder {
    struct mr_env *env;
    struct mr_plan plan;
    unsigned epoch;              /* of `plan` */
    unsigned first_pos, end_pos; /* plan positions of this epoch that the run publishes */
};

/* ---- resume: what the ledger has ------------------------------------------------------------------------------------------ */

/* Marks the items of one line that belong to this epoch.  1 = the line is of a step that is done again: no later line counts. */
static int mark_line(struct feeder *f, const char *line, size_t n, struct mr_err *err)
{
    json_t *root = json_loadb(line, n, 0, NULL), *item;
    json_t *step = json_object_get(root, "step"), *items = json_object_get(root, "items");
    int past = json_integer_value(step) >= f->env->hdr->first_step;
    size_t i;

    if (!json_is_integer(step) || !json_is_array(items)) {
        json_decref(root);
        return mr_err_set(err, MR_EXIT_CONFIG, "not a ledger line: \"step\" must be an integer and \"items\" an array; this run cannot be resumed");
    }
    if (!past)
        json_array_foreach(items, i, item) {
            json_int_t pos = json_integer_value(json_object_get(item, "item"));

            if (pos >= f->first_pos && pos < (json_int_t)f->first_pos + f->plan.n)
                f->plan.entry[pos - f->first_pos].committed = 1;
        }
    json_decref(root);
    return past;
}

/* The supervisor has cut the ledger to lines < first_step before we were started, and appends while we read: lines ascend, so the first
 * one at or past first_step ends the reading before any line that may be half-written. */
static int mark_committed(struct feeder *f, struct mr_err *err)
{
    char path[MR_PATH + 32], *line = NULL;
    size_t cap = 0;
    unsigned no = 0;
    ssize_t n;
    int rc = 0;
    FILE *in;

    if (!f->env->hdr->first_step)
        return 0;
    snprintf(path, sizeof(path), "%s/ledger.jsonl", f->env->topo->run.dir);
    in = fopen(path, "re");
    if (!in)
        return mr_err_set(err, MR_EXIT_FAILED, "%s: %s; a run that resumes at step %u needs the ledger of the steps before", path,
                          strerror(errno), f->env->hdr->first_step);
    while (!rc && no < f->env->hdr->first_step && (n = getline(&line, &cap, in)) > 0) {
        no++;
        rc = mark_line(f, line, (size_t)n, err);
    }
    if (rc < 0)
        mr_err_prefix(err, "%s:%u", path, no);
    free(line);
    fclose(in);
    return rc < 0 ? -1 : 0;
}

/* ---- the plan of an epoch --------------------------------------------------------------------------------------------------- */

static int plan_matches(const struct feeder *f, struct mr_err *err)
{
    const struct mr_env *e = f->env;
    unsigned want = e->seg->epochs[f->epoch + 1].first_pos - f->first_pos;

    if (f->plan.n < want || (f->plan.n > want && f->epoch + 1 < e->hdr->n_epochs))
        return mr_err_set(err, MR_EXIT_FAILED,
                          "%s: the plan of epoch %u has %u microbatches, but this run was started with %u; the data set has changed since: "
                          "bring the old one back, or start a new run", e->topo->data.train, f->epoch, f->plan.n, want);
    if (f->plan.n > e->hdr->plan_entries_max || f->plan.n_samples > e->hdr->plan_samples_max)
        return mr_err_set(err, MR_EXIT_FAILED,
                          "%s: the plan of epoch %u (%u microbatches, %" PRIu64 " samples) does not fit the segment (%u, %" PRIu64 ")",
                          e->topo->data.train, f->epoch, f->plan.n, f->plan.n_samples, e->hdr->plan_entries_max, e->hdr->plan_samples_max);
    return 0;
}

static int make_plan(struct feeder *f, unsigned epoch, struct mr_err *err)
{
    const struct mr_env *e = f->env;
    unsigned end = e->seg->epochs[epoch + 1].first_pos;

    mr_plan_free(&f->plan);
    memset(&f->plan, 0, sizeof(f->plan));
    f->epoch = epoch;
    f->first_pos = e->seg->epochs[epoch].first_pos;
    f->end_pos = end < e->hdr->microbatches_total ? end : e->hdr->microbatches_total;
    if (mr_plan_make(&f->plan, e->checked->data, &e->checked->plan_opts, epoch, err))
        return -1;
    return plan_matches(f, err) || mark_committed(f, err) ? -1 : 0;
}

/* Writes the plan into its half of .plan, unless a former incarnation has sealed it already (readers may be using it).  A half-written
 * one has no seal: ours is the only writer, so it is simply written again. */
static void seal(struct feeder *f)
{
    struct mr_env *e = f->env;
    struct mr_plan_view v = mr_plan_at(e->seg, f->epoch);

    if (mr_ld(&v.hdr->epoch) != f->epoch + 1u) {
        mr_st(&v.hdr->epoch, 0);
        MR_POINT("feeder.plan.open");
        memcpy(v.entry, f->plan.entry, f->plan.n * sizeof(*v.entry));
        memcpy(v.sample, f->plan.sample, f->plan.n_samples * sizeof(*v.sample));
        v.hdr->n_entries = f->plan.n;
        v.hdr->n_samples = f->plan.n_samples;
        MR_POINT("feeder.plan.written");
        mr_st(&v.hdr->epoch, f->epoch + 1u);
    }
    MR_POINT("feeder.plan.sealed");
    if (mr_ld(&e->hdr->plan_epochs) < f->epoch + 1u)
        mr_st(&e->hdr->plan_epochs, f->epoch + 1u);
    mr_evc_bump(&e->hdr->evc[MR_DRAFTER]);
    mr_env_notify(e);
}

/* See the head of this file. */
static int may_seal(const struct mr_env *e, unsigned epoch)
{
    return epoch < 2 || mr_ld(&e->hdr->ledger_done) >= e->seg->epochs[epoch - 1].first_step;
}

/* ---- one microbatch --------------------------------------------------------------------------------------------------------- */

static void write_payload(struct feeder *f, unsigned idx, const struct mr_plan_entry *p)
{
    struct mr_tok tok = mr_tok_at(f->env->seg, idx);
    struct mr_item *it = &f->env->seg->items[idx];
    int at = 0;

    for (unsigned i = 0; i < p->n_seqs; i++) {
        uint32_t id = f->plan.sample[p->first_sample + i];
        struct mr_row row = mr_dataset_row(f->env->checked->data, id);

        memcpy(tok.ids + at, row.ids, (size_t)row.n * sizeof(*tok.ids));
        memcpy(tok.mask + at, row.mask, (size_t)row.n);
        tok.sample[i] = id;
        tok.cu[i] = at;
        at += row.n;
    }
    tok.cu[p->n_seqs] = at;
    MR_ASSERT((uint32_t)at == p->n_tokens);
    it->bucket = p->bucket;
    it->epoch = f->epoch;
    it->n_seqs = p->n_seqs;
    it->n_tokens = p->n_tokens;
    it->extractions = 0;
}

static int publish(struct feeder *f, unsigned pos, unsigned idx, uint64_t word)
{
    struct mr_env *e = f->env;
    const struct mr_plan_entry *p = &f->plan.entry[pos - f->first_pos];
    uint64_t t0 = mr_now_ns();
    int rc;

    write_payload(f, idx, p);
    MR_POINT("feeder.payload.written");
    mr_st(&e->hdr->cursor, pos + 1);
    MR_POINT("feeder.cursor.moved");
    rc = mr_item_queue(e->seg, idx, &word);
    if (rc)
        return mr_env_lost(e, "FILLING to QUEUED", pos, rc);
    MR_POINT("feeder.item.queued");
    mr_env_worked(e, t0, 1, p->n_tokens, 0);
    return MR_GO_ON;
}

/* ---- loop ------------------------------------------------------------------------------------------------------------------- */

/* Publishes the next position of the epoch in hand. */
static int turn(struct feeder *f)
{
    struct mr_env *e = f->env;
    uint32_t seq = mr_evc_read(e->evc);
    int rc = mr_env_check(e, 1), idx;
    unsigned pos = (unsigned)mr_ld(&e->hdr->cursor);
    uint64_t word;

    if (rc != MR_GO_ON)
        return rc;
    if (f->plan.entry[pos - f->first_pos].committed) {
        mr_st(&e->hdr->cursor, pos + 1);
        MR_POINT("feeder.committed.skipped");
        return MR_GO_ON;
    }
    idx = mr_item_fill(e->seg, e->slot, e->inc, pos, &word);
    if (idx < 0) {
        mr_env_wait(e, seq, MR_WAIT_ITEM);
        return MR_GO_ON;
    }
    MR_POINT("feeder.item.claimed");
    mr_env_claimed(e);
    return publish(f, pos, (unsigned)idx, word);
}

static int feed_epoch(struct feeder *f, unsigned epoch)
{
    struct mr_err err = {0};
    int rc;

    if (make_plan(f, epoch, &err))
        return mr_env_fail(f->env, &err);
    for (;;) {
        uint32_t seq = mr_evc_read(f->env->evc);

        rc = mr_env_check(f->env, 1);
        if (rc != MR_GO_ON)
            return rc;
        if (may_seal(f->env, epoch))
            break;
        mr_env_wait(f->env, seq, MR_WAIT_EPOCH);
    }
    if (mr_ld(&f->env->hdr->cursor) < f->first_pos)       /* resume: whole epochs before this one are committed */
        mr_st(&f->env->hdr->cursor, f->first_pos);
    seal(f);
    while (rc == MR_GO_ON && mr_ld(&f->env->hdr->cursor) < f->end_pos)
        rc = turn(f);
    return rc;
}

/* Epoch to go on with: that of the cursor, but never before the one that a resumed run is in; n_epochs = nothing is left to publish. */
static unsigned first_epoch(const struct mr_env *e)
{
    unsigned n = e->hdr->n_epochs, epoch = 0;
    uint64_t cursor = mr_ld(&e->hdr->cursor);

    while (epoch < n && (e->seg->epochs[epoch + 1].first_pos <= cursor || e->seg->epochs[epoch + 1].first_step <= e->hdr->first_step))
        epoch++;
    return epoch;
}

static int wait_for_the_end(struct mr_env *e)
{
    for (;;) {
        uint32_t seq = mr_evc_read(e->evc);
        int rc = mr_env_check(e, 1);

        if (rc != MR_GO_ON)
            return rc;
        mr_env_wait(e, seq, MR_WAIT_END);
    }
}

int mr_actor_feeder(struct mr_env *e)
{
    struct feeder f = {.env = e};
    int rc = MR_GO_ON;

    mr_env_running(e);
    for (unsigned epoch = first_epoch(e); rc == MR_GO_ON && epoch < e->hdr->n_epochs; epoch++) {
        if (e->seg->epochs[epoch].first_pos >= e->hdr->microbatches_total)
            break;                               /* max_steps ends the run before this epoch */
        rc = feed_epoch(&f, epoch);
    }
    if (rc == MR_GO_ON)
        rc = wait_for_the_end(e);
    mr_plan_free(&f.plan);
    return mr_env_leave(e, rc);
}
