"""What a node's blocks are on its disk: encoded when they are written, decoded when they are brought back.

Invariants
- All work on bytes runs in threads, few of them: writing behind and reading back have their own, so that neither waits
  for the other. A call returns when no thread uses the memory that it was given, cancelled or not.
- Bytes that do not have their sum are never encoded: they are stored as they are, and stay provably bad.
- What comes back has the sum that was said when it was written: of the bytes that were put, or, where the codec loses
  something, of those that it makes of them. Anything else is a damaged copy.
- A block is stored with loss once: one that came back from such a copy, or may have, is *exact* from then on, stored
  without loss, so that losses never add up. What its writer called exact never is. A copy's flags say it.
- A block that the codec declines is offered to `lossless`, where that can be had, and else stored as it is.
"""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from ucxkv.tiers.base import BlockDamaged, SetupFailed, TierError
from ucxkv.tiers.codecs import CODECS, ELEMENT_BYTES, ERROR_BOUND, Codec, CodecUnknown, codec_number, codec_of
from ucxkv.tiers.copy import sum_bytes
from ucxkv.tiers.datafiles.waiting import to_the_end

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Buffer

    from ucxkv.node.config import NodeConfig

__all__ = ["AS_IS", "EXACT", "Coded", "Coder", "Stored", "codec_in", "codecs_for", "is_exact_next", "is_usable"]

T = TypeVar("T")
AS_IS = 0
EXACT = 1 << 8
"""In a copy's flags, beside the codec's number: the value is not to be stored with loss."""
_ENCODERS = 2
"""One a batch of the writer that may be under way."""
_DECODERS = 4
_JOB_BYTES = 1 << 20
"""Of values that one job decodes: long enough to be worth the hop, short enough to share a request among threads."""


class Coded(NamedTuple):
    """A block as it is to be stored. codec: its number. sum: of `data`; shown: of what a reader gets of it later."""

    data: Buffer
    codec: int
    sum: int
    shown: int


class Stored(NamedTuple):
    """A block to decode: `data`, made by codec number `codec`, into `into`, whose bytes then have the sum `shown`."""

    data: Buffer
    codec: int
    into: Buffer
    shown: int


def codec_in(flags: int) -> int:
    """The number of the codec in a copy's flags; one that nobody has where they say more than this release knows."""
    return flags & ~EXACT


def is_exact_next(flags: int) -> bool:
    """Whether a block with such a copy is not stored with loss the next time."""
    return bool(flags & EXACT) or any(codec.number == flags and not codec.is_lossless for codec in CODECS)


def codecs_for(config: NodeConfig) -> tuple[Codec, ...]:
    """The codecs that a block is offered to, in this order. Raises SetupFailed, which names the setting and the fix."""
    name = config.disk_codec
    if name not in {codec.name for codec in CODECS}:
        known = " | ".join(codec.name for codec in CODECS)
        raise SetupFailed("disk_codec", found=repr(name), needed=known, fix="name one of these")
    if name == "none":
        return ()
    codec = codec_of(name)
    floats = tuple(ELEMENT_BYTES) if codec.is_lossless else tuple(ERROR_BOUND)
    if config.disk_dtype not in floats:
        raise SetupFailed(
            f"disk_codec = {name!r} and the type of the blocks' elements",
            found=f"disk_dtype = {config.disk_dtype!r}",
            needed=" | ".join(floats),
            fix='set disk_dtype to the type of keys and values, as "bfloat16"',
        )
    if not codec.is_lossless and min(config.disk_channels, config.disk_tokens) < 1:
        raise SetupFailed(
            f"disk_codec = {name!r} and the blocks' axes",
            found=f"disk_channels = {config.disk_channels}, disk_tokens = {config.disk_tokens}",
            needed="the lengths of the last axis and of that of tokens before it",
            fix="set disk_channels, as 128 for heads of 128 elements, and disk_tokens, as 16 for blocks of 16 tokens",
        )
    if codec.is_lossless:
        _prove_usable(codec)
        return (codec,)
    fallback = codec_of("lossless")
    return (codec, fallback) if is_usable(fallback.number) else (codec,)


def is_usable(number: int) -> bool:
    """Whether this process can read blocks of the codec with that number."""
    try:
        _prove_usable(codec_number(number))
    except (CodecUnknown, SetupFailed):
        return False
    return True


def _prove_usable(codec: Codec) -> None:
    """Encode something. Raises SetupFailed where the codec's library is missing."""
    codec.encode(bytes(1 << 10), dtype="uint8")


class Coder:
    """See the module. Raises SetupFailed as `codecs_for`."""

    def __init__(self, config: NodeConfig) -> None:
        self._codecs = codecs_for(config)
        self._dtype = config.disk_dtype
        self._axes = (config.disk_tokens, config.disk_channels)
        self._encoders = ThreadPoolExecutor(_ENCODERS, thread_name_prefix="disk-encode")  # threads come with work
        self._decoders = ThreadPoolExecutor(min(_DECODERS, os.cpu_count() or 1), thread_name_prefix="disk-decode")
        self.counts = {
            "disk_codec_in_bytes": 0,
            "disk_codec_out_bytes": 0,
            "disk_codec_declined": 0,
            "disk_decoded_bytes": 0,
        }

    @property
    def is_encoding(self) -> bool:
        """Whether blocks are encoded at all; those of an earlier life are decoded in any case."""
        return bool(self._codecs)

    @property
    def fact(self) -> str:
        """For reports: what is done to blocks, empty for nothing."""
        if not self._codecs:
            return ""
        names = ", else ".join(codec.name for codec in self._codecs)
        axes = "" if self._codecs[0].is_lossless else f" x {self._axes[0]} tokens x {self._axes[1]} channels"
        return f"codec {names} for {self._dtype}{axes}"

    # ---- to the disk

    async def encode(self, values: Sequence[Buffer], sums: Sequence[int], exact: Sequence[bool]) -> list[Coded]:
        """How to store these values, which have these sums; borrowed and not changed until this returns or raises."""

        def work() -> list[Coded]:
            return [self._encode(*each) for each in zip(values, sums, exact, strict=True)]

        coded = await _run(self._encoders, work)
        for value, one in zip(values, coded, strict=True):
            self.counts["disk_codec_in_bytes"] += memoryview(value).nbytes
            self.counts["disk_codec_out_bytes"] += memoryview(one.data).nbytes
            self.counts["disk_codec_declined"] += one.codec == AS_IS
        return coded

    def _encode(self, value: Buffer, total: int, is_exact: bool) -> Coded:
        as_is = Coded(value, AS_IS, total, total)
        if sum_bytes(value) != total:
            return as_is
        for codec in self._codecs:
            if is_exact and not codec.is_lossless:
                continue
            data = codec.encode(value, dtype=self._dtype, shape=self._shape(memoryview(value).nbytes))
            if data is None:
                continue
            shown = total
            if not codec.is_lossless:
                back = np.empty(memoryview(value).nbytes, np.uint8).data
                codec.decode(data, back)
                shown = sum_bytes(back)
            return Coded(data, codec.number, sum_bytes(data), shown)
        return as_is

    def _shape(self, nbytes: int) -> tuple[int, ...]:
        """(groups, tokens, channels) of a value of so many bytes, () where it has no such axes."""
        unit = self._axes[0] * self._axes[1] * ELEMENT_BYTES[self._dtype]
        return (nbytes // unit, *self._axes) if unit and nbytes and not nbytes % unit else ()

    # ---- from the disk

    async def decode(self, wanted: Sequence[Stored]) -> list[TierError | None]:
        """Decode these: None for each whose `into` has its value, else why not. Memory is the caller's again then."""
        jobs = [_run(self._decoders, partial(_decode_all, some)) for some in _shares(wanted)]
        done = await asyncio.gather(*jobs, return_exceptions=True)  # a job that raises leaves none behind
        outcomes: list[TierError | None] = []
        for found in done:
            if isinstance(found, BaseException):
                raise found
            outcomes += found
        for each, failed in zip(wanted, outcomes, strict=True):
            self.counts["disk_decoded_bytes"] += 0 if failed else memoryview(each.into).nbytes
        return outcomes

    def close(self) -> None:
        """End the threads; none has work any more."""
        self._encoders.shutdown()
        self._decoders.shutdown()


def _shares(wanted: Sequence[Stored]) -> list[Sequence[Stored]]:
    """Parts of about _JOB_BYTES."""
    parts, start, nbytes = [], 0, 0
    for at, each in enumerate(wanted):
        nbytes += memoryview(each.into).nbytes
        if nbytes >= _JOB_BYTES or at == len(wanted) - 1:
            parts.append(wanted[start : at + 1])
            start, nbytes = at + 1, 0
    return parts


def _decode_all(some: Sequence[Stored]) -> list[TierError | None]:
    return [_decode(each) for each in some]


def _decode(each: Stored) -> TierError | None:
    try:
        codec_number(each.codec).decode(each.data, each.into)
    except CodecUnknown as exc:
        return BlockDamaged(str(exc))
    except TierError as exc:
        return exc
    if sum_bytes(each.into) != each.shown:
        return BlockDamaged(f"{memoryview(each.into).nbytes} bytes do not have their sum once they are decoded")
    return None


async def _run(pool: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    """The result of work in one of the pool's threads, which is over when this returns or raises."""
    return await to_the_end(asyncio.get_running_loop().run_in_executor(pool, work))
