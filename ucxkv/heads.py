"""The common heads that a client remembers: blocks that delegate, so that a walk may start behind them. Pure.

Never trusted, only tried first: a walk proves the head that it starts behind, or finds it gone. Bounded; the head that
was used longest ago is forgotten first. What a head's shard has to be asked once for each new one is which of its
children live with it (`local`): with them known a miss behind it is final without asking there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import replace

from ucxkv.keys import KeyArray
from ucxkv.walk import Head, Life, Walk

__all__ = ["Heads"]


class Heads:
    """See the module. limit: how many are remembered, about 400 bytes each."""

    def __init__(self, limit: int = 4096) -> None:
        self._limit = limit
        self._heads: OrderedDict[bytes, Head] = OrderedDict()
        self._roots: dict[bytes, bytes] = {}
        self._lengths: dict[bytes, dict[int, int]] = {}  # root -> how many heads of each length

    def __len__(self) -> int:
        return len(self._heads)

    def find(self, keys: KeyArray) -> Head | None:
        """The longest known head that this chain, (n, 16) uint8 from its root on, starts with."""
        for blocks in sorted(self._lengths.get(keys[0].tobytes(), ()), reverse=True):
            if blocks <= len(keys):
                key = keys[blocks - 1].tobytes()
                head = self._heads.get(key)
                if head is not None:
                    self._heads.move_to_end(key)
                    return head
        return None

    def learn(self, keys: KeyArray, walk: Walk) -> list[tuple[bytes, int]]:
        """Take in what a walk along these keys found out.

        Returns (key, shard) of heads whose life and local children are to be asked for, and given to `complete`.
        """
        if walk.lost_head is not None:
            self.forget(keys[walk.lost_head.blocks - 1].tobytes())
        fresh = []
        for head in walk.heads:
            key = keys[head.blocks - 1].tobytes()
            known = self._heads.get(key)
            if known is not None and known.shard == head.shard:
                head = replace(known, voucher=head.voucher if head.voucher >= 0 else known.voucher)
            if head.life is None or walk.stale_head:
                fresh.append((key, head.shard))
            self._put(keys[0].tobytes(), key, head)
        return fresh

    def complete(self, key: bytes, life: Life, local: Collection[bytes]) -> None:
        """A head's life and local children, as its shard names them now."""
        head = self._heads.get(key)
        if head is not None:
            self._heads[key] = replace(head, life=life, local=frozenset(local))

    def forget(self, key: bytes) -> None:
        """This block is no head any more."""
        head = self._heads.pop(key, None)
        if head is not None:
            self._count(self._roots.pop(key), head.blocks, -1)

    def _put(self, root: bytes, key: bytes, head: Head) -> None:
        if key not in self._heads:
            if len(self._heads) >= self._limit:
                self.forget(next(iter(self._heads)))
            self._roots[key] = root
            self._count(root, head.blocks, 1)
        self._heads[key] = head

    def _count(self, root: bytes, blocks: int, by: int) -> None:
        lengths = self._lengths.setdefault(root, {})
        lengths[blocks] = lengths.get(blocks, 0) + by
        if not lengths[blocks]:
            del lengths[blocks]
        if not lengths:
            del self._lengths[root]
