#!/usr/bin/env bash
# Shows that step_kill and step_wait can fail: breaks recovery or an operation in a copy of the sources, one "must" of the protocol at a
# time, and runs the program on it.  Each broken copy must be found out.     usage: step_broken.sh [compiler [name]]
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
prog=step_kill cc=${1:-cc} only=${2:-} work=$(mktemp -d /tmp/step-broken-XXXXXX)
trap 'rm -rf "$work"' EXIT
missed=0

# name | operations to run | file | python expression on the text `s`
broken() {
  local name=$1 ops=$2 file=$3 edit=$4 out rc=0
  [ -z "$only" ] || [ "$only" = "$name" ] || return 0
  rm -rf "$work/src"; mkdir -p "$work/src"
  cp -r "$root/ipc" "$root/base" "$work/src/"; mkdir -p "$work/src/test"; cp -r "$root/test/stress" "$work/src/test/"; cp "$root"/test/*.h "$work/src/test/"
  python3 - "$work/src/$file" "$edit" <<'PY'
import sys
path, edit = sys.argv[1:]
s = open(path).read()
t = eval(edit, {"s": s})
assert t != s, "this edit changes nothing: " + edit
open(path, "w").write(t)
PY
  $cc -std=gnu17 -w -O2 -D_GNU_SOURCE -DMR_VERSION='"0"' -I"$work/src" "$work/src/test/stress/$prog.c" "$work"/src/ipc/*.c "$work"/src/base/*.c \
      -o "$work/$prog" -lcmocka -lpthread -lm
  if [ $prog = step_kill ]; then set -- --first "$ops"; else set --; fi
  out=$("$work/$prog" "$@" 2>&1) || rc=$?
  if [ $rc -gt 0 ] && grep -qE "killed after|lost at|is not" <<<"$out"; then
    printf 'found   %-28s %s\n' "$name" "$(grep -m1 -E 'killed after|lost at|is not' <<<"$out" | sed 's/^ *//' || true)"
  else
    printf 'MISSED  %-28s exit code %d\n' "$name" $rc
    missed=1
  fi
}

broken no-sweep          "item queue"       ipc/recover.c 's.replace("n += !mr_ring_push(s, ring, idx, word[idx]);", "(void)ring;")'
broken slab-before-item  "exact slabs"      ipc/recover.c 's.replace("    mark_slabs(s, slot, inc);\n", "    mark_slabs(s, slot, inc);\n    for (unsigned i = 0; i < s->hdr->n_slabs; i++)\n        mr_slab_give(s, i, slot, inc);\n")'
broken slabs-not-marked  "slab assign"      ipc/recover.c 's.replace("    mark_slabs(s, slot, inc);\n", "    (void)mark_slabs;\n")'
broken joined-kept       "item accumulated" ipc/recover.c 's.replace("mr_st(&s->actors[slot].joined, 0);", ";")'
broken places-kept       "place done"       ipc/recover.c 's.replace("r->places += (unsigned)mr_cas(", "if (0) r->places += (unsigned)mr_cas(")'
broken commit-ignored    "item free"        ipc/recover.c 's.replace("if (mr_sw_phase(w) == MR_COMMITTED) ", "if (0) ")'
broken at-the-cursor     "item fill"        ipc/recover.c 's.replace("mr_w_pos(w) < cursor", "mr_w_pos(w) <= cursor")'
broken checkpoint-kept   "checkpoint claim" ipc/recover.c 's.replace("    mr_ckpt_recover(s, slot, inc);\n", "")'
broken no-orphan-sweep   "turn: drafter, hidden" ipc/recover.c 's.replace("    mr_recover_slabs(s);\n    for", "    for")'
broken requeue-keeps-slab "item requeue"    ipc/item.c    's.replace("    s->items[idx].slab = MR_NO_SLAB;\n", "")'
broken no-repair-end     "step join"        ipc/recover.c 's.replace("    mr_step_repair_end(s); ", "    ; ")'
broken no-tail-help      "item queue"       ipc/ring.c    's.replace("            mr_cas(&r->tail, t, t + 1);        /* help */\n", "")'
broken no-zero-at-boot   "turn: drafter, accumulate" test/test_ipc_run.h 's.replace("    drafter_zero(m, rank);\n    MR_POINT(\"test.drafter.boot_zeroed\");", "")'
broken ready-before-slab "turn: target, publish" test/test_ipc_run.h 's.replace("        MINI_BAD(m, mr_slab_assign(s, l->slab, slot, inc, l->idx, pos));\n        MINI_BAD(m, mr_item_ready(s, l->idx, &l->word));", "        s->items[l->idx].slab = l->slab;\n        s->items[l->idx].arena = 0;\n        s->items[l->idx].generation = mr_ld(&s->arenas[0].generation);\n        s->items[l->idx].offset = s->slabs[l->slab].offset;\n        MINI_BAD(m, mr_item_ready(s, l->idx, &l->word));\n        MINI_BAD(m, mr_slab_assign(s, l->slab, slot, inc, l->idx, pos));")'
broken free-after-applied "turn: drafter, last apply" test/test_ipc_run.h 's.replace("    rig_free_own(&m->r, slot, mini_inc(m, slot));\n    MINI_BAD(m, mr_step_applied(&m->r.s, rank, w) < 0);", "    MINI_BAD(m, mr_step_applied(&m->r.s, rank, w) < 0);\n    rig_free_own(&m->r, slot, mini_inc(m, slot));")'
broken cursor-late       "turn: feeder"     test/test_ipc_run.h 's.replace("    mr_st(&s->hdr->cursor, (uint64_t)pos + 1);\n    MR_POINT(\"test.feeder.cursor\");\n    MINI_BAD(m, mr_item_queue(s, (unsigned)idx, &w));", "    MINI_BAD(m, mr_item_queue(s, (unsigned)idx, &w));\n    mr_st(&s->hdr->cursor, (uint64_t)pos + 1);")'
prog=step_wait
broken bump-without-wake  -                 ipc/wait.c    's.replace("    MR_POINT(\"ipc.evc.cleared\");\n    wake_all(e);", "")'
broken sleep-on-old-count -                 ipc/wait.c    's.replace("& ~(uint32_t)SLEEPERS) != seq)\n            continue;", "& ~(uint32_t)SLEEPERS) != seq)\n            seq = mr_evc_read(e);")'
broken wake-bit-missed    -                 ipc/wait.c    's.replace("if (!(mr_add(&e->seq, 2) & SLEEPERS))", "uint32_t old = mr_ld(&e->seq);\n\n    mr_add(&e->seq, 2);\n    if (!(old & SLEEPERS))")'
exit $missed
