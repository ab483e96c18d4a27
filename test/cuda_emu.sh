#!/bin/sh
# The tests of the cuda kernels on the emulated device (test/emu): the kernels compiled as C++, run by fibers, checked against the cpu
# backend.  Needs a C++ compiler and x86-64, no CUDA.  Both ways in which an asynchronous copy may land are tried: at the wait (a missing
# wait shows) and at once (a missing barrier shows); and a device whose shared memory holds one stage only.
# usage: cuda_emu.sh BUILD_DIR        exit 77: cannot run here
set -eu
src=$(cd "$(dirname "$0")/.." && pwd)
build=${1:?usage: cuda_emu.sh BUILD_DIR}
cxx=${CXX:-g++}
command -v "$cxx" >/dev/null || { echo "skipped: no C++ compiler"; exit 77; }
[ "$(uname -m)" = x86_64 ] || { echo "skipped: fibers are written for x86-64"; exit 77; }

tmp=$(mktemp -d /tmp/millrace-emu-XXXXXX)
trap 'rm -rf "$tmp"' EXIT
flags="-std=c++17 -O1 -g -Wno-unknown-pragmas -DMR_CUDA_EMULATED -D_GNU_SOURCE -I$src/test/emu -I$src"
for name in context elementwise norm rope optim ce plan attn_fwd attn_bwd; do   # emu.cc has loops in the place of cuBLAS
    $cxx $flags -x c++ -c "$src/kernels/cuda/$name.cu" -o "$tmp/$name.o"
done
$cxx $flags -c "$src/test/emu/emu.cc" -o "$tmp/emu.o"
libs="$build/kernels/libmr_kernels.a $build/base/libmr_base.a"
grep -q '^MR_GEMM:STRING=onednn' "$build/CMakeCache.txt" && libs="$libs -ldnnl" || libs="$libs -lopenblas"

export MR_TEST_SMALL=1
for t in rows products attn; do
    ${CC:-cc} -std=gnu17 -O1 -g -D_GNU_SOURCE -I"$src" -c "$src/test/test_cuda_$t.c" -o "$tmp/test.o"
    $cxx "$tmp/test.o" $(ls "$tmp"/*.o | grep -v /test.o) $libs -lcmocka -lpthread -lm -o "$tmp/$t"
    "$tmp/$t"
    MR_EMU_ASYNC=early "$tmp/$t"
done
MR_EMU_SMEM=101376 "$tmp/attn"
