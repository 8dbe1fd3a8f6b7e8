"""Open a control connection to a node and shake hands; clients and nodes use it alike.

Promise: `dial` returns an open, authenticated connection with the node's Welcome, or raises one of `ucxkv.errors`
within
the deadline and leaves no socket or descriptor behind. Errors of the transport become errors of ucxkv here and
nowhere else.
"""

from __future__ import annotations

import asyncio
import functools
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ucxkv import errors
from ucxkv.protocol import WIRE_VERSION, Message, MessageError, auth, decode, encode
from ucxkv.protocol import messages as m
from ucxkv.transport import base as transport
from ucxkv.transport.address import parse_address
from ucxkv.transport.control_server import connect
from ucxkv.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable

    from ucxkv.transport.control import ControlConnection, Handler
    from ucxkv.transport.control import Message as ControlMessage

__all__ = [
    "Caller",
    "Dialed",
    "answer_to",
    "ask",
    "dial",
    "failure_of",
    "host_identity",
    "mapped_error",
    "raise_failure",
    "start_asking",
]


@functools.cache
def host_identity() -> str:
    """This kernel's boot id: two processes with the same one may share memory."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@dataclass(frozen=True, slots=True)
class Caller:
    """Who dials. role: "client" or "node"; token: the shared secret, "" for none; node_id: a node's, else 0."""

    role: str
    name: str
    token: str = ""
    node_id: int = 0


@dataclass(slots=True)
class Dialed:
    """An open connection, the node's answer, and the descriptors that came with it (owned by the holder)."""

    connection: ControlConnection
    welcome: m.Welcome
    fds: tuple[int, ...]


_FAILURES: dict[str, Callable[[str], errors.UcxKvError]] = {
    name: getattr(errors, name) for name in errors.__all__ if name != "UcxKvError"
}


def raise_failure(failure: m.Failure, node: str) -> None:
    """Raise the error that the node named."""
    if failure.kind == "Overloaded":
        raise errors.Overloaded(failure.text, retry_after_s=failure.retry_after_ms / 1e3, node=node)
    error = _FAILURES.get(failure.kind, errors.Unavailable)(failure.text)
    error.node = node
    raise error


def failure_of(error: errors.UcxKvError) -> m.Failure:
    """The answer that carries `error` to the other side."""
    retry = int(error.retry_after_s * 1e3) if isinstance(error, errors.Overloaded) else 0
    details = [f"{name}: {getattr(error, name)}" for name in ("found", "needed", "fix") if getattr(error, name, "")]
    return m.Failure(kind=type(error).__name__, text="; ".join([error.message, *details]), retry_after_ms=retry)


def mapped_error(exc: Exception, node: str | None = None) -> errors.UcxKvError:
    """The error of ucxkv for one of the transport or the codec."""
    text = str(exc)
    match exc:
        case errors.UcxKvError():
            return exc
        case transport.DeadlineExceeded():
            return errors.DeadlineExceeded(text, node=node)
        case transport.SetupFailed():
            return errors.SetupError(text, node=node)
        case transport.UsageError():
            return errors.UsageError(text, node=node)
        case MessageError() | transport.ProtocolError():
            return errors.Unavailable(f"the node does not speak this protocol: {text}", node=node)
        case _:
            return errors.Unavailable(text, node=node)


async def ask(
    connection: ControlConnection, message: Message, deadline_ns: int | None, node: str | None = None
) -> Message:
    """Send one request and return its answer; a Failure becomes the error it names."""
    try:
        kind, payload = await connection.request(message.CODE, encode(message), deadline_ns)
        answer = decode(kind, payload)
    except (transport.TransportError, MessageError) as exc:
        raise mapped_error(exc, node) from exc
    if isinstance(answer, m.Failure):
        raise_failure(answer, node or "")
    return answer


def start_asking(
    connection: ControlConnection, message: Message, deadline_ns: int | None, node: str | None = None
) -> asyncio.Future[ControlMessage]:
    """Send one request now; its answer is for `answer_to`. What raises here was not sent."""
    try:
        return connection.start_request(message.CODE, encode(message), deadline_ns)
    except transport.TransportError as exc:
        raise mapped_error(exc, node) from exc


async def answer_to(
    connection: ControlConnection, future: asyncio.Future[ControlMessage], node: str | None = None
) -> Message:
    """The answer to a request of `start_asking`; a Failure becomes the error it names. Given up when cancelled."""
    try:
        reply = await future
        answer = decode(reply.type, reply.payload)
    except asyncio.CancelledError:
        connection.discard(future)
        raise
    except (transport.TransportError, MessageError) as exc:
        raise mapped_error(exc, node) from exc
    if isinstance(answer, m.Failure):
        raise_failure(answer, node or "")
    return answer


async def dial(
    address: str,
    caller: Caller,
    deadline_ns: int,
    *,
    handler: Handler | None = None,
    want_memory: bool = False,
    inline_wait_us: int = 0,
) -> Dialed:
    """Connect to `address` and shake hands.

    want_memory: ask for the descriptors of the slot table and the segments (Unix sockets only).
    Raises Unavailable (nobody there), DeadlineExceeded, SetupError (wrong token, unknown host name), VersionMismatch.
    """
    try:
        connection = await connect(
            parse_address(address), deadline_ns=deadline_ns, handler=handler, inline_wait_us=inline_wait_us
        )
    except transport.TransportError as exc:
        raise mapped_error(exc, address) from exc
    try:
        return await _shake_hands(connection, address, caller, deadline_ns, want_memory)
    except BaseException as exc:
        connection.abort()
        if isinstance(exc, (transport.TransportError, MessageError)):
            raise mapped_error(exc, address) from exc
        raise


async def _shake_hands(
    connection: ControlConnection, address: str, caller: Caller, deadline_ns: int, want_memory: bool
) -> Dialed:
    nonce = secrets.token_bytes(auth.NONCE_BYTES)
    hello = m.Hello(
        wire_version=WIRE_VERSION,
        version=VERSION,
        role=caller.role,
        name=caller.name,
        host=host_identity(),
        pid=os.getpid(),
        nonce=nonce,
        want_memory=want_memory,
        node_id=caller.node_id,
    )
    reply = await connection.request_message(hello.CODE, encode(hello), deadline_ns)
    try:
        answer = decode(reply.type, reply.payload)
        if isinstance(answer, m.Challenge):
            if not auth.is_proof(caller.token, "node", answer.nonce, nonce, answer.proof):
                raise errors.SetupError(
                    f"the node at {address} holds another token", fix="give both sides the same token"
                )
            response = m.Proof(proof=auth.proof(caller.token, "caller", nonce, answer.nonce))
            reply.close_fds()
            reply = await connection.request_message(response.CODE, encode(response), deadline_ns)
            answer = decode(reply.type, reply.payload)
        elif caller.token and isinstance(answer, m.Welcome):
            raise errors.SetupError(
                f"the node at {address} asks for no token, so it cannot prove that it is yours",
                fix="start the node with the same token",
            )
        if isinstance(answer, m.Failure):
            raise_failure(answer, address)
        if not isinstance(answer, m.Welcome):
            raise errors.Unavailable(f"{address} answered the handshake with a {type(answer).__name__}")
        if answer.wire_version != WIRE_VERSION:
            raise errors.VersionMismatch(
                f"the node at {address} speaks wire version {answer.wire_version} (ucxkv {answer.version})",
                needed=f"wire version {WIRE_VERSION} (ucxkv {VERSION})",
                fix="install the same ucxkv release on both sides",
            )
        return Dialed(connection, answer, reply.take_fds())
    finally:
        reply.close_fds()
