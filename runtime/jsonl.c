/* Append-only line files: see jsonl.h.  A line is the unit: it is there whole or not at all, also when the disk is full. */
#include "runtime/jsonl.h"

#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int failed(struct mr_err *err, const char *what, const char *path)
{
    return mr_err_set(err, MR_EXIT_ENV, "cannot %s %s: %s", what, mr_err_path(path, 200), strerror(errno));
}

int mr_jsonl_open(struct mr_jsonl *j, const char *path, struct mr_err *err)
{
    struct stat st;

    j->fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (j->fd < 0 || fstat(j->fd, &st)) {
        failed(err, "open", path);
        mr_jsonl_close(j);
        return -1;
    }
    j->bytes = (uint64_t)st.st_size;
    return 0;
}

void mr_jsonl_close(struct mr_jsonl *j)
{
    if (j->fd >= 0)
        close(j->fd);
    j->fd = -1;
}

int mr_jsonl_append(struct mr_jsonl *j, const char *line, size_t n)
{
    size_t done = 0;

    while (done < n) {
        ssize_t w = write(j->fd, line + done, n - done);

        if (w < 0 && errno == EINTR)
            continue;
        if (w <= 0) {
            int e = w < 0 ? errno : EIO;

            if (done && ftruncate(j->fd, (off_t)j->bytes))
                return -EIO;
            return -e;
        }
        done += (size_t)w;
    }
    j->bytes += n;
    return 0;
}

void mr_jsonl_truncate(struct mr_jsonl *j, uint64_t bytes)
{
    if (bytes < j->bytes && ftruncate(j->fd, (off_t)bytes) == 0)
        j->bytes = bytes;
}

int mr_jsonl_sync(struct mr_jsonl *j)
{
    struct stat st;

    if (fdatasync(j->fd) || fstat(j->fd, &st))
        return -errno;
    return st.st_nlink == 0 ? -ENOLINK : 0; /* it has no name: nobody will ever find what we wrote */
}

/* The directory entry of `path` on disk. */
static int sync_parent(const char *path)
{
    char copy[4096];
    int fd, r;

    snprintf(copy, sizeof copy, "%s", path);
    fd = open(dirname(copy), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    r = fsync(fd);
    close(fd);
    return r;
}

static int publish(FILE *f, const char *tmp, const char *path, struct mr_err *err)
{
    int bad = ferror(f) || fflush(f) || fsync(fileno(f));

    if (fclose(f) || bad || rename(tmp, path) || sync_parent(path))
        return failed(err, "write", path);
    return 0;
}

static FILE *open_tmp(const char *path, char *tmp, size_t bytes, struct mr_err *err)
{
    FILE *f;

    snprintf(tmp, bytes, "%s.tmp", path);
    f = fopen(tmp, "we");
    if (!f)
        failed(err, "create", tmp);
    return f;
}

int mr_write_file(const char *path, const char *text, size_t n, struct mr_err *err)
{
    char tmp[4096];
    FILE *f = open_tmp(path, tmp, sizeof tmp, err);

    if (!f)
        return -1;
    fwrite(text, 1, n, f);
    return publish(f, tmp, path, err);
}

struct cut {
    const char *path;
    unsigned n_steps, kept, line_no;
    int lax;
    mr_jsonl_fn fn;
    void *arg;
    FILE *out;
};

static int cut_line(struct cut *c, const char *line, size_t n, struct mr_err *err)
{
    json_error_t je;
    json_t *root = json_loadb(line, n, 0, &je);
    json_t *step = json_object_get(root, "step");
    int keep;

    c->line_no++;
    if (!json_is_integer(step)) {
        json_decref(root);
        return mr_err_set(err, MR_EXIT_CONFIG, "%s:%u: not a line with a \"step\" (%s): the file is damaged; start a new run.dir", c->path,
                          c->line_no, root ? "no such key" : je.text);
    }
    keep = json_integer_value(step) >= 0 && json_integer_value(step) < (json_int_t)c->n_steps;
    if (keep && !c->lax && json_integer_value(step) != (json_int_t)c->kept) {
        json_decref(root);
        return mr_err_set(err, MR_EXIT_CONFIG, "%s:%u: step %lld where step %u belongs: the file is damaged; start a new run.dir", c->path,
                          c->line_no, (long long)json_integer_value(step), c->kept);
    }
    if (keep) {
        fwrite(line, 1, n, c->out);
        c->kept++;
    }
    if (c->fn)
        c->fn(root, keep, c->arg);
    json_decref(root);
    return 0;
}

static int cut_all(struct cut *c, FILE *in, struct mr_err *err)
{
    char *line = NULL;
    size_t cap = 0;
    ssize_t n;
    int r = 0;

    while (r == 0 && in && (n = getline(&line, &cap, in)) > 0)
        if (line[n - 1] == '\n') /* else: torn by a crash in mid-write, never counted as written */
            r = cut_line(c, line, (size_t)n, err);
    free(line);
    if (r == 0 && !c->lax && c->kept != c->n_steps)
        r = mr_err_set(err, MR_EXIT_CONFIG,
                       "%s: has %u of the %u steps that the checkpoint says are done: the file is damaged; start a new run.dir", c->path,
                       c->kept, c->n_steps);
    return r;
}

int mr_jsonl_cut(const char *path, unsigned n_steps, int lax, mr_jsonl_fn fn, void *arg, struct mr_err *err)
{
    struct cut c = {.path = path, .n_steps = n_steps, .lax = lax, .fn = fn, .arg = arg};
    char tmp[4096];
    FILE *in = fopen(path, "re");

    if (!in && errno != ENOENT)
        return failed(err, "read", path);
    c.out = open_tmp(path, tmp, sizeof tmp, err);
    if (!c.out || cut_all(&c, in, err)) {
        if (c.out) {
            fclose(c.out);
            unlink(tmp);
        }
        if (in)
            fclose(in);
        return -1;
    }
    if (in)
        fclose(in);
    return publish(c.out, tmp, path, err);
}
