"""`kv.objects`: values under names of the user's, overwritable and versioned, beside the blocks of the cache.

What holds is in docs/objects.md, how it is done in `numbering`, `chains` and `bodies`. In short, a put moves the value
under keys of its own, then claims the next version's header, then removes what was there before; a get finds the
current header and reads the body it names; either of them starts again when another writer came between.

Invariant, which makes that an old value never comes back: before the header of version n is put, the bodies of all
versions up to n - 2 are removed; the put of n does not return before that of n - 1 is.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ucxkv import errors
from ucxkv.objects.bodies import Bodies, left_s
from ucxkv.objects.chains import Chains, Claim, Position, Removal
from ucxkv.objects.records import (
    NO_BODY,
    ROOT_PREFIX,
    SEAL_PREFIX,
    STAMP_BYTES,
    Body,
    Kind,
    Root,
    Seal,
    Version,
    checked_name,
)
from ucxkv.objects.values import Described, described, destination

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ucxkv.client.client import Client

__all__ = ["ABSENT", "Absent", "ObjectInfo", "Objects", "StoredObject"]

_BYTES_A_SECOND: Final = 64 << 20
"""What a call without a deadline of its own gets more time for: a slow disk's speed."""
_AT_ONCE: Final = 16
_ROOTS_A_CALL: Final = 256


class Absent:
    """The type of ABSENT."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Final = Absent()
"""As `if_version`: the object must not be there."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What is known of an object without its bytes.

    kind: "bytes", "numpy" or "torch". dtype: numpy's `dtype.str` or torch's name, "" for bytes. shape: () for bytes.
    time_ns: when it was put, in ns since 1970 by the clock of who put it. is_durable: see `put`.
    """

    name: str
    version: Version
    kind: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    time_ns: int
    is_durable: bool


@dataclass(frozen=True, slots=True)
class StoredObject:
    """What `get` found. value: the caller's `into`, or a bytearray, numpy array or torch tensor of the caller's own."""

    value: object
    info: ObjectInfo


class Objects:
    """See the module; `kv.objects`. One for a client; calls may overlap, also on one name."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._bodies = Bodies(client)
        self._chains = Chains(client)

    async def put(
        self,
        name: str,
        value: object,
        *,
        if_version: Version | Absent | None = None,
        durable: bool = False,
        gather: bool = False,
        deadline_s: float | None = None,
    ) -> Version:
        """Store a value under a name, whatever was there; seen by every get that begins after this has returned.

        value: bytes-like, a numpy array, a torch CPU tensor, or what numpy takes by DLPack; borrowed until this
        returns. It needs room beside the value that it replaces. if_version: only where this is the current version, or
        (ABSENT) there is none; else VersionConflict, and nothing has changed. durable: it is not evicted and survives
        the node's process; needs a node started with durability = process or power. gather: copy an array that
        is not contiguous instead of refusing it. deadline_s: default the client's timeout and a second for each 64 MiB.

        Raises VersionConflict, UsageError, ValueTooLarge; Overloaded: no room; JournalFailed and any other Unavailable:
        the value may have been put or not, `stat` tells.
        """
        name = checked_name(name)
        if not (if_version is None or isinstance(if_version, Version | Absent)):
            raise errors.UsageError(f"if_version is {type(if_version).__name__}; pass a Version, ABSENT or None")
        what = described(value, gather=gather)
        deadline_ns = self._deadline(deadline_s, what.nbytes)
        if if_version is not None:
            await self._check(await self._chains.locate(name, deadline_ns), if_version, deadline_ns)
        seal = _sealed(name, what, durable)
        is_known = True
        try:
            await self._bodies.put(seal, what.pieces, deadline_ns)
            while True:
                at = await self._chains.locate(name, deadline_ns)
                await self._check(at, if_version, deadline_ns)
                await self._clear(at, deadline_ns)
                is_known = False
                claim, header = await self._chains.claim(at, seal.body, durable=durable, deadline_ns=deadline_ns)
                is_known = True
                if claim is Claim.OURS:
                    break
        except BaseException as exc:
            if is_known or isinstance(exc, errors.Overloaded | errors.UsageError):
                await self._bodies.discard(seal.body)
            raise
        await self._remove_before(at, header.version, deadline_ns)
        return header.version

    async def get(
        self, name: str, into: object | None = None, *, deadline_s: float | None = None
    ) -> StoredObject | None:
        """Read an object: one version of it, whole; None: it is not there.

        into: writable, contiguous memory of exactly the value's size, of the same dtype or of single bytes; borrowed
        until this returns, undefined when it raises or answers None. Without it the value comes in new memory: a
        bytearray, a numpy array, or a torch tensor (in a program that has imported torch). deadline_s: as in `put`.

        Raises UsageError; Unavailable, DeadlineExceeded: a node did not answer, or the object was overwritten again and
        again while it was read.
        """
        name = checked_name(name)
        deadline_ns = self._deadline(deadline_s, 0)
        missing: Version | None = None
        while True:
            at = await self._chains.locate(name, deadline_ns)
            seal = await self._seal(at, deadline_ns)
            if seal is not None and at.header is not None:
                value, memory = destination(seal, into)
                until_ns = self._deadline(deadline_s, seal.body.nbytes) if deadline_s is None else deadline_ns
                if await self._bodies.read(seal.body, memory.pieces, until_ns):
                    return StoredObject(value, _info(seal, at.header.version))
            if at.header is None or at.header.version == missing:
                return None  # nobody has overwritten it: what is missing was evicted
            missing = at.header.version

    async def stat(self, name: str, *, deadline_s: float | None = None) -> ObjectInfo | None:
        """What is known of an object; None: it is not there. Raises Unavailable, DeadlineExceeded, UsageError."""
        name = checked_name(name)
        deadline_ns = self._deadline(deadline_s, 0)
        missing: Version | None = None
        while True:
            at = await self._chains.locate(name, deadline_ns)
            seal = await self._seal(at, deadline_ns)
            if seal is not None and at.header is not None:
                return _info(seal, at.header.version)
            if at.header is None or at.header.version == missing:
                return None
            missing = at.header.version

    async def list(self, prefix: str = "", *, deadline_s: float | None = None) -> list[ObjectInfo]:
        """All objects whose names begin with `prefix`, by name. Looks through the keys of all blocks of all nodes.

        Objects put or deleted meanwhile may be missing. Raises Unavailable, DeadlineExceeded, UsageError.
        """
        if not isinstance(prefix, str):
            raise errors.UsageError(f"a prefix of names is text, not {type(prefix).__name__}")
        deadline_ns = self._deadline(deadline_s, 0)
        names = {root.name async for root in self._roots(deadline_ns) if root.name.startswith(prefix)}
        turns = asyncio.Semaphore(_AT_ONCE)

        async def one(name: str) -> ObjectInfo | None:
            async with turns:
                return await self.stat(name, deadline_s=left_s(deadline_ns))

        found = await asyncio.gather(*(one(name) for name in sorted(names)), return_exceptions=True)
        for info in found:
            if isinstance(info, BaseException):
                raise info
        return [info for info in found if isinstance(info, ObjectInfo)]

    async def delete(self, name: str, *, if_version: Version | None = None, deadline_s: float | None = None) -> bool:
        """Remove an object, all of it; whether there was one.

        if_version: only where this is the current version; else VersionConflict, and nothing has changed. Raises
        Unavailable: it may have been removed or not, or is removed and its bytes are not yet (`sweep`).
        """
        name = checked_name(name)
        deadline_ns = self._deadline(deadline_s, 0)
        removed: Body | None = None
        while True:
            at = await self._chains.locate(name, deadline_ns)
            if at.header is None and removed is not None:
                await self._bodies.remove(removed, deadline_ns)
                return True
            if if_version is not None:
                await self._check(at, if_version, deadline_ns)
            if at.header is None:
                return False
            seal = await self._seal(at, deadline_ns)
            await self._clear(at, deadline_ns)
            outcome = await self._chains.remove(at, deadline_ns)
            if outcome is Removal.DONE:
                await self._bodies.remove(at.body, deadline_ns)
                return seal is not None
            removed = at.body if outcome is Removal.UNCLEAR and seal is not None else None

    async def sweep(self, *, older_than_s: float = 3600.0, deadline_s: float | None = None) -> int:
        """Remove durable values, and others, that are no object's: what writers left that were killed between storing a
        value and naming it, or between naming the next and removing the old one. How many.

        older_than_s: since when, by the clocks of who put them; a put that takes longer than that may be swept away
        under its writer. Looks through the keys of all blocks of all nodes. Raises UsageError for an age that is none.
        """
        if not 0 <= older_than_s < float("inf"):
            raise errors.UsageError(f"older_than_s={older_than_s}; pass seconds, at least 0")
        deadline_ns = self._deadline(deadline_s, 0)
        before_ns = time.time_ns() - int(older_than_s * 1e9)
        removed = 0
        async for raw in self._marked(SEAL_PREFIX, deadline_ns):
            seal = Seal.from_bytes(raw)
            if seal is None or seal.time_ns >= before_ns:
                continue
            at = await self._chains.locate(seal.name, deadline_ns)
            if at.body != seal.body:
                await self._bodies.remove(seal.body, deadline_ns)
                removed += 1
        return removed

    # ---- parts of the above

    def _deadline(self, deadline_s: float | None, nbytes: int) -> int:
        if deadline_s is None:
            return self._client.deadline() + nbytes * 1_000_000_000 // _BYTES_A_SECOND
        if not deadline_s > 0:
            raise errors.UsageError(f"deadline_s={deadline_s}; pass seconds from now, above 0")
        return time.monotonic_ns() + int(min(deadline_s, 86_400.0) * 1e9)

    async def _seal(self, at: Position, deadline_ns: int) -> Seal | None:
        """Of the current version; None: it is not there, or none of it."""
        if at.header is None:
            return None
        (raw,) = await self._chains.look([at.body.seal_key], at.body.first_key, deadline_ns)
        seal = Seal.from_bytes(raw) if raw is not None else None
        return seal if seal is not None and seal.body == at.body else None

    async def _check(self, at: Position, expected: Version | Absent | None, deadline_ns: int) -> None:
        """Raises VersionConflict. A version whose body is gone is none."""
        if expected is None:
            return
        found = at.header.version if at.header is not None and await self._seal(at, deadline_ns) else None
        if found != (None if isinstance(expected, Absent) else expected):
            there = "there is none" if found is None else f"version {found} is there"
            raise errors.VersionConflict(f"{at.name!r}: expected {expected}, and {there}; get it again, and decide")

    async def _clear(self, at: Position, deadline_ns: int) -> None:
        """What has to be gone before the next version is put: see the module's invariant."""
        await self._chains.clear(at, deadline_ns)
        before = at.header.before if at.header is not None else NO_BODY
        if before != NO_BODY:
            (raw,) = await self._chains.look([before.seal_key], before.first_key, deadline_ns)
            if raw is not None:
                await self._bodies.remove(before, deadline_ns)

    async def _remove_before(self, at: Position, version: Version, deadline_ns: int) -> None:
        if at.header is None:
            return
        try:
            await self._bodies.remove(at.body, deadline_ns)
        except errors.Unavailable as exc:
            raise errors.Unavailable(
                f"{at.name!r} is stored as version {version}, but its value of before may be there still: {exc.message}"
            ) from exc

    async def _roots(self, deadline_ns: int) -> AsyncIterator[Root]:
        async for raw in self._marked(ROOT_PREFIX, deadline_ns):
            root = Root.from_bytes(raw)
            if root is not None:
                yield root

    async def _marked(self, prefix: bytes, deadline_ns: int) -> AsyncIterator[bytes]:
        """The bytes of all small blocks whose keys begin so."""
        keys = await self._client.find_keys(prefix, deadline_s=left_s(deadline_ns))
        for begin in range(0, len(keys), _ROOTS_A_CALL):
            for raw in await self._chains.look(keys[begin : begin + _ROOTS_A_CALL], None, deadline_ns):
                if raw is not None:
                    yield raw


def _sealed(name: str, what: Described, durable: bool) -> Seal:
    body = Body(os.urandom(STAMP_BYTES), what.nbytes)
    return Seal(name, body, what.kind, what.dtype, what.shape, durable, time.time_ns())


def _info(seal: Seal, version: Version) -> ObjectInfo:
    kind = Kind(seal.kind).name.lower()
    return ObjectInfo(seal.name, version, kind, seal.dtype, seal.shape, seal.body.nbytes, seal.time_ns, seal.is_durable)
