"""What the files of a journal say after any end: the newest state that they prove, and where writing goes on.

The result is the newest whole snapshot and every record after it up to the first frame that does not prove itself.
It is never less than a snapshot that was once complete: when the newest one is damaged, the one before and the log
up to the damaged one's lsn must be there, or `recover` refuses (SetupError). Files of another identity or of a newer
version are refused before anything is changed; and nothing is changed before all was read. When acknowledged records
are lost (DAMAGED), nothing is cut before the first append: whoever closes the journal instead finds the damage
again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ucxkv.errors import IntegrityError, SetupError
from ucxkv.journal.files import Files
from ucxkv.journal.log import Log, Spares, retire
from ucxkv.journal.pieces import VERSION, Head
from ucxkv.journal.snapshots import TEMPORARY, Snapshot, is_whole, list_snapshots, read_chunks, read_snapshot_head
from ucxkv.journal.walk import LogFile, StopKind, Stopped, Walk, read_log_head, sequence_of

__all__ = ["Recovered", "Recovery", "recover"]


@dataclass(frozen=True, slots=True)
class Recovered:
    """What was in the folder when it was opened. Read it before the first `snapshot`: that recycles old files.

    snapshot_epoch, snapshot_lsn: of the newest whole snapshot, 0 and 0 = none. last_lsn: of the last record; the next
    append follows it. stopped: why replay ended there; when its kind is DAMAGED,
    acknowledged records behind that place are lost, and the first append gives them up for good. damaged: names of
    snapshots that do not check out."""

    snapshot_epoch: int
    snapshot_lsn: int
    last_lsn: int
    stopped: Stopped
    damaged: tuple[str, ...] = ()
    _files: Files | None = field(default=None, repr=False)
    _snapshot: Snapshot | None = field(default=None, repr=False)
    _logs: tuple[LogFile, ...] = field(default=(), repr=False)

    @property
    def snapshot(self) -> Iterator[bytes]:
        """The snapshot's chunks in order. Reads the disk; IntegrityError when that changed."""
        if self._files is not None and self._snapshot is not None:
            yield from read_chunks(self._files, self._snapshot)

    @property
    def records(self) -> Iterator[tuple[int, int, bytes]]:
        """(epoch, lsn, record) of every record after the snapshot. Reads the disk; IntegrityError when it changed."""
        if self._files is None or not self._logs or self.last_lsn <= self.snapshot_lsn:
            return
        lsn = 0
        for frame in Walk(self._files, self._logs).frames():
            for lsn, record in enumerate(frame.records, frame.lsn):
                if lsn > self.last_lsn:
                    return
                if lsn > self.snapshot_lsn:
                    yield frame.epoch, lsn, record
        if lsn < self.last_lsn:
            raise IntegrityError(f"the journal held records up to {self.last_lsn} when it was opened, now up to {lsn}")


@dataclass(frozen=True, slots=True)
class Recovery:
    """The recovered state, the log ready for writing, and what its owner must know.

    snapshots: the whole ones, newest last. run: this opening's.
    """

    recovered: Recovered
    log: Log
    spares: Spares
    snapshots: tuple[Snapshot, ...]
    run: int


def recover(files: Files, *, identity: bytes, file_bytes: int, now_run: int, is_synced: bool) -> Recovery:
    """Read the folder, which is locked, cut the log behind its last good record, and make it ready for writing.

    now_run: a number larger than at earlier calls, such as the wall clock's nanoseconds. is_synced: frames are synced.
    Raises SetupError (see above), OSError.
    """
    names = files.names()
    logs, bad = _read_heads(files, names, identity)
    snapshots = list_snapshots(names)
    _check_snapshots(files, snapshots, identity)
    if is_synced:
        _settle(files, [each.name for each in logs])
    chosen, whole, damaged = _choose(files, snapshots)
    base_lsn = chosen.lsn if chosen is not None else 0
    needed_lsn = snapshots[-1].lsn if snapshots else 0

    start = max((i for i, each in enumerate(logs) if each.lsn <= base_lsn + 1), default=-1)
    if start < 0 and (snapshots or logs or bad):
        raise _nothing_to_start_from(files, base_lsn, logs, bad, damaged)
    walk = _walk(files, logs[start:]) if start >= 0 else None
    last_lsn = max(base_lsn, walk.lsn if walk else 0)
    if last_lsn < needed_lsn:
        raise _too_short(files, damaged, last_lsn, needed_lsn)

    stopped = walk.stopped if walk else Stopped(StopKind.END, "", 0, "the folder is new")
    if bad and stopped.kind is not StopKind.DAMAGED and walk is not None and bad[-1] > walk.file.name:
        text = f"the head of {bad[-1]} is damaged: acknowledged records may be lost"
        stopped = Stopped(StopKind.DAMAGED, bad[-1], 0, text)
    run = max([now_run, *(each.head.run + 1 for each in logs), walk.run + 1 if walk else 1])
    kept = logs[: start + walk.index + 1] if walk else []
    sequences = [found for name in names if (found := sequence_of(name)) is not None]

    for name in names:
        if name.endswith(TEMPORARY) and name.startswith("snapshot-"):
            files.remove(name)
    if stopped.kind is not StopKind.DAMAGED:
        for each in whole[:-2]:  # an end came between the newest one and their removal
            files.remove(each.name)
        whole = whole[-2:]
    spares = Spares(files, file_bytes)
    spares.adopt(names)
    keep = {each.name for each in kept}
    dropped = [name for name in names if sequence_of(name) is not None and name not in keep]
    log = Log(
        files,
        spares,
        identity=identity,
        file_bytes=file_bytes,
        run=run,
        is_synced=is_synced,
        logs=kept,
        next_sequence=max(sequences, default=0) + 1,
    )

    def cut() -> None:
        """Give up what lies behind the last good record, and go on from there."""
        retire(files, spares, dropped[::-1])
        if walk is not None and walk.lsn == last_lsn:
            log.resume(walk.offset, walk.sum, walk.last_frame_sum)
        else:
            log.begin(last_lsn + 1)

    if stopped.kind is StopKind.DAMAGED:
        log.prepare_later(cut)
    else:
        cut()
    recovered = Recovered(
        chosen.epoch if chosen is not None else 0,
        base_lsn,
        last_lsn,
        stopped,
        tuple(each.name for each in damaged),
        files,
        chosen,
        tuple(kept[start:]),
    )
    return Recovery(recovered, log, spares, tuple(whole), run)


def _read_heads(files: Files, names: Sequence[str], identity: bytes) -> tuple[list[LogFile], list[str]]:
    """(log files in order, names of those whose head is damaged); refuses what is not ours."""
    logs, bad = [], []
    for name in names:
        sequence = sequence_of(name)
        if sequence is None:
            continue
        found = read_log_head(files, name)
        if found is None or (found[0].version == VERSION and len(found[1]) < 8):
            bad.append(name)
            continue
        head, payload = found
        _check_owner(files, name, head, payload[8:], identity)
        if head.sequence == sequence:  # else an old life's: renamed, and never begun
            logs.append(LogFile(name, head, int.from_bytes(payload[:8], "little")))
    return sorted(logs, key=lambda each: each.sequence), sorted(bad)


def _check_snapshots(files: Files, snapshots: Sequence[Snapshot], identity: bytes) -> None:
    for each in snapshots:
        found = read_snapshot_head(files, each)
        if found is not None:
            _check_owner(files, each.name, found[0], found[1], identity)


def _check_owner(files: Files, name: str, head: Head, found: bytes, identity: bytes) -> None:
    """Raise when a newer release or another node wrote it."""
    if head.version != VERSION:
        raise SetupError(
            f"the journal in {files.folder} was written by another version of ucxkv; it is left as it is",
            found=f"format {head.version} in {name}",
            needed=f"format {VERSION}",
            fix="start the release that wrote it, or name an empty journal folder",
        )
    if found != identity:
        raise SetupError(
            f"the journal in {files.folder} belongs to another node; it is left as it is",
            found=f"identity {_show(found)} in {name}",
            needed=f"identity {_show(identity)}",
            fix="correct the node's name or its journal folder; to start empty, name an empty folder",
        )


def _show(identity: bytes) -> str:
    return repr(identity.decode()) if identity.isascii() else identity.hex()


def _settle(files: Files, names: Sequence[str]) -> None:
    """What will be read must be on the disk: a record that is handed out here must not vanish at the next power cut."""
    for name in names:
        handle = files.open(name)
        try:
            files.sync(handle)
            files.forget_cached(handle)
        finally:
            files.close(handle)


def _choose(files: Files, snapshots: Sequence[Snapshot]) -> tuple[Snapshot | None, list[Snapshot], list[Snapshot]]:
    """(the newest whole one, the whole ones, the damaged ones); older ones are read only when a newer is damaged."""
    whole: list[Snapshot] = []
    damaged: list[Snapshot] = []
    for each in reversed(snapshots):
        if whole or is_whole(files, each):
            whole.append(each)
        else:
            damaged.append(each)
    return (whole[0] if whole else None), whole[::-1], damaged


def _walk(files: Files, logs: Sequence[LogFile]) -> Walk:
    walk = Walk(files, logs)
    for _ in walk.frames():
        pass
    return walk


def _restore(files: Files) -> str:
    return (
        f"restore {files.folder} from a copy, or let this node rejoin from its replicas with an empty journal folder; "
        "what only this journal held is lost then"
    )


def _nothing_to_start_from(
    files: Files, base_lsn: int, logs: Sequence[LogFile], bad: Sequence[str], damaged: Sequence[Snapshot]
) -> SetupError:
    said = [f"{each.name} is damaged" for each in damaged] + [f"the head of {name} is damaged" for name in bad]
    if logs:
        said.append(f"the log begins at record {logs[0].lsn}")
    elif not bad:
        said.append("there is no log file")
    return SetupError(
        f"records are missing in the journal in {files.folder}",
        found=", ".join(said),
        needed=f"a log that has record {base_lsn + 1}",
        fix=_restore(files),
    )


def _too_short(files: Files, damaged: Sequence[Snapshot], last_lsn: int, needed_lsn: int) -> SetupError:
    return SetupError(
        f"the newest snapshot in {files.folder} is damaged and the log does not reach as far",
        found=f"{', '.join(each.name for each in damaged)} damaged; records up to {last_lsn} can be read",
        needed=f"records up to {needed_lsn}",
        fix=_restore(files),
    )
