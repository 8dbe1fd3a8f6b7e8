#!/usr/bin/env python
"""Fuzz the control protocol: frames, payloads, handshakes, and whole sessions with a node.

    python scripts/fuzz_protocol.py --seconds 300

Payloads go into `decode`, which may raise MessageError and nothing else; streams of frames, in pieces, into the frame
decoder; callers with and without the token to a node that has one; and dials to nodes that lie (fuzz_handshake.py).
Half of the time whole sessions go through a socket pair into a node of this process: handshakes, well-formed messages
of every type with keys and extents that exist or almost do, data paths that are opened, spoilt payloads, broken frames.
The node must answer or end the connection, its loop must see no exception, and its store's invariants must hold. Prints
what was run; exit code 1, and the seed, on a finding. The same seed replays the same inputs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import random
import socket
import sys
import time
import traceback
from typing import Any, get_args, get_origin, get_type_hints

import structlog
from fuzz_handshake import TOKEN, fuzz_dials, fuzz_frames, fuzz_greetings

from ucxkv.dial import host_identity
from ucxkv.node import Node, NodeConfig
from ucxkv.protocol import WIRE_VERSION, Message, MessageError, decode, encode
from ucxkv.protocol import messages as m
from ucxkv.protocol.codec import _ITEM_BYTES, _PARALLEL, _TYPES
from ucxkv.transport.base import TransportError
from ucxkv.transport.control import ControlConnection
from ucxkv.transport.frames import pack_header

_HINTS = {kind: get_type_hints(kind) for kind in _TYPES.values()}
_INTS = (0, 1, 2, 3, 16, 255, 256, 4096, 65_535, 65_536, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 63, (1 << 64) - 1)
_TEXTS = ("", "client", "node", "fuzz", "127.0.0.1:1", "unix:@nobody", "\0", "x" * 300, "\U0001f511")
_KEYS = [bytes([i]) * 16 for i in range(12)]
_MESSAGES_A_SESSION = 80
_BUSY = (
    m.Grant,
    m.Grant,
    m.Put,
    m.Put,
    m.PutPart,
    m.LeaseKeys,
    m.Renew,
    m.Release,
    m.Delete,
    m.Touch,
    m.Return,
    m.Damaged,
    m.Explain,
    m.OpenData,
)
_ONE_WAY = {kind.CODE for kind in (m.Touch, m.Return, m.Damaged, m.Release, m.Surrender, m.Replicate, m.Lacks)}
_SESSIONS_A_NODE = 300


class Generator:
    """Random messages and payloads; what a session was really granted makes some of them fit."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.extents: list[int] = []
        """Offsets that the session holds."""

    def value(self, name: str, hint: Any) -> Any:
        """A value for one field."""
        rng = self.random
        if hint is int:
            return rng.choice(_INTS) if rng.random() < 0.8 else rng.randrange(1 << rng.randrange(1, 64))
        if hint is bool:
            return rng.random() < 0.5
        if hint is float:
            return rng.choice((0.0, 1.0, -1.0, 1e300, float("inf"), float("-inf"), float("nan")))
        if hint is str:
            return rng.choice(_TEXTS)
        if hint is bytes:
            return rng.randbytes(rng.choice((0, 1, 16, 32, 200)))
        if get_origin(hint) is list:
            return [self.value(name, get_args(hint)[0]) for _ in range(rng.randrange(3))]
        if get_origin(hint) is dict:
            return {rng.choice(_TEXTS): self.value(name, get_args(hint)[1])}
        return self.message(hint)

    def message(self, kind: type[Message]) -> Message:
        """A well-formed message."""
        rng, count = self.random, self.random.choice((0, 1, 1, 2, 5))
        if kind in (m.Put, m.PutPart) and rng.random() < 0.9:
            count = min(count, len(self.extents))
        arrays = dict(_PARALLEL[kind])
        values = {}
        for name, hint in _HINTS[kind].items():
            if name == "CODE":
                continue
            values[name] = self.array(name, count) if name in arrays else self.value(name, hint)
        if kind is m.Grant and rng.random() < 0.8:
            values.update(length=rng.choice((0, 1, 100, 4096, 100_000)), count=rng.randrange(8))
        if kind in (m.Put, m.PutPart) and rng.random() < 0.8:
            values.update(parts=2, part=rng.randrange(2), owner=0) if kind is m.PutPart else None
        if kind is m.OpenData:  # what is inside an address is UCX's to read; see transport.ucx.checked_address
            address = rng.choice((b"", rng.randbytes(5), bytes([rng.randrange(256) | 2]) + rng.randbytes(100)))
            values.update(address=address, client_id=rng.choice((0, 1, 2, rng.randrange(1 << 64))))
        if kind is m.Put and rng.random() < 0.8:
            values.update(refill_length=rng.choice((0, 100, 4096)))
        return kind(**values)

    def array(self, name: str, count: int) -> bytes:
        """n elements of an array field."""
        rng = self.random
        if name == "parents" and rng.random() < 0.5:
            return bytes(16 * count)
        if name in ("keys", "parents"):
            return b"".join(rng.choice(_KEYS) if rng.random() < 0.9 else rng.randbytes(16) for _ in range(count))
        if name == "offsets" and count <= len(self.extents) and rng.random() < 0.9:
            rng.shuffle(self.extents)
            taken, self.extents = self.extents[:count], self.extents[count:]
            return b"".join(offset.to_bytes(8, "little") for offset in taken)
        if name in ("regions", "segments") and rng.random() < 0.97:
            return bytes(2 * count)
        if name == "lengths" and rng.random() < 0.9:
            return b"".join(rng.randrange(65).to_bytes(4, "little") for _ in range(count))
        return rng.randbytes(count * _ITEM_BYTES[name])

    def spoil(self, payload: bytes) -> bytes:
        """Flip, cut, insert or repeat a few bytes."""
        rng, raw = self.random, bytearray(payload)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(raw) + 1)
            match rng.randrange(4):
                case 0:
                    del raw[at:]
                case 1:
                    raw[at:at] = rng.randbytes(rng.randrange(9))
                case 2 if at < len(raw):
                    raw[at] = rng.randrange(256)
                case _:
                    raw += raw[:at]
        return bytes(raw)

    def payload(self) -> tuple[int, bytes]:
        """(type, payload), good or not."""
        rng = self.random
        kind = rng.choice(list(_TYPES.values()))
        if rng.random() < 0.1:
            return rng.choice((kind.CODE, rng.randrange(1 << 16))), rng.randbytes(rng.randrange(300))
        good = encode(self.message(kind))
        return kind.CODE, good if rng.random() < 0.4 else self.spoil(good)


def fuzz_decoder(seed: int, seconds: float) -> int:
    """Payloads into `decode` for a while; returns how many."""
    generator, count, until = Generator(seed), 0, time.monotonic() + seconds
    while time.monotonic() < until:
        for _ in range(500):
            code, payload = generator.payload()
            try:
                message = decode(code, payload)
            except MessageError:
                pass
            else:
                encode(message)
            count += 1
    return count


class NodeFuzzer:
    """Sessions into a node; `messages` counts what was sent, `failures` what its loop saw."""

    def __init__(self, seed: int) -> None:
        self.generator = Generator(seed)
        self.messages = self.sessions = self.nodes = self.stored = 0
        self.failures: list[str] = []

    def failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Exception handler of the loop."""
        error = context.get("exception")
        lines = traceback.format_exception(error) if error is not None else []
        self.failures.append(f"{context.get('message')}\n{''.join(lines)}")

    async def run(self, seconds: float) -> None:
        """Fresh nodes, each with some hundred sessions, until the time is over or something is found."""
        asyncio.get_running_loop().set_exception_handler(self.failed)
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.failures:
            config = NodeConfig(
                name="fuzz",
                slots_count=512,
                listen="127.0.0.1:0",
                host_bytes=4 << 20,
                message_path=self.nodes % 3 == 2,
                connections_max=64,
                grace_ms=1,
            )
            async with Node(config) as node:
                self.nodes += 1
                for number in range(_SESSIONS_A_NODE):
                    if time.monotonic() > until or self.failures:
                        break
                    await self._session(node)
                    if number % 20 == 19:
                        node.store.check()
                node.store.check()
                self.stored += node.store.directory.stats().stored_total

    async def _session(self, node: Node) -> None:
        rng = self.generator.random
        theirs, ours = socket.socketpair()
        server = ControlConnection(theirs, node._on_message, is_serving=True, max_frame_bytes=64 << 10)
        node._on_connect(server)
        peer = ControlConnection(ours, lambda _connection, message: message.close_fds())
        self.generator.extents = []
        self.sessions += 1
        try:
            if rng.random() < 0.95:
                role = rng.choice(("client", "client", "node"))
                hello = m.Hello(WIRE_VERSION, "0", role, "fuzz", host_identity(), 1, bytes(16))
                await self._ask(peer, hello.CODE, encode(hello))
            for _ in range(rng.randrange(_MESSAGES_A_SESSION)):
                if not peer.is_open:
                    break
                await self._one(peer)
        finally:
            peer.abort()
            await asyncio.sleep(0)
            server.abort()

    async def _one(self, peer: ControlConnection) -> None:
        rng = self.generator.random
        self.messages += 1
        if rng.random() < 0.005:  # a frame that lies
            length = rng.choice((0, 5, 1 << 20, (1 << 32) - 1))
            with contextlib.suppress(OSError):  # the node has ended the connection already
                peer._sock.send(
                    pack_header(length, rng.randrange(1 << 16), rng.choice((0, 1, 0x0100, 2)), 7) + bytes(5)
                )
            await asyncio.sleep(0)
            return
        if rng.random() < 0.98:
            kind = rng.choice(_BUSY if rng.random() < 0.8 else list(_TYPES.values()))
            code, payload = kind.CODE, encode(self.generator.message(kind))
        else:
            code, payload = self.generator.payload()
        await self._ask(peer, code, payload)

    async def _ask(self, peer: ControlConnection, code: int, payload: bytes) -> None:
        """Send it, as a request or one way; learn what it brought."""
        try:
            if code in _ONE_WAY or self.generator.random.random() < 0.05:
                peer.send(code, payload)
                await asyncio.sleep(0)
                return
            future = peer.start_request(code, payload, time.monotonic_ns() + 20_000_000)
            reply = await future
            answer = decode(reply.type, reply.payload)
        except TransportError:
            return
        offsets = answer.offsets if isinstance(answer, m.Granted) else getattr(answer, "refill_offsets", b"")
        self.generator.extents += [int.from_bytes(offsets[i : i + 8], "little") for i in range(0, len(offsets), 8)]


async def fuzz_handshakes(fuzzer: NodeFuzzer, seed: int, seconds: float) -> tuple[int, int, int]:
    """Greetings at a node with a token, then dials to liars: how many of each, and how many mappings came of it."""
    asyncio.get_running_loop().set_exception_handler(fuzzer.failed)
    async with Node(
        NodeConfig(name="fuzz", listen="127.0.0.1:0", host_bytes=4 << 20, message_path=False, token=TOKEN)
    ) as node:
        greeted = await fuzz_greetings(node, seed, seconds / 2)
    generator = fuzzer.generator
    return greeted, *await fuzz_dials(seed, seconds / 2, generator.spoil, generator.message)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long in all (default 20)")
    parser.add_argument("--seed", type=int, default=None, help="replay: the seed that was printed")
    options = parser.parse_args()
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    print(f"seed {seed}", flush=True)
    started, share = time.monotonic(), options.seconds
    fuzzer = NodeFuzzer(seed)
    try:
        decoded = fuzz_decoder(seed, share * 0.15)
        frames = fuzz_frames(seed, share * 0.1)
        asyncio.run(fuzzer.run(share * 0.5))
        if not fuzzer.failures:
            greeted, dialed, mapped = asyncio.run(fuzz_handshakes(fuzzer, seed, share * 0.25))
    except Exception:
        traceback.print_exc()
        print(f"FOUND something: run again with --seed {seed}", file=sys.stderr)
        return 1
    if not fuzzer.failures:
        print(
            f"{time.monotonic() - started:.0f} s, 0 findings: {decoded} payloads and {frames} frames decoded, "
            f"{fuzzer.messages} messages in {fuzzer.sessions} sessions with {fuzzer.nodes} nodes, {fuzzer.stored} "
            f"blocks stored, {greeted} greetings, {dialed} dials, {mapped} mappings"
        )
    for failure in fuzzer.failures:
        print(failure, file=sys.stderr)
    if fuzzer.failures:
        print(f"FOUND something: run again with --seed {seed}", file=sys.stderr)
    return 1 if fuzzer.failures else 0


if __name__ == "__main__":
    sys.exit(main())
