/* The relations between keys.  Private to data/. */
#ifndef MR_DATA_TOPOLOGY_PVT_H
#define MR_DATA_TOPOLOGY_PVT_H

#include "data/topology.h"

/* Everything that holds between keys and needs no file, with the arithmetic in the message.  0 or -1. */
int mr_topology_rules(const struct mr_topology *t, struct mr_err *err);

#endif
