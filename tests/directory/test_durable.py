"""Class durable, promise by promise; the state machine beside this file covers their interplay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.directory.arena import chain, key_of
from tests.directory.shell import SECOND, Shell
from ucxkv.directory import ROOT_KEY, DeleteStatus, Limits, PutStatus, events
from ucxkv.directory.log import COMMIT_DTYPE


def _stage(shell: Shell, keys: list[bytes], parent: bytes = ROOT_KEY, log: int = 0) -> Any:
    parents = b"".join([parent, *keys[:-1]])
    return shell(events.StagePut(b"".join(keys), parents, *shell.columns(len(keys)), log=log))


def _keys(reply: Any) -> list[bytes]:
    return [row["key"].tobytes() for row in reply.rows]


def test_a_durable_block_is_seen_when_the_log_has_it_and_not_before() -> None:
    """Goal: nothing is shown that a crash could take back. Method: stage, look, settle, look; the rows name it all."""
    shell, keys = Shell(), chain(3)
    reply = _stage(shell, keys)
    assert reply.status.tolist() == [0, 0, 0] and _keys(reply) == keys and shell.visible(keys) == [0, 0, 0]
    assert reply.rows["parent"].tobytes() == b"".join([ROOT_KEY, *keys[:2]])
    assert shell(events.Settle(reply.batch)).status.tolist() == [0, 0, 0] and shell.visible(keys) == [1, 1, 1]
    stats = shell.core.stats()
    assert (stats.durable_blocks, stats.durable_bytes, stats.staged) == (3, 300, 0)
    assert shell(events.Evict(10**9)).blocks == 0, "durable blocks are not evicted"


def test_a_child_may_be_staged_below_a_staged_parent() -> None:
    """Goal: a chain in several calls needs no waiting. Method: two batches, settled in order; not the other way."""
    shell, keys = Shell(), chain(4)
    first = _stage(shell, keys[:2])
    second = _stage(shell, keys[2:], keys[1])
    assert second.status.tolist() == [0, 0]
    with pytest.raises(ValueError, match="before"):
        shell(events.Settle(second.batch))
    shell(events.Settle(first.batch))
    assert shell.visible(keys) == [1, 1, 0, 0]
    shell(events.Settle(second.batch))
    assert shell.visible(keys) == [1, 1, 1, 1]


def test_what_is_above_a_durable_block_becomes_durable_with_it() -> None:
    """Goal: no restart makes a hole. Method: a chain of class cache, a durable child below it; the log names all of it,
    parents first, and then nothing of it is evicted, though its other child is."""
    shell, keys = Shell(), chain(5)
    shell.put(keys[:3])
    shell.put([keys[4]], keys[1])
    reply = _stage(shell, [keys[3]], keys[2])
    assert _keys(reply) == keys[:4] and reply.status.tolist() == [0]
    assert shell(events.Evict(100)).blocks == 1 and shell.visible(keys) == [1, 1, 1, 0, 0]  # held while staged
    shell(events.Settle(reply.batch))
    assert shell(events.Evict(10**9)).blocks == 0 and shell.visible(keys[:4]) == [1, 1, 1, 1]
    again = _stage(shell, [keys[3]], keys[2])
    assert again.status.tolist() == [PutStatus.ALREADY] and again.batch == 0


def test_already_means_there_and_durable() -> None:
    """Goal: a durable put of a visible block waits until it is durable. Method: a cache block put durably; twice, the
    second while the first waits; both have a batch."""
    shell, keys = Shell(), chain(2)
    shell.put(keys)
    first, second = _stage(shell, keys), _stage(shell, keys)
    assert first.status.tolist() == second.status.tolist() == [PutStatus.ALREADY] * 2
    assert _keys(first) == keys and _keys(second) == [] and second.batch == first.batch + 1
    shell(events.Settle(first.batch))
    shell(events.Settle(second.batch))
    assert shell.core.stats().durable_blocks == 2


def test_only_one_that_is_nowhere_is_out_of_order() -> None:
    """Goal: ORDER is for a missing parent; what cannot be durable is REFUSED. Method: no parent; a parent in parts; a
    parent in another node's memory."""
    shell, keys = Shell(), chain(6)
    assert _stage(shell, [keys[1]], keys[0]).status.tolist() == [PutStatus.ORDER]
    for part in range(2):
        shell.part([keys[2]], part, 2)
    assert _stage(shell, [keys[3]], keys[2]).status.tolist() == [PutStatus.REFUSED]
    shell.put([keys[4]], region=1)
    assert _stage(shell, [keys[5]], keys[4]).status.tolist() == [PutStatus.REFUSED]
    assert _stage(shell, [ROOT_KEY]).status.tolist() == [PutStatus.REFUSED]


def test_a_put_of_class_cache_knows_that_it_would_better_wait() -> None:
    """Goal: a cache child of a staged parent can be published after it. Method: what `waits` says, and BUSY or ORDER if
    nobody waits."""
    shell, keys = Shell(), chain(3)
    reply = _stage(shell, keys[:1])
    waits = shell.core.durable.waits
    assert waits(keys[1], keys[0], is_durable=False) == waits(keys[0], ROOT_KEY, is_durable=False) == reply.batch
    assert waits(keys[1], keys[0], is_durable=True) == waits(keys[2], ROOT_KEY, is_durable=False) == 0
    assert shell.put(keys[:1]) == [PutStatus.BUSY] and shell.put([keys[1]], keys[0]) == [PutStatus.ORDER]
    assert shell.part([keys[0]], 0, 2) == [PutStatus.BUSY]
    shell(events.Settle(reply.batch))
    assert shell.put([keys[1]], keys[0]) == [0] and waits(keys[1], keys[0], is_durable=False) == 0


def test_a_durable_block_goes_when_the_log_has_its_leave() -> None:
    """Goal: a delete that a crash could undo is not shown. Method: delete two of three; look, try to put below it,
    settle; the memory comes back after the grace."""
    shell, keys = Shell(grace_ns=SECOND), chain(4)
    shell(events.Settle(_stage(shell, keys[:3]).batch))
    reply = shell(events.Delete(b"".join(keys[1:3])))
    assert reply.status.tolist() == [0, 0] and reply.left == keys[2] + keys[1]
    assert shell.visible(keys) == [1, 1, 1, 0]
    assert shell.put([keys[3]], keys[2]) == [PutStatus.BUSY]
    assert _stage(shell, [keys[3]], keys[2]).status.tolist() == [PutStatus.BUSY]
    assert shell.core.durable.waits_delete(keys[2]) and shell.core.durable.waits(keys[3], keys[2], is_durable=True)
    shell(events.Settle(reply.batch))
    assert shell.visible(keys) == [1, 0, 0, 0] and shell.freed == []
    shell(events.Tick(), after=SECOND)
    assert len(shell.freed) == 2 and shell.core.stats().durable_blocks == 1
    assert shell(events.Delete(key_of(99))).status.tolist() == [DeleteStatus.MISS]


def test_an_abandoned_batch_leaves_nothing() -> None:
    """Goal: when the log fails, all is as before. Method: an upgrade, a put below it and a delete, abandoned newest
    first; then the same chain is evicted."""
    shell, keys = Shell(), chain(4)
    shell.put(keys[:2])
    shell(events.Settle(_stage(shell, [keys[3]]).batch))
    first = _stage(shell, [keys[2]], keys[1])
    second = shell(events.Delete(keys[3]))
    with pytest.raises(ValueError, match="before"):
        shell(events.Abandon(first.batch))
    shell(events.Abandon(second.batch))
    shell(events.Abandon(first.batch))
    assert shell.visible(keys) == [1, 1, 0, 1]
    assert shell(events.Evict(10**9)).blocks == 2 and shell.visible(keys) == [0, 0, 0, 1]
    assert shell.core.stats().staged == 0


def test_damage_takes_what_is_staged_below_along() -> None:
    """Goal: no hole after damage either. Method: a durable parent, a staged child and grandchild; the parent's bytes
    are bad; the children end as ORDER and are named for the log."""
    shell, keys = Shell(), chain(3)
    shell(events.Settle(_stage(shell, keys[:1]).batch))
    first = _stage(shell, [keys[1]], keys[0])
    second = _stage(shell, [keys[2]], keys[1])
    gone = shell(events.Drop(keys[0]))
    assert (gone.blocks, gone.left) == (1, keys[0])
    for reply, key in ((first, keys[1]), (second, keys[2])):
        settled = shell(events.Settle(reply.batch))
        assert settled.status.tolist() == [PutStatus.ORDER] and settled.left == key
    assert shell.visible(keys) == [0, 0, 0] and shell.core.stats().durable_blocks == 0


def test_damage_to_a_block_that_is_becoming_durable_is_named_for_the_log() -> None:
    """Goal: what the log calls durable is so, or logged as gone. Method: damage between an upgrade's two steps."""
    shell, keys = Shell(), chain(2)
    shell.put(keys)
    reply = _stage(shell, keys)
    gone = shell(events.Drop(keys[0]))
    assert (gone.blocks, gone.left) == (2, keys[1] + keys[0])
    assert shell(events.Settle(reply.batch)).left == b"" and shell.core.stats().durable_blocks == 0


def test_a_full_table_and_a_full_stage_are_said() -> None:
    """Goal: bounds have answers. Method: a table of 4 slots; a stage of 2 blocks."""
    shell = Shell(4)
    reply = _stage(shell, chain(6))
    assert reply.status.tolist() == [0, 0, 0, 0, PutStatus.NO_SPACE, PutStatus.NO_SPACE]
    shell(events.Settle(reply.batch))
    small = Shell(limits=Limits(staged=2))
    assert _stage(small, chain(3)).status.tolist() == [0, 0, PutStatus.BUSY]


def test_a_block_that_the_index_has_no_room_for_is_logged_as_gone_with_what_is_below() -> None:
    """Goal: also the rare end of a put that was logged is an answer that a replay agrees with. Method: an index of one
    line (7 entries), a chain of ten in two batches; seven are there, the rest is NO_SPACE or ORDER and named."""
    shell, keys = Shell(16, lines=1), chain(10)
    first, second = _stage(shell, keys[:9]), _stage(shell, [keys[9]], keys[8])
    settled = shell(events.Settle(first.batch))
    assert settled.status.tolist() == [0] * 7 + [PutStatus.NO_SPACE, PutStatus.ORDER]
    assert settled.left == keys[7] + keys[8] and shell.visible(keys) == [1] * 7 + [0] * 3
    last = shell(events.Settle(second.batch))
    assert last.status.tolist() == [PutStatus.ORDER] and last.left == keys[9]
    assert shell.core.stats().durable_blocks == 7


def test_blocks_come_back_without_holes() -> None:
    """Goal: a restored directory is one that never stopped. Method: rows of a chain and a fork, one with bad bytes;
    what hangs below it is ORDER; the rest is there, durable, and takes children and deletes."""
    shell, keys = Shell(), chain(5)
    shell(events.Settle(_stage(shell, keys[:4]).batch))
    shell(events.Settle(_stage(shell, [keys[4]], keys[0]).batch))
    rows = shell.core.durable_rows()
    assert rows.dtype == COMMIT_DTYPE and [row["key"].tobytes() for row in rows] == keys
    again = Shell()
    bad = np.zeros(5, np.uint8)
    bad[1] = PutStatus.REFUSED
    status = again(events.Restore(rows, bad)).status.tolist()
    assert status == [0, PutStatus.REFUSED, PutStatus.ORDER, PutStatus.ORDER, 0]
    assert again.visible(keys) == [1, 0, 0, 0, 1] and again.core.stats().durable_bytes == 200
    assert again.core.generation >= shell.core.generation
    again.offset = shell.offset
    assert _stage(again, [keys[1]], keys[0]).status.tolist() == [0]


def test_blocks_come_back_beside_others() -> None:
    """Goal: a new leader's table has other shards' blocks already. Method: one with a durable chain and a cached one,
    to which come: a chain; the same again; one below a cached block; one below a block that is being deleted; a key
    that is being written, and one that is staged."""
    keys, shell = chain(9), Shell()
    shell(events.Settle(_stage(shell, keys[:2]).batch))
    shell.put([keys[2]])
    other = Shell()
    other.offset = 10_000
    other(events.Settle(_stage(other, [keys[3], keys[4]]).batch))
    rows = other.core.durable_rows()
    before = shell.core.generation
    good = np.zeros(2, np.uint8)
    assert shell(events.Restore(rows, good)).status.tolist() == [0, 0]
    assert shell.visible(keys[:5]) == [1] * 5 and shell.core.generation == before + 2
    assert (shell.core.stats().durable_blocks, shell.core.stats().durable_bytes) == (4, 400)
    assert shell(events.Evict(10**9)).blocks == 1, "the cached one"
    assert shell(events.Restore(rows, good)).status.tolist() == [PutStatus.ALREADY] * 2
    assert shell.core.stats().durable_blocks == 4

    shell.put([keys[2]])
    shell.part([keys[6]], 0, 2)
    shell(events.Delete(keys[1], log=1))
    _stage(shell, [keys[7]])
    odd = np.zeros(6, COMMIT_DTYPE)
    for at, (key, parent) in enumerate(
        [(5, keys[2]), (8, keys[5]), (6, ROOT_KEY), (7, ROOT_KEY), (2, ROOT_KEY), (0, keys[1])]
    ):
        odd[at]["key"], odd[at]["parent"] = keys[key], parent
    odd["key"][5] = key_of(99)
    odd["length"], odd["offset"] = 100, 20_000 + 100 * np.arange(6)
    busy, order = PutStatus.BUSY, PutStatus.ORDER
    status = shell(events.Restore(odd, np.zeros(6, np.uint8))).status.tolist()
    assert status == [order, order, busy, busy, PutStatus.ALREADY, busy]


def test_logs_settle_each_in_its_own_order() -> None:
    """Goal: one table serves several logs. Method: three batches, two of them of one log; the other log's is settled
    first though it is the newest; an own order that is wrong is refused, and so is a put that hangs on another log,
    with nothing changed."""
    shell, keys, others = Shell(), chain(3), chain(2, b"other")
    first = _stage(shell, keys[:1], log=4)
    second = _stage(shell, [keys[1]], keys[0], log=4)
    third = _stage(shell, others[:1], log=7)
    for event in (events.Settle(second.batch), events.Abandon(first.batch), events.Settle(99)):
        with pytest.raises(ValueError, match="batch"):
            shell(event)
    for stage in ([keys[2]], keys[1]), ([keys[0]], ROOT_KEY):
        with pytest.raises(ValueError, match="log 7 hangs on batch"):
            _stage(shell, *stage, log=7)
    assert shell.core.stats().staged == 3
    assert shell(events.Settle(third.batch)).status.tolist() == [0] and shell.visible(others[:1]) == [1]
    waits = shell.core.durable.waits
    assert waits(keys[2] + others[1], keys[1] + others[0], is_durable=False) == second.batch
    shell(events.Abandon(second.batch))
    assert waits(keys[1] + others[1], keys[0] + others[0], is_durable=False) == first.batch
    going = shell(events.Delete(others[0], log=7))
    assert waits(others[1], others[0], is_durable=True) == going.batch == shell.core.durable.waits_delete(others[0])
    shell(events.Settle(first.batch))
    newer = _stage(shell, [keys[1]], keys[0], log=4)
    shell(events.Settle(newer.batch))
    assert newer.batch > going.batch == waits(others[1], others[0], is_durable=True), "the other log's is over"
    assert shell.core.durable.waits_delete(others[0]) == going.batch
    shell(events.Settle(going.batch))
    assert shell.visible([*keys, *others]) == [1, 1, 0, 0, 0]


def test_a_put_below_an_upgrade_of_another_log_is_refused() -> None:
    """Goal: a chain is in one log. Method: a cached parent becomes durable under one log, a child under another."""
    shell, keys = Shell(), chain(2)
    shell.put(keys[:1])
    reply = _stage(shell, keys[:1], log=1)
    with pytest.raises(ValueError, match="hangs on batch"):
        _stage(shell, [keys[1]], keys[0], log=2)
    shell(events.Settle(reply.batch))
    assert _stage(shell, [keys[1]], keys[0], log=1).status.tolist() == [0]


def test_a_delete_waits_for_what_is_staged_below() -> None:
    """Goal: a delete is not refused for a child that nobody has seen. Method: a child is staged; a delete of the parent
    would better wait for its batch, and is ORDER when that is settled, DELETED when it was abandoned."""
    shell, keys = Shell(), chain(3)
    shell(events.Settle(_stage(shell, keys[:1]).batch))
    staged = _stage(shell, keys[1:2], keys[0])
    deeper = _stage(shell, keys[2:], keys[1])
    assert shell.core.durable.waits_delete(keys[0]) == staged.batch
    assert shell.core.durable.waits_delete(keys[1]) == staged.batch
    shell(events.Abandon(deeper.batch))
    shell(events.Abandon(staged.batch))
    assert not shell.core.durable.waits_delete(keys[0])
    assert shell(events.Delete(keys[0])).status.tolist() == [DeleteStatus.DELETED]
