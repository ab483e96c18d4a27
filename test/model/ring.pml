/* The ring of hints: push, claim, help, re-push after a death, lap wrap (ipc/ring.c, mr_recover_rings; design 4.1, 4.2).
 *
 * Truth is the item word; a ring cell is a hint {lap, ticket, index}.  Every shared access is one step; the words are touched only inside
 * one atomic each.  Workers 0..NP-1 push, NP..NP+NC-1 claim.  The supervisor may kill any of them between any two steps and recovers
 * it; STOPS processes freeze for good and are never recovered (R1: the others must go on without them).  A death is merged with the
 * begin of its recovery: a dead process that nobody has noticed differs in nothing from one that is not scheduled.
 * Item life here: SRC (a producer may take it) -> HELD -> READY -> TAKEN -> SRC with the next plan position.
 *
 * Properties: a microbatch is finished at most once; a claim from the ring of bucket b yields an item of bucket b; when nothing
 * can move any more (timeout) no item is READY or SRC while somebody lives who could take it; -DFIFO: claims come in the order of the
 * pushes; -DNOFULL: recovery never finds its ring full.
 * Limits: sequentially consistent; publication below 8; head and tail are bytes (the run is finite), laps wrap at LAPM. */
#ifndef N
#define N 2        /* items */
#endif
#ifndef NP
#define NP 1       /* producers */
#endif
#ifndef NC
#define NC 2       /* consumers */
#endif
#ifndef W
#define W 3        /* plan positions */
#endif
#ifndef NR
#define NR 1       /* ready rings; position p belongs to ring p % NR */
#endif
#ifndef CAP
#define CAP 2      /* cells; below 4 N so that a full ring and lap wrap are met */
#endif
#ifndef LAPM
#define LAPM 4     /* laps wrap here (2^24 in the layout) */
#endif
#ifndef PUBM
#define PUBM 8
#endif
#ifndef KILLS
#define KILLS 1
#endif
#ifndef STOPS
#define STOPS 0
#endif
#define FREE 0
#define SRC 1
#define HELD 2
#define READY 3
#define TAKEN 4
#define NW (NP + NC)
#define LAP(p) (((p) / CAP + 1) % LAPM)
#define CI(r, p) ((r) * CAP + (p) % CAP)
#define CELL(l, p, q, i) ((l) << 8 | (p) << 5 | (q) << 2 | (i))
#define C_LAP(c) ((c) >> 8)
#define C_POS(c) (((c) >> 5) & 7)
#define C_PUB(c) (((c) >> 2) & 7)
#define C_IX(c) ((c) & 3)
#ifdef MUT_no_ticket
#define LIVE(c) (ph[C_IX(c)] == READY)
#else
#define LIVE(c) (ph[C_IX(c)] == READY && pos[C_IX(c)] == C_POS(c) && pub[C_IX(c)] == C_PUB(c))
#endif
#ifdef MUT_no_pub
#define PUB1(i) skip
#else
#define PUB1(i) pub[i] = (pub[i] + 1) % PUBM; assert(PUBM != 8 || pub[i] != 0)
#endif

byte ph[N], ow[N], pos[N], pub[N];       /* the item word */
short cell[NR * CAP];
byte tail[NR], head[NR];
bool sweep;
byte cursor, finished[W];
#ifdef DET
byte dets;                                /* ghost: claims by plan position so far; at most DET of them */
#endif
#ifdef FIFO
byte order[N], pushed, claimed;
#define PUSHED(i) order[i] = pushed; pushed++
#define CLAIMED(i) assert(order[i] == claimed); claimed++
#else
#define CLAIMED(i) skip
#define PUSHED(i) skip
#endif
byte kills, stops; bool frozen[NW];
byte pusher[N];                          /* ghost: producer + 1 that published the item and has not pushed its hint yet */
chan die[NW] = [0] of { bit };           /* 0: killed (then restarted), 1: stopped for good */

#define CAS(x, old, new) if :: x == (old) -> x = new :: else fi
#define CAS_TAIL(r, t) if :: tail[r] == (t) -> assert(t < head[r] + CAP); tail[r] = (t) + 1 :: else fi

/* Local work is folded into the shared access before it.  `head_seen` of the code is left out: an older head only leads to the look at
 * head. */

/* discard stale cells at the head */
inline drain(r) {
  h = head[r];
  do
  :: c = cell[CI(r, h)];
     if
     :: atomic { C_LAP(c) != LAP(h) && h != head[r] -> h = head[r] }
     :: atomic { C_LAP(c) != LAP(h) && h == head[r] -> break }
     :: atomic { C_LAP(c) == LAP(h) && LIVE(c) -> break }
     :: atomic { C_LAP(c) == LAP(h) && !LIVE(c) }; atomic { CAS(head[r], h, h + 1); h = head[r] }
     fi
  od
}

#define PUSH_DONE t = 0; h = 0; c = 0; tries = 0
#ifdef MUT_fetch_add
inline push(r, ix, tk) {                                     /* Vyukov/DPDK: take the cell first, fill it later */
  atomic { t = tail[r]; tail[r] = t + 1 };
  atomic { cell[CI(r, t)] = LAP(t) << 8 | tk << 2 | ix; t = 0 }
}
#else
inline push(r, ix, tk) {
  t = tail[r];
  do
  :: c = cell[CI(r, t)];
     if
#ifdef MUT_no_help_tail
     :: atomic { C_LAP(c) == LAP(t) }; atomic { t != tail[r] -> t = tail[r] }
#else
     :: atomic { C_LAP(c) == LAP(t) -> CAS_TAIL(r, t); t = tail[r] }
#endif
#ifdef MUT_no_recheck
     :: atomic { C_LAP(c) != LAP(t) };
#else
     :: atomic { C_LAP(c) != LAP(t) && t != tail[r] -> t = tail[r] }
     :: atomic { C_LAP(c) != LAP(t) && t == tail[r] };
#endif
        if
        :: atomic { t >= head[r] + CAP && !tries -> tries = 1 }; drain(r); t = tail[r]
        :: atomic { t >= head[r] + CAP && tries };
           if
           :: atomic { t != tail[r] -> t = tail[r] }         /* full for a position that is history */
           :: atomic { t == tail[r] };
              atomic {
#ifdef NOFULL
                assert(false);
#endif
#ifndef MUT_full_no_sweep
                sweep = 1;
#endif
                PUSH_DONE; break }
           fi
        :: atomic { t < head[r] + CAP };
           if
#ifdef MUT_blind_store
           :: atomic { cell[CI(r, t)] = LAP(t) << 8 | tk << 2 | ix };
#else
           :: atomic { cell[CI(r, t)] != c -> t = tail[r] }
           :: atomic { cell[CI(r, t)] == c -> cell[CI(r, t)] = LAP(t) << 8 | tk << 2 | ix };
#endif
              atomic { CAS_TAIL(r, t); PUSH_DONE; break }
           fi
        fi
     fi
  od
}
#endif

#define TAKE(c) a = C_IX(c); ph[a] = TAKEN; ow[a] = me; CLAIMED(a)
#define CLAIM_DONE h = 0; c = 0; ok = 0
/* a: index of the claimed item or 255 */
inline claim(r, me) {
  do
  :: c = cell[CI(r, h)];
     if
     :: atomic { C_LAP(c) != LAP(h) && h != head[r] -> h = head[r] }
     :: atomic { C_LAP(c) != LAP(h) && h == head[r] -> CLAIM_DONE; break }
#if defined(MUT_head_first)
     :: atomic { C_LAP(c) == LAP(h) -> if :: head[r] == h -> head[r] = h + 1; ok = 1 :: else -> ok = 0 fi };
        atomic { if :: ok && LIVE(c) -> TAKE(c) :: else fi };
        atomic { if :: a != 255 -> CLAIM_DONE; break :: else -> h = head[r] fi }
#else
#ifdef MUT_claim_plain
     :: atomic { C_LAP(c) == LAP(h) -> ok = LIVE(c) };         /* test and store, no compare-and-swap */
        atomic { if :: ok -> TAKE(c) :: else fi };
#else
     :: atomic { C_LAP(c) == LAP(h) -> if :: LIVE(c) -> TAKE(c) :: else fi };
#endif
#ifdef MUT_no_help_head
        if :: atomic { a == 255 -> head[r] != h } :: atomic { a != 255 } fi;        /* leave a stale cell to whoever claimed it */
#endif
        atomic { CAS(head[r], h, h + 1); if :: a != 255 -> CLAIM_DONE; break :: else -> h = head[r] fi }
#endif
     fi
  od
}

#define SOME(p) (ph[0] == p || ph[N - 1] == p)
#define FIND(x, p) x = 0; do :: ph[x] != p -> x++ :: else -> break od

proctype producer(byte me) {
  byte t, h, i, a, tk; short c; bool ok, tries;
end_again:
  {
end_idle:
  do
  :: atomic { SOME(SRC) -> FIND(i, SRC); ph[i] = HELD; ow[i] = me };
#ifdef MUT_push_first
     tk = pos[i] << 3 | (pub[i] + 1);
     push(pos[i] % NR, i, tk);
     atomic { ph[i] = READY; ow[i] = 0; PUB1(i) };
#else
     atomic { assert(ph[i] == HELD && ow[i] == me); ph[i] = READY; ow[i] = 0; PUB1(i); PUSHED(i); pusher[i] = me + 1;
       tk = pos[i] << 3 | pub[i]; a = pos[i] % NR };
     push(a, i, tk);
#endif
     atomic { if :: pusher[i] == me + 1 -> pusher[i] = 0 :: else fi; i = 0; a = 0; tk = 0 }
  od
  } unless { atomic { die[me]?ok -> t = 0; h = 0; i = 0; a = 0; tk = 0; c = 0; tries = 0; if :: ok -> ok = 0; goto end_stopped
    :: else fi } };
end_dead:
  die[me]?ok; goto end_again;                                /* recovered: the next incarnation */
end_stopped:
  false
}

proctype consumer(byte me) {
  byte h, a, r; short c; bool ok;
end_again:
  {
end_idle:
  do
#if NR == 2
  :: atomic { C_LAP(cell[CI(1, head[1])]) == LAP(head[1]) -> r = 1; h = head[1]; a = 255 }; claim(1, me); goto work
#endif
#ifdef DET                                                   /* claims by plan position on the item word: its cell becomes stale */
  :: atomic { me == NW - 1 && dets < DET && SOME(READY) -> dets++; FIND(a, READY); ph[a] = TAKEN; ow[a] = me }; goto work
#endif
#ifdef MUT_any_item
  :: atomic { ph[N - 1] == READY -> a = N - 1; ph[a] = TAKEN; ow[a] = me; CLAIMED(a) }; goto work
#endif
  :: atomic { C_LAP(cell[CI(0, head[0])]) == LAP(head[0]) -> h = head[0]; a = 255 }; claim(0, me);
work:
     atomic {
       if
       :: a == 255
       :: else ->
          assert(ph[a] == TAKEN && ow[a] == me);
          assert(pos[a] % NR == r);
          finished[pos[a]]++; assert(finished[pos[a]] == 1);
          ow[a] = 0;
          if :: cursor < W -> ph[a] = SRC; pos[a] = cursor; cursor++; pub[a] = 0 :: else -> ph[a] = FREE fi
       fi;
       a = 0; r = 0 }
  od
  } unless { atomic { die[me]?ok -> h = 0; a = 0; r = 0; c = 0; if :: ok -> ok = 0; goto end_stopped :: else fi } };
end_dead:
  die[me]?ok; goto end_again;
end_stopped:
  false
}

/* R3 (mr_recover_rings): words, then cells between head and tail, then a hint for every READY item that has none.  NONE: not wanted. */
#define NONE 255
#ifdef MUT_no_repush
#define WANTED(i) false
#else
#ifdef MUT_repush_own
#define WANTED(i) (ph[i] == READY && mine[i])
#else
#define WANTED(i) (ph[i] == READY)
#endif
#endif
#define WORD(i) (pos[i] << 3 | pub[i])
inline repush() {
#ifndef MUT_sweep_last
  sweep = 0;                                                 /* before the scan: a hint dropped during it raises it again */
#endif
  do
  :: atomic { i < N -> word[i] = (WANTED(i) -> WORD(i) : NONE); i++ }
  :: atomic { i >= N -> i = 0; break }
  od;
#ifndef MUT_repush_always
  do
  :: atomic { r < NR -> q = head[r] };
     atomic { e = (tail[r] + 1 > q + CAP -> q + CAP : tail[r] + 1) };
     do
     :: atomic { q < e -> c = cell[CI(r, q)];
          if :: C_LAP(c) == LAP(q) && word[C_IX(c)] == ((c >> 2) & 63) -> word[C_IX(c)] = NONE :: else fi; q++; c = 0 }
     :: atomic { q >= e -> q = 0; e = 0; break }
     od;
     atomic { r++ }
  :: atomic { r >= NR -> r = 0; break }
  od;
#endif
  do
  :: atomic { i < N && (word[i] == NONE || ph[i] != READY || word[i] != WORD(i)) -> i++ }
  :: atomic { i < N && word[i] != NONE && ph[i] == READY && word[i] == WORD(i) -> tk = word[i]; r = pos[i] % NR };
     push(r, i, tk);
     atomic { r = 0; tk = 0; i++ }
  :: atomic { i >= N -> i = 0; word[0] = NONE; word[N - 1] = NONE; break }
  od
#ifdef MUT_sweep_last
  ; sweep = 0
#endif
}

inline recover() {
  do
  :: atomic {
       i < N ->
       if
       :: ph[i] == HELD && ow[i] == v -> ph[i] = SRC; ow[i] = 0; PUB1(i); mine[i] = 1
       :: ph[i] == TAKEN && ow[i] == v -> ph[i] = READY; ow[i] = 0; PUB1(i); mine[i] = 1
       :: else
       fi; i++ }
  :: atomic { i >= N -> i = 0; break }
  od;
  repush();
  atomic { mine[0] = 0; mine[N - 1] = 0; i = v; v = 0; die[i]!0 };
  i = 0
}

#define KILL(x) :: atomic { kills < KILLS && x < NW && !frozen[x] -> kills++; v = x; die[x]!0 }; recover()
#define STOP(x) :: atomic { stops < STOPS && x < NW && !frozen[x] -> stops++; frozen[x] = 1; die[x]!1 }
#define ALIVE(lo, n) ((n) > 1 && (!frozen[lo] || !frozen[(lo) + (n) - 1]) || !frozen[lo])

active proctype supervisor() {
  byte v, i, r, q, e, t, h, tk, word[N]; short c; bool tries, mine[N];
  atomic {
    do :: i < N -> ph[i] = SRC; pos[i] = i; i++ :: else -> break od;
    cursor = N; i = 0; word[0] = NONE; word[N - 1] = NONE;
    do :: i < NP -> run producer(i); i++ :: else -> break od;
    do :: i < NW -> run consumer(i); i++ :: else -> break od;
    i = 0 };
  do
  KILL(0)
  KILL(1)
  KILL(2)
  STOP(0)
  STOP(1)
  STOP(2)
  :: atomic { sweep }; repush()
  :: timeout ->                                              /* nobody can move: what is left must belong to a frozen process */
     atomic { i = 0;
       do
       :: i < N ->
          assert(!(ph[i] == READY && ALIVE(NP, NC)) || pusher[i] != 0 && frozen[pusher[i] - 1]);
          assert(!(ph[i] == SRC && ALIVE(0, NP)));
          assert(ph[i] != HELD && ph[i] != TAKEN || frozen[ow[i]]);
          i++
       :: else -> break
       od };
     break
  od
}
