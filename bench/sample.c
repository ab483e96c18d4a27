/* Looking at a live run through a read-only mapping: see sample.h.  Every read is one aligned load; nothing is locked or stopped. */
#include "bench/sample.h"

#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "ipc/atomic.h"
#include "ipc/step.h"

/* Relaxed: metrics.  A sleep in progress is not in wait_ns yet; it is counted when it ends, after MR_PARK_MS at most. */
static void look_actor(const struct mr_actor_row *row, struct mr_bench_actor *a)
{
    for (int i = 0; i < MR_WAIT_REASONS; i++)
        a->wait_ns[i] = mr_ld_relaxed(&row->wait_ns[i]);
    a->busy_ns = mr_ld_relaxed(&row->busy_ns);
    a->items = mr_ld_relaxed(&row->items);
    a->tokens = mr_ld_relaxed(&row->tokens);
    a->draft_tokens = mr_ld_relaxed(&row->draft_tokens);
    a->restarts = mr_ld_relaxed(&row->restarts);
}

void mr_bench_look(const struct mr_seg *s, struct mr_bench_look *look)
{
    uint64_t word = mr_step_read(s);

    memset(look, 0, sizeof *look);
    look->at_ns = mr_now_ns();
    look->step = mr_sw_step(word);
    look->committed = mr_committed_at(s, look->step);
    look->tokens_done = mr_ld(&s->hdr->tokens_done);
    look->draft_tokens_done = mr_ld(&s->hdr->draft_tokens_done);
    for (unsigned i = 0; i < s->hdr->n_actors; i++)
        look_actor(&s->actors[i], &look->actor[i]);
}

struct found {
    char name[MR_NAME_MAX], all[512];
    int n;
};

static void count_live(const char *run, int alive, void *arg)
{
    struct found *f = arg;
    size_t used = strlen(f->all);

    if (alive != 1)
        return;
    f->n++;
    snprintf(f->name, sizeof f->name, "%s", run);
    snprintf(f->all + used, sizeof f->all - used, "%s%s", used ? ", " : "", run);
}

int mr_bench_find(const char *name, char run[MR_NAME_MAX], struct mr_err *err)
{
    struct found f = {0};

    if (name) {
        snprintf(run, MR_NAME_MAX, "%s", name);
        return 0;
    }
    mr_seg_each(count_live, &f);
    if (f.n == 0)
        return mr_err_set(err, MR_EXIT_CONFIG, "no run is live on this machine: start one with `millrace run`, then attach");
    if (f.n > 1)
        return mr_err_set(err, MR_EXIT_CONFIG, "%d runs are live (%s): name one", f.n, f.all);
    snprintf(run, MR_NAME_MAX, "%s", f.name);
    return 0;
}
