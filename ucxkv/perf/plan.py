"""What to measure: parsed and checked once, then plain values. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ucxkv.errors import UsageError
from ucxkv.sizes import parse_size

__all__ = ["CACHES", "MEMORIES", "OPERATIONS", "Plan", "Shape", "parse_names", "parse_sizes", "row_name"]

OPERATIONS = ("get", "put", "am", "tag", "look-up")
MEMORIES = ("host", "cuda")
CACHES = ("cold", "hot")
_SIZE_MAX = 1 << 30
_SIZES_MAX = 64
_FLIGHT_BYTES_MAX = 256 << 20  # on their way at a time; larger blocks are fewer
_QUICK_FLIGHT_BYTES_MAX = 128 << 20
_FLIGHT_MIN = 2
_COLD_BYTES_MIN = 4096
_SMALL_BLOCKS = 4096  # of a working set of blocks below that size: they come from the cache, whatever their number


@dataclass(frozen=True, slots=True)
class Shape:
    """How calls are made. batch: blocks of a call; at_once: calls on their way."""

    batch: int = 1
    at_once: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure.

    sizes: bytes, multiples of 8. batch, at_once: of the rows that are not single calls; 1 = no such rows. paths: ways
    of ucxkv's client. cache: "cold" = the working set is three last-level caches, "hot" = no more blocks than are on
    their way.
    """

    operations: tuple[str, ...]
    sizes: tuple[int, ...]
    backends: tuple[str, ...]
    paths: tuple[str, ...]
    batch: int = 64
    at_once: int = 8
    cache: str = "cold"
    memory: str = "host"
    is_quick: bool = False

    @property
    def budget_s(self) -> float:
        """Time for the measured rounds of one row."""
        return 0.03 if self.is_quick else 0.5

    def shapes(self, operation: str) -> list[Shape]:
        """Single calls first."""
        shapes = [Shape()]
        if self.batch > 1 and operation not in ("am", "tag"):
            shapes.append(Shape(batch=self.batch))
        if self.at_once > 1 and operation != "look-up":
            shapes.append(Shape(at_once=self.at_once))
        return shapes

    def fitted(self, nbytes: int, shape: Shape) -> Shape:
        """The shape with fewer blocks of a call, or calls, where they would pass 256 (quick: 128) MiB together."""
        most = max(_FLIGHT_MIN, (_QUICK_FLIGHT_BYTES_MAX if self.is_quick else _FLIGHT_BYTES_MAX) // nbytes)
        return Shape(min(shape.batch, most), min(shape.at_once, most))

    def blocks(self, nbytes: int, shape: Shape, cache_bytes: int) -> int:
        """Blocks in the working set of a shape, fitted to nbytes. cache_bytes: the last-level cache."""
        least = max(shape.batch, shape.at_once)
        if self.cache == "hot":
            return least
        return max(least, -(-3 * cache_bytes // nbytes) if nbytes >= _COLD_BYTES_MIN else _SMALL_BLOCKS)


def row_name(operation: str, shape: Shape) -> str:
    """How a row of this operation and shape is called: get, get_many, am, am_stream, look_up, ..."""
    name = operation.replace("-", "_")
    if shape.batch > 1:
        return f"{name}_many"
    if shape.at_once > 1 and operation in ("am", "tag"):
        return f"{name}_stream"
    return name


def parse_sizes(text: str) -> tuple[int, ...]:
    """Sizes, comma separated; `8:64MiB:x8` is 8, 64, 512, ... below 64 MiB, and 64 MiB.

    Raises UsageError for what is no size, 0, no multiple of 8, above 1 GiB, or more than 64 sizes.
    """
    sizes: list[int] = []
    for piece in text.split(","):
        first, *rest = piece.split(":")
        if not rest:
            sizes.append(parse_size(first))
            continue
        match = re.fullmatch(r"x(\d+)", rest[1].strip()) if len(rest) == 2 else None
        if match is None or int(match[1]) < 2:
            raise UsageError(f"--sizes: {piece!r} is no range; write FIRST:LAST:xFACTOR, as in 8:64MiB:x8")
        size, last = parse_size(first), parse_size(rest[0])
        if not 0 < size < last:
            raise UsageError(f"--sizes: the range {piece!r} does not grow")
        while size < last and len(sizes) <= _SIZES_MAX:
            sizes.append(size)
            size *= int(match[1])
        sizes.append(last)
    for size in sizes:
        if size < 8 or size % 8 or size > _SIZE_MAX:
            raise UsageError(f"--sizes: {size} bytes; use multiples of 8 from 8 bytes to 1GiB")
    if len(sizes) > _SIZES_MAX:
        raise UsageError(f"--sizes: more than {_SIZES_MAX} sizes")
    return tuple(dict.fromkeys(sizes))


def parse_names(option: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    """Names, comma separated, each one of `known`; `all` is all of them. Raises UsageError that quotes the unknown."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name != "all" and name not in known:
            raise UsageError(f"{option}: {name!r} is unknown; use {', '.join(known)} or all")
    if not names:
        raise UsageError(f"{option}: nothing named; use {', '.join(known)} or all")
    return tuple(known) if "all" in names else tuple(dict.fromkeys(names))
