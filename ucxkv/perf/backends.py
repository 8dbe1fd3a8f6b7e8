"""The backends: what each can do, which module runs it in which interpreter, and how to get it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ucxkv.errors import UsageError

__all__ = ["BACKENDS", "Backend", "find_perftest", "parse_interpreters"]


@dataclass(frozen=True, slots=True)
class Backend:
    """One backend. module: of `ucxkv.perf.peers`, or with dots of ucxkv's own; "" = it runs in the command's process.

    is_tool: it measures all tasks of an operation in one run. how: the way to get it. note: what its rows mean that
    others' do not.
    """

    name: str
    operations: tuple[str, ...]
    module: str = ""
    has_batches: bool = True
    has_at_once: bool = True
    is_tool: bool = False
    how: str = ""
    note: str = ""

    @property
    def is_foreign(self) -> bool:
        """Whether another interpreter may run it."""
        return bool(self.module) and "." not in self.module


BACKENDS: Mapping[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend(
            "ucxkv",
            ("get", "put", "am", "look-up"),
            "ucxkv.perf.active",
            note="get, put and look_up are the product's calls (look-up, sums and await included); am is the message "
            "interface of its UCX binding, which has no tag matching",
        ),
        Backend(
            "ucx_perftest",
            ("get", "put", "am", "tag"),
            "perftest",
            is_tool=True,
            how="pip install libucx-cu12, or Debian's ucx-utils",
            note="polls on both sides, moves one buffer again and again (in the cache), verifies nothing; one put is "
            "half of a round trip, a batch is that many operations on their way",
        ),
        Backend(
            "ucxx",
            ("am", "tag"),
            "rapids",
            has_batches=False,
            how="pip install ucxx-cu12 in an environment of its own (it pins libucx below 1.22), then "
            "--python ucxx=/path/to/its/python",
            note="asyncio, progress mode polling; its Python has no one-sided operations",
        ),
        Backend(
            "ucx-py",
            ("am", "tag"),
            "rapids",
            has_batches=False,
            how="archived upstream and no package on PyPI; a RAPIDS conda environment up to 25.08 has it, then "
            "--python ucx-py=/path/to/its/python",
            note="asyncio, non-blocking progress mode",
        ),
        Backend(
            "nixl",
            ("get", "put"),
            "nixl",
            how="pip install --no-deps nixl-cu12 numpy in an environment of its own, then "
            "--python nixl=/path/to/its/python",
            note="one-sided, to a place both sides agreed on before: no directory, no sums",
        ),
        Backend(
            "socket",
            ("get", "put"),
            "sockets",
            has_at_once=False,
            note="request and answer over a blocking socket, Unix or TCP: the floor without UCX",
        ),
        Backend("memcpy", ("get", "put"), has_at_once=False, note="the copy alone, in one process, timed in C"),
    )
}


def parse_interpreters(texts: Sequence[str]) -> dict[str, str]:
    """Backend -> interpreter, from texts NAME=PATH. Raises UsageError."""
    found: dict[str, str] = {}
    for text in texts:
        name, _, path = text.partition("=")
        if name not in BACKENDS or not BACKENDS[name].is_foreign:
            names = ", ".join(each.name for each in BACKENDS.values() if each.is_foreign)
            raise UsageError(f"--python {text!r}: write NAME=PATH with a NAME of {names}")
        if not path or not os.access(path, os.X_OK) or os.path.isdir(path):
            raise UsageError(f"--python {text!r}: {path or 'nothing'} is no program that can be run")
        found[name] = os.path.abspath(path)
    return found


def find_perftest() -> str:
    """Path of ucx_perftest: beside the libucp in use, else the wheel's, else from PATH; empty when there is none."""
    from ucxkv.transport.library import loaded

    library = loaded()
    folders = [library.directory.parent / "bin", library.directory.parent.parent / "bin"] if library else []
    spec = find_spec("libucx")
    if spec is not None and spec.submodule_search_locations:
        folders.append(Path(next(iter(spec.submodule_search_locations))) / "bin")
    for folder in folders:
        if os.access(folder / "ucx_perftest", os.X_OK):
            return str(folder / "ucx_perftest")
    return shutil.which("ucx_perftest") or ""


def interpreter_of(name: str, interpreters: Mapping[str, str]) -> str:
    """The interpreter that runs a backend."""
    return interpreters.get(name, sys.executable)
