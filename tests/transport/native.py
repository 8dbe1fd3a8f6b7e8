"""Compiles tests/native/resolver.c once and hands out the addresses of its functions."""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
_BUILT = "UCXKV_TEST_RESOLVER"
KEY_MARK = 0x79656B747365746B
EPOCH = 7
"""Of the tests' nodes, until they begin another."""


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled resolver; built by the first process, inherited by its children through the environment."""
    built = os.environ.get(_BUILT)
    if built is None:
        scratch = tempfile.mkdtemp()
        atexit.register(shutil.rmtree, scratch, True)
        built = os.environ[_BUILT] = f"{scratch}/resolver.so"
        source = ROOT / "tests/native/resolver.c"
        includes = [f"-I{ROOT / 'transport'}", f"-I{ROOT / 'tiers'}"]
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", *includes, str(source), "-o", built], check=True)
    return ctypes.CDLL(built)


def address_of(name: str) -> int:
    """Address of an exported C function."""
    value = ctypes.cast(getattr(library(), name), ctypes.c_void_p).value
    assert value is not None
    return value


def keys_of(indices: object) -> bytes:
    """The 16-byte keys of blocks with these numbers."""
    numbers = np.asarray(indices, dtype="<u8").reshape(-1)
    keys = np.empty((len(numbers), 2), "<u8")
    keys[:, 0] = numbers
    keys[:, 1] = KEY_MARK
    return keys.tobytes()


def pattern(number: int, length: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """The bytes of block `number`: pseudo-random, the same in every process."""
    words = np.arange((length + 7) // 8, dtype=np.uint64) + np.uint64((number + 1) * 0x9E3779B97F4A7C15 % 2**64)
    words ^= words >> np.uint64(29)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    return words.view(np.uint8)[:length].copy()
