"""A fault run from start to end: machines, clients, faults, the last reading and what is wrong with it.

Everything that is found is in `findings`: what the history says (tests/cluster/judging.py), and what only a witness
can: a node that ended by itself, a call that outlived its deadline, a cluster that does not serve again."""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cluster.faults import KINDS, Blow, Field, draw
from tests.cluster.judging import Findings, failovers, judge
from tests.cluster.machines import CLIENT_HOST, WATCH_HOST, Machines
from tests.cluster.record import Recorded
from tests.cluster.workers import WorkerProcess, Workers
from ucxkv.sizes import parse_size

__all__ = ["Campaign"]

_READY_S = 90.0
_PAUSE_S = 60.0
_TICK_S = 0.02


class Campaign:
    """`with Campaign(options, folder) as campaign:` everything runs and the clients wait. options: of the script."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.lease_s = options.lease_ms / 1000
        self.rng = random.Random(f"faults {options.seed}")
        self.faults: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.findings = Findings()
        self.recorded = Recorded(folder)
        self.deaths: list[tuple[int, list[int]]] = []
        self._started_ns = time.monotonic_ns()
        self._events = (folder / "events.log").open("a")
        self._open = contextlib.ExitStack()
        self._open.callback(self._events.close)
        self._workers = Workers(self._told)
        self._probes = 0
        self._evicted: dict[tuple[str, int], tuple[int, int]] = {}

    # ---- making and ending

    def __enter__(self) -> Campaign:
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End everything; logs and history stay in the folder."""
        self._workers.close()
        self._open.close()

    def _build(self) -> None:
        o = self.options
        flags = ["--cluster-lease-ms", str(o.lease_ms)]
        if o.replicas:
            flags += ["--replicas", str(o.replicas), "--cluster-shards", str(o.shards)]
        self.machines = Machines(
            self.folder, o.nodes, in_namespaces=o.namespaces, durability=o.durability, flags=flags,
            host_bytes=o.host_bytes, disk_bytes=o.disk_bytes,
        )  # fmt: skip
        self._open.enter_context(self.machines)
        self.field = Field(self.machines)
        late = self.machines.await_ready(_READY_S, self._workers.poll)
        if late:
            raise RuntimeError(f"not ready: {late}; {self.machines.nodes[0].tail()}")
        # clients on a host of their own, and others on nodes' hosts, which map their memory
        places = [CLIENT_HOST, *(node.host for node in self.machines.nodes)]
        for at in range(o.clients):
            arguments = ["--fill-bytes", str(o.fill_bytes if at == 0 else 0)]
            arguments += ["--burst-bytes", str(2 * o.nodes * parse_size(o.host_bytes))]
            self._workers.all.append(self._worker(f"w{at}", places[at % len(places)], at, arguments))
        self.watcher = self._worker("watch", WATCH_HOST, o.clients, ["--watch", "--tasks", "0"])
        self._workers.all.append(self.watcher)
        self._workers.await_all(self._workers.all, "ready", _READY_S, self._tick)
        if o.replicas:
            self._until(lambda: len(self.field.shards) == o.shards, _READY_S, "every shard has a leader")
        self.serve("start")

    def _worker(self, name: str, place: str, at: int, more: list[str]) -> WorkerProcess:
        o = self.options
        arguments = [
            "--cluster", self.machines.url, "--nodes", ",".join(node.address for node in self.machines.nodes),
            "--seed", str(o.seed), "--number", str(at), "--processes", str(o.clients), "--tasks", str(o.tasks),
            "--shards", str(o.shards), "--pause-ms", str(o.pause_ms), "--life-s", str(o.life_s),
            "--deadline-s", str(2 * self.lease_s), *more,
        ]  # fmt: skip
        arguments += [*(["--is-sharded"] if o.replicas else []), *([] if o.namespaces else ["--mixed-paths"])]
        return WorkerProcess(name, self.folder, self.machines.argv(place), arguments)

    @property
    def loaders(self) -> list[WorkerProcess]:
        """The workers that put and read."""
        return [worker for worker in self._workers.all if worker is not self.watcher]

    # ---- time

    def note(self, text: str) -> None:
        """Write it down, with its time since the start, and as operations have it."""
        now_ns = time.monotonic_ns()
        since_s = (now_ns - self._started_ns) / 1e9
        print(f"{since_s:9.3f} s  {now_ns / 1e6:.3f} ms  {text}", file=self._events, flush=True)

    def complain(self, kind: str, text: str) -> None:
        """Something that must not be."""
        self.note(f"VIOLATION {kind}: {text}")
        self.findings.add(kind, text)

    def _told(self, said: dict[str, Any]) -> None:
        """What workers say without being asked."""
        if said["event"] == "shards":
            if said["shards"] != self.field.shards:
                self.note(f"shards: {json.dumps(said['shards'])}")
            self.field.shards = said["shards"]
        elif said["event"] == "evicted":
            self._evicted.update({(name, epoch): (gone, moved) for name, epoch, gone, moved in said["nodes"]})
        elif said["event"] == "hang":
            self.complain("hang", said["what"])
        else:
            why = said.get("why") or (self.folder / f"{said['worker']}.log").read_text()[-3000:]
            raise RuntimeError(f"client process {said['worker']} {said['event']}: {why}")

    def _tick(self) -> None:
        self.machines.poll()
        for node in self.machines.nodes:
            while node.surprises:
                self.complain("ended", node.surprises.pop())

    def sleep(self, seconds: float) -> None:
        """Look after everything for so long."""
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            self._tick()
            self._workers.poll()
            time.sleep(min(_TICK_S, max(0.0, until_s - time.monotonic())))

    def sleep_until(self, is_so: Callable[[], bool], seconds: float) -> None:
        """Look after everything until it is so, or for so long."""
        until_s = time.monotonic() + seconds
        while not is_so() and time.monotonic() < until_s:
            self.sleep(_TICK_S / 4)

    def _until(self, is_so: Callable[[], bool], seconds: float, what: str) -> bool:
        until_s = time.monotonic() + seconds
        while not is_so():
            if time.monotonic() > until_s:
                self.complain("progress", f"not within {seconds:.0f} s: {what}; shards {json.dumps(self.field.shards)}")
                return False
            self.sleep(_TICK_S)
        return True

    # ---- what a run is made of

    def go(self, prefix: str) -> None:
        """Let the clients work on chains of this prefix."""
        for worker in self.loaders:
            worker.ask("go", prefix)
        self._workers.await_all(self.loaders, "going", _PAUSE_S, self._tick)

    def pause(self) -> None:
        """Let them end what they began."""
        for worker in self.loaders:
            worker.ask("pause")
        self.counts.clear()
        for said in self._workers.await_all(self.loaders, "paused", _PAUSE_S, self._tick):
            self.counts.update(said["counts"])

    def serve(self, why: str) -> bool:
        """Wait until all nodes are ready and every shard stores a put; whether it did in time."""
        bound_s = 30 + 10 * self.lease_s
        late = self.machines.await_ready(bound_s, self._workers.poll)
        for name in late:
            self.complain("progress", f"{name} is not ready {bound_s:.0f} s after {why}")
        self._probes += 1
        self.watcher.ask("probe", f"probe{self._probes}", bound_s)
        (said,) = self._workers.await_all([self.watcher], "probed", bound_s + _PAUSE_S, self._tick)
        slowest = max(said["served"].values(), default=0.0)
        self.note(f"served again {slowest:.2f} s after {why}")
        if said["missing"]:
            self.complain("progress", f"shards {said['missing']} store nothing within {bound_s:.0f} s of {why}")
        return not said["missing"] and not late

    def strike(self, kind: str, dice: int) -> Blow | None:
        """One fault; None when it cannot be now."""
        before_ns = time.monotonic_ns()
        led = {node.name: self.field.led_by([node.name]) for node in self.machines.nodes}
        blow = KINDS[kind](self.field, random.Random(dice))
        if blow is not None:
            self.faults[kind] += 1
            self.note(f"FAULT {blow.text}")
            if blow.dead:
                self.deaths.append((before_ns, [shard for node in blow.dead for shard in led[node.name]]))
        return blow

    def undo(self, blow: Blow) -> None:
        """End a fault."""
        self.note(f"over: {blow.text}")
        blow.undo()

    def faults_once(self) -> None:
        """Some faults, overlapping, all over in the end."""
        o = self.options
        is_memory = o.durability == "memory"
        planned = draw(self.rng, self.lease_s, has_network=o.namespaces, durability=o.durability)
        if is_memory and any(fault.kind == "kill" for fault in planned):
            self.await_in_sync("the next kill was due")
        began_s = time.monotonic()
        todo = [(began_s + fault.after_s, fault) for fault in planned]
        active: list[tuple[float, Blow]] = []
        while todo or active:
            if todo and todo[0][0] <= time.monotonic():
                _, fault = todo.pop(0)
                blow = self.strike(fault.kind, fault.dice)
                if blow is not None:
                    active.append((time.monotonic() + fault.span_s, blow))
            for item in [item for item in active if item[0] <= time.monotonic()]:
                active.remove(item)
                self.undo(item[1])
            self.sleep(_TICK_S)

    def await_in_sync(self, why: str) -> None:
        """Wait until every shard has all its replicas again."""
        if self.options.replicas:
            what = f"every shard has all its replicas, since {why}"
            self._until(self._is_in_sync, 30 + 10 * self.lease_s, what)

    def _is_in_sync(self) -> bool:
        full = min(len(self.machines.nodes), self.options.replicas)
        return all(len(said["insync"]) >= full for said in self.field.shards.values())

    # ---- the last reading

    def audit(self, names: list[str]) -> None:
        """Read every block of these chains, while the clients wait."""
        path = self.folder / "audit.json"
        path.write_text(json.dumps(names))
        bound_s = 60.0 + 0.05 * len(names)
        self.watcher.ask("audit", path, bound_s)
        (said,) = self._workers.await_all([self.watcher], "audited", 2 * bound_s + _PAUSE_S, self._tick)
        for name in said["unread"]:
            self.complain("unread", f"chain {name}: no answer within {bound_s:.0f} s of the last reading")

    def conclude(self) -> Findings:
        """Read everything, and say what is wrong with all that was seen."""
        self.recorded.read()
        self.audit(list(self.recorded.chains))
        self.recorded.read()
        self.note("judging")
        found = judge(self.recorded.chains)
        for text in found.texts:
            self.note(f"VIOLATION {text.splitlines()[0]}")
        found.counts.update(self.findings.counts)
        found.texts = self.findings.texts + found.texts
        self.findings = found
        return found

    @property
    def evicted(self) -> int:
        """Blocks that nodes evicted, as far as they were asked before they died."""
        return sum(gone for gone, _ in self._evicted.values())

    @property
    def demoted(self) -> int:
        """Times that blocks left memory for the disk, told likewise."""
        return sum(moved for _, moved in self._evicted.values())

    @property
    def failovers(self) -> list[float]:
        """See `tests.cluster.judging.failovers`, in order of length."""
        return sorted(failovers(self.recorded.chains, self.deaths))
