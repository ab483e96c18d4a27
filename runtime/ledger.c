/* Ledger lines: see ledger.h.
 *
 * {"step":0,"epoch":0,"loss":6.2,"weight":812,"items":[{"item":3,"bucket":1,"drafter":0,"tokens":1600,"samples":[17,4]},...]}
 *
 * Items ascend by plan position: the line does not depend on which place was filled first.  "bucket" is the index in /data/buckets.
 */
#include "runtime/ledger.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/atomic.h"

static int by_pos(const void *a, const void *b)
{
    const struct mr_record *x = *(const struct mr_record *const *)a, *y = *(const struct mr_record *const *)b;

    return x->pos < y->pos ? -1 : x->pos > y->pos;
}

double mr_step_loss(const struct mr_step_sums *sums)
{
    return sums->weight_sum > 0 ? sums->loss_sum / sums->weight_sum : NAN;
}

void mr_json_number(FILE *f, const char *key, double x)
{
    if (isfinite(x))
        fprintf(f, "\"%s\":%.9g", key, x);
    else
        fprintf(f, "\"%s\":null", key);
}

static void add(struct mr_step_sums *sums, const struct mr_record *r, const struct mr_slot_sums *slot)
{
    sums->items++;
    sums->tokens += r->tokens;
    sums->draft_tokens += r->draft_tokens;
    sums->blocks += r->blocks;
    sums->accepted += r->accepted;
    sums->labels += r->labels;
    sums->correct += r->correct;
    sums->loss_sum += r->loss_sum;
    sums->weight_sum += r->weight_sum;
    for (unsigned i = 0; i < sums->n_slots; i++) {
        sums->slot[i].labels += slot[i].labels;
        sums->slot[i].correct += slot[i].correct;
        sums->slot[i].loss += slot[i].loss;
    }
}

static int write_item(FILE *f, const struct mr_plan_view *plan, unsigned first_pos, unsigned entries, const struct mr_record *r)
{
    const struct mr_plan_entry *e;

    if (r->pos < first_pos || r->pos - first_pos >= entries)
        return -ESTALE;
    e = &plan->entry[r->pos - first_pos];
    fprintf(f, "{\"item\":%u,\"bucket\":%u,\"drafter\":%u,\"tokens\":%u,\"samples\":[", r->pos, r->bucket, r->drafter, r->tokens);
    for (uint32_t i = 0; i < e->n_seqs; i++)
        fprintf(f, "%s%u", i ? "," : "", plan->sample[e->first_sample + i]);
    fputs("]}", f);
    return 0;
}

static int write_line(FILE *f, const struct mr_seg *s, const struct mr_record **rec, unsigned m, const struct mr_step_sums *sums)
{
    struct mr_plan_view plan = mr_plan_at(s, sums->epoch);
    int r = mr_ld(&plan.hdr->epoch) == (uint64_t)sums->epoch + 1 ? 0 : -ESTALE;

    fprintf(f, "{\"step\":%u,\"epoch\":%u,", sums->step, sums->epoch);
    mr_json_number(f, "loss", mr_step_loss(sums));
    fputc(',', f);
    mr_json_number(f, "weight", sums->weight_sum);
    fputs(",\"items\":[", f);
    for (unsigned k = 0; r == 0 && k < m; k++) {
        if (k)
            fputc(',', f);
        r = write_item(f, &plan, s->epochs[sums->epoch].first_pos, plan.hdr->n_entries, rec[k]);
    }
    fputs("]}\n", f);
    return r;
}

int mr_ledger_line(const struct mr_seg *s, unsigned step, char **line, size_t *n, struct mr_step_sums *sums)
{
    unsigned m = mr_step_places(s, step);
    const struct mr_record **rec = calloc(m ? m : 1, sizeof *rec);
    FILE *f;
    int r;

    *line = NULL;
    *sums = (struct mr_step_sums){.step = step, .epoch = mr_epoch_of_step(s, step), .n_slots = s->hdr->block_slots};
    f = open_memstream(line, n);
    if (!rec || !f) {
        free(rec);
        if (f)
            fclose(f);
        free(*line);
        return -ENOMEM;
    }
    for (unsigned k = 0; k < m; k++)
        rec[k] = mr_record(s, step, k);
    qsort(rec, m, sizeof *rec, by_pos);
    for (unsigned k = 0; k < m; k++) /* in plan order: floating-point sums do not depend on who was faster */
        add(sums, rec[k], mr_slot_sums_at(s, step, (unsigned)(rec[k] - mr_record(s, step, 0))));
    r = write_line(f, s, rec, m, sums);
    free(rec);
    if (fclose(f) && r == 0)
        r = -ENOMEM;
    if (r) {
        free(*line);
        *line = NULL;
    }
    return r;
}

static void count_line(const json_t *line, int kept, void *arg)
{
    struct mr_ledger_cut *c = arg;
    json_t *items = json_object_get(line, "items"), *item;
    size_t i;

    if (!kept)
        c->dropped_lines++;
    json_array_foreach(items, i, item)
    {
        json_int_t pos = json_integer_value(json_object_get(item, "item"));

        if (!kept) {
            c->dropped_items++;
            continue;
        }
        c->items++;
        if (pos < 0 || pos >= (json_int_t)c->n_pos)
            continue;
        if (c->committed[pos])
            c->duplicate = (int)pos;
        c->committed[pos] = 1;
    }
}

int mr_ledger_cut(const char *path, unsigned n_steps, unsigned n_pos, struct mr_ledger_cut *c, struct mr_err *err)
{
    *c = (struct mr_ledger_cut){.n_pos = n_pos, .duplicate = -1};
    c->committed = calloc(n_pos ? n_pos : 1, 1);
    if (!c->committed)
        return mr_err_set(err, MR_EXIT_ENV, "out of memory for %u plan positions", n_pos);
    if (mr_jsonl_cut(path, n_steps, 0, count_line, c, err))
        return -1;
    if (c->duplicate >= 0)
        return mr_err_set(err, MR_EXIT_CONFIG, "%s: microbatch %d is in two steps: the file is damaged; start a new run.dir",
                          mr_err_path(path, 200), c->duplicate);
    return 0;
}

void mr_ledger_cut_free(struct mr_ledger_cut *c)
{
    free(c->committed);
    c->committed = NULL;
}
