"""Real nodes that find each other through SQLite and etcd: deaths, returns, outages, two of one name."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ucxkv
from tests.conftest import blocks, keys
from tests.control.etcd_server import WHY_NOT, EtcdServer
from tests.control.test_contract import put
from tests.harness import ROOT, NodeProcess, wait_until
from ucxkv import errors
from ucxkv.control import open_control

pytestmark = [pytest.mark.faults, pytest.mark.control]


class Plane:
    """A control plane that can be taken away. url: for nodes and clients."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.etcd = EtcdServer() if kind == "etcd" else None
        self.path = folder / "cluster.db"
        self.url = f"sqlite://{self.path}"
        if self.etcd is not None:
            self.etcd.start()
            self.url = self.etcd.url("test")

    @contextlib.contextmanager
    def gone(self) -> Iterator[None]:
        """etcd is killed and comes back; the file is held by somebody who does not let go."""
        if self.etcd is not None:
            self.etcd.kill()
            yield
            self.etcd.start()
            return
        with contextlib.closing(sqlite3.connect(self.path, isolation_level=None)) as db:
            db.execute("begin immediate")
            yield
            db.execute("rollback")

    def close(self) -> None:
        if self.etcd is not None:
            self.etcd.__exit__(None, None, None)


@pytest.fixture(
    params=["sqlite", pytest.param("etcd", marks=pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "it is here"))]
)
def plane(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Plane]:
    """Each engine in turn."""
    made = Plane(request.param, tmp_path)
    yield made
    made.close()


def start(plane: Plane, name: str, lease_ms: int = 5000) -> NodeProcess:
    return NodeProcess(name, cluster=plane.url, cluster_lease_ms=str(lease_ms))


async def sees(url: str, nodes: int) -> dict[str, ucxkv.NodeStatus]:
    """Connect by the control plane until every node sees `nodes` of them; what they report."""
    found: dict[str, ucxkv.NodeStatus] = {}

    async def all_there() -> bool:
        with contextlib.suppress(errors.Unavailable):
            async with ucxkv.connect(url, timeout_s=10) as kv:
                found.clear()
                found.update((status.name, status) for status in await kv.status())
        return len(found) == nodes and all(
            status.numbers["nodes"] == nodes == status.numbers["cluster_members"] for status in found.values()
        )

    await wait_until(all_there, f"{nodes} nodes see each other", 40)
    return found


@pytest.mark.timeout(240)
async def test_three_nodes_find_each_other_one_is_killed_and_returns(plane: Plane) -> None:
    """Goal: membership by the control plane alone (issue 4). Method: three nodes without --join; a client by URL puts
    and gets; kill -9 one: the others miss it; the same name starts again and is another incarnation; a clean stop is
    seen without waiting for the lease; `ucxkv status` shows all that."""
    with contextlib.ExitStack() as running:
        nodes = {name: running.enter_context(start(plane, name)) for name in "abc"}
        before = await sees(plane.url, 3)
        assert all(status.numbers["incarnation"] >= 1 for status in before.values())
        assert all(0 < status.numbers["cluster_lease_s"] <= 5 for status in before.values())
        async with ucxkv.connect(plane.url) as kv:
            names, values = keys(60), blocks(60, 1000)
            assert (await kv.put_many(names, values)).ok
            assert (await kv.get_many(names)).hits == 60
        nodes["b"].kill()
        await sees(plane.url, 2)
        nodes["b"] = running.enter_context(start(plane, "b"))
        after = await sees(plane.url, 3)
        assert after["b"].numbers["incarnation"] > before["b"].numbers["incarnation"]
        command = [sys.executable, "-m", "ucxkv", "status", "--json", "-a", plane.url]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60, cwd=ROOT)
        shown = [json.loads(line) for line in done.stdout.splitlines()]
        assert {node["name"] for node in shown} == {"a", "b", "c"} and all(node["incarnation"] for node in shown)
        assert all(node["facts"]["cluster_lease"] == "held" for node in shown)
        del command[4]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60, cwd=ROOT)
        assert "incarnation" in done.stdout and "cluster lease" in done.stdout, done.stdout + done.stderr
        assert await asyncio.to_thread(nodes["c"].stop) == 0
        control = await open_control(plane.url)
        assert [entry.key for entry in (await control.list("members/"))[0]] == ["members/a", "members/b"]
        await control.aclose()


@pytest.mark.timeout(240)
async def test_without_its_control_plane_a_node_serves_until_its_lease_ends_then_recovers_alone(plane: Plane) -> None:
    """Goal: "serve until the lease ends, then stop, say so, recover alone". Method: the plane goes away for longer than
    the lease; puts are refused and status says why; it comes back, and so does the node, with what it held, as the next
    incarnation."""
    with start(plane, "a") as node:
        async with ucxkv.connect(node.address, timeout_s=5) as kv:
            names, values = keys(2), blocks(2, 1000)
            assert (await kv.put(names[0], values[0])).name == "STORED"
            with plane.gone():

                async def refused() -> bool:
                    try:
                        return (await kv.put(names[1], values[1])).name not in ("STORED", "ALREADY")
                    except errors.Unavailable:
                        return True

                await wait_until(refused, "the node stops serving", 60)
                (status,) = await kv.status()
                assert status.numbers["cluster_lease_s"] == 0
                assert status.facts["cluster_lease"].startswith("lost")
                await wait_until(lambda: "membership.lost" in node.log(), "the node says so", 5)

            async def serves() -> bool:
                with contextlib.suppress(errors.Unavailable):
                    return await kv.get(names[0]) is not None
                return False

            await wait_until(serves, "the node serves again by itself", 40)
            (status,) = await kv.status()
            assert status.numbers["incarnation"] >= 2 and status.numbers["cluster_lease_losses"] >= 1
            assert status.facts["cluster_lease"] == "held"
            assert (await kv.put(names[1], values[1])).name in ("STORED", "ALREADY")


@pytest.mark.timeout(240)
async def test_a_second_node_of_one_name_is_refused_while_the_first_lives(plane: Plane) -> None:
    """Goal: two nodes with one name (issue 4). Method: the second ends with the first's address and the fix; the first
    serves on. A stopped first one loses its name to the second; when it wakes it does not serve."""
    with start(plane, "a", 4000) as first:
        with pytest.raises(RuntimeError, match=r"named 'a' already.*--name"):
            await asyncio.to_thread(start, plane, "a", 4000)
        async with ucxkv.connect(first.address) as kv:
            assert (await kv.put(keys(1)[0], b"x" * 100)).name == "STORED"
        first.freeze()
        second = await asyncio.to_thread(start, plane, "a", 4000)
        with second:
            first.thaw()
            async with ucxkv.connect(plane.url) as kv:
                (status,) = await kv.status()
                assert status.address == second.address and status.numbers["incarnation"] > 1

            async def says_so() -> bool:
                async with ucxkv.connect(first.address) as kv:
                    said = [status.facts["cluster_lease"] for status in await kv.status()]  # none while it is redialled
                    return any(text.startswith("lost") and "already" in text for text in said)

            await wait_until(says_so, "the first one knows that its name is another's", 60)


async def test_a_cluster_of_a_newer_release_is_left_alone(plane: Plane) -> None:
    """Goal: a value of a newer version (issue 4). Method: the cluster's record says version 7; the node does not start,
    names both versions, and the record is as it was."""
    control = await open_control(plane.url)
    entry = await put(control, "cluster", b'{"version":7}')
    with pytest.raises(RuntimeError, match=r"version 7.*version 1 or older.*upgrade"):
        await asyncio.to_thread(start, plane, "a")
    assert await control.get("cluster") == entry
    assert (await control.list("members/"))[0] == []
    await control.aclose()


async def test_a_client_of_an_empty_or_wrong_cluster_is_told(plane: Plane) -> None:
    """Goal: errors that say what to do. Method: nobody registered; URLs that are none."""
    with pytest.raises(errors.Unavailable, match=r"no node is registered.*--cluster"):
        await ucxkv.connect(plane.url)
    for url in ("sqlite://relative.db", "etcd://host/name", "etcd://host:1/"):
        with pytest.raises(errors.SetupError, match="cluster-name"):
            ucxkv.connect(url)
