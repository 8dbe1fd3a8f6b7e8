"""The values beside the log (durability = power): whenever the power goes, what was acknowledged has its bytes."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable

import numpy as np
import pytest

from tests.journal.faulty import FaultyFiles
from ucxkv.directory.log import COMMIT_DTYPE, Replay, commits, leaves, named
from ucxkv.errors import JournalFailed, SetupError
from ucxkv.journal import Durability, Journal, ValueFile
from ucxkv.tiers.copy import sum_bytes

SLOT_BYTES, SLOTS = 1000, 12  # neighbours share sectors
FILE_BYTES = 16 << 10


class Owner:
    """A directory in small: places are given out, and again after the Leave of the block before is in the log."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.memory = bytearray(SLOT_BYTES * SLOTS)
        self._free = list(range(SLOTS))
        self._slots: dict[bytes, int] = {}
        self.acknowledged: dict[bytes, bytes] = {}
        self.unsure: dict[bytes, bytes] = {}
        """On their way when the end came: there or not, never wrong."""

    async def live(self, journal: Journal, values: ValueFile, steps: int) -> None:
        """Put and delete until the disk refuses."""
        journal.keep_beside(values)
        for _ in range(steps):
            if self._slots and (not self._free or self._rng.random() < 0.4):
                await self._delete(journal, self._rng.choice(list(self._slots)))
            else:
                await self._put(journal, self._rng.randint(1, min(3, len(self._free))))
            if self._rng.random() < 0.2:
                rows = [self._row(key, slot) for key, slot in self._slots.items()]
                await journal.snapshot(1, journal.durable_lsn, list(commits(np.array(rows, COMMIT_DTYPE))))

    async def _put(self, journal: Journal, count: int) -> None:
        made = {}
        for _ in range(count):
            key, slot = self._rng.randbytes(16), self._free.pop(self._rng.randrange(len(self._free)))
            value = self._rng.randbytes(self._rng.choice((0, 1, 700, SLOT_BYTES)))
            self.memory[slot * SLOT_BYTES : slot * SLOT_BYTES + len(value)] = value
            self.unsure[key], self._slots[key], made[key] = value, slot, value
        rows = [self._row(key, self._slots[key]) for key in made]
        await journal.committed(journal.append(1, list(commits(np.array(rows, COMMIT_DTYPE)))))
        self.acknowledged.update(made)
        self.unsure = {}

    async def _delete(self, journal: Journal, key: bytes) -> None:
        self.unsure = {key: self.acknowledged.pop(key)}
        await journal.committed(journal.append(1, list(leaves(key))))
        self._free.append(self._slots.pop(key))
        self.unsure = {}

    def _row(self, key: bytes, slot: int) -> np.void:
        value = self.unsure[key] if key in self.unsure else self.acknowledged[key]
        row = np.zeros(1, COMMIT_DTYPE)[0]
        row["key"], row["offset"], row["length"] = np.void(key), slot * SLOT_BYTES, len(value)
        row["sum"] = sum_bytes(value)
        return row

    async def check(self, files: FaultyFiles) -> None:
        """What a machine finds that starts with this disk and new memory."""
        memory = bytearray(len(self.memory))
        journal, told = await opened(files)
        values = ValueFile.find(journal.files, memoryview(memory), named)
        assert values is not None
        replay = Replay()
        for record in (*told.snapshot, *(record for _, _, record in told.records)):
            replay.feed(record)
        rows = replay.rows()
        values.read(rows)
        found = {}
        for row in rows:
            value = bytes(memory[int(row["offset"]) : int(row["offset"]) + int(row["length"])])
            assert sum_bytes(value) == row["sum"], "the log names a value that is not there"
            found[row["key"].tobytes()] = value
        assert {key: found.get(key) for key in self.acknowledged} == self.acknowledged
        assert found.items() <= {**self.acknowledged, **self.unsure}.items()
        values.close()
        await journal.aclose()


async def opened(files: FaultyFiles) -> tuple[Journal, object]:
    return await Journal.open(  # type: ignore[return-value,arg-type]
        None, durability=Durability.POWER, file_bytes=FILE_BYTES, files=files, is_threaded=False
    )


async def begun(files: FaultyFiles, owner: Owner) -> tuple[Journal, ValueFile]:
    """A first start."""
    journal, _ = await opened(files)
    return journal, ValueFile.make(journal.files, memoryview(owner.memory), named, np.empty(0, COMMIT_DTYPE))


def stopper(files: FaultyFiles, stop: int) -> Callable[[str, str], None]:
    def before(_kind: str, _name: str) -> None:
        if sum(files.operations.values()) >= stop:
            raise OSError(errno.EIO, "the machine has no power")

    return before


@pytest.mark.parametrize("seed", range(3))
async def test_every_acknowledged_value_survives_a_power_cut_at_every_step(seed: int) -> None:
    """Goal: durability power. Method: puts, deletes, places used again and snapshots; the machine stops before each
    single operation on the disk; for each: nothing unsynced made it, all of it, and random sectors and names of it."""
    rng, states, stop, is_over = random.Random(seed), 0, 0, False
    while not is_over:
        files, owner = FaultyFiles(), Owner(random.Random(f"life {seed}"))
        journal, values = await begun(files, owner)
        stop = stop or sum(files.operations.values())
        files.before = stopper(files, stop)
        try:
            await owner.live(journal, values, 30)
            is_over = True
        except (JournalFailed, SetupError):
            pass  # of a snapshot, too, the last words of this machine
        files.before = lambda kind, name: None
        for state in files.power_cuts(rng, 4):
            await owner.check(state)
            states += 1
        stop += 1
    assert states > 1000


async def test_a_value_that_the_disk_refuses_is_never_acknowledged() -> None:
    """Goal: fencing as for the log's own files. Method: the write, then the sync, of a value fails once; its record and
    all later ones are refused, what was acknowledged before is there after a restart, the refused one is not."""
    for kind in ("write", "sync"):
        files, owner = FaultyFiles(), Owner(random.Random(kind))
        journal, values = await begun(files, owner)
        await owner.live(journal, values, 4)
        failures = [1]

        def before(now: str, name: str, kind: str = kind, failures: list[int] = failures) -> None:
            if (now, name) == (kind, "values") and failures[0]:
                failures[0] -= 1
                raise OSError(errno.EIO, "bad sector")

        files.before = before
        with pytest.raises(JournalFailed, match="bad sector"):
            await owner.live(journal, values, 50)
        with pytest.raises(JournalFailed):
            journal.append(1, [b"more"])
        assert not failures[0]
        await journal.aclose()
        assert files.open_handles == 0
        await owner.check(files.after_power_cut(None))
        await owner.check(files.after_kill())


async def test_values_that_begin_to_be_kept_are_whole_or_not_there() -> None:
    """Goal: a node that goes over from `process` to `power`. Method: the machine stops at each operation of `make`;
    then there is no file, or one with every value."""
    owner = Owner(random.Random(5))
    files = FaultyFiles()
    journal, values = await begun(files, owner)
    await owner.live(journal, values, 20)
    rows = np.array([owner._row(key, slot) for key, slot in owner._slots.items()], COMMIT_DTYPE)
    seen = set()
    for stop in range(100):
        fresh = FaultyFiles()
        fresh.before = stopper(fresh, stop)
        try:
            ValueFile.make(fresh, memoryview(owner.memory), named, rows).close()
        except SetupError as exc:
            assert "bytes there" in str(exc) or "folder" in str(exc)
        fresh.before = lambda kind, name: None
        for state in fresh.power_cuts(random.Random(stop), 4):
            memory = bytearray(len(owner.memory))
            found = ValueFile.find(state, memoryview(memory), named)
            seen.add(found is not None)
            assert "values.tmp" not in state.names()
            if found is not None:
                found.read(rows)
                for key, slot in owner._slots.items():
                    value = owner.acknowledged[key]
                    assert memory[slot * SLOT_BYTES : slot * SLOT_BYTES + len(value)] == value
                found.close()
    assert seen == {True, False}


async def test_a_disk_without_room_for_all_values_is_refused_at_the_start() -> None:
    """Goal: no put finds the disk full. Method: a disk with half of the room."""
    files = FaultyFiles()
    files.room = SLOT_BYTES * SLOTS // 2
    with pytest.raises(SetupError, match="No space left"):
        ValueFile.make(files, memoryview(bytearray(SLOT_BYTES * SLOTS)), named, np.empty(0, COMMIT_DTYPE))
    assert files.names() == [] and files.open_handles == 0
