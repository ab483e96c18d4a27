/* The drafter's gradient against finite differences of its loss, for every tensor, every mask variant, fused and separate matrices.
 *
 * Along a tensor's own gradient the loss is steepest, so f32 noise matters least there: that checks the whole tensor.  Single parameters
 * with the largest gradients are checked too.  D-PACE weights are constants for the gradient, so D-PACE is checked by golden vectors. */
#include "test/models.h"

static double loss_at(struct tiny *t, struct mr_dflash *fwd)
{
    struct mr_dflash_batch b = tiny_batch(t);
    struct mr_dflash_result r;

    assert_int_equal(mr_dflash_forward(fwd, &b, NULL, NULL, &r), 0);
    return r.loss_sum;
}

/* (L(p + h dir) - L(p - h dir)) / 2h over one tensor */
static double difference(struct tiny *t, struct mr_dflash *fwd, const struct mr_dparam *p, const float *dir, double h)
{
    float *x = t->param + p->offset, *old = malloc(p->n * sizeof *old);
    double up, down;

    assert_non_null(old);
    memcpy(old, x, p->n * sizeof *old);
    for (uint64_t i = 0; i < p->n; i++)
        x[i] = old[i] + (float)(h * (double)dir[i]);
    up = loss_at(t, fwd);
    for (uint64_t i = 0; i < p->n; i++)
        x[i] = old[i] - (float)(h * (double)dir[i]);
    down = loss_at(t, fwd);
    memcpy(x, old, p->n * sizeof *old);
    free(old);
    return (up - down) / (2 * h);
}

static void check_direction(struct tiny *t, struct mr_dflash *fwd, const struct mr_dparam *p, const float *g)
{
    float *dir = malloc(p->n * sizeof *dir);
    double norm = 0, fd;

    assert_non_null(dir);
    for (uint64_t i = 0; i < p->n; i++)
        norm += (double)g[i] * (double)g[i];
    norm = sqrt(norm);
    assert_true(norm > 1e-2);                /* a tensor that gets no gradient would pass everything */
    for (uint64_t i = 0; i < p->n; i++)
        dir[i] = (float)((double)g[i] / norm);
    fd = difference(t, fwd, p, dir, 5e-3);
    if (!(fabs(fd - norm) <= 1e-2 * norm))
        fail_msg("%s: |gradient| %g, finite difference along it %g", p->name, norm, fd);
    free(dir);
}

/* Four parameters: the one with the largest gradient, and three more a quarter of the tensor apart. */
static void check_single(struct tiny *t, struct mr_dflash *fwd, const struct mr_dparam *p, const float *g)
{
    float *dir = calloc(p->n, sizeof *dir);
    uint64_t best = 0;
    double fd, large;

    assert_non_null(dir);
    for (uint64_t i = 1; i < p->n; i++)
        if (fabsf(g[i]) > fabsf(g[best]))
            best = i;
    large = fabs((double)g[best]);
    for (uint64_t step = 0; step < 4; step++) {
        uint64_t i = (best + step * (p->n / 4 + 1)) % p->n;

        dir[i] = 1.0f;
        fd = difference(t, fwd, p, dir, 1e-2);
        dir[i] = 0.0f;
        if (!(fabs(fd - (double)g[i]) <= 2e-2 * large + 2e-3))
            fail_msg("%s[%llu]: gradient %g, finite difference %g", p->name, (unsigned long long)i, (double)g[i], fd);
    }
    free(dir);
}

static void check_all(struct tiny *t)
{
    struct mr_dflash *train = tiny_model(t, 1, 12, MR_DFLASH_LABELLED, 0), *fwd = tiny_model(t, 0, 1000, MR_DFLASH_LABELLED, 0);
    struct mr_dflash_batch b = tiny_batch(t);
    struct mr_dflash_result r;
    float *g = tiny_gradient(t, train, &b, &r);

    assert_true(fabs(r.loss_sum - loss_at(t, fwd)) < 1e-4 * r.loss_sum);
    for (int i = 0; i < t->l.n; i++) {
        check_direction(t, fwd, &t->l.t[i], g + t->l.t[i].offset);
        check_single(t, fwd, &t->l.t[i], g + t->l.t[i].offset);
    }
    free(g);
    mr_dflash_destroy(train);
    mr_dflash_destroy(fwd);
}

static void full_fused(void **state)
{
    struct tiny t;

    (void)state;
    tiny_open(&t, 32);
    check_all(&t);
    tiny_close(&t);
}

static void full_separate(void **state)
{
    struct tiny t;

    (void)state;
    tiny_open(&t, 20);
    check_all(&t);
    tiny_close(&t);
}

static void window(int causal, int origin)
{
    struct tiny t;

    tiny_open(&t, 32);
    t.c.sliding_window = 5;
    t.c.sliding[0] = 1;
    t.c.causal[0] = (unsigned char)causal;
    t.c.window_origin = origin;
    check_all(&t);
    tiny_close(&t);
}

static void window_causal_from_query(void **state)
{
    (void)state;
    window(1, 0);
}

static void window_open_from_anchor(void **state)
{
    (void)state;
    window(0, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(full_fused),
        cmocka_unit_test(full_separate),
        cmocka_unit_test(window_causal_from_query),
        cmocka_unit_test(window_open_from_anchor),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
