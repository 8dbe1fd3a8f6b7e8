"""A simulated process's clock: virtual time with an offset and a rate of its own.

It never goes back, and runs on while its process is frozen, as a stopped process's monotonic clock does. `virtual_ns`
is the exact first moment at which `local_ns` shows at least the asked reading: no timer fires early by its own
clock."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Clock"]

MILLION = 1_000_000


@dataclass(frozen=True, slots=True)
class Clock:
    """offset_ns: its reading at virtual time 0. rate_ppm: how much faster than virtual time it runs, in millionths."""

    offset_ns: int = 0
    rate_ppm: int = 0

    def local_ns(self, virtual_ns: int) -> int:
        """Its reading at a moment of virtual time."""
        return self.offset_ns + virtual_ns * (MILLION + self.rate_ppm) // MILLION

    def virtual_ns(self, local_ns: int) -> int:
        """The first moment of virtual time at which it reads `local_ns` or more."""
        return -(-(local_ns - self.offset_ns) * MILLION // (MILLION + self.rate_ppm))
