/* One line of log, to stderr, from any thread or process.
 *
 * A line is written with ONE write(2), so that lines of several processes do not mix in a pipe (up to PIPE_BUF).  The supervisor
 * holds the read end of every actor's stderr, so the last lines survive the actor's death.
 */
#ifndef MR_BASE_LOG_H
#define MR_BASE_LOG_H

enum mr_level { MR_LOG_DEBUG, MR_LOG_INFO, MR_LOG_WARN, MR_LOG_ERROR };

/* Name put in front of every line of this process, e.g. "drafter/1"; copied.  Lines below `min` are dropped.  Call once at start. */
void mr_log_init(const char *who, enum mr_level min);

/* Never fails, never blocks longer than write(2) does. */
void mr_log(enum mr_level level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

#define mr_debug(...) mr_log(MR_LOG_DEBUG, __VA_ARGS__)
#define mr_info(...) mr_log(MR_LOG_INFO, __VA_ARGS__)
#define mr_warn(...) mr_log(MR_LOG_WARN, __VA_ARGS__)
#define mr_error(...) mr_log(MR_LOG_ERROR, __VA_ARGS__)

#endif
