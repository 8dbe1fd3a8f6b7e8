"""A writer that is told step by step what to do and keeps no promise: a process, so that it can be stopped and killed.

    python -m tests.writer ADDRESS PATH     reads one command a line from standard input, answers each with one line

PATH is how it reaches the node's memory: `mapped` (segments in its own address space), `message` (UCX on one host) or
`network` (UCX as to another host). Each with the real calls of that path, and without the product's client.

    grant LENGTH COUNT   hold more extents            -> how many it holds
    scribble             write all extents it holds   -> how many writes UCX (or the memory) took
    scribble-all         as above, also those it committed, returned or lost
    put-raw              the same extents by UCX's one-sided put, which asks nobody, over the endpoint it has
    put-raw-anew         as put-raw, with a new endpoint whenever the node has closed the old one
    flood WHAT           one of the four again and again until the end of the process
    put KEYHEX           write and commit one extent  -> the PutStatus, or "refused"
    return               give all extents back        -> "returned"
    open-data            open the data path (again)   -> the answer's type
    session              its session's id             -> that
    close                end the control connection without Bye; the data path stays open
    exit
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine

import numpy as np

from tests.harness import ROOT
from tests.wire import RawPeer
from ucxkv.protocol import Message, encode
from ucxkv.protocol import messages as m
from ucxkv.tiers import copy as tier_copy
from ucxkv.tiers.segments import MappedSegment

__all__ = ["WRITER_PATHS", "Writer", "main"]

WRITER_PATHS = ("mapped", "message", "network")
_FILL, _PUT_FILL = b"\xee", b"\x11"
_FRAGMENT_BYTES = 192 << 10
_WRITE_AM = 21
_GIVE_UP_NS = 500_000_000


class Writer:
    """The process, as a test holds it. prefix: a command that execs what follows it (another host)."""

    def __init__(self, address: str, path: str = "mapped", prefix: tuple[str, ...] = ()) -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.writer", address, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=ROOT,
            text=True,
        )
        try:
            assert self._line() == "ready"
        except BaseException:
            self.end()
            raise

    def _line(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("- "):  # UCX writes its own warnings in between
                return line[2:].strip()
        raise AssertionError("the writer ended")

    def start(self, command: str) -> None:
        """Give a command and do not wait for its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def tell(self, command: str) -> str:
        """Give a command; its answer."""
        self.start(command)
        return self._line()

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs."""
        return self.process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def end(self) -> None:
        """kill -9, and wait. Idempotent."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class _Mapped:
    """Writes through its own mapping of the node's segment."""

    def __init__(self, peer: RawPeer, welcome: m.Welcome) -> None:
        self._peer, self._welcome = peer, welcome
        self._segment = MappedSegment(peer.fds[1], welcome.regions[0].size_bytes, writable=True)
        self._messages: _Messages | None = None

    def open(self) -> str:
        self._messages = _Messages(self._peer, self._welcome, is_same_host=True)
        return type(self._messages.opened).__name__

    async def write(self, offset: int, data: bytes) -> bool:
        self._segment.view[offset : offset + len(data)] = data
        return True

    async def put_raw(self, offset: int, data: bytes, *, is_stubborn: bool) -> bool:
        return await self.write(offset, data)

    async def write_whole(self, offset: int, data: bytes) -> None:
        await self.write(offset, data)


class _Messages:
    """Sends WRITE messages under its session's token, and one-sided puts with the key that it was given."""

    def __init__(self, peer: RawPeer, welcome: m.Welcome, *, is_same_host: bool) -> None:
        from ucxkv.transport.endpoint import Endpoint
        from ucxkv.transport.progress import Worker
        from ucxkv.transport.ucx import SAME_HOST_TRANSPORTS, Context

        self._peer, self._token, self._is_far = peer, welcome.session, not is_same_host
        self._epoch = welcome.epoch
        self._context = Context(transports=SAME_HOST_TRANSPORTS if is_same_host else None, is_shared=False)
        self._worker = Worker(self._context)
        self.opened = self._ask()
        self._connect = lambda: Endpoint.connect(self._worker, welcome.data_address, is_peer_mode=self._is_far)
        self._reconnect()

    def _reconnect(self) -> None:
        """The node closed the endpoint: an attacker makes another one."""
        assert isinstance(self.opened, m.DataOpened), self.opened
        self._endpoint = self._connect()
        self._key = self._endpoint.unpack_key(self.opened.key)

    def _ask(self) -> Message | None:
        return self._peer.ask(m.OpenData(self._worker.address, self._is_far, self._is_far))

    def open(self) -> str:
        return type(self._ask()).__name__

    async def write(self, offset: int, data: bytes) -> bool:
        return await self._try(lambda: self._write(offset, data))

    async def _try(self, call: Callable[[], Coroutine[object, object, None]], *, is_stubborn: bool = True) -> bool:
        """Whether UCX took it; stubborn: once more over a new endpoint when the node has closed the old one."""
        from ucxkv.transport.base import TransportError

        for _ in range(2 if is_stubborn else 1):
            try:
                await call()
                return True
            except TransportError:
                if is_stubborn:
                    self._reconnect()
        return False

    async def _write(self, offset: int, data: bytes) -> None:
        step = _FRAGMENT_BYTES if self._is_far else len(data)
        for at in range(0, len(data), step):
            header = self._token.to_bytes(8, "little") + bytes(16) + offset.to_bytes(8, "little")
            header += at.to_bytes(8, "little")
            flags = 2 if self._is_far else 0
            await self._endpoint.send(_WRITE_AM, header, data[at : at + step], flags=flags, deadline_ns=_soon())

    async def write_whole(self, offset: int, data: bytes) -> None:
        """As the product does, until the node says that it is there."""
        from ucxkv.transport.data import DataClient, WriteStatus

        client = DataClient(
            self._worker,
            self._endpoint,
            self._token,
            self._epoch,
            fragment_bytes=_FRAGMENT_BYTES * self._is_far,
        )
        source = np.frombuffer(data, np.uint8)
        status = await client.write(
            np.zeros(1, "<u2"),
            np.array([offset], "<u8"),
            np.array([0, 1], "<u4"),
            np.array([source.ctypes.data], "<u8"),
            np.array([len(data)], "<u8"),
            keep=source,
        )
        assert status.tolist() == [WriteStatus.WRITTEN], status

    async def put_raw(self, offset: int, data: bytes, *, is_stubborn: bool) -> bool:
        return await self._try(lambda: self._put_raw(offset, data), is_stubborn=is_stubborn)

    async def _put_raw(self, offset: int, data: bytes) -> None:
        await self._endpoint.put(data, self.opened.base + offset, self._key, deadline_ns=_soon())
        await self._endpoint.flush(deadline_ns=_soon())


def _soon() -> int:
    return time.monotonic_ns() + _GIVE_UP_NS


class _Process:
    """What the commands work on."""

    def __init__(self, address: str, path: str) -> None:
        self.peer = RawPeer(address)
        if path != "network":
            with self.peer as outside:
                local_name = outside.open().local_name
            self.peer = RawPeer(f"unix:@{local_name}")
        welcome = self.peer.open(want_memory=path == "mapped")
        self.session = welcome.session
        self.by: _Mapped | _Messages
        if path == "mapped":
            self.by = _Mapped(self.peer, welcome)
        else:
            self.by = _Messages(self.peer, welcome, is_same_host=path == "message")
        self.held: list[int] = []
        self.ever: list[int] = []
        self.length = 0
        self.tasks: list[asyncio.Task[None]] = []

    async def run(self, command: str, *words: str) -> str:
        match command:
            case "grant":
                self.length = int(words[0])
                await self._grant(int(words[1]))
                return str(len(self.held))
            case "scribble" | "scribble-all" | "put-raw" | "put-raw-anew":
                return str(await self._scribble(command))
            case "flood":
                self.tasks.append(asyncio.create_task(self._flood(words[0])))
                return "flooding"
            case "put":
                return await self._put(bytes.fromhex(words[0]))
            case "return":
                offsets = b"".join(offset.to_bytes(8, "little") for offset in self.held)
                message = m.Return(bytes(2 * len(self.held)), offsets)
                self.peer.send(message.CODE, encode(message), request_id=0)
                self.peer.ask(m.GetStatus())  # it was dealt with
                self.held.clear()
                return "returned"
            case "open-data":
                return self.by.open()
            case "session":
                return str(self.session)
            case "close":
                self.peer.close()
                return "closed"
        raise AssertionError(command)

    async def _grant(self, count: int) -> None:
        """A full node gives some and says when to ask for the rest."""
        until = time.monotonic() + 10
        while count > 0 and time.monotonic() < until:
            granted = self.peer.ask(m.Grant(self.length, count))
            assert isinstance(granted, m.Granted), granted
            offsets = memoryview(granted.offsets).cast("Q").tolist()
            count -= len(offsets)
            self.held += offsets
            self.ever = list(dict.fromkeys([*self.ever, *offsets]))
            await asyncio.sleep(granted.retry_after_ms / 1e3)

    async def _scribble(self, what: str) -> int:
        data, taken = _FILL * self.length, 0
        for offset in self.held if what == "scribble" else self.ever:
            if what.startswith("put-raw"):
                taken += await self.by.put_raw(offset, data, is_stubborn=what == "put-raw-anew")
            else:
                taken += await self.by.write(offset, data)
        return taken

    async def _flood(self, what: str) -> None:
        while True:
            await self._scribble(what)
            await asyncio.sleep(0)

    async def _put(self, key: bytes) -> str:
        offset, data = self.held.pop(), _PUT_FILL * self.length
        await self.by.write_whole(offset, data)
        done = self.peer.ask(
            m.Put(
                key,
                bytes(16),
                bytes(2),
                offset.to_bytes(8, "little"),
                self.length.to_bytes(4, "little"),
                tier_copy.sum_bytes(data).to_bytes(8, "little"),
            )
        )
        return str(done.status[0]) if isinstance(done, m.PutDone) else "refused"


def m_encode(message: Message) -> bytes:
    """The message's payload."""
    from ucxkv.protocol import encode

    return encode(message)


def _say(text: str) -> None:
    print(f"- {text}", flush=True)


async def _serve(address: str, path: str) -> None:
    process = _Process(address, path)
    _say("ready")
    loop = asyncio.get_running_loop()
    while True:
        line: str = await loop.run_in_executor(None, sys.stdin.readline)
        command, *words = line.split() or ["exit"]
        if command == "exit":
            os._exit(0)
        _say(await process.run(command, *words))


def main() -> None:
    """Entry point."""
    asyncio.run(_serve(sys.argv[1], sys.argv[2]))


if __name__ == "__main__":
    main()
