# Sourced, never run: makes or reuses a virtual environment in the repository, for the other scripts.
#
#   . scripts/env.sh
#   ucxkv_env .venv test                    # folder, extras of pyproject.toml (comma separated, may be empty)
#   ucxkv_env .venv-torch test "torch==2.13.0"   # further requirements as further arguments
#
# Promises: afterwards $UCXKV_PYTHON is that environment's interpreter (3.11 or newer) and its bin/ comes first in
# PATH; the project is installed editable, its native modules built. Nothing is done when pyproject.toml, setup.py,
# the C sources, the build scripts, the interpreter and the arguments are those of the last successful call. System
# packages are installed only on Debian and its kin, only as root, only those missing; otherwise the message names
# them. Two scripts may call it at once (a lock in the environment's folder).

UCXKV_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

ucxkv_say() { printf '%s\n' "$*" >&2; }

ucxkv_find_python() {
  # The interpreter to build from: $PYTHON when set, else the first of the usual names that is 3.11 or newer.
  local candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if command -v "$candidate" >/dev/null 2>&1 &&
      "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return 0
    fi
  done
  return 1
}

ucxkv_missing_packages() {
  # Debian names of what is missing to make an environment with $1 and to compile the C modules.
  local python="$1"
  if [ -z "$python" ]; then
    printf 'python3 python3-venv python3-dev '
  else
    "$python" -c 'import ensurepip, venv' 2>/dev/null || printf 'python3-venv '
    "$python" - 2>/dev/null <<'PY' || printf 'python3-dev '
import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))
PY
  fi
  command -v "${CC:-cc}" >/dev/null 2>&1 || printf 'gcc '
  [ -e /usr/include/stdio.h ] || command -v clang >/dev/null 2>&1 || printf 'libc6-dev '
}

ucxkv_system_packages() {
  local python missing
  python="$(ucxkv_find_python || true)"
  missing="$(ucxkv_missing_packages "$python")"
  [ -n "$missing" ] || return 0
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    ucxkv_say "setup: apt-get install $missing"
    # shellcheck disable=SC2086
    { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends $missing; } >&2 || {
      ucxkv_say "setup: apt-get failed; needed: $missing"
      return 1
    }
    if [ -z "$(ucxkv_find_python || true)" ]; then
      ucxkv_say "setup: python3 here is older than 3.11; set PYTHON to a newer interpreter"
      return 1
    fi
    return 0
  fi
  ucxkv_say "setup: missing: $missing"
  ucxkv_say "setup: install them (Debian: apt-get install $missing), or set PYTHON to an interpreter >= 3.11 and CC to a C compiler"
  return 1
}

ucxkv_fingerprint() {
  # Two hashes: of everything that a build depends on ($1 is the interpreter), and of the other arguments.
  {
    "$1" -c 'import sys; print(sys.version, sys.prefix)'
    cd "$UCXKV_ROOT" && find pyproject.toml setup.py transport tiers ucxkv/directory \
      \( -name 'pyproject.toml' -o -name 'setup.py' -o -name 'build_*.py' -o -name '*.h' -o -name '*.c' \) \
      ! -name '_*.c' -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum
  } | sha256sum | cut -c1-32 | tr '\n' ' '
  shift
  printf '%s\n' "$@" | sha256sum | cut -c1-32
}

ucxkv_install() {
  # Fills the environment: build requirements first, so that the build needs no second copy of them.
  local python="$1" extras="$2" started=$SECONDS
  shift 2
  local -a requires pip=("$python" -m pip --disable-pip-version-check install)
  [ -t 2 ] || pip+=(-q -q)
  mapfile -t requires < <("$python" -c '
import sys, tomllib
print("\n".join(tomllib.load(open(sys.argv[1], "rb"))["build-system"]["requires"]))' "$UCXKV_ROOT/pyproject.toml")
  ucxkv_say "setup: 1/3 build requirements: ${requires[*]}"
  "${pip[@]}" "${requires[@]}" >&2 || return 1
  if [ "$#" -gt 0 ]; then
    ucxkv_say "setup: 2/3 $*"
    "${pip[@]}" "$@" >&2 || return 1
  fi
  ucxkv_say "setup: 3/3 ucxkv and its dependencies${extras:+, extras: $extras} (compiles the native modules)"
  "${pip[@]}" --no-build-isolation -e "$UCXKV_ROOT${extras:+[$extras]}" >&2 || return 1
  ucxkv_say "setup: ready after $((SECONDS - started)) s"
}

ucxkv_env() {
  local folder="$UCXKV_ROOT/$1" extras="${2:-}" base mark kept
  shift
  [ "$#" -eq 0 ] || shift
  ucxkv_system_packages || return 1
  base="$(ucxkv_find_python)" || return 1
  mkdir -p "$folder" || return 1
  exec 9>"$folder.lock" || return 1
  if command -v flock >/dev/null && ! flock -n 9; then
    ucxkv_say "setup: another script is setting up $folder; waiting for it"
    flock 9
  fi
  if ! "$folder/bin/python" -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    ucxkv_say "setup: virtual environment in ${folder#"$UCXKV_ROOT"/} from $base"
    "$base" -m venv --clear "$folder" || return 1
  fi
  UCXKV_PYTHON="$folder/bin/python"
  mark="$(ucxkv_fingerprint "$UCXKV_PYTHON" "$extras" "$@")"
  if ! grep -qxF -- "$mark" "$folder/.installed" 2>/dev/null || ! ucxkv_is_built; then
    # What was installed for other arguments stays valid only while the sources are the same.
    kept="$(grep -- "^${mark% *} " "$folder/.installed" 2>/dev/null || true)"
    rm -f "$folder/.installed"
    ucxkv_install "$UCXKV_PYTHON" "$extras" "$@" || {
      ucxkv_say "setup: failed; the lines above say why. Removing ${folder#"$UCXKV_ROOT"/} and trying again starts afresh."
      return 1
    }
    printf '%s\n' ${kept:+"$kept"} "$mark" >"$folder/.installed"
  fi
  exec 9>&-
  export UCXKV_PYTHON PATH="$folder/bin:$PATH"
}

ucxkv_is_built() {
  # The native modules lie beside their sources in an editable install; `git clean` may have removed them.
  compgen -G "$UCXKV_ROOT/transport/_ucx*.so" >/dev/null && compgen -G "$UCXKV_ROOT/tiers/_host*.so" >/dev/null &&
    compgen -G "$UCXKV_ROOT/tiers/_engine*.so" >/dev/null &&
    compgen -G "$UCXKV_ROOT/ucxkv/directory/_slots*.so" >/dev/null
}
