/* The event loop, on both backends: readiness, many events, deletion in mid-batch, re-use of descriptor numbers, refusal of io_uring. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include "runtime/loop.h"
#include "runtime/spawn.h"

struct fixture {
    struct mr_loop *loop;
    int fd[200];
    unsigned hits[200];
    int n;
    int victim; /* fd deleted by the first callback */
    int deleted;
};

static int set_up(void **state, enum mr_io io)
{
    struct fixture *f = calloc(1, sizeof *f);
    struct mr_err err = {0};
    char why[300];

    f->loop = mr_loop_create(io, why, sizeof why, &err);
    f->victim = -1;
    *state = f;
    if (!f->loop)
        print_message("SKIP: %s\n", err.msg);
    return 0;
}

static int set_up_uring(void **state)
{
    return set_up(state, MR_IO_URING);
}
static int set_up_epoll(void **state)
{
    return set_up(state, MR_IO_EPOLL);
}

static int tear_down(void **state)
{
    struct fixture *f = *state;

    for (int i = 0; i < f->n; i++)
        close(f->fd[i]);
    mr_loop_destroy(f->loop);
    free(f);
    return 0;
}

static struct fixture *need_loop(void **state)
{
    struct fixture *f = *state;

    if (!f->loop)
        skip();
    return f;
}

static int index_of(const struct fixture *f, int fd)
{
    for (int i = 0; i < f->n; i++)
        if (f->fd[i] == fd)
            return i;
    fail_msg("an event for descriptor %d, which nobody watches", fd);
    return -1;
}

static void on_event(void *arg, int fd)
{
    struct fixture *f = arg;
    uint64_t v;

    if (read(fd, &v, sizeof v) == (ssize_t)sizeof v)
        f->hits[index_of(f, fd)]++;
    if (f->victim >= 0) {
        mr_loop_del(f->loop, f->victim == fd ? f->fd[f->n - 1] : f->victim);
        f->deleted++;
        f->victim = -1;
    }
}

static int add_eventfd(struct fixture *f)
{
    int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);

    assert_true(fd >= 0);
    assert_int_equal(mr_loop_add(f->loop, fd, on_event, f), 0);
    f->fd[f->n++] = fd;
    return fd;
}

static void signal_fd(int fd)
{
    uint64_t one = 1;

    assert_int_equal(write(fd, &one, sizeof one), sizeof one);
}

static void drain(struct fixture *f)
{
    for (int quiet = 0; quiet < 2;)
        quiet = mr_loop_wait(f->loop, 50) ? 0 : quiet + 1;
}

static void test_nothing_to_do_times_out(void **state)
{
    struct fixture *f = need_loop(state);

    add_eventfd(f);
    assert_int_equal(mr_loop_wait(f->loop, 0), 0);
    assert_int_equal(mr_loop_wait(f->loop, 20), 0);
}

static void test_every_write_is_seen(void **state)
{
    struct fixture *f = need_loop(state);
    int fd = add_eventfd(f);

    for (unsigned i = 1; i <= 100; i++) {
        signal_fd(fd);
        while (f->hits[0] < i)
            assert_true(mr_loop_wait(f->loop, 5000) >= 0);
        assert_int_equal(f->hits[0], i);
    }
}

static void test_ready_before_it_is_added(void **state)
{
    struct fixture *f = need_loop(state);
    int fd = eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK);

    f->fd[f->n++] = fd;
    assert_int_equal(mr_loop_add(f->loop, fd, on_event, f), 0);
    assert_int_equal(mr_loop_wait(f->loop, 5000), 1);
    assert_int_equal(f->hits[0], 1);
}

static void test_more_than_a_batch(void **state)
{
    struct fixture *f = need_loop(state);

    for (int i = 0; i < 200; i++)
        add_eventfd(f);
    for (int i = 0; i < 200; i++)
        signal_fd(f->fd[i]);
    drain(f);
    for (int i = 0; i < 200; i++)
        assert_int_equal(f->hits[i], 1);
}

static void test_deleted_in_the_same_batch(void **state)
{
    struct fixture *f = need_loop(state);

    for (int i = 0; i < 2; i++)
        add_eventfd(f);
    mr_loop_wait(f->loop, 0); /* both are armed */
    f->victim = f->fd[0];
    signal_fd(f->fd[0]);
    signal_fd(f->fd[1]);
    drain(f);
    assert_int_equal(f->deleted, 1);
    assert_int_equal(f->hits[0] + f->hits[1], 1); /* whoever came first deleted the other */
}

static void test_number_is_reused(void **state)
{
    struct fixture *f = need_loop(state);
    int fd = add_eventfd(f), again;

    mr_loop_wait(f->loop, 0);
    signal_fd(fd);
    mr_loop_del(f->loop, fd);
    close(fd);
    f->n = 0;
    again = add_eventfd(f);
    assert_int_equal(again, fd);
    drain(f);
    assert_int_equal(f->hits[0], 0);
    signal_fd(again);
    drain(f);
    assert_int_equal(f->hits[0], 1);
}

static void test_timer_and_hangup(void **state)
{
    struct fixture *f = need_loop(state);
    struct itimerspec every = {.it_interval.tv_nsec = 2000000, .it_value.tv_nsec = 2000000};
    int fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);

    f->fd[f->n++] = fd;
    assert_int_equal(timerfd_settime(fd, 0, &every, NULL), 0);
    assert_int_equal(mr_loop_add(f->loop, fd, on_event, f), 0);
    while (f->hits[0] < 5)
        assert_true(mr_loop_wait(f->loop, 5000) >= 0);
}

static void count_hangup(void *arg, int fd)
{
    struct fixture *f = arg;
    char c;

    if (read(fd, &c, 1) == 0) {
        f->hits[0]++;
        mr_loop_del(f->loop, fd);
    }
}

static void test_pipe_end(void **state)
{
    struct fixture *f = need_loop(state);
    int p[2];

    assert_int_equal(pipe(p), 0);
    assert_int_equal(mr_loop_add(f->loop, p[0], count_hangup, f), 0);
    mr_loop_wait(f->loop, 0);
    close(p[1]);
    drain(f);
    assert_int_equal(f->hits[0], 1);
    close(p[0]);
}

static void reaped(void *arg, int fd)
{
    mr_loop_del(((struct fixture *)arg)->loop, fd);
    ((struct fixture *)arg)->hits[0]++;
}

static void test_death_by_pidfd(void **state)
{
    struct fixture *f = need_loop(state);
    char *argv[] = {(char *)"sh", (char *)"-c", (char *)"exit 7", NULL};
    struct mr_spawn sp = {.path = "/bin/sh", .argv = argv};
    struct mr_child c;
    struct mr_err err = {0};
    int code = 0, sig = 0;

    assert_int_equal(mr_spawn(&c, &sp, &err), 0);
    assert_int_equal(mr_loop_add(f->loop, c.pidfd, reaped, f), 0);
    while (!f->hits[0])
        assert_true(mr_loop_wait(f->loop, 5000) >= 0);
    assert_int_equal(mr_child_reap(&c, &code, &sig), 0);
    assert_int_equal(code, 7);
    assert_int_equal(sig, 0);
    mr_child_close(&c);
}

/* What a container's seccomp profile does: io_uring_setup fails with `error`. */
static void forbid_uring(int error)
{
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (unsigned)error),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog prog = {.len = sizeof code / sizeof code[0], .filter = code};

    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &prog))
        _exit(77);
}

/* In a child, for good: exit code 0 = as it must be. */
static int refused_child(int error, enum mr_io io)
{
    struct mr_err err = {0};
    char why[300];
    struct mr_loop *l;

    forbid_uring(error);
    l = mr_loop_create(io, why, sizeof why, &err);
    if (io == MR_IO_URING)
        return l == NULL && err.code == MR_EXIT_ENV && strstr(err.msg, "--io") ? 0 : 1;
    return l && strcmp(mr_loop_name(l), "epoll") == 0 && strstr(why, "io_uring is refused") && !strchr(why, '\n') ? 0 : 2;
}

static void test_refusals(void **state)
{
    static const int errors[] = {EPERM, ENOSYS, ENOMEM};
    int status;

    (void)state;
    for (int i = 0; i < 6; i++) {
        pid_t pid = fork();

        if (pid == 0)
            _exit(refused_child(errors[i / 2], i & 1 ? MR_IO_URING : MR_IO_AUTO));
        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_true(WIFEXITED(status));
        if (WEXITSTATUS(status) == 77)
            skip();
        assert_int_equal(WEXITSTATUS(status), 0);
    }
}

static void test_auto_says_nothing_when_it_has_uring(void **state)
{
    struct mr_err err = {0};
    char why[300] = "x";
    struct mr_loop *l = mr_loop_create(MR_IO_AUTO, why, sizeof why, &err);

    (void)state;
    assert_non_null(l);
    assert_int_equal(why[0] == 0, strcmp(mr_loop_name(l), "io_uring") == 0);
    mr_loop_destroy(l);
}

#define BOTH(test)                                                                                                                         \
    cmocka_unit_test_setup_teardown(test, set_up_uring, tear_down), cmocka_unit_test_setup_teardown(test, set_up_epoll, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        BOTH(test_nothing_to_do_times_out),
        BOTH(test_every_write_is_seen),
        BOTH(test_ready_before_it_is_added),
        BOTH(test_more_than_a_batch),
        BOTH(test_deleted_in_the_same_batch),
        BOTH(test_number_is_reused),
        BOTH(test_timer_and_hangup),
        BOTH(test_pipe_end),
        BOTH(test_death_by_pidfd),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_auto_says_nothing_when_it_has_uring),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
