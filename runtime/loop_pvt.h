/* Between loop.c and its two backends.
 *
 * A watch is named by a tag: generation << 32 | index, generation >= 1.  The generation moves when a watch is deleted, so that an event
 * fetched before the deletion never reaches the next owner of the index or of the descriptor number. */
#ifndef MR_RUNTIME_LOOP_PVT_H
#define MR_RUNTIME_LOOP_PVT_H

#include <stdint.h>

#include "runtime/loop.h"

struct mr_loop_ops {
    const char *name;
    void *(*open)(int *error); /* NULL with a negative errno */
    void (*close)(void *self);
    int (*arm)(void *self, int fd, uint64_t tag);
    void (*disarm)(void *self, int fd, uint64_t tag);
    /* Fills tags of ready watches; *rearm[i] = 1 when the backend has stopped watching and wants arm() again. */
    int (*wait)(void *self, int timeout_ms, uint64_t *tags, unsigned char *rearm, int max);
};
extern const struct mr_loop_ops mr_loop_uring, mr_loop_epoll;

#endif
