/* Text dumps of each shared object: for tests, `millrace inspect`, and the hang report.  Read-only, safe on a read-only mapping. */
#ifndef MR_IPC_DUMP_H
#define MR_IPC_DUMP_H

#include <stdio.h>

#include "ipc/seg.h"

void mr_seg_dump(const struct mr_seg *s, FILE *f);        /* header and levels */
void mr_actors_dump(const struct mr_seg *s, FILE *f);
void mr_items_dump(const struct mr_seg *s, FILE *f);      /* items that are not FREE */
void mr_ring_dump(const struct mr_seg *s, unsigned ring, FILE *f);
void mr_step_dump(const struct mr_seg *s, FILE *f);       /* step word, places, checkpoint word */
void mr_slabs_dump(const struct mr_seg *s, FILE *f);
void mr_arenas_dump(const struct mr_seg *s, FILE *f);
void mr_dump_all(const struct mr_seg *s, FILE *f);

#endif
