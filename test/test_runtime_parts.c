/* Small parts of the runtime: how deaths are told, spawning, arguments, the control socket, the progress line. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "runtime/cmd.h"
#include "runtime/control.h"
#include "runtime/death.h"
#include "runtime/progress.h"
#include "runtime/spawn.h"

/* ---- deaths -------------------------------------------------------------------------------------------------------------------------- */

static void test_every_death_has_its_own_sentence(void **state)
{
    const struct mr_death d[] = {
        {.code = 3},
        {.code = 4},
        {.code = 1},
        {.code = 0},
        {.code = 0, .drained = 1},
        {.code = 0, .acked = 1},
        {.code = -1, .sig = SIGSEGV},
        {.code = -1, .sig = SIGBUS},
        {.code = -1, .sig = SIGABRT},
        {.code = -1, .sig = SIGKILL},
        {.code = -1, .sig = SIGKILL, .oom = 1},
        {.code = -1, .sig = SIGKILL, .why = MR_KILL_HANG},
        {.code = -1, .sig = SIGKILL, .why = MR_KILL_STOPPED},
        {.code = -1, .sig = SIGKILL, .why = MR_KILL_RESTART, .oom = 1},
    };
    enum { N = sizeof d / sizeof d[0] };
    char text[N][300];

    (void)state;
    for (int i = 0; i < N; i++) {
        mr_death_sentence(&d[i], text[i], sizeof text[i]);
        assert_true(strlen(text[i]) > 10);
        for (int k = 0; k < i; k++)
            assert_string_not_equal(text[i], text[k]);
    }
    assert_non_null(strstr(text[7], "/dev/shm"));
    assert_non_null(strstr(text[10], "out of memory"));
}

static void test_pid_state(void **state)
{
    pid_t pid = fork();
    int status;

    (void)state;
    if (pid == 0) {
        raise(SIGSTOP);
        _exit(0);
    }
    assert_int_equal(waitpid(pid, &status, WUNTRACED), pid);
    assert_int_equal(mr_pid_state(pid), 'T');
    kill(pid, SIGKILL);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(mr_pid_state(pid), '?');
    assert_int_equal(mr_pid_state(getpid()), 'R');
}

/* ---- spawn --------------------------------------------------------------------------------------------------------------------------- */

/* Runs a shell script to its end; its output lands in out. */
static int run_shell(const char *script, const int *keep, int n_keep, int threads, char *out, size_t bytes, int *sig)
{
    char *argv[] = {(char *)"sh", (char *)"-c", (char *)script, NULL};
    struct mr_spawn sp = {.path = "/bin/sh", .argv = argv, .keep = keep, .n_keep = n_keep, .threads = threads};
    struct mr_child c;
    struct mr_err err = {0};
    struct pollfd p;
    size_t n = 0;
    int code = -1;
    ssize_t r;

    assert_int_equal(mr_spawn(&c, &sp, &err), 0);
    p = (struct pollfd){.fd = c.out_fd, .events = POLLIN};
    while (poll(&p, 1, -1) > 0 && (r = read(c.out_fd, out + n, bytes - 1 - n)) != 0)
        n += r > 0 ? (size_t)r : 0;
    out[n] = 0;
    p.fd = c.pidfd;
    assert_true(poll(&p, 1, -1) > 0);
    assert_int_equal(mr_child_reap(&c, &code, sig), 0);
    assert_int_equal(mr_child_reap(&c, &code, sig), -ECHILD);
    mr_child_close(&c);
    return code;
}

static void test_spawn_passes_what_it_should(void **state)
{
    int pipe_fd[2], other[2], sig;
    char script[256], out[4096];
    sigset_t some, before;

    (void)state;
    assert_int_equal(pipe2(pipe_fd, O_CLOEXEC), 0);
    assert_int_equal(pipe2(other, O_CLOEXEC), 0);
    sigemptyset(&some);
    sigaddset(&some, SIGTERM);
    sigprocmask(SIG_BLOCK, &some, &before);
    /* the masks are read by the shell itself: a shell that starts a program blocks all signals for a moment */
    unsetenv("OMP_WAIT_POLICY");
    assert_int_equal(run_shell("echo T=$OMP_NUM_THREADS; echo W=$OMP_WAIT_POLICY; ls -l /proc/$$/fd; "
                               "while read -r a b; do case $a in Sig*) printf '%s\\t%s\\n' $a $b ;; esac; done </proc/$$/status; "
                               "echo err >&2; exit 5",
                               &pipe_fd[0], 1, 3, out, sizeof out, &sig), 5);
    sigprocmask(SIG_SETMASK, &before, NULL);
    assert_non_null(strstr(out, "T=3\n"));
    assert_non_null(strstr(out, "W=passive\n"));
    assert_non_null(strstr(out, "err\n"));
    assert_non_null(strstr(out, "SigBlk:\t0000000000000000"));
    assert_non_null(strstr(out, "SigIgn:\t"));
    assert_int_equal(strtoull(strstr(out, "SigIgn:\t") + 8, NULL, 16) & 7, 7); /* HUP, INT, QUIT */
    assert_non_null(strstr(out, "/dev/null"));
    snprintf(script, sizeof script, "%d -> pipe:", pipe_fd[0]);
    assert_non_null(strstr(out, script));
    snprintf(script, sizeof script, "%d -> pipe:", other[0]);
    assert_null(strstr(out, script));
    assert_true(fcntl(pipe_fd[0], F_GETFD) & FD_CLOEXEC); /* ours stays as it was */
    for (int i = 0; i < 2; i++) {
        close(pipe_fd[i]);
        close(other[i]);
    }
}

static void test_spawn_tells_why_exec_failed(void **state)
{
    char *argv[] = {(char *)"x", NULL};
    struct mr_spawn sp = {.path = "/no/such/program", .argv = argv};
    struct mr_child c;
    struct mr_err err = {0};

    (void)state;
    assert_int_equal(mr_spawn(&c, &sp, &err), -1);
    assert_int_equal(err.code, MR_EXIT_ENV);
    assert_non_null(strstr(err.msg, "No such file"));
    assert_int_equal(c.pidfd, -1);
    assert_int_equal(mr_child_signal(&c, SIGKILL), -ESRCH);
    assert_int_equal(waitpid(-1, NULL, WNOHANG), -1); /* no zombie */
}

static void test_death_by_signal(void **state)
{
    char out[64];
    int sig = 0;

    (void)state;
    assert_int_equal(run_shell("kill -SEGV $$", NULL, 0, 0, out, sizeof out, &sig), -1);
    assert_int_equal(sig, SIGSEGV);
}

/* ---- arguments ----------------------------------------------------------------------------------------------------------------------- */

static void test_args(void **state)
{
    int flag = 0, n = 0;
    const char *value = NULL, *pos[2] = {NULL};
    struct mr_arg_list list = {.n = 0};
    const struct mr_arg args[] = {
        {.name = "flag", .flag = &flag}, {.name = "value", .value = &value}, {.name = "set", .list = &list}, {.name = NULL}};
    const struct mr_usage u = {"x A [B]", "", args, 1, 2};
    char *good[] = {(char *)"x",   (char *)"--set=a=1", (char *)"one", (char *)"--flag", (char *)"--set",
                    (char *)"b=2", (char *)"--value",   (char *)"v",   (char *)"--",     (char *)"--two"};
    char *bad[][3] = {{(char *)"x", NULL},
                      {(char *)"x", (char *)"--flg", (char *)"a"},
                      {(char *)"x", (char *)"a", (char *)"--value"},
                      {(char *)"x", (char *)"a", (char *)"-q"}};

    (void)state;
    assert_int_equal(mr_args_parse(&u, 10, good, pos, &n), 0);
    assert_int_equal(n, 2);
    assert_string_equal(pos[1], "--two");
    assert_int_equal(flag, 1);
    assert_string_equal(value, "v");
    assert_int_equal(list.n, 2);
    assert_string_equal(list.v[0], "a=1");
    for (int i = 0; i < 4; i++)
        assert_int_equal(mr_args_parse(&u, bad[i][1] ? 3 : 1, bad[i], pos, &n), MR_EXIT_CONFIG);
}

/* ---- control ------------------------------------------------------------------------------------------------------------------------- */

static json_t *echo(const json_t *request, void *arg)
{
    json_t *o = mr_control_ok();

    ++*(int *)arg;
    if (json_object_get(request, "refuse"))
        json_object_set_new(o, "ok", json_false());
    json_object_set_new(o, "error", json_string("no way"));
    json_object_set(o, "echo", json_object_get(request, "say"));
    return o;
}

struct client {
    char run[48];
    json_t *reply;
    struct mr_err err;
    int refuse;
    int done;
};

static void *client_main(void *arg)
{
    struct client *c = arg;

    c->reply = mr_control_call(c->run, json_pack(c->refuse ? "{s:s, s:b}" : "{s:s}", "say", "hello", "refuse", 1), 5000, &c->err);
    __atomic_store_n(&c->done, 1, __ATOMIC_RELEASE);
    return NULL;
}

static void talk(struct mr_loop *loop, struct client *c)
{
    pthread_t thread;

    assert_int_equal(pthread_create(&thread, NULL, client_main, c), 0);
    while (!__atomic_load_n(&c->done, __ATOMIC_ACQUIRE))
        assert_true(mr_loop_wait(loop, 20) >= 0);
    pthread_join(thread, NULL);
}

static void test_control(void **state)
{
    struct mr_err err = {0};
    struct mr_loop *loop = mr_loop_create(MR_IO_AUTO, (char[300]){0}, 300, &err);
    struct mr_control ctl;
    struct client a = {.refuse = 0}, b = {.refuse = 1}, none = {.refuse = 0};
    int calls = 0;
    char path[128];

    (void)state;
    assert_non_null(loop);
    snprintf(a.run, sizeof a.run, "test-%d-ctl", (int)getpid());
    memcpy(b.run, a.run, sizeof b.run);
    assert_int_equal(mr_control_open(&ctl, a.run, loop, echo, &calls, &err), 0);
    talk(loop, &a);
    assert_string_equal(json_string_value(json_object_get(a.reply, "echo")), "hello");
    talk(loop, &b);
    assert_null(b.reply);
    assert_string_equal(b.err.msg, "no way");
    assert_int_equal(calls, 2);
    json_decref(a.reply);
    mr_control_close(&ctl);
    snprintf(path, sizeof path, "/dev/shm/millrace-%s.sock", a.run);
    assert_int_equal(unlink(path), 0);
    memcpy(none.run, a.run, sizeof none.run);
    assert_null(mr_control_call(none.run, json_object(), 100, &none.err));
    assert_int_equal(none.err.code, MR_EXIT_FAILED);
    mr_loop_destroy(loop);
}

/* ---- progress ------------------------------------------------------------------------------------------------------------------------ */

static void test_progress(void **state)
{
    struct mr_progress p = {.n = 0};
    struct mr_totals t;
    char line[256];

    (void)state;
    mr_totals_init(&t, 100, 200);
    mr_progress_line(&p, &t, 0, line, sizeof line);
    assert_non_null(strstr(line, "step 0/100"));
    assert_non_null(strstr(line, "ETA ?"));
    for (unsigned i = 0; i < 50; i++) { /* 1000 tokens and 2 microbatches a second, twice the ring's length */
        t.steps = i;
        t.items = 2 * i;
        t.tokens = 1000 * i;
        mr_progress_sample(&p, &t, 1000000000ull * (i + 1));
        mr_progress_sample(&p, &t, 1000000000ull * (i + 1) + 1000); /* too soon after: no sample */
    }
    assert_int_equal(p.n, 50);
    assert_float_equal(mr_progress_tokens_per_s(&p), 1000.0, 1e-6);
    assert_float_equal(mr_progress_eta_s(&p, &t), (200 - 98) / 2.0, 1e-6);
    t.has_loss = 1;
    t.loss_last = 2.5;
    mr_progress_line(&p, &t, 3, line, sizeof line);
    assert_string_equal(line, "step 49/100  loss 2.5000  1000 tokens/s  ETA 51s  restarts 3");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_death_has_its_own_sentence),
        cmocka_unit_test(test_pid_state),
        cmocka_unit_test(test_spawn_passes_what_it_should),
        cmocka_unit_test(test_spawn_tells_why_exec_failed),
        cmocka_unit_test(test_death_by_signal),
        cmocka_unit_test(test_args),
        cmocka_unit_test(test_control),
        cmocka_unit_test(test_progress),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
