"""Hypothesis strategies for control messages: well-formed ones of every type, and payloads that are almost that."""

from __future__ import annotations

from typing import Any, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from ucxkv.protocol import Message, encode
from ucxkv.protocol import messages as m
from ucxkv.protocol.codec import _ITEM_BYTES, _PARALLEL, _TYPES

__all__ = ["KINDS", "message_of", "messages", "payloads"]

KINDS: dict[int, type[Message]] = dict(_TYPES)
_TEXT = st.text(st.characters(codec="utf-8"), max_size=40)
_SIGNED = {("owner", m.PutPart), ("owner_session", m.PutPart), ("session", m.Welcome), ("next_cursor", m.KeyPage)}


def _value(name: str, hint: Any, kind: type[Message]) -> st.SearchStrategy[Any]:
    if hint is int:
        low = -(1 << 63) if (name, kind) in _SIGNED or name == "wire_version" else 0
        return st.one_of(st.integers(0, 300), st.integers(low, (1 << 64) - 1))
    if hint is bool:
        return st.booleans()
    if hint is float:
        return st.floats(allow_nan=False)
    if hint is str:
        return _TEXT
    if hint is bytes:
        return st.binary(max_size=64)
    if get_origin(hint) is list and get_args(hint) == (str,):
        return st.lists(_TEXT, max_size=3)
    if get_origin(hint) is list:
        return st.lists(message_of(get_args(hint)[0]), max_size=3)
    if get_origin(hint) is dict:
        key, value = get_args(hint)
        return st.dictionaries(_value("", key, kind), _value("", value, kind), max_size=3)
    if issubclass(hint, Message):
        return message_of(hint)
    raise AssertionError(f"{kind.__name__}.{name}: {hint}")


@st.composite
def _build(draw: st.DrawFn, kind: type[Message]) -> Message:
    hints = get_type_hints(kind)
    count = draw(st.integers(0, 4))
    arrays = {name for name, _ in _PARALLEL[kind]}
    values = {}
    for name in kind.__struct_fields__:
        if name in arrays:
            size = count * _ITEM_BYTES[name]
            values[name] = draw(st.binary(min_size=size, max_size=size))
        else:
            values[name] = draw(_value(name, hints[name], kind))
    return kind(**values)


def message_of(kind: type[Message]) -> st.SearchStrategy[Message]:
    """Well-formed messages of one type."""
    return _build(kind)


def messages() -> st.SearchStrategy[Message]:
    """Well-formed messages of every type."""
    return st.sampled_from(sorted(KINDS)).flatmap(lambda code: message_of(KINDS[code]))


@st.composite
def _spoilt(draw: st.DrawFn, good: bytes) -> bytes:
    raw = bytearray(good)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, max(0, len(raw) - 1)))
        match draw(st.integers(0, 3)):
            case 0:
                del raw[at:]
            case 1:
                raw[at:at] = draw(st.binary(max_size=8))
            case 2 if raw:
                raw[at] = draw(st.integers(0, 255))
            case _:
                raw += draw(st.binary(max_size=8))
    return bytes(raw)


def payloads() -> st.SearchStrategy[tuple[int, bytes]]:
    """(type, payload): right, spoilt in a few bytes, of the wrong type, or any bytes at all."""
    spoilt = messages().flatmap(lambda message: st.tuples(st.just(message.CODE), _spoilt(encode(message))))
    crossed = st.tuples(st.integers(0, 65_535), messages().map(encode))
    return st.one_of(
        messages().map(lambda message: (message.CODE, encode(message))),
        spoilt,
        crossed,
        st.tuples(st.sampled_from(sorted(KINDS)), st.binary(max_size=200)),
    )
