"""Which handle is which copy: the directory and the datafiles name the same copies, one by a number, one by a place.

Invariants
- A handle is in use from `add` until `free`, and names one copy all that time; a copy whose file was used again keeps
  its handle, marked as gone, until nobody names it any more.
- What is noted of a file has every handle whose copy is there in this life of it, and those that were and are elsewhere
  by now. So a file's end costs what was written to it, not what there is.

64 bytes a handle and 4 a note; no Python object a copy.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np

from ucxkv.ids import KEY_BYTES
from ucxkv.tiers.datafiles import Place

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

__all__ = ["Places"]

_DTYPE = np.dtype(
    [
        ("key", f"V{KEY_BYTES}"),
        ("sum", "<u8"),
        ("shown", "<u8"),
        ("generation", "<u8"),
        ("offset", "<u8"),
        ("length", "<u4"),
        ("flags", "<u4"),
        ("file", "<u4"),
        ("drive", "<u2"),
        ("state", "<u1"),
        ("unused", "V1"),
    ]
)
assert _DTYPE.itemsize == 64
_FREE, _THERE, _GONE = 0, 1, 2


class Places:
    """See the module. expected: so many handles will be needed, or there is a stop while the table is copied; memory
    is taken for those in use only.
    """

    def __init__(self, expected: int) -> None:
        self._rows = np.zeros(expected + 1, _DTYPE)
        self._free: list[int] = []
        self._fresh = 1
        """Handles from this one on were never used; 0 is none."""
        self._notes: dict[tuple[int, int, int], array[int]] = {}
        """(drive, file, generation) -> handles, in the order of the log."""

    def __len__(self) -> int:
        return self._fresh - 1 - len(self._free)

    def add(self, keys: Sequence[bytes], places: Sequence[Place], shown: Sequence[int]) -> npt.NDArray[np.uint32]:
        """Handles of these copies, u32[n]. shown: the sums of what they bring back."""
        handles = [self._free.pop() for _ in places[: len(self._free)]]
        end = self._fresh + len(places) - len(handles)
        handles += range(self._fresh, end)
        self._fresh = end
        if end > len(self._rows):
            self._rows = np.concatenate([self._rows, np.zeros(max(end, len(self._rows)), _DTYPE)])
        for handle, key, place, total in zip(handles, keys, places, shown, strict=True):
            self._rows[handle] = (
                key, place.sum, total, place.generation, place.offset, place.length, place.flags, place.file,
                place.drive, _THERE, b"",
            )  # fmt: skip
            self._note(handle, place)
        return np.array(handles, np.uint32)

    def place(self, handle: int) -> Place | None:
        """Where a copy is; None: its file was used again, or the handle is free."""
        _, total, _, generation, offset, length, flags, file, drive, state, _ = self._rows[handle].item()
        return Place(file, generation, offset, length, total, flags, drive) if state == _THERE else None

    def shown(self, handle: int) -> int:
        """The sum of what the copy brings back."""
        return int(self._rows["shown"][handle])

    def flags(self, handles: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
        """Of each of these, also of those whose file was used again."""
        found: npt.NDArray[np.uint32] = self._rows["flags"][handles]
        return found

    def is_of(self, handle: int, place: Place) -> bool:
        """Whether a handle that was of this copy still is of one with the same bytes, wherever that is now."""
        _, total, _, _, _, length, flags, _, _, state, _ = self._rows[handle].item()
        return (total, length, flags) == (place.sum, place.length, place.flags) and state != _FREE

    def key(self, handle: int) -> bytes:
        """The key of the copy's block."""
        return bytes(self._rows["key"][handle])

    def move(self, handle: int, place: Place) -> None:
        """The copy is at another place now."""
        row = self._rows[handle]
        for name in ("file", "generation", "offset", "drive"):
            row[name] = getattr(place, name)
        self._note(handle, place)

    def _note(self, handle: int, place: Place) -> None:
        life = place.drive, place.file, place.generation
        handles = self._notes.get(life)
        if handles is None:
            handles = self._notes[life] = array("I")
        handles.append(handle)

    def of_file(self, drive: int, file: int, generation: int) -> npt.NDArray[np.uint32]:
        """The copies in this life of this file, which is over, in the order of the log: from now on they are gone."""
        noted = np.array(self._notes.pop((drive, file, generation), ()), np.uint32)[::-1]
        _, last = np.unique(noted, return_index=True)  # one that was freed may name another copy in the same file
        handles = noted[np.sort(last)][::-1]
        rows = self._rows[handles]
        is_there = (rows["file"] == file) & (rows["drive"] == drive) & (rows["generation"] == generation)
        found: npt.NDArray[np.uint32] = handles[is_there & (rows["state"] == _THERE)]
        self._rows["state"][found] = _GONE
        return found

    def keys(self, handles: npt.NDArray[np.uint32]) -> bytes:
        """Of each of these, one after the other."""
        return self._rows["key"][handles].tobytes()

    def free(self, handle: int) -> bool:
        """Nobody names this copy any more; whether it is on disk all the same."""
        was = int(self._rows["state"][handle])
        if was != _FREE:
            self._rows["state"][handle] = _FREE
            self._free.append(handle)
        return was == _THERE
