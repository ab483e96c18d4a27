/* Turns on a GPU that targets and drafters share.
 *
 * Two processes that compute on one GPU at the same time are given slices of it in turn, and each change costs: the two stages of a large
 * model then take 8 % longer than one after the other (docs/performance.md).  So they take turns by themselves, a unit of work (a forward
 * pass, a microbatch's gradient) at a time.  Drafters come first: a target computes while the drafters of its GPU wait, for microbatches or at
 * the end of a step, and so fills exactly that time.
 *
 * It is a courtesy, no lock: one word of the own row says "I compute", it is read without any order, nothing depends on it, and whoever has
 * waited TURN_LIMIT for somebody goes on beside him.  A death, a stop or a race costs time, never progress; recovery clears the word of the
 * dead.  Where several targets share the GPU with a drafter, one may begin while the other computes, and the drafter has its turn when both
 * rest, or after TURN_LIMIT.  Units of less than TURN_UNIT are not worth a hand-over, and targets among themselves, or drafters, do not wait
 * for each other.
 *
 * All functions: the actor's own thread; none blocks.  On the cpu, and on a GPU that only one kind uses, they do nothing. */
#ifndef MR_ACTORS_TURNS_H
#define MR_ACTORS_TURNS_H

#include "actors/env.h"

/* Finds who shares our GPU.  Once, when the topology is known. */
void mr_turns_init(struct mr_env *e);
/* 1 = turns matter to us: the GPU is shared, and our units are long. */
int mr_turns_matter(const struct mr_env *e);
/* 1 = better park with MR_WAIT_TURN than begin a unit now.  What ends the wait bumps our kind's event count. */
int mr_turns_taken(struct mr_env *e);
/* A target that has just published: 1 = a drafter of this GPU waits for a microbatch or for us, and is about to take this one; better wait
 * for the time of a wake-up.  Says so once for each publication. */
int mr_turns_given(struct mr_env *e);
/* We have work on the GPU from here on. */
void mr_turns_begin(struct mr_env *e);
/* A unit is done that took so long. */
void mr_turns_unit(struct mr_env *e, uint64_t unit_ns);
/* We have no work there any more.  mr_env_wait does it too. */
void mr_turns_end(struct mr_env *e);

#endif
