"""What UCX made of a choice: the devices that a context opened, the lanes that an endpoint uses.

Settings are wishes: a device may be masked in a container, a peer out of its reach. Only UCX knows, and UCX 1.13 says
it as text alone; a text that is not understood reads as no lanes, never as an error.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .endpoint import Endpoint

__all__ = ["Lane", "lanes_of", "lanes_text", "read_lanes"]

_LANE = re.compile(r"lane\[\d+\]:\s+\d+:(\w+)/(\S+)\.\d+ md\[")
_RESOURCE = re.compile(r"resource \d+\s+:.*-- (\w+)/(\S+)")
_RDMA = ("rc_", "dc_")
_LOCAL = frozenset(("self", "posix", "sysv", "cma", "knem", "xpmem"))
_TEXT_BYTES = 64 << 10


class Lane(NamedTuple):
    """A transport over a device, as UCX names them: rc_mlx5 over mlx5_0:1, tcp over eth0, posix over memory."""

    transport: str
    device: str

    @property
    def has_rma(self) -> bool:
        """Whether the device itself reads and writes the peer's memory (reliable connections; datagrams do not)."""
        return self.transport.startswith(_RDMA)

    @property
    def is_network(self) -> bool:
        """Whether it leads out of this host."""
        return self.transport not in _LOCAL

    def __str__(self) -> str:
        return f"{self.transport}/{self.device}"


def read_lanes(text: str) -> tuple[Lane, ...]:
    """The lanes of an endpoint or the resources of a context, from what UCX prints, each once and in its order."""
    found = [Lane(*match) for match in (*_LANE.findall(text), *_RESOURCE.findall(text))]
    return tuple(dict.fromkeys(found))


def lanes_of(endpoint: Endpoint) -> tuple[Lane, ...]:
    """The lanes of an endpoint; all of them only once its connection stands. Raises what it failed with, or Closed."""
    ffi, lib = endpoint.binding
    text = ffi.new("char[]", _TEXT_BYTES)
    length = lib.kv_endpoint_describe(endpoint.native(), text, _TEXT_BYTES)
    return read_lanes(bytes(ffi.buffer(text, length)).decode(errors="replace"))


def lanes_text(lanes: tuple[Lane, ...]) -> str:
    """ "rc_mlx5/mlx5_0:1, rc_mlx5/mlx5_1:1" for people; the datagram lanes that only watch the peer are left out."""
    shown = [lane for lane in lanes if lane.has_rma] or list(lanes)
    return ", ".join(map(str, shown))
