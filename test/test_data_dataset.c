/* Data sets: every way a file can be odd, ids out of range by line and by row, honest counts, pack, and the synthetic generator. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

#include "base/log.h"
#include "data/dataset.h"
#include "data/safetensors.h"

static char dir[64], path[96], packed[96];

static const struct mr_dataset_opts plain = {.vocab_rows = 100, .need_anchor = 1};

static void put(const char *text, size_t n)
{
    FILE *f = fopen(path, "wb");

    assert_non_null(f);
    fwrite(text, 1, n, f);
    fclose(f);
}

static struct mr_dataset *good(const char *file, const struct mr_dataset_opts *o)
{
    struct mr_err err = {0};
    struct mr_dataset *d = mr_dataset_open(file, o, &err);

    if (!d)
        fail_msg("%s", err.msg);
    return d;
}

static void refused_n(const char *text, size_t n, const char *why)
{
    struct mr_err err = {0};

    put(text, n);
    assert_null(mr_dataset_open(path, &plain, &err));
    assert_int_equal(err.code, MR_EXIT_CONFIG);
    if (!strstr(err.msg, why))
        fail_msg("message \"%s\"\n  lacks \"%s\"", err.msg, why);
}

static void refused(const char *text, const char *why)
{
    refused_n(text, strlen(text), why);
}

#define ROW(ids, mask) "{\"input_ids\": [" ids "], \"loss_mask\": [" mask "]}"
#define A ROW("1,2,3", "0,1,1")
#define B ROW("4,5,6,7", "1,1,0,0")

/* Kept rows and tokens, and the sum rule. */
static void expect(const char *text, size_t n, uint64_t rows, uint64_t kept, uint64_t blank)
{
    struct mr_dataset *d;
    uint64_t k = 0, dropped = 0;

    put(text, n);
    d = good(path, &plain);
    for (uint64_t i = 0; i < mr_dataset_rows(d); i++)
        k += mr_dataset_len(d, i) > 0;
    for (int i = 0; i < MR_DROPS; i++)
        dropped += mr_dataset_dropped(d)[i];
    assert_int_equal(mr_dataset_rows(d), rows);
    assert_int_equal(k, kept);
    assert_int_equal(k + dropped, rows);
    assert_int_equal(mr_dataset_blank_lines(d), blank);
    if (rows > 1) {
        assert_int_equal(mr_dataset_row(d, 0).n, 3);
        assert_int_equal(mr_dataset_row(d, 1).ids[3], 7);
        assert_int_equal(mr_dataset_row(d, 1).mask[1], 1);
    }
    mr_dataset_close(d);
}

static void expect_text(const char *text, uint64_t rows, uint64_t kept, uint64_t blank)
{
    expect(text, strlen(text), rows, kept, blank);
}

static void odd_but_good(void **state)
{
    (void)state;
    expect_text(A "\n" B "\n", 2, 2, 0);
    expect_text(A "\n" B, 2, 2, 0); /* last newline missing */
    expect_text("\xef\xbb\xbf" A "\n" B "\n", 2, 2, 0);
    expect_text(A "\r\n" B "\r\n", 2, 2, 0);
    expect_text("\n" A "\n  \t\n" B "\n\r\n\n", 2, 2, 4);
    expect_text("  " A "\t\n" B "\n", 2, 2, 0);
    expect_text("{\"x\": \"\xe2\x80\xa8\", \"input_ids\": [1,2,3], \"loss_mask\": [false,true,true]}\n" B "\n", 2, 2, 0);
    expect_text("\xef\xbb\xbf" B, 1, 1, 0);
}

static void bad_records(void **state)
{
    (void)state;
    refused(A "\n" A "\n{\"input_ids\": [1,2", ":3:108: not valid JSON");
    refused(A "\n" A "\n{\"input_ids\": [1,2", "was it cut?");
    refused(A "\n{\"input_ids\": [1,2\n" B "\n", ":2:");
    refused(A A "\n", "two records on one line?");
    refused(A "\r" B "\r", "not with CR alone");
    refused(A "\n\xef\xbb\xbf" B, ":2:45: a byte-order mark in the middle");
    refused_n("{\"input_ids\0", 12, ":1:11: a NUL byte");
    refused("\xff\xfe{", "UTF-16");
    refused("\x1f\x8b\x08", "gunzip");
    refused("PAR1xx", "Parquet");
    refused("", "is empty");
    refused("version https://git-lfs.github.com/spec/v1", "git lfs pull");
    refused_n("\x08\0\0\0\0\0\0\0{}      ", 16, "is a safetensors file");
    refused("[1]\n", "no object");
    refused("{\"messages\": []}\n", "tokenise it");
    refused("{\"loss_mask\": []}\n", "no \"input_ids\" array");
    refused("{\"input_ids\": []}\n", "no \"loss_mask\" array");
    refused(ROW("1,2", "1"), "2 input_ids, but 1 loss_mask entries");
    refused(ROW("1,2", "1,2"), "loss_mask[1] is not 0 or 1");
    refused(ROW("1,2.0", "1,1"), "input_ids[1] is no integer");
    refused(ROW("1,100", "1,1"), ":1:0: input_ids[1] is 100; ids are 0..99");
    refused(A "\n" ROW("1,2147483648", "1,1"), ":2:45: input_ids[1] is 2147483648");
    refused(ROW("1,-1", "1,1"), "input_ids[1] is -1; ids are 0..99");
    refused(ROW("1,-100", "1,1"), "-100 belongs in labels");
    refused("{\"input_ids\":[1],\"input_ids\":[2],\"loss_mask\":[1]}", "duplicate");
    expect_text(ROW("98,99", "1,1") "\n", 1, 1, 0); /* the last row of the embedding is legal */
}

/* The first 10 of many, with line numbers; skipped and counted on request. */
static void many_bad(void **state)
{
    char text[4096] = "";
    struct mr_err err = {0};
    struct mr_dataset_opts skip = plain;
    struct mr_dataset *d;

    (void)state;
    for (int i = 0; i < 15; i++)
        strcat(text, i % 5 ? "{\n" : A "\n");
    put(text, strlen(text));
    assert_null(mr_dataset_open(path, &plain, &err));
    assert_non_null(strstr(err.msg, "10 bad records"));
    assert_non_null(strstr(err.msg, "d.jsonl:13:"));
    assert_null(strstr(err.msg, ":14:"));
    skip.skip_bad = 1;
    d = good(path, &skip);
    assert_int_equal(mr_dataset_rows(d), 15);
    assert_int_equal(mr_dataset_dropped(d)[MR_DROP_BAD], 12);
    assert_int_equal(mr_dataset_len(d, 5), 3);
    mr_dataset_close(d);
}

static void drops(void **state)
{
    const char *text = ROW("1", "1") "\n" ROW("", "") "\n" ROW("1,2,3", "1,0,1") "\n" ROW("1,2,3,4,5,6", "0,0,0,0,1,1") "\n" ROW(
        "1,2,3,4,5,6", "1,1,0,0,1,1") "\n" ROW("1,2,3,4", "0,0,0,0") "\n" ROW("1,2,3,4", "0,0,1,1") "\n";
    struct mr_dataset_opts o = {.vocab_rows = 100, .max_tokens = 4, .need_anchor = 1};
    struct mr_dataset *d;

    (void)state;
    put(text, strlen(text));
    d = good(path, &o);
    assert_int_equal(mr_dataset_dropped(d)[MR_DROP_SHORT], 2);
    assert_int_equal(mr_dataset_dropped(d)[MR_DROP_MASKED], 2);
    assert_int_equal(mr_dataset_dropped(d)[MR_DROP_OVERLONG], 2);
    assert_int_equal(mr_dataset_len(d, 6), 4);
    mr_dataset_close(d);
    o.truncate = 1; /* then one of the two long ones is all prompt */
    d = good(path, &o);
    assert_int_equal(mr_dataset_dropped(d)[MR_DROP_MASKED], 3);
    assert_int_equal(mr_dataset_dropped(d)[MR_DROP_OVERLONG], 0);
    assert_int_equal(mr_dataset_truncated(d), 1);
    assert_int_equal(mr_dataset_len(d, 4), 4);
    mr_dataset_close(d);
    o = (struct mr_dataset_opts){.min_tokens = 5};
    d = good(path, &o);
    assert_int_equal(mr_dataset_dropped(d)[MR_DROP_SHORT], 5);
    assert_int_equal(mr_dataset_len(d, 3), 6);
    mr_dataset_close(d);
}

/* 1000 rows, 350 over the limit: the counts are those. */
static void honest_counts(void **state)
{
    struct mr_dataset_opts o = {.max_tokens = 3, .need_anchor = 1};
    FILE *f = fopen(path, "w");
    struct mr_dataset *d;
    uint64_t kept = 0;

    (void)state;
    for (int i = 0; i < 1000; i++)
        fputs(i % 20 < 7 ? B "\n" : A "\n", f);
    fclose(f);
    d = good(path, &o);
    assert_int_equal(mr_dataset_dropped(d)[MR_DROP_OVERLONG], 350);
    for (uint64_t i = 0; i < 1000; i++)
        kept += mr_dataset_len(d, i) > 0;
    assert_int_equal(kept, 650);
    mr_dataset_close(d);
}

static void pack(void **state)
{
    char report[200];
    struct mr_err err = {0};
    struct mr_dataset *a, *b;
    struct mr_st st;

    (void)state;
    put("\n" A "\n" B "\n" ROW("", "") "\n" ROW("99,98", "1,1"), strlen("\n" A "\n" B "\n" ROW("", "") "\n" ROW("99,98", "1,1")));
    assert_int_equal(mr_pack(path, packed, 0, report, sizeof report, &err), 0);
    assert_string_equal(report, "4 rows, 9 tokens, largest id 99, 0 bad records skipped, 1 blank lines");
    a = good(path, &plain);
    b = good(packed, &plain);
    assert_int_equal(mr_dataset_rows(b), 4);
    assert_true(mr_dataset_fingerprint(a) == mr_dataset_fingerprint(b));
    for (uint64_t i = 0; i < 4; i++) {
        assert_int_equal(mr_dataset_len(a, i), mr_dataset_len(b, i));
        assert_memory_equal(mr_dataset_row(a, i).ids, mr_dataset_row(b, i).ids, (size_t)mr_dataset_len(a, i) * 4);
        assert_memory_equal(mr_dataset_row(a, i).mask, mr_dataset_row(b, i).mask, (size_t)mr_dataset_len(a, i));
    }
    mr_dataset_close(a);
    mr_dataset_close(b);
    assert_int_equal(mr_st_open(&st, packed, &err), 0);
    assert_string_equal(mr_st_find(&st, "ids")->dtype_name, "U16");
    mr_st_close(&st);
    put(ROW("1,70000", "1,1"), strlen(ROW("1,70000", "1,1")));
    assert_int_equal(mr_pack(path, packed, 0, NULL, 0, &err), 0);
    assert_int_equal(mr_st_open(&st, packed, &err), 0);
    assert_string_equal(mr_st_find(&st, "ids")->dtype_name, "I32");
    mr_st_close(&st);
    assert_null(mr_dataset_open(packed, &plain, &err));
    assert_non_null(strstr(err.msg, "row 0: ids[1] is 70000; ids are 0..99"));
    err.code = 0;
    put(A "\n{\n", strlen(A "\n{\n"));
    assert_int_equal(mr_pack(path, packed, 0, report, sizeof report, &err), -1);
    assert_non_null(strstr(err.msg, ":2:"));
    err.code = 0;
    assert_non_null(strstr(err.msg, "--skip-bad"));
    err.code = 0;
    assert_int_equal(mr_pack(path, packed, 1, report, sizeof report, &err), 0);
    assert_non_null(strstr(report, "1 rows, 3 tokens, largest id 3, 1 bad records skipped"));
    put("\n\n", 2);
    assert_int_equal(mr_pack(path, packed, 1, report, sizeof report, &err), -1);
    assert_non_null(strstr(err.msg, "no rows"));
    err.code = 0;
    assert_int_equal(mr_pack(path, path, 1, report, sizeof report, &err), -1);
    assert_non_null(strstr(err.msg, "input and output"));
    err.code = 0;
    assert_int_equal(mr_pack(path, "/nonexistent/x.safetensors", 1, report, sizeof report, &err), -1);
    assert_int_equal(err.code, MR_EXIT_ENV);
}

static void write_packed(int64_t *offset, uint64_t n_offsets, int32_t *ids, uint64_t n_ids, uint8_t *mask, uint64_t n_mask)
{
    struct mr_st_out *o = mr_st_out_create();
    struct mr_err err = {0};

    mr_st_out_add(o, "offsets", MR_ST_I64, &n_offsets, 1, offset);
    mr_st_out_add(o, "ids", MR_ST_I32, &n_ids, 1, ids);
    mr_st_out_add(o, "mask", MR_ST_U8, &n_mask, 1, mask);
    assert_int_equal(mr_st_out_write(o, packed, &err), 0);
    mr_st_out_free(o);
}

static void packed_refused(const char *why)
{
    struct mr_err err = {0};

    assert_null(mr_dataset_open(packed, &plain, &err));
    if (!strstr(err.msg, why))
        fail_msg("message \"%s\" lacks \"%s\"", err.msg, why);
}

static void packed_lies(void **state)
{
    int32_t ids[4] = {1, 2, 3, -1};
    uint8_t mask[4] = {1, 1, 1, 2};
    struct mr_dataset_opts skip = plain;
    struct mr_dataset *d;

    (void)state;
    write_packed((int64_t[]){0, 3, 4}, 3, ids, 4, mask, 3);
    packed_refused("4 ids, 3 mask entries");
    write_packed((int64_t[]){0, 3, 5}, 3, ids, 4, mask, 4);
    packed_refused("row 1 is tokens 3..5 of 4");
    write_packed((int64_t[]){0, 3, 2}, 3, ids, 4, mask, 4);
    packed_refused("row 1 is tokens 3..2");
    write_packed((int64_t[]){0, 3}, 2, ids, 4, mask, 4);
    packed_refused("offsets end at 3");
    write_packed((int64_t[]){1, 4}, 2, ids, 4, mask, 4);
    packed_refused("offsets[0] is 1");
    write_packed((int64_t[]){0, 3, 4}, 3, ids, 4, mask, 4);
    packed_refused("row 1: mask[0] is 2");
    mask[3] = 1;
    write_packed((int64_t[]){0, 2, 4}, 3, ids, 4, mask, 4);
    packed_refused("row 1: ids[1] is -1; ids are 0..99");
    skip.skip_bad = 1;
    d = good(packed, &skip);
    assert_int_equal(mr_dataset_dropped(d)[MR_DROP_BAD], 1);
    assert_int_equal(mr_dataset_len(d, 0), 2);
    mr_dataset_close(d);
}

static void synthetic(void **state)
{
    struct mr_dataset *a = good("synthetic:500?min=10&max=20&seed=3", &plain), *b = good("synthetic:500?min=10&max=20&seed=3", &plain),
                      *c = good("synthetic:500?min=10&max=20&seed=4", &plain);
    struct mr_err err = {0};
    int seen[21] = {0};

    (void)state;
    assert_int_equal(mr_dataset_rows(a), 500);
    assert_true(mr_dataset_fingerprint(a) == mr_dataset_fingerprint(b));
    assert_true(mr_dataset_fingerprint(a) != mr_dataset_fingerprint(c));
    for (uint64_t i = 0; i < 500; i++) {
        assert_in_range(mr_dataset_len(a, i), 10, 20);
        seen[mr_dataset_len(a, i)]++;
    }
    for (int n = 10; n <= 20; n++)
        assert_true(seen[n] > 10);
    mr_dataset_close(a);
    mr_dataset_close(b);
    mr_dataset_close(c);
    assert_null(mr_dataset_open("synthetic:0", &plain, &err));
    assert_null(mr_dataset_open("synthetic:10?mni=3", &plain, &err));
    assert_null(mr_dataset_open("synthetic:10?min=30&max=20", &plain, &err));
    assert_non_null(strstr(err.msg, "the form is"));
    err.code = 0;
    assert_null(mr_dataset_open(dir, &plain, &err));
    assert_non_null(strstr(err.msg, "is a directory"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(odd_but_good), cmocka_unit_test(bad_records),   cmocka_unit_test(many_bad),
                                       cmocka_unit_test(drops),        cmocka_unit_test(honest_counts), cmocka_unit_test(pack),
                                       cmocka_unit_test(packed_lies),  cmocka_unit_test(synthetic)};
    int rc;
    char cmd[96];

    mr_log_init("test", MR_LOG_ERROR);
    strcpy(dir, "/tmp/mr-data-XXXXXX");
    if (!mkdtemp(dir))
        return 1;
    snprintf(path, sizeof path, "%s/d.jsonl", dir);
    snprintf(packed, sizeof packed, "%s/d.safetensors", dir);
    rc = cmocka_run_group_tests(tests, NULL, NULL);
    snprintf(cmd, sizeof cmd, "rm -r %s", dir);
    return system(cmd) || rc;
}
