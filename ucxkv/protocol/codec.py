"""Encode and decode control messages; the only place that knows msgpack.

A payload from the network either decodes to exactly one message of its type, with every array a whole number of
elements, or raises `MessageError`; nothing else ever escapes (fuzzed).
"""

from __future__ import annotations

import msgspec

from ucxkv.protocol import messages
from ucxkv.protocol.messages import Message

WIRE_VERSION = 2

_ENCODER = msgspec.msgpack.Encoder()
_TYPES: dict[int, type[Message]] = {
    kind.CODE: kind
    for kind in vars(messages).values()
    if isinstance(kind, type) and issubclass(kind, Message) and kind is not Message
}
_DECODERS = {code: msgspec.msgpack.Decoder(kind) for code, kind in _TYPES.items()}

# bytes an element of each array field: a payload whose arrays do not fit together is refused before anyone indexes it
_ITEM_BYTES = {
    "keys": 16,
    "parents": 16,
    "offsets": 8,
    "sums": 8,
    "lengths": 4,
    "regions": 2,
    "segments": 2,
    "tiers": 1,
    "parts": 1,
}
_PARALLEL: dict[type[Message], tuple[tuple[str, int], ...]] = {
    kind: tuple(
        (f, _ITEM_BYTES[f]) for f in kind.__struct_fields__ if f in _ITEM_BYTES and kind.__annotations__[f] == "bytes"
    )
    for kind in _TYPES.values()
}


class MessageError(ValueError):
    """The payload is no message of that type: drop the connection, it speaks something else."""


def encode(message: Message) -> bytes:
    """The payload of `message`; its frame type is `message.CODE`."""
    return _ENCODER.encode(message)


def decode(code: int, payload: bytes | bytearray | memoryview) -> Message:
    """The message of type `code` in `payload`.

    Raises MessageError for an unknown code, bytes that are not that message, or arrays of unequal length.
    """
    decoder = _DECODERS.get(code)
    if decoder is None:
        raise MessageError(f"unknown message type {code}; the peer speaks another version of the protocol")
    try:
        message: Message = decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise MessageError(f"malformed {_TYPES[code].__name__}: {exc}") from exc
    fields = _PARALLEL[type(message)]
    if fields:
        first, width = fields[0]
        count, rest = divmod(len(getattr(message, first)), width)
        if rest or any(len(getattr(message, name)) != count * item for name, item in fields[1:]):
            raise MessageError(f"malformed {type(message).__name__}: its arrays are not of one length")
    return message
