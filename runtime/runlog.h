/* What a run says: log.jsonl for everything, the terminal for what a person should see, and the status line that both must not tear.
 *
 * log.jsonl: one object a line, {"t": unix seconds, "level": "info", "actor": "drafter/1", "msg": "..."}.  A full disk or a closed terminal
 * never stops training: failed writes are counted and forgotten. */
#ifndef MR_RUNTIME_RUNLOG_H
#define MR_RUNTIME_RUNLOG_H

#include <stdarg.h>
#include <stdio.h>

#include "base/err.h"
#include "base/log.h"

struct mr_runlog {
    int fd;             /* log.jsonl; -1 = not open (messages still reach the terminal) */
    int tty;            /* stdout is a terminal: the status line is redrawn in place */
    int line_shown;     /* a status line stands on the terminal now */
    unsigned long lost; /* lines that could not be written */
};

int mr_runlog_open(struct mr_runlog *l, const char *path, struct mr_err *err);
void mr_runlog_close(struct mr_runlog *l);
/* To log.jsonl; level WARN and ERROR also to stderr as "actor: msg".  actor may be "supervisor". */
void mr_runlog_write(struct mr_runlog *l, enum mr_level level, const char *actor, const char *msg);
void mr_runlog(struct mr_runlog *l, enum mr_level level, const char *actor, const char *fmt, ...) __attribute__((format(printf, 4, 5)));
/* Also to the terminal at level INFO: what a user waits to read. */
void mr_runlog_say(struct mr_runlog *l, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* Replaces the status line (terminal), or prints it as a line of its own. */
void mr_runlog_status(struct mr_runlog *l, const char *line);
/* Ends the status line, so that what follows starts on a fresh line. */
void mr_runlog_end_status(struct mr_runlog *l);

#endif
