/* Everything that processes of a miniature run share, as one thing that can be saved, put back and compared.
 *
 * What a killed process leaves behind are these bytes and nothing else (it holds no lock, no descriptor that others use, no kernel
 * object): two deaths that leave equal bytes are one case.
 */
#ifndef TEST_SHADOW_H
#define TEST_SHADOW_H

#include "test/test_ipc_run.h"

struct shadow {
    unsigned n;
    size_t bytes;
    struct {
        char *at;
        size_t n;
    } area[4 + MR_MAX_DRAFTERS];
};

static inline void shadow_add(struct shadow *h, void *at, size_t n)
{
    h->area[h->n].at = at;
    h->area[h->n++].n = n;
    h->bytes += n;
}

/* struct mini up to its mappings' cache, which is private in truth, comes in two parts. */
static inline void shadow_of(struct shadow *h, struct mini *m)
{
    char *after = (char *)&m->map + sizeof m->map;

    *h = (struct shadow){0};
    shadow_add(h, m->r.s.ctl, m->r.s.ctl_bytes);
    shadow_add(h, m->r.s.tok, m->r.s.tok_bytes);
    for (unsigned i = 0; i < m->r.s.hdr->n_arenas; i++)
        shadow_add(h, m->map.at[i].base, m->map.at[i].bytes);
    shadow_add(h, after, (size_t)((char *)m + sizeof *m - after));
}

static inline void shadow_save(const struct shadow *h, char *to)
{
    for (unsigned i = 0; i < h->n; to += h->area[i++].n)
        memcpy(to, h->area[i].at, h->area[i].n);
}

static inline void shadow_load(const struct shadow *h, const char *from)
{
    for (unsigned i = 0; i < h->n; from += h->area[i++].n)
        memcpy(h->area[i].at, from, h->area[i].n);
}

static inline int shadow_same(const struct shadow *h, const char *as)
{
    for (unsigned i = 0; i < h->n; as += h->area[i++].n)
        if (memcmp(h->area[i].at, as, h->area[i].n))
            return 0;
    return 1;
}

static inline int shadow_holds(const struct shadow *h, uint64_t address)
{
    for (unsigned i = 0; i < h->n; i++)
        if (address - (uint64_t)(uintptr_t)h->area[i].at < h->area[i].n)
            return 1;
    return 0;
}

#endif
