#!/usr/bin/env bash
# Installs what millrace builds and tests with, on Debian 12 (or a relative of it).  Does nothing when all of it is there.
# usage: tools/setup.sh [build|test]      build: enough for ./tools/demo.sh; test (default): everything
set -euo pipefail
what=${1:-test}
case $what in build | test) ;; *) echo "usage: tools/setup.sh [build|test]" >&2; exit 2 ;; esac
packages=(build-essential cmake ninja-build pkg-config ca-certificates git python3
          liburing-dev libjansson-dev libdnnl-dev libmicrohttpd-dev libncurses-dev)
if [ "$what" = test ]; then
  packages+=(libcmocka-dev spin valgrind procps)
fi

missing=()
for p in "${packages[@]}"; do
  dpkg-query -W -f='${Status}' "$p" 2>/dev/null | grep -q 'ok installed' || missing+=("$p")
done
[ ${#missing[@]} -eq 0 ] && exit 0

echo "setup: installing ${missing[*]}"
root=()
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || { echo "setup: these packages are missing and there is neither root nor sudo: ${missing[*]}" >&2; exit 3; }
  root=(sudo)
fi
"${root[@]}" apt-get -qq update
"${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
