#!/bin/bash
# test/model/run.sh [--small|--large] [--all] [MODEL [NAME]]
#
# Runs the SPIN models of the protocols and their mutants, as runs.txt lists them.
#   --small  (default) bounds that take minutes of one slow core, all mutants included
#   --large  the larger bounds only; with --all also everything of --small.  Up to 4 GB of memory, one verifier at a time
# A pass model must be searched completely (bitstate: as far as the line says) without an error; a mutant must be caught by the
# property that runs.txt names.  Exit codes: 0 all as expected, 1 not, 77 no spin or no compiler.
set -u
TIMEFORMAT='%U %S' LC_ALL=C
export LC_ALL
here=$(cd "$(dirname "$0")" && pwd)
size=s all=0 model= name=
for a in "$@"; do
    case $a in
    --small) size=s ;;
    --large) size=l ;;
    --all) all=1 ;;
    -*) echo "run.sh: unknown option $a (allowed: --small --large --all)" >&2; exit 2 ;;
    *) if [ -z "$model" ]; then model=$a; else name=$a; fi ;;
    esac
done
if [ -n "$model" ] && [ ! -f "$here/$model.pml" ]; then
    echo "run.sh: no model '$model' (there are: $(cd "$here" && ls *.pml | sed 's/\.pml//' | tr '\n' ' '))" >&2; exit 2
fi
CC=${CC:-gcc}
command -v spin >/dev/null && command -v "$CC" >/dev/null || { echo "skipped: needs spin and $CC"; exit 77; }
[ $size = s ] && mem=${MODEL_MEM_MB:-1500} depth=100000 opt=-O0 || mem=${MODEL_MEM_MB:-4000} depth=3000000 opt=-O2
work=$(mktemp -d /tmp/mr-model-XXXXXX) || exit 1
trap 'rm -rf "$work"' EXIT
trim() { local s=$1; s=${s#"${s%%[! ]*}"}; echo -n "${s%"${s##*[! ]}"}"; }

# verify SEARCH FLAGS: leaves pan.out; prints nothing
verify() {
    local mode="-DCOLLAPSE" args=
    [ $size = s ] && mode=
    case $1 in b*) mode="-DBITSTATE"; args="-w${1#b} -k3 -Q${MODEL_MINUTES:-5}" ;; esac
    spin -a $2 m.pml >spin.out 2>&1 || { cat spin.out; return 1; }
    # kills are rendezvous in the escape of an `unless`: partial-order reduction would be unsound
    "$CC" $opt -w -DSAFETY -DNOREDUCE -DMEMLIM=$mem -DVECTORSZ=2048 $mode -o pan pan.c 2>gcc.out || { cat gcc.out; return 1; }
    nice ./pan -n -m$depth $args >pan.out 2>&1
}

runs=0 bad=0 total=0   # small runs end before a better optimisation is compiled: -O0
while IFS='|' read -r m n s x expect flags what; do
    m=$(trim "$m"); [ -z "$m" ] || [ "${m#\#}" != "$m" ] && continue
    n=$(trim "$n") s=$(trim "$s") x=$(trim "$x") expect=$(trim "$expect") flags=$(trim "$flags")
    [ -n "$model" ] && [ "$m" != "$model" ] && continue
    [ -n "$name" ] && [ "$n" != "$name" ] && continue
    [ "$s" = $size ] || { [ $size = l ] && [ $all = 1 ]; } || continue
    runs=$((runs + 1))
    rm -rf "$work/r" && mkdir "$work/r" && cd "$work/r" && cp "$here/$m.pml" m.pml || exit 1
    { time verify "$x" "$flags"; } 2>cpu.out
    took=$(awk 'END { printf "%.1f", $1 + $2 }' cpu.out)
    total=$(awk -v a="$total" -v b="$took" 'BEGIN { printf "%.1f", a + b }')
    states=$(awk '/states, stored/ { printf "%.0f", $1; exit }' pan.out)
    error=$(grep -m1 -E '^pan:[0-9]+: (assertion violated|invalid end state)' pan.out | sed 's/ (at depth.*//; s/^pan:[0-9]*: //')
    whole=$(grep -cE 'errors: 0$' pan.out)
    grep -qE 'max search depth too small|reached -DMEMLIM|out of memory|Search not completed' pan.out && whole=0
    cover=
    case $x in b*)
        cover="bitstate, $(grep -oE 'hash factor: [0-9.]+' pan.out)"
        grep -q 'Search not completed' pan.out && { cover="$cover, cut off after ${MODEL_MINUTES:-5} min"; whole=1; } ;;
    esac
    squeezed=$(echo "$error" | tr -d ' ')
    if [ "$expect" = pass ]; then
        if [ "$whole" = 1 ] && [ -z "$error" ]; then verdict=pass; else verdict="FAILED: ${error:-the search is not complete}"; fi
    elif [ -z "$error" ]; then verdict=SURVIVED
    elif [ "$expect" = end ]; then
        case $error in invalid*) verdict="caught" ;; *) verdict="CAUGHT ELSEWHERE: $error" ;; esac
    else
        case $squeezed in *"$expect"*) verdict="caught" ;; *) verdict="CAUGHT ELSEWHERE: $error" ;; esac
    fi
    case $verdict in pass|caught) ;; *) bad=$((bad + 1)) ;; esac
    printf '%-46s %-8s %11s states %7s s%s\n' "$m: $n" "$verdict" "${states:-?}" "$took" "${cover:+  $cover}"
done <"$here/runs.txt"
[ $runs -gt 0 ] || { echo "run.sh: no such run" >&2; exit 2; }
echo "$runs runs, $bad not as expected, $total s of CPU"
[ $bad = 0 ]
