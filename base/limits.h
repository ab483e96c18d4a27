/* Limits and names that several rooms share.  They come from the bit widths of the shared words (ipc/shm_layout.h). */
#ifndef MR_BASE_LIMITS_H
#define MR_BASE_LIMITS_H

enum {
    MR_MAX_ACTORS = 128,     /* slot is 8 bits; 255 = nobody */
    MR_MAX_DRAFTERS = 12,    /* bits in the step word */
    MR_MAX_BUCKETS = 32,
    MR_MAX_ITEMS = 4096,     /* index is 16 bits in a cell */
    MR_MAX_PLACES = 4096,    /* M */
    MR_MAX_ARENAS = 256,
    MR_MAX_SEQS = 1024,      /* samples of one microbatch */
    MR_MAX_BLOCK = 256,      /* tokens of a drafter's block, the anchor included */
    MR_NO_SLOT = 255,
    MR_INC_MAX = 4095,       /* incarnation: 12 bits */
    MR_NAME_MAX = 64
};

#define MR_POS_MAX ((1u << 28) - 1)   /* plan position: 28 bits of the item word */
#define MR_PUB_MAX ((1u << 12) - 1)   /* publication count: 12 bits */
#define MR_STEP_MAX ((1u << 24) - 1)  /* step: 24 bits of the step word */

enum mr_kind { MR_FEEDER, MR_TARGET, MR_DRAFTER, MR_KEEPER, MR_KINDS };
static inline const char *mr_kind_name(enum mr_kind k)
{
    static const char *const name[MR_KINDS] = {"feeder", "target", "drafter", "keeper"};

    return (unsigned)k < MR_KINDS ? name[k] : "?";
}

#endif
