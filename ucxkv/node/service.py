"""The node's data service: look-ups, reads and writes by UCX message, answered in C without this interpreter."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ucxkv.node.config import NodeConfig
    from ucxkv.node.store import HostStore
    from ucxkv.protocol import messages as m


class Service:
    """Off: this build has no data service yet."""

    def __init__(self, config: NodeConfig, store: HostStore) -> None:
        self.address = b""
        self.why_off = "not built"

    def open_session(self, session: int) -> None:
        """A session may use the service."""

    def close_session(self, session: int) -> None:
        """A session ended: when this returns nothing of it writes here any more."""

    def lend(self, session: int, granted: m.Granted) -> None:
        """Extents the session may write."""

    def numbers(self) -> dict[str, float]:
        """Counters."""
        return {}

    def facts(self) -> dict[str, str]:
        """Which UCX."""
        return {}

    def close(self) -> None:
        """Stop."""
