/* JSON lines: see dataset_pvt.h.
 *
 * One line, one record {"input_ids": [...], "loss_mask": [...]}; other members are ignored.  Only '\n' ends a line ('\r' before it is white
 * space), so U+2028 in a string is data.  Blank lines are counted and are no rows.  The last line may lack its newline; if it does and does
 * not parse, the message says that the file was probably cut.  Memory: one line and one record.
 */
#include "data/dataset_pvt.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/log.h"
#include "data/json.h"

enum { LISTED = 10, ENTRY = 150 }; /* ten entries fit into one message */

struct reader {
    const char *path;
    int vocab_rows;
    char *line;
    size_t room, n; /* n: without the newline */
    uint64_t line_no, line_byte, next_byte;
    int ends; /* the line has its newline */
    int32_t *ids;
    uint8_t *mask;
    size_t max_n;
    char list[1900];
    int n_bad;
};

static int bad(struct reader *r, uint64_t byte, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
static int bad(struct reader *r, uint64_t byte, const char *fmt, ...)
{
    size_t used = strlen(r->list), left = sizeof r->list - used;
    const char *slash = strrchr(r->path, '/'); /* the first entry has the whole path, the others the file's name */
    va_list ap;
    int n;

    if (r->n_bad++ >= LISTED)
        return -1;
    n = snprintf(r->list + used, left, "%s%s:%llu:%llu: ", r->n_bad > 1 ? "\n" : "",
                 r->n_bad > 1 && slash ? slash + 1 : mr_err_path(r->path, 300), (unsigned long long)r->line_no,
                 (unsigned long long)(r->line_byte + byte));
    va_start(ap, fmt);
    if (n > 0 && (size_t)n < left)
        vsnprintf(r->list + used + n, left - (size_t)n < ENTRY ? left - (size_t)n : ENTRY, fmt, ap);
    va_end(ap);
    return -1;
}

/* 1 = a line, 0 = end of file, -1 = error */
static int next_line(struct reader *r, FILE *f, struct mr_err *err)
{
    ssize_t n;

    errno = 0;
    n = getline(&r->line, &r->room, f);
    if (n < 0)
        return ferror(f) || errno == ENOMEM ? mr_err_set(err, MR_EXIT_CONFIG, "%s: cannot read line %llu: %s", r->path,
                                                         (unsigned long long)r->line_no + 1, strerror(errno))
                                            : 0;
    r->line_no++;
    r->line_byte = r->next_byte;
    r->next_byte += (uint64_t)n;
    r->ends = n > 0 && r->line[n - 1] == '\n';
    r->n = (size_t)n - (size_t)r->ends;
    return 1;
}

static int is_blank(const char *s, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (s[i] != ' ' && s[i] != '\t' && s[i] != '\r')
            return 0;
    return 1;
}

static int parse_failed(struct reader *r, const json_error_t *e)
{
    const char *hint = "";

    if (json_error_code(e) == json_error_end_of_input_expected)
        hint = memchr(r->line, '\r', r->n - 1) ? "; lines must end with a newline, not with CR alone" : "; two records on one line?";
    else if (!r->ends)
        hint = "; the file ends here without a newline: was it cut?";
    return bad(r, (uint64_t)e->position, "not valid JSON: %s%s", e->text, hint);
}

static int parse_ids(struct reader *r, json_t *a)
{
    const char *rows = r->vocab_rows ? " (the rows of the target's head)" : "";
    size_t i;
    json_t *v;

    json_array_foreach(a, i, v)
    {
        json_int_t x = json_integer_value(v);
        json_int_t limit = r->vocab_rows ? r->vocab_rows : INT32_MAX;

        if (!json_is_integer(v))
            return bad(r, 0, "input_ids[%zu] is no integer", i);
        if (x < 0)
            return bad(r, 0, "input_ids[%zu] is %lld; ids are 0..%lld%s%s", i, (long long)x, (long long)limit - 1, rows,
                       x == -100 ? "; -100 belongs in labels: use loss_mask" : "");
        if (x >= limit)
            return bad(r, 0, "input_ids[%zu] is %lld; ids are 0..%lld%s: do tokenizer and target belong together?", i, (long long)x,
                       (long long)limit - 1, rows);
        r->ids[i] = (int32_t)x;
    }
    return 0;
}

static int parse_mask(struct reader *r, json_t *a)
{
    size_t i;
    json_t *v;

    json_array_foreach(a, i, v)
    {
        if (!json_is_boolean(v) && !(json_is_integer(v) && (json_integer_value(v) | 1) == 1))
            return bad(r, 0, "loss_mask[%zu] is not 0 or 1", i);
        r->mask[i] = json_is_true(v) || json_integer_value(v) == 1;
    }
    return 0;
}

static int parse_record(struct reader *r, json_t *v, size_t *n)
{
    json_t *ids = json_object_get(v, "input_ids"), *mask = json_object_get(v, "loss_mask");

    if (!json_is_array(ids))
        return bad(r, 0,
                   json_object_get(v, "messages") || json_object_get(v, "conversations") || json_object_get(v, "text")
                       ? "text, not tokens: tokenise it to input_ids and loss_mask first"
                       : "no \"input_ids\" array");
    if (!json_is_array(mask))
        return bad(r, 0, "no \"loss_mask\" array");
    *n = json_array_size(ids);
    if (json_array_size(mask) != *n)
        return bad(r, 0, "%zu input_ids, but %zu loss_mask entries", *n, json_array_size(mask));
    if (*n > r->max_n || !r->ids) {
        size_t room = 2 * *n + 1024;
        int32_t *more_ids = realloc(r->ids, room * sizeof *more_ids);
        uint8_t *more_mask = realloc(r->mask, room);

        r->ids = more_ids ? more_ids : r->ids;
        r->mask = more_mask ? more_mask : r->mask;
        if (!more_ids || !more_mask)
            return bad(r, 0, "out of memory for %zu tokens", *n);
        r->max_n = room;
    }
    return parse_ids(r, ids) || parse_mask(r, mask) ? -1 : 0;
}

/* 0, or -1 for a bad record (noted in r) */
static int parse_line(struct reader *r, size_t *n)
{
    json_error_t e;
    json_t *v;
    int rc;

    if (r->n >= 3 && !memcmp(r->line, "\xef\xbb\xbf", 3))
        return bad(r, 0, "a byte-order mark in the middle: were two files joined?");
    if (memchr(r->line, 0, r->n))
        return bad(r, (uint64_t)((char *)memchr(r->line, 0, r->n) - r->line), "a NUL byte");
    v = json_loadb(r->line, r->n, JSON_REJECT_DUPLICATES, &e);
    if (!v)
        return parse_failed(r, &e);
    rc = json_is_object(v) ? parse_record(r, v, n) : bad(r, 0, "no object { ... }");
    json_decref(v);
    return rc;
}

/* A leading BOM is skipped and noted; other formats get their name. */
static int judge_head(struct reader *r, FILE *f, struct mr_err *err)
{
    unsigned char head[64];
    size_t n = fread(head, 1, sizeof head, f);
    const char *kind = mr_file_kind(head, n);
    int bom = n >= 3 && !memcmp(head, "\xef\xbb\xbf", 3) ? 3 : 0;

    if (kind)
        return mr_err_set(err, MR_EXIT_CONFIG, "%s: this is %s", r->path, kind);
    if (n > 8 && head[8] == '{' && !memcmp(head + 4, "\0\0\0", 4)) /* a header of less than 4 GiB */
        return mr_err_set(err, MR_EXIT_CONFIG,
                          "%s: this is a safetensors file; JSON lines are wanted here (what pack has written is used as it is, under a name "
                          "that ends with .safetensors)",
                          r->path);
    if (n == 0)
        return mr_err_set(err, MR_EXIT_CONFIG, "%s: the file is empty; JSON lines are wanted", r->path);
    if (bom)
        mr_info("%s: a leading byte-order mark is skipped", r->path);
    r->next_byte = (uint64_t)bom;
    return fseek(f, bom, SEEK_SET) ? mr_err_set(err, MR_EXIT_CONFIG, "%s: cannot seek: %s", r->path, strerror(errno)) : 0;
}

static int read_all(struct reader *r, FILE *f, int skip_bad, int (*fn)(void *, const struct mr_jsonl_row *, struct mr_err *), void *arg,
                    struct mr_jsonl_stats *s, struct mr_err *err)
{
    int rc;

    while ((rc = next_line(r, f, err)) > 0) {
        struct mr_jsonl_row row = {0};

        if (is_blank(r->line, r->n)) {
            s->blank++;
            continue;
        }
        s->rows++;
        if (!parse_line(r, &row.n))
            row.ids = r->ids, row.mask = r->mask;
        else if (!skip_bad && r->n_bad < LISTED)
            continue;
        else if (!skip_bad)
            break;
        if (fn(arg, &row, err))
            return -1;
    }
    s->bad = (uint64_t)r->n_bad;
    if (rc < 0)
        return -1;
    if (r->n_bad == 1 && !skip_bad)
        return mr_err_set(err, MR_EXIT_CONFIG, "%s (on_bad_record \"skip\", or pack --skip-bad, counts it instead)", r->list);
    if (r->n_bad && !skip_bad)
        return mr_err_set(err, MR_EXIT_CONFIG, "%s\n%s%d bad records (on_bad_record \"skip\", or pack --skip-bad, counts them instead)",
                          r->list, rc > 0 ? "at least " : "", r->n_bad);
    if (r->n_bad)
        mr_warn("%d bad records skipped%s:\n%s", r->n_bad, r->n_bad > LISTED ? ", the first ones" : "", r->list);
    return 0;
}

int mr_jsonl_read(const char *path, int vocab_rows, int skip_bad, int (*fn)(void *, const struct mr_jsonl_row *, struct mr_err *),
                  void *arg, struct mr_jsonl_stats *stats, struct mr_err *err)
{
    struct reader r = {.path = path, .vocab_rows = vocab_rows};
    struct stat st;
    FILE *f = NULL;
    int rc;

    *stats = (struct mr_jsonl_stats){0};
    if (!stat(path, &st) && !S_ISREG(st.st_mode)) /* before the open: a FIFO would hang it */
        rc = mr_err_set(err, MR_EXIT_CONFIG, "%s: %s; a .jsonl or .safetensors file is wanted", path,
                        S_ISDIR(st.st_mode) ? "is a directory" : "is no regular file");
    else if (!(f = fopen(path, "re")))
        rc = mr_err_set(err, MR_EXIT_CONFIG, "%s: cannot open: %s", path, strerror(errno));
    else
        rc = judge_head(&r, f, err) || read_all(&r, f, skip_bad, fn, arg, stats, err) ? -1 : 0;
    if (f)
        fclose(f);
    free(r.line);
    free(r.ids);
    free(r.mask);
    return rc;
}

/* ---- into memory ---------------------------------------------------------------------------------------------------------- */

struct store {
    int32_t *ids, *len;
    uint8_t *mask;
    int64_t *offset;
    uint64_t rows, tokens, room_rows, room_tokens;
};

static int grow(void **p, uint64_t n, size_t size)
{
    void *q = realloc(*p, n * size);

    if (!q)
        return -1;
    *p = q;
    return 0;
}

static int make_room(struct store *s, size_t n)
{
    if (s->rows + 2 > s->room_rows) {
        s->room_rows = 2 * s->room_rows + 1024;
        if (grow((void **)&s->offset, s->room_rows, sizeof *s->offset) || grow((void **)&s->len, s->room_rows, sizeof *s->len))
            return -1;
    }
    if (s->tokens + n > s->room_tokens) {
        s->room_tokens = 2 * (s->tokens + n) + 65536;
        if (grow((void **)&s->ids, s->room_tokens, sizeof *s->ids) || grow((void **)&s->mask, s->room_tokens, 1))
            return -1;
    }
    return 0;
}

static int keep(void *arg, const struct mr_jsonl_row *row, struct mr_err *err)
{
    struct store *s = arg;

    if (make_room(s, row->n))
        return mr_err_set(err, MR_EXIT_ENV, "out of memory after %llu rows: pack the data set first (millrace pack)",
                          (unsigned long long)s->rows);
    s->len[s->rows] = row->ids ? 0 : -1;
    s->offset[s->rows++] = (int64_t)s->tokens;
    if (row->ids) {
        memcpy(s->ids + s->tokens, row->ids, row->n * sizeof *row->ids);
        memcpy(s->mask + s->tokens, row->mask, row->n);
        s->tokens += row->n;
    }
    s->offset[s->rows] = (int64_t)s->tokens;
    return 0;
}

int mr_dataset_open_jsonl(struct mr_dataset *d, const struct mr_dataset_opts *o, struct mr_err *err)
{
    struct store s = {0};
    struct mr_jsonl_stats stats;
    int rc = make_room(&s, 0) ? mr_err_set(err, MR_EXIT_ENV, "out of memory") : 0;

    if (!rc)
        rc = mr_jsonl_read(d->path, o->vocab_rows, o->skip_bad, keep, &s, &stats, err);
    d->ids = d->own_ids = s.ids;
    d->mask = d->own_mask = s.mask;
    d->offset = d->own_offset = s.offset;
    d->len = s.len;
    d->rows = s.rows;
    d->tokens = s.tokens;
    d->blank = rc ? 0 : stats.blank;
    return rc;
}
