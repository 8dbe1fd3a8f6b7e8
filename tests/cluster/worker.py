"""A process of clients: several that put, delete, match and read chains until told to pause, and what is asked of a
cluster as a whole.

    python -m tests.cluster.worker --log FILE.ops --name w1 --cluster URL --nodes ADDRESS,... [--watch]

Commands, a line each from standard input; every one is answered by a line of JSON on standard output:

    go PREFIX            work on chains of that prefix
    pause                finish what was begun
    probe PREFIX SECONDS put one durable block in every shard
    audit FILE SECONDS   read every block of the chains named in the file
    (the end)            leave

With --watch it also tells what stands in the control plane about the shards, whenever that changes."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any, TextIO

from tests.cluster.calls import Caller
from tests.cluster.chains import Chain
from tests.cluster.judging import AUDITOR
from tests.cluster.load import Filler, Load
from tests.cluster.record import Log
from ucxkv import errors
from ucxkv.control import open_control
from ucxkv.control.mirror import Picture, mirror

_ROUND_S = 0.2


class Worker:
    """All clients of this process."""

    def __init__(self, arguments: argparse.Namespace, out: TextIO) -> None:
        self._arguments = arguments
        self._out = out
        self._log = Log(Path(arguments.log))
        self._loads = [Load(self._caller(f"{arguments.name}.{at}", at), at, arguments) for at in range(arguments.tasks)]
        self._filler = (
            Filler(self._caller(f"{arguments.name}.f", 0), arguments, self.say) if arguments.fill_bytes else None
        )
        self._auditor = self._caller(AUDITOR if arguments.watch else f"{arguments.name}.p", 0)
        self._going: list[asyncio.Task[None]] = []

    @property
    def _clients(self) -> list[Load | Filler]:
        return [*self._loads, self._filler] if self._filler else [*self._loads]

    def _caller(self, who: str, at: int) -> Caller:
        path = "message" if self._arguments.mixed_paths and at % 2 else "auto"
        addresses = tuple(self._arguments.nodes.split(","))
        return Caller(
            who, self._log, self._arguments.cluster, addresses, self._arguments.shards, path=path, say=self.say
        )

    def say(self, **words: Any) -> None:
        """One line for whoever started this process."""
        print(json.dumps({"worker": self._arguments.name, **words}), file=self._out, flush=True)

    async def run(self) -> None:
        """Serve standard input until its end."""
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        watching = asyncio.create_task(self._watch()) if self._arguments.watch else None
        self.say(event="ready")
        while line := (await reader.readline()).decode().split():
            await getattr(self, f"_{line[0]}")(*line[1:])
        await self._pause()
        if watching is not None:
            watching.cancel()
        for one in self._clients:
            await one.caller.aclose()
        await self._auditor.aclose()

    async def _go(self, prefix: str) -> None:
        if not self._going:
            await asyncio.gather(*(one.caller.settle() for one in self._clients))
            work = [*(load.work(prefix) for load in self._loads), *([self._filler.work()] if self._filler else [])]
            self._going = [asyncio.create_task(self._told_when_broken(one)) for one in work]
        self.say(event="going")

    async def _told_when_broken(self, work: Any) -> None:
        try:
            await work
        except Exception as exc:
            self.say(event="broken", why=f"{type(exc).__name__}: {exc}")
            raise

    async def _pause(self) -> None:
        for one in self._clients:
            one.is_over = True
        await asyncio.gather(*self._going, return_exceptions=True)
        self._going = []
        counts: dict[str, int] = {}
        for load in self._loads:
            for name, count in load.caller.counts.items():
                counts[name] = counts.get(name, 0) + count
        self.say(event="paused", counts=counts)

    async def _probe(self, prefix: str, seconds: str) -> None:
        """Until every shard has stored one; which did not in time."""
        until_s = time.monotonic() + float(seconds)
        started_s = time.monotonic()
        shards = self._arguments.shards if self._arguments.is_sharded else 1
        served: dict[int, float] = {}

        async def one(shard: int) -> None:
            chain = Chain.of(f"{prefix}.p", shard, is_durable=True)
            for attempt in range(10_000):
                results = await self._auditor.put(chain, 0, [f"{prefix}.{shard}.{attempt}"], deadline_s=2.0)
                if results[0] in ("stored", "already"):
                    served[shard] = time.monotonic() - started_s
                if shard in served or time.monotonic() > until_s:
                    return
                await asyncio.sleep(0.05)

        await asyncio.gather(*(one(shard) for shard in range(shards)))
        missing = sorted(set(range(shards)) - served.keys())
        self.say(event="probed", served=served, missing=missing)

    async def _audit(self, path: str, seconds: str) -> None:
        """Read every block of every chain; which chains did not answer in time."""
        until_s = time.monotonic() + float(seconds)
        chains = [Chain(name) for name in json.loads(await asyncio.to_thread(Path(path).read_text))]
        unread: list[str] = []
        for chain in chains:
            while not await self._auditor.read_all(chain):
                if time.monotonic() > until_s:
                    unread.append(chain.name)
                    break
                await asyncio.sleep(_ROUND_S)
        self.say(event="audited", chains=len(chains), unread=unread)

    async def _watch(self) -> None:
        while True:
            with contextlib.suppress(errors.UcxKvError):
                plane = await open_control(self._arguments.cluster)
                try:
                    async with aclosing(mirror(plane, "shards/")) as pictures:
                        async for picture in pictures:
                            self.say(event="shards", ns=time.monotonic_ns(), shards=_shards(picture))
                finally:
                    await plane.aclose()
            await asyncio.sleep(_ROUND_S)


def _shards(picture: Picture) -> dict[str, Any]:
    """Shard -> epoch, leader and the names in sync."""
    found = {}
    for key, entry in picture.entries.items():
        number = key.partition("/")[2]
        if number.isdigit():
            said = json.loads(entry.value)
            insync = [member[0] for member in said["insync"]]
            found[number] = {"epoch": said["epoch"], "leader": said["leader"][0], "insync": insync}
    return found


def main() -> None:
    """See the module."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--log", required=True)
    options.add_argument("--name", required=True)
    options.add_argument("--cluster", required=True)
    options.add_argument("--nodes", required=True, help="addresses, with commas between")
    options.add_argument("--seed", default="0")
    options.add_argument("--number", type=int, default=0, help="of this process")
    options.add_argument("--processes", type=int, default=1, help="how many there are")
    options.add_argument("--tasks", type=int, default=3, help="clients in this process")
    options.add_argument("--shards", type=int, default=8)
    options.add_argument("--is-sharded", action="store_true")
    options.add_argument("--pause-ms", type=float, default=20.0, help="mean pause of a client between calls")
    options.add_argument("--life-s", type=float, default=20.0, help="how long a chain is worked on")
    options.add_argument("--deadline-s", type=float, default=4.0)
    options.add_argument("--fill-bytes", type=int, default=0, help="a second of cache blocks, so that some are evicted")
    options.add_argument("--burst-bytes", type=int, default=0, help="as many of them at once when it begins")
    options.add_argument("--mixed-paths", action="store_true", help="every second client by messages")
    options.add_argument("--watch", action="store_true")
    arguments = options.parse_args()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries write there, and each of our lines is one of JSON
    with out:
        asyncio.run(_run(arguments, out))


async def _run(arguments: argparse.Namespace, out: TextIO) -> None:
    random.seed(arguments.seed)
    await Worker(arguments, out).run()


if __name__ == "__main__":
    main()
