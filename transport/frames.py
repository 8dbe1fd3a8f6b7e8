"""Frames of a control connection, sans I/O.

    offset  bytes  field (little endian)
    0       4      length of the payload in bytes
    4       2      type: what the frame asks or answers; the meaning belongs to the layer above
    6       2      flags: bit 0 REPLY; bits 8..15 number of file descriptors that travel with the frame; others zero
    8       4      request id: chosen by the asker, repeated by the reply; 0 = one-way, nobody answers
    12      length payload

Promises: no frame longer than `max_frame_bytes` is ever held; a header that breaks a bound raises ProtocolError before
anything of its payload is read; memory held is one receive buffer plus at most one frame that does not fit into it.
"""

from __future__ import annotations

import struct

from .base import ProtocolError

__all__ = [
    "FLAG_REPLY",
    "HEADER_BYTES",
    "MAX_FDS",
    "MAX_FRAME_BYTES",
    "Frame",
    "FrameDecoder",
    "Payload",
    "pack_header",
]

HEADER = struct.Struct("<IHHI")
HEADER_BYTES = HEADER.size
MAX_FRAME_BYTES = 64 << 20
MAX_FDS = 253  # SCM_MAX_FD: what one message of a Unix socket carries

FLAG_REPLY = 0x0001
_FLAGS_KNOWN = 0xFF00 | FLAG_REPLY

Payload = bytes | bytearray
Frame = tuple[int, int, int, Payload]
"""(type, flags, request id, payload); the payload is owned by the receiver."""

_RECEIVE_BYTES = 256 << 10
_FIRST_BYTES = 4 << 10  # before a connection has sent more: many never do


def pack_header(length: int, kind: int, flags: int, request_id: int) -> bytes:
    """The 12 bytes before a payload of `length` bytes."""
    return HEADER.pack(length, kind, flags, request_id)


class FrameDecoder:
    """Cuts a byte stream into frames: fill `buffer()`, say `received(n)`, then take `next_frame()` until it is None."""

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self.max_frame_bytes = max_frame_bytes
        self._memory = bytearray(_FIRST_BYTES)
        self._view = memoryview(self._memory)
        self._start = 0
        self._end = 0
        self._was_filled = False
        self._large: bytearray | None = None  # payload of a frame that does not fit into the receive buffer
        self._large_filled = 0
        self._large_header = (0, 0, 0)

    def buffer(self) -> memoryview:
        """Where the next received bytes go; never empty."""
        if self._large is not None:
            return memoryview(self._large)[self._large_filled :]
        if self._start == self._end:
            self._start = self._end = 0
            if self._was_filled:
                self._make_room(4 * len(self._memory))
        elif self._end == len(self._memory):
            self._make_room(4 * len(self._memory) if self._was_filled else 0)
        self._was_filled = False
        return self._view[self._end :]

    def _make_room(self, nbytes: int) -> None:
        """Move what is held to the beginning, of larger memory when `nbytes` asks for it (up to _RECEIVE_BYTES)."""
        held = bytes(self._view[self._start : self._end])
        nbytes = min(nbytes, _RECEIVE_BYTES)
        if nbytes > len(self._memory):
            self._memory = bytearray(nbytes)
            self._view = memoryview(self._memory)
        self._view[: len(held)] = held
        self._start, self._end = 0, len(held)

    def received(self, count: int) -> None:
        """`count` bytes were put into the memory that `buffer()` returned last."""
        if self._large is not None:
            self._large_filled += count
        else:
            self._end += count
            self._was_filled = self._end == len(self._memory)

    def next_frame(self) -> Frame | None:
        """The next whole frame, or None until more bytes are received. Raises ProtocolError."""
        large = self._large
        if large is not None:
            if self._large_filled < len(large):
                return None
            self._large = None
            kind, flags, request_id = self._large_header
            return kind, flags, request_id, large
        start = self._start
        held = self._end - start
        if held < HEADER_BYTES:
            return None
        length, kind, flags, request_id = HEADER.unpack_from(self._memory, start)
        if length > self.max_frame_bytes:
            raise ProtocolError(f"frame of {length} bytes (type {kind}); the limit here is {self.max_frame_bytes}")
        if flags & ~_FLAGS_KNOWN:
            raise ProtocolError(f"frame of type {kind} with unknown flags {flags:#06x}")
        body = start + HEADER_BYTES
        if held >= HEADER_BYTES + length:
            self._start = body + length
            return kind, flags, request_id, bytes(self._view[body : body + length])
        if HEADER_BYTES + length > _RECEIVE_BYTES:
            large = bytearray(length)
            self._large_filled = held - HEADER_BYTES
            large[: self._large_filled] = self._view[body : self._end]
            self._large, self._large_header = large, (kind, flags, request_id)
            self._start = self._end = 0
        elif start or HEADER_BYTES + length > len(self._memory):  # for the rest of this frame
            self._make_room(HEADER_BYTES + length)
        return None

    def finish(self) -> None:
        """The stream ended: raises ProtocolError when it ended inside a frame."""
        if self._large is not None:
            raise ProtocolError(
                f"stream ended inside a frame: {self._large_filled} of {len(self._large)} payload bytes"
            )
        held = self._end - self._start
        if held >= HEADER_BYTES:
            length = HEADER.unpack_from(self._memory, self._start)[0]
            raise ProtocolError(f"stream ended inside a frame: {held - HEADER_BYTES} of {length} payload bytes")
        if held:
            raise ProtocolError(f"stream ended inside a frame header: {held} of {HEADER_BYTES} bytes")
