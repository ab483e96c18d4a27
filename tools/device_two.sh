#!/usr/bin/env bash
# Runs over two GPUs: builds, tests, measures, and ends with a table of one line per figure, with its goal.
# usage: tools/device_two.sh [build,test,pair,apart,grads,points,hung,kills,rate]     default: all; about 8 minutes
#   build  also when programs are there already           test   memory of one process mapped by others, on both GPUs
#   pair   the link between the GPUs                      apart  target on one, drafter on the other
#   grads  gradients of two GPUs against those of one     points, hung  deaths and stops inside and beside the all-reduce
#   kills  SIGKILLs of targets, drafters and keepers      rate   8B shape: each stage alone, apart, one GPU, two GPUs; deaths
#   OUT=DIR       logs (default /tmp/millrace-two)
#   LIMIT=520     seconds for everything; what does not fit any more is left out
#   PREBUILT=DIR  programs built elsewhere: DIR/{bin,test,lib}; when they do not run here, it builds
#   DEPS=DIR      packages for machines without them (tools/deps_prefix.sh DIR), default ./.deps
#   FAKE=FILE     millrace-actor-fake: tries the script out without a GPU, with the demo's shape
#   MR_KILLS, MR_STEPS, MR_SEED: of kills
# Every step has its own limit and its own log; a step that fails does not stop the others.  The environment is left to the actors as it is
# (NCCL_* of the machine).
set -uo pipefail
cd "$(dirname "$0")/.." || exit
parts=,${1:-build,test,pair,apart,grads,points,hung,kills,rate},
out=${OUT:-/tmp/millrace-two} build=${MR_BUILD:-/tmp/millrace-two-build} deps=${DEPS:-.deps} LIMIT=${LIMIT:-520}
# shellcheck source=tools/device_lib.sh
. tools/device_lib.sh
known build test pair apart grads points hung kills rate
rm -f "$out"/*.log                # of an earlier call: the tables are made of them

fake=()
if [ -n "${FAKE:-}" ]; then
  export MILLRACE_ACTOR=$FAKE FAKE_CUDA_DEVICES=2
  fake=("$FAKE")
fi
bin=$build/bin
if has build || [ -n "${PREBUILT:-}" ] || [ ! -x "$bin/millrace" ]; then programs millrace millrace-actor millrace-bench test_cuda_ipc; fi
if command -v nvidia-smi >/dev/null; then
  nvidia-smi --query-gpu=name,memory.used,memory.total,driver_version --format=csv,noheader | tee "$out/nvidia-smi.log"
  nvidia-smi topo -m 2>/dev/null | head -n 4
fi
env | grep -E '^NCCL_' | sort

two() { step "two-$1" "${2:-120}" python3 test/e2e_two_gpus.py "$bin" "$1" "${fake[@]}"; }

# Each side by itself is in order; both at once, as neither needs much of a GPU.  What measures runs alone.
p2p_side() {
  has apart && two apart
  has grads && two grads_p2p
  has points && two points_p2p
  has hung && two hung_p2p
}
nccl_side() {
  has grads && { two grads_nccl; two grads_bf16; }
  has points && two points_nccl
  has hung && two hung_nccl
}

has test && step cuda-ipc 60 "$build/test/test_cuda_ipc"
if has pair; then
  step pair 100 "$bin/millrace-bench" pair
  cat "$out/pair.log"
fi
p2p_side & one=$!
nccl_side & wait $! $one
if has kills; then
  two kills_p2p 150
  two kills_nccl 150
fi
if has rate; then
  shape=(--config conf/shapes/qwen3-8b)
  [ -n "${FAKE:-}" ] && shape=(--demo)
  for part in alone apart one p2p nccl; do
    step "rate-$part" 110 python3 -u tools/rate_two_gpus.py "$bin" "$out/rate" $part "${shape[@]}"
  done
  step rate-table 10 python3 tools/rate_two_gpus.py "$bin" "$out/rate" table
fi

echo
figures
finish
