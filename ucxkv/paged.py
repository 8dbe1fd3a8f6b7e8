"""An engine's paged KV cache as memory that blocks are stored from and loaded into, layer group by layer group.

Promises of this module: for a set of pages and one layer group, `PagedMemory.pieces` names exactly the bytes of the
group's value in the layout's axis order, whether the cache is one array or one array (or a pair) a layer; addresses
are computed in numpy, with no Python work per block or layer. Shape and element type are compared with the layout
before any address is given: a cache of another head order, block size or dtype is refused, never reinterpreted."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ucxkv.buffers import Pieces, RegisteredBuffer
from ucxkv.errors import UsageError
from ucxkv.layout import DTYPE_BYTES, Layout, canonical_dtype
from ucxkv.memory import locate_rows, type_name

__all__ = ["PagedMemory"]

_NO_NUMPY_NAME: Final = frozenset({"bfloat16", "float8_e4m3", "float8_e5m2"})


class PagedMemory:
    """A paged cache, checked against a layout.

    cache: one array or tensor of shape (pages, *layout.shape), or a RegisteredBuffer whose rows are pages of
    layout.block_bytes, or a list of one array a layer, each of shape (pages, *layout.layer_shape), or of one pair
    (keys, values) a layer, each of shape (pages, *layout.layer_shape without the k axis). Lists need a layout whose
    order starts with "l" (pairs: with "lk"). Held while this lives.
    writable: it is loaded into. Raises UsageError for another shape, dtype or order, and for what buffers refuse.
    """

    def __init__(self, cache: object, layout: Layout, *, writable: bool) -> None:
        self.layout = layout
        self.writable = writable
        self._keepalive: list[object] = []
        self._registration: RegisteredBuffer | None = None
        if isinstance(cache, RegisteredBuffer):
            base, stride, pages = self._registered(cache)
        elif isinstance(cache, list | tuple):
            base, stride, pages = self._listed(cache)
        else:
            base, stride, pages = self._whole(cache)
        self.pages_count = pages
        # One row a layer group, one column a piece of its value: where page 0's piece lies, and how far the next
        # page's is.
        self._base = base
        self._stride = stride
        self._piece_bytes = layout.group_bytes // base.shape[1]

    def pieces(self, pages: npt.NDArray[np.int64], group: int) -> Pieces:
        """The values of one layer group in n pages, as Pieces of n values.

        pages: (n,) int64, checked by `page_numbers`.
        """
        base, stride = self._base[group], self._stride[group]
        n, columns = len(pages), len(base)
        addr = (pages[:, None] * stride + base).reshape(-1).view(np.uint64)
        nbytes = np.full(n, self.layout.group_bytes, np.uint64)
        length = nbytes if columns == 1 else np.full(n * columns, self._piece_bytes, np.uint64)
        first = np.arange(0, n * columns + 1, columns, dtype=np.uint32)
        return Pieces(
            first, addr, length, nbytes, self._keepalive, writable=self.writable, registration=self._registration
        )

    def page_numbers(self, block_ids: npt.ArrayLike | None, blocks: int) -> npt.NDArray[np.int64]:
        """The pages of a sequence's first `blocks` blocks: block_ids, or 0, 1, 2 ...

        when it is None. Raises UsageError.
        """
        ids = np.arange(blocks) if block_ids is None else np.asarray(block_ids)
        if ids.ndim != 1 or len(ids) < blocks or (len(ids) and ids.dtype.kind not in "iu"):
            raise UsageError(
                f"block_ids has dtype {ids.dtype} and shape {ids.shape}; pass the page of each of the {blocks} blocks"
            )
        numbers = ids[:blocks].astype(np.int64)
        if len(numbers) and (int(numbers.min()) < 0 or int(numbers.max()) >= self.pages_count):
            raise UsageError(
                f"block {int(np.flatnonzero((numbers < 0) | (numbers >= self.pages_count))[0])} stands in no page:"
                f" the cache has {self.pages_count} pages"
            )
        return numbers

    def _registered(self, pool: RegisteredBuffer) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], int]:
        if pool.row_bytes != self.layout.block_bytes:
            raise UsageError(
                f"the registered buffer has rows of {pool.row_bytes} bytes and the layout blocks of"
                f" {self.layout.block_bytes}; use pool.rows({self.layout.block_bytes})"
            )
        if self.writable and not pool.writable:
            raise UsageError("the registered buffer is read-only; pass writable memory")
        self._registration = pool
        self._keepalive += pool.keepalive
        return *self._columns(pool.address, pool.row_bytes), len(pool)

    def _whole(self, cache: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], int]:
        address, stride, pages = self._rows(cache, self.layout.shape, "the cache")
        return *self._columns(address, stride), pages

    def _columns(self, address: int, page_stride: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Pieces of each layer group in one whole page: one, or one for each index of the axes before the layers'."""
        layout = self.layout
        at = layout.order.index("l")
        runs = math.prod(layout.shape[:at])
        run_bytes = layout.group_bytes // runs
        groups = np.arange(layout.layer_groups, dtype=np.int64)[:, None] * run_bytes
        base = address + groups + np.arange(runs, dtype=np.int64) * (layout.block_bytes // runs)
        return base, np.full_like(base, page_stride)

    def _listed(self, cache: list[Any] | tuple[Any, ...]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], int]:
        layout = self.layout
        if len(cache) != layout.layers:
            raise UsageError(f"the cache lists {len(cache)} layers and the layout has {layout.layers}")
        paired = [isinstance(layer, list | tuple) for layer in cache]
        needed = "lk" if any(paired) else "l"
        if not layout.order.startswith(needed):
            raise UsageError(
                f"a cache listed by {'layer and by keys and values' if any(paired) else 'layer'} needs a layout order"
                f" that starts with {needed!r}, not {layout.order!r}: a block's bytes would be permuted"
            )
        if any(paired) and not all(
            len(layer) == layout.kv_planes if pair else False for layer, pair in zip(cache, paired, strict=True)
        ):
            raise UsageError(f"each layer of the cache is one array, or each is a list of {layout.kv_planes}")
        shape = layout.layer_shape[1:] if any(paired) else layout.layer_shape
        found = []
        for number, layer in enumerate(cache):
            for plane, array in enumerate(layer if any(paired) else (layer,)):
                found.append(self._rows(array, shape, f"layer {number}{f', plane {plane},' if any(paired) else ''}"))
        pages = {count for _, _, count in found}
        if len(pages) != 1:
            raise UsageError(f"the layers of the cache have different numbers of pages: {sorted(pages)}")
        base = np.array([address for address, _, _ in found], np.int64).reshape(layout.layer_groups, -1)
        stride = np.array([distance for _, distance, _ in found], np.int64).reshape(layout.layer_groups, -1)
        return base, stride, pages.pop()

    def _rows(self, array: Any, shape: tuple[int, ...], what: str) -> tuple[int, int, int]:
        """Address, page stride and page count of one array of pages, after its shape and dtype were compared."""
        got = tuple(getattr(array, "shape", ()))
        if not got or got[1:] != shape:
            raise UsageError(
                f"{what} is {type_name(array)} of shape {got}; the layout asks for"
                f" (pages, {', '.join(map(str, shape))}), axes {self.layout.order!r}"
            )
        _check_dtype(getattr(array, "dtype", None), self.layout.dtype, what)
        try:
            address, _, owner, stride = locate_rows(array, self.writable, False)
        except UsageError as exc:
            raise UsageError(f"{what} {exc.message}") from exc
        self._keepalive.append((owner, array))
        return address, stride, got[0]


def _check_dtype(dtype: Any, wanted: str, what: str) -> None:
    """Refuse elements of another dtype than the layout's; numpy, which cannot name bfloat16, may hold its bits."""
    try:
        name = canonical_dtype(dtype)
    except UsageError:
        name = str(dtype)
    if name == wanted:
        return
    as_bits = isinstance(dtype, np.dtype) and wanted in _NO_NUMPY_NAME and dtype.kind in "iuV"
    if not (as_bits and dtype.itemsize == DTYPE_BYTES[wanted]):
        raise UsageError(f"{what} holds {name} and the layout {wanted}; blocks are never converted")
