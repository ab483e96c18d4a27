#!/usr/bin/env bash
# Build dependencies in a folder, for machines where packages cannot be installed (no root, no network).
# usage: tools/deps_prefix.sh DIR            downloads the packages into DIR/debs (Debian 12 or compatible, amd64, apt)
#        tools/deps_prefix.sh --unpack DIR   there: unpacks them into DIR/usr; prints the cmake arguments to build with it
# The programs find their libraries there by themselves (an rpath); no environment variable is needed to run them.
set -euo pipefail
packages="liburing2 liburing-dev libjansson4 libjansson-dev libcmocka0 libcmocka-dev libmicrohttpd12 libmicrohttpd-dev
  libncurses6 libncurses-dev libtinfo6 libopenblas0-pthread libopenblas-pthread-dev libgfortran5 libquadmath0
  libgnutls30 libnettle8 libhogweed6 libp11-kit0 libtasn1-6 libidn2-0 libunistring2 libgmp10 libffi8"

if [ "${1:-}" != --unpack ]; then
  dir=${1:?usage: tools/deps_prefix.sh [--unpack] DIR}
  mkdir -p "$dir/debs/partial"
  cd "$dir/debs"
  # shellcheck disable=SC2086
  apt-get -qq -o APT::Sandbox::User=root download $packages
  rmdir partial
  du -sh . | cut -f1 | sed "s|\$| in $dir/debs|"
  exit 0
fi

dir=$(cd "${2:?usage: tools/deps_prefix.sh --unpack DIR}" && pwd)
lib=$dir/usr/lib/x86_64-linux-gnu
if [ -d "$dir/debs" ] && [ ! -e "$dir/.unpacked" ]; then
  for deb in "$dir"/debs/*.deb; do dpkg -x "$deb" "$dir"; done
  rm -rf "$dir/usr/share" && find "$dir/usr" -name '*.a' -delete
  [ -d "$dir/lib" ] && cp -a "$dir/lib/." "$dir/usr/lib/" && rm -rf "$dir/lib"
  sed -i '/^Requires.private:/d' "$lib"/pkgconfig/*.pc       # of static links only
  touch "$dir/.unpacked"
fi
echo "-DCMAKE_PREFIX_PATH=$dir/usr"
echo "-DCMAKE_BUILD_RPATH=$lib;$lib/openblas-pthread"
echo "-DCMAKE_EXE_LINKER_FLAGS=-Wl,--disable-new-dtags"          # RPATH, which libraries of libraries are found by too
if [ -e "$lib/openblas-pthread/libopenblas.so" ]; then
  echo "-DMR_GEMM=cblas"
  echo "-DCBLAS_LIB=$lib/openblas-pthread/libopenblas.so"
  echo "-DCBLAS_INC=$dir/usr/include/x86_64-linux-gnu/openblas-pthread"
fi
