"""A folder and an engine in memory that fail as disks do, and every state that a crash can leave.

Everything that happens is an event in one list; `crash(at)` makes the folder as it may be found when the machine or the
process stopped after the first `at` events:

- kill -9: what was written is there; of each write under way any subset of its 512-byte sectors.
- power cut: what was written before the last successful sync of its file began is there; of every later or unfinished
  write any subset of its sectors, so that a sector holds what any of those writes, or the state before them, put there.

Writes and syncs are carried out in random turns of the event loop, in random order, from a seed. A file that was being
created is there whole or, under a temporary name, not at all: that is what Folder promises."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ucxkv.tiers.io import DIRECT_ALIGNMENT, EngineBusy, EngineClosed, OpKind, SyncFailed

SECTOR = 512
SYNC = 2


@dataclass(eq=False)
class Op:
    """A transfer or a sync. data: of a write, as it was when it was submitted."""

    kind: int
    name: str
    file: int
    offset: int
    address: int
    length: int
    data: bytes
    done: Callable[[int], None]


@dataclass(frozen=True)
class Event:
    """kind: create, remove, submit (of a write), write (it was carried out), sync (was asked for), synced."""

    kind: str
    name: str
    op: Op | None = None
    data: bytes = b""
    sectors: tuple[int, ...] | None = None


def _put(content: bytearray, op: Op, sectors: tuple[int, ...] | None) -> None:
    if sectors is None:
        content[op.offset : op.offset + op.length] = op.data
    else:
        for at in sectors:
            part = op.data[at * SECTOR : (at + 1) * SECTOR]
            content[op.offset + at * SECTOR : op.offset + at * SECTOR + len(part)] = part


@dataclass
class FaultyDisk:
    """See Folder. content: as a reader sees it. refuse: errno for the next calls of a kind ("create", "open")."""

    content: dict[str, bytearray] = field(default_factory=dict)
    has_direct: bool = True
    late: list[tuple[str, Op, tuple[int, ...] | None]] = field(default_factory=list)
    """Writes of a killed owner that are still under way: they land at `settle`, or when a test says so."""

    def __post_init__(self) -> None:
        self.base = {name: bytes(data) for name, data in self.content.items()}
        self.events: list[Event] = []
        self.refuse: dict[str, int] = {}
        self.is_locked = False
        self.names_by_fd: dict[int, str] = {}
        self._next_fd = 1000

    path = "(memory)"

    def lock(self) -> None:
        assert not self.is_locked
        self.is_locked = True

    def release(self) -> None:
        self.is_locked = False

    def names(self) -> list[str]:
        return sorted(["lock", *self.content])

    def read_small(self, name: str) -> bytes:
        return bytes(self.content[name])

    def _refuse(self, kind: str) -> None:
        if kind in self.refuse:
            raise OSError(self.refuse[kind], "refused by the test")

    def open(self, name: str, *, direct: bool) -> tuple[int, bool]:
        self._refuse("open")
        fd = self._next_fd = self._next_fd + 1
        self.names_by_fd[fd] = name
        return fd, direct and self.has_direct

    async def settle(self, fd: int) -> None:
        await asyncio.sleep(0)
        self.land(self.names_by_fd[fd])

    def land(self, *names: str) -> None:
        """Late writes to files, all by default, reach the disk."""
        for name, op, sectors in self.late:
            if not names or name in names:
                _put(self.content[name], op, sectors)
        self.late = [each for each in self.late if names and each[0] not in names]

    def size(self, fd: int) -> int:
        return len(self.content[self.names_by_fd[fd]])

    def close(self, fd: int) -> None:
        del self.names_by_fd[fd]

    async def create(self, name: str, *, nbytes: int, head: bytes) -> None:
        self._refuse("create")
        await asyncio.sleep(0)
        self.content[name] = bytearray(head.ljust(nbytes, b"\0"))
        self.events.append(Event("create", name, data=bytes(self.content[name])))

    async def remove(self, name: str) -> None:
        del self.content[name]
        self.events.append(Event("remove", name))

    def crash(self, at: int, rng: random.Random, *, is_power: bool, kept: float | None = None) -> FaultyDisk:
        """The folder after the first `at` events. kept: share of the open sectors that made it, random by default."""
        kept = rng.choice([0.0, 0.1, 0.5, 0.9, 1.0]) if kept is None else kept
        content, unsure = self._split(at, rng, is_power=is_power)
        for op, sectors in unsure:
            if op.name in content:
                every = range(-(-op.length // SECTOR)) if sectors is None else sectors
                _put(content[op.name], op, tuple(each for each in every if rng.random() < kept))
        return FaultyDisk(content, self.has_direct)

    def killed(self, at: int, rng: random.Random) -> FaultyDisk:
        """The folder after the first `at` events and a kill -9, with what the disk had been given still under way."""
        content, unsure = self._split(at, rng, is_power=False)
        late = [(op.name, op, sectors) for op, sectors in unsure if op.name in content]
        return FaultyDisk(content, self.has_direct, late)

    def crashes(self, at: int, rng: random.Random, *, is_power: bool, most: int) -> Iterator[FaultyDisk]:
        """The folder after the first `at` events, once for each way in which the open writes are there whole or not at
        all; with more than `most` of them only `most` random ones may be."""
        content, unsure = self._split(at, rng, is_power=is_power)
        some = sorted(rng.sample(range(len(unsure)), min(most, len(unsure))))
        for size in range(len(some) + 1):
            for chosen in itertools.combinations(some, size):
                made = {name: bytearray(data) for name, data in content.items()}
                for number in chosen:
                    op, sectors = unsure[number]
                    if op.name in made:
                        _put(made[op.name], op, sectors)
                yield FaultyDisk(made, self.has_direct)

    def _split(
        self, at: int, rng: random.Random, *, is_power: bool
    ) -> tuple[dict[str, bytearray], list[tuple[Op, tuple[int, ...] | None]]]:
        """(what is there for sure after the first `at` events, writes that may be, in an order that may be)."""
        content = {name: bytearray(data) for name, data in self.base.items()}
        safe = self._safe(at) if is_power else {}
        flying: dict[int, Op] = {}
        loose: list[tuple[Op, tuple[int, ...] | None]] = []
        for index, event in enumerate(self.events[:at]):
            if event.kind == "create":
                content[event.name] = bytearray(event.data)
            elif event.kind == "remove":
                del content[event.name]
            elif event.kind == "submit" and event.op is not None:
                flying[id(event.op)] = event.op
            elif event.kind == "write" and event.op is not None:
                del flying[id(event.op)]
                if not is_power or index < safe.get(event.name, 0):
                    _put(content[event.name], event.op, event.sectors)
                else:
                    loose.append((event.op, event.sectors))
        rest = list(flying.values())
        rng.shuffle(rest)
        return content, [*loose, *((op, None) for op in rest)]

    def _safe(self, at: int) -> dict[str, int]:
        """By file: events before this one are on the disk."""
        asked: dict[int, int] = {}
        safe: dict[str, int] = {}
        for index, event in enumerate(self.events[:at]):
            if event.kind == "sync":
                asked[id(event.op)] = index
            elif event.kind == "synced":
                safe[event.name] = max(safe.get(event.name, 0), asked[id(event.op)])
        return safe


class FaultyEngine:
    """See IoEngine. fault: asked when an operation is carried out: None, an errno (a write then reaches a random part
    of its sectors), or minus the bytes that are moved at most. is_held: operations that wait until `release`.
    is_prompt: all that can be done is done in the next turn."""

    name = "faulty"
    max_inflight_bytes = 1 << 30

    def __init__(self, disk: FaultyDisk, seed: int = 0, *, max_ops: int = 4096, is_prompt: bool = False) -> None:
        self.disk = disk
        self.rng = random.Random(seed)
        self.max_ops = max_ops
        self.is_prompt = is_prompt
        self.fault: Callable[[Op], int | None] = lambda op: None
        self.is_held: Callable[[Op], bool] = lambda op: False
        self.changed_memory: list[Op] = []
        self.ops_done: list[Op] = []
        self.batches: list[list[int]] = []  # of each submit: the lengths of its operations
        self.registered: dict[int, int] = {}
        self._files: dict[int, tuple[int, bool]] = {}
        self._fenced: set[int] = set()
        self._waiting: list[Op] = []
        self._landed: dict[asyncio.Future[NDArray[np.int64]], asyncio.Future[None]] = {}
        self._is_scheduled = self._is_closed = False

    def attach(self, fd: int, *, direct: bool) -> int:
        if self._is_closed:
            raise EngineClosed("the engine is closed")
        file = next(number for number in range(1 << 16) if number not in self._files)
        self._files[file] = (fd, direct)
        self._fenced.discard(file)
        return file

    def detach(self, file: int) -> None:
        if any(op.file == file for op in self._waiting):
            raise EngineBusy("operations on the file are not done")
        del self._files[file]

    def register(self, address: int, nbytes: int) -> bool:
        self.registered[address] = nbytes
        return False

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def submit(self, ops: NDArray[np.void]) -> asyncio.Future[NDArray[np.int64]]:
        if self._is_closed:
            raise EngineClosed("the engine is closed")
        if len(self._waiting) + len(ops) > self.max_ops:
            raise EngineBusy(f"{len(self._waiting)} operations wait")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[NDArray[np.int64]] = loop.create_future()
        landed: asyncio.Future[None] = loop.create_future()
        results = np.zeros(len(ops), np.int64)
        left = len(ops)

        def finish(at: int, result: int) -> None:
            nonlocal left
            results[at] = result
            left -= 1
            if not left:
                landed.set_result(None)
                if not future.done():
                    future.set_result(results)

        self.batches.append(ops["length"].tolist())
        made = [self._make(row, lambda result, at=at: finish(at, result)) for at, row in enumerate(ops.tolist())]  # type: ignore[misc]
        self._landed[future] = landed
        landed.add_done_callback(lambda _: self._landed.pop(future, None))
        for op in made:
            if op.kind == OpKind.WRITE:
                self.disk.events.append(Event("submit", op.name, op))
        self._waiting += made
        self._schedule()
        return future

    def _make(self, row: tuple[int, int, int, int, int], done: Callable[[int], None]) -> Op:
        address, offset, length, file, kind = row
        if file not in self._files or kind not in (OpKind.READ, OpKind.WRITE):
            raise ValueError(f"no such file or kind: {file}, {kind}")
        fd, direct = self._files[file]
        if direct and (address % DIRECT_ALIGNMENT or offset % DIRECT_ALIGNMENT or length % DIRECT_ALIGNMENT):
            raise ValueError("misaligned on a direct file")
        if kind == OpKind.WRITE and file in self._fenced:
            raise SyncFailed("writing", errno=errno.EIO)
        data = ctypes.string_at(address, length) if kind == OpKind.WRITE else b""
        return Op(kind, self.disk.names_by_fd[fd], file, offset, address, length, data, done)

    async def settle(self, future: asyncio.Future[NDArray[np.int64]]) -> None:
        landed = self._landed.get(future)
        if landed is not None:
            await asyncio.shield(landed)

    async def sync(self, file: int) -> None:
        if file in self._fenced:
            raise SyncFailed("syncing", errno=errno.EIO)
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        op = Op(SYNC, self.disk.names_by_fd[self._files[file][0]], file, 0, 0, 0, b"", done.set_result)
        self.disk.events.append(Event("sync", op.name, op))
        self._waiting.append(op)
        self._schedule()
        result = await asyncio.shield(done)
        if result < 0:
            raise SyncFailed("syncing", errno=-result)

    @property
    def pending(self) -> int:
        return len(self._waiting)

    async def aclose(self) -> None:
        self._is_closed = True
        self.release()
        if self._landed:
            await asyncio.wait(list(self._landed.values()))

    def release(self) -> None:
        """Hold nothing any more."""
        self.is_held = lambda op: False
        self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled and self._waiting:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._is_scheduled = False
        ready = [op for op in self._waiting if not self.is_held(op)]
        self.rng.shuffle(ready)
        for op in ready[: len(ready) if self.is_prompt else self.rng.randrange(len(ready) + 1)]:
            self._waiting.remove(op)
            result = self._carry_out(op)
            self.ops_done.append(op)
            op.done(result)
        if ready:
            self._schedule()

    def _carry_out(self, op: Op) -> int:
        fault = self.fault(op)
        content = self.disk.content[op.name]
        if op.kind == SYNC:
            if fault is not None:
                self._fenced.add(op.file)
                return -fault
            self.disk.events.append(Event("synced", op.name, op))
            return 0
        if op.kind == OpKind.READ:
            if fault is not None and fault > 0:
                return -fault
            most = op.length if fault is None else -fault
            data = bytes(content[op.offset : op.offset + min(op.length, most)])
            ctypes.memmove(op.address, data, len(data))
            return len(data)
        if ctypes.string_at(op.address, op.length) != op.data:
            self.changed_memory.append(op)
        sectors: tuple[int, ...] | None = None
        result = op.length
        if fault is not None and fault > 0:
            result = -fault
            sectors = tuple(at for at in range(-(-op.length // SECTOR)) if self.rng.random() < 0.5)
        elif fault is not None:
            result = min(op.length, -fault)
            sectors = tuple(range(result // SECTOR))
        assert op.offset + op.length <= len(content), "a write past the file's end"
        _put(content, op, sectors)
        self.disk.events.append(Event("write", op.name, op, sectors=sectors))
        return result


def io_error(op: Op) -> int | None:
    """A `fault` that fails everything."""
    return errno.EIO


__all__ = ["SECTOR", "SYNC", "Event", "FaultyDisk", "FaultyEngine", "Op", "io_error"]
