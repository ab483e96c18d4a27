/* Sums of a run: see totals.h. */
#include "runtime/totals.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"

void mr_totals_init(struct mr_totals *t, unsigned steps_total, unsigned items_total)
{
    unsigned w = steps_total / 10;

    memset(t, 0, sizeof *t);
    t->steps_total = steps_total;
    t->items_total = items_total;
    t->window = w < 1 ? 1 : w > MR_RECENT_MAX ? MR_RECENT_MAX : w;
    t->start_ns = mr_now_ns();
}

static void add_loss(struct mr_totals *t, double loss, double weight)
{
    t->loss_last = loss;
    t->weight_last = weight;
    if (!t->has_loss)
        t->loss_first = loss;
    t->has_loss = 1;
}

void mr_totals_add(struct mr_totals *t, const struct mr_step_sums *sums)
{
    unsigned i = t->steps % t->window;

    t->steps++;
    t->items += sums->items;
    t->tokens += sums->tokens;
    t->draft_tokens += sums->draft_tokens;
    t->recent[i].blocks = sums->blocks;
    t->recent[i].accepted = sums->accepted;
    t->recent[i].labels = sums->labels;
    t->recent[i].correct = sums->correct;
    if (sums->weight_sum > 0) /* a step of masked-out blocks has no loss */
        add_loss(t, mr_step_loss(sums), sums->weight_sum);
    if (sums->labels && sums->n_slots) {
        t->n_slots = sums->n_slots;
        memcpy(t->slot, sums->slot, sizeof t->slot);
    }
}

double mr_totals_wall_s(const struct mr_totals *t)
{
    return t->wall_before_s + (double)(mr_now_ns() - t->start_ns) * 1e-9;
}

double mr_totals_accept(const struct mr_totals *t)
{
    uint64_t blocks = 0, accepted = 0;

    for (unsigned i = 0; i < t->window; i++) {
        blocks += t->recent[i].blocks;
        accepted += t->recent[i].accepted;
    }
    return blocks ? 1.0 + (double)accepted / (double)blocks : NAN;
}

double mr_totals_accuracy(const struct mr_totals *t)
{
    uint64_t labels = 0, correct = 0;

    for (unsigned i = 0; i < t->window; i++) {
        labels += t->recent[i].labels;
        correct += t->recent[i].correct;
    }
    return labels ? (double)correct / (double)labels : NAN;
}

double mr_slot_accuracy(const struct mr_slot_sums *slot)
{
    return slot->labels ? (double)slot->correct / (double)slot->labels : NAN;
}

double mr_slot_loss(const struct mr_slot_sums *slot)
{
    return slot->labels ? slot->loss / (double)slot->labels : NAN;
}

/* Three arrays over the positions of a block, the first after the anchor first. */
static void slots_line(FILE *f, const struct mr_step_sums *sums)
{
    fputs(",\"pos_labels\":[", f);
    for (unsigned i = 0; i < sums->n_slots; i++)
        fprintf(f, "%s%llu", i ? "," : "", (unsigned long long)sums->slot[i].labels);
    fputs("],\"pos_correct\":[", f);
    for (unsigned i = 0; i < sums->n_slots; i++)
        fprintf(f, "%s%llu", i ? "," : "", (unsigned long long)sums->slot[i].correct);
    fputs("],\"pos_loss\":[", f);
    for (unsigned i = 0; i < sums->n_slots; i++) {
        double loss = mr_slot_loss(&sums->slot[i]);

        if (isfinite(loss))
            fprintf(f, "%s%.6g", i ? "," : "", loss);
        else
            fprintf(f, "%snull", i ? "," : "");
    }
    fputs("]", f);
}

char *mr_totals_line(const struct mr_totals *t, const struct mr_step_sums *sums, double lr, size_t *n)
{
    char *line = NULL;
    FILE *f = open_memstream(&line, n);

    if (!f)
        return NULL;
    fprintf(f, "{\"step\":%u,\"wall_s\":%.3f,", sums->step, mr_totals_wall_s(t));
    mr_json_number(f, "loss", mr_step_loss(sums));
    fputc(',', f);
    mr_json_number(f, "weight", sums->weight_sum);
    fprintf(f,
            ",\"lr\":%.9g,\"items\":%u,\"tokens\":%llu,\"draft_tokens\":%llu,\"blocks\":%llu,\"accepted\":%llu,\"labels\":%llu,\"correct\":"
            "%llu",
            lr, sums->items, (unsigned long long)sums->tokens, (unsigned long long)sums->draft_tokens, (unsigned long long)sums->blocks,
            (unsigned long long)sums->accepted, (unsigned long long)sums->labels, (unsigned long long)sums->correct);
    if (sums->n_slots)
        slots_line(f, sums);
    fprintf(f, ",\"restarts\":%u,\"recomputed\":%u}\n", t->restarts, t->recomputed);
    if (fclose(f)) {
        free(line);
        return NULL;
    }
    return line;
}

static uint64_t integer(const json_t *line, const char *key)
{
    json_int_t v = json_integer_value(json_object_get(line, key));

    return v > 0 ? (uint64_t)v : 0;
}

static uint64_t integer_at(const json_t *array, size_t i)
{
    json_int_t v = json_integer_value(json_array_get(array, i));

    return v > 0 ? (uint64_t)v : 0;
}

/* A line of a build that did not count by position has none of these. */
static void add_slots(const json_t *line, struct mr_step_sums *s)
{
    const json_t *labels = json_object_get(line, "pos_labels"), *loss = json_object_get(line, "pos_loss");
    size_t n = json_array_size(labels);

    s->n_slots = n < MR_MAX_BLOCK ? (unsigned)n : MR_MAX_BLOCK - 1;
    for (unsigned i = 0; i < s->n_slots; i++) {
        s->slot[i].labels = integer_at(labels, i);
        s->slot[i].correct = integer_at(json_object_get(line, "pos_correct"), i);
        s->slot[i].loss = json_number_value(json_array_get(loss, i)) * (double)s->slot[i].labels;
    }
}

static void add_line(const json_t *line, int kept, void *arg)
{
    struct mr_totals *t = arg;
    struct mr_step_sums s = {
        .items = (unsigned)integer(line, "items"),
        .tokens = integer(line, "tokens"),
        .draft_tokens = integer(line, "draft_tokens"),
        .blocks = integer(line, "blocks"),
        .accepted = integer(line, "accepted"),
        .labels = integer(line, "labels"),
        .correct = integer(line, "correct"),
        .weight_sum = json_number_value(json_object_get(line, "weight")),
    };

    if (!kept)
        return;
    s.loss_sum = json_number_value(json_object_get(line, "loss")) * s.weight_sum;
    add_slots(line, &s);
    mr_totals_add(t, &s);
    t->restarts = (unsigned)integer(line, "restarts");
    t->recomputed = (unsigned)integer(line, "recomputed");
    t->wall_before_s = json_number_value(json_object_get(line, "wall_s"));
}

int mr_totals_resume(struct mr_totals *t, const char *path, unsigned n_steps, struct mr_err *err)
{
    return mr_jsonl_cut(path, n_steps, 0, add_line, t, err);
}

static void number_or_null(json_t *o, const char *key, double x, int known)
{
    json_object_set_new(o, key, known && isfinite(x) ? json_real(x) : json_null());
}

static json_t *summary(const struct mr_totals *t, const char *status, unsigned epochs, const struct mr_checked *c)
{
    const uint64_t *dropped = mr_dataset_dropped(c->data);
    json_t *o = json_object(), *reasons = json_object();
    double wall = mr_totals_wall_s(t), accept = mr_totals_accept(t);

    json_object_set_new(o, "status", json_string(status));
    json_object_set_new(o, "microbatches_total", json_integer(t->items_total));
    json_object_set_new(o, "microbatches_committed", json_integer(t->items));
    json_object_set_new(o, "microbatches_recomputed", json_integer(t->recomputed));
    json_object_set_new(o, "steps", json_integer(t->steps));
    json_object_set_new(o, "epochs", json_integer(epochs));
    json_object_set_new(o, "tokens", json_integer((json_int_t)t->tokens));
    json_object_set_new(o, "draft_tokens", json_integer((json_int_t)t->draft_tokens));
    json_object_set_new(o, "restarts", json_integer(t->restarts));
    number_or_null(o, "loss_first", t->loss_first, t->has_loss);
    number_or_null(o, "loss_last", t->loss_last, t->has_loss);
    number_or_null(o, "accept_proxy", accept, 1);
    json_object_set_new(o, "wall_s", json_real(wall));
    json_object_set_new(o, "tokens_per_s", json_real(wall > 0 ? (double)t->tokens / wall : 0));
    for (int i = 0; i < MR_DROPS; i++)
        json_object_set_new(reasons, mr_drop_name[i], json_integer((json_int_t)dropped[i]));
    json_object_set_new(o, "dropped", reasons);
    return o;
}

int mr_summary_write(const struct mr_totals *t, const char *path, const char *status, unsigned epochs, const struct mr_checked *c,
                     struct mr_err *err)
{
    json_t *o = summary(t, status, epochs, c);
    char *text = NULL;
    size_t n = 0;
    FILE *f = open_memstream(&text, &n);
    int r = f ? json_dumpf(o, f, JSON_INDENT(2) | JSON_PRESERVE_ORDER | JSON_REAL_PRECISION(9)) : -1;

    if (f) {
        fputc('\n', f);
        r |= fclose(f);
    }
    r = r ? mr_err_set(err, MR_EXIT_ENV, "out of memory for summary.json") : mr_write_file(path, text, n, err);
    free(text);
    json_decref(o);
    return r;
}
