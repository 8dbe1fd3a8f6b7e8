"""`open_control`: a URL in, an open control plane out.

    sqlite:///absolute/path/file.db              one machine, any number of processes
    etcd://host:2379[,host:2379...]/cluster      many machines; the cluster's keys stand under /ucxkv/cluster/

Everything else is a SetupError that says what a URL looks like."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ucxkv import errors
from ucxkv.control.base import SystemClock

if TYPE_CHECKING:
    from ucxkv.control.base import Clock, ControlPlane

__all__ = ["ControlUrl", "is_control_url", "open_control", "parse_control_url"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_HOST = re.compile(r"(?:[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class ControlUrl:
    """One URL, taken apart. path: sqlite's file. endpoints, cluster: etcd's members and the name in it."""

    engine: str
    path: Path | None = None
    endpoints: tuple[str, ...] = ()
    cluster: str = ""


def is_control_url(text: str) -> bool:
    """Whether `text` means a control plane rather than a node's address."""
    return text.startswith(("sqlite:", "etcd:"))


def parse_control_url(url: str) -> ControlUrl:
    """Take a URL apart. Raises SetupError naming what is wrong with it."""
    scheme, separator, rest = url.partition("://")
    if separator and scheme == "sqlite":
        if not rest.startswith("/") or rest.endswith("/") or "\0" in rest:
            raise _wrong(url, "sqlite takes the absolute path of a file after three slashes")
        return ControlUrl("sqlite", path=Path(rest))
    if separator and scheme == "etcd":
        hosts, _, cluster = rest.partition("/")
        endpoints = tuple(hosts.split(","))
        for endpoint in endpoints:
            found = _HOST.fullmatch(endpoint)
            if found is None or not 0 < int(found[1]) < 65536:
                raise _wrong(url, f"{endpoint!r} is no host:port")
        if not _NAME.fullmatch(cluster):
            raise _wrong(url, f"{cluster!r} is no cluster name: letters, digits, dot, dash and underscore, 64 at most")
        return ControlUrl("etcd", endpoints=endpoints, cluster=cluster)
    raise _wrong(url, "it names no engine")


async def open_control(
    url: str, *, clock: Clock | None = None, timeout_s: float = 5.0, may_make: bool = True
) -> ControlPlane:
    """Open the control plane at `url`. clock: the holder's of leases. timeout_s: each call's deadline. may_make: a file
    that is not there is made, as nodes do; who only asks would take a mistyped path for an empty cluster.

    Raises SetupError (URL, file, missing client, wrong server) and Unavailable (etcd can't be reached, no such file).
    """
    found = parse_control_url(url)
    clock = clock or SystemClock()
    # only who uses an engine loads it
    if found.engine == "etcd":
        try:
            from ucxkv.control.etcd import EtcdControl
        except ImportError as exc:
            raise errors.SetupError(
                f"{url} needs etcd's client: {exc}", needed="etcd3aio", fix="pip install 'ucxkv[etcd]'"
            ) from exc
        return await EtcdControl.open(found.endpoints, found.cluster, clock, timeout_s)
    from ucxkv.control.sqlite import SqliteControl

    assert found.path is not None
    if not may_make and found.path.parent.is_dir() and not found.path.exists():
        raise errors.Unavailable(
            f"no node is registered in {url}: there is no file {found.path}; start one with ucxkv node --cluster {url}"
        )
    return await SqliteControl.open(found.path, clock, timeout_s)


def _wrong(url: str, why: str) -> errors.SetupError:
    return errors.SetupError(
        f"{url!r} is no control plane: {why}",
        needed="sqlite:///absolute/path/file.db or etcd://host:2379[,host:2379]/cluster-name",
    )
