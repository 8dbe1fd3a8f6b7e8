"""The UCX context: settings, memory registration, and the mapping of UCX's statuses to the transport's errors.

A context loads libucp on first use (library.py). Our settings are applied to it alone, never to the environment, and
each only when the user did not set its UCX_ variable. Close what was made from a context (workers, memory) before it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from . import library
from .base import Closed, ForkGuard, PeerLost, SetupFailed, TransportError, UcxError, UsageError
from .lanes import Lane, read_lanes
from .sysfs import HostTree
from .topology import read_topology

if TYPE_CHECKING:
    from .progress import Worker

__all__ = [
    "DEFAULT_SETTINGS",
    "SAME_HOST_TRANSPORTS",
    "Context",
    "checked_address",
    "error_from_status",
    "why_no_verbs",
]

DEFAULT_SETTINGS: Mapping[str, str] = {
    "TCP_TX_SEG_SIZE": "256k",  # 8 KiB by default: 0.85 instead of 3 to 5 GB/s over TCP
    "TCP_RX_SEG_SIZE": "256k",
    "TCP_CONN_NB": "y",  # else an endpoint to a host that answers nothing blocks its thread, for minutes
    "KEEPALIVE_INTERVAL": "1s",  # a dead peer is found within two of them; 20 s by default
}
SAME_HOST_TRANSPORTS = "posix,cma,self"
"""For `transports`: shared memory and cross-memory attach only, with error mode NONE and a control connection."""

_RDMA_TRANSPORTS = frozenset(("all", "ib", "rc", "rc_verbs", "rc_mlx5", "rc_x", "dc", "dc_mlx5", "dc_x"))
_UD_TRANSPORTS = frozenset(("ud", "ud_verbs", "ud_x"))
_SOFT_ROCE_SETTINGS: Mapping[str, str] = {
    # UCX 1.13 looks for a datagram's destination GID where Soft-RoCE does not put it, and drops them all: no wire-up by
    # worker address, and endpoints with a keepalive over UD die after half a minute.
    "UD_ETH_DGID_CHECK": "n",
}
_CANCELED = -16
_RMA_RAILS_SINCE = (1, 17)  # 1.13 does not know MAX_RMA_RAILS and reads over one rail; 1.17 and later do
_PREFIXES_SINCE = (1, 17)  # before, `ucp_config_modify` knows a transport's settings without the transport's name alone
_TEXT_BYTES = 64 << 10
_LOST = frozenset(
    (-3, -6, -13, -20, -23, -24, -25)
)  # I/O error, unreachable, timed out, rejected, not connected, reset
_FAILURES = range(-89, -39)  # link and endpoint failures, endpoint timeout
_ADDRESS_BYTES_MIN, _ADDRESS_BYTES_MAX = 10, 16384
_ADDRESS_VERSIONS = (0, 1)  # low half of the first byte: UCX's formats v1 and v2
_BAD_POSIX_SEGMENT = re.compile(r"(\d+)([kKmM]?)")


def checked_address(address: bytes) -> bytes:
    """A worker address that a peer sent, fit for UCX, which takes no length and ends the process where it finds a
    version that it does not know. Followed by zeros, so that one that was cut is not read on into other memory.

    Raises UsageError. UCX trusts the rest of it: whoever may send one must be trusted as far.
    """
    if not _ADDRESS_BYTES_MIN <= len(address) <= _ADDRESS_BYTES_MAX or address[0] & 0x0F not in _ADDRESS_VERSIONS:
        raise UsageError(f"{len(address)} bytes that are no worker address of UCX ({address[:1].hex()}...)")
    return address + bytes(_ADDRESS_BYTES_MAX - len(address))


def error_from_status(status: int, what: str) -> TransportError:
    """The error that a negative ucs_status_t means: PeerLost, Closed (cancelled), UsageError (full) or UcxError."""
    ffi, lib = library.binding()
    text = f"{what}: {ffi.string(lib.kv_status_text(status)).decode()}"
    if status == _CANCELED:
        return Closed(text)
    if status == -1000:
        return UsageError(f"{text}; await some of them first")
    if status in _LOST or status in _FAILURES:
        return PeerLost(text)
    return UcxError(text, status)


class Context:
    """A UCX context with its registered memory.

    transports: UCX_TLS for this context alone (None: UCX's choice, or the user's UCX_TLS); devices: its network devices
    ("mlx5_0:1", "eth0"), a wish that the user's UCX_NET_DEVICES and devices that UCX cannot open overrule; rails: how
    many of them are RDMA rails of equal rank, over which UCX stripes large transfers; settings: further UCX_ settings
    without the prefix; is_shared: its workers run in different threads (the data service's does); library_path: see
    library.load. Raises SetupFailed.
    """

    def __init__(
        self,
        *,
        transports: str | None = None,
        devices: Sequence[str] = (),
        rails: int = 0,
        settings: Mapping[str, str] | None = None,
        is_shared: bool = True,
        library_path: str | os.PathLike[str] | None = None,
    ) -> None:
        self.library = library.load(library_path)
        self._ffi, self._lib = library.binding()
        self.guard = ForkGuard("this UCX context")
        wanted = _applicable(DEFAULT_SETTINGS, transports or os.environ.get("UCX_TLS"))
        if transports is not None:
            wanted["TLS"] = transports
        if devices:
            wanted["NET_DEVICES"] = ",".join(devices)
        if rails:
            wanted["MAX_RNDV_RAILS"] = str(rails)
            if self.library.version[:2] >= _RMA_RAILS_SINCE:
                wanted["MAX_RMA_RAILS"] = str(rails)
        if self.library.has_verbs and _is_soft_only(wanted.get("TLS")):
            wanted |= _SOFT_ROCE_SETTINGS
        wanted = {name: value for name, value in wanted.items() if f"UCX_{name}" not in os.environ}
        wanted.update(settings or {})
        _refuse_crashing_segment(wanted.get("POSIX_SEG_SIZE") or os.environ.get("UCX_POSIX_SEG_SIZE"))
        self.handle: Any = None
        self.lanes: tuple[Lane, ...] = ()
        """What UCX opened: every transport with its device."""
        self.unknown_settings_count = 0
        is_wish = bool(devices) and wanted.get("NET_DEVICES") == ",".join(devices)
        if not (is_wish and self._opens_one_of(devices, wanted, is_shared)):
            if is_wish:
                del wanted["NET_DEVICES"]  # masked, or without an address: UCX chooses itself
            self._open(wanted, is_shared)
        self.settings: Mapping[str, str] = wanted
        self.users_count = 0
        """Workers and memory regions that still use this context."""
        self.workers: set[Worker] = set()
        """Those of its workers that are driven from Python; they know which registrations are in use."""

    def _opens_one_of(self, devices: Sequence[str], wanted: Mapping[str, str], is_shared: bool) -> bool:
        try:
            self._open(wanted, is_shared)
        except SetupFailed:
            return False
        if not set(devices).isdisjoint(self.net_devices):
            return True
        self._lib.kv_context_close(self.handle)
        return False

    def _open(self, wanted: Mapping[str, str], is_shared: bool) -> None:
        ffi = self._ffi
        wanted = _of_use(wanted, os.environ.get("UCX_NET_DEVICES") or wanted.get("NET_DEVICES") or "all")
        names = wanted if self.library.version[:2] >= _PREFIXES_SINCE else [n.removeprefix("TCP_") for n in wanted]
        texts = [
            (ffi.new("char[]", name.encode()), ffi.new("char[]", value.encode()))
            for name, value in zip(names, wanted.values(), strict=True)
        ]
        p_names = ffi.new("const char *[]", [name for name, _ in texts] or [ffi.NULL])
        p_values = ffi.new("const char *[]", [value for _, value in texts] or [ffi.NULL])
        out, unknown = ffi.new("ucp_context_h *"), ffi.new("uint32_t *")
        status = self._lib.kv_context_open(p_names, p_values, len(texts), is_shared, out, unknown)
        if status != 0:
            reason = ffi.string(self._lib.kv_status_text(status)).decode()
            raise SetupFailed(
                f"UCX {self.library.version_text} ({self.library.directory}) opens no context: {reason}; "
                f"settings {dict(wanted)}, modules found: {', '.join(self.library.modules) or 'none'}"
            )
        self.unknown_settings_count = unknown[0]
        self.handle = out[0]
        text = ffi.new("char[]", _TEXT_BYTES)
        length = self._lib.kv_context_describe(self.handle, text, _TEXT_BYTES)
        self.lanes = read_lanes(bytes(ffi.buffer(text, length)).decode(errors="replace"))

    def close(self) -> None:
        """Free the context. Idempotent. Raises UsageError while workers or memory regions of it are open."""
        if self.handle is None or self.guard.is_forked:
            return
        if self.users_count:
            raise UsageError(
                f"{self.users_count} workers or memory regions still use this UCX context; close them first"
            )
        handle, self.handle = self.handle, None
        self._lib.kv_context_close(handle)

    @property
    def has_rdma(self) -> bool:
        """Whether this context can read and write remote memory by a device: UCX opened one with verbs."""
        return any(lane.has_rma for lane in self.lanes)

    @property
    def net_devices(self) -> tuple[str, ...]:
        """The network devices that it opened, as UCX names them."""
        return tuple(dict.fromkeys(lane.device for lane in self.lanes if lane.is_network))

    @property
    def transports(self) -> tuple[str, ...]:
        """The transports that it opened."""
        return tuple(dict.fromkeys(lane.transport for lane in self.lanes))

    def acquire(self) -> Any:
        """The native handle for a new user of this context; give it back with `release`."""
        self.guard.check()
        if self.handle is None:
            raise Closed("this UCX context is closed")
        self.users_count += 1
        return self.handle

    def release(self) -> None:
        """One user of this context is gone."""
        self.users_count -= 1

    def __enter__(self) -> Context:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _applicable(settings: Mapping[str, str], transports: str | None) -> dict[str, str]:
    """Those of our settings that these transports know: for the others UCX would print a warning."""
    names = set(re.split(r"[,\s]+", transports)) if transports else {"all"}
    is_all = "all" in names or any(name.startswith("^") for name in names)
    if is_all or "tcp" in names:
        return dict(settings)
    return {name: value for name, value in settings.items() if not name.startswith("TCP_")}


def _of_use(settings: Mapping[str, str], devices: str) -> Mapping[str, str]:
    """Those of our settings that these devices use: of the others UCX would say that they are invalid."""
    names = devices.split(",")
    if "all" in names or devices.startswith("^"):
        return settings
    unused = ["TCP_"] * all(":" in name for name in names) + ["UD_"] * all(":" not in name for name in names)
    return {name: value for name, value in settings.items() if not name.startswith(tuple(unused))}


def why_no_verbs(path: str | os.PathLike[str] | None = None) -> str:
    """Why UCX moves nothing by RDMA in this process, whatever devices there are; "" when it may. Loads libucp."""
    found = library.load(path)
    if not found.has_verbs:
        return f"UCX {found.version_text} of {found.directory} has no verbs"
    wanted = os.environ.get("UCX_TLS", "all")
    names = {name.strip() for name in wanted.split(",")}
    if not (names & _RDMA_TRANSPORTS or wanted.startswith("^")):
        return f"UCX_TLS={wanted} allows no RDMA"
    return ""


def _is_soft_only(transports: str | None) -> bool:
    """Whether the RDMA devices that these transports (None: the user's, or all) use are all in software."""
    names = set((os.environ.get("UCX_TLS") or transports or "all").split(","))
    uses_rdma = bool(names & (_RDMA_TRANSPORTS | _UD_TRANSPORTS))
    ports = read_topology(HostTree(use_nvml=False)).usable_ports() if uses_rdma else ()
    return bool(ports) and all(device.is_soft for device, _ in ports)


def _refuse_crashing_segment(value: str | None) -> None:
    match = _BAD_POSIX_SEGMENT.fullmatch(value or "")
    if match is None:
        return
    size = int(match[1]) * {"": 1, "k": 1 << 10, "m": 1 << 20}[match[2].lower()]
    if size >= 64 << 10:
        raise SetupFailed(f"UCX_POSIX_SEG_SIZE={value} crashes receivers of UCX up to 1.22; use 60k or less")
