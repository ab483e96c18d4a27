/* The life of an item with its slab, and what the supervisor makes of it after a death (ipc/item.h, ipc/slab.h, ipc/recover.h, design
 * 4.1, 4.3, 4.4, 6.5).
 *
 * Targets 0..NT-1 (device t), one drafter, one supervisor; device work is asynchronous: a launched kernel lands at any later moment,
 * also while its process is stopped, until the process is reaped.  Deaths at any step (KILLS), loss of a keeper = arena generation
 * (KEEPS).  Rings are ideal (a claimer looks at the item words; ring.pml has the rest), a step is one microbatch (step.pml has the
 * rest), and a freed item carries the next plan position at once (feeder.pml has the rest). A process that is stopped (SIGSTOP) is one
 * that is not scheduled: the supervisor may declare it dead at any time, but it KILLS AND REAPS it first.  MUT_by_time leaves that out:
 * then the stopped process wakes up after its items were given away.
 *
 * Properties: a drafter reads from a slab exactly what its item says, and opens no arena that is lost; a microbatch enters the weights
 * once; at the end nothing is lost and no slab is leaked; no invalid end state. */
#ifndef NI
#define NI 2       /* items */
#endif
#ifndef NPOS
#define NPOS 3     /* plan positions */
#endif
#ifndef NS
#define NS 2       /* slabs */
#endif
#ifndef NT
#define NT 1       /* targets */
#endif
#ifndef KILLS
#define KILLS 1
#endif
#ifndef KEEPS
#define KEEPS 0    /* keeper deaths; then slab k lies on device k % NT and target t writes to device t only */
#endif
#define FREE 0
#define QUEUED 1
#define EXTRACTING 2
#define READY 3
#define DRAFTING 4
#define ACCUMULATED 5
#define S_FREE 0
#define S_TARGET 1
#define S_ITEM 2
#define INCS 3                                /* incarnations of a slot in this model at most: KILLS + KEEPS + 1 */
#define DRAFTER NT
#define SLOTS (NT + 1)
#define PROC(slot, inc) ((slot) * INCS + (inc))
#define DEV(k) ((k) % NT)
#define GARBAGE 15

byte ph[NI], ow[NI], inc[NI], pos[NI];        /* item word */
byte islab[NI], igen[NI];                     /* its payload, plain */
byte sk[NS], sa[NS], sb[NS];                  /* slab word: kind; slot, incarnation | index, position */
byte data[2 * NS];                            /* [generation mod 2][slab]: an importer keeps the memory of a lost generation */
/* arena generation of a device; `lost` (0 in the code) from the keeper's death to the new one */
byte gen[NT];
bool lost[NT];
bool sweep;                                   /* somebody left a slab behind: the supervisor looks for slabs without an item */
bool committed; byte acc[NPOS], w[NPOS];      /* step word and arithmetic of the one drafter */
byte cursor, kills, keeps;
bool gone;                                    /* the drafter exited by itself */
byte cur[SLOTS];                              /* the supervisor's idea of the running incarnation */
/* device work in flight, one per process: 0 none, 1 launched */
bool busy[SLOTS * INCS]; byte kslab[SLOTS * INCS], kpos[SLOTS * INCS], kgen[SLOTS * INCS];
chan die[SLOTS * INCS] = [0] of { bit };

#define OWNED(i, p, s, n) (ph[i] == p && ow[i] == s && inc[i] == n)
#define SET(i, p, s, n) ph[i] = p; ow[i] = s; inc[i] = n
#define SLAB_IS(k, kind, a, b) (sk[k] == kind && sa[k] == a && sb[k] == b)
#define SLAB(k, kind, a, b) sk[k] = kind; sa[k] = a; sb[k] = b
#define DATA(k, g) data[((g) & 1) * NS + (k)]
#define DONE(i) if :: cursor < NPOS -> SET(i, QUEUED, 0, 0); pos[i] = cursor; cursor++ :: else -> SET(i, FREE, 0, 0); pos[i] = 0 fi; \
    islab[i] = NO_SLAB; igen[i] = 0
#define REQUEUE(i) SET(i, QUEUED, 0, 0)
#define CURRENT(i) (igen[i] == gen[DEV(islab[i])] && !lost[DEV(islab[i])])
#define NO_SLAB NS

/* the device: what was launched lands some time */
#define LAND(q) :: atomic { q < SLOTS * INCS && busy[q] -> \
    if \
    :: q < NT * INCS -> DATA(kslab[q], kgen[q]) = kpos[q] \
    :: else -> assert(DATA(kslab[q], kgen[q]) == kpos[q]); acc[kpos[q]]++ \
    fi; \
    busy[q] = 0; kslab[q] = 0; kpos[q] = 0; kgen[q] = 0 }
active proctype gpu() {
end:
  do
  LAND(0) LAND(1) LAND(2) LAND(3) LAND(4) LAND(5) LAND(6) LAND(7) LAND(8)
  od
}
#define LAUNCH(k, p, g) busy[q] = 1; kslab[q] = k; kpos[q] = p; kgen[q] = g

#define TAKEABLE(k) (NS > (k) && sk[k] == S_FREE && (KEEPS == 0 || DEV(k) == t && !lost[t]))
proctype target(byte t, n) {
  byte k, i, p, q; bool ok;
  q = PROC(t, n);
  {
end_idle:
  do
  :: atomic { TAKEABLE(0) || TAKEABLE(1) || TAKEABLE(2) ->     /* the slab first */
       k = 0; do :: !TAKEABLE(k) -> k++ :: else -> break od;
       SLAB(k, S_TARGET, t, n) };
end_item:
     atomic { ph[0] == QUEUED || ph[NI - 1] == QUEUED ->
       i = 0; do :: ph[i] != QUEUED -> i++ :: else -> break od;
       SET(i, EXTRACTING, t, n); p = pos[i] };
     atomic { LAUNCH(k, p, gen[DEV(k)]) };
#ifndef MUT_ready_early
     atomic { !busy[q] };                                      /* E1: host-confirmed */
#endif
     if                                                        /* mr_slab_assign; fields before the words */
     :: atomic { KEEPS && lost[DEV(k)] }; end_lost: false      /* the arena is gone: exit, or killed with the device */
     :: atomic { !(KEEPS && lost[DEV(k)]) -> if :: OWNED(i, EXTRACTING, t, n) -> islab[i] = k; igen[i] = gen[DEV(k)] :: else -> break fi }
     fi;
#ifdef MUT_ready_first
     atomic { if :: OWNED(i, EXTRACTING, t, n) -> SET(i, READY, 0, 0) :: else -> break fi };
     atomic { if :: SLAB_IS(k, S_TARGET, t, n) -> SLAB(k, S_ITEM, i, p) :: else -> break fi };
#else
     atomic { if :: SLAB_IS(k, S_TARGET, t, n) -> SLAB(k, S_ITEM, i, p) :: else -> break fi };
     atomic { if :: OWNED(i, EXTRACTING, t, n) -> SET(i, READY, 0, 0) :: else -> break fi };
#endif
     atomic { k = 0; i = 0; p = 0 }
  od
  } unless { die[q]?ok };
  k = 0; i = 0; p = 0
}

proctype drafter(byte n) {
  byte i, k, q, p; bool ok;
  q = PROC(DRAFTER, n);
  {
  /* a new incarnation: its accumulator is void, a committed step is finished (its items were freed by recovery) */
  do :: atomic { i < NPOS -> acc[i] = 0; i++ } :: atomic { i >= NPOS -> i = 0; break } od;
  committed = 0;
end_idle:
  do
  :: atomic { ph[0] == READY || ph[NI - 1] == READY ->
       i = 0; do :: ph[i] != READY -> i++ :: else -> break od;
       SET(i, DRAFTING, DRAFTER, n); p = pos[i]; k = islab[i] };
#if KEEPS
     if
#ifdef MUT_no_requeue
     :: true
#else
     :: atomic { CURRENT(i) }
     /* the hidden states are gone: mr_item_requeue, then look for another one */
     :: atomic { !CURRENT(i) };
#ifndef MUT_requeue_names_slab
        atomic { islab[i] = NO_SLAB };
#endif
        atomic { if :: OWNED(i, DRAFTING, DRAFTER, n) -> REQUEUE(i) :: else -> break fi };
        atomic { sweep = 1; i = 0; k = 0; p = 0 }; goto end_idle
#endif
     fi;
#endif
     if
     :: atomic { !KEEPS || CURRENT(i) -> LAUNCH(k, p, igen[i]) }
#if KEEPS
     :: atomic { !CURRENT(i) };                                /* lost just now: nobody can open it any more */
#ifdef MUT_no_requeue
        assert(false);
#endif
        gone = 1; false
#endif
     fi;
#ifndef MUT_acc_early
     atomic { !busy[q] };                                      /* E2: host-confirmed */
#endif
#ifdef MUT_slab_at_acc
     atomic { if :: SLAB_IS(k, S_ITEM, i, p) -> SLAB(k, S_FREE, 0, 0) :: else fi };
#endif
     atomic { if :: OWNED(i, DRAFTING, DRAFTER, n) -> SET(i, ACCUMULATED, DRAFTER, n) :: else -> break fi };
     atomic {                                                  /* commit and apply */
       committed = 1; assert(acc[p] == 1); assert(w[p] == 0); w[p]++; acc[p] = 0 };
#ifdef MUT_item_free_first
     atomic { if :: OWNED(i, ACCUMULATED, DRAFTER, n) -> DONE(i) :: else fi };
#endif
#ifdef MUT_blind_free
     atomic { SLAB(k, S_FREE, 0, 0) };
#else
     atomic { if :: SLAB_IS(k, S_ITEM, i, p) -> SLAB(k, S_FREE, 0, 0) :: else fi };
#endif
#ifndef MUT_item_free_first
     atomic { if :: OWNED(i, ACCUMULATED, DRAFTER, n) -> DONE(i) :: else fi };
#endif
     atomic { committed = 0; i = 0; k = 0; p = 0 }
  od
  } unless { die[q]?ok };
  k = 0; i = 0; p = 0
}

inline reap(x) {                                               /* killed and reaped: its device work has stopped */
#ifndef MUT_by_time
  die[x]!0;
#ifndef MUT_fork
  atomic { busy[x] = 0; kslab[x] = 0; kpos[x] = 0; kgen[x] = 0 };
#endif
#endif
  skip
}
inline free_slab(j, i, p) { if :: SLAB_IS(j, S_ITEM, i, p) -> SLAB(j, S_FREE, 0, 0) :: else fi }

/* design 4.4.  The slabs of the dead are marked TARGET(dead) BEFORE their items are queued again: afterwards the word ITEM(i, pos) may
 * be that of the next target's slab for the same item. */
inline recover_target(v, n) {
#ifndef MUT_slab_by_word
  do
  :: atomic { i < NI -> j = 0;
       do
       :: j < NS -> if :: OWNED(i, EXTRACTING, v, n) && SLAB_IS(j, S_ITEM, i, pos[i]) -> SLAB(j, S_TARGET, v, n) :: else fi; j++
       :: else -> break
       od; i++ }
  :: atomic { i >= NI -> i = 0; j = 0; break }
  od;
#endif
  do
  :: atomic { i < NI -> was[i] = NPOS; if :: OWNED(i, EXTRACTING, v, n) -> was[i] = pos[i]; REQUEUE(i) :: else fi; i++ }
  :: atomic { i >= NI -> i = 0; break }
  od;
  do
  :: atomic { j < NS ->
       if
       :: SLAB_IS(j, S_TARGET, v, n) -> SLAB(j, S_FREE, 0, 0)
#ifdef MUT_slab_by_word
       :: sk[j] == S_ITEM && was[sa[j]] == sb[j] -> SLAB(j, S_FREE, 0, 0)
#endif
       :: else
       fi; j++ }
  :: atomic { j >= NS -> j = 0; was[0] = NPOS; was[NI - 1] = NPOS; break }
  od
}
#define BACK(i) (OWNED(i, DRAFTING, DRAFTER, n) || (OWNED(i, ACCUMULATED, DRAFTER, n) && !committed))
#ifdef MUT_stale_ready
#define STALE_TOO true
#else
#define STALE_TOO false
#endif
inline recover_drafter(n) {
  do
  :: atomic { i < NI && BACK(i) && (STALE_TOO || islab[i] == NO_SLAB || CURRENT(i)) ->
       if :: islab[i] == NO_SLAB -> REQUEUE(i) :: else -> SET(i, READY, 0, 0) fi; i++ }
  :: atomic { i < NI && BACK(i) && !STALE_TOO && islab[i] != NO_SLAB && !CURRENT(i) -> j = islab[i]; islab[i] = NO_SLAB };
     atomic { REQUEUE(i) };
     atomic { free_slab(j, i, pos[i]); j = 0; i++ }
  :: atomic { i < NI && OWNED(i, ACCUMULATED, DRAFTER, n) && committed ->
#ifdef MUT_blind_free
       SLAB(islab[i], S_FREE, 0, 0) };
#else
       free_slab(islab[i], i, pos[i]) };
#endif
     atomic { DONE(i); i++ }
  :: atomic { i < NI && !OWNED(i, DRAFTING, DRAFTER, n) && !OWNED(i, ACCUMULATED, DRAFTER, n) -> i++ }
  :: atomic { i >= NI -> i = 0; break }
  od
}
inline spawn_target(v) { atomic { cur[v]++; run target(v, cur[v]) } }

/* slabs ITEM(i, p) whose item has moved on without them (mr_recover_slabs) */
#define ORPHAN(j) (sk[j] == S_ITEM && (pos[sa[j]] != sb[j] || islab[sa[j]] != j || ph[sa[j]] == QUEUED || ph[sa[j]] == FREE))
inline recover_slabs() {
  do
  :: atomic { j < NS && !ORPHAN(j) -> j++ }
  :: atomic { j < NS && ORPHAN(j) -> i = sa[j]; p = sb[j] }; atomic { free_slab(j, i, p); i = 0; p = 0; j++ }
  :: atomic { j >= NS -> j = 0; break }
  od
}
#if KEEPS
#define SWEEP recover_slabs()            /* every recovery ends with it */
#else
#define SWEEP skip
#endif
/* Loss of the arena of device d.  As the supervisor does it: nobody may take a slab there, READY items go back, then the actors of the
 * device are killed (what they publish until then is met by the drafters), and only then may the next keeper register its generation. */
#define GONE(i) (ph[i] == READY && DEV(islab[i]) == d)
inline recover_keeper(d) {
  do
#ifdef MUT_keeper_all
  :: atomic { i < NI && (ph[i] == DRAFTING || ph[i] == ACCUMULATED) && DEV(islab[i]) == d -> j = islab[i]; p = pos[i]; REQUEUE(i) };
     atomic { free_slab(j, i, p); j = 0; p = 0; i++ }
#endif
  :: atomic { i < NI && GONE(i) -> j = islab[i]; p = pos[i]; REQUEUE(i) };
     atomic { free_slab(j, i, p); j = 0; p = 0; i++ }
  :: atomic { i < NI && !GONE(i) -> i++ }
  :: atomic { i >= NI -> i = 0; break }
  od;
#ifdef MUT_register_early
  atomic { gen[d]++; lost[d] = 0 };
#endif
  reap(PROC(d, cur[d]));
  recover_target(d, cur[d]);
  recover_slabs();
#ifndef MUT_register_early
  atomic { gen[d]++; lost[d] = 0 };
#endif
  atomic { do :: j < NS -> if :: DEV(j) == d -> DATA(j, gen[d]) = GARBAGE :: else fi; j++ :: else -> break od; j = 0 };
  spawn_target(d)
}

active proctype supervisor() {
  byte i, j, p, was[NI];
  atomic {
    do :: i < NI -> SET(i, QUEUED, 0, 0); pos[i] = i; islab[i] = NO_SLAB; was[i] = NPOS; i++ :: else -> break od;
    cursor = NI; i = 0;
    do :: i < 2 * NS -> data[i] = GARBAGE; i++ :: else -> break od;
    i = 0;
    do :: i < NT -> run target(i, 0); i++ :: else -> break od;
    run drafter(0); i = 0 };
  do
  :: atomic { kills < KILLS && cursor <= NPOS -> kills++ };
     if
     :: reap(PROC(0, cur[0])); recover_target(0, cur[0]); spawn_target(0)
#if NT > 1
     :: reap(PROC(1, cur[1])); recover_target(1, cur[1]); spawn_target(1)
#endif
#ifdef MUT_spawn_first
     :: reap(PROC(DRAFTER, cur[DRAFTER])); atomic { cur[DRAFTER]++; run drafter(cur[DRAFTER]) }; recover_drafter(cur[DRAFTER] - 1)
#else
     :: reap(PROC(DRAFTER, cur[DRAFTER])); recover_drafter(cur[DRAFTER]); SWEEP; atomic { cur[DRAFTER]++; run drafter(cur[DRAFTER]) }
#endif
     fi
#if KEEPS
  :: atomic { gone -> gone = 0 }; reap(PROC(DRAFTER, cur[DRAFTER])); recover_drafter(cur[DRAFTER]); SWEEP; atomic { cur[DRAFTER]++;
    run drafter(cur[DRAFTER]) }
  :: atomic { keeps < KEEPS -> keeps++; lost[0] = 1 }; recover_keeper(0)
  :: atomic { keeps < KEEPS -> keeps++; lost[1] = 1 }; recover_keeper(1)
#endif
  :: atomic { sweep -> sweep = 0 }; recover_slabs()
  :: timeout -> break
  od;
  atomic {
    do :: i < NPOS -> assert(w[i] == 1); i++ :: else -> break od;
    i = 0; do :: i < NI -> assert(ph[i] == FREE); i++ :: else -> break od;
    i = 0; do :: i < NS -> assert(sk[i] != S_ITEM && (sk[i] == S_FREE || cur[sa[i]] == sb[i])); i++ :: else -> break od }
}
