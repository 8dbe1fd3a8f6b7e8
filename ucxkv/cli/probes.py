"""The questions of `ucxkv doctor` that only trying answers: each probe does it once, harmlessly."""

from __future__ import annotations

import ctypes
import importlib
import os
import platform
import resource
import subprocess
import sys

from ucxkv.cli.checks import Probes

__all__ = ["PROBES"]

_NATIVE = ("ucxkv.tiers._host", "ucxkv.directory._slots")  # transport's own stands and falls with libucp: see `ucx`
_IO_URING_SETUP = 425  # the same number on all architectures
_READ_OTHER = """
import ctypes, os, sys
class Piece(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
into = ctypes.create_string_buffer(8)
here, there = Piece(ctypes.addressof(into), 8), Piece(int(sys.argv[2]), 8)
libc = ctypes.CDLL(None, use_errno=True)
if not hasattr(libc, "process_vm_readv"):
    sys.exit("not in this libc")
got = libc.process_vm_readv(int(sys.argv[1]), ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
sys.exit(0 if got == 8 and into.raw == b"ucxkv-ok" else os.strerror(ctypes.get_errno()))
"""


def native() -> str:
    """Names of native modules that cannot be imported, with the reason; empty when all can."""
    missing = []
    for name in _NATIVE:
        try:
            importlib.import_module(name)
        except ImportError as exc:
            missing.append(f"{name} ({exc})")
    return ", ".join(missing)


def ucx() -> dict[str, object]:
    """The libucp that a node here would use, loaded, with transport's extension on top of it. Raises SetupFailed."""
    from ucxkv.transport.library import load

    library = load()
    return {
        "version": library.version_text,
        "path": str(library.directory),
        "source": library.source,
        "transports": ("self", "tcp", "posix", "sysv", *library.modules),
        "has_verbs": library.has_verbs,
    }


def other_ucx() -> list[str]:
    """Paths of other libucp files that this process has mapped besides ours."""
    from ucxkv.transport.library import loaded

    library = loaded()
    return list(library.others) if library is not None else []


def memlock() -> int:
    """The soft limit in bytes; -1 = unlimited."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return -1 if limit == resource.RLIM_INFINITY else limit


def dev_shm_free() -> int:
    """Free bytes of /dev/shm; -1 when there is none."""
    try:
        facts = os.statvfs("/dev/shm")
    except OSError:
        return -1
    return facts.f_bavail * facts.f_frsize


def huge_segment() -> str:
    """The pages that a node's segment gets on this host: huge-explicit, huge-transparent or small. Tried on 4 MiB."""
    from ucxkv.tiers.segments import HostSegment

    with HostSegment.create(4 << 20, "ucxkv-doctor") as segment:
        return segment.page_kind


def io_uring() -> str:
    """Empty when a ring can be set up, else why not."""
    libc = ctypes.CDLL(None, use_errno=True)
    parameters = ctypes.create_string_buffer(120)  # struct io_uring_params
    descriptor = libc.syscall(_IO_URING_SETUP, 2, parameters)
    if descriptor >= 0:
        os.close(descriptor)
        return ""
    return os.strerror(ctypes.get_errno())


def process_vm_readv() -> str:
    """Empty when an unrelated process of the same user may read our memory, else why not.

    A child asks for eight bytes of this process: exactly what UCX's cma does between a client and a node.
    """
    if platform.system() != "Linux":
        return "no Linux"
    ours = ctypes.create_string_buffer(b"ucxkv-ok", 8)
    try:
        done = subprocess.run(
            [sys.executable, "-S", "-E", "-c", _READ_OTHER, str(os.getpid()), str(ctypes.addressof(ours))],
            check=False,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        return str(exc)
    return "" if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"


def cpus() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


PROBES: Probes = {
    "native": native,
    "ucx": ucx,
    "other_ucx": other_ucx,
    "memlock": memlock,
    "dev_shm_free": dev_shm_free,
    "huge_segment": huge_segment,
    "io_uring": io_uring,
    "process_vm_readv": process_vm_readv,
    "cpus": cpus,
}
"""By name, as `ucxkv.cli.checks` asks for them."""
