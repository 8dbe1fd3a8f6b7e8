"""The values that a journal's records name, on the disk beside it: what durability = power needs on top of the log.

One file as large as the memory in which the values lie, each value at the offset that it has there. So nothing is
allocated, listed or collected: a place that a record names in memory, it names here too.

Invariants
- A value is on the disk, written and synced, before the first record that names its place is. (`keep`: the journal's
  thread calls it with the records of a frame, ahead of the frame; when it fails the journal has failed, and nothing
  that these records say is acknowledged.)
- A place is written again only for a record that names it, and memory is used again only behind the record that gave
  it up. So the file has, at any moment, what a process that died then would find in the memory.
- `values` is whole: it has every value that the journal names. One in the making is called `values.tmp`, and is void.
- The file says nothing about itself; each value is proven by the sum in its record.

Source: fdatasync(2) covers all that was written through any descriptor; as with the log, one that failed is not
repeated.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Self, TypeAlias

import numpy as np

from ucxkv.errors import SetupError
from ucxkv.journal.files import Files, how_to_fix, setup_error

if TYPE_CHECKING:
    import numpy.typing as npt

    Rows: TypeAlias = npt.NDArray[np.void]
    """n rows with the fields region, offset, length: a directory's COMMIT_DTYPE."""
    Named: TypeAlias = Callable[[Sequence[bytes]], Rows]

__all__ = ["ValueFile"]

_NAME, _TEMPORARY = "values", "values.tmp"
_THREADS_MAX = 8


class ValueFile:
    """The file `values` of a journal's folder, which is locked. Made by `find` or `make`; `close` ends it.

    memory: all of it, writable; the caller keeps it mapped until `close`. named: the rows that records name; of them
    only those in this memory (region 0) count.
    """

    def __init__(self, files: Files, handle: int, memory: memoryview, named: Named) -> None:
        self._files = files
        self._handle = handle
        self._memory = memory
        self._named = named

    @property
    def folder(self) -> str:
        """Where it is."""
        return self._files.folder

    @classmethod
    def find(cls, files: Files, memory: memoryview, named: Named) -> Self | None:
        """The whole one that is there, as the disk has it; None: there is none. Raises SetupError."""
        names = files.names()
        try:
            if _TEMPORARY in names:
                files.remove(_TEMPORARY)
            if _NAME not in names:
                return None
            found = cls(files, files.open(_NAME), memory, named)
        except OSError as exc:
            raise setup_error(files.folder, exc) from exc
        try:
            files.sync(found._handle)
            files.forget_cached(found._handle)  # pages of a sync that failed are no proof
        except OSError as exc:
            found.close()
            raise setup_error(files.folder, exc) from exc
        return found

    @classmethod
    def make(cls, files: Files, memory: memoryview, named: Named, rows: Rows) -> Self:
        """One that has the values of these rows, and room for all others. Raises SetupError: there is none then."""
        try:
            made = cls(files, files.open(_TEMPORARY, create=True), memory, named)
        except OSError as exc:
            raise setup_error(files.folder, exc) from exc
        try:
            files.reserve(made._handle, len(memory))
            made.write(rows)
            files.sync(made._handle)
            files.rename(_TEMPORARY, _NAME)
            files.sync_folder()
        except OSError as exc:
            made.close()
            with contextlib.suppress(OSError):
                files.remove(_TEMPORARY)
            raise SetupError(
                f"durability = power keeps all values in {files.folder}, too",
                found=str(exc),
                needed=f"{len(memory)} bytes there (host_bytes)",
                fix=how_to_fix(exc),
            ) from exc
        return made

    def keep(self, records: Sequence[bytes]) -> None:
        """Put on the disk what these records name. Raises OSError."""
        rows = self._named(records)
        if len(rows):
            self.write(rows)
            self._files.sync(self._handle)

    def write(self, rows: Rows) -> None:
        """Write the values of these rows, without a sync. Raises OSError."""
        for offset, length in self._places(rows):
            self._files.write(self._handle, offset, self._memory[offset : offset + length])

    def read(self, rows: Rows) -> None:
        """Bring the values of these rows into the memory, as far as they are there; by several threads. OSError."""
        places = self._places(rows)
        step = -(-len(places) // min(_THREADS_MAX, os.cpu_count() or 1)) or 1
        with ThreadPoolExecutor(_THREADS_MAX) as pool:
            list(pool.map(self._read, [places[at : at + step] for at in range(0, len(places), step)]))

    def _read(self, places: list[tuple[int, int]]) -> None:
        for offset, length in places:
            found = self._files.read(self._handle, offset, length)
            self._memory[offset : offset + len(found)] = found

    def _places(self, rows: Rows) -> list[tuple[int, int]]:
        """(offset, length) of the rows that lie in this memory."""
        rows = rows[rows["region"] == 0]
        ends = rows["offset"].astype(np.uint64) + rows["length"]
        rows = rows[(ends <= len(self._memory)) & (rows["length"] > 0)]
        return list(zip(rows["offset"].tolist(), rows["length"].tolist(), strict=True))

    def remove(self) -> None:
        """Close it, and give the file up: its values are no longer kept. Raises SetupError."""
        self.close()
        try:
            self._files.remove(_NAME)
            self._files.sync_folder()
        except OSError as exc:
            raise setup_error(self._files.folder, exc) from exc

    def close(self) -> None:
        """Idempotent."""
        if self._handle >= 0:
            self._files.close(self._handle)
            self._handle = -1
            self._memory = memoryview(b"")
