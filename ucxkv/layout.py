"""What a block's bytes mean, and the 16-byte fingerprint of it.

Promises of this module: two layouts that differ in any field have different fingerprints, so their blocks never meet
under one key (keys.py hashes the fingerprint into every key); equal layouts have equal fingerprints in every process,
whatever PYTHONHASHSEED is. A layout cannot be changed. Sizes follow from the fields: `block_bytes` is the size of the
one value stored for a block.

The fingerprint is sha256, cut to 16 bytes, of a format word and then, for each field in the order of the class:
length of the name (u32), name, length of the value (u32), value (text as UTF-8, integers as decimal text, everything
little endian). Lengths go first, so no two layouts share the bytes that are hashed."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Final

from ucxkv.errors import UsageError
from ucxkv.ids import KEY_BYTES, LayoutFingerprint

__all__ = ["DTYPE_BYTES", "Layout", "canonical_dtype"]

DTYPE_BYTES: Final[dict[str, int]] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
"""Bytes of one element, by the dtype's canonical name."""

_DTYPE_NAMES: Final[dict[str, str]] = {
    "fp32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "float8_e4m3fn": "float8_e4m3",
    "fp8_e4m3": "float8_e4m3",
    "fp8_e5m2": "float8_e5m2",
}

AXES: Final[dict[str, str]] = {
    "l": "layer",
    "k": "keys or values, 2 entries (1 where keys and values are one vector, as in MLA)",
    "h": "KV head of this rank",
    "n": "token in the block",
    "d": "element of the head",
}
"""The letters of `Layout.order`, and what they count."""

_FORMAT: Final = b"ucxkv layout 1"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Everything that decides what a block's bytes mean. Frozen; compare by value; `fingerprint` is its 16-byte digest.

    model, revision: identity of the weights, e.g. a repository name and its commit. dtype: name of the element type
    (torch and numpy names and the usual short forms are accepted and made canonical). layers, kv_heads, head_dim: of
    this rank's share of the model. block_tokens: tokens a block. order: the axes from outermost to innermost, a
    permutation of "lkhnd" (see AXES). kv_planes: 2 for keys and values, 1 for MLA.
    rank, world: which share of how many. adapter: name of the LoRA or other adapter. salt: the tenant's secret;
    different salts share nothing.
    shared: tenants share blocks, so keys use sha256. layer_groups: a block is stored as so many values, each of
    layers / layer_groups layers.
    Raises UsageError for a dtype or order that is not known, and for numbers that are not positive or do not divide.
    """

    model: str
    revision: str = ""
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int = 16
    order: str = "lkhnd"
    kv_planes: int = 2
    rank: int = 0
    world: int = 1
    adapter: str = ""
    salt: str = ""
    shared: bool = False
    layer_groups: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", canonical_dtype(self.dtype))
        for name in ("layers", "kv_heads", "head_dim", "block_tokens", "kv_planes", "world", "layer_groups"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise UsageError(f"layout {name} is {value!r}; it is a whole number of at least 1")
        if type(self.rank) is not int or not 0 <= self.rank < self.world:
            raise UsageError(
                f"layout rank is {self.rank!r}; it is a whole number from 0 to world - 1 = {self.world - 1}"
            )
        if self.kv_planes > 2:
            raise UsageError(
                f"layout kv_planes is {self.kv_planes}; it is 2 (keys and values) or 1 (one latent vector)"
            )
        if sorted(self.order) != sorted(AXES):
            raise UsageError(
                f"layout order is {self.order!r}; it is a permutation of 'lkhnd' (layer, k/v, head, token, element)"
            )
        if self.layers % self.layer_groups:
            raise UsageError(f"{self.layers} layers do not split evenly into {self.layer_groups} layer groups")
        for name in ("model", "revision", "adapter", "salt"):
            if type(getattr(self, name)) is not str:
                raise UsageError(f"layout {name} is {type(getattr(self, name)).__name__}; it is text (str)")

    @cached_property
    def fingerprint(self) -> LayoutFingerprint:
        """16 bytes that differ whenever any field differs; the same in every process."""
        digest = hashlib.sha256(_FORMAT)
        for field in fields(self):
            value = getattr(self, field.name)
            text = value if isinstance(value, str) else str(int(value))
            for part in (field.name.encode(), text.encode("utf-8", "surrogatepass")):
                digest.update(len(part).to_bytes(4, "little"))
                digest.update(part)
        return LayoutFingerprint(digest.digest()[:KEY_BYTES])

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def shape(self) -> tuple[int, ...]:
        """The block's shape, axes in `order`."""
        return self._shape_of(self.layers)

    @property
    def block_bytes(self) -> int:
        """Bytes of a whole block, all layers."""
        return math.prod(self.shape) * self.item_bytes

    @property
    def group_layers(self) -> int:
        """Layers in one layer group."""
        return self.layers // self.layer_groups

    @property
    def group_shape(self) -> tuple[int, ...]:
        """The shape of one stored value: a block's layers of one layer group, axes in `order`."""
        return self._shape_of(self.group_layers)

    @property
    def group_bytes(self) -> int:
        """Bytes of one stored value."""
        return self.block_bytes // self.layer_groups

    @property
    def layer_shape(self) -> tuple[int, ...]:
        """The shape of one layer of a block, axes in `order` without the layer."""
        return tuple(size for axis, size in zip(self.order, self.shape, strict=True) if axis != "l")

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of a block."""
        return self.block_bytes // self.layers

    def _shape_of(self, layers: int) -> tuple[int, ...]:
        sizes = {"l": layers, "k": self.kv_planes, "h": self.kv_heads, "n": self.block_tokens, "d": self.head_dim}
        return tuple(sizes[axis] for axis in self.order)


def canonical_dtype(name: object) -> str:
    """The canonical name of a dtype given as text, or as a torch or numpy dtype object."""
    text = str(getattr(name, "name", name)) if not isinstance(name, str) else name
    text = text.removeprefix("torch.").lower()
    text = _DTYPE_NAMES.get(text, text)
    if text not in DTYPE_BYTES:
        raise UsageError(f"layout dtype {name!r} is not known; use one of {', '.join(DTYPE_BYTES)}")
    return text
