"""Where this process is and where another one says that it is: what paths are chosen by.

A process tells its place once, in its Welcome; what a peer says is taken as it is, since it decides speed alone: that a
path works is proved by opening it.
"""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING

from ucxkv.protocol import messages as m
from ucxkv.transport.ranking import Location, Rail

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["clock_identity", "location_of", "place_of", "process_identity"]

_BORN = secrets.token_hex(8)
"""Of this interpreter: pids alone repeat in containers that share a kernel. A forked child differs by its pid."""


def process_identity() -> str:
    """Unique among the processes of this host: equal only within one process."""
    return f"{os.getpid()}-{_BORN}"


def clock_identity() -> str:
    """Which CLOCK_MONOTONIC this process reads, "" unknown: on one host those in one time namespace share it."""
    try:
        return os.readlink("/proc/self/ns/time")
    except OSError:
        return ""


def place_of(numa: int | None, rails: Iterable[Rail]) -> m.Place:
    """What this process tells others. numa: of its memory, None unknown; rails: those its UCX context opened."""
    ports = [m.RailInfo(*rail) for rail in rails]
    return m.Place(process_identity(), -1 if numa is None else numa, rails=ports, clock=clock_identity())


def location_of(welcome: m.Welcome) -> Location:
    """The place of the process behind a Welcome."""
    place = welcome.place
    rails = frozenset(Rail(rail.fabric, rail.number, rail.gid) for rail in place.rails)
    return Location(welcome.host, place.process, place.gpu, place.numa, rails=rails)
