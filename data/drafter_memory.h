/* Device memory of a drafter on a GPU: what it allocates itself, beside the state that its keeper holds (data/check.h adds them up).
 *
 * Known before any device is touched: `check` prints it, and a run that would not fit is refused before it starts.  The sizes of a chunk are
 * decided here, so the arithmetic and the program cannot disagree about them. */
#ifndef MR_DATA_DRAFTER_MEMORY_H
#define MR_DATA_DRAFTER_MEMORY_H

#include "data/drafter_config.h"

/* What is computed at a time.  On a GPU a chunk is whole sequences: the gradients of a sequence's context keys and values are then summed
 * inside one kernel in f32, and never added up in the 16 bits that they are kept in. */
struct mr_drafter_chunk {
    int max_tokens, max_seqs;    /* of a microbatch */
    int seq_blocks;              /* of one sequence, at most */
    int max_blocks;              /* of a microbatch */
    int rows;                    /* block rows of a chunk; at least seq_blocks * block_size on a GPU */
};
/* elem: bytes of an activation; 4 = cpu. */
struct mr_drafter_chunk mr_drafter_chunk_of(const struct mr_topology *t, int block_size, int max_seqs, int elem);

struct mr_drafter_work {
    uint64_t weights;            /* working copy of the parameters */
    uint64_t context;            /* fc, and keys, values and their gradients of every context row, per layer */
    uint64_t chunk;              /* activations and gradients of a chunk's block rows */
    uint64_t loss;               /* logits of a piece of the chunk */
    uint64_t scratch;            /* of the kernels */
    uint64_t staging;            /* two slabs, when hidden states come from other GPUs; gradients in bf16, when those are sent */
    uint64_t total;
};

void mr_drafter_work_bytes(struct mr_drafter_work *w, const struct mr_drafter_config *c, uint64_t P, const struct mr_drafter_chunk *k, int elem,
                           uint64_t staging);

#endif
