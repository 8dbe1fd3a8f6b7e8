"""A writer of `crash_rounds.py`: puts and deletes durable blocks until the node is gone, and writes down what it asked
and what it was told, each before and after the call.

    python scripts/crash_writer.py NUMBER LOG     one command a line from standard input: "go ADDRESS SEED"

A log line is written whole by one system call, so that what a killed or stopped writer knew is in it. Values follow
from their keys: nobody has to remember them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys

import xxhash

import ucxkv

CHAIN_MAX = 40
SHARED = 99
"""The writer number of chains that all writers put: the first of them wins."""


def key_of(writer: int, chain: int, block: int) -> bytes:
    """The key of block `block` of a chain."""
    return xxhash.xxh3_128_digest(f"{writer}/{chain}/{block}".encode())


def value_of(key: bytes) -> bytes:
    """The one value that a key has: 0 to 24 KiB."""
    rnd = random.Random(key)
    return rnd.randbytes(rnd.choice((0, 1, 100, 3000, 8192, 24_000)))


class Writer:
    """One writer's life: chains that grow, are made durable late, and lose their tails."""

    def __init__(self, number: int, log: int) -> None:
        self.number, self._log = number, log
        self._chains: dict[tuple[int, int], int] = {}  # (writer, chain) -> blocks that were acknowledged
        self._calls = 0

    def _say(self, **words: object) -> None:
        os.write(self._log, json.dumps(words).encode() + b"\n")

    async def run(self, address: str, seed: int) -> None:
        """Until the node does not answer."""
        rnd = random.Random(seed)
        try:
            async with ucxkv.connect(address, timeout_s=20) as kv:
                await asyncio.gather(*(self._work(kv, random.Random(rnd.random())) for _ in range(3)))
        except ucxkv.UcxKvError:
            return

    async def _work(self, kv: ucxkv.Client, rnd: random.Random) -> None:
        while True:
            kind = rnd.choice(("batch", "batch", "single", "late", "shared", "delete"))
            if kind == "delete":
                answered = await self._delete(kv, rnd)
            else:
                answered = await self._put(kv, rnd, kind)
            if not answered:
                return
            await asyncio.sleep(0)

    async def _put(self, kv: ucxkv.Client, rnd: random.Random, kind: str) -> bool:
        if kind == "shared":
            owner, chain, begin, end = SHARED, rnd.randrange(1 << 30) % 4000, 0, rnd.randrange(1, 4)
        else:
            self._calls += 1
            owner, chain, begin, end = self.number, self._calls, 0, rnd.randrange(1, CHAIN_MAX)
        keys = [key_of(owner, chain, i) for i in range(end)]
        steps = {
            "batch": [(0, end, True)],
            "shared": [(0, end, True)],
            "late": [(0, end - 1, False), (end - 1, end, True)],
        }
        cuts = [(i, i + 1, True) for i in range(end)] if kind == "single" else steps[kind]
        for begin, end, durable in cuts:
            if begin == end:
                continue
            parents = [keys[begin - 1] if begin else ucxkv.ROOT_KEY, *keys[begin : end - 1]]
            call = self._begin("put", owner, chain, begin, end, durable)
            values = [value_of(key) for key in keys[begin:end]]
            if kind == "single":
                parent = keys[begin - 1] if begin else None
                status = [int(await kv.put(keys[begin], values[0], parent, durable=durable))]
            else:
                status = (await kv.put_many(keys[begin:end], values, parents, durable=durable)).status.tolist()
            self._say(call=call, status=status)
            if ucxkv.PutStatus.UNAVAILABLE in status:
                return False
            if any(one not in (ucxkv.PutStatus.STORED, ucxkv.PutStatus.ALREADY) for one in status):
                return True
        if owner == self.number:
            self._chains[(owner, chain)] = end
        return True

    async def _delete(self, kv: ucxkv.Client, rnd: random.Random) -> bool:
        if not self._chains:
            return True
        owner, chain = rnd.choice(list(self._chains))
        end = self._chains.pop((owner, chain))
        begin = rnd.choice((0, 0, rnd.randrange(end)))
        call = self._begin("delete", owner, chain, begin, end, True)
        status = (await kv.delete([key_of(owner, chain, i) for i in range(begin, end)])).tolist()
        self._say(call=call, status=status)
        return ucxkv.DeleteStatus.UNAVAILABLE not in status

    def _begin(self, op: str, owner: int, chain: int, begin: int, end: int, durable: bool) -> int:
        self._calls += 1
        call = self._calls
        self._say(call=call, op=op, owner=owner, chain=chain, begin=begin, end=end, durable=durable)
        return call


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("number", type=int)
    parser.add_argument("log")
    arguments = parser.parse_args()
    log = os.open(arguments.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    writer = Writer(arguments.number, log)
    print("ready", flush=True)
    for line in sys.stdin:
        _, address, seed = line.split()
        asyncio.run(writer.run(address, int(seed)))
        print("done", flush=True)


if __name__ == "__main__":
    main()
