"""torch tensors as sources and destinations: every dtype in use, bit for bit, or refused by name."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the torch extra: pip install ucxkv[torch]")

from ucxkv.buffers import Pieces, RegisteredBuffer, as_destination, as_destinations, as_source, as_sources  # noqa: E402
from ucxkv.errors import UsageError  # noqa: E402
from ucxkv.layout import DTYPE_BYTES, Layout  # noqa: E402

pytestmark = pytest.mark.torch

DTYPES = ["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "int8", "uint8"]


def bits(tensor: Any) -> bytes:
    """The tensor's bytes in logical order, whatever its dtype."""
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()) if tensor.numel() else b""


def read(pieces: Pieces) -> list[bytes]:
    """The bytes of every one-piece value, read from the addresses."""
    return [ctypes.string_at(a, n) for a, n in zip(pieces.addr.tolist(), pieces.length.tolist(), strict=True)]


def every_bit_pattern(dtype: str, *shape: int) -> Any:
    """A tensor that holds all kinds of values, NaNs with payloads included: random bits."""
    kind = getattr(torch, dtype)
    count = 1
    for size in shape:
        count *= size
    raw = torch.randint(0, 256, (count * torch.empty(0, dtype=kind).element_size(),), dtype=torch.uint8)
    return raw.view(kind).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_every_dtype_move_bit_for_bit(dtype: str) -> None:
    """Goal: user voice 36: same bits, NaN payloads too, for dtypes that numpy cannot name. Method: copy random bits
    from source addresses to destination addresses; single, list, 0-dim, empty and whole-array forms; dtype and shape
    of the destination are untouched."""
    tensor = every_bit_pattern(dtype, 4, 3, 8)
    assert read(as_source(tensor)) == [bits(tensor)]
    assert read(as_sources([tensor, tensor[1]], 2)) == [bits(tensor), bits(tensor[1])]
    assert read(as_sources(tensor, 4)) == [bits(row) for row in tensor]
    assert read(as_source(tensor[0, 0, 0])) == [bits(tensor[0, 0, 0])]
    assert read(as_source(tensor[:0])) == [b""]
    into = torch.zeros_like(tensor)
    for piece, value in zip(as_destinations(into, 4).addr.tolist(), read(as_sources(tensor, 4)), strict=True):
        ctypes.memmove(piece, value, len(value))
    assert bits(into) == bits(tensor)
    assert (into.dtype, into.shape) == (tensor.dtype, tensor.shape)


@pytest.mark.parametrize("dtype", DTYPES)
def test_transposed_and_sliced_tensors_are_refused_or_gathered(dtype: str) -> None:
    """Goal: user voice 36: never silently reordered. Method: views that are not contiguous, refused by name as source
    and destination, copied in logical order when asked."""
    base = every_bit_pattern(dtype, 6, 8)
    for odd in (base.T, base[:, ::2], base[:, 3], base[:, 1:5]):
        with pytest.raises(UsageError, match=r"tensor that is not contiguous .*\.contiguous\(\).*gather=True"):
            as_source(odd)
        with pytest.raises(UsageError, match="not contiguous"):
            as_destination(odd)
        assert read(as_source(odd, gather=True)) == [bits(odd)]
    assert read(as_sources(base[::2], 3)) == [bits(row) for row in base[::2]]
    assert read(as_sources(base[:, 1:5], 6)) == [bits(row) for row in base[:, 1:5]]


def test_tensors_that_are_no_plain_host_memory_are_refused_by_name() -> None:
    """Goal: the message names the fix. Method: meta, sparse, lazily conjugated and expanded tensors."""
    with pytest.raises(UsageError, match="device 'meta'"):
        as_source(torch.empty(4, device="meta"))
    with pytest.raises(UsageError, match="to_dense"):
        as_source(torch.eye(3).to_sparse())
    with pytest.raises(UsageError, match="resolve_conj"):
        as_source(torch.zeros(2, dtype=torch.complex64).conj())
    with pytest.raises(UsageError, match="overlap"):
        as_destinations(torch.zeros(1, 4).expand(3, 4), 3)
    with pytest.raises(UsageError, match="overlap"):
        as_destinations([torch.zeros(4)] * 2, 2)
    if torch.cuda.is_available():
        with pytest.raises(UsageError, match="device path"):
            as_source(torch.zeros(4, device="cuda"))


def test_pieces_keep_a_tensors_memory() -> None:
    """Goal: an address never dangles. Method: drop the tensor, allocate others, read."""
    tensor = every_bit_pattern("bfloat16", 1000)
    want = bits(tensor)
    pieces = as_sources([tensor], 1)
    del tensor
    noise = [torch.ones(1000, dtype=torch.bfloat16) for _ in range(50)]
    assert read(pieces) == [want]
    assert len(noise) == 50


def test_a_tensor_pool_is_registered_and_addressed_by_rows() -> None:
    """Goal: a paged pool of bfloat16 works like numpy's. Method: rows by index against the tensor's own rows."""
    pool = every_bit_pattern("bfloat16", 8, 2, 4)
    rows = RegisteredBuffer(pool)
    assert (len(rows), rows.row_bytes) == (8, 16)
    assert read(rows[[5, 1]]) == [bits(pool[5]), bits(pool[1])]
    assert read(rows[torch.tensor([7, 0])]) == [bits(pool[7]), bits(pool[0])]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layouts_bytes_are_those_of_the_tensor_it_describes(dtype: str) -> None:
    """Goal: Layout and torch agree on sizes. Method: a tensor of the layout's shape and dtype has block_bytes bytes."""
    layout = Layout(model="m", dtype=str(getattr(torch, dtype)), layers=2, kv_heads=3, head_dim=4, block_tokens=5)
    assert layout.dtype in DTYPE_BYTES
    assert torch.empty(layout.shape, dtype=getattr(torch, dtype)).nbytes == layout.block_bytes


def test_ucxkv_does_not_import_torch() -> None:
    """Goal: programs without torch do not pay for it. Method: a fresh interpreter with torch installed uses buffers."""
    code = (
        "import sys, ucxkv.buffers as b; b.as_sources([bytearray(4)], 1);"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
