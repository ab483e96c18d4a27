/* Memory of a keeper, over processes that die: what docs/design.md section 12 states as measured, as a test.
 *
 * Every process that touches CUDA is this program exec'd anew with a role (a child of a process that has used CUDA could not use it), and
 * talks over its stdin and stdout, one line at a time.  The parent never touches CUDA.  Exit code 77 where there is no GPU. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "kernels/kernels.h"

#ifdef MR_HAVE_CUDA
int probe_write(void *p, size_t bytes, double seconds);
int probe_poison(void *p);

enum { BYTES = 128 << 20, HEX = 2 * MR_K_CUDA_HANDLE };

static char why[512];
static const char *self;

/* ---- roles ------------------------------------------------------------------------------------------------------------------- */

static int say(const char *text)
{
    printf("%s\n", text);
    fflush(stdout);
    return 0;
}

static int hear(void)
{
    char line[64];

    return fgets(line, sizeof line, stdin) ? line[0] : 0;
}

__attribute__((noreturn)) static void die(const char *what)
{
    printf("%s: %s\n", what, why);
    exit(1);
}

static void *open_hex(const char *hex)
{
    uint8_t handle[MR_K_CUDA_HANDLE];
    void *base = NULL;
    int rc;

    for (int i = 0; i < MR_K_CUDA_HANDLE; i++) {
        unsigned v;

        sscanf(hex + 2 * i, "%2x", &v);
        handle[i] = (uint8_t)v;
    }
    rc = mr_k_cuda_arena_open(handle, &base, why, sizeof why);
    if (rc == -ENXIO) {
        say("gone");
        exit(0);
    }
    if (rc)
        die("open");
    return base;
}

static int role_keeper(int device)
{
    uint8_t handle[MR_K_CUDA_HANDLE];
    char uuid[MR_K_CUDA_UUID], hex[HEX + 1];
    void *base, *again;

    if (mr_k_cuda_use(device, why, sizeof why) || mr_k_cuda_arena_alloc(BYTES, &base, handle, uuid, why, sizeof why))
        die("alloc");
    for (int i = 0; i < MR_K_CUDA_HANDLE; i++)
        sprintf(hex + 2 * i, "%02x", handle[i]);
    if (!mr_k_cuda_arena_open(handle, &again, why, sizeof why))
        die("an exporter opened its own handle");    /* its failure must leave the context usable: the arena is used below */
    say(hex);
    hear();
    return 0;
}

static struct mr_k *context(void)
{
    struct mr_k *k = mr_k_cuda_create(0, 0, why, sizeof why);

    if (!k)
        die("context");
    return k;
}

static uint64_t checksum(struct mr_k *k, const void *p)
{
    static uint64_t host[BYTES / 8];
    uint64_t h = 1;

    if (k->op->d2h(k, host, p, BYTES) || k->op->sync(k))
        die("read");
    for (size_t i = 0; i < BYTES / 8; i++)
        h = (h ^ host[i]) * 0x100000001b3u;
    return h;
}

/* For each line: does the memory stand still for a second, or for 200 ms ("q")?  "z": all zero? */
static int role_watch(const char *hex)
{
    struct mr_k *k = context();
    void *p = open_hex(hex);
    const struct timespec second = {.tv_sec = 1}, fifth = {.tv_nsec = 200000000};
    uint64_t zero = 0, a, b;

    for (size_t i = 0; i < BYTES / 8; i++)
        zero = ((i ? zero : 1) ^ 0) * 0x100000001b3u;
    say("ready");
    for (int c; (c = hear());) {
        a = checksum(k, p);
        if (c == 'z') {
            say(a == zero ? "zero" : "written");
            continue;
        }
        nanosleep(c == 'q' ? &fifth : &second, NULL);
        b = checksum(k, p);
        say(a == b ? "still" : "moving");
    }
    return 0;
}

/* Opens twice (counted), closes once, and the other mapping is still good. */
static int role_write(const char *hex)
{
    struct mr_k *k = context();
    void *p = open_hex(hex), *q = open_hex(hex);

    if (p != q)
        say("two addresses");
    mr_k_cuda_arena_close(q);
    if (probe_write(p, BYTES, 0.0) || k->op->sync(k))
        die("write");
    hear();
    mr_k_cuda_destroy(k);
    return say("done");
}

/* Writes for a minute, from `device`.  With `child`, a process that inherits every descriptor outlives this one. */
static int role_writer(const char *hex, int device, int child)
{
    char pid[32] = "alone";
    void *p;

    if (mr_k_cuda_use(device, why, sizeof why))
        die("use");
    p = open_hex(hex);
    if (child) {
        pid_t c = fork();

        if (c == 0) {
            close(STDOUT_FILENO);                    /* or nobody would see our end */
            for (;;)
                pause();
        }
        snprintf(pid, sizeof pid, "%d", (int)c);
    }
    if (probe_write(p, BYTES, 60.0))
        die("write");
    say(pid);
    for (;;)
        pause();
}

/* Double-buffered pulls out of the arena, with work on the places in between. */
static int role_pull(const char *hex)
{
    enum { N = 1 << 20, ROUNDS = 20 };
    struct mr_k *k = context();
    char *p = open_hex(hex);
    struct mr_k_pull *pull = mr_k_cuda_pull_create(k);
    float *stage[2], *sum, *one, host;

    for (int i = 0; i < 2; i++)
        stage[i] = k->op->alloc(k, N * sizeof(float));
    sum = k->op->alloc(k, N * sizeof(float));
    one = k->op->alloc(k, N * sizeof(float));
    for (int i = 0; i < ROUNDS; i++) {               /* slab i holds the value i everywhere */
        float v = (float)i;

        for (int at = 0; at < N; at = at ? 2 * at : 1)
            if (at ? k->op->d2d(k, p + (size_t)i * N * 4 + 4 * (size_t)at, p + (size_t)i * N * 4, 4 * (size_t)at)
                   : k->op->h2d(k, p + (size_t)i * N * 4, &v, 4))
                die("fill");
    }
    if (k->op->sync(k) || mr_k_cuda_pull_begin(k, pull, 0, stage[0], p, N * 4))
        die("pull");
    for (int i = 0; i < ROUNDS; i++) {
        const float *src[2] = {sum, stage[i % 2]};

        if (i + 1 < ROUNDS && mr_k_cuda_pull_begin(k, pull, (i + 1) % 2, stage[(i + 1) % 2], p + (size_t)(i + 1) * N * 4, N * 4))
            die("pull");
        if (mr_k_cuda_pull_use(k, pull, i % 2) || k->op->sum(k, N, src, 2, one) || k->op->d2d(k, sum, one, N * 4) ||
            mr_k_cuda_pull_wait(k, pull, i % 2))
            die("sum");
    }
    if (k->op->d2h(k, &host, sum + N - 1, 4) || k->op->sync(k))
        die("read");
    mr_k_cuda_pull_destroy(k, pull);
    return say(host == ROUNDS * (ROUNDS - 1) / 2 ? "right" : "wrong");
}

/* After a sticky error every call fails, and says so. */
static int role_poison(const char *hex)
{
    struct mr_k *k = context();
    void *p = open_hex(hex);
    struct mr_k_mark *m = mr_k_cuda_mark_create(k);

    if (probe_poison(p))
        return say("not poisoned");
    if (!mr_k_cuda_mark_set(k, m) && !mr_k_cuda_mark_wait(k, m))
        return say("no error seen");
    return say(k->op->sync(k) == -EIO && k->op->zero(k, p, 4) == -EIO ? "sticky" : "forgotten");
}

static int role_free(void)
{
    uint64_t f, t;
    char text[32];

    if (mr_k_cuda_use(0, why, sizeof why) || mr_k_cuda_mem_info(&f, &t, why, sizeof why))
        die("free");
    snprintf(text, sizeof text, "%llu", (unsigned long long)(f >> 20));
    return say(text);
}

/* How many GPUs, and whether the second one can map the memory of the first. */
static int role_count(void)
{
    struct mr_k_cuda_device d[MR_K_CUDA_DEVICES];
    char text[16];
    int n = 0;

    if (mr_k_cuda_devices(d, &n, why, sizeof why))
        n = 0;
    snprintf(text, sizeof text, "%d %d", n, n > 1 && d[1].peer[0]);
    return say(text);
}

static int role(int argc, char **argv)
{
    const char *hex = argc > 2 ? argv[2] : "";

    if (!strcmp(argv[1], "keeper"))
        return role_keeper(atoi(hex));
    if (!strcmp(argv[1], "watch"))
        return role_watch(hex);
    if (!strcmp(argv[1], "write"))
        return role_write(hex);
    if (!strcmp(argv[1], "writer"))
        return role_writer(hex, 0, argc > 3);
    if (!strcmp(argv[1], "writer1"))                 /* on the other GPU */
        return role_writer(hex, 1, argc > 3);
    if (!strcmp(argv[1], "pull"))
        return role_pull(hex);
    if (!strcmp(argv[1], "poison"))
        return role_poison(hex);
    return !strcmp(argv[1], "free") ? role_free() : role_count();
}

/* ---- the parent's side --------------------------------------------------------------------------------------------------------- */

struct proc {
    pid_t pid;
    FILE *to, *from;
    char line[512];
};

static void start(struct proc *p, const char *name, const char *hex, const char *more)
{
    int in[2], out[2];

    assert_int_equal(pipe2(in, 02000000) | pipe2(out, 02000000), 0);     /* O_CLOEXEC */
    p->pid = fork();
    if (p->pid == 0) {
        dup2(in[0], STDIN_FILENO);
        dup2(out[1], STDOUT_FILENO);
        execl(self, self, name, hex, more, (char *)NULL);
        _exit(127);
    }
    close(in[0]);
    close(out[1]);
    p->to = fdopen(in[1], "w");
    p->from = fdopen(out[0], "r");
}

static const char *answer(struct proc *p)
{
    if (!fgets(p->line, sizeof p->line, p->from))
        snprintf(p->line, sizeof p->line, "(nothing)");
    p->line[strcspn(p->line, "\n")] = 0;
    return p->line;
}

static const char *ask(struct proc *p, const char *what)
{
    fprintf(p->to, "%s\n", what);
    fflush(p->to);
    return answer(p);
}

static void end(struct proc *p, int sig)
{
    if (sig)
        kill(p->pid, sig);
    fclose(p->to);
    waitpid(p->pid, NULL, 0);                        /* reaped: from here on its death is proven */
    fclose(p->from);
}

static void keep(struct proc *p, char hex[HEX + 1])
{
    start(p, "keeper", "0", NULL);
    snprintf(hex, HEX + 1, "%.128s", answer(p));
    assert_int_equal(strlen(hex), HEX);
}

static void watch(struct proc *p, const char *hex)
{
    start(p, "watch", hex, NULL);
    assert_string_equal(answer(p), "ready");
}

static void shared_between_processes(void **state)
{
    struct proc k, w, x;
    char hex[HEX + 1];

    (void)state;
    keep(&k, hex);
    watch(&w, hex);
    assert_string_equal(ask(&w, "z"), "zero");       /* new memory is zeroed */
    start(&x, "write", hex, NULL);
    assert_string_equal(ask(&x, "go"), "done");
    end(&x, 0);
    assert_string_equal(ask(&w, "z"), "written");
    assert_string_equal(ask(&w, "s"), "still");
    end(&w, 0);
    end(&k, 0);
}

static void mappings_outlive_their_exporter(void **state)
{
    struct proc k, w, late;
    char hex[HEX + 1];

    (void)state;
    keep(&k, hex);
    watch(&w, hex);
    end(&k, SIGKILL);
    assert_string_equal(ask(&w, "z"), "zero");
    start(&late, "watch", hex, NULL);
    assert_string_equal(answer(&late), "gone");
    end(&late, 0);
    end(&w, 0);
}

static void killed_writers_kernel_has_stopped_when_it_is_reaped(void **state)
{
    struct proc k, w, x;
    char hex[HEX + 1];

    (void)state;
    keep(&k, hex);
    watch(&w, hex);
    start(&x, "writer", hex, NULL);
    assert_string_equal(answer(&x), "alone");
    assert_string_equal(ask(&w, "s"), "moving");
    end(&x, SIGKILL);
    assert_string_equal(ask(&w, "s"), "still");
    assert_string_equal(ask(&w, "s"), "still");
    end(&w, 0);
    end(&k, 0);
}

/* Why actors never fork: whoever holds the dead one's descriptors keeps its kernel running. */
static void inherited_descriptors_keep_the_kernel_running(void **state)
{
    struct proc k, w, x;
    char hex[HEX + 1];
    pid_t child;

    (void)state;
    keep(&k, hex);
    watch(&w, hex);
    start(&x, "writer", hex, "child");
    child = (pid_t)atoi(answer(&x));
    assert_true(child > 1);
    end(&x, SIGKILL);
    assert_string_equal(ask(&w, "s"), "moving");
    kill(child, SIGKILL);
    for (int i = 0; i < 50 && strcmp(ask(&w, "s"), "still"); i++)
        ;                                            /* not our child: nothing tells us when it is gone */
    assert_string_equal(w.line, "still");
    end(&w, 0);
    end(&k, 0);
}

static void pulls_are_double_buffered(void **state)
{
    struct proc k, x;
    char hex[HEX + 1];

    (void)state;
    keep(&k, hex);
    start(&x, "pull", hex, NULL);
    assert_string_equal(answer(&x), "right");
    end(&x, 0);
    end(&k, 0);
}

static void an_error_sticks_to_its_process(void **state)
{
    struct proc k, w, x;
    char hex[HEX + 1];

    (void)state;
    keep(&k, hex);
    watch(&w, hex);
    start(&x, "poison", hex, NULL);
    assert_string_equal(answer(&x), "sticky");
    end(&x, 0);
    assert_string_equal(ask(&w, "z"), "zero");       /* bystanders work on, and the keeper's memory is intact */
    end(&w, 0);
    end(&k, 0);
}

static long free_mib(void)
{
    struct proc f;
    long n;

    start(&f, "free", NULL, NULL);
    n = atol(answer(&f));
    end(&f, 0);
    return n;
}

static void memory_comes_back(void **state)
{
    long before = free_mib(), after = 0;

    (void)state;
    for (int i = 0; i < 5; i++) {
        struct proc k, w, x;
        char hex[HEX + 1];

        keep(&k, hex);
        watch(&w, hex);
        start(&x, "writer", hex, NULL);
        answer(&x);
        end(&x, SIGKILL);
        end(&k, SIGKILL);
        end(&w, SIGKILL);
    }
    for (int i = 0; i < 20 && (after = free_mib()) < before - 64; i++)
        nanosleep(&(struct timespec){.tv_nsec = 250000000}, NULL);
    assert_true(after >= before - 64);
}

/* ---- two GPUs ---- */

static int gpus, mapped;                             /* how many; whether GPU 1 can map the memory of GPU 0 */

static void need_two_gpus(void)
{
    if (gpus > 1 && mapped)
        return;
    print_message("skipped: needs two GPUs with peer access; %d here\n", gpus);
    skip();
}

/* Everybody on GPU 0, the writer's kernel on GPU 1: what is under way between them when it is killed must not arrive later. */
static void killed_writer_on_another_gpu_has_stopped_when_it_is_reaped(void **state)
{
    struct proc k, w, x;
    char hex[HEX + 1];

    (void)state;
    need_two_gpus();
    keep(&k, hex);
    watch(&w, hex);
    for (int i = 0; i < 5; i++) {
        start(&x, "writer1", hex, NULL);
        assert_string_equal(answer(&x), "alone");
        assert_string_equal(ask(&w, "q"), "moving");
        end(&x, SIGKILL);
        assert_string_equal(ask(&w, "q"), "still");
        assert_string_equal(ask(&w, "q"), "still");
        assert_string_equal(ask(&w, "z"), "written");
    }
    end(&w, 0);
    end(&k, 0);
}

static void inherited_descriptors_keep_a_kernel_on_another_gpu_running(void **state)
{
    struct proc k, w, x;
    char hex[HEX + 1];
    pid_t child;
    int moving;

    (void)state;
    need_two_gpus();
    keep(&k, hex);
    watch(&w, hex);
    start(&x, "writer1", hex, "child");
    child = (pid_t)atoi(answer(&x));
    assert_true(child > 1);
    end(&x, SIGKILL);
    moving = strcmp(ask(&w, "q"), "moving") == 0;
    kill(child, SIGKILL);
    assert_true(moving);
    for (int i = 0; i < 50 && strcmp(ask(&w, "q"), "still"); i++)
        ;                                            /* not our child: nothing tells us when it is gone */
    assert_string_equal(w.line, "still");
    end(&w, 0);
    end(&k, 0);
}

static int devices(void)
{
    struct proc c;

    start(&c, "count", NULL, NULL);
    if (sscanf(answer(&c), "%d %d", &gpus, &mapped) != 2)
        gpus = 0;
    end(&c, 0);
    return gpus;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shared_between_processes),
        cmocka_unit_test(mappings_outlive_their_exporter),
        cmocka_unit_test(killed_writers_kernel_has_stopped_when_it_is_reaped),
        cmocka_unit_test(inherited_descriptors_keep_the_kernel_running),
        cmocka_unit_test(pulls_are_double_buffered),
        cmocka_unit_test(an_error_sticks_to_its_process),
        cmocka_unit_test(memory_comes_back),
        cmocka_unit_test(killed_writer_on_another_gpu_has_stopped_when_it_is_reaped),
        cmocka_unit_test(inherited_descriptors_keep_a_kernel_on_another_gpu_running),
    };

    if (argc > 1)
        return role(argc, argv);
    self = "/proc/self/exe";
    signal(SIGPIPE, SIG_IGN);
    if (!devices()) {
        printf("skipped: no GPU here\n");
        return 77;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
#else
int main(void)
{
    printf("skipped: this build has no CUDA backend\n");
    return 77;
}
#endif
