"""Stored bytes that are cut, changed, mixed up or hostile: an error with a type, never other bytes, never elsewhere."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiers.coded import Guarded, as_words, kv_values, need, with_codecs
from ucxkv.tiers.base import BlockDamaged, TierError
from ucxkv.tiers.codecs import Codec, CodecUnknown, Head, Int8, Lossless, codec_number, read_head
from ucxkv.tiers.codecs.envelope import HEAD_BYTES, seal
from ucxkv.tiers.codecs.lossless import PIECE_MAX, PIECE_MIN

BOTH = with_codecs("lossless", "int8")


def stored_block(codec: Codec, dtype: str = "bfloat16", shape: tuple[int, ...] = (2, 16, 32)) -> tuple[bytes, int]:
    """(an encoded block, bytes of the original); more than a kilobyte, so that each byte can be tried."""
    need(codec)
    words = as_words(kv_values(shape), dtype)
    stored = codec.encode(words, dtype=dtype, shape=shape)
    assert stored is not None
    return bytes(stored), words.nbytes


def resealed(stored: bytes, *, body: bytes | None = None, **fields: Any) -> bytes:
    """A block whose sum holds again, with another body or other fields of the head: what a hostile writer makes."""
    head = read_head(stored)
    known = {"codec": head.codec, "dtype": head.dtype, "original_bytes": head.original_bytes} | fields
    raw = np.frombuffer(bytes(HEAD_BYTES) + (stored[HEAD_BYTES:] if body is None else body), np.uint8).copy()
    return bytes(seal(raw, Head(**known)))


def refuse(codec: Codec, stored: bytes, nbytes: int) -> TierError:
    """The error that decoding gives; nothing around the destination is written."""
    into = Guarded(nbytes)
    with pytest.raises(TierError) as caught:
        codec.decode(stored, into.view)
    into.check()
    return caught.value


@pytest.mark.parametrize("codec", BOTH)
def test_a_block_cut_or_lengthened_at_any_byte_is_damaged(codec: Codec) -> None:
    """Goal: no prefix is a block. Method: every length but the right one, then bytes behind the end."""
    stored, nbytes = stored_block(codec)
    for length in range(len(stored)):
        assert isinstance(refuse(codec, stored[:length], nbytes), BlockDamaged)
    for more in (b"\0", b"\0" * 4096, stored):
        assert isinstance(refuse(codec, stored + more, nbytes), BlockDamaged)


@pytest.mark.parametrize("codec", BOTH)
def test_a_bit_that_flips_anywhere_is_found(codec: Codec) -> None:
    """Goal: no changed byte is data. Method: one bit of each byte in turn, a different one for each."""
    stored, nbytes = stored_block(codec)
    for place in range(len(stored)):
        flipped = bytearray(stored)
        flipped[place] ^= 1 << (place % 8)
        error = refuse(codec, bytes(flipped), nbytes)
        assert isinstance(error, CodecUnknown if place in (4, 5) else BlockDamaged)


@settings(max_examples=150, deadline=None)
@given(raw=st.binary(max_size=300), number=st.sampled_from([1, 2]), is_marked=st.booleans())
def test_foreign_bytes_are_no_block(raw: bytes, number: int, is_marked: bool) -> None:
    """Goal: what was never encoded is not decoded. Method: any bytes, some with a head's first bytes before them."""
    codec = codec_number(number)
    refuse(codec, (b"UKVC\x01\x00\x00\x00" if is_marked else b"") + raw, 4096)


@pytest.mark.parametrize("codec", BOTH)
def test_a_good_block_of_something_else_is_not_taken(codec: Codec) -> None:
    """Goal: mixed-up books are a miss. Method: another codec's block, and destinations of another length."""
    stored, nbytes = stored_block(codec)
    other = Int8() if isinstance(codec, Lossless) else Lossless()
    need(other)
    assert "encoded by codec" in str(refuse(other, stored, nbytes))
    for length in (0, nbytes - 2, nbytes + 2, 1 << 20):
        assert f"encoded from {nbytes} bytes, not from {length}" in str(refuse(codec, stored, length))


@pytest.mark.parametrize("codec", BOTH)
def test_what_a_newer_release_wrote_is_named(codec: Codec) -> None:
    """Goal: a miss that explains itself. Method: a newer version, an element type and a field from the future."""
    stored, nbytes = stored_block(codec)
    newer = stored[:4] + (2).to_bytes(2, "little") + stored[6:]
    error = refuse(codec, newer, nbytes)
    assert isinstance(error, CodecUnknown)
    assert "version 2; this release reads version 1" in str(error)
    for place, value in ((17, 99), (20, 1)):
        raw = np.frombuffer(stored, np.uint8).copy()
        raw[place] = value
        raw[8:16] = 0
        summed = _with_sum(raw)
        assert isinstance(refuse(codec, summed, nbytes), CodecUnknown)


def _with_sum(raw: np.ndarray[Any, Any]) -> bytes:
    from ucxkv.tiers.copy import sum_bytes

    raw[8:16] = np.frombuffer(sum_bytes(raw[16:].data).to_bytes(8, "little"), np.uint8)
    return raw.tobytes()


@settings(max_examples=400, deadline=None)
@given(data=st.data(), number=st.sampled_from([1, 2]), dtype=st.sampled_from(["float32", "bfloat16"]))
def test_a_hostile_block_with_a_good_sum_stays_within_its_buffers(data: st.DataObject, number: int, dtype: str) -> None:
    """Goal: no out-of-bounds access, no untyped error, no bomb. Method: bodies changed, cut and stretched, heads with
    other lengths and types, sealed anew; decoding fills the destination or raises a TierError."""
    codec = codec_number(number)
    stored, nbytes = stored_block(codec, dtype)
    body = bytearray(stored[HEAD_BYTES:])
    for _ in range(data.draw(st.integers(0, 4))):
        place = data.draw(st.one_of(st.integers(0, 23), st.integers(0, len(body) - 1)))
        body[place] = data.draw(st.integers(0, 255))
    length = data.draw(st.one_of(st.just(len(body)), st.integers(0, len(body) + 40)))
    changed = bytes(body[:length]).ljust(length, b"\x07")
    claims = data.draw(st.one_of(st.just(nbytes), st.integers(0, 2 * nbytes)))
    kind = data.draw(st.sampled_from([dtype, "float32", "float16", "uint8", "int64"]))
    into = Guarded(claims)
    try:
        codec.decode(resealed(stored, body=changed, original_bytes=claims, dtype=kind), into.view)
    except TierError:
        pass
    into.check()


def lossless_body(piece: int, lengths: list[int], planes: bytes, *, zero: int = 0) -> bytes:
    return b"".join(number.to_bytes(4, "little") for number in (piece, zero, *lengths)) + planes


def test_lossless_refuses_a_frame_that_would_unpack_to_more() -> None:
    """Goal: no zip bomb. Method: frames of zeros, one that says 64 MiB, one that does not say, one too short, and two
    in one place, each in the place of 4,096 bytes; memory does not grow by what they would unpack to."""
    import tracemalloc

    zstandard = pytest.importorskip("zstandard", reason="needs the extra codec")
    stored, _ = stored_block(Lossless())
    huge = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64 << 20))
    short, right = (zstandard.ZstdCompressor().compress(bytes(length)) for length in (4095, 4096))
    good = resealed(stored, body=lossless_body(4096, [len(right)], right), dtype="uint8", original_bytes=4096)
    Lossless().decode(good, bytearray(b"x" * 4096))
    tracemalloc.start()
    try:
        for frame in (huge, silent, short, right + right, right[:-1], b"", b"\x28\xb5\x2f\xfd"):
            body = lossless_body(4096, [len(frame)], frame)
            error = refuse(Lossless(), resealed(stored, body=body, dtype="uint8", original_bytes=4096), 4096)
            assert isinstance(error, BlockDamaged)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("piece", [0, 1, PIECE_MIN - 1, PIECE_MAX + 1, 2**32 - 1])
def test_lossless_refuses_pieces_of_a_size_that_it_never_writes(piece: int) -> None:
    """Goal: neither allocations nor turns without bound. Method: sizes on either side of what is allowed."""
    stored, _ = stored_block(Lossless())
    plane = bytes(5000)
    for size in (piece, 5000):
        body = lossless_body(size, [len(plane) | 1 << 31], plane)
        raw = resealed(stored, body=body, dtype="uint8", original_bytes=5000)
        if size == 5000:
            Lossless().decode(raw, bytearray(5000))
        else:
            assert f"pieces of {piece} elements" in str(refuse(Lossless(), raw, 5000))


def test_lossless_refuses_planes_that_leave_bytes_over_or_overlap() -> None:
    """Goal: every byte of a body is accounted for. Method: a byte more or less in the lengths."""
    stored, _ = stored_block(Lossless())
    plane = bytes(range(256)) * 16
    for length, planes in ((4096, plane + b"x"), (4096, plane[:-1]), (4095, plane), (4097, plane)):
        body = lossless_body(4096, [length | 1 << 31] * 2, plane + planes + b"t")
        raw = resealed(stored, body=body, dtype="bfloat16", original_bytes=8193)
        assert "do not end where it ends" in str(refuse(Lossless(), raw, 8193))


def int8_body(tokens: int, channels: int, scales: list[int], values: bytes) -> bytes:
    fields = tokens.to_bytes(4, "little") + channels.to_bytes(4, "little")
    return fields + np.array(scales, "<u2").tobytes() + values


@pytest.mark.parametrize("scale", [0x7F80, 0x7FC0, 0x8000, 0xBF80, 0xFFFF])
def test_int8_refuses_scales_that_are_no_size(scale: int) -> None:
    """Goal: infinities, NaN and signs are not made up. Method: each as the scale of one of two channels."""
    stored, _ = stored_block(Int8())
    for scales, is_good in (([0x3F80, scale], False), ([0x3F80, 0x7F7F], True)):
        raw = resealed(stored, body=int8_body(4, 2, scales, bytes([100] * 8)), dtype="float32", original_bytes=32)
        if is_good:  # overflows float32: an infinity, without a warning
            Int8().decode(raw, bytearray(32))
        else:
            assert "scale" in str(refuse(Int8(), raw, 32))


@pytest.mark.parametrize(
    ("tokens", "channels"), [(0, 2), (4, 0), (3, 2), (8, 2), (4, 3), (2**32 - 1, 2**32 - 1), (1, 1)]
)
def test_int8_refuses_axes_that_are_not_those_of_its_values(tokens: int, channels: int) -> None:
    """Goal: no place outside of the body is read. Method: axes that do not give 8 values, or other scales."""
    stored, _ = stored_block(Int8())
    raw = resealed(stored, body=int8_body(tokens, channels, [0x3F80] * 2, bytes(8)), dtype="float32", original_bytes=32)
    assert isinstance(refuse(Int8(), raw, 32), BlockDamaged)


# A block of 192 bfloat16 values (1, 16, 12), 0, 0, 1, -1, 2, -2 and so on, as version 1 wrote it: to be read for ever.
WRITTEN = {
    "int8": (
        "VUtWQwEAAACm/mw48OJ73QIHAAAAAAAAgAEAAAAAAAAQAAAADAAAADY/Nj84Pzg/Oj86Pzw/PD8+Pz4/QD9APwAAAf8D/QT8BfsH+Qj4CvYL"
        "9Qz0DfMP8RHvEu4T7RTsFuoX6RnnGuYc5B3jHuIf4SLeI90k3CXbJton2SrWK9Us1C3TLtIv0TPNM800zDXLNso3yTvFPMQ9wz3DPsI/wUS8"
        "RLxFu0W7RrpHuUy0TbNNs06yTrJPsVSsVatVq1aqVqpXqV2jXaNeol6iXqJfoWWbZppmmmaaZppnmW6SbpJukm6SbpJvkXaKdop2inaKd4l3"
        "iX+Bf4F/gX+Bf4F/gQ=="
    ),
    "lossless": (
        "VUtWQwEAAACN5HcRtEXjFQEHAAAAAAAAgAEAAAAAAAAAAAIAAAAAAMAAAIAeAAAAAACAgAAAQECAgKCgwMDg4AAAEBAgIDAwQEBQUGBgcHCA"
        "gIiIkJCYmKCgqKiwsLi4wMDIyNDQ2Njg4Ojo8PD4+AAABAQICAwMEBAUFBgYHBwgICQkKCgsLDAwNDQ4ODw8QEBEREhITExQUFRUWFhcXGBg"
        "ZGRoaGxscHB0dHh4fHyAgIKChISGhoiIioqMjI6OkJCSkpSUlpaYmJqanJyenqCgoqKkpKamqKiqqqysrq6wsLKytLS2tri4urq8vL6+KLUv"
        "/SDArQAAUACAP79AwEHBQsIDABukeGBwsCsC"
    ),
}


@pytest.mark.parametrize("codec", BOTH)
def test_blocks_of_version_1_are_read_for_ever(codec: Codec) -> None:
    """Goal: a later release reads what this one wrote. Method: a block of each kept here as text, and its values."""
    need(codec)
    values = np.arange(192, dtype=np.float32).reshape(1, 16, 12) // 2 * np.tile([1, -1], 6).astype(np.float32)
    words, into = as_words(values, "bfloat16"), np.empty((1, 16, 12), np.uint16)
    codec.decode(base64.b64decode(WRITTEN[codec.name]), into)
    if codec.is_lossless:
        assert np.array_equal(into, words)
    else:
        peaks = np.abs(values).max(axis=1, keepdims=True)
        got = (into.astype(np.uint32) << 16).view(np.float32)
        assert (np.abs(got - values) <= peaks / 126).all()
