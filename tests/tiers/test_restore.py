"""Places, grants and segments across a restart: taking exactly the same places again, keeping off what was lent, and
knowing from the kernel who may still write."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.harness import ROOT
from ucxkv.tiers.base import ForeignExtent, SetupFailed
from ucxkv.tiers.grants import GrantTable
from ucxkv.tiers.ledger import GrantLedger, ledger_bytes
from ucxkv.tiers.named import SHARED_FOLDER, NamedSegment
from ucxkv.tiers.segments import MappedSegment
from ucxkv.tiers.slabs import PLACE_DTYPE, UNIT_BYTES, SlabAllocator

MIB = 1 << 20
SIZES = (64, 1000, 5000, 16 << 10, 24 << 10, 64 << 10, 100_000, 500_000, 600_000, 3 * MIB)


@pytest.fixture
def path() -> Iterator[str]:
    """A name in /dev/shm, gone after the test."""
    name = f"{SHARED_FOLDER}/ucxkv-test-{os.getpid()}"
    yield name
    Path(name).unlink(missing_ok=True)


def _filled(seed: int) -> tuple[SlabAllocator, dict[int, int]]:
    """An allocator after a random life, and its live allocations: offset -> class."""
    rnd, slabs, live = random.Random(seed), SlabAllocator(64 * MIB), dict[int, int]()
    for _ in range(400):
        nbytes = rnd.choice(SIZES)
        for offset in slabs.allocate(nbytes, rnd.randrange(1, 6)):
            live[offset] = slabs.class_bytes(nbytes)
        gone = rnd.sample(sorted(live), k=len(live) // 8)
        slabs.free(gone)
        for offset in gone:
            del live[offset]
    return slabs, live


@pytest.mark.parametrize("seed", range(12))
def test_the_same_places_are_taken_again(seed: int) -> None:
    """Goal: after a restart the blocks that are kept lie where they were and nothing is given over them, nor lost.
    Method: a random allocator, half of its places restored in another; both agree; the rest is given out; all freed."""
    slabs, live = _filled(seed)
    kept = random.Random(seed).sample(sorted(live), k=len(live) // 2)
    again = SlabAllocator(64 * MIB)
    again.restore(slabs.places(np.array(kept, np.uint64)))
    again.check()
    assert {offset: again.bytes_at(offset) for offset in kept} == {offset: live[offset] for offset in kept}
    assert again.used_bytes == sum(live[offset] for offset in kept)
    taken = {offset: again.class_bytes(n) for n in SIZES for offset in again.allocate(n, 50)}
    spans = sorted([*taken.items(), *((offset, live[offset]) for offset in kept)])
    assert all(at + size <= following for (at, size), (following, _) in pairwise(spans))
    again.check()
    again.free([*taken, *kept])
    again.check()
    assert again.used_bytes == 0 and again.largest_free_bytes == again.capacity_bytes


@pytest.mark.parametrize("seed", range(6))
def test_held_units_are_given_to_nobody(seed: int) -> None:
    """Goal: what a process of before may still write is not given out. Method: restore, hold random units, allocate
    until nothing is left; no place touches a held unit; free what was held, and all of the segment is there again."""
    slabs, live = _filled(seed)
    rnd = random.Random(seed)
    kept = rnd.sample(sorted(live), k=len(live) // 3)
    again = SlabAllocator(64 * MIB)
    again.restore(slabs.places(np.array(kept, np.uint64)))
    units = sorted(rnd.sample(range(64 * MIB // UNIT_BYTES), k=200))
    held = again.hold(units)
    again.check()
    taken = [offset for n in reversed(SIZES) for offset in again.allocate(n, 1 << 20)]
    forbidden = set(units)
    for offset in taken:
        touched = range(offset // UNIT_BYTES, (offset + again.bytes_at(offset) - 1) // UNIT_BYTES + 1)
        assert forbidden.isdisjoint(touched)
    again.check()
    again.free([*held, *taken, *kept])
    again.check()
    assert again.used_bytes == 0 and again.largest_free_bytes == again.capacity_bytes


@pytest.mark.parametrize("damage", ["outside", "overlap", "no slot", "twice", "short run", "two classes"])
def test_places_of_another_segment_are_refused(damage: str) -> None:
    """Goal: a journal that does not fit the segment is no crash and no overlap. Method: contradictory places."""
    slabs = SlabAllocator(8 * MIB)
    offsets = [*slabs.allocate(16 << 10, 20), *slabs.allocate(MIB, 2)]
    places = slabs.places(np.array(offsets, np.uint64))
    if damage == "outside":
        places["base_unit"] += 1 << 20
    elif damage == "overlap":
        places["units"][:20] += 100
    elif damage == "no slot":
        places["offset"][3] += 64
    elif damage == "twice":
        places["offset"][3] = places["offset"][4]
    elif damage == "short run":
        places["slot_lines"][20] += 1
    else:
        places["slot_lines"][5] *= 2
    with pytest.raises(ForeignExtent):
        SlabAllocator(8 * MIB).restore(places)
    assert places.dtype == PLACE_DTYPE


def test_the_ledger_counts_what_is_lent_and_to_nobody_else() -> None:
    """Goal: a unit is counted while an extent in it is lent or quarantined. Method: a grant table with a ledger through
    a random life, against a count made anew from what it holds."""
    memory = memoryview(bytearray(ledger_bytes(64 * MIB)))
    slabs, ledger, rnd = SlabAllocator(64 * MIB), GrantLedger(memory), random.Random(3)
    table = GrantTable(limit_bytes=64 * MIB, ledger=ledger)
    held: dict[int, dict[int, int]] = {connection: {} for connection in range(1, 5)}

    def expected() -> list[int]:
        units = set[int]()
        for mine in held.values():
            for offset, size in mine.items():
                units.update(range(offset // UNIT_BYTES, (offset + size - 1) // UNIT_BYTES + 1))
        return sorted(units)

    for _ in range(300):
        connection = rnd.randrange(1, 4)
        nbytes = rnd.choice(SIZES)
        size = slabs.class_bytes(nbytes)
        offsets = slabs.allocate(nbytes, rnd.randrange(1, 9))
        table.grant_run(connection, 0, offsets, size)
        held[connection].update(dict.fromkeys(offsets, size))
        mine = held[connection]
        some = rnd.sample(sorted(mine), k=min(len(mine), rnd.randrange(9)))
        assert table.take_run(connection, 0, some, [0] * len(some)) == [mine[offset] for offset in some]
        slabs.free(some)
        for offset in some:
            del mine[offset]
        assert ledger.units() == expected()
    table.close(1, may_still_write=True)
    assert ledger.units() == expected()  # quarantined is held
    before = ledger.snapshot()
    table.writer_gone(1)
    held[1].clear()
    assert ledger.units() == expected()
    again = GrantLedger(memory)
    again.add([0], 64)
    assert before.sum() and again.units()[0] == 0
    ledger.close()
    table.close(2, may_still_write=False)
    assert again.units() == sorted({0, *expected()})  # closed: counts stay


_HOLDER = """
import os, sys
import socket, array
from ucxkv.tiers.segments import MappedSegment
sock = socket.socket(fileno=0)
_, data, *_ = sock.recvmsg(1, 64)
fd = array.array("i", data[0][2])[0]
segment = MappedSegment(fd, int(sys.argv[1]), writable=True)
os.close(fd)
sock.sendall(b"m")
while command := sock.recv(1):
    if command == b"w":
        segment.view[:4] = b"late"
    sock.sendall(b"d")
"""


class _Holder:
    """Another process with the segment mapped, its descriptor closed."""

    def __init__(self, segment: NamedSegment) -> None:
        import array
        import socket

        self.sock, theirs = socket.socketpair()
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        argv = [sys.executable, "-c", _HOLDER, str(segment.size_bytes)]
        self.process = subprocess.Popen(argv, stdin=theirs, env=env)
        theirs.close()
        rights = array.array("i", [segment.lent_fd])
        self.sock.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        assert self.sock.recv(1) == b"m"

    def write(self) -> None:
        self.sock.sendall(b"w")
        assert self.sock.recv(1) == b"d"

    def end(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.sock.close()


def test_a_named_segment_is_found_again_and_knows_who_still_writes(path: str) -> None:
    """Goal: bytes outlive the node, and the kernel tells who has the memory from before. Method: make, write, let
    another process map, close; open as the next incarnation; the other writes late, is stopped, is killed."""
    first = NamedSegment.create_file(path, 4 * MIB, incarnation=7)
    first.view[100:105] = b"value"
    assert os.stat(path).st_mode & 0o777 == 0o600 and not first.is_mapped_by_older()
    holder = _Holder(first)
    first.close()
    second = NamedSegment.open_file(path, incarnation=8)
    assert second is not None and second.size_bytes == 4 * MIB and bytes(second.view[100:105]) == b"value"
    assert second.is_mapped_by_older()
    holder.write()
    assert bytes(second.view[:4]) == b"late"
    os.kill(holder.process.pid, signal.SIGSTOP)
    assert second.is_mapped_by_older()
    mine = MappedSegment(second.lent_fd, second.size_bytes)  # one of this incarnation does not count
    holder.end()
    assert not second.is_mapped_by_older()
    second.close()
    third = NamedSegment.open_file(path, incarnation=9)
    assert third is not None and third.is_mapped_by_older()  # mine, of incarnation 8
    mine.close()
    assert not third.is_mapped_by_older()
    third.close()
    third.close()


def test_what_is_no_segment_of_ours_is_refused(path: str) -> None:
    """Goal: typed errors that name the fix. Method: no file, an empty one, one that others may read, a link, one too
    large for the folder, a folder that is not there."""
    assert NamedSegment.open_file(path, incarnation=1) is None
    Path(path).touch(0o600)
    assert NamedSegment.open_file(path, incarnation=1) is None and not Path(path).exists()
    Path(path).write_bytes(bytes(4096))
    Path(path).chmod(0o644)
    with pytest.raises(SetupFailed, match="mode 644"):
        NamedSegment.open_file(path, incarnation=1)
    Path(path).unlink()
    Path(path).symlink_to("/etc/passwd")
    with pytest.raises(SetupFailed):
        NamedSegment.open_file(path, incarnation=1)
    Path(path).unlink()
    with pytest.raises(SetupFailed, match="tmpfs"):
        NamedSegment.create_file("/sys/ucxkv-test", 1 << 20, incarnation=1)
    assert not Path(path).exists()


def test_a_shared_folder_that_is_too_small_says_so(path: str) -> None:
    """Goal: no SIGBUS and no half segment in a small /dev/shm (the default in containers). Method: a tmpfs of 8 MiB
    mounted in a namespace of its own; a segment of 64 MiB there, also where statvfs says nothing."""
    program = """
import sys
from ucxkv.tiers.base import SetupFailed
from ucxkv.tiers.named import NamedSegment
import os
class Blind:
    f_blocks = 0; f_bavail = 0; f_frsize = 0
for blind in (False, True):
    if blind:
        os.statvfs = lambda *_: Blind
    try:
        NamedSegment.create_file(sys.argv[1] + "/ucxkv-a", 64 << 20, incarnation=1)
    except SetupFailed as exc:
        assert "shm-size" in str(exc), exc
        assert not os.listdir(sys.argv[1])
    else:
        raise AssertionError("it fits")
print("refused")
"""
    command = 'mount -t tmpfs -o size=8m tmpfs "$1" && exec "$2" -c "$3" "$1"'
    folder = Path(path)
    folder.mkdir()
    try:
        done = subprocess.run(
            ["unshare", "-Urm", "sh", "-c", command, "sh", path, sys.executable, program],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    finally:
        folder.rmdir()
    if "unshare" in done.stderr:
        pytest.skip(f"no user namespaces here: {done.stderr}")
    assert done.stdout == "refused\n", done.stderr
