"""Single promises of the directory core, each by name; the state machine beside this file covers their interplay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.directory.arena import aligned, chain, key_of
from ucxkv.directory import (
    ROOT_KEY,
    DeleteStatus,
    Directory,
    LeaseStatus,
    Limits,
    PutStatus,
    SlotTable,
    events,
    part_key,
    table_bytes,
)
from ucxkv.directory.descent import with_descendants
from ucxkv.directory.events import Extent
from ucxkv.directory.slots import NONE

SECOND = 10**9


class Shell:
    """A directory with a clock and an allocator that never reuses an extent."""

    def __init__(self, capacity: int = 256, *, grace_ns: int = 0, limits: Limits | None = None) -> None:
        table = SlotTable(aligned(table_bytes(capacity)), capacity, epoch=1, seed=11)
        self.core = Directory(table, grace_ns=grace_ns, limits=limits)
        self.now = 5 * SECOND
        self.offset = 0
        self.freed: list[Extent] = []

    def __call__(self, event: Any, *, after: int = 0) -> Any:
        self.now += after
        outcome = self.core.handle(event, self.now)
        for effect in outcome.effects:
            self.freed += effect.extents
        self.core.check()
        return outcome.reply

    def columns(self, n: int, region: int = 0) -> tuple[Any, ...]:
        offsets = self.offset + 100 * np.arange(n, dtype=np.uint64)
        self.offset += 100 * n
        return np.full(n, region, np.uint16), offsets, np.full(n, 100, np.uint32), np.zeros(n, np.uint64)

    def put(self, keys: list[bytes], parent: bytes = ROOT_KEY, *, after: int = 0, region: int = 0) -> list[int]:
        """A chain below `parent`."""
        parents = b"".join([parent, *keys[:-1]])
        reply = self(events.Put(b"".join(keys), parents, *self.columns(len(keys), region)), after=after)
        out: list[int] = reply.status.tolist()
        return out

    def part(
        self, keys: list[bytes], part: int, parts: int, *, put_id: int = 1, parents: list[bytes] | None = None,
        last: int = SECOND, region: int = 0,
    ) -> list[int]:  # fmt: skip
        above = b"".join(parents or [ROOT_KEY] * len(keys))
        columns = self.columns(len(keys), region)
        event = events.PutPart(b"".join(keys), above, part, parts, put_id, *columns, deadline_ns=self.now + last)
        out: list[int] = self(event).status.tolist()
        return out

    def visible(self, keys: list[bytes]) -> list[int]:
        out: list[int] = self.core.reader.exists(b"".join(keys)).tolist()
        return out

    def evict_one(self) -> None:
        assert self(events.Evict(1)).blocks == 1


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


def test_a_block_in_parts_appears_with_its_last_part_and_leaves_whole() -> None:
    """Goal: I2. Method: seal parts out of order, look between; the parts carry one generation; evict frees all
    extents.
    """
    shell = Shell()
    root, key = chain(2)
    shell.put([root])
    assert shell.part([key], 2, 3, parents=[root]) == [PutStatus.SEALED]
    assert shell.part([key], 0, 3, parents=[root]) == [PutStatus.SEALED]
    assert shell.part([key], 0, 3, parents=[root]) == [PutStatus.ALREADY]
    assert shell.visible([key]) == [0]
    assert shell.part([key], 1, 3, parents=[root]) == [PutStatus.STORED]
    names = [part_key(key, part, 3) for part in range(3)]
    records, found = shell.core.lookup(b"".join(names))
    assert found.all() and len(set(records["generation"].tolist())) == 1
    assert records["offset"].tolist() == [200, 400, 100] and records["parts"].tolist() == [3, 3, 3]
    assert shell.core.stats().blocks == 2 and shell.core.stats().slots_used == 4
    assert len(shell.core.scan(0, 10)[1]) == 2
    shell.evict_one()
    assert sorted(shell.freed) == [(0, 100, 100), (0, 200, 100), (0, 400, 100)]
    assert shell.visible(names) == [0, 0, 0]


def test_parts_of_two_puts_never_mix() -> None:
    """Goal: one put_id a block. Method: a second put_id while the first is open, then after its deadline; a plain
    put too.
    """
    shell = Shell()
    (key,) = chain(1)
    assert shell.part([key], 0, 2, put_id=1, last=1000) == [PutStatus.SEALED]
    reply = shell(events.PutPart(key, ROOT_KEY, 1, 2, 2, *shell.columns(1), deadline_ns=shell.now + 9), after=400)
    assert reply.status.tolist() == [PutStatus.BUSY] and reply.retry_after_ns == 600
    assert shell.put([key]) == [PutStatus.BUSY]
    shell.now += 600
    assert shell.part([key], 1, 2, put_id=2) == [PutStatus.SEALED]
    assert shell.freed == [(0, 0, 100)]
    assert shell.part([key], 0, 2, put_id=2) == [PutStatus.STORED]


def test_a_writing_child_keeps_its_parent_until_it_is_given_up() -> None:
    """Goal: the parent visible at Begin is visible at Commit. Method: evict and delete the parent meanwhile, then
    reap.
    """
    shell = Shell()
    root, key = chain(2)
    shell.put([root])
    shell.part([key], 0, 2, parents=[root], last=1000)
    assert shell(events.Evict(1)).blocks == 0
    assert shell(events.Delete(root)).status.tolist() == [DeleteStatus.ORDER]
    assert shell.core.next_ns() == shell.now + 1000
    shell(events.Tick(), after=1000)
    assert shell.freed == [(0, 100, 100)] and shell.core.stats().writing == 0
    shell.evict_one()


def test_each_rank_puts_its_part_of_a_chain_in_one_call() -> None:
    """Goal: chains of parts. Method: three ranks, a call each for four blocks; then the same chain's continuation."""
    shell = Shell()
    keys = chain(6)
    above = [ROOT_KEY, *keys[:-1]]
    for rank in (1, 0):
        assert shell.part(keys[:4], rank, 3, parents=above[:4]) == [PutStatus.SEALED] * 4
        assert shell.core.match(b"".join(keys)) == 0
    assert shell.part(keys[:4], 2, 3, parents=above[:4]) == [PutStatus.STORED] * 4
    assert shell.core.match(b"".join(keys)) == 4 and shell.core.stats().writing == 0
    assert shell.part(keys[4:], 0, 1, parents=above[4:]) == [PutStatus.STORED] * 2
    assert shell.core.match(b"".join(keys)) == 6


def test_a_whole_block_waits_for_its_parent_and_follows_it_in_the_same_event() -> None:
    """Goal: I1. Method: a fork whose blocks are completed deepest first; then the root, and each block's generation."""
    shell = Shell()
    a, b, c, d = keys = chain(4)
    above = [ROOT_KEY, a, b, a]
    assert shell.part(keys, 0, 2, parents=above) == [PutStatus.SEALED] * 4
    assert shell.part([c, b], 1, 2, parents=[b, a]) == [PutStatus.SEALED] * 2
    assert shell.part([c], 1, 2, parents=[b]) == [PutStatus.ALREADY] and shell.visible(keys) == [0] * 4
    reply = shell(events.PutPart(a, ROOT_KEY, 1, 2, 1, *shell.columns(1), deadline_ns=10**18))
    assert reply.status.tolist() == [PutStatus.STORED] and reply.index == 3
    assert shell.visible(keys) == [1, 1, 1, 0] and shell.core.stats().writing == 1
    assert shell.core.lookup(a + b + c)[0]["generation"].tolist() == [1, 2, 3]
    assert shell(events.Delete(a + b + c)).status.tolist() == [DeleteStatus.ORDER, 0, 0], "d is being written below a"
    assert shell.part([d], 1, 2, parents=[a]) == [PutStatus.STORED]


def test_a_block_is_begun_only_below_a_parent_of_its_own_put() -> None:
    """Goal: ORDER otherwise. Method: another put_id, a block of one part, a plain put, a parent that nobody began."""
    shell = Shell()
    a, b, c = chain(3)
    assert shell.part([a], 0, 2, put_id=1) == [PutStatus.SEALED]
    assert shell.part([b], 0, 2, put_id=2, parents=[a]) == [PutStatus.ORDER]
    assert shell.part([b], 0, 1, put_id=1, parents=[a]) == [PutStatus.ORDER] == shell.put([b], a)
    assert shell.part([c, b], 0, 2, put_id=1, parents=[b, a]) == [PutStatus.ORDER, PutStatus.SEALED]
    assert shell.part([c], 0, 2, put_id=1, parents=[c]) == [PutStatus.ORDER]


def test_a_parent_that_is_given_up_takes_what_was_begun_below_it_along() -> None:
    """Goal: no orphan waits. Method: a chain of 2,000, all but the root whole; the root's deadline comes first."""
    shell = Shell()
    keys = chain(2000)
    assert shell.part(keys[:1], 0, 2, last=500) == [PutStatus.SEALED]
    for rank in range(2):
        assert shell.part(keys[1:], rank, 2, parents=keys[:-1]) == [PutStatus.SEALED] * 1999
    shell(events.Tick(), after=499)
    assert shell.core.stats().writing == 2000 and shell.freed == []
    shell(events.Tick(), after=1)
    assert shell.core.stats().writing == 0 and shell.core.stats().blocks == 0
    assert sorted(shell.freed) == [(0, 100 * i, 100) for i in range(1 + 2 * 1999)]
    assert shell.part(keys[1:2], 0, 2, parents=keys[:1]) == [PutStatus.ORDER]


def test_a_whole_block_that_waits_past_its_own_deadline_is_given_up_alone() -> None:
    """Goal: each block has its deadline. Method: child and grandchild due before their parent, which then commits."""
    shell = Shell()
    a, b, c = chain(3)
    shell.part([a], 0, 2, last=1000)
    for rank in range(2):
        shell.part([b], rank, 2, parents=[a], last=100)
        shell.part([c], rank, 2, parents=[b], last=1000)
    shell.now += 100
    assert shell.part([a], 1, 2) == [PutStatus.STORED]
    assert shell.visible([a, b, c]) == [1, 0, 0] and shell.core.stats().writing == 0
    assert sorted(shell.freed) == [(0, 100 * i, 100) for i in range(1, 5)]


def test_a_loss_takes_waiting_blocks_along_and_frees_what_is_still_there() -> None:
    """Goal: Lost and Drop below writing parents. Method: a visible root with a fork of writing blocks below it; first a
    region with a part of one block and of its child goes, then the root is dropped.
    """
    shell = Shell()
    a, b, c, d, e = chain(5)
    shell.put([a])  # offset 0
    shell.part([b], 0, 2, parents=[a], region=1)  # 100
    shell.part([c], 0, 2, parents=[b])  # 200
    shell.part([c], 1, 2, parents=[b], region=1)  # 300
    shell.part([d, e], 0, 2, parents=[a, d])  # 400, 500
    shell.part([e], 1, 2, parents=[d])  # 600
    shell(events.Lost([1]))
    assert shell.core.stats().writing == 2 and shell.freed == [(0, 200, 100)]
    shell.freed.clear()
    assert shell(events.Drop(a)).blocks == 1
    assert shell.core.stats().writing == 0
    assert sorted(shell.freed) == [(0, 0, 100), (0, 400, 100), (0, 500, 100), (0, 600, 100)]


def test_a_waiting_block_that_finds_no_room_or_its_parts_key_taken_is_given_up() -> None:
    """Goal: nobody is left to repeat it. Method: four whole blocks of two parts, but the root, in a table of 7 slots;
    then in a big one with the key of the third block's part 1 taken.
    """
    shell = Shell(7)
    keys = chain(4)
    a, b, c, _ = keys
    for rank in (0, 1):
        shell.part(keys[rank:], rank, 2, parents=[ROOT_KEY, a, b, c][rank:])
    assert shell.part([a], 1, 2) == [PutStatus.STORED]
    assert shell.visible(keys) == [1, 1, 1, 0] and shell.core.stats().writing == 0 and len(shell.freed) == 2
    shell = Shell()
    for rank in (0, 1):
        shell.part(keys[rank:], rank, 2, parents=[ROOT_KEY, a, b, c][rank:])
    assert shell.put([part_key(c, 1, 2)]) == [PutStatus.STORED]
    assert shell.part([a], 1, 2) == [PutStatus.STORED]
    assert shell.visible(keys) == [1, 1, 0, 0] and shell.core.stats().writing == 0 and len(shell.freed) == 4


def test_keys_of_parts_are_nobody_elses() -> None:
    """Goal: derived keys are taken or refused, never shared. Method: use one as a key, a parent, and in the way of
    a commit.
    """
    shell = Shell()
    key, child, other = chain(3)
    derived = part_key(key, 1, 2)
    shell.part([key], 0, 2)
    shell.part([key], 1, 2)
    assert shell.put([derived]) == [PutStatus.REFUSED] == shell.part([derived], 0, 1)
    assert shell.put([child], derived) == [PutStatus.ORDER] == shell.part([child], 0, 1, parents=[derived])
    assert shell(events.Delete(derived)).status.tolist() == [DeleteStatus.MISS]
    assert shell(events.Lease(derived, 10, 1)).lease == 0 and not shell(events.Touch(derived)).ok
    assert shell.put([part_key(other, 1, 2)]) == [PutStatus.STORED]
    assert shell.part([other], 0, 2) == [PutStatus.SEALED]
    assert shell.part([other], 1, 2) == [PutStatus.REFUSED] and shell.core.stats().writing == 0
    assert shell.put([ROOT_KEY]) == [PutStatus.REFUSED] == shell.part([ROOT_KEY], 0, 2)


def test_a_full_table_refuses_the_last_part_and_takes_it_after_an_eviction() -> None:
    """Goal: NO_SPACE loses nothing. Method: 3 slots of which 2 are used; commit a block of 2 parts, evict, repeat."""
    shell = Shell(3)
    a, b, key = chain(3)
    shell.put([a])
    shell.put([b])
    assert shell.part([key], 0, 2) == [PutStatus.SEALED]
    assert shell.part([key], 1, 2) == [PutStatus.NO_SPACE]
    assert shell.core.stats().writing == 1
    shell.evict_one()
    assert shell.part([key], 1, 2) == [PutStatus.STORED]


def test_writing_blocks_are_bounded() -> None:
    """Goal: half-written blocks can't fill memory. Method: one more than the limit, which waits for the next
    deadline.
    """
    shell = Shell(limits=Limits(writing=2))
    assert shell.part(chain(3), 0, 2, last=777) == [PutStatus.SEALED, PutStatus.SEALED, PutStatus.BUSY]
    shell = Shell(limits=Limits(writing=2))
    a, b, c = chain(3)
    assert shell.part([a, b, c], 0, 2, parents=[ROOT_KEY, a, b]) == [PutStatus.SEALED, PutStatus.SEALED, PutStatus.BUSY]
    assert shell.part([b, c], 1, 2, parents=[a, b]) == [PutStatus.SEALED, PutStatus.BUSY], "a waiting block counts"
    assert shell.part([a, c], 1, 2, parents=[ROOT_KEY, b]) == [PutStatus.STORED, PutStatus.SEALED]


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
