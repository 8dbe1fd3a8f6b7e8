"""Memory beside a device: pages that this thread populates come from one NUMA node while it has any.

Invariants: the calling thread's policy is as before afterwards; a kernel that refuses (a container's seccomp filter, an
unknown machine) changes nothing and is named. Preferred, never bound: a full node means farther memory, not a failure.

The policy is the thread's rather than the mapping's (set_mempolicy, not mbind), so that it covers everything that the
thread populates meanwhile: segments, small and huge pages alike, and the slot table.

Source: Linux man-pages set_mempolicy(2); kernel admin-guide/mm/numa_memory_policy.rst.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from collections.abc import Iterator

__all__ = ["memory_near", "thread_policy"]

_DEFAULT, _PREFERRED = 0, 1
_NUMBERS = {  # set_mempolicy, get_mempolicy
    "x86_64": (238, 239),
    "aarch64": (237, 236),
    "riscv64": (237, 236),
    "ppc64le": (261, 260),
    "s390x": (270, 269),
}
_MASK_BITS = 1024

_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def memory_near(node: int | None) -> Iterator[str]:
    """Populate from NUMA node `node` meanwhile, in this thread; None changes nothing. Yields why not, or empty."""
    if node is None:
        yield ""
        return
    before = thread_policy()
    refused = _set(_PREFERRED, 1 << node) if before is not None else f"unknown here ({platform.machine()})"
    try:
        yield refused
    finally:
        if before is not None and not refused:
            _set(*before)


def thread_policy() -> tuple[int, int] | None:
    """This thread's policy and its nodes as a bit mask, as the kernel numbers them; None where it cannot be asked."""
    numbers = _NUMBERS.get(platform.machine())
    mode, mask = ctypes.c_int(), (ctypes.c_uint64 * (_MASK_BITS // 64))()
    size = ctypes.c_ulong(_MASK_BITS)
    if numbers is None or _libc.syscall(numbers[1], ctypes.byref(mode), mask, size, None, ctypes.c_ulong(0)):
        return None
    return mode.value, sum(word << (64 * index) for index, word in enumerate(mask))


def _set(mode: int, nodes: int) -> str:
    """Set the thread's policy; empty, or the kernel's words."""
    mask = (ctypes.c_uint64 * (_MASK_BITS // 64))()
    for index in range(len(mask)):
        mask[index] = nodes >> (64 * index) & (1 << 64) - 1
    size = ctypes.c_ulong(_MASK_BITS if mode != _DEFAULT else 0)
    if _libc.syscall(_NUMBERS[platform.machine()][0], mode, mask if mode != _DEFAULT else None, size):
        return os.strerror(ctypes.get_errno())
    return ""
