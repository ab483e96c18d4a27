/* Command-line arguments: long options only, in any place, values as "--name V" or "--name=V".  See cmd.h. */
#include <stdio.h>
#include <string.h>

#include "data/json.h"
#include "runtime/cmd.h"

int mr_cmd_fail(const struct mr_err *err)
{
    fflush(stdout); /* first what was said before, also where both go to one file */
    fprintf(stderr, "millrace: %s\n", err->msg);
    return err->code ? err->code : MR_EXIT_FAILED;
}

static int hint(const struct mr_usage *u, const char *fmt, const char *what, const char *near)
{
    char msg[256];

    snprintf(msg, sizeof msg, fmt, what);
    fprintf(stderr, "millrace: %s%s%s%s (usage: millrace %s)\n", msg, near ? "; did you mean --" : "", near ? near : "", near ? "?" : "",
            u->synopsis);
    return MR_EXIT_CONFIG;
}

static const char *nearest_option(const struct mr_usage *u, const char *name)
{
    const char *names[32];
    int n = 0;

    for (const struct mr_arg *a = u->args; a && a->name && n < 32; a++)
        names[n++] = a->name;
    return mr_nearest(name, names, n);
}

static const struct mr_arg *find(const struct mr_usage *u, const char *name, size_t n)
{
    for (const struct mr_arg *a = u->args; a && a->name; a++)
        if (strlen(a->name) == n && strncmp(a->name, name, n) == 0)
            return a;
    return NULL;
}

/* One "--name[=value]"; *i moves past a value of its own. */
static int take_option(const struct mr_usage *u, int argc, char **argv, int *i)
{
    const char *name = argv[*i] + 2, *eq = strchr(name, '=');
    size_t n = eq ? (size_t)(eq - name) : strlen(name);
    const struct mr_arg *a = find(u, name, n);
    const char *value = eq ? eq + 1 : NULL;
    char plain[64];

    snprintf(plain, sizeof plain, "%.*s", (int)n, name);
    if (!a)
        return hint(u, "unknown option --%s", plain, nearest_option(u, plain));
    if (a->flag) {
        *a->flag = 1;
        return eq ? hint(u, "--%s takes no value", plain, NULL) : 0;
    }
    if (!value && *i + 1 < argc)
        value = argv[++*i];
    if (!value)
        return hint(u, "--%s needs a value", plain, NULL);
    if (a->value)
        *a->value = value;
    else if (a->list->n == MR_ARG_LIST)
        return hint(u, "too many --%s", plain, NULL);
    else
        a->list->v[a->list->n++] = value;
    return 0;
}

static void print_help(const struct mr_usage *u)
{
    printf("usage: millrace %s\n\n%s", u->synopsis, u->text);
}

int mr_args_parse(const struct mr_usage *u, int argc, char **argv, const char **pos, int *n_pos)
{
    int n = 0, only_pos = 0, r;

    for (int i = 1; i < argc; i++) {
        if (!only_pos && (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0)) {
            print_help(u);
            return MR_ARGS_DONE;
        }
        if (!only_pos && strcmp(argv[i], "--") == 0) {
            only_pos = 1;
        } else if (!only_pos && argv[i][0] == '-' && argv[i][1] == '-') {
            if ((r = take_option(u, argc, argv, &i)))
                return r;
        } else if (!only_pos && argv[i][0] == '-' && argv[i][1]) {
            return hint(u, "unknown option %s", argv[i], NULL);
        } else if (n == u->max_pos) {
            return hint(u, "surplus argument \"%s\"", argv[i], NULL);
        } else {
            pos[n++] = argv[i];
        }
    }
    if (n < u->min_pos)
        return hint(u, "an argument is missing%s", "", NULL);
    *n_pos = n;
    return 0;
}

/* ---- which run ----------------------------------------------------------------------------------------------------------------------- */

struct found {
    char first[MR_NAME_MAX], all[512];
    int n;
};

static void count_live(const char *run, int alive, void *arg)
{
    struct found *f = arg;
    size_t used = strlen(f->all);

    if (alive != 1)
        return;
    if (f->n++ == 0)
        snprintf(f->first, sizeof f->first, "%s", run);
    snprintf(f->all + used, sizeof f->all - used, "%s%s", used ? ", " : "", run);
}

int mr_cmd_pick_run(const char *name, char run[MR_NAME_MAX], struct mr_err *err)
{
    struct found f = {.n = 0};

    mr_seg_each(count_live, &f);
    if (name) {
        unsigned files;
        char said[400];

        snprintf(run, MR_NAME_MAX, "%s", name);
        mr_shm_files(name, &files);
        if (files == 0)
            return mr_err_set(err, MR_EXIT_CONFIG, "no run named \"%s\" on this machine; live: %s", name, f.n ? f.all : "none");
        if (mr_shm_odd(name, said, sizeof said))
            return mr_err_set(err, MR_EXIT_ENV, "%s", said);
        return 0;
    }
    if (f.n == 0)
        return mr_err_set(err, MR_EXIT_CONFIG, "no run is live on this machine");
    if (f.n > 1)
        return mr_err_set(err, MR_EXIT_CONFIG, "%d runs are live (%s): name one", f.n, f.all);
    snprintf(run, MR_NAME_MAX, "%s", f.first);
    return 0;
}
