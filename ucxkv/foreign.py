"""Engines' own block keys, mapped to our 128 bits.

Promises of this module: `encode` is injective over everything it accepts (type-tagged, length-prefixed) and `decode`
undoes it, so two keys of an engine that differ in value or type never share the bytes that are hashed; nothing is
joined by a separator that a model's name could contain. The namespace (engine, model, dtype, layout and the rest) is
hashed in front, so equal engine keys under different namespaces differ. What cannot be encoded is refused by a named
error, never turned into text.

    what       bytes
    None       'N'
    False      'F'
    True       'T'
    integer    'i' length(u32) two's complement, little endian, as short as it goes (0 has length 0)
    text       's' length(u32) UTF-8 (lone surrogates kept)
    bytes      'b' length(u32) the bytes
    tuple      't' count(u32)  the items, each encoded

Keys seen in engines: vLLM 32 bytes of hash and 4 of group; SGLang 64 hexadecimal characters; LMCache tuples of text
and integers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import Final, TypeAlias

import numpy as np

from ucxkv.errors import UsageError
from ucxkv.ids import KEY_BYTES, BlockKey
from ucxkv.keys import KeyArray, hash_key
from ucxkv.layout import Layout

__all__ = ["ForeignKey", "ForeignKeys", "Namespace", "decode", "encode"]

ForeignKey: TypeAlias = "bool | int | str | bytes | tuple[ForeignKey, ...] | None"
"""An engine's key: None, booleans, integers, text, bytes, and tuples of these, nested at most `MAX_DEPTH` deep."""

MAX_DEPTH: Final = 16
MAX_BYTES: Final = 1 << 20
"""The longest encoded key accepted; real ones have about 120 bytes."""


@dataclass(frozen=True, kw_only=True)
class Namespace:
    """What an engine's key leaves unsaid about the bytes behind it. Frozen; differing in any field, two share nothing.

    engine: which engine made the keys, e.g. "vllm". model, revision: the weights. dtype: of the stored elements.
    layout: the memory format as the engine names it. block_tokens: tokens a block. rank, world: which share of how
    many. format_version: of the adapter's own value format.
    salt: the tenant's secret. shared: tenants share blocks, so keys are cut from sha256 instead of xxh3-128.
    """

    engine: str
    model: str
    revision: str = ""
    dtype: str = ""
    layout: str = ""
    block_tokens: int = 0
    rank: int = 0
    world: int = 1
    format_version: int = 1
    salt: str = ""
    shared: bool = False

    @classmethod
    def of(cls, layout: Layout, *, engine: str, format_version: int = 1) -> Namespace:
        """The namespace of an engine's keys for blocks that have `layout`."""
        return cls(
            engine=engine,
            model=layout.model,
            revision=layout.revision,
            dtype=layout.dtype,
            layout=layout.fingerprint.hex(),
            block_tokens=layout.block_tokens,
            rank=layout.rank,
            world=layout.world,
            format_version=format_version,
            salt=layout.salt,
            shared=layout.shared,
        )

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that differ whenever any field differs."""
        return hash_key(b"ucxkv namespace 1\0" + encode(astuple(self)), shared=True)


class ForeignKeys:
    """Maps one namespace's engine keys to block keys. Stateless and cheap: nothing is remembered about the keys."""

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self._prefix = namespace.digest

    def one(self, key: ForeignKey) -> BlockKey:
        """The 16-byte key of one engine key."""
        return BlockKey(hash_key(self._prefix + encode(key), shared=self.namespace.shared))

    def map(self, keys: Iterable[ForeignKey]) -> KeyArray:
        """The block keys of engine keys, in order, as (n, 16) uint8; what put_many, get_many and match take.

        Raises UsageError naming the first key that is of another type, nested too deep or too long.
        """
        if isinstance(keys, bytes | str):
            raise UsageError(f"keys is one {type(keys).__name__}; pass a list of keys, e.g. [key]")
        prefix, shared = self._prefix, self.namespace.shared
        out = []
        for index, key in enumerate(keys):
            try:
                out.append(hash_key(prefix + encode(key), shared=shared))
            except UsageError as exc:
                raise UsageError(f"engine key {index}: {exc.message}") from exc
        return np.frombuffer(b"".join(out), np.uint8).reshape(-1, KEY_BYTES)


def encode(key: ForeignKey) -> bytes:
    """The canonical bytes of an engine's key; see the table above. Raises UsageError for what cannot be a key."""
    if type(key) is bytes:  # the common kind, straight
        out = b"b" + len(key).to_bytes(4, "little") + key
    else:
        parts: list[bytes] = []
        _append(parts, key, 0)
        out = b"".join(parts)
    if len(out) > MAX_BYTES:
        raise UsageError(f"the key takes {len(out)} bytes; at most {MAX_BYTES} are accepted: hash it first")
    return out


def _append(parts: list[bytes], key: object, depth: int) -> None:
    if key is None:
        parts.append(b"N")
    elif isinstance(key, bool):
        parts.append(b"T" if key else b"F")
    elif isinstance(key, int):
        raw = key.to_bytes((_magnitude_bits(key) + 8) // 8 if key else 0, "little", signed=True)
        parts += (b"i", len(raw).to_bytes(4, "little"), raw)
    elif isinstance(key, str):
        raw = key.encode("utf-8", "surrogatepass")
        parts += (b"s", len(raw).to_bytes(4, "little"), raw)
    elif isinstance(key, bytes):
        parts += (b"b", len(key).to_bytes(4, "little"), key)
    elif isinstance(key, tuple):
        if depth == MAX_DEPTH:
            raise UsageError(f"the key nests tuples more than {MAX_DEPTH} deep")
        parts += (b"t", len(key).to_bytes(4, "little"))
        for item in key:
            _append(parts, item, depth + 1)
    else:
        raise UsageError(
            f"{type(key).__name__} cannot be part of a key; use None, bool, int, str, bytes, or tuples of these"
        )


def _magnitude_bits(value: int) -> int:
    return (value if value >= 0 else ~value).bit_length()


def decode(data: bytes) -> ForeignKey:
    """The engine's key that `encode` made `data` from. Raises UsageError for bytes that `encode` never gives."""
    key, end = _take(data, 0, 0)
    if end != len(data):
        raise UsageError(f"{len(data) - end} bytes follow the encoded key")
    return key


def _take(data: bytes, at: int, depth: int) -> tuple[ForeignKey, int]:
    tag = data[at : at + 1]
    at += 1
    if tag in (b"N", b"T", b"F"):
        return (None if tag == b"N" else tag == b"T"), at
    if tag not in (b"i", b"s", b"b", b"t") or len(data) < at + 4:
        raise UsageError(f"byte {at - 1} starts no encoded key")
    size = int.from_bytes(data[at : at + 4], "little")
    at += 4
    if size > len(data) - at:
        raise UsageError(f"the encoded key ends early: {size} more expected at byte {at}")
    if tag == b"t":
        if depth == MAX_DEPTH:
            raise UsageError(f"the key nests tuples more than {MAX_DEPTH} deep")
        items = []
        for _ in range(size):
            item, at = _take(data, at, depth + 1)
            items.append(item)
        return tuple(items), at
    raw = data[at : at + size]
    at += size
    if tag == b"b":
        return raw, at
    if tag == b"s":
        try:
            return raw.decode("utf-8", "surrogatepass"), at
        except UnicodeDecodeError as exc:
            raise UsageError(f"encoded text is not UTF-8: {exc}") from None
    value = int.from_bytes(raw, "little", signed=True)
    if size != ((_magnitude_bits(value) + 8) // 8 if value else 0):
        raise UsageError("an encoded integer is longer than it needs to be")
    return value, at
