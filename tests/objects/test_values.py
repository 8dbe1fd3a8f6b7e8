"""What can be a value: described without a copy, or refused by name; and what can be a destination."""

from __future__ import annotations

import array
import ctypes
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from ucxkv.errors import UsageError
from ucxkv.objects.records import BODY_BLOCK_BYTES, Body, Kind, Seal
from ucxkv.objects.values import Described, described, destination


def bytes_of(value: Described) -> bytes:
    """Read from the addresses."""
    pieces = value.pieces
    return b"".join(ctypes.string_at(a, n) for a, n in zip(pieces.addr.tolist(), pieces.length.tolist(), strict=True))


def seal_of(value: Described) -> Seal:
    """As a put would seal it."""
    body = Body(bytes(range(16)), value.nbytes)
    return Seal("x", body, value.kind, value.dtype, value.shape, False, 1)


ARRAYS = [
    np.arange(24).astype(dtype).reshape(2, 3, 4)
    for dtype in ("u1", "<i8", ">i4", "f2", "f4", "f8", "c16", "M8[ns]", "m8[s]")
] + [
    np.array(7.5),
    np.zeros((0, 5), np.int32),
    np.array([True, False]),
    np.array(["a", "größe"]),
    np.array([b"ab", b"c"]),
    np.array([b"ab"], "V2"),
]


@pytest.mark.parametrize("value", ARRAYS, ids=lambda value: f"{value.dtype}{list(value.shape)}")
def test_an_array_comes_back_as_it_was(value: np.ndarray) -> None:
    """Goal: dtype, byte order and shape are kept. Method: describe, allocate what the seal says, compare."""
    what = described(value)
    assert what.kind is Kind.NUMPY and bytes_of(what) == value.tobytes()
    again, memory = destination(seal_of(what), None)
    assert isinstance(again, np.ndarray)
    assert again.dtype == value.dtype and again.shape == value.shape and memory.nbytes == value.nbytes


@pytest.mark.parametrize("value", [np.float32(2.5), np.int64(-7), np.bool_(True), np.datetime64("2026-12-01")])
def test_a_number_of_numpys_is_an_array_without_axes(value: np.generic) -> None:
    """Goal: its dtype is kept; as a buffer it would come back as bytes. Method: describe, allocate, compare."""
    what = described(value)
    assert (what.kind, what.dtype, what.shape) == (Kind.NUMPY, value.dtype.str, ())
    assert bytes_of(what) == value.tobytes()
    again, _ = destination(seal_of(what), None)
    assert isinstance(again, np.ndarray) and again.dtype == value.dtype and again.shape == ()


@pytest.mark.parametrize(
    "value",
    [np.bytes_(b"ab"), b"", b"abc", bytearray(9), memoryview(b"xy"), array.array("d", [1, 2])],
    ids=lambda value: f"{type(value).__name__}{len(value)}",
)
def test_bytes_are_bytes(value: Any) -> None:
    """Goal: whatever has a buffer is a value. Method: describe; its bytes, in new memory of that size."""
    what = described(value)
    assert (what.kind, what.dtype, what.shape) == (Kind.BYTES, "", ()) and bytes_of(what) == bytes(memoryview(value))
    again, _ = destination(seal_of(what), None)
    assert isinstance(again, bytearray) and len(again) == what.nbytes


@pytest.mark.parametrize("nbytes", [0, 1, BODY_BLOCK_BYTES - 1, BODY_BLOCK_BYTES, BODY_BLOCK_BYTES + 1])
def test_a_value_is_cut_as_its_body_is(nbytes: int) -> None:
    """Goal: pieces and keys agree. Method: sizes at the edges of a block; no byte is copied."""
    memory = np.arange(nbytes, dtype=np.uint8)
    what = described(memory)
    assert len(what.pieces) == Body(bytes(16), nbytes).blocks_count and what.pieces.total_bytes == nbytes
    assert not nbytes or int(what.pieces.addr[0]) == memory.ctypes.data


class Foreign:
    """An array of another library, on the CPU."""

    def __init__(self, held: np.ndarray) -> None:
        self.held = held

    def __dlpack__(self, **options: Any) -> Any:
        return self.held.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.held.__dlpack_device__()


def test_an_array_of_another_library_is_numpys() -> None:
    """Goal: cupy's and JAX's host arrays are taken. Method: an object with DLPack alone."""
    what = described(Foreign(np.arange(6.0).reshape(2, 3)))
    assert (what.kind, what.dtype, what.shape) == (Kind.NUMPY, "<f8", (2, 3))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("text", "encode"),
        ([1, 2], "list"),
        ((b"a", b"b"), "tuple"),
        (7, "int"),
        (None, "None"),
        (np.array([object()]), "Python objects"),
        (np.zeros(2, [("a", "f4")]), "no name of its own"),
        (np.arange(10)[::2], "not contiguous"),
        (np.ma.masked_array([1], [True]), "masked"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_no_plain_data_is_refused_by_name(value: Any, said: str) -> None:
    """Goal: nothing is pickled or guessed. Method: values of other kinds."""
    with pytest.raises(UsageError, match=said):
        described(value)


def test_a_value_that_is_not_contiguous_is_copied_when_asked() -> None:
    """Goal: `gather`. Method: every second element, and a transposed array."""
    for value in (np.arange(10)[::2], np.arange(6).reshape(2, 3).T):
        assert bytes_of(described(value, gather=True)) == value.tobytes()


@pytest.mark.parametrize(
    ("into", "said"),
    [
        (np.empty(3, np.float32), "12"),
        (np.empty(2, np.int32), "numpy <i4"),
        (bytes(8), "read-only"),
        (np.empty((2, 2), np.float32)[:, 0], "not contiguous"),
        ("text", "str"),
    ],
    ids=lambda value: str(type(value).__name__),
)
def test_a_destination_that_does_not_fit_is_refused(into: Any, said: str) -> None:
    """Goal: no byte is read as something else. Method: wrong sizes, elements, and memory that can't be written."""
    seal = seal_of(described(np.zeros(2, np.float32)))
    with pytest.raises(UsageError, match=said):
        destination(seal, into)
    for fits in (np.empty(2, np.float32), np.empty((1, 2), np.float32), bytearray(8), np.empty(8, np.uint8)):
        assert destination(seal, fits)[0] is fits


def test_a_tensor_in_a_program_without_torch_is_refused_and_its_bytes_are_not() -> None:
    """Goal: torch is never imported for anybody. Method: a fresh interpreter with a sealed tensor."""
    code = """
import sys
from ucxkv.errors import UsageError
from ucxkv.objects.records import Body, Kind, Seal
from ucxkv.objects.values import destination
seal = Seal("x", Body(bytes(range(16)), 4), Kind.TORCH, "bfloat16", (2,), False, 1)
assert destination(seal, bytearray(4))[1].nbytes == 4
try:
    destination(seal, None)
except UsageError as exc:
    assert "import" in str(exc) and "torch" not in sys.modules
else:
    sys.exit("it was accepted")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
