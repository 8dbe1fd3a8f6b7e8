"""What a folder holds after any end, and where writing goes on.

A file with an index that proves itself is taken by it. Any other file in use is walked, batch by batch, every
payload checked, up to the first batch that does not follow; what lies behind is given up. The last file goes on
from there, the others get their index. Of several copies of a key the last one in log order counts, unless a
tombstone comes after it.

A file that is not ours is reported and left as it is: a stray name, another store's, a newer release's, one that is
too short, one whose head is damaged or cannot be read. So is a damaged block in a walked file, which is left out.
An older file that could not be read for a while and comes back does not count: files name the lowest
generation that did (`mark`), and older ones are free."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np

from ..base import SetupFailed, TierError
from ..datafile_format import (
    BLOCK_BYTES,
    DESCRIPTOR_DTYPE,
    FREE,
    KEY_BYTES,
    TOMBSTONE,
    VERSION,
    Head,
    decode_file,
    decode_store,
    encode_store,
)
from ..io import IoEngine, IoFailed
from .files import DataFile, FileState, file_name, read_index, read_piece
from .folder import LOCK_NAME, Folder, setup_failed
from .memory import AlignedMemory
from .values import Place, Problem, ProblemKind, Recovered
from .walking import walk

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["RecoveredBlocks", "Recovery", "recover"]

STORE_NAME = "store"
_NAME = re.compile(r"data-(\d{6,9})")


class RecoveredBlocks:
    """The blocks that were found, in log order. Iterating makes them one by one; `len` counts them."""

    def __init__(self, parts: list[tuple[DataFile, NDArray[np.void]]], drive: int) -> None:
        self._drive = drive
        self._files = np.repeat(
            np.array([(file.number, file.generation) for file, _ in parts], np.int64).reshape(-1, 2),
            [len(found) for _, found in parts],
            axis=0,
        )
        self._rows = np.concatenate([np.empty(0, DESCRIPTOR_DTYPE), *(found for _, found in parts)])
        newest = _newest(self._rows)
        newest = newest[(self._rows["flags"][newest] & TOMBSTONE) == 0]
        self._rows, self._files = self._rows[newest], self._files[newest]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Recovered]:
        for start in range(0, len(self._rows), 4096):
            rows, files = self._rows[start : start + 4096], self._files[start : start + 4096]
            places = map(
                Place,
                files[:, 0].tolist(),
                files[:, 1].tolist(),
                (rows["offset"].astype(np.int64) * BLOCK_BYTES).tolist(),
                *(rows[name].tolist() for name in ("length", "sum", "flags")),
                repeat(self._drive),
            )
            keys, parents = rows["key"].tolist(), rows["parent"].tolist()
            yield from map(Recovered, keys, rows["version"].tolist(), places, parents, rows["original"].tolist())


def _newest(rows: NDArray[np.void]) -> NDArray[np.intp]:
    """Positions of the last row of each key, ascending."""
    if not len(rows):
        return np.empty(0, np.intp)
    keys = np.ascontiguousarray(rows["key"]).view("<u8").reshape(-1, KEY_BYTES // 8)
    order = np.lexsort((keys[:, 0], keys[:, 1]))  # stable: copies of a key stay in log order
    grouped = keys[order]
    is_last = np.append((grouped[1:] != grouped[:-1]).any(axis=1), True)
    return np.sort(order[is_last])


@dataclass(slots=True)
class Recovery:
    """The files of the store and what was found in them. unsealed: in use, without an index, in log order."""

    store: bytes = b""
    files: dict[int, DataFile] = field(default_factory=dict)
    unsealed: list[DataFile] = field(default_factory=list)
    blocks: RecoveredBlocks = field(default_factory=lambda: RecoveredBlocks([], 0))
    problems: list[Problem] = field(default_factory=list)
    next_number: int = 0
    next_generation: int = 1
    next_sequence: int = 1

    def report(self, kind: ProblemKind, name: str, text: str) -> None:
        """One more problem."""
        self.problems.append(Problem(kind, name, text))


async def recover(
    folder: Folder,
    engine: IoEngine,
    memory: AlignedMemory,
    *,
    new_store: bytes,
    direct: bool,
    drive: int,
    is_synced: bool,
) -> Recovery:
    """Read a folder, which is locked. new_store: the id when it is new. is_synced: what is handed out must survive a
    power cut. The files are open and attached: whoever gets an error finds them closed.

    Raises SetupFailed (no access, a newer release's, mixed up), EngineClosed.
    """
    found = Recovery()
    heads: dict[int, tuple[Head, bytes]] = {}
    try:
        names = folder.names()
        for name in names:
            match = _NAME.fullmatch(name)
            if match and file_name(int(match[1])) == name:
                found.next_number = max(found.next_number, int(match[1]) + 1)
                head = await _open(folder, engine, memory, found, int(match[1]), direct)
                if head is not None:
                    heads[int(match[1])] = head
            elif name not in (LOCK_NAME, STORE_NAME):
                found.report(ProblemKind.STRAY, name, "no file of this store; left alone")
        found.store = await _store_id(folder, found, names, heads, new_store)
        _sort_out(folder, engine, found, heads)
        parts = await _read_all(engine, memory, found, heads, is_synced, folder)
        found.blocks = RecoveredBlocks(parts, drive)
    except BaseException as exc:
        for file in found.files.values():
            file.close(folder, engine)
        if isinstance(exc, OSError):
            raise setup_failed(folder.path, exc) from exc
        raise
    return found


async def _open(
    folder: Folder, engine: IoEngine, memory: AlignedMemory, found: Recovery, number: int, direct: bool
) -> tuple[Head, bytes] | None:
    """Open one file and read its head; None when it is left alone."""
    name = file_name(number)
    try:
        fd, is_direct = folder.open(name, direct=direct)
    except OSError as exc:
        found.report(ProblemKind.UNREADABLE, name, f"cannot be opened: {exc}; left alone")
        return None
    file = DataFile(number, fd, is_direct, -1, 0)
    try:
        file.engine_file = engine.attach(fd, direct=is_direct)
    except TierError:
        folder.close(fd)
        raise
    found.files[number] = file
    kind, text = ProblemKind.DAMAGED, "its head is damaged; left alone"
    head = None
    try:
        await folder.settle(fd)
        file.file_bytes = folder.size(fd)
        if file.file_bytes >= BLOCK_BYTES:
            piece = await read_piece(engine, memory, file, 0, BLOCK_BYTES)
            head = decode_file(piece.view[:BLOCK_BYTES].tobytes())
            memory.give(piece)
    except (IoFailed, OSError) as exc:
        kind, text = ProblemKind.UNREADABLE, f"cannot be read: {exc}; left alone"
    if head is not None and head[0].version != VERSION:
        kind, text = ProblemKind.NEWER, f"format {head[0].version} of another release; left alone"
        head = None
    elif head is not None and head[0].file != number:
        kind, text = ProblemKind.FOREIGN, f"is datafile {head[0].file} by its head; left alone"
        head = None
    elif (head is not None and head[0].length != file.file_bytes) or file.file_bytes < BLOCK_BYTES:
        needed = f" instead of {head[0].length}" if head is not None else ""
        kind, text = ProblemKind.TRUNCATED, f"has {file.file_bytes} bytes{needed}; left alone"
        head = None
    if head is None:
        found.report(kind, name, text)
        _leave(folder, engine, found, number)
    return head


def _leave(folder: Folder, engine: IoEngine, found: Recovery, number: int) -> None:
    found.files.pop(number).close(folder, engine)


async def _store_id(
    folder: Folder, found: Recovery, names: list[str], heads: dict[int, tuple[Head, bytes]], new_store: bytes
) -> bytes:
    """The store's id; the file that says so is made when it is missing."""
    if STORE_NAME in names:
        held = decode_store(folder.read_small(STORE_NAME))
        if held is not None and held[0].version != VERSION:
            raise SetupFailed(
                f"the datafiles in {folder.path} were written by another release; they are left as they are",
                found=f"format {held[0].version} in {STORE_NAME}",
                needed=f"format {VERSION}",
                fix="start the release that wrote them, or name an empty folder",
            )
        if held is not None:
            return held[1]
    said = {store for _, store in heads.values()}
    if len(said) > 1:
        raise SetupFailed(
            f"datafiles of {len(said)} stores are mixed in {folder.path}; they are left as they are",
            found=f"no file {STORE_NAME} that says which ones count",
            needed="the files of one store",
            fix=f"restore {STORE_NAME}, or move the others' datafiles away, or name an empty folder",
        )
    store = said.pop() if said else new_store
    if heads or STORE_NAME in names:
        found.report(ProblemKind.NOTICE, STORE_NAME, "was missing or damaged; made anew")
    await folder.create(STORE_NAME, nbytes=BLOCK_BYTES, head=encode_store(store))
    return store


def _sort_out(folder: Folder, engine: IoEngine, found: Recovery, heads: dict[int, tuple[Head, bytes]]) -> None:
    """Leave other stores' files alone; say of the others whether they are in use, and where numbers go on."""
    for number, (_, store) in list(heads.items()):
        if store != found.store:
            found.report(ProblemKind.FOREIGN, file_name(number), "of another store; left alone")
            _leave(folder, engine, found, number)
            del heads[number]
    floor = max((head.mark for head, _ in heads.values()), default=0)
    for number, (head, _) in heads.items():
        file = found.files[number]
        file.generation, file.head_sum = head.generation, head.sum
        found.next_generation = max(found.next_generation, head.generation + 1)
        found.next_sequence = max(found.next_sequence, head.sequence)
        is_free = head.state == FREE or head.generation < floor
        file.state = FileState.FREE if is_free else FileState.SEALED


async def _read_all(
    engine: IoEngine,
    memory: AlignedMemory,
    found: Recovery,
    heads: dict[int, tuple[Head, bytes]],
    is_synced: bool,
    folder: Folder,
) -> list[tuple[DataFile, NDArray[np.void]]]:
    """(file, descriptors) of the files in use, in log order."""
    parts = []
    used = [file for file in found.files.values() if file.state is not FileState.FREE]
    for file in sorted(used, key=lambda file: file.generation):
        try:
            index = await read_index(engine, memory, file)
            if index is None:
                damaged = await walk(engine, memory, file, heads[file.number][0])
                if damaged:
                    places = ", ".join(map(str, damaged))
                    found.report(ProblemKind.DAMAGED, file.name, f"blocks at {places} do not have their sums; left out")
                rows = np.concatenate([np.empty(0, DESCRIPTOR_DTYPE), *file.descriptors])
                found.unsealed.append(file)
            else:
                rows = index.descriptors
            if is_synced and index is None:
                await engine.sync(file.engine_file)
        except IoFailed as exc:
            found.report(ProblemKind.UNREADABLE, file.name, f"cannot be read: {exc}; left alone")
            found.unsealed = [each for each in found.unsealed if each is not file]
            _leave(folder, engine, found, file.number)
            continue
        last = index.sequence if index is not None else file.last_sequence
        found.next_sequence = max(found.next_sequence, last + 1)
        parts.append((file, rows))
    return parts
