/* The end of a run: FINISHED and the acknowledgements (design 6.4; mr_step_finish, mr_actor_row.acked).
 *
 * The last step, from its COLLECT on, with one microbatch: target, drafters 0 and 1, supervisor.  Before the commit the arena may be
 * lost (KEEPS), then the microbatch must be extracted once more.  Actors die at any step; a slot that has acknowledged is not started
 * again.
 *
 * Properties: whoever sees the sentinel sees all applied, the last ledger line and the final checkpoint on disk; every slot
 * acknowledges exactly once, and nobody after the end; no invalid end state (nobody waits for ever, the run ends). */
#ifndef KILLS
#define KILLS 2
#endif
#ifndef KEEPS
#define KEEPS 1
#endif
#define D 2
#define SLOTS (D + 1)
#define TARGET D
#define COLLECT 0
#define REDUCE 1
#define COMMITTED 2
#define END 3                            /* COLLECT of the step after the last: no places */
#define HALT 4
#define FINISHED 5
#define QUEUED 0
#define EXTRACTING 1
#define READY 2
#define DONE 3
#define FREE 4

byte ph, e, rm, am;                      /* step word */
byte item, own;                          /* the last microbatch */
bool ledger, ckpt, copying[D];           /* last line, final checkpoint on disk */
bool acked[SLOTS]; byte acks[SLOTS];     /* actor rows; ghost */
bool exited[SLOTS];
byte kills, keeps, tokens;
chan die[SLOTS] = [0] of { bit };

#ifdef MUT_message
#define SENTINEL (tokens > 0)            /* one message a slot, taken before it is acknowledged */
#define SEE tokens--
#else
#define SENTINEL (ph == FINISHED)
#define SEE skip
#endif
#define COMPLETE (am == 3 && ledger && ckpt && item == FREE)
inline acknowledge(me) {
  atomic { SENTINEL -> SEE; assert(COMPLETE) };
  atomic { acks[me]++; assert(acks[me] == 1); acked[me] = 1 };
  exited[me] = 1
}

proctype drafter(byte d) {
  byte we;
end_start:
  {
  do
  :: atomic { ph == COLLECT && item == READY -> item = DONE; own = d }
  :: atomic { ph == COLLECT && item == DONE -> ph = REDUCE; rm = 0 }
  :: atomic { ph == REDUCE && !(rm & (1 << d)) -> we = e };
     atomic { if :: ph == REDUCE && e == we -> rm = rm | (1 << d); if :: rm == 3 -> ph = COMMITTED
#ifdef MUT_at_commit
       ; ph = FINISHED
#endif
       :: else fi :: else fi; we = 0 }
  :: atomic { ph == COMMITTED && !(am & (1 << d)) -> if :: item == DONE && own == d -> item = FREE :: else fi };
     atomic { am = am | (1 << d); if :: am == 3 -> if :: ph = END :: ph = HALT fi :: else fi }
  :: atomic { (ph == END || ph == HALT) && !ckpt && !copying[1 - d] -> copying[d] = 1 };
     atomic { ckpt = 1; copying[d] = 0 }
  :: acknowledge(d); break
  od
  } unless { die[d]?_ };
  we = 0;
end_dead:
  if
  :: die[d]?_; goto end_start
  fi
}

proctype target() {
end_start:
  {
end_idle:
  do
  :: atomic { item == QUEUED -> item = EXTRACTING };
     atomic { assert(item == EXTRACTING); item = READY }
#ifdef MUT_target_leaves
     ; goto end_left                                           /* the input ring is empty and the feeder is done */
#endif
  :: acknowledge(TARGET); break
  od
  } unless { die[TARGET]?_ };
end_dead:
  if
  :: die[TARGET]?_; goto end_start
  fi;
end_left:
  acknowledge(TARGET)
}

inline recover_drafter(v) {
  atomic {
    copying[v] = 0;
    if
    :: ph == COLLECT || ph == REDUCE -> ph = COLLECT; e++; rm = 0; if :: item == DONE && own == v -> item = READY :: else fi
    :: ph == COMMITTED -> if :: item == DONE && own == v -> item = FREE :: else fi
#ifdef MUT_repair_finished
    :: ph == FINISHED -> ph = END
#endif
    :: else
    fi }
}
#ifdef MUT_restart_acked
#define SPAWN(v) die[v]!0; exited[v] = 0
#else
#define SPAWN(v) if :: atomic { acked[v] -> exited[v] = 1 } :: atomic { !acked[v] }; die[v]!0 fi
#endif
#if defined(MUT_no_applied)
#define MAY_FINISH ((ph == COMMITTED || ph == END || ph == HALT) && ledger)
#elif defined(MUT_no_ledger)
#define MAY_FINISH ((ph == END || ph == HALT) && ckpt)
#elif defined(MUT_no_ckpt)
#define MAY_FINISH ((ph == END || ph == HALT) && ledger)
#else
#define MAY_FINISH ((ph == END || ph == HALT) && ledger && ckpt)
#endif

active proctype supervisor() {
  atomic { run drafter(0); run drafter(1); run target() };
  do
  :: atomic { kills < KILLS && !exited[0] -> kills++; die[0]!0 }; recover_drafter(0); SPAWN(0)
  :: atomic { kills < KILLS && !exited[1] -> kills++; die[1]!0 }; recover_drafter(1); SPAWN(1)
  :: atomic { kills < KILLS && !exited[TARGET] -> kills++; die[TARGET]!0 };
     atomic { if :: item == EXTRACTING -> item = QUEUED :: else fi }; SPAWN(TARGET)
  :: atomic { keeps < KEEPS && item == READY -> keeps++; item = QUEUED }
  :: atomic { (ph == COMMITTED || ph == END || ph == HALT) && !ledger -> ledger = 1 }
  :: atomic { MAY_FINISH -> ph = FINISHED; tokens = SLOTS }
  :: atomic { exited[0] && exited[1] && exited[TARGET] -> break }
  od;
  atomic { assert(COMPLETE && ph == FINISHED && acked[0] && acked[1] && acked[TARGET]);
#ifdef MUT_message
           assert(tokens == 0)
#endif
  }
}
