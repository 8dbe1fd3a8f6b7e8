"""Active messages of ucxkv's own binding, by the loops that measure ucxx: a peer that needs ucxkv's interpreter.

What is measured is the general message interface of `ucxkv.transport` (a payload nobody pre-posted a buffer for is
copied twice on its way), not the data service, whose messages are answered in C and land in their places.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import numpy as np

from ucxkv.perf.peers.base import Client, Config, Facts, Missing, Server
from ucxkv.perf.peers.blocks import Blocks
from ucxkv.perf.peers.messages import MessageClient, MessageServer
from ucxkv.transport.base import SetupFailed
from ucxkv.transport.endpoint import Endpoint
from ucxkv.transport.progress import ReceivedMessage, Worker
from ucxkv.transport.ucx import Context

__all__ = ["make_client", "make_server"]

_ORDER_ID, _BLOCK_ID = 1, 2


class _Inbox:
    """Messages of one id, in the order of their arrival."""

    def __init__(self) -> None:
        self._arrived: deque[ReceivedMessage] = deque()
        self._waiting: deque[asyncio.Future[ReceivedMessage]] = deque()

    def put(self, message: ReceivedMessage) -> None:
        """The worker's handler."""
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(message)
                return
        self._arrived.append(message)

    async def get(self) -> ReceivedMessage:
        """The next one."""
        if self._arrived:
            return self._arrived.popleft()
        future: asyncio.Future[ReceivedMessage] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        return await future


class _Side:
    """One side's worker: a Messenger once `connect` was told the other side's address."""

    def __init__(self, config: Config) -> None:
        if config.memory != "host":
            raise Missing("ucxkv measures host memory only in this version")
        try:
            self._context = Context(is_shared=False)  # the driver chose the transports, in the environment
        except SetupFailed as exc:
            raise Missing(str(exc)) from exc
        self._is_same_host = config.wire == "shm"
        self._worker = Worker(self._context)
        self._orders, self._blocks = _Inbox(), _Inbox()
        self._worker.on_message(_ORDER_ID, self._orders.put)
        self._worker.on_message(_BLOCK_ID, self._blocks.put)
        self._endpoint: Endpoint | None = None

    @property
    def address(self) -> str:
        """This worker's address."""
        return self._worker.address.hex()

    async def connect(self, address: str) -> None:
        """Make the endpoint."""
        other = bytes.fromhex(address)
        self._endpoint = Endpoint.connect(self._worker, other, is_peer_mode=not self._is_same_host)

    async def send_order(self, order: bytes) -> None:
        """See Messenger."""
        assert self._endpoint is not None
        await self._endpoint.send(_ORDER_ID, order)

    async def receive_order(self) -> bytes:
        """See Messenger."""
        return (await self._orders.get()).header

    async def send(self, kind: str, buffer: Any) -> None:
        """See Messenger."""
        assert kind == "am"
        assert self._endpoint is not None
        await self._endpoint.send(_BLOCK_ID, b"", buffer)

    async def receive(self, kind: str, into: Any) -> Any:
        """See Messenger."""
        return await (await self._blocks.get()).receive(into)

    def pool(self, blocks: Blocks) -> Any:
        """See Messenger."""
        return blocks

    def bytes_of(self, buffer: Any) -> Blocks:
        """See Messenger."""
        return np.frombuffer(buffer, np.uint8)

    def facts(self) -> Facts:
        """Version of UCX."""
        return {"ucx": self._context.library.version_text}


def make_server() -> Server:
    """The side that echoes and drains."""
    return MessageServer(_Side)


def make_client() -> Client:
    """The side that measures."""
    return MessageClient(_Side)
