"""Opens damaged journals for a while: whatever the files hold, no wrong record, no gap and no unexpected error.

    python scripts/fuzz_journal.py [--seconds 20] [--seed N]

Each input is a journal of a few small files and snapshots with bits flipped, bytes overwritten, blocks moved, files
cut, removed, renamed or exchanged. Opening it either refuses (SetupError) or returns records that were written, each
under its own number, without a gap, and goes on behind them. A third of the inputs get heads whose fields are wrong
and whose sums are right, as no disk makes them: these must only not end in another error. The seed that is printed
repeats a run."""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
import traceback
from pathlib import Path

from ucxkv.errors import IntegrityError, SetupError
from ucxkv.journal import FolderFiles
from ucxkv.journal.pieces import BLOCK_BYTES, CHUNK, FILE, FRAME, HEAD_BYTES, read_head, seal
from ucxkv.journal.recovery import Recovery, recover
from ucxkv.journal.snapshots import Generations, SnapshotWriter

_FILE_BYTES = 32 << 10
_IDENTITY = b"fuzz"


def record(lsn: int) -> bytes:
    """The record with this number."""
    return b"%d:" % lsn + bytes([lsn % 251]) * (lsn * 131 % 3000)


def state(lsn: int) -> list[bytes]:
    """The chunks of the snapshot at this number."""
    return [b"state at %d" % lsn, bytes(lsn * 37 % 5000)]


def opened(files: FolderFiles, run: int) -> Recovery:
    """The folder, recovered."""
    return recover(files, identity=_IDENTITY, file_bytes=_FILE_BYTES, now_run=run, is_synced=False)


def make(folder: Path, rng: random.Random) -> dict[str, bytes]:
    """A journal with a life of its own: name -> bytes."""
    files = FolderFiles(folder)
    files.lock()
    for opening in range(rng.randrange(1, 4)):
        recovery = opened(files, opening + 1)
        lsn = recovery.recovered.last_lsn
        generations = Generations(files, recovery.snapshots, recovery.recovered.damaged)
        for _ in range(rng.randrange(12)):
            count = rng.randrange(1, 4)
            recovery.log.write(rng.randrange(3), lsn + 1, [record(lsn + 1 + i) for i in range(count)])
            lsn += count
            if rng.random() < 0.15:
                writer = SnapshotWriter(files, epoch=opening, lsn=lsn, run=recovery.run, identity=_IDENTITY)
                writer.add(state(lsn))
                recovery.log.trim(generations.finish(writer))
        recovery.log.close()
    files.release()
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}


class Mutator:
    """Damage, drawn from one random generator."""

    def __init__(self, rng: random.Random) -> None:
        self.random = rng

    def spoil(self, content: dict[str, bytes]) -> dict[str, bytes]:
        """A copy with a few things wrong."""
        found = dict(content)
        for _ in range(self.random.randrange(1, 4)):
            if found:
                self._one(found)
        return found

    def _one(self, found: dict[str, bytes]) -> None:
        rng = self.random
        name = rng.choice(sorted(found))
        raw = bytearray(found[name])
        at = rng.randrange(len(raw) + 1)
        if rng.random() < 0.6:  # where it matters: near a head
            at = min(len(raw), at // BLOCK_BYTES * BLOCK_BYTES + rng.randrange(HEAD_BYTES + 40))
        match rng.randrange(8):
            case 0 | 1 if at < len(raw):
                raw[at] ^= 1 << rng.randrange(8)
            case 2:
                some = rng.randbytes(rng.randrange(1, 600))
                raw[at : at + len(some)] = some
            case 3:
                del raw[at:]
            case 4:
                some = bytes(rng.randrange(1, 5000))
                raw[at : at + len(some)] = some[: max(0, len(raw) - at)]
            case 5:
                other = found[rng.choice(sorted(found))]
                start = rng.randrange(len(other) // BLOCK_BYTES + 1) * BLOCK_BYTES
                block = other[start : start + BLOCK_BYTES]
                at = at // BLOCK_BYTES * BLOCK_BYTES
                raw[at : at + len(block)] = block
            case 6:
                del found[name]
                return
            case _:
                other_name = rng.choice(sorted(found))
                found[name], found[other_name] = found[other_name], found[name]
                return
        found[name] = bytes(raw)

    def forge(self, content: dict[str, bytes]) -> dict[str, bytes]:
        """A copy in which a few heads say something else, with right sums."""
        rng, found = self.random, dict(content)
        for _ in range(rng.randrange(1, 3)):
            name = rng.choice(sorted(found))
            raw = bytearray(found[name])
            places = [at for at in range(0, len(raw), BLOCK_BYTES) if read_head(bytes(raw[at : at + HEAD_BYTES]))]
            if not places:
                continue
            at = rng.choice(places)
            head = read_head(bytes(raw[at : at + HEAD_BYTES]))
            assert head is not None
            fields = {name: getattr(head, name) for name in ("count", "sequence", "epoch", "lsn", "run", "previous")}
            changed = rng.choice(sorted(fields))
            limit = 1 << (32 if changed == "count" else 64)
            fields[changed] = rng.choice((0, 1, fields[changed] + 1, rng.randrange(limit), limit - 1)) % limit
            length = head.length if rng.random() < 0.7 else rng.randrange(len(raw) - at)
            payload = bytes(raw[at + HEAD_BYTES : at + HEAD_BYTES + length])
            magic = head.magic if rng.random() < 0.9 else rng.choice((FILE, FRAME, CHUNK))
            sealed, _ = seal(magic, payload, version=rng.choice((1, 1, 1, 2)), **fields)
            raw[at : at + HEAD_BYTES] = sealed
            found[name] = bytes(raw)
        return found


def check(folder: Path, is_forged: bool) -> str:
    """Open it twice, writing in between: "refused", or "opened"."""
    files = FolderFiles(folder)
    files.lock()
    try:
        last = 0
        for opening in (1, 2):
            try:
                recovery = opened(files, time.time_ns())
            except SetupError:
                if opening == 2 and not is_forged:
                    raise
                return "refused"
            found = recovery.recovered
            try:
                chunks, records = list(found.snapshot), list(found.records)
            except IntegrityError:
                if not is_forged:
                    raise
                chunks, records = [], []
            if not is_forged:
                assert chunks == (state(found.snapshot_lsn) if found.snapshot_lsn else chunks)
                assert [lsn for _, lsn, _ in records] == list(range(found.snapshot_lsn + 1, found.last_lsn + 1))
                assert all(content == record(lsn) for _, lsn, content in records)
                assert opening == 1 or found.last_lsn == last + 1
            last = found.last_lsn
            if last < 1 << 62:
                recovery.log.write(7, last + 1, [record(last + 1)])
            recovery.log.close()
        return "opened"
    finally:
        files.release()


def fuzz(seed: int, seconds: float) -> dict[str, int]:
    """Inputs until the time is over; how many ended how."""
    rng = random.Random(seed)
    mutator, counts = Mutator(rng), {"opened": 0, "refused": 0}
    until = time.monotonic() + seconds
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    while time.monotonic() < until:
        with tempfile.TemporaryDirectory(prefix="ucxkv-fuzz-", dir=memory) as top:
            content = make(Path(top) / "good", rng)
            for number in range(30):
                if time.monotonic() > until:
                    break
                is_forged = rng.random() < 0.33
                spoiled = mutator.forge(content) if is_forged else mutator.spoil(content)
                folder = Path(top) / str(number)
                folder.mkdir()
                for name, data in spoiled.items():
                    (folder / name).write_bytes(data)
                counts[check(folder, is_forged)] += 1
    return counts


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long in all (default 20)")
    parser.add_argument("--seed", type=int, default=None, help="replay: the seed that was printed")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    started = time.monotonic()
    try:
        counts = fuzz(seed, options.seconds)
    except Exception:
        traceback.print_exc()
        print(f"FOUND something: run again with --seed {seed}", file=sys.stderr)
        return 1
    total = sum(counts.values())
    said = f"{counts['opened']} opened, {counts['refused']} refused"
    print(f"{time.monotonic() - started:.0f} s, 0 findings: {total} damaged journals, {said}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
