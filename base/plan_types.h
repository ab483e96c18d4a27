/* The records of a plan: made by data/, published in shared memory by ipc/ as they are (fixed widths). */
#ifndef MR_BASE_PLAN_TYPES_H
#define MR_BASE_PLAN_TYPES_H

#include <stdint.h>

/* One microbatch; its sample ids are sample[first_sample .. first_sample + n_seqs). */
struct mr_plan_entry {
    uint32_t bucket, n_seqs, n_tokens;
    uint32_t committed;               /* resume: 1 = already in the ledger, the feeder skips it */
    uint64_t first_sample;
};

/* First plan position and step of an epoch; a table has n_epochs entries and one end entry with the totals. */
struct mr_epoch {
    uint32_t first_pos, first_step;
};

#endif
