"""What a node that keeps durable blocks holds beside its store, from start to end: folder, journal, memory, log.

Taken in this order, so that nothing is made or changed before it is known to be this node's; given back in the reverse.
With durability = power there is also the file with the values beside the journal, which goes with it.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Self

import structlog

from ucxkv.directory.log import named
from ucxkv.errors import SetupError
from ucxkv.journal import Durability, Journal, Recovered, ValueFile
from ucxkv.node.durable import NO_NUMBERS, DurableLog
from ucxkv.node.recovering import recover
from ucxkv.node.shards.records import named as named_by_shards
from ucxkv.node.shards.recovery import recover_shards
from ucxkv.node.state import NodeState

if TYPE_CHECKING:
    from ucxkv.directory.slots import Records
    from ucxkv.node.config import NodeConfig
    from ucxkv.node.placing import Placing
    from ucxkv.node.shards.recovery import ShardRecovery
    from ucxkv.node.staging import Staging
    from ucxkv.node.state import NodeMemory
    from ucxkv.node.store import HostStore

__all__ = ["Keeping", "file_system"]

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
        self._values: ValueFile | None = None
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
            if config.durability == "power":
                _refuse_memory(state.folder)
            keeping._journal, keeping._recovered = await Journal.open(
                state.journal_folder, durability=Durability(config.durability), identity=state.identity
            )
            keeping.memory = await asyncio.to_thread(placing.near, state.take_memory, config.huge_pages)
            keeping._values = await asyncio.to_thread(keeping._find_values)
        except BaseException:
            await keeping.aclose()
            if keeping.memory is not None:
                keeping.memory.close()
            keeping.release()
            raise
        return keeping

    async def recover(self, store: HostStore) -> DurableLog:
        """Take in what is there, and begin to log. Raises SetupError."""
        assert self._journal is not None and self._recovered is not None and self.memory is not None
        recovery = await asyncio.to_thread(recover, store, self._state, self.memory, self._recovered, self._values)
        await asyncio.to_thread(self._keep_values, recovery.rows)
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

    async def recover_shards(self, store: HostStore) -> ShardRecovery:
        """The same on a node of a cluster, whose journal has the logs of many shards; it is theirs from then on."""
        assert self._journal is not None and self._recovered is not None and self.memory is not None
        found = await asyncio.to_thread(
            recover_shards, store, self._state, self.memory, self._journal, self._recovered, self._values
        )
        await asyncio.to_thread(self._keep_values, found.rows())
        say = log.error if found.lacking else log.info
        say(
            "durable.recovered",
            state_dir=self._config.state_dir,
            blocks=found.blocks,
            lacking=sum(found.lacking.values()),
            why=self.memory.why_empty if found.lacking else "",
            held_bytes=found.held_bytes,
        )
        return found

    def _find_values(self) -> ValueFile | None:
        assert self._journal is not None and self.memory is not None
        names = named_by_shards if self._config.cluster else named
        return ValueFile.find(self._journal.files, self.memory.segment.view, names)

    def _keep_values(self, rows: Records) -> None:
        """From here on the disk has the values, too, or has them no longer. Raises SetupError."""
        assert self._journal is not None and self.memory is not None
        values, self._values = self._values, None
        if self._config.durability == "power":
            if values is None:
                names = named_by_shards if self._config.cluster else named
                values = ValueFile.make(self._journal.files, self.memory.segment.view, names, rows)
            self._journal.keep_beside(values)
        elif values is not None:
            values.remove()

    async def aclose(self) -> None:
        """Commit and settle what is on its way, close the journal. Idempotent."""
        if self.log is not None:
            await self.log.aclose()
        elif self._journal is not None:
            await self._journal.aclose()
        if self._values is not None:
            self._values.close()
            self._values = None

    def release(self) -> None:
        """Let the folder go, when nothing of this process touches the memory any more. Idempotent."""
        self._state.close()


def facts(config: NodeConfig, durable: Staging | None) -> dict[str, str]:
    """What durable blocks survive on a node, in words."""
    if durable is None:
        return {"durability": "memory: durable puts are refused"}
    if durable.failed is not None:
        return {"durability": f"journal failed, durable puts are refused until a restart: {durable.failed}"}
    if config.durability == "memory":
        return {"durability": "memory of the shard's nodes: durable puts survive all of them but one"}
    return {"durability": f"{config.durability}, state in {config.state_dir}"}


def numbers(durable: Staging | None) -> dict[str, float]:
    """The journal's numbers of a node; zeros without one."""
    return NO_NUMBERS if durable is None else {**NO_NUMBERS, **durable.numbers()}


def file_system(folder: Path) -> str:
    """What kind the file system of this folder is; empty where the machine does not tell."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((each.partition(" - ")[2].split()[0] for each in mounts if each.split()[2] == number), "")


def _refuse_memory(folder: Path) -> None:
    """SetupError when nothing in this folder outlives the machine."""
    kind = file_system(folder)
    if kind in ("tmpfs", "ramfs"):
        raise SetupError(
            f"durability = power, and state_dir {folder} is in memory",
            found=kind,
            needed="a folder on a disk",
            fix="state_dir on a disk, or durability = process",
        )
