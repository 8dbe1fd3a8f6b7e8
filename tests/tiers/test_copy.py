"""Contract of the copy engines: the C of host.c and its Python twin, against the public xxhash package."""

from __future__ import annotations

import random
import subprocess
import sys
import threading

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from ucxkv.tiers import copy as tier_copy
from ucxkv.tiers.copy import CHUNK_BYTES, IOV_DTYPE, CancelFlag, CopyEngine, NativeEngine, TwinEngine

GUARD = 64
PIECE = st.sampled_from([0, 1, 7, 63, 64, 65, 191, 192, 255, 256, 257, 1023, 1024, 1025]) | st.integers(0, 3000)


@pytest.fixture(params=[NativeEngine, TwinEngine], ids=["native", "twin"], scope="module")
def engine(request: pytest.FixtureRequest) -> CopyEngine:
    """Each engine in turn; the native one must be there, a missing build is a failure and not a skip."""
    made: CopyEngine = request.param()
    return made


@pytest.fixture
def use_engine(engine: CopyEngine, monkeypatch: pytest.MonkeyPatch) -> CopyEngine:
    monkeypatch.setattr(tier_copy, "engine", engine)
    return engine


def _bytes(nbytes: int, seed: int = 1) -> np.ndarray:
    return np.frombuffer(random.Random(seed).randbytes(nbytes), np.uint8) if nbytes else np.empty(0, np.uint8)


def _plan(lengths: list[list[int]], source: np.ndarray, *, copy: bool = True) -> tuple[np.ndarray, ...]:
    """Arrays for gather: the pieces lie one after the other in source, the blocks in a destination with guards."""
    first = np.cumsum([0, *(len(pieces) for pieces in lengths)]).astype(np.uint32)
    flat = [size for pieces in lengths for size in pieces]
    iov = np.zeros(len(flat), IOV_DTYPE)
    iov["len"] = flat
    iov["addr"] = source.ctypes.data + np.cumsum([0, *flat])[: len(flat)]
    totals = [sum(pieces) for pieces in lengths]
    out = np.full(sum(totals) + GUARD * (len(totals) + 1), 0xAA, np.uint8)
    starts = np.cumsum([GUARD, *(total + GUARD for total in totals)])[: len(totals)]
    dst = (out.ctypes.data + starts).astype(np.uint64) if copy else np.zeros(len(totals), np.uint64)
    return first, iov, dst, np.zeros(len(totals), np.uint64), out, starts, np.array(totals)


def test_every_length_up_to_2100_sums_like_xxhash(engine: CopyEngine) -> None:
    """Goal: no length class of XXH3 is wrong. Method: all lengths, many alignments, guards intact."""
    data, out = _bytes(4096), np.empty(4096, np.uint8)
    for n in range(2101):
        start = n % 67
        want = xxhash.xxh3_64_intdigest(data[start : start + n].tobytes())
        assert engine.sum_at(data.ctypes.data + start, n) == want, n
        out.fill(0xAA)
        at = 1 + n % 31
        assert engine.copy_sum_at(out.ctypes.data + at, data.ctypes.data + start, n) == want, n
        assert out[at : at + n].tobytes() == data[start : start + n].tobytes(), n
        assert (out[:at] == 0xAA).all() and (out[at + n :] == 0xAA).all(), n


def test_large_values_sum_like_xxhash(engine: CopyEngine) -> None:
    """Goal: long runs of stripes and scrambles agree. Method: random lengths up to 3 MiB, and those around 1 MiB."""
    rnd = random.Random(7)
    data, out = _bytes(3 << 20, 2), np.empty(3 << 20, np.uint8)
    sizes = [rnd.randrange(2101, data.nbytes) for _ in range(20)] + [(1 << 20) + d for d in (-65, -1, 0, 1, 63, 64, 65)]
    for n in sizes:
        want = xxhash.xxh3_64_intdigest(data[:n].data)
        assert engine.sum_at(data.ctypes.data, n) == want, n
        assert engine.copy_sum_at(out.ctypes.data, data.ctypes.data, n) == want, n
        assert np.array_equal(out[:n], data[:n]), n


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.lists(PIECE, max_size=6), min_size=1, max_size=5), copy=st.booleans(), seed=st.integers(0, 99)
)
def test_gather_equals_join_then_sum(engine: CopyEngine, lengths: list[list[int]], copy: bool, seed: int) -> None:
    """Goal: splits never change bytes or sums. Method: drawn pieces, empty ones too, against the joined bytes."""
    source = _bytes(sum(map(sum, lengths)), seed)
    first, iov, dst, sums, out, starts, totals = _plan(lengths, source, copy=copy)
    flag = CancelFlag()  # lives as long as the call
    done = engine.gather_at(
        len(lengths), first.ctypes.data, iov.ctypes.data, dst.ctypes.data, sums.ctypes.data, flag.address
    )
    assert done == len(lengths)
    at, mask = 0, np.ones(out.nbytes, bool)
    for block, total in enumerate(totals):
        want = source[at : at + total].tobytes()
        at += total
        assert int(sums[block]) == xxhash.xxh3_64_intdigest(want)
        if copy:
            assert out[starts[block] : starts[block] + total].tobytes() == want
            mask[starts[block] : starts[block] + total] = False
    assert (out[mask] == 0xAA).all()


def test_gather_of_pieces_larger_than_a_chunk(use_engine: CopyEngine) -> None:
    """Goal: the chunks between two looks at the cancel flag leave no seam. Method: pieces around and over 256 KiB."""
    lengths = [[CHUNK_BYTES + 1], [3, 3 * CHUNK_BYTES - 1, CHUNK_BYTES], [CHUNK_BYTES], [5 * CHUNK_BYTES + 17, 0, 1]]
    source = _bytes(sum(map(sum, lengths)), 3)
    first, iov, dst, sums, out, starts, totals = _plan(lengths, source)
    assert tier_copy.gather(first, iov, dst, sums) == len(lengths)
    at = 0
    for block, total in enumerate(totals):
        assert int(sums[block]) == xxhash.xxh3_64_intdigest(source[at : at + total].data)
        assert np.array_equal(out[starts[block] : starts[block] + total], source[at : at + total])
        at += total


def test_a_cancelled_gather_stops_and_says_how_far_it_came(use_engine: CopyEngine) -> None:
    """Goal: cancel is seen and unfinished sums stay untouched. Method: a flag set before, and one set by a thread."""
    lengths = [[1000]] * 4
    first, iov, dst, sums, out, _, _ = _plan(lengths, _bytes(4000))
    flag = CancelFlag()
    flag.set()
    assert flag.is_set and tier_copy.gather(first, iov, dst, sums, flag) == 0
    assert not sums.any() and (out == 0xAA).all()

    source = _bytes(1 << 20)
    lengths = [[1 << 20]] * 20_000  # about 20 GB to sum: nobody waits for the end of that
    first, iov, dst, sums, *_ = _plan([[]], source)
    first = np.arange(len(lengths) + 1, dtype=np.uint32)
    iov = np.zeros(len(lengths), IOV_DTYPE)
    iov["addr"], iov["len"] = source.ctypes.data, 1 << 20
    dst, sums, flag = np.zeros(len(lengths), np.uint64), np.zeros(len(lengths), np.uint64), CancelFlag()
    timer = threading.Timer(0.05, flag.set)
    timer.start()
    done = tier_copy.gather(first, iov, dst, sums, flag)
    timer.join()
    assert done < len(lengths)
    assert (sums[:done] == tier_copy.sum_bytes(source)).all() and not sums[done:].any()


def test_buffers_of_all_kinds_are_taken_and_wrong_ones_refused_by_name(use_engine: CopyEngine) -> None:
    """Goal: the Python face takes any contiguous buffer and names what it refuses. Method: a table of each."""
    data = _bytes(1000).tobytes()
    want = xxhash.xxh3_64_intdigest(data)
    array = np.frombuffer(data, np.uint8)
    for source in (data, bytearray(data), memoryview(data), array, array.reshape(10, 100), array.view(np.float32)):
        target = bytearray(1000)
        assert tier_copy.sum_bytes(source) == want
        assert tier_copy.copy_sum(target, source) == want and target == data
    assert tier_copy.copy_sum(bytearray(), b"") == tier_copy.sum_bytes(b"") == xxhash.xxh3_64_intdigest(b"")
    with pytest.raises(ValueError, match="read-only"):
        tier_copy.copy_sum(bytes(1000), data)
    with pytest.raises(ValueError, match="contiguous"):
        tier_copy.sum_bytes(array[::2])
    with pytest.raises(ValueError, match="999 bytes, source 1000"):
        tier_copy.copy_sum(bytearray(999), data)


def test_gather_refuses_arrays_that_do_not_fit_together() -> None:
    """Goal: no address outside the arrays is ever read. Method: each wrong dtype, length and bound is a ValueError."""
    first, iov, dst, sums, *_ = _plan([[10], [20]], _bytes(30))
    bad = [
        (first.astype(np.uint64), iov, dst, sums),
        (first[:-1], iov, dst, sums),
        (np.array([0, 2, 3], np.uint32), iov, dst, sums),
        (np.array([0, 2, 1], np.uint32), iov, dst, sums),
        (np.array([1, 1, 2], np.uint32), iov, dst, sums),
        (first, iov.view(np.uint64), dst, sums),
        (first, iov, dst, sums[:1]),
        (first, iov, dst.astype(np.int64), sums),
        (first, iov, dst, np.zeros(4, np.uint64)[::2]),
    ]
    for arrays in bad:
        with pytest.raises(ValueError, match="must"):
            tier_copy.gather(*arrays)
    assert tier_copy.gather(first[:1], iov[:0], dst[:0], sums[:0]) == 0


def test_the_copy_probe_counts_what_it_was_asked_for() -> None:
    """Goal: benchmarks get a figure of the right shape. Method: every kind on a tiny working set, and bad sizes."""
    for kind in ("memcpy", "copy_sum", "sum"):
        speed = tier_copy.copy_speed(4096, 1 << 20, copies=50, kind=kind)
        assert speed.nbytes == 4096 and speed.gbps > 0 and 0 < speed.us <= speed.us_p99
    with pytest.raises(ValueError, match="kind"):
        tier_copy.copy_speed(4096, 1 << 20, kind="fast")
    with pytest.raises(ValueError, match="working_set"):
        tier_copy.copy_speed(4096, 1024)


def test_without_the_extension_the_twin_serves_and_says_so() -> None:
    """Goal: a host without a compiler still gets right bytes. Method: a child process that cannot import _host."""
    code = """
import sys
sys.modules["ucxkv.tiers._host"] = None
from ucxkv.tiers import copy
assert not copy.engine.is_native
target = bytearray(3000)
print(copy.copy_sum(target, b"kv" * 1500), target == b"kv" * 1500)
for refused in (copy.NativeEngine, lambda: copy.copy_speed(10, 10), lambda: copy.copy_ns(0, 0, 0)):
    try:
        refused()
    except (ImportError, RuntimeError) as exc:
        assert "_host" in str(exc)
    else:
        raise AssertionError(refused)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(xxhash.xxh3_64_intdigest(b"kv" * 1500)), "True"]
