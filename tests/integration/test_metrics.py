"""What a scraper sees: every number is described, moves when it should, and only then (user voice 34)."""

from __future__ import annotations

import asyncio
import re
import urllib.request

import ucxkv
from tests.conftest import blocks, keys
from tests.harness import ROOT
from ucxkv.node import Node, NodeConfig
from ucxkv.node.metrics import METRIC_TEXTS


def _scrape(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url, timeout=5) as answer:
        text = answer.read().decode()
    return {name: float(value) for name, value in re.findall(r'^ucxkv_(\w+)\{node="m"\} (\S+)$', text, re.M)}


def test_every_metric_is_documented() -> None:
    """Goal: docs/metrics.md is complete. Method: every name of the node's report stands in it."""
    text = (ROOT / "docs" / "metrics.md").read_text()
    assert not [name for name in METRIC_TEXTS if f"`ucxkv_{name}" not in text]


async def test_metrics_count_what_happened_and_idle_time_moves_nothing() -> None:
    """Goal: truthful metrics. Method: 30 puts, one delete, scrape before, after, and again after idle time."""
    config = NodeConfig(name="m", listen="127.0.0.1:0", host_bytes=64 << 20, metrics_listen="127.0.0.1:0")
    async with Node(config) as node, ucxkv.connect(node.address) as kv:
        assert node._metrics is not None
        url = f"http://{node._metrics.address}/metrics"
        before = await asyncio.to_thread(_scrape, url)
        k = keys(30)
        assert (await kv.put_many(k, blocks(30, 1000))).ok
        await kv.delete(k[:1])
        await asyncio.sleep(0.1)
        after = await asyncio.to_thread(_scrape, url)
        again = await asyncio.to_thread(_scrape, url)
    moved = {name: after[name] - before[name] for name in ("puts_total", "stored_total", "blocks", "deleted_total")}
    assert moved == {"puts_total": 30, "stored_total": 30, "blocks": 29, "deleted_total": 1}
    busy = {"message_sleeps_total", "scrape_late_total"}
    assert {k: v for k, v in after.items() if k not in busy} == {k: v for k, v in again.items() if k not in busy}
    plain = {re.sub("_total$", "", name) for name in after} - {"scrape_late"}
    assert {name for name in plain if not name.startswith("message_")} == set(METRIC_TEXTS)
