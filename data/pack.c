/* millrace pack: JSON lines to a packed data set (see dataset.h).
 *
 * Streaming: ids, masks and offsets go to three nameless files beside the output, which are then mapped and written as tensors; memory does
 * not grow with the data.  Ids are U16 when they all fit and the set is small, because readers widen U16 to I32 in memory; larger sets stay
 * I32 and are used where they lie.
 */
#include "data/dataset.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/dataset_pvt.h"

enum { U16_TOKENS = 64 << 20 };

struct spool {
    FILE *f;
    uint64_t n; /* elements */
    void *map;
    size_t bytes;
};

struct packer {
    struct spool ids, mask, offset;
    int32_t max_id;
    uint64_t bad;
};

static FILE *nameless(const char *beside)
{
    char *name = NULL;
    int fd;

    if (asprintf(&name, "%s.XXXXXX", beside) < 0)
        return NULL;
    fd = mkostemp(name, O_CLOEXEC);
    if (fd >= 0)
        unlink(name);
    free(name);
    return fd < 0 ? NULL : fdopen(fd, "w+");
}

static int append(struct spool *s, const void *p, size_t size, size_t n)
{
    if (fwrite(p, size, n, s->f) != n)
        return -1;
    s->n += n;
    s->bytes += size * n;
    return 0;
}

static int pack_row(void *arg, const struct mr_jsonl_row *row, struct mr_err *err)
{
    struct packer *p = arg;
    int64_t end;

    if (!row->ids) {
        p->bad++;
        return 0;
    }
    for (size_t i = 0; i < row->n; i++)
        p->max_id = row->ids[i] > p->max_id ? row->ids[i] : p->max_id;
    if (append(&p->ids, row->ids, sizeof *row->ids, row->n) || append(&p->mask, row->mask, 1, row->n))
        return mr_err_set(err, MR_EXIT_ENV, "cannot write a temporary file: %s", strerror(errno));
    end = (int64_t)p->ids.n;
    return append(&p->offset, &end, sizeof end, 1) ? mr_err_set(err, MR_EXIT_ENV, "cannot write a temporary file: %s", strerror(errno)) : 0;
}

static int map_spool(struct spool *s)
{
    if (fflush(s->f))
        return -1;
    s->map = s->bytes ? mmap(NULL, s->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fileno(s->f), 0) : NULL;
    if (s->map == MAP_FAILED) {
        s->map = NULL;
        return -1;
    }
    return 0;
}

static void close_spool(struct spool *s)
{
    if (s->map)
        munmap(s->map, s->bytes);
    if (s->f)
        fclose(s->f);
}

static int write_out(struct packer *p, const char *out, const char *source, struct mr_err *err)
{
    struct mr_st_out *o = mr_st_out_create();
    int narrow = p->max_id <= UINT16_MAX && p->ids.n <= U16_TOKENS, rc;
    uint16_t *half;

    if (!o || map_spool(&p->ids) || map_spool(&p->mask) || map_spool(&p->offset)) {
        mr_st_out_free(o);
        return mr_err_set(err, MR_EXIT_ENV, "%s: cannot map temporary files: %s", out, strerror(errno));
    }
    half = p->ids.map;
    for (uint64_t i = 0; narrow && i < p->ids.n; i++) {
        int32_t wide; /* in place: element i of the narrow array never passes element i of the wide one */

        memcpy(&wide, (char *)p->ids.map + 4 * i, 4);
        half[i] = (uint16_t)wide;
    }
    mr_st_out_add(o, "ids", narrow ? MR_ST_U16 : MR_ST_I32, &p->ids.n, 1, p->ids.map);
    mr_st_out_add(o, "mask", MR_ST_U8, &p->mask.n, 1, p->mask.map);
    mr_st_out_add(o, "offsets", MR_ST_I64, &p->offset.n, 1, p->offset.map);
    mr_st_out_meta(o, "format", "millrace-rows-1");
    mr_st_out_meta(o, "source", strrchr(source, '/') ? strrchr(source, '/') + 1 : source);
    rc = mr_st_out_write(o, out, err);
    mr_st_out_free(o);
    return rc;
}

/* The output takes the input's name only by mistake, and the rename would destroy the rows. */
static int same_file(const char *a, const char *b)
{
    struct stat s, t;

    return !stat(a, &s) && !stat(b, &t) && s.st_dev == t.st_dev && s.st_ino == t.st_ino;
}

int mr_pack(const char *in, const char *out, int skip_bad, char *report, size_t report_bytes, struct mr_err *err)
{
    struct packer p = {.ids.f = nameless(out), .mask.f = nameless(out), .offset.f = nameless(out)};
    struct mr_jsonl_stats s = {0};
    int64_t zero = 0;
    int rc;

    if (same_file(in, out))
        rc = mr_err_set(err, MR_EXIT_CONFIG, "%s: is input and output: pack would overwrite the rows; give another OUT", in);
    else if (!p.ids.f || !p.mask.f || !p.offset.f || append(&p.offset, &zero, sizeof zero, 1))
        rc = mr_err_set(err, MR_EXIT_ENV, "%s: cannot create a temporary file beside it: %s", out, strerror(errno));
    else
        rc = mr_jsonl_read(in, 0, skip_bad, pack_row, &p, &s, err);
    if (!rc && p.offset.n == 1)
        rc = mr_err_set(err, MR_EXIT_CONFIG, "%s: no rows (%llu bad records, %llu blank lines)", in, (unsigned long long)s.bad,
                        (unsigned long long)s.blank);
    if (!rc)
        rc = write_out(&p, out, in, err);
    if (!rc && report)
        snprintf(report, report_bytes, "%llu rows, %llu tokens, largest id %d, %llu bad records skipped, %llu blank lines",
                 (unsigned long long)(s.rows - s.bad), (unsigned long long)p.ids.n, p.max_id, (unsigned long long)s.bad,
                 (unsigned long long)s.blank);
    close_spool(&p.ids);
    close_spool(&p.mask);
    close_spool(&p.offset);
    return rc;
}
