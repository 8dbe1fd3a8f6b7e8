"""Every error ucxkv raises, in one tree split by what the caller does next.

    UcxKvError
      UsageError     (ValueError)    the call is wrong: fix it; repeating it cannot help
        ValueTooLarge                the value fits no segment
        ClientClosed                 the client was closed
        ForkError                    the client belongs to the process that connected
      Unavailable                    nobody could answer: retry, or recompute the block
        DeadlineExceeded (TimeoutError)  the call's deadline passed
        Overloaded                   the node refuses work for now
        NotLeader                    the node does not lead the chain's shard (any more)
      StaleError                     what was known is out of date: look up again
        VersionConflict              the object has another version than the caller expected
      IntegrityError                 the bytes did not prove themselves; the entry is dropped
      SetupError                     an operator must act before it can work
        VersionMismatch              client and node speak different wire versions
        JournalFailed                the node's log could not be written; it acknowledges nothing more

A miss is never an error: reads answer it as a status. Messages name the fix. `key`, `node` and `epoch` are attributes
where they are known and are appended to the text. Errors survive pickling, so they cross process borders whole."""

from __future__ import annotations

__all__ = [
    "ClientClosed",
    "DeadlineExceeded",
    "ForkError",
    "IntegrityError",
    "JournalFailed",
    "NotLeader",
    "Overloaded",
    "SetupError",
    "StaleError",
    "UcxKvError",
    "Unavailable",
    "UsageError",
    "ValueTooLarge",
    "VersionConflict",
    "VersionMismatch",
]


class UcxKvError(Exception):
    """Base of all errors of ucxkv; catch a branch of the tree instead, as the branches ask for different actions.

    message: what happened and how to fix it. key: the block's 16 bytes. node: the node's name. epoch: its incarnation.
    """

    key: bytes | None
    node: str | None
    epoch: int | None

    def __init__(
        self, message: str, *, key: bytes | None = None, node: str | None = None, epoch: int | None = None
    ) -> None:
        super().__init__(message)
        self.key = key
        self.node = node
        self.epoch = epoch

    @property
    def message(self) -> str:
        """The text alone, without key, node and epoch."""
        return str(self.args[0]) if self.args else ""

    def __str__(self) -> str:
        known = []
        if self.key is not None:
            known.append(f"key={self.key.hex()}")
        if self.node is not None:
            known.append(f"node={self.node}")
        if self.epoch is not None:
            known.append(f"epoch={self.epoch}")
        return f"{self.message} ({', '.join(known)})" if known else self.message


class UsageError(UcxKvError, ValueError):
    """The call itself is wrong (type, shape, length, count). Fix the call; nothing was changed by it."""


class ValueTooLarge(UsageError):
    """The value fits no segment of any node. Split it, or start nodes with larger segments; a retry cannot help.

    size_bytes: the value's size. limit_bytes: the largest size accepted.
    """

    def __init__(
        self,
        message: str,
        *,
        size_bytes: int = 0,
        limit_bytes: int = 0,
        key: bytes | None = None,
        node: str | None = None,
    ) -> None:
        super().__init__(message, key=key, node=node)
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes


class ClientClosed(UsageError):
    """The client was closed before or during the call. Connect a new one."""


class ForkError(UsageError):
    """The client was used in a process forked after it connected.

    Connect again in the child; the parent's is unharmed.
    """


class Unavailable(UcxKvError):
    """No node could answer: it died, hangs or left. Retry later, or recompute the block; a read treats it as a miss."""


class DeadlineExceeded(Unavailable, TimeoutError):
    """The call's deadline passed first. Recompute, or retry with a longer deadline; a put may still have happened.

    Repeating a put is safe: the first writer wins and the second is told so.
    """


class Overloaded(Unavailable):
    """The node refuses work for now: a bound (queue, space that nothing may free) is reached. Back off, then retry.

    retry_after_s: seconds after which a retry makes sense, 0 when unknown.
    """

    def __init__(
        self,
        message: str,
        *,
        retry_after_s: float = 0.0,
        key: bytes | None = None,
        node: str | None = None,
        epoch: int | None = None,
    ) -> None:
        super().__init__(message, key=key, node=node, epoch=epoch)
        self.retry_after_s = retry_after_s


class NotLeader(Unavailable):
    """The node does not lead the chain's shard (any more), and nothing of the call happened: ask the shard's leader.

    The client does so by itself, within the call's deadline, for puts.
    """


class StaleError(UcxKvError):
    """A location, lease or epoch is out of date. Look the key up again; the destination's bytes are undefined."""


class VersionConflict(StaleError):
    """The object has another version than the call was to replace; nothing was changed. Get it again, and decide."""


class IntegrityError(UcxKvError):
    """Bytes did not match their sum.

    They were never handed out and the entry is dropped; recompute and put it again.
    """


class SetupError(UcxKvError):
    """The host or the configuration must be changed by an operator; no retry helps before that.

    found: what is there. needed: what it takes. fix: the command or setting that gets it. All three are in the text.
    """

    def __init__(
        self, message: str, *, found: str = "", needed: str = "", fix: str = "", node: str | None = None
    ) -> None:
        super().__init__(message, node=node)
        self.found = found
        self.needed = needed
        self.fix = fix

    def __str__(self) -> str:
        parts = [super().__str__()]
        if self.found:
            parts.append(f"found: {self.found}")
        if self.needed:
            parts.append(f"needed: {self.needed}")
        if self.fix:
            parts.append(f"fix: {self.fix}")
        return "; ".join(parts)


class VersionMismatch(SetupError):
    """Client and node speak wire versions that do not overlap. Install the same ucxkv release on both."""


class JournalFailed(SetupError):
    """A write or sync of the journal failed, and what the disk holds is unknown: nothing more is acknowledged.

    It lasts until the node is started again; a put that met it may be there afterwards or not.
    """
