#!/usr/bin/env bash
# Builds the C code's test drivers, and the native modules for the contract tests, under sanitizers and runs them.
#
#   bash scripts/sanitize.sh [asan|tsan|all] [driver ...]     default: all, every driver
#
# asan is address + undefined behaviour + leaks, tsan is data races. A driver is a function check_NAME below. Needs gcc or
# clang ($CC) with their sanitizer runtimes. Exit code 0: all passed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

CC="${CC:-cc}"
mode="${1:-all}"
[ $# -gt 0 ] && shift
case "$mode" in
  asan | tsan | all) ;;
  -h | --help)
    sed -n '2,7p' "$0" | sed 's/^# \{0,1\}//'
    exit 0
    ;;
  *)
    sed -n '2,7p' "$0" | sed 's/^# \{0,1\}//' >&2
    exit 2
    ;;
esac
command -v "$CC" >/dev/null || { echo "no C compiler ($CC): install gcc, or set CC" >&2; exit 2; }
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

flags_asan="-fsanitize=address,undefined -fno-sanitize-recover=all"
flags_tsan="-fsanitize=thread"
export ASAN_OPTIONS="detect_leaks=1:strict_string_checks=1:${ASAN_OPTIONS:-}"
export UBSAN_OPTIONS="print_stacktrace=1:${UBSAN_OPTIONS:-}"
# gcc 12's thread sanitizer takes the 16 bytes before a library's thread-local block for a header of glibc 2.19 when the
# block lies 16 bytes into a page, and ends ("failed to allocate 0x1e... bytes at address 10000000d000") when they are not
export TSAN_OPTIONS="halt_on_error=1:second_deadlock_stack=1:intercept_tls_get_addr=0:${TSAN_OPTIONS:-}"

# Some runtimes cannot map their shadow where the kernel's address randomisation puts things: switch it off if we may.
fixed=()
if setarch -R true 2>/dev/null; then fixed=(setarch -R); fi

# driver NAME ROUNDS SOURCE... [FLAG...]: build once per sanitizer, run with a fixed and with a fresh seed
driver() {
  local name="$1" rounds="$2" sanitizer flags seed
  shift 2
  for sanitizer in asan tsan; do
    if [ "$mode" != all ] && [ "$mode" != "$sanitizer" ]; then continue; fi
    flags="flags_$sanitizer"
    # shellcheck disable=SC2086
    "$CC" -std=gnu11 -O1 -g -fno-omit-frame-pointer -Wall -Wextra -Wno-unused-function -Werror ${!flags} \
      -Itiers "$@" -o "$work/$name-$sanitizer" -lpthread
    for seed in 1 $((RANDOM * 32768 + RANDOM)); do
      echo "== $name, $sanitizer, seed $seed"
      timeout 300 "${fixed[@]}" "$work/$name-$sanitizer" "$seed" "$rounds"
    done
  done
}

check_host() { driver host 100 tests/native/host_check.c; }
check_io() { driver io 6 tests/native/io_check.c; }
check_slots() { driver slots 100 tests/native/slots_check.c -Iucxkv/directory; }

# An interpreter with libucx and pytest: the present one, or the project's own environment.
need_python() {
  PYTHON="${PYTHON:-python3}"
  "$PYTHON" -c 'import libucx, pytest, ucxkv' 2>/dev/null && return
  . scripts/env.sh
  ucxkv_env .venv test
  PYTHON="$UCXKV_PYTHON"
}

# What runs on a real UCX. Its memory hooks break ThreadSanitizer at a thread's exit, and UCX itself is not instrumented:
# what it does inside is left out.
on_ucx() {
  local name="$1" rounds="$2" wheel
  need_python
  wheel="$("$PYTHON" -c 'import importlib.util as u; print(u.find_spec("libucx").submodule_search_locations[0])')"
  UCX_MEM_EVENTS=n TSAN_OPTIONS="$TSAN_OPTIONS:ignore_noninstrumented_modules=1" \
    driver "$name" "$rounds" "tests/native/${name}_check.c" transport/{ucx,ops,service,accept,serve,fetch,receive}.c \
    -Itransport -isystem "$wheel/include" -L"$wheel/lib" -Wl,-rpath,"$wheel/lib" -lucp -lucs
}
check_service() { on_ucx service 250; }
check_killed() { on_ucx killed 4; }

# The transport's contract tests in Python, on native modules that are built under the sanitizer; both at once. Python's own
# leaks and what is not instrumented are left out; a call that UCX makes to see whether it may is kept from the sanitizers,
# whose interceptors misread it.
contract() {
  local sanitizer="$1" tree="$work/contract-$1" flags="flags_$1" script runtimes
  runtimes="$work/plain-$1.so $("$CC" -print-file-name=libtsan.so)"
  [ "$sanitizer" = tsan ] ||
    runtimes="$work/plain-$1.so $("$CC" -print-file-name=libasan.so) $("$CC" -print-file-name=libubsan.so)"
  "$CC" -O1 -fPIC -shared -x c - -o "$work/plain-$1.so" <<'C'
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>
ssize_t process_vm_readv(pid_t pid, const struct iovec *to, unsigned long n, const struct iovec *from, unsigned long m,
                         unsigned long flags) {
    return syscall(SYS_process_vm_readv, pid, to, n, from, m, flags);
}
C
  mkdir "$tree"
  tar c --exclude=./.git --exclude='./.venv*' --exclude=./.fuzz --exclude='*.so' --exclude=__pycache__ . | tar x -C "$tree"
  cd "$tree"
  export PYTHONPATH="$tree" UCX_MEM_EVENTS=n
  for script in transport/build_ucx.py tiers/build_host.py tiers/build_io.py ucxkv/directory/build_slots.py; do
    CFLAGS="-O1 -g -fno-omit-frame-pointer ${!flags}" LDFLAGS="${!flags}" "$PYTHON" "$script" >/dev/null
  done
  # reports into files: pytest captures what is written to the error stream
  ASAN_OPTIONS="$ASAN_OPTIONS:detect_leaks=0:verify_asan_link_order=0:log_path=$work/report-asan" \
    UBSAN_OPTIONS="$UBSAN_OPTIONS:log_path=$work/report-asan" \
    TSAN_OPTIONS="$TSAN_OPTIONS:ignore_noninstrumented_modules=1:log_path=$work/report-tsan" \
    timeout 500 "${fixed[@]}" env LD_PRELOAD="$runtimes" "$PYTHON" -m pytest -q -p no:cacheprovider tests/contract
}
check_contract() {
  local sanitizer pids=() failed=0
  case "$("$CC" --version)" in *Free\ Software*) ;; *) echo "== contract: skipped, needs gcc's runtimes"; return 0 ;; esac
  need_python
  for sanitizer in asan tsan; do
    if [ "$mode" != all ] && [ "$mode" != "$sanitizer" ]; then continue; fi
    (contract "$sanitizer") >"$work/contract-$sanitizer.log" 2>&1 &
    pids+=("$sanitizer:$!")
  done
  for sanitizer in "${pids[@]}"; do
    wait "${sanitizer#*:}" || failed=1
    echo "== contract tests, ${sanitizer%:*}"
    head -n 60 "$work/report-${sanitizer%:*}".* 2>/dev/null || true
    tail -20 "$work/contract-${sanitizer%:*}.log"
  done
  return "$failed"
}

# ---- one function per native file; new ones are found by their name

if [ $# -eq 0 ]; then
  mapfile -t names < <(declare -F | sed -n 's/^declare -f check_//p')
else
  names=("$@")
fi
for name in "${names[@]}"; do
  declare -F "check_$name" >/dev/null || { echo "no driver '$name' in $0" >&2; exit 2; }
  "check_$name"
done
echo "sanitize: all passed (${names[*]})"
