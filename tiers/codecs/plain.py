"""The codec `none`: blocks are stored as they are, without a head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..base import BlockDamaged
from .base import element_bytes, flat_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

__all__ = ["Plain"]


class Plain:
    """Store as is: `encode` always says so, `decode` copies. See Codec."""

    name = "none"
    number = 0
    is_lossless = True

    def encode(self, data: Buffer, *, dtype: str, shape: Sequence[int] = ()) -> Buffer | None:
        """None, always."""
        element_bytes(dtype)
        return None

    def decode(self, stored: Buffer, into: Buffer) -> None:
        """Copy; BlockDamaged when the lengths differ. Nothing proves these bytes but the store's sum."""
        source, target = flat_bytes(stored), flat_bytes(into, writable=True)
        if len(source) != len(target):
            raise BlockDamaged(f"{len(source)} bytes are stored, not {len(target)}")
        np.copyto(target, source)
