"""ucxx and ucx-py: their asyncio interface (the two are alike), tagged and active messages between two workers.

The workers meet by worker address, so that no listener is needed (ucxx's binds every interface) and shared memory can
be used alone. Error handling is off on shared memory, where UCX would move the traffic to TCP otherwise. Progress mode
is "polling" (ucx-py: non-blocking), the fastest of their modes with asyncio on two cores.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from .base import Client, Config, Facts, Missing, Server
from .blocks import Blocks
from .device import Device
from .messages import ORDER_BYTES, MessageClient, MessageServer

__all__ = ["make_client", "make_server"]

_ORDER_TAG, _BLOCK_TAG = (1 << 40) + 1, (1 << 40) + 2
_MODULES = {"ucxx": "ucxx", "ucx-py": "ucp"}


class _Side:
    """One side's context: a Messenger once `connect` was told the other side's address."""

    def __init__(self, config: Config) -> None:
        try:
            self._library: Any = importlib.import_module(_MODULES[config.backend])
        except ImportError as exc:
            raise Missing(f"{config.backend} is not installed ({exc})") from exc
        self._is_ucxx = config.backend == "ucxx"
        self._is_same_host = config.wire == "shm"
        self._device = Device() if config.memory == "cuda" else None
        self._endpoint: Any = None
        if self._is_ucxx:
            self._library.init(progress_mode="polling")
        else:
            self._library.init(blocking_progress_mode=False)

    @property
    def address(self) -> str:
        """This worker's address."""
        return bytes(memoryview(self._library.get_worker_address())).hex()

    async def connect(self, address: str) -> None:
        """Make the endpoint."""
        other = self._library.get_ucx_address_from_buffer(bytes.fromhex(address))
        connect = self._library.create_endpoint_from_worker_address
        self._endpoint = await connect(other, endpoint_error_handling=not self._is_same_host)

    async def send_order(self, order: bytes) -> None:
        """See Messenger."""
        await self._endpoint.send(np.frombuffer(order, np.uint8), tag=_ORDER_TAG, force_tag=True)

    async def receive_order(self) -> bytes:
        """See Messenger."""
        order = np.empty(ORDER_BYTES, np.uint8)
        await self._endpoint.recv(order, tag=_ORDER_TAG, force_tag=True)
        return order.tobytes()

    async def send(self, kind: str, buffer: Any) -> None:
        """See Messenger."""
        if kind == "am":
            await self._endpoint.am_send(buffer)
        else:
            await self._endpoint.send(buffer, tag=_BLOCK_TAG, force_tag=True)

    async def receive(self, kind: str, into: Any) -> Any:
        """See Messenger."""
        if kind == "am":
            return await self._endpoint.am_recv()
        await self._endpoint.recv(into, tag=_BLOCK_TAG, force_tag=True)
        return into

    def pool(self, blocks: Blocks) -> Any:
        """See Messenger."""
        return blocks if self._device is None else self._device.upload(blocks)

    def bytes_of(self, buffer: Any) -> Blocks:
        """See Messenger."""
        return np.frombuffer(buffer, np.uint8) if self._device is None else self._device.download(buffer)

    def facts(self) -> Facts:
        """Versions, and the transports that UCX uses, where the library can tell."""
        facts = {"version": self._library.__version__}
        facts["ucx"] = ".".join(map(str, self._library.get_ucx_version()))
        if hasattr(self._library, "get_active_transports"):
            facts["transports"] = ",".join(sorted(self._library.get_active_transports()))
        return facts


def make_server() -> Server:
    """The side that echoes and drains."""
    return MessageServer(_Side)


def make_client() -> Client:
    """The side that measures."""
    return MessageClient(_Side)
