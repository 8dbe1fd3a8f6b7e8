"""A node: sockets, sessions, timers and neighbours around the store. Python decides here; C and hardware move the
bytes.

Promises
  - A malformed message ends its own connection and nothing else.
  - Nothing waits for a client: a slow reader of answers is not read from; its memory comes back when its process
  is gone.
  - `aclose()` says goodbye: clients see the end at once, neighbours forget this node, nothing stays behind on the host.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from typing import TYPE_CHECKING, Self

import structlog

from ucxkv import errors
from ucxkv.dial import failure_of, host_identity, mapped_error
from ucxkv.directory import FOREVER
from ucxkv.node.clustering import NO_NUMBERS, Clustering
from ucxkv.node.config import NodeConfig
from ucxkv.node.disk.tier import DiskTier
from ucxkv.node.greeting import Greeter
from ucxkv.node.keeping import Keeping
from ucxkv.node.keeping import facts as keeping_facts
from ucxkv.node.keeping import numbers as keeping_numbers
from ucxkv.node.metrics import MetricsServer
from ucxkv.node.mirror import Mirrors
from ucxkv.node.peers import PeerLinks
from ucxkv.node.placing import Placing
from ucxkv.node.requests import Requests
from ucxkv.node.service import Service
from ucxkv.node.session import PATH_KINDS, Session, SessionState, printable
from ucxkv.node.store import HostStore
from ucxkv.protocol import WIRE_VERSION, MessageError, decode, encode
from ucxkv.protocol import messages as m
from ucxkv.tiers.base import SetupFailed
from ucxkv.transport.address import TcpAddress, UnixAddress, parse_address
from ucxkv.transport.base import ProtocolError, TransportError
from ucxkv.transport.control_server import ControlServer
from ucxkv.version import VERSION
from ucxkv.whereabouts import place_of

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from types import TracebackType

    from ucxkv.node.shards.recovery import ShardRecovery
    from ucxkv.node.staging import Staging
    from ucxkv.transport.control import ControlConnection
    from ucxkv.transport.control import Message as ControlMessage

__all__ = ["Node"]

_GREETING_FRAME_BYTES = 64 << 10
_IDLE_NS = 1_000_000_000

log = structlog.get_logger("ucxkv.node")


class Node:
    """One running node. `async with Node(config) as node:` serves until the block ends; `node.address` is where."""

    def __init__(self, config: NodeConfig | None = None) -> None:
        self.config = config or NodeConfig()
        self.address = ""
        self.node_id = secrets.randbits(63) | 1
        self.epoch = int(time.time()) & 0xFFFFFFFF
        self.sessions: dict[int, Session] = {}
        self._gone: dict[int, Session] = {}  # closed, but their processes may still write into granted memory
        self._server: ControlServer | None = None
        self._metrics: MetricsServer | None = None
        self._tick: asyncio.TimerHandle | None = None
        self._tick_ns = 0
        self.tasks: set[asyncio.Task[None]] = set()
        self._started_ns = 0
        self.is_open = False
        self._has_store = False
        self.lease_end_ns = 0 if self.config.cluster else FOREVER
        self.cluster: Clustering | None = None
        self._stopped = asyncio.Event()
        self.durable: Staging | None = None
        """The durable half of the store; None where nothing durable is kept."""
        self.disk: DiskTier | None = None
        """The tier behind memory; None without one."""
        self._keeping: Keeping | None = None
        self._local_name = f"ucxkv-{self.node_id:016x}"

    # ---- life

    async def start(self) -> Self:
        """Take the memory, bind, join. Raises SetupError naming what is missing; then nothing is left behind."""
        try:
            await self._start()
        except SetupFailed as exc:
            await self.aclose()
            raise errors.SetupError(str(exc)) from exc
        except TransportError as exc:
            await self.aclose()
            raise mapped_error(exc, self.config.name) from exc
        except BaseException:
            await self.aclose()
            raise
        return self

    async def _start(self) -> None:
        config = self.config
        self._loop = asyncio.get_running_loop()
        self._started_ns = time.monotonic_ns()
        listen = parse_address(config.listen)
        taking = asyncio.ensure_future(self._take_memory())
        try:
            recovery = await asyncio.shield(taking)
        except asyncio.CancelledError:
            await asyncio.gather(taking, return_exceptions=True)  # its threads still work on what aclose gives back
            raise
        self.store.serving.until(self.lease_end_ns)
        self.service = Service(config, self.store, self.placing)
        self._greeter = Greeter(config.token, self._welcome)
        self._requests = Requests(self, self._loop)
        self._server = await ControlServer.start(
            [listen, UnixAddress(self._local_name)],
            self._on_message,
            on_connect=self._on_connect,
            max_connections=config.connections_max,
            max_frame_bytes=_GREETING_FRAME_BYTES,
        )
        bound = self._server.addresses[0]
        if isinstance(bound, TcpAddress) and not bound.is_loopback and not config.token:
            log.warning(
                "node.open",
                address=str(bound),
                why="no token is set: anyone who reaches this address may read and write",
            )
        self.address = config.advertise or str(bound)
        if isinstance(bound, TcpAddress):
            await self.service.listen(bound.host, time.monotonic_ns() + 10_000_000_000)
        self.is_open = True
        if config.metrics_listen:
            self._metrics = MetricsServer(config.metrics_listen, self._numbers, config.name)
            log.info("metrics.start", address=self._metrics.address)
        own = m.MemberInfo(self.node_id, config.name, self.address, self.epoch, weight=config.host_bytes / (1 << 30))
        self.mirrors = Mirrors(own, config.token, ucx_library=config.ucx_library)
        self.peers = PeerLinks(own, config.token, self)
        self._wake_at(None)
        if config.join:
            await self.peers.join(config.join)
        if config.cluster:
            self.cluster = Clustering(self, own, recovery)
            await self.cluster.start()
            if self.cluster.shards is not None and self.cluster.keeps_durable:
                self.durable = self.cluster.shards.writes
        log.info(
            "node.start",
            name=config.name,
            address=self.address,
            epoch=self.epoch,
            **self.store.facts(),
            **keeping_facts(self.config, self.durable),
            **self.service.facts(),
            **self.placing.facts(),
        )

    async def _take_memory(self) -> ShardRecovery | None:
        """The store, with what was kept, and the tier behind it; what a shard's logs need of before, if anything."""
        config = self.config
        self.placing = await asyncio.to_thread(Placing, config)
        keeping = self._keeping = await Keeping.open(config, self.epoch, self.placing)
        self.epoch = self.epoch if keeping is None else keeping.epoch
        memory = None if keeping is None else keeping.memory
        try:
            self.store = await asyncio.to_thread(
                self.placing.near, HostStore, config, self.node_id, self.epoch, self._wake_at, memory
            )
        except BaseException:
            if memory is not None:
                memory.close()
            raise
        recovery = None
        if keeping is not None and config.cluster:
            recovery = await keeping.recover_shards(self.store)
        elif keeping is not None:
            self.durable = await keeping.recover(self.store)
        if config.disk:
            self.disk = await DiskTier.open(config, self.store)
            self.disk.start()
        self._has_store = True
        return recovery

    async def serve_forever(self) -> None:
        """Wait until `stop()`."""
        await self._stopped.wait()

    def stop(self) -> None:
        """Ask `serve_forever` to return. Safe to call from a signal handler of the loop."""
        self._stopped.set()

    async def aclose(self) -> None:
        """Stop serving and give everything back. Idempotent."""
        was_open, self.is_open = self.is_open, False
        self.lease_until(0)
        if self.cluster is not None:
            await self.cluster.leave()
        self._has_store = False
        self._stopped.set()
        if self._tick is not None:
            self._tick.cancel()
            self._tick = None
        if self._server is not None:
            self._server.stop_accepting()
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        if self.cluster is not None:
            await self.cluster.aclose()
        if self._keeping is not None:
            await self._keeping.aclose()
        if self.disk is not None:
            await self.disk.aclose()
        if hasattr(self, "store"):
            self.store.keep_books()
        if hasattr(self, "mirrors"):
            await self.mirrors.aclose()
        if hasattr(self, "peers"):
            await self.peers.aclose()
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.close)
            self._metrics = None
        if self._server is not None:
            self._server.close()
            self._server = None
        for session in list(self._gone.values()):
            self._release(session)
        if hasattr(self, "service"):
            self.service.close()
        if hasattr(self, "store"):
            self.store.close()
        if self._keeping is not None:
            self._keeping.release()
        if was_open:
            log.info("node.stop", name=self.config.name)

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    # ---- the serving lease

    def lease_until(self, end_ns: int) -> None:
        """Serve until this `time.monotonic_ns()` and not after it: FOREVER, as a node without a cluster does, or 0.

        For the code that holds this node's lease: counted from before it asked. A fence, not a timer; see
        `ucxkv.node.serving`. May be called before `start`.
        """
        self.lease_end_ns = end_ns
        if self._has_store:
            self.store.serving.until(end_ns)

    def begin_epoch(self, epoch: int) -> None:
        """Go over to a new epoch with what is visible, after somebody else may have led; ends the lease. Before
        `start`: the epoch to start with.
        """
        self.epoch = epoch
        self.lease_end_ns = 0
        if self._has_store:
            self.store.epoch = epoch
            self.store.serving.begin_epoch(epoch)

    def _wake_at(self, due_ns: int | None) -> None:
        """Let time pass at `due_ns`, when something falls due there, and once a second in any case."""
        now_ns = time.monotonic_ns()
        due_ns = now_ns + _IDLE_NS if due_ns is None else min(due_ns, now_ns + _IDLE_NS)
        if self._tick is not None:
            if self._tick_ns <= due_ns:
                return
            self._tick.cancel()
        self._tick_ns = due_ns
        self._tick = self._loop.call_later(max(0.0, (due_ns - now_ns) / 1e9), self._let_time_pass)

    def _let_time_pass(self) -> None:
        self._tick = None
        if self.is_open:
            self.tell_surrendered(self.store.tick(time.monotonic_ns()))
            self._wake_at(self.store.next_ns())

    # ---- connections

    def _on_connect(self, connection: ControlConnection) -> None:
        session = Session(connection)
        connection.owner = session
        connection.on_closed(self._on_closed)
        delay_s = self.config.handshake_ms_max / 1e3
        session.greeting_timer = self._loop.call_later(delay_s, self._greeting_over, session)

    def _greeting_over(self, session: Session) -> None:
        if session.state in (SessionState.GREETING, SessionState.PROVING):
            session.connection.abort(ProtocolError("no handshake in time"))

    def _on_closed(self, connection: ControlConnection) -> None:
        session = connection.owner
        assert isinstance(session, Session)
        before, session.state = session.state, SessionState.CLOSED
        session.end_greeting()
        connection.owner = None  # no cycle: thousands that come and go do not wait for the garbage collector
        if self.sessions.pop(session.id, None) is None:
            session.close_pidfd()
            return
        if session.role == "node":
            self.peers.session_ended(session.id)
        may_write = before is SessionState.OPEN and session.writes_alone
        if self.service.serves(session.id):
            self.spawn(self._end_data(session, may_write))
        else:
            self._end_grants(session, may_write)

    async def _end_data(self, session: Session, may_write: bool) -> None:
        """Close a session's data path; what could still be written through it stays out of use."""
        try:
            is_clean = await self.service.close_session(session.id)
        except BaseException:  # the node closes, and its memory goes with it
            session.close_pidfd()
            raise
        if not is_clean:
            log.error("session.stuck", name=session.name, session=session.id)
        self._end_grants(session, may_write or not is_clean)

    def _end_grants(self, session: Session, may_write: bool) -> None:
        """What a session that ended was granted is free, or waits for the end of its process."""
        quarantined = self.store.close_session(session.id, may_still_write=may_write, now_ns=time.monotonic_ns())
        log.debug("session.end", name=session.name, pid=session.pid, quarantined_bytes=quarantined)
        if quarantined and session.pidfd >= 0 and self.is_open:
            self._gone[session.id] = session
            self._loop.add_reader(session.pidfd, self._release, session)
        else:
            session.close_pidfd()

    def _release(self, session: Session) -> None:
        """The process of a vanished session has ended: what it could still have written is free."""
        if self._gone.pop(session.id, None) is not None:
            self._loop.remove_reader(session.pidfd)
            session.close_pidfd()
            self.store.space.writer_gone(session.id)

    def _welcome(self, session: Session) -> m.Welcome:
        if self.config.cluster and session.role == "client" and not self._has_shards():
            raise errors.Unavailable("this node is still joining its cluster; try again")
        self.sessions[session.id] = session
        session.connection.max_frame_bytes = 64 << 20
        shards = self.cluster.shards if self.cluster is not None else None
        return m.Welcome(
            wire_version=WIRE_VERSION,
            version=VERSION,
            node_id=self.node_id,
            name=self.config.name,
            address=self.address,
            epoch=self.epoch,
            host=host_identity(),
            local_name=self._local_name,
            session=session.id,
            table_bytes=self.store.table_bytes,
            table_capacity=self.store.table.capacity,
            value_bytes_max=self.store.value_bytes_max,
            regions=self.store.regions(),
            members=self.peers.members(),
            data_address=self.service.address,
            data_why_off=self.service.why_off,
            data_port=self.service.port,
            place=place_of(self.placing.placement.numa, self.service.rails),
            durability="replicas" if self.durable is not None and self._keeping is None else self.config.durability,
            shards=0 if shards is None else len(shards.shards),
            led=b"" if shards is None else shards.led,
            leaders=self._leaders(),
            has_disk=self.disk is not None,
        )

    def _has_shards(self) -> bool:
        return self.cluster is not None and self.cluster.shards is not None

    def _leaders(self) -> list[str]:
        shards = self.cluster.shards if self.cluster is not None else None
        return [] if shards is None else shards.leaders

    # ---- messages

    def _on_message(self, connection: ControlConnection, message: ControlMessage) -> None:
        session = connection.owner
        assert isinstance(session, Session)
        try:
            request = decode(message.type, message.payload)
        except MessageError as exc:
            raise ProtocolError(str(exc)) from exc
        try:
            if session.is_open:
                answer = self._requests.answer(session, request, message)
            else:
                answer = self._greeter.handle(session, request)
        except errors.UcxKvError as exc:
            answer = failure_of(exc)
        if answer is None or not connection.is_open:
            return
        if message.request_id:
            fds = self.store.memory_fds() if isinstance(answer, m.Welcome) and session.hello_wants_memory else ()
            connection.reply(message, answer.CODE, encode(answer), fds=fds)
        if isinstance(answer, m.Failure) and not session.is_open:
            self._loop.call_later(0.2, connection.abort)  # the handshake failed; let the answer arrive

    def spawn(self, work: Coroutine[object, object, None]) -> None:
        """Run this until the node ends."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def tell_surrendered(self, surrendered: dict[int, m.Surrender]) -> None:
        """Give other nodes the extents back that this shard needs no longer."""
        for node_id, message in surrendered.items():
            self.peers.tell(node_id, message)

    # ---- neighbours

    def peer_lost(self, member: m.MemberInfo) -> None:
        """See PeerListener."""
        self.store.node_lost(member, time.monotonic_ns())

    def members_changed(self) -> None:
        """See PeerListener: clients are told."""
        message = m.Members(members=self.peers.members(), leaders=self._leaders())
        payload = encode(message)
        for session in list(self.sessions.values()):
            if session.is_open and session.role == "client":
                with contextlib.suppress(TransportError):
                    session.connection.send(message.CODE, payload)

    # ---- the cluster

    def resign(self, why: str) -> None:
        """This node can't hold what it holds of the cluster any more: let others take over."""
        if self.cluster is not None:
            self.spawn(self.cluster.membership.resign(why))

    # ---- the report

    def _numbers(self) -> dict[str, float]:
        server = self._server
        paths = Counter(session.path_kind for session in self.sessions.values())
        return {
            **self.store.numbers(),
            **keeping_numbers(self.durable),
            **self.service.numbers(),
            "connections": len(self.sessions),
            "connections_refused": server.refused_count if server else 0,
            "nodes": len(self.peers.members()),
            "vanished_writers": len(self._gone),
            **(self.cluster.numbers() if self.cluster is not None else NO_NUMBERS),
            **{f"connections_{kind}": paths[kind] for kind in PATH_KINDS},
        }

    def connections(self) -> list[m.ConnectionInfo]:
        """What `GetConnections` answers."""
        return [
            m.ConnectionInfo(printable(s.name), s.role, s.host, s.path_kind, s.way, s.why)
            for s in sorted(self.sessions.values(), key=lambda session: (session.role, session.name))
        ]

    def report(self) -> m.NodeReport:
        """What `GetStatus` answers."""
        return m.NodeReport(
            name=self.config.name,
            address=self.address,
            version=VERSION,
            epoch=self.epoch,
            uptime_s=(time.monotonic_ns() - self._started_ns) / 1e9,
            numbers=self._numbers(),
            facts={
                **self.store.facts(),
                **keeping_facts(self.config, self.durable),
                **self.service.facts(),
                **self.placing.facts(),
                **(self.cluster.facts() if self.cluster is not None else {}),
            },
        )
