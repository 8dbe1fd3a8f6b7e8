"""Crossings between two shards, one at a time: who is held for whom, and what late and doubled messages change."""

from __future__ import annotations

from typing import Any

import pytest

from tests.directory.arena import aligned, key_of
from tests.directory.shell import SECOND, Shell
from ucxkv.directory import ROOT_KEY, Directory, PutStatus, SlotTable, events, table_bytes
from ucxkv.directory import crossing as cx
from ucxkv.directory.elsewhere import ShardRole
from ucxkv.sharding import ShardRule

RULE = ShardRule(shards=2, fanout=2, cut_blocks=1 << 20)
KEYS = [key_of(number) for number in range(200) if not RULE.is_cut(key_of(number))]
HERE = [key for key in KEYS if RULE.own(key) == 0]
THERE = [key for key in KEYS if RULE.own(key) == 1]
ROOT, CHILD = HERE[0], THERE[0]


class Pair:
    """Shard 0, which has a root with two local children, and shard 1. Nothing is sent but by hand."""

    def __init__(self, crossings: int = 100) -> None:
        self.shells = []
        for shard in (0, 1):
            shell = Shell()
            table = SlotTable(aligned(table_bytes(256)), 256, epoch=1 + shard, seed=11)
            shell.core = Directory(table, grace_ns=0, role=ShardRole(shard, RULE, crossings))
            self.shells.append(shell)
        assert self.shells[0].put([ROOT]) == [PutStatus.STORED]
        for key in THERE[-2:]:
            assert self.shells[0].put([key], ROOT) == [PutStatus.STORED]

    def __call__(self, shard: int, event: Any) -> Any:
        return self.shells[shard](event)

    def sends(self, shard: int, event: Any) -> Any:
        """The reply and what is to be sent."""
        shell = self.shells[shard]
        outcome = shell.core.handle(event, shell.now)
        shell.core.check()
        return outcome.reply, [send.event for send in outcome.sends]

    def expect(self, child: bytes = CHILD, parent: bytes = ROOT) -> cx.Pin:
        pin = self(1, cx.Expect(child, parent, 0, self.shells[1].now + SECOND)).pin
        assert pin.shard == 0
        event: cx.Pin = pin.event
        return event

    def cross(self, child: bytes = CHILD) -> cx.Pin:
        """A child of the root, in shard 1, in good order."""
        assert self.shells[0].put([child], ROOT) == [PutStatus.ELSEWHERE]
        pin = self.expect(child)
        assert self(1, cx.Pinned(child, pin.token, self(0, pin))).ok
        assert self.shells[1].put([child], ROOT) == [PutStatus.STORED]
        return pin


def test_the_third_child_goes_to_the_shard_of_its_own_key() -> None:
    """Goal: delegation. Method: two children stay, a third whose own shard this is stays too, any other is ELSEWHERE,
    with what hangs on it; the root delegates from its first child elsewhere on, and names its local children."""
    pair = Pair()
    assert pair.shells[0].put([HERE[1]], ROOT) == [PutStatus.STORED]
    assert pair.shells[0].put([CHILD, THERE[1]], ROOT) == [PutStatus.ELSEWHERE, PutStatus.ORDER]
    assert not pair(0, cx.Local(ROOT)).is_delegating
    pair.cross()
    reply = pair(0, cx.Local(ROOT))
    assert reply.is_delegating
    assert set(reply.local) == {*THERE[-2:], HERE[1]}
    pair(0, events.Delete(THERE[-1] + THERE[-2] + HERE[1]))
    assert pair.shells[0].put([THERE[2]], ROOT) == [PutStatus.ELSEWHERE]  # it goes on delegating
    assert pair(0, cx.Local(CHILD)).life is None


def test_a_root_of_another_shard_is_refused() -> None:
    """Goal: a client with a wrong map is told. Method: a root whose key is the other shard's."""
    assert Pair().shells[0].put([CHILD]) == [PutStatus.ELSEWHERE]


def test_a_child_is_not_put_before_its_parent_is_pinned() -> None:
    """Goal: never a pin too few. Method: the put before Expect, before the pin, and after it."""
    pair = Pair()
    assert pair.shells[1].put([CHILD], ROOT) == [PutStatus.ORDER]
    pin = pair.expect()
    assert pair.shells[1].put([CHILD], ROOT) == [PutStatus.ORDER]
    reply = pair(0, pin)
    assert pair.shells[1].put([CHILD], ROOT) == [PutStatus.ORDER]
    pair(1, cx.Pinned(CHILD, pin.token, reply))
    assert pair.shells[1].put([CHILD], ROOT) == [PutStatus.STORED]
    assert pair.shells[1].put([CHILD], ROOT) == [PutStatus.ALREADY]


def test_a_pinned_block_stays_until_its_child_is_gone() -> None:
    """Goal: a pin is a hold. Method: the local children go, the root can't; the child goes, and its Unpin frees it."""
    pair = Pair()
    pin = pair.cross()
    assert pair(0, events.Evict(10**6)).blocks == 2
    assert pair(0, events.Delete(ROOT)).status.tolist() == [events.DeleteStatus.ORDER]
    _, sends = pair.sends(1, events.Evict(10**6))
    assert sends == [cx.Unpin(ROOT, CHILD, pin.token)]
    assert pair(0, sends[0]).ok
    assert not pair(0, sends[0]).ok  # doubled
    assert pair(0, events.Evict(10**6)).blocks == 1


def test_a_late_unpin_does_not_take_a_newer_pin_away() -> None:
    """Goal: never a pin too few. Method: the child goes, its Unpin lingers; it comes again under a new pin."""
    pair = Pair()
    pair.cross()
    _, (late,) = pair.sends(1, events.Delete(CHILD))
    pair.cross()
    assert not pair(0, late).ok
    pair(0, events.Evict(10**6))
    assert pair.shells[0].visible([ROOT]) == [1]


def test_a_late_pin_is_reclaimed_by_asking() -> None:
    """Goal: never a pin too many for ever. Method: a doubled Pin comes after the Unpin; asked, the child's shard says
    no. A pin that is needed is kept."""
    pair = Pair()
    pin = pair.cross()
    _, (unpin,) = pair.sends(1, events.Delete(CHILD))
    pair(0, unpin)
    pair(0, pin)
    (send,) = pair(0, cx.Reclaim(10)).sends
    assert (send.shard, send.event) == (1, cx.AskPin(ROOT, CHILD, pin.token))
    assert not pair(1, send.event).ok
    assert pair(0, cx.Unpin(ROOT, CHILD, send.event.token)).ok
    pair.cross()
    assert pair(1, pair(0, cx.Reclaim(10)).sends[0].event).ok


def test_an_answer_to_an_old_question_does_not_count() -> None:
    """Goal: a Pinned belongs to its Pin. Method: two Expects; the first one's answer, ORDER, comes last."""
    pair = Pair()
    first = pair.expect()
    second = pair.expect()
    assert second.token > first.token
    assert pair(1, cx.Pinned(CHILD, second.token, pair(0, second))).ok
    assert not pair(1, cx.Pinned(CHILD, first.token, cx.PinReply(cx.PinStatus.ORDER, None))).ok
    assert pair.shells[1].put([CHILD], ROOT) == [PutStatus.STORED]


def test_children_of_a_lost_parent_go_with_all_below_them() -> None:
    """Goal: I1 across shards. Method: the root is damaged; an Orphaned follows it; then the same with the message lost
    and the parents pinned again."""
    for is_lost in (False, True):
        pair = Pair()
        pin = pair.cross()
        pair.shells[1].put([HERE[5], HERE[6]], CHILD)
        before = pair.shells[1].core.elsewhere.fence
        _, sends = pair.sends(0, events.Drop(ROOT))
        assert sends == [cx.Orphaned(ROOT, CHILD, pin.token)]
        if is_lost:
            (again,) = pair(1, cx.Repin(0)).sends
            pair(1, cx.Pinned(CHILD, again.event.token, pair(0, again.event)))
        else:
            pair(1, sends[0])
        assert pair.shells[1].visible([CHILD, HERE[5], HERE[6]]) == [0, 0, 0]
        assert pair.shells[1].core.elsewhere.fence > before


def test_an_expected_child_that_does_not_come_gives_its_pin_back() -> None:
    """Goal: bounded. Method: a deadline passes; the Unpin names the pin."""
    pair = Pair()
    pin = pair.expect()
    pair(1, cx.Pinned(CHILD, pin.token, pair(0, pin)))
    pair.shells[1].now += 2 * SECOND
    _, sends = pair.sends(1, events.Tick())
    assert sends == [cx.Unpin(ROOT, CHILD, pin.token)]
    assert pair.shells[1].put([CHILD], ROOT) == [PutStatus.ORDER]


def test_a_block_in_parts_crosses_too() -> None:
    """Goal: parts and shards go together. Method: two parts of the child; ELSEWHERE in the first shard; after the pin
    it is sealed, outlives its deadline as a crossing while it is written, and appears with its second part."""
    pair = Pair()
    assert pair.shells[0].part([CHILD, HERE[3]], 0, 2, parents=[ROOT, ROOT]) == [PutStatus.ELSEWHERE, PutStatus.SEALED]
    pin = pair.expect()
    pair(1, cx.Pinned(CHILD, pin.token, pair(0, pin)))
    last = 10 * SECOND
    assert pair.shells[1].part([CHILD], 0, 2, parents=[ROOT], last=last) == [PutStatus.SEALED]
    pair.shells[1].now += 2 * SECOND
    pair(1, events.Tick())
    assert pair.shells[1].part([CHILD], 1, 2, parents=[ROOT], last=last) == [PutStatus.STORED]
    _, sends = pair.sends(1, events.Delete(CHILD))
    assert [type(send) for send in sends] == [cx.Unpin]


def test_a_shard_vouches_for_the_parents_that_it_has_pinned() -> None:
    """Goal: a head costs its shard no message. Method: what shard 1 answers about a child that it lacks, before and
    after it holds another child of the same parent."""
    pair = Pair()
    links = pair.shells[1].core.elsewhere
    assert links.answer(THERE[3], ROOT).vouched is None
    pair.cross()
    assert links.answer(THERE[3], ROOT).vouched == pair(0, cx.Local(ROOT)).life
    assert (links.answer(CHILD, ROOT).visible, links.answer(b"", ROOT).visible) == (1, 0)
    assert pair.shells[0].core.elsewhere.answer(ROOT + CHILD).is_delegating


def test_crossings_are_bounded_on_both_sides() -> None:
    """Goal: Python objects are bounded. Method: room for one; the second is LIMIT, here and there."""
    pair = Pair(crossings=1)
    pair.cross()
    assert pair(1, cx.Expect(THERE[1], ROOT, 0, 10**12)).status == cx.PinStatus.LIMIT
    assert pair(0, cx.Pin(ROOT, THERE[1], 1)).status == cx.PinStatus.LIMIT


def test_a_directory_without_a_shard_number_is_as_it_was() -> None:
    """Goal: one shard pays nothing. Method: a wide fan-out without a role; crossings are refused."""
    shell = Shell()
    shell.put([ROOT])
    for key in THERE[:20]:
        assert shell.put([key], ROOT) == [PutStatus.STORED]
    assert shell(cx.Pin(ROOT, HERE[1], 1)).status == cx.PinStatus.LIMIT
    assert shell(cx.Expect(HERE[1], ROOT, 1, 10**12)).status == cx.PinStatus.LIMIT
    with pytest.raises(ValueError, match="parents"):
        Pair()(0, events.Put(CHILD, ROOT_KEY * 2, *shell.columns(1)))
