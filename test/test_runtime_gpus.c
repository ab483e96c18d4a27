/* GPUs from a report: names, duplicates, peer access, room; and what each actor is to see of them.  No GPU is needed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <unistd.h>

#include "runtime/gpus.h"

static const char report[] =
    "W millrace: a line of some library\n"
    "{\"devices\":[{\"name\":\"A100\",\"uuid\":\"GPU-aaaa1111\",\"free\":40000000000,\"total\":42000000000,\"major\":8,\"minor\":0,\"sms\":108,"
    "\"peers\":[1,0,1]},{\"name\":\"H200\",\"uuid\":\"GPU-aaab2222\",\"free\":140000000000,\"total\":150000000000,\"major\":9,\"minor\":0,"
    "\"sms\":132,\"peers\":[0,1,1]},{\"name\":\"T4\",\"uuid\":\"GPU-cccc3333\",\"free\":1,\"total\":1,\"major\":7,\"minor\":5,\"sms\":40,"
    "\"peers\":[1,1,1]}]}\n";

static void parse_and_find(void **state)
{
    struct mr_gpus g;
    struct mr_err err = {0};

    (void)state;
    assert_int_equal(mr_gpus_parse(&g, report, &err), 0);
    assert_int_equal(g.n, 3);
    assert_string_equal(g.gpu[1].name, "H200");
    assert_int_equal(g.gpu[1].free_bytes, 140000000000);
    assert_int_equal(g.gpu[0].peer[1], 0);
    assert_int_equal(mr_gpus_find(&g, "cuda:2"), 2);
    assert_int_equal(mr_gpus_find(&g, "cuda:3"), -1);
    assert_int_equal(mr_gpus_find(&g, "GPU-AAAB2222"), 1);
    assert_int_equal(mr_gpus_find(&g, "GPU-aaaa"), 0);
    assert_int_equal(mr_gpus_find(&g, "GPU-aaa"), -1);     /* two begin so */
    assert_int_equal(mr_gpus_find(&g, "GPU-dddd"), -1);
    assert_int_equal(mr_gpus_parse(&g, "{\"devices\":[],\"error\":\"no driver\"}", &err), -1);
    assert_string_equal(err.msg, "no driver");
    err.code = 0;
    assert_int_equal(mr_gpus_parse(&g, "Segmentation fault\n", &err), -1);
    assert_non_null(strstr(err.msg, "Segmentation fault"));
}

static struct mr_topology load(const char *actors)
{
    struct mr_topology t;
    struct mr_err err = {0};
    char set[1024];
    const char *list[] = {set};

    snprintf(set, sizeof set, "/actors=[{\"kind\":\"feeder\"},%s]", actors);
    if (mr_topology_load(&t, MR_SOURCE_DIR "/conf/demo.json", list, 1, &err))
        fail_msg("%s", err.msg);
    return t;
}

static void check(const char *actors, int code, const char *word)
{
    struct mr_topology t = load(actors);
    struct mr_checked c;
    struct mr_gpus g;
    struct mr_err err = {0};
    FILE *f = fopen("/dev/null", "w");

    if (mr_check(&c, &t, MR_CHECK_MODEL, &err) || mr_gpus_parse(&g, report, &err))
        fail_msg("%s", err.msg);
    assert_int_equal(mr_gpus_check(&g, &t, &c, f, &err), code ? -1 : 0);
    assert_int_equal(err.code, code);
    if (code && !strstr(err.msg, word))
        fail_msg("\"%s\" is not in: %s", word, err.msg);
    fclose(f);
    mr_checked_free(&c);
    mr_topology_free(&t);
}

#define TARGET(d) "{\"kind\":\"target\",\"device\":\"" d "\"}"
#define DRAFTER(d) "{\"kind\":\"drafter\",\"device\":\"" d "\"}"

static void refusals(void **state)
{
    (void)state;
    check(TARGET("cuda:1") "," DRAFTER("cpu"), 0, NULL);
    check(TARGET("cuda:1") "," DRAFTER("cuda:1"), 0, NULL);
    check(TARGET("cuda:3") "," DRAFTER("cpu"), MR_EXIT_ENV, "\"cuda:3\" is not there; 3 GPUs are visible: cuda:0 = A100 GPU-aaaa1111, ");
    check(TARGET("cuda:1") "," TARGET("GPU-aaab2222") "," DRAFTER("cpu"), MR_EXIT_CONFIG, "are the same GPU (H200 GPU-aaab2222)");
    check(TARGET("cuda:2") "," DRAFTER("cpu"), MR_EXIT_ENV, "compute capability 7.5");
    check(TARGET("cuda:0") "," DRAFTER("cuda:1"), MR_EXIT_ENV, "no peer access");
    check(TARGET("cuda:0") "," TARGET("cuda:1") "," DRAFTER("cuda:1"), MR_EXIT_ENV, "no peer access");
}

static void room(void **state)
{
    struct mr_topology t = load(TARGET("cuda:0") "," DRAFTER("cuda:0"));
    struct mr_checked c;
    struct mr_gpus g;
    struct mr_err err = {0};
    FILE *f = fopen("/dev/null", "w");

    (void)state;
    assert_int_equal(mr_check(&c, &t, MR_CHECK_MODEL, &err), 0);
    assert_int_equal(mr_gpus_parse(&g, report, &err), 0);
    g.gpu[0].free_bytes = 500u << 20;
    assert_int_equal(mr_gpus_check(&g, &t, &c, f, &err), -1);
    assert_int_equal(err.code, MR_EXIT_ENV);
    assert_non_null(strstr(err.msg, "is too small"));
    fclose(f);
    mr_checked_free(&c);
    mr_topology_free(&t);
}

static void sees(const struct mr_topology *t, unsigned slot, const char *ours, const char *want, int pinned)
{
    char out[64];
    int p, set = mr_gpus_visible(t, slot, ours, out, sizeof out, &p);

    assert_int_equal(set, want != NULL);
    if (want)
        assert_string_equal(out, want);
    assert_int_equal(p, pinned);
}

static void what_actors_see(void **state)
{
    struct mr_topology cpu = load(TARGET("cpu") "," DRAFTER("cpu")), one = load(TARGET("cuda:1") "," DRAFTER("cpu"));
    struct mr_topology two = load(TARGET("cuda:0") "," TARGET("GPU-aaab2222") "," DRAFTER("cuda:0"));

    (void)state;
    sees(&cpu, 1, "0,1", NULL, 0);                         /* no GPU in the run: the environment is nobody's business */
    sees(&one, 0, NULL, "", 0);                            /* feeder */
    sees(&one, 1, NULL, "1", 1);
    sees(&one, 1, "GPU-x, MIG-y ,3", "MIG-y", 1);
    sees(&one, 1, "5", NULL, 0);                           /* not there: its own message says so */
    sees(&one, 2, NULL, "", 0);                            /* cpu drafter */
    sees(&one, 3, "4,7", "7", 1);                          /* keeper */
    sees(&two, 2, NULL, "GPU-aaab2222", 1);
    sees(&two, 3, "0,1", NULL, 0);                         /* a drafter maps the slabs of both */
    mr_topology_free(&cpu);
    mr_topology_free(&one);
    mr_topology_free(&two);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(parse_and_find), cmocka_unit_test(refusals), cmocka_unit_test(room),
                                       cmocka_unit_test(what_actors_see)};

    unsetenv("CUDA_VISIBLE_DEVICES");
    if (chdir(MR_SOURCE_DIR))                              /* the demo's paths are relative */
        return 1;
    if (chdir(MR_SOURCE_DIR))             /* the demo's paths are relative */
        return 1;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
