"""A writer of objects that kills itself, by SIGKILL, at one step of a put. For tests.

    python -m tests.objects.killed ADDRESS NAME NBYTES FILL STEP [durable]

STEP: `half` after the first block of the body, `sealed` before the header, `claimed` after it and before what was there
is removed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from typing import Any

import ucxkv
from tests.harness import ROOT
from ucxkv.client.client import Client
from ucxkv.objects.chains import Chains

__all__ = ["STEPS", "killed_put"]

STEPS = ("half", "sealed", "claimed")


def killed_put(address: str, name: str, value: bytes, step: str, *, durable: bool = False) -> None:
    """Put a value of equal bytes from another process, which dies at this step."""
    arguments = [address, name, str(len(value)), str(value[0]), step, *(["durable"] if durable else [])]
    done = subprocess.run(
        [sys.executable, "-m", "tests.objects.killed", *arguments], cwd=ROOT, timeout=60, capture_output=True, text=True
    )
    assert done.returncode == -signal.SIGKILL, (done.returncode, done.stderr)


def _die(*_: Any, **__: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


async def _put(address: str, name: str, value: bytes, step: str, durable: bool) -> None:
    async with ucxkv.connect(address) as kv:
        if step == "half":
            put_many = Client.put_many

            async def first_block(self: Client, keys: Any, blocks: Any, parents: Any, **options: Any) -> None:
                await put_many(self, keys[:1], blocks.run(0, 1), parents[:1], **options)
                _die()

            Client.put_many = first_block  # type: ignore[method-assign, assignment]
        elif step == "sealed":
            Chains.claim = _die  # type: ignore[method-assign]
        else:
            kv.objects._remove_before = _die  # type: ignore[method-assign]
        await kv.objects.put(name, value, durable=durable)


if __name__ == "__main__":
    address, name, nbytes, fill, step, *rest = sys.argv[1:]
    asyncio.run(_put(address, name, bytes([int(fill)]) * int(nbytes), step, bool(rest)))
