#!/usr/bin/env bash
# GPU drafters on a machine with a GPU: builds, runs the tests that need one, measures, and ends with a short table.
# usage: tools/device_drafters.sh [golden,autograd,test,kill,bench,torch,run,demo,demo3,sanitize]     default: all but demo3 and sanitize; about 8 minutes
#   golden    golden sets in bf16                            autograd  3 layers, 4096 tokens: PyTorch's fp32 gradients (tools/torch_dflash_golden.py)
#   test      properties, and short runs                     kill      runs with kills of drafters and of a keeper
#   bench     one step, sustained and short                  torch     the same step in PyTorch (with bench: in the same call)
#   run       8B shape, target and drafter on one GPU, against both one after the other, and how busy the GPU is
#   demo, demo3   one and three epochs of the demo           sanitize  racecheck and initcheck of the kernels' tests
#   OUT=DIR       logs (default /tmp/millrace-drafters)
#   LIMIT=480     seconds for everything; what does not fit any more is left out
#   PREBUILT=DIR  programs built elsewhere: DIR/{bin,test,lib}; when they do not run here, it builds
#   GOLDENS=DIR   further golden sets of drafters (default ./.gdgold, when it is there)
#   DEPS=DIR      packages for machines without them (tools/deps_prefix.sh DIR), default ./.deps
#   SHAPE=DIR     config.json for bench, torch and run (default conf/shapes/qwen3-8b); TOKENS=3072 ANCHORS=512 BLOCK=16 MASK=151669 STEPS=30: theirs
#   MR_KILLS, MR_STEPS, MR_SEED: of the parts that kill
# Every step has its own limit and its own log; a step that fails does not stop the others.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
parts=,${1:-golden,autograd,test,kill,bench,torch,run,demo},
out=${OUT:-/tmp/millrace-drafters} build=${MR_BUILD:-/tmp/millrace-drafters-build} deps=${DEPS:-.deps} goldens=${GOLDENS:-.gdgold}
# shellcheck source=tools/device_lib.sh
. tools/device_lib.sh
known golden autograd test kill bench torch run demo demo3 sanitize
rm -f "$out"/{bench-drafter,bench-drafter-2,torch,rate-8b}.log          # of an earlier call: the end of this one quotes them

targets=(millrace millrace-actor golden_dflash test_cuda_dflash millrace-actor-poison)
has sanitize && targets+=(test_cuda_rows test_cuda_attn)
programs "${targets[@]}"
actor=${MILLRACE_ACTOR:-$bin/millrace-actor}
shape=${SHAPE:-conf/shapes/qwen3-8b} tokens=${TOKENS:-3072} anchors=${ANCHORS:-512} block=${BLOCK:-16}
size=(--tokens "$tokens" --anchors "$anchors" --block "$block")
nvidia-smi --query-gpu=name,memory.used,memory.total,driver_version --format=csv,noheader | tee "$out/nvidia-smi.log"

if has golden; then
  for dir in test/goldens/dflash/* "$goldens"/*; do
    [ -e "$dir/golden.safetensors" ] && step "golden-$(basename "$dir")" 60 "$build/test/golden_dflash" "$dir" cuda:0
  done
fi
if has autograd; then
  set=$(mktemp -d)
  if step autograd-make 120 python3 -u tools/torch_dflash_golden.py "$set"; then
    cat "$out/autograd-make.log"
    step autograd-cuda 60 "$build/test/golden_dflash" "$set" cuda:0
    grep -E "^loss |gradients|FAIL" "$out/autograd-cuda.log"
    step autograd-cpu 60 "$build/test/golden_dflash" "$set"
  fi
  rm -rf "$set"
fi
if has test; then
  step properties 60 "$build/test/test_cuda_dflash"
  for case in one p2p poisoned init nccl; do step "run-$case" 120 python3 test/e2e_gpu_drafters.py "$bin" $case; done
fi
if has kill; then
  for case in kill_one kill_two; do
    MR_KILLS=${MR_KILLS:-25} MR_STEPS=${MR_STEPS:-150} MR_PAUSE=0.05 step "run-$case" 200 python3 test/e2e_gpu_drafters.py "$bin" $case
    grep -h "until reaped" "$out/run-$case.log"          # where the time of the three slowest restarts went
  done
  step run-kill_keeper 120 python3 test/e2e_gpu_drafters.py "$bin" kill_keeper
fi

if has bench; then
  step bench-drafter 120 "$actor" bench-drafter --config "$shape" "${size[@]}"
  cat "$out/bench-drafter.log"
fi
if has torch; then
  step torch 150 python3 -u tools/bench_torch_drafter.py --config "$shape" "${size[@]}" --limit 145
  grep -E "torch|peak|left out" "$out/torch.log"
fi
if has bench; then
  step bench-drafter-2 120 "$actor" bench-drafter --config "$shape" "${size[@]}" --seqs 2
  cat "$out/bench-drafter-2.log"
fi

# Target and drafter on one GPU: microbatches of two sequences of about 3072 tokens, two of them a step.  First each by itself.
if has run; then
  step run-target 90 "$actor" bench-target --config "$shape" --tokens $((2 * tokens)) --mix 3072 --rounds 1 --json
  step run-drafter 90 "$actor" bench-drafter --config "$shape" "${size[@]}" --seqs 2 --rounds 1 --json
  run8b=(conf/demo-gpu-all.json --set "/run/dir=\"$out/8b\"" --set '/run/name="both"' --set "/target/checkpoint=\"random:$(realpath "$shape")?seed=1\""
    --set '/target/layers=[1,9,17,25,33]' --set '/drafter/layers=5' --set "/drafter/block_size=$block" --set "/drafter/anchors=$anchors"
    --set "/drafter/mask_token_id=${MASK:-151669}" --set '/drafter/init_std=0.02' --set "/data/max_tokens=$tokens" --set "/data/buckets=[$tokens]"
    --set "/data/train=\"synthetic:$((5 * ${STEPS:-30}))?min=$((tokens - 12))&max=$tokens&seed=1\"" --set "/data/token_budget=$((2 * tokens))"
    --set "/train/max_steps=${STEPS:-30}" --set '/train/checkpoint_every_steps=0' --set '/queue/slabs_per_device=6' --set '/train/lr=1e-4')
  rm -rf "$out/8b"
  stdbuf -oL nvidia-smi --query-gpu=timestamp,utilization.gpu,power.draw,clocks.sm --format=csv,noheader,nounits -i 0 -lms 100 >"$out/gpu.csv" 2>&1 &
  sampler=$!
  step run-8b 200 "$bin/millrace" run "${run8b[@]}"
  kill $sampler; wait $sampler 2>/dev/null
  step rate-8b 20 python3 tools/e2e_rate.py "$out/8b" --target "$out/run-target.log" --drafter "$out/run-drafter.log" --gpu "$out/gpu.csv"
  cat "$out/rate-8b.log"
  grep -E "memory|gpu " -A1 "$out/run-8b.log" | head -6
  rm -rf "$out/8b/checkpoints"
fi
if has demo; then
  step demo 200 "$bin/millrace" run conf/demo-gpu-all.json --set "/run/dir=\"$out/demo\""
  step demo-eval 120 "$bin/millrace" eval --target demo/target --draft "$out/demo/latest" --data demo/eval.safetensors --device cuda:0 --json
fi
if has demo3; then
  step demo3 300 "$bin/millrace" run conf/demo-gpu-all.json --set "/run/dir=\"$out/demo3\"" --set '/run/name="demo3"' --set '/train/epochs=3' \
    --set '/drafter/layers=3' --set '/drafter/anchors=64' --set '/train/lr=3e-3'
  step demo3-eval 120 "$bin/millrace" eval --target demo/target --draft "$out/demo3/latest" --data demo/eval.safetensors --device cuda:0 --json
fi
# Slow: a tool that meets its limit has found nothing up to there, and is noted so.
sanitize() {
  local name=sanitize-$1-$2 limit=$3
  MR_TEST_SMALL=1 step "$name" "$limit" compute-sanitizer --tool "$1" --error-exitcode 9 "$build/test/test_cuda_$2" && return
  grep -qE "^========= +(ERROR SUMMARY: [1-9]|Error|Uninit|Race|WARN|Invalid|Program hit)" "$out/$name.log" && return
  [ "$(tail -n 1 "$out/$name.rc" 2>/dev/null)" = 124 ] && instead "$name" "FAILED (124)" "at its limit, nothing found so far"
}
if has sanitize; then
  if command -v compute-sanitizer >/dev/null; then
    for test in rows attn dflash; do for tool in racecheck initcheck; do sanitize $tool $test "${SANITIZE_S:-75}"; done; done
  else
    note sanitize "left out: no compute-sanitizer"
  fi
fi

echo
for log in bench-drafter torch bench-drafter-2 rate-8b; do
  [ -e "$out/$log.log" ] && grep -E "sustained|short|peak|busy" "$out/$log.log" | sed "s|^ *|$log: |"
done
finish
