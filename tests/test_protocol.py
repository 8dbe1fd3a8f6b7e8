"""The control protocol: every message travels whole; anything else is a MessageError and nothing worse."""

from __future__ import annotations

from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.messages import KINDS, messages, payloads
from ucxkv.protocol import Message, MessageError, auth, decode, encode
from ucxkv.protocol import messages as m


def test_type_codes_are_unique_and_fit_the_frame() -> None:
    """Goal: no two messages are taken for each other. Method: all message classes against the table of codes."""
    kinds = [kind for kind in vars(m).values() if isinstance(kind, type) and issubclass(kind, Message)]
    codes = [kind.CODE for kind in kinds if kind is not Message]
    assert len(codes) == len(set(codes)) == len(KINDS) and all(0 < code < 1 << 16 for code in codes)


@settings(max_examples=400, deadline=None)
@given(messages())
def test_every_message_comes_out_as_it_went_in(message: Message) -> None:
    """Goal: encode and decode are inverse, and only for the right type. Method: any values of any message."""
    payload = encode(message)
    assert decode(message.CODE, payload) == message
    assert decode(message.CODE, bytearray(payload)) == message == decode(message.CODE, memoryview(payload))


@settings(max_examples=1500, deadline=None)
@given(payloads())
def test_any_bytes_are_a_message_or_a_message_error(given_: tuple[int, bytes]) -> None:
    """Goal: nothing else ever escapes the decoder. Method: spoilt, cut, crossed and random payloads."""
    code, payload = given_
    try:
        message = decode(code, payload)
    except MessageError:
        return
    assert code == type(message).CODE
    assert encode(decode(code, encode(message))) == encode(message)  # by bytes: a weight may be no number


@pytest.mark.parametrize("code", sorted(KINDS))
def test_a_payload_cut_anywhere_is_refused_or_a_shorter_message(code: int) -> None:
    """Goal: truncation at every byte. Method: an example of each type, cut at every length."""
    payload = encode(messages_example(KINDS[code]))
    for end in range(len(payload)):
        with pytest.raises(MessageError):
            decode(code, payload[:end])


def messages_example(kind: type[Message]) -> Message:
    """One message of a type with every field at a plain value."""
    plain: dict[Any, Any] = {int: 7, bool: True, float: 1.5, str: "text", bytes: b""}
    hints = get_type_hints(kind)
    values = {}
    for name in kind.__struct_fields__:
        hint = hints[name]
        if get_origin(hint) is list:
            (item,) = get_args(hint)
            values[name] = [plain[item] if item in plain else messages_example(item)]
        elif get_origin(hint) is dict:
            values[name] = {"key": plain[get_args(hint)[1]]}
        else:
            values[name] = plain[hint] if hint in plain else messages_example(hint)
    return kind(**values)


def test_arrays_that_do_not_fit_together_are_refused() -> None:
    """Goal: nobody indexes past an array of the peer's. Method: one array a row short, long, or not whole."""
    whole = m.Put(bytes(32), bytes(32), bytes(4), bytes(16), bytes(8), bytes(16))
    assert decode(m.Put.CODE, encode(whole)) == whole
    for name in ("keys", "parents", "regions", "offsets", "lengths", "sums"):
        for change in (-1, 1, 16, -len(getattr(whole, name))):
            values = {field: getattr(whole, field) for field in whole.__struct_fields__}
            values[name] = bytes(len(values[name]) + change)
            with pytest.raises(MessageError, match="one length"):
                decode(m.Put.CODE, encode(m.Put(**values)))


def test_numbers_out_of_range_are_refused() -> None:
    """Goal: a size is never negative. Method: negative numbers where only unsigned ones make sense."""
    for message in (m.Grant(-1, 1), m.Grant(1, -1), m.Renew(-1, 5), m.ListKeys(-5, 1)):
        with pytest.raises(MessageError):
            decode(message.CODE, encode(message))


def test_unknown_types_and_deep_nesting_are_refused() -> None:
    """Goal: no recursion error, no crash. Method: type codes nobody has, arrays nested a hundred thousand deep."""
    for code in (0, 9, 999, 65_535):
        with pytest.raises(MessageError, match="another version"):
            decode(code, b"\x90")
    for code in KINDS:
        for deep in (
            b"\x91" * 100_000 + b"\xc0",
            b"\x81\xa1a" * 100_000,
            b"\xdd\xff\xff\xff\xff",
            b"\xc6\xff\xff\xff\xff",
        ):
            with pytest.raises(MessageError):
                decode(code, deep)


@given(st.text(), st.binary(min_size=16, max_size=16), st.binary(min_size=16, max_size=16))
def test_a_proof_is_good_for_its_side_its_nonces_and_its_token_only(token: str, own: bytes, peer: bytes) -> None:
    """Goal: nothing recorded or reflected opens a session. Method: proofs of the other side, swapped, other token."""
    token = token.encode(errors="ignore").decode()
    given_ = auth.proof(token, "node", own, peer)
    assert auth.is_proof(token, "node", own, peer, given_)
    assert not auth.is_proof(token, "caller", own, peer, given_)
    assert not auth.is_proof(token + "x", "node", own, peer, given_)
    assert not auth.is_proof(token, "node", own, peer, given_[:-1]) and not auth.is_proof(token, "node", own, peer, b"")
    if own != peer:
        assert not auth.is_proof(token, "node", peer, own, given_)
