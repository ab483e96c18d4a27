/* A run's checkpoint -> a directory that serving engines load (docs/dflash.md 2). */
#ifndef MR_ACTORS_EXPORT_H
#define MR_ACTORS_EXPORT_H

#include "base/err.h"

/* Checks config.json and every tensor's name and shape in model.safetensors of directory `ckpt`, then copies both files into `dir`,
 * which is made when it does not exist, and refused when it is not empty.  0 or -1 with err; then `dir` holds neither file. */
int mr_export(const char *ckpt, const char *dir, struct mr_err *err);

#endif
