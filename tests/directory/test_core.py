"""Single promises of the directory core, each by name; the state machine beside this file covers their interplay."""

from __future__ import annotations

import numpy as np
import pytest

from tests.directory.arena import chain, key_of
from tests.directory.shell import SECOND, Shell
from ucxkv.directory import (
    ROOT_KEY,
    DeleteStatus,
    LeaseStatus,
    Limits,
    events,
    part_key,
)
from ucxkv.directory.descent import with_descendants
from ucxkv.directory.slots import NONE


def test_the_least_recently_used_leaf_goes_first_and_chains_from_their_tail() -> None:
    """Goal: leaf-first LRU. Method: three chains put in turn, the first touched; evict block by block, watch the
    order.
    """
    shell = Shell()
    a, b, c = (chain(3, salt) for salt in (b"a", b"b", b"c"))
    for run in (a, b, c):
        shell.put(run, after=SECOND)
    shell(events.Touch(b"".join(reversed(a))), after=SECOND)
    order = []
    left = {*a, *b, *c}
    while left:
        shell.evict_one()
        gone = {key for key in left if not shell.visible([key])[0]}
        left -= gone
        order += list(gone)
    assert order == [*reversed(b), *reversed(c), *reversed(a)]
    assert sorted(shell.freed) == [(0, 100 * i, 100) for i in range(9)]


def test_a_shared_prefix_does_not_age_when_one_of_its_continuations_goes() -> None:
    """Goal: a parent that becomes a leaf keeps its own place in time. Method: old child of a fresh prefix, and a
    block of
    an age between them.
    """
    shell = Shell()
    prefix, old, between = chain(3)
    shell.put([prefix], after=SECOND)
    shell.put([old], prefix, after=SECOND)
    shell.put([between], after=SECOND)
    shell(events.Touch(prefix), after=SECOND)
    shell.evict_one()
    assert shell.visible([prefix, old, between]) == [1, 0, 1]
    shell.evict_one()
    assert shell.visible([prefix, between]) == [1, 0]


def test_eviction_stops_when_enough_is_on_its_way_and_within_its_limit() -> None:
    """Goal: bounded, exact work. Method: bytes that need three of ten blocks; a limit of two; nothing left."""
    shell = Shell()
    shell.put(chain(10))
    reply = shell(events.Evict(250))
    assert (reply.blocks, reply.bytes) == (3, 300)
    assert shell(events.Evict(10**9, None, 2)).blocks == 2
    assert shell(events.Evict(0)).blocks == 0
    assert shell(events.Evict(10**9)).blocks == 5 and shell(events.Evict(1)).blocks == 0


def test_eviction_for_a_region_leaves_the_others_in_their_order() -> None:
    """Goal: `regions` picks only there. Method: roots of two regions in turn; evict region 1, then look at the LRU
    order.
    """
    shell = Shell()
    keys = chain(6)
    for i, key in enumerate(keys):
        shell.put([key], after=SECOND, region=i % 2)
    assert shell(events.Evict(200, (1,))).blocks == 2
    assert shell.visible(keys) == [1, 0, 1, 0, 1, 1]
    shell.evict_one()
    assert shell.visible(keys) == [0, 0, 1, 0, 1, 1]


def test_memory_comes_back_only_after_the_lease_and_the_grace() -> None:
    """Goal: I5. Method: delete a leased block and another; the leased extent waits for both, the other for the
    grace.
    """
    shell = Shell(grace_ns=1000)
    leased, other = chain(2)
    shell.put([leased])
    shell.put([other])
    lease = shell(events.Lease(leased, 5000, 1)).lease
    assert shell(events.Delete(leased + other)).status.tolist() == [DeleteStatus.DELETED] * 2
    assert shell.visible([leased, other]) == [0, 0] and shell.freed == []
    shell(events.Tick(), after=999)
    assert shell.freed == [] and shell.core.next_ns() == shell.now + 1
    shell(events.Tick(), after=1)
    assert shell.freed == [(0, 100, 100)]
    shell(events.Release(lease), after=1)
    assert shell.freed == [(0, 100, 100), (0, 0, 100)]


def test_a_lost_owners_leases_run_out_but_do_not_end_at_once() -> None:
    """Goal: a vanished connection is no proof that nobody reads. Method: owner lost; evict, renew, wait, evict."""
    shell = Shell()
    (key,) = chain(1)
    shell.put([key])
    reply = shell(events.Lease(key, 5000, 7))
    assert reply.end_ns == shell.now + 5000
    assert shell(events.OwnerLost(7)).ok and not shell(events.OwnerLost(8)).ok
    assert not shell(events.Renew(reply.lease, 10**6)).ok
    assert shell(events.Evict(1)).blocks == 0
    shell(events.Tick(), after=5000)
    shell.evict_one()


def test_a_renewed_lease_outlives_its_first_end_and_an_ended_one_stays_ended() -> None:
    """Goal: renew moves the end. Method: renew before, tick at the first end, evict; then past the second end."""
    shell = Shell()
    (key,) = chain(1)
    shell.put([key])
    lease = shell(events.Lease(key, 100, 1)).lease
    assert shell(events.Renew(lease, 100), after=50).ok
    shell(events.Tick(), after=60)
    assert shell(events.Evict(1)).blocks == 0
    assert not shell(events.Renew(lease, 100), after=40).ok
    shell(events.Tick())
    assert not shell(events.Release(lease)).ok
    shell.evict_one()


def test_leases_are_bounded_in_number_keys_and_time() -> None:
    """Goal: a client can't hold the store. Method: one more than each limit; a century asked for."""
    shell = Shell(limits=Limits(leases=2, lease_keys=3, lease_ttl_ns=1000))
    keys = chain(4)
    shell.put(keys)
    many = shell(events.Lease(b"".join(keys), 10, 1))
    assert many.lease == 0 and many.status.tolist() == [LeaseStatus.LIMIT] * 4
    assert shell(events.Lease(keys[0], 10**18, 1)).end_ns == shell.now + 1000
    assert shell(events.Lease(keys[0], 10, 1)).lease > 0
    assert shell(events.Lease(keys[1], 10, 1)).status.tolist() == [LeaseStatus.LIMIT]
    shell(events.Tick(), after=1000)
    assert len(shell.core.leases) == 0
    for _ in range(500):  # opened and released at once: nothing may pile up
        shell(events.Release(shell(events.Lease(keys[0], 1000, 1)).lease))
    assert len(shell.core.leases._ends) <= 64


def test_a_block_with_children_is_deleted_only_together_with_them() -> None:
    """Goal: token order survives delete. Method: parent alone, parent and one of two children, all in mixed order."""
    shell = Shell()
    a, b, c, d = chain(4)
    shell.put([a, b, c])
    shell.put([d], a)
    status = shell(events.Delete(a)).status
    assert status.tolist() == [DeleteStatus.ORDER]
    assert shell(events.Delete(a + c + b)).status.tolist() == [DeleteStatus.ORDER, 0, 0]
    assert shell(events.Delete(b + a + d + a)).status.tolist() == [DeleteStatus.MISS, 0, 0, 0]
    assert shell.core.stats().blocks == shell.core.stats().bytes == 0


def test_losing_a_region_takes_descendants_along_but_frees_only_what_is_still_there() -> None:
    """Goal: Lost. Method: a chain over two regions with a fork, a block in parts, a lease, a writing child."""
    shell = Shell(grace_ns=10)
    a, b, c, d, e, f, g = chain(7)
    shell.put([a])
    shell.put([b], a, region=1)
    shell.put([c], b)
    shell.put([d], a)
    shell.part([e], 0, 2, parents=[d])
    shell.part([e], 1, 2, parents=[d], region=1)
    shell.part([f], 0, 2, parents=[c])
    shell.put([g])
    lease = shell(events.Lease(c + b, 10**6, 1)).lease
    reply = shell(events.Lost([1]))
    assert (reply.blocks, reply.bytes) == (3, 400)
    assert shell.visible([a, b, c, d, e, g]) == [1, 0, 0, 1, 0, 1] and shell.core.stats().writing == 0
    shell(events.Tick(), after=10)
    assert sorted(shell.freed) == [(0, 400, 100), (0, 600, 100)]  # e's first part and f's; c's is leased
    shell(events.Release(lease))
    assert sorted(shell.freed) == [(0, 200, 100), (0, 400, 100), (0, 600, 100)]
    assert shell.core.stats().leaving_extents == 0


def test_a_long_chain_is_lost_in_one_event() -> None:
    """Goal: depth costs no recursion and no order. Method: 5,000 blocks deep, the root's region goes."""
    shell = Shell(6000)
    keys = chain(5000)
    outcome = shell.core.handle(
        events.Put(b"".join(keys), b"".join([ROOT_KEY, *keys[:-1]]), *shell.columns(5000)), shell.now
    )
    assert not outcome.reply.status.any()
    reply = shell(events.Lost([0]))
    assert reply.blocks == 5000 and shell.freed == [] and shell.core.stats().slots_used == 0


def test_descendants_come_deepest_first() -> None:
    """Goal: with_descendants is complete and ordered. Method: a random forest against walking up parent by parent."""
    rng = np.random.default_rng(5)
    parents = np.array([NONE if i < 5 or rng.random() < 0.1 else rng.integers(0, i) for i in range(400)], np.uint32)
    shuffle = rng.permutation(400)
    moved = np.full(400, NONE, np.uint32)
    for i in range(400):
        moved[shuffle[i]] = NONE if parents[i] == NONE else shuffle[parents[i]]
    marked = rng.random(400) < 0.05

    def line(slot: int) -> list[int]:
        out = [slot]
        while moved[out[-1]] != NONE:
            out.append(int(moved[out[-1]]))
        return out

    slots = with_descendants(moved, marked).tolist()
    assert set(slots) == {slot for slot in range(400) if any(marked[up] for up in line(slot))}
    depths = [len(line(slot)) for slot in slots]
    assert depths == sorted(depths, reverse=True)


def test_the_index_takes_at_most_96_bytes_a_block() -> None:
    """Goal: the design's bound. Method: arithmetic over the real arrays of a directory of 100,000 blocks."""
    shell = Shell(100_000)
    core = shell.core
    real = len(core.table.memory) - 4096 + sum(array.nbytes for array in core.arrays.values())
    assert real / 100_000 == core.index_bytes_per_block() <= 96


def test_calls_that_make_no_sense_change_nothing() -> None:
    """Goal: refuse before anything is touched. Method: ragged keys, short columns, impossible parts."""
    shell = Shell()
    keys = chain(2)
    columns = shell.columns(2)
    for event in (
        events.Put(b"x" * 33, ROOT_KEY * 2, *columns),
        events.Put(b"".join(keys), ROOT_KEY, *columns),
        events.Put(keys[0], ROOT_KEY, *columns),
        events.PutPart(keys[0], ROOT_KEY, 2, 2, 1, *shell.columns(1), deadline_ns=10**18),
        events.PutPart(keys[0], ROOT_KEY, 0, 256, 1, *shell.columns(1), deadline_ns=10**18),
        events.PutPart(keys[0], ROOT_KEY, 0, 2, 1, *columns, deadline_ns=10**18),
        events.Delete(b"short"),
    ):
        with pytest.raises(ValueError):
            shell(event)
        shell.core.check()
        assert shell.core.stats().slots_used == 0 == shell.core.stats().writing


def test_an_empty_call_is_answered_with_nothing() -> None:
    """Goal: n = 0 works everywhere. Method: every batched event without keys."""
    shell = Shell()
    assert shell(events.Put(b"", b"", b"", b"", b"", b"")).status.size == 0
    assert shell(events.PutPart(b"", b"", 0, 2, 1, b"", b"", b"", b"", deadline_ns=1)).status.size == 0
    assert shell(events.Delete(b"")).status.size == 0 and not shell(events.Touch(b"")).ok
    assert shell(events.Lease(b"", 10, 1)).lease == 0 and shell(events.Lost([])).blocks == 0
    assert shell(events.Drop(b"")).blocks == 0


def test_part_keys_differ_by_part_and_by_count() -> None:
    """Goal: derived keys are injective in practice. Method: all parts of all splits up to 40 of two keys, compared."""
    names = [part_key(key, p, n) for key in (key_of(1), key_of(2)) for n in range(1, 41) for p in range(1, n)]
    assert len(set(names)) == len(names) and part_key(key_of(1), 0, 9) == key_of(1)
    for part, parts in ((2, 2), (-1, 2), (0, 0), (0, 256)):
        with pytest.raises(ValueError):
            part_key(key_of(1), part, parts)
    with pytest.raises(ValueError):
        part_key(b"short", 0, 1)
