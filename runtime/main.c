/* millrace: the command line.  Exit codes are those of base/err.h; docs/design.md section 9 has the whole of it. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "data/json.h"
#include "runtime/cmd.h"

struct command {
    const char *name;
    int (*fn)(int argc, char **argv);
    const char *what;
};

static const struct command command[] = {
    {"check", mr_cmd_check, "TOPO.json              validate, print the plan and the memory arithmetic; start nothing"},
    {"run", mr_cmd_run, "TOPO.json                train"},
    {"status", mr_cmd_status, "[RUN] [--json]        what each actor does or waits for"},
    {"top", mr_cmd_top, "[RUN]                    the same, live"},
    {"restart", mr_cmd_restart, "[RUN] ACTOR [--kill] hot restart of one actor"},
    {"stop", mr_cmd_stop, "[RUN] [--now]           end a run, with a checkpoint unless --now"},
    {"eval", mr_cmd_eval, "--target --draft --data acceptance length of a drafter on held-out rows"},
    {"export", mr_cmd_export, "CKPT DIR              a checkpoint as a directory that serving engines load"},
    {"pack", mr_cmd_pack, "IN.jsonl OUT.safetensors"},
    {"clean", mr_cmd_clean, "                       remove what dead runs left in /dev/shm"},
    {"inspect", mr_cmd_inspect, "[RUN]                dump the shared memory of a run, read-only"},
    {"doctor", mr_cmd_doctor, "                      what this machine offers: io_uring, /dev/shm, limits, GPUs"},
};
enum { COMMANDS = sizeof command / sizeof command[0] };

static void help(void)
{
    puts("usage: millrace COMMAND ...\n");
    for (int i = 0; i < COMMANDS; i++)
        printf("  %s %s\n", command[i].name, command[i].what);
    puts("\nmillrace COMMAND --help says more.  RUN may be left out when exactly one run is live.\n"
         "Exit codes: 0 completed, or stopped by request with a checkpoint; 1 the run failed; 2 usage or configuration; 3 environment;\n"
         "130/143 interrupted without a checkpoint.");
}

static int unknown(const char *name)
{
    const char *names[COMMANDS], *near;

    for (int i = 0; i < COMMANDS; i++)
        names[i] = command[i].name;
    near = mr_nearest(name, names, COMMANDS);
    fprintf(stderr, "millrace: unknown command \"%s\"%s%s%s (millrace --help lists them)\n", name, near ? "; did you mean " : "",
            near ? near : "", near ? "?" : "");
    return MR_EXIT_CONFIG;
}

/* An answer that nobody got is no success.  A run is more than its lines: it goes on without them, and so does its exit code. */
static int answered(int rc)
{
    if (rc || (!fflush(stdout) && !ferror(stdout)))
        return rc;
    fprintf(stderr, "millrace: standard output cannot be written: %s\n", strerror(errno ? errno : EIO));
    return MR_EXIT_ENV;
}

static int perform(int argc, char **argv)
{
    for (int i = 0; i < COMMANDS; i++)
        if (strcmp(argv[1], command[i].name) == 0) {
            int rc = command[i].fn(argc - 1, argv + 1);

            return command[i].fn == mr_cmd_run ? rc : answered(rc);
        }
    return unknown(argv[1]);
}

int main(int argc, char **argv)
{
    mr_log_init("millrace", MR_LOG_INFO);
    if (argc < 2) {
        fprintf(stderr, "millrace: which command? (millrace --help lists them)\n");
        return MR_EXIT_CONFIG;
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 || strcmp(argv[1], "help") == 0) {
        help();
        return answered(0);
    }
    if (strcmp(argv[1], "--version") == 0) {
        printf("millrace %s\n", MR_VERSION);
        return answered(0);
    }
    return perform(argc, argv);
}
