/* The progress line: see progress.h. */
#include "runtime/progress.h"

#include <math.h>
#include <stdio.h>

enum { SAMPLE_NS = 500000000 };

void mr_progress_sample(struct mr_progress *p, const struct mr_totals *t, uint64_t now_ns)
{
    unsigned last = (p->n + MR_RATE_SAMPLES - 1) % MR_RATE_SAMPLES, i = p->n % MR_RATE_SAMPLES;

    if (p->n && now_ns - p->at[last].ns < SAMPLE_NS)
        return;
    p->at[i].ns = now_ns;
    p->at[i].tokens = t->tokens;
    p->at[i].items = t->items;
    p->n++;
}

/* Oldest and newest sample; 0 when there are fewer than two. */
static int ends(const struct mr_progress *p, unsigned *old, unsigned *new)
{
    if (p->n < 2)
        return 0;
    *old = p->n <= MR_RATE_SAMPLES ? 0 : p->n % MR_RATE_SAMPLES;
    *new = (p->n - 1) % MR_RATE_SAMPLES;
    return 1;
}

double mr_progress_tokens_per_s(const struct mr_progress *p)
{
    unsigned a, b;

    if (!ends(p, &a, &b))
        return 0;
    return (double)(p->at[b].tokens - p->at[a].tokens) / ((double)(p->at[b].ns - p->at[a].ns) * 1e-9);
}

double mr_progress_eta_s(const struct mr_progress *p, const struct mr_totals *t)
{
    unsigned a, b;

    if (!ends(p, &a, &b) || p->at[b].items == p->at[a].items)
        return -1;
    return (double)(t->items_total - t->items) * ((double)(p->at[b].ns - p->at[a].ns) * 1e-9) / (double)(p->at[b].items - p->at[a].items);
}

static void duration(double s, char *out, size_t bytes)
{
    unsigned long n = s < 0 ? 0 : (unsigned long)(s + 0.5);

    if (s < 0)
        snprintf(out, bytes, "?");
    else if (n >= 3600)
        snprintf(out, bytes, "%luh%02lum", n / 3600, n / 60 % 60);
    else if (n >= 60)
        snprintf(out, bytes, "%lum%02lus", n / 60, n % 60);
    else
        snprintf(out, bytes, "%lus", n);
}

void mr_progress_line(const struct mr_progress *p, const struct mr_totals *t, unsigned restarts, char *out, size_t bytes)
{
    char loss[32] = "-", accept[40] = "", eta[32];
    double a = mr_totals_accept(t);

    if (t->has_loss)
        snprintf(loss, sizeof loss, "%.4f", t->loss_last);
    if (isfinite(a))
        snprintf(accept, sizeof accept, "  accept %.3f", a);
    duration(mr_progress_eta_s(p, t), eta, sizeof eta);
    snprintf(out, bytes, "step %u/%u  loss %s%s  %.0f tokens/s  ETA %s  restarts %u", t->steps, t->steps_total, loss, accept,
             mr_progress_tokens_per_s(p), eta, restarts);
}
