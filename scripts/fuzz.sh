#!/usr/bin/env bash
# Fuzzes everything of ours that reads bytes of a peer, under address and undefined-behaviour sanitizers.
#
#   bash scripts/fuzz.sh [seconds]          every target, the time split between them (default 60)
#   bash scripts/fuzz.sh --only NAME [seconds]
#   bash scripts/fuzz.sh --replay NAME FILE runs one input: what a finding's last line says
#   bash scripts/fuzz.sh --coverage         lines of the C code that the corpora in tests/native reach
#   bash scripts/fuzz.sh --keep             puts what earlier runs found (.fuzz/) into those corpora, minimised
#
# Targets: wire (parsers of messages), slots (readers of a mapped table), serve (the node's handlers and sessions), fetch (the
# client's handlers, and the binding's own), protocol (control messages, frames, handshake; Python), journal (damaged log files;
# Python). With clang: libFuzzer; missing, it is installed where that is possible (Debian, root). Without: gcc ($CC) and
# tests/native/fuzz_driver.c, which mutates the corpora without feedback from coverage ($SEED repeats a run). The last lines say for
# each target how many inputs ran, what was found, and how many edges were reached. Exit code 0: nothing was found. A finding
# stays in .fuzz/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/env.sh

usage() { sed -n '2,15p' "$0" | sed 's/^# \{0,1\}//'; }
native=(wire slots serve fetch)
declare -A share=([wire]=1 [slots]=3 [serve]=6 [fetch]=6 [protocol]=4 [journal]=1) # of the time
declare -A covered=(
  [wire]="transport/wire.h"
  [slots]="ucxkv/directory/slots_reader.c ucxkv/directory/slots_atomic.h"
  [serve]="transport/serve.c transport/service.c transport/accept.c"
  [fetch]="transport/fetch.c transport/receive.c transport/ops.c transport/ucx.c"
)
mode=run seconds=60 targets=("${native[@]}" protocol journal) file=
is_target() { [ -n "${share[$1]:-}" ] || { echo "no target '$1': ${!share[*]}" >&2; exit 2; }; }
while [ $# -gt 0 ]; do
  case "$1" in
    -h | --help) usage; exit 0 ;;
    --only) is_target "${2:-}"; targets=("$2"); shift ;;
    --replay) is_target "${2:-}"; mode=replay targets=("$2") file="${3:?--replay needs a file}"; shift 2 ;;
    --coverage) mode=coverage targets=("${native[@]}") ;;
    --keep) mode=keep targets=("${native[@]}") ;;
    *[!0-9]* | '') usage >&2; exit 2 ;;
    *) seconds="$1" ;;
  esac
  shift
done

# ---- what it needs: UCX's headers and the project for Python; clang if there is a way

needed=("${targets[@]}")
[ "$mode" = run ] || needed=("${targets[0]}")
if ! "${PYTHON:-python3}" -c 'import libucx, ucxkv' 2>/dev/null; then
  ucxkv_env .venv test
  PYTHON="$UCXKV_PYTHON"
fi
PYTHON="${PYTHON:-python3}"
headers="$("$PYTHON" -c 'import importlib.util as u; print(u.find_spec("libucx").submodule_search_locations[0])')/include"

has_libfuzzer() {
  command -v clang >/dev/null && clang -fsanitize=fuzzer -x c - -o "$work/probe" 2>/dev/null \
    <<<'int LLVMFuzzerTestOneInput(const unsigned char *d, unsigned long n) { (void)d; (void)n; return 0; }'
}

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
libfuzzer=0
is_python() { [ "$1" = protocol ] || [ "$1" = journal ]; }
if [ "${#needed[@]}" -gt 1 ] || ! is_python "${needed[0]}"; then
  if ! has_libfuzzer && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "setup: apt-get install clang and its runtimes (libFuzzer)"
    export DEBIAN_FRONTEND=noninteractive
    { apt-get -qq update && { apt-get -qq install -y --no-install-recommends clang libclang-rt-dev ||
      apt-get -qq install -y clang; }; } >/dev/null 2>&1 || echo "setup: that failed"
  fi
  if has_libfuzzer; then libfuzzer=1; else echo "no clang with libFuzzer: gcc and the driver without feedback"; fi
fi
if [ "$mode" = coverage ] || [ "$mode" = keep ]; then
  ((libfuzzer)) && { [ "$mode" = keep ] || command -v llvm-cov >/dev/null; } ||
    { echo "--$mode needs clang with libFuzzer, and llvm (Debian: apt-get install clang llvm)" >&2; exit 2; }
fi

# ---- building

build() {
  # build NAME OUT SANITIZER-FLAGS...: the driver comes along where there is no libFuzzer
  local name="$1" out="$2" compiler=(clang) driver=()
  shift 2
  ((libfuzzer)) || compiler=("${CC:-cc}") driver=(tests/native/fuzz_driver.c)
  "${compiler[@]}" -std=gnu11 -O1 -g -fno-omit-frame-pointer -Wall -Wextra -Werror -Itransport -Itiers -Iucxkv/directory \
    -isystem "$headers" "$@" "tests/native/${name}_fuzz.c" "${driver[@]}" -o "$out"
}

checks=(-fsanitize=address,undefined -fno-sanitize-recover=all)
if ((libfuzzer)); then checks=(-fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all); fi
export ASAN_OPTIONS="detect_leaks=1:abort_on_error=1:strict_string_checks=1:${ASAN_OPTIONS:-}"
export UBSAN_OPTIONS="print_stacktrace=1:abort_on_error=1:${UBSAN_OPTIONS:-}"

# ---- the other modes

if [ "$mode" = replay ]; then
  if is_python "${targets[0]}"; then
    exec "$PYTHON" "scripts/fuzz_${targets[0]}.py" --seconds 60 --seed "$(cat "$file")"
  fi
  build "${targets[0]}" "$work/target" "${checks[@]}"
  "$work/target" "$file"
  echo "replay: $file passes now"
  exit 0
fi
if [ "$mode" = coverage ]; then
  for name in "${targets[@]}"; do
    build "$name" "$work/$name" -fsanitize=fuzzer -fprofile-instr-generate -fcoverage-mapping
    LLVM_PROFILE_FILE="$work/$name.raw" "$work/$name" -runs=0 "tests/native/${name}_corpus" 2>/dev/null
    llvm-profdata merge -sparse "$work/$name.raw" -o "$work/$name.data"
    read -ra files <<<"${covered[$name]}"
    llvm-cov report "$work/$name" -instr-profile="$work/$name.data" "${files[@]}" |
      awk -v name="$name" 'NF > 9 && $1 ~ /\.[ch]$/ {printf "%-6s %-18s lines %7s   branches %7s\n", name, $1, $10, $13}'
    [ -z "${SHOW:-}" ] || llvm-cov show "$work/$name" -instr-profile="$work/$name.data" "${files[@]}" >"$SHOW.$name"
  done
  exit 0
fi
if [ "$mode" = keep ]; then
  for name in "${targets[@]}"; do
    kept="tests/native/${name}_corpus"
    build "$name" "$work/$name" "${checks[@]}"
    mkdir -p "$work/$name.kept" ".fuzz/$name"
    # what is there under a name of its own (a regression) stays as it is
    find "$kept" -type f ! -name 'auto-*' -exec cp -t "$work/$name.kept" {} +
    find "$kept" -type f -name 'auto-*' -delete
    "$work/$name" -merge=1 -use_counters=0 -max_len=1024 "$work/$name.kept" ".fuzz/$name" 2>&1 | grep 'MERGE-OUTER' | tail -1
    for input in "$work/$name.kept"/*; do
      [ -e "$kept/$(basename "$input")" ] || cp "$input" "$kept/auto-$(basename "$input" | cut -c1-12)"
    done
    du -sb "$kept"
  done
  exit 0
fi

# ---- running

declare -A outcome
failed=0 total_share=0
for name in "${targets[@]}"; do total_share=$((total_share + share[$name])); done
mkdir -p .fuzz

number() { grep -o "$1" "$2" | tail -1 | grep -o '[0-9]*' | tail -1 || echo 0; }

run_native() {
  # run_native NAME SECONDS: 0 when nothing was found
  local name="$1" length="$2" log="$work/$1.log" code=0 found=0 edges artifact
  local corpus="$PWD/tests/native/${name}_corpus"
  mkdir -p ".fuzz/$name"
  if ((libfuzzer)); then
    "$work/$name" -max_total_time="$length" -max_len=1024 -timeout=20 -rss_limit_mb=4096 -print_final_stats=1 \
      -artifact_prefix=".fuzz/$name-" ".fuzz/$name" "$corpus" >"$log" 2>&1 || code=$?
    edges="$(number 'cov: [0-9]*' "$log")"
  else
    local seed="${SEED:-$((RANDOM * 32768 + RANDOM))}"
    "$work/$name" -seconds="$length" -seed="$seed" -crash=".fuzz/$name-crash" "$corpus" >"$log" 2>&1 || code=$?
    edges="no" # nobody counts them
  fi
  if [ "$code" -ne 0 ]; then
    found=1
    grep -vE '^#[0-9]+\s|NEW_FUNC|# Uses|fuzzer::' "$log" | tail -60
    artifact="$(ls -t .fuzz/"$name"-* 2>/dev/null | head -1)"
    echo "FOUND by $name: ${artifact:-no input was left}; replay: bash scripts/fuzz.sh --replay $name ${artifact:-FILE}"
  fi
  outcome[$name]="$(number 'number_of_executed_units: [0-9]*' "$log") inputs, $found findings, $edges edges"
  [ "$code" -eq 0 ]
}

run_python() {
  # run_python NAME SECONDS: 0 when nothing was found
  local log="$work/$1.log" code=0
  "$PYTHON" "scripts/fuzz_$1.py" --seconds "$2" >"$log" 2>&1 || code=$?
  outcome[$1]="$(tail -1 "$log")"
  [ "$code" -eq 0 ] && return
  cat "$log"
  sed -n 's/^seed //p' "$log" >".fuzz/$1-seed"
  echo "FOUND by $1; replay: bash scripts/fuzz.sh --replay $1 .fuzz/$1-seed"
  return 1
}

pids=()
for name in "${targets[@]}"; do
  is_python "$name" && continue
  build "$name" "$work/$name" "${checks[@]}" &
  pids+=($!)
done
for pid in ${pids[@]+"${pids[@]}"}; do wait "$pid" || { echo "fuzz: a target does not build" >&2; exit 1; }; done
for name in "${targets[@]}"; do
  length=$((seconds * share[$name] / total_share))
  [ "$length" -gt 0 ] || length=1
  echo "fuzz: $name, $length s"
  if is_python "$name"; then run_python "$name" "$length" || failed=1; else run_native "$name" "$length" || failed=1; fi
done
for name in "${targets[@]}"; do printf 'fuzz: %-8s %s\n' "$name" "${outcome[$name]}"; done
exit "$failed"
