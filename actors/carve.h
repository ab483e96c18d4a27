/* Carving: one device allocation, many tensors.
 *
 * A layout function takes tensors from a carve in a fixed order.  It runs twice: with base NULL to learn the size, then with the
 * memory.  So size and layout can never disagree, and whoever owns the memory (the model itself, or a keeper) needs to know one number. */
#ifndef MR_ACTORS_CARVE_H
#define MR_ACTORS_CARVE_H

#include <stddef.h>

struct mr_carve {
    char *base;          /* NULL: only count */
    size_t at;           /* bytes taken so far, a multiple of 256 */
};

/* n elements of `bytes` bytes, aligned to 256.  NULL while counting. */
static inline void *mr_carve_take(struct mr_carve *c, size_t n, size_t bytes)
{
    void *p = c->base ? c->base + c->at : NULL;

    c->at += (n * bytes + 255) & ~(size_t)255;
    return p;
}

#endif
