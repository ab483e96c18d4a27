/* The first parameters: the same bits whatever the number of threads, with threads that cannot be made, and block by block to a device.
 *
 * Linked with --wrap (test/checkpoints.cmake): the number of processors is the test's, and threads can be refused. */
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "base/rng.h"
#include "data/drafter_config.h"
#include "data/safetensors.h"

static struct { int processors, threads, made; } machine;

int __wrap_sched_getaffinity(pid_t pid, size_t bytes, cpu_set_t *set);
int __real_pthread_create(pthread_t *t, const pthread_attr_t *a, void *(*fn)(void *), void *arg);
int __wrap_pthread_create(pthread_t *t, const pthread_attr_t *a, void *(*fn)(void *), void *arg);

int __wrap_sched_getaffinity(pid_t pid, size_t bytes, cpu_set_t *set)
{
    (void)pid;
    if (!machine.processors) {
        errno = EINVAL;
        return -1;
    }
    memset(set, 0, bytes);
    for (int i = 0; i < machine.processors; i++)
        CPU_SET((size_t)(2 * i), set);
    return 0;
}

int __wrap_pthread_create(pthread_t *t, const pthread_attr_t *a, void *(*fn)(void *), void *arg)
{
    if (machine.made == machine.threads)
        return EAGAIN;
    machine.made++;
    return __real_pthread_create(t, a, fn, arg);
}

/* What the values are: each matrix is a stream of its own, drawn from its first number to its last. */
static void plainly(const struct mr_dlayout *l, float *param, uint64_t seed, double std)
{
    memset(param, 0, l->P * sizeof *param);
    for (int i = 0; i < l->n; i++) {
        const struct mr_dparam *p = &l->t[i];
        struct mr_rng r = mr_rng_key(seed, (uint64_t)i, 0x696e6974);
        float *x = param + p->offset;

        for (uint64_t k = 0; k < p->n && !p->cols; k++)
            x[k] = 1.0f;
        for (uint64_t k = 0; k < p->n && p->cols; k += 2) {
            double u = 1.0 - mr_rng_unit(&r), w = 6.283185307179586 * mr_rng_unit(&r), radius = std * sqrt(-2.0 * log(u));

            x[k] = (float)(radius * cos(w));
            if (k + 1 < p->n)
                x[k + 1] = (float)(radius * sin(w));
        }
    }
}

/* One matrix (fc) grows with target_hidden; many others are smaller than a chunk, and of odd size. */
static void layout(struct mr_dlayout *l, int target_hidden)
{
    const struct mr_drafter_config c = {.hidden_size = 513, .intermediate_size = 77, .n_layers = 2, .n_heads = 3, .n_kv_heads = 1, .head_dim = 11,
                                        .K = 5, .target_hidden = target_hidden};

    assert_int_equal(mr_dlayout_make(l, &c), 0);
    assert_int_equal(l->t[l->fc].n % 2, 1);
}

static void threads(void **state)
{
    static const struct { int processors, threads; } with[] = {{1, 0}, {2, 64}, {3, 64}, {7, 64}, {64, 64}, {400, 64}, {0, 64}, {8, 2}, {8, 0}};
    struct mr_dlayout l;
    float *a, *b;

    (void)state;
    layout(&l, 1999);
    a = malloc(2 * l.P * sizeof *a), b = a + l.P;
    plainly(&l, a, 7, 0.02);
    for (size_t i = 0; i < sizeof with / sizeof *with; i++) {
        machine.processors = with[i].processors;
        machine.threads = with[i].threads;
        machine.made = 0;
        memset(b, 0x55, l.P * sizeof *b);
        mr_drafter_init(&l, b, 7, 0.02);
        assert_memory_equal(a, b, l.P * sizeof *a);
        if (with[i].processors < 2)
            assert_int_equal(machine.made, 0);
        else
            assert_true(machine.made > 0 || !with[i].threads);
    }
    free(a);
    mr_dlayout_free(&l);
}

/* A few hundred parameters are no work for threads. */
static void small(void **state)
{
    struct mr_dlayout l;
    float *a, *b;

    (void)state;
    layout(&l, 21);
    a = malloc(2 * l.P * sizeof *a), b = a + l.P;
    machine.processors = machine.threads = 8;
    machine.made = 0;
    plainly(&l, a, 3, 1);
    mr_drafter_init(&l, b, 3, 1);
    assert_memory_equal(a, b, l.P * sizeof *a);
    assert_int_equal(machine.made, 0);
    free(a);
    mr_dlayout_free(&l);
}

static struct { const float *next; int puts, fails; } device;

static int put(void *ctx, float *dst, const float *host, size_t n)
{
    (void)ctx;
    assert_ptr_equal(dst, device.next);              /* in order, each element once */
    device.next += n;
    if (++device.puts == device.fails)
        return -EIO;
    memcpy(dst, host, n * sizeof *dst);
    return 0;
}

static void to_device(void **state)
{
    const struct mr_st_sink sink = {NULL, put};
    struct mr_err err = {0};
    struct mr_dlayout l;
    float *a, *b;

    (void)state;
    layout(&l, 6801);
    assert_true(l.P > 2 * (8 << 20));
    a = malloc(2 * l.P * sizeof *a), b = a + l.P;
    plainly(&l, a, 5, 0.5);
    machine.processors = 3;
    machine.threads = 1000;
    device.next = b;
    assert_int_equal(mr_drafter_init_to(&l, b, 5, 0.5, &sink, &err), 0);
    assert_ptr_equal(device.next, b + l.P);
    assert_memory_equal(a, b, l.P * sizeof *a);
    assert_int_equal(device.puts, 3);
    for (device.fails = 1; device.fails <= 3; device.fails++) {
        device.puts = 0;
        device.next = b;
        assert_int_equal(mr_drafter_init_to(&l, b, 5, 0.5, &sink, &err), -1);
        assert_int_equal(err.code, 0);
        assert_int_equal(device.puts, device.fails);
    }
    free(a);
    mr_dlayout_free(&l);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(threads), cmocka_unit_test(small), cmocka_unit_test(to_device)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
