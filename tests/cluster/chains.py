"""The chains that clients of a fault run put, delete and read: their names, keys and values.

A chain's name says its shard and class, so that whoever reads a log needs nothing else: `PREFIX.sSHARDd` is durable,
`PREFIX.sSHARDc` of class cache. Keys follow from the name alone; whoever puts a block chooses its content, a word that
nobody else uses, and the value's bytes follow from chain, position and content. So two writers of one key differ, and
what a reader got tells whose it is, or that it is nobody's."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from functools import lru_cache

import xxhash

from ucxkv.sharding import ShardRule

__all__ = ["BLOCKS_MAX", "Chain", "content_of", "keys_of", "value_of"]

BLOCKS_MAX = 12
"""Blocks of a chain; short, since each of its operations may be ordered against each other."""

_SIZES = (0, 1, 200, 3000, 8192)


@dataclass(frozen=True, slots=True)
class Chain:
    """One chain. shard: of its root, among the `shards` of the run."""

    name: str

    @property
    def is_durable(self) -> bool:
        """Whether its blocks are put as durable."""
        return self.name[-1] == "d"

    @property
    def shard(self) -> int:
        """The shard that its root is made for."""
        return int(self.name[self.name.rindex(".s") + 2 : -1])

    @staticmethod
    def of(prefix: str, shard: int, *, is_durable: bool) -> Chain:
        """The chain of this prefix (unique among all chains of the run)."""
        return Chain(f"{prefix}.s{shard}{'d' if is_durable else 'c'}")


@lru_cache(1 << 14)
def keys_of(chain: Chain, shards: int) -> tuple[bytes, ...]:
    """The keys of the chain's blocks, root first; the root is in the chain's shard of `shards`."""
    rule = ShardRule(shards=shards)
    for salt in itertools.count():
        root = xxhash.xxh3_128_digest(f"{chain.name}/{salt}".encode())
        if rule.own(root) == chain.shard:
            return (
                root,
                *(xxhash.xxh3_128_digest(f"{chain.name}/{salt}/{at}".encode()) for at in range(1, BLOCKS_MAX)),
            )
    raise AssertionError("endless")


def value_of(chain: Chain, at: int, content: str) -> bytes:
    """The one value of this content at this place: the word, its length before it, and 0 to 8 KiB of its own bytes."""
    rng = random.Random(f"{chain.name}/{at}/{content}")
    word = content.encode()
    return bytes([len(word)]) + word + rng.randbytes(rng.choice(_SIZES))


def content_of(chain: Chain, at: int, value: bytes) -> str | None:
    """Whose value this is; None when not every byte is as that writer put it there."""
    content = value[1 : 1 + value[0]].decode(errors="replace") if value else ""
    return content if content and value == value_of(chain, at, content) else None
