/* Segments and their names: creation, what open refuses, who owns a run, what clean removes; damaged segments never crash a reader. */
#include "test_ipc.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <utime.h>

#include "base/rng.h"

static void path_of(char path[128], const char *run, const char *kind)
{
    snprintf(path, 128, "/dev/shm/millrace-%s.%s", run, kind);
}

static int exists(const char *run, const char *kind)
{
    char path[128];

    path_of(path, run, kind);
    return access(path, F_OK) == 0;
}

static void touch(const char *run, const char *kind, int old)
{
    char path[128];
    int fd;

    path_of(path, run, kind);
    fd = open(path, O_RDWR | O_CREAT, 0600);
    assert_true(fd >= 0);
    close(fd);
    if (old)
        assert_int_equal(utime(path, &(struct utimbuf){1, 1}), 0);
}

TEST(test_create_open)
{
    struct mr_err err = {0};
    struct mr_seg o;
    struct stat st;
    struct rig r;
    char path[128];

    rig_make(&r, 2, 3, 6, 7, 2, 9);
    path_of(path, r.run, "ctl");
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    assert_true((uint64_t)st.st_size == r.s.hdr->total_bytes);
    assert_int_equal(mr_seg_open(&o, r.run, 0, &err), 0);
    assert_int_equal(o.writable, 0);
    assert_int_equal(o.hdr->n_places, 6);
    assert_int_equal(mr_sw_phase(mr_step_read(&o)), MR_COLLECT);
    assert_true((char *)o.epochs + (o.hdr->n_epochs + 1) * sizeof *o.epochs <= (char *)o.ctl + o.ctl_bytes);
    assert_true((char *)(mr_record(&o, 1, 5) + 1) == (char *)mr_slot_sums_at(&o, 0, 0));
    assert_true(mr_slot_sums_at(&o, 1, 0) == mr_slot_sums_at(&o, 0, 5) + 7);
    assert_true((char *)(mr_slot_sums_at(&o, 1, 5) + 7) <= (char *)o.slabs);
    assert_true((uintptr_t)o.items % 128 == 0 && (uintptr_t)o.records % 128 == 0 && (uintptr_t)mr_ring_at(&o, 3) % 128 == 0);
    assert_true(o.hdr->ring_cap >= 4 * o.hdr->n_items);
    mr_seg_close(&o);
    mr_seg_close(&o);                                   /* a zeroed object is fine */
    assert_int_equal(mr_seg_open(&o, r.run, 1, &err), 0);
    o.items[0].n_tokens = 77;
    assert_int_equal(r.s.items[0].n_tokens, 77);
    mr_seg_close(&o);
    rig_drop(&r);
    assert_false(exists(r.run, "ctl") || exists(r.run, "tok") || exists(r.run, "plan"));
    assert_int_equal(mr_seg_open(&o, r.run, 0, &err), -1);
}

TEST(test_bytes_are_exact)
{
    struct rig r;
    struct mr_seg_params p;

    rig_make(&r, 2, 2, 4, 5, 2, 9);
    p = rig_params(r.run, 2, 2, 4, 5, 2, 9);
    assert_true(mr_seg_bytes(&p) == r.s.ctl_bytes + r.s.tok_bytes + r.s.plan_bytes);
    rig_drop(&r);
}

/* The last byte of every part of .tok and .plan lies inside, and no two parts overlap. */
TEST(test_tok_and_plan)
{
    struct rig r;
    struct mr_plan_view a, b;

    rig_make(&r, 1, 1, 2, 3, 2, 5);
    for (unsigned i = 0; i < r.s.hdr->n_items; i++) {
        struct mr_tok t = mr_tok_at(&r.s, i);

        memset(t.ids, (int)i + 1, 4 * 64);
        memset(t.cu, (int)i + 51, 4 * 9);
        memset(t.sample, (int)i + 101, 4 * 8);
        memset(t.mask, (int)i + 151, 64);
        assert_true((char *)t.mask + 64 <= (char *)r.s.tok + r.s.tok_bytes);
    }
    for (unsigned i = 0; i < r.s.hdr->n_items; i++) {
        struct mr_tok t = mr_tok_at(&r.s, i);

        assert_int_equal(((uint8_t *)t.ids)[255], i + 1);
        assert_int_equal(((uint8_t *)t.cu)[35], i + 51);
        assert_int_equal(((uint8_t *)t.sample)[31], i + 101);
        assert_int_equal(t.mask[63], i + 151);
    }
    a = mr_plan_at(&r.s, 0), b = mr_plan_at(&r.s, 1);
    assert_true((char *)(a.entry + 5) <= (char *)a.sample && (char *)(a.sample + 5) <= (char *)b.hdr);
    assert_true((char *)(b.sample + 5) <= (char *)r.s.plan + r.s.plan_bytes);
    assert_ptr_equal(mr_plan_at(&r.s, 2).hdr, a.hdr);
    rig_drop(&r);
}

TEST(test_refused_parameters)
{
    struct mr_err err = {0};
    struct mr_seg s;
    struct mr_seg_params p = rig_params("bad/name", 1, 1, 2, 3, 1, 5), q = rig_params("test-q", 1, 13, 13, 3, 1, 5);

    assert_int_equal(mr_seg_create(&s, &p, &err), -1);
    assert_int_equal(err.code, MR_EXIT_CONFIG);
    err.code = 0;
    assert_int_equal(mr_seg_create(&s, &q, &err), -1);      /* 13 drafters do not fit the step word */
    assert_non_null(strstr(err.msg, "n_drafters"));
    err.code = 0;
    q.n_drafters = 1;
    q.block_slots = MR_MAX_BLOCK;
    assert_int_equal(mr_seg_create(&s, &q, &err), -1);
    assert_non_null(strstr(err.msg, "block_slots"));
    for (const char *const *name = (const char *const[]){"", ".", "..", "a b", "x/../y", NULL}; *name; name++)
        assert_int_equal(mr_seg_open(&s, *name, 0, NULL), -1);
    assert_int_equal(mr_seg_open(&s, "0123456789012345678901234567890123456789012345678", 0, NULL), -1);
}

TEST(test_name_is_reserved)
{
    struct mr_err err = {0};
    struct mr_seg s;
    struct rig r;
    struct mr_seg_params p;

    rig_make(&r, 1, 1, 2, 3, 1, 5);
    p = rig_params(r.run, 1, 1, 2, 3, 1, 5);
    assert_int_equal(mr_seg_create(&s, &p, &err), -1);
    assert_int_equal(err.code, MR_EXIT_ENV);
    assert_non_null(strstr(err.msg, "exists"));
    assert_true(exists(r.run, "ctl") && exists(r.run, "tok") && exists(r.run, "plan"));   /* the live run is untouched */
    rig_drop(&r);
}

TEST(test_no_room)
{
    struct mr_err err = {0};
    struct mr_seg s;
    char run[32];
    struct mr_seg_params p = rig_params(run, 1, 1, 2, 4000, 1, 5);

    snprintf(run, sizeof run, "test-%d-big", (int)getpid());
    p.token_budget = 1u << 26;                              /* over a terabyte of tokens */
    assert_int_equal(mr_seg_create(&s, &p, &err), -1);
    assert_int_equal(err.code, MR_EXIT_ENV);
    assert_non_null(strstr(err.msg, "bytes needed"));
    assert_false(exists(run, "ctl") || exists(run, "tok") || exists(run, "plan"));
}

/* ---- owners ---------------------------------------------------------------------------------------------------------------- */

/* A run whose supervisor is a child. */
static void foreign_run(char run[32], pid_t *pid)
{
    int fd[2];
    char c;

    snprintf(run, 32, "test-%d-owned", (int)getpid());
    assert_int_equal(pipe(fd), 0);
    *pid = fork();
    if (*pid == 0) {
        struct mr_seg_params p = rig_params(run, 1, 1, 2, 3, 1, 5);
        struct mr_seg s;

        if (mr_seg_create(&s, &p, NULL) || write(fd[1], "x", 1) != 1)
            _exit(1);
        pause();
        _exit(0);
    }
    close(fd[1]);
    assert_int_equal(read(fd[0], &c, 1), 1);
    close(fd[0]);
}

TEST(test_owner_alive)
{
    char run[32];
    struct rig r;
    pid_t pid;

    rig_make(&r, 1, 1, 2, 3, 1, 5);
    assert_int_equal(mr_seg_owner_alive(r.run), 1);
    assert_int_equal(mr_seg_clean(r.run), 1);
    assert_true(exists(r.run, "ctl"));
    r.s.hdr->sup_start++;                                   /* the pid was reused by a younger process */
    assert_int_equal(mr_seg_owner_alive(r.run), 0);
    r.s.hdr->sup_start--;
    r.s.hdr->sup_pidns++;                                   /* another container: its pids mean nothing here */
    assert_int_equal(mr_seg_owner_alive(r.run), -1);
    assert_int_equal(mr_seg_clean(r.run), -1);
    assert_true(exists(r.run, "ctl"));
    r.s.hdr->sup_pidns--;
    r.s.hdr->boot_id[0] ^= 1;
    assert_int_equal(mr_seg_owner_alive(r.run), 0);
    rig_drop(&r);

    foreign_run(run, &pid);
    assert_int_equal(mr_seg_owner_alive(run), 1);
    kill(pid, SIGKILL);
    assert_int_equal(waitid(P_PID, (id_t)pid, &(siginfo_t){0}, WEXITED | WNOWAIT), 0);
    assert_int_equal(mr_seg_owner_alive(run), 0);           /* a zombie owns nothing, reaped or not */
    waitpid(pid, NULL, 0);
    assert_int_equal(mr_seg_owner_alive(run), 0);
    touch(run, "a0", 0);
    touch(run, "a12", 0);
    touch(run, "sock", 0);
    assert_int_equal(mr_seg_clean(run), 0);
    for (const char *const *k = (const char *const[]){"ctl", "tok", "plan", "sock", "a0", "a12", NULL}; *k; k++)
        assert_false(exists(run, *k));
    assert_true(mr_pid_start((int)getpid()) != 0);
    assert_true(mr_pid_start(pid) == 0 && mr_pid_start(0) == 0 && mr_pid_start(-1) == 0);
}

TEST(test_unfinished_creation)
{
    struct mr_seg s;
    char run[32];

    snprintf(run, sizeof run, "test-%d-half", (int)getpid());
    touch(run, "ctl", 0);
    assert_int_equal(mr_seg_owner_alive(run), -1);          /* young: somebody may be at it */
    assert_int_equal(mr_seg_clean(run), -1);
    assert_int_equal(mr_seg_open(&s, run, 0, NULL), -1);
    touch(run, "ctl", 1);
    assert_int_equal(mr_seg_owner_alive(run), 0);
    assert_int_equal(mr_seg_clean(run), 0);
    touch(run, "tok", 0);                                   /* without .ctl nobody owns it */
    assert_int_equal(mr_seg_owner_alive(run), 0);
    assert_int_equal(mr_seg_clean(run), 0);
    assert_false(exists(run, "tok") || exists(run, "ctl"));
}

/* A creator killed at any point leaves names that open refuses and clean removes. */
TEST(test_creator_killed)
{
#ifdef MR_FAULT_POINTS
    static const char *const at[] = {"ipc.seg.created:1", "ipc.seg.allocated:1", "ipc.seg.created:2", "ipc.seg.allocated:2",
                                     "ipc.seg.allocated:3", "ipc.seg.filled:1"};
    char run[32];

    snprintf(run, sizeof run, "test-%d-dies", (int)getpid());
    for (size_t i = 0; i < sizeof at / sizeof at[0]; i++) {
        struct mr_seg_params p = rig_params(run, 1, 1, 2, 3, 1, 5);
        struct mr_seg s;
        int status;
        pid_t pid = fork();

        if (pid == 0) {
            setenv("MR_FAULT", at[i], 1);
            mr_point_init("supervisor");
            mr_seg_create(&s, &p, NULL);
            _exit(0);
        }
        waitpid(pid, &status, 0);
        assert_true(WIFSIGNALED(status));
        assert_int_equal(mr_seg_open(&s, run, 0, NULL), -1);
        assert_int_equal(mr_seg_clean(run), 0);      /* at once: even an unfinished segment names its owner */
        assert_false(exists(run, "ctl") || exists(run, "tok") || exists(run, "plan"));
    }
#else
    skip();
#endif
}

struct seen {
    const char *want;
    int n, alive;
};

static void see(const char *run, int alive, void *arg)
{
    struct seen *s = arg;

    if (!strcmp(run, s->want)) {
        s->n++;
        s->alive = alive;
    }
}

/* Runs "x" and "x.a1" have names that look alike: millrace-x.a1 is an arena, millrace-x.a1.ctl another run. */
TEST(test_each_and_lookalikes)
{
    struct seen mine = {0}, other = {0};
    char name[40], like[48];
    struct rig r;

    rig_make(&r, 1, 1, 2, 3, 1, 5);
    snprintf(like, sizeof like, "%s.a1", r.run);
    snprintf(name, sizeof name, "%s", r.run);
    touch(r.run, "a1", 0);
    touch(like, "ctl", 1);
    mine.want = name;
    other.want = like;
    mr_seg_each(see, &mine);
    mr_seg_each(see, &other);
    assert_int_equal(mine.n, 1);
    assert_int_equal(mine.alive, 1);
    assert_int_equal(other.n, 1);
    assert_int_equal(other.alive, 0);
    rig_drop(&r);
    assert_false(exists(r.run, "a1"));
    assert_true(exists(like, "ctl"));
    mr_seg_unlink(like);
}

/* ---- damage ---------------------------------------------------------------------------------------------------------------- */

/* Opens read-only and dumps, in a child: 1 = opened, 0 = refused with a message, a crash fails the test. */
static int try_dump(const char *run)
{
    struct mr_err err = {0};
    struct mr_seg s;
    FILE *f;

    if (mr_seg_open(&s, run, 0, &err)) {
        assert_true(err.code == MR_EXIT_ENV && err.msg[0]);
        return 0;
    }
    f = fopen("/dev/null", "w");
    assert_non_null(f);
    mr_dump_all(&s, f);
    fclose(f);
    mr_seg_close(&s);
    return 1;
}

/* Its names taken away, or a pipe put there, which must not be waited for. */
TEST(test_removed)
{
    static const char *const kind[] = {"plan", "tok", "ctl"};

    for (int k = 0; k < 3; k++) {
        struct mr_err err = {0};
        struct mr_seg s;
        struct rig r;
        char path[128];

        rig_make(&r, 1, 1, 2, 3, 1, 5);
        path_of(path, r.run, kind[k]);
        assert_int_equal(unlink(path), 0);
        assert_int_equal(mr_seg_open(&s, r.run, 0, &err), -1);
        assert_non_null(strstr(err.msg, "RemoveIPC"));
        assert_int_equal(mkfifo(path, 0600), 0);
        err = (struct mr_err){0};
        assert_int_equal(mr_seg_open(&s, r.run, 0, &err), -1);
        assert_non_null(strstr(err.msg, "is not a segment"));
        assert_int_equal(unlink(path), 0);
        rig_drop(&r);
    }
}

TEST(test_truncated)
{
    static const char *const kind[] = {"ctl", "tok", "plan"};
    struct rig r;
    char path[128];

    rig_make(&r, 2, 2, 4, 5, 2, 9);
    for (int k = 0; k < 3; k++) {
        struct stat st;
        void *copy;
        int fd;

        path_of(path, r.run, kind[k]);
        fd = open(path, O_RDWR);
        assert_int_equal(fstat(fd, &st), 0);
        copy = malloc((size_t)st.st_size);
        assert_true(pread(fd, copy, (size_t)st.st_size, 0) == st.st_size);
        assert_int_equal(try_dump(r.run), 1);
        for (off_t n = st.st_size - 1; n >= 0; n = n > 600 ? n - 509 : n - 1) {
            assert_int_equal(ftruncate(fd, n), 0);
            assert_int_equal(try_dump(r.run), 0);
        }
        assert_int_equal(ftruncate(fd, st.st_size + 128), 0);
        assert_int_equal(try_dump(r.run), 0);
        assert_int_equal(ftruncate(fd, st.st_size), 0);
        assert_true(pwrite(fd, copy, (size_t)st.st_size, 0) == st.st_size);
        free(copy);
        close(fd);
    }
    assert_int_equal(try_dump(r.run), 1);
    rig_drop(&r);
}

TEST(test_every_header_byte)
{
    struct rig r;
    uint8_t *b;

    rig_make(&r, 2, 2, 4, 5, 2, 9);
    b = r.s.ctl;
    for (unsigned i = 0; i < 1024; i++) {
        for (unsigned bit = 0; bit < 8; bit += 7) {
            b[i] ^= (uint8_t)(1u << bit);
            try_dump(r.run);
            if (i < offsetof(struct mr_shm_header, run_id) || (i >= offsetof(struct mr_shm_header, total_bytes) && i < 232))
                assert_int_equal(try_dump(r.run), 0);
            b[i] ^= (uint8_t)(1u << bit);
        }
    }
    assert_int_equal(try_dump(r.run), 1);
    rig_drop(&r);
}

/* Bytes anywhere, many at once: whatever opens is dumped without a crash. */
TEST(test_random_damage)
{
    struct mr_rng rng = mr_rng_key(7, 7, 7);
    unsigned opened = 0;
    struct rig r;
    uint8_t *copy;

    rig_make(&r, 2, 2, 4, 5, 2, 9);
    for (unsigned pos = 0; pos < 5; pos++)
        rig_feed(&r, pos);
    rig_extract(&r, 1);
    copy = malloc(r.s.ctl_bytes);
    memcpy(copy, r.s.ctl, r.s.ctl_bytes);
    for (int round = 0; round < 2000; round++) {
        unsigned n = 1 + (unsigned)mr_rng_below(&rng, 64), from = round % 4 ? 1024 : 0;

        for (unsigned i = 0; i < n; i++)
            ((uint8_t *)r.s.ctl)[from + mr_rng_below(&rng, r.s.ctl_bytes - from)] = (uint8_t)mr_rng_u64(&rng);
        opened += (unsigned)try_dump(r.run);
        memcpy(r.s.ctl, copy, r.s.ctl_bytes);
    }
    assert_true(opened > 500);
    /* and all ones behind the header */
    memset((char *)r.s.ctl + r.s.hdr->off_items, 0xff, r.s.hdr->off_rings - r.s.hdr->off_items);
    memset((char *)r.s.ctl + r.s.hdr->off_steps, 0xff, r.s.ctl_bytes - r.s.hdr->off_steps);
    memset(r.s.actors, 0xff, r.s.hdr->n_actors * sizeof *r.s.actors);
    assert_int_equal(try_dump(r.run), 1);
    free(copy);
    rig_drop(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_create_open),        cmocka_unit_test(test_bytes_are_exact),   cmocka_unit_test(test_tok_and_plan),
        cmocka_unit_test(test_refused_parameters), cmocka_unit_test(test_name_is_reserved),  cmocka_unit_test(test_no_room),
        cmocka_unit_test(test_owner_alive),        cmocka_unit_test(test_unfinished_creation), cmocka_unit_test(test_creator_killed),
        cmocka_unit_test(test_each_and_lookalikes), cmocka_unit_test(test_removed),          cmocka_unit_test(test_truncated),
        cmocka_unit_test(test_every_header_byte),
        cmocka_unit_test(test_random_damage),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
