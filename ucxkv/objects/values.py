"""What can be an object's value, and the memory it is read into.

Promises: a value is described without a byte being copied, unless `gather` asks for it; what comes back has the kind,
the dtype and the shape that went in. Nothing is pickled: what is not plain data in one piece of host memory is refused
by name. torch is never imported here: a tensor can only come from, and go to, a program that did.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ucxkv.buffers import Pieces
from ucxkv.errors import UsageError
from ucxkv.memory import locate, type_name
from ucxkv.objects.records import BODY_BLOCK_BYTES, Kind, Seal

__all__ = ["Described", "described", "destination"]

_AXES_MAX: Final = 64
_RAW: Final = frozenset(("", "|u1", "|i1", "|S1", "|V1", "uint8", "int8"))
"""dtypes of destinations that take the bytes of any value."""


@dataclass(frozen=True, slots=True)
class Described:
    """A value to put, or memory to read one into. pieces: its bytes, cut as a body's blocks are; borrowed."""

    kind: Kind
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    pieces: Pieces


def described(value: object, *, gather: bool = False) -> Described:
    """A value to put: bytes-like, a numpy array, a torch CPU tensor, or what numpy takes by DLPack.

    gather: copy an array that is not contiguous instead of refusing it. Raises UsageError, which names what it is.
    """
    _refuse_what_is_no_value(value)
    try:
        return _described(value, writable=False, gather=gather)
    except UsageError as exc:
        raise UsageError(f"the value {exc.message}") from exc


def destination(seal: Seal, into: object | None) -> tuple[object, Described]:
    """Where the sealed value is to be read: `into`, or new memory of its kind; and that memory described.

    Raises UsageError where `into` has another size, or elements of another type, than the value (elements of one byte
    take any), and for a tensor in a program that has not imported torch.
    """
    if into is None:
        into = _allocated(seal)
        return into, _described(into, writable=True, gather=False)
    try:
        found = _described(into, writable=True, gather=False)
    except UsageError as exc:
        raise UsageError(f"the destination {exc.message}") from exc
    if found.nbytes != seal.body.nbytes:
        raise UsageError(f"{seal.name!r} has {seal.body.nbytes} bytes and the destination {found.nbytes}")
    is_alike = (found.kind, found.dtype) == (seal.kind, seal.dtype) or found.dtype in _RAW
    if not is_alike:
        wanted = f"{seal.kind.name.lower()} {seal.dtype}".strip()
        raise UsageError(
            f"{seal.name!r} is {wanted} and the destination {found.kind.name.lower()} {found.dtype}; pass one of the "
            "same dtype, or bytes"
        )
    return into, found


def _refuse_what_is_no_value(value: object) -> None:
    if isinstance(value, str):
        raise UsageError("the value is str; pass value.encode()")
    if isinstance(value, list | tuple):
        raise UsageError(f"the value is a {type_name(value)}; pass one array or buffer, e.g. numpy.array(value)")


def _described(value: Any, *, writable: bool, gather: bool) -> Described:
    torch = sys.modules.get("torch")
    kind, dtype, shape = Kind.BYTES, "", ()
    if torch is not None and isinstance(value, torch.Tensor):
        kind, dtype, shape = Kind.TORCH, _torch_name(value), tuple(value.shape)
    else:
        value = _as_array(value)
        if isinstance(value, np.ndarray):
            kind, dtype, shape = Kind.NUMPY, _numpy_name(value.dtype), value.shape
    if len(shape) > _AXES_MAX:
        raise UsageError(f"has {len(shape)} axes; at most {_AXES_MAX} are stored")
    address, nbytes, owner = locate(value, writable, gather)
    return Described(kind, dtype, shape, nbytes, _cut(address, nbytes, (owner, value), writable))


def _as_array(value: Any) -> Any:
    """Arrays of other libraries as numpy's, over the same memory; numpy's numbers as arrays without axes; all else as
    it is.
    """
    if isinstance(value, np.generic) and not isinstance(value, bytes):
        return np.asarray(value)
    is_foreign = hasattr(value, "__dlpack__") and not isinstance(value, np.ndarray)
    if not is_foreign or hasattr(value, "__cuda_array_interface__"):
        return value
    try:
        return np.from_dlpack(value)
    except (TypeError, ValueError, BufferError, RuntimeError):
        return value  # `locate` says what is wrong with it


def _torch_name(tensor: Any) -> str:
    if tensor.is_quantized:
        raise UsageError("is a quantized tensor, whose scales would be lost; pass .int_repr() and put them beside it")
    return str(tensor.dtype).removeprefix("torch.")


def _numpy_name(dtype: np.dtype[Any]) -> str:
    if dtype.hasobject:
        raise UsageError(f"holds Python objects (dtype {dtype}); only plain data can be stored")
    if dtype.names is not None or np.dtype(dtype.str) != dtype:
        raise UsageError(
            f"has dtype {dtype}, which has no name of its own; pass value.view(numpy.uint8), and note the dtype"
        )
    return dtype.str


def _cut(address: int, nbytes: int, keepalive: tuple[object, ...], writable: bool) -> Pieces:
    """One piece of memory as the blocks of a body; none where there is no byte."""
    count = -(-nbytes // BODY_BLOCK_BYTES)
    starts = np.arange(count, dtype=np.uint64) * np.uint64(BODY_BLOCK_BYTES)
    length = np.full(count, BODY_BLOCK_BYTES, np.uint64)
    if count:
        length[-1] = nbytes - (count - 1) * BODY_BLOCK_BYTES
    first = np.arange(count + 1, dtype=np.uint32)
    return Pieces(first, starts + np.uint64(address), length, length, keepalive, writable=writable)


def _allocated(seal: Seal) -> object:
    if seal.kind is Kind.BYTES:
        return bytearray(seal.body.nbytes)
    if seal.kind is Kind.NUMPY:
        return np.empty(seal.shape, np.dtype(seal.dtype))
    torch = sys.modules.get("torch")
    if torch is None:
        raise UsageError(
            f"{seal.name!r} is a torch tensor, and this program has not imported torch; import it before, or pass "
            f"into= a buffer of {seal.body.nbytes} bytes"
        )
    dtype = getattr(torch, seal.dtype, None)
    if dtype is None:
        raise UsageError(f"{seal.name!r} is a tensor of dtype {seal.dtype}, which this torch {torch.__version__} lacks")
    return torch.empty(seal.shape, dtype=dtype)
