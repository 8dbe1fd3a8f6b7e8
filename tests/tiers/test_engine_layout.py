"""What the io engines' C and Python share in memory: the same bytes mean the same on both sides."""

from __future__ import annotations

import numpy as np

from ucxkv.tiers._engine import ffi, lib
from ucxkv.tiers.io import DIRECT_ALIGNMENT, OP_DTYPE, OpKind


def test_an_operation_lies_in_memory_as_c_reads_it() -> None:
    """Goal: no field is read for another. Method: size and offsets of kv_io_op against OP_DTYPE, values."""
    assert OP_DTYPE.itemsize == ffi.sizeof("kv_io_op") == 24
    assert OP_DTYPE.names == ("address", "offset", "length", "file", "kind")
    fields = OP_DTYPE.fields
    assert fields is not None
    for field in OP_DTYPE.names:
        assert fields[field][1] == ffi.offsetof("kv_io_op", field)
    ops = np.array([(1 << 63 | 1, 1 << 62 | 2, 0xFFFFFFF3, 0xFFF4, 0xFFF5)], OP_DTYPE)
    seen = ffi.from_buffer("kv_io_op[]", ops)[0]
    values = (seen.address, seen.offset, seen.length, seen.file, seen.kind)
    assert values == tuple(int(ops[0][field]) for field in OP_DTYPE.names)


def test_numbers_that_both_sides_name_are_equal() -> None:
    """Goal: one meaning. Method: C's constants against the seam's."""
    assert lib.KV_ALIGNMENT == DIRECT_ALIGNMENT
    assert (lib.KV_READ, lib.KV_WRITE) == (OpKind.READ, OpKind.WRITE)
    assert np.iinfo(np.uint16).max >= lib.KV_FILES
    refusals = [lib.KV_BUSY, lib.KV_UNKNOWN_FILE, lib.KV_UNKNOWN_KIND, lib.KV_MISALIGNED]
    refusals += [lib.KV_BEYOND, lib.KV_FENCED, lib.KV_TOO_MANY]
    assert len(set(refusals)) == 7 and max(refusals) < 0
