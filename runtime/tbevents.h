/* TensorBoard event files: scalars only.
 *
 * A file is a sequence of TFRecords {u64 length, u32 masked crc32c of it, data, u32 masked crc32c of the data}; data is a protobuf Event
 * {1: double wall_time, 2: int64 step, 3: string file_version | 5: Summary {1: Value {1: string tag, 2: float simple_value}} |
 * 7: SessionLog {1: enum status}}. */
#ifndef MR_RUNTIME_TBEVENTS_H
#define MR_RUNTIME_TBEVENTS_H

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

struct mr_tb {
    int fd; /* -1 = not open */
};
struct mr_tb_scalar {
    const char *tag; /* at most 63 bytes */
    double value;    /* written as f32 */
};
enum { MR_TB_SCALARS = 32 };

/* Creates DIR/events.out.tfevents.<unix time>.<host>.<pid>.millrace with its version record.  0 or -1 with err. */
int mr_tb_open(struct mr_tb *tb, const char *dir, struct mr_err *err);
void mr_tb_close(struct mr_tb *tb);
/* A resume goes on at `step`: readers drop what earlier files say about it and later ones, because they will be done again. */
int mr_tb_restart(struct mr_tb *tb, uint64_t step);
/* One event with up to MR_TB_SCALARS scalars, in one write.  0 or a negative errno; a failure is not the run's. */
int mr_tb_write(struct mr_tb *tb, uint64_t step, const struct mr_tb_scalar *scalar, int n);

uint32_t mr_crc32c(const void *p, size_t n); /* Castagnoli, as in RFC 3720 */

#endif
