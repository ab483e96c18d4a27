/* The corpus of invalid inputs: test/corpus/KIND/CASE/ holds an input and `error`, the exact message that it must give (paths as INPUT).
 *
 * MR_CORPUS_UPDATE=1 rewrites the error files; read the difference before committing it.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

#include "base/log.h"
#include "data/dataset.h"
#include "data/drafter_config.h"
#include "data/model_config.h"
#include "data/safetensors.h"
#include "data/topology.h"

static int try_topology(const char *input, struct mr_err *err)
{
    struct mr_topology t;

    if (mr_topology_load(&t, input, NULL, 0, err))
        return -1;
    mr_topology_free(&t);
    return 0;
}

static int try_data(const char *input, struct mr_err *err)
{
    const struct mr_dataset_opts o = {.vocab_rows = 100, .need_anchor = 1};
    struct mr_dataset *d = mr_dataset_open(input, &o, err);

    mr_dataset_close(d);
    return d ? 0 : -1;
}

static int try_safetensors(const char *input, struct mr_err *err)
{
    struct mr_st st;

    if (mr_st_open(&st, input, err))
        return -1;
    mr_st_close(&st);
    return 0;
}

static int try_target(const char *input, struct mr_err *err)
{
    struct mr_model_config c;

    return mr_model_config_load(&c, input, err);
}

static int try_drafter(const char *input, struct mr_err *err)
{
    struct mr_drafter_config c;

    return mr_drafter_config_load(&c, input, err);
}

/* file NULL: the case's directory is the input */
static const struct {
    const char *kind, *file;
    int (*try)(const char *, struct mr_err *);
} kinds[] = {{"topology", "input.json", try_topology},
             {"data", "input.jsonl", try_data},
             {"safetensors", "input.safetensors", try_safetensors},
             {"target", NULL, try_target},
             {"drafter", NULL, try_drafter}};

/* msg with every occurrence of `path` as "INPUT" */
static void normalise(const char *msg, const char *path, char *out, size_t bytes)
{
    size_t n = strlen(path), used = 0;

    while (*msg && used + 8 < bytes) {
        if (!strncmp(msg, path, n)) {
            memcpy(out + used, "INPUT", 5);
            used += 5, msg += n;
        } else {
            out[used++] = *msg++;
        }
    }
    out[used] = 0;
}

static void read_text(const char *path, char *out, size_t bytes)
{
    FILE *f = fopen(path, "r");
    size_t n = f ? fread(out, 1, bytes - 1, f) : 0;

    if (f)
        fclose(f);
    out[n] = 0;
    if (n && out[n - 1] == '\n')
        out[n - 1] = 0;
}

static void one_case(int k, const char *name)
{
    char dir[400], input[450], path[450], have[2300], want[2300];
    struct mr_err err = {0};

    snprintf(dir, sizeof dir, MR_SOURCE_DIR "/test/corpus/%s/%s", kinds[k].kind, name);
    snprintf(input, sizeof input, kinds[k].file ? "%s/%s" : "%s", dir, kinds[k].file);
    snprintf(path, sizeof path, "%s/error", dir);
    if (!kinds[k].try(input, &err))
        fail_msg("%s/%s was accepted", kinds[k].kind, name);
    assert_true(err.code == MR_EXIT_CONFIG);
    normalise(err.msg, input, have, sizeof have);
    if (getenv("MR_CORPUS_UPDATE")) {
        FILE *f = fopen(path, "w");

        assert_non_null(f);
        fprintf(f, "%s\n", have);
        fclose(f);
    }
    read_text(path, want, sizeof want);
    if (strcmp(have, want))
        fail_msg("%s/%s\n  says  %s\n  wants %s", kinds[k].kind, name, have, want);
}

static void corpus(void **state)
{
    int n = 0;

    (void)state;
    for (int k = 0; k < (int)(sizeof kinds / sizeof *kinds); k++) {
        char dir[400];
        struct dirent **list;
        int cases;

        snprintf(dir, sizeof dir, MR_SOURCE_DIR "/test/corpus/%s", kinds[k].kind);
        cases = scandir(dir, &list, NULL, alphasort);
        assert_true(cases > 2);
        for (int i = 0; i < cases; i++) {
            if (list[i]->d_name[0] != '.') {
                one_case(k, list[i]->d_name);
                n++;
            }
            free(list[i]);
        }
        free(list);
    }
    print_message("%d cases\n", n);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(corpus)};

    mr_log_init("test", MR_LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
