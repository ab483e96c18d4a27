/* The one wait primitive: futex on an event count, always with a deadline and the abort flag.
 *
 * Usage, so that no wake-up is lost:   seq = mr_evc_read(evc);  if (condition) go on;  else mr_evc_wait(..., seq, ...);  again.
 * The waiter compares the value it read BEFORE it looked at the condition; whoever changes the condition bumps AFTER the change.
 * A waker that dies between change and bump is covered by the deadline (MR_PARK_MS at most) and by recovery, which bumps all.
 */
#ifndef MR_IPC_WAIT_H
#define MR_IPC_WAIT_H

#include <stdint.h>

#include "ipc/seg.h"

enum { MR_PARK_MS = 500 };   /* longest single sleep: every park re-checks at least this often */

/* Acquire load of the count. */
uint32_t mr_evc_read(const struct mr_evc *e);

/* Moves the count on (release) and wakes all sleepers.  Any process; does not block; costs a system call only when somebody sleeps. */
void mr_evc_bump(struct mr_evc *e);

/* Bumps the work counts of all kinds: after recovery, stop, abort, finish. */
void mr_evc_bump_all(const struct mr_seg *s);

/* Parks until the count differs from `seq`, `timeout_ms` (capped to MR_PARK_MS) passed, or abort is set; spins briefly first.
 * `me` (may be NULL) gets wait_reason / wait_since_ns / wait_ns[] so that a stall names who waits for what.
 * Returns 0 (changed), -ETIMEDOUT, -ECANCELED (abort), -EINTR never (restarted). */
int mr_evc_wait(const struct mr_seg *s, struct mr_evc *e, uint32_t seq, unsigned timeout_ms, struct mr_actor_row *me,
                enum mr_wait_reason why);

const char *mr_wait_name(enum mr_wait_reason why);   /* "input", "slab", ... */

#endif
