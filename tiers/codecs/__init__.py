"""How blocks are stored smaller: `none`, `lossless` (byte planes and zstd), `int8` (a scale a channel)."""

from .base import ELEMENT_BYTES, Codec, CodecUnknown, by_channel
from .choice import CODECS, codec_number, codec_of
from .envelope import Head, read_head
from .int8 import ERROR_BOUND, Int8
from .lossless import Lossless
from .plain import Plain

__all__ = [
    "CODECS",
    "ELEMENT_BYTES",
    "ERROR_BOUND",
    "Codec",
    "CodecUnknown",
    "Head",
    "Int8",
    "Lossless",
    "Plain",
    "by_channel",
    "codec_number",
    "codec_of",
    "read_head",
]
