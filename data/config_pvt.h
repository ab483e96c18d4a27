/* Reading Hugging Face style config files: typed access with messages.  Private to data/. */
#ifndef MR_DATA_CONFIG_PVT_H
#define MR_DATA_CONFIG_PVT_H

#include "data/json.h"

/* Opens DIR/config.json; DIR must be a directory.  0 or -1. */
int mr_cfg_open(struct mr_json *j, const char *dir, struct mr_err *err);

/* Present and not null? */
int mr_cfg_has(const struct mr_json *j, const char *ptr);

/* Required values: absent, of another type or out of range is an error naming the file and position.  Integers may be written 8.0:
 * Python tools do.  0 or -1. */
int mr_cfg_int(const struct mr_json *j, const char *ptr, int min, int max, int *out, struct mr_err *err);
int mr_cfg_positive(const struct mr_json *j, const char *ptr, double *out, struct mr_err *err);

/* Optional boolean: *out is left alone when absent or null. */
int mr_cfg_bool(const struct mr_json *j, const char *ptr, int *out, struct mr_err *err);

/* A boolean that, when present, must have this value: anything else is not implemented here. */
int mr_cfg_must_be(const struct mr_json *j, const char *ptr, int value, struct mr_err *err);

/* hidden_act is "silu": nothing else is implemented. */
int mr_cfg_silu(const struct mr_json *j, struct mr_err *err);

/* RoPE in every schema (top-level rope_theta, rope_scaling, rope_parameters): all that is there must agree, and theta has no default. */
struct mr_cfg_rope {
    double theta, factor, low, high, orig;
    int kind;                                  /* as mr_model_config.rope_kind */
};
int mr_cfg_rope(const struct mr_json *j, int max_position, struct mr_cfg_rope *out, struct mr_err *err);

#endif
