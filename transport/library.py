"""Which libucp this process uses: found, checked and loaded once, on first use.

Order: an explicit path; on a host with an RDMA device a system UCX >= 1.13 that has verbs (the PyPI wheels carry no
InfiniBand or RoCE); else the newest of the libucx wheel and the system's. Importing this module loads nothing and sets
no environment variable. A second, different libucp in the process (another package's) is detected and reported: two of
them clash over memory hooks and hang in the worst case.
"""

from __future__ import annotations

import ctypes
import glob
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .base import SetupFailed, UsageError

__all__ = ["OLDEST", "UcxLibrary", "load", "loaded", "mapped_libucp"]

OLDEST = (1, 13)
"""Oldest UCX (major, minor) whose symbols are used."""

_SYSTEM_DIRECTORIES = (
    "/opt/mellanox/ucx/lib",
    "/opt/hpcx/ucx/lib",
    "/usr/local/lib",
    "/usr/local/ucx/lib",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
)
_RDMA_DEVICES = Path("/sys/class/infiniband")
_PROBE = (
    "import ctypes,sys;d=sys.argv[1];[ctypes.CDLL(d+'/'+n) for n in ('libucs.so.0','libuct.so.0')];"
    "u=ctypes.CDLL(d+'/libucp.so.0');v=[ctypes.c_uint() for _ in range(3)];"
    "u.ucp_get_version(*map(ctypes.byref,v));print(*[x.value for x in v])"
)
_lock = threading.Lock()
_loaded: list[UcxLibrary] = []  # at most one


@dataclass(frozen=True, slots=True)
class UcxLibrary:
    """The libucp in use.

    directory: where libucp.so.0 lies; source: "explicit", "system" or "wheel"; modules: transport modules beside it
    (tcp, posix and self are built in); others: paths of other libucp files that this process has mapped too.
    """

    directory: Path
    version: tuple[int, int, int]
    source: str
    modules: tuple[str, ...]
    others: tuple[str, ...]

    @property
    def has_verbs(self) -> bool:
        """True when InfiniBand and RoCE transports are there."""
        return "ib" in self.modules

    @property
    def version_text(self) -> str:
        """Like 1.22.0."""
        return ".".join(map(str, self.version))


def loaded() -> UcxLibrary | None:
    """The library in use, or None while nothing needed one."""
    return _loaded[0] if _loaded else None


def load(path: str | os.PathLike[str] | None = None) -> UcxLibrary:
    """Load libucp (once) and the extension on top of it.

    path: a directory with libucp.so.0, or the file itself. Raises SetupFailed (none found, too old, extension missing)
    and UsageError (another one is loaded already).
    """
    with _lock:
        if _loaded:
            library = _loaded[0]
            if path is not None and _as_directory(Path(path)) != library.directory:
                raise UsageError(f"libucp of {library.directory} is loaded already; {path} cannot be used any more")
            return library
        directory, source = _find(Path(path) if path is not None else None)
        try:
            for name in ("libucs.so.0", "libuct.so.0", "libucp.so.0"):
                ctypes.CDLL(str(directory / name), mode=os.RTLD_LOCAL | os.RTLD_NOW)
        except OSError as exc:
            raise SetupFailed(f"libucp in {directory} does not load: {exc}") from exc
        version = _version()
        if version[:2] < OLDEST:
            raise SetupFailed(f"UCX in {directory} is {version[0]}.{version[1]}; {OLDEST[0]}.{OLDEST[1]} is the oldest")
        others = tuple(p for p in mapped_libucp() if not _is_same_file(p, directory / "libucp.so.0"))
        _loaded.append(UcxLibrary(directory, version, source, _modules(directory), others))
        return _loaded[0]


def binding() -> tuple[Any, Any]:
    """(ffi, lib) of the extension; loads the library first if nobody did."""
    load()
    from ._ucx import ffi, lib

    return ffi, lib


def _version() -> tuple[int, int, int]:
    try:
        from ._ucx import ffi, lib
    except ImportError as exc:
        raise SetupFailed(
            f"the extension ucxkv.transport._ucx does not load ({exc}); reinstall ucxkv where a C compiler is present, "
            "or run `python transport/build_ucx.py` in a source tree"
        ) from exc
    out = ffi.new("uint32_t[3]")
    lib.kv_version(out)
    return out[0], out[1], out[2]


def mapped_libucp() -> tuple[str, ...]:
    """Paths of every libucp file this process has mapped."""
    paths: dict[str, None] = {}
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
            for line in maps:
                path = line.rstrip("\n").partition("/")[2]
                if "libucp" in path.rpartition("/")[2]:
                    paths["/" + path.removesuffix(" (deleted)")] = None
    except OSError:
        return ()
    return tuple(paths)


def _is_same_file(one: str, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def _as_directory(path: Path) -> Path:
    path = path.resolve()
    return path if path.is_dir() else path.parent


def _modules(directory: Path) -> tuple[str, ...]:
    names = {Path(p).name.split(".")[0].removeprefix("libuct_") for p in glob.glob(str(directory / "ucx/libuct_*.so*"))}
    return tuple(sorted(names))


def _find(path: Path | None) -> tuple[Path, str]:
    if path is not None:
        directory = _as_directory(path)
        if not (directory / "libucp.so.0").exists():
            raise SetupFailed(
                f"no libucp.so.0 in {directory}; give the directory of a UCX >= 1.13 or leave the path out"
            )
        return directory, "explicit"
    system = [directory for directory in map(Path, _SYSTEM_DIRECTORIES) if (directory / "libucp.so.0").exists()]
    versions = {directory: _probe(directory) for directory in system}
    fit = [directory for directory in system if versions[directory] >= OLDEST]
    verbs = next((directory for directory in fit if "ib" in _modules(directory)), None)
    if verbs is not None and has_rdma_device():
        return verbs, "system"
    wheel = _wheel_directory()
    newest = max(fit, key=versions.__getitem__, default=None)
    if newest is not None and (wheel is None or versions[newest] > _probe(wheel)):
        return newest, "system"
    if wheel is not None:
        return wheel, "wheel"
    raise SetupFailed(
        "no UCX found: no system UCX >= 1.13 and no libucx wheel; install libucx-cu12 (pip) or libucx0 (Debian)"
    )


def has_rdma_device() -> bool:
    """Whether the kernel shows an RDMA device; this process may still be refused it."""
    try:
        return bool(os.listdir(_RDMA_DEVICES))
    except OSError:
        return False


def _wheel_directory() -> Path | None:
    spec = find_spec("libucx")
    if spec is None or not spec.submodule_search_locations:
        return None
    directory = Path(next(iter(spec.submodule_search_locations))) / "lib"
    return directory if (directory / "libucp.so.0").exists() else None


def _probe(directory: Path) -> tuple[int, ...]:
    """Version of a candidate, asked in another process so that a rejected one is not mapped here; () when it fails."""
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _PROBE, str(directory)], capture_output=True, timeout=60, check=True, text=True
        )
        return tuple(int(word) for word in done.stdout.split())
    except (OSError, ValueError, subprocess.SubprocessError):
        return ()
