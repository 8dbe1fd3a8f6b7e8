"""Codecs: what is encoded comes back, whatever the bytes are; who asks wrongly is told so."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiers.coded import Guarded, as_words, kv_values, need, with_codecs
from ucxkv.layout import DTYPE_BYTES
from ucxkv.tiers.base import BlockDamaged
from ucxkv.tiers.codecs import (
    CODECS,
    ELEMENT_BYTES,
    Codec,
    CodecUnknown,
    Lossless,
    Plain,
    by_channel,
    codec_number,
    codec_of,
    lossless,
    read_head,
)
from ucxkv.tiers.codecs.planes import WORDS, join_planes, split_plane

SHAPE = (2, 2, 3, 16, 64)


def block(dtype: str = "bfloat16") -> np.ndarray[Any, Any]:
    return as_words(kv_values(SHAPE), dtype)


def encoded(codec: Codec, words: np.ndarray[Any, Any], dtype: str) -> memoryview:
    need(codec)
    stored = codec.encode(words, dtype=dtype, shape=words.shape)
    assert stored is not None
    return memoryview(stored)


@st.composite
def sparse_bytes(draw: st.DrawFn) -> bytes:
    """Bytes of any length that often save something: few different values, runs, repeats, noise between."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    pieces = draw(st.lists(st.tuples(st.integers(0, 12_000), st.sampled_from([1, 2, 5, 40, 256])), max_size=5))
    return b"".join(random.integers(0, most, length, dtype=np.uint8).tobytes() for length, most in pieces)


@settings(max_examples=150, deadline=None)
@given(data=sparse_bytes(), dtype=st.sampled_from(sorted(ELEMENT_BYTES)), shift=st.integers(0, 3))
def test_lossless_gives_back_any_bytes_of_any_type(data: bytes, dtype: str, shift: int) -> None:
    """Goal: exactness. Method: bytes of odd lengths and of several pieces, stored and restored at odd addresses."""
    need(Lossless())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lossless, "PIECE_ELEMENTS", lossless.PIECE_MIN)
        stored = Lossless().encode(data, dtype=dtype)
    if stored is None:
        return
    into, moved = Guarded(len(data), shift=shift), Guarded(len(memoryview(stored)), shift=shift)
    moved.view[:] = stored
    Lossless().decode(moved.view, into.view)
    into.check()
    assert into.view.tobytes() == data
    assert 16 * moved.view.nbytes <= 15 * len(data)


@pytest.mark.parametrize("extra", [-3, -1, 0, 1, 5])
@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "float64"])
def test_lossless_gives_back_blocks_of_whole_pieces_and_a_little_more(dtype: str, extra: int) -> None:
    """Goal: the seams of pieces. Method: two pieces and some bytes more or less, at the size that is used."""
    need(Lossless())
    nbytes = 2 * lossless.PIECE_ELEMENTS * ELEMENT_BYTES[dtype] + extra
    data = np.random.default_rng(3).integers(0, 9, nbytes, dtype=np.uint8)
    stored = Lossless().encode(data, dtype=dtype)
    assert stored is not None
    into = np.empty_like(data)
    Lossless().decode(stored, into)
    assert np.array_equal(into, data)


def test_what_saves_nothing_is_stored_as_it_is() -> None:
    """Goal: no block grows. Method: noise, the shortest blocks, and a block whose saving is below 1/16."""
    need(Lossless())
    noise = np.random.default_rng(4).integers(0, 256, 1 << 16, dtype=np.uint8)
    nearly = noise.copy()
    nearly[: len(noise) // 17] = 0
    for data in (noise, nearly, b"", b"x", bytes(41)):
        assert Lossless().encode(data, dtype="uint8") is None
    nearly[: len(noise) // 15] = 0
    assert Lossless().encode(nearly, dtype="uint8") is not None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("codec", with_codecs("lossless", "int8"))
def test_encoding_changes_and_keeps_nothing_of_its_input(codec: Codec, dtype: str) -> None:
    """Goal: registered memory may be encoded. Method: read-only bytes, compared after; the result outlives its input
    and is the same for a block at an odd address."""
    words = block(dtype)
    before = words.tobytes()
    stored = bytes(encoded(codec, words, dtype))
    assert words.tobytes() == before
    moved = Guarded(len(before), shift=1)
    moved.view[:] = before
    again = codec.encode(moved.view.toreadonly(), dtype=dtype, shape=SHAPE)
    assert again is not None
    moved.view[:] = bytes(len(before))
    assert bytes(again) == stored


@pytest.mark.parametrize("codec", with_codecs("lossless", "int8"))
def test_one_codec_serves_several_threads(codec: Codec) -> None:
    """Goal: no state. Method: eight threads encode and decode different blocks with one object; each gets its own."""
    need(codec)

    def turn(seed: int) -> bool:
        words = as_words(kv_values(SHAPE, seed), "bfloat16")
        alone = bytes(encoded(codec, words, "bfloat16"))
        first = np.empty_like(words)
        codec.decode(alone, first)
        for _ in range(20):
            into = np.empty_like(words)
            codec.decode(encoded(codec, words, "bfloat16"), into)
            if not np.array_equal(into, first):
                return False
        return not codec.is_lossless or np.array_equal(first, words)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(turn, range(8)))


def test_an_encoded_block_says_what_it_is() -> None:
    """Goal: a block can be looked at without its books. Method: the head of a block of each codec."""
    for codec in (codec_of("lossless"), codec_of("int8")):
        words = block("float16")
        head = read_head(encoded(codec, words, "float16"))
        assert (head.codec, head.dtype, head.original_bytes) == (codec.number, "float16", words.nbytes)


def test_none_copies_and_keeps_to_the_length() -> None:
    """Goal: number 0 is as good as any. Method: a copy, and lengths that differ."""
    plain, into = Plain(), bytearray(5)
    assert plain.encode(b"12345", dtype="uint8") is None
    plain.decode(b"12345", into)
    assert into == b"12345"
    for stored in (b"1234", b"123456", b""):
        with pytest.raises(BlockDamaged, match=f"{len(stored)} bytes are stored, not 5"):
            plain.decode(stored, into)
    plain.decode(b"", bytearray())


def test_codecs_are_found_by_name_and_by_number() -> None:
    """Goal: configuration and flags lead to the same object. Method: both ways, and those that nobody has."""
    assert [codec.name for codec in CODECS] == ["none", "lossless", "int8"]
    for number, codec in enumerate(CODECS):
        assert codec_of(codec.name) is codec is codec_number(number)
        assert codec.number == number
    for unknown in ("zip", "", "None"):
        with pytest.raises(CodecUnknown, match="known are none, lossless, int8"):
            codec_of(unknown)
    for number in (-1, 3, 255):
        with pytest.raises(CodecUnknown, match=f"codec {number}"):
            codec_number(number)


@pytest.mark.parametrize("codec", with_codecs("none", "lossless", "int8"))
def test_a_wrong_call_is_told_what_is_wrong(codec: Codec) -> None:
    """Goal: no guess about what was meant. Method: an unknown type, scattered and read-only memory."""
    words = block()
    with pytest.raises(ValueError, match="dtype 'fp99' is unknown; known are uint8"):
        codec.encode(words, dtype="fp99")
    if codec.number:
        with pytest.raises(ValueError, match="not C-contiguous"):
            codec.encode(words[..., ::2], dtype="bfloat16")
    stored = encoded(codec, words, "bfloat16") if codec.number else words
    with pytest.raises(ValueError, match="read-only"):
        codec.decode(stored, bytes(words.nbytes))
    with pytest.raises(ValueError, match="not C-contiguous"):
        codec.decode(stored, np.empty((*SHAPE[:-1], 128), np.uint16)[..., ::2])


def test_every_type_of_a_layout_has_its_size() -> None:
    """Goal: no layout is refused. Method: the table here against the layout's."""
    assert {name: ELEMENT_BYTES[name] for name in DTYPE_BYTES} == DTYPE_BYTES


@given(
    width=st.sampled_from([1, 2, 4, 8]),
    raw=st.binary(min_size=8, max_size=200),
    spare=st.integers(min_value=0, max_value=3),
)
def test_planes_hold_one_byte_of_each_word(width: int, raw: bytes, spare: int) -> None:
    """Goal: planes are what they are called. Method: split against slicing, joined again; scratch may be longer."""
    words = np.frombuffer(raw[: len(raw) // width * width], WORDS[width])
    scratch = np.empty(len(words) + spare, WORDS[width])
    planes = [np.empty(len(words), np.uint8) for _ in range(width)]
    for number, plane in enumerate(planes):
        split_plane(words, number, plane, scratch)
        assert plane.tobytes() == words.tobytes()[number::width]
    joined = np.empty_like(words)
    join_planes(planes, joined, scratch)
    assert np.array_equal(joined, words)


def test_axes_before_and_after_the_tokens_are_groups_and_channels() -> None:
    """Goal: one rule for all orders of axes. Method: the layouts of engines, and an axis that is not there."""
    assert by_channel((30, 2, 3, 16, 64), 3) == (180, 16, 64)
    assert by_channel((30, 2, 16, 3, 64), 2) == (60, 16, 192)
    assert by_channel((16, 30, 2), 0) == (1, 16, 60)
    assert by_channel((4, 64, 16), 2) == (256, 16, 1)
    with pytest.raises(ValueError, match="axis 2 of 2"):
        by_channel((4, 5), 2)


WITHOUT = """
import sys
sys.modules["zstandard"] = None  # what an import finds where the package is not installed
from ucxkv.tiers.base import SetupFailed
from ucxkv.tiers.codecs import codec_of
for call in (
    lambda: codec_of("lossless").encode(bytes(4096), dtype="uint8"),
    lambda: codec_of("lossless").decode(STORED, bytearray(4096)),
):
    try:
        call()
    except SetupFailed as exc:
        print(exc.fix)
assert codec_of("int8").encode(bytes(4096), dtype="float32", shape=(1, 64, 16)) is not None
"""


def test_without_its_library_lossless_says_how_to_get_it() -> None:
    """Goal: an installation without the extra works, and its operator is told. Method: a process without zstandard
    stores, and loads a block that another one stored; int8 needs nothing."""
    need(Lossless())
    stored = Lossless().encode(bytes(4096), dtype="uint8")
    assert stored is not None
    code = WITHOUT.replace("STORED", repr(bytes(stored)))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ['pip install "ucxkv[codec]"'] * 2
