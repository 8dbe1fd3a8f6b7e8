"""Single promises of blocks in parts, each by name; the state machine beside this file covers their interplay."""

from __future__ import annotations

from tests.directory.arena import chain
from tests.directory.shell import Shell
from ucxkv.directory import ROOT_KEY, DeleteStatus, Limits, PutStatus, events, part_key


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
