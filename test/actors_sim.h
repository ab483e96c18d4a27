/* A small supervisor for the actor tests: makes a run with synthetic engines (topology, segments, run directory), keeps the ledger and the
 * end of the run, and checks what must hold afterwards.  The actors themselves run as threads (test_actors_threads.c) or as forked
 * processes (test_actors_kill.c).
 *
 * What is checked: every plan position in exactly one ledger line, every step's bucket mix equal to its group of the plan, final parameters
 * of every drafter equal to what the committed microbatches add (integers: exact), as many applied steps as ledger lines, checkpoint files
 * equal to the memory, all acknowledged, nothing held, nothing left.
 */
#ifndef MR_TEST_ACTORS_SIM_H
#define MR_TEST_ACTORS_SIM_H

#include <dirent.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "actors/actors.h"
#include "base/clock.h"
#include "ipc/atomic.h"
#include "ipc/dump.h"
#include "ipc/recover.h"
#include "ipc/step.h"
#include "runtime/ledger.h"
#include "runtime/shm_plan.h"

struct spec {
    int D, T, accum, epochs, rows, slabs;
    int deterministic, max_steps, ckpt_every;
    int target_us, drafter_us;           /* per item */
    unsigned stop_at;                    /* a stop is requested when this step is reached, 0 = never */
    unsigned first_step;                 /* resume */
    uint64_t seed;
    int in_memory;                       /* run directory in /dev/shm: hundreds of short runs would spend their time in fsync */
};

struct sim {
    struct spec spec;
    char dir[64], run[48];
    struct mr_topology topo;
    struct mr_checked checked;
    struct mr_seg seg;
    struct mr_plan *plan;                /* [epochs] */
    unsigned *line;                      /* [plan positions] step + 1 of the ledger line that has it, 0 = none yet */
    FILE *ledger;
    unsigned end;                        /* steps committed when the run was finished */
    uint64_t deadline_ns;
};

static void sim_must(int rc, const struct mr_err *err)
{
    if (rc)
        fail_msg("%s", err->msg);
}

static void sim_write_topology(const struct sim *m, const char *path)
{
    const struct spec *p = &m->spec;
    FILE *f = fopen(path, "w");

    assert_non_null(f);
    fprintf(f, "{\"run\": {\"name\": \"%s\", \"dir\": \"%s\", \"seed\": %llu},\n", m->run, m->dir, (unsigned long long)p->seed);
    fprintf(f, " \"target\": {\"checkpoint\": \"synthetic:hidden=16,layers=6,vocab=1000\", \"layers\": [1, 3]},\n");
    fprintf(f, " \"drafter\": {\"layers\": 1, \"block_size\": 8, \"mask_token_id\": 1, \"anchors\": 32, \"intermediate_size\": 32,"
               " \"num_attention_heads\": 2, \"num_key_value_heads\": 1, \"head_dim\": 8},\n");
    fprintf(f, " \"data\": {\"train\": \"synthetic:%d?min=8&max=64&seed=3\", \"max_tokens\": 64, \"buckets\": [16, 32, 64],"
               " \"token_budget\": 128},\n", p->rows);
    fprintf(f, " \"train\": {\"epochs\": %d, \"grad_accum\": %d, \"lr\": 1e-3, \"deterministic\": %s, \"max_steps\": %d,"
               " \"checkpoint_every_steps\": %d},\n",
            p->epochs, p->accum, p->deterministic ? "true" : "false", p->max_steps, p->ckpt_every);
    fprintf(f, " \"queue\": {\"slabs_per_device\": %d},\n \"actors\": [{\"kind\": \"feeder\"},\n", p->slabs);
    fprintf(f, "  {\"kind\": \"target\", \"device\": \"cpu\", \"engine\": \"synthetic\", \"count\": %d, \"us_per_item\": %d, \"us_per_token\": 1,"
               " \"jitter\": 0.5},\n", p->T, p->target_us);
    fprintf(f, "  {\"kind\": \"drafter\", \"device\": \"cpu\", \"engine\": \"synthetic\", \"count\": %d, \"us_per_item\": %d,"
               " \"us_per_token\": 1, \"jitter\": 0.5}]}\n", p->D, p->drafter_us);
    assert_int_equal(fclose(f), 0);
}

static void sim_read_plans(struct sim *m)
{
    struct mr_err err = {0};
    int n = m->spec.epochs;

    m->plan = calloc((size_t)n, sizeof(*m->plan));
    for (int e = 0; e < n; e++)
        sim_must(mr_plan_make(&m->plan[e], m->checked.data, &m->checked.plan_opts, (unsigned)e, &err), &err);
    free(m->line);
    m->line = calloc(m->checked.epoch[n].first_pos + 1u, sizeof(*m->line));
}

/* Segments, arenas and an open ledger; the run directory exists. */
static void sim_open(struct sim *m)
{
    struct mr_shm_plan sp;
    struct mr_err err = {0};
    char path[160];

    snprintf(path, sizeof(path), "%s/topology.json", m->dir);
    sim_write_topology(m, path);
    sim_must(mr_topology_load(&m->topo, path, NULL, 0, &err), &err);
    sim_must(mr_check(&m->checked, &m->topo, MR_CHECK_PLAN, &err), &err);
    mr_shm_plan_make(&sp, &m->checked, &m->topo, m->spec.first_step);
    sim_must(mr_shm_plan_create(&sp, &m->checked, &m->topo, &m->seg, &err), &err);
    sim_read_plans(m);
    snprintf(path, sizeof(path), "%s/ledger.jsonl", m->dir);
    m->ledger = fopen(path, "a");
    assert_non_null(m->ledger);
    m->deadline_ns = mr_now_ns() + 240u * 1000000000ull;
}

static void sim_close(struct sim *m)
{
    for (int e = 0; e < m->spec.epochs; e++)
        mr_plan_free(&m->plan[e]);
    free(m->plan);
    fclose(m->ledger);
    mr_seg_close(&m->seg);
    mr_seg_unlink(m->run);
    mr_checked_free(&m->checked);
    mr_topology_free(&m->topo);
}

/* A test that failed half-way leaves its segments and its directory; they go when the next one starts, or with the program. */
static char sim_run[48], sim_dir[64];

static void sim_clean(void)
{
    char command[96];

    if (sim_run[0])
        mr_seg_unlink(sim_run);
    snprintf(command, sizeof(command), "rm -rf '%s'", sim_dir);
    if (sim_dir[0] && system(command))
        fprintf(stderr, "cannot remove %s\n", sim_dir);
    sim_run[0] = sim_dir[0] = 0;
}

static void sim_start(struct sim *m, struct spec spec, const char *tag)
{
    static int registered;

    if (!registered++)
        atexit(sim_clean);
    sim_clean();
    memset(m, 0, sizeof(*m));
    m->spec = spec;
    snprintf(m->run, sizeof(m->run), "test-%d-%s", (int)getpid(), tag);
    snprintf(sim_run, sizeof(sim_run), "%s", m->run);
    snprintf(m->dir, sizeof(m->dir), "%s/actors-XXXXXX", spec.in_memory ? "/dev/shm" : "/tmp");
    assert_non_null(mkdtemp(m->dir));
    snprintf(sim_dir, sizeof(sim_dir), "%s", m->dir);
    sim_open(m);
}

static void sim_remove(struct sim *m)
{
    free(m->line);
    sim_clean();
}

/* ---- the supervisor's part of a run --------------------------------------------------------------------------------------------- */

/* The synthetic drafter gives its labels to the slots in turn: they must be this microbatch's, counted once. */
static void sim_check_slots(const struct mr_seg *s, unsigned step, unsigned place)
{
    const struct mr_slot_sums *slot = mr_slot_sums_at(s, step, place);
    const struct mr_record *r = mr_record(s, step, place);
    uint64_t correct = 0, n = s->hdr->block_slots;

    assert_int_equal(n, 7);
    for (uint64_t i = 0; i < n; i++) {
        assert_int_equal(slot[i].labels, r->labels / n + (i < r->labels % n));
        assert_true(slot[i].loss == 2.0 * (double)slot[i].labels);
        correct += slot[i].correct;
    }
    assert_int_equal(correct, r->correct);
}

static void sim_check_line(struct sim *m, unsigned step)
{
    const struct mr_seg *s = &m->seg;
    unsigned n = mr_step_places(s, step), first = mr_step_first_pos(s, step), epoch = mr_epoch_of_step(s, step);
    int want[MR_MAX_BUCKETS] = {0};

    for (unsigned k = 0; k < n; k++) {
        const struct mr_record *r = mr_record(s, step, k);
        const struct mr_plan_entry *p;

        assert_in_range(r->pos, s->epochs[epoch].first_pos, s->epochs[epoch + 1].first_pos - 1);
        p = &m->plan[epoch].entry[r->pos - s->epochs[epoch].first_pos];
        if (m->line[r->pos])
            fail_msg("microbatch %u is in the ledger lines of steps %u and %u", r->pos, m->line[r->pos] - 1, step);
        m->line[r->pos] = step + 1;
        assert_int_equal(r->bucket, p->bucket);
        assert_int_equal(r->tokens, p->n_tokens);
        want[m->plan[epoch].entry[first + k - s->epochs[epoch].first_pos].bucket]++;
        want[r->bucket]--;
        sim_check_slots(s, step, k);
        if (m->spec.deterministic) {
            assert_int_equal(r->pos, first + k);
            assert_int_equal(r->drafter, k % (unsigned)m->spec.D);
        }
    }
    for (int b = 0; b < MR_MAX_BUCKETS; b++)
        assert_int_equal(want[b], 0);
}

static void sim_ledger(struct sim *m)
{
    struct mr_seg *s = &m->seg;
    uint64_t w = mr_step_read(s);
    unsigned committed = mr_sw_step(w) + (mr_sw_phase(w) == MR_COMMITTED);
    struct mr_step_sums sums;
    char *line;
    size_t n;

    for (unsigned step = (unsigned)mr_ld(&s->hdr->ledger_done); step < committed; step++) {
        sim_check_line(m, step);
        assert_int_equal(mr_ledger_line(s, step, &line, &n, &sums), 0);
        assert_int_equal(fwrite(line, 1, n, m->ledger), n);
        assert_int_equal(fflush(m->ledger), 0);
        free(line);
        mr_st(&s->hdr->ledger_done, step + 1);
        mr_evc_bump(&s->hdr->evc[MR_DRAFTER]);
        mr_evc_bump(&s->hdr->evc[MR_FEEDER]);
    }
}

/* One round; 1 = the sentinel is out.  Never blocks. */
__attribute__((unused)) static int sim_round(struct sim *m)
{
    struct mr_seg *s = &m->seg;
    uint64_t w, ckpt = mr_ld(&s->hdr->ckpt);
    unsigned phase, step;

    assert_false(mr_ld(&s->hdr->fatal));
    if (mr_ld(&s->hdr->sweep)) {
        mr_st(&s->hdr->sweep, 0);
        mr_recover_rings(s);
    }
    sim_ledger(m);
    w = mr_step_read(s);
    phase = mr_sw_phase(w);
    step = mr_sw_step(w);
    if (m->spec.stop_at && step >= m->spec.stop_at)
        mr_st(&s->hdr->stop, 1);
    if (phase == MR_FINISHED)
        return 1;
    if ((phase != MR_HALT && (phase != MR_COLLECT || mr_step_places(s, step))) || mr_ld(&s->hdr->ledger_done) < step)
        return 0;
    if (mr_pw_state(ckpt) != MR_CKPT_IDLE || mr_pw_step(ckpt) != step)
        return 0;
    mr_st(&s->hdr->ckpt_latest, step);
    m->end = step;
    return mr_step_finish(s, w) == 0;
}

/* Fails with everything that is known when the run hangs. */
__attribute__((unused)) static void sim_watch(struct sim *m)
{
    if (mr_now_ns() < m->deadline_ns)
        return;
    mr_dump_all(&m->seg, stderr);
    fail_msg("the run does not end");
}

/* ---- what must hold after it ---------------------------------------------------------------------------------------------------- */

/* Parameters at the start of `step`: what the ledger lines before it add. */
static float *sim_expected(const struct sim *m, unsigned step)
{
    uint64_t P = m->seg.hdr->param_count;
    float *want = calloc(P, sizeof(*want));

    for (int e = 0; e < m->spec.epochs; e++)
        for (uint32_t i = 0; i < m->plan[e].n; i++) {
            unsigned line = m->line[m->checked.epoch[e].first_pos + i];
            struct mr_plan one = m->plan[e];

            if (!line || line > step)
                continue;
            one.entry = &m->plan[e].entry[i];
            one.n = 1;
            mr_synthetic_expect(&one, (unsigned)e, &m->checked.layout, want);
        }
    return want;
}

static void sim_check_state(const struct sim *m, const float *want)
{
    struct mr_arena_map map = {0};
    struct mr_err err = {0};
    uint64_t P = m->seg.hdr->param_count;

    for (int d = 0; d < m->spec.D; d++) {
        void *base = mr_arena_base(&map, &m->seg, (unsigned)mr_arena_of_drafter(&m->seg, (unsigned)d), 0, &err);
        struct mr_drafter_view v = mr_drafter_view_at(base, P);
        unsigned k = m->end & 1;

        for (uint64_t i = 0; i < P; i++) {
            if (v.param[k][i] != want[i])
                fail_msg("drafter/%d, parameter %llu: %g, the ledger's microbatches make it %g", d, (unsigned long long)i, v.param[k][i], want[i]);
            if (v.acc[i] != 0.0f)
                fail_msg("drafter/%d: its accumulator is not empty", d);
        }
        if (v.m[k][0] != (float)m->end)
            fail_msg("drafter/%d: %g steps applied, the run has %u", d, v.m[k][0], m->end);
    }
    mr_arena_close_all(&map);
}

static void sim_check_checkpoint(const struct sim *m, unsigned step)
{
    float *want = sim_expected(m, step);
    uint64_t P = m->seg.hdr->param_count, got = 0;
    float *x = calloc(3 * P, sizeof(*x));
    struct mr_err err = {0};
    struct mr_drafter_config config;
    char path[160];

    snprintf(path, sizeof(path), "%s/checkpoints/step-%u/trainer.safetensors", m->dir, step);
    sim_must(mr_trainer_load(&m->checked.layout, x, x + P, x + 2 * P, &got, path, &err), &err);
    assert_int_equal(got, step);
    for (int t = 0; t < m->checked.layout.n; t++) {
        const struct mr_dparam *p = &m->checked.layout.t[t];

        for (uint64_t i = p->offset; i < p->offset + p->n; i++) {
            if (x[i] != want[i] || x[P + i] != (float)step)
                fail_msg("checkpoint %u, parameter %llu: %g after %g steps; the ledger makes it %g", step, (unsigned long long)i, x[i], x[P + i],
                         want[i]);
        }
    }
    snprintf(path, sizeof(path), "%s/checkpoints/step-%u", m->dir, step);
    sim_must(mr_drafter_config_load(&config, path, &err), &err);
    snprintf(path, sizeof(path), "%s/checkpoints/step-%u/state.json", m->dir, step);
    assert_int_equal(access(path, R_OK), 0);
    free(x);
    free(want);
}

/* Every one, also those that were copied out while the run went on. */
static void sim_check_checkpoints(const struct sim *m)
{
    unsigned n = 0, step;
    char path[160];
    struct dirent *ent;
    DIR *dir;

    snprintf(path, sizeof(path), "%s/checkpoints", m->dir);
    dir = opendir(path);
    assert_non_null(dir);
    while ((ent = readdir(dir))) {
        if (strstr(ent->d_name, ".tmp"))
            fail_msg("left over: %s/%s", path, ent->d_name);
        if (sscanf(ent->d_name, "step-%u", &step) != 1)
            continue;
        sim_check_checkpoint(m, step);
        n += step == m->end;
    }
    closedir(dir);
    assert_int_equal(n, 1);
}

__attribute__((unused)) static void sim_check(const struct sim *m)
{
    const struct mr_seg *s = &m->seg;
    unsigned stopped = m->end < s->hdr->steps_total, committed = 0, total = m->checked.epoch[m->spec.epochs].first_pos;
    float *want = sim_expected(m, m->end);

    for (unsigned i = 0; i < total; i++)
        committed += m->line[i] != 0;
    assert_int_equal(committed, mr_committed_at(s, m->end));
    if (!stopped)
        assert_int_equal(committed, s->hdr->microbatches_total);
    for (unsigned i = 0; i < s->hdr->n_actors; i++)
        assert_int_equal(s->actors[i].acked, 1);
    for (unsigned i = 0; i < s->hdr->n_slabs && !stopped; i++)
        assert_int_equal(s->slabs[i].word, 0);
    for (unsigned i = 0; i < s->hdr->n_items && !stopped; i++)
        assert_int_equal(mr_w_phase(s->items[i].word), MR_FREE);
    sim_check_state(m, want);
    sim_check_checkpoints(m);
    free(want);
}

#endif
