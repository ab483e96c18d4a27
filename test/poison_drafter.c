/* A drafter whose context can be poisoned: before a microbatch, whoever removes the file MR_POISON launches a kernel that writes out of bounds.
 * Linked into the actor program around mr_dflash_accumulate (--wrap); the real one then finds the device failed. */
#include <stdlib.h>
#include <unistd.h>

#include "actors/dflash.h"

int probe_poison(void *p);

int __real_mr_dflash_accumulate(struct mr_dflash *d, const struct mr_dflash_batch *b, float *acc, struct mr_dflash_result *r);
int __wrap_mr_dflash_accumulate(struct mr_dflash *d, const struct mr_dflash_batch *b, float *acc, struct mr_dflash_result *r);

int __wrap_mr_dflash_accumulate(struct mr_dflash *d, const struct mr_dflash_batch *b, float *acc, struct mr_dflash_result *r)
{
    const char *file = getenv("MR_POISON");

    if (file && !unlink(file))
        probe_poison(acc);
    return __real_mr_dflash_accumulate(d, b, acc, r);
}
