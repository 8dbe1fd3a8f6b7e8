"""How long does a node's loop stand still for the directory, with two million blocks in it?

    python scripts/bench_turns.py [--blocks 2000000] [--policy tuc] [--json] [--quick]

A turn is one call from the loop, in which nobody else is served; times are CPU of this thread, since a turn waits for
nothing. Rows "lost": a directory with a disk tier whose table
is full of chains of 32 cold blocks is told that copies are gone: of a chain's last block, of its first one (and all 32
go), of a datafile's worth of whole chains, and that a value in memory is bad. Bound: a Delete of as many blocks, in
turns: both take each block out of the table once. Row "trim": a table that is full is given room, a 128th of it, as a
node with a disk does. Row "places": which copies were in that datafile. Row "evict": a
store of --host-bytes takes chains of 16 blocks of 16 KiB, makes room between its watermarks as a node does, and every
turn in which it does so counts; `longest_us` is the worst. Bound: 1 ms.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
from benchlib import Bench, main, parser

from ucxkv.cli.measure import Row, Series, row
from ucxkv.directory import Directory, SlotTable, events, table_bytes, tiering
from ucxkv.node.config import NodeConfig
from ucxkv.node.disk.places import Places
from ucxkv.node.policy import NodePolicy
from ucxkv.node.store import HostStore
from ucxkv.protocol import messages as m
from ucxkv.tiers.datafiles import Place

_CHAIN, _LENGTH = 32, 64 << 10
_FILE_BLOCKS = (256 << 20) // _LENGTH
_VALUE, _BATCH, _SESSION = 16 << 10, 16, 7
_TURN_US = 1000.0


class ColdTable:
    """A directory that is full of cold chains, and their keys in the order in which they came."""

    def __init__(self, blocks: int, policy: str) -> None:
        blocks -= blocks % _FILE_BLOCKS
        capacity = blocks + _FILE_BLOCKS
        memory = np.zeros(table_bytes(capacity) + 64, np.uint8)
        memory = memory[-memory.ctypes.data % 64 :]
        table = SlotTable(memory.data, capacity, epoch=1, seed=7)
        config = NodeConfig(policy=policy, disk=("folder",), grace_ms=1)  # type: ignore[arg-type]
        self.core: Directory = NodePolicy(config).directory(table, config)
        self.random = np.random.default_rng(5)
        self.now_ns, self.handles = 10**9, 0
        self.keys = b"".join(self.adopt(_FILE_BLOCKS) for _ in range(blocks // _FILE_BLOCKS))
        self._next = iter(range(0, blocks, _CHAIN))

    def adopt(self, count: int) -> bytes:
        """Whole chains come, on disk only; their keys."""
        keys = self.random.bytes(16 * count)
        parents = bytearray(16) + keys[:-16]
        for at in range(0, count, _CHAIN):
            parents[16 * at : 16 * at + 16] = bytes(16)
        handles = np.arange(self.handles + 1, self.handles + count + 1, dtype=np.uint32)
        self.handles += count
        lengths, sums = np.full(count, _LENGTH, np.uint32), np.zeros(count, np.uint64)
        taken = self.core.handle(tiering.AdoptCold(keys, bytes(parents), handles, lengths, sums), self.now_ns).reply
        assert taken.taken.all()
        return keys

    def chains(self, count: int) -> bytes:
        """Keys of so many chains that are still whole."""
        return b"".join(self.keys[16 * at : 16 * (at + _CHAIN)] for at in (next(self._next) for _ in range(count)))

    def handles_of(self, keys: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
        """The copies of these cold blocks."""
        slots = self.core.table.find(keys)
        return self.core.table.records["offset"][slots].astype(np.uint32)

    def timed(self, event: events.Event[object]) -> int:
        """Nanoseconds that this event took."""
        self.now_ns += 50_000_000
        self.core.handle(events.Tick(), self.now_ns)
        start = time.thread_time_ns()
        self.core.handle(event, self.now_ns)
        return time.thread_time_ns() - start

    def warm(self, keys: bytes) -> None:
        """These blocks are in memory."""
        n = len(keys) // 16
        event = tiering.Warm(keys, self.handles_of(keys), np.arange(n, dtype=np.uint64), np.zeros(n, np.uint64))
        assert self.core.handle(event, self.now_ns).reply.taken.all()


def losses(table: ColdTable, rounds: int) -> Iterator[Row]:
    """The rows "lost"."""
    whole = _FILE_BLOCKS // _CHAIN

    def lost(keys: bytes, *, is_damage: bool = True) -> tiering.CopiesLost:
        return tiering.CopiesLost(keys, table.handles_of(keys), is_damage=is_damage)

    def drop(keys: bytes) -> events.Drop:
        table.warm(keys)
        return events.Drop(keys[-16:])

    cases: list[tuple[str, int, int, Callable[[bytes], events.Event[object]], slice]] = [
        ("a chain's last copy is bad", 1, 1, lambda keys: lost(keys[-16:]), slice(-16, None)),
        ("a value in memory is bad", 1, 1, drop, slice(-16, None)),
        ("a chain's first copy is bad", 1, _CHAIN, lambda keys: lost(keys[:16]), slice(None)),
        ("a datafile is used again", whole, _FILE_BLOCKS, lambda keys: lost(keys, is_damage=False), slice(None)),
    ]
    for name, chains, touched, event, share in cases:
        found, bound = Series(), Series()
        for _ in range(rounds):
            found.start_round().append(table.timed(event(table.chains(chains))))
            bound.start_round().append(table.timed(events.Delete(table.chains(chains)[share])))
        one = row("turns", f"lost: {name}", found, bound, batch=touched, limit_name="Delete of as many", verified=True)
        yield one | {"longest_us": longest(found), "us_a_block": round(found.p50_us / touched, 2)}


def trims(table: ColdTable, rounds: int) -> Row:
    """The row "trim"."""
    found, count = Series(), table.core.table.capacity // 128
    for _ in range(rounds):
        found.start_round().append(table.timed(tiering.Trim(count)))
    return row("turns", "trim: a full table", found, batch=count, verified=True) | {
        "longest_us": longest(found), "us_a_block": round(found.p50_us / count, 2)
    }  # fmt: skip


def places_of_a_file(blocks: int, rounds: int) -> Row:
    """The row "places": which copies a file had, among all."""
    places, found = Places(blocks), Series()
    for file in range(blocks // _FILE_BLOCKS):
        at = range(file * _FILE_BLOCKS, (file + 1) * _FILE_BLOCKS)
        keys = [each.to_bytes(16, "little") for each in at]
        places.add(keys, [Place(file, 1, 4096 * each, _LENGTH, 0, 0, 0) for each in at], [0] * _FILE_BLOCKS)
    for file in range(rounds):
        start = time.thread_time_ns()
        handles = places.of_file(0, file, 1)
        found.start_round().append(time.thread_time_ns() - start)
        assert len(handles) == _FILE_BLOCKS
    return row("turns", "places: a datafile is used again", found, batch=_FILE_BLOCKS, verified=True) | {
        "longest_us": longest(found), "us_a_block": round(found.p50_us / _FILE_BLOCKS, 2)
    }  # fmt: skip


def longest(series: Series) -> float:
    """The worst of all, in us."""
    return round(max(map(max, series.rounds)) / 1e3, 1)


class FullStore:
    """A store that makes room for one put after the other; what each turn took in which it did."""

    def __init__(self, host_bytes: int, policy: str) -> None:
        self.due_ns: int | None = None
        config = NodeConfig(name="turns", host_bytes=host_bytes, policy=policy)  # type: ignore[arg-type]
        self.store = HostStore(config, 1, 1, self._on_due)
        self.random = np.random.default_rng(6)
        self.turns = Series()

    def _on_due(self, due_ns: int) -> None:
        self.due_ns = due_ns if self.due_ns is None else min(self.due_ns, due_ns)

    def turn(self, call: Callable[[], object]) -> object:
        """One call of the loop."""
        before, start = self.store.counts["evicted"], time.thread_time_ns()
        answer = call()
        took = time.thread_time_ns() - start
        if self.store.counts["evicted"] > before and self.turns.rounds:
            self.turns.rounds[-1].append(took)
        return answer

    def let_time_pass(self) -> None:
        """As the node's timer does: one turn, when something is due."""
        if self.due_ns is not None and self.due_ns <= time.monotonic_ns():
            self.due_ns = None
            self.turn(lambda: self.store.tick(time.monotonic_ns()))
            due_ns = self.store.next_ns()
            if due_ns is not None:
                self._on_due(due_ns)

    def put(self) -> bool:
        """A chain comes; False: there was no room yet."""
        store = self.store
        granted = self.turn(lambda: store.grant(_SESSION, _VALUE, _BATCH, time.monotonic_ns())[0])
        assert isinstance(granted, m.Granted)
        n = len(granted.offsets) // 8
        keys = self.random.bytes(16 * n)
        put = m.Put(
            keys=keys, parents=(bytes(16) + keys)[: 16 * n], regions=bytes(2 * n), offsets=granted.offsets,
            lengths=np.full(n, _VALUE, np.uint32).tobytes(), sums=bytes(8 * n), epoch=1,
        )  # fmt: skip
        if n:
            assert not any(store.put(_SESSION, put, time.monotonic_ns()).status)
        self.let_time_pass()
        return bool(n)

    def fill(self, puts: int) -> int:
        """So many chains come; how often there was no room."""
        waits = 0
        while puts:
            done = self.put()
            puts -= done
            waits += not done
            if not done:
                time.sleep(0.001)
                self.let_time_pass()
        return waits


def evictions(host_bytes: int, policy: str, rounds: int) -> Row:
    """The row "evict"."""
    full = FullStore(host_bytes, policy)
    try:
        puts = host_bytes // _VALUE // _BATCH
        full.fill(puts)
        waits = evicted = 0
        for _ in range(rounds):
            full.turns.start_round()
            before = full.store.counts["evicted"]
            waits += full.fill(puts // 2)
            evicted += full.store.counts["evicted"] - before
        full.turns.rounds = [each for each in full.turns.rounds if each]
        full.store.directory.check() if host_bytes <= 64 << 20 else None
        turns = sum(map(len, full.turns.rounds))
        return row("turns", f"evict: {policy}", full.turns, bytes=_VALUE, batch=round(evicted / turns)) | {
            "limit_us": _TURN_US, "limit_name": "a turn", "ratio": round(longest(full.turns) / _TURN_US, 2),
            "longest_us": longest(full.turns), "waits": waits, "verified": True,
        }  # fmt: skip
    finally:
        full.store.close()


def run() -> int:
    options = parser(__doc__, sizes="")
    options.add_argument("--blocks", type=int, default=2_000_000, help="blocks of the table (default 2000000)")
    options.add_argument("--policy", choices=("lru", "s3fifo", "tuc"), default="tuc", help="the node's (default tuc)")
    arguments = options.parse_args()
    rounds = 5 if arguments.quick else 15

    async def lost() -> list[Row]:
        table = ColdTable(arguments.blocks, arguments.policy)
        return [*losses(table, rounds), trims(table, rounds), places_of_a_file(arguments.blocks, rounds)]

    async def evict() -> Row:
        return evictions(arguments.host_bytes, arguments.policy, rounds)

    bench = Bench("turns", "turns of the node's loop", arguments)
    bench.run([("lost", lost), ("evict", evict)], blocks=arguments.blocks, policy=arguments.policy)
    return 0


if __name__ == "__main__":
    main(run)
