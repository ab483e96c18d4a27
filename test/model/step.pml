/* One optimizer step, exactly once: step word, places, joined/reduced/applied bits, REPAIR, commit, apply, zeroing, ledger gate, HALT
 * (ipc/step.h, design 6.1 to 6.3).
 *
 * Data flow is modelled for real: accumulators, reduced gradients and the two states of each drafter are bit masks of microbatches, so
 * "exactly once" is checked on the final weights.  Every shared access is one step; KILLS deaths at any step, also of the same drafter
 * twice and while another one is being recovered (a death is merged with the begin of its recovery: nobody can tell a dead drafter from
 * one that is not scheduled before that).  STOP: a stop may be requested at any moment.  DET: deterministic mode.
 * Targets and rings are ideal here: every item is READY at the start (ring.pml, item.pml, slabs.pml have the rest).
 *
 * Properties: no two accumulators share a microbatch when a sum is accepted; nothing is applied to a torn state or twice; an ACCUMULATED
 * item belongs to the step in the step word; a ledger line is written once, from records of its own step; at the end state == the
 * items of the ledger, all items FREE (after HALT: the rest untouched); no invalid end state (= no deadlock). */
#ifndef D
#define D 2
#endif
#ifndef M
#define M 2        /* places of a step, <= 3 */
#endif
#ifndef N
#define N 3        /* microbatches; the last step is partial when M does not divide N */
#endif
#ifndef KILLS
#define KILLS 1
#endif
#ifndef STOP
#define STOP 0
#endif
#define STEPS ((N + M - 1) / M)
#define ALL ((1 << N) - 1)
#define FULL ((1 << D) - 1)
#define TORN 128
#define NPL(q) ((q) * M + M <= N -> M : ((q) * M < N -> N - (q) * M : 0))
#define COLLECT 0
#define REDUCE 1
#define COMMITTED 2
#define REPAIR 3
#define HALT 4
#define FINISHED 5
#define READY 0
#define DRAFT 1
#define ACC 2
#define FREE 3
#define OPEN 0
#define TAKEN 1
#define DONE 2

byte ph, s, e, rm, am;                   /* the step word */
byte ist[N], iow[N];                     /* item words */
byte pst[M], pstp[M], pown[M];           /* place words */
byte rec[2 * M], recstep[2 * M];         /* place records [step mod 2][M]; the step is a ghost */
byte acc[D], red[D], st[2 * D];          /* arena: accumulator, reduced gradient, state[2] of each drafter */
bool joined[D];
byte ledger_done, led[N];
bool stop;
byte kills;
chan die[D] = [0] of { bit };

#ifdef MUT_place_nostep
#define OPENP(p, q) (pst[p] == OPEN)
#define DONEP(p, q) (pst[p] == DONE)
#else
#define OPENP(p, q) (pst[p] == OPEN || pstp[p] != (q))
#define DONEP(p, q) (pst[p] == DONE && pstp[p] == (q))
#endif
#ifdef DET
#ifdef MUT_det_any
#define MINE(p) true
#else
#define MINE(p) ((p) % D == d)
#endif
#define FITS(i, p) ((i) == s * M + (p))
#else
#define MINE(p) true
#define FITS(i, p) true
#endif
#define OPEN_FOR_ME(p, q) (NPL(q) > (p) && OPENP(p, q) && MINE(p))
#if M == 1
#define ANY_OPEN(q) OPEN_FOR_ME(0, q)
#define ALL_DONE(q) DONEP(0, q)
#elif M == 2
#define ANY_OPEN(q) (OPEN_FOR_ME(0, q) || OPEN_FOR_ME(1, q))
#define ALL_DONE(q) (DONEP(0, q) && (NPL(q) < 2 || DONEP(1, q)))
#else
#define ANY_OPEN(q) (OPEN_FOR_ME(0, q) || OPEN_FOR_ME(1, q) || OPEN_FOR_ME(2, q))
#define ALL_DONE(q) (DONEP(0, q) && (NPL(q) < 2 || DONEP(1, q)) && (NPL(q) < 3 || DONEP(2, q)))
#endif
#if D == 2
#define ALL_JOINED (joined[0] && joined[1])
#else
#define ALL_JOINED (joined[0] && joined[1] && joined[2])
#endif
#ifdef MUT_no_join
#define JOINED true
#else
#define JOINED ALL_JOINED
#endif
#ifdef MUT_no_gate
#define GATE(q) true
#else
#define GATE(q) (ledger_done >= (q))     /* line q - 1 is on disk: the record slots of q + 1 may be used again after REDUCE(q) */
#endif
#define IS_READY(i) ((i) < N && ist[i] == READY)              /* N <= 5 */
#define CHANGED (ph != wp || s != ws || e != we)

inline next_step() {                     /* the CAS that sets the last applied bit */
  assert(s == ws);
  rm = 0; am = 0; s++; ph = (stop -> HALT : COLLECT)
}
inline free_items() {
  do
  :: atomic { i < N -> if :: ist[i] == ACC && iow[i] == d -> assert(ph == COMMITTED && s == ws); ist[i] = FREE :: else fi; i++ }
  :: atomic { i >= N -> i = 0; break }
  od
}
inline apply() {
#ifdef MUT_no_pingpong
  r = st[2 * d + (ws & 1)]; st[2 * d + (ws & 1)] = TORN;
  atomic { assert(r != TORN); st[2 * d + ((ws + 1) & 1)] = r | red[d]; r = 0 };
#else
  st[2 * d + ((ws + 1) & 1)] = TORN;
  atomic { r = st[2 * d + (ws & 1)]; assert(r != TORN && !(r & red[d])); st[2 * d + ((ws + 1) & 1)] = r | red[d]; r = 0 };
#endif
#ifndef MUT_zero_late
  acc[d] = 0;
#endif
#ifndef MUT_free_late
  free_items();
#endif
#if defined(MUT_ledger_by_drafter)
  atomic { am = am | (1 << d); ok = (am == FULL) };
  if
  :: ok ->
     atomic { do :: i < NPL(ws) -> led[rec[M * (ws & 1) + i]]++; i++ :: else -> break od; i = 0; ledger_done++ };
     atomic { ok = 0; next_step() }
  :: else
  fi;
#elif defined(MUT_place_nostep)
  atomic { am = am | (1 << d); ok = (am == FULL) };
  if
  :: ok -> do :: atomic { i < M -> pst[i] = OPEN; i++ } :: atomic { i >= M -> i = 0; break } od; atomic { ok = 0; next_step() }
  :: else
  fi;
#elif defined(MUT_applied_count)
  atomic { assert(ph == COMMITTED && s == ws); am++; if :: am >= D -> next_step() :: else fi };
#else
  atomic { assert(ph == COMMITTED && s == ws); am = am | (1 << d); if :: am == FULL -> next_step() :: else fi };
#endif
#ifdef MUT_free_late
  do
  :: atomic { i < N -> if :: ist[i] == ACC && iow[i] == d -> ist[i] = FREE :: else fi; i++ }
  :: atomic { i >= N -> i = 0; break }
  od;
#endif
#ifdef MUT_zero_late
  acc[d] = 0;
#endif
  skip
}
#ifdef MUT_applied_count
#define UNAPPLIED(a) true
#else
#define UNAPPLIED(a) (!((a) & (1 << d)))
#endif
#define READWORD wp = ph; ws = s; we = e; wr = rm; wa = am
#define CLEAR wp = 0; ws = 0; we = 0; wr = 0; wa = 0; i = 0; p = 0; r = 0; ok = 0

proctype drafter(byte d) {
  byte wp, ws, we, wr, wa, i, p, r;
  bool ok;
start:
  {
    atomic { READWORD };
    if
    :: atomic { wp == COMMITTED && UNAPPLIED(wa) };
#ifdef MUT_no_apply_new
       acc[d] = 0;
       atomic { am = am | (1 << d); if :: am == FULL -> next_step() :: else fi }
#else
       apply()
#endif
    :: atomic { !(wp == COMMITTED && UNAPPLIED(wa)) }
    fi;
#ifndef MUT_no_zero
    acc[d] = 0;
#endif
    atomic { joined[d] = 1; CLEAR };
    do
    :: atomic { READWORD };
       if
       :: atomic { wp == FINISHED -> break }
       :: atomic { wp == COMMITTED && !(wa & (1 << d)) }; apply(); atomic { CLEAR }
#ifdef MUT_no_zero_join
       :: atomic { wp == REDUCE && !(wr & (1 << d)) && acc[d] != 0 };
#else
       :: atomic { wp == REDUCE && !(wr & (1 << d)) };
#endif
          do                                                 /* sum, one accumulator a step */
          :: atomic { i < D -> if :: r & acc[i] -> ok = 1 :: else fi; r = r | acc[i]; i++ }
          :: atomic { i >= D -> i = 0; break }
          od;
#ifdef MUT_in_place
          acc[d] = r;
#endif
#ifndef MUT_bit_early
          red[d] = r;                                        /* E3: the sum is complete before the bit says so */
#endif
          atomic {
            if
#ifdef MUT_no_epoch
            :: ph == REDUCE && s == ws ->
#else
            :: ph == REDUCE && s == ws && e == we ->
#endif
#ifdef DET
               do :: i < NPL(ws) -> if :: (i % D) == d -> assert(acc[d] & (1 << (ws * M + i)))
                 :: else -> assert(!(acc[d] & (1 << (ws * M + i)))) fi; i++ :: else -> break od;
#endif
               assert(!ok);                                  /* no microbatch twice */
               rm = rm | (1 << d);
               if :: rm == FULL -> ph = COMMITTED; am = 0 :: else fi
            :: else                                          /* throw the sum away */
            fi };
#ifdef MUT_bit_early
          red[d] = r;
#endif
          atomic { CLEAR }
#ifdef MUT_halt_claims
       :: atomic { wp == HALT && ANY_OPEN(ws) };
#else
       :: atomic { (wp == COLLECT || wp == REPAIR) && ANY_OPEN(ws) };
#endif
          atomic {                                           /* take an open place */
            do :: p < NPL(ws) && !OPEN_FOR_ME(p, ws) -> p++ :: else -> break od;
            if :: p < NPL(ws) -> assert(s == ws); pst[p] = TAKEN; pown[p] = d; pstp[p] = ws; ok = 1 :: else fi };
          if
          :: atomic { !ok -> CLEAR }
          :: atomic { ok ->                                  /* claim an item */
               i = 0; do :: i < N && !(ist[i] == READY && FITS(i, p)) -> i++ :: else -> break od;
               if
               :: i < N -> ist[i] = DRAFT; iow[i] = d
               :: else -> assert(pst[p] == TAKEN && pown[p] == d); pst[p] = OPEN; ok = 0  /* empty: give it back */
               fi };
             if
             :: atomic { !ok -> CLEAR }; IS_READY(0) || IS_READY(1) || IS_READY(2) || IS_READY(3) || IS_READY(4) || CHANGED
             :: atomic { ok };
                atomic { assert(!(acc[d] & (1 << i)));
#ifdef DET
                         assert((acc[d] >> i) == 0);         /* ascending, also after recovery */
#endif
                         acc[d] = acc[d] | (1 << i) };
                atomic { assert(ist[i] == DRAFT && iow[i] == d); assert(ph != COMMITTED && s == ws); ist[i] = ACC };
#ifndef MUT_record_late
                atomic { rec[M * (ws & 1) + p] = i; recstep[M * (ws & 1) + p] = ws };
#endif
                atomic { assert(pst[p] == TAKEN && pown[p] == d); pst[p] = DONE };
#ifdef MUT_record_late
                atomic { rec[M * (ws & 1) + p] = i; recstep[M * (ws & 1) + p] = ws };
#endif
                atomic { CLEAR }
             fi
          fi
       :: atomic { wp == COLLECT && NPL(ws) > 0 && !ANY_OPEN(ws) && ALL_DONE(ws) && JOINED && GATE(ws) };
          do                                                 /* scan: not one atomic look */
          :: atomic { p < NPL(ws) && DONEP(p, ws) -> p++ }
          :: atomic { p < NPL(ws) && !DONEP(p, ws) -> ok = 1; break }
          :: atomic { p >= NPL(ws) -> break }
          od;
          atomic { if :: !(JOINED && GATE(ws)) -> ok = 1 :: else fi };
          atomic { if :: !ok && ph == COLLECT && s == ws && e == we -> ph = REDUCE; rm = 0 :: else fi; CLEAR }
       :: atomic { CHANGED || rm != wr || am != wa -> CLEAR }              /* sleep until something changes */
       fi
    od
  } unless { atomic { die[d]?ok -> CLEAR } };
  if
  :: atomic { ph != FINISHED -> die[d]?ok }; goto start      /* recovered: the next incarnation */
  :: atomic { ph == FINISHED -> CLEAR }
  fi
}

/* design 6.2 */
inline recover() {
#if defined(MUT_two_reads)
  c = (ph == COLLECT || ph == REDUCE);
#elif defined(MUT_no_repair)
  atomic { c = (ph == COLLECT || ph == REDUCE); if :: c -> ph = COLLECT; e++; rm = 0 :: else fi };
#else
  atomic {
    if
    :: ph == COLLECT || ph == REDUCE || ph == REPAIR -> c = 1; ph = REPAIR; e++; rm = 0
    :: ph == HALT -> c = 1; e++                              /* has no places: nothing to repair, and nobody may claim */
    :: ph == COMMITTED -> c = 0;
#ifndef MUT_committed_epoch
       e++
#endif
    :: else -> assert(false)
    fi };
#endif
#ifndef MUT_join_late
  joined[v] = 0;
#endif
  do
  :: atomic {
       i < N ->
       if
       :: iow[i] == v && ist[i] == DRAFT -> assert(c); ist[i] = READY
#ifdef MUT_free_ready
       :: iow[i] == v && ist[i] == ACC -> ist[i] = READY
#else
       :: iow[i] == v && ist[i] == ACC -> ist[i] = (c -> READY : FREE)
#endif
       :: else
       fi; i++ }
  :: atomic { i >= N -> i = 0; break }
  od;
  do
#ifdef MUT_done_stays
  :: atomic { c && i < M -> if :: pown[i] == v && pst[i] == TAKEN && pstp[i] == s -> pst[i] = OPEN :: else fi; i++ }
#else
  :: atomic { c && i < M -> if :: pown[i] == v && pst[i] != OPEN && pstp[i] == s -> pst[i] = OPEN :: else fi; i++ }
#endif
  :: atomic { !(c && i < M) -> i = 0; break }
  od;
#if defined(MUT_two_reads)
  atomic { if :: ph == REDUCE -> ph = COLLECT; e++; rm = 0 :: else fi };
#else
  atomic { if :: ph == REPAIR -> ph = COLLECT :: else fi; c = 0 };
#endif
#ifdef MUT_join_late
  joined[v] = 0;
#endif
  atomic { i = v; v = 0; c = 0; die[i]!0 };
  i = 0
}
#define KILL(x) :: atomic { ph != FINISHED && kills < KILLS && x < D -> kills++; v = x; die[x]!0 }; recover()

active proctype supervisor() {
  byte v, i, c;
  atomic {
    do :: i < M -> pstp[i] = 255; i++ :: else -> break od;
    i = 0; do :: i < 2 * M -> recstep[i] = 255; i++ :: else -> break od;
    i = 0; do :: i < D -> run drafter(i); i++ :: else -> break od;
    i = 0 };
  do
  KILL(0)
  KILL(1)
  KILL(2)
#if STOP
  :: atomic { !stop && ph != FINISHED -> stop = 1 }
#endif
#ifndef MUT_ledger_by_drafter
  :: atomic {                                                /* ledger line, from the records of step ledger_done */
       s > ledger_done || (ph == COMMITTED && s == ledger_done) ->
       do
       :: i < NPL(ledger_done) ->
          assert(recstep[M * (ledger_done & 1) + i] == ledger_done);
          led[rec[M * (ledger_done & 1) + i]]++; i++
       :: else -> break
       od;
       i = 0; ledger_done++ }
#endif
  :: atomic { ledger_done == s && (ph == HALT || (ph == COLLECT && NPL(s) == 0)) -> ph = FINISHED; break }
  od;
  atomic {                                                   /* the final truth */
    do
    :: i < N ->
       assert(led[i] <= 1);
       assert((led[i] == 1) == ((st[s & 1] >> i) & 1));
       assert(ist[i] == (led[i] == 1 -> FREE : READY));
       i++
    :: else -> break
    od;
    i = 0; do :: i < D -> assert(st[2 * i + (s & 1)] == st[s & 1]); i++ :: else -> break od;
    assert(stop || st[s & 1] == ALL) }
}
