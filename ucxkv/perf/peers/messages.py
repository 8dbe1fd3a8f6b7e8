"""Messages between two sides of UCX, the same loops for every library: `am` (active messages) and `tag` (tag matching).

One at a time: n bytes there and the same n bytes back; the time of a message is half of the round trip, as ucx_perftest
counts it. A stream: one way, `at_once` messages on their way, ended by an answer to the last; the time is the stream's,
divided by its messages. What came back, and the last messages of a stream, are compared with what was sent.
"""

from __future__ import annotations

import asyncio
import random
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from .base import Config, Facts, OneByOne, Result, Server, ServerCpu, Task, WrongBytes
from .blocks import Blocks, Pattern, anonymous_blocks
from .rounds import Operation, draw, measure

__all__ = ["ORDER_BYTES", "MessageClient", "MessageServer", "Messenger"]

_ORDER = struct.Struct("<BB2xIQQ")  # what, kind, window, bytes, count
ORDER_BYTES = _ORDER.size
_PING, _STREAM, _DONE, _RIGHT, _WRONG = range(1, 6)
_KINDS = ("am", "tag")
_BYTES_MAX = 1 << 30
_WINDOW_MAX = 1024


class Messenger(Protocol):
    """One side's library. Orders are messages of ORDER_BYTES that never meet the measured ones."""

    @property
    def address(self) -> str:
        """What the other side connects to."""

    async def connect(self, address: str) -> None:
        """Make the way to the other side; nothing is sent or received before."""

    def facts(self) -> Facts:
        """Versions and transports."""

    async def send_order(self, order: bytes) -> None:
        """Send an order."""

    async def receive_order(self) -> bytes:
        """The next order."""

    async def send(self, kind: str, buffer: Any) -> None:
        """Send a buffer as an active or a tagged message; returns when it may be reused."""

    async def receive(self, kind: str, into: Any) -> Any:
        """The next message: `into`, or a buffer of the library's own making."""

    def pool(self, blocks: Blocks) -> Any:
        """Buffers with the content of u8[n, nbytes], to be indexed: the same memory, or its copy on a device."""

    def bytes_of(self, buffer: Any) -> Blocks:
        """The content of a buffer, u8[nbytes] in host memory."""


class MessageServer(Server):
    """Echoes and drains messages. make_side raises Missing."""

    def __init__(self, make_side: Callable[[Config], Messenger]) -> None:
        self._make_side = make_side

    async def start(self, config: Config) -> Facts:
        """See Server, for this and the next."""
        self._side = self._make_side(config)
        return {"address": self._side.address}

    async def ask(self, request: Facts) -> Facts:
        """The client's address."""
        await self._side.connect(request["peer"]["address"])
        self._serving = asyncio.ensure_future(_serve(self._side))
        return {}


class MessageClient(OneByOne):
    """Measures messages one at a time, or with task.at_once on their way. make_side raises Missing."""

    def __init__(self, make_side: Callable[[Config], Messenger]) -> None:
        self._make_side = make_side

    async def start(self, config: Config, server: Facts) -> Facts:
        """See Client, for this and what follows."""
        self._side = self._make_side(config)
        self._server = server
        return {"address": self._side.address}

    async def ready(self) -> None:
        """Both know each other."""
        await self._side.connect(self._server["address"])

    async def measure_one(self, task: Task, server_cpu: ServerCpu) -> Result:
        """One task."""
        operation = _PingPong(self._side, task) if task.at_once == 1 else _Stream(self._side, task)
        return await measure(operation, task, server_cpu)

    def facts(self) -> Facts:
        """Of this side."""
        return self._side.facts()


async def _serve(messenger: Messenger) -> None:
    """Carry out a client's orders, until cancelled."""
    while True:
        what, kind, window, nbytes, count = _ORDER.unpack(await messenger.receive_order())
        if kind >= len(_KINDS) or not 0 < nbytes <= _BYTES_MAX or not 0 < window <= _WINDOW_MAX:
            raise ValueError(f"an order of kind {kind}, {nbytes} bytes, window {window}")
        if what == _PING:
            await _echo(messenger, _KINDS[kind], nbytes, count)
        else:
            await _drain(messenger, _KINDS[kind], nbytes, count, window)


async def _echo(messenger: Messenger, kind: str, nbytes: int, count: int) -> None:
    room = messenger.pool(anonymous_blocks(1, nbytes))[0]
    for _ in range(count):
        await messenger.send(kind, await messenger.receive(kind, room))


async def _drain(messenger: Messenger, kind: str, nbytes: int, count: int, window: int) -> None:
    rooms = messenger.pool(anonymous_blocks(window, nbytes))
    last: list[Any] = [None] * window
    left = iter(range(count))

    async def receiver(place: int) -> None:
        for _ in left:
            last[place] = await messenger.receive(kind, rooms[place])

    await asyncio.gather(*map(receiver, range(window)))
    await messenger.send_order(_ORDER.pack(_DONE, 0, 1, nbytes, count))
    pattern = Pattern(nbytes)
    got = [messenger.bytes_of(message) for message in last if message is not None]
    is_right = all(pattern.matches(pattern.number_of(block), block) for block in got)
    await messenger.send_order(_ORDER.pack(_RIGHT if is_right else _WRONG, 0, 1, nbytes, len(got)))


def _filled(task: Task) -> Blocks:
    blocks = anonymous_blocks(task.count, task.nbytes)
    Pattern(task.nbytes).fill_all(blocks)
    return blocks


class _PingPong(Operation):
    def __init__(self, messenger: Messenger, task: Task) -> None:
        self._messenger, self._task = messenger, task
        self._pattern = Pattern(task.nbytes)
        self._pool = messenger.pool(_filled(task))
        self._into = messenger.pool(anonymous_blocks(task.count, task.nbytes))
        self._random = random.Random(1)
        self._numbers: list[int] = []
        self._got: list[Any] = []

    async def prepare(self, calls: int) -> None:
        self._numbers, self._got = draw(self._random, self._task.count, calls), []
        for number in self._numbers:
            self._into[number][:] = 0
        order = _ORDER.pack(_PING, _KINDS.index(self._task.op), 1, self._task.nbytes, calls)
        await self._messenger.send_order(order)

    async def operate(self) -> list[int]:
        times, kind = [], self._task.op
        for number in self._numbers:
            block, into = self._pool[number], self._into[number]
            start = time.perf_counter_ns()
            await self._messenger.send(kind, block)
            got = await self._messenger.receive(kind, into)
            times.append((time.perf_counter_ns() - start) // 2)
            self._got.append(got)
        return times

    async def check(self) -> None:
        for number, got in zip(self._numbers, self._got, strict=True):
            if not self._pattern.matches(number, self._messenger.bytes_of(got)):
                raise WrongBytes(f"message {number} of {self._task.nbytes} bytes came back with other bytes")
        self._got = []


class _Stream(Operation):
    is_stream = True

    def __init__(self, messenger: Messenger, task: Task) -> None:
        self._messenger, self._task = messenger, task
        self._pool = messenger.pool(_filled(task))
        self._random = random.Random(1)
        self._numbers: list[int] = []

    async def prepare(self, calls: int) -> None:
        self._numbers = draw(self._random, self._task.count, calls)
        window = min(self._task.at_once, calls)
        kind = _KINDS.index(self._task.op)
        await self._messenger.send_order(_ORDER.pack(_STREAM, kind, window, self._task.nbytes, calls))

    async def operate(self) -> list[int]:
        left = iter(self._numbers)
        start = time.perf_counter_ns()
        await asyncio.gather(*[self._sender(left) for _ in range(min(self._task.at_once, len(self._numbers)))])
        await self._messenger.receive_order()
        each_ns = (time.perf_counter_ns() - start) // len(self._numbers)
        return [each_ns] * len(self._numbers)

    async def _sender(self, left: Iterator[int]) -> None:
        for number in left:
            await self._messenger.send(self._task.op, self._pool[number])

    async def check(self) -> None:
        if _ORDER.unpack(await self._messenger.receive_order())[0] != _RIGHT:
            raise WrongBytes(f"messages of {self._task.nbytes} bytes arrived with other bytes")
