#!/usr/bin/env bash
# GPU drafters on a machine with a GPU: builds, runs the tests that need one, measures, and ends with a short table.
# usage: tools/device_drafters.sh [golden,test,kill,bench,torch,run,demo,demo3]     default: all but demo3; about 7 minutes
#   OUT=DIR       logs (default /tmp/millrace-drafters)
#   LIMIT=480     seconds for everything; what does not fit any more is left out
#   PREBUILT=DIR  programs built elsewhere: DIR/{bin,test,lib}; when they do not run here, it builds
#   GOLDENS=DIR   further golden sets of drafters (default ./.gdgold, when it is there)
#   DEPS=DIR      packages for machines without them (tools/deps_prefix.sh DIR), default ./.deps
#   MR_KILLS, MR_STEPS, MR_SEED: of the parts that kill
# Every step has its own limit and its own log; a step that fails does not stop the others.
set -uo pipefail
cd "$(dirname "$0")/.."
parts=,${1:-golden,test,kill,bench,torch,run,demo},
out=${OUT:-/tmp/millrace-drafters} build=${MR_BUILD:-/tmp/millrace-drafters-build} deps=${DEPS:-.deps} goldens=${GOLDENS:-.gdgold}
mkdir -p "$out"
begun=$SECONDS
export PATH=$PATH:/usr/local/cuda/bin
table=()

has() { [[ $parts == *,$1,* ]]; }
note() { table+=("$(printf '%-30s %s' "$1" "$2")"); printf '== %4ds  %-30s %s\n' $((SECONDS - begun)) "$1" "$2"; }

# step NAME SECONDS COMMAND...: runs, logs, notes passed / skipped / FAILED with the last line said.
step() {
  local name=$1 limit=$2 t0=$SECONDS left=$((${LIMIT:-480} - SECONDS + begun)) rc; shift 2
  [ $left -lt 8 ] && { note "$name" "left out: no time"; return 1; }
  [ "$limit" -gt $left ] && limit=$left
  timeout -k 5 "$limit" "$@" >"$out/$name.log" 2>&1
  rc=$?
  case $rc in
    0) note "$name" "passed, $((SECONDS - t0)) s  $(tail -n 1 "$out/$name.log" | cut -c1-150)" ;;
    77) note "$name" "skipped: $(tail -n 1 "$out/$name.log" | cut -c1-80)" ;;
    *) note "$name" "FAILED ($rc), $((SECONDS - t0)) s"; tail -n 25 "$out/$name.log" ;;
  esac
  return $rc
}

run_here() {                      # programs that were built elsewhere
  export LD_LIBRARY_PATH=$1/lib:/usr/local/cuda/lib64:${LD_LIBRARY_PATH:-}
  "$1/bin/millrace" --version >/dev/null && "$1/bin/millrace-actor" devices >"$out/devices.log"
}
if [ -n "${PREBUILT:-}" ] && run_here "$(realpath "$PREBUILT")"; then
  build=$(realpath "$PREBUILT")
  note prebuilt "$(cut -c1-150 "$out/devices.log")"
else
  args=()
  if [ -d "$deps" ]; then
    mapfile -t args < <(bash tools/deps_prefix.sh --unpack "$deps")
    export PKG_CONFIG_PATH=$PWD/$deps/usr/lib/x86_64-linux-gnu/pkgconfig PKG_CONFIG_SYSROOT_DIR=$PWD/$deps
  elif ! ldconfig -p | grep -q libdnnl; then
    args=(-DMR_GEMM=cblas)
  fi
  nccl=$(python3 -c 'import nvidia.nccl; print(list(nvidia.nccl.__path__)[0])' 2>/dev/null) && args+=("-DMR_NCCL_ROOT=$nccl")
  gen=(); command -v ninja >/dev/null && gen=(-G Ninja)
  step configure 60 cmake -S . -B "$build" "${gen[@]}" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DMR_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES="${ARCH:-90}" \
    -DMR_FAULT_POINTS=ON "${args[@]}" || exit 1
  targets=(millrace millrace-actor golden_dflash test_cuda_dflash millrace-actor-poison)
  step build 300 cmake --build "$build" -j "$(nproc)" --target "${targets[@]}" || exit 1
fi
bin=$build/bin
nvidia-smi --query-gpu=name,memory.used,memory.total,driver_version --format=csv,noheader | tee "$out/nvidia-smi.log"

if has golden; then
  for dir in test/goldens/dflash/* "$goldens"/*; do
    [ -e "$dir/golden.safetensors" ] && step "golden-$(basename "$dir")" 60 "$build/test/golden_dflash" "$dir" cuda:0
  done
fi
if has test; then
  step properties 60 "$build/test/test_cuda_dflash"
  for case in one p2p poisoned init nccl; do step "run-$case" 120 python3 test/e2e_gpu_drafters.py "$bin" $case; done
fi
if has kill; then
  for case in kill_one kill_two; do
    MR_KILLS=${MR_KILLS:-25} MR_STEPS=${MR_STEPS:-150} MR_PAUSE=0.05 step "run-$case" 200 python3 test/e2e_gpu_drafters.py "$bin" $case
  done
  step run-kill_keeper 120 python3 test/e2e_gpu_drafters.py "$bin" kill_keeper
fi

shape=conf/shapes/qwen3-8b
if has bench; then
  step bench-drafter 120 "$bin/millrace-actor" bench-drafter --config $shape
  step bench-drafter-2 120 "$bin/millrace-actor" bench-drafter --config $shape --seqs 2
  cat "$out/bench-drafter.log" "$out/bench-drafter-2.log"
fi
has torch && step torch 200 python3 tools/bench_torch_drafter.py --config $shape

# Target and drafter on one GPU: microbatches of two sequences of about 3072 tokens, two of them a step.
if has run; then
  step bench-target 120 "$bin/millrace-actor" bench-target --config $shape --tokens 6144 --runs 10
  cat "$out/bench-target.log"
  step run-8b 240 "$bin/millrace" run conf/demo-gpu-all.json --set "/run/dir=\"$out/8b\"" --set "/target/checkpoint=\"random:$PWD/$shape?seed=1\"" \
    --set '/target/layers=[1,9,17,25,33]' --set '/drafter/layers=5' --set '/drafter/block_size=16' --set '/drafter/anchors=512' \
    --set '/drafter/mask_token_id=151669' --set '/drafter/init_std=0.02' --set '/data/train="synthetic:150?min=3060&max=3072&seed=1"' \
    --set '/data/max_tokens=3072' --set '/data/buckets=[3072]' --set '/data/token_budget=6144' --set '/train/max_steps=30' \
    --set '/train/checkpoint_every_steps=0' --set '/queue/slabs_per_device=6' --set '/train/lr=1e-4'
  step rate-8b 20 python3 tools/e2e_rate.py "$out/8b"
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

echo
printf '%s\n' "${table[@]}"
printf '%s\n' "${table[@]}" | grep -q FAILED && { echo "FAILED"; exit 1; }
echo "all passed in $((SECONDS - begun)) s"
