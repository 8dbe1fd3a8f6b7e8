#!/usr/bin/env python
"""Simulate a cluster under faults, seed by seed, and check what its clients saw.

    python scripts/simulate_faults.py --seeds 2000 [--first-seed 0] [--jobs 2] [--planted NAME] [--quiet]

Each seed is one run of three nodes with the product's own replication, a control plane, two to four clients and up to
a dozen faults, in virtual time (tests/sim/cluster.py: what is simulated and checked; docs/correctness.md: why).
The last line says how many seeds ran (Ctrl-C: until then), how many faults were injected and how many seeds violated
something; exit code 1 if any did. The first failing seeds are run again with their timeline, and the command that
replays each is printed.

--planted NAME changes one rule of the core (tests/sim/planted.py; `--planted list` names them): then violations are
what is hoped for, and the exit code is 1 for the same reason. The same seed gives the same run on every machine.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHUNK = 20
SHOWN = 3


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seeds", type=int, default=200, help="how many (default 200)")
    options.add_argument("--first-seed", type=int, default=0, help="the first one (default 0)")
    options.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)")
    options.add_argument("--planted", default="", metavar="NAME", help="with this bug planted; `list` names them")
    options.add_argument("--quiet", action="store_true", help="no timelines of failing seeds")
    options.add_argument("--timeline", action="store_true", help="the timeline of every seed, failing or not")
    arguments = options.parse_args()
    sys.path.insert(0, str(ROOT))
    from tests.sim.planted import PLANTED

    if arguments.planted == "list":
        print("\n".join(PLANTED))
        return 0
    if arguments.planted and arguments.planted not in PLANTED:
        options.error(f"no planted bug is called {arguments.planted}; --planted list names them")
    if arguments.seeds < 1 or arguments.jobs < 1:
        options.error("--seeds and --jobs are at least 1")
    return Campaign(arguments).run()


Found = tuple[list[tuple[int, list[str]]], Counter[str], int, int]
"""Failing seeds with their violations, faults by kind, seeds whose shard was rightly lost, operations."""


def some_seeds(work: tuple[int, int, str]) -> Found:
    """One process's share: seeds `first` to `last`."""
    from tests.sim.cluster import run
    from tests.sim.planted import PLANTED

    first, last, planted = work
    failing: list[tuple[int, list[str]]] = []
    faults: Counter[str] = Counter()
    spent = operations = 0
    for seed in range(first, last):
        report = run(seed, **PLANTED[planted] if planted else {})
        faults += report.faults
        spent += report.is_spent
        operations += report.operations
        if report.violations:
            failing.append((seed, report.violations))
    return failing, faults, spent, operations


class Campaign:
    """All seeds of one call, and what is printed of them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.planted: str = arguments.planted
        self.first: int = arguments.first_seed
        self.end = self.first + arguments.seeds
        self.started_s = time.monotonic()
        self.faults: Counter[str] = Counter()
        self.failing: list[tuple[int, list[str]]] = []
        self.spent = self.operations = self.done = 0

    def run(self) -> int:
        """Run, show, sum up; the exit code."""
        shares = [(at, min(at + CHUNK, self.end), self.planted) for at in range(self.first, self.end, CHUNK)]
        try:
            for found, share in zip(self._results(shares), shares, strict=True):
                self._take(found, share[1] - share[0])
        except KeyboardInterrupt:
            print("interrupted: this is what ran until then", file=sys.stderr)
        self.failing.sort()
        if self.arguments.timeline:
            for seed in range(self.first, self.end):
                self._show(seed)
        elif not self.arguments.quiet:
            for seed, _ in self.failing[:SHOWN]:
                self._show(seed)
        for seed, violations in self.failing:
            print(f"seed {seed}: {violations[0].splitlines()[0]}")
            print(f"  replay: {self._command(seed)}")
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.faults.items()))
        print(f"faults: {kinds}")
        print(f"operations checked: {self.operations}; shards rightly given up for lost: {self.spent}")
        took = f"in {time.monotonic() - self.started_s:.0f} s"
        injected = f"{sum(self.faults.values())} faults injected"
        print(f"{self.done} seeds run from {self.first} on {took}, {injected}, {len(self.failing)} violations")
        return 1 if self.failing else 0

    def _results(self, shares: list[tuple[int, int, str]]) -> Iterator[Found]:
        if self.arguments.jobs == 1 or len(shares) == 1:
            yield from map(some_seeds, shares)
            return
        with get_context("spawn").Pool(min(self.arguments.jobs, len(shares)), _start, (str(ROOT),)) as pool:
            yield from pool.imap(some_seeds, shares)

    def _take(self, found: Found, seeds: int) -> None:
        failing, faults, spent, operations = found
        self.failing += failing
        self.faults += faults
        self.spent += spent
        self.operations += operations
        before, self.done = self.done, self.done + seeds
        total = self.end - self.first
        said = f"{self.done}/{total} seeds, {len(self.failing)} violations, {time.monotonic() - self.started_s:.0f} s"
        if sys.stderr.isatty():
            print(f"\r{said}  ", end="\n" if self.done == total else "", file=sys.stderr, flush=True)
        elif self.done * 10 // total != before * 10 // total:
            print(said, file=sys.stderr, flush=True)

    def _show(self, seed: int) -> None:
        from tests.sim.cluster import run
        from tests.sim.planted import PLANTED

        report = run(seed, is_traced=True, **PLANTED[self.planted] if self.planted else {})
        print(f"\n==== seed {seed}\n" + "\n".join(report.timeline))
        print("\n".join(f"VIOLATION {violation}" for violation in report.violations))

    def _command(self, seed: int) -> str:
        planted = f" --planted {self.planted}" if self.planted else ""
        return f"python scripts/simulate_faults.py --first-seed {seed} --seeds 1 --timeline{planted}"


def _start(root: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the first process's to answer
    sys.path.insert(0, root)


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets of strings is part of a run
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, *sys.argv])
    sys.exit(main())
