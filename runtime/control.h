/* The control socket /dev/shm/millrace-<run>.sock: one JSON object in, one out, over SOCK_SEQPACKET (a message is a packet, nothing to
 * frame).
 *
 * Requests: {"cmd":"info"} | {"cmd":"stop","now":bool} | {"cmd":"restart","actor":"drafter/0","kill":bool}.  Replies: {"ok":true,...} or
 * {"ok":false,"error":"..."}.  Mode 0600 and the peer's uid are checked: only the owner of the run, and root, may talk to it. */
#ifndef MR_RUNTIME_CONTROL_H
#define MR_RUNTIME_CONTROL_H

#include <jansson.h>

#include "runtime/loop.h"

enum { MR_CONTROL_CLIENTS = 16, MR_CONTROL_BYTES = 65536 };

typedef json_t *(*mr_control_fn)(const json_t *request, void *arg); /* returns a new reply */

struct mr_control {
    int fd;                         /* listening; -1 = not open */
    int client[MR_CONTROL_CLIENTS]; /* -1 = free */
    struct mr_loop *loop;
    mr_control_fn fn;
    void *arg;
};

/* Listens; the segments of `run` exist already, so the name is ours.  0 or -1 with err (MR_EXIT_ENV). */
int mr_control_open(struct mr_control *c, const char *run, struct mr_loop *loop, mr_control_fn fn, void *arg, struct mr_err *err);
void mr_control_close(struct mr_control *c); /* the name is removed with the segments */

json_t *mr_control_ok(void); /* {"ok":true} */
json_t *mr_control_refuse(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* Client: sends `request` (stolen), waits at most timeout_ms.  The reply, or NULL with err: MR_EXIT_FAILED when nobody answers or the
 * supervisor refused (its words are the message). */
json_t *mr_control_call(const char *run, json_t *request, int timeout_ms, struct mr_err *err);

#endif
