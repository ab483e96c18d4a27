/* The commands of `millrace`, and what they share.  Each returns the exit code; argv[0] is the command's name. */
#ifndef MR_RUNTIME_CMD_H
#define MR_RUNTIME_CMD_H

#include <jansson.h>

#include "base/err.h"
#include "base/limits.h"
#include "ipc/seg.h"

int mr_cmd_check(int argc, char **argv);
int mr_cmd_run(int argc, char **argv);
int mr_cmd_status(int argc, char **argv);
int mr_cmd_top(int argc, char **argv);
int mr_cmd_restart(int argc, char **argv);
int mr_cmd_stop(int argc, char **argv);
int mr_cmd_clean(int argc, char **argv);
int mr_cmd_eval(int argc, char **argv);
int mr_cmd_export(int argc, char **argv);
int mr_cmd_pack(int argc, char **argv);
int mr_cmd_inspect(int argc, char **argv);
int mr_cmd_doctor(int argc, char **argv);

/* ---- arguments (args.c) -------------------------------------------------------------------------------------------------------------- */

enum { MR_ARG_LIST = 64 };
struct mr_arg_list {
    const char *v[MR_ARG_LIST];
    int n;
};
struct mr_arg {
    const char *name; /* without "--"; a table ends with NULL */
    int *flag;        /* one of these three */
    const char **value;
    struct mr_arg_list *list;
};
struct mr_usage {
    const char *synopsis; /* "check TOPO.json [--set ...]" */
    const char *text;     /* of --help */
    const struct mr_arg *args;
    int min_pos, max_pos;
};
enum { MR_ARGS_DONE = -1 }; /* --help was printed: exit 0 */

/* 0, or an exit code, or MR_ARGS_DONE; positional arguments land in pos (room for max_pos), *n_pos of them. */
int mr_args_parse(const struct mr_usage *u, int argc, char **argv, const char **pos, int *n_pos);

/* Prints "millrace: message" to stderr and returns its code. */
int mr_cmd_fail(const struct mr_err *err);

/* ---- which run (args.c) -------------------------------------------------------------------------------------------------------------- */

/* `name`, or the only live run of this machine when NULL.  0 or -1 with err. */
int mr_cmd_pick_run(const char *name, char run[MR_NAME_MAX], struct mr_err *err);

/* ---- status (status.c) --------------------------------------------------------------------------------------------------------------- */

/* What `status --json` prints (docs/design.md 9); `info` is the supervisor's reply to {"cmd":"info"}, or NULL. */
json_t *mr_status_json(const struct mr_seg *s, const json_t *info);
void mr_status_print(const json_t *status, FILE *f);

/* ---- /dev/shm (shm_files.c) ---------------------------------------------------------------------------------------------------------- */

/* Bytes that the files of a run take in /dev/shm, and their number. */
uint64_t mr_shm_files(const char *run, unsigned *n);
/* Is the .ctl of a run what its name says?  FINE also when there is none; else `said` has a sentence with what to do. */
enum mr_shm_odd {
    MR_SHM_FINE,
    MR_SHM_GARBAGE, /* a file that is no segment: it counts as left over once it is 10 s old */
    MR_SHM_FOREIGN  /* no file, or one that this user may not read: never touched */
};
enum mr_shm_odd mr_shm_odd(const char *run, char *said, size_t bytes);
/* Removes the files of a run whose owner is proven dead.  1 = removed, with a sentence in `said`; 0 = there was nothing; -1 = it is
 * alive or cannot be told, `said` has the reason.  Waits up to 3 s for its last actors to go. */
int mr_shm_clean(const char *run, char *said, size_t bytes);

#endif
