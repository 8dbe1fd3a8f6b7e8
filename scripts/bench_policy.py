"""What does an eviction policy cost for each block, lessons and evictions included?

    python scripts/bench_policy.py [--blocks 20000] [--json] [--quick]

A full tier of --blocks blocks takes requests of --batch blocks: half of each is a hit on a recurring head, half is new
and pushes as many out, so a block is either used again or comes and makes one go. Times are of `Residents` and policy
together, CPU of this thread, per block of all requests. Bound: an ordered dictionary that does the same as plain LRU,
without leaves, chains or lessons, in turns with the policy.

Rows "in the directory" are of a node's directory, its log of decisions included, that takes chains of --batch blocks,
one a millisecond, and evicts as many: "put" is what a put takes, "all" with evictions and ticks. Bound: the same
directory with plain LRU and no log, in turns.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
from benchlib import Bench, main, parser

from ucxkv.cli.measure import Row
from ucxkv.directory import Directory, SlotTable, events, table_bytes
from ucxkv.policy import EvictionPolicy, LeafLinks, LruPolicy, Residents, S3FifoPolicy, TucPolicy
from ucxkv.policy.cost import PrefillCost
from ucxkv.policy.decisions import DecisionLog

_ROUNDS, _HEADS = 5, 16
_BLOCK = 1 << 16
_PREFILL = PrefillCost.of_model(parameters=8e9, layers=32, width=4096, flops=400e12)
POLICIES: dict[str, Callable[[LeafLinks], EvictionPolicy]] = {
    "lru": LruPolicy,
    "s3fifo": S3FifoPolicy,
    "tuc": lambda links: TucPolicy(links, lambda places: _PREFILL.seconds(places, 512)),
}


class Load:
    """Requests over one tier."""

    def __init__(self, policy: str, blocks: int, batch: int) -> None:
        self.half = max(1, batch // 2)
        self.blocks = blocks
        self.tier = Residents(blocks + batch, POLICIES[policy])
        self.places = 512 * np.arange(2 * self.half, dtype=np.int64)
        self.fresh, self.now = 0, 0
        self.heads = [self.tier.insert(-1, self.names(), self.places[: self.half], 0) for _ in range(_HEADS)]
        for slots in self.heads:
            self.tier.hold(int(slots[-1]))
        self.plain: OrderedDict[int, None] = OrderedDict()
        for _ in range(2 * blocks // self.half):
            self.request()

    def names(self) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
        """Names nobody has had."""
        self.fresh += self.half
        return np.arange(self.fresh - self.half, self.fresh, dtype=np.uint64)

    def request(self) -> None:
        """Half hits, half new."""
        self.now += 20
        tier, head = self.tier, self.heads[self.now // 20 % _HEADS]
        tier.use(head, self.now)
        tier.insert(int(head[-1]), self.names(), self.places[self.half :], self.now)
        while len(tier) > self.blocks:
            tier.evict()

    def plain_request(self) -> None:
        """The same for a dictionary."""
        plain = self.plain
        self.now += 20
        for block in range(self.half):
            plain[-1 - block] = None
            plain.move_to_end(-1 - block)
        for block in self.names().tolist():
            plain[block] = None
        while len(plain) > self.blocks:
            plain.popitem(last=False)


def _aligned(nbytes: int) -> memoryview:
    """Memory that begins at a cache line."""
    memory = np.zeros(nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + nbytes].data


class DirectoryLoad:
    """A full directory of a node that takes puts. log: with decisions."""

    def __init__(self, policy: str, blocks: int, batch: int, *, has_log: bool) -> None:
        capacity = blocks + 2 * blocks // 16 + batch
        table = SlotTable(_aligned(table_bytes(capacity)), capacity, epoch=1, seed=7)
        log = DecisionLog(16_384) if has_log else None
        self.core = Directory(table, policy=POLICIES[policy], grace_ns=1, decisions=log)
        self.blocks, self.batch, self.now_ns, self.offset = blocks, batch, 10**9, 0
        self.random = np.random.default_rng(3)
        self.put_s = 0.0
        self.regions, self.lengths = np.zeros(batch, np.uint16), np.full(batch, _BLOCK, np.uint32)
        self.sums = np.zeros(batch, np.uint64)
        for _ in range(2 * blocks // batch):
            self.request()

    def request(self) -> None:
        """One chain comes; when a sixteenth too many are there, so many go."""
        self.now_ns += 1_000_000
        keys = self.random.bytes(16 * self.batch)
        offsets = np.arange(self.offset, self.offset + _BLOCK * self.batch, _BLOCK, dtype=np.uint64)
        self.offset += _BLOCK * self.batch
        event = events.Put(keys, bytes(16) + keys[:-16], self.regions, offsets, self.lengths, self.sums)
        start = time.thread_time()
        self.core.handle(event, self.now_ns)
        self.put_s += time.thread_time() - start
        due = self.core.next_ns()
        if due is not None and due <= self.now_ns:
            self.core.handle(events.Tick(), self.now_ns)
        if self.core.blocks > self.blocks + self.blocks // 16:
            self.core.handle(events.Evict(_BLOCK * (self.blocks // 16), limit=1 << 30), self.now_ns)


def in_directory(policy: str, blocks: int, batch: int, requests: int) -> list[Row]:
    """Two rows: of puts alone, and of all."""
    loads = {"policy": DirectoryLoad(policy, blocks, batch, has_log=True),
             "plain": DirectoryLoad("lru", blocks, batch, has_log=False)}  # fmt: skip
    times: dict[tuple[str, str], list[float]] = {(name, what): [] for name in loads for what in ("put", "all")}
    for _ in range(_ROUNDS):
        for name, load in loads.items():
            load.put_s, start = 0.0, time.thread_time()
            for _ in range(requests):
                load.request()
            scale = 1e6 / (requests * batch)
            times[name, "all"].append((time.thread_time() - start) * scale)
            times[name, "put"].append(load.put_s * scale)
    rows: list[Row] = []
    for what in ("put", "all"):
        found, plain = times["policy", what], times["plain", what]
        cost, limit = float(np.median(found)), float(np.median(plain))
        rows.append({
            "op": f"{policy} in the directory, {what}", "batch": batch, "p50_us": round(cost, 3),
            "limit_us": round(limit, 3), "limit_name": "lru without a log", "ratio": round(cost / limit, 2),
            "verified": loads["policy"].core.stats().blocks > 0,
            "spread": round((max(found) - min(found)) / cost, 3),
        })  # fmt: skip
    return rows


def measured(policy: str, blocks: int, batch: int, requests: int) -> Row:
    """One row."""
    load = Load(policy, blocks, batch)
    times: dict[str, list[float]] = {"policy": [], "plain": []}
    for _ in range(_ROUNDS):
        for name, call in (("policy", load.request), ("plain", load.plain_request)):
            start = time.thread_time()
            for _ in range(requests):
                call()
            times[name].append((time.thread_time() - start) / (requests * 2 * load.half) * 1e6)
    cost, limit = (float(np.median(times[name])) for name in ("policy", "plain"))
    load.tier.check()
    return {
        "op": f"{policy}, a block", "batch": 2 * load.half, "p50_us": round(cost, 3), "limit_us": round(limit, 3),
        "limit_name": "dict", "ratio": round(cost / limit, 2), "verified": True,
        "spread": round((max(times["policy"]) - min(times["policy"])) / cost, 3),
    }  # fmt: skip


def run() -> int:
    options = parser(__doc__, sizes="")
    options.add_argument("--blocks", type=int, default=20_000, help="blocks of the tier (default 20000)")
    options.add_argument("--batch", default="8,32,256", help="blocks of a request (default 8,32,256)")
    arguments = options.parse_args()
    batches = [int(text) for text in arguments.batch.split(",")]
    work = 4_000 if arguments.quick else 40_000

    def step(policy: str, batch: int) -> Callable[[], object]:
        async def go() -> Row:
            return measured(policy, arguments.blocks, batch, max(4, work // batch))

        return go

    def whole(policy: str, batch: int) -> Callable[[], object]:
        async def go() -> list[Row]:
            return in_directory(policy, arguments.blocks, batch, max(4, work // batch))

        return go

    bench = Bench("policy", "policies: CPU time a block", arguments)
    steps = [(f"{name} {batch}", step(name, batch)) for name in POLICIES for batch in batches]
    steps += [(f"{name} {batch} in the directory", whole(name, batch)) for name in POLICIES for batch in (1, *batches)]
    bench.run(steps, blocks=arguments.blocks)  # type: ignore[arg-type]
    return 0


if __name__ == "__main__":
    main(run)
