"""A session's index as values in the store: one record a turn, a chain of its own.

Record i has the key `record_keys(session, ...)[i]` and record i - 1 as its parent. The store's first-writer-wins makes
the chain a log that any process may append to: who finds record i taken reads it, and writes i + 1. A record says what
chain of blocks a turn used, by what it adds to the chain of one of the `BASES` records before it.

One record, version 1, little endian:

    offset  bytes  what
    0       8      b"ucxkvses"
    8       2      version, 1
    10      2      layer groups that the chain is stored in, at least 1
    12      4      base: how many records back the chain is that this one continues (1 .. BASES); 0 = none
    16      4      common: leading keys that are those of the base's chain (0 without one)
    20      4      count: keys that follow
    24      8      when the turn was, seconds of Unix time, float64
    32      8      time to live from then, seconds, float64
    40      16 x count  the chain's keys from `common` on

What does not parse ends the log: an index is a hint, and a hint that cannot be read is none. The store proves the
bytes by their sum. Pure.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np

from ucxkv.ids import KEY_BYTES
from ucxkv.keys import KeyArray, hash_key
from ucxkv.sessions.book import Chain, common_head

__all__ = ["BASES", "RECORDS_MAX", "SessionLog", "Turn", "record_keys", "session_key"]

RECORDS_MAX: Final = 256
"""After so many turns the log is written anew, from the chains that are known then."""
BASES: Final = 8

_HEAD: Final = struct.Struct("<8sHHIIIdd")
_MAGIC: Final = b"ucxkvses"
_VERSION: Final = 1
_KEYS_MAX: Final = 1 << 24


def session_key(session: str, salt: str = "") -> bytes:
    """The 16 bytes that name a session in books and logs; sha256, so that nobody finds another of the same name."""
    body = session.encode("utf-8", "surrogatepass")
    return hash_key(b"ucxkv session\0" + len(body).to_bytes(4, "little") + body + salt.encode(), shared=True)


def record_keys(session: bytes, count: int = RECORDS_MAX) -> KeyArray:
    """The keys of the first `count` records of a session, (count, 16) uint8."""
    keys = b"".join(hash_key(b"ucxkv session record\0" + session + i.to_bytes(4, "little")) for i in range(count))
    return np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES)


@dataclass(frozen=True, slots=True)
class Turn:
    """One record, read: the chain that a turn used, when (Unix time), and for how long it is to be remembered."""

    chain: Chain
    used_unix_s: float
    ttl_s: float

    def left_s(self, now_unix_s: float) -> float:
        """Of its time to live; 0 or less when that is over. A turn in the future (another clock) is one of now."""
        return self.ttl_s - max(0.0, now_unix_s - self.used_unix_s)


class SessionLog:
    """What has been read or written of one session's log so far: how many records, and the last chains."""

    def __init__(self) -> None:
        self.count = 0
        self._recent: deque[Chain] = deque(maxlen=BASES)

    def encode(self, turn: Turn) -> bytes:
        """The record that would be the next one."""
        base, common = 0, 0
        for back, chain in enumerate(reversed(self._recent), 1):
            if (head := common_head(chain, turn.chain)) > common:
                base, common = back, head
        rest = turn.chain.keys[common:]
        fixed = (_MAGIC, _VERSION, turn.chain.layer_groups, base, common, len(rest), turn.used_unix_s, turn.ttl_s)
        return _HEAD.pack(*fixed) + rest.tobytes()

    def decode(self, record: bytes) -> Turn | None:
        """The turn of the next record; None for what is no record."""
        if len(record) < _HEAD.size:
            return None
        magic, version, groups, base, common, count, used_unix_s, ttl_s = _HEAD.unpack_from(record)
        if (magic, version) != (_MAGIC, _VERSION) or len(record) != _HEAD.size + KEY_BYTES * count:
            return None
        if not (math.isfinite(used_unix_s) and 0 < ttl_s < math.inf and groups and base <= len(self._recent)):
            return None
        keys = np.frombuffer(record, np.uint8, offset=_HEAD.size).reshape(-1, KEY_BYTES)
        if base or common:
            chain = self._recent[-base] if base else Chain(keys[:0])
            if common > len(chain) or chain.layer_groups != groups or common + count > _KEYS_MAX:
                return None
            keys = np.concatenate([chain.keys[:common], keys])
        if not len(keys) or (keys.view(np.uint64).reshape(-1, 2) == 0).all(axis=1).any():
            return None
        return Turn(Chain(keys, groups), used_unix_s, ttl_s)

    def add(self, chain: Chain) -> None:
        """The next record is in the store, and is this chain's."""
        self.count += 1
        self._recent.append(chain)
