/* The wait primitive: futex on an event count (ipc/wait.h, design R5).
 *
 * One waiter that waits for two things (a ring and a place, say), two wakers that change one of them each, once a round.  A waker may
 * die between its change and its bump; recovery then bumps all.  There is NO deadline in the model: the real one (MR_PARK_MS) covers
 * nothing but a death before recovery has run.
 *
 * Property: no invalid end state: every change is consumed, so nobody sleeps while something is there for him. */
#ifndef ROUNDS
#define ROUNDS 2
#endif
#ifndef KILLS
#define KILLS 1
#endif
byte thing[2], taken;                    /* what may be waited for */
/* event count: count and bit 0 of ONE word; the kernel's sleepers.  The rule uses [0] for both things */
byte seq[2]; bool some[2], asleep[2];
byte kills; bool dead[2];

#ifdef MUT_own_counts
#define EVC(x) (x)                       /* an event count per thing: the waiter can sleep on one only */
#else
#define EVC(x) 0
#endif
inline bump(x) {
  atomic { seq[x]++; b = some[x] };      /* one fetch-and-add: the count moves, bit 0 is read */
  if
  :: atomic { b }; some[x] = 0; atomic { asleep[x] = 0; b = 0 }
  :: atomic { !b }
  fi
}
inline die() { atomic { kills < KILLS -> kills++; dead[x] = 1; dead[x] == 0; b = 0 } }
proctype waker(byte x) {
  byte r; bool b;
  do
  :: atomic { r < ROUNDS };
#ifdef MUT_bump_first
     bump(EVC(x));
     atomic { thing[x]++; r++ }
#else
     atomic { thing[x]++; r++ };
     if
     :: die()                            /* killed before the bump ... */
     :: atomic { seq[EVC(x)]++; b = some[EVC(x)] };
        if
        :: atomic { !b }
        :: atomic { b };
           if
           :: die()
           :: some[EVC(x)] = 0;
              if
              :: die()                   /* ... or before the wake; the next incarnation goes on after recovery */
              :: atomic { asleep[EVC(x)] = 0; b = 0 }
              fi
           fi
        fi
     fi
#endif
  :: atomic { r >= ROUNDS -> break }
  od
}
#ifdef MUT_announce_late
#define SAME(x) (seq[x] == s)
#else
#define SAME(x) (seq[x] == s && some[x])
#endif
active proctype waiter() {
  byte s;
  run waker(0); run waker(1);
  do
  :: atomic { taken == 2 * ROUNDS -> break }
  :: atomic { taken < 2 * ROUNDS };
#ifdef MUT_seq_late
     if
     :: atomic { thing[0] > 0 -> thing[0]--; taken++ }
     :: atomic { thing[1] > 0 -> thing[1]--; taken++ }
     :: atomic { thing[0] == 0 && thing[1] == 0 }; s = seq[0];
#else
     s = seq[0];
     if
     :: atomic { thing[0] > 0 -> thing[0]--; taken++ }
     :: atomic { thing[1] > 0 -> thing[1]--; taken++ }
     :: atomic { thing[0] == 0 && thing[1] == 0 };
#endif
        do                                                     /* park */
        :: atomic { seq[0] != s -> break }
        :: atomic { seq[0] == s };
#ifndef MUT_announce_late
           if
           :: atomic { seq[0] != s -> some[0] = 1; break }      /* the or shows a count that has moved */
           :: atomic { seq[0] == s -> some[0] = 1 };
#endif
           atomic { if :: SAME(0) -> asleep[0] = 1 :: else fi };      /* the kernel compares the word and sleeps in one */
#ifdef MUT_announce_late
           some[0] = 1;
#endif
           !asleep[0]
#ifndef MUT_announce_late
           fi
#endif
        od
     fi;
     s = 0
  od
}
active proctype supervisor() {
  bool b;
end:
  do
#if defined(MUT_no_recovery_bump)
  :: atomic { dead[0] -> dead[0] = 0 }
  :: atomic { dead[1] -> dead[1] = 0 }
#elif defined(MUT_recovery_wakes_lazily)
  :: atomic { dead[0] }; bump(0); dead[0] = 0                  /* only where bit 0 is set: the dead may have cleared it */
  :: atomic { dead[1] }; bump(0); dead[1] = 0
#else
  :: atomic { dead[0] }; seq[0]++; asleep[0] = 0; dead[0] = 0  /* wakes always */
  :: atomic { dead[1] }; seq[0]++; asleep[0] = 0; dead[1] = 0
#endif
  od
}
