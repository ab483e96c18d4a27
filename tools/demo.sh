#!/usr/bin/env bash
# The main job on the CPU backend: installs, builds, trains one epoch on the demo data with 2 targets and 2 drafters, and evaluates the
# drafter on rows it has not seen.  usage: tools/demo.sh [--set /pointer=value]...   (passed on to `millrace run`)
set -euo pipefail
cd "$(dirname "$0")/.."
./tools/setup.sh build
cmake --preset release -DMR_CUDA=OFF >build-demo.log 2>&1 || { cat build-demo.log; exit 1; }
cmake --build --preset release >>build-demo.log 2>&1 || { tail -n 40 build-demo.log; exit 1; }
rm -f build-demo.log
bin=build/release/bin
run=runs/demo-$(date +%Y%m%d-%H%M%S)

"$bin/millrace" run conf/demo.json --set "/run/dir=\"$run\"" "$@"
python3 tools/ledger_check.py "$run"
"$bin/millrace" eval --target demo/target --draft "$run/latest" --data demo/eval.safetensors
echo "the drafter is in $run/latest; export it with: $bin/millrace export $run/latest DIR"
