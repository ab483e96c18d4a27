/* FNV-1a, 64 bit: fingerprints of layouts, configs and data.  Not for hash tables fed by an adversary. */
#ifndef MR_BASE_HASH_H
#define MR_BASE_HASH_H

#include <stddef.h>
#include <stdint.h>

#define MR_HASH_INIT 0xcbf29ce484222325u

static inline uint64_t mr_hash(uint64_t h, const void *p, size_t n)
{
    const unsigned char *b = p;

    for (size_t i = 0; i < n; i++)
        h = (h ^ b[i]) * 0x100000001b3u;
    return h;
}

#endif
