#!/usr/bin/env bash
# Builds and runs all tests.  usage: tools/test.sh [--quick]
#   --quick: only the dev build and its tests (no sanitizers, no valgrind)
# Stages: layout rules, dev build (with the cuda side where nvcc is), its tests, asan, tsan, valgrind.  The last line counts them.
set -euo pipefail
cd "$(dirname "$0")/.."
quick=0
for a in "$@"; do
  case $a in
    --quick) quick=1 ;;
    *) echo "usage: tools/test.sh [--quick]" >&2; exit 2 ;;
  esac
done
export MR_CI=${CI:-}
if [ -d /usr/local/cuda/bin ] && ! command -v nvcc >/dev/null; then
  PATH=$PATH:/usr/local/cuda/bin
fi
./tools/setup.sh test
bash test/tidy.sh

build() {        # preset, extra cmake arguments
  local preset=$1 log; shift
  log=$(mktemp)
  echo "== build $preset"
  if ! { cmake --preset "$preset" "$@" && cmake --build --preset "$preset"; } >"$log" 2>&1; then
    tail -n 60 "$log"; rm -f "$log"; exit 1
  fi
  grep -E 'warning:' "$log" | head -n 20 || true
  rm -f "$log"
}
stages=0
run_tests() {    # preset, extra ctest arguments
  local preset=$1; shift
  echo "== test $preset"
  # Two at a time; tests with processes of their own run alone all the same.  On a CI machine one that fails is tried once more, and
  # both tries are in the log: deadlines of whole runs are the machine's, too.
  ctest --preset "$preset" -j 2 ${MR_CI:+--repeat until-pass:2} "$@"
  stages=$((stages + 1))
}

build dev
run_tests dev
if [ $quick = 0 ]; then
  build asan
  run_tests asan -LE once
  build tsan
  run_tests tsan -L unit
  echo "== valgrind ipc"
  for t in build/dev/test/test_ipc_*; do
    [ -x "$t" ] && [ ! -d "$t" ] || continue
    case $t in *_instr) continue ;; esac             # it single-steps its children, which valgrind does too
    MR_TEST_QUICK=1 valgrind -q --error-exitcode=9 --leak-check=full --errors-for-leak-kinds=definite "$t" >/tmp/mr-vg.$$ 2>&1 ||
      { cat /tmp/mr-vg.$$; rm -f /tmp/mr-vg.$$; echo "valgrind: $t failed"; exit 1; }
    rm -f /tmp/mr-vg.$$
  done
  stages=$((stages + 1))
fi
left=$(ls /dev/shm 2>/dev/null | grep '^millrace-test' || true)
[ -z "$left" ] || { echo "tests left in /dev/shm: $left"; exit 1; }
echo "$stages passed, 0 failed"
