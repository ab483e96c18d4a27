/* Named fault points.  MR_POINT("item.claimed") compiles to nothing, except with -DMR_FAULT_POINTS=1 (test builds).
 *
 * There, the environment variable MR_FAULT="NAME:N[:ROLE][,NAME:N[:ROLE]...]" (up to four) makes the N-th passage (1-based) of point NAME
 * in a process whose role starts with ROLE ("feeder", "target/1", "supervisor", ...) raise SIGKILL on the process itself.  With
 * MR_FAULT_ONCE=FILE the k-th of them (0-based) does so only if it is the one that creates FILE.k: the next incarnation passes.
 * MR_FAULT_STOP=1 raises SIGSTOP instead: the tester does something to the others meanwhile, then continues it.
 * MR_FAULT_TRACE=FILE appends one line "role name" the first time a process passes a point.  Names are "room.object.step", literal
 * strings, unique in the tree.
 */
#ifndef MR_BASE_POINT_H
#define MR_BASE_POINT_H

#ifdef MR_FAULT_POINTS
void mr_point_init(const char *role);   /* once a process, before the first point */
void mr_point_hit(const char *name);
#define MR_POINT(name) mr_point_hit(name)
#else
#define mr_point_init(role) ((void)(role))
#define MR_POINT(name) ((void)0)
#endif

#endif
