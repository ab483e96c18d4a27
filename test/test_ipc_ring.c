/* Rings: order, stale cells, lagging ends, fullness, wrap of the lap; stress with threads and with processes that are killed. */
#include "test_ipc.h"

#include <pthread.h>
#include <sched.h>
#include <sys/prctl.h>

enum { IN = MR_RING_INPUT };

/* Publishes item idx for `pos` without a push.  Its word. */
static uint64_t queued(struct rig *r, unsigned idx, unsigned pos, unsigned pub)
{
    uint64_t w = mr_w_item(MR_QUEUED, MR_NO_SLOT, 0, pos, pub);

    mr_st(&r->s.items[idx].word, w);
    return w;
}

static void start_at(struct rig *r, unsigned ring, uint64_t pos)
{
    mr_ring_at(&r->s, ring)->head = pos;
    mr_ring_at(&r->s, ring)->tail = pos;
}

TEST(test_fifo)
{
    struct rig r;
    uint64_t w;

    rig_make(&r, 1, 1, 2, 8, 1, 8);
    assert_int_equal(mr_ring_claim(&r.s, IN, MR_EXTRACTING, 1, 1, &w), -EAGAIN);
    assert_int_equal(mr_ring_peek(&r.s, IN), 0);
    for (unsigned i = 0; i < 8; i++)
        assert_int_equal(mr_ring_push(&r.s, IN, 7 - i, queued(&r, 7 - i, i, 1)), 0);
    assert_int_equal(mr_ring_live(&r.s, IN), 8);
    assert_int_equal(mr_ring_peek(&r.s, IN), 1);
    assert_int_equal(mr_ring_has(&r.s, IN, 3, r.s.items[3].word), 1);
    for (unsigned i = 0; i < 8; i++) {
        assert_int_equal(mr_ring_claim(&r.s, IN, MR_EXTRACTING, 1, 5, &w), 7 - i);
        assert_int_equal(w, mr_w_item(MR_EXTRACTING, 1, 5, i, 1));
        assert_int_equal(r.s.items[7 - i].word, w);
    }
    assert_int_equal(mr_ring_claim(&r.s, IN, MR_EXTRACTING, 1, 1, &w), -EAGAIN);
    assert_int_equal(mr_ring_live(&r.s, IN), 0);
    rig_drop(&r);
}

/* Cells of publications that are over are discarded by whoever meets them; duplicates of a live one count once. */
TEST(test_stale_and_duplicate)
{
    struct rig r;
    uint64_t w, old;

    rig_make(&r, 1, 1, 2, 8, 1, 8);
    old = queued(&r, 0, 5, 1);
    mr_ring_push(&r.s, IN, 0, old);
    w = queued(&r, 0, 5, 2);
    assert_int_equal(mr_ring_peek(&r.s, IN), 0);
    mr_ring_push(&r.s, IN, 0, old);
    mr_ring_push(&r.s, IN, 0, w);
    mr_ring_push(&r.s, IN, 0, w);
    assert_int_equal(mr_ring_claim(&r.s, IN, MR_EXTRACTING, 1, 1, &w), 0);
    assert_int_equal(mr_w_pub(w), 2);
    assert_int_equal(mr_ring_claim(&r.s, IN, MR_EXTRACTING, 1, 1, &w), -EAGAIN);
    w = queued(&r, 1, 6, 1);
    mr_ring_push(&r.s, IN, 1, w);
    r.s.items[1].word = mr_w_item(MR_READY, MR_NO_SLOT, 0, 6, 1);       /* right ticket, wrong phase */
    assert_int_equal(mr_ring_claim(&r.s, IN, MR_EXTRACTING, 1, 1, &w), -EAGAIN);
    rig_drop(&r);
}

/* A pusher that died after its cell: everybody can go on, and its item is found. */
TEST(test_lagging_tail)
{
    struct rig r;
    struct mr_ring *q;
    uint64_t w, v;

    rig_make(&r, 1, 1, 2, 8, 1, 8);
    q = mr_ring_at(&r.s, IN);
    w = queued(&r, 0, 0, 1);
    mr_ring_push(&r.s, IN, 0, w);
    q->tail--;                                                          /* as if the help had not happened */
    assert_int_equal(mr_ring_has(&r.s, IN, 0, w), 1);
    assert_int_equal(mr_ring_live(&r.s, IN), 1);
    assert_int_equal(mr_ring_claim(&r.s, IN, MR_EXTRACTING, 1, 1, &v), 0);
    assert_int_equal(q->head, 1);
    assert_int_equal(q->tail, 0);                                       /* head one ahead of a lagging tail */
    assert_int_equal(mr_ring_claim(&r.s, IN, MR_EXTRACTING, 1, 1, &v), -EAGAIN);
    assert_int_equal(mr_ring_live(&r.s, IN), 0);
    w = queued(&r, 1, 1, 1);
    assert_int_equal(mr_ring_push(&r.s, IN, 1, w), 0);
    assert_int_equal(q->tail, 2);
    assert_int_equal(mr_ring_claim(&r.s, IN, MR_EXTRACTING, 1, 1, &v), 1);
    rig_drop(&r);
}

/* A claimer that died after its claim, before the head moved. */
TEST(test_lagging_head)
{
    struct rig r;
    uint64_t w;

    rig_make(&r, 1, 1, 2, 8, 1, 8);
    for (unsigned i = 0; i < 3; i++)
        mr_ring_push(&r.s, IN, i, queued(&r, i, i, 1));
    r.s.items[0].word = mr_w_item(MR_EXTRACTING, 2, 1, 0, 1);
    assert_int_equal(mr_ring_claim(&r.s, IN, MR_EXTRACTING, 1, 1, &w), 1);
    assert_int_equal(mr_ring_claim(&r.s, IN, MR_EXTRACTING, 1, 1, &w), 2);
    rig_drop(&r);
}

/* Live cells fill the ring (only duplicates can): the hint is dropped, sweep is set, nothing spins; stale ones make room. */
TEST(test_full)
{
    struct rig r;
    uint64_t a, b, w;
    unsigned cap, n = 0;

    rig_make(&r, 1, 1, 2, 4, 1, 8);
    cap = r.s.hdr->ring_cap;
    a = queued(&r, 0, 0, 1);
    b = queued(&r, 1, 1, 1);
    while (mr_ring_push(&r.s, IN, 0, a) == 0)
        n++;
    assert_int_equal(n, cap);
    assert_int_equal(mr_ring_push(&r.s, IN, 1, b), -ENOBUFS);
    assert_int_equal(r.s.hdr->sweep, 1);
    assert_int_equal(mr_ring_has(&r.s, IN, 1, b), 0);
    assert_int_equal(mr_recover_rings(&r.s), 0);                        /* still full */
    assert_int_equal(r.s.hdr->sweep, 1);
    assert_int_equal(mr_ring_claim(&r.s, IN, MR_EXTRACTING, 1, 1, &w), 0);
    assert_int_equal(mr_recover_rings(&r.s), 1);
    assert_int_equal(r.s.hdr->sweep, 0);
    assert_int_equal(mr_recover_rings(&r.s), 0);                        /* idempotent */
    assert_int_equal(mr_ring_live(&r.s, IN), 1);
    assert_int_equal(mr_ring_claim(&r.s, IN, MR_EXTRACTING, 1, 1, &w), 1);
    rig_drop(&r);
}

TEST(test_corrupt_cell)
{
    struct rig r;
    struct mr_ring *q;
    uint64_t w;

    rig_make(&r, 1, 1, 2, 4, 1, 8);
    q = mr_ring_at(&r.s, IN);
    q->cell[0] = mr_c_make(1, 0, 0xffff);
    mr_ring_push(&r.s, IN, 2, queued(&r, 2, 0, 1));
    assert_int_equal(mr_ring_claim(&r.s, IN, MR_EXTRACTING, 1, 1, &w), 2);
    rig_drop(&r);
}

/* Three laps across the wrap of the 24-bit lap. */
TEST(test_lap_wrap)
{
    struct rig r;
    unsigned cap;
    uint64_t w;

    rig_make(&r, 1, 1, 2, 4, 1, 8);
    cap = r.s.hdr->ring_cap;
    start_at(&r, IN, (uint64_t)cap * ((1u << 24) - 2) + 3);
    for (unsigned i = 0; i < 4 * cap; i++) {
        unsigned idx = i % 3, pub = 1 + i / 3 % 4000;

        assert_int_equal(mr_ring_push(&r.s, IN, idx, queued(&r, idx, i, pub)), 0);
        if (i % 5 == 4)
            mr_ring_push(&r.s, IN, idx, r.s.items[idx].word);           /* duplicates on the way */
        assert_int_equal(mr_ring_live(&r.s, IN), i % 5 == 4 ? 2 : 1);
        assert_int_equal(mr_ring_claim(&r.s, IN, MR_EXTRACTING, 1, 1, &w), idx);
        assert_int_equal(mr_w_pos(w), i);
    }
    assert_int_equal(mr_ring_claim(&r.s, IN, MR_EXTRACTING, 1, 1, &w), -EAGAIN);
    assert_true(mr_ring_at(&r.s, IN)->tail > (uint64_t)cap << 24);
    rig_drop(&r);
}

/* R3: whatever lost its hint gets it back, new items into the input ring, others into retry or ready, in plan order. */
TEST(test_sweep)
{
    struct rig r;
    uint64_t w;

    rig_make(&r, 1, 1, 2, 8, 1, 8);
    queued(&r, 3, 9, 1), queued(&r, 4, 8, 1), queued(&r, 5, 7, 3);
    r.s.items[6].word = mr_w_item(MR_READY, MR_NO_SLOT, 0, 1, 2);
    r.s.items[6].bucket = 1;
    mr_ring_push(&r.s, IN, 3, r.s.items[3].word);
    assert_int_equal(mr_recover_rings(&r.s), 3);
    assert_int_equal(mr_ring_live(&r.s, MR_RING_RETRY), 1);
    assert_int_equal(mr_ring_live(&r.s, mr_ring_ready(1, 0)), 1);
    assert_int_equal(mr_ring_live(&r.s, IN), 2);
    assert_int_equal(mr_item_extract(&r.s, 1, 1, &w), 5);               /* retry first */
    assert_int_equal(mr_item_extract(&r.s, 1, 1, &w), 3);
    assert_int_equal(mr_item_extract(&r.s, 1, 1, &w), 4);
    rig_drop(&r);
}

/* ---- stress ------------------------------------------------------------------------------------------------------------------
 *
 * Workers move stamped items round: EXTRACTING -> QUEUED as the next microbatch, pushed; claim; check the stamp.  Per item a counter
 * is only touched by its holder, without any atomics: two holders at once are a lost update (and a tsan report). */

struct stamp {
    uint64_t count, copy;          /* plain: guarded by holding the item */
};

struct stress {
    struct rig r;
    struct stamp *stamp;           /* [items] */
    uint64_t *claims;              /* [workers], shared */
    uint64_t *bad;                 /* shared */
    unsigned items;
};

static void republish(struct stress *t, unsigned idx, uint64_t w)
{
    /* a new microbatch every time: the position moves, so tickets do not repeat for 4096 rounds */
    uint64_t n = mr_w_item(MR_QUEUED, MR_NO_SLOT, 0, (mr_w_pos(w) + 1) & MR_POS_MAX, 1);

    if (mr_cas(&t->r.s.items[idx].word, w, n))
        mr_ring_push(&t->r.s, IN, idx, n);
    else
        mr_add(t->bad, 1);
}

static void one_turn(struct stress *t, unsigned me)
{
    uint64_t w;
    int idx = mr_ring_claim(&t->r.s, IN, MR_EXTRACTING, me, 1, &w);

    if (idx < 0) {
        sched_yield();
        return;
    }
    if (t->stamp[idx].count != t->stamp[idx].copy)
        mr_add(t->bad, 1);
    t->stamp[idx].count++;
    t->stamp[idx].copy++;
    t->claims[me]++;
    republish(t, (unsigned)idx, w);
}

struct worker {
    struct stress *t;
    unsigned me, turns;
};

static void *work(void *arg)
{
    struct worker *w = arg;

    for (unsigned i = 0; i < w->turns; i++)
        one_turn(w->t, w->me);
    return NULL;
}

static void stress_make(struct stress *t, unsigned items)
{
    rig_make(&t->r, 1, 1, 2, 20, 1, 8);
    t->items = items;
    t->stamp = (struct stamp *)((char *)t->r.s.tok);
    t->claims = (uint64_t *)((char *)t->r.s.tok + 4096);
    t->bad = (uint64_t *)((char *)t->r.s.tok + 6144);
    assert_true(t->r.s.tok_bytes > 8192);
    start_at(&t->r, IN, (uint64_t)t->r.s.hdr->ring_cap * ((1u << 24) - 20));
    for (unsigned i = 0; i < items; i++)
        mr_ring_push(&t->r.s, IN, i, queued(&t->r, i, i, 1));
}

static void stress_check(struct stress *t, unsigned workers, uint64_t slack)
{
    uint64_t count = 0, claims = 0, w;
    unsigned got = 0;

    assert_int_equal(*t->bad, 0);
    for (unsigned i = 0; i < t->items; i++)
        count += t->stamp[i].count;
    for (unsigned i = 0; i < workers; i++)
        claims += t->claims[i];
    assert_true(count >= claims && count <= claims + slack);
    while (mr_ring_claim(&t->r.s, IN, MR_EXTRACTING, 1, 2, &w) >= 0)
        got++;
    assert_int_equal(got, t->items);                                    /* nothing lost, nothing twice */
}

TEST(test_threads)
{
    struct stress t = {0};
    struct worker w[4];
    pthread_t th[4];

    stress_make(&t, 11);
    for (unsigned i = 0; i < 4; i++) {
        w[i] = (struct worker){&t, i, 40000};
        pthread_create(&th[i], NULL, work, &w[i]);
    }
    for (unsigned i = 0; i < 4; i++)
        pthread_join(th[i], NULL);
    stress_check(&t, 4, 0);
    rig_drop(&t.r);
}

/* Recovery of a killed worker: its item goes back as a new publication, hints are swept. */
static void back(struct stress *t, unsigned dead)
{
    for (unsigned i = 0; i < t->items; i++) {
        uint64_t w = mr_ld(&t->r.s.items[i].word);

        if (mr_w_phase(w) != MR_EXTRACTING || mr_w_slot(w) != dead)
            continue;
        t->stamp[i].copy = t->stamp[i].count;                           /* it may have died between the two */
        mr_cas(&t->r.s.items[i].word, w, mr_w_item(MR_QUEUED, MR_NO_SLOT, 0, mr_w_pos(w) + 1, 1));
    }
    mr_recover_rings(&t->r.s);
}

static pid_t spawn(struct stress *t, unsigned me)
{
    pid_t pid = fork();

    if (pid)
        return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (;;)
        one_turn(t, me);
}

TEST(test_killed_processes)
{
    struct stress t = {0};
    unsigned seed = (unsigned)getpid(), kills = 300;
    pid_t pid[4];

    STRESS();
    print_message("seed %u\n", seed);
    srand(seed);
    stress_make(&t, 5);
    for (unsigned i = 0; i < 4; i++)
        pid[i] = spawn(&t, i);
    for (unsigned n = 0; n < kills; n++) {
        unsigned v = (unsigned)rand() % 4;

        usleep((unsigned)rand() % 1500);
        kill(pid[v], SIGKILL);
        waitpid(pid[v], NULL, 0);
        back(&t, v);
        pid[v] = spawn(&t, v);
    }
    for (unsigned i = 0; i < 4; i++) {
        kill(pid[i], SIGKILL);
        waitpid(pid[i], NULL, 0);
        back(&t, i);
    }
    assert_true(mr_ring_at(&t.r.s, IN)->tail > (uint64_t)t.r.s.hdr->ring_cap * ((1u << 24) - 20) + 1000);
    stress_check(&t, 4, kills + 4);
    rig_drop(&t.r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fifo),         cmocka_unit_test(test_stale_and_duplicate), cmocka_unit_test(test_lagging_tail),
        cmocka_unit_test(test_lagging_head), cmocka_unit_test(test_full),                cmocka_unit_test(test_corrupt_cell),
        cmocka_unit_test(test_lap_wrap),     cmocka_unit_test(test_sweep),               cmocka_unit_test(test_threads),
        cmocka_unit_test(test_killed_processes),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
