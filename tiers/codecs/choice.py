"""Which codecs there are: by the name in a configuration, by the number in a stored block's flags."""

from __future__ import annotations

from .base import Codec, CodecUnknown
from .int8 import Int8
from .lossless import Lossless
from .plain import Plain

__all__ = ["CODECS", "codec_number", "codec_of"]

CODECS: tuple[Codec, ...] = (Plain(), Lossless(), Int8())
"""All of them, by number."""


def codec_of(name: str) -> Codec:
    """The codec of that name; CodecUnknown says which there are. Its library may still be missing: see Codec.encode."""
    for codec in CODECS:
        if codec.name == name:
            return codec
    raise CodecUnknown(f"codec {name!r} is unknown; known are {', '.join(codec.name for codec in CODECS)}")


def codec_number(number: int) -> Codec:
    """The codec that stored a block with that number in its flags; CodecUnknown where a newer release did."""
    if not 0 <= number < len(CODECS):
        raise CodecUnknown(f"a block stored by codec {number}; this release has 0 to {len(CODECS) - 1}")
    return CODECS[number]
