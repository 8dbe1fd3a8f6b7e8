"""A peer that speaks the control protocol over a plain blocking socket: what a wrong or hostile program may send."""

from __future__ import annotations

import array
import os
import socket
from typing import Self

from ucxkv.dial import host_identity
from ucxkv.protocol import WIRE_VERSION, Message, decode, encode
from ucxkv.protocol import messages as m
from ucxkv.transport.frames import HEADER, HEADER_BYTES, pack_header

__all__ = ["RawPeer", "hello"]


def hello(role: str = "client", name: str = "raw", *, want_memory: bool = False, wire: int = WIRE_VERSION) -> m.Hello:
    """A well-formed first message."""
    return m.Hello(
        wire_version=wire,
        version="0",
        role=role,
        name=name,
        host=host_identity(),
        pid=os.getpid(),
        nonce=bytes(16),
        want_memory=want_memory,
    )


class RawPeer:
    """One connection; `address` is "host:port" or "unix:@name". Reads raise TimeoutError after `timeout_s`."""

    def __init__(self, address: str, timeout_s: float = 5.0) -> None:
        if address.startswith("unix:@"):
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.socket.settimeout(timeout_s)
            self.socket.connect("\0" + address.removeprefix("unix:@"))
        else:
            host, _, port = address.rpartition(":")
            self.socket = socket.create_connection((host.strip("[]"), int(port)), timeout_s)
        self.fds: list[int] = []
        self._last_id = 0

    def send(self, kind: int, payload: bytes = b"", *, request_id: int | None = None, flags: int = 0) -> int:
        """One frame; returns its request id."""
        if request_id is None:
            self._last_id += 1
            request_id = self._last_id
        self.socket.sendall(pack_header(len(payload), kind, flags, request_id) + payload)
        return request_id

    def receive(self) -> tuple[int, int, int, bytes] | None:
        """The next frame, (type, flags, request id, payload); None at the end of the stream."""
        header = self._exactly(HEADER_BYTES)
        if header is None:
            return None
        length, kind, flags, request_id = HEADER.unpack(header)
        payload = self._exactly(length)
        return None if payload is None else (kind, flags, request_id, payload)

    def _exactly(self, nbytes: int) -> bytes | None:
        out = b""
        while len(out) < nbytes:
            try:
                data, rights, _, _ = self.socket.recvmsg(nbytes - len(out), socket.CMSG_SPACE(64 * 4))
            except ConnectionResetError:
                return None
            for _, _, raw in rights:
                self.fds += array.array("i", raw)
            if not data:
                return None
            out += data
        return out

    def ask(self, message: Message) -> Message | None:
        """The answer to one message, passing over what was not asked for; None when the node closed."""
        try:
            request_id = self.send(message.CODE, encode(message))
            while (frame := self.receive()) is not None:
                kind, flags, answered, payload = frame
                if flags & 1 and answered == request_id:
                    return decode(kind, payload)
        except (BrokenPipeError, ConnectionResetError):
            pass
        return None

    def open(self, role: str = "client", name: str = "raw", *, want_memory: bool = False) -> m.Welcome:
        """Shake hands."""
        answer = self.ask(hello(role, name, want_memory=want_memory))
        assert isinstance(answer, m.Welcome), answer
        return answer

    def is_ended(self) -> bool:
        """Wait for the node to close; False when it has not within the timeout."""
        try:
            while self.receive() is not None:
                continue
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Close the socket and what descriptors came. Idempotent."""
        self.socket.close()
        while self.fds:
            os.close(self.fds.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
