"""Fuzzing of what comes before a session is open; part of fuzz_protocol.py.

- frames: streams of whole, cut and spoilt frames in pieces of any size, against a decoder that sees them at once;
- greetings: callers that know the token and callers that do not, at a node that has one: only a right proof opens;
- dials: nodes that answer anything, and hand out any descriptors: the client raises an error of ucxkv or has a session.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ucxkv import errors
from ucxkv.client.mapped import MappedPath
from ucxkv.dial import Caller, dial, host_identity
from ucxkv.directory import SlotTableError, slots
from ucxkv.protocol import WIRE_VERSION, Message, auth, decode, encode
from ucxkv.protocol import messages as m
from ucxkv.tiers.base import TierError
from ucxkv.tiers.segments import HostSegment
from ucxkv.transport.base import ProtocolError, TransportError
from ucxkv.transport.control import ControlConnection
from ucxkv.transport.control import Message as ControlMessage
from ucxkv.transport.frames import HEADER, HEADER_BYTES, Frame, FrameDecoder, pack_header

if TYPE_CHECKING:
    from ucxkv.node import Node

__all__ = ["TOKEN", "Finding", "fuzz_dials", "fuzz_frames", "fuzz_greetings"]

TOKEN = "shared secret"
_MAX_FRAME = 300_000
_KNOWN_FLAGS = 0xFF01
_DEADLINE_NS = 2_000_000_000


class Finding(Exception):
    """Something that must not happen; the text says what."""


# ---- frames


def _expected(stream: bytes) -> tuple[list[Frame], bool]:
    """The frames of a whole stream, and whether it breaks a bound after them."""
    frames: list[Frame] = []
    at = 0
    while len(stream) - at >= HEADER_BYTES:
        length, kind, flags, request_id = HEADER.unpack_from(stream, at)
        if length > _MAX_FRAME or flags & ~_KNOWN_FLAGS:
            return frames, True
        if len(stream) - at - HEADER_BYTES < length:
            break
        frames.append((kind, flags, request_id, stream[at + HEADER_BYTES : at + HEADER_BYTES + length]))
        at += HEADER_BYTES + length
    return frames, False


def fuzz_frames(seed: int, seconds: float) -> int:
    """Streams through the decoder for a while; returns how many frames came out. Raises Finding."""
    rng, until, count = random.Random(seed), time.monotonic() + seconds, 0
    while time.monotonic() < until:
        stream = bytearray()
        for _ in range(rng.randrange(1, 8)):
            length = rng.choice((0, 1, 12, 300, rng.randrange(3000)))
            if rng.random() < 0.02:
                length = rng.choice((_MAX_FRAME, (256 << 10) - 13, (256 << 10) - 12, (256 << 10) - 11, 256 << 10))
            flags = rng.choice((0, 1, 0x0100, 0xFD01)) if rng.random() < 0.98 else rng.randrange(1 << 16)
            stream += pack_header(length, rng.randrange(1 << 16), flags, rng.randrange(1 << 32)) + rng.randbytes(length)
        if rng.random() < 0.3:
            stream[rng.randrange(len(stream))] ^= 1 << rng.randrange(8)
        if rng.random() < 0.3:
            del stream[rng.randrange(len(stream)) :]
        frames, is_broken = _expected(bytes(stream))
        seen, was_refused = _in_pieces(rng, bytes(stream))
        if seen != frames or was_refused != is_broken:
            raise Finding(f"{len(seen)} frames of {len(frames)}, refused {was_refused}, must be {is_broken}")
        count += len(seen)
    return count


def _in_pieces(rng: random.Random, stream: bytes) -> tuple[list[Frame], bool]:
    decoder, at = FrameDecoder(_MAX_FRAME), 0
    seen: list[Frame] = []
    step = rng.choice((1, 7, 200, 70_000, 1 << 20)) if len(stream) < 5000 else rng.choice((5000, 70_000, 1 << 20))
    while at < len(stream):
        room = decoder.buffer()
        n = min(rng.randrange(1, step + 1), len(room), len(stream) - at)
        room[:n] = stream[at : at + n]
        decoder.received(n)
        at += n
        try:
            while (frame := decoder.next_frame()) is not None:
                seen.append((frame[0], frame[1], frame[2], bytes(frame[3])))
        except ProtocolError:
            return seen, True
    return seen, False


# ---- greetings


async def _told(peer: ControlConnection, message: Message) -> Message | None:
    """The node's answer, None when it ended the connection."""
    try:
        reply = await peer.request_message(message.CODE, encode(message), time.monotonic_ns() + _DEADLINE_NS)
    except TransportError:
        return None
    try:
        return decode(reply.type, reply.payload)
    finally:
        reply.close_fds()


async def fuzz_greetings(node: Node, seed: int, seconds: float) -> int:
    """Callers at a node whose token is TOKEN for a while; returns how many. Raises Finding."""
    rng, until, count = random.Random(seed), time.monotonic() + seconds, 0
    recorded: list[bytes] = []
    while time.monotonic() < until:
        count += 1
        theirs, ours = socket.socketpair()
        server = ControlConnection(theirs, node._on_message, is_serving=True, max_frame_bytes=64 << 10)
        node._on_connect(server)
        peer = ControlConnection(ours, lambda _connection, message: message.close_fds())
        try:
            await _greet(rng, peer, recorded)
        finally:
            peer.abort()
            await asyncio.sleep(0)
            server.abort()
    return count


async def _greet(rng: random.Random, peer: ControlConnection, recorded: list[bytes]) -> None:
    nonce = rng.randbytes(16) if rng.random() < 0.9 else rng.randbytes(rng.randrange(40))
    hello = m.Hello(WIRE_VERSION, "0", "client", "fuzz", host_identity(), 1, nonce)
    if rng.random() < 0.1:  # something else comes first
        if isinstance(await _told(peer, m.Proof(rng.randbytes(32))), m.Welcome):
            raise Finding("a proof without a challenge opened a session")
        if rng.random() < 0.5:
            await _told(peer, m.GetStatus())
    challenge = await _told(peer, hello)
    if isinstance(challenge, m.Welcome):
        raise Finding("a node with a token let a caller in without a proof")
    if not isinstance(challenge, m.Challenge):
        return
    if not auth.is_proof(TOKEN, "node", challenge.nonce, nonce, challenge.proof):
        raise Finding("the node's own proof is wrong")
    right = auth.proof(TOKEN, "caller", nonce, challenge.nonce)
    spoilt = bytearray(right)
    spoilt[rng.randrange(32)] ^= 1 << rng.randrange(8)
    wrong = (
        bytes(spoilt),
        challenge.proof,
        auth.proof("", "caller", nonce, challenge.nonce),
        auth.proof(TOKEN, "caller", challenge.nonce, nonce),
        auth.proof(TOKEN, "node", nonce, challenge.nonce),
        right[: rng.randrange(32)],
        right + b"\0",
        rng.choice(recorded) if recorded else b"",
        b"",
    )
    recorded[:] = [*recorded[-20:], right]
    is_right = rng.random() < 0.3
    answer = await _told(peer, m.Proof(right if is_right else rng.choice(wrong)))
    if is_right != isinstance(answer, m.Welcome):
        raise Finding(f"a {'right' if is_right else 'wrong'} proof was answered with {type(answer).__name__}")
    if not is_right and isinstance(await _told(peer, m.GetMembers()), m.Members):
        raise Finding("a caller without a proof was answered")


# ---- dials


class _Liar:
    """A node that answers whatever `random` says, on a local socket."""

    def __init__(self, rng: random.Random, spoil: Callable[[bytes], bytes], make: Callable[[type[Message]], Message]):
        self.rng, self._spoil, self._make = rng, spoil, make
        self._files = [HostSegment.create(size, name="fuzz") for size in (1 << 14, 1 << 16)]
        table = slots.SlotTable(self._files[0].view, 16, epoch=1, lines=8)
        self._keep = table

    def close(self) -> None:
        """Give the files back."""
        del self._keep
        for file in self._files:
            with contextlib.suppress(BufferError):
                file.close()

    def _welcome(self) -> m.Welcome:
        rng = self.rng
        regions = [
            m.SegmentInfo(rng.choice((0, 1, 7, 1023, 1024, 1 << 40)), rng.choice((5, 6)), 1, 0, self._size())
            for _ in range(rng.randrange(4))
        ]
        members = [m.MemberInfo(5, "liar", rng.choice(("127.0.0.1:1", "", "x", "unix:@")), 1)]
        version = WIRE_VERSION if rng.random() < 0.9 else rng.randrange(1 << 40)
        return m.Welcome(
            version,
            "0",
            5,
            "liar",
            "127.0.0.1:1",
            1,
            host_identity(),
            "",
            9,
            self._size(),
            16,
            1 << 20,
            regions,
            members,
        )

    def _size(self) -> int:
        return self.rng.choice((1 << 14, 1 << 16, 0, 1, 4096, 1 << 20, 1 << 62))

    def answer(self, connection: ControlConnection, message: ControlMessage) -> None:
        """Handler of the liar's connections."""
        rng = self.rng
        message.close_fds()
        if rng.random() < 0.05:
            connection.abort()
            return
        said: Message = self._welcome()
        if rng.random() < 0.3:
            hello = decode(message.type, message.payload)
            nonce = rng.randbytes(16)
            caller = hello.nonce if isinstance(hello, m.Hello) else b""
            said = m.Challenge(nonce, auth.proof(TOKEN if rng.random() < 0.7 else "", "node", nonce, caller))
        elif rng.random() < 0.1:
            said = self._make(rng.choice((m.Failure, m.Members, m.Granted, m.Challenge, m.Welcome)))
        payload = encode(said)
        if rng.random() < 0.2:
            payload = self._spoil(payload)
        fds = [rng.choice(self._files).fd for _ in range(rng.randrange(4))]
        if fds and rng.random() < 0.7:
            fds[0] = self._files[0].fd  # the slot table, where it belongs
        with contextlib.suppress(TransportError):
            connection.reply(message, said.CODE, payload, fds=fds)


async def fuzz_dials(
    seed: int, seconds: float, spoil: Callable[[bytes], bytes], make: Callable[[type[Message]], Message]
) -> tuple[int, int]:
    """Dials to nodes that lie for a while; returns how many, and how many mappings came of them. Raises Finding."""
    rng, until, count, mapped = random.Random(seed), time.monotonic() + seconds, 0, 0
    liar = _Liar(rng, spoil, make)
    name = f"ucxkv-fuzz-{os.getpid()}-{rng.randrange(1 << 32)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind("\0" + name)
    listener.listen(16)
    listener.setblocking(False)
    loop, connections = asyncio.get_running_loop(), list[ControlConnection]()

    def accept() -> None:
        with contextlib.suppress(BlockingIOError):
            connections.append(ControlConnection(listener.accept()[0], liar.answer, is_serving=True))

    loop.add_reader(listener.fileno(), accept)
    try:
        while time.monotonic() < until:
            before = len(os.listdir("/proc/self/fd"))
            count += 1
            mapped += await _dial_liar(rng, name)
            while connections:
                connections.pop().abort()
            if len(os.listdir("/proc/self/fd")) > before:
                raise Finding("a dial left a descriptor behind")
    finally:
        loop.remove_reader(listener.fileno())
        listener.close()
        liar.close()
    return count, mapped


async def _dial_liar(rng: random.Random, name: str) -> int:
    token = rng.choice(("", TOKEN))
    caller, wants = Caller("client", "fuzz", token), rng.random() < 0.8
    try:
        dialed = await dial(f"unix:@{name}", caller, time.monotonic_ns() + _DEADLINE_NS, want_memory=wants)
    except errors.UcxKvError:
        return 0
    fds, dialed.fds = dialed.fds, ()
    try:
        path = MappedPath(dialed.welcome, fds)
    except (TierError, SlotTableError, OSError):
        return 0
    finally:
        dialed.connection.abort()
    path.contains(bytes(16))
    path.close()
    return 1
