/* Weights arenas: one loader, deaths of loader and keeper, seals that must not land on the wrong generation; a keeper whose index is not its
 * device's; mappings of a dead keeper's memory. */
#include "test/test_ipc.h"

#include "ipc/arena.h"
#include "ipc/recover.h"

enum { WEIGHTS = 0, A = 1, B = 2 };      /* slots of two targets */

static void as_weights(struct rig *r)
{
    r->s.arenas[WEIGHTS].use = MR_ARENA_WEIGHTS;
    r->s.arenas[WEIGHTS].export_kind = MR_EXPORT_CUDA_IPC;
}

static void one_loads_the_others_wait(void **state)
{
    struct rig r;

    (void)state;
    rig_make(&r, 2, 1, 1, 2, 1, 4);
    as_weights(&r);
    assert_int_equal(mr_arena_load(&r.s, WEIGHTS, 1, A, 1), 0);
    assert_int_equal(mr_arena_load(&r.s, WEIGHTS, 1, A, 1), 0);        /* asked twice: still mine */
    assert_int_equal(mr_arena_load(&r.s, WEIGHTS, 1, B, 1), -EAGAIN);
    assert_int_equal(mr_arena_seal(&r.s, WEIGHTS, 1, 77, B, 1), -ESTALE);
    assert_int_equal(mr_arena_seal(&r.s, WEIGHTS, 1, 77, A, 1), 0);
    assert_int_equal(mr_arena_load(&r.s, WEIGHTS, 1, B, 1), 1);
    assert_int_equal(r.s.arenas[WEIGHTS].fingerprint, 77);
    assert_int_equal(mr_arena_load(&r.s, WEIGHTS, 2, B, 1), -ESTALE);
    rig_drop(&r);
}

static void a_dead_loader_is_replaced(void **state)
{
    struct rig r;

    (void)state;
    rig_make(&r, 2, 1, 1, 2, 1, 4);
    as_weights(&r);
    assert_int_equal(mr_arena_load(&r.s, WEIGHTS, 1, A, 1), 0);
    mr_recover(&r.s, B, 1);                                            /* the death of another one changes nothing */
    assert_int_equal(mr_arena_load(&r.s, WEIGHTS, 1, B, 2), -EAGAIN);
    mr_recover(&r.s, A, 1);
    assert_int_equal(mr_arena_load(&r.s, WEIGHTS, 1, B, 2), 0);
    assert_int_equal(mr_arena_seal(&r.s, WEIGHTS, 1, 77, A, 1), -ESTALE);
    assert_int_equal(mr_arena_seal(&r.s, WEIGHTS, 1, 77, B, 2), 0);
    assert_int_equal(mr_arena_recover_loader(&r.s, B, 2), 0);          /* a seal outlives its loader */
    assert_int_equal(mr_arena_load(&r.s, WEIGHTS, 1, A, 2), 1);
    rig_drop(&r);
}

static void a_new_generation_is_empty(void **state)
{
    struct rig r;

    (void)state;
    rig_make(&r, 2, 1, 1, 2, 1, 4);
    as_weights(&r);
    assert_int_equal(mr_arena_load(&r.s, WEIGHTS, 1, A, 1), 0);
    mr_recover_arena(&r.s, WEIGHTS);
    assert_int_equal(mr_arena_load(&r.s, WEIGHTS, 1, B, 1), -ESTALE);
    mr_arena_unseal(&r.s, WEIGHTS);
    assert_int_equal(mr_arena_register(&r.s, WEIGHTS), 2);
    /* the loader of the memory that is gone is late, with the old generation and with the new one */
    assert_int_equal(mr_arena_seal(&r.s, WEIGHTS, 1, 77, A, 1), -ESTALE);
    assert_int_equal(mr_arena_seal(&r.s, WEIGHTS, 2, 77, A, 1), -ESTALE);
    assert_int_equal(mr_arena_load(&r.s, WEIGHTS, 2, B, 1), 0);
    rig_drop(&r);
}

/* Devices: 0 = cpu, 1 = the GPU of keeper/0.  Its weights and slabs go, the cpu's do not. */
static void keeper_by_index_not_by_device(void **state)
{
    struct rig r;

    (void)state;
    rig_make(&r, 2, 1, 1, 2, 1, 4);
    rig_row(&r, A, MR_KEEPER, 0);
    r.s.arenas[1] = (struct mr_arena_row){.use = MR_ARENA_WEIGHTS, .owner = 0, .device = 1, .export_kind = MR_EXPORT_CUDA_IPC};
    mr_arena_register(&r.s, 1);
    assert_int_equal(r.s.arenas[0].generation, 1);
    mr_recover(&r.s, A, 1);
    assert_int_equal(r.s.arenas[0].generation, 1);
    assert_int_equal(r.s.arenas[1].generation, 0);
    rig_drop(&r);
}

struct opened {
    int open, closed;
    char memory[2];
};

static void *open_fake(const struct mr_arena_row *row, void *ctx, struct mr_err *err)
{
    struct opened *o = ctx;

    (void)err;
    o->open++;
    return &o->memory[row->generation & 1];
}

static void close_fake(void *base, const struct mr_arena_row *row, void *ctx)
{
    struct opened *o = ctx;

    assert_ptr_equal(base, &o->memory[row->generation & 1]);
    o->closed++;
}

static void stale_mappings_are_closed(void **state)
{
    struct opened o = {0};
    struct mr_arena_map m = {.open_cuda = open_fake, .close_cuda = close_fake, .ctx = &o};
    struct mr_err err = {0};
    struct rig r;

    (void)state;
    rig_make(&r, 1, 1, 1, 2, 1, 4);
    r.s.arenas[0].use = MR_ARENA_SLABS;
    r.s.arenas[0].export_kind = MR_EXPORT_CUDA_IPC;
    assert_ptr_equal(mr_arena_base(&m, &r.s, 0, 0, &err), &o.memory[1]);
    mr_arena_close_stale(&m, &r.s);
    assert_int_equal(o.closed, 0);
    mr_recover_arena(&r.s, 0);
    mr_arena_close_stale(&m, &r.s);
    assert_int_equal(o.closed, 1);
    assert_null(mr_arena_base(&m, &r.s, 0, 0, &err));
    mr_arena_register(&r.s, 0);
    assert_ptr_equal(mr_arena_base(&m, &r.s, 0, 0, &err), &o.memory[0]);
    mr_arena_close_all(&m);
    assert_int_equal(o.open, 2);
    assert_int_equal(o.closed, 2);
    rig_drop(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_loads_the_others_wait),     cmocka_unit_test(a_dead_loader_is_replaced),
        cmocka_unit_test(a_new_generation_is_empty),     cmocka_unit_test(keeper_by_index_not_by_device),
        cmocka_unit_test(stale_mappings_are_closed),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
