"""The configuration file's tables, and the settings of clients: what `ucxkv.connect` was not told by its caller.

One TOML file holds `[node]` (see `ucxkv.config`) and `[client]`, so that the processes of a host share it. For clients
the environment's UCXKV_CONFIG names the file. Later sources win: defaults, the file's `[client]`, the environment's
UCXKV_PATH, the argument or flag.

    [client]
    path = "message"
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from ucxkv.errors import SetupError, UsageError

__all__ = ["CONFIG_VARIABLE", "PATHS", "PATH_VARIABLE", "AskedPath", "check_keys", "path_setting", "read_tables"]

CONFIG_VARIABLE = "UCXKV_CONFIG"
PATH_VARIABLE = "UCXKV_PATH"
PATHS = ("auto", "mapped", "rma", "message", "network", "rdma")
"""auto; mapped: the node's memory mapped; rma, message: UCX, by one-sided reads or by messages, shared memory included;
network: as to another host, also on the same one; rdma: the same, and an RDMA device or nothing."""

_TABLES = ("node", "client")
_CLIENT_KEYS = ("path",)


class AskedPath(NamedTuple):
    """Which path a client takes, and who says so: `path='rma'`, UCXKV_PATH or a file; "" for the default."""

    path: str
    by: str


def path_setting(argument: str | None = None, environ: Mapping[str, str] | None = None) -> AskedPath:
    """The path to take. Raises UsageError for a wrong argument, SetupError for a wrong environment or file."""
    environ = os.environ if environ is None else environ
    if argument is not None:
        if argument not in PATHS:
            raise UsageError(f"path={argument!r}; one of {', '.join(PATHS)}")
        return AskedPath(argument, f"path={argument!r}")
    found = environ.get(PATH_VARIABLE)
    by = f"the environment's {PATH_VARIABLE}={found}"
    if not found and environ.get(CONFIG_VARIABLE):
        file = Path(environ[CONFIG_VARIABLE])
        table = read_tables(file)["client"]
        check_keys(table, _CLIENT_KEYS, file, "client")
        value = table.get("path", "")
        found, by = str(value), f"{file}: path = {value!r}"
    if not found:
        return AskedPath("auto", "")
    if found not in PATHS:
        raise SetupError(by, needed=f"one of {', '.join(PATHS)}")
    return AskedPath(found, by)


def read_tables(file: Path) -> dict[str, dict[str, object]]:
    """The tables of a configuration file, an empty one for each that it lacks. Raises SetupError naming the file."""
    import tomllib  # most clients read no file

    try:
        tables = tomllib.loads(file.read_text())
    except OSError as exc:
        raise SetupError(
            f"configuration {file}: {exc.strerror}", fix=f"check the path given to --config or {CONFIG_VARIABLE}"
        ) from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise SetupError(f"configuration {file} is no TOML: {exc}") from exc
    for name in tables:
        if name not in _TABLES:
            raise SetupError(
                f"configuration {file}: unknown table or key {name!r}", needed="the tables [node] and [client]"
            )
    for name in _TABLES:
        if not isinstance(tables.setdefault(name, {}), dict):
            raise SetupError(f"configuration {file}: {name} is no table", needed=f"a line [{name}], then key = value")
    return tables


def check_keys(table: Mapping[str, object], known: Collection[str], file: Path, name: str) -> None:
    """Refuse a key that the table does not know, so that a misspelt one never silently means its default."""
    for key in table:
        if key not in known:
            import difflib

            near = difflib.get_close_matches(key, sorted(known), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
            raise SetupError(f"configuration {file}: unknown key {key!r} in [{name}]; {hint}")
