# Shared by the tools/device_*.sh that source it from the repository's root; not a program.
# They set before: parts=,a,b, (what is to be done), out=DIR (logs), build=DIR, deps=DIR; LIMIT is the seconds for everything.
# shellcheck shell=bash disable=SC2154,SC2034
mkdir -p "$out"
begun=$SECONDS
export PATH=$PATH:/usr/local/cuda/bin
: >"$out/table"

has() { [[ $parts == *,$1,* ]]; }
# known PART...: leaves with 2 when something else is asked for.
known() {
  local p
  for p in ${parts//,/ }; do
    [[ " $* " == *" $p "* ]] || { echo "$0: there is no part '$p' (allowed: $*)" >&2; exit 2; }
  done
}
left() { echo $((${LIMIT:-480} - SECONDS + begun)); }
note() { printf '%-30s %s\n' "$1" "$2" >>"$out/table"; printf '== %4ds  %-30s %s\n' $((SECONDS - begun)) "$1" "$2"; }

# step NAME SECONDS COMMAND...: runs, logs in NAME.log and NAME.rc, notes passed / skipped / FAILED with the last line said.  May run in the
# background.
step() {
  local name=$1 limit=$2 t0=$SECONDS room rc; shift 2
  room=$(left)
  [ "$room" -lt 8 ] && { note "$name" "left out: no time"; return 1; }
  [ "$limit" -gt "$room" ] && limit=$room
  timeout -k 5 "$limit" "$@" >"$out/$name.log" 2>&1
  rc=$?
  echo $rc >"$out/$name.rc"
  case $rc in
    0) note "$name" "passed, $((SECONDS - t0)) s  $(tail -n 1 "$out/$name.log" | tr '\t' ' ' | cut -c1-120)" ;;
    77) note "$name" "skipped: $(tail -n 1 "$out/$name.log" | cut -c1-80)" ;;
    *) note "$name" "FAILED ($rc), $((SECONDS - t0)) s"; tail -n 25 "$out/$name.log" ;;
  esac
  return $rc
}

run_here() {                      # programs that were built elsewhere
  export LD_LIBRARY_PATH=$1/lib:/usr/local/cuda/lib64:${LD_LIBRARY_PATH:-}
  "$1/bin/millrace" --version >/dev/null && "$1/bin/millrace-actor" devices >"$out/devices.log"
}

# programs TARGET...: those of PREBUILT=DIR (DIR/{bin,test,lib}) when they run here, else built in $build.  Sets build and bin, or leaves.
programs() {
  local args=() gen=() nccl
  if [ -n "${PREBUILT:-}" ] && run_here "$(realpath "$PREBUILT")"; then
    build=$(realpath "$PREBUILT") bin=$build/bin
    note prebuilt "$(cut -c1-150 "$out/devices.log")"
    return
  fi
  if [ -d "$deps" ]; then
    mapfile -t args < <(bash tools/deps_prefix.sh --unpack "$deps")
    export PKG_CONFIG_PATH=$PWD/$deps/usr/lib/x86_64-linux-gnu/pkgconfig PKG_CONFIG_SYSROOT_DIR=$PWD/$deps
  elif ! ldconfig -p | grep -q libdnnl; then
    args=(-DMR_GEMM=cblas)
  fi
  nccl=$(python3 -c 'import nvidia.nccl; print(list(nvidia.nccl.__path__)[0])' 2>/dev/null) && args+=("-DMR_NCCL_ROOT=$nccl")
  command -v ninja >/dev/null && gen=(-G Ninja)
  step configure 60 cmake -S . -B "$build" "${gen[@]}" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DMR_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES="${ARCH:-90}" \
    -DMR_FAULT_POINTS=ON "${args[@]}" || exit 1
  step build 300 cmake --build "$build" -j "$(nproc)" --target "$@" || exit 1
  bin=$build/bin
}

# instead NAME OLD NEW: other words in NAME's line of the table.
instead() { sed -i "s|^\($1 .*\)$2|\1$3|" "$out/table"; }

# figures: the lines "figure<tab>name<tab>value<tab>goal<tab>met" of all logs as a table.
figures() {
  grep -h "^figure" "$out"/*.log | awk -F '\t' '{printf "%-62s %-64s %-22s %s\n", $2, $3, $4 == "-" ? "" : $4, $5}'
}

# finish: the table of the steps, and whether one failed.
finish() {
  echo
  cat "$out/table"
  grep -q FAILED "$out/table" && { echo "FAILED"; return 1; }
  echo "all passed in $((SECONDS - begun)) s"
}
