"""The headers of one object's versions in the store: which version is current, who has the next one, what may go.

How it stays right (see `numbering` for the shape of the chain)
- A header's key is made from the object's life and the number, so of all who want to have the next version the first
  writer wins, in the one place where the chain lives; the parent has to be there, so nobody continues a life that is
  over or a run that was cleared from its beginning.
- `locate` answers what was current at one moment of the call: it has seen the header, then that the next one was not
  there and the run was not closed. Without evictions nothing else can have been current then.
- `claim` looks at what its header stands on after it has put it: whether the run was closed (then its place may have
  been another's long ago, and the stamps in the closing header tell whose), whether the life is still the root's, and
  whether the version before is the one that it was to follow. A header that should not be there is taken back.
- A life is removed in one step, headers and root: the newest header stays when somebody has put the next version.
"""

from __future__ import annotations

import asyncio
import enum
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ucxkv import errors
from ucxkv.client.results import DeleteStatus, PutStatus, ReadStatus
from ucxkv.objects import numbering
from ucxkv.objects.bodies import left_s
from ucxkv.objects.records import NO_BODY, STAMP_BYTES, Body, Header, Root, header_key, header_keys, root_key

if TYPE_CHECKING:
    from ucxkv.client.client import Client

__all__ = ["Chains", "Claim", "Position", "Removal"]

_HINTS_MAX: Final = 4096
_BUSY_S: Final = 0.005


class Claim(enum.Enum):
    """What became of a claim on the next version."""

    OURS = enum.auto()
    LOST = enum.auto()
    """Somebody else has it, or what was current is no more: locate again."""


class Removal(enum.Enum):
    """What became of a removal."""

    DONE = enum.auto()
    OVERTAKEN = enum.auto()
    """There is another version, or another one removed it: locate again."""
    UNCLEAR = enum.auto()
    """The version is gone, its root is not: for a next version, or for what a writer left that was killed. Locate
    again: if there is no version then, this has removed the last one."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where an object stood at one moment. life: None: it had no root. header: of the current version, None: none."""

    name: str
    life: bytes | None
    header: Header | None

    @property
    def number(self) -> int:
        """Of the current version; 0: none."""
        return self.header.number if self.header is not None else 0

    @property
    def body(self) -> Body:
        """Of the current version."""
        return self.header.body if self.header is not None else NO_BODY


class Chains:
    """See the module. Remembers where it found objects, at most `_HINTS_MAX` of them, and never trusts that."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._hints: dict[str, tuple[bytes, int]] = {}

    # ---- which version is current

    async def locate(self, name: str, deadline_ns: int) -> Position:
        """The current version. Raises Unavailable, DeadlineExceeded, UsageError for a name that another one hides."""
        key = root_key(name)
        hint = self._hints.pop(name, None)
        while True:
            if hint is None:
                (raw,) = await self.look([key], key, deadline_ns)
                if raw is None:
                    return Position(name, None, None)
                life = _root(raw, name).life
                hint = life, await self._search(key, life, deadline_ns)
            found = await self._confirmed(name, *hint, deadline_ns)
            if found is not None:
                if found.life is not None:
                    self._remember(name, found.life, found.number)
                return found
            hint = None
            await asyncio.sleep(0)

    def _remember(self, name: str, life: bytes, number: int) -> None:
        if len(self._hints) >= _HINTS_MAX:
            del self._hints[next(iter(self._hints))]
        self._hints[name] = life, number

    async def _search(self, root: bytes, life: bytes, deadline_ns: int) -> int:
        steps = numbering.search()
        numbers = next(steps)
        while True:
            seen = await self._client.exists_many(header_keys(life, numbers), root=root, deadline_s=left_s(deadline_ns))
            try:
                numbers = steps.send(seen.tolist())
            except StopIteration as done:
                number: int = done.value
                return number

    async def _confirmed(self, name: str, life: bytes, number: int, deadline_ns: int) -> Position | None:
        """The object as it is, if this is where it is; None: look for it again."""
        root = root_key(name)
        behind = dict.fromkeys((*([number + 1] if number < numbering.LAST else []), *numbering.closers(number)))
        keys = [root, *header_keys(life, [number] if number else []), *header_keys(life, list(behind))]
        first, *others = await self.look(keys, root, deadline_ns)
        if first is None:
            return Position(name, None, None)
        if _root(first, name).life != life:
            return None
        header = None
        if number:
            raw, *others = others
            header = Header.from_bytes(raw) if raw is not None else None
            if header is None:
                return None
        return Position(name, life, header) if not any(one is not None for one in others) else None

    async def look(self, keys: list[bytes], root: bytes | None, deadline_ns: int) -> list[bytes | None]:
        """The bytes of small blocks, None where there is none for certain. Raises Unavailable where that is unknown.

        A block whose bytes do not prove themselves counts as none; its node drops it.
        """
        while True:
            result = await self._client.get_many(keys, root=root, deadline_s=left_s(deadline_ns))
            if (result.status == ReadStatus.UNAVAILABLE).any():
                raise errors.Unavailable("a node that may hold the object does not answer; retry")
            if not (result.status == ReadStatus.STALE).any():
                assert result.values is not None
                return result.values

    # ---- the next version

    async def claim(self, at: Position, body: Body, *, durable: bool, deadline_ns: int) -> tuple[Claim, Header]:
        """Make `body`, which is sealed, the version after `at`, and say whether it is.

        Raises Unavailable when that cannot be known: it may be the current version then, or become it. Raises
        Overloaded, JournalFailed, UsageError: it is none.
        """
        if at.number == numbering.LAST:
            raise errors.UsageError(f"{at.name!r} was put {at.number} times; delete it, and put it again")
        if at.life is None:
            at = await self._created(at, deadline_ns)
        assert at.life is not None
        number = at.number + 1
        header = Header(number, body, at.body, await self._stamps(at, number, deadline_ns))
        above = numbering.parent(number)
        status = await self._put(
            header_key(at.life, number),
            header.to_bytes(),
            header_key(at.life, above) if above else root_key(at.name),
            durable,
            deadline_ns,
        )
        if status in (PutStatus.ALREADY, PutStatus.ORDER):
            return Claim.LOST, header
        if status is not PutStatus.STORED:
            raise errors.Overloaded(f"{at.name!r}: no room for a version's header; retry later")
        if await self._is_void(at, header, deadline_ns):
            return Claim.LOST, header
        self._remember(at.name, at.life, number)
        return Claim.OURS, header

    async def _created(self, at: Position, deadline_ns: int) -> Position:
        """A new life. Its root becomes durable with the first durable header."""
        root = Root(os.urandom(STAMP_BYTES), at.name)
        status = await self._put(root_key(at.name), root.to_bytes(), None, False, deadline_ns)
        if status is PutStatus.STORED:
            return Position(at.name, root.life, None)
        if status is not PutStatus.ALREADY:
            raise errors.Overloaded(f"{at.name!r}: no room for its first block; retry later")
        found = await self.locate(at.name, deadline_ns)
        return Position(at.name, found.life or root.life, None)  # if it has a version, the claim on the first is lost

    async def _put(self, key: bytes, raw: bytes, parent: bytes | None, durable: bool, deadline_ns: int) -> PutStatus:
        while True:
            status = await self._client.put(
                key, raw, parent, durable=durable, exact=True, deadline_s=left_s(deadline_ns)
            )
            if status is PutStatus.UNAVAILABLE:
                raise errors.Unavailable("the node did not answer in time, and the object may have been put or not")
            if status is not PutStatus.BUSY:
                return status
            await asyncio.sleep(_BUSY_S)

    async def _stamps(self, at: Position, number: int, deadline_ns: int) -> tuple[bytes, ...]:
        """The stamps of the versions that `number` closes; zeros for one whose header is not there."""
        closed = numbering.closed_numbers(number)
        if not closed:
            return ()
        assert at.life is not None
        raw = await self.look(header_keys(at.life, closed), root_key(at.name), deadline_ns)
        headers = [Header.from_bytes(one) if one is not None else None for one in raw]
        return tuple(NO_BODY.stamp if one is None else one.body.stamp for one in headers)

    async def _is_void(self, at: Position, header: Header, deadline_ns: int) -> bool:
        """Whether a header that was just put makes no version, for what it stands on; it is taken back then."""
        assert at.life is not None
        above = numbering.closers_above(header.number)
        keys = [root_key(at.name), *header_keys(at.life, [*above, at.number] if at.number else above)]
        first, *others = await self.look(keys, keys[0], deadline_ns)
        closing, base = others[: len(above)], others[len(above) :]
        is_closed = any(one is not None for one in closing)
        if closing and closing[0] is not None:
            return await self._is_taken(at.life, header, closing[0], above[0], deadline_ns)
        is_followed = all(one is None or Header.from_bytes(one) == at.header for one in base)
        if not is_closed and is_followed and first is not None and _root(first, at.name).life == at.life:
            return False
        # Its run was cleared, and what closed that too; or it stands on another life's root, or on another version. Had
        # it been a version it would have been removed with its run, or its life, or be followed by another: then it is
        # not there to be taken back, or cannot be.
        return await self._take_back(at.life, header, deadline_ns) is DeleteStatus.DELETED

    async def _is_taken(self, life: bytes, header: Header, closing: bytes, number: int, deadline_ns: int) -> bool:
        """The same, where the header of the version `number`, which closed the run, is still there."""
        closed, above = numbering.closed_numbers(number), Header.from_bytes(closing)
        stamps = dict(zip(closed, above.closed, strict=False)) if above is not None else {}
        if stamps.get(header.number) == header.body.stamp:
            return False
        await self._take_back(life, header, deadline_ns)
        return True

    async def _take_back(self, life: bytes, header: Header, deadline_ns: int) -> DeleteStatus:
        (status,) = await self._client.delete([header_key(life, header.number)], deadline_s=left_s(deadline_ns))
        if status == DeleteStatus.UNAVAILABLE:
            raise errors.Unavailable("a node does not answer, and the object may have been put or not")
        return DeleteStatus(int(status))

    # ---- what may go

    async def clear(self, at: Position, deadline_ns: int) -> None:
        """Remove the headers that the current version's run has closed, where they are there still."""
        base = at.number - at.number % numbering.RADIX
        closed = numbering.closed_numbers(base) if base else []
        if not closed or at.life is None:
            return
        firsts, root = header_keys(at.life, closed[:: numbering.RADIX - 1]), root_key(at.name)
        if (await self._client.exists_many(firsts, root=root, deadline_s=left_s(deadline_ns))).any():
            status = await self._client.delete(header_keys(at.life, closed), deadline_s=left_s(deadline_ns))
            if (status == DeleteStatus.UNAVAILABLE).any():
                raise errors.Unavailable("a node does not answer; nothing was put")

    async def remove(self, at: Position, deadline_ns: int) -> Removal:
        """Remove a life that has a version, root and headers, in one step; not what was put since `at`.

        Raises Unavailable when it cannot be known whether it was removed.
        """
        assert at.life is not None and at.header is not None
        root = root_key(at.name)
        numbers = {n for n in await self._all_numbers(root, at.life, deadline_ns) if n < at.number}
        above = numbering.parent(at.number + 1) if at.number < numbering.LAST else 0
        order = [at.number, *sorted(numbers, reverse=True)]
        status = await self._client.delete([*header_keys(at.life, order), root], deadline_s=left_s(deadline_ns))
        self._hints.pop(at.name, None)
        if (status == DeleteStatus.UNAVAILABLE).any():
            raise errors.Unavailable(f"{at.name!r}: a node does not answer, and it may have been deleted or not")
        pivot = status[order.index(above)] if above in order else status[-1]  # what the next version would hang on
        if pivot == DeleteStatus.DELETED:
            return Removal.DONE
        return Removal.UNCLEAR if status[0] == DeleteStatus.DELETED else Removal.OVERTAKEN

    async def _all_numbers(self, root: bytes, life: bytes, deadline_ns: int) -> list[int]:
        """Of all headers that are there, also of those that no version needs."""
        found: list[int] = []
        bases = [0]
        while bases:
            numbers = [number for base in bases for run in numbering.runs(base) for number in run]
            if not numbers:
                break
            keys = header_keys(life, numbers)
            seen = await self._client.exists_many(keys, root=root, deadline_s=left_s(deadline_ns))
            bases = [number for number, is_there in zip(numbers, seen.tolist(), strict=True) if is_there]
            found += bases
        return found


def _root(raw: bytes, name: str) -> Root:
    root = Root.from_bytes(raw)
    if root is None or root.name != name:
        shown = "something else" if root is None else f"the object {root.name!r}"
        raise errors.UsageError(f"{name!r} cannot be used: its key is taken by {shown}")
    return root
