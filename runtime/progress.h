/* The progress line: step, loss, rate over the last seconds, time to go, restarts. */
#ifndef MR_RUNTIME_PROGRESS_H
#define MR_RUNTIME_PROGRESS_H

#include "runtime/totals.h"

enum { MR_RATE_SAMPLES = 32 };

/* Rates are taken over the samples of the last ~16 s; a sample is at most one each half second. */
struct mr_progress {
    struct {
        uint64_t ns, tokens;
        unsigned items;
    } at[MR_RATE_SAMPLES];
    unsigned n; /* samples ever taken */
    uint64_t shown_ns;
};

void mr_progress_sample(struct mr_progress *p, const struct mr_totals *t, uint64_t now_ns);
double mr_progress_tokens_per_s(const struct mr_progress *p);                     /* 0 before two samples */
double mr_progress_eta_s(const struct mr_progress *p, const struct mr_totals *t); /* -1 = unknown */
void mr_progress_line(const struct mr_progress *p, const struct mr_totals *t, unsigned restarts, char *out, size_t bytes);

#endif
