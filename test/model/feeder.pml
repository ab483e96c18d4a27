/* Feeder, epochs, ledger, resume: cursor and claim, parity slots of the plan, ledger lines by the supervisor, death of the feeder and
 * of the supervisor (design 4.4 first row, 5, 6.3; ipc/item.h, ipc/seg.h).
 *
 * M = 1: step s trains one microbatch, any published one of its epoch, so the committed set is not a prefix of the plan.  The trainer
 * stands for targets and drafters and does not die here (step.pml, item.pml); the feeder dies KILLS times, the whole run SUPS times and
 * is resumed from the latest checkpoint.  A parity slot of .plan holds an epoch or TORN while it is written.
 *
 * Properties: a claimed item has the tokens of its position; who reads a parity slot (place bucket, sample ids for the ledger) finds
 * his epoch in it; a microbatch enters the weights once; the checkpoint that `latest` names has its ledger lines on disk; at the end
 * every position is in exactly one line, in a step of its epoch; no invalid end state. */
#ifndef E
#define E 3        /* epochs */
#endif
#ifndef PE
#define PE 2       /* positions (= steps) of an epoch */
#endif
#ifndef NI
#define NI 2       /* items */
#endif
#ifndef KILLS
#define KILLS 1
#endif
#ifndef SUPS
#define SUPS 0
#endif
#define NPOS (E * PE)
#define NONE 31
#define TORN 30
#define FREE 0
#define FILLING 1
#define QUEUED 2
#define HELD 3
#define EPOCH(p) ((p) / PE)

byte ph[NI], pos[NI], tok[NI];           /* item word (phase, position), payload */
byte cursor, sealed, plan[2];            /* header, .plan */
byte s, rec[2], ledger_done;             /* step, place records, lines on disk as published */
short w;                                 /* weights: mask of microbatches */
byte line[NPOS], lines;                  /* disk: ledger */
byte dir, latest; short dirw, latestw;   /* disk: a complete checkpoint directory, the one that `latest` names */
byte kills, sups;
chan dieF = [0] of { bit };
chan dieT = [0] of { bit };
bool skip_pos[NPOS];                     /* resume: in the ledger already */

#ifdef MUT_two_ahead
#define MAY_SEAL(e) true
#else
#ifdef MUT_seal_early
#define MAY_SEAL(e) ((e) <= EPOCH(s) + 1)                       /* looks at the step word alone */
#else
/* the slot of epoch e - 2 is free when its last ledger line is on disk: the line needs its sample ids */
#define MAY_SEAL(e) ((e) < 2 || ledger_done >= ((e) - 1) * PE)
#endif
#endif
#define SOME(p) (ph[0] == (p) || ph[NI - 1] == (p))

proctype feeder() {
  byte p, i, e;
end_start:
  {
  do
  :: atomic { cursor < NPOS -> p = cursor; e = EPOCH(p) };
     if
     :: atomic { e < sealed }
     :: atomic { e >= sealed && MAY_SEAL(e) };
#ifdef MUT_mark_first
        sealed = e + 1;
#endif
        plan[e & 1] = TORN;
        plan[e & 1] = e;
        sealed = e + 1
     fi;
     if
     :: atomic { skip_pos[p] -> cursor = p + 1 }
     :: atomic { !skip_pos[p] };
        atomic { SOME(FREE) -> i = (ph[0] == FREE -> 0 : NI - 1); ph[i] = FILLING;
#ifndef MUT_pos_separate
                 pos[i] = p
#endif
        };
#ifdef MUT_pos_separate
        pos[i] = p;
#endif
#ifdef MUT_cursor_early
        cursor = p + 1;
#endif
        tok[i] = p;                                            /* tokens, lengths, masks */
#ifdef MUT_publish_first
        ph[i] = QUEUED;
        cursor = p + 1
#else
        cursor = p + 1;                                        /* then the cursor, */
        atomic { assert(ph[i] == FILLING); ph[i] = QUEUED }   /* then the item */
#endif
     fi;
     atomic { p = 0; i = 0; e = 0 }
  :: atomic { cursor >= NPOS }; end_done: false
  od
  } unless { dieF?_ };
  p = 0; i = 0; e = 0;
end_dead:
  dieF?_; goto end_start
}

#ifdef MUT_no_parity
#define FITS(i) (ph[i] == QUEUED)
#else
#define FITS(i) (ph[i] == QUEUED && EPOCH(pos[i]) == EPOCH(s))
#endif
proctype trainer() {
  byte i;
end_start:
  {
  do
  :: atomic { s < NPOS && sealed > EPOCH(s) };
     atomic { assert(plan[EPOCH(s) & 1] == EPOCH(s)) };        /* the place's bucket */
     atomic { FITS(0) || FITS(NI - 1) -> if :: FITS(0) -> i = 0 :: FITS(NI - 1) -> i = NI - 1 fi; ph[i] = HELD };
     atomic { assert(tok[i] == pos[i]) };
     atomic { rec[s & 1] = pos[i] };
     atomic { ledger_done >= s };                              /* gate of REDUCE(s) */
     /* commit, apply, free, COLLECT(s + 1) */
     atomic { assert(!((w >> pos[i]) & 1)); w = w | (1 << pos[i]); s++; ph[i] = FREE; i = 0 }
  :: atomic { s >= NPOS }; end_done: false
  od
  } unless { dieT?_ };
  i = 0;
end_dead:
  dieT?_; goto end_start
}

inline recover_feeder() {
  do
  :: atomic { i < NI ->
       if
       :: ph[i] == FILLING ->
#if defined(MUT_free_all)
          ph[i] = FREE
#elif defined(MUT_publish_all)
          ph[i] = QUEUED
#else
          ph[i] = (pos[i] < cursor -> QUEUED : FREE)
#endif
       :: else
       fi; i++ }
  :: atomic { i >= NI -> i = 0; break }
  od
}
#define BEHIND (s > ledger_done)

active proctype supervisor() {
  byte i;
  atomic {
    do :: i < NPOS -> line[i] = NONE; i++ :: else -> break od;
    i = 0; do :: i < NI -> pos[i] = NONE; i++ :: else -> break od;
    i = 0; plan[0] = NONE; plan[1] = NONE; rec[0] = NONE; rec[1] = NONE;
    run feeder(); run trainer() };
  do
  :: atomic { kills < KILLS && cursor < NPOS -> kills++; dieF!0 }; recover_feeder(); dieF!0
  :: atomic { BEHIND };                                        /* ledger line: record, then the sample ids of its microbatch */
     atomic { assert(plan[EPOCH(ledger_done) & 1] == EPOCH(ledger_done));
              assert(lines == ledger_done); line[lines] = rec[ledger_done & 1]; lines++ };
     ledger_done = lines
#if SUPS
  :: atomic { s > dir && s < NPOS -> dir = s; dirw = w }       /* a checkpoint directory is complete */
#ifdef MUT_latest_early
  :: atomic { dir > latest -> latest = dir; latestw = dirw }
#else
  :: atomic { dir > latest && ledger_done >= dir -> latest = dir; latestw = dirw }
#endif
  :: atomic { sups < SUPS && s < NPOS -> sups++; dieF!0 };     /* the supervisor dies, all with it; run --resume */
     dieT!0;
     atomic {
       assert(lines >= latest);
#ifndef MUT_no_cut
       do :: lines > latest -> lines--; line[lines] = NONE :: else -> break od;
#endif
       w = latestw; s = latest; dir = latest; dirw = latestw; ledger_done = latest; sealed = EPOCH(s);
       i = 0; do :: i < NPOS -> skip_pos[i] = 0; i++ :: else -> break od;
#ifdef MUT_resume_cursor
       cursor = s;                                             /* as if the committed set were a prefix of the plan */
#else
       i = 0; do :: i < lines -> skip_pos[line[i]] = 1; i++ :: else -> break od;
       cursor = EPOCH(s) * PE;
#endif
       i = 0; do :: i < NI -> ph[i] = FREE; pos[i] = NONE; tok[i] = 0; i++ :: else -> break od; i = 0;
       plan[0] = NONE; plan[1] = NONE; rec[0] = NONE; rec[1] = NONE };
     dieT!0; dieF!0
#endif
  :: atomic { s == NPOS && ledger_done == NPOS -> break }
  od;
  atomic {
    assert(w == (1 << NPOS) - 1 && lines == NPOS);
    w = 0; i = 0;
    do :: i < NPOS -> assert(EPOCH(line[i]) == EPOCH(i)); assert(!((w >> line[i]) & 1)); w = w | (1 << line[i]); i++ :: else -> break od }
}
