"""A directory of several shards as plain dicts, laid out by the rule and answering as a shard has to."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import xxhash

from ucxkv.keys import KeyArray
from ucxkv.sharding import ShardRule
from ucxkv.walk import Answer, Ask, Life


def chain(steps: list[int]) -> KeyArray:
    """The keys of a chain: each names its step and all before it."""
    keys = [xxhash.xxh3_128_digest(bytes(steps[: depth + 1])) for depth in range(len(steps))]
    return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 16)


@dataclass
class Block:
    home: int
    parent: bytes
    life: Life
    delegates: bool = False


@dataclass
class ShardsModel:
    """All shards at once; `epoch[s]` is shard s's."""

    rule: ShardRule
    blocks: dict[bytes, Block] = field(default_factory=dict)
    lives: int = 0

    def __post_init__(self) -> None:
        self.epoch = [1] * self.rule.shards

    def children(self, key: bytes) -> list[bytes]:
        return [child for child, block in self.blocks.items() if block.parent == key]

    def local(self, key: bytes) -> list[bytes]:
        return [child for child in self.children(key) if self.blocks[child].home == self.blocks[key].home]

    def put(self, keys: KeyArray) -> None:
        """Store a chain, each block where the rule says."""
        parent = b""
        for row in keys:
            key = row.tobytes()
            if key not in self.blocks:
                home = self.rule.own(key)
                if parent:
                    above = self.blocks[parent]
                    home = self.rule.child(
                        key, above.home, self.rule.delegates(len(self.local(parent)), above.delegates)
                    )
                    above.delegates |= home != above.home
                self.lives += 1
                self.blocks[key] = Block(home, parent, (self.epoch[home], self.lives))
            parent = key

    def evict(self, key: bytes) -> None:
        """Take a block out that has no children."""
        assert not self.children(key)
        del self.blocks[key]

    def lose(self, shard: int) -> None:
        """A shard is gone with all it held, and what hung on it."""
        self.epoch[shard] += 1
        gone = [key for key, block in self.blocks.items() if block.home == shard]
        while gone:
            key = gone.pop()
            if self.blocks.pop(key, None) is not None:
                gone += self.children(key)

    def prefix(self, keys: KeyArray) -> int:
        """How many of the chain's blocks are visible without a gap."""
        return next((at for at, row in enumerate(keys) if row.tobytes() not in self.blocks), len(keys))

    def answer(self, ask: Ask, keys: KeyArray) -> Answer:
        """What a shard says to a question."""
        rows = [row.tobytes() for row in keys]
        visible = 0
        for key in rows[ask.first : ask.last]:
            block = self.blocks.get(key)
            if block is None or block.home != ask.shard:
                break
            visible += 1
        delegates = visible > 0 and self.blocks[rows[ask.first + visible - 1]].delegates
        parent = rows[ask.first - 1] if ask.first else b""
        pins = [key for key in self.children(parent) if self.blocks[key].home == ask.shard] if parent else []
        holds_pin = bool(pins) and self.blocks[parent].home != ask.shard
        vouched = self.blocks[parent].life if holds_pin else None
        return Answer(visible, self.epoch[ask.shard], delegates, vouched)
