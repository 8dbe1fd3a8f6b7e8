"""The directory as plain dicts, one key at a time: slow, obvious, and written without a look at the core."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ucxkv.directory import ROOT_KEY, DeleteStatus, PutStatus
from ucxkv.directory.events import Extent


@dataclass
class Block:
    life: int
    parent: bytes
    extents: list[Extent]
    leases: set[int] = field(default_factory=set)


@dataclass
class Draft:
    parent: bytes
    parts: int
    put_id: int
    deadline: int
    extents: dict[int, Extent] = field(default_factory=dict)


@dataclass
class Gone:
    extents: list[Extent]
    free_at: int
    leases: set[int]


@dataclass
class ModelLease:
    keys: list[tuple[bytes, int]]
    end: int
    owner: int
    lost: bool = False


class Model:
    """`capacity` slots, `grace` as in the core. Methods answer what the core must answer."""

    def __init__(self, capacity: int, grace: int) -> None:
        self.capacity, self.grace = capacity, grace
        self.visible: dict[bytes, Block] = {}
        self.drafts: dict[bytes, Draft] = {}
        self.gone: list[Gone] = []
        self.leases: dict[int, ModelLease] = {}
        self.lives = 0
        self.seen: Counter[str] = Counter()  # what became of drafts below drafts

    @property
    def used(self) -> int:
        return sum(len(block.extents) for block in self.visible.values())

    def children(self, key: bytes) -> int:
        return sum(block.parent == key for block in self.visible.values()) + sum(
            draft.parent == key for draft in self.drafts.values()
        )

    def put(self, key: bytes, parent: bytes, extent: Extent, now: int) -> PutStatus:
        if key in self.drafts:
            return PutStatus.BUSY
        if key in self.visible:
            return PutStatus.ALREADY
        if parent != ROOT_KEY and parent not in self.visible:
            return PutStatus.ORDER
        if self.used >= self.capacity:
            return PutStatus.NO_SPACE
        self.appear(key, parent, [extent])
        return PutStatus.STORED

    def put_part(
        self, key: bytes, parent: bytes, part: int, parts: int, put_id: int, extent: Extent, deadline: int, now: int
    ) -> PutStatus:
        if key in self.visible:
            return PutStatus.ALREADY
        draft = self.drafts.get(key)
        if draft is None:
            above = self.drafts.get(parent)
            is_same_put = parts > 1 and above is not None and above.put_id == put_id
            if parent != ROOT_KEY and parent not in self.visible and not is_same_put:
                return PutStatus.ORDER
            draft = Draft(parent, parts, put_id, deadline)
        elif (draft.put_id, draft.parts) != (put_id, parts):
            return PutStatus.BUSY
        elif part in draft.extents:
            return PutStatus.ALREADY
        if len(draft.extents) + 1 < parts or draft.parent in self.drafts:
            draft.extents[part] = extent
            self.drafts[key] = draft
            return PutStatus.SEALED
        if self.used + parts > self.capacity:
            return PutStatus.NO_SPACE
        draft.extents[part] = extent
        self.drafts.pop(key, None)
        self.appear(key, draft.parent, [draft.extents[p] for p in range(parts)])
        self.follow(key, now)
        return PutStatus.STORED

    def follow(self, key: bytes, now: int) -> None:
        """Whole drafts below a block that has appeared appear too, level by level; those that find no room go."""
        shown = [key]
        for above in shown:
            for child in [key for key, draft in self.drafts.items() if draft.parent == above]:
                draft = self.drafts[child]
                if len(draft.extents) < draft.parts:
                    continue
                if self.used + draft.parts > self.capacity:
                    self.drop(child, now)
                    self.seen["no room"] += 1
                    continue
                del self.drafts[child]
                self.appear(child, above, [draft.extents[p] for p in range(draft.parts)])
                self.seen["followed"] += 1
                shown.append(child)

    def appear(self, key: bytes, parent: bytes, extents: list[Extent]) -> None:
        self.lives += 1
        self.visible[key] = Block(self.lives, parent, extents)

    def remove(self, key: bytes, now: int, without: frozenset[int] = frozenset()) -> None:
        block = self.visible.pop(key)
        extents = [extent for extent in block.extents if extent[0] not in without]
        self.gone.append(Gone(extents, now + self.grace, block.leases))

    def delete(self, keys: list[bytes], now: int) -> list[DeleteStatus]:
        known = {key for key in keys if key in self.visible}
        done: set[bytes] = set()
        while ready := [key for key in known - done if not self.children(key)]:
            for key in ready:
                self.remove(key, now)
                done.add(key)
        return [
            DeleteStatus.DELETED if k in done else DeleteStatus.ORDER if k in known else DeleteStatus.MISS for k in keys
        ]

    def drop_late(self, now: int) -> None:
        for key in [key for key, draft in self.drafts.items() if draft.deadline <= now]:
            self.drop(key, now)

    def drop(self, key: bytes, now: int, without: frozenset[int] = frozenset()) -> None:
        """Give up a draft, if it is one still, and the drafts below it."""
        draft = self.drafts.pop(key, None)
        if draft is None:
            return
        extents = [extent for extent in draft.extents.values() if extent[0] not in without]
        self.gone.append(Gone(extents, now + self.grace, set()))
        for child in [child for child, below in self.drafts.items() if below.parent == key]:
            self.drop(child, now, without)
            self.seen["given up"] += 1

    def lease(self, lease: int, keys: list[bytes], end: int, owner: int) -> None:
        held = [(key, self.visible[key].life) for key in dict.fromkeys(keys) if key in self.visible]
        self.leases[lease] = ModelLease(held, end, owner)
        for key, _ in held:
            self.visible[key].leases.add(lease)

    def end_lease(self, lease: int) -> None:
        del self.leases[lease]
        for block in [*self.visible.values(), *self.gone]:
            block.leases.discard(lease)

    def lose(self, region: int, now: int) -> set[bytes]:
        lost, before = frozenset([region]), self.seen["given up"]
        for key in list(self.drafts):
            if key in self.drafts and any(e[0] == region for e in self.drafts[key].extents.values()):
                self.drop(key, now, lost)
        hit = [key for key, block in self.visible.items() if any(e[0] == region for e in block.extents)]
        out = self.drop_blocks(hit, now, lost)
        for gone in self.gone:
            gone.extents = [extent for extent in gone.extents if extent[0] != region]
        self.seen["lost"] += self.seen["given up"] - before
        return out

    def drop_blocks(self, keys: list[bytes], now: int, lost: frozenset[int] = frozenset()) -> set[bytes]:
        out = {key for key in keys if key in self.visible}
        while more := {key for key, block in self.visible.items() if block.parent in out} - out:
            out |= more
        for key in list(self.drafts):
            if key in self.drafts and self.drafts[key].parent in out:
                self.drop(key, now, lost)
        for key in out:
            self.remove(key, now, lost)
        return out

    def tick(self, now: int) -> None:
        for lease in [lease for lease, it in self.leases.items() if it.end <= now]:
            self.end_lease(lease)
        self.drop_late(now)

    def due(self, now: int) -> list[Extent]:
        """Take out what must be freed by now."""
        out = [extent for gone in self.gone if gone.free_at <= now and not gone.leases for extent in gone.extents]
        self.gone = [gone for gone in self.gone if gone.free_at > now or gone.leases]
        return sorted(out)
