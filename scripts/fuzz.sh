#!/usr/bin/env bash
# Fuzzes the parsers of bytes from the network (transport/wire.h) under address and undefined-behaviour sanitizers.
#
#   bash scripts/fuzz.sh [seconds]      default: 60
#
# With clang: libFuzzer. Without: gcc ($CC) and the driver's own deterministic mutations, from a seed it prints ($SEED
# repeats a run). Exit code 0: nothing was found.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case "${1:-}" in -h | --help)
  sed -n '2,7p' "$0" | sed 's/^# \{0,1\}//'
  exit 0
  ;;
esac
seconds="${1:-60}"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
flags="-std=gnu11 -O1 -g -fno-omit-frame-pointer -Wall -Wextra -Itransport"

if command -v clang >/dev/null && clang -fsanitize=fuzzer -x c - -o "$work/probe" 2>/dev/null \
  <<<'int LLVMFuzzerTestOneInput(const unsigned char *d, unsigned long n) { (void)d; (void)n; return 0; }'; then
  # shellcheck disable=SC2086
  clang $flags -DWITH_LIBFUZZER -fsanitize=fuzzer,address,undefined tests/native/wire_fuzz.c -o "$work/wire_fuzz"
  mkdir "$work/corpus"
  "$work/wire_fuzz" -max_total_time="$seconds" -max_len=256 -print_final_stats=1 "$work/corpus" tests/native/wire_corpus
else
  seed="${SEED:-$((RANDOM * 32768 + RANDOM))}"
  echo "no clang with libFuzzer: deterministic driver, SEED=$seed"
  # shellcheck disable=SC2086
  "${CC:-cc}" $flags -fsanitize=address,undefined -fno-sanitize-recover=all tests/native/wire_fuzz.c -o "$work/wire_fuzz"
  "$work/wire_fuzz" "$seed" "$seconds" tests/native/wire_corpus/*
fi
