"""Control messages, as frozen msgspec structs encoded as msgpack arrays.

Every message has a type code (class constant `CODE`, in the frame's `type` field) and travels as the frame's payload.
Fields are only ever appended, with defaults, within one wire version; anything else raises `WIRE_VERSION`,
and so does any change of the data service's messages (`transport/wire.h`), which have no version of their own.
Arrays travel as raw little-endian bytes so that nothing is boxed a key: `keys` and `parents` are n x 16 bytes,
`offsets` n x u64, `lengths` n x u32, `regions` n x u16, `sums` n x u64, `status` n x u8.

| direction | request -> answer |
|---|---|
| any -> node | Hello -> Welcome, or Challenge; Proof -> Welcome |
| client -> node | OpenData -> DataOpened; Grant -> Granted; Put, PutPart -> PutDone; LeaseKeys -> Leased; Renew,
Release
-> Done; Delete
-> Statuses; ReadAt -> FoundAt |
| client -> node | ListKeys -> KeyPage; GetStatus -> NodeReport; GetConnections -> Connections; GetRegions -> Regions;
Explain -> Explained; GetMembers, Join -> Members |
| client -> node, one way | ChosenPath, Touch, Return, Damaged, Bye |
| node -> node | Adopt, Values, HaveValues -> Statuses; Reclaim -> Done; one way: Surrender,
Replicate, Lacks; for Values as a client also
Grant, OpenData, Return, ChosenPath, Bye |
| node -> client, one way | Members (the membership changed) |
| any | Failure answers any request that could not be carried out |
"""

from __future__ import annotations

from typing import ClassVar

from ucxkv.protocol.base import Message as Message
from ucxkv.protocol.base import UInt
from ucxkv.protocol.between_nodes import Adopt as Adopt
from ucxkv.protocol.between_nodes import HaveValues as HaveValues
from ucxkv.protocol.between_nodes import Lacks as Lacks
from ucxkv.protocol.between_nodes import Reclaim as Reclaim
from ucxkv.protocol.between_nodes import Replicate as Replicate
from ucxkv.protocol.between_nodes import Surrender as Surrender
from ucxkv.protocol.between_nodes import Values as Values
from ucxkv.protocol.by_token import FoundAt as FoundAt
from ucxkv.protocol.by_token import ReadAt as ReadAt
from ucxkv.protocol.explaining import Explain as Explain
from ucxkv.protocol.explaining import Explained as Explained
from ucxkv.protocol.explaining import PastDecision as PastDecision


class Failure(Message, frozen=True):
    """A request that was understood and not carried out. `kind` names the error class of `ucxkv.errors`."""

    CODE: ClassVar[int] = 1
    kind: str
    text: str
    retry_after_ms: UInt = 0


class Hello(Message, frozen=True):
    """First message of a connection. `host` is the kernel's boot id; `nonce` is 16 random bytes of the caller."""

    CODE: ClassVar[int] = 2
    wire_version: int
    version: str
    role: str  # "client" | "node"
    name: str
    host: str
    pid: UInt
    nonce: bytes
    want_memory: bool = False  # on a Unix socket: pass the descriptors of the slot table and the segments
    node_id: UInt = 0  # of a caller whose role is "node"


class Challenge(Message, frozen=True):
    """The node wants proof of the shared token; `proof` is its own, over the caller's nonce."""

    CODE: ClassVar[int] = 3
    nonce: bytes
    proof: bytes


class Proof(Message, frozen=True):
    """HMAC-SHA256(token, node nonce + caller nonce)."""

    CODE: ClassVar[int] = 4
    proof: bytes


class MemberInfo(Message, frozen=True):
    """One node of the cluster as the others know it."""

    CODE: ClassVar[int] = 5
    node_id: UInt
    name: str
    address: str
    epoch: UInt
    weight: float = 1.0


class SegmentInfo(Message, frozen=True):
    """One region of the node's shard: which node's segment it is, and how to reach it by UCX."""

    CODE: ClassVar[int] = 6
    region: UInt
    node_id: UInt
    epoch: UInt
    segment: UInt
    size_bytes: UInt


class RailInfo(Message, frozen=True):
    """One RDMA port that a process uses (see `transport.rails.Rail`)."""

    CODE: ClassVar[int] = 45
    fabric: str
    number: UInt
    gid: str


class Place(Message, frozen=True):
    """Where a process is (see `transport.ranking.Location`). process: opaque, unique on its host; numa: of its memory,
    -1 unknown; gpu: "" for host memory; clock: its time namespace, "" unknown.
    """

    CODE: ClassVar[int] = 46
    process: str = ""
    numa: int = -1
    gpu: str = ""
    rails: list[RailInfo] = []
    clock: str = ""


class Welcome(Message, frozen=True):
    """The connection is open. Descriptors (slot table first, then own segments in region order) come with it when
    asked.
    """

    CODE: ClassVar[int] = 7
    wire_version: int
    version: str
    node_id: UInt
    name: str
    address: str
    epoch: UInt
    host: str
    local_name: str  # abstract Unix socket of the node, "" when it has none
    session: int  # u64, proves this connection on the data path
    table_bytes: UInt
    table_capacity: UInt
    value_bytes_max: UInt
    regions: list[SegmentInfo]
    members: list[MemberInfo]
    data_address: bytes = b""  # UCX worker address of the data service, empty when it is off
    data_why_off: str = ""
    data_port: UInt = 0  # UCX listener of the data service at the node's host, 0 when there is none
    place: Place = Place()
    durability: str = "memory"
    shards: UInt = 0  # of the cluster's directory; 0: there are none, and the node answers for everything
    led: bytes = b""  # bit s (little-endian) is set: the node leads shard s under `epoch`
    leaders: list[str] = []  # as in Members
    has_disk: bool = False  # some of its blocks are on disk only, until they are asked for with Warm


class Grant(Message, frozen=True):
    """Ask for `count` extents that hold `length` bytes each."""

    CODE: ClassVar[int] = 10
    length: UInt
    count: UInt


class Granted(Message, frozen=True):
    """Extents lent to this connection, each of `capacity` bytes; fewer than asked when the node is short."""

    CODE: ClassVar[int] = 11
    capacity: UInt
    regions: bytes
    offsets: bytes
    retry_after_ms: UInt = 0


class Put(Message, frozen=True):
    """Commit n single-part blocks whose bytes lie in extents granted to this connection.

    The message uses its extents up, whatever becomes of each block: the sender writes them no more.
    refill_length: ask for new extents of this size, in the answer; 0 for none. refill_count: how many, 0 for as many as
    were used. durable: answer when they survive what the node's durability says. epoch: the node's, as its Welcome
    said: under another one it leads other shards, and refuses (NotLeader); 0 where it has none. exact: no tier stores
    them with loss.
    """

    CODE: ClassVar[int] = 12
    keys: bytes
    parents: bytes
    regions: bytes
    offsets: bytes
    lengths: bytes
    sums: bytes
    refill_length: UInt = 0
    refill_count: UInt = 0
    durable: bool = False
    epoch: UInt = 0
    exact: bool = False


class PutPart(Message, frozen=True):
    """Seal one part of n blocks; `owners` is the node id whose segment holds each extent (0: this node)."""

    CODE: ClassVar[int] = 13
    keys: bytes
    parents: bytes
    segments: bytes
    offsets: bytes
    lengths: bytes
    sums: bytes
    part: UInt
    parts: UInt
    put_id: UInt
    owner: int  # node id that granted the extents
    owner_session: int  # the session they were granted to
    deadline_ms: UInt
    epoch: UInt = 0  # as in Put


class PutDone(Message, frozen=True):
    """One PutStatus a block, and how far the node's log is with it. `refill_*` as in Granted.

    shard, epoch, index: of a durable put in one shard, the entry that made it so; of one without shards, the table's
    epoch and generation; else 0. token: all entries that made it so (`ucxkv.tokens`); empty for a put of the cache
    class, which no log has.
    """

    CODE: ClassVar[int] = 14
    status: bytes
    shard: UInt
    epoch: UInt
    index: UInt
    refill_capacity: UInt = 0
    refill_regions: bytes = b""
    refill_offsets: bytes = b""
    retry_after_ms: UInt = 0
    token: bytes = b""


class Touch(Message, frozen=True):
    """Keys read since the last report, in the order read; one-sided reads are invisible to the node."""

    CODE: ClassVar[int] = 16
    keys: bytes


class LeaseKeys(Message, frozen=True):
    """Hold these blocks in place for `ttl_ms`."""

    CODE: ClassVar[int] = 17
    keys: bytes
    ttl_ms: UInt


class Leased(Message, frozen=True):
    """`lease` is 0 when nothing was granted; `status` is 0 (granted) or 1 (miss) a key."""

    CODE: ClassVar[int] = 18
    lease: UInt
    ttl_ms: UInt
    status: bytes


class Warm(Message, frozen=True):
    """Bring those of these blocks that are on disk only into memory. ttl_ms: hold all of them in place, 0: do not."""

    CODE: ClassVar[int] = 56
    keys: bytes
    ttl_ms: UInt = 0


class Warmed(Message, frozen=True):
    """One status a key: 0 in memory, 1 a miss, 2 later: no room now, ask again. lease: 0 when nothing is held."""

    CODE: ClassVar[int] = 57
    lease: UInt
    ttl_ms: UInt
    status: bytes


class Renew(Message, frozen=True):
    """Start the lease's time anew."""

    CODE: ClassVar[int] = 19
    lease: UInt
    ttl_ms: UInt


class Release(Message, frozen=True):
    """End the lease now."""

    CODE: ClassVar[int] = 20
    lease: UInt


class Done(Message, frozen=True):
    """Carried out; `ok` false: there was nothing to do it to (an expired lease, an unknown member)."""

    CODE: ClassVar[int] = 21
    ok: bool = True
    value: UInt = 0


class Delete(Message, frozen=True):
    """Remove blocks; one with visible children that are not in the same call stays (ORDER). epoch: as in Put."""

    CODE: ClassVar[int] = 22
    keys: bytes
    epoch: UInt = 0


class Statuses(Message, frozen=True):
    """One u8 a key; the meaning depends on the request. token: of a delete in shards, as in PutDone."""

    CODE: ClassVar[int] = 23
    status: bytes
    token: bytes = b""


class ListKeys(Message, frozen=True):
    """Visible blocks from `cursor` on."""

    CODE: ClassVar[int] = 24
    cursor: UInt
    limit: UInt


class KeyPage(Message, frozen=True):
    """`next_cursor` is -1 at the end. tiers and parts are u8."""

    CODE: ClassVar[int] = 25
    next_cursor: int
    keys: bytes
    lengths: bytes
    tiers: bytes
    parts: bytes


class GetStatus(Message, frozen=True):
    """Ask for the node's report."""

    CODE: ClassVar[int] = 26


class NodeReport(Message, frozen=True):
    """What `ucxkv status` shows; numbers are totals since start unless they are named as levels."""

    CODE: ClassVar[int] = 27
    name: str
    address: str
    version: str
    epoch: UInt
    uptime_s: float
    numbers: dict[str, float]
    facts: dict[str, str]


class ChosenPath(Message, frozen=True):
    """One way: how this client moves this node's bytes. path: a PathKind; way: where from; why: for people."""

    CODE: ClassVar[int] = 41
    path: str
    way: str
    why: str


class GetConnections(Message, frozen=True):
    """Ask who is connected, by which path."""

    CODE: ClassVar[int] = 42


class ConnectionInfo(Message, frozen=True):
    """One open control connection as the node sees it. role: "client" or "node"; host: its kernel's boot id; path, way,
    why: what it said (path "none": nothing yet, "control": a node's link, which moves no bytes).
    """

    CODE: ClassVar[int] = 43
    name: str
    role: str
    host: str
    path: str
    way: str
    why: str


class Connections(Message, frozen=True):
    """Every open connection, ordered by name."""

    CODE: ClassVar[int] = 44
    connections: list[ConnectionInfo]


class GetRegions(Message, frozen=True):
    """Ask for the shard's region table."""

    CODE: ClassVar[int] = 28


class Regions(Message, frozen=True):
    """All regions that slots of this shard may name."""

    CODE: ClassVar[int] = 29
    regions: list[SegmentInfo]


class GetMembers(Message, frozen=True):
    """Ask for the membership."""

    CODE: ClassVar[int] = 30


class Members(Message, frozen=True):
    """The nodes as the sender knows them, itself included. leaders: by shard, the name of the node that leads it as far
    as the sender knows, "" unknown; none at all without shards.
    """

    CODE: ClassVar[int] = 31
    members: list[MemberInfo]
    leaders: list[str] = []


class Join(Message, frozen=True):
    """A node makes itself known; the answer is Members."""

    CODE: ClassVar[int] = 32
    member: MemberInfo


class Bye(Message, frozen=True):
    """One way: this connection ends in good order and its process writes into none of its extents any more."""

    CODE: ClassVar[int] = 36


class Return(Message, frozen=True):
    """One way: extents granted to this connection that it will not use; those it no longer holds are ignored."""

    CODE: ClassVar[int] = 37
    regions: bytes
    offsets: bytes


class OpenData(Message, frozen=True):
    """Open the data path of this connection: the caller's UCX worker address, and how its endpoint is made. With a
    client_id the caller connects to `data_port` instead, and its worker says that id. connections: how many it makes, 1
    to 8, for data to go over (1 with a client_id). Answer: DataOpened.
    """

    CODE: ClassVar[int] = 39
    address: bytes
    is_peer_mode: bool
    is_eager_only: bool
    client_id: UInt = 0
    connections: UInt = 1


class DataOpened(Message, frozen=True):
    """The data path is open. base, size_bytes, key: the node's own segment for one-sided reads; has_rdma: it has a
    device.
    """

    CODE: ClassVar[int] = 40
    base: UInt
    size_bytes: UInt
    key: bytes
    has_rdma: bool = False


class Damaged(Message, frozen=True):
    """One way: these blocks' bytes did not match their sums; the node checks, and drops what is bad with all below
    it.
    """

    CODE: ClassVar[int] = 38
    keys: bytes
