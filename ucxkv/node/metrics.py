"""Prometheus metrics of a node: the numbers of its report, served over HTTP by `prometheus_client`.

A scrape runs in a thread of the HTTP server and asks the event loop for the numbers; when the loop does not answer
in time
the last ones are served and `ucxkv_scrape_late_total` moves, so that a stuck node is seen rather than a stuck scrape.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ucxkv import errors
from ucxkv.node.session import PATH_KINDS
from ucxkv.transport.address import TcpAddress, parse_address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from threading import Thread
    from wsgiref.simple_server import WSGIServer

    from prometheus_client.metrics_core import Metric

__all__ = ["BY_PATH", "COUNTERS", "METRIC_TEXTS", "MetricsServer"]

_SCRAPE_S = 1.0

METRIC_TEXTS: dict[str, str] = {
    "puts": "blocks (or parts) that clients asked to store",
    "stored": "blocks that became visible",
    "grants": "extents lent by a request of their own; refills that ride on a put's answer are not counted",
    "evicted": "blocks hidden to make room",
    "evicted_bytes": "bytes of values in evicted blocks",
    "deleted": "blocks removed by clients",
    "lost": "blocks dropped because a neighbour or their bytes were lost, descendants included",
    "damaged": "blocks dropped because a reader found that their bytes do not match their sums, descendants included",
    "refused_without_lease": "requests refused, or puts not acknowledged, because the node's serving lease was over",
    "blocks": "visible blocks",
    "block_bytes": "bytes of values in visible blocks",
    "slots_used": "slots of the table in use; a block of n parts uses n",
    "slots_capacity": "slots of the table",
    "writing": "blocks of several parts that are not complete yet",
    "leases": "leases that run",
    "leased_blocks": "blocks that a lease holds in place",
    "leaving_extents": "extents of hidden blocks whose leases or grace time still run",
    "host_bytes": "bytes of host memory for blocks",
    "used_bytes": "bytes of it in any hand but free",
    "free_bytes": "bytes of it that are free",
    "granted_bytes": "bytes lent to clients ahead of their puts",
    "quarantined_bytes": "bytes whose writer vanished and may still write",
    "arrived_bytes": "bytes of values that other nodes copied here and no log entry has claimed yet",
    "adopted_bytes": "bytes that hold parts of other nodes' blocks",
    "held_over_bytes": "bytes that a process of before the node's start may still write",
    "durable_blocks": "visible blocks that survive the node's process and are not evicted",
    "durable_bytes": "bytes of values in durable blocks",
    "staged": "durable puts that wait for the journal",
    "durable_lost": "durable blocks that did not come back at the start: bytes gone or damaged, or below such",
    "journal_failed": "1 when the journal could not be written: durable puts and deletes are refused until a restart",
    "journal_records": "records committed to the journal",
    "journal_bytes": "bytes written for them",
    "journal_commits": "writes of the journal that carried them; records ride together",
    "journal_snapshots": "snapshots written, after which old files of the journal are used again",
    "snapshots_failed": "snapshots that the disk refused; the journal goes on and grows",
    "disk_reclaimed": "blocks that went when the oldest datafile was used again, descendants included",
    "disk_blocks": "visible blocks whose value is on disk only",
    "disk_block_bytes": "bytes of their values",
    "disk_copies": "copies on disk that are known, of blocks in memory too",
    "disk_pending": "blocks that have no copy yet, at most",
    "disk_demoted": "times that a block left memory and stayed on disk",
    "disk_promoted": "times that a block was brought back",
    "disk_failed": "1 when nothing is written to disk any more until a restart",
    "disk_payload_bytes": "bytes of values written to disk, as they are stored",
    "disk_written_bytes": "bytes written for them, with headers, padding, indexes and what was written again",
    "disk_read_bytes": "bytes of values read from disk, as they are stored",
    "disk_damaged": "copies whose bytes did not match their sums, or could not be read",
    "disk_files": "datafiles",
    "disk_files_reclaimed": "times that a datafile was used again",
    "disk_reads": "values read back into memory",
    "disk_read_failed": "values that could not be read back",
    "disk_codec_in_bytes": "bytes of values that were offered to the codec on their way to the disk",
    "disk_codec_out_bytes": "bytes that they took there, encoded or as they were",
    "disk_codec_declined": "values that the codec could not make smaller, or not within its error: stored as they were",
    "disk_decoded_bytes": "bytes of values that were decoded on their way back",
    "disk_writes_refused": "times that a block was to be written and the disk had no room or too much to do",
    "disk_too_long": "blocks that fit no datafile and stay in memory only",
    "index_bytes": "bytes of the slot table, the directory's arrays and a learning policy's",
    "policy_lessons": "times that the eviction policy learned anew how likely blocks are used again",
    "policy_price": "prefill seconds saved per second by the block that left memory last, under tuc",
    "policy_repriced": "times that tuc took over measured costs of the disk",
    "decided_demotions": "blocks that left memory for the disk",
    "decided_promotions": "blocks that came back from the disk",
    "decided_drops": "blocks dropped that the log of decisions got a line for, by eviction, delete or damage",
    "disk_load_latency_s": "seconds of a disk read whatever its size, as measured; 0 without a disk",
    "disk_load_bytes_s": "bytes a second of a disk read beyond that, as measured; 0 without a disk",
    "disk_loads_measured": "disk reads that went into these two",
    "connections": "open control connections",
    "connections_refused": "connections refused because too many were open",
    "nodes": "nodes in the cluster as this one sees it, itself included",
    "vanished_writers": "ended connections whose processes still run",
    "incarnation": "this node's incarnation in its cluster: grows with each registration; 0 without a cluster",
    "cluster_lease_s": "seconds for which this node's registration surely holds; 0: lost, or no cluster",
    "cluster_lease_losses": "times that this node's registration was lost and serving stopped until the next",
    "shards": "shards of the cluster's directory",
    "shards_led": "of these, shown to readers by this node, their leader",
    "shards_followed": "of these, held by this node in sync behind another",
    "standby_blocks": "durable blocks of shards that this node does not lead",
    "shard_lag_records": "log records that are here and not committed yet, of all shards",
    "cluster_members": "nodes registered in the cluster's control plane, as last seen",
}
COUNTERS = frozenset(
    (
        "puts",
        "stored",
        "grants",
        "evicted",
        "evicted_bytes",
        "deleted",
        "lost",
        "damaged",
        "refused_without_lease",
        "disk_reclaimed",
        "disk_demoted",
        "disk_promoted",
        "disk_payload_bytes",
        "disk_written_bytes",
        "disk_read_bytes",
        "disk_damaged",
        "disk_files_reclaimed",
        "disk_reads",
        "disk_read_failed",
        "disk_codec_in_bytes",
        "disk_codec_out_bytes",
        "disk_codec_declined",
        "disk_decoded_bytes",
        "disk_writes_refused",
        "disk_too_long",
        "connections_refused",
        "policy_lessons",
        "policy_repriced",
        "decided_demotions",
        "decided_promotions",
        "decided_drops",
        "disk_loads_measured",
        "journal_records",
        "journal_bytes",
        "journal_commits",
        "journal_snapshots",
        "snapshots_failed",
        "cluster_lease_losses",
    )
)
_MESSAGE_LEVELS = ("message_sessions", "message_grants", "message_closing")
BY_PATH = "connections_by_path"
_BY_PATH_TEXT = "open control connections by the path that moves their bytes"


class _Report(Collector):
    def __init__(self, loop: asyncio.AbstractEventLoop, numbers: Callable[[], dict[str, float]], name: str) -> None:
        self._loop = loop
        self._numbers = numbers
        self._name = name
        self._last: dict[str, float] = {}
        self._late = 0

    async def _ask(self) -> dict[str, float]:
        return self._numbers()

    def collect(self) -> Iterator[Metric]:
        """Called by the HTTP server's thread for every scrape."""
        future = asyncio.run_coroutine_threadsafe(self._ask(), self._loop)
        try:
            self._last = future.result(_SCRAPE_S)
        except concurrent.futures.TimeoutError:
            future.cancel()
            self._late += 1
        numbers = {**self._last, "scrape_late": float(self._late)}
        by_path = GaugeMetricFamily(f"ucxkv_{BY_PATH}", _BY_PATH_TEXT, labels=["node", "path"])
        for path in PATH_KINDS:
            by_path.add_metric([self._name, path], numbers.pop(f"connections_{path}", 0.0))
        yield by_path
        for name, value in numbers.items():
            is_counter = name in COUNTERS or name == "scrape_late"
            is_counter |= name.startswith("message_") and name not in _MESSAGE_LEVELS
            text = METRIC_TEXTS.get(
                name, "of the data service; see transport/service.py" if "message_" in name else name
            )
            kind = CounterMetricFamily if is_counter else GaugeMetricFamily
            family = kind(f"ucxkv_{name}", text, labels=["node"])
            family.add_metric([self._name], value)
            yield family


class MetricsServer:
    """Serves http://HOST:PORT/metrics until closed. Raises SetupError when the address is bad or in use."""

    def __init__(self, listen: str, numbers: Callable[[], dict[str, float]], name: str) -> None:
        address = parse_address(listen)
        if not isinstance(address, TcpAddress):
            raise errors.SetupError(
                f"metrics_listen={listen!r} is no host:port", fix="pass host:port, as 127.0.0.1:9337"
            )
        registry = CollectorRegistry()
        self._server: WSGIServer
        self._thread: Thread
        try:
            self._server, self._thread = start_http_server(address.port, address.host, registry)
        except OSError as exc:
            raise errors.SetupError(
                f"metrics cannot be served at {address}: {exc.strerror}", fix="choose another metrics_listen, or port 0"
            ) from exc
        registry.register(_Report(asyncio.get_running_loop(), numbers, name))
        self.address = str(TcpAddress(address.host, self._server.server_port))

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
