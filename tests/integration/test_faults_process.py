"""Forks, event loops and interpreters: a client belongs to one loop of one process, and says so where it does not."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap

import pytest

import ucxkv
from tests.conftest import keys
from tests.harness import ROOT, NodeProcess
from ucxkv import PutStatus


def run_program(source: str, *arguments: str, flags: tuple[str, ...] = ("-W", "error", "-X", "dev")) -> str:
    """Run a program with all warnings as errors; its standard output. Fails when it fails or complains."""
    done = subprocess.run(
        [sys.executable, *flags, "-c", textwrap.dedent(source), *arguments],
        capture_output=True,
        text=True,
        timeout=90,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONASYNCIODEBUG": "0"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stderr.splitlines() if not line.startswith("Executing")]  # slow turns, in debug mode
    complaints = [line for line in lines if "Warning" in line or "never" in line or "pending" in line]
    assert not complaints, done.stderr[-3000:]
    return done.stdout


# ---- fork


async def test_a_forked_child_is_told_to_connect_again(shared_node: NodeProcess) -> None:
    """User voice 23. Method: fork after a put; every call of the child is a ForkError at once; the parent works."""
    (key,) = keys(1)
    for path in ("mapped", "message"):
        async with ucxkv.connect(shared_node.address, path=path) as kv:
            await kv.put(key, b"value")
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                told = b"no"
                try:
                    told = _in_child(kv, key)
                finally:
                    os.write(writer, told)
                    os.kill(os.getpid(), signal.SIGKILL)  # nothing of the parent's may run in the child's exit
            os.close(writer)
            said = await asyncio.to_thread(os.read, reader, 100)
            os.close(reader)
            await asyncio.to_thread(os.waitpid, pid, 0)
            assert said == b"ForkError" * 6, said
            assert await kv.get(key) == b"value" and await kv.put(keys(1)[0], b"v") is PutStatus.STORED
            assert len(await kv.status()) == 1


def _in_child(kv: ucxkv.Client, key: bytes) -> bytes:
    """Drive coroutines by hand: the child has no loop of its own to run them in."""
    told = b""
    calls = (
        kv.get(key),
        kv.get(key, bytearray(5)),
        kv.get_many([key]),
        kv.put(key, b"v"),
        kv.exists(key),
        kv.delete([key]),
    )
    for call in calls:
        try:
            call.send(None)
        except BaseException as exc:
            told += type(exc).__name__.encode()
        finally:
            call.close()
    return told


def test_multiprocessing_children_connect_for_themselves(shared_node: NodeProcess) -> None:
    """User voice 23. Method: a parent with a client starts children by fork, forkserver and spawn; each connects."""
    source = """
        import asyncio, multiprocessing, os, sys, warnings
        import ucxkv, ucxkv.sync

        def child(address, key, queue):
            with ucxkv.sync.connect(address) as kv:
                queue.put(kv.get(key))

        def main():
            address, key = sys.argv[1], os.urandom(16)
            with ucxkv.sync.connect(address) as kv:
                kv.put(key, b"from the parent")
                for method in ("fork", "forkserver", "spawn"):
                    context = multiprocessing.get_context(method)
                    queue = context.SimpleQueue()
                    process = context.Process(target=child, args=(address, key, queue))
                    process.start()
                    print(queue.get().decode())
                    process.join()
                    assert process.exitcode == 0, method
                assert kv.get(key) == b"from the parent"

        if __name__ == "__main__":
            main()
    """
    path = ROOT / "tests" / "integration"
    script = path / f"_children_{os.getpid()}.py"
    script.write_text(textwrap.dedent(source))
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore::DeprecationWarning", str(script), shared_node.address],
            capture_output=True,
            text=True,
            timeout=90,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            check=False,
        )
    finally:
        script.unlink()
    assert done.returncode == 0, done.stderr[-2000:]
    assert [line for line in done.stdout.splitlines() if "parent" in line] == ["from the parent"] * 3


# ---- event loops

_MAIN = """
    import asyncio, os, sys
    import numpy as np
    import ucxkv

    async def main(address, path):
        async with ucxkv.connect(address, path=path) as kv:
            keys = [os.urandom(16) for _ in range(20)]
            blocks = np.random.default_rng(1).integers(0, 256, (20, 50_000), np.uint8)
            assert (await kv.put_many(keys, blocks, "chain")).ok
            into = np.zeros_like(blocks)
            assert (await kv.get_many(keys, into)).hits == 20 and (into == blocks).all()
            big = bytes(12 << 20)
            assert await kv.put(os.urandom(16), big) is ucxkv.PutStatus.STORED
            async with kv.lease(keys):
                view = await kv.view(keys[0]) if path == "mapped" else None
                if view is not None:
                    await view.aclose()
            await asyncio.gather(*(kv.get(key) for key in keys), *(kv.exists(key) for key in keys))
            assert (await kv.delete(keys)).max() == 0
        assert len(asyncio.all_tasks()) == 1, asyncio.all_tasks()
"""


@pytest.mark.parametrize("path", ["mapped", "message", "network"])
def test_asyncio_run_twice_in_one_process_leaves_no_task_and_no_warning(shared_node: NodeProcess, path: str) -> None:
    """User voice 26. Method: the whole life of a client in two asyncio.run, development mode, warnings are errors."""
    source = (
        _MAIN + "\n    for _ in range(2):\n        asyncio.run(main(sys.argv[1], sys.argv[2]))\n    print('fine')\n"
    )
    assert "fine" in run_program(source, shared_node.address, path)


@pytest.mark.parametrize("path", ["mapped", "message", "network"])
def test_uvloop_serves_as_well(shared_node: NodeProcess, path: str) -> None:
    """User voice 26. Method: the same under uvloop, twice."""
    pytest.importorskip("uvloop")
    source = _MAIN + (
        "\n    import uvloop\n    for _ in range(2):\n"
        "        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:\n"
        "            runner.run(main(sys.argv[1], sys.argv[2]))\n    print('fine')\n"
    )
    assert "fine" in run_program(source, shared_node.address, path)


def test_an_in_process_node_under_asyncio_debug_leaves_nothing() -> None:
    """User voice 26. Method: node and client in one loop, development mode; tasks and descriptors are counted."""
    source = """
        import asyncio, os
        import ucxkv
        from ucxkv.node import Node, NodeConfig

        async def main():
            before = len(os.listdir("/proc/self/fd"))
            config = NodeConfig(name="a", listen="127.0.0.1:0", host_bytes=8 << 20)
            async with Node(config) as a:
                other = NodeConfig(name="b", listen="127.0.0.1:0", host_bytes=8 << 20, join=(a.address,))
                async with Node(other) as b, ucxkv.connect(a.address) as kv:
                    keys = [os.urandom(16) for _ in range(40)]
                    assert (await kv.put_many(keys, [os.urandom(1000)] * 40)).ok
                    assert (await kv.get_many(keys)).hits == 40
                    a.store.check(), b.store.check()
            assert len(asyncio.all_tasks()) == 1, asyncio.all_tasks()
            assert len(os.listdir("/proc/self/fd")) <= before + 1, os.listdir("/proc/self/fd")

        asyncio.run(main(), debug=True)
        asyncio.run(main())
        print("fine")
    """
    assert "fine" in run_program(source)


def test_a_client_that_is_never_closed_does_not_hang_the_interpreter(shared_node: NodeProcess) -> None:
    """Goal: a sloppy program ends. Method: clients of both faces, never closed, at interpreter exit."""
    source = """
        import asyncio, os, sys
        import ucxkv, ucxkv.sync

        async def main():
            kv = await ucxkv.connect(sys.argv[1], path=sys.argv[2])
            await kv.put(os.urandom(16), bytes(1000))

        asyncio.run(main())
        kv = ucxkv.sync.connect(sys.argv[1], path=sys.argv[2])
        kv.put(os.urandom(16), bytes(1000))
        print("fine", flush=True)
    """
    for path in ("mapped", "message"):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(source), shared_node.address, path],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            check=False,
        )
        assert done.returncode == 0 and "fine" in done.stdout, done.stderr[-2000:]


def test_no_rdma_device_is_no_error(shared_node: NodeProcess) -> None:
    """User voice 24. Method: default settings and the network path on a host without devices; no complaint of UCX."""
    if os.path.isdir("/dev/infiniband"):
        pytest.skip("this host has RDMA devices")
    source = """
        import os, sys, ucxkv.sync
        for path in ("auto", "network"):
            with ucxkv.sync.connect(sys.argv[1], path=path) as kv:
                key = os.urandom(16)
                kv.put(key, b"v" * 1000)
                assert kv.get(key) == b"v" * 1000
                print(kv.peers()[0].why)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source), shared_node.address],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    assert "ERROR" not in done.stderr and "infiniband" not in done.stderr and "network" in done.stdout
