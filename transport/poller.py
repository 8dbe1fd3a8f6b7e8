"""Readiness of stream sockets, through one epoll of our own beneath the event loop.

Promises: a socket whose peer is gone, reset or not, is reported as readable or writable until it is removed, on any
loop. uvloop 0.23 does not promise it: where a reset comes before anybody has read (EPOLLERR), libuv's poll handle ends
in silence, and so does whoever waits for that socket (MagicStack/uvloop#552). The loop watches the epoll's descriptor
alone, which has no errors.

One Poller a loop; its descriptor is there while it has sockets. Used by the loop's thread only.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import weakref
from collections.abc import Callable

__all__ = ["Poller", "connect_socket"]

_IN, _OUT = select.EPOLLIN | select.EPOLLRDHUP, select.EPOLLOUT
_GONE = select.EPOLLHUP | select.EPOLLERR
_EVENTS_MAX = 64

_pollers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Poller] = weakref.WeakKeyDictionary()


class Poller:
    """See the module. Get a loop's by `Poller.of_loop()`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._epoll: select.epoll | None = None
        self._pid = os.getpid()
        self._callbacks: dict[int, tuple[Callable[[], None] | None, Callable[[], None] | None]] = {}

    @staticmethod
    def of_loop() -> Poller:
        """The running loop's."""
        loop = asyncio.get_running_loop()
        poller = _pollers.get(loop)
        if poller is None:
            poller = _pollers[loop] = Poller(loop)
        return poller

    def set_reader(self, fd: int, callback: Callable[[], None] | None) -> None:
        """Call it whenever there is something to read, an end or an error; None: no more."""
        self._set(fd, callback, self._callbacks.get(fd, (None, None))[1])

    def set_writer(self, fd: int, callback: Callable[[], None] | None) -> None:
        """Call it whenever the kernel takes bytes, or would answer with an error; None: no more."""
        self._set(fd, self._callbacks.get(fd, (None, None))[0], callback)

    def remove(self, fd: int) -> None:
        """Forget a descriptor, before it is closed. Idempotent."""
        self._set(fd, None, None)

    def _set(self, fd: int, reader: Callable[[], None] | None, writer: Callable[[], None] | None) -> None:
        if os.getpid() != self._pid:  # the epoll is the parent's, too
            return
        is_known = fd in self._callbacks
        mask = (_IN if reader is not None else 0) | (_OUT if writer is not None else 0)
        if not mask:  # with an empty mask a socket that is gone would be reported for ever
            if is_known:
                del self._callbacks[fd]
                assert self._epoll is not None
                self._epoll.unregister(fd)
                if not self._callbacks:
                    self._close()
            return
        epoll = self._epoll or self._open()
        if is_known:
            epoll.modify(fd, mask)
        else:
            epoll.register(fd, mask)
        self._callbacks[fd] = (reader, writer)

    def _open(self) -> select.epoll:
        loop = self._loop()
        assert loop is not None
        self._epoll = epoll = select.epoll()
        loop.add_reader(epoll.fileno(), self._ready)
        return epoll

    def _close(self) -> None:
        assert self._epoll is not None
        loop = self._loop()
        if loop is not None and not loop.is_closed():
            loop.remove_reader(self._epoll.fileno())
        self._epoll.close()
        self._epoll = None

    def _ready(self) -> None:
        if self._epoll is None or os.getpid() != self._pid:
            return
        for fd, mask in self._epoll.poll(0, _EVENTS_MAX):
            for events, which in ((_IN, 0), (_OUT, 1)):
                callback = self._callbacks.get(fd, (None, None))[which]
                if callback is not None and mask & (events | _GONE):
                    self._call(callback)

    def _call(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception as exc:
            loop = self._loop()
            if loop is not None:
                loop.call_exception_handler({"message": "a socket's callback failed", "exception": exc})


async def connect_socket(sock: socket.socket, address: str | tuple[object, ...]) -> None:
    """Connect a socket that does not block. Raises OSError. Cancelled: the socket is still the caller's to close."""
    try:
        sock.connect(address)
    except (BlockingIOError, InterruptedError):
        pass
    else:
        return
    poller, done = Poller.of_loop(), asyncio.get_running_loop().create_future()

    def writable() -> None:
        if not done.done():
            done.set_result(None)

    poller.set_writer(sock.fileno(), writable)
    try:
        await done
    finally:
        poller.remove(sock.fileno())
    code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))
