"""The floor: request and answer over a blocking socket, a Unix one on this host, TCP to another. No event loop.

A get sends a header with block numbers and receives the blocks into their places; a put sends header and blocks and
waits for eight bytes. The server's blocks and the client's lie in pools as large as the working set. A connection
starts with a random word that only the driver's client knows.
"""

from __future__ import annotations

import os
import random
import secrets
import socket
import struct
import threading
import time

import numpy as np

from .base import Client, Config, Facts, OneByOne, Result, Server, ServerCpu, Task, WrongBytes
from .blocks import Blocks, Pattern, anonymous_blocks
from .rounds import Operation, draw, measure

__all__ = ["make_client", "make_server"]

_HEADER = struct.Struct("<BxxxIQ")  # operation, blocks (prepare: of the pool), bytes a block
_PREPARE, _GET, _PUT = 1, 2, 3
_WORD_BYTES = 16
_DONE = b"ucxkv ok"
_TIMEOUT_S = 30.0
_BLOCKS_MAX = 1 << 16  # of a request
_POOL_BYTES_MAX = 8 << 30


def _receive(sock: socket.socket, into: memoryview) -> None:
    while into:
        got = sock.recv_into(into)
        if not got:
            raise ConnectionError("the other side of the socket has closed it")
        into = into[got:]


def _tune(sock: socket.socket) -> None:
    sock.settimeout(_TIMEOUT_S)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class _SocketServer(Server):
    def __init__(self) -> None:
        self._word = secrets.token_bytes(_WORD_BYTES)
        self._pool: Blocks = np.empty((0, 0), np.uint8)

    async def start(self, config: Config) -> Facts:
        if config.wire == "shm":
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind("")  # the kernel picks an abstract name
            address: list[object] = [listener.getsockname().decode("latin-1")]
        else:
            family, _, _, _, target = socket.getaddrinfo(config.host, 0, type=socket.SOCK_STREAM)[0]
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.bind(target)
            address = list(listener.getsockname()[:2])
        listener.listen(1)
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return {"address": address, "word": self._word.hex()}

    def _accept(self, listener: socket.socket) -> None:
        while True:
            sock, _ = listener.accept()
            _tune(sock)
            with sock:
                try:
                    word = bytearray(_WORD_BYTES)
                    _receive(sock, memoryview(word))
                    if secrets.compare_digest(word, self._word):
                        sock.settimeout(None)  # the driver ends this process when the client is gone
                        self._serve(sock)
                except (OSError, ValueError):
                    continue  # that client is gone, or is none

    def _serve(self, sock: socket.socket) -> None:
        header = memoryview(bytearray(_HEADER.size))
        while True:
            _receive(sock, header)
            kind, count, nbytes = _HEADER.unpack(header)
            if kind == _PREPARE:
                self._prepare(count, nbytes)
                sock.sendall(_DONE)
                continue
            if not 0 < count <= _BLOCKS_MAX:
                raise ValueError(f"{count} blocks in a request")
            numbers = np.empty(count, "<u4")
            _receive(sock, numbers.data.cast("B"))
            blocks = [self._pool[number].data for number in numbers.tolist()]
            if kind == _GET:
                for block in blocks:
                    sock.sendall(block)
            else:
                for block in blocks:
                    _receive(sock, block)
                sock.sendall(_DONE)

    def _prepare(self, count: int, nbytes: int) -> None:
        if not 0 < count * nbytes <= _POOL_BYTES_MAX or nbytes % 8:
            raise ValueError(f"a pool of {count} blocks of {nbytes} bytes")
        self._pool = np.empty((0, 0), np.uint8)
        self._pool = anonymous_blocks(count, nbytes)
        Pattern(nbytes).fill_all(self._pool)

    async def ask(self, request: Facts) -> Facts:
        raise ValueError("the socket server is asked over its socket only")


class _SocketClient(OneByOne):
    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._is_unix = False

    async def start(self, config: Config, server: Facts) -> Facts:
        self._is_unix = len(server["address"]) == 1
        if self._is_unix:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            _tune(self._socket)
            self._socket.connect(server["address"][0].encode("latin-1"))
        else:
            self._socket = socket.create_connection(tuple(server["address"]), timeout=_TIMEOUT_S)
            _tune(self._socket)
        self._socket.sendall(bytes.fromhex(server["word"]))
        return {}

    async def measure_one(self, task: Task, server_cpu: ServerCpu) -> Result:
        assert self._socket is not None
        self._socket.sendall(_HEADER.pack(_PREPARE, task.count, task.nbytes))
        _receive(self._socket, memoryview(bytearray(len(_DONE))))
        return await measure(_Exchange(self._socket, task), task, server_cpu)

    def facts(self) -> Facts:
        return {"version": os.uname().release, "transports": "unix" if self._is_unix else "tcp"}


class _Exchange(Operation):
    """Gets, or puts, of task.batch blocks a request."""

    def __init__(self, sock: socket.socket, task: Task) -> None:
        self._socket, self._task = sock, task
        self._pattern = Pattern(task.nbytes)
        self._pool = anonymous_blocks(task.count, task.nbytes)
        self._random = random.Random(1)
        self._sources: list[int] = []
        self._targets: list[int] = []
        if task.op == "put":
            self._pattern.fill_all(self._pool)

    async def prepare(self, calls: int) -> None:
        n, count = calls * self._task.batch, self._task.count
        self._sources, self._targets = draw(self._random, count, n), draw(self._random, count, n)

    async def operate(self) -> list[int]:
        call = self._get if self._task.op == "get" else self._put
        batch, times = self._task.batch, []
        for low in range(0, len(self._sources), batch):
            sources, targets = self._sources[low : low + batch], self._targets[low : low + batch]
            start = time.perf_counter_ns()
            call(sources, targets)
            times.append(time.perf_counter_ns() - start)
        return times

    def _get(self, sources: list[int], targets: list[int]) -> None:
        header = _HEADER.pack(_GET, len(sources), self._task.nbytes)
        self._socket.sendall(header + np.asarray(sources, "<u4").tobytes())
        for target in targets:
            _receive(self._socket, self._pool[target].data)

    def _put(self, sources: list[int], targets: list[int]) -> None:
        header = _HEADER.pack(_PUT, len(sources), self._task.nbytes)
        self._socket.sendall(header + np.asarray(targets, "<u4").tobytes())
        for source in sources:
            self._socket.sendall(self._pool[source])
        done = bytearray(len(_DONE))
        _receive(self._socket, memoryview(done))
        if done != _DONE:
            raise WrongBytes(f"the socket server answered {bytes(done)!r}")

    async def check(self) -> None:
        if self._task.op == "get":
            for source, target in zip(self._sources, self._targets, strict=True):
                self._expect(source, self._pool[target])
            self._pool[self._targets] = 0
            return
        back = anonymous_blocks(1, self._task.nbytes)[0]
        for source, target in zip(self._sources, self._targets, strict=True):
            header = _HEADER.pack(_GET, 1, self._task.nbytes)
            self._socket.sendall(header + np.asarray([target], "<u4").tobytes())
            _receive(self._socket, back.data)
            self._expect(source, back)

    def _expect(self, number: int, block: Blocks) -> None:
        if not self._pattern.matches(number, block):
            raise WrongBytes(f"block {number} of {self._task.nbytes} bytes arrived with other bytes")


def make_server() -> Server:
    """The side that answers."""
    return _SocketServer()


def make_client() -> Client:
    """The side that asks."""
    return _SocketClient()
