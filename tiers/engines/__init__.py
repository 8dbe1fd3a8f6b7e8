"""Engines that move bytes between memory and files: io_uring where the kernel allows it, threads elsewhere."""

from __future__ import annotations

from .opening import MAX_INFLIGHT_BYTES, MAX_OPS, open_engine
from .probe import Probe, probe_engine

__all__ = ["MAX_INFLIGHT_BYTES", "MAX_OPS", "Probe", "open_engine", "probe_engine"]
