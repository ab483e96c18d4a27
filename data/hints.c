/* What a user probably meant: the nearest name, and what a file really is.  See json.h. */
#include "data/json.h"

#include <ctype.h>
#include <string.h>

const char *mr_file_kind(const unsigned char *h, size_t n)
{
    static const struct {
        const char *magic;
        size_t n;
        const char *kind;
    } kinds[] = {
        {"version https://git-lfs", 23, "a Git LFS pointer, not the file itself: run `git lfs pull` in its repository"},
        {"\x1f\x8b", 2, "gzip data: unpack it first (gunzip)"},
        {"\x28\xb5\x2f\xfd", 4, "zstd data: unpack it first (zstd -d)"},
        {"PK\3\4", 4, "a zip archive (a PyTorch .bin or .pt?): convert it to safetensors"},
        {"PAR1", 4, "a Parquet file: convert it to JSON lines"},
        {"\xff\xfe", 2, "UTF-16 text: convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)"},
        {"\xfe\xff", 2, "UTF-16 text: convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)"},
        {"<!DOCTYPE", 9, "an HTML page (a failed download?): fetch it again"},
        {"<!doctype", 9, "an HTML page (a failed download?): fetch it again"},
        {"<html", 5, "an HTML page (a failed download?): fetch it again"},
        {"\x80\x02", 2, "a Python pickle: convert it to safetensors"},
    };

    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (n >= kinds[i].n && !memcmp(h, kinds[i].magic, kinds[i].n))
            return kinds[i].kind;
    return NULL;
}

/* ---- nearest name --------------------------------------------------------------------------------------------------------- */

enum { NAME_MAX_LEN = 64 };

/* Edit distance with transpositions, case-insensitive; a large number when a name is too long to be one of ours. */
static int edit_distance(const char *a, const char *b)
{
    int d[3][NAME_MAX_LEN + 1];
    size_t n = strlen(a), m = strlen(b);

    if (n > NAME_MAX_LEN || m > NAME_MAX_LEN)
        return 1 << 20;
    for (size_t k = 0; k <= m; k++)
        d[0][k] = (int)k;
    for (size_t i = 1; i <= n; i++) {
        int *row = d[i % 3], *up = d[(i + 2) % 3], *up2 = d[(i + 1) % 3];

        row[0] = (int)i;
        for (size_t k = 1; k <= m; k++) {
            int x = tolower((unsigned char)a[i - 1]), y = tolower((unsigned char)b[k - 1]), best = up[k - 1] + (x != y);

            best = up[k] + 1 < best ? up[k] + 1 : best;
            best = row[k - 1] + 1 < best ? row[k - 1] + 1 : best;
            if (i > 1 && k > 1 && x == tolower((unsigned char)b[k - 2]) && y == tolower((unsigned char)a[i - 2]) && up2[k - 2] + 1 < best)
                best = up2[k - 2] + 1;
            row[k] = best;
        }
    }
    return d[n % 3][m];
}

const char *mr_nearest(const char *name, const char *const *names, int n)
{
    const char *best = NULL;
    int best_d = 1 << 20;

    for (int i = 0; i < n; i++) {
        int d = edit_distance(name, names[i]);

        if (d < best_d)
            best_d = d, best = names[i];
    }
    return best_d <= 1 + (int)strlen(name) / 3 ? best : NULL;
}
