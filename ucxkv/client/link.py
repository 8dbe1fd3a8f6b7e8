"""One node as a client sees it: its control connection, the path to its memory, the grants it gave, and its death.

Invariants
  - After the control connection ends, nothing of that node is a hit any more: `is_alive` is False in the same loop
  turn.
  - What an answer gives is never lost: one that comes after its asker was cancelled or gave up is used all the same
  (extents) or given back (leases).
  - Whoever waits for extents holds no uncollected answers, so that two puts never wait for each other.
  - Every request carries the call's deadline.
  - A link that is left because its node is in another epoch gets no new calls, and its running puts their answers.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from ucxkv import errors
from ucxkv.client.leading import led_shards
from ucxkv.client.putter import Putter
from ucxkv.dial import ask, mapped_error
from ucxkv.protocol import MessageError, decode, encode
from ucxkv.protocol import messages as m
from ucxkv.tokens import Point, Token
from ucxkv.transport.base import TransportError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ucxkv.client.path import Path
    from ucxkv.protocol import Message
    from ucxkv.transport.control import ControlConnection
    from ucxkv.transport.control import Message as ControlMessage
    from ucxkv.transport.ranking import Way

__all__ = ["NodeLink"]

_TOUCH_DELAY_S = 0.05
_TOUCH_KEYS_MAX = 65_536
_QUIET_S = 0.02


class NodeLink:
    """An open session with one node. Made by `ucxkv.client.opening.open_link`."""

    def __init__(
        self,
        welcome: m.Welcome,
        connection: ControlConnection,
        path: Path,
        on_lost: Callable[[NodeLink], None],
        way: Way,
    ) -> None:
        self.welcome = welcome
        self.connection = connection
        self.path = path
        self.way = way
        """Where the node is, seen from here."""
        self.name = welcome.name
        self.address = welcome.address
        self.node_id = welcome.node_id
        self.epoch = welcome.epoch if welcome.shards else 0
        """The one in which it leads what it said that it leads; 0 without shards."""
        self.led = led_shards(welcome)
        """Shards that the node leads in the epoch it was welcomed in, one bit each."""
        self.on_seen: Callable[[Iterable[Point]], None] | None = None
        """Told how far the logs of shards are that answers of this node showed."""
        self.slow_until_ns = 0
        """Reads that others can answer as well pass this node over until then: it did not answer in time."""
        self.is_alive = True
        self.is_leaving = False
        """Nothing begins here any more, and what runs may end: `wait_quiet`, then `close`."""
        self._loop = asyncio.get_running_loop()
        self._touched: list[bytes] = []
        self._touched_keys = 0
        self._touch_timer: asyncio.TimerHandle | None = None
        self.putter = Putter(self)
        self._on_lost = on_lost
        connection.on_closed(self._closed)
        connection.on_late_reply = self._late

    def _closed(self, connection: ControlConnection) -> None:
        if not self.is_alive:
            return
        self.is_alive = False
        self._stop_timers()
        self._on_lost(self)

    def _stop_timers(self) -> None:
        if self._touch_timer is not None:
            self._touch_timer.cancel()
            self._touch_timer = None
        self.putter.stop()

    def _late(self, reply: ControlMessage) -> None:
        """An answer nobody waits for any more."""
        try:
            answer = decode(reply.type, reply.payload)
        except MessageError:
            return
        match answer:
            case m.Granted() | m.PutDone():
                self.putter.late(answer)
            case m.Leased() | m.Warmed() if answer.lease:
                with contextlib.suppress(errors.UcxKvError):
                    self.tell(m.Release(lease=answer.lease))

    async def ask(self, message: Message, deadline_ns: int | None) -> Message:
        """One request on the control connection. Raises an error of `ucxkv.errors`."""
        return await ask(self.connection, message, deadline_ns, self.name)

    def tell(self, message: Message) -> None:
        """One one-way message; lost with the connection."""
        if self.is_alive:
            try:
                self.connection.send(message.CODE, encode(message))
            except TransportError as exc:
                raise mapped_error(exc, self.name) from exc

    def saw(self, token: bytes) -> None:
        """An answer showed this (`ucxkv.tokens`; empty: nothing that a log has). Raises Unavailable for no token."""
        if token and self.on_seen is not None:
            try:
                self.on_seen(Token.from_bytes(token).points)
            except errors.UsageError as exc:
                raise errors.Unavailable(f"the node's answer names no token: {exc.message}", node=self.name) from exc

    # ---- what was read, so that the node's policy knows

    def touch(self, keys: bytes) -> None:
        """Report these keys as read, soon and together with others; under pressure reports are dropped, not queued."""
        if self._touched_keys < _TOUCH_KEYS_MAX:
            self._touched.append(keys)
            self._touched_keys += len(keys) // 16
            if self._touch_timer is None and self.is_alive:
                self._touch_timer = self._loop.call_later(_TOUCH_DELAY_S, self.flush_touches)

    def flush_touches(self) -> None:
        """Send the pending report now."""
        if self._touch_timer is not None:
            self._touch_timer.cancel()
            self._touch_timer = None
        if self._touched and self.is_alive:
            keys = b"".join(self._touched)
            self._touched.clear()
            self._touched_keys = 0
            try:
                self.tell(m.Touch(keys=keys))
            except errors.UcxKvError:
                return  # the connection ended just now; its callback tells everybody

    def report_damage(self, keys: bytes) -> None:
        """Tell the node that these blocks' bytes do not match their sums."""
        try:
            self.tell(m.Damaged(keys=keys))
        except errors.UcxKvError:
            return  # the node is gone, and the blocks with it

    # ---- the end

    def leave_epoch(self) -> None:
        """The node went over to another epoch: leave it in good order, and have it dialled again."""
        if self.is_alive:
            self.flush_touches()
        if self.is_alive:
            self.is_alive, self.is_leaving = False, True
            self._stop_timers()
            self._on_lost(self)

    async def wait_quiet(self, limit_s: float) -> None:
        """Wait, at most this long, until no request of this link is on its way."""
        until = self._loop.time() + limit_s
        while self.connection.is_open and self._loop.time() < until:
            await asyncio.sleep(_QUIET_S)
            if not self.connection.pending_count and not self.path.is_busy:
                break

    def close(self) -> None:
        """Leave in good order: the node may reuse everything this client was granted. Idempotent.

        The caller has waited for its own puts; where one is still writing the node is not told that it may reuse them.
        """
        if self.is_alive:
            self.flush_touches()
        if self.is_alive or self.is_leaving:
            self.is_alive = self.is_leaving = False
            self._stop_timers()
            if self.connection.is_open and not self.path.is_busy:  # else the node waits for the end of this process
                try:
                    self.connection.send(m.Bye.CODE, encode(m.Bye()))
                except TransportError:
                    pass
        self.connection.abort()
        self.path.close()
