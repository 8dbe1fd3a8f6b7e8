"""What a node that keeps durable blocks has outside of its process, and who may open it.

    state_dir/lock        held by the one running node (flock)
    state_dir/node.json   whose it is, and where its memory lies; replaced whole
    state_dir/journal/    the directory's log (ucxkv.journal)
    /dev/shm/ucxkv-NAME-IDENTITY          the segment: the values
    /dev/shm/ucxkv-NAME-IDENTITY-grants   who may write what: a page that says whose it is, then the grant ledger

Invariants
- One process at a time: without the lock nothing is read or changed. The kernel lets it go with the process, so a
  stale lock stops nobody, and a stopped (SIGSTOP) node keeps it.
- Epochs grow: each start takes one that is larger than every one before and writes it down before it serves. It is the
  incarnation of the segment, too (`tiers.named`).
- What belongs to another node, another version or another size is refused, by name, and nothing of it is changed.
- **A late writer of an incarnation before never meets another's bytes.** A process that mapped the segment from a node
  that was killed may wake and write at any time, into what was lent to it then. What was lent stands in the ledger,
  which outlives the node as the segment does: counted before the client was told, uncounted after it had committed or
  given back. While the kernel says that any process of before still has the memory (`is_mapped_by_older`), the units
  that the ledger counted then are given to nobody (`NodeMemory.held_units`); only when it says that none is left they
  are free. Blocks that came back lie in places that their writers had committed, and so write no more. Peers that
  write by message, by RDMA or by CMA (into a process, by its number) have no such way: the process that served them is
  gone, and what they wrote through with it.
- With `durability = process` the values do not survive the machine: after a reboot the segment is not there, and the
  blocks that the journal names are dropped, and said so.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from ucxkv.dial import host_identity
from ucxkv.errors import SetupError
from ucxkv.tiers.ledger import GrantLedger, ledger_bytes
from ucxkv.tiers.named import SHARED_FOLDER, NamedSegment
from ucxkv.tiers.slabs import UNIT_BYTES

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ucxkv.node.config import NodeConfig
    from ucxkv.tiers.segments import HugePages

__all__ = ["NodeMemory", "NodeState", "forget"]

_FORMAT = 1
_HEAD_BYTES = 4096
_NODE, _LOCK, _JOURNAL = "node.json", "lock", "journal"


@dataclass(frozen=True, slots=True)
class _Facts:
    """What node.json says."""

    format: int
    name: str
    identity: str
    epoch: int
    segment_bytes: int
    boot: str

    @property
    def segment_path(self) -> str:
        plain = re.sub(r"[^A-Za-z0-9._-]", "_", self.name)[:64]
        return f"{SHARED_FOLDER}/ucxkv-{plain}-{self.identity}"


@dataclass(slots=True)
class NodeMemory:
    """The memory of a node: its segment, the ledger of what is lent, and what a process of before may still write.

    why_empty: why the segment has none of the bytes of before; empty: it is the one of before.
    """

    segment: NamedSegment
    ledger: GrantLedger
    why_empty: str
    held_units: list[int]
    _ledger_segment: NamedSegment
    _before: npt.NDArray[np.uint32]

    def is_mapped_by_older(self) -> bool:
        """Whether a process of before this start still has the segment."""
        return self.segment.is_mapped_by_older()

    def release_held(self) -> None:
        """No process of before is left: what it had is uncounted."""
        self.ledger.subtract(self._before)
        self.held_units = []

    def close(self) -> None:
        """Leave everything where it is. Idempotent."""
        self.ledger.close()
        self._ledger_segment.close()
        self.segment.close()


class NodeState:
    """See the module. Made by `open`; `close` lets the folder go and leaves everything where it is."""

    def __init__(self, folder: Path, lock: int, facts: _Facts, boot_before: str) -> None:
        self.folder = folder
        self.epoch = facts.epoch
        self.journal_folder = folder / _JOURNAL
        self.identity = facts.identity.encode()
        self._lock = lock
        self._facts = facts
        self._boot_before = boot_before

    @classmethod
    def open(cls, config: NodeConfig, epoch_least: int) -> Self:
        """Take the folder, made if missing, under an epoch of at least epoch_least. Raises SetupError."""
        folder = Path(config.state_dir)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = _take_lock(folder)
        except OSError as exc:
            raise SetupError(f"state_dir {folder}: {exc}", fix="name a folder that this user may write") from exc
        try:
            known = _read(folder)
            if known is None:
                known = _Facts(_FORMAT, config.name, secrets.token_hex(8), 0, config.host_bytes, host_identity())
            elif known.name != config.name:
                raise SetupError(
                    f"state_dir {folder} is another node's",
                    found=f"node {known.name!r}",
                    needed=f"node {config.name!r}",
                    fix=f"name = {known.name!r}, or another state_dir",
                )
            elif known.segment_bytes != config.host_bytes:
                raise SetupError(
                    f"host_bytes of node {config.name} has changed, and its durable blocks lie in a segment of the old "
                    "size",
                    found=f"{config.host_bytes} bytes",
                    needed=f"{known.segment_bytes} bytes, as before",
                    fix=f"set it back, or give the blocks up: `ucxkv forget {folder}`",
                )
            epoch = max(epoch_least, known.epoch + 1)
            facts = _Facts(_FORMAT, known.name, known.identity, epoch, known.segment_bytes, host_identity())
            _write(folder, facts)
        except BaseException:
            os.close(lock)
            raise
        return cls(folder, lock, facts, known.boot)

    def take_memory(self, huge_pages: HugePages) -> NodeMemory:
        """Map the memory of before, or make it: once, when the journal has turned out to be this node's. Raises
        SetupFailed.
        """
        facts = self._facts
        segment, why = _segment(facts, huge_pages)
        if why and self._boot_before != facts.boot:
            why = f"the machine was started anew, and memory went with it ({why})"
        try:
            ledger_segment, is_known = _ledger(facts, segment, self.folder)
        except BaseException:
            segment.close()
            raise
        ledger = GrantLedger(ledger_segment.view[_HEAD_BYTES:])
        before, held = ledger.snapshot(), list[int]()
        if not segment.is_mapped_by_older():
            ledger.subtract(before)
        else:
            held = ledger.units() if is_known else list(range(segment.size_bytes // UNIT_BYTES))
        return NodeMemory(segment, ledger, why, held, ledger_segment, before)

    def close(self) -> None:
        """Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def forget(folder: Path) -> list[str]:
    """Delete a node's state and segment: what was deleted. Raises SetupError when a node runs on it, or it is none."""
    if not (folder / _NODE).exists() and not (folder / _LOCK).exists():
        raise SetupError(f"{folder} is no node's state_dir", fix="name the folder that the node was given")
    try:
        lock = _take_lock(folder)
    except OSError as exc:
        raise SetupError(f"state_dir {folder}: {exc}", fix="run this as the node's user") from exc
    gone = []
    try:
        facts = _read(folder)
        if facts is not None:
            for path in (facts.segment_path, facts.segment_path + "-grants"):
                if os.path.lexists(path):
                    os.unlink(path)
                    gone.append(path)
        if (folder / _JOURNAL).exists():
            shutil.rmtree(folder / _JOURNAL)
            gone.append(str(folder / _JOURNAL))
        for name in (_NODE, _LOCK):
            (folder / name).unlink(missing_ok=True)
            gone.append(str(folder / name))
    except OSError as exc:
        raise SetupError(f"state_dir {folder}: {exc}", fix="run this as the node's user") from exc
    finally:
        os.close(lock)
    return gone


def _take_lock(folder: Path) -> int:
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        holder = os.pread(lock, 20, 0).decode(errors="replace").strip()
        os.close(lock)
        raise SetupError(
            f"state_dir {folder} is in use",
            found=f"a running node, process {holder or 'unknown'}",
            needed="one node for each state_dir",
            fix="stop that node, or give this one its own state_dir",
        ) from exc
    except BaseException:
        os.close(lock)
        raise
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def _read(folder: Path) -> _Facts | None:
    path = folder / _NODE
    try:
        raw = json.loads(path.read_bytes())
        facts = _Facts(**raw)
        good = all(type(getattr(facts, field)) is kind for field, kind in _KINDS.items())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as exc:
        raise _unreadable(path, str(exc)) from exc
    if not good or facts.format != _FORMAT or not re.fullmatch(r"[0-9a-f]{16}", facts.identity):
        raise _unreadable(path, f"format {facts.format}")
    return facts


_KINDS = {"format": int, "name": str, "identity": str, "epoch": int, "segment_bytes": int, "boot": str}


def _unreadable(path: Path, found: str) -> SetupError:
    return SetupError(
        f"{path} is no state of this version",
        found=found,
        needed=f"format {_FORMAT}",
        fix="run the ucxkv version that wrote it, or another state_dir",
    )


def _write(folder: Path, facts: _Facts) -> None:
    fresh = folder / f"{_NODE}.new"
    try:
        with open(fresh, "w") as out:
            json.dump(asdict(facts), out)
            out.flush()
            os.fsync(out.fileno())
        fresh.rename(folder / _NODE)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as exc:
        raise SetupError(f"state_dir {folder}: {exc}", fix="make room there, or name another folder") from exc


def _segment(facts: _Facts, huge_pages: HugePages) -> tuple[NamedSegment, str]:
    """The segment of before, or a new one and why."""
    path, size = facts.segment_path, facts.segment_bytes
    found = NamedSegment.open_file(path, huge_pages, incarnation=facts.epoch)
    why = f"{path} is not there"
    if found is not None:
        if size <= found.size_bytes < size + (2 << 20):  # rounded up to huge pages
            return found, ""
        why = f"{path} has {found.size_bytes} bytes, not {size}"
        found.close()
        os.unlink(path)
    return NamedSegment.create_file(path, size, huge_pages, incarnation=facts.epoch), why


def _ledger(facts: _Facts, segment: NamedSegment, folder: Path) -> tuple[NamedSegment, bool]:
    """The ledger, and whether it tells what was lent before."""
    path = facts.segment_path + "-grants"
    nbytes = _HEAD_BYTES + ledger_bytes(segment.size_bytes)
    nbytes = -(-nbytes // _HEAD_BYTES) * _HEAD_BYTES
    found = NamedSegment.open_file(path, "never", incarnation=facts.epoch)
    if found is not None:
        if found.size_bytes == nbytes:
            return found, True
        found.close()
        os.unlink(path)
    made = NamedSegment.create_file(path, nbytes, "never", incarnation=facts.epoch)
    head = json.dumps({"node": facts.name, "state_dir": str(folder.resolve())}).encode()[:_HEAD_BYTES]
    made.view[: len(head)] = head
    return made, False
