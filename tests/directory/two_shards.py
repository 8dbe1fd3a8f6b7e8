"""Two trees of blocks, in a shard each, and what a node's shell keeps of them: for the state machine over both."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.directory.arena import key_of
from ucxkv.directory import ROOT_KEY, events

KEYS = 18
SHARDS = 2
NAMES = [key_of(i) for i in range(KEYS)]
NUMBER = {key: i for i, key in enumerate(NAMES)}


def above(number: int) -> int:
    """A fixed tree of two roots, 0 and 1, each with a fork; -1 above a root."""
    return -1 if number < SHARDS else {4: 0, 5: 1}.get(number, number - 2)


def parent_of(number: int) -> bytes:
    return ROOT_KEY if number < SHARDS else NAMES[above(number)]


def shard_of(number: int) -> int:
    while number >= SHARDS:
        number = above(number)
    return number


OF_SHARD = [[n for n in range(KEYS) if shard_of(n) == shard] for shard in range(SHARDS)]
"""A shard's blocks, parents first."""


def roots_of(shard: int) -> events.Roots:
    def picks(keys: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
        return np.array([shard_of(NUMBER[key.tobytes()]) == shard for key in keys], np.bool_)

    return picks


@dataclass
class Waiting:
    """A staged batch: what it makes durable, what it stores, or what it takes out."""

    batch: int
    rows: list[int] = field(default_factory=list)
    stored: dict[int, int] = field(default_factory=dict)  # number -> offset
    status: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    going: list[int] = field(default_factory=list)


@dataclass
class Lease:
    end: int
    numbers: list[int]
    offsets: set[int]
    is_fixed: bool = False


@dataclass
class Standby:
    """What the shell keeps of a shard that it doesn't lead."""

    rows: Any
    busy_until: int
