"""The blocks that an object is made of: their keys and their bytes.

    root      one a name; gives this life of the object its number, from which the headers' keys are made
    header    one a version (see `numbering`); says which body is this version's, and which was the one before
    body      the value in blocks of BODY_BLOCK_BYTES (the last is shorter), a chain of its own, under keys made from
              a stamp: 16 random bytes that no other body has
    seal      the last block of that chain, small: what the value is. Visible => the body is visible, whole.

Roots and seals have keys that can be told from others by their first four bytes, so that a scan finds them.

    block     key
    root      "uobj" sha256("ucxkv object root 1" 0 name)[:12]
    header    xxh3-128("ucxkv object header 1" 0 life(16) number(u64))
    body      xxh3-128("ucxkv object body 1" 0 stamp(16) index(u64))
    seal      "uobs" xxh3-128("ucxkv object seal 1" 0 stamp(16))[:12]

All integers are little endian.

    root                            header                          seal
    0   4  "uOr1"                   0   4  "uOh1"                   0   4  "uOs1"
    4  16  life                     4   8  number                   4  16  stamp
    20  2  bytes of the name        12 16  stamp                    20  8  time, ns since 1970
    22     name, UTF-8              28  8  bytes of the value       28  8  bytes of the value
                                    36 16  stamp of the body        36  1  kind
                                           before (0: none)         37  1  1: class durable
                                    52  8  bytes of that            38  1  bytes of the dtype
                                    60  2  how many stamps follow   39  1  axes
                                    62     stamps of the versions   40  2  bytes of the name
                                           that this one closes     42     axes (u64 each), dtype, name

Whatever does not decode is `None`: the block is not one of ours.
"""

from __future__ import annotations

import enum
import re
import struct
from dataclasses import dataclass
from typing import Final

import numpy as np

from ucxkv.errors import UsageError
from ucxkv.ids import KEY_BYTES
from ucxkv.keys import KeyArray, hash_key

__all__ = [
    "BODY_BLOCK_BYTES",
    "NO_BODY",
    "ROOT_PREFIX",
    "SEAL_PREFIX",
    "STAMP_BYTES",
    "Body",
    "Header",
    "Kind",
    "Root",
    "Seal",
    "Version",
    "checked_name",
    "header_key",
    "header_keys",
    "root_key",
]

BODY_BLOCK_BYTES: Final = 1 << 20
"""Large enough that its copy costs more than its look-up, small enough that several are under way at once."""
STAMP_BYTES: Final = 16
NAME_BYTES_MAX: Final = 1024
ROOT_PREFIX: Final = b"uobj"
SEAL_PREFIX: Final = b"uobs"

_ROOT: Final = struct.Struct("<4s16sH")
_HEADER: Final = struct.Struct("<4sQ16sQ16sQH")
_SEAL: Final = struct.Struct("<4s16sQQBBBBH")
_VERSION: Final = re.compile(r"([1-9][0-9]*)-([0-9a-f]{32})\Z")


class Kind(enum.IntEnum):
    """What was put, and so what is got."""

    BYTES = 0
    NUMPY = 1
    TORCH = 2


@dataclass(frozen=True, slots=True)
class Version:
    """One version of an object: its number, which grows with every put, and 16 random bytes that no other version has.

    Compare versions for equality only: numbers begin again when an object was deleted or evicted. `str` and `parse`
    are each other's inverse.
    """

    number: int
    stamp: bytes

    def __str__(self) -> str:
        return f"{self.number}-{self.stamp.hex()}"

    @classmethod
    def parse(cls, text: str) -> Version:
        """What `str` gave. Raises UsageError."""
        found = _VERSION.match(text)
        if found is None:
            raise UsageError(f"{text!r} is no version; one looks like 12-{'0123456789abcdef' * 2}")
        return cls(int(found[1]), bytes.fromhex(found[2]))


@dataclass(frozen=True, slots=True)
class Body:
    """The blocks that hold one version's value. nbytes: of the value."""

    stamp: bytes
    nbytes: int

    @property
    def blocks_count(self) -> int:
        """Without the seal."""
        return -(-self.nbytes // BODY_BLOCK_BYTES)

    def keys(self) -> KeyArray:
        """The keys of all its blocks in their order, the seal's last."""
        keys = [self._block_key(at) for at in range(self.blocks_count)]
        return np.frombuffer(b"".join([*keys, self.seal_key]), np.uint8).reshape(-1, KEY_BYTES)

    @property
    def first_key(self) -> bytes:
        """The key of its first block, the root of its chain."""
        return self._block_key(0) if self.nbytes else self.seal_key

    @property
    def seal_key(self) -> bytes:
        """The key of its last block."""
        return SEAL_PREFIX + hash_key(b"ucxkv object seal 1\0" + self.stamp)[: KEY_BYTES - len(SEAL_PREFIX)]

    def _block_key(self, at: int) -> bytes:
        return hash_key(b"ucxkv object body 1\0" + self.stamp + at.to_bytes(8, "little"))


NO_BODY: Final = Body(bytes(STAMP_BYTES), 0)
"""In a header: there was none before."""


@dataclass(frozen=True, slots=True)
class Root:
    """The first block of an object. life: 16 random bytes, new whenever the object is made."""

    life: bytes
    name: str

    def to_bytes(self) -> bytes:
        """See the table."""
        name = self.name.encode()
        return _ROOT.pack(b"uOr1", self.life, len(name)) + name

    @classmethod
    def from_bytes(cls, raw: bytes) -> Root | None:
        """The inverse; None: no root."""
        if len(raw) < _ROOT.size:
            return None
        magic, life, length = _ROOT.unpack_from(raw)
        name = _text(raw[_ROOT.size :])
        if magic != b"uOr1" or name is None or len(raw) != _ROOT.size + length:
            return None
        return cls(life, name)


@dataclass(frozen=True, slots=True)
class Header:
    """What makes a body a version. closed: the stamps of the versions that `number` closes, in the order of
    `numbering.closed_numbers`; zeros for one that could not be read.
    """

    number: int
    body: Body
    before: Body = NO_BODY
    closed: tuple[bytes, ...] = ()

    @property
    def version(self) -> Version:
        """As users see it."""
        return Version(self.number, self.body.stamp)

    def to_bytes(self) -> bytes:
        """See the table."""
        body, before = self.body, self.before
        fixed = _HEADER.pack(
            b"uOh1", self.number, body.stamp, body.nbytes, before.stamp, before.nbytes, len(self.closed)
        )
        return fixed + b"".join(self.closed)

    @classmethod
    def from_bytes(cls, raw: bytes) -> Header | None:
        """The inverse; None: no header."""
        if len(raw) < _HEADER.size:
            return None
        magic, number, stamp, nbytes, before, before_nbytes, count = _HEADER.unpack_from(raw)
        if magic != b"uOh1" or len(raw) != _HEADER.size + count * STAMP_BYTES:
            return None
        at = range(_HEADER.size, len(raw), STAMP_BYTES)
        closed = tuple(raw[i : i + STAMP_BYTES] for i in at)
        return cls(number, Body(stamp, nbytes), Body(before, before_nbytes), closed)


@dataclass(frozen=True, slots=True)
class Seal:
    """What a value is. dtype: numpy's `dtype.str`, torch's name, or "". shape: of an array, () for bytes. time_ns: when
    it was put, by the clock of who put it.
    """

    name: str
    body: Body
    kind: Kind
    dtype: str
    shape: tuple[int, ...]
    is_durable: bool
    time_ns: int

    def to_bytes(self) -> bytes:
        """See the table."""
        name, dtype, axes = self.name.encode(), self.dtype.encode(), len(self.shape)
        durable, body = int(self.is_durable), self.body
        fixed = _SEAL.pack(
            b"uOs1", body.stamp, self.time_ns, body.nbytes, self.kind, durable, len(dtype), axes, len(name)
        )
        return fixed + struct.pack(f"<{axes}Q", *self.shape) + dtype + name

    @classmethod
    def from_bytes(cls, raw: bytes) -> Seal | None:
        """The inverse; None: no seal."""
        if len(raw) < _SEAL.size:
            return None
        magic, stamp, time_ns, nbytes, kind, durable, dtype_len, axes, name_len = _SEAL.unpack_from(raw)
        at = _SEAL.size + 8 * axes
        is_whole = magic == b"uOs1" and kind in Kind.__members__.values() and len(raw) == at + dtype_len + name_len
        if not is_whole:
            return None
        dtype, name = _text(raw[at : at + dtype_len]), _text(raw[at + dtype_len :])
        if dtype is None or name is None:
            return None
        shape = struct.unpack_from(f"<{axes}Q", raw, _SEAL.size)
        return cls(name, Body(stamp, nbytes), Kind(kind), dtype, shape, bool(durable), time_ns)


def checked_name(name: str) -> str:
    """The name itself. Raises UsageError for what cannot be one: 1 to 1024 bytes of UTF-8."""
    if not isinstance(name, str):
        raise UsageError(f"an object's name is text, not {type(name).__name__}")
    try:
        length = len(name.encode())
    except UnicodeEncodeError as exc:
        raise UsageError(f"the name {name!r} is no valid Unicode ({exc.reason})") from None
    if not 1 <= length <= NAME_BYTES_MAX:
        raise UsageError(f"an object's name has 1 to {NAME_BYTES_MAX} bytes in UTF-8; this one has {length}")
    return name


def root_key(name: str) -> bytes:
    """The key of an object's root."""
    record = b"ucxkv object root 1\0" + name.encode()
    return ROOT_PREFIX + hash_key(record, shared=True)[: KEY_BYTES - len(ROOT_PREFIX)]


def header_key(life: bytes, number: int) -> bytes:
    """The key of a version's header."""
    return hash_key(b"ucxkv object header 1\0" + life + number.to_bytes(8, "little"))


def header_keys(life: bytes, numbers: list[int]) -> list[bytes]:
    """The keys of several."""
    return [header_key(life, number) for number in numbers]


def _text(raw: bytes) -> str | None:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None
