"""What every control message is."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

__all__ = ["Message", "UInt"]

UInt = Annotated[int, msgspec.Meta(ge=0)]


class Message(msgspec.Struct, frozen=True, array_like=True):
    """Base of all control messages; `CODE` is the frame's type."""

    CODE: ClassVar[int] = 0
