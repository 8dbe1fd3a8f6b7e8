"""What a cost of several parts is thought to take, corrected by what it took.

A cost is told as the seconds of its parts (a pass and its tokens, blocks and bytes, one tier and another), and only the
whole is measured. What it took longer than expected is laid to the parts by their shares, so that costs of different
mixtures tell the parts apart, and with one mixture only that one is learned, which is what is asked for then.

Promises: each scale is positive and within `most` times 1, whatever was measured. One measurement moves the expectation
of a cost like it to about (measured / expected) ** gain times what it was, and counts for at most `clip` times as long,
or as short, as expected: a moving average of logarithms, which a single stall moves little. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["Scales"]


class Scales:
    """See the module. values: how many times as long as told each part takes."""

    def __init__(self, count: int, *, gain: float, clip: float, most: float = 1e4) -> None:
        self.values = [1.0] * count
        self._gain, self._clip, self._most = gain, clip, most

    def seconds(self, told_s: Sequence[float]) -> float:
        """Of a cost that is told as these parts."""
        return sum(scale * part_s for scale, part_s in zip(self.values, told_s, strict=True))

    def observe(self, told_s: Sequence[float], seconds: float) -> None:
        """A cost that is told as these parts, at least one above 0, took so long."""
        parts = [scale * part_s for scale, part_s in zip(self.values, told_s, strict=True)]
        expected_s = sum(parts)
        step = self._gain * math.log(min(max(seconds / expected_s, 1 / self._clip), self._clip))
        step *= expected_s / sum(part * part for part in parts)
        for i, part in enumerate(parts):
            scale = self.values[i] * math.exp(step * part)
            self.values[i] = min(max(scale, 1 / self._most), self._most)
