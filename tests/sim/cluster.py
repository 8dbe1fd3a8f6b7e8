"""A simulated cluster under faults, from one seed: three nodes, a control plane, clients, and what is checked of them.

    run(seed) -> Report     faults for some seconds of virtual time, then quiet; then all checks

Checked: every chain's history is linearizable (tests/sim/linear.py), so no acknowledged durable block is lost; the
invariants of tests/sim/witness.py after every event; and liveness: with the faults over, a put and a look at every
chain are answered within some seconds, all nodes that should hold the shard are in sync, and their states are equal.

The faults take no more than the guarantee allows: a disk is lost (or, where nothing is synced, a node's power) only
while another member of the in-sync set still has its log. Where that set shrank at the very moment of the loss, the
shard stands still for good, rightly: such a run is counted as `is_spent` and is not asked for liveness."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from tests.control.memory import Store
from tests.sim.client import Client
from tests.sim.clock import Clock
from tests.sim.control import SERVER, ProcessClock, Server
from tests.sim.faults import Fault, Plan
from tests.sim.history import History
from tests.sim.linear import ChainModel, TooHard, check
from tests.sim.loop import SECOND, SimLoop, SimulationError
from tests.sim.network import Link, Network
from tests.sim.node import CONFIG_KEY, Node, Settings, decode_config
from tests.sim.process import DiskFate, Host, Process
from tests.sim.witness import Witness
from ucxkv.replication import Member, ShardConfig, Timing
from ucxkv.replication import events as ev

__all__ = ["Cluster", "Report", "run"]

MS = 1_000_000
NODES = ("n1", "n2", "n3")
DURABLE, CACHE = ("d1", "d2"), ("c1",)
QUIET_NS = 12 * SECOND


@dataclass
class Report:
    """What one seed came to."""

    seed: int
    faults: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    is_spent: bool = False
    operations: int = 0
    unknown: int = 0
    reads: int = 0
    epochs: int = 0
    entries: int = 0
    restores: int = 0
    steps: int = 0
    virtual_ns: int = 0
    timeline: list[str] = field(default_factory=list)


def timing(rng: random.Random, insync_min: int) -> Timing:
    """Short times, small windows: everything happens within seconds, snapshots too."""
    return Timing(
        heartbeat_ns=100 * MS,
        resend_ns=150 * MS,
        silence_ns=400 * MS,
        retry_ns=100 * MS,
        batch_bytes=rng.choice((60, 400)),
        inflight_records=rng.choice((2, 16)),
        pending_records=rng.choice((4, 64)),
        window_records=rng.choice((2, 4, 20, 100)),
        insync_min=insync_min,
    )


class Cluster:
    """All that is simulated, and the hands that faults have on it. changes: of the nodes' settings (planted bugs)."""

    def __init__(self, seed: int, *, is_traced: bool = False, **changes: object) -> None:
        self.seed = seed
        self.random = random.Random(f"cluster {seed}")
        rng = self.random
        self.is_traced = is_traced
        self.report = Report(seed)
        self.loop = SimLoop(seed, steps_limit=400_000)
        self.network = Network(self.loop, seed)
        self.history = History()
        self.witness = Witness(self.loop)
        self.wish = NODES[: rng.choice((1, 2, 2, 3, 3, 3))]
        insync_min = rng.choice((1, 1, 1, min(2, len(self.wish))))
        settings: dict[str, object] = {"timing": timing(rng, insync_min), "is_synced": rng.random() < 0.7}
        settings["disk_max_ns"] = rng.choice((1, 3, 20, 200)) * MS
        settings |= changes
        self.settings = Settings(**settings)  # type: ignore[arg-type]
        self.lost: set[Member] = set()
        self._claims: dict[str, frozenset[Member]] = {}
        self.nodes: dict[str, Node] = {}
        self.hosts: dict[str, Host] = {}
        self.is_over = False
        self.is_calm = False
        self.busy_until_ns = 0
        """A fault of several steps ends then."""
        self._boot_control()
        self.network.default = Link(delay_min_ns=50_000, delay_max_ns=3 * MS)
        for name in NODES:
            clock = Clock(rng.randrange(10**12), rng.choice((-10_000, -5_000, 0, 5_000, 10_000)))
            self.hosts[name] = Host(self.loop, name, self._boot, clock=clock, seed=seed)
            self._link_node(name, is_ordered=rng.random() < 0.5)
        self.clients: list[Client] = []
        for number in range(rng.randint(2, 4)):
            host = Host(self.loop, f"k{number}", lambda process: None, clock=Clock(0, 0))
            client = Client(
                host.start(), self.network, self.history, self.witness, f"{seed} {number}", NODES, (*DURABLE, *CACHE),
                reads_everywhere=self.settings.reads_everywhere,
            )  # fmt: skip
            self.clients.append(client)

    # ---- building

    def _boot_control(self) -> None:
        clock = Clock(0, self.random.choice((-10_000, 0, 10_000)))
        self.control_host = Host(self.loop, SERVER, self._boot_server, clock=clock)
        self.store: Store | None = None
        self.control_host.start()

    def _boot_server(self, process: Process) -> None:
        self.store = Store(ProcessClock(process))
        server = Server(process, self.network, self.store)
        self.server = server
        store = self.store

        def watch_time() -> None:
            store.expire()
            server.tell()
            process.at(process.now_ns() + 50 * MS, watch_time)

        watch_time()

    def _link_node(self, name: str, *, is_ordered: bool) -> None:
        for other in NODES:
            if other != name:
                self.network.shape(name, other, is_ordered=is_ordered, breaks=False)
        for source, destination in ((f"{name}.control", SERVER), (SERVER, f"{name}.control")):
            self.network.shape(source, destination, is_ordered=False)

    def _boot(self, process: Process) -> None:
        name = process.host_name
        rng = random.Random(f"node {self.seed} {process.name}")
        self.nodes[name] = Node(
            self.hosts[name], process, self.network, self.witness, self.settings, self.wish, rng, self.note
        )

    def note(self, what: str) -> None:
        """For the timeline of a failing run."""
        if self.is_traced:
            self.report.timeline.append(f"{self.loop.now_ns / 1e6:10.3f} ms  {what}")

    # ---- what faults may do

    def did(self, kind: str, what: str) -> None:
        """Count a fault."""
        self.report.faults[kind] += 1
        self.note(f"FAULT {kind}: {what}")

    @property
    def config(self) -> ShardConfig | None:
        """As the control plane has it now."""
        assert self.store is not None
        held = self.store.entries.get(CONFIG_KEY)
        return None if held is None else decode_config(held.entry.value)

    @property
    def leader(self) -> str:
        """The name of who leads by the configuration."""
        config = self.config
        return NODES[0] if config is None else config.leader.name

    def claims(self, name: str) -> frozenset[Member]:
        """Whose logs a node proves, alive, or may prove by its disk: after a restart, also one whose journal failed."""
        if self.hosts[name].is_up and name in self.nodes:
            node = self.nodes[name]
            return frozenset(node.replica.claims) | node.written_claims
        return self._claims.get(name, frozenset())

    def proves(self, name: str) -> frozenset[Member]:
        """Whose logs a node surely proves, now or after a restart."""
        is_failed = self.hosts[name].is_up and self.nodes[name].replica.role.value == "failed"
        return frozenset() if is_failed else self.claims(name)

    def may_lose(self, name: str) -> bool:
        """Whether another node still proves a member of the in-sync set."""
        config = self.config
        if config is None:
            return False
        if not self.claims(name) & config.insync:
            return True
        return any(self.proves(other) & config.insync for other in NODES if other != name)

    def crash(self, name: str) -> bool:
        """kill -9; the disk's fate is decided at the restart."""
        host = self.hosts[name]
        if not host.is_up:
            return False
        self._claims[name] = self.claims(name)
        host.kill()
        return True

    def restart(self, name: str, fate: DiskFate) -> None:
        """Boot it again, with a fate of its disk that the guarantee allows."""
        if self.hosts[name].is_up:
            return
        loses = fate in ("empty", "damaged") or (fate == "torn" and not self.settings.is_synced)
        if loses and not self.may_lose(name):
            fate = "kept"
            loses = False
        if loses:
            self.lost |= self._claims.get(name, frozenset())
        self.note(f"restart of {name}, disk {fate}")
        self.hosts[name].start(fate)

    def set_wish(self, names: tuple[str, ...]) -> None:
        """Other nodes are to hold the shard."""
        self.wish = names
        for name in NODES:
            if self.hosts[name].is_up:
                self.nodes[name].wish = names
                self.at_node(name, ev.Wish(names))

    def at_node(self, name: str, event: ev.Event) -> None:
        """Let a node handle an event of its operator."""
        node = self.nodes[name]
        if not node.process.dead:
            self.loop.soon(node.handle, (event,), node.process.context, node.process)

    # ---- the run

    def run(self, plan: Plan) -> Report:
        """Faults, quiet, checks."""
        report = self.report
        try:
            self._run(plan)
        except (SimulationError, AssertionError, Exception) as error:
            report.violations.append(f"{type(error).__name__}: {error}")
            self.note(f"ended by {error!r}")
            if self.is_traced:
                import traceback

                report.timeline += traceback.format_exc().splitlines()
        self._close()
        return report

    def _run(self, plan: Plan) -> None:
        loop, rng = self.loop, self.random
        for name in NODES:
            loop.at(0, self.hosts[name].start)
        loop.run_for_ns(SECOND // 2)
        pause_s = rng.choice((0.05, 0.1, 0.2))
        for client in self.clients:
            client.process.spawn(client.work(lambda: self.is_over, pause_s), "work")
        if CACHE:
            loop.at(loop.now_ns, self._evict)
        for fault in plan.faults:
            loop.at(loop.now_ns + fault.at_ns, self._inject, (fault,))
        loop.run_for_ns(plan.span_ns)
        loop.run_until_ns(max(loop.now_ns, self.busy_until_ns))
        self._calm()
        loop.run_for_ns(2 * SECOND)
        self.is_over = True
        self._finish()

    def _inject(self, fault: Fault) -> None:
        fault.act(self)

    def _evict(self) -> None:
        for name in NODES:
            node = self.nodes[name]
            if not node.process.is_held and self.random.random() < 0.3:
                self.loop.soon(node.door.evict, (CACHE[0],), node.process.context, node.process)
        if not self.is_over:
            self.loop.at(self.loop.now_ns + 150 * MS, self._evict)

    def _calm(self) -> None:
        """End all faults."""
        self.note("the faults are over")
        self.is_calm = True
        self.network.heal_all()
        for way in list(self.network.links):
            self.network.shape(*way, drop=0.0, duplicate=0.0, late=0.0)
        self.control_host.wake()
        for name in NODES:
            self.hosts[name].wake()
            self.nodes[name].fails_sync = False
            self.loop.at(self.loop.now_ns, self.restart, (name, "kept"))
        self.loop.at(self.loop.now_ns + SECOND, self._replace_failed)

    def _replace_failed(self) -> None:
        """An operator restarts the nodes whose journals failed."""
        for name in NODES:
            node = self.nodes[name]
            if not node.process.dead and node.replica.role.value == "failed":
                self.crash(name)
                self.restart(name, "kept")

    def _finish(self) -> None:
        """Liveness, convergence, the last reads."""
        loop, client = self.loop, self.clients[0]
        done: list[str] = []

        async def last() -> None:
            for chain in DURABLE:
                while not await client.put(chain):
                    pass
            for chain in (*DURABLE, *CACHE):
                while not await client.look(chain):
                    pass
            done.append("all")

        client.process.spawn(last(), "last")
        end_ns = loop.now_ns + QUIET_NS
        while loop.now_ns < end_ns and not (done and self._unequal() == ""):
            loop.run_for_ns(200 * MS)
        if self._is_spent():
            self.report.is_spent = True
            return
        if not done:
            self.witness.complain(f"liveness: no put and look within {QUIET_NS / 1e9} s of quiet; {self._state()}")
        elif self._unequal():
            self.witness.complain(f"liveness: no convergence: {self._unequal()}; {self._state()}")

    def _is_spent(self) -> bool:
        config = self.config
        return config is not None and config.insync <= self.lost

    def _unequal(self) -> str:
        """Why the nodes that hold the shard are not yet alike; empty when they are."""
        config = self.config
        if config is None:
            return "no configuration"
        names = {member.name for member in config.insync}
        if not set(self.wish) <= names <= {*self.wish, config.leader.name}:  # a leader stays until it is told to go
            return f"in sync: {sorted(config.insync)}, wished: {self.wish}"
        states = {}
        for name in self.wish:
            node = self.nodes[name]
            states[name] = (node.chains.index, node.replica.watermark, node.replica.log.last_index, node.chains.state())
        first = states[self.wish[0]]
        if any(state != first for state in states.values()):
            return f"states differ: {states}"
        return ""

    def _state(self) -> str:
        rows = [f"config {self.config}"]
        for node in self.nodes.values():
            replica = node.replica
            rows.append(
                f"{node.process.name} dead={node.process.dead} {replica.role} epoch {replica.epoch} "
                f"log {replica.log.last_index} watermark {replica.watermark} claims {sorted(replica.claims)}"
            )
        return "; ".join(rows)

    def _close(self) -> None:
        report, witness = self.report, self.witness
        report.violations += witness.violations
        operations = self.history.operations
        report.operations = len(operations)
        report.unknown = sum(not operation.is_known for operation in operations)
        report.reads = sum(client.counts["read"] for client in self.clients)
        report.epochs = self.config.epoch if self.config is not None else 0
        report.entries = witness.reference.index
        report.restores = witness.restores
        report.steps = self.loop.steps
        report.virtual_ns = self.loop.now_ns
        for chain in (*DURABLE, *CACHE):
            history = self.history.of_chain(chain)
            try:
                verdict = check(history, ChainModel(is_durable=chain in DURABLE))
            except TooHard as error:
                report.violations.append(f"chain {chain}: {error}")
                continue
            if not verdict.is_linearizable:
                report.violations.append(f"chain {chain} of {len(history)} operations is {verdict}")
        if self.is_traced:
            report.timeline += [str(operation) for operation in operations]
        self.loop.close()


def run(seed: int, *, is_traced: bool = False, **changes: object) -> Report:
    """One seed, from nothing to its report."""
    cluster = Cluster(seed, is_traced=is_traced, **changes)
    return cluster.run(Plan.of_seed(seed))
