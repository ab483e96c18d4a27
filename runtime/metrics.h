/* GET /metrics in Prometheus text, when /metrics/listen is set.  No thread: libmicrohttpd's own epoll descriptor sits in the event loop. */
#ifndef MR_RUNTIME_METRICS_H
#define MR_RUNTIME_METRICS_H

#include <stdio.h>

#include "ipc/seg.h"
#include "runtime/loop.h"
#include "runtime/progress.h"
#include "runtime/totals.h"

struct mr_metrics_source {
    const struct mr_seg *seg;
    const struct mr_totals *totals;
    const struct mr_progress *progress;
};
struct mr_metrics;

/* Can a run listen there?  Nothing is kept.  0, also for "" and for a port that somebody has now (the run then goes on without /metrics);
 * -1 with err: no address, not one of this machine's, or a port that needs privileges. */
int mr_metrics_probe(const char *listen, struct mr_err *err);
/* `listen` is HOST:PORT, numeric ("127.0.0.1:9464", "[::1]:9464", ":9464" = all).  NULL with err (MR_EXIT_CONFIG or _ENV). */
struct mr_metrics *mr_metrics_open(const char *listen, struct mr_loop *loop, struct mr_metrics_source src, struct mr_err *err);
void mr_metrics_close(struct mr_metrics *m); /* NULL is fine */
void mr_metrics_tick(struct mr_metrics *m);  /* time-outs of connections; NULL is fine */
void mr_metrics_text(const struct mr_metrics_source *src, FILE *f);

#endif
