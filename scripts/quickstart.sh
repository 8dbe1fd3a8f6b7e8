#!/usr/bin/env bash
# Two ucxkv nodes and two client processes on this machine, replaying a slice of a public trace; every byte is checked.
# Makes its own environment in .venv first. Needs: Linux, Python 3.11 or newer, a C compiler, 4 GiB of free memory.
#
#   bash scripts/quickstart.sh [--requests N] [--json]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/env.sh
ucxkv_env .venv
exec "$UCXKV_PYTHON" scripts/quickstart.py "$@"
