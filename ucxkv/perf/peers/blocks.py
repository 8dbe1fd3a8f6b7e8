"""Blocks to measure with: memory as an engine's pool is, and a content that tells every block from every other."""

from __future__ import annotations

import functools
import mmap

import numpy as np
import numpy.typing as npt

__all__ = ["Blocks", "Pattern", "anonymous_blocks"]

Blocks = npt.NDArray[np.uint8]
_FILLED_ALONE_BYTES = 1 << 20  # from here on, numpy's call costs nothing beside the bytes
_PIECE_WORDS = 1 << 18  # compared at a time, so that the difference stays in the cache


def anonymous_blocks(count: int, nbytes: int) -> Blocks:
    """u8[count, nbytes] of private memory, huge pages asked for, touched: what an engine's pool of blocks is."""
    memory = mmap.mmap(-1, max(count * nbytes, mmap.PAGESIZE), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass  # a kernel without huge pages is measured as it is
    flat: Blocks = np.frombuffer(memory, np.uint8)[: count * nbytes]
    flat.fill(1)
    return flat.reshape(count, nbytes)


@functools.lru_cache(maxsize=2)
def _words(nbytes: int, seed: int) -> npt.NDArray[np.uint64]:
    assert nbytes > 0
    assert nbytes % 8 == 0
    return np.random.default_rng(seed).integers(1, 1 << 63, nbytes // 8, np.uint64)


class Pattern:
    """Content of blocks of nbytes, a multiple of 8: random words that follow from the seed, plus the block's number.

    Both sides of a transfer make it for themselves.
    """

    def __init__(self, nbytes: int, seed: int = 1) -> None:
        self._words = _words(nbytes, seed)

    def fill(self, index: int, block: Blocks) -> None:
        """Write block `index`'s content."""
        np.add(self._words, np.uint64(index), out=block.view(np.uint64))

    def fill_all(self, blocks: Blocks) -> None:
        """Write the contents of blocks 0, 1, ... into u8[n, nbytes]."""
        if blocks.shape[1] >= _FILLED_ALONE_BYTES:
            for index, block in enumerate(blocks):
                self.fill(index, block)
        else:
            np.add(self._words, np.arange(len(blocks), dtype=np.uint64)[:, None], out=blocks.view(np.uint64))

    def matches(self, index: int, block: Blocks) -> bool:
        """Whether a block is block `index`'s content, byte for byte."""
        words, shift = block.view(np.uint64), np.uint64(index)
        if len(words) != len(self._words):
            return False
        return all(
            np.array_equal(words[low : low + _PIECE_WORDS] - shift, self._words[low : low + _PIECE_WORDS])
            for low in range(0, len(words), _PIECE_WORDS)
        )

    def number_of(self, block: Blocks) -> int:
        """The number of the block whose content this may be; `matches` tells whether it is."""
        return int(block[:8].view(np.uint64)[0] - self._words[0])
