"""The plainest engine: each batch is a thread's os.preadv and os.pwritev, one operation after the other."""

from __future__ import annotations

import asyncio
import ctypes
import os

import numpy as np
from numpy.typing import NDArray

from ucxkv.tiers.io import EngineBusy, OpKind, SyncFailed


class PlainEngine:
    """See IoEngine."""

    name = "plain"
    max_inflight_bytes = 1 << 30

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self._files: dict[int, int] = {}
        self._running: dict[asyncio.Future[NDArray[np.int64]], asyncio.Future[NDArray[np.int64]]] = {}

    def attach(self, fd: int, *, direct: bool) -> int:
        file = next(number for number in range(1 << 16) if number not in self._files)
        self._files[file] = fd
        return file

    def detach(self, file: int) -> None:
        if self._running:
            raise EngineBusy("operations are not done")
        del self._files[file]

    def register(self, address: int, nbytes: int) -> bool:
        assert address not in self.registered
        self.registered[address] = nbytes
        return False

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def submit(self, ops: NDArray[np.void]) -> asyncio.Future[NDArray[np.int64]]:
        rows = [(*row[:3], self._files[row[3]], row[4]) for row in ops.tolist()]
        future: asyncio.Future[NDArray[np.int64]] = asyncio.get_running_loop().create_future()
        running = asyncio.get_running_loop().run_in_executor(None, _carry_out, rows)  # no task: nobody cancels it
        self._running[future] = running

        def finish(done: asyncio.Future[NDArray[np.int64]]) -> None:
            del self._running[future]
            if not future.done():
                future.set_result(done.result())

        running.add_done_callback(finish)
        return future

    async def settle(self, future: asyncio.Future[NDArray[np.int64]]) -> None:
        running = self._running.get(future)
        if running is not None:
            await asyncio.shield(running)

    async def sync(self, file: int) -> None:
        try:
            await asyncio.to_thread(os.fdatasync, self._files[file])
        except OSError as exc:
            raise SyncFailed("syncing", errno=exc.errno or 0) from exc

    @property
    def pending(self) -> int:
        return len(self._running)

    async def aclose(self) -> None:
        if self._running:
            await asyncio.wait(list(self._running.values()))


def _carry_out(rows: list[tuple[int, int, int, int, int]]) -> NDArray[np.int64]:
    results = np.zeros(len(rows), np.int64)
    for at, (address, offset, length, fd, kind) in enumerate(rows):
        moved = 0
        try:
            while moved < length:
                memory = (ctypes.c_ubyte * (length - moved)).from_address(address + moved)
                move = os.preadv if kind == OpKind.READ else os.pwritev
                more = move(fd, [memory], offset + moved)
                if not more:
                    break
                moved += more
            results[at] = moved
        except OSError as exc:
            results[at] = -(exc.errno or 1)
    return results
