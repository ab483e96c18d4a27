#!/usr/bin/env bash
# Checkpoints on a machine with a GPU: the same files with and without io_uring; at the 8B shape, how long one takes and what it costs the steps, and
# how long a start and a resume take.  About 4 minutes, and 50 GB under OUT.
# usage: tools/device_checkpoints.sh [test,run,resume]      default: all
#   OUT=DIR (default /tmp/millrace-checkpoints), LIMIT, PREBUILT, DEPS: as tools/device_drafters.sh      STEPS=30 EVERY=10 SHAPE=conf/shapes/qwen3-8b
set -uo pipefail
cd "$(dirname "$0")/.." || exit
parts=,${1:-test,run,resume},
out=${OUT:-/tmp/millrace-checkpoints} build=${MR_BUILD:-/tmp/millrace-drafters-build} deps=${DEPS:-.deps}
# shellcheck source=tools/device_lib.sh
. tools/device_lib.sh
known test run resume

programs millrace millrace-actor
df -h "$out" | tail -1
has test && step files 120 python3 test/e2e_checkpoints.py "$bin" no_uring
steps=${STEPS:-30}
run8b=(conf/demo-gpu-all.json --set "/run/dir=\"$out/8b\"" --set '/run/name="checkpoints"'
  --set "/target/checkpoint=\"random:$(realpath "${SHAPE:-conf/shapes/qwen3-8b}")?seed=1\"" --set '/target/layers=[1,9,17,25,33]' --set '/drafter/layers=5'
  --set '/drafter/block_size=16' --set '/drafter/anchors=512' --set '/drafter/mask_token_id=151669' --set '/drafter/init_std=0.02'
  --set '/data/max_tokens=3072' --set '/data/buckets=[3072]' --set "/data/train=\"synthetic:$((5 * steps + 60))?min=3060&max=3072&seed=1\""
  --set '/data/token_budget=6144' --set '/train/keep_checkpoints=1' --set "/train/checkpoint_every_steps=${EVERY:-10}"
  --set '/queue/slabs_per_device=6' --set '/train/lr=1e-4')
if has run; then
  rm -rf "$out/8b"
  step run-8b 200 "$bin/millrace" run "${run8b[@]}" --set "/train/max_steps=$steps"
  grep -hE "refused here|checkpoint [0-9]+:|joined " "$out/run-8b.log" | cut -c1-200
  step cost 20 python3 tools/checkpoint_cost.py "$out/8b" && cat "$out/cost.log"
fi
if has run && has resume; then
  step resume-8b 150 "$bin/millrace" run "${run8b[@]}" --set "/train/max_steps=$((steps + 4))" --resume
  grep -hE "joined " "$out/resume-8b.log" | cut -c1-200
fi
rm -rf "$out/8b/checkpoints"
finish
