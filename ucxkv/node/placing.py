"""Where this node's memory and data thread go, decided once at start from the machine's topology.

A no-op on a machine with one NUMA node. Nothing here fails a start but a node number that does not exist.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import structlog

from ucxkv.errors import SetupError
from ucxkv.tiers.numa import memory_near
from ucxkv.transport.affinity import placement_for_node, running_on
from ucxkv.transport.base import UsageError
from ucxkv.transport.rails import choose_rails
from ucxkv.transport.sysfs import HostTree
from ucxkv.transport.topology import read_topology

if TYPE_CHECKING:
    from ucxkv.node.config import NodeConfig
    from ucxkv.transport.sysfs import SysTree

__all__ = ["Placing"]

P = ParamSpec("P")
T = TypeVar("T")

log = structlog.get_logger("ucxkv.node")


class Placing:
    """One node's placement. tree: where the machine is read; default: this one, without asking NVML."""

    def __init__(self, config: NodeConfig, tree: SysTree | None = None) -> None:
        """Read the machine (milliseconds of file reads). Raises SetupError for a NUMA node that does not exist."""
        topology = read_topology(HostTree(use_nvml=False) if tree is None else tree)
        try:
            self.placement = placement_for_node(topology, config.numa)
        except UsageError as exc:
            raise SetupError(f"numa = {config.numa!r}: {exc}", fix="`ucxkv topo` shows the nodes") from exc
        near = f"numa{self.placement.numa}" if self.placement.numa is not None else ""
        self._choice = choose_rails(topology, near)
        self._refused = ""

    def near(self, make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `make` so that the memory which it populates is on the chosen node."""
        with memory_near(self.placement.numa) as self._refused:
            if self._refused:
                log.warning("memory.unplaced", numa=self.placement.numa, why=self._refused)
            return make(*args, **kwargs)

    def thread(self) -> AbstractContextManager[bool]:
        """Threads that are started inside run on the chosen node's CPUs."""
        return running_on(self.placement.cpus)

    def facts(self) -> dict[str, str]:
        """The placement and the devices that rank best here, with reasons."""
        where = "any node" if self.placement.numa is None else f"node {self.placement.numa}"
        why = f"memory refused: {self._refused}" if self._refused else self.placement.why
        return {"numa": f"{where} ({why})", "devices": f"{self._choice.net_devices} ({self._choice.why})"}
