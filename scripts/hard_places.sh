#!/usr/bin/env bash
# The tests of the tiers where a node may find itself: without io_uring (as Docker refuses it), with 64 KiB of memory
# that may be locked, on a tmpfs. (A file system of 50 MB that fills, and one that is read-only, are among the tests:
# as root, with loop devices.)
#
#   bash scripts/hard_places.sh                     all places, tests/tiers
#   bash scripts/hard_places.sh --place memlock     one of plain, no-io_uring, memlock, tmpfs
#   bash scripts/hard_places.sh -- tests/tiers tests/integration     what follows -- goes to pytest
#
# $UCXKV_PYTHON names an interpreter that has the project's test extra; without it an environment is made in .venv. All
# places run even when one fails; the exit code is 0 only when all passed. The last line counts the tests.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

usage() { sed -n '2,12p' "${BASH_SOURCE[0]}" | sed 's/^# \{0,1\}//'; }

places=() arguments=(tests/tiers)
while [ $# -gt 0 ]; do
  case "$1" in
    --place)
      case "${2:-}" in
        plain | no-io_uring | memlock | tmpfs) places+=("$2") ;;
        *) echo "--place is one of plain, no-io_uring, memlock, tmpfs" >&2; exit 2 ;;
      esac
      shift
      ;;
    --help | -h) usage; exit 0 ;;
    --) shift; arguments=("$@"); break ;;
    *) echo "unknown option: $1" >&2; usage >&2; exit 2 ;;
  esac
  shift
done
[ "${#places[@]}" -gt 0 ] || places=(plain no-io_uring memlock tmpfs)

if [ -z "${UCXKV_PYTHON:-}" ]; then
  . scripts/env.sh
  ucxkv_env .venv test || { echo "the environment .venv could not be made" >&2; exit 1; }
fi

reports="$(mktemp -d)"
memory="/dev/shm/ucxkv-hard-places-$$"
trap 'rm -rf "$reports" "$memory"' EXIT

unlocked() {
  # Runs a command with 64 KiB of lockable memory; root may lock more, so it gives that right up.
  ulimit -l 64 || return 1
  [ "$(id -u)" = 0 ] || exec "$@"
  exec setpriv --bounding-set -ipc_lock --inh-caps -ipc_lock "$@"
}

tests_in() {
  # tests_in PLACE: pytest there, its report in a file of the place's name.
  local pytest=("$UCXKV_PYTHON" -m pytest -q -m "not torch and not slow" --junitxml="$reports/$1.xml" "${arguments[@]}")
  case "$1" in
    plain) "${pytest[@]}" ;;
    no-io_uring) "$UCXKV_PYTHON" scripts/without_io_uring.py -- "${pytest[@]}" ;;
    memlock) (unlocked "${pytest[@]}") ;;
    tmpfs) mkdir -p "$memory/tmp" && TMPDIR="$memory/tmp" "${pytest[@]}" --basetemp="$memory/tests" ;;
  esac
}

failed=0 summary=()
for place in "${places[@]}"; do
  printf '\n== %s\n' "$place"
  started=$SECONDS outcome=passed
  tests_in "$place" </dev/null || { outcome=FAILED failed=$((failed + 1)); }
  summary+=("$(printf '%-12s %4d s  %s' "$place" $((SECONDS - started)) "$outcome")")
done

printf '\n== summary\n'
printf '%s\n' "${summary[@]}"
"$UCXKV_PYTHON" - "$reports" "${#places[@]}" <<'PY'
import pathlib, sys
import xml.etree.ElementTree as tree
total = failed = skipped = 0
for path in pathlib.Path(sys.argv[1]).glob("*.xml"):
    for suite in tree.parse(path).getroot().iter("testsuite"):
        total += int(suite.get("tests", 0))
        failed += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        skipped += int(suite.get("skipped", 0))
print(f"{sys.argv[2]} places: {total - failed - skipped} passed, {failed} failed, {skipped} skipped")
PY
[ "$failed" -eq 0 ]
