"""What dead processes of ucxkv could leave on a host, and whether they did.

A name counts only when no living process holds it, so that other nodes and clients on the host never disturb the
answer.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["residue"]

_LOOKS, _PAUSE_S = 4, 0.25
_OURS = re.compile(r"ucx")  # ucxkv, ucx_shm_posix_...


def residue() -> set[str]:
    """Files in /dev/shm and abstract Unix sockets with our or UCX's names that no living process has open or mapped.

    Something that others open or close while we look is looked at again, so this takes up to a second. Sees the
    processes
    that this user may inspect; as another user's it may report what that user still holds.
    """
    left = _unheld()
    for _ in range(_LOOKS - 1):
        if not left:
            break
        time.sleep(_PAUSE_S)
        left &= _unheld()
    return left


def _unheld() -> set[str]:
    """One look: named before and after the holders were listed, and held by none of them."""
    sockets, files = _sockets(), _shared_files()
    if not sockets and not files:
        return set()
    held = set(_held())
    still = _sockets().keys()
    found = {f"socket @{name}" for inode, name in sockets.items() if f"socket:[{inode}]" not in held and inode in still}
    files &= _shared_files()
    return found | {path for path in files if path not in held and f"{path} (deleted)" not in held}


def _sockets() -> dict[str, str]:
    """Inode and name of the abstract sockets whose name tells of us."""
    found = {}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if len(fields) == 8 and fields[7].startswith("@") and _OURS.search(fields[7]):
            found[fields[6]] = fields[7][1:]
    return found


def _shared_files() -> set[str]:
    try:
        return {f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if _OURS.search(name)}
    except OSError:
        return set()


def _held() -> Iterator[str]:
    """Targets of all descriptors and mappings of all processes that we may look at."""
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            for descriptor in (process / "fd").iterdir():
                try:
                    yield os.readlink(descriptor)
                except OSError:
                    continue  # closed meanwhile
            for line in (process / "maps").read_text(errors="replace").splitlines():
                if "/dev/shm/" in line:
                    yield "/" + line.partition("/")[2]
        except OSError:
            continue  # ended meanwhile, or another user's
