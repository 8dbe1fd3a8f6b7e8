"""Memory policy of a thread: set while a segment is made, back to what it was afterwards."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ucxkv.tiers.numa import memory_near, thread_policy
from ucxkv.tiers.segments import HostSegment

PREFERRED = 1


def _nodes() -> list[int]:
    return sorted(int(path.name[4:]) for path in Path("/sys/devices/system/node").glob("node[0-9]*"))


needs_numa = pytest.mark.skipif(thread_policy() is None or not _nodes(), reason="this kernel shows no NUMA policy")


@needs_numa
def test_the_policy_holds_inside_only_and_in_this_thread_only() -> None:
    """Goal: nobody else's memory moves. Method: the kernel's own answer before, inside, in another thread, after."""
    before = thread_policy()
    elsewhere: list[object] = []
    node = _nodes()[-1]
    with memory_near(node) as refused:
        if refused:
            pytest.skip(f"the kernel refused: {refused}")
        assert thread_policy() == (PREFERRED, 1 << node)
        thread = threading.Thread(target=lambda: elsewhere.append(thread_policy()))
        thread.start()
        thread.join()
    assert thread_policy() == before
    assert elsewhere == [(PREFERRED, 1 << node)] or elsewhere == [before]  # a new thread inherits its maker's


@needs_numa
def test_a_segment_made_near_a_node_lies_there() -> None:
    """Goal: the pages are where they were wanted. Method: /proc/self/numa_maps of a populated segment."""
    node = _nodes()[-1]
    with memory_near(node) as refused, HostSegment.create(4 << 20, "ucxkv-numa-test", "never") as segment:
        if refused:
            pytest.skip(f"the kernel refused: {refused}")
        try:
            lines = Path("/proc/self/numa_maps").read_text().splitlines()
        except OSError:
            pytest.skip("no /proc/self/numa_maps here")
        mine = next(line for line in lines if line.startswith(f"{segment.address:x} "))
        pages = {word.partition("=")[0]: int(word.partition("=")[2]) for word in mine.split() if word[:1] == "N"}
        assert pages == {f"N{node}": segment.size_bytes // 4096}


@needs_numa
def test_a_node_that_does_not_exist_is_refused_and_changes_nothing() -> None:
    """Goal: a wish, not a failure. Method: node 1000: the kernel's words inside, the old policy all along."""
    before = thread_policy()
    with memory_near(1000) as refused:
        assert refused
        assert thread_policy() == before
    assert thread_policy() == before


def test_no_node_changes_nothing() -> None:
    """Goal: a no-op for machines of one node. Method: None."""
    before = thread_policy()
    with memory_near(None) as refused:
        assert refused == ""
        assert thread_policy() == before


@needs_numa
def test_the_policy_is_given_back_after_an_error() -> None:
    """Goal: a failed start leaves no policy behind. Method: an exception inside."""
    before = thread_policy()
    with pytest.raises(RuntimeError), memory_near(_nodes()[0]):
        raise RuntimeError
    assert thread_policy() == before
