#!/usr/bin/env python
"""Real nodes and a real etcd under faults, each on a host of its own; what clients saw is checked.

    python scripts/cluster_faults.py --seconds 600 [--seed S]      random faults, as root (network namespaces)
    python scripts/cluster_faults.py --rounds 100 [--mode mix]     kill -9 of leader, replica, both, at random moments
    ... --no-namespaces                                            kills and stops only, on the loopback
    ... --nodes 1 --replicas 0                                     one node, without replication

Faults: kill -9 and restart of a node, of a leader with a replica, of all; SIGSTOP past the lease; partitions of nodes,
etcd and clients, both ways or one; a cable out; loss; delay; kill -9 and SIGSTOP of etcd; with --durability power also
the end of all machines, memory in /dev/shm included. Clients on a host of their
own and on nodes' hosts put durable and cache blocks in token order, delete tails, match and read, on chains of their
own and on shared ones; a filler makes the nodes evict. After most faults every shard has to store again.

Checked: each chain's history is linearizable (tests/sim/linear.py); every acknowledged durable put that nobody deleted
is read in the end; no deleted block is back; no block is there without the one before it; every byte is one that the
block's writer put there; no node ends by itself, no call outlives its deadline by far.

The last line counts faults, operations, violations and lost acknowledged puts; exit code 1 on any violation, and then
the logs, the history and the journals stay in the folder that is named. The seed gives the same choices, though not the
same moments.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.cluster.campaign import Campaign

ROOT = Path(__file__).resolve().parent.parent
SHOWN_LINES = 12
_STEPS_S = 1.0
MODES = ("leader", "replica", "both", "mix")


def options() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long there are faults (default 60)")
    parser.add_argument("--rounds", type=int, default=0, help="instead: so many rounds of kill -9")
    parser.add_argument("--mode", choices=MODES, default="mix", help="whom a round kills (default mix)")
    parser.add_argument("--seed", type=int, default=None, help="default: any, and printed")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=2, help="copies of a shard; 0: nodes without replication")
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--lease-ms", type=int, default=2000)
    parser.add_argument("--durability", choices=("process", "power", "memory"), default="process")
    parser.add_argument("--host-bytes", default="48MiB")
    parser.add_argument("--clients", type=int, default=3, help="client processes (default 3)")
    parser.add_argument("--tasks", type=int, default=3, help="clients in each (default 3)")
    parser.add_argument("--pause-ms", type=float, default=30.0, help="mean pause of a client between calls")
    parser.add_argument("--life-s", type=float, default=20.0, help="how long a chain is worked on")
    parser.add_argument("--disk-bytes", default="", help="give each node a disk tier of so many bytes (default: none)")
    parser.add_argument("--fill-bytes", type=int, default=32 << 20, help="cache bytes put a second, for eviction")
    parser.add_argument("--no-namespaces", dest="namespaces", action="store_false", help="all on the loopback")
    parser.add_argument("--folder", type=Path, default=None, help="for logs and history; kept then")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the last lines")
    return parser


def main() -> int:
    parser = options()
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    why = _why_not(arguments)
    if why:
        parser.error(why)
    if arguments.seed is None:
        arguments.seed = random.SystemRandom().randrange(1 << 30)
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="ucxkv-faults-"))
    folder.mkdir(parents=True, exist_ok=True)
    return Run(arguments, folder).run()


def _why_not(arguments: argparse.Namespace) -> str:
    """Why this cannot run here; empty when it can."""
    from tests.cluster.machines import knows_replicas
    from tests.control.etcd_server import WHY_NOT
    from tests.hosts import why_not

    if WHY_NOT:
        return WHY_NOT
    if arguments.namespaces and why_not():
        return f"{why_not()}; or --no-namespaces"
    if arguments.replicas and not knows_replicas():
        return "this ucxkv has no --replicas; try --nodes 1 --replicas 0"
    if arguments.durability == "memory" and arguments.replicas < 2:
        return "--durability memory keeps nothing durable without replicas"
    if arguments.nodes > 1 and not arguments.replicas:
        return "without replicas a chain is not linearizable over nodes that go: --nodes 1"
    return ""


class Run:
    """One call, and what is printed of it."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments = arguments
        self.folder = folder
        self.kills: Counter[str] = Counter()
        self.kills_at_steps = self.rounds = 0
        self.started_s = time.monotonic()
        self._shown_s = 0.0

    def run(self) -> int:
        """Run, judge, sum up; the exit code."""
        from tests.cluster.campaign import Campaign

        print(f"seed {self.arguments.seed}, logs in {self.folder}", file=sys.stderr, flush=True)
        with Campaign(self.arguments, self.folder) as campaign:
            self.started_s = time.monotonic()
            try:
                self._rounds(campaign) if self.arguments.rounds else self._seconds(campaign)
            except KeyboardInterrupt:
                print("interrupted: this is what ran until then", file=sys.stderr)
            lasted_s = time.monotonic() - self.started_s
            if not self.arguments.rounds:
                self._finish(campaign)
            self._show(campaign, "reading everything", force=True)
            found = campaign.conclude()
            if found.violations:
                for node in campaign.machines.nodes:
                    node.kill()
                campaign.machines.keep_journals()
            self._report(campaign, lasted_s)
        if not found.violations and self.arguments.folder is None:
            shutil.rmtree(self.folder, ignore_errors=True)
        else:
            print(f"kept: {self.folder}", file=sys.stderr)
        return 1 if found.violations else 0

    # ---- random faults

    def _seconds(self, campaign: Campaign) -> None:
        campaign.go("go")
        until_s = time.monotonic() + self.arguments.seconds
        while time.monotonic() < until_s:
            campaign.faults_once()
            if campaign.rng.random() < 0.7:
                campaign.serve("the faults were over")
            campaign.sleep(campaign.rng.choice((0.0, 0.5, 2.0)) * campaign.rng.random())
            self._show(campaign)

    def _finish(self, campaign: Campaign) -> None:
        campaign.serve("the last fault was over")
        campaign.await_in_sync("the last fault was over")
        campaign.pause()

    # ---- rounds of kill -9

    def _rounds(self, campaign: Campaign) -> None:
        rng = campaign.rng
        for number in range(1, self.arguments.rounds + 1):
            prefix = f"r{number}"
            campaign.go(prefix)
            campaign.sleep(rng.choice((0.2, 0.5, 2.0)) * rng.random() + 0.3)
            mode = self.arguments.mode if self.arguments.mode != "mix" else rng.choice(MODES[:3])
            self._kill(campaign, mode)
            campaign.sleep(rng.choice((0.2, 1.0)) * rng.random())
            campaign.serve(f"the kills of round {number}")
            campaign.pause()
            campaign.await_in_sync(f"the kills of round {number}")
            campaign.recorded.read()
            mine = [name for name in campaign.recorded.chains if name.startswith(f"{prefix}.")]
            older = [name for name in campaign.recorded.chains if name not in mine]
            campaign.audit(mine + rng.sample(older, min(10, len(older))))
            self.rounds = number
            self._judge_round(campaign, mine)
            if campaign.findings.violations:
                return

    def _kill(self, campaign: Campaign, mode: str) -> None:
        """Of the leader of some shard, of one of its replicas, or of both, once or again while they start; at any
        moment, or some steps on in its work."""
        rng, field = campaign.rng, campaign.field
        leader = field.leader(rng)
        replica = field.replica_of(leader, rng) or leader
        victims = {"leader": [leader], "replica": [replica], "both": list(dict.fromkeys([leader, replica]))}[mode]
        for _ in range(2 if rng.random() < 0.2 else 1):
            led = field.led_by([node.name for node in victims])
            if rng.random() < 0.6:
                for node in victims:
                    node.doom(rng.choice((3, 20, 100)) + rng.randrange(20))
                campaign.sleep_until(lambda: not any(node.is_doomed for node in victims), _STEPS_S)
            at_steps = sum(not node.is_up for node in victims)
            self.kills_at_steps += at_steps
            before_ns = time.monotonic_ns()
            blow = field.kill(victims)
            campaign.faults[f"kill of {mode}"] += 1
            campaign.deaths.append((before_ns, led))
            self.kills[mode] += len(victims)
            campaign.note(f"FAULT {blow.text} ({mode}{f', {at_steps} at a step' * bool(at_steps)})")
            campaign.sleep(rng.choice((0.0, 0.5, 1.5)) * rng.random() * campaign.lease_s)
            campaign.undo(blow)
            campaign.sleep(1.5 * rng.random())

    def _judge_round(self, campaign: Campaign, names: list[str]) -> None:
        from tests.cluster.judging import judge

        campaign.recorded.read()
        found = judge({name: campaign.recorded.chains[name] for name in names})
        for text in found.texts:
            kind, _, rest = text.partition(": ")
            campaign.complain(kind, rest)
        self._show(campaign, force=True)

    # ---- what is printed

    def _show(self, campaign: Campaign, more: str = "", *, force: bool = False) -> None:
        now_s = time.monotonic()
        is_terminal = sys.stderr.isatty()
        if not force and now_s - self._shown_s < (1 if is_terminal else 10):
            return
        self._shown_s = now_s
        campaign.recorded.read()
        done = f"round {self.rounds}/{self.arguments.rounds}, " if self.arguments.rounds else ""
        said = f"{done}{now_s - self.started_s:.0f} s, {campaign.faults.total()} faults, "
        said += f"{campaign.recorded.count} operations, {campaign.findings.violations} violations {more}"
        print(f"\r{said}  " if is_terminal else said, end="" if is_terminal else "\n", file=sys.stderr, flush=True)

    def _report(self, campaign: Campaign, lasted_s: float) -> None:
        found = campaign.findings
        (self.folder / "violations.txt").write_text("\n\n".join(found.texts))
        times = campaign.failovers
        middle = statistics.median(times) if times else 0.0
        said = {
            "script": "cluster_faults", "pid": os.getpid(), "seed": self.arguments.seed, "seconds": round(lasted_s, 1),
            "rounds": self.rounds, "kills": self.kills.total(), "kills_at_steps": self.kills_at_steps,
            "faults": dict(campaign.faults),
            "operations": found.operations, "unknown": found.unknown, "acknowledged": found.acknowledged,
            "evicted": campaign.evicted,
            "demoted": campaign.demoted,
            "calls": dict(campaign.counts), "violations": found.violations, "found": dict(found.counts),
            "lost": found.counts["lost"], "wrong": found.counts["wrong"], "holes": found.counts["hole"],
            "failovers": len(times), "failover_p50_s": round(middle, 3),
            "failover_max_s": round(max(times, default=0), 3),
        }  # fmt: skip
        if self.arguments.json:
            print(json.dumps(said))
            return
        if sys.stderr.isatty():
            print(file=sys.stderr)
        for text in found.texts[:5]:
            print(f"VIOLATION {_short(text)}")
        if found.texts:
            print(f"all {len(found.texts)} of them, whole: {self.folder / 'violations.txt'}; faults: events.log")
            print(f"the same choices: {shlex.join(['python', *sys.argv, '--seed', str(self.arguments.seed)])}")
        print("faults: " + ", ".join(f"{count} {kind}" for kind, count in sorted(campaign.faults.items())))
        print("calls: " + ", ".join(f"{count} {name}" for name, count in sorted(campaign.counts.items())))
        print(
            f"{found.acknowledged} durable puts acknowledged, {found.unknown} operations of unknown outcome, "
            f"{campaign.evicted} cache blocks evicted, {campaign.demoted} moved to disk; "
            f"{len(times)} shards served again after kill -9: p50 {middle:.2f} s, max {max(times, default=0):.2f} s"
        )
        if self.arguments.rounds:
            kinds = ", ".join(f"{found.counts[kind]} {kind}" for kind in ("lost", "back", "wrong", "hole", "order"))
            kills = f"{self.kills.total()} kills ({self.kills_at_steps} at steps)"
            print(f"{self.rounds} rounds, {kills}, {found.acknowledged} acknowledged, {kinds}")
        print(
            f"{lasted_s:.0f} s, {campaign.faults.total()} faults, {found.operations} operations, "
            f"{found.violations} violations, {found.counts['lost']} acknowledged lost"
        )


def _short(text: str) -> str:
    """Its first line and its last ones: of a history, what cannot follow."""
    lines = text.splitlines()
    if len(lines) <= SHOWN_LINES + 2:
        return text
    return "\n".join([lines[0], "  ...", *lines[-SHOWN_LINES:]])


def _terminated(*_: object) -> None:
    raise SystemExit(143)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminated)  # so that what was started is ended
    sys.exit(main())
