#!/bin/sh
# The drafter's golden vectors and properties through the cuda kernels on the emulated device (test/emu): the model code in bf16, chunk by chunk, where there
# is no GPU.  Needs a C++ compiler and x86-64, no CUDA.
# usage: golden_emu.sh BUILD_DIR GOLDEN_DIR...        exit 77: cannot run here
set -eu
src=$(cd "$(dirname "$0")/.." && pwd)
build=${1:?usage: golden_emu.sh BUILD_DIR GOLDEN_DIR...}
shift
cxx=${CXX:-g++}
command -v "$cxx" >/dev/null || { echo "skipped: no C++ compiler"; exit 77; }
[ "$(uname -m)" = x86_64 ] || { echo "skipped: fibers are written for x86-64"; exit 77; }
grep -q 'MR_HAVE_CUDA' "$build/build.ninja" && { echo "skipped: this build has the real kernels"; exit 77; }

tmp=$(mktemp -d /tmp/millrace-emu-XXXXXX)
trap 'rm -rf "$tmp"' EXIT
flags="-std=c++17 -O1 -g -Wno-unknown-pragmas -DMR_CUDA_EMULATED -D_GNU_SOURCE -I$src/test/emu -I$src"
for name in context elementwise norm rope optim ce plan attn_fwd attn_bwd; do
    $cxx $flags -x c++ -c "$src/kernels/cuda/$name.cu" -o "$tmp/$name.o"
done
$cxx $flags -c "$src/test/emu/emu.cc" -o "$tmp/emu.o"
${CC:-cc} -std=gnu17 -O1 -g -D_GNU_SOURCE -DMR_SOURCE_DIR=\""$src"\" -I"$src" -c "$src/test/golden_dflash.c" -o "$tmp/golden.main"
${CC:-cc} -std=gnu17 -O1 -g -D_GNU_SOURCE -DMR_SOURCE_DIR=\""$src"\" -I"$src" -c "$src/test/test_cuda_dflash.c" -o "$tmp/properties.main"
${CC:-cc} -std=gnu17 -O1 -g -D_GNU_SOURCE -I"$src" -c "$src/test/emu/resolve.c" -o "$tmp/resolve.o"
libs="$build/actors/libmr_actors.a $build/ipc/libmr_ipc.a $build/data/libmr_data.a $build/kernels/libmr_kernels.a $build/base/libmr_base.a"
grep -q '^MR_GEMM:STRING=onednn' "$build/CMakeCache.txt" && libs="$libs -ldnnl" || libs="$libs -lopenblas"
# What the emulation has not (arenas, pulls) comes from kernels/nocuda.c, and with it a second mr_k_cuda_create, which is not the one used.
link() {
    $cxx -x none "$tmp/$1.main" "$tmp"/*.o $libs -Wl,--allow-multiple-definition -lcmocka -ljansson -luring -lpthread -lm -o "$tmp/$1"
}
link golden
link properties
for set in "$@"; do
    "$tmp/golden" "$set" cuda:0 >"$tmp/out" || { cat "$tmp/out"; exit 1; }
    tail -1 "$tmp/out"
done
MR_TEST_SMALL=1 "$tmp/properties"
