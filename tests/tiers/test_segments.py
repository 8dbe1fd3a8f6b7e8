"""Segments and mappings, on the real kernel: seals, protections, leaks, limits; recorded machines for the check."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ucxkv.tiers import segments
from ucxkv.tiers.base import SetupFailed
from ucxkv.tiers.host_memory import HUGE_PAGE_BYTES, HostMemory
from ucxkv.tiers.segments import HostSegment, MappedSegment

MIB = 1 << 20


def _fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def _mapped(name: str) -> int:
    """How many mappings of segments called `name` this process has."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count(f"/memfd:{name}")


def test_a_segment_is_populated_zeroed_and_shared_with_its_mapping() -> None:
    """Goal: what a node writes a client reads. Method: write at both ends, map read-only and writable, compare."""
    with HostSegment.create(3 * MIB, "ucxkv-share") as segment:
        assert segment.size_bytes == 4 * MIB and len(segment.view) == 4 * MIB
        assert not any(segment.view[:: 64 * 1024])
        segment.view[0], segment.view[-1] = 1, 2
        fd = segment.readonly_fd()
        with MappedSegment(fd, segment.size_bytes) as reader, MappedSegment(segment.fd, MIB, writable=True) as writer:
            os.close(fd)
            assert reader.view[0] == 1 and reader.view[-1] == 2 and reader.view.readonly
            assert reader.address != segment.address and len(writer.view) == MIB
            writer.view[5] = 9
            assert segment.view[5] == reader.view[5] == 9


@pytest.mark.parametrize("huge_pages", ["never", "auto"])
def test_all_pages_are_present_after_create(huge_pages: str) -> None:
    """Goal: populated at start, with honest progress. Method: count blocks of the memfd, and the callback's figures."""
    seen: list[tuple[int, int]] = []
    with HostSegment.create(70 * MIB, "ucxkv-pop", huge_pages, progress=lambda *at: seen.append(at)) as segment:  # type: ignore[arg-type]
        assert os.fstat(segment.fd).st_blocks * 512 >= segment.size_bytes
        assert seen == [(64 * MIB, 70 * MIB), (70 * MIB, 70 * MIB)]
        assert huge_pages == "auto" or segment.page_kind == "small"
        assert segment.address % HUGE_PAGE_BYTES == 0


def test_sizes_are_rounded_to_whole_pages_and_tiny_ones_work() -> None:
    """Goal: no size is a special case. Method: sizes around the page sizes, with and without huge pages."""
    for asked, huge, got in ((1, "auto", 4096), (4097, "never", 8192), (2 * MIB + 1, "never", 2 * MIB + 4096)):
        with HostSegment.create(asked, "ucxkv-tiny", huge) as segment:  # type: ignore[arg-type]
            assert segment.size_bytes == got and segment.page_kind == "small"
    with pytest.raises(ValueError, match="positive"):
        HostSegment.create(0, "ucxkv-none")


def test_the_size_is_sealed_and_the_seals_too() -> None:
    """Goal: no mapping can ever fault past the end. Method: shrink, grow and more seals are all refused."""
    with HostSegment.create(MIB, "ucxkv-seal") as segment:
        seals = fcntl.fcntl(segment.fd, fcntl.F_GET_SEALS)
        assert seals & fcntl.F_SEAL_SHRINK and seals & fcntl.F_SEAL_GROW and seals & fcntl.F_SEAL_SEAL
        for size in (0, 4096, 2 * MIB):
            with pytest.raises(PermissionError):
                os.ftruncate(segment.fd, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(segment.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_a_readonly_descriptor_cannot_be_mapped_writable() -> None:
    """Goal: readers cannot harm a node by a slip. Method: writable mapping, write() and ftruncate() on it all fail."""
    with HostSegment.create(MIB, "ucxkv-ro") as segment:
        fd = segment.readonly_fd()
        try:
            with pytest.raises(SetupFailed, match="open for writing"):
                MappedSegment(fd, MIB, writable=True)
            with pytest.raises(OSError):
                os.write(fd, b"x")
            assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        finally:
            os.close(fd)
    assert _mapped("ucxkv-ro") == 0


def test_a_mapping_larger_than_the_file_or_of_an_unsealed_file_is_refused(tmp_path: Path) -> None:
    """Goal: a wrong announcement is an error, never SIGBUS. Method: too long, empty, unsealed memfd, plain file."""
    with HostSegment.create(MIB, "ucxkv-size") as segment:
        for size in (MIB + 1, 0, 1 << 60):
            with pytest.raises(SetupFailed, match="node announced"):
                MappedSegment(segment.fd, size)
    loose = os.memfd_create("ucxkv-loose", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, MIB)
    with pytest.raises(SetupFailed, match="shrink"):
        MappedSegment(loose, MIB)
    os.close(loose)
    with (tmp_path / "file").open("wb+") as plain:
        plain.truncate(MIB)
        with pytest.raises(SetupFailed):
            MappedSegment(plain.fileno(), MIB)


def test_close_is_idempotent_and_leaks_neither_descriptors_nor_mappings() -> None:
    """Goal: counts return to their value before. Method: many create/map/close rounds, views that outlive close."""
    before = _fds()
    for _ in range(20):
        segment = HostSegment.create(4 * MIB, "ucxkv-leak")
        reader = MappedSegment(segment.fd, segment.size_bytes)
        for held in (reader, segment):
            held.close()
            held.close()
            assert held.is_closed
            for attribute in ("address", "view"):
                with pytest.raises(ValueError, match="closed"):
                    getattr(held, attribute)
    with pytest.raises(ValueError, match="closed"):
        segment.readonly_fd()
    assert _fds() == before and _mapped("ucxkv-leak") == 0

    segment = HostSegment.create(MIB, "ucxkv-leak")
    view = segment.view
    view[7] = 7
    segment.close()
    assert view[7] == 7 and _mapped("ucxkv-leak") == 1 and _fds() == before
    del view
    assert _mapped("ucxkv-leak") == 0


def test_a_failed_or_interrupted_create_leaves_nothing() -> None:
    """Goal: SetupFailed or Ctrl-C while populating takes nothing. Method: a progress callback that raises."""
    before = _fds()

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        HostSegment.create(4 * MIB, "ucxkv-stop", progress=stop)
    assert _fds() == before and _mapped("ucxkv-stop") == 0


def test_require_huge_pages_gives_them_or_says_how_to_get_them() -> None:
    """Goal: no silent fallback when they are required. Method: 4 MiB; either kind of answer must be honest."""
    try:
        with HostSegment.create(4 * MIB, "ucxkv-huge", "require") as segment:
            assert segment.page_kind in ("huge-explicit", "huge-transparent")
    except SetupFailed as exc:
        assert "nr_hugepages" in exc.fix and "4 MiB" in exc.needed


def test_reserved_pages_that_somebody_took_are_not_fatal() -> None:
    """Goal: the race for explicit huge pages ends in other pages. Method: a reading that claims pages that are not."""
    liar = HostMemory(
        available_bytes=1 << 40,
        cgroup_free_bytes=None,
        address_space_free_bytes=None,
        file_size_limit_bytes=None,
        huge_free_bytes=1 << 40,
    )
    before = _fds()
    with HostSegment.create(4 * MIB, "ucxkv-race", memory=liar) as segment:
        assert len(segment.view) == 4 * MIB
    assert _fds() == before


def test_a_kernel_that_knows_none_of_the_advice_still_gets_every_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: kernels before 5.14 and 6.1 work, in small pages. Method: madvise refuses everything; count blocks."""
    monkeypatch.setattr(segments.Mapping, "advise", lambda *unused: errno.EINVAL)
    with (
        HostSegment.create(4 * MIB, "ucxkv-old") as segment,
        MappedSegment(segment.fd, 4 * MIB, writable=True) as mapped,
    ):
        assert segment.page_kind == "small" and os.fstat(segment.fd).st_blocks * 512 >= 4 * MIB
        mapped.view[4 * MIB - 1] = 3
        assert segment.view[4 * MIB - 1] == 3 and not any(segment.view[: 4 * MIB - 1 : 1024])
    with pytest.raises(SetupFailed, match="huge"):
        HostSegment.create(4 * MIB, "ucxkv-old", "require")


def _machine(root: Path, files: dict[str, str]) -> HostMemory:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return HostMemory.read(root)


MEMINFO = "MemTotal:  16000000 kB\nMemFree:  100 kB\nMemAvailable:   4194304 kB\n"


def test_a_machine_short_of_memory_is_refused_with_numbers(tmp_path: Path) -> None:
    """Goal: refused before populating, with what to do. Method: recorded /proc/meminfo with 4 GiB available."""
    memory = _machine(tmp_path, {"proc/meminfo": MEMINFO})
    assert memory.available_bytes == 4 << 30 and memory.cgroup_free_bytes is None and memory.huge_free_bytes == 0
    memory.check(3 << 30)
    before = _fds()
    with pytest.raises(SetupFailed) as failure:
        HostSegment.create(4 << 30, "ucxkv-short", memory=memory)
    assert "4096 MiB of memory available" in failure.value.found and "at most 4024 MiB" in failure.value.fix
    assert _fds() == before
    memory.check(4024 * MIB)


def test_cgroup_limits_of_both_versions_count_at_every_level(tmp_path: Path) -> None:
    """Goal: a container's limit is seen before the OOM killer is. Method: recorded v2, v1 and unlimited trees."""
    v2 = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/pod/box\n",
        "sys/fs/cgroup/pod/box/memory.max": "max\n",
        "sys/fs/cgroup/pod/memory.max": f"{1 << 30}\n",
        "sys/fs/cgroup/pod/memory.current": f"{600 * MIB}\n",
        "sys/fs/cgroup/pod/memory.stat": f"anon 5\ninactive_file {100 * MIB}\n",
    }
    memory = _machine(tmp_path / "v2", v2)
    assert memory.cgroup_free_bytes == (1024 - 500) * MIB
    with pytest.raises(SetupFailed, match="container limit"):
        memory.check(500 * MIB)
    v1 = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "5:devices:/\n4:cpu,memory:/elsewhere/x\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{800 * MIB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{300 * MIB}\n",
    }
    assert _machine(tmp_path / "v1", v1).cgroup_free_bytes == 500 * MIB
    v1["sys/fs/cgroup/memory/memory.limit_in_bytes"] = "9223372036854771712\n"
    assert _machine(tmp_path / "v1", v1).cgroup_free_bytes is None


def test_free_explicit_huge_pages_leave_out_reserved_ones(tmp_path: Path) -> None:
    """Goal: pages promised to others are not counted. Method: recorded pool of 100 free pages, 30 of them reserved."""
    pool = "sys/kernel/mm/hugepages/hugepages-2048kB"
    memory = _machine(tmp_path, {"proc/meminfo": MEMINFO, f"{pool}/free_hugepages": "100\n"})
    assert memory.huge_free_bytes == 200 * MIB
    memory = _machine(tmp_path, {f"{pool}/resv_hugepages": "30\n"})
    assert memory.huge_free_bytes == 140 * MIB
    memory.check(8 << 30, explicit_huge=True)


@pytest.mark.parametrize(("limit", "says"), [("RLIMIT_AS", "LimitAS"), ("RLIMIT_FSIZE", "LimitFSIZE")])
def test_process_limits_are_reported_with_their_fix(limit: str, says: str) -> None:
    """Goal: ulimits are named, not hit. Method: a child process lowers one and tries to create 4 GiB."""
    code = f"""
import resource
from ucxkv.tiers.base import SetupFailed
from ucxkv.tiers.segments import HostSegment
resource.setrlimit(resource.{limit}, (2 << 30, 2 << 30))
try:
    HostSegment.create(4 << 30, "ucxkv-limit")
except SetupFailed as exc:
    print(exc.fix)
"""
    assert getattr(resource, limit) is not None
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    free = HostMemory.read()
    if free.available_bytes < 5 << 30 or (free.cgroup_free_bytes or 5 << 30) < 5 << 30:
        pytest.skip("this machine has no 5 GiB free, another limit is reported first")
    assert says in done.stdout, done.stderr


def test_a_killed_owner_leaves_nothing_behind() -> None:
    """Goal: kill -9 frees the memory and leaves no name. Method: SIGKILL a child that holds 64 MiB."""
    names = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    code = """
import sys, time
from ucxkv.tiers.segments import HostSegment
segment = HostSegment.create(64 << 20, "ucxkv-dead")
print("ready", flush=True)
time.sleep(60)
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    with child, child.stdout:
        assert child.stdout.readline() == "ready\n"
        maps = Path(f"/proc/{child.pid}/maps").read_text()
        child.send_signal(signal.SIGKILL)
        assert child.wait(30) == -signal.SIGKILL
    assert "memfd:ucxkv-dead" in maps and not Path(f"/proc/{child.pid}").exists()
    assert not os.path.isdir("/dev/shm") or {n for n in os.listdir("/dev/shm") if "ucxkv-dead" in n} <= names
