"""A node in a process of its own whose Python can be stopped on demand, for `bench_get.py --node-blocked` and tests.

Run as a script it is that process: it prints the readiness line of `ucxkv node`, then obeys lines on standard input:
`block SECONDS` holds the GIL for so long (a C sleep that does not release it, so that neither the event loop nor any
other Python thread of the node runs), answers `unblocked`; the end of its input ends it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator

from ucxkv.cli.launch import NodeProcess, stop_nodes
from ucxkv.cli.node import READY


class BlockableNode(NodeProcess):
    """The parent's side."""

    def block(self, seconds: float) -> None:
        """Let the node's Python stand still from now on; returns once it does."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"block {seconds}\n".encode())
        self.process.stdin.flush()
        assert self.process.stdout.readline() == b"blocking\n"
        time.sleep(0.005)

    def wait_unblocked(self) -> None:
        """Wait for the end of it."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"unblocked\n"


@contextlib.contextmanager
def started(host_bytes: int) -> Iterator[BlockableNode]:
    """Such a node for the length of a `with` block."""
    command = [sys.executable, __file__, "--host-bytes", str(host_bytes)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    node = BlockableNode("blockable", process, None)
    try:
        node.wait_ready(time.monotonic() + 60)
        yield node
    finally:
        stop_nodes([node])


async def serve(host_bytes: int) -> None:
    """The child's side."""
    from ucxkv.cli.logs import log_to_stderr
    from ucxkv.node import Node, NodeConfig

    log_to_stderr("warning", as_json=False)
    usleep = ctypes.PyDLL(None).usleep  # PyDLL keeps the GIL during the call
    async with Node(NodeConfig(name="blockable", listen="127.0.0.1:0", host_bytes=host_bytes)) as node:
        ready = {"event": READY, "name": "blockable", "address": node.address, "pid": os.getpid()}
        print(json.dumps(ready), flush=True)
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            print("blocking", flush=True)
            usleep(int(float(line.split()[1]) * 1e6))
            print("unblocked", flush=True)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--host-bytes", type=int, default=1 << 30, help="bytes of memory for blocks")
    asyncio.run(serve(options.parse_args().host_bytes))
