#!/bin/sh
# Builds the cuda backend on a machine with a GPU, runs its tests and its bench, and prints a short table last.
# usage: tools/device_cuda.sh [tests|bench|sanitize|all] [BENCH_NAME]      from the project's root; default all = tests, then bench
#   OUT=DIR      full logs go there (default: the build folder)
#   ARCH=90      compute capability to build for
#   .deps/       libraries unpacked beside the sources are used when they are there (jansson, liburing, cmocka, libmicrohttpd)
# `sanitize` runs the small tests under compute-sanitizer: memcheck, racecheck, initcheck.
set -u
what=${1:-all}
arch=${ARCH:-90}
build=build/device
out=${OUT:-$build}
here=$(pwd)
case $what in tests|bench|sanitize|all) ;; *) echo "$0: there is no part '$what' (allowed: tests bench sanitize all)" >&2; exit 2 ;; esac
[ -f kernels/kernels.h ] || { echo "run it from the project's root" >&2; exit 2; }
PATH=$PATH:/usr/local/cuda/bin
if [ -d .deps ]; then
    lib=$here/.deps/usr/lib/x86_64-linux-gnu
    export PKG_CONFIG_PATH="$lib/pkgconfig" PKG_CONFIG_SYSROOT_DIR="$here/.deps" CMAKE_PREFIX_PATH="$here/.deps/usr"
    export LD_LIBRARY_PATH="$lib:${LD_LIBRARY_PATH:-}"
fi
mkdir -p "$build" "$out"
nvidia-smi --query-gpu=name,driver_version,clocks.sm --format=csv,noheader 2>/dev/null

cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DMR_CUDA=ON -DMR_GEMM=cblas -DCMAKE_CUDA_ARCHITECTURES="$arch" \
    >"$out/cmake.log" 2>&1 || { tail -20 "$out/cmake.log"; exit 1; }
tests="test_cuda_rows test_cuda_products test_cuda_attn"
ninja -C "$build" $tests millrace-bench >"$out/ninja.log" 2>&1 || { grep -E "error|FAILED" "$out/ninja.log" | head -30; exit 1; }

failed=0
summary="$out/summary.txt"
: >"$summary"
run_tests() {                     # $1 = name in the table, rest = command in front of the program
    label=$1
    shift
    for t in $tests; do
        start=$(date +%s)
        timeout 200 "$@" "$build/test/$t" >"$out/$t.$label.log" 2>&1
        rc=$?
        [ $rc -eq 0 ] || { failed=1; grep -aE "ERROR|error|=========" "$out/$t.$label.log" | head -12; }
        printf '%-22s %-12s %s  %ds\n' "$t" "$label" "$([ $rc -eq 0 ] && echo ok || echo "FAILED rc=$rc")" $(($(date +%s) - start)) >>"$summary"
    done
}

case $what in
tests | all)
    export MR_TEST_VERBOSE=1
    run_tests plain env
    ;;
sanitize)
    export MR_TEST_SMALL=1
    run_tests memcheck compute-sanitizer --tool memcheck --error-exitcode 9
    run_tests racecheck compute-sanitizer --tool racecheck --error-exitcode 9
    run_tests initcheck compute-sanitizer --tool initcheck --error-exitcode 9
    ;;
esac
case $what in
bench | all)
    timeout 240 "$build/bin/millrace-bench" cuda ${2:+"$2"} >"$out/bench.txt" 2>&1 || { failed=1; echo "bench FAILED" >>"$summary"; }
    cat "$out/bench.txt"
    python3 -c "import torch" 2>/dev/null && timeout 60 python3 tools/torch_products.py 2>&1 | tee "$out/torch_products.txt"
    ;;
esac
echo
# The worst errors that the tests saw, per operation: measured / allowed.
cat "$out"/test_cuda_*.plain.log 2>/dev/null | awk '/ rms .* max /{sub(/^ +/, ""); i = index($0, " rms "); k = substr($0, 1, i); sub(/ +$/, "", k)
    split(substr($0, i), f, " "); if (f[2] + 0 > r[k]) r[k] = f[2] + 0; if (f[5] + 0 > m[k]) m[k] = f[5] + 0; a[k] = f[3] " " f[6]}
    END{for (k in r) if (r[k] > 0) printf "%-24s rms %.1e max %.1e  allowed %s\n", k, r[k], m[k], a[k]}' | sort >"$out/errors.txt"
grep -E "attn|linear|ce" "$out/errors.txt"
cat "$summary"
exit $failed
