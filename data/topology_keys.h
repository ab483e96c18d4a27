/* The table of topology keys: the ONE place that says which keys exist, of what type, in which range, with which default.
 *
 * Parsing, the refusal of unknown keys, the resolved output, conf/topology.schema.json and the tables of conf/README.md follow it (the last
 * two are compared with it by a test).
 */
#ifndef MR_DATA_TOPOLOGY_KEYS_H
#define MR_DATA_TOPOLOGY_KEYS_H

#include "data/topology.h"

enum mr_key_type { MR_KEY_INT, MR_KEY_U64, MR_KEY_REAL, MR_KEY_STRING, MR_KEY_PATH, MR_KEY_ENUM, MR_KEY_BOOL, MR_KEY_INTS };

struct mr_key {
    const char *ptr;             /* "/train/lr"; "/actors/N/kind" for keys of every array element */
    enum mr_key_type type;
    unsigned offset;             /* of the value in struct mr_topology, or struct mr_actor_entry for actors */
    unsigned size;               /* strings: bytes with NUL; lists: most entries */
    unsigned offset_n;           /* lists: of the count */
    int required;
    double min, max;             /* numbers, list entries */
    int above;                   /* min itself is not allowed */
    const char *dflt;            /* JSON text; NULL: required, or computed (see conf/README.md) */
    const char *values;          /* enums: "a|b|c" in value order ... */
    int first;                   /* ... starting with this value */
    const char *alias;           /* names that people try: only for the hint */
    const char *doc;
};

/* One element of "actors", before `count` is expanded. */
struct mr_actor_entry {
    int kind, engine, count, threads;
    char device[40];
    double us_per_token, us_per_item, jitter;
};

extern const struct mr_key mr_keys[];
extern const int mr_n_keys;

/* Every key of `root` is in the table, else an error with the nearest valid one.  0 or -1. */
int mr_keys_check_names(const struct mr_json *j, struct mr_err *err);
/* Fills the fields of `base` from all keys below `section` ("" = all but actors; "/actors/3" = that element). */
int mr_keys_parse(const struct mr_json *j, const char *section, void *base, struct mr_err *err);
/* The inverse: all keys but actors into the object `root`, or (actor = 1) the keys of one element. */
void mr_keys_write(json_t *root, const void *base, int actor);

/* Paths become absolute, so that actors and a later --resume do not depend on their working directory.  "synthetic:...", "normal" and ""
 * are no paths; "checkpoint:DIR" and "random:DIR?seed=N" have one behind the colon.  0, or -1 when it does not fit. */
int mr_path_absolute(const char *s, char *out, size_t bytes);

#endif
