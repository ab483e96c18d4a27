/* Slabs, retry ring, plan order, places, prefetch: no deadlock; loss of a keeper (ipc/slab.h, design 4.3, 4.4, 5).
 *
 * Two targets, two drafters, two buckets, M places a step whose buckets are those of the step's group of the plan; the plan itself is
 * chosen at the start (-DPLAN=<bit mask> fixes it: bit i is the bucket of position i).  Rings are ideal; which READY item of a bucket a
 * drafter gets is left open (any order that a ring may have is among them).  The commit is one step (step.pml has the rest). DEVICE:
 * slab k and target t lie on device 0 or 1; the keeper of device 0 may die at any moment, DEVICE times, and its successor comes at any
 * later one.  FROZEN: target 0 may stop for good. RESUME: the run starts at step 1 with the microbatches of mask RESUME committed (any M of
 * them with the buckets of group 0).
 *
 * Properties: when nothing can move (timeout) all is committed; a slab belongs to one item; no drafter uses hidden states that are gone but
 * those it has claimed; no place is held by a drafter without an item at rest; no invalid end state. */
#ifndef N
#define N 4
#endif
#ifndef M
#define M 2
#endif
#ifndef S
#define S 3        /* slabs, <= 4 */
#endif
#ifndef KILLS
#define KILLS 0
#endif
#ifndef DEVICE
#define DEVICE 0
#endif
#ifndef FROZEN
#define FROZEN 0
#endif
#ifndef DEV0
#define DEV0 2     /* DEVICE: slabs 0..DEV0-1 lie on device 0 */
#endif
#ifndef UNREACHABLE
#define UNREACHABLE 0 /* the first slabs, which no target may write to */
#endif
#ifndef RESUME
#define RESUME 0
#endif
#define NT 2
#define ND 2
#define QUEUED 0
#define EXTRACTING 1
#define READY 2
#define DRAFTING 3
#define ACCUMULATED 4
#define FREE 5
#define NONE 15
#define S_FREE 0
#define S_TARGET 1
#define S_ITEM 2
#define OPEN 0
#define TAKEN 1
#define DONE 2

byte ph[N], ow[N], sl[N];                /* item word and slab */
byte sk[S], sx[S];                       /* slab word: kind; target | item */
byte pst[M], pow[M];                     /* places of the current step */
byte first;                              /* first plan position of the current step */
byte inp;                                /* the input ring in plan order */
byte plan, kills, losses;
bool down, old[S], frozen;               /* down: no keeper on device 0; old: what was in the slab went with one */
chan retry = [N] of { byte };
chan dieT[NT] = [0] of { bit };
chan dieD[ND] = [0] of { bit };

#define B(i) ((plan >> (i)) & 1)
#ifdef MUT_quota
#define PB(p) ((p) & 1)                  /* a second apportionment instead of the group's own buckets */
#else
#define PB(p) B(first + (p))
#endif
#define NPL (first + M <= N -> M : N - first)
#define SDEV(k) ((k) < DEV0 -> 0 : 1)
#define REACH(k, t) ((k) >= UNREACHABLE && (!DEVICE || (SDEV(k) == (t) && !(down && SDEV(k) == 0))))
#define TAKEABLE(k) (S > (k) && sk[k] == S_FREE && REACH(k, t))
#define IS(i, p, b) ((i) < N && ph[i] == (p) && B(i) == (b))
#if N > 4
#define ANY(p, b) (IS(0, p, b) || IS(1, p, b) || IS(2, p, b) || IS(3, p, b) || IS(4, p, b) || IS(N - 1, p, b))
#else
#define ANY(p, b) (IS(0, p, b) || IS(1, p, b) || IS(2, p, b) || IS(N - 1, p, b))
#endif
/* The ready rings: with FIFO the oldest of the bucket; else any, which has every order that concurrent pushes and re-pushes can make. */
#ifdef FIFO
chan ring[2] = [N] of { byte };
#define PUSHED(i) ring[B(i)]!i
#define TAKEN_BACK(i) if :: B(i) == 0 -> ring[0]??eval(i) :: else -> ring[1]??eval(i) fi
#define PICK(b) if :: (b) == 0 -> ring[0]?i :: else -> ring[1]?i fi
#else
#define PUSHED(i) skip
#define TAKEN_BACK(i) skip
#if N > 4
#define PICK(b) if :: IS(0, READY, b) -> i = 0 :: IS(1, READY, b) -> i = 1 :: IS(2, READY, b) -> i = 2 :: IS(3, READY, b) -> i = 3 \
    :: IS(4, READY, b) -> i = 4 :: N > 5 && IS(N - 1, READY, b) -> i = N - 1 fi
#else
#define PICK(b) if :: IS(0, READY, b) -> i = 0 :: IS(1, READY, b) -> i = 1 :: IS(2, READY, b) -> i = 2 :: N > 3 && \
    IS(N - 1, READY, b) -> i = N - 1 fi
#endif
#endif

#define TAKE_SLAB k = 0; do :: !TAKEABLE(k) -> k++ :: else -> break od; sk[k] = S_TARGET; sx[k] = t
#define EXTRACT(x) assert(ph[x] == QUEUED); ph[x] = EXTRACTING; ow[x] = t
#define SKIP_COMMITTED do :: inp < N && ph[inp] == FREE -> inp++ :: else -> break od

#define OPENP(p) ((p) < NPL && pst[p] == OPEN && ANY(READY, PB(p)))
#define SOME_PLACE (OPENP(0) || (M > 1 && OPENP(M - 1)) || (M > 2 && OPENP(1)))

proctype target(byte t) {
  byte k, i;
end_start:
  {
end_idle:
  do
#ifdef MUT_item_first
  :: atomic { nempty(retry) -> retry?i; EXTRACT(i) }; goto slab
  :: atomic { empty(retry) && inp < N -> i = inp; inp++; SKIP_COMMITTED; EXTRACT(i) };
slab:
     atomic { TAKEABLE(0) || TAKEABLE(1) || TAKEABLE(2) || TAKEABLE(3) -> TAKE_SLAB };
#else
  :: atomic { TAKEABLE(0) || TAKEABLE(1) || TAKEABLE(2) || TAKEABLE(3) -> TAKE_SLAB };
end_item:
#if defined(MUT_input_first)
     if
     :: atomic { inp < N -> i = inp; inp++; SKIP_COMMITTED; EXTRACT(i) }
     :: atomic { inp == N && nempty(retry) -> retry?i; EXTRACT(i) }
     fi;
#elif defined(MUT_any_order)
     if
     :: atomic { ph[0] == QUEUED -> i = 0; EXTRACT(i) }
     :: atomic { ph[1] == QUEUED -> i = 1; EXTRACT(i) }
     :: atomic { ph[2] == QUEUED -> i = 2; EXTRACT(i) }
     :: atomic { ph[N - 1] == QUEUED -> i = N - 1; EXTRACT(i) }
     fi;
#else
     if
     :: atomic { nempty(retry) -> retry?i; EXTRACT(i) }
     :: atomic { empty(retry) };                               /* looked there first; it may fill up again now */
end_input:
        if
        :: atomic { inp < N -> i = inp; inp++; SKIP_COMMITTED; EXTRACT(i) }
        :: atomic { nempty(retry) }; goto end_item
        fi
     fi;
#endif
#endif
     atomic { assert(sk[k] == S_TARGET && sx[k] == t); sk[k] = S_ITEM; sx[k] = i };
     atomic { assert(ph[i] == EXTRACTING && ow[i] == t); ph[i] = READY; ow[i] = NONE; sl[i] = k; PUSHED(i); k = 0; i = 0 }
  od
  } unless { atomic { dieT[t]?_ -> k = 0; i = 0 } };
end_dead:
  dieT[t]?_; goto end_start
}

#define CLAIM(i) assert(!old[sl[i]]); ph[i] = DRAFTING; ow[i] = d
#define PICK_PLACE(x) if :: OPENP(0) -> x = 0 :: M > 1 && OPENP(M - 1) -> x = M - 1 :: M > 2 && OPENP(1) -> x = 1 fi; pst[x] = TAKEN; \
    pow[x] = d

inline commit() {                        /* with the last place: all of the step is applied, slabs first, then items */
  p = 0; do :: p < NPL && pst[p] == DONE -> p++ :: else -> break od;
  if
  :: p < NPL
  :: else ->
     p = 0; i = 0;
     do
     :: i < N && ph[i] == DRAFTING -> assert(false)           /* a claimed item has a place, so it cannot outlive the step */
     :: i < N && ph[i] == ACCUMULATED -> p++; if :: sk[sl[i]] == S_ITEM && sx[sl[i]] == i -> sk[sl[i]] = S_FREE; sx[sl[i]] = 0; old[sl[i]] = 0 :: else fi;
                                         ph[i] = FREE; ow[i] = NONE; sl[i] = NONE; i++
     :: i < N && ph[i] != ACCUMULATED && ph[i] != DRAFTING -> i++
     :: else -> break
     od;
     assert(p == NPL); first = first + NPL;
     p = 0; do :: p < M -> pst[p] = OPEN; pow[p] = 0; p++ :: else -> break od
  fi
}

proctype drafter(byte d) {
  byte p, q, i, j; bool two;
end_start:
  {
end_idle:
  do
#ifdef MUT_prefetch_noplace
  :: atomic { !two && (ANY(READY, 0) || ANY(READY, 1)) -> if :: ANY(READY, 0) -> PICK(0) :: ANY(READY, 1) -> PICK(1) fi; CLAIM(i);
    two = 1 }
  :: atomic { two && ((pst[0] == OPEN && NPL > 0 && PB(0) == B(i)) || (NPL > 1 && pst[M - 1] == OPEN && PB(M - 1) == B(i))) ->
       if :: pst[0] == OPEN && NPL > 0 && PB(0) == B(i) -> p = 0 :: NPL > 1 && pst[M - 1] == OPEN && PB(M - 1) == B(i) -> p = M - 1 fi;
       pst[p] = TAKEN; pow[p] = d };
     atomic { ph[i] = ACCUMULATED; pst[p] = DONE; two = 0; commit(); p = 0; i = 0 }
#else
  :: atomic { SOME_PLACE -> PICK_PLACE(p) };
pop:
     if
     :: atomic { ANY(READY, PB(p)) -> PICK(PB(p)); CLAIM(i) }
#ifdef MUT_no_giveback
     :: atomic { !ANY(READY, PB(p)) }; end_hold: ANY(READY, PB(p)); goto pop
#else
     :: atomic { !ANY(READY, PB(p)) -> pst[p] = OPEN; pow[p] = 0; p = 0 }; goto end_idle
#endif
     fi;
work:
     if
     :: atomic { SOME_PLACE -> PICK_PLACE(q) };                /* prefetch: a place of the same step, before the item */
        j = i;
        if
        :: atomic { ANY(READY, PB(q)) -> PICK(PB(q)); CLAIM(i); two = 1; q = q + 16 * i; i = j; j = q / 16; q = q % 16 }
        :: atomic { !ANY(READY, PB(q)) -> pst[q] = OPEN; pow[q] = 0; q = 0; i = j; j = 0 }
        fi
     :: atomic { true }
     fi;
     atomic { assert(sk[sl[i]] == S_ITEM && sx[sl[i]] == i);
              assert(PB(p) == B(i) && pst[p] == TAKEN && pow[p] == d);
              ph[i] = ACCUMULATED; pst[p] = DONE; commit(); p = 0; i = 0 };
     if
     :: atomic { two -> p = q; i = j; q = 0; j = 0; two = 0 }; goto work
     :: atomic { !two }
     fi
#endif
  od
  } unless { atomic { dieD[d]?_ -> p = 0; q = 0; i = 0; j = 0; two = 0 } };
end_dead:
  dieD[d]?_; goto end_start
}

#define BACK(i) if :: ph[i] == EXTRACTING && ow[i] == v -> ph[i] = QUEUED; ow[i] = NONE; retry!i :: else fi
inline recover_target(v) {
#ifdef MUT_slab_first
  atomic { i = 0; do :: i < S -> if :: sk[i] == S_TARGET && sx[i] == v || sk[i] == S_ITEM && ph[sx[i]] == EXTRACTING &&
    ow[sx[i]] == v -> sk[i] = S_FREE; sx[i] = 0 :: else fi; i++ :: else -> break od; i = 0 };
  atomic { do :: i < N -> BACK(i); i++ :: else -> break od; i = 0 };
#else
  atomic { i = 0; do :: i < S -> if :: sk[i] == S_ITEM && ph[sx[i]] == EXTRACTING && ow[sx[i]] == v -> sk[i] = S_TARGET; sx[i] = v
    :: else fi; i++ :: else -> break od; i = 0 };
  atomic { do :: i < N -> BACK(i); i++ :: else -> break od; i = 0 };
  atomic { do :: i < S -> if :: sk[i] == S_TARGET && sx[i] == v -> sk[i] = S_FREE; sx[i] = 0 :: else fi; i++ :: else -> break od; i = 0 };
#endif
  skip
}
inline recover_drafter(v) {
  atomic {
    i = 0;
    do
    :: i < N ->
       if
       :: (ph[i] == DRAFTING || ph[i] == ACCUMULATED) && ow[i] == v ->
          if
#ifndef MUT_lost_ready
          :: old[sl[i]] -> ph[i] = QUEUED; retry!i; sk[sl[i]] = S_FREE; sx[sl[i]] = 0; old[sl[i]] = 0; sl[i] = NONE
#endif
          :: else -> ph[i] = READY; PUSHED(i)
          fi; ow[i] = NONE
       :: else
       fi; i++
    :: else -> break
    od;
    i = 0; do :: i < M -> if :: pow[i] == v && pst[i] != OPEN -> pst[i] = OPEN; pow[i] = 0 :: else fi; i++ :: else -> break od; i = 0 }
}
/* A READY item on device 0: queued and pushed, then its slab. */
#define TAKE_BACK(i) if :: ph[i] == READY && SDEV(sl[i]) == 0 -> ph[i] = QUEUED; TAKEN_BACK(i); retry!i; sk[sl[i]] = S_FREE; \
    sx[sl[i]] = 0; sl[i] = NONE :: else fi

active proctype supervisor() {
  byte i;
  atomic {
#ifdef PLAN
    plan = PLAN;
#else
    do :: i < N -> if :: plan = plan | (1 << i) :: true fi; i++ :: else -> break od;
#endif
    i = 0; do :: i < N -> ow[i] = NONE; sl[i] = NONE; if :: (RESUME >> i) & 1 -> ph[i] = FREE; first = M :: else fi; i++
      :: else -> break od;
    SKIP_COMMITTED; i = 0;
    run target(0); run target(1); run drafter(0); run drafter(1) };
  do
  :: atomic { kills < KILLS && first < N && !frozen -> kills++; dieT[0]!0 }; recover_target(0); dieT[0]!0
  :: atomic { kills < KILLS && first < N -> kills++; dieT[1]!0 }; recover_target(1); dieT[1]!0
  :: atomic { kills < KILLS && first < N -> kills++; dieD[0]!0 }; recover_drafter(0); dieD[0]!0
  :: atomic { kills < KILLS && first < N -> kills++; dieD[1]!0 }; recover_drafter(1); dieD[1]!0
  :: atomic { FROZEN && !frozen && first < N -> frozen = 1; dieT[0]!0 }
  :: atomic { losses < DEVICE && !down && first < N -> losses++; down = 1; dieT[0]!0 };   /* the device's target goes first */
     recover_target(0);
     atomic {
       do :: i < N -> TAKE_BACK(i); i++ :: else -> break od;
       i = 0; do :: i < DEV0 -> old[i] = (sk[i] == S_ITEM); i++ :: else -> break od; i = 0 };
     dieT[0]!0
#ifndef MUT_no_keeper
  :: atomic { down -> down = 0;                                     /* the successor registers its memory */
#ifdef MUT_frees_held
       do :: i < DEV0 -> if :: sk[i] == S_ITEM -> sk[i] = S_FREE; sx[i] = 0; old[i] = 0 :: else fi; i++ :: else -> break od; i = 0;
#endif
       skip }
#endif
  :: timeout -> break
  od;
  atomic {
    assert(frozen || first == N);
    i = 0; do :: i < S -> assert(frozen || sk[i] != S_ITEM); i++ :: else -> break od;
    i = 0; do :: i < NPL -> assert(!(frozen && pst[i] == TAKEN)); i++ :: else -> break od }
}
