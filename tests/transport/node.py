"""A small node for transport tests: a data service over one region, driven over a control connection.

Run as `python -m tests.transport.node NAME TRANSPORTS`; listens on unix:@NAME. Commands and replies are JSON.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import sys
import time
from typing import Any

import numpy as np
import xxhash

from tests.transport.native import EPOCH, address_of, pattern
from ucxkv.transport.address import UnixAddress
from ucxkv.transport.control import ControlConnection
from ucxkv.transport.control_server import ControlServer
from ucxkv.transport.data import FOUND_DTYPE
from ucxkv.transport.endpoint import Endpoint, Listener
from ucxkv.transport.memory import MemoryRegion
from ucxkv.transport.message import Message
from ucxkv.transport.progress import ReceivedMessage, Worker
from ucxkv.transport.service import DataService
from ucxkv.transport.ucx import Context

REGION_BYTES = 64 << 20
BLOCKS = 4096


class Node:
    """State of the node process; one method a command."""

    def __init__(self, transports: str) -> None:
        self.is_peer_mode = "tcp" in transports
        self.context = Context(transports=transports)
        self.memory = mmap.mmap(-1, REGION_BYTES)
        self.bytes = np.frombuffer(self.memory, np.uint8)
        self.region = MemoryRegion.register(self.context, self.memory)
        self.table = np.zeros(24 + BLOCKS * FOUND_DTYPE.itemsize, np.uint8)
        self.table[:8].view("<u8")[0] = BLOCKS
        self.table[16:24].view("<u8")[0] = EPOCH
        self.found = self.table[24:].view(FOUND_DTYPE)
        self.found["status"] = 1
        self.lost: list[int] = []
        self.worker: Worker | None = None
        self.echo_to: Endpoint | None = None
        self.listener: Listener | None = None
        self.allocated: MemoryRegion | None = None
        self.tasks: set[asyncio.Future[None]] = set()
        self.service = DataService(
            self.context,
            address_of("test_resolve"),
            self.table.ctypes.data,
            on_session_lost=lambda token, _: self.lost.append(token),
        )
        self.service.lend(0, self.region)

    async def reset(self) -> None:
        """Forget every block and delay; the memory is zero again, the epoch the first."""
        self.found[:] = 0
        self.found["status"] = 1
        self.table[8:16] = 0
        await self.begin_epoch(EPOCH)
        self.bytes[:] = 0

    async def hello(self, token: int, address: str, eager_only: bool) -> dict[str, Any]:
        await self.service.open_session(
            token, bytes.fromhex(address), is_peer_mode=self.is_peer_mode, is_eager_only=eager_only
        )
        return {"address": self.service.address.hex(), "base": self.region.address, "key": self.region.pack_key().hex()}

    async def publish(self, first: int, offsets: list[int], length: int) -> None:
        """Blocks first, first + 1, ... with their patterns at these offsets."""
        for number, offset in enumerate(offsets, first):
            data = pattern(number, length)
            self.bytes[offset : offset + length] = data
            self._show(number, offset, data)

    async def show(self, number: int, offset: int, length: int) -> None:
        """Make visible what lies there now."""
        self._show(number, offset, self.bytes[offset : offset + length])

    def _show(self, number: int, offset: int, data: Any) -> None:
        row = self.found[number]
        row["addr"], row["length"] = self.region.address + offset, len(data)
        row["sum"], row["generation"], row["slot"] = xxhash.xxh3_64_intdigest(data.tobytes()), number + 1, number
        row["status"], row["tier"] = 0, 1

    async def spoil(self, number: int, field: str, value: int) -> None:
        """Put nonsense into a block's record, or another byte into its memory (field 'byte')."""
        if field == "byte":
            offset = int(self.found[number]["addr"]) - self.region.address
            self.bytes[offset] ^= value
        else:
            self.found[number][field] = value

    async def begin_epoch(self, epoch: int) -> None:
        """Every resolve answers in this epoch from now on."""
        self.table[16:24].view("<u8")[0] = epoch

    async def delay(self, ns: int) -> None:
        """Every resolve takes this long from now on."""
        self.table[8:16].view("<u8")[0] = ns

    async def grant(self, token: int, offsets: list[int], capacity: int) -> list[int]:
        return self.service.grant(token, [0] * len(offsets), offsets, [capacity] * len(offsets)).tolist()

    async def revoke(self, token: int, offsets: list[int]) -> list[int]:
        return self.service.revoke(token, [0] * len(offsets), offsets).tolist()

    async def peek(self, offset: int, length: int) -> str:
        return self.bytes[offset : offset + length].tobytes().hex()

    async def close_session(self, token: int) -> bool:
        return await self.service.close_session(token)

    async def counters(self) -> dict[str, int]:
        return self.service.counters()._asdict()

    async def lost_sessions(self) -> list[int]:
        return self.lost

    async def block(self, seconds: float) -> None:
        """Keep this process's Python busy."""
        asyncio.get_running_loop().call_soon(time.sleep, seconds)

    async def echo(self, address: str) -> str:
        """Start (once) a worker that sends every message 1 back as message 2; an endpoint to this client's worker."""
        if self.worker is None:
            self.worker = Worker(self.context)
            self.worker.on_message(1, self._echo)
        self.echo_to = Endpoint.connect(self.worker, bytes.fromhex(address), is_peer_mode=self.is_peer_mode)
        return self.worker.address.hex()

    def _echo(self, message: ReceivedMessage) -> None:
        task = asyncio.ensure_future(self._send_back(message))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _send_back(self, message: ReceivedMessage) -> None:
        data = bytes(await message.receive())
        assert self.echo_to is not None
        await self.echo_to.send(2, message.header, data)

    async def listen(self) -> int:
        """A sockaddr listener whose endpoints get a greeting: message 2."""
        if self.worker is None:
            self.worker = Worker(self.context)
            self.worker.on_message(1, self._echo)
        self.listener = Listener(self.worker, "127.0.0.1", 0, self._greet)
        return self.listener.port

    def _greet(self, endpoint: Endpoint) -> None:
        self.echo_to = endpoint

    async def allocate(self, length: int) -> dict[str, Any]:
        """Memory allocated by UCX, filled with 0, 1, 2 .."""
        self.allocated = MemoryRegion.allocate(self.context, length)
        np.frombuffer(self.allocated.view, np.uint8)[:] = np.arange(length) % 251
        return {"base": self.allocated.address, "key": self.allocated.pack_key().hex()}

    async def stop(self) -> None:
        if self.worker is not None:
            if self.listener is not None:
                self.listener.close()
            await self.worker.aclose()
        if self.allocated is not None:
            self.allocated.close()
        self.service.close()
        self.region.close()
        self.context.close()


async def main(name: str, transports: str) -> None:
    node = Node(transports)
    done = asyncio.Event()
    tasks: set[asyncio.Task[None]] = set()

    async def answer(connection: ControlConnection, message: Message) -> None:
        command, arguments = json.loads(message.payload)
        result = await getattr(node, command)(**arguments)
        connection.reply(message, 1, json.dumps(result).encode())
        if command == "stop":
            await asyncio.sleep(0.01)
            done.set()

    def handler(connection: ControlConnection, message: Message) -> None:
        task = asyncio.create_task(answer(connection, message))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await ControlServer.start([UnixAddress(name)], handler)
    print("ready", os.getpid(), flush=True)
    await done.wait()
    server.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
