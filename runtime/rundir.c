/* The run directory: see rundir.h. */
#include "runtime/rundir.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "runtime/jsonl.h"

enum { FILE_PATH = MR_PATH + 64 };

char *mr_rundir_file(const struct mr_rundir *d, const char *name, char *out)
{
    if (snprintf(out, FILE_PATH, "%s/%s", d->path, name) >= FILE_PATH)
        out[0] = 0; /* a name that nothing has: the caller's open fails */
    return out;
}

static int make_path(const char *path)
{
    char copy[MR_PATH];

    snprintf(copy, sizeof copy, "%s", path);
    for (char *p = copy + 1; *p; p++) {
        if (*p != '/')
            continue;
        *p = 0;
        if (mkdir(copy, 0755) && errno != EEXIST)
            return -1;
        *p = '/';
    }
    return mkdir(copy, 0755) && errno != EEXIST ? -1 : 0;
}

static int has_content(const struct mr_rundir *d, const char *name)
{
    char path[FILE_PATH];
    struct stat st;

    return lstat(mr_rundir_file(d, name, path), &st) == 0 && (S_ISLNK(st.st_mode) || st.st_size > 0);
}

static int take_lock(struct mr_rundir *d, struct mr_err *err)
{
    char path[FILE_PATH];

    d->lock_fd = open(mr_rundir_file(d, ".lock", path), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (d->lock_fd < 0)
        return mr_err_set(err, MR_EXIT_ENV, "/run/dir: cannot write in %s: %s", mr_err_path(d->path, 200), strerror(errno));
    if (flock(d->lock_fd, LOCK_EX | LOCK_NB) == 0)
        return 0;
    if (errno == EWOULDBLOCK)
        return mr_err_set(err, MR_EXIT_CONFIG, "/run/dir: %s is in use by another live run: choose another directory, or stop that run",
                          mr_err_path(d->path, 200));
    return 0; /* a file system without locks: the live-name check still stands */
}

static int probe(const struct mr_rundir *d, struct mr_err *err)
{
    char path[FILE_PATH];
    static const char text[] = "probe\n";

    if (mr_write_file(mr_rundir_file(d, ".probe", path), text, sizeof text - 1, err))
        return mr_err_prefix(err, "/run/dir");
    unlink(path);
    return 0;
}

int mr_rundir_open(struct mr_rundir *d, const char *path, int resume, struct mr_err *err)
{
    static const char *const sub[] = {"checkpoints", "metrics"};
    char file[FILE_PATH];

    d->lock_fd = -1;
    snprintf(d->path, sizeof d->path, "%s", path);
    if (make_path(path))
        return mr_err_set(err, MR_EXIT_ENV, "/run/dir: cannot make %s: %s", mr_err_path(path, 200), strerror(errno));
    if (take_lock(d, err))
        goto fail;
    if (!resume && (has_content(d, "ledger.jsonl") || has_content(d, "latest"))) {
        mr_err_set(err, MR_EXIT_CONFIG,
                   "/run/dir: %s holds a run already: go on with it (--resume), or choose another directory (--set /run/dir=...)",
                   mr_err_path(path, 200));
        goto fail;
    }
    for (size_t i = 0; i < 2; i++)
        if (mkdir(mr_rundir_file(d, sub[i], file), 0755) && errno != EEXIST) {
            mr_err_set(err, MR_EXIT_ENV, "/run/dir: cannot make %s: %s", mr_err_path(file, 200), strerror(errno));
            goto fail;
        }
    if (probe(d, err) == 0)
        return 0;
fail:
    mr_rundir_close(d);
    return -1;
}

int mr_rundir_has_room(const struct mr_rundir *d, const struct mr_checked *c, unsigned n, struct mr_err *err)
{
    enum { WEIGHT = 2, TRAINER = 3 * 4, REST = 64 << 10 }; /* bf16; f32 master and two moments; headers, configs, state */
    uint64_t one = (uint64_t)c->layout.P * (WEIGHT + TRAINER) + REST, have;
    struct statvfs fs;

    if (statvfs(d->path, &fs) || fs.f_blocks == 0) /* 0: a file system that does not say */
        return 0;
    have = (uint64_t)fs.f_bavail * fs.f_frsize;
    if (have >= n * one)
        return 0;
    return mr_err_set(err, MR_EXIT_ENV,
                      "/run/dir: too little space in %s: %u checkpoint%s of %" PRIu64 " bytes need%s %" PRIu64 ", available %" PRIu64
                      "; free some, choose another directory, or lower /train/keep_checkpoints",
                      mr_err_path(d->path, 200), n, n == 1 ? "" : "s", one, n == 1 ? "s" : "", n * one, have);
}

unsigned mr_rundir_checkpoints(const struct mr_topology *t, unsigned steps)
{
    unsigned every = (unsigned)t->train.checkpoint_every_steps, n = every ? (steps + every - 1) / every : 1;

    return n > (unsigned)t->train.keep_checkpoints ? (unsigned)t->train.keep_checkpoints + 1 : n;
}

int mr_rundir_possible(const char *path, const struct mr_checked *c, unsigned n, struct mr_err *err)
{
    struct mr_rundir d = {.lock_fd = -1};
    struct stat st;
    char *slash;
    int rc;

    snprintf(d.path, sizeof d.path, "%s", path);
    while ((rc = stat(d.path, &st)) && errno == ENOENT && (slash = strrchr(d.path, '/')) != NULL)
        slash[slash == d.path] = 0; /* what exists of it */
    if (!rc && !S_ISDIR(st.st_mode)) {
        errno = ENOTDIR;
        rc = -1;
    }
    if (rc || access(d.path, W_OK | X_OK))
        return mr_err_set(err, MR_EXIT_ENV, "/run/dir: cannot make %s: %s: %s; choose another directory", mr_err_path(path, 200),
                          mr_err_path(d.path, 100), strerror(errno));
    return mr_rundir_has_room(&d, c, has_content(&d, "ledger.jsonl") ? 1 : n, err);
}

void mr_rundir_close(struct mr_rundir *d)
{
    if (d->lock_fd >= 0)
        close(d->lock_fd);
    d->lock_fd = -1;
}

static int sync_dir(const char *path)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC), r;

    if (fd < 0)
        return -errno;
    r = fsync(fd) ? -errno : 0;
    close(fd);
    return r;
}

int mr_rundir_set_latest(const struct mr_rundir *d, unsigned step)
{
    char to[64], dir[FILE_PATH], tmp[FILE_PATH], path[FILE_PATH];

    snprintf(to, sizeof to, "checkpoints/step-%u", step);
    if (access(mr_rundir_file(d, to, dir), F_OK))
        return -errno;
    mr_rundir_file(d, "latest.tmp", tmp);
    if (unlink(tmp) && errno != ENOENT)
        return -errno;
    if (symlink(to, tmp) || rename(tmp, mr_rundir_file(d, "latest", path)))
        return -errno;
    return sync_dir(d->path);
}

static int remove_entry(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)st, (void)type, (void)ftw;
    return remove(path);
}

/* Renamed first, so that what a kill leaves of it is never taken for a checkpoint. */
static int remove_checkpoint(const struct mr_rundir *d, const char *name)
{
    char from[FILE_PATH], to[FILE_PATH], rel[300];
    int gone;

    if (strlen(name) > 200)
        return -1;
    snprintf(rel, sizeof rel, "checkpoints/%s", name);
    mr_rundir_file(d, rel, from);
    gone = strncmp(name, "gone-", 5) == 0;
    snprintf(rel, sizeof rel, "checkpoints/%s%s", gone ? "" : "gone-", name);
    mr_rundir_file(d, rel, to);
    if (!gone && rename(from, to))
        return -1;
    return nftw(to, remove_entry, 8, FTW_DEPTH | FTW_PHYS);
}

/* Number of "step-N", or -1 for any other name. */
static long step_of(const char *name)
{
    char *end;
    long n;

    if (strncmp(name, "step-", 5) || name[5] < '0' || name[5] > '9')
        return -1;
    n = strtol(name + 5, &end, 10);
    return *end ? -1 : n;
}

static int each_checkpoint(const struct mr_rundir *d, int (*want)(const char *name, const void *arg), const void *arg)
{
    char path[FILE_PATH];
    DIR *dir = opendir(mr_rundir_file(d, "checkpoints", path));
    struct dirent *e;
    int n = 0;

    while (dir && (e = readdir(dir)))
        if (e->d_name[0] != '.' && want(e->d_name, arg) && remove_checkpoint(d, e->d_name) == 0)
            n++;
    if (dir)
        closedir(dir);
    return n;
}

static int is_below(const char *name, const void *arg)
{
    long n = step_of(name);

    return strncmp(name, "gone-", 5) == 0 || (n >= 0 && n < *(const long *)arg);
}

static int is_unpublished(const char *name, const void *arg)
{
    long n = step_of(name);

    return n < 0 || n > *(const long *)arg;
}

static int newest_first(const void *a, const void *b)
{
    long x = *(const long *)a, y = *(const long *)b;

    return x > y ? -1 : x < y;
}

/* Steps of the complete checkpoints up to `max`, newest first.  Returns their number, *step is the caller's to free. */
static size_t list_steps(const struct mr_rundir *d, long max, long **step)
{
    char path[FILE_PATH];
    DIR *dir = opendir(mr_rundir_file(d, "checkpoints", path));
    struct dirent *e;
    size_t n = 0;

    *step = NULL;
    while (dir && (e = readdir(dir))) {
        long k = step_of(e->d_name);
        long *more = k < 0 || k > max ? NULL : realloc(*step, (n + 1) * sizeof **step);

        if (more) {
            *step = more;
            more[n++] = k;
        }
    }
    if (dir)
        closedir(dir);
    if (n)
        qsort(*step, n, sizeof **step, newest_first);
    return n;
}

int mr_rundir_prune(const struct mr_rundir *d, unsigned latest, int keep)
{
    long *step, floor_step;
    size_t n = keep <= 0 ? 0 : list_steps(d, latest, &step);
    int removed = 0;

    if (keep <= 0)
        return 0;
    if (n > (size_t)keep) {
        floor_step = step[keep - 1];
        removed = each_checkpoint(d, is_below, &floor_step);
    }
    free(step);
    return removed;
}

/* One checkpoint without `latest` is a first one that was never published.  Several: the link was lost, and starting again would throw
 * them away. */
static int latest_lost(const struct mr_rundir *d, struct mr_err *err)
{
    long *step;
    size_t n = list_steps(d, MR_STEP_MAX, &step);
    int r = 0;

    if (n > 1)
        r = mr_err_set(err, MR_EXIT_CONFIG, "--resume: %s has %zu checkpoints, but no link `latest` that says which one counts; "
                       "to go on from the newest: ln -s checkpoints/step-%ld %s/latest", d->path, n, step[0], d->path);
    free(step);
    return r;
}

int mr_rundir_damaged(const struct mr_rundir *d, struct mr_err *err)
{
    char path[FILE_PATH], to[64] = "", advice[FILE_PATH + 200];
    ssize_t len = readlink(mr_rundir_file(d, "latest", path), to, sizeof to - 1);
    const char *name = len > 0 && strrchr(to, '/') ? strrchr(to, '/') + 1 : to;
    long now = step_of(name), *step;
    size_t n = list_steps(d, now < 0 ? MR_STEP_MAX : now - 1, &step);

    if (n)
        snprintf(advice, sizeof advice, "to go on from the one before it: ln -sfn checkpoints/step-%ld %s", step[0], path);
    else
        snprintf(advice, sizeof advice, "there is no older one: bring it back from a copy, or start a new run.dir");
    free(step);
    mr_err_prefix(err, "--resume: the checkpoint that `latest` names is damaged");
    snprintf(err->msg + strlen(err->msg), sizeof err->msg - strlen(err->msg), "; %s", advice);
    return -1;
}

int mr_rundir_resume_step(const struct mr_rundir *d, unsigned *step, struct mr_err *err)
{
    char path[FILE_PATH];
    struct mr_json j;
    json_t *n;
    int r = 0;

    *step = 0;
    if (!has_content(d, "latest"))
        return latest_lost(d, err);
    if (mr_json_load(&j, mr_rundir_file(d, "latest/state.json", path), err))
        return mr_rundir_damaged(d, err);
    n = json_object_get(j.root, "step");
    if (!json_is_integer(n) || json_integer_value(n) <= 0 || json_integer_value(n) > MR_STEP_MAX)
        r = mr_json_error(&j, "/step", err, "the number of the step, 1 to %u, is wanted", MR_STEP_MAX) ? mr_rundir_damaged(d, err) : 0;
    else
        *step = (unsigned)json_integer_value(n);
    mr_json_free(&j);
    return r;
}

int mr_rundir_drop_unpublished(const struct mr_rundir *d, unsigned latest)
{
    long n = latest;

    return each_checkpoint(d, is_unpublished, &n);
}

/* ---- run.json ------------------------------------------------------------------------------------------------------------------- */

static json_t *int_array(const int *v, int n)
{
    json_t *a = json_array();

    for (int i = 0; i < n; i++)
        json_array_append_new(a, json_integer(v[i]));
    return a;
}

/* What the weights mean, beside their number: a drafter trained with two of these would be good for neither. */
static json_t *drafter_identity(const struct mr_checked *c)
{
    const struct mr_drafter_config *d = &c->drafter;
    int sliding[MR_TOPO_LAYERS], causal[MR_TOPO_LAYERS];
    char target[24], weights[24];

    snprintf(target, sizeof target, "%016" PRIx64, c->target_fingerprint);
    snprintf(weights, sizeof weights, "%016" PRIx64, c->target_content);
    for (int i = 0; i < d->n_layers; i++) {
        sliding[i] = d->sliding[i];
        causal[i] = d->causal[i];
    }
    return json_pack("{s:s, s:s, s:o, s:I, s:i, s:i, s:i, s:i, s:i, s:f, s:f, s:i, s:o, s:o, s:i}", "target", target, "target_weights",
                     weights, "target_layers", int_array(d->layer_ids, d->K), "parameters", (json_int_t)c->layout.P, "block_size",
                     d->block_size, "mask_token_id", d->mask_token_id, "num_attention_heads", d->n_heads, "num_key_value_heads",
                     d->n_kv_heads, "head_dim", d->head_dim, "rope_theta", d->rope_theta, "rms_norm_eps", d->rms_eps, "sliding_window",
                     d->sliding_window, "sliding", int_array(sliding, d->n_layers), "causal", int_array(causal, d->n_layers),
                     "window_origin", d->window_origin);
}

static json_t *identity(const struct mr_topology *t, const struct mr_checked *c)
{
    json_t *count = json_array();
    char data[24];

    for (int i = 0; i < t->data.n_buckets; i++)
        json_array_append_new(count, json_integer((json_int_t)c->bucket_n[i]));
    snprintf(data, sizeof data, "%016" PRIx64, mr_dataset_fingerprint(c->data));
    return json_pack("{s:s, s:I, s:i, s:i, s:o, s:s, s:i, s:o, s:o}", "run", t->run.name, "seed", (json_int_t)t->run.seed,
                     "microbatches_per_step", mr_topo_places(t), "token_budget", t->data.token_budget, "buckets",
                     int_array(t->data.buckets, t->data.n_buckets), "data", data, "microbatches_per_epoch",
                     (int)(c->epoch[1].first_pos - c->epoch[0].first_pos), "microbatches_per_bucket", count, "drafter",
                     drafter_identity(c));
}

int mr_rundir_write_identity(const struct mr_rundir *d, const struct mr_topology *t, const struct mr_checked *c, struct mr_err *err)
{
    json_t *id = identity(t, c);
    char *text = id ? json_dumps(id, JSON_INDENT(2)) : NULL, path[FILE_PATH];
    int r =
        text ? mr_write_file(mr_rundir_file(d, "run.json", path), text, strlen(text), err) : mr_err_set(err, MR_EXIT_ENV, "out of memory");

    free(text);
    json_decref(id);
    return r;
}

/* Fingerprints say nothing by themselves. */
static const char *meaning(const char *ptr, const char *other)
{
    if (!strcmp(ptr, "/drafter/target"))
        return "the target is another model: its config.json differs, or its tensors have other names or shapes";
    if (!strcmp(ptr, "/drafter/target_weights"))
        return "the target's tensors have the same shapes and other bytes (where its files lie does not matter)";
    if (!strcmp(ptr, "/data"))
        return "the file of /data/train was changed: its rows, or what of them is used, are others";
    return other;
}

/* A key that is not there was written by an older version, and cannot be compared. */
static int same(const struct mr_json *then, const char *ptr, const json_t *now, const char *other, struct mr_err *err)
{
    json_t *was = mr_json_at(then->root, ptr);
    char *a, *b;
    int r;

    if (!was || json_equal(was, now))
        return 0;
    a = json_dumps(was, JSON_ENCODE_ANY | JSON_COMPACT);
    b = json_dumps(now, JSON_ENCODE_ANY | JSON_COMPACT);
    r = mr_json_error(then, ptr, err,
                      "--resume: the run was started with %s, the topology now gives %s: %s; restore it, or start a new run.dir",
                      a ? a : "?", b ? b : "?", other);
    free(a);
    free(b);
    return r;
}

/* The members of `now` against those at `at` ("" or "/drafter"). */
static int all_same(const struct mr_json *then, const char *at, json_t *now, const char *other, struct mr_err *err)
{
    json_t *value;
    const char *key;
    char ptr[64];

    json_object_foreach(now, key, value)
    {
        snprintf(ptr, sizeof ptr, "%s/%s", at, key);
        if (strcmp(ptr, "/run") && strcmp(ptr, "/drafter") && same(then, ptr, value, meaning(ptr, other), err))
            return -1;
    }
    return 0;
}

int mr_rundir_check_identity(const struct mr_rundir *d, const struct mr_topology *t, const struct mr_checked *c, struct mr_err *err)
{
    json_t *id;
    struct mr_json then;
    char path[FILE_PATH];
    int r;

    if (mr_json_load(&then, mr_rundir_file(d, "run.json", path), err))
        return mr_err_prefix(err, "--resume: there is no run to go on with");
    id = identity(t, c);
    r = all_same(&then, "", id, "the plan would be another one", err);
    if (r == 0)
        r = all_same(&then, "/drafter", json_object_get(id, "drafter"), "it would be another drafter", err);
    json_decref(id);
    mr_json_free(&then);
    return r;
}
