"""A cluster described in a TOML file, for `ucxkv simulate --cluster`.

    [model]
    name = "8b"                 # 8b or 70b; or a name of your own with all of what follows
    kv_bytes_per_token = 131072
    prefill_tokens_per_s = 25000      # measured on a short prompt
    prefill_slowdown_tokens = 170000  # tokens before a token that double its cost; left out: none do

    [cluster]
    nodes = 8
    placement = "chain"         # or "shards"
    link = "50GB"               # bytes a second from a node to a serving instance; left out: no limit
    link_us = 10

    [[tier]]                    # fastest first; capacity of all nodes together
    name = "host"
    capacity = "2TiB"           # or a share of the trace's different blocks: 0.05
    bandwidth = "40GB"
    latency_us = 20

Whatever is left out has the default of the flags. An unknown key is refused by name.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Literal

from ucxkv.errors import SetupError, UsageError
from ucxkv.policy.cost import LoadCost, PrefillCost
from ucxkv.settings import check_keys
from ucxkv.simulation.cluster import MODELS, Cluster, Model, Tier
from ucxkv.sizes import parse_size

__all__ = ["HOST", "model_named", "parse_capacity", "read_cluster"]

HOST = Tier("host", 0.05, 40e9, 20e-6)
"""The tier of a cluster that names none: DRAM over RDMA."""

_MODEL = ("name", "kv_bytes_per_token", "prefill_tokens_per_s", "prefill_slowdown_tokens")
_CLUSTER = ("nodes", "placement", "link", "link_us")
_NODES_MAX, _KV_BYTES_MAX = 100_000, 1 << 30
_TIER = ("name", "capacity", "bandwidth", "latency_us")


def model_named(name: str) -> Model:
    """A model that is known by name."""
    if name not in MODELS:
        known = " or ".join(MODELS)
        raise UsageError(f"model {name!r}: use {known}, or describe it in a --cluster file's [model]")
    return MODELS[name]


def parse_capacity(text: str) -> float:
    """A share of the trace's different blocks (`0.05`, up to 1), or bytes (`64GiB`)."""
    try:
        share = float(text)
    except ValueError:
        size = parse_size(text)
        if size < 2:
            raise UsageError(f"capacity {text!r}: give more bytes than that") from None
        return float(size)
    if not 0 < share <= 1:
        raise UsageError(f"capacity {text!r}: a share is above 0 and at most 1; write sizes with a unit, as 64GiB")
    return share


def read_cluster(path: Path, *, model: str | None = None, nodes: int | None = None) -> Cluster:
    """The cluster of a file. model, nodes: flags that win over it. Raises SetupError that names file and key."""
    try:
        tables = tomllib.loads(path.read_text())
    except OSError as exc:
        raise SetupError(f"cluster {path}: {exc.strerror}", fix="check the path given to --cluster") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise SetupError(f"cluster {path} is no TOML: {exc}") from exc
    check_keys(tables, ("model", "cluster", "tier"), path, "")
    about, rows = tables.get("cluster", {}), tables.get("tier", [])
    if not isinstance(about, dict) or not isinstance(rows, list) or not isinstance(tables.get("model", {}), dict):
        raise SetupError(f"cluster {path}", needed="tables [model] and [cluster], and one [[tier]] for each tier")
    check_keys(about, _CLUSTER, path, "cluster")
    try:
        link = None
        if "link" in about or "link_us" in about:
            link = LoadCost(_number(about, "link_us", 0.0) * 1e-6, _rate(about, "link", 1e15))
        placement = about.get("placement", "chain")
        if placement not in ("chain", "shards"):
            raise UsageError(f"placement is {placement!r}; chain or shards")
        kind: Literal["chain", "shards"] = placement
        tiers = tuple(_tier(row, path) for row in rows) or (HOST,)
        of_model = model_named(model) if model is not None else _model(tables.get("model", {}), path)
        count = nodes if nodes is not None else int(_number(about, "nodes", 1, most=_NODES_MAX))
        return Cluster(of_model, tiers, count, kind, link)
    except UsageError as exc:
        raise SetupError(f"cluster {path}: {exc}") from exc


def _model(table: dict[str, Any], path: Path) -> Model:
    check_keys(table, _MODEL, path, "model")
    name = str(table.get("name", "8b"))
    if "prefill_tokens_per_s" not in table and "kv_bytes_per_token" not in table:
        return model_named(name)
    for key in ("kv_bytes_per_token", "prefill_tokens_per_s"):
        if key not in table:
            raise UsageError(f"[model] {key} is missing; a model of one's own needs it")
    token = 1.0 / _number(table, "prefill_tokens_per_s", 0.0, least=1e-9)
    slowdown = _number(table, "prefill_slowdown_tokens", 0.0)
    kv_bytes = int(_number(table, "kv_bytes_per_token", 0.0, least=1, most=_KV_BYTES_MAX))
    return Model(name, kv_bytes, PrefillCost(token, token / slowdown if slowdown else 0.0))


def _tier(row: object, path: Path) -> Tier:
    if not isinstance(row, dict):
        raise UsageError(f"[[tier]] is {row!r}; a table is expected")
    check_keys(row, _TIER, path, "tier")
    for key in ("name", "capacity", "bandwidth"):
        if key not in row:
            raise UsageError(f"a [[tier]] has no {key}; every tier has a name, a capacity and a bandwidth")
    latency = _number(row, "latency_us", 0.0) * 1e-6
    return Tier(str(row["name"]), parse_capacity(str(row["capacity"])), _rate(row, "bandwidth", 0.0), latency)


def _number(table: dict[str, Any], key: str, default: float, *, least: float = 0.0, most: float = 1e18) -> float:
    value = table.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise UsageError(f"{key} is {value!r}; a number from {least:g} to {most:g} is expected")
    return float(value)


def _rate(table: dict[str, Any], key: str, default: float) -> float:
    rate = float(parse_size(table[key])) if key in table else default
    if not rate > 0:
        raise UsageError(f'{key} is {table.get(key)!r}; bytes a second, above 0, as "6GB"')
    return rate
