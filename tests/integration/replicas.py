"""Nodes of a cluster that hold each other's shards, for tests, and what clients may rely on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import ucxkv
from tests.harness import NodeProcess, wait_until
from ucxkv import PutStatus, errors
from ucxkv.control import open_control
from ucxkv.control.cluster import Cluster
from ucxkv.journal import Durability, Journal
from ucxkv.node.shards.records import ShardLog, feed
from ucxkv.node.shards.standby import Standby
from ucxkv.node.state import forget
from ucxkv.replication import ShardConfig

__all__ = ["LEASE_MS", "SHARDS", "Trio", "Writer", "connected", "journal_states", "trio_of"]

LEASE_MS = 3000  # shorter ones are lost to pauses of a busy machine
SHARDS = 4


class Trio:
    """Up to three nodes of one cluster on this machine, each with its folder. url: of the control plane."""

    def __init__(self, folder: Path, replicas: int, url: str = "") -> None:
        self.url = url or f"sqlite://{folder}/cluster.db"
        self._folder = folder
        self._replicas = replicas
        self._folders: set[Path] = set()
        self.nodes: dict[str, NodeProcess] = {}

    def start(self, *names: str, durability: str = "process", folder: str = "", **options: str) -> None:
        """Start nodes, again or for the first time. folder: another one than the node's own; options: as for
        NodeProcess."""
        for name in names:
            self.nodes[name] = self.process(name, durability=durability, folder=folder, **options)

    def process(self, name: str, *, durability: str = "process", folder: str = "", **options: str) -> NodeProcess:
        """A node that is nobody's here: the caller ends it."""
        state = {}
        if durability != "memory":
            path = self.state(folder or name)
            self._folders.add(path)
            state = {"state_dir": str(path)}
        flags = {"host_bytes": "64MiB", "cluster_lease_ms": str(LEASE_MS), **options}
        return NodeProcess(
            name, cluster=self.url, cluster_shards=str(SHARDS), replicas=str(self._replicas), durability=durability,
            **state, **flags,
        )  # type: ignore[arg-type]  # fmt: skip

    def state(self, name: str) -> Path:
        """The folder of a node."""
        return self._folder / name

    def kill(self, *names: str) -> None:
        """kill -9."""
        for name in names:
            self.nodes[name].kill()

    def lose_disk(self, name: str) -> None:
        """Folder and memory of a node that does not run are gone."""
        forget(self.state(name))

    def stop_all(self) -> None:
        """End what is left; nothing stays on the host."""
        for node in self.nodes.values():
            node.kill()
        for folder in self._folders:
            if (folder / "node.json").exists():
                forget(folder)

    async def settled(self, followed: int, led: int = SHARDS, seconds: float = 60) -> None:
        """Wait until all shards are led, and followed this often in all, by nodes that the control plane knows as such:
        one that was asleep may not know yet that it is none.
        """

        async def is_so() -> bool:
            with contextlib.suppress(errors.UcxKvError):
                if await self._in_sync() != led + followed:
                    return False
                async with ucxkv.connect(self.url, timeout_s=2) as kv:
                    reports = await kv.status()
                    return (
                        sum(report.numbers["shards_led"] for report in reports) == led
                        and sum(report.numbers["shards_followed"] for report in reports) == followed
                    )
            return False

        await wait_until(is_so, f"{led} shards led, {followed} followed", seconds)

    async def _in_sync(self) -> int:
        """How many in-sync members all shards have together that are registered now."""
        plane = await open_control(self.url)
        try:
            view = await (await Cluster.open(plane)).view()
        finally:
            await plane.aclose()
        alive = {(record.name, record.incarnation) for record in view.members}
        return sum(member in alive for config, _ in view.shards.values() for member in config.insync)

    async def config(self, root: bytes) -> ShardConfig:
        """Who holds the shard of the chain with this root, by the control plane."""
        plane = await open_control(self.url)
        try:
            cluster = await Cluster.open(plane)
            config, _ = await cluster.shard(cluster.rule.own(root))
        finally:
            await plane.aclose()
        assert config is not None, "nobody ever held it"
        return config


@contextlib.contextmanager
def trio_of(folder: Path, replicas: int = 2, url: str = "") -> Iterator[Trio]:
    """Nodes a, b and c, of which none is started; nothing of them is left at the end."""
    made = Trio(folder, replicas, url)
    try:
        yield made
    finally:
        made.stop_all()


class Writer:
    """Durable chains, put one block after the other; what was acknowledged, and deleted, is remembered."""

    def __init__(self, seed: int, chains: int = 12) -> None:
        self._random = random.Random(seed)
        self.chains: list[list[bytes]] = [[] for _ in range(chains)]
        self.values: dict[bytes, bytes] = {}
        self.gone: set[bytes] = set()

    async def put(self, kv: ucxkv.Client, count: int, deadline_s: float = 20) -> int:
        """Put `count` blocks; how many were acknowledged."""
        done = 0
        for _ in range(count):
            chain = self._random.choice(self.chains)
            key, value = self._random.randbytes(16), self._random.randbytes(self._random.choice((10, 4000, 70_000)))
            status = await kv.put(key, value, chain[-1] if chain else None, durable=True, deadline_s=deadline_s)
            if status is PutStatus.STORED:
                chain.append(key)
                self.values[key] = value
                done += 1
            else:
                assert status is PutStatus.UNAVAILABLE, status
        return done

    async def delete_tails(self, kv: ucxkv.Client, count: int, deadline_s: float = 20) -> None:
        """Delete the last blocks of some chains."""
        for chain in self.chains:
            if count and len(chain) > 1:
                count -= 1
                key = chain[-1]
                (status,) = (await kv.delete([key], deadline_s=deadline_s)).tolist()
                assert status in (ucxkv.DeleteStatus.DELETED, ucxkv.DeleteStatus.UNAVAILABLE), status
                chain.pop()
                del self.values[key]
                if status == ucxkv.DeleteStatus.DELETED:
                    self.gone.add(key)

    async def check(self, kv: ucxkv.Client) -> None:
        """All that was acknowledged is there, what was deleted is not, and no chain has a hole."""

        async def is_whole() -> bool:
            for chain in self.chains:
                if chain:
                    match = await kv.match(chain, deadline_s=5)
                    if not match.is_certain:
                        return False
                    assert match.blocks == len(chain), f"{match.blocks} of {len(chain)} are visible"
                    result = await kv.get_many(chain, root=chain[0], deadline_s=5)
                    if (result.status == ucxkv.ReadStatus.UNAVAILABLE).any():
                        return False
                    assert result.values == [self.values[key] for key in chain]
            return True

        await wait_until(is_whole, "every shard answers", 30)
        for key in self.gone:
            assert await kv.get(key) is None, "a deleted block came back"


@contextlib.asynccontextmanager
async def connected(trio: Trio) -> AsyncIterator[ucxkv.Client]:
    """A client of all its nodes; they may be just starting."""
    until_s = time.monotonic() + 20
    while True:
        try:
            kv = await ucxkv.connect(trio.url, timeout_s=10)
            break
        except errors.Unavailable:
            if time.monotonic() > until_s:
                raise
            await asyncio.sleep(0.1)
    try:
        yield kv
    finally:
        await kv.aclose()


async def journal_states(folder: Path) -> dict[int, dict[bytes, tuple[int, int]]]:
    """What the journal of a node that does not run comes to, by shard: key -> (sum, length) of its durable blocks.
    folder: the node's.
    """
    identity = json.loads((folder / "node.json").read_text())["identity"].encode()
    journal, told = await Journal.open(folder / "journal", durability=Durability.PROCESS, identity=identity)
    try:
        logs: dict[int, ShardLog] = {}
        for record in told.snapshot:
            feed(logs, bytes(record))
        for _, _, record in told.records:
            feed(logs, bytes(record))
    finally:
        await journal.aclose()
    out = {}
    for number, log in logs.items():
        standby = Standby(log.rows())
        for logged in log.entries:
            if logged.rows is not None:
                standby.commit(logged.rows)
            elif logged.keys:
                standby.leave(logged.keys)
        rows = standby.rows()
        keys = rows["key"].tobytes()
        out[number] = {
            keys[16 * i : 16 * i + 16]: (int(rows["sum"][i]), int(rows["length"][i])) for i in range(len(rows))
        }
    return out
