"""The node's side of the handshake: who may open a session, and what a new session is told. No await."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from ucxkv import errors
from ucxkv.dial import host_identity
from ucxkv.node.session import Session, SessionState
from ucxkv.protocol import WIRE_VERSION, Message, auth
from ucxkv.protocol import messages as m
from ucxkv.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Greeter"]


class Greeter:
    """Takes a session from GREETING to OPEN.

    welcome: makes the Welcome for a session that may open; called once a session. token: the shared secret, "" for
    none.
    """

    def __init__(self, token: str, welcome: Callable[[Session], m.Welcome]) -> None:
        self._token = token
        self._welcome = welcome

    def handle(self, session: Session, message: Message) -> Message:
        """The answer to a message of a session that is not open yet. Raises an error of `ucxkv.errors` to refuse it."""
        if session.state is SessionState.GREETING and isinstance(message, m.Hello):
            return self._hello(session, message)
        if session.state is SessionState.PROVING and isinstance(message, m.Proof):
            if auth.is_proof(self._token, "caller", session.caller_nonce, session.nonce, message.proof):
                return self._open(session)
            raise errors.SetupError("the token is not this node's", fix="give both sides the same token")
        raise errors.UsageError(f"a {type(message).__name__} came before the handshake was done")

    def _hello(self, session: Session, hello: m.Hello) -> Message:
        if hello.wire_version != WIRE_VERSION:
            raise errors.VersionMismatch(
                f"{hello.name or 'the caller'} speaks wire version {hello.wire_version} (ucxkv {hello.version}), "
                f"this node {WIRE_VERSION} (ucxkv {VERSION}); install the same ucxkv release on both sides"
            )
        if hello.role not in ("client", "node"):
            raise errors.UsageError(f"role {hello.role!r}; a caller is a client or a node")
        session.role, session.name, session.host = hello.role, hello.name, hello.host
        session.node_id = hello.node_id
        session.hello_wants_memory = hello.want_memory
        if not self._token:
            return self._open(session)
        if len(hello.nonce) != auth.NONCE_BYTES:
            raise errors.UsageError(f"a nonce has {auth.NONCE_BYTES} bytes, not {len(hello.nonce)}")
        session.caller_nonce = hello.nonce
        session.nonce = secrets.token_bytes(auth.NONCE_BYTES)
        session.state = SessionState.PROVING
        return m.Challenge(
            nonce=session.nonce, proof=auth.proof(self._token, "node", session.nonce, session.caller_nonce)
        )

    def _open(self, session: Session) -> m.Welcome:
        if session.hello_wants_memory:
            if session.host != host_identity() or not session.connection.is_unix:
                raise errors.UsageError("memory is handed to processes of the same host only, over the Unix socket")
            if not session.watch_process():
                raise errors.Unavailable("the caller's process cannot be watched from here (another pid namespace?)")
        session.state = SessionState.OPEN
        session.end_greeting()
        return self._welcome(session)
