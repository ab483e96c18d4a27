/* millrace status and top: look at a run, change nothing. */
#include <ncurses.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/cmd.h"
#include "runtime/control.h"

enum { INFO_MS = 500, TOP_MS = 500 };

/* NULL with err when the run cannot be opened. */
static json_t *look(const char *run, struct mr_err *err)
{
    struct mr_err silent = {0};
    struct mr_seg s = {0};
    json_t *info = NULL, *o;

    if (mr_seg_open(&s, run, 0, err))
        return NULL;
    if (mr_seg_owner_alive(run) == 1) /* a supervisor that does not answer is no reason to say nothing */
        info = mr_control_call(run, json_pack("{s:s}", "cmd", "info"), INFO_MS, &silent);
    o = mr_status_json(&s, info);
    json_decref(info);
    mr_seg_close(&s);
    return o;
}

int mr_cmd_status(int argc, char **argv)
{
    int json = 0, n, r;
    const struct mr_arg args[] = {{.name = "json", .flag = &json}, {.name = NULL}};
    const struct mr_usage u = {"status [RUN] [--json]", "What a run and each of its actors do, or wait for.\n", args, 0, 1};
    const char *name = NULL;
    char run[MR_NAME_MAX];
    struct mr_err err = {0};
    json_t *o;

    r = mr_args_parse(&u, argc, argv, &name, &n);
    if (r)
        return r == MR_ARGS_DONE ? 0 : r;
    if (mr_cmd_pick_run(name, run, &err) || !(o = look(run, &err)))
        return mr_cmd_fail(&err);
    if (json) {
        json_dumpf(o, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(9));
        putchar('\n');
    } else {
        mr_status_print(o, stdout);
    }
    json_decref(o);
    return 0;
}

/* ---- top ----------------------------------------------------------------------------------------------------------------------------- */

static void draw(const json_t *o)
{
    char *text = NULL;
    size_t n;
    FILE *f = open_memstream(&text, &n);

    if (!f)
        return;
    mr_status_print(o, f);
    fclose(f);
    erase();
    addstr(text);
    addstr("\nq: quit");
    refresh();
    free(text);
}

int mr_cmd_top(int argc, char **argv)
{
    const struct mr_usage u = {"top [RUN]", "status, redrawn twice a second until q is pressed or the run is over.\n", NULL, 0, 1};
    const char *name = NULL;
    char run[MR_NAME_MAX];
    struct mr_err err = {0};
    json_t *o;
    int n, key = 0, r = mr_args_parse(&u, argc, argv, &name, &n);

    if (r)
        return r == MR_ARGS_DONE ? 0 : r;
    if (mr_cmd_pick_run(name, run, &err) || !(o = look(run, &err)))
        return mr_cmd_fail(&err);
    if (!isatty(STDOUT_FILENO)) {
        json_decref(o);
        mr_err_set(&err, MR_EXIT_CONFIG, "top needs a terminal; use millrace status");
        return mr_cmd_fail(&err);
    }
    initscr();
    cbreak();
    noecho();
    timeout(TOP_MS);
    while (o && key != 'q') {
        draw(o);
        json_decref(o);
        key = getch();
        o = look(run, &err);
    }
    json_decref(o);
    endwin();
    if (err.code)
        printf("run %s is over\n", run);
    return 0;
}
