/* Files of a run: whole lines or nothing, the cut of a resume, `latest`, retention, totals across a resume, TensorBoard records. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "runtime/jsonl.h"
#include "runtime/ledger.h"
#include "runtime/rundir.h"
#include "runtime/tbevents.h"
#include "runtime/totals.h"

struct fixture {
    char dir[64], path[MR_PATH + 64];
};

static int set_up(void **state)
{
    struct fixture *f = calloc(1, sizeof *f);

    strcpy(f->dir, "/tmp/mr-files-XXXXXX");
    assert_non_null(mkdtemp(f->dir));
    *state = f;
    return 0;
}

static int tear_down(void **state)
{
    struct fixture *f = *state;
    char cmd[128];

    snprintf(cmd, sizeof cmd, "rm -rf %s", f->dir);
    assert_int_equal(system(cmd), 0);
    free(f);
    return 0;
}

static char *in(struct fixture *f, const char *name)
{
    snprintf(f->path, sizeof f->path, "%s/%s", f->dir, name);
    return f->path;
}

static void put(struct fixture *f, const char *name, const char *text)
{
    FILE *o = fopen(in(f, name), "w");

    assert_non_null(o);
    fputs(text, o);
    assert_int_equal(fclose(o), 0);
}

static char *get(struct fixture *f, const char *name, char *buf, size_t bytes)
{
    FILE *i = fopen(in(f, name), "r");
    size_t n;

    assert_non_null(i);
    n = fread(buf, 1, bytes - 1, i);
    buf[n] = 0;
    fclose(i);
    return buf;
}

static void make_checkpoint(struct fixture *f, unsigned step)
{
    char name[64], text[64];

    snprintf(name, sizeof name, "checkpoints/step-%u", step);
    assert_int_equal(mkdir(in(f, name), 0755), 0);
    snprintf(name, sizeof name, "checkpoints/step-%u/state.json", step);
    snprintf(text, sizeof text, "{\"step\": %u}\n", step);
    put(f, name, text);
}

static int exists(struct fixture *f, const char *name)
{
    struct stat st;

    return lstat(in(f, name), &st) == 0;
}

/* ---- lines --------------------------------------------------------------------------------------------------------------------------- */

static const char ledger[] = "{\"step\":0,\"items\":[{\"item\":1},{\"item\":0}]}\n"
                             "{\"step\":1,\"items\":[{\"item\":5},{\"item\":2}]}\n"
                             "{\"step\":2,\"items\":[{\"item\":3},{\"item\":4}]}\n";

static void test_cut_keeps_whole_lines_below(void **state)
{
    struct fixture *f = *state;
    struct mr_ledger_cut c;
    struct mr_err err = {0};
    char buf[512];

    put(f, "l", ledger);
    assert_int_equal(mr_ledger_cut(in(f, "l"), 2, 6, &c, &err), 0);
    assert_int_equal(c.items, 4);
    assert_int_equal(c.dropped_items, 2);
    assert_int_equal(c.dropped_lines, 1);
    assert_memory_equal(c.committed, "\1\1\1\0\0\1", 6);
    mr_ledger_cut_free(&c);
    assert_int_equal(strlen(get(f, "l", buf, sizeof buf)), strstr(ledger, "{\"step\":2") - ledger);
    assert_false(exists(f, "l.tmp"));
}

static void test_cut_drops_a_torn_line(void **state)
{
    struct fixture *f = *state;
    struct mr_ledger_cut c;
    struct mr_err err = {0};
    char text[512];

    for (size_t cut = 1; cut < 30; cut += 7) {
        snprintf(text, sizeof text, "%.*s", (int)(sizeof ledger - 1 - cut), ledger);
        put(f, "l", text);
        assert_int_equal(mr_ledger_cut(in(f, "l"), 2, 6, &c, &err), 0);
        assert_int_equal(c.dropped_lines, 0);
        mr_ledger_cut_free(&c);
        put(f, "l", text);
        assert_int_equal(mr_ledger_cut(in(f, "l"), 3, 6, &c, &err), -1); /* the checkpoint claims a line that is not whole */
        assert_int_equal(err.code, MR_EXIT_CONFIG);
        assert_non_null(strstr(err.msg, "2 of the 3"));
        mr_ledger_cut_free(&c);
        memset(&err, 0, sizeof err);
    }
}

static void test_cut_refuses_damage(void **state)
{
    static const char *const bad[] = {"{\"step\":0,\"items\":[]}\n{\"step\":0,\"items\":[]}\n", "{\"step\":1,\"items\":[]}\n", "nonsense\n",
                                      "{\"items\":[]}\n", "{\"step\":0,\"items\":[{\"item\":1}]}\n{\"step\":1,\"items\":[{\"item\":1}]}\n"};
    struct fixture *f = *state;

    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        struct mr_ledger_cut c;
        struct mr_err err = {0};

        put(f, "l", bad[i]);
        assert_int_equal(mr_ledger_cut(in(f, "l"), 2, 6, &c, &err), -1);
        assert_int_equal(err.code, MR_EXIT_CONFIG);
        mr_ledger_cut_free(&c);
    }
}

static void test_cut_of_nothing(void **state)
{
    struct fixture *f = *state;
    struct mr_ledger_cut c;
    struct mr_err err = {0};

    assert_int_equal(mr_ledger_cut(in(f, "none"), 0, 6, &c, &err), 0);
    assert_int_equal(c.items, 0);
    mr_ledger_cut_free(&c);
    assert_true(exists(f, "none"));
}

/* A full disk: RLIMIT_FSIZE makes the write short, then refused.  In a child, for the limit's sake. */
static int short_write_child(struct fixture *f)
{
    struct rlimit limit = {.rlim_cur = 100, .rlim_max = 100};
    struct mr_jsonl j;
    struct mr_err err = {0};
    char line[64], buf[256];

    memset(line, 'x', sizeof line);
    line[63] = '\n';
    if (mr_jsonl_open(&j, in(f, "full"), &err) || mr_jsonl_append(&j, line, 64))
        return 1;
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &limit);
    if (mr_jsonl_append(&j, line, 64) != -EFBIG || j.bytes != 64)
        return 2;
    mr_jsonl_close(&j);
    return strlen(get(f, "full", buf, sizeof buf)) == 64 ? 0 : 3;
}

static void test_short_write_leaves_whole_lines(void **state)
{
    struct fixture *f = *state;
    pid_t pid = fork();
    int status;

    if (pid == 0)
        _exit(short_write_child(f));
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

/* ---- run directory ------------------------------------------------------------------------------------------------------------------- */

static void test_rundir_refuses_a_run_that_is_there(void **state)
{
    struct fixture *f = *state;
    struct mr_rundir d;
    struct mr_err err = {0};
    char dir[128];

    snprintf(dir, sizeof dir, "%s/a/b/c", f->dir);
    assert_int_equal(mr_rundir_open(&d, dir, 0, &err), 0);
    mr_rundir_close(&d);
    put(f, "a/b/c/ledger.jsonl", ""); /* a start that got nowhere */
    assert_int_equal(mr_rundir_open(&d, dir, 0, &err), 0);
    mr_rundir_close(&d);
    put(f, "a/b/c/ledger.jsonl", "{}\n");
    assert_int_equal(mr_rundir_open(&d, dir, 0, &err), -1);
    assert_int_equal(err.code, MR_EXIT_CONFIG);
    assert_non_null(strstr(err.msg, "--resume"));
    memset(&err, 0, sizeof err);
    assert_int_equal(mr_rundir_open(&d, dir, 1, &err), 0);
    mr_rundir_close(&d);
}

static void test_rundir_is_for_one(void **state)
{
    struct fixture *f = *state;
    struct mr_rundir a, b;
    struct mr_err err = {0};

    assert_int_equal(mr_rundir_open(&a, f->dir, 0, &err), 0);
    assert_int_equal(mr_rundir_open(&b, f->dir, 0, &err), -1);
    assert_non_null(strstr(err.msg, "in use"));
    mr_rundir_close(&a);
    memset(&err, 0, sizeof err);
    assert_int_equal(mr_rundir_open(&b, f->dir, 0, &err), 0);
    mr_rundir_close(&b);
}

static void test_rundir_unwritable(void **state)
{
    struct fixture *f = *state;
    struct mr_rundir d;
    struct mr_err err = {0};
    char dir[128];

    put(f, "file", "x");
    snprintf(dir, sizeof dir, "%s/file/run", f->dir);
    assert_int_equal(mr_rundir_open(&d, dir, 0, &err), -1);
    assert_int_equal(err.code, MR_EXIT_ENV);
    assert_non_null(strstr(err.msg, "/run/dir"));
}

static void test_rundir_too_small(void **state)
{
    struct fixture *f = *state;
    struct mr_checked c = {.synthetic = 1};
    struct mr_err err = {0};
    struct mr_rundir d;

    assert_int_equal(mr_rundir_open(&d, f->dir, 0, &err), 0);
    c.layout.P = 1000;
    assert_int_equal(mr_rundir_has_room(&d, &c, 1, &err), 0);
    c.layout.P = (size_t)1 << 50;
    assert_int_equal(mr_rundir_has_room(&d, &c, 2, &err), -1);
    assert_int_equal(err.code, MR_EXIT_ENV);
    assert_non_null(strstr(err.msg, "2 checkpoints of 15762598695862272 bytes need 31525197391724544, available "));
    mr_rundir_close(&d);
}

static void test_latest(void **state)
{
    struct fixture *f = *state;
    struct mr_rundir d;
    struct mr_err err = {0};
    unsigned step = 9;
    char to[64] = "";

    assert_int_equal(mr_rundir_open(&d, f->dir, 0, &err), 0);
    assert_int_equal(mr_rundir_resume_step(&d, &step, &err), 0);
    assert_int_equal(step, 0);
    assert_int_equal(mr_rundir_set_latest(&d, 10), -ENOENT);
    assert_false(exists(f, "latest"));
    make_checkpoint(f, 10);
    assert_int_equal(mr_rundir_resume_step(&d, &step, &err), 0);      /* one that was never published */
    assert_int_equal(step, 0);
    make_checkpoint(f, 20);
    assert_int_equal(mr_rundir_resume_step(&d, &step, &err), -1);     /* the link was lost */
    assert_non_null(strstr(err.msg, "ln -s checkpoints/step-20"));
    memset(&err, 0, sizeof err);
    assert_int_equal(mr_rundir_set_latest(&d, 10), 0);
    put(f, "latest.tmp", "left by a kill");
    assert_int_equal(mr_rundir_set_latest(&d, 20), 0);
    assert_true(readlink(in(f, "latest"), to, sizeof to - 1) > 0);
    assert_string_equal(to, "checkpoints/step-20");
    assert_int_equal(mr_rundir_resume_step(&d, &step, &err), 0);
    assert_int_equal(step, 20);
    put(f, "latest/state.json", "{\"step\": -3}");
    assert_int_equal(mr_rundir_resume_step(&d, &step, &err), -1);
    assert_non_null(strstr(err.msg, "/step: "));
    assert_non_null(strstr(err.msg, "ln -sfn checkpoints/step-10 "));
    assert_int_equal(mr_rundir_set_latest(&d, 10), 0);
    put(f, "latest/state.json", "{");
    memset(&err, 0, sizeof err);
    assert_int_equal(mr_rundir_resume_step(&d, &step, &err), -1);
    assert_non_null(strstr(err.msg, "there is no older one"));
    mr_rundir_close(&d);
}

static void test_prune(void **state)
{
    struct fixture *f = *state;
    struct mr_rundir d;
    struct mr_err err = {0};

    assert_int_equal(mr_rundir_open(&d, f->dir, 0, &err), 0);
    for (unsigned s = 10; s <= 50; s += 10)
        make_checkpoint(f, s);
    assert_int_equal(mkdir(in(f, "checkpoints/step-60.tmp-3-1"), 0755), 0);
    assert_int_equal(mkdir(in(f, "checkpoints/gone-step-1"), 0755), 0);
    assert_int_equal(mr_rundir_prune(&d, 40, 0), 0);
    assert_int_equal(mr_rundir_prune(&d, 40, 2), 3); /* 10, 20, and what an earlier removal left */
    assert_false(exists(f, "checkpoints/step-10"));
    assert_false(exists(f, "checkpoints/step-20"));
    assert_true(exists(f, "checkpoints/step-30"));
    assert_true(exists(f, "checkpoints/step-40"));
    assert_true(exists(f, "checkpoints/step-50")); /* not `latest` yet */
    assert_true(exists(f, "checkpoints/step-60.tmp-3-1"));
    assert_int_equal(mr_rundir_prune(&d, 40, 1), 1);
    assert_true(exists(f, "checkpoints/step-40"));
    assert_int_equal(mr_rundir_drop_unpublished(&d, 40), 2);
    assert_false(exists(f, "checkpoints/step-50"));
    assert_true(exists(f, "checkpoints/step-40/state.json"));
    mr_rundir_close(&d);
}

/* ---- totals -------------------------------------------------------------------------------------------------------------------------- */

static void test_totals_survive_a_resume(void **state)
{
    struct fixture *f = *state;
    struct mr_totals a, b;
    struct mr_jsonl j;
    struct mr_err err = {0};

    mr_totals_init(&a, 40, 80);
    assert_int_equal(mr_jsonl_open(&j, in(f, "steps.jsonl"), &err), 0);
    for (unsigned s = 0; s < 30; s++) {
        struct mr_step_sums sums = {.step = s,
                                    .items = 2,
                                    .tokens = 100 + s,
                                    .draft_tokens = 7,
                                    .blocks = 10,
                                    .accepted = s,
                                    .labels = 20,
                                    .correct = 5,
                                    .loss_sum = 3.0 * (40 - s),
                                    .weight_sum = 3.0,
                                    .n_slots = 3,
                                    .slot = {{12, 4, 6.0}, {8, 1, 4.0 + s}, {0, 0, 0}}};
        size_t n;
        char *line;

        mr_totals_add(&a, &sums);
        a.restarts = s / 10;
        line = mr_totals_line(&a, &sums, 1e-3, &n);
        assert_non_null(line);
        if (s == 4)
            assert_non_null(strstr(line, "\"pos_labels\":[12,8,0],\"pos_correct\":[4,1,0],\"pos_loss\":[0.5,1,null],"));
        assert_int_equal(mr_jsonl_append(&j, line, n), 0);
        free(line);
    }
    mr_jsonl_close(&j);
    mr_totals_init(&b, 40, 80);
    assert_int_equal(mr_totals_resume(&b, in(f, "steps.jsonl"), 20, &err), 0);
    assert_int_equal(b.steps, 20);
    assert_int_equal(b.items, 40);
    assert_int_equal(b.tokens, 20 * 100 + 190);
    assert_int_equal(b.restarts, 1);
    assert_float_equal(b.loss_first, 40.0, 1e-6);
    assert_float_equal(b.loss_last, 21.0, 1e-6);
    assert_float_equal(mr_totals_accept(&b), 1.0 + (16 + 17 + 18 + 19) / 40.0, 1e-9); /* a tenth of 40 steps */
    assert_float_equal(mr_totals_accuracy(&b), 0.25, 1e-9);
    assert_int_equal(b.n_slots, 3);
    assert_float_equal(mr_slot_accuracy(&b.slot[0]), 4 / 12.0, 1e-12);
    assert_float_equal(mr_slot_loss(&b.slot[1]), (4.0 + 19) / 8, 1e-4); /* the last step that stays */
    assert_true(isnan(mr_slot_accuracy(&b.slot[2])) && isnan(mr_slot_loss(&b.slot[2])));
}

static void test_totals_without_labels(void **state)
{
    struct mr_totals t;
    struct mr_step_sums sums = {.items = 1};
    char *line;
    size_t n;

    (void)state;
    mr_totals_init(&t, 3, 3);
    assert_true(isnan(mr_totals_accept(&t)));
    mr_totals_add(&t, &sums);
    assert_false(t.has_loss);
    line = mr_totals_line(&t, &sums, 0, &n);
    assert_non_null(strstr(line, "\"loss\":null"));
    assert_null(strstr(line, "pos_"));
    assert_int_equal(t.n_slots, 0);
    free(line);
}

/* ---- TensorBoard --------------------------------------------------------------------------------------------------------------------- */

static void test_crc32c(void **state)
{
    unsigned char zero[32] = {0};

    (void)state;
    assert_int_equal(mr_crc32c("123456789", 9), 0xe3069283u);
    assert_int_equal(mr_crc32c(zero, 32), 0x8a9136aau); /* RFC 3720 B.4 */
    assert_int_equal(mr_crc32c("", 0), 0);
}

static uint32_t unmask(uint32_t m)
{
    uint32_t rot = m - 0xa282ead8u;

    return rot >> 17 | rot << 15;
}

/* Walks the records, checks both checksums of each, returns their number; *last = data of the last one. */
static int walk(const unsigned char *p, size_t n, const unsigned char **last, uint64_t *last_bytes)
{
    int records = 0;

    while (n >= 16) {
        uint64_t len;
        uint32_t crc;

        memcpy(&len, p, 8);
        memcpy(&crc, p + 8, 4);
        assert_int_equal(unmask(crc), mr_crc32c(p, 8));
        assert_true(len + 16 <= n);
        memcpy(&crc, p + 12 + len, 4);
        assert_int_equal(unmask(crc), mr_crc32c(p + 12, len));
        *last = p + 12;
        *last_bytes = len;
        p += 16 + len;
        n -= 16 + len;
        records++;
    }
    assert_int_equal(n, 0);
    return records;
}

static void test_tb_records(void **state)
{
    struct fixture *f = *state;
    struct mr_tb tb;
    struct mr_tb_scalar v[] = {{"train/loss", 2.5}, {"x", -1.0}};
    struct mr_err err = {0};
    const unsigned char expect[] = {
        0x10, 0xac, 0x02, 0x2a, 0x1d, 0x0a, 0x11, 0x0a, 0x0a, 't',  'r', 'a',  'i', 'n', '/',  'l', 'o', 's',
        's',  0x15, 0,    0,    0x20, 0x40, 0x0a, 0x08, 0x0a, 0x01, 'x', 0x15, 0,   0,   0x80, 0xbf}; /* step 300, summary of 29 bytes with
                                                                                                         two values */
    const unsigned char *last = NULL;
    unsigned char buf[4096];
    uint64_t bytes;
    DIR *dir;
    struct dirent *e;
    char name[300] = "";
    FILE *i;
    size_t n;

    assert_int_equal(mr_tb_open(&tb, f->dir, &err), 0);
    assert_int_equal(mr_tb_restart(&tb, 300), 0);
    assert_int_equal(mr_tb_write(&tb, 300, v, 2), 0);
    mr_tb_close(&tb);
    assert_int_equal(mr_tb_write(&tb, 301, v, 2), -EBADF);
    dir = opendir(f->dir);
    while ((e = readdir(dir)))
        if (strncmp(e->d_name, "events.out.tfevents.", 20) == 0)
            snprintf(name, sizeof name, "%s", e->d_name);
    closedir(dir);
    i = fopen(in(f, name), "rb");
    assert_non_null(i);
    n = fread(buf, 1, sizeof buf, i);
    fclose(i);
    assert_int_equal(walk(buf, n, &last, &bytes), 3);
    assert_int_equal(bytes, 9 + sizeof expect);
    assert_int_equal(last[0], 0x09); /* field 1, fixed64: the time */
    assert_memory_equal(last + 9, expect, sizeof expect);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_cut_keeps_whole_lines_below, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_cut_drops_a_torn_line, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_cut_refuses_damage, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_cut_of_nothing, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_short_write_leaves_whole_lines, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_rundir_refuses_a_run_that_is_there, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_rundir_is_for_one, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_rundir_unwritable, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_rundir_too_small, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_latest, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_prune, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_totals_survive_a_resume, set_up, tear_down),
        cmocka_unit_test(test_totals_without_labels),
        cmocka_unit_test(test_crc32c),
        cmocka_unit_test_setup_teardown(test_tb_records, set_up, tear_down),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
