/* Items, slabs and arenas: every transition, and every way to be too late. */
#include "test_ipc.h"

TEST(test_life)
{
    struct rig r;
    uint64_t w, x;
    unsigned d;
    int idx, slab;

    rig_make(&r, 1, 1, 2, 4, 1, 8);
    d = rig_drafter(&r, 0);
    idx = mr_item_fill(&r.s, 0, 1, 3, &w);
    assert_int_equal(idx, 3);                                            /* the search starts at the position */
    assert_int_equal(w, mr_w_item(MR_FILLING, 0, 1, 3, 0));
    r.s.items[idx].bucket = 1;
    assert_int_equal(mr_item_queue(&r.s, 3, &w), 0);
    assert_int_equal(w, mr_w_item(MR_QUEUED, MR_NO_SLOT, 0, 3, 1));
    slab = mr_slab_take(&r.s, 0, 1, 9);
    assert_int_equal(mr_item_extract(&r.s, 1, 9, &w), 3);
    assert_int_equal(w, mr_w_item(MR_EXTRACTING, 1, 9, 3, 1));
    assert_int_equal(mr_slab_assign(&r.s, (unsigned)slab, 1, 9, 3, 3), 0);
    assert_int_equal(r.s.items[3].slab, slab);
    assert_true(r.s.items[3].generation == 1 && r.s.items[3].bytes == 4096);
    x = w;
    assert_int_equal(mr_item_ready(&r.s, 3, &w), 0);
    assert_int_equal(w, mr_w_item(MR_READY, MR_NO_SLOT, 0, 3, 2));
    assert_int_equal(mr_item_ready(&r.s, 3, &x), -ESTALE);               /* only from the exact word */
    assert_int_equal(mr_item_draft(&r.s, 0, 0, d, 1, &w), -EAGAIN);      /* another bucket */
    assert_int_equal(mr_item_draft(&r.s, 1, 1, d, 1, &w), -EAGAIN);      /* another epoch */
    assert_int_equal(mr_item_draft(&r.s, 1, 0, d, 1, &w), 3);
    assert_int_equal(mr_item_draft(&r.s, 1, 0, d, 1, &x), -EAGAIN);
    assert_int_equal(mr_item_accumulated(&r.s, 3, &w), 0);
    assert_int_equal(w, mr_w_item(MR_ACCUMULATED, d, 1, 3, 2));
    assert_int_equal(mr_item_accumulated(&r.s, 3, &x), -ESTALE);
    x = w;
    assert_int_equal(mr_item_free(&r.s, 3, &w), 0);
    assert_int_equal(mr_w_phase(w), MR_FREE);
    assert_int_equal(r.s.slabs[slab].word, 0);
    assert_int_equal(mr_item_free(&r.s, 3, &x), -ESTALE);
    rig_drop(&r);
}

TEST(test_table_full)
{
    struct rig r;
    unsigned n = 0;
    uint64_t w;

    rig_make(&r, 1, 1, 2, 4, 1, 8);
    while (mr_item_fill(&r.s, 0, 1, n, &w) >= 0)
        n++;
    assert_int_equal(n, r.s.hdr->n_items);
    mr_recover_feeder(&r.s, 0, 1);
    assert_int_equal(rig_count(&r, MR_FREE), n);
    rig_drop(&r);
}

TEST(test_draft_by_position)
{
    struct rig r;
    uint64_t w;

    rig_make(&r, 1, 1, 2, 4, 1, 8);
    for (unsigned i = 0; i < 3; i++)
        rig_feed(&r, i), rig_extract(&r, 1);
    assert_int_equal(mr_item_draft_pos(&r.s, 7, 2, 1, &w), -EAGAIN);
    assert_int_equal(mr_item_draft_pos(&r.s, 2, 2, 1, &w), 2);
    assert_int_equal(mr_item_draft_pos(&r.s, 2, 2, 1, &w), -EAGAIN);
    assert_int_equal(mr_item_draft(&r.s, 0, 0, 2, 1, &w), 0);
    assert_int_equal(mr_item_draft(&r.s, 0, 0, 2, 1, &w), -EAGAIN);      /* the cell of position 2 is stale */
    rig_drop(&r);
}

TEST(test_slab_words)
{
    struct rig r;

    rig_make(&r, 2, 1, 2, 3, 1, 8);
    r.s.slabs[1].device = 1;
    assert_int_equal(mr_slab_take(&r.s, 0, 1, 4), 0);
    assert_int_equal(mr_slab_take(&r.s, 1, 2, 4), 1);                    /* only its own device */
    assert_int_equal(mr_slab_take(&r.s, 1, 2, 4), -EAGAIN);
    assert_int_equal(mr_slab_give(&r.s, 0, 1, 5), -ESTALE);              /* another incarnation */
    assert_int_equal(mr_slab_give(&r.s, 0, 2, 4), -ESTALE);
    assert_int_equal(mr_slab_give(&r.s, 0, 1, 4), 0);
    assert_int_equal(mr_slab_give(&r.s, 0, 1, 4), -ESTALE);
    assert_int_equal(mr_slab_assign(&r.s, 0, 1, 4, 0, 0), -ESTALE);      /* not held */
    assert_int_equal(mr_slab_assign(&r.s, 1, 2, 4, 7, 1000), 0);
    assert_int_equal(mr_slab_free(&r.s, 1, 7, 1001), -ESTALE);
    assert_int_equal(mr_slab_free(&r.s, 1, 7, 1000), 0);
    assert_int_equal(mr_slab_free(&r.s, 1, 7, 1000), -ESTALE);
    assert_int_equal(mr_slab_free(&r.s, 4000, 7, 1000), -ESTALE);
    mr_st(&r.s.arenas[0].generation, (uint64_t)0);
    assert_int_equal(mr_slab_take(&r.s, 0, 1, 4), -EAGAIN);
    rig_drop(&r);
}

/* Every publication wakes who may go on. */
TEST(test_bumps)
{
    struct rig r;
    struct mr_evc *e;
    uint32_t f, t, d;
    uint64_t w;
    unsigned place, rr = 0, me;
    int idx;

    rig_make(&r, 1, 1, 1, 2, 1, 4);
    e = r.s.hdr->evc;
    me = rig_drafter(&r, 0);
#define MARK() (f = mr_evc_read(&e[MR_FEEDER]), t = mr_evc_read(&e[MR_TARGET]), d = mr_evc_read(&e[MR_DRAFTER]))
#define MOVED(kind, old) assert_int_not_equal(mr_evc_read(&e[kind]), old)
    MARK();
    rig_feed(&r, 0);
    MOVED(MR_TARGET, t);
    MARK();
    rig_extract(&r, 1);
    MOVED(MR_DRAFTER, d);
    MARK();
    assert_int_equal(mr_place_take(&r.s, 0, 0, me, 1), 0);
    assert_int_equal(mr_place_give(&r.s, 0, 0, me, 1), 0);
    MOVED(MR_DRAFTER, d);
    idx = mr_place_claim(&r.s, 0, me, 1, &rr, &place, &w);
    assert_true(idx >= 0);
    mr_item_accumulated(&r.s, (unsigned)idx, &w);
    MARK();
    mr_place_done(&r.s, 0, place, me, 1);
    MOVED(MR_DRAFTER, d);
    MARK();
    mr_item_free(&r.s, (unsigned)idx, &w);
    MOVED(MR_FEEDER, f);
    MOVED(MR_TARGET, t);
    MARK();
    mr_step_repair_begin(&r.s);
    MOVED(MR_DRAFTER, d);
    MARK();
    mr_step_repair_end(&r.s);
    MOVED(MR_DRAFTER, d);
    MARK();
    mr_step_join(&r.s, me);
    MOVED(MR_DRAFTER, d);
    mr_ckpt_claim(&r.s, 1, me, 1);
    MARK();
    mr_ckpt_read(&r.s, 1, me, 1);
    MOVED(MR_DRAFTER, d);
    MARK();
    mr_ckpt_done(&r.s, 1, me, 1);
    MOVED(MR_DRAFTER, d);
    MARK();
    mr_recover(&r.s, 0, 1);
    MOVED(MR_DRAFTER, d), MOVED(MR_FEEDER, f), MOVED(MR_TARGET, t);
    rig_drop(&r);
}

/* ---- arenas ---------------------------------------------------------------------------------------------------------------- */

TEST(test_shm_arena)
{
    struct mr_arena_map *m = calloc(1, sizeof *m);
    struct mr_err err = {0};
    struct mr_seg ro;
    struct rig r;
    char *a, *b;

    rig_make(&r, 1, 2, 2, 3, 1, 8);
    assert_null(mr_arena_base(m, &r.s, 1, 0, &err));                     /* not registered */
    assert_int_equal(err.code, MR_EXIT_FAILED);
    err.code = 0;
    assert_int_equal(mr_arena_create_shm(&r.s, 1, 10000, &err), 0);
    assert_int_equal(mr_arena_create_shm(&r.s, 1, 10000, &err), -1);     /* the name is taken */
    assert_int_equal(err.code, MR_EXIT_ENV);
    err.code = 0;
    a = mr_arena_base(m, &r.s, 1, 0, &err);
    assert_non_null(a);
    for (unsigned i = 0; i < 10000; i += 999)
        assert_int_equal(a[i], 0);
    assert_ptr_equal(mr_arena_base(m, &r.s, 1, 1, &err), a);             /* cached */
    strcpy(a, "hidden states");
    assert_null(mr_arena_base(m, &r.s, 1, 2, &err));                     /* a generation that is not current */
    err.code = 0;
    assert_int_equal(mr_seg_open(&ro, r.run, 0, &err), 0);
    mr_arena_close_all(m);
    b = mr_arena_base(m, &ro, 1, 0, &err);
    assert_string_equal(b, "hidden states");                             /* read-only through a read-only view */
    mr_arena_close_all(m);
    a = mr_arena_base(m, &r.s, 1, 0, &err);
    assert_int_equal(mr_arena_register(&r.s, 1), 2);
    b = mr_arena_base(m, &r.s, 1, 0, &err);
    assert_non_null(b);
    assert_string_equal(a, "hidden states");                             /* the old mapping stays while work on it may be in flight */
    assert_string_equal(b, "hidden states");
    mr_arena_close_all(m);
    mr_arena_close_all(m);
    r.s.arenas[1].bytes = 1 << 20;                                       /* a row that promises more than the file has */
    assert_null(mr_arena_base(m, &r.s, 1, 0, &err));
    mr_seg_close(&ro);
    rig_drop(&r);
    free(m);
}

static void *fake_open(const struct mr_arena_row *row, void *ctx, struct mr_err *err)
{
    (void)err;
    ++*(int *)ctx;
    return row->bytes == 77 ? ctx : NULL;
}

static void fake_close(void *base, const struct mr_arena_row *row, void *ctx)
{
    assert_ptr_equal(base, ctx);
    assert_int_equal(row->bytes, 77);
    *(int *)ctx += 100;
}

TEST(test_cuda_opener)
{
    struct mr_arena_map *m = calloc(1, sizeof *m);
    struct mr_err err = {0};
    struct rig r;
    int calls = 0;

    rig_make(&r, 1, 1, 2, 3, 1, 8);
    r.s.arenas[1].export_kind = MR_EXPORT_CUDA_IPC;
    r.s.arenas[1].bytes = 77;
    mr_arena_register(&r.s, 1);
    assert_null(mr_arena_base(m, &r.s, 1, 0, &err));                     /* no opener: a clear refusal */
    assert_int_equal(err.code, MR_EXIT_ENV);
    m->open_cuda = fake_open, m->close_cuda = fake_close, m->ctx = &calls;
    assert_ptr_equal(mr_arena_base(m, &r.s, 1, 0, &err), &calls);
    assert_ptr_equal(mr_arena_base(m, &r.s, 1, 1, &err), &calls);
    assert_int_equal(calls, 1);
    mr_arena_close_all(m);
    assert_int_equal(calls, 101);
    rig_drop(&r);
    free(m);
}

TEST(test_arena_no_room)
{
    struct mr_err err = {0};
    struct rig r;

    rig_make(&r, 1, 1, 2, 3, 1, 8);
    assert_int_equal(mr_arena_create_shm(&r.s, 1, 1ull << 50, &err), -1);
    assert_int_equal(err.code, MR_EXIT_ENV);
    assert_non_null(strstr(err.msg, "available"));
    assert_true(r.s.arenas[1].generation == 0);
    rig_drop(&r);
}

TEST(test_drafter_view)
{
    uint64_t bytes = mr_drafter_arena_bytes(1001);
    char *mem = aligned_alloc(128, (bytes + 127) & ~127ull);
    struct mr_drafter_view v = mr_drafter_view_at(mem, 1001);
    float *const part[8] = {v.param[0], v.m[0], v.v[0], v.param[1], v.m[1], v.v[1], v.acc, v.reduced};

    for (int i = 0; i < 8; i++) {
        assert_true((uintptr_t)part[i] % 128 == 0);
        assert_true((char *)part[i] >= (i ? (char *)(part[i - 1] + 1001) : mem + sizeof *v.hdr));
        assert_true((char *)(part[i] + 1001) <= mem + bytes);
    }
    free(mem);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_life),       cmocka_unit_test(test_table_full),  cmocka_unit_test(test_draft_by_position),
        cmocka_unit_test(test_slab_words), cmocka_unit_test(test_bumps),       cmocka_unit_test(test_shm_arena),
        cmocka_unit_test(test_cuda_opener), cmocka_unit_test(test_arena_no_room), cmocka_unit_test(test_drafter_view),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
