/* The wait primitive: futex on an event count (ipc/wait.h, design R5).
 *
 * One waiter that waits for two things (a ring and a place, say), two wakers that change one of them each, once a round.  A waker may die between
 * its change and its bump; recovery then bumps all.  There is NO deadline in the model: the real one (MR_PARK_MS) covers nothing but a
 * death before recovery has run.
 *
 * Property: no invalid end state: every change is consumed, so nobody sleeps while something is there for him. */
#ifndef ROUNDS
#define ROUNDS 2
#endif
#ifndef KILLS
#define KILLS 1
#endif
byte thing[2], taken;                    /* what may be waited for */
byte seq[2], waiters[2]; bool asleep[2]; /* event counts; the rule uses [0] for both things */
byte kills; bool dead[2];

#ifdef MUT_own_counts
#define EVC(x) (x)                       /* an event count per thing: the waiter can sleep on one only */
#else
#define EVC(x) 0
#endif
inline bump(x) {
  atomic { seq[x]++ };
  if                                     /* a system call only when somebody sleeps */
  :: atomic { waiters[x] > 0 -> asleep[x] = 0 }
  :: atomic { waiters[x] == 0 }
  fi
}
proctype waker(byte x) {
  byte r;
  do
  :: atomic { r < ROUNDS };
#ifdef MUT_bump_first
     bump(EVC(x));
     atomic { thing[x]++; r++ }
#else
     atomic { thing[x]++; r++ };
     if
     :: atomic { kills < KILLS -> kills++; dead[x] = 1; dead[x] == 0 }      /* killed here; the next incarnation goes on */
     :: true; bump(EVC(x))
     fi
#endif
  :: atomic { r >= ROUNDS -> break }
  od
}
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
#ifdef MUT_waiters_late
        atomic { if :: seq[0] == s -> asleep[0] = 1 :: else fi };
        waiters[0]++;
#else
        waiters[0]++;
        atomic { if :: seq[0] == s -> asleep[0] = 1 :: else fi };         /* the kernel compares and sleeps in one */
#endif
        atomic { !asleep[0] };
        waiters[0]--
     fi;
     s = 0
  od
}
active proctype supervisor() {
end:
  do
#ifdef MUT_no_recovery_bump
  :: atomic { dead[0] -> dead[0] = 0 }
  :: atomic { dead[1] -> dead[1] = 0 }
#else
  :: atomic { dead[0] }; bump(0); dead[0] = 0
  :: atomic { dead[1] }; bump(0); dead[1] = 0
#endif
  od
}
