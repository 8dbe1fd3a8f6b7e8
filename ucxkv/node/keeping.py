"""What a node that keeps durable blocks holds beside its store, from start to end: folder, journal, memory, log.

Taken in this order, so that nothing is made or changed before it is known to be this node's; given back in the reverse.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Self

import structlog

from ucxkv.journal import Durability, Journal, Recovered
from ucxkv.node.durable import NO_NUMBERS, DurableLog
from ucxkv.node.recovering import recover
from ucxkv.node.state import NodeState

if TYPE_CHECKING:
    from ucxkv.node.config import NodeConfig
    from ucxkv.node.placing import Placing
    from ucxkv.node.state import NodeMemory
    from ucxkv.node.store import HostStore

__all__ = ["Keeping"]

log = structlog.get_logger("ucxkv.node")


class Keeping:
    """Made by `open`; `recover` once the store is there, then `log` is set; `aclose` before the store is closed,
    `release` after.

    epoch: this start's.
    """

    def __init__(self, config: NodeConfig, state: NodeState) -> None:
        self._config = config
        self._state = state
        self._journal: Journal | None = None
        self._recovered: Recovered | None = None
        self.epoch = state.epoch
        self.memory: NodeMemory | None = None
        """To be closed with the store on it."""
        self.log: DurableLog | None = None

    @classmethod
    async def open(cls, config: NodeConfig, epoch_least: int, placing: Placing) -> Self | None:
        """None with durability = memory. Raises SetupError, SetupFailed; then everything is as it was."""
        if config.durability == "memory":
            return None
        state = await asyncio.to_thread(NodeState.open, config, epoch_least)
        keeping = cls(config, state)
        try:
            keeping._journal, keeping._recovered = await Journal.open(
                state.journal_folder, durability=Durability(config.durability), identity=state.identity
            )
            keeping.memory = await asyncio.to_thread(placing.near, state.take_memory, config.huge_pages)
        except BaseException:
            await keeping.aclose()
            keeping.release()
            raise
        return keeping

    async def recover(self, store: HostStore) -> DurableLog:
        """Take in what is there, and begin to log. Raises SetupError."""
        assert self._journal is not None and self._recovered is not None and self.memory is not None
        recovery = await asyncio.to_thread(recover, store, self._state, self.memory, self._recovered)
        durable = DurableLog(store, self._journal)
        await durable.start(recovery)
        self.log = durable
        say = log.error if recovery.lost else log.info
        say(
            "durable.recovered",
            state_dir=self._config.state_dir,
            blocks=recovery.blocks,
            lost=recovery.lost_blocks,
            damaged=recovery.damaged,
            why=self.memory.why_empty if recovery.lost else "",
            held_bytes=recovery.held_bytes,
            index_s=round(recovery.index_s, 3),
            index_cpu_s=round(recovery.index_cpu_s, 3),
            sums_s=round(recovery.sums_s, 3),
        )
        return durable

    async def aclose(self) -> None:
        """Commit and settle what is on its way, close the journal. Idempotent."""
        if self.log is not None:
            await self.log.aclose()
        elif self._journal is not None:
            await self._journal.aclose()

    def release(self) -> None:
        """Let the folder go, when nothing of this process touches the memory any more. Idempotent."""
        self._state.close()


def facts(config: NodeConfig, durable: DurableLog | None) -> dict[str, str]:
    """What durable blocks survive on a node, in words."""
    if durable is None:
        return {"durability": "memory: durable puts are refused"}
    if durable.failed is not None:
        return {"durability": f"journal failed, durable puts are refused until a restart: {durable.failed}"}
    return {"durability": f"{config.durability}, state in {config.state_dir}"}


def numbers(durable: DurableLog | None) -> dict[str, float]:
    """The journal's numbers of a node; zeros without one."""
    return NO_NUMBERS if durable is None else durable.numbers()
