"""What a node is told at start: one frozen value, each field with its unit and the reason for its default."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from typing import Literal

from ucxkv.errors import SetupError

MIB = 1 << 20
GIB = 1 << 30


def _default_name() -> str:
    return socket.gethostname()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """Settings of one node. Every field has a default that works on a laptop."""

    name: str = field(default_factory=_default_name)
    """Unique in the cluster; placement hashes it, so a node that returns under its name keeps its share of the keys."""
    listen: str = "127.0.0.1:13337"
    """host:port (or [ipv6]:port) of the control listener; port 0 takes a free one. Loopback by default: UCX does
    not encrypt.
    """
    host_bytes: int = 1 * GIB
    """Bytes of host memory for blocks; taken and populated at start, so that no get or put ever waits for the
    kernel.
    """
    huge_pages: Literal["auto", "never", "require"] = "auto"
    """auto | never | require. Huge pages spare the TLB on large copies; auto falls back to 4 KiB pages and says so."""
    numa: Literal["auto", "off"] | int = "auto"
    """auto | off | a NUMA node's number: where memory and data thread go. auto: beside the best network device, if one
    NUMA node has all of those; it does nothing on a machine with one NUMA node.
    """
    slots_count: int = 0
    """Blocks the directory can hold; 0 = one for every 16 KiB of host_bytes, at least 65,536, and one for every 64 KiB
    on disk (64 + 32 bytes each; 20 more with a disk tier)."""
    durability: Literal["memory", "process", "power"] = "memory"
    """memory | process | power: what blocks put with durable=True survive. memory: nothing, such puts are refused;
    process: the death of the node's process, by kill -9 too; power: that of the machine, values are on disk, too.
    """
    disk: tuple[str, ...] = ()
    """Folders, one a drive, for blocks that leave memory, striped over them; empty = such blocks are gone."""
    disk_bytes: int = 64 * GIB
    """Bytes in each of these folders; the oldest files are used again."""
    disk_wait_ms: int = 2_000
    """When memory is full of blocks that are not on disk yet, puts wait; but when the disk has written nothing for so
    long, the oldest go without a copy."""
    disk_codec: Literal["none", "lossless", "int8"] = "none"
    """none | lossless | int8: how blocks are made smaller on disk. No codec on a CPU is as fast as a good drive, so
    none; int8 brings back other bytes than were put.
    """
    disk_dtype: str = ""
    """Type of the elements of blocks, as "bfloat16"; a codec needs it, and it cannot be seen from the bytes."""
    disk_tokens: int = 16
    """For int8, tokens of a block, the axis before the last: so many values of a channel share a scale. A divisor of
    the real number works too, and saves less.
    """
    disk_channels: int = 0
    """For int8, the length of a block's last axis: elements of a head, or of all heads of a token; needed."""
    io_engine: Literal["auto", "io_uring", "threads"] = "auto"
    """auto | io_uring | threads: how the folders are read and written. auto tries io_uring and says why not."""
    policy: Literal["tuc", "s3fifo", "lru"] = "tuc"
    """tuc | s3fifo | lru: what leaves memory first: what saves the least prefill time, what came first and was not used
    since, what was used longest ago.
    """
    prefill_tokens_s: float = 12_500.0
    """Tokens a second that the engines compute at the start of a prompt, for tuc: a model of 8 G parameters at 200
    TFLOP/s. With a disk it decides which blocks are faster loaded than computed.
    """
    block_tokens: int = 16
    """Tokens of a block, for tuc; the store itself sees bytes only."""
    state_dir: str = ""
    """Folder for the journal and what else outlives the process; needed unless durability is memory. With power on a
    disk, and it takes host_bytes there, too."""
    join: tuple[str, ...] = ()
    """Addresses of nodes to join; one that answers is enough."""
    cluster: str = ""
    """Control plane to register with and to learn the other nodes from: sqlite:///absolute/path/file.db on one machine,
    etcd://host:2379[,host:2379]/cluster-name on many; empty = none, the node serves alone or with those of `join`.
    """
    cluster_lease_ms: int = 10_000
    """The registration's lease. A node that the control plane has lost sight of serves this long and no longer; a
    node that died is missed by then. Shorter finds the dead sooner and survives shorter outages of the control plane.
    """
    cluster_shards: int = 64
    """Shards of the directory of the cluster, a power of two up to 256; used by the node that makes the cluster, then
    fixed for its life.
    """
    replicas: int = 1
    """On how many nodes each shard, with its durable blocks, is (1 to 3); used by the node that makes the cluster, then
    fixed for its life. Fewer while there are fewer nodes.
    """
    advertise: str = ""
    """Address that others are told, when `listen` is not what they can reach (0.0.0.0, NAT)."""
    token: str = ""
    """Shared secret; empty = anyone who reaches the port may read and write."""
    grace_ms: int = 5
    """Time between hiding a block and reusing its memory; readers prove their bytes anyway, this makes retries rare."""
    free_low: float = 0.04
    """Eviction starts when less than this share of host_bytes is free or about to be..."""
    free_high: float = 0.08
    """...and ends at this share: puts then find memory without waiting."""
    grant_share_max: float = 0.125
    """Largest share of host_bytes that may be granted to one connection ahead of its puts."""
    put_deadline_ms: int = 30_000
    """A multi-part put whose parts have not all come by then is dropped and its memory freed."""
    lease_ms_max: int = 600_000
    """Longest lease; a reader that wants more renews."""
    connections_max: int = 4096
    """Control connections served at once; more are refused with a clear answer."""
    handshake_ms_max: int = 5_000
    """A connection that has not finished its handshake by then is closed."""
    message_path: bool = True
    """Serve look-ups, reads and writes over UCX active messages too (clients on other hosts need it)."""
    ucx_library: str = ""
    """Path of libucp.so.0 to use; empty = a system UCX with verbs where this host has an RDMA device, else the
    newest of the libucx wheel's and the system's.
    """
    data_port: int | str = 0
    """TCP port, or range "first-last", of the data service, for firewalls; 0 takes free ones. With RDMA at least two:
    the first is for clients that connect by RDMA.
    """
    metrics_listen: str = ""
    """host:port of the Prometheus endpoint; empty = none."""

    def data_ports(self) -> tuple[int, int] | None:
        """First and last port of the data service, None for any. Raises SetupError for what is no port or range."""
        text = str(self.data_port)
        if text == "0":
            return None
        first, dash, last = text.partition("-")
        found = [int(part) if part.isascii() and part.isdecimal() and len(part) <= 5 else 0 for part in (first, last)]
        ports = (found[0], found[1] if dash else found[0])
        if not 1 <= ports[0] <= ports[1] <= 65_535:
            raise SetupError(
                f"data_port = {self.data_port!r}", needed="a port, a range as 13338-13345 (1 to 65535), or 0 for any"
            )
        return ports

    def slots(self) -> int:
        """Capacity of the slot table."""
        on_disk = len(self.disk) * self.disk_bytes // (64 << 10)
        return self.slots_count or max(65_536, self.host_bytes // (16 << 10)) + on_disk
