"""int8: the stated error holds for all that is taken, and what it cannot hold for is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tests.tiers.coded import Guarded, as_float64, as_words, kv_values
from ucxkv.tiers.codecs import ERROR_BOUND, Int8, int8
from ucxkv.tiers.codecs.floats import FLOATS

FLOAT_TYPES = sorted(FLOATS)
Words = np.ndarray[Any, Any]


def restored(words: Words, dtype: str) -> Words | None:
    """What decoding gives, or None for a block that was refused."""
    stored = Int8().encode(words, dtype=dtype, shape=words.shape)
    if stored is None:
        return None
    into = np.empty_like(words)
    Int8().decode(stored, into)
    return into


def check_error(words: Words, found: Words, dtype: str) -> float:
    """Assert the bound for every value; the largest error as a share of its channel's peak."""
    exact, got = as_float64(words, dtype), as_float64(found, dtype)
    peaks = np.broadcast_to(np.abs(exact).max(axis=-2, keepdims=True), exact.shape)
    errors = np.abs(got - exact)
    assert (errors <= peaks * ERROR_BOUND[dtype]).all()
    return float((errors[peaks > 0] / peaks[peaks > 0]).max(initial=0.0))


@st.composite
def any_words(draw: st.DrawFn) -> tuple[str, Words]:
    """A float type and an array of any of its patterns: the adversary chooses each bit."""
    dtype = draw(st.sampled_from(FLOAT_TYPES))
    shape = (draw(st.integers(1, 3)), draw(st.integers(4, 9)), draw(st.integers(12, 17)))
    word = FLOATS[dtype].word
    return dtype, draw(arrays.arrays(word, shape, elements=arrays.from_dtype(word), fill=st.just(0)))


@settings(max_examples=300, deadline=None)
@given(any_words())
def test_any_bits_are_refused_or_within_the_bound(case: tuple[str, Words]) -> None:
    """Goal: no pattern escapes the bound. Method: arbitrary bits, with infinities, NaN and subnormals among them."""
    dtype, words = case
    found = restored(words, dtype)
    if found is None:
        return
    assert np.isfinite(as_float64(words, dtype)).all()
    check_error(words, found, dtype)


@settings(max_examples=200, deadline=None)
@given(
    dtype=st.sampled_from(FLOAT_TYPES),
    seed=st.integers(0, 2**32),
    exponents=st.lists(st.integers(-110, 110), min_size=1, max_size=64),
)
@example(dtype="float16", seed=0, exponents=list(range(-24, 15)))
def test_channels_of_any_size_side_by_side_keep_the_bound(dtype: str, seed: int, exponents: list[int]) -> None:
    """Goal: a channel's error is its own. Method: channels from 2**-110 to 2**110 in one block, taken and measured;
    float16 has them from its smallest subnormal to its largest binade."""
    low, high = (-24, 14) if dtype == "float16" else (-110, 110)
    sizes = np.exp2(np.clip(exponents, low, high).astype(np.float64))
    values = np.random.default_rng(seed).uniform(-1, 1, (2, 32, len(sizes))) * sizes
    words = as_words(values.astype(np.float32), dtype)
    found = restored(words, dtype)
    assert found is not None
    check_error(words, found, dtype)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_the_bound_is_not_far_from_what_happens(dtype: str) -> None:
    """Goal: the stated error says something. Method: a million normal values come within a third of the bound."""
    words = as_words(kv_values((4, 64, 64, 64)), dtype)
    found = restored(words, dtype)
    assert found is not None
    assert check_error(words, found, dtype) > ERROR_BOUND[dtype] / 3


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_an_odd_address_changes_nothing(dtype: str) -> None:
    """Goal: memory is taken as it comes. Method: the same block stored and restored one and three bytes off."""
    words = as_words(kv_values((3, 16, 24)), dtype)
    expected = restored(words, dtype)
    assert expected is not None
    stored = Int8().encode(words, dtype=dtype, shape=words.shape)
    assert stored is not None
    moved, into = Guarded(len(memoryview(stored)), shift=1), Guarded(words.nbytes, shift=3)
    moved.view[:] = stored
    Int8().decode(moved.view, into.view)
    into.check()
    assert into.view.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_zeros_and_a_lonely_peak_stay_what_they_are(dtype: str) -> None:
    """Goal: no division by nothing, no leak between channels. Method: a block of zeros, then one value in it."""
    words = np.zeros((3, 16, 24), FLOATS[dtype].word)
    words[0, 3, 5] = 1 << (8 * words.itemsize - 1)  # minus zero
    found = restored(words, dtype)
    assert found is not None
    assert not found.any()
    words[1, 7, 9] = as_words(np.array([-3.0], np.float32), dtype)[0]
    found = restored(words, dtype)
    assert found is not None
    values = as_float64(found, dtype)
    assert abs(values[1, 7, 9] + 3) <= 3 * ERROR_BOUND[dtype]
    assert np.count_nonzero(values) == 1


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize("bad", ["inf", "-inf", "nan", "-nan", "largest", "-largest"])
def test_a_block_with_one_value_that_cannot_be_kept_is_refused(dtype: str, bad: str) -> None:
    """Goal: an infinity, a NaN or an overflow never becomes a number. Method: one of them, first, last and between."""
    kind = FLOATS[dtype]
    pattern = {"inf": kind.infinity, "nan": kind.infinity + 1, "largest": kind.infinity - 1}[bad.lstrip("-")]
    pattern |= (bad[0] == "-") << (8 * kind.word.itemsize - 1)
    for place in (0, 700, -1):
        words = as_words(kv_values((2, 16, 64)), dtype)
        words.reshape(-1)[place] = pattern
        assert restored(words, dtype) is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_channels_too_small_for_a_scale_are_refused(dtype: str) -> None:
    """Goal: the bound holds down to where a scale would lose bits. Method: peaks on either side of that limit."""
    for peak, is_taken in ((2.0**-117, True), (2.0**-118, False), (2.0**-130, False), (0.0, True)):
        words = as_words(kv_values((2, 16, 64)), dtype)
        words[1, :, 7] = as_words(np.full(16, peak, np.float32), dtype)
        found = restored(words, dtype)
        assert (found is not None) == is_taken
        if found is not None:
            check_error(words, found, dtype)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize(
    "shape", [(5, 16, 64), (1, 64, 3000), (2, 4000, 3), (300, 16, 1), (16, 640), (2, 3, 2, 16, 64)]
)
def test_blocks_of_many_parts_are_as_blocks_of_one(dtype: str, shape: tuple[int, ...], monkeypatch: Any) -> None:
    """Goal: the seams of parts. Method: few groups, wide ones and long ones, in parts of 4,096 elements and in one."""
    words = as_words(kv_values(shape), dtype)
    whole = Int8().encode(words, dtype=dtype, shape=shape)
    assert whole is not None
    monkeypatch.setattr(int8, "PART_ELEMENTS", 4096)
    parts = Int8().encode(words, dtype=dtype, shape=shape)
    assert parts is not None
    assert bytes(parts) == bytes(whole)
    found = restored(words, dtype)
    assert found is not None
    check_error(words, found, dtype)


def test_what_int8_is_not_for_is_stored_as_it_is() -> None:
    """Goal: no guess. Method: no shape, one axis, whole numbers, eight-bit floats, too few tokens, nothing at all."""
    words = as_words(kv_values((4, 16, 64)), "bfloat16")
    codec = Int8()
    assert codec.encode(words, dtype="bfloat16") is None
    assert codec.encode(words, dtype="bfloat16", shape=(words.size,)) is None
    assert codec.encode(words, dtype="int16", shape=words.shape) is None
    assert codec.encode(words, dtype="float8_e4m3", shape=(4, 16, 128)) is None
    assert codec.encode(words, dtype="bfloat16", shape=(32, 2, 64)) is None
    assert codec.encode(b"", dtype="bfloat16", shape=(0, 16, 64)) is None
    for shape in ((4, 16, 63), (4, 17, 64), (-4, -16, 64)):
        with pytest.raises(ValueError, match="are no bfloat16 array of shape"):
            codec.encode(words, dtype="bfloat16", shape=shape)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_a_value_is_its_byte_times_its_scale_rounded_to_the_nearest(dtype: str) -> None:
    """Goal: no bias. Method: bytes and scales read from the stored block, multiplied exactly; of the type's values the
    decoded one is as near as its neighbours, and so is each byte to its value in steps of its scale."""
    shape = (3, 64, 48)
    words = as_words(kv_values(shape), dtype)
    stored = Int8().encode(words, dtype=dtype, shape=shape)
    assert stored is not None
    raw = np.frombuffer(stored, np.uint8)
    scales = as_float64(raw[40 : 40 + 2 * 3 * 48].view("<u2").reshape(3, 1, 48), "bfloat16")
    steps = raw[40 + 2 * 3 * 48 :].view(np.int8).reshape(shape)
    assert (np.abs(as_float64(words, dtype) - steps * scales) <= scales * 0.50001).all()
    found = restored(words, dtype)
    assert found is not None
    miss = np.abs(as_float64(found, dtype) - steps * scales)
    for neighbour in (found + 1, found - 1):
        is_finite = (found & (FLOATS[dtype].infinity | (FLOATS[dtype].infinity - 1))) != 0
        assert (miss <= np.abs(as_float64(neighbour, dtype) - steps * scales))[is_finite].all()


def test_an_int8_block_is_written_as_the_table_says() -> None:
    """Goal: the format does not drift. Method: every byte of a small block, and its values again."""
    values = np.array([[127, -127, 0, 0.5], [-63.5, 1, 0, -0.25], [0, 64, 0, 0.125], [3, 5, 0, 0.25]], np.float32)
    stored = Int8().encode(values, dtype="float32", shape=(1, 4, 4))
    assert stored is None  # 64 bytes would become 64
    wide = np.tile(values, (1, 8))
    stored = Int8().encode(wide, dtype="float32", shape=(1, 4, 32))
    assert stored is not None
    raw = bytes(stored)
    assert raw[:8] == b"UKVC\x01\x00\x00\x00"
    assert raw[16:32] == bytes([2, 10, 0, 0, 0, 0, 0, 0]) + (512).to_bytes(8, "little")
    assert raw[32:40] == (4).to_bytes(4, "little") + (32).to_bytes(4, "little")
    scales = [0x3F80, 0x3F80, 0, 0x3B82]  # 1, 1, 0, and 0.5/127 rounded up: 0.00396728515625
    assert raw[40:104] == np.array(scales * 8, "<u2").tobytes()
    rows = [[127, -127, 0, 126], [-64, 1, 0, -63], [0, 64, 0, 32], [3, 5, 0, 63]]
    assert raw[104:] == np.tile(np.array(rows, np.int8), (1, 8)).tobytes()
