/* The checkpoint word: copy intent, background copy, the apply that waits until the state is read, death of the copier, the final
 * checkpoint (ipc/step.h, design 6.3).
 *
 * Two drafters in lockstep over STEPS steps, each with state[2] in its arena (a state is its step number, or TORN while it is written);
 * a checkpoint is wanted at every step.  The copy is a thread of the drafter that claimed it and dies with it.  Steps are abstract:
 * commit is one word change (step.pml has the rest).
 *
 * Properties: a directory that the word calls complete was written by one copier from one state that was not touched meanwhile;
 * `latest` never goes back; the final checkpoint is on disk at the end; no invalid end state. */
#ifndef STEPS
#define STEPS 3
#endif
#ifndef KILLS
#define KILLS 1
#endif
#define D 2
#define TORN 15
#define IDLE 0
#define WANTED 1
#define COPYING 2
#define WRITING 3                        /* read; the disk has the rest */
#define COLLECT 0
#define COMMITTED 1

byte ph, s; byte am, rm;                 /* step word: phase, step, applied bits; rm: who has entered (stands for reduced bits) */
byte ck, ckn, ckd;                       /* checkpoint word: state, step, slot */
byte st[2 * D];
byte dirn, dirby, dirparts;              /* the directory being written: step, copier, parts on disk */
byte latest, kills;
bool job[D]; byte jobn[D];               /* the drafter's copier thread has work */
bool wrote[D];
chan die[D] = [0] of { bit };
chan dieC[D] = [0] of { bit };

/* a copy of N may start: nobody copies, N is newer than what is complete, and this drafter's state[N mod 2] is still N */
#ifdef MUT_claim_gone
#define HAS(n) true
#else
#define HAS(n) (st[2 * d + ((n) & 1)] == (n))
#endif
#define FREE (ck != COPYING && ck != WRITING)
#define DUE (s > 0 && FREE && ckn < s && HAS(s))
#define LATE (s > 1 && FREE && ckn < s - 1 && HAS(s - 1))        /* the one before was still on its way to the disk */
#define AGAIN (ck == WANTED && HAS(ckn))
#ifdef MUT_no_wait
#define BLOCKED false
#else
/* apply of step s overwrites state s - 1: which is being read, or whose checkpoint is due and cannot be claimed yet */
#define BLOCKED ((ck == COPYING && ckn + 1 == s) || (ck == WRITING && ckn + 1 < s))
#endif
#define CLAIM(n) ck = COPYING; ckn = n; ckd = d; jobn[d] = n; job[d] = 1

proctype drafter(byte d) {
  byte ws;
end_start:
  {
  do
#ifdef MUT_two_copiers
  :: atomic { DUE && !job[d] -> ws = s }; atomic { CLAIM(ws); ws = 0 }      /* test and store */
#else
  :: atomic { DUE && !job[d] -> CLAIM(s) }
#endif
  :: atomic { LATE && !job[d] -> CLAIM(s - 1) }
#ifdef MUT_no_again
  :: atomic { AGAIN && ckn == s && s < STEPS && !job[d] -> CLAIM(ckn) }
#else
  :: atomic { AGAIN && !job[d] -> CLAIM(ckn) }
#endif
  :: atomic { ph == COLLECT && s < STEPS && !(rm & (1 << d)) -> rm = rm | (1 << d); if :: rm == 3 -> ph = COMMITTED; rm = 0 :: else fi }
  :: atomic { ph == COMMITTED && !(am & (1 << d)) && !BLOCKED };
     st[2 * d + ((s + 1) & 1)] = TORN;
     st[2 * d + ((s + 1) & 1)] = s + 1;
     atomic { am = am | (1 << d); if :: am == 3 -> am = 0; s++; ph = COLLECT :: else fi }
  :: atomic { s == STEPS && ck == IDLE && ckn == STEPS -> goto done }
  od
  } unless { die[d]?_ };
  ws = 0;
  die[d]?_; goto end_start;
done:
  skip
}

proctype copier(byte d) {
end_start:
  {
end_idle:
  do
  :: atomic { job[d] -> assert(st[2 * d + (jobn[d] & 1)] == jobn[d]); dirn = jobn[d]; dirby = d; dirparts = 1 };
#ifdef MUT_read_early
     atomic { if :: ck == COPYING && ckn == jobn[d] && ckd == d -> ck = WRITING :: else fi };
#endif
     assert(st[2 * d + (jobn[d] & 1)] == jobn[d]);               /* not touched meanwhile */
     atomic { if :: ck == COPYING && ckn == jobn[d] && ckd == d -> ck = WRITING :: else fi };
#ifdef MUT_done_early
     atomic { if :: ck == WRITING && ckn == jobn[d] && ckd == d -> ck = IDLE :: else fi };
#endif
     atomic { assert(dirn == jobn[d] && dirby == d); dirparts = 2 };
     atomic { if :: ck == WRITING && ckn == jobn[d] && ckd == d -> ck = IDLE :: else fi; job[d] = 0; jobn[d] = 0 }
  od
  } unless { dieC[d]?_ };
end_dead:
  dieC[d]?_; goto end_start
}

inline recover(v) {
  dieC[v]!0;
  atomic { job[v] = 0; jobn[v] = 0; rm = rm & ~(1 << v) };       /* its reduced bit goes (REPAIR); an applied bit stays */
#ifndef MUT_no_recover
#ifdef MUT_no_recover_writing
  atomic { if :: ck == COPYING && ckd == v -> ck = WANTED :: else fi };
#else
  atomic { if :: (ck == COPYING || ck == WRITING) && ckd == v -> ck = WANTED :: else fi };
#endif
#endif
  dieC[v]!0; die[v]!0
}

active proctype supervisor() {
  atomic { st[1] = TORN; st[3] = TORN; run drafter(0); run drafter(1); run copier(0); run copier(1) };
  do
  :: atomic { kills < KILLS && !(s == STEPS && ck == IDLE && ckn == STEPS) -> kills++; die[0]!0 }; recover(0)
  :: atomic { kills < KILLS && !(s == STEPS && ck == IDLE && ckn == STEPS) -> kills++; die[1]!0 }; recover(1)
#ifdef MUT_latest_early
  :: atomic { ckn > latest -> assert(dirn == ckn && dirparts == 2); latest = ckn }
#else
  :: atomic { ck == IDLE && ckn > latest -> assert(dirn == ckn && dirparts == 2); latest = ckn }
#endif
  :: atomic { latest == STEPS -> break }
  od
}
