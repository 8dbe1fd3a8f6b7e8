"""Block keys: 128 bits, chained, the same in any process, on any Python, on any day.

Promises of this module:

- `key[i] = H(key[i-1], tokens of block i, layout fingerprint)`, so a key covers its whole prefix; two prefixes that
  differ in one token, or in anything of the layout, have different keys from there on.
- The bytes that are hashed are a fixed-size record, so the encoding is injective for one kind of token width (table
  below).
- Only whole blocks get keys. The all-zero key never results: it is reserved for "no parent" (`ids.ROOT_KEY`).
- Nothing depends on `hash()`, PYTHONHASHSEED, the platform's byte order or an environment variable.

The hashed record of one block, all integers little endian:

    offset       bytes  what
    0            16     parent's key; for a block without a parent, 16 zero bytes
    16           16     layout fingerprint (holds the tenant's salt)
    32           8 x n  the block's n token ids, int64

H is xxh3-128 (seed 0) inside one tenant: it is not built to resist somebody who looks for collisions, but one tenant
can only fool itself. When tenants share blocks (`shared=True`) H is sha256 cut to 128 bits. blake3 would be three
times as fast there; it is a dependency of its own for one hash of 160 bytes a block, and sha256 is in the standard
library."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from ucxkv.errors import UsageError
from ucxkv.ids import KEY_BYTES, ROOT_KEY

if TYPE_CHECKING:
    from ucxkv.layout import Layout

__all__ = ["KeyArray", "Keys", "as_key", "as_key_array", "block_keys", "derived_keys", "hash_key"]

KeyArray: TypeAlias = npt.NDArray[np.uint8]
"""(n, 16) uint8, C-contiguous: n keys."""

Keys: TypeAlias = Iterable[bytes] | KeyArray
"""What callers may pass as keys: bytes of 16 in any iterable, or a KeyArray."""


# Tuples of types, not unions: a union is built anew at each call.
_ONE_KEY: Final = (bytes, bytearray, memoryview, str)
_LISTS: Final = (list, tuple)


def as_key(key: bytes) -> bytes:
    """Check one key and return it as `bytes` of 16.

    Raises UsageError for another type or length, or the reserved zero key.
    """
    if type(key) is bytes and len(key) == KEY_BYTES and key != ROOT_KEY:
        return key
    return as_key_array([key]).tobytes()


def as_key_array(keys: Keys, *, allow_root: bool = False) -> KeyArray:
    """Return keys as one contiguous (n, 16) uint8 array, checked once here and trusted from then on.

    keys: bytes-like objects of 16 bytes in any iterable (copied), or an (n, 16) uint8 array (borrowed, returned as it
    is when it is contiguous; do not change it while a call uses it). allow_root: accept the zero key, as lists of
    parents do.
    Raises UsageError with the index and length of the first bad key.
    """
    if isinstance(keys, np.ndarray):
        arr = _checked_array(keys)
        raw = arr.tobytes()
    else:
        raw = _joined(keys)
        arr = np.frombuffer(raw, np.uint8).reshape(-1, KEY_BYTES)
    if not allow_root and ROOT_KEY in raw:  # a run of 16 zero bytes, perhaps across two keys: look closely
        words = arr.view(np.uint64)
        zero = np.flatnonzero((words[:, 0] | words[:, 1]) == 0)
        if zero.size:
            raise UsageError(
                f"key {int(zero[0])} is all zeros: this key is reserved (it means 'no parent'); use another"
            )
    return arr


def _checked_array(keys: npt.NDArray[np.uint8]) -> KeyArray:
    if keys.dtype != np.uint8 or keys.ndim != 2 or keys.shape[1] != KEY_BYTES:
        raise UsageError(
            f"keys array has dtype {keys.dtype} and shape {keys.shape}; pass uint8 of shape (n, {KEY_BYTES})"
        )
    return np.ascontiguousarray(keys)


def _joined(keys: Iterable[bytes]) -> bytes:
    if isinstance(keys, _ONE_KEY):
        raise UsageError(f"keys is one {type(keys).__name__}; pass a list of keys, e.g. [key]")
    try:
        rows = keys if isinstance(keys, _LISTS) else list(keys)
    except TypeError:
        raise UsageError(f"keys is {type(keys).__name__}; pass a list of bytes or an (n, 16) uint8 array") from None
    try:
        raw = b"".join(rows)
        if len(raw) == KEY_BYTES * len(rows) and (not rows or set(map(len, rows)) == {KEY_BYTES}):
            return raw
    except TypeError:
        pass
    raise _first_bad(rows)


def _first_bad(rows: Sequence[object]) -> UsageError:
    for index, key in enumerate(rows):
        try:
            size = memoryview(key).nbytes  # type: ignore[arg-type]
        except TypeError:
            return UsageError(
                f"key {index} is {type(key).__name__}; keys are bytes of {KEY_BYTES}"
                " (use ucxkv.ForeignKeys for an engine's own keys)"
            )
        if size != KEY_BYTES or len(key) != KEY_BYTES:  # type: ignore[arg-type]
            return UsageError(
                f"key {index} has {size} bytes; keys have exactly {KEY_BYTES}"
                " (use ucxkv.ForeignKeys for an engine's own keys)"
            )
    raise AssertionError("no bad key found")


def block_keys(
    token_ids: npt.ArrayLike,
    layout: Layout | bytes,
    block_tokens: int | None = None,
    *,
    parent: bytes | None = None,
    shared: bool | None = None,
) -> KeyArray:
    """Return the keys of the whole blocks of `token_ids`, in order; a partial block at the end gets none.

    token_ids: n integers (list, numpy array, torch CPU tensor), at least 0 and below 2**63. layout: a Layout, or a
    fingerprint of 16 bytes together with `block_tokens`. parent: key of the block before the first one, None for a
    prefix's start. shared: tenants share these blocks, so hash with sha256; default is the layout's `shared`, else no.
    Returns (n // block_tokens, 16) uint8. Raises UsageError.
    """
    fingerprint, block_tokens, shared = _layout_facts(layout, block_tokens, shared)
    tokens = _as_tokens(token_ids)
    parent = ROOT_KEY if parent is None else as_key(parent)
    blocks_count = len(tokens) // block_tokens
    records = np.empty((blocks_count, 2 + block_tokens), "<i8")
    records[:, :2] = np.frombuffer(fingerprint, "<i8")
    records[:, 2:] = tokens[: blocks_count * block_tokens].reshape(blocks_count, block_tokens)
    body, width = records.tobytes(), records.itemsize * (2 + block_tokens)
    digest = _sha256_128 if shared else xxhash.xxh3_128_digest
    keys = []
    for start in range(0, len(body), width):
        record = parent + body[start : start + width]
        parent = digest(record)
        if parent == ROOT_KEY:
            parent = _not_zero(record, digest)
        keys.append(parent)
    return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES)


def derived_keys(keys: KeyArray, label: bytes) -> KeyArray:
    """Return one further key for each of `keys`, for what belongs to a block without being it (a layer group, a part).

    keys: (n, 16) uint8, checked. label: says what is derived; the same label gives the same keys. Never the zero key.
    """
    raw = keys.tobytes()
    out = bytearray(len(raw))
    tag = b"ucxkv derived\0" + len(label).to_bytes(4, "little") + label
    for at in range(0, len(raw), KEY_BYTES):
        record = tag + raw[at : at + KEY_BYTES]
        key = xxhash.xxh3_128_digest(record)
        out[at : at + KEY_BYTES] = key if key != ROOT_KEY else _not_zero(record, xxhash.xxh3_128_digest)
    return np.frombuffer(out, np.uint8).reshape(-1, KEY_BYTES)


def hash_key(record: bytes, *, shared: bool = False) -> bytes:
    """Return the 16-byte hash of an injective record, never the zero key; xxh3-128, or sha256 cut when `shared`."""
    digest = _sha256_128 if shared else xxhash.xxh3_128_digest
    key = digest(record)
    return key if key != ROOT_KEY else _not_zero(record, digest)


def _sha256_128(record: bytes) -> bytes:
    return hashlib.sha256(record).digest()[:KEY_BYTES]


def _not_zero(record: bytes, digest: Callable[[bytes], bytes]) -> bytes:
    """Hash again with a counter behind the record until the key is not the reserved one."""
    for count in range(256):
        key = digest(record + bytes((count,)))
        if key != ROOT_KEY:
            return key
    raise AssertionError("256 hashes in a row were zero")


def _layout_facts(layout: Layout | bytes, block_tokens: int | None, shared: bool | None) -> tuple[bytes, int, bool]:
    if isinstance(layout, bytes):
        if len(layout) != KEY_BYTES:
            raise UsageError(f"layout fingerprint has {len(layout)} bytes; it has exactly {KEY_BYTES}")
        if block_tokens is None:
            raise UsageError("a fingerprint alone does not say how long a block is; pass block_tokens=...")
        fingerprint = layout
    else:
        if block_tokens is not None and block_tokens != layout.block_tokens:
            raise UsageError(
                f"block_tokens={block_tokens} differs from the layout's {layout.block_tokens}; leave it out"
            )
        fingerprint, block_tokens = layout.fingerprint, layout.block_tokens
        shared = layout.shared if shared is None else shared
    if block_tokens < 1:
        raise UsageError(f"block_tokens is {block_tokens}; a block has at least one token")
    return fingerprint, block_tokens, bool(shared)


def _as_tokens(token_ids: npt.ArrayLike) -> npt.NDArray[np.int64]:
    tokens = np.asarray(token_ids)
    if tokens.size == 0:
        return np.empty(0, "<i8")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise UsageError(f"token_ids has dtype {tokens.dtype} and shape {tokens.shape}; pass one axis of integers")
    if int(tokens.min()) < 0 or int(tokens.max()) >= 1 << 63:
        raise UsageError("token ids are at least 0 and below 2**63; a negative id marks padding: cut it off first")
    return tokens.astype("<i8", copy=False)
