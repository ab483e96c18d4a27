/* Checkpoints: copying state[N mod 2] out in the background.
 *
 * The state after step N-1 is read-only until step N+1 is applied, and that apply waits until it has been read (mr_ckpt_blocks_apply); not for
 * the disk: nothing is flushed before (mr_ckpt_read).  So a thread of one drafter copies from the arena while all drafters go on; out of
 * device memory block by block, on a stream of its own, into pinned memory: the next block is copied while the last ones are on their way to
 * the disk (data/safetensors_write.c).  At most one copier exists in the run: the checkpoint word names it.
 *
 *     checkpoints/step-N.tmp-SLOT-INC/{config.json, model.safetensors, trainer.safetensors, state.json} -> mr_ckpt_read -> each file fsynced
 *     fsync of the directory -> rename to step-N -> fsync of checkpoints/ -> mr_ckpt_done -> the supervisor moves `latest`
 *
 * A copier may die anywhere: its word becomes WANTED, another copies again.  Directories *.tmp-* of the dead are removed by the next
 * copier, who knows that it is alone.  A complete step-N that is there already (its copier died before it could say so, or the run was
 * resumed from an older one) is exchanged in one rename, so that a `latest` that names it never points at nothing.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <jansson.h>

#include "actors/drafter_pvt.h"
#include "base/clock.h"
#include "base/hash.h"
#include "base/log.h"
#include "base/point.h"
#include "data/safetensors.h"
#include "ipc/atomic.h"
#include "ipc/step.h"

enum { DIR_MAX = MR_PATH + 64, STEP_MAX = DIR_MAX + 64, FILE_MAX = STEP_MAX + 64 };

/* ---- files and directories -------------------------------------------------------------------------------------------------- */

static int sync_path(const char *path, struct mr_err *err)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    int rc = fd < 0 ? -1 : fsync(fd);

    if (rc)
        mr_err_set(err, MR_EXIT_ENV, "%s: cannot flush to disk: %s; when the disk is well: millrace run ... --resume", path, strerror(errno));
    if (fd >= 0)
        close(fd);
    return rc;
}

/* Removes a directory of plain files; one that is not there is fine. */
static int remove_dir(const char *path, struct mr_err *err)
{
    DIR *dir = opendir(path);
    struct dirent *ent;

    if (!dir && errno == ENOENT)
        return 0;
    while (dir && (ent = readdir(dir)))
        if (strcmp(ent->d_name, ".") && strcmp(ent->d_name, ".."))
            unlinkat(dirfd(dir), ent->d_name, 0);
    if (dir)
        closedir(dir);
    if (!rmdir(path) || errno == ENOENT)
        return 0;
    return mr_err_set(err, MR_EXIT_FAILED, "%s: cannot remove: %s", path, strerror(errno));
}

/* What dead copiers left. */
static int remove_leftovers(const char *parent, struct mr_err *err)
{
    DIR *dir = opendir(parent);
    struct dirent *ent;
    int rc = 0;

    if (!dir)
        return mr_err_set(err, MR_EXIT_FAILED, "%s: %s", parent, strerror(errno));
    while (!rc && (ent = readdir(dir)))
        if (!strncmp(ent->d_name, "step-", 5) && strstr(ent->d_name, ".tmp-")) {
            char path[FILE_MAX + 256];

            snprintf(path, sizeof(path), "%s/%s", parent, ent->d_name);
            rc = remove_dir(path, err);
        }
    closedir(dir);
    return rc;
}

/* tmp takes the name `final`; an old `final` ends up under the name tmp. */
static int swap_in(const char *tmp, const char *final, struct mr_err *err)
{
    char old[FILE_MAX];

    if (!rename(tmp, final))
        return 0;
    if (errno != ENOTEMPTY && errno != EEXIST)
        return mr_err_set(err, MR_EXIT_FAILED, "%s: cannot rename to %s: %s", tmp, final, strerror(errno));
    if (!renameat2(AT_FDCWD, tmp, AT_FDCWD, final, RENAME_EXCHANGE))
        return 0;
    /* a file system without exchange: two renames, and for an instant no step-N */
    snprintf(old, sizeof(old), "%s.old", tmp);
    if (rename(final, old) || rename(tmp, final) || rename(old, tmp))
        return mr_err_set(err, MR_EXIT_FAILED, "%s: cannot replace: %s", final, strerror(errno));
    return 0;
}

static int make_dir(const char *path, struct mr_err *err)
{
    if (!mkdir(path, 0777) || errno == EEXIST)
        return 0;
    return mr_err_set(err, MR_EXIT_FAILED, "%s: cannot create: %s", path, strerror(errno));
}

/* ---- contents --------------------------------------------------------------------------------------------------------------- */

static uint64_t layout_hash(const struct mr_dlayout *l)
{
    uint64_t h = MR_HASH_INIT;

    for (int i = 0; i < l->n; i++) {
        h = mr_hash(h, l->t[i].name, strlen(l->t[i].name));
        h = mr_hash(h, &l->t[i].rows, sizeof(l->t[i].rows));
        h = mr_hash(h, &l->t[i].cols, sizeof(l->t[i].cols));
    }
    return h;
}

static uint64_t tokens_drafted(const struct mr_env *e)
{
    uint64_t n = 0;

    for (unsigned i = 0; i < e->hdr->n_actors; i++)
        if (e->seg->actors[i].kind == MR_DRAFTER)
            n += mr_ld_relaxed(&e->seg->actors[i].tokens);   /* metrics */
    return n;
}

/* What `run --resume` compares with its own plan before it believes the checkpoint. */
static json_t *state_json(const struct mr_drafter *d, unsigned step)
{
    const struct mr_env *e = d->env;
    const struct mr_shm_header *h = e->hdr;
    char fingerprint[32];
    unsigned epoch = mr_epoch_of_step(e->seg, step);     /* also when max_steps ends the run within it; after the last one: their number */

    snprintf(fingerprint, sizeof(fingerprint), "%016llx", (unsigned long long)layout_hash(&e->checked->layout));
    return json_pack("{s:I, s:I, s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:s, s:I, s:s}",
                     "step", (json_int_t)step, "epoch", (json_int_t)epoch, "run", e->topo->run.name, "seed", (json_int_t)h->seed,
                     "places", (json_int_t)h->n_places, "steps_total", (json_int_t)h->steps_total,
                     "microbatches_total", (json_int_t)h->microbatches_total,
                     "microbatches_committed", (json_int_t)mr_committed_at(e->seg, step), "token_budget", (json_int_t)h->token_budget,
                     "param_count", (json_int_t)h->param_count, "drafter_fingerprint", fingerprint,
                     "tokens", (json_int_t)tokens_drafted(e), "data", e->topo->data.train);
}

static int write_state(const struct mr_drafter *d, unsigned step, const char *path, struct mr_err *err)
{
    json_t *root = state_json(d, step);
    int rc = root ? json_dump_file(root, path, JSON_INDENT(2)) : -1;

    json_decref(root);
    if (rc)
        return mr_err_set(err, MR_EXIT_FAILED, "%s: cannot write: %s", path, strerror(errno));
    return 0;
}

static int source_failed(const struct mr_drafter *d, const char *path, struct mr_err *err)
{
    return mr_err_set(err, d->eng.failure, "%s: the state could not be read from %s", path, d->env->me->device);
}

/* Bytes of the four files, for the log. */
static double mib_of(char path[4][FILE_MAX])
{
    double sum = 0;
    struct stat st;

    for (int i = 0; i < 4; i++)
        sum += stat(path[i], &st) ? 0 : (double)st.st_size;
    return sum / 0x1p20;
}

static int write_files(const struct mr_drafter *d, unsigned step, const char *dir, struct mr_err *err)
{
    static const char *const name[] = {"config.json", "model.safetensors", "trainer.safetensors", "state.json"};
    const struct mr_checked *c = d->env->checked;
    const struct mr_st_source from = {.ctx = d->eng.self, .block = d->eng.read_block, .read = d->eng.read, .unflushed = 1};
    uint64_t begun = mr_now_ns();
    unsigned k = step & 1;
    char path[4][FILE_MAX];

    for (int i = 0; i < 4; i++)
        snprintf(path[i], sizeof(path[i]), "%s/%s", dir, name[i]);
    if (mr_drafter_config_save(&c->drafter, path[0], err))
        return -1;
    if (mr_drafter_weights_save(&c->layout, d->v.param[k], &from, path[1], err))
        return source_failed(d, path[1], err);
    MR_POINT("ckpt.model.written");
    if (mr_trainer_save(&c->layout, d->v.param[k], d->v.m[k], d->v.v[k], step, &from, path[2], err))
        return source_failed(d, path[2], err);
    MR_POINT("ckpt.trainer.written");
    if (mr_ckpt_read(d->env->seg, step, d->env->slot, d->env->inc))
        return mr_err_set(err, MR_EXIT_FAILED, "somebody else changed the checkpoint word that this incarnation (%u) holds", d->env->inc);
    MR_POINT("ckpt.state.free");
    if (write_state(d, step, path[3], err))
        return -1;
    for (int i = 0; i < 4; i++)
        if (sync_path(path[i], err))
            return -1;
    mr_info("checkpoint %u: %.1f MiB on disk after %.2f s", step, mib_of(path), (double)(mr_now_ns() - begun) * 1e-9);
    return 0;
}

/* ---- the copy --------------------------------------------------------------------------------------------------------------- */

static int copy_out(const struct mr_drafter *d, unsigned step, struct mr_err *err)
{
    char parent[DIR_MAX], tmp[STEP_MAX], final[STEP_MAX];

    snprintf(parent, sizeof(parent), "%s/checkpoints", d->env->topo->run.dir);
    snprintf(final, sizeof(final), "%s/step-%u", parent, step);
    snprintf(tmp, sizeof(tmp), "%s/step-%u.tmp-%u-%u", parent, step, d->env->slot, d->env->inc);
    if (make_dir(parent, err) || remove_leftovers(parent, err) || make_dir(tmp, err))
        return -1;
    MR_POINT("ckpt.directory.made");
    if (write_files(d, step, tmp, err) || sync_path(tmp, err))
        return -1;
    MR_POINT("ckpt.files.synced");
    if (swap_in(tmp, final, err))
        return -1;
    MR_POINT("ckpt.renamed");
    if (sync_path(parent, err))
        return -1;
    return remove_dir(tmp, err);
}

static void *copier(void *arg)
{
    struct mr_drafter *d = arg;
    struct mr_ckpt_job *job = &d->job;
    struct mr_env *e = d->env;

    job->rc = copy_out(d, job->step, &job->err);
    __atomic_store_n(&job->done, 1, __ATOMIC_RELEASE);           /* first: who sees the word free must be able to claim it */
    if (!job->rc) {
        MR_POINT("ckpt.complete");
        mr_ckpt_done(e->seg, job->step, e->slot, e->inc);
        MR_POINT("ckpt.done");
    }
    mr_evc_bump(&e->hdr->evc[MR_DRAFTER]);
    mr_env_notify(e);
    return NULL;
}

int mr_drafter_ckpt_join(struct mr_drafter *d)
{
    struct mr_ckpt_job *job = &d->job;

    if (!job->active)
        return MR_GO_ON;
    pthread_join(job->thread, NULL);
    job->active = 0;
    if (!job->rc)
        return MR_GO_ON;
    mr_err_prefix(&job->err, "checkpoint %u was not made, `latest` is as it was", job->step);
    return mr_env_fail(d->env, &job->err);
}

static int start_copy(struct mr_drafter *d, unsigned step)
{
    struct mr_ckpt_job *job = &d->job;

    MR_POINT("ckpt.claimed");
    *job = (struct mr_ckpt_job){.step = step};
    if (!pthread_create(&job->thread, NULL, copier, d)) {
        job->active = 1;
        return MR_GO_ON;
    }
    copier(d);                                   /* no thread to be had: the copy is made here, and this drafter stands still for it */
    return job->rc ? mr_env_fail(d->env, &job->err) : MR_GO_ON;
}

/* Is a checkpoint of state n due by itself?  `now` = the step my current state is the start of. */
static int wanted(const struct mr_seg *s, uint64_t word, unsigned n, unsigned now)
{
    return (n == now && (now == s->hdr->steps_total || mr_sw_phase(word) == MR_HALT)) || mr_ckpt_periodic(s, n);
}

/* Step whose checkpoint is to be made of what I hold, the older of two first; 0 = none. */
static unsigned due(const struct mr_drafter *d, uint64_t word, unsigned now)
{
    const struct mr_shm_header *h = d->env->hdr;
    uint64_t ckpt = mr_ld(&h->ckpt), first = d->v.hdr->first_state > h->first_step + 1u ? d->v.hdr->first_state : h->first_step + 1u;
    unsigned last = mr_pw_step(ckpt);

    if (mr_ckpt_has_copier(ckpt))
        return 0;
    for (unsigned n = now ? now - 1 : 0; n <= now; n++) {
        int again = mr_pw_state(ckpt) == MR_CKPT_WANTED && n == last;

        if (n >= first && (again || (n > last && wanted(d->env->seg, word, n, now))))
            return n;
    }
    return 0;
}

static unsigned state_of(const struct mr_drafter *d, uint64_t word)
{
    return mr_sw_step(word) + (mr_sw_phase(word) == MR_COMMITTED && mr_drafter_applied(d, word));
}

int mr_drafter_ckpt_due(const struct mr_drafter *d, uint64_t word)
{
    return due(d, word, state_of(d, word)) != 0;
}

int mr_drafter_ckpt(struct mr_drafter *d, uint64_t word)
{
    struct mr_ckpt_job *job = &d->job;
    unsigned step;
    int rc = MR_GO_ON;

    if (job->active) {
        if (!__atomic_load_n(&job->done, __ATOMIC_ACQUIRE))
            return MR_GO_ON;
        rc = mr_drafter_ckpt_join(d);
    }
    step = rc == MR_GO_ON ? due(d, word, state_of(d, word)) : 0;
    if (!step || mr_ckpt_claim(d->env->seg, step, d->env->slot, d->env->inc))
        return rc;
    return start_copy(d, step);
}
