"""A node's settings from one TOML file, the environment's token and flags, checked once, here.

Later sources win: NodeConfig's defaults, then the file's table `[node]`, then flags. Keys are NodeConfig's field names,
plus `token_file`. An unknown key is refused by name, so that a misspelt one never silently means its default. Sizes are
written as in `ucxkv.sizes`.

    [node]
    name = "n1"
    listen = "127.0.0.1:13337"
    host_bytes = "4GiB"
    join = ["127.0.0.1:13338"]
    token_file = "cluster.token"
"""

from __future__ import annotations

import dataclasses
import os
import typing
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ucxkv.control.opening import parse_control_url
from ucxkv.errors import SetupError, UsageError
from ucxkv.node.config import NodeConfig
from ucxkv.settings import check_keys, read_tables
from ucxkv.sizes import parse_size
from ucxkv.tiers.base import SetupFailed
from ucxkv.transport.address import AddressError, TcpAddress, parse_address

__all__ = ["TOKEN_VARIABLE", "load_config", "node_config", "token_from"]

TOKEN_VARIABLE = "UCXKV_TOKEN"
_FIELDS = {field.name for field in dataclasses.fields(NodeConfig)}
_HUGE_PAGES = ("auto", "never", "require")
_POLICIES = ("tuc", "s3fifo", "lru")
_IO_ENGINES = ("auto", "io_uring", "threads")
_DURABILITIES = ("memory", "process", "power")
_HOST_BYTES_MIN = 1 << 20
_DISK_BYTES_MIN = 8 << 20


def load_config(path: str | os.PathLike[str]) -> NodeConfig:
    """The settings of a TOML file's table `[node]`. Raises SetupError that names the file, the key and the fix."""
    return node_config(path)


def node_config(
    path: str | os.PathLike[str] | None = None,
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
) -> NodeConfig:
    """Merge defaults, the file at `path` and `flags` (a value of None = flag not given), and check the result.

    environ: where TOKEN_VARIABLE is looked up when neither file nor flags give a token; default: this process's.
    Raises SetupError.
    """
    values = _from_file(Path(path)) if path is not None else {}
    origin = dict.fromkeys(values, f"{path}")
    for key, value in (flags or {}).items():
        if value is not None:
            values[key] = value
            origin[key] = "--" + key.replace("_", "-")
    if origin.get("token_file", "").startswith("--"):
        values.pop("token", None)
    folder = Path(path).parent if path is not None and origin.get("token_file") == f"{path}" else Path()
    token_file = values.pop("token_file", None)
    if not values.get("token"):
        token = token_from(folder / str(token_file) if token_file else None, environ)
        if token:
            values["token"] = token
    for key in ("host_bytes", "disk_bytes"):
        if isinstance(values.get(key), str):
            try:
                values[key] = parse_size(str(values[key]))
            except UsageError as exc:
                raise SetupError(f"{origin[key]}: {key}: {exc}") from exc
    if isinstance(values.get("numa"), str) and str(values["numa"]).isdecimal():
        values["numa"] = int(str(values["numa"]))
    try:
        config = msgspec.convert(values, NodeConfig)
    except msgspec.ValidationError as exc:
        raise _mistyped(exc, values, origin) from exc
    _check(config, origin)
    return config


def token_from(path: Path | None, environ: Mapping[str, str] | None = None) -> str:
    """The shared secret: the file's text without surrounding white space, else TOKEN_VARIABLE, else empty.

    Raises SetupError when the file cannot be read, is empty, or may be read by others.
    """
    if path is None:
        return (os.environ if environ is None else environ).get(TOKEN_VARIABLE, "")
    try:
        mode = path.stat().st_mode
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise SetupError(f"token file {path}: {exc}", fix="name a readable text file") from exc
    if mode & 0o077:
        raise SetupError(
            f"token file {path} may be read by others", found=f"mode {mode & 0o777:o}", fix=f"chmod 600 {path}"
        )
    if not token:
        raise SetupError(f"token file {path} is empty", fix=f"openssl rand -hex 32 > {path}")
    return token


def _from_file(path: Path) -> dict[str, object]:
    values = read_tables(path)["node"]
    check_keys(values, _FIELDS | {"token_file"}, path, "node")
    return dict(values)


def _check(config: NodeConfig, origin: Mapping[str, str]) -> None:
    """Refuse what would fail later and less clearly."""

    def refuse(key: str, found: object, needed: str) -> SetupError:
        return SetupError(f"{origin.get(key, 'default')}: {key}", found=repr(found), needed=needed)

    if not config.name or len(config.name) > 128 or not config.name.isprintable():
        raise refuse("name", config.name, "1 to 128 printable characters")
    if config.huge_pages not in _HUGE_PAGES:
        raise refuse("huge_pages", config.huge_pages, " | ".join(_HUGE_PAGES))
    if config.durability not in _DURABILITIES:
        raise refuse("durability", config.durability, " | ".join(_DURABILITIES))
    if config.io_engine not in _IO_ENGINES:
        raise refuse("io_engine", config.io_engine, " | ".join(_IO_ENGINES))
    if config.disk and config.disk_bytes < _DISK_BYTES_MIN:
        raise refuse("disk_bytes", config.disk_bytes, "at least 8MiB")
    if config.disk_codec != "none":
        _check_codec(config, origin)
    if len({os.path.realpath(name) for name in config.disk if name}) != len(config.disk):
        raise refuse("disk", config.disk, "folders, each named once")
    if (config.durability != "memory") != bool(config.state_dir):
        if config.state_dir:
            raise refuse("state_dir", config.state_dir, "durability = process | power too")
        where = origin.get("durability", "default")
        raise SetupError(
            f"{where}: durability = {config.durability!r} without state_dir",
            needed="a folder for the journal",
            fix="name one of this node's own with --state-dir (state_dir in a file)",
        )
    if config.host_bytes < _HOST_BYTES_MIN:
        raise refuse("host_bytes", config.host_bytes, "at least 1MiB")
    for key in ("free_low", "free_high", "grant_share_max"):
        if not 0 < getattr(config, key) < 1:
            raise refuse(key, getattr(config, key), "a share between 0 and 1")
    if config.free_low > config.free_high:
        raise refuse("free_low", config.free_low, f"at most free_high ({config.free_high})")
    ports = config.data_ports()
    if isinstance(config.numa, int) and config.numa < 0:
        raise refuse("numa", config.numa, "auto, off, or a NUMA node's number")
    if config.policy not in _POLICIES:
        raise refuse("policy", config.policy, " | ".join(_POLICIES))
    if not 0 < config.prefill_tokens_s < float("inf"):
        raise refuse("prefill_tokens_s", config.prefill_tokens_s, "tokens a second, more than 0")
    if config.block_tokens < 1:
        raise refuse("block_tokens", config.block_tokens, "1 or more")
    for key in ("grace_ms", "slots_count", "disk_wait_ms"):
        if getattr(config, key) < 0:
            raise refuse(key, getattr(config, key), "0 or more")
    for key in ("put_deadline_ms", "lease_ms_max", "connections_max", "handshake_ms_max"):
        if getattr(config, key) < 1:
            raise refuse(key, getattr(config, key), "1 or more")
    addresses = {"listen": (config.listen,), "join": config.join, "advertise": (config.advertise,)}
    addresses["metrics_listen"] = (config.metrics_listen,)
    for key, texts in addresses.items():
        for text in texts:
            if not text and key in ("advertise", "metrics_listen"):
                continue
            try:
                if not isinstance(parse_address(text), TcpAddress):
                    raise refuse(key, text, "host:port or [ipv6]:port")
            except AddressError as exc:
                raise SetupError(f"{origin.get(key, 'default')}: {key}: {exc}") from exc
    if not 1 <= config.cluster_shards <= 256 or config.cluster_shards & (config.cluster_shards - 1):
        raise refuse("cluster_shards", config.cluster_shards, "a power of two from 1 to 256")
    if not 1 <= config.replicas <= 3:
        raise refuse("replicas", config.replicas, "1 to 3")
    if config.cluster_lease_ms < 1000:
        raise refuse("cluster_lease_ms", config.cluster_lease_ms, "1000 or more")
    for key in ("cluster_shards", "replicas"):
        if key in origin and not config.cluster:
            fix = "name the control plane with --cluster (cluster in a file), or leave it out"
            raise SetupError(f"{origin[key]}: {key} without cluster", needed="a cluster", fix=fix)
    if config.cluster:
        try:
            parse_control_url(config.cluster)
        except SetupError as exc:
            raise SetupError(
                f"{origin.get('cluster', 'default')}: {exc.message}", needed=exc.needed, fix=exc.fix
            ) from exc
    control = parse_address(config.listen)
    if ports is not None and isinstance(control, TcpAddress) and ports[0] <= control.port <= ports[1]:
        raise refuse("data_port", config.data_port, f"ports other than that of listen, {control.port}")


def _check_codec(config: NodeConfig, origin: Mapping[str, str]) -> None:
    from ucxkv.node.disk.coding import codecs_for  # for those who have one: it loads codecs

    where = origin.get("disk_codec", "default")
    if not config.disk:
        fix = "name folders for blocks with disk, or leave disk_codec out"
        raise SetupError(f"{where}: disk_codec", found="no disk", needed="blocks on disk to encode", fix=fix)
    try:
        codecs_for(config)
    except SetupFailed as exc:
        raise SetupError(f"{where}: {exc.what}", found=exc.found, needed=exc.needed, fix=exc.fix) from exc


def _mistyped(exc: msgspec.ValidationError, values: Mapping[str, object], origin: Mapping[str, str]) -> SetupError:
    """What msgspec says of a value, with the key's source in place of all of them, and what the key takes."""
    what, _, path = str(exc).rpartition(" - at `$.")
    key = path.rstrip("`").partition("[")[0]
    if key not in _FIELDS:
        return SetupError(f"{_sources(origin)}: {exc}", fix="see docs/configuration.md")
    kind = typing.get_type_hints(NodeConfig)[key]
    choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
    needed = " | ".join(map(str, choices)) if choices else what.rstrip()
    return SetupError(f"{origin.get(key, 'default')}: {key}", found=repr(values.get(key)), needed=needed)


def _sources(origin: Mapping[str, str]) -> str:
    return ", ".join(dict.fromkeys(origin.values())) or "defaults"
