"""Opens the engine that works here: io_uring where a probe finds that it does, threads elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from ..base import SetupFailed
from ..io import IoEngine, IoFailed
from .probe import Probe, probe_engine, refused
from .threads import ThreadsEngine
from .uring import open_ring

__all__ = ["MAX_INFLIGHT_BYTES", "MAX_OPS", "open_engine"]

MAX_INFLIGHT_BYTES = 8 << 20
"""More than 4 to 8 MiB under way make a drive's answers later, not faster (measured with fio, 256 KiB and larger)."""

MAX_OPS = 4096
"""Operations that may wait; each takes 88 bytes of a table."""


def open_engine(
    which: Literal["auto", "io_uring", "threads"] = "auto",
    *,
    directory: Path | None = None,
    max_inflight_bytes: int = MAX_INFLIGHT_BYTES,
    max_ops: int = MAX_OPS,
    on_probe: Callable[[Probe], None] | None = None,
) -> IoEngine:
    """An engine, closed by its user with `aclose`.

    which: `auto` takes io_uring if it works and threads otherwise; `io_uring` raises SetupFailed where it does not.
    directory: where its files will be, to probe there. on_probe: told once what was chosen and why, for the log.
    Raises ValueError for limits that cannot be, IoFailed when memory or descriptors are short.
    """
    if which not in ("auto", "io_uring", "threads"):
        raise ValueError(f"engine {which!r} is none of auto, io_uring, threads")
    if max_inflight_bytes < 1 or not 1 <= max_ops <= 1 << 20:
        raise ValueError(f"max_inflight_bytes {max_inflight_bytes} or max_ops {max_ops} (1 to {1 << 20}) cannot be")
    found = Probe("threads", "threads were asked for") if which == "threads" else probe_engine(directory)
    ring = None
    if found.name == "io_uring":
        try:
            ring = open_ring(max_inflight_bytes=max_inflight_bytes, max_ops=max_ops)
        except IoFailed as exc:  # there was room for the probe's ring, and others took it
            found = refused(exc)
    if on_probe is not None:
        on_probe(found)
    if ring is not None:
        return ring
    if which == "io_uring":
        raise SetupFailed(
            "io engine io_uring",
            found=found.why,
            needed="a kernel of 5.6 or newer that lets this process call io_uring_setup",
            fix="run with a seccomp profile that allows io_uring and kernel.io_uring_disabled=0, "
            "or choose the engine auto or threads",
        )
    return ThreadsEngine(max_inflight_bytes=max_inflight_bytes, max_ops=max_ops)
