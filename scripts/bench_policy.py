"""What does an eviction policy cost for each block, lessons and evictions included?

    python scripts/bench_policy.py [--blocks 20000] [--json] [--quick]

A full tier of --blocks blocks takes requests of --batch blocks: half of each is a hit on a recurring head, half is new
and pushes as many out, so a block is either used again or comes and makes one go. Times are of `Residents` and policy
together, CPU of this thread, per block of all requests. Bound: an ordered dictionary that does the same as plain LRU,
without leaves, chains or lessons, in turns with the policy.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
from benchlib import Bench, main, parser

from ucxkv.cli.measure import Row
from ucxkv.policy import EvictionPolicy, LeafLinks, LruPolicy, Residents, S3FifoPolicy, TucPolicy
from ucxkv.policy.cost import PrefillCost

_ROUNDS, _HEADS = 5, 16
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

    bench = Bench("policy", "policies: CPU time a block", arguments)
    steps = [(f"{name} {batch}", step(name, batch)) for name in POLICIES for batch in batches]
    bench.run(steps, blocks=arguments.blocks)  # type: ignore[arg-type]
    return 0


if __name__ == "__main__":
    main(run)
