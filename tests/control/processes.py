"""Other processes that use a control plane: something to kill and to stop."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator

_HOLDER = """
import asyncio, sys
from ucxkv.control import open_control

async def main():
    url, key, ttl_s = sys.argv[1], sys.argv[2], float(sys.argv[3])
    plane = await open_control(url)
    lease = await plane.lease(ttl_s)
    await plane.compare_and_set(key, 0, b"of another process", lease=lease)
    print("held", flush=True)
    print("lost:", await lease.lost, flush=True)
    await plane.aclose()

asyncio.run(main())
"""


@contextlib.contextmanager
def holder(url: str, key: str, ttl_s: float) -> Iterator[subprocess.Popen[str]]:
    """A process that holds `key` under a lease which it keeps alive; it prints `lost: WHY` and ends when it lost it."""
    process = subprocess.Popen([sys.executable, "-c", _HOLDER, url, key, str(ttl_s)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait(30)
        if process.stdout is not None:
            process.stdout.close()
