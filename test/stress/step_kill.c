/* Kills a process after EVERY instruction of every operation of ipc/, and recovery too, and looks at what is left.
 *
 * For each operation a miniature run (test/test_ipc_run.h) is brought to where the victim performs it.  A child executes it one instruction
 * at a time; after each, the shared memory is compared with what it was.  A dead process leaves nothing but bytes, so positions with equal
 * bytes are one case.  Each different content is judged three times:
 *   at once    the supervisor's recovery, everything is checked from the words (step_check.h), the next incarnations play on to the end,
 *              every microbatch must be in the parameters of every drafter exactly once, every ring must take and give several laps;
 *   soon       the survivors have two turns each BEFORE the recovery;
 *   late       the survivors play on as far as they can before it: nobody may be blocked by a dead process, only wait for it.
 * Then children get SIGKILL after instruction k, before and after every change (--full: after every instruction), and must leave just those
 * bytes.  From each content of the first kind, recovery is stepped in the same way: killed after each instruction j, run again, judged.
 *
 * Usage: step_kill [--full] [--detail] [--first] [part of an operation's name]
 *   --full    also whole turns of actors (several operations and the payload between them), a SIGKILL after every instruction of every
 *             operation, and some hundred in recovery.
 *   --first   stop at the first position that is not ok
 *   --detail  print all of them
 * Prints a table; exit code 1 when one position is not ok.
 */
#include <setjmp.h>
#include <sys/time.h>

#include "test/stress/ptrace_step.h"
#include "test/stress/shadow.h"
#include "test/stress/step_check.h"
#include "test/stress/step_ops.h"

enum ending { AT_ONCE, SOON, LATE, ENDINGS };
enum { CPU_LIMIT_S = 2, CONTENTS_MAX = 512, MANY = 12, RECOVERY_STRIDE = 211, PLENTY = 100000 };

struct tally {
    long positions, contents, kills, n[VERDICTS];
};

/* The contents of the shared memory that one walk met. */
struct walk {
    unsigned n;
    long positions;                       /* instructions, + 1 */
    struct {
        long from;                        /* first position with these bytes */
        char *bytes;
    } at[CONTENTS_MAX];
};

static struct {
    struct mini *m;                       /* one run, put back before each case */
    struct shadow all;
    char *fresh[2], *begin;               /* contents: new run (normal, deterministic), the operation begins */
    const struct op *op;
    struct scene scene, scene0;
    int full, detail, first, told;
    sigjmp_buf jump;
} g;

static int is_shared(uint64_t address) { return shadow_holds(&g.all, address); }

static int act(void *arg)
{
    (void)arg;
    return g.op->act(&g.scene);
}

static int recovery(void *arg)
{
    (void)arg;
    if (g.op->redo)
        g.op->redo(&g.scene);
    else
        mr_recover(&g.m->r.s, g.op->slot, g.scene.inc);
    return 0;
}

/* ---- one case ----------------------------------------------------------------------------------------------------------------- */

/* Everybody but `absent` (a bit mask of slots) plays on until the end, or until nothing moves, `rounds` at most. */
static void play_on(struct mini *m, unsigned absent, unsigned rounds)
{
    for (unsigned idle = 0; rounds-- && idle < 3 && !mini_finished(m);) {
        unsigned did = (unsigned)supervisor_turn(m);

        for (unsigned i = 0; i < 1 + m->r.T + m->r.D; i++)
            did += !(absent >> i & 1) && mini_turn(m, i);
        idle = did ? 0 : idle + 1;
    }
}

static void reincarnate(struct mini *m, unsigned slot)
{
    memset(&m->local[slot], 0, sizeof m->local[slot]);
    m->r.s.actors[slot].incarnation++;
}

static enum verdict go_to_the_end(enum ending e)
{
    struct mini *m = g.m;
    enum verdict v;

    if (e != AT_ONCE)
        play_on(m, g.op->redo ? g.op->absent : 1u << g.op->slot, e == SOON ? 2 : PLENTY);
    recovery(NULL);
    v = check_recovered(m, g.op->slot, g.op->redo ? 0 : g.scene.inc);
    if (v)
        return v;
    if (!g.op->redo)
        reincarnate(m, g.op->slot);
    play_on(m, 0, PLENTY);
    return check_finished(m);
}

/* A loop without end, a failed assertion and a wild pointer end the case, not the program. */
static void on_signal(int sig) { siglongjmp(g.jump, sig); }

static void limit_cpu(long seconds)
{
    const struct itimerval it = {.it_value = {.tv_sec = seconds}};

    setitimer(ITIMER_VIRTUAL, &it, NULL);
}

static enum verdict guarded(enum ending e)
{
    int sig = sigsetjmp(g.jump, 1);
    enum verdict v;

    if (sig) {
        limit_cpu(0);
        return bad(sig == SIGVTALRM ? V_STUCK : V_DUP, "%s", sig == SIGVTALRM ? "endless loop" : strsignal(sig));
    }
    limit_cpu(CPU_LIMIT_S);
    v = go_to_the_end(e);
    limit_cpu(0);
    return v;
}

/* All endings from the remains in `from`; the worst verdict. */
static enum verdict judge(const char *from, long k, long j)
{
    static const char *const name[ENDINGS] = {"at once", "soon", "late"};
    enum verdict worst = V_OK;

    for (unsigned e = AT_ONCE; e < ENDINGS; e++) {
        enum verdict v;

        shadow_load(&g.all, from);
        v = guarded((enum ending)e);
        worst = v > worst ? v : worst;
        if (v == V_OK || (g.told++ > 20 && !g.detail))
            continue;
        printf("  %s, killed after %ld", g.op->name, k);
        if (j >= 0)
            printf(", recovery after %ld", j);
        printf(", recovered %s: %s\n", name[e], verdict_why);
        if (g.first)
            exit(1);
    }
    return worst;
}

/* ---- one operation ---------------------------------------------------------------------------------------------------------------- */

static void die(const char *what)
{
    fprintf(stderr, "step_kill: %s: %s\n", g.op->name, what);
    exit(2);
}

/* Brings the run to the operation and checks that it does there what it is meant to. */
static void prepare(const struct op *op)
{
    int rc;

    g.op = op;
    shadow_load(&g.all, g.fresh[op->flags & DET]);
    g.m->det = op->flags & DET;
    g.scene = (struct scene){.m = g.m, .s = &g.m->r.s, .inc = 1};
    op->prep(&g.scene);
    g.scene.inc = g.m->r.s.actors[op->slot].incarnation;
    g.scene0 = g.scene;
    shadow_save(&g.all, g.begin);
    rc = op->act(&g.scene);
    if (op->want == 1 ? rc < 0 : rc != op->want)
        die("does not do what it should");
}

static pid_t start(int (*fn)(void *), const char *from)
{
    pid_t pid;

    g.scene = g.scene0;
    shadow_load(&g.all, from);
    pid = step_start(fn, NULL);
    if (pid < 0)
        die("cannot be traced");
    return pid;
}

/* Steps through fn, begun at the bytes `from`, and notes each different content. */
static void walk(struct walk *w, int (*fn)(void *), const char *from)
{
    pid_t pid = start(fn, from);
    enum step_result r = STEP_ON;

    w->n = 0;
    for (long k = 0; r == STEP_ON; k++) {
        if (!w->n || !shadow_same(&g.all, w->at[w->n - 1].bytes)) {
            if (w->n == CONTENTS_MAX)
                die("too many contents");
            if (!w->at[w->n].bytes)
                w->at[w->n].bytes = malloc(g.all.bytes);
            shadow_save(&g.all, w->at[w->n].bytes);
            w->at[w->n++].from = k;
        }
        w->positions = k + 1;
        r = step_one(pid, is_shared);
    }
    if (r == STEP_BROKEN)
        die("cannot be stepped");
    step_kill(pid);
}

/* SIGKILL after instruction k of fn: the bytes must be those of the walk. */
static void really_kill(const struct walk *w, int (*fn)(void *), const char *from, long k)
{
    pid_t pid = start(fn, from);
    unsigned i = 0;

    if (step_to(pid, k, is_shared) != k)
        die("goes another way");
    step_kill(pid);
    while (i + 1 < w->n && w->at[i + 1].from <= k)
        i++;
    if (!shadow_same(&g.all, w->at[i].bytes))
        die("leaves other bytes when it is killed");
}

/* Before and after each change, and at every `stride`-th position (0 = none). */
static void kill_all(struct tally *t, const struct walk *w, int (*fn)(void *), const char *from, long stride)
{
    for (unsigned i = 0; i < w->n; i++) {
        long end = i + 1 < w->n ? w->at[i + 1].from : w->positions;

        for (long k = w->at[i].from; k < end; k++) {
            if (k != w->at[i].from && k != end - 1 && (!stride || k % stride))
                continue;
            really_kill(w, fn, from, k);
            t->kills++;
        }
    }
}

/* Judges every content; positions inherit the verdict of theirs. */
static void judge_all(struct tally *t, const struct walk *w, long k)
{
    t->positions += w->positions;
    t->contents += w->n;
    for (unsigned i = 0; i < w->n; i++) {
        long from = w->at[i].from, end = i + 1 < w->n ? w->at[i + 1].from : w->positions;

        t->n[k < 0 ? judge(w->at[i].bytes, from, -1) : judge(w->at[i].bytes, k, from)] += end - from;
    }
}

static void kill_operation(struct tally *op, struct tally *rec)
{
    static struct walk outer, inner;

    walk(&outer, act, g.begin);
    judge_all(op, &outer, -1);
    kill_all(op, &outer, act, g.begin, g.full);
    for (unsigned i = 0; i < outer.n; i++) {
        if (!g.full && outer.n > MANY && i % (outer.n / MANY) && i + 1 < outer.n)
            continue;                     /* a loop over a ring's stale cells: each round leaves the same but for head */
        walk(&inner, recovery, outer.at[i].bytes);
        judge_all(rec, &inner, outer.at[i].from);
        if (g.full && (i == 0 || i + 1 == outer.n))
            kill_all(rec, &inner, recovery, outer.at[i].bytes, RECOVERY_STRIDE);
    }
}

/* ---- the table ---------------------------------------------------------------------------------------------------------------------- */

static long row(const char *name, const char *suffix, const struct tally *t)
{
    printf("| %s%s | %ld | %ld | %ld |", name, suffix, t->positions, t->contents, t->kills);
    for (unsigned v = 0; v < VERDICTS; v++)
        printf(" %ld |", t->n[v]);
    printf("\n");
    fflush(stdout);
    return t->positions - t->n[V_OK];
}

static void remove_run(void) { mini_drop(g.m); }

static void set_up(void)
{
    static const int caught[] = {SIGVTALRM, SIGABRT, SIGSEGV, SIGBUS, SIGFPE};
    struct sigaction sa = {.sa_handler = on_signal};

    for (size_t i = 0; i < sizeof caught / sizeof caught[0]; i++)
        sigaction(caught[i], &sa, NULL);
    atexit(remove_run);
    g.m = mini_make(2, 2, 3, 6, 1, 10, 0);
    shadow_of(&g.all, g.m);
    for (int det = 0; det < 2; det++) {
        g.fresh[det] = malloc(g.all.bytes);
        g.m->det = (unsigned)det;
        shadow_save(&g.all, g.fresh[det]);
    }
    g.begin = malloc(g.all.bytes);
}

int main(int argc, char **argv)
{
    const char *only = NULL;
    long wrong = 0;

    for (int i = 1; i < argc; i++) {
        g.full |= strcmp(argv[i], "--full") == 0;
        g.detail |= strcmp(argv[i], "--detail") == 0;
        g.first |= strcmp(argv[i], "--first") == 0;
        only = argv[i][0] == '-' ? only : argv[i];
    }
    set_up();
    printf("| operation | positions | contents | kills | ok | lost | leak | stuck | dup |\n|---|---|---|---|---|---|---|---|---|\n");
    for (size_t i = 0; i < sizeof ops / sizeof ops[0]; i++) {
        struct tally op = {0}, rec = {0};

        if (only ? !strstr(ops[i].name, only) : (ops[i].flags & WHOLE) && !g.full)
            continue;
        prepare(&ops[i]);
        kill_operation(&op, &rec);
        wrong += row(ops[i].name, "", &op);
        wrong += row(ops[i].name, ", recovery killed too", &rec);
    }
    if (wrong)
        printf("%ld positions are not ok\n", wrong);
    return wrong != 0;
}
