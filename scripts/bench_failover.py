"""How long is a shard out of service when its leader is killed, and what does a replica cost a durable put?

    python scripts/bench_failover.py [--rounds 7] [--lease-ms 2000] [--json] [--quick]

Three nodes of one cluster on this machine (SQLite control plane), two copies of each shard. Per round: kill -9 of the
node that leads most shards; from then on a client puts one durable block into each of these shards, and reads one that
was put before, until all have answered; the slowest counts. Bound: the lease, since nobody may take over before it is
over by everybody's clock. Goal: serving again within the lease + 1 s. Then the node starts again, and the next round
begins when all shards have their two copies.

"put, N copies": one durable put of 4 KiB, awaited, in clusters of one and of two copies, no other load. Bound: the one
without a replica; a replica adds one message to it and one answer, a copy of the value and its journal's write.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchlib import Bench, main, parser

import ucxkv
from ucxkv import PutStatus, ReadStatus
from ucxkv.cli.launch import NodeProcess, start_node, stop_nodes
from ucxkv.cli.measure import Row, Series, row
from ucxkv.control import open_control
from ucxkv.control.cluster import Cluster, ClusterView
from ucxkv.node.state import forget
from ucxkv.sharding import ShardRule

SHARDS = 8
VALUE_BYTES = 4096
WAIT_S = 60.0


class Nodes:
    """Nodes of one cluster in one folder. copies: of each shard."""

    def __init__(self, folder: Path, count: int, copies: int, lease_ms: int) -> None:
        self.url = f"sqlite://{folder}/cluster.db"
        self._folder, self._copies, self._lease_ms = folder, copies, lease_ms
        self.names = [f"bench-{index + 1}" for index in range(count)]
        self.running: dict[str, NodeProcess] = {}

    def start(self, *names: str) -> None:
        """Start these; READY when it returns."""
        for name in names:
            flags = ["--cluster", self.url, "--cluster-lease-ms", str(self._lease_ms), "--cluster-shards", str(SHARDS)]
            flags += ["--replicas", str(self._copies), "--durability", "process"]
            flags += ["--state-dir", str(self._folder / name)]
            self.running[name] = start_node(name, host_bytes="256MiB", arguments=flags)
        for name in names:
            self.running[name].wait_ready(time.monotonic() + WAIT_S)

    def kill(self, name: str) -> None:
        """kill -9."""
        node = self.running.pop(name)
        node.process.kill()
        node.process.wait()
        node.release()

    def close(self) -> None:
        """End all of it, and give their memory back. Idempotent."""
        stop_nodes(list(self.running.values()))
        self.running.clear()
        for name in self.names:
            if (self._folder / name / "node.json").exists():
                forget(self._folder / name)

    async def settled(self) -> ClusterView:
        """Wait until all shards have all their copies, all of them live, and the map stands still."""
        plane = await open_control(self.url)
        try:
            cluster = await Cluster.open(plane)
            until, since, before = time.monotonic() + WAIT_S, time.monotonic(), None
            while True:
                view = await cluster.view()
                alive = {(record.name, record.incarnation) for record in view.members}
                copies = [config.insync for config, _ in view.shards.values()]
                whole = len(copies) == SHARDS and all(len(c) == self._copies and c <= alive for c in copies)
                if view.shards != before:
                    since, before = time.monotonic(), view.shards
                if whole and time.monotonic() - since > 5:
                    return view
                if time.monotonic() > until:
                    raise TimeoutError(f"the cluster did not settle: {view}")
                await asyncio.sleep(0.1)
        finally:
            await plane.aclose()


def root_in(shard: int) -> bytes:
    """A new root key of this shard."""
    rule = ShardRule(SHARDS)
    while True:
        key = os.urandom(16)
        if rule.own(key) == shard:
            return key


def run() -> int:
    """See the module."""
    options = parser(__doc__, sizes="")
    options.add_argument("--rounds", type=int, default=0, help="kills (default 7; 3 with --quick)")
    options.add_argument("--lease-ms", type=int, default=2000, help="the nodes' lease (default 2000)")
    arguments = options.parse_args()
    rounds = arguments.rounds or (3 if arguments.quick else 7)
    puts = 300 if arguments.quick else 1500
    with tempfile.TemporaryDirectory() as folder:
        clusters: list[Nodes] = []

        def begin(count: int, copies: int) -> Nodes:
            place = Path(folder) / f"{count}-{copies}"
            place.mkdir()
            nodes = Nodes(place, count, copies, arguments.lease_ms)
            clusters.append(nodes)
            nodes.start(*nodes.names)
            return nodes

        try:
            three = begin(3, 2)
            bench = Bench("failover", "failover and replication", arguments, list(three.running.values()))

            async def kills() -> list[Row]:
                return await _kills(three, rounds, arguments.lease_ms)

            async def costs() -> list[Row]:
                three.close()
                return await _costs(begin(1, 1), begin(2, 2), puts)

            bench.run([("kill -9 of a leader", kills), ("durable puts", costs)], lease_ms=arguments.lease_ms)
        finally:
            for nodes in clusters:
                nodes.close()
    return 0


async def _kills(nodes: Nodes, rounds: int, lease_ms: int) -> list[Row]:
    series = {name: Series() for name in ("put", "get", "lease")}
    for _ in range(rounds):
        view = await nodes.settled()
        led = Counter(config.leader.name for config, _ in view.shards.values())
        victim = led.most_common(1)[0][0]
        shards = [number for number, (config, _) in view.shards.items() if config.leader.name == victim]
        async with ucxkv.connect(nodes.url, timeout_s=WAIT_S) as kv:
            value = os.urandom(VALUE_BYTES)
            known = {shard: root_in(shard) for shard in shards}
            for root in known.values():
                assert await kv.put(root, value, durable=True) is PutStatus.STORED
            began = time.perf_counter_ns()
            nodes.kill(victim)
            done = await asyncio.gather(
                *(_put_again(kv, shard, value) for shard in shards), *(_get_again(kv, r, value) for r in known.values())
            )
            series["put"].start_round().append(max(done[: len(shards)]) - began)
            series["get"].start_round().append(max(done[len(shards) :]) - began)
            series["lease"].start_round().append(lease_ms * 1_000_000)
        nodes.start(victim)
    return [
        row("failover", f"{op} in every shard it led", series[op], path="auto", verified=True,
            limit=series["lease"], limit_name="the lease", concurrency=len(shards))
        for op in ("put", "get")
    ]  # fmt: skip


async def _put_again(kv: ucxkv.Client, shard: int, value: bytes) -> int:
    """When a durable put into this shard was acknowledged."""
    while True:
        if await kv.put(root_in(shard), value, durable=True, deadline_s=WAIT_S) is PutStatus.STORED:
            return time.perf_counter_ns()
        await asyncio.sleep(0.01)


async def _get_again(kv: ucxkv.Client, root: bytes, value: bytes) -> int:
    """When a block that was there before was read again. A miss that says it is certain would be a loss."""
    while True:
        result = await kv.get_many([root], root=root)
        if result.status[0] == ReadStatus.HIT:
            assert result.values == [value]
            return time.perf_counter_ns()
        assert result.status[0] == ReadStatus.UNAVAILABLE, "an acknowledged block is missing"
        await asyncio.sleep(0.005)


async def _costs(one: Nodes, two: Nodes, puts: int) -> list[Row]:
    series = [Series(), Series()]
    value = os.urandom(VALUE_BYTES)
    await one.settled()
    await two.settled()
    async with ucxkv.connect(one.url) as kv_one, ucxkv.connect(two.url) as kv_two:
        for number in range(6):
            for kv, times in ((kv_one, series[0]), (kv_two, series[1])):
                found = times.start_round() if number else []  # the first round warms up
                for _ in range(puts // 5):
                    key = os.urandom(16)
                    began = time.perf_counter_ns()
                    status = await kv.put(key, value, durable=True)
                    found.append(time.perf_counter_ns() - began)
                    assert status is PutStatus.STORED
                assert await kv.get(key) == value
    fields: dict[str, Any] = {"path": "auto", "bytes": VALUE_BYTES, "concurrency": 1, "verified": True}
    return [
        row("failover", "put, 1 copy", series[0], **fields),
        row("failover", "put, 2 copies", series[1], limit=series[0], limit_name="put, 1 copy", **fields),
    ]


if __name__ == "__main__":
    main(run)
