/* A run of a few items in the explorer's region, laid out by hand: as small as the code allows. */
#ifndef TEST_WEAK_WORLD_H
#define TEST_WEAK_WORLD_H

#include <errno.h>

#include "ipc/arena.h"
#include "ipc/atomic.h"
#include "ipc/item.h"
#include "ipc/recover.h"
#include "ipc/ring.h"
#include "ipc/seg.h"
#include "ipc/slab.h"
#include "ipc/step.h"
#include "ipc/wait.h"
#include "test/weak/explore.h"

/* Slots: 0 feeder, 1 and 2 targets, 3 and 4 drafters.  One bucket. */
enum { FEEDER, TARGET0, TARGET1, DRAFTER0, DRAFTER1, ACTORS, ITEMS = 3, SLABS = 3, ARENAS = 1, PLACES_MAX = 2, ELEMS = 4 };

/* What lies behind the protocols: plain memory. */
struct payload {
    uint32_t tok[ITEMS], hidden[SLABS];
    uint32_t acc[2][ELEMS], reduced[2][ELEMS];
    uint64_t flag[2];                     /* conditions of waits */
};

struct world {
    struct mr_seg s;                      /* constant after setup: not in the region */
    struct payload *pay;
};

extern struct world w;

/* D drafters, `places` places a step, `steps` steps, rings of `cap` cells. */
void world_make(unsigned drafters, unsigned places, unsigned steps, unsigned cap);
/* Item idx is in `phase` for position pos. */
uint64_t world_item(unsigned idx, enum mr_phase phase, unsigned slot, unsigned pos, unsigned pub);
void world_ring_at(unsigned ring, uint64_t pos);

extern const struct mw_scenario litmus_scenarios[], item_scenarios[], step_scenarios[], wait_scenarios[];   /* each ends with a NULL name */

#endif
