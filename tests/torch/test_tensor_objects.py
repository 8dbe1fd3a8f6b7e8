"""torch tensors as objects: every dtype in use comes back as a tensor, bit for bit, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the torch extra: pip install ucxkv[torch]")

import ucxkv  # noqa: E402
from ucxkv.cli.launch import running_node  # noqa: E402
from ucxkv.objects.values import described  # noqa: E402

pytestmark = pytest.mark.torch

DTYPES = [
    "bfloat16",
    "float16",
    "float32",
    "float8_e4m3fn",
    "float8_e5m2",
    "int8",
    "uint8",
    "int64",
    "bool",
    "complex64",
]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A node's address."""
    with running_node("objects-torch", host_bytes="64MiB") as node:
        yield node.address
    if node.log is not None:
        node.log.close()


def tensor_of(dtype: str, *shape: int) -> Any:
    """Random bits, NaNs with payloads included."""
    kind = getattr(torch, dtype)
    count = int(np.prod(shape)) * torch.empty(0, dtype=kind).element_size()
    raw = torch.randint(0, 2 if dtype == "bool" else 256, (count,), dtype=torch.uint8)
    return raw.view(kind).reshape(shape)


def bits(tensor: Any) -> bytes:
    """The tensor's bytes."""
    return bytes(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", ["mapped", "network"])
async def test_a_tensor_comes_back_as_it_was(address: str, dtype: str, path: str) -> None:
    """Goal: dtype, shape and bits. Method: put, get into new memory, into a tensor, into bytes."""
    value = tensor_of(dtype, 3, 700, 40)
    async with ucxkv.connect(address, path=path) as kv:
        await kv.objects.put(f"t/{dtype}", value)
        found = await kv.objects.get(f"t/{dtype}")
        assert found is not None and isinstance(found.value, torch.Tensor)
        assert (
            found.value.dtype == value.dtype and found.value.shape == value.shape and bits(found.value) == bits(value)
        )
        assert (found.info.kind, found.info.dtype, found.info.shape) == ("torch", dtype, (3, 700, 40))
        into = torch.empty_like(value)
        assert await kv.objects.get(f"t/{dtype}", into) is not None and bits(into) == bits(value)
        raw = bytearray(value.nbytes)
        assert await kv.objects.get(f"t/{dtype}", raw) is not None and bytes(raw) == bits(value)


async def test_a_tensor_and_an_array_are_not_taken_for_each_other(address: str) -> None:
    """Goal: a destination of another kind is refused. Method: a tensor into an array, an array into a tensor."""
    async with ucxkv.connect(address) as kv:
        await kv.objects.put("tensor", torch.ones(4))
        await kv.objects.put("array", np.ones(4, np.float32))
        with pytest.raises(ucxkv.UsageError, match="torch float32"):
            await kv.objects.get("tensor", np.empty(4, np.float32))
        with pytest.raises(ucxkv.UsageError, match="numpy <f4"):
            await kv.objects.get("array", torch.empty(4))


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, of kinds that it gives up
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: torch.ones(4, 4).t()[1:], "not contiguous"),
        (lambda: torch.ones(3, device="meta"), "meta"),
        (lambda: torch.ones(3).to_sparse(), "to_dense"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantized"),
    ],
    ids=["not contiguous", "meta", "sparse", "quantized"],
)
def test_what_is_no_plain_tensor_is_refused_by_name(make: Callable[[], Any], said: str) -> None:
    """Goal: no bit is lost in silence. Method: tensors whose memory is not their value."""
    with pytest.raises(ucxkv.UsageError, match=said):
        described(make())


def test_scalars_and_empty_tensors_are_values() -> None:
    """Goal: the edges. Method: no axis, and no element."""
    assert described(torch.tensor(7.0)).shape == () and described(torch.empty(0, 3)).nbytes == 0
    assert described(torch.ones(4, 4).t(), gather=True).nbytes == 64
