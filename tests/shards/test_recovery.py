"""What a node of a cluster finds when it starts again, in a real segment with a real journal."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.shards.rows import KEYS
from ucxkv.directory.log import packed
from ucxkv.errors import SetupError
from ucxkv.journal import Durability, Journal
from ucxkv.node.config import NodeConfig
from ucxkv.node.shards.records import ABSENT_REGION, LoggedEntry, base_records, entry_record, reset_record
from ucxkv.node.shards.recovery import ShardRecovery, recover_shards
from ucxkv.node.shards.standby import places_of
from ucxkv.node.state import NodeState, forget
from ucxkv.node.store import HostStore
from ucxkv.replication import Kind, Member, ShardConfig
from ucxkv.tiers.copy import sum_bytes

BYTES = 2 << 20


class Home:
    """A node's folder, and what it puts there before it ends."""

    def __init__(self, folder: Path) -> None:
        name = f"rec-{os.getpid()}-{folder.name}"[-40:]
        self.config = NodeConfig(
            name=name, host_bytes=BYTES, slots_count=256, huge_pages="never", durability="process",
            state_dir=str(folder / "state"), grace_ms=0,
        )  # fmt: skip
        self.epoch = 0
        self.segment: Path
        self.store: HostStore
        self.journal: Journal

    @asynccontextmanager
    async def life(self, *, recover: bool = True) -> AsyncIterator[ShardRecovery | None]:
        """One start: memory and journal; closed with the process's memory as it is."""
        self.epoch += 1
        state = NodeState.open(self.config, self.epoch)
        self.journal, told = await Journal.open(
            state.journal_folder, durability=Durability.PROCESS, identity=state.identity
        )
        memory = state.take_memory("never")
        self.segment = Path(state._facts.segment_path)
        self.store = HostStore(self.config, 1, self.epoch, memory=memory)
        try:
            found = recover_shards(self.store, state, memory, self.journal, told, None) if recover else None
            if found is not None:
                self.store.held_elsewhere = lambda: held_by(found)
                self.store.check()
            yield found
        finally:
            await self.journal.aclose()
            self.store.close()
            state.close()

    async def log(self, *records: bytes) -> None:
        await self.journal.committed(self.journal.append(self.epoch, records))

    def place(self, data: bytes) -> int:
        (offset,) = self.store.slabs.allocate(len(data), 1)
        self.store.segment.view[offset : offset + len(data)] = data
        return offset

    def commit(self, index: int, key: int, data: bytes, offset: int) -> LoggedEntry:
        rows = packed([(KEYS[key], bytes(16), index, (0, offset, len(data)), sum_bytes(data), 1, 0)])
        places = self.store.slabs.places(rows["offset"])
        for name in ("slot_lines", "base_unit", "units"):
            rows[name] = places[name]
        return LoggedEntry(index, 1, Kind.RECORD, rows)


def held_by(found: ShardRecovery) -> list[int]:
    """What each shard is handed: its state's rows and its entries'."""
    out: list[int] = []
    for log in found.logs.values():
        out += places_of(log.rows())
        out += [at for logged in log.entries if logged.rows is not None for at in places_of(logged.rows)]
    return out


def leave(index: int, key: int) -> LoggedEntry:
    return LoggedEntry(index, 1, Kind.RECORD, keys=KEYS[key])


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home(tmp_path)
    yield made  # type: ignore[misc]
    if (tmp_path / "state").exists():
        forget(tmp_path / "state")


async def test_all_comes_back_where_it_was(home: Home) -> None:
    """Goal: rows of a state and of entries, small values and large ones, of two shards. Method: log, end, start."""
    data = [b"small" * 20, b"L" * 700_000, b"middle" * 3000]
    async with home.life(recover=False):
        places = [home.place(each) for each in data]
        first = home.commit(1, 0, data[0], places[0])
        assert first.rows is not None
        await home.log(reset_record(0, 5, 1), *base_records(0, first.rows))
        await home.log(entry_record(0, home.commit(6, 1, data[1], places[1])))
        await home.log(entry_record(1, home.commit(1, 2, data[2], places[2])))
    async with home.life() as found:
        assert found is not None and (found.blocks, found.lacking) == (3, {})
        assert sorted(held_by(found)) == sorted(places)
        assert home.store.slabs.used_bytes == sum(home.store.slabs.bytes_at(at) for at in places)


async def test_a_block_that_left_gives_its_place_to_the_one_that_has_it(home: Home) -> None:
    """Goal: `_places`: memory of a block that left and was reused is its new owner's, in the same slab or another one.
    Method: K at P, gone; J there; K again elsewhere; then L gone, its slab's memory a run now."""
    async with home.life(recover=False):
        place = home.place(b"k" * 100)
        old = entry_record(0, home.commit(1, 0, b"k" * 100, place))
        home.store.slabs.free([place])
        again = home.place(b"j" * 100)
        assert again == place, "the allocator gave another place: the test says nothing"
        new = entry_record(1, home.commit(1, 1, b"j" * 100, again))
        third = home.place(b"k" * 100)
        back = entry_record(0, home.commit(3, 0, b"k" * 100, third))
        await home.log(old, entry_record(0, leave(2, 0)), new, back)
        slotted = home.place(b"l" * 5000)
        gone = entry_record(1, home.commit(2, 2, b"l" * 5000, slotted))
        home.store.slabs.free([slotted])
        large = home.place(b"x" * 1_000_000)
        assert large <= slotted < large + 1_000_000, "the run lies elsewhere: the test says nothing"
        await home.log(gone, entry_record(1, leave(3, 2)), entry_record(0, home.commit(4, 3, b"x" * 1_000_000, large)))
    async with home.life() as found:
        assert found is not None and not found.lacking
        assert sorted(held_by(found)) == sorted([again, third, large])
        (first, _, second, _) = found.logs[0].entries
        assert first.rows is not None and first.rows["region"][0] == ABSENT_REGION
        assert second.rows is not None and second.rows["offset"][0] == third


async def test_a_damaged_value_is_lacking_and_no_other_is(home: Home) -> None:
    """Goal: bytes are proven. Method: one of two values changes; a third left before, its change is nothing."""
    async with home.life(recover=False):
        places = [home.place(bytes([n]) * 300) for n in range(3)]
        for n, place in enumerate(places):
            await home.log(entry_record(n % 2, home.commit(1 + n, n, bytes([n]) * 300, place)))
        await home.log(entry_record(0, leave(4, 2)))
        for place in (places[1], places[2]):
            home.store.segment.view[place] ^= 0xFF
    async with home.life() as found:
        assert found is not None and found.lacking == {1: 1}
        assert held_by(found) == [places[0]]


async def test_a_value_that_was_put_again_after_its_leave_is_proven_too(home: Home) -> None:
    """Goal: an earlier Leave excuses nothing that came after it. Method: put, delete, put; the last one's bytes go
    bad."""
    async with home.life(recover=False):
        first, second = home.place(b"v" * 300), home.place(b"v" * 300)
        await home.log(
            entry_record(0, home.commit(1, 0, b"v" * 300, first)),
            entry_record(0, leave(2, 0)),
            entry_record(0, home.commit(3, 0, b"v" * 300, second)),
        )
        home.store.segment.view[second] ^= 0xFF
    async with home.life() as found:
        assert found is not None and found.lacking == {0: 1}


async def test_a_block_committed_twice_has_its_last_place(home: Home) -> None:
    """Goal: a Commit of a block that is there (its Leave was never logged) stops no start. Method: K at P, then at Q
    while another shard's block has P, with the same bytes."""
    async with home.life(recover=False):
        place = home.place(b"same" * 50)
        first = entry_record(0, home.commit(1, 0, b"same" * 50, place))
        other = entry_record(1, home.commit(1, 1, b"same" * 50, place))
        last = home.place(b"same" * 50)
        await home.log(first, other, entry_record(0, home.commit(2, 0, b"same" * 50, last)))
    async with home.life() as found:
        assert found is not None and not found.lacking
        assert sorted(held_by(found)) == sorted([place, last])


async def test_memory_that_is_gone_lacks_everything(home: Home) -> None:
    """Goal: `why_empty`. Method: the segment is another one than the journal speaks of, with the right bytes in it."""
    async with home.life(recover=False):
        place = home.place(b"v" * 300)
        await home.log(
            entry_record(0, home.commit(1, 0, b"v" * 300, place)),
            entry_record(0, home.commit(2, 1, b"v" * 300, home.place(b"v" * 300))),
            entry_record(1, leave(1, 5)),
        )
    home.segment.unlink()
    async with home.life() as found:
        assert found is not None and found.lacking == {0: 2}, "a shard without values lacks none"
        assert held_by(found) == [] and home.store.slabs.used_bytes == 0


async def test_who_goes_on_with_a_log_that_lacks_values(home: Home) -> None:
    """Goal: the rules of `is_whole`. Method: alone in sync, or nobody ever led: there is no better copy; else there
    is."""
    found = ShardRecovery(home, lacking={3: 1})  # type: ignore[arg-type]
    a, b, before = Member("a", 5), Member("b", 2), Member("a", 3)
    alone, both = ShardConfig(2, before, frozenset({before})), ShardConfig(2, b, frozenset({a, b}))
    assert found.is_whole(1, (both, 9), "a"), "nothing is lacking there"
    assert found.is_whole(3, None, "a")
    assert found.is_whole(3, (alone, 9), "a"), "an earlier life of the same node"
    assert not found.is_whole(3, (both, 9), "a")
    assert not found.is_whole(3, (alone, 9), "b")


@pytest.mark.parametrize("record", [b"x" * 30, reset_record(0, 1, 1)[:-1], b"\x03\x01" + bytes(14)])
async def test_another_kind_of_journal_is_refused(home: Home, record: bytes) -> None:
    """Goal: SetupError that names the fix. Method: records of no such journal."""
    async with home.life(recover=False):
        await home.log(record)
    with pytest.raises(SetupError, match="ucxkv forget"):
        async with home.life():
            pass


async def test_places_that_contradict_each_other_are_refused(home: Home) -> None:
    """Goal: a journal of another segment does not start. Method: two live blocks in one place, both proven."""
    async with home.life(recover=False):
        place = home.place(b"v" * 300)
        await home.log(
            entry_record(0, home.commit(1, 0, b"v" * 300, place)), entry_record(1, home.commit(1, 1, b"v" * 300, place))
        )
    with pytest.raises(SetupError, match="does not fit the segment"):
        async with home.life():
            pass
