"""Where one buffer of the caller lies: address, size and owner, without copying a byte.

Promises of this module: an address is given only for host memory that is C-contiguous, plain data, and writable when
that is asked for; the owner that comes with it keeps the memory allocated, and where Python can lock a buffer against
resizing or closing (bytearray, mmap, array.array, memoryview), it is locked while the owner lives. A torch tensor's
storage must not be resized meanwhile: torch has no lock. Everything else is refused by a UsageError whose message
continues a sentence: "block 3 " + "is read-only; pass writable memory".
torch is never imported here: a tensor can only come from a program that did.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ucxkv.errors import UsageError

__all__ = ["Located", "locate", "locate_alike", "locate_either", "locate_rows", "type_name"]

Located: TypeAlias = tuple[int, int, object]
"""Address, bytes, owner."""

_CONTIGUOUS_FIX: Final = "pass .contiguous() / np.ascontiguousarray(...)"
_DEVICE: Final = "is on a GPU: the device path is not in this build; pass .cpu() or a host buffer"

# One zero-length ctypes array per buffer: `from_buffer` checks that the memory is writable and C-contiguous, locks
# the exporter, and is the cheapest way to an address that Python has (0.3 us; ndarray.ctypes and __array_interface__
# cost 1.7 us and more).
_lock: Final = (ctypes.c_char * 0).from_buffer
_address_of: Final = ctypes.addressof
_nbytes_of: Final = attrgetter("nbytes")
_has_objects: Final = attrgetter("dtype.hasobject")


def locate(obj: Any, writable: bool, gather: bool) -> Located:
    """Address, size and owner of one contiguous buffer; UsageError's message continues "block 3 ..."."""
    locator = _LOCATORS.get(type(obj)) or _find_locator(obj)
    return locator(obj, writable, gather)


def locate_alike(
    blocks: Sequence[Any], writable: bool
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], Sequence[object]] | None:
    """Addresses, sizes and owners of plain writable arrays, of bytearrays, or of bytes: the common lists, without a
    Python call each.

    None where the list is mixed, holds anything else, or something is refused: then `locate` says for each what it is.
    """
    kinds = set(map(type, blocks))
    if len(kinds) != 1:
        return None
    kind = kinds.pop()
    n = len(blocks)
    if kind is bytes and not writable:
        addr = np.frombuffer(memoryview((ctypes.c_char_p * n)(*blocks)), np.uint64)
        return addr, np.fromiter(map(len, blocks), np.uint64, n), tuple(blocks)
    try:
        if kind is np.ndarray:
            if any(map(_has_objects, blocks)):
                return None
            sizes = map(_nbytes_of, blocks)
        elif kind is bytearray:
            sizes = map(len, blocks)
        else:
            return None
        owners = list(map(_lock, blocks))
    except (TypeError, ValueError, BufferError):
        return None
    return np.fromiter(map(_address_of, owners), np.uint64, n), np.fromiter(sizes, np.uint64, n), owners


def locate_either(obj: object) -> tuple[int, int, object, bool]:
    """Like `locate`, and whether the memory is writable, for regions that may serve both ways."""
    try:
        return (*locate(obj, True, False), True)
    except UsageError as refused:
        try:
            return (*locate(obj, False, False), False)
        except UsageError:
            raise refused from None


def _locate_ndarray(array: npt.NDArray[Any], writable: bool, gather: bool) -> Located:
    if array.dtype.hasobject:
        raise UsageError(f"holds Python objects (dtype {array.dtype}); only plain data can be stored")
    try:
        owner = _lock(array)  # type: ignore[arg-type]  # numpy's stub hides __buffer__ before 3.12
        return _address_of(owner), array.nbytes, owner
    except (TypeError, ValueError, BufferError):
        # read-only, not contiguous, or a dtype (bfloat16) that the buffer protocol cannot name
        flags = array.flags
        if writable and not flags.writeable:
            raise UsageError("is read-only; pass writable memory") from None
        if not flags.c_contiguous:
            if writable:
                raise UsageError(f"is not contiguous (strides {array.strides}); {_CONTIGUOUS_FIX}") from None
            if not gather:
                raise UsageError(
                    f"is not contiguous (strides {array.strides}); {_CONTIGUOUS_FIX} or gather=True"
                ) from None
            array = np.ascontiguousarray(array)
        return int(array.__array_interface__["data"][0]), array.nbytes, array


def _locate_bytes(value: bytes, writable: bool, gather: bool) -> Located:
    if writable:
        raise UsageError("is bytes, which is read-only; pass a bytearray or an array")
    return ctypes.c_void_p.from_buffer(ctypes.c_char_p(value)).value or 0, len(value), value


def _locate_buffer(obj: Any, writable: bool, gather: bool) -> Located:
    """Anything with the buffer protocol."""
    try:
        view = memoryview(obj)
    except (TypeError, ValueError, BufferError) as exc:
        raise UsageError(f"is a {type_name(obj)} that offers no buffer ({exc})") from None
    if "O" in view.format:
        raise UsageError("holds Python objects; only plain data can be stored")
    if not view.c_contiguous:
        if not gather or writable:
            raise UsageError(
                f"is not contiguous (strides {view.strides}); {_CONTIGUOUS_FIX}{'' if writable else ' or gather=True'}"
            )
        return _locate_bytes(view.tobytes(), False, False)
    if view.readonly:
        if writable:
            raise UsageError(f"is a read-only {type_name(obj)}; pass writable memory")
        flat = np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)
        return int(flat.__array_interface__["data"][0]), view.nbytes, (flat, obj)
    owner = _lock(view)
    return _address_of(owner), view.nbytes, owner


def _locate_tensor(tensor: Any, writable: bool, gather: bool) -> Located:
    """A torch tensor of any dtype: bfloat16 and fp8 have no numpy name, so only address and size are asked for."""
    _check_tensor(tensor)
    if not tensor.is_contiguous():
        if writable or not gather:
            raise UsageError(
                f"is a tensor that is not contiguous (strides {tuple(tensor.stride())}); {_CONTIGUOUS_FIX}"
                f"{'' if writable else ' or gather=True'}"
            )
        tensor = tensor.detach().contiguous()
    return tensor.data_ptr(), tensor.nbytes, tensor


def _check_tensor(tensor: Any) -> None:
    device = tensor.device.type
    if device == "cuda":
        raise UsageError(f"is a tensor that {_DEVICE}")
    if device != "cpu":
        raise UsageError(f"is a tensor on device {device!r}; pass .cpu()")
    if str(tensor.layout) != "torch.strided":
        raise UsageError(f"is a tensor of layout {tensor.layout}; pass .to_dense()")
    if tensor.is_conj() or tensor.is_neg():
        raise UsageError("is a tensor whose values are computed lazily; pass .resolve_conj().resolve_neg()")


def _locate_dlpack(obj: Any, writable: bool, gather: bool) -> Located:
    return _locate_ndarray(_from_dlpack(obj), writable, gather)


def _from_dlpack(obj: Any) -> npt.NDArray[Any]:
    device = int(obj.__dlpack_device__()[0])
    if device == 2:
        raise UsageError(f"is a {type_name(obj)} that {_DEVICE}")
    if device not in (1, 3):  # kDLCPU, kDLCUDAHost (pinned host memory)
        raise UsageError(f"is a {type_name(obj)} on DLPack device {device}; only host memory is accepted")
    try:
        return np.from_dlpack(obj)
    except (TypeError, ValueError, BufferError, RuntimeError) as exc:
        raise UsageError(f"is a {type_name(obj)} that numpy cannot import by DLPack ({exc})") from None


_LOCATORS: Final[dict[type, Callable[[Any, bool, bool], Located]]] = {
    np.ndarray: _locate_ndarray,
    bytes: _locate_bytes,
    bytearray: _locate_buffer,
    memoryview: _locate_buffer,
}


def _find_locator(obj: object) -> Callable[[Any, bool, bool], Located]:
    """The way to one object's memory, by what it is rather than by its exact type; UsageError when it has none."""
    if _is_tensor(obj):
        return _locate_tensor
    if isinstance(obj, np.ma.MaskedArray):
        raise UsageError("is a masked array, whose mask would be lost; pass .filled(...) or .data")
    if isinstance(obj, np.ndarray):
        return _locate_ndarray
    if hasattr(obj, "__cuda_array_interface__"):
        raise UsageError(f"is a {type_name(obj)} that {_DEVICE}")
    if hasattr(obj, "__dlpack__") and hasattr(obj, "__dlpack_device__"):
        return _locate_dlpack
    if isinstance(obj, list | tuple):
        raise UsageError("nests lists too deep; a value is a buffer or a flat list of buffers")
    try:
        memoryview(obj)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(
            f"is {type_name(obj)}; pass a numpy array, a torch CPU tensor, bytes, bytearray or another buffer"
        ) from None
    return _locate_buffer


def locate_rows(blocks: Any, writable: bool, gather: bool) -> tuple[int, int, object, int]:
    """Address, bytes of all rows, owner, and distance between rows of an array whose rows are contiguous each."""
    if _is_tensor(blocks):
        _check_tensor(blocks)
        if not blocks.is_contiguous() and blocks.shape[0] and blocks[0].is_contiguous():
            return blocks.data_ptr(), blocks.nbytes, blocks, blocks.stride(0) * blocks.element_size()
    elif not isinstance(blocks, np.ndarray) and hasattr(blocks, "__dlpack__"):
        if hasattr(blocks, "__cuda_array_interface__"):
            raise UsageError(f"is a {type_name(blocks)} that {_DEVICE}")
        blocks = _from_dlpack(blocks)
    if (
        isinstance(blocks, np.ndarray)
        and not blocks.flags.c_contiguous
        and blocks.shape[0]
        and blocks[0].flags.c_contiguous
    ):
        if writable and not blocks.flags.writeable:
            raise UsageError("is read-only; pass writable memory")
        if blocks.dtype.hasobject:
            raise UsageError(f"holds Python objects (dtype {blocks.dtype}); only plain data can be stored")
        return int(blocks.__array_interface__["data"][0]), blocks.nbytes, blocks, blocks.strides[0]
    addr, nbytes, owner = locate(blocks, writable, gather)
    return addr, nbytes, owner, nbytes // blocks.shape[0] if blocks.shape[0] else 0


def _is_tensor(obj: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(obj, torch.Tensor)


def type_name(obj: object) -> str:
    """The type of obj as messages name it, with its module unless it is a built-in."""
    kind = type(obj)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
