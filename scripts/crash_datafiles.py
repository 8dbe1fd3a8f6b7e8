"""Kill the owner of a store of datafiles at random moments, open what it left, and compare with what it had heard.

    python scripts/crash_datafiles.py --rounds 50 [--seed S] [--engine auto] [--json]

Each round: a process with four writers that overwrite, forget and read blocks in files so small that they are used
again, hot blocks re-admitted, all the time (`crash_datafiles_writer.py`); kill -9 at a random moment, also while it
opens the store; then the store is opened here, and in the next round by the next process. Counted as violations:

    lost    acknowledged, and not there though its file's life is not over, or its store had been told that it is hot
    wrong   bytes, a version or a parent that are not the block's
    back    a forgotten block, an older version, or a place in a life that was said to be over
    refused the store does not open, or reports files that it cannot use

A file's life is over when the file's own head says so. What was asked and not answered may be there or not, and is from
then on what it was found to be. The last line has the counts; exit code 1 on any violation. The seed gives the same
choices, though not the same moments.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from crash_datafiles_writer import block_of, number_of, open_store

from ucxkv.tiers.base import TierError
from ucxkv.tiers.datafile_format import FREE, decode_file
from ucxkv.tiers.datafiles import ProblemKind, Recovered
from ucxkv.tiers.engines import open_engine

HERE = Path(__file__).resolve().parent
START_S, ANSWER_S = 0.8, 60.0
VIOLATIONS = ("lost", "wrong", "back", "refused")
Life = tuple[int, int]
"""A datafile's number and its generation."""


@dataclass
class Block:
    """What is known of a key. version: acknowledged, 0 = none or forgotten; life: where; asked: not answered since."""

    version: int = 0
    life: Life = (0, 0)
    is_hot: bool = False
    asked: list[int] = field(default_factory=list)


class Ledger:
    """What must and may be there, from the writers' lines."""

    def __init__(self) -> None:
        self.blocks: dict[int, Block] = {}
        self.dropped: set[Life] = set()
        self.counts: Counter[str] = Counter(dict.fromkeys(VIOLATIONS, 0))
        self.examples: list[str] = []
        self._calls: dict[int, list[tuple[int, int]]] = {}

    def begin_round(self) -> None:
        """Another process: its calls are counted from 1 again."""
        self._calls.clear()

    def take(self, said: list[Any]) -> None:
        """One line."""
        what = said[0]
        if what == "ask":
            self._calls[said[1]] = said[2]
            for number, version in said[2]:
                self.blocks.setdefault(number, Block()).asked.append(version)
        elif what == "ack":
            self._acknowledge(self._calls.pop(said[1]), said[2])
        elif what == "hot":
            block = self.blocks[said[1]]
            block.is_hot = block.is_hot or block.life == (said[2], said[3])
        elif what == "moved":
            block = self.blocks[said[1]]
            block.life, block.is_hot = (said[2], said[3]), False
            self.counts["moved"] += 1
        elif what == "dropped":
            self.dropped.add((said[1], said[2]))
            self.counts["files dropped"] += 1
        elif what == "wrong":
            self.violation("wrong", said[1])

    def _acknowledge(self, asked: list[tuple[int, int]], lives: list[Life]) -> None:
        for (number, version), life in zip(asked, lives, strict=True):
            block = self.blocks[number]
            block.version, block.life, block.is_hot = version, (life[0], life[1]), False
            block.asked.clear()
            self.counts["acknowledged" if version else "forgotten"] += 1

    def violation(self, kind: str, text: str) -> None:
        """One more."""
        self.counts[kind] += 1
        if len(self.examples) < 20:
            self.examples.append(f"{kind}: {text}")

    def judge(self, found: dict[int, Recovered], lives: dict[int, tuple[int, int]]) -> None:
        """Compare with what the store has; what was open is settled by it. lives: of each file (generation, state)."""
        for number, each in found.items():
            block = self.blocks.setdefault(number, Block())
            if each.version not in (block.version, *block.asked) or not each.version:
                self.violation("back", f"key {number}: version {each.version}, not {block.version} or {block.asked}")
            if (each.place.file, each.place.generation) in self.dropped:
                self.violation("back", f"key {number} at {each.place}, which was said to be over")
        for number, block in self.blocks.items():
            there = found.get(number)
            if there is None and block.version and not block.asked:
                generation, state = lives.get(block.life[0], (1 << 63, FREE))
                is_over = (generation, state == FREE) > (block.life[1], False)
                if not is_over or block.is_hot:
                    hot = ", hot" if block.is_hot else ""
                    now = f"the file's head says {generation}, state {state}"
                    self.violation("lost", f"key {number}, version {block.version} in life {block.life}{hot}; {now}")
            self.counts["found"] += there is not None
            self.counts["dropped blocks"] += there is None and block.version > 0 and not block.asked
            block.asked.clear()
            block.version, block.is_hot = (there.version if there is not None else 0), False
            if there is not None:
                block.life = (there.place.file, there.place.generation)


def _listen(stream: IO[bytes], lines: list[bytes], opened: threading.Event) -> None:
    """Take in what a process says until it ends."""
    for line in stream:
        lines.append(line)
        opened.set()


class Rounds:
    """All rounds on one folder."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.rnd = random.Random(arguments.seed)
        self.folder = Path(tempfile.mkdtemp(prefix="ucxkv-crash-", dir=arguments.folder))
        self.ledger = Ledger()
        self.done = 0

    @property
    def violations(self) -> int:
        """Of all kinds."""
        return sum(self.ledger.counts[kind] for kind in VIOLATIONS)

    def run(self) -> None:
        """All rounds, or up to the first with violations."""
        for number in range(1, self.arguments.rounds + 1):
            self._kill_one(number)
            asyncio.run(self._verify())
            self.done = number
            if not self.arguments.json:
                print(f"round {number}: {self.summary()}", file=sys.stderr, flush=True)
            if self.violations:
                return

    def _kill_one(self, number: int) -> None:
        """Start a process, kill it at a random moment, and take in all that it said."""
        engine = self.arguments.engine if self.arguments.engine != "both" else ("io_uring", "threads")[number % 2]
        words = [self.folder / "store", engine, self.rnd.randrange(1 << 30), number * 1_000_000]
        command = [sys.executable, HERE / "crash_datafiles_writer.py", *words]
        self.ledger.begin_round()
        lines: list[bytes] = []
        opened = threading.Event()
        with subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE) as process:
            listener = threading.Thread(target=_listen, args=(process.stdout, lines, opened))
            listener.start()
            if self.done and self.rnd.random() < 0.15:
                time.sleep(self.rnd.random() * START_S)  # while it starts and opens the store
            elif opened.wait(ANSWER_S):
                time.sleep(self.rnd.random() * self.arguments.seconds)
            process.kill()
            listener.join()
        if process.returncode != -signal.SIGKILL:
            self.ledger.violation("refused", f"the writers ended with {process.returncode}")
        self.ledger.counts["killed before they wrote"] += not opened.is_set()
        for line in lines:
            self.ledger.take(json.loads(line))

    async def _verify(self) -> None:
        """Open the store and read all of it."""
        lives = self._lives()
        engine = open_engine("auto", directory=self.folder)
        try:
            store, blocks, problems = await open_store(self.folder / "store", engine)
        except TierError as exc:
            self.ledger.violation("refused", str(exc))
            return
        for problem in problems:
            if problem.kind not in (ProblemKind.NOTICE, ProblemKind.DAMAGED) or "head" in problem.text:
                self.ledger.violation("refused", f"{problem.name}: {problem.text}")
        found = {number_of(each.key): each for each in blocks}
        into = [bytearray(each.place.length) for each in found.values()]
        outcomes = await store.read_many([each.place for each in found.values()], into)
        for (number, each), data, outcome in zip(found.items(), into, outcomes, strict=True):
            expected = block_of(number, each.version)
            if outcome is not None or data != expected.buffers[0] or each.parent != expected.parent:
                self.ledger.violation("wrong", f"key {number}, version {each.version} at {each.place}: {outcome}")
            self.ledger.counts["read bytes"] += len(data)
        self.ledger.judge(found, lives)
        await store.aclose()
        await engine.aclose()

    def _lives(self) -> dict[int, tuple[int, int]]:
        """By file: (generation, state), as its head says."""
        found = {}
        for path in (self.folder / "store").glob("data-??????"):
            with path.open("rb") as file:
                decoded = decode_file(file.read(4096))
            if decoded is None:
                self.ledger.violation("refused", f"{path.name} has a torn head")
            else:
                found[decoded[0].file] = (decoded[0].generation, decoded[0].state)
        return found

    def summary(self) -> str:
        """The counts in words."""
        return ", ".join(f"{name} {count}" for name, count in self.ledger.counts.items())

    def close(self) -> None:
        """Nothing is left behind, but after violations what they were found in."""
        if self.violations:
            print(f"left in {self.folder}", file=sys.stderr)
        else:
            shutil.rmtree(self.folder)


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--seconds", type=float, default=1.0, help="a process lives at most so long (default 1)")
    parser.add_argument("--engine", choices=("auto", "io_uring", "threads", "both"), default="auto")
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to use (default: the temporary one)")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.seed is None:
        arguments.seed = random.SystemRandom().randrange(1 << 30)
    rounds = Rounds(arguments)
    try:
        rounds.run()
    finally:
        rounds.close()
    counts = rounds.ledger.counts
    print("\n".join(rounds.ledger.examples), end="\n" if rounds.ledger.examples else "", file=sys.stderr)
    if arguments.json:
        print(json.dumps({"bench": "crash_datafiles", "rounds": rounds.done, "seed": arguments.seed, **counts}))
    else:
        names = ("acknowledged", "forgotten", "moved", "files dropped", *VIOLATIONS)
        print(f"seed {arguments.seed}, rounds {rounds.done}: " + ", ".join(f"{name} {counts[name]}" for name in names))
    return 1 if rounds.violations or not counts["acknowledged"] else 0


if __name__ == "__main__":
    sys.exit(main())
