/* What one slot of the drafter's blocks did, summed over blocks: position k of a block is entry k - 1 of an array of these, because slot 0
 * is given and never supervised.  Made by the drafter (actors/dflash.h), kept in shared memory beside a place's record (ipc/shm_layout.h),
 * summed over the places of a committed step for the metrics (runtime/ledger.h). */
#ifndef MR_BASE_SLOT_SUMS_H
#define MR_BASE_SLOT_SUMS_H

#include <stdint.h>

struct mr_slot_sums {
    uint64_t labels, correct; /* supervised slots, and those predicted right */
    double loss;              /* sum of their cross-entropy in nats, without the loss's weights */
};

#endif
