/* safetensors: the reference reader's vectors, files that lie, files that are something else, and a round trip. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <math.h>
#include <cmocka.h>

#include "data/safetensors.h"

static char dir[64];

static char *put(const char *name, const void *data, size_t n)
{
    static char path[128];
    FILE *f;

    snprintf(path, sizeof path, "%s/%s", dir, name);
    f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, n, f), n);
    fclose(f);
    return path;
}

/* A file of `header` and `data` zero bytes. */
static char *make(const char *header, size_t data)
{
    size_t n = strlen(header);
    char *buf = calloc(1, 8 + n + data), *path;

    for (int i = 0; i < 8; i++)
        buf[i] = (char)(n >> 8 * i);
    memcpy(buf + 8, header, n);
    path = put("x.safetensors", buf, 8 + n + data);
    free(buf);
    return path;
}

static void accepts(const char *header, size_t data)
{
    struct mr_st st;
    struct mr_err err = {0};

    if (mr_st_open(&st, make(header, data), &err))
        fail_msg("%s: %s", header, err.msg);
    mr_st_close(&st);
}

static void refuses(const char *header, size_t data, const char *why)
{
    struct mr_st st;
    struct mr_err err = {0};

    if (!mr_st_open(&st, make(header, data), &err))
        fail_msg("accepted: %s", header);
    assert_int_equal(err.code, MR_EXIT_CONFIG);
    if (!strstr(err.msg, why))
        fail_msg("%s\n  message \"%s\"\n  lacks \"%s\"", header, err.msg, why);
}

static void reference_vectors(void **state)
{
    (void)state;
    accepts("{}      ", 0);
    accepts("  {} \n", 0);
    accepts("{\"test\":{\"dtype\":\"I32\",\"shape\":[2,2],\"data_offsets\":[0,16]}}", 16);
    accepts("{\"test\":{\"dtype\":\"I32\",\"shape\":[2,0],\"data_offsets\":[0,0]}}", 0);
    accepts("{\"test\":{\"dtype\":\"I32\",\"shape\":[],\"data_offsets\":[0,4]}}", 4);
    accepts("{\"b\":{\"data_offsets\":[4,5],\"x\":1,\"dtype\":\"F8_E4M3\",\"shape\":[1]},\"a\":{\"dtype\":\"F32\",\"shape\":[1],"
            "\"data_offsets\":[0,4]},\"__metadata__\":{\"format\":\"pt\"}}",
            5);
    refuses("{\"test\":{\"dtype\":\"I32\",\"shape\":[2,2],\"data_offsets\":[0,16]}}", 17, "1 bytes follow");
    refuses("{\"test\":{\"dtype\":\"I32\",\"shape\":[2,2],\"data_offsets\":[0,16]}}", 14, "the data at 14");
    refuses("{\"test\":{\"dtype\":\"I32\",\"shape\":[2,18446744073709551614],\"data_offsets\":[0,16]}}", 16, "too big integer");
    refuses("{\"test\":{\"dtype\":\"I32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,16]}}", 16, "overflows");
    refuses("{\"test\":{\"dtype\":\"I32\",\"shape\":[2305843009213693952,4],\"data_offsets\":[0,16]}}", 16, "overflows");
    refuses("{\"test\":{\"dtype\":\"I32\",\"shape\":[2,2],\"data_offsets\":[0,4]}}", 4, "needs 16 bytes, data_offsets give 4");
    refuses(
        "{\"a\":{\"dtype\":\"I32\",\"shape\":[4],\"data_offsets\":[0,16]},\"b\":{\"dtype\":\"I32\",\"shape\":[4],\"data_offsets\":[0,16]}}",
        16, "previous tensor ends at 16");
    refuses("{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[1,5]}}", 5, "previous tensor ends at 0");
    refuses("{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[4,0]}}", 4, "end before they begin");
}

static void wrong_types(void **state)
{
    (void)state;
    refuses("", 0, "header of 0 bytes");
    refuses("[]", 0, "no JSON object");
    refuses("\xff", 0, "header of 1 bytes");
    refuses("{\"a\":{\"dtype\":\"U8\",\"shape\":[1.0],\"data_offsets\":[0,1]}}", 1, "plain non-negative");
    refuses("{\"a\":{\"dtype\":\"U8\",\"shape\":[-1],\"data_offsets\":[0,1]}}", 1, "plain non-negative");
    refuses("{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0.0,1]}}", 1, "data_offsets");
    refuses("{\"a\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,1]}}", 1, "8 dimensions");
    refuses("{\"a\":{\"dtype\":\"Q4\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "unknown dtype \"Q4\"");
    refuses("{\"a\":{\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "dtype");
    refuses("{\"a\":{\"dtype\":\"F4\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "whole number of bytes");
    refuses("{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]}}",
            2, "duplicate");
    refuses("{\"__metadata__\":{\"a\":1}}", 0, "must be a string");
    refuses("{\"a\":[]}", 0, "dtype");
}

static void refuses_file(const void *data, size_t n, const char *why)
{
    struct mr_st st;
    struct mr_err err = {0};

    assert_int_equal(mr_st_open(&st, put("y.safetensors", data, n), &err), -1);
    if (!strstr(err.msg, why))
        fail_msg("message \"%s\" lacks \"%s\"", err.msg, why);
}

static void other_files(void **state)
{
    struct mr_st st;
    char fifo[96];
    struct mr_err err = {0};
    const char lfs[] = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 17\n";

    (void)state;
    refuses_file(lfs, sizeof lfs - 1, "git lfs pull");
    refuses_file("<!DOCTYPE html>", 15, "HTML");
    refuses_file("PK\3\4xxxxxxxx", 12, "zip");
    refuses_file("", 0, "empty");
    refuses_file("\1", 1, "at least 8");
    refuses_file("\1\0\0\0\0\0\0", 7, "at least 8");
    refuses_file("\1\0\0\0\0\0\0\0", 8, "claims 1 bytes");
    refuses_file("\0\0\0\0\0\0\0\x80", 8, "allowed are 100000000");
    refuses_file("\x00\xe1\xf5\x06\0\0\0\0", 8, "allowed are 100000000");
    refuses_file("\x00\xe1\xf5\x05\0\0\0\0", 8, "claims 100000000 bytes, the file has 0");
    assert_int_equal(mr_st_open(&st, dir, &err), -1);
    assert_non_null(strstr(err.msg, "is a directory"));
    err.code = 0;
    assert_int_equal(mr_st_open(&st, "/nonexistent/x", &err), -1);
    assert_non_null(strstr(err.msg, "No such file"));
    snprintf(fifo, sizeof fifo, "%s/fifo", dir);
    assert_int_equal(mkfifo(fifo, 0600), 0);
    err.code = 0;
    assert_int_equal(mr_st_open(&st, fifo, &err), -1); /* and does not wait for a writer */
    assert_non_null(strstr(err.msg, "is no regular file"));
}

/* Every prefix of a good file is refused, and every single changed header byte is either refused or still consistent: never a crash. */
static void mutations(void **state)
{
    const char *h =
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[0,12]},\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[12,14]}}";
    size_t n = 8 + strlen(h) + 14;
    char *good = calloc(1, n), *bad = malloc(n);
    struct mr_st st;
    struct mr_err err;

    (void)state;
    good[0] = (char)strlen(h);
    memcpy(good + 8, h, strlen(h));
    for (size_t k = 0; k < n; k++) {
        err.code = 0;
        assert_int_equal(mr_st_open(&st, put("m", good, k), &err), -1);
    }
    for (size_t k = 0; k < 8 + strlen(h); k++) {
        for (int b = 0; b < 8; b++) {
            memcpy(bad, good, n);
            bad[k] = (char)(bad[k] ^ 1 << b);
            err.code = 0;
            if (!mr_st_open(&st, put("m", bad, n), &err)) {
                for (int i = 0; i < st.n; i++)
                    assert_true(st.t[i].begin + st.t[i].bytes <= st.file_bytes);
                mr_st_close(&st);
            }
        }
    }
    free(good);
    free(bad);
}

static void round_trip(void **state)
{
    float f[3] = {1.0f, -2.5f, 0.1f}, back[3];
    uint16_t h[3] = {0x3c00, 0xc100, 0x0001}; /* f16: 1, -2.5, the smallest subnormal */
    uint8_t u[5] = {1, 2, 3, 4, 5};
    int64_t i[2] = {-1, 7};
    uint64_t s3 = 3, s5 = 5, s2[2] = {2, 1};
    struct mr_st_out *o = mr_st_out_create();
    struct mr_st st;
    struct mr_err err = {0};
    const struct mr_st_tensor *t;
    char path[128];

    (void)state;
    snprintf(path, sizeof path, "%s/rt.safetensors", dir);
    mr_st_out_add(o, "u", MR_ST_U8, &s5, 1, u);
    mr_st_out_add(o, "f", MR_ST_F32, &s3, 1, f);
    mr_st_out_add(o, "h", MR_ST_F16, &s3, 1, h);
    mr_st_out_add(o, "i\"\xc3\xa9", MR_ST_I64, s2, 2, i);
    mr_st_out_meta(o, "format", "pt");
    assert_int_equal(mr_st_out_write(o, path, &err), 0);
    mr_st_out_free(o);
    assert_int_equal(mr_st_open(&st, path, &err), 0);
    assert_int_equal(st.n, 4);
    assert_string_equal(json_string_value(json_object_get(st.metadata, "format")), "pt");
    t = mr_st_find(&st, "i\"\xc3\xa9");
    assert_non_null(t);
    assert_int_equal(t->begin % 8, 0);
    assert_int_equal(t->n_dims, 2);
    assert_memory_equal(mr_st_data(&st, t), i, sizeof i);
    t = mr_st_find(&st, "f");
    assert_int_equal(mr_st_to_f32(&st, t, back, &err), 0);
    assert_memory_equal(back, f, sizeof f);
    assert_int_equal(mr_st_to_f32(&st, mr_st_find(&st, "h"), back, &err), 0);
    assert_true(back[0] == 1.0f && back[1] == -2.5f && back[2] == 0x1.0p-24f);
    assert_null(mr_st_find(&st, "x"));
    assert_int_equal(mr_st_to_f32(&st, mr_st_find(&st, "u"), back, &err), -1);
    mr_st_close(&st);
    snprintf(path, sizeof path, "%s/rt.safetensors.tmp", dir);
    assert_int_not_equal(access(path, F_OK), 0);
}

static void bf16_rounding(void **state)
{
    uint32_t u;
    float x;

    (void)state;
    assert_int_equal(mr_bf16(1.0f), 0x3f80);
    u = 0x3f808000, memcpy(&x, &u, 4);
    assert_int_equal(mr_bf16(x), 0x3f80); /* tie: to even */
    u = 0x3f818000, memcpy(&x, &u, 4);
    assert_int_equal(mr_bf16(x), 0x3f82);
    u = 0x3f808001, memcpy(&x, &u, 4);
    assert_int_equal(mr_bf16(x), 0x3f81);
    u = 0x7f7fffff, memcpy(&x, &u, 4);
    assert_int_equal(mr_bf16(x), 0x7f80); /* rounds up to infinity */
    u = 0x7f800001, memcpy(&x, &u, 4);
    assert_true(isnan(mr_bf16_f32(mr_bf16(x))));
    assert_true(mr_bf16_f32(0xc020) == -2.5f);
}

static void write_errors(void **state)
{
    struct mr_st_out *o = mr_st_out_create();
    struct mr_err err = {0};
    uint64_t n = 1;
    float f = 1;

    (void)state;
    mr_st_out_add(o, "f", MR_ST_F32, &n, 1, &f);
    assert_int_equal(mr_st_out_write(o, "/nonexistent/dir/f.safetensors", &err), -1);
    assert_int_equal(err.code, MR_EXIT_ENV);
    mr_st_out_add(o, "f", MR_ST_F32, &n, 1, &f); /* the same name twice is refused, not written */
    err.code = 0;
    assert_int_equal(mr_st_out_write(o, "/tmp/never", &err), -1);
    mr_st_out_free(o);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(reference_vectors), cmocka_unit_test(wrong_types), cmocka_unit_test(other_files),
                                       cmocka_unit_test(mutations),         cmocka_unit_test(round_trip),  cmocka_unit_test(bf16_rounding),
                                       cmocka_unit_test(write_errors)};
    int rc;
    char cmd[96];

    strcpy(dir, "/tmp/mr-st-XXXXXX");
    if (!mkdtemp(dir))
        return 1;
    rc = cmocka_run_group_tests(tests, NULL, NULL);
    snprintf(cmd, sizeof cmd, "rm -r %s", dir);
    return system(cmd) || rc;
}
