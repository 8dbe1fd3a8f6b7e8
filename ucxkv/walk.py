"""One look-up across shards: which shard to ask for which keys, and what its answers add up to. Pure.

A `Walk` says what to ask next (`ask()`), takes the answer (`answer()`), and ends with the longest visible prefix. It
goes forward, home by home, as `sharding` lays a chain out. What it promises of the blocks that it found:

  ordered         without a crash or a loss of memory on the way, there was one moment within the walk at which exactly
                  these blocks of the chain were visible: a block is pinned by its children elsewhere, so what was found
                  before was still there when the next was found.
  prefix-regular  with one: each was visible at some moment within the walk. Their bytes are right all the same.
  strict          asked for, the epochs of all shards that were used are read a second time; the walk starts anew when
                  one has changed, and says so (`is_settled` False) when they never stand still.

A walk may start behind a `Head` that the client remembers (see `heads`): it asks the next block's shard at once. That
block, when it is visible, proves the head (its parent is pinned). When it is not, a shard that holds any pin of the
head's last block *vouches* for it. So neither costs the head's shard a message, which is what spreads the load of a
head that every request shares. A head that nobody vouches for is asked for, and one that is gone makes the walk start
at the root. After a crash of the head's shard its pins vouch for what was lost until they are renewed; a strict walk
uses no head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from ucxkv.keys import KeyArray
from ucxkv.sharding import ShardRule

__all__ = ["Answer", "Ask", "Head", "Life", "Span", "Walk"]

Life: TypeAlias = tuple[int, int]
"""(epoch, generation) of a visible block: it differs when the block went and came again."""

_STRICT_TRIES = 4


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask `shard` how many of keys[first:last] from the first on it has visible; for first > 0 also whether it vouches
    for keys[first - 1]. first == last: only that, and the epoch."""

    shard: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What the shard says, all of one moment.

    visible: how many from the first on. is_delegating: the last of these delegates (of none: False). vouched: the life
    of keys[first - 1] that a pin of this shard's holds; None: it holds none. epoch: grows whenever the shard lost
    blocks against their order: a new leader, lost memory, damaged values.
    """

    visible: int
    epoch: int
    is_delegating: bool = False
    vouched: Life | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """keys[first:last] were found in `shard`."""

    shard: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Head:
    """A remembered head: the chain's first `blocks` blocks, the last of which delegates.

    shard: where its last block is. life, local: once they were asked for, which life of that block delegates, and those
    of its children that live with it: while this life lasts no child joins them, so any other is in the shard of its
    own key. voucher: the latest shard that vouched for it or held one of its children; -1: none yet.
    """

    blocks: int
    shard: int
    life: Life | None = None
    local: frozenset[bytes] = frozenset()
    voucher: int = -1


class Walk:
    """See the module. keys: (n, 16) uint8, a chain from its root on, n >= 1.

    Ask as `ask()` says until it is None; then `visible` is the result and `spans` says where it was found. Blocks of a
    head that was proved by what hangs on it are in no span: they are visible, and the client has their places.
    """

    def __init__(self, keys: KeyArray, rule: ShardRule, *, head: Head | None = None, strict: bool = False) -> None:
        assert len(keys) > 0
        self._keys, self._strict = keys, strict
        self._own: list[int] = rule.own_many(keys).tolist()
        self._cuts: list[bool] = rule.cuts(keys).tolist()
        self._head = None if strict else head
        self._tries = 0
        self.messages = 0
        """How many questions were answered."""
        self.lost_head: Head | None = None
        """The head that it was to start behind, found to be gone, or none any more."""
        self.stale_head = False
        """Whether the head that it was to start behind is in another life than the client remembers."""
        self.is_settled = True
        self._next: Ask | None = None
        self._begin()

    def ask(self) -> Ask | None:
        """What to ask now; None: the walk is over."""
        return self._next

    def answer(self, answer: Answer) -> None:
        """Take the answer to what `ask` said."""
        asked = self._next
        assert asked is not None and 0 <= answer.visible <= asked.last - asked.first
        self.messages += 1
        if self._strict and self._epochs.setdefault(asked.shard, answer.epoch) != answer.epoch:
            self._anew()
        elif self._recheck is not None:
            self._recheck.pop()
            self._next = Ask(self._recheck[-1], 0, 0) if self._recheck else None
        elif self._behind is not None:
            self._answer_head(self._behind, asked, answer)
        else:
            self._forward(asked, answer)

    def _begin(self) -> None:
        self.visible = 0
        self.spans: list[Span] = []
        self.heads: list[Head] = []
        """Blocks seen to delegate, for `Heads.learn`."""
        self._epochs: dict[int, int] = {}
        self._recheck: list[int] | None = None
        self._behind = self._head
        self._at = 0
        self._next = self._question(self._own[0] if self._head is None else self._behind_shard(self._head))

    def _behind_shard(self, head: Head) -> int:
        """Which shard to ask first, and from which block on, to start behind a head."""
        at, shard = head.blocks, head.shard
        if at == len(self._keys):
            shard = head.voucher if head.voucher >= 0 else shard
        elif self._cuts[at] or (head.life is not None and self._keys[at].tobytes() not in head.local):
            shard = self._own[at]
        self._at = at if shard != head.shard else at - 1  # its own shard: ask for the head's last block itself
        return shard

    def _question(self, shard: int) -> Ask:
        """Keys from here up to the next that can't be in this shard."""
        own, cuts = self._own, self._cuts
        first = last = self._at
        while last < len(own) and (last == first or not cuts[last] or own[last] == shard):
            last += 1
        return Ask(shard, first, last)

    def _answer_head(self, head: Head, asked: Ask, answer: Answer) -> None:
        """The answer while it isn't known yet whether the head stands."""
        if asked.first < head.blocks:  # the head's last block itself was asked for
            self._behind = None
            if not answer.visible:
                self.lost_head, self._head = head, None
                self._begin()
                return
            if answer.visible == 1 and not answer.is_delegating:
                self.lost_head = head  # it is there, but heads nothing
            self._forward(asked, answer)
        elif answer.visible or (answer.vouched is not None and answer.vouched == head.life):
            self._behind = None
            self.visible = head.blocks
            self.heads.append(replace(head, voucher=asked.shard))
            self._forward(asked, answer)
        else:  # nobody knows this life of it here: its own shard does
            self.stale_head = answer.vouched is not None
            self._at = head.blocks - 1
            self._next = self._question(head.shard)

    def _forward(self, asked: Ask, answer: Answer) -> None:
        """Add what was found and go on where the next block may be."""
        if answer.visible:
            if self.heads and self.heads[-1].blocks == asked.first and self.heads[-1].shard != asked.shard:
                self.heads[-1] = replace(self.heads[-1], voucher=asked.shard)  # a block here holds a pin of the head
            self._at = self.visible = asked.first + answer.visible
            self.spans.append(Span(asked.shard, asked.first, self._at))
            if answer.is_delegating:
                self.heads.append(Head(self._at, asked.shard))
            is_elsewhere = self._at < len(self._keys) and (answer.is_delegating or self._cuts[self._at])
            if is_elsewhere and self._own[self._at] != asked.shard:
                self._next = self._question(self._own[self._at])
                return
        if self._strict and len(self._epochs) > 1:
            self._recheck = list(self._epochs)
            self._next = Ask(self._recheck[-1], 0, 0)
        else:
            self._next = None

    def _anew(self) -> None:
        """Strict: a shard's epoch has changed on the way."""
        self._tries += 1
        if self._tries < _STRICT_TRIES:
            self._begin()
        else:
            self.is_settled, self._next = False, None
