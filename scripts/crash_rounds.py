"""Kill a node at random moments under durable puts and deletes, start it again, and compare it with what it had said.

    python scripts/crash_rounds.py --rounds 100 [--seed S] [--writers 4] [--reboots] [--json]

Each round: writers put and delete, at a random moment kill -9 of the node (in some rounds again while it recovers; in
some a writer is stopped first, and goes on after the restart with the memory that it had mapped), a new start, and
every key that was ever named is read. With --reboots the node keeps durability = power, and every second kill takes the
memory in /dev/shm along, as the end of the machine does. Counted as violations:

    lost    acknowledged as durable (STORED, ALREADY), not deleted since, and a miss
    back    acknowledged as deleted, and there
    wrong   bytes that are not the key's
    hole    a block without its parent (I1)
    refused the node does not start on what it left

What was asked and not answered may be there or not (and is from then on what it was found to be). Exit code 1 on any
violation; the seed is printed and gives the same choices, though not the same moments.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from crash_writer import key_of, value_of

import ucxkv
from ucxkv.cli.launch import NodeProcess, start_node
from ucxkv.errors import SetupError
from ucxkv.node.state import forget

HERE = Path(__file__).resolve().parent
STORED, ALREADY = int(ucxkv.PutStatus.STORED), int(ucxkv.PutStatus.ALREADY)
READY_S, WRITER_S = 120.0, 120.0
_VIOLATIONS = ("lost", "back", "wrong", "hole", "refused")
Block = tuple[int, int, int]


class Ledger:
    """What may and must be there: block -> "durable", "gone" or "open" (either), from the writers' logs."""

    def __init__(self) -> None:
        self.state: dict[Block, str] = {}
        self._calls: dict[tuple[int, int], dict[str, Any]] = {}
        self._read: Counter[int] = Counter()
        self.acknowledged = self.deleted = 0

    def read(self, writer: int, log: Path) -> None:
        """Take in what a writer has written down since the last time."""
        with log.open("rb") as file:
            file.seek(self._read[writer])
            for line in file:
                if line.endswith(b"\n"):
                    self._read[writer] += len(line)
                    self._take(writer, json.loads(line))

    def _take(self, writer: int, said: dict[str, Any]) -> None:
        if "status" not in said:
            self._calls[writer, said["call"]] = said
            if said["op"] == "delete" or said["durable"]:  # a durable put takes what is above it along
                begin = said["begin"] if said["op"] == "delete" else 0
                for at in range(begin, said["end"]):
                    self._maybe((said["owner"], said["chain"], at), is_delete=said["op"] == "delete")
            return
        call = self._calls.pop((writer, said["call"]))
        if not call["durable"]:
            return
        for i, status in enumerate(said["status"]):
            block = (call["owner"], call["chain"], call["begin"] + i)
            if call["op"] == "delete" and status in (0, 1):  # DELETED, MISS
                self.state[block] = "gone"
                self.deleted += 1
            elif call["op"] == "put" and status in (STORED, ALREADY):
                for above in range(block[2] + 1):
                    self.state[block[0], block[1], above] = "durable"
                self.acknowledged += 1

    def _maybe(self, block: Block, *, is_delete: bool) -> None:
        if is_delete or self.state.get(block) != "durable":
            self.state[block] = "open"


class Rounds:
    """All rounds on one state folder."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.rnd = random.Random(arguments.seed)
        self.folder = Path(tempfile.mkdtemp(prefix="ucxkv-crash-"))
        self.ledger = Ledger()
        self.counts: Counter[str] = Counter(dict.fromkeys(_VIOLATIONS, 0))
        self.writers: list[subprocess.Popen[str]] = []
        self.examples: list[str] = []
        self.name = f"crash-{os.getpid()}"
        self._node: NodeProcess | None = None
        self._durability = "power" if arguments.reboots else "process"

    @property
    def violations(self) -> int:
        """Of all kinds."""
        return sum(self.counts[kind] for kind in _VIOLATIONS)

    def _start(self) -> NodeProcess:
        node = start_node(
            self.name,
            host_bytes=self.arguments.host_bytes,
            arguments=["--durability", self._durability, "--state-dir", str(self.folder / "state")],
        )
        self._node = node
        return node

    def _writer(self, number: int) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "crash_writer.py"), str(number), str(self._log(number))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        process.stdout.readline()
        return process

    def _log(self, number: int) -> Path:
        return self.folder / f"writer-{number}.log"

    def run(self) -> None:
        """All rounds; the counts tell."""
        self.writers = [self._writer(number) for number in range(self.arguments.writers)]
        node = self._start()
        node.wait_ready(time.monotonic() + READY_S)
        for number in range(1, self.arguments.rounds + 1):
            try:
                node = self._round(node)
            except SetupError as exc:
                self.counts["refused"] += 1
                self.examples.append(f"refused: {exc}")
            if not self.arguments.json:
                print(f"round {number}: {self._summary()}", file=sys.stderr, flush=True)
            if self.violations:
                return

    def _round(self, node: NodeProcess) -> NodeProcess:
        running = list(self.writers)
        for writer in running:
            assert writer.stdin is not None
            writer.stdin.write(f"go {node.address} {self.rnd.randrange(1 << 30)}\n")
            writer.stdin.flush()
        time.sleep(self.rnd.choice((0.0, 0.1, 1.0)) * self.rnd.random() + 0.2)
        stopped = self.rnd.choice(running) if self.rnd.random() < 0.3 else None
        if stopped is not None:
            os.kill(stopped.pid, signal.SIGSTOP)
            self.counts["stopped writers"] += 1
            time.sleep(0.05 * self.rnd.random())
        self._kill(node)
        node = self._start()
        if self.rnd.random() < 0.2:  # again, while it recovers
            time.sleep(1.5 * self.rnd.random())
            self._kill(node)
            node = self._start()
        node.wait_ready(time.monotonic() + READY_S)
        for writer in running:
            if writer is not stopped:
                self._await(writer)
        for i in range(len(self.writers)):
            self.ledger.read(i, self._log(i))
        asyncio.run(self._verify(node.address))
        if stopped is not None:
            os.kill(stopped.pid, signal.SIGCONT)
            self._await(stopped)  # what it writes now goes where it was lent memory before
            self.ledger.read(self.writers.index(stopped), self._log(self.writers.index(stopped)))
            asyncio.run(self._verify(node.address))
        asyncio.run(self._thin_out(node.address))
        return node

    def _kill(self, node: NodeProcess) -> None:
        node.process.kill()
        node.process.wait()
        node.release()
        self.counts["kills"] += 1
        if self.arguments.reboots and self.rnd.random() < 0.5:
            self.counts["reboots"] += 1
            for path in Path("/dev/shm").glob(f"ucxkv-{self.name}-*"):
                path.unlink()

    def _await(self, writer: subprocess.Popen[str]) -> None:
        assert writer.stdout is not None
        if not select.select([writer.stdout], [], [], WRITER_S)[0]:
            raise TimeoutError(f"writer {writer.pid} hangs")
        assert writer.stdout.readline() == "done\n", "a writer broke"

    async def _verify(self, address: str) -> None:
        """Every block that was ever named, against the ledger; what is open is settled by what is found."""
        blocks = sorted(self.ledger.state)
        async with ucxkv.connect(address, timeout_s=60) as kv:
            for at in range(0, len(blocks), 512):
                some = blocks[at : at + 512]
                keys = [key_of(*block) for block in some]
                result = await kv.get_many(keys)
                assert result.values is not None
                for block, key, value in zip(some, keys, result.values, strict=True):
                    self._judge(block, key, value)
        there = {block for block in blocks if self.ledger.state[block] == "durable"}
        for owner, chain, at in there:
            if at and (owner, chain, at - 1) not in there:
                self._violation("hole", (owner, chain, at))

    def _judge(self, block: Block, key: bytes, value: bytes | None) -> None:
        expected = self.ledger.state[block]
        self.counts["reads"] += 1
        if value is not None and value != value_of(key):
            self._violation("wrong", block)
        if expected == "durable" and value is None:
            self._violation("lost", block)
        if expected == "gone" and value is not None:
            self._violation("back", block)
        if expected == "open":
            self.counts["unanswered, there" if value is not None else "unanswered, not there"] += 1
            self.ledger.state[block] = "gone" if value is None else "durable"

    def _violation(self, kind: str, block: Block) -> None:
        self.counts[kind] += 1
        if len(self.examples) < 20:
            self.examples.append(f"{kind}: writer {block[0]}, chain {block[1]}, block {block[2]}")

    async def _thin_out(self, address: str) -> None:
        """Keep the store from filling: delete all but the newest chains, and forget what is gone for two rounds."""
        for block in [block for block, state in self.ledger.state.items() if state == "gone"][:-500]:
            del self.ledger.state[block]
        chains = sorted({block[:2] for block, state in self.ledger.state.items() if state == "durable"})
        doomed = {chain for chain in chains if self.rnd.random() < 0.5} if len(chains) > 150 else set()
        blocks = sorted(b for b, state in self.ledger.state.items() if b[:2] in doomed and state == "durable")
        async with ucxkv.connect(address, timeout_s=60) as kv:
            for at in range(0, len(blocks), 4096):
                some = blocks[at : at + 4096][::-1]
                status = (await kv.delete([key_of(*block) for block in some])).tolist()
                for block, one in zip(some, status, strict=True):
                    self.ledger.state[block] = "gone" if one == 0 else self.ledger.state[block]

    def _summary(self) -> str:
        named = {"acknowledged": self.ledger.acknowledged, "deleted": self.ledger.deleted, **self.counts}
        return ", ".join(f"{name} {count}" for name, count in named.items())

    def close(self) -> None:
        """Nothing is left behind."""
        for writer in self.writers:
            writer.kill()
            writer.wait()
        if self._node is not None:
            with contextlib.suppress(ProcessLookupError):
                self._node.process.kill()
            self._node.process.wait()
            self._node.release()
        if (self.folder / "state").exists():
            forget(self.folder / "state")
        shutil.rmtree(self.folder)

    def report(self) -> dict[str, object]:
        """For --json."""
        return {
            "bench": "crash_rounds",
            "rounds": self.arguments.rounds,
            "seed": self.arguments.seed,
            "node": self.name,
            "acknowledged": self.ledger.acknowledged,
            "deleted": self.ledger.deleted,
            **self.counts,
            "violations": self.violations,
            "examples": self.examples,
        }


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--writers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--host-bytes", default="256MiB")
    parser.add_argument("--reboots", action="store_true", help="durability = power; memory goes, too")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.seed is None:
        arguments.seed = random.SystemRandom().randrange(1 << 30)
    rounds = Rounds(arguments)
    try:
        rounds.run()
    finally:
        rounds.close()
    if arguments.json:
        print(json.dumps(rounds.report()))
    else:
        print(f"seed {arguments.seed}, rounds {arguments.rounds}: {rounds._summary()}; violations {rounds.violations}")
        print("\n".join(rounds.examples), end="\n" if rounds.examples else "")
    return 1 if rounds.violations else 0


if __name__ == "__main__":
    sys.exit(main())
