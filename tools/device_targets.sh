#!/usr/bin/env bash
# GPU targets on a machine with a GPU: builds, runs the tests that need one, measures, and ends with a short table.
# usage: tools/device_targets.sh [--quick | --demo | --bench] [OUT_DIR]     about 9 minutes
#   --quick leaves the comparison with PyTorch and the sanitizers out; --demo trains one epoch of conf/demo-gpu.json instead, and evaluates it;
#   --bench only measures: the forward pass, sustained and short, then the same in PyTorch (about 4 minutes)
#   PREBUILT=DIR  programs built elsewhere: DIR/{bin,test,lib}; when they do not run here, it builds
#   SHAPE=DIR, TOKENS=16384: of the measurements (default conf/shapes/qwen3-8b)
# Packages that are missing are taken from ./.deps (tools/deps_prefix.sh .deps, where there is a network).  Every step has its own limit and its
# own log in OUT_DIR (default /tmp/millrace-device); a step that fails does not stop the others.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
quick=0 demo=0 bench=0
[ "${1:-}" = --quick ] && { quick=1; shift; }
[ "${1:-}" = --demo ] && { demo=1; shift; }
[ "${1:-}" = --bench ] && { bench=1; shift; }
parts="" out=${1:-/tmp/millrace-device} build=${MR_BUILD:-/tmp/millrace-build} deps=.deps LIMIT=${LIMIT:-530}
# shellcheck source=tools/device_lib.sh
. tools/device_lib.sh
rm -f "$out"/bench-*.log

targets=(millrace millrace-actor millrace-bench)
[ $bench = 1 ] || targets+=(golden_target gpu_consumer test_cuda_ipc test_cuda_rows test_cuda_products test_cuda_attn)
programs "${targets[@]}"

# The forward pass here, in PyTorch, and here again.
shape=${SHAPE:-conf/shapes/qwen3-8b}
measure() {
  local depth
  step bench-target 150 "$bin/millrace-bench" target --config "$shape" --tokens "${TOKENS:-16384}"; cat "$out/bench-target.log"
  [ $quick = 1 ] && return
  depth=$(sed -n 's/.*layers 0\.\.\([0-9]*\) of.*/\1/p' "$out/bench-target.log")
  step bench-hf 160 python3 -u tools/bench_hf_target.py "$shape" --layers $((${depth:-33} + 1)) --tokens "${TOKENS:-16384}" --cudnn --limit 150
  cat "$out/bench-hf.log"
  step bench-again 60 "$bin/millrace-bench" target --config "$shape" --tokens "${TOKENS:-16384}" --mix 2048; tail -n 2 "$out/bench-again.log"
}

# ---- what is here ------------------------------------------------------------------------------------------------------------------------
nvidia-smi --query-gpu=name,memory.used,memory.total,driver_version --format=csv,noheader | tee "$out/nvidia-smi.log"
used() { nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits | head -n 1; }
used_before=$(used)
step doctor 60 "$bin/millrace" doctor; cat "$out/doctor.log"
step check 60 "$bin/millrace" check conf/demo-gpu.json; grep -E "gpu|slabs of" "$out/check.log"

if [ $demo = 1 ]; then
  # seconds count, so each cpu drafter gets a share of the cores
  step demo-gpu 450 "$bin/millrace" run conf/demo-gpu.json --set "/run/dir=\"$out/demo\"" --set "/actors/2/threads=$(($(nproc) / 4 + 1))"
  tail -n 3 "$out/demo-gpu.log"
  step demo-eval 120 "$bin/millrace" eval --target demo/target --draft "$out/demo/latest" --data demo/eval.safetensors --json
  cat "$out/demo-eval.log"; cp "$out/demo/summary.json" "$out/"
  finish
  exit
fi

if [ $bench = 1 ]; then
  measure
  finish
  exit
fi

# ---- right ---------------------------------------------------------------------------------------------------------------------------------
for set in qwen3 llama3; do
  step "golden-$set" 60 "$build/test/golden_target" test/goldens/targets/$set --device cuda:0
  grep -E "FAIL|compared" "$out/golden-$set.log" | tail -n 12
done
for t in rows products attn; do step "kernels-$t" 90 "$build/test/test_cuda_$t"; done
step cuda-ipc 120 "$build/test/test_cuda_ipc"
step e2e-mixed 120 python3 test/e2e_gpu.py "$bin" mixed
step e2e-two-targets 90 python3 test/e2e_gpu.py "$bin" two_targets
MR_KILLS=25 MR_STEPS=120 step e2e-kill-targets 200 python3 test/e2e_gpu.py "$bin" kill_targets
tail -n 2 "$out/e2e-kill-targets.log"
step e2e-kill-keeper 120 python3 test/e2e_gpu.py "$bin" kill_keeper

# ---- fast ----------------------------------------------------------------------------------------------------------------------------------
measure

# Slabs of 2 GiB (51200 tokens x 5 layers x 4096 x 2 bytes) of a model that is wide and cheap: 1000 microbatches in a minute.
mkdir -p "$out/wide"
sed 's/"intermediate_size": [0-9]*/"intermediate_size": 256/; s/"num_hidden_layers": [0-9]*/"num_hidden_layers": 6/; s/"vocab_size": [0-9]*/"vocab_size": 4096/' \
  "$shape/config.json" >"$out/wide/config.json"
wide=(--set "/target/checkpoint=\"random:$out/wide?seed=1\"" --set '/target/layers=[0,1,2,3,4]' --set '/data/max_tokens=2048'
  --set '/data/token_budget=51200' --set '/data/buckets=[2048]' --set '/actors/1/count=1' --set '/queue/slabs_per_device=4'
  --set '/drafter/intermediate_size=256')
step consumer-2gib 150 "$build/test/gpu_consumer" --actor "$bin/millrace-actor" --topology test/gpu_consumer.json --items 1000 --rss 1536 \
  "${wide[@]}" --set '/data/train="synthetic:28000?min=1900&max=2048&seed=1"'
tail -n 4 "$out/consumer-2gib.log"

# The 8B shape: weights mapped, not loaded, by every new incarnation; two targets, so that the other one goes on.
big=(--set "/target/checkpoint=\"random:$PWD/$shape?seed=1\"" --set '/target/layers=[1,9,17,25,33]' --set '/data/max_tokens=2048'
  --set '/data/token_budget=4096' --set '/data/buckets=[2048]' --set '/actors/1/count=1' --set '/queue/slabs_per_device=6'
  --set '/drafter/intermediate_size=512')
step consumer-kills 120 "$build/test/gpu_consumer" --actor "$bin/millrace-actor" --topology test/gpu_consumer.json --items 250 --kills 10 \
  "${big[@]}" --set '/data/train="synthetic:600?min=1900&max=2048&seed=1"'
grep -E "context|first micro" "$out/consumer-kills.log" | tail -n 4; tail -n 4 "$out/consumer-kills.log"
sleep 1
note "memory used (MiB), before and after" "$used_before -> $(used)"

if [ $quick = 0 ] && command -v compute-sanitizer >/dev/null; then
  for tool in memcheck racecheck initcheck; do
    step "sanitizer-$tool" "$(left)" compute-sanitizer --tool $tool --error-exitcode 9 "$build/test/golden_target" test/goldens/targets/qwen3 --device cuda:0
    tail -n 1 "$out/sanitizer-$tool.log"
  done
fi

# ---- table ---------------------------------------------------------------------------------------------------------------------------------
echo
grep -hE "2048 each|3072 each|ragged" "$out/bench-target.log"
grep -hE "tokens_per_s" "$out/bench-hf.log" 2>/dev/null
grep -hE "SIGKILLs|resident" "$out"/consumer-*.log
finish
