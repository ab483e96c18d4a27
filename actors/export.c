/* millrace-actor export CKPT DIR.
 *
 * The files are copied byte for byte: what was evaluated is what is served.  They are complete under temporary names before the first
 * one gets its own, so a reader never sees half a file.
 */
#include "actors/export.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "actors/actors.h"
#include "data/drafter_config.h"

static const char *const file_name[] = {"model.safetensors", "config.json"};
enum { N_FILES = sizeof file_name / sizeof file_name[0] };

static int check_checkpoint(const char *ckpt, struct mr_err *err)
{
    struct mr_drafter_config c;
    struct mr_dlayout l;
    char path[4096];
    float *param;
    int rc;

    if (mr_drafter_config_load(&c, ckpt, err))
        return -1;
    if (mr_dlayout_make(&l, &c))
        return mr_err_set(err, MR_EXIT_ENV, "out of memory");
    snprintf(path, sizeof path, "%s/%s", ckpt, file_name[0]);
    param = malloc(l.P * sizeof *param);
    rc = param ? mr_drafter_weights_load(&l, param, path, err)
               : mr_err_set(err, MR_EXIT_ENV, "out of memory for %llu parameters", (unsigned long long)l.P);
    free(param);
    mr_dlayout_free(&l);
    return rc;
}

static int make_empty_dir(const char *dir, struct mr_err *err)
{
    struct dirent *e;
    DIR *d;

    if (!mkdir(dir, 0777))
        return 0;
    if (errno != EEXIST)
        return mr_err_set(err, MR_EXIT_CONFIG, "%s: cannot make the directory: %s", dir, strerror(errno));
    d = opendir(dir);
    if (!d)
        return mr_err_set(err, MR_EXIT_CONFIG, "%s: %s", dir, strerror(errno));
    while ((e = readdir(d)))
        if (strcmp(e->d_name, ".") && strcmp(e->d_name, ".."))
            break;
    if (e)
        mr_err_set(err, MR_EXIT_CONFIG,
                   "%s is not empty (it has %s): export writes into a new or empty directory; name another one, or remove it", dir,
                   e->d_name);
    closedir(d);
    return e ? -1 : 0;
}

static int copy_bytes(int in, int out)
{
    char buf[1 << 16];
    ssize_t n, w;

    while ((n = read(in, buf, sizeof buf)) > 0)
        for (ssize_t at = 0; at < n; at += w)
            if ((w = write(out, buf + at, (size_t)(n - at))) < 0)
                return -1;
    return n < 0 || fsync(out) ? -1 : 0;
}

static int copy_file(const char *src, const char *dst, struct mr_err *err)
{
    int in = open(src, O_RDONLY | O_CLOEXEC), out, rc;

    if (in < 0)
        return mr_err_set(err, MR_EXIT_CONFIG, "%s: %s", src, strerror(errno));
    out = open(dst, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    rc = out < 0 || copy_bytes(in, out) ? mr_err_set(err, MR_EXIT_ENV, "%s: cannot be written: %s", dst, strerror(errno)) : 0;
    if (out >= 0 && close(out) && !rc)
        rc = mr_err_set(err, MR_EXIT_ENV, "%s: cannot be written: %s", dst, strerror(errno));
    close(in);
    return rc;
}

static void remove_files(const char *dir)
{
    char path[4200];

    for (int i = 0; i < N_FILES; i++) {
        snprintf(path, sizeof path, "%s/%s", dir, file_name[i]);
        unlink(path);
        snprintf(path, sizeof path, "%s/%s.tmp", dir, file_name[i]);
        unlink(path);
    }
}

static int copy_all(const char *ckpt, const char *dir, struct mr_err *err)
{
    char src[4200], tmp[4200], dst[4200];

    for (int i = 0; i < N_FILES; i++) {
        snprintf(src, sizeof src, "%s/%s", ckpt, file_name[i]);
        snprintf(tmp, sizeof tmp, "%s/%s.tmp", dir, file_name[i]);
        if (copy_file(src, tmp, err))
            return -1;
    }
    for (int i = 0; i < N_FILES; i++) {
        snprintf(tmp, sizeof tmp, "%s/%s.tmp", dir, file_name[i]);
        snprintf(dst, sizeof dst, "%s/%s", dir, file_name[i]);
        if (rename(tmp, dst))
            return mr_err_set(err, MR_EXIT_ENV, "%s: cannot be renamed to %s: %s", tmp, dst, strerror(errno));
    }
    return 0;
}

int mr_export(const char *ckpt, const char *dir, struct mr_err *err)
{
    if (check_checkpoint(ckpt, err) || make_empty_dir(dir, err))
        return -1;
    if (!copy_all(ckpt, dir, err))
        return 0;
    remove_files(dir);
    return -1;
}

int mr_export_main(int argc, char **argv)
{
    struct mr_err err = {0};

    int help = argc == 2 && (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h"));

    if (argc != 3 || argv[1][0] == '-' || argv[2][0] == '-') {
        fprintf(help ? stdout : stderr, "usage: millrace export CKPT DIR\n\n"
                                        "Writes config.json and model.safetensors of a drafter in the z-lab DFlash format.\n"
                                        "  CKPT  a checkpoint of a run, e.g. runs/demo/latest\n"
                                        "  DIR   a new or empty directory\n");
        return help ? MR_EXIT_OK : MR_EXIT_CONFIG;
    }
    if (mr_export(argv[1], argv[2], &err)) {
        fprintf(stderr, "export: %s\n", err.msg);
        return err.code;
    }
    printf("%s: config.json and model.safetensors, checked tensor by tensor\n", argv[2]);
    return MR_EXIT_OK;
}
