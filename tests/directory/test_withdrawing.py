"""Giving up a shard's blocks and taking them back, and finding roots, promise by promise; the state machine beside this
file covers their interplay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.directory.arena import chain, key_of
from tests.directory.shell import SECOND, Shell
from ucxkv.directory import ROOT_KEY, PutStatus, events
from ucxkv.directory.events import Roots
from ucxkv.directory.roots import _REMEMBERED_MAX


def below(*keys: bytes) -> Roots:
    """These roots."""
    return lambda roots: np.array([root.tobytes() in keys for root in roots], np.bool_)


def _durable(shell: Shell, keys: list[bytes], parent: bytes = ROOT_KEY, log: int = 0) -> None:
    parents = b"".join([parent, *keys[:-1]])
    reply = shell(events.StagePut(b"".join(keys), parents, *shell.columns(len(keys)), log=log))
    assert shell(events.Settle(reply.batch)).status.tolist() == [0] * len(keys)


def _names(rows: Any) -> list[bytes]:
    return [row["key"].tobytes() for row in rows]


def test_a_shard_goes_with_all_its_kinds_and_no_other_goes() -> None:
    """Goal: what is withdrawn is the shard, and each extent is in one hand after it. Method: a durable chain with
    cached blocks and one in parts below it; one being written below, and one that is a root; another shard beside."""
    shell, keys, others = Shell(), chain(9), chain(3, b"other")
    _durable(shell, keys[:3])
    shell.put(keys[3:5], keys[2])
    for part in range(2):
        shell.part([keys[5]], part, 2, parents=[keys[0]])
    shell.part([keys[6]], 0, 2, parents=[keys[5]])
    shell.part([keys[7]], 0, 2)
    _durable(shell, others[:2], log=1)
    shell.part([others[2]], 0, 2)
    extents = [shell.core.words.extent(int(shell.core.table.find(key)[0])) for key in keys[:6]]
    reply = shell(events.Withdraw(below(keys[0], keys[7]), keep={keys[4], others[1], key_of(77)}))
    assert (reply.blocks, reply.bytes, reply.busy_until_ns) == (6, 700, shell.now)
    assert _names(reply.rows) == keys[:3] and reply.rows["parent"].tobytes() == b"".join([ROOT_KEY, *keys[:2]])
    assert [(row["region"], row["offset"], row["length"]) for row in reply.rows] == extents[:3]
    assert shell.visible([*keys, *others]) == [0] * 9 + [1, 1, 0]
    assert extents[3] in shell.freed and not {*extents[:3], extents[4]} & {*shell.freed}
    assert len(shell.freed) == len(set(shell.freed)) == 5, "one cached block, two parts, two that were being written"
    stats = shell.core.stats()
    assert (stats.blocks, stats.durable_blocks, stats.durable_bytes, stats.writing) == (2, 2, 200, 1)
    assert (stats.withdrawn_total, stats.leaves) == (6, 0)
    again = shell(events.Withdraw(below(keys[0], keys[7])))
    assert (again.blocks, len(again.rows)) == (0, 0)

    assert shell(events.Restore(reply.rows, np.zeros(3, np.uint8))).status.tolist() == [0, 0, 0]
    assert _names(shell.core.durable_rows(below(keys[0]))) == keys[:3]
    assert _names(shell.core.durable_rows(below(others[0]))) == others[:2]
    assert _names(shell.core.durable_rows()) == others[:2] + keys[:3]


def test_a_block_in_parts_is_kept_whole() -> None:
    """Goal: `keep` means a block. Method: one in three parts, kept; one in two, not kept."""
    shell, keys = Shell(), chain(2)
    for part in range(3):
        shell.part(keys[:1], part, 3)
    for part in range(2):
        shell.part(keys[1:], part, 2)
    assert shell(events.Withdraw(below(*keys), keep=[keys[0]])).bytes == 500
    assert [offset for _, offset, _ in shell.freed] == [300, 400]


def test_what_is_staged_stops_it() -> None:
    """Goal: no batch is left that hangs on blocks which are gone. Method: a staged root, a staged child, an upgrade and
    a delete, each alone: refused, and nothing changed; after abandoning, it goes."""
    keys = chain(3)

    def stage(shell: Shell, key: bytes, parent: bytes) -> Any:
        return shell(events.StagePut(key, parent, *shell.columns(1)))

    for what in range(4):
        shell = Shell()
        if what:
            _durable(shell, keys[:1])
            shell.put([keys[1]], keys[0])
        if what == 3:
            reply = shell(events.Delete(keys[1] + keys[0]))
        else:
            reply = stage(shell, *[(keys[0], ROOT_KEY), (keys[2], keys[0]), (keys[1], keys[0])][what])
        before = shell.visible(keys), shell.core.stats()
        with pytest.raises(ValueError, match="staged"):
            shell(events.Withdraw(below(keys[0])))
        assert (shell.visible(keys), shell.core.stats()) == before
        assert shell(events.Withdraw(below(key_of(5)))).blocks == 0, "another shard's is no reason"
        shell(events.Abandon(reply.batch))
        assert shell(events.Withdraw(below(keys[0]))).blocks == (2 if what else 0)


def test_leases_keep_memory_in_place_in_whosever_hands_it_is() -> None:
    """Goal: I5 over a change of leaders. Method: leases on a durable block, on a cached one and on another shard's; the
    first can't be renewed, the caller is told its end; the block comes back and is deleted at once: it is free after
    that end and the grace, an unleased one beside it after the grace, and a lease that ends itself frees nothing."""
    shell, keys, other = Shell(grace_ns=10), chain(3), key_of(50)
    _durable(shell, keys[:2])
    shell.put([keys[2]], keys[1])
    shell.put([other])
    durable = shell(events.Lease(keys[1], 5 * SECOND, 1))
    cached = shell(events.Lease(keys[2], 2 * SECOND, 1))
    elsewhere = shell(events.Lease(other, 9 * SECOND, 1))
    reply = shell(events.Withdraw(below(keys[0])))
    assert reply.busy_until_ns == durable.end_ns and _names(reply.rows) == keys[:2]
    assert not shell(events.Renew(durable.lease, 90 * SECOND)).ok
    assert shell(events.Renew(cached.lease, 3 * SECOND)).ok and shell(events.Renew(elsewhere.lease, SECOND)).ok
    shell(events.Restore(reply.rows, np.zeros(2, np.uint8)))
    second = shell(events.Withdraw(below(keys[0])))
    assert second.busy_until_ns == durable.end_ns, "it still runs"
    shell(events.Restore(second.rows, np.zeros(2, np.uint8)))
    shell(events.Settle(shell(events.Delete(keys[0] + keys[1])).batch))
    shell(events.Tick(), after=11)
    assert [offset for _, offset, _ in shell.freed] == [0]
    shell(events.Tick(), after=3 * SECOND)
    assert [offset for _, offset, _ in shell.freed] == [0, 200]
    shell(events.Release(durable.lease))
    shell(events.Tick(), after=durable.end_ns + 9 - shell.now)
    assert [offset for _, offset, _ in shell.freed] == [0, 200]
    shell(events.Tick(), after=1)
    assert [offset for _, offset, _ in shell.freed] == [0, 200, 100]
    late = shell(events.Withdraw(below(other)))
    assert late.busy_until_ns == shell.now, "what is freed is not the caller's to wait for"


def test_a_predicate_that_is_none_is_refused() -> None:
    """Goal: a mask of the wrong shape or type withdraws nothing. Method: both."""
    shell = Shell()
    shell.put(chain(1))
    for roots in (lambda keys: np.ones(len(keys) + 1, np.bool_), lambda keys: np.ones(len(keys), np.uint8)):
        with pytest.raises(ValueError, match="of 1 roots"):
            shell(events.Withdraw(roots))
    assert shell.core.stats().blocks == 1


def test_many_chains_of_many_shards_go_one_shard_at_a_time() -> None:
    """Goal: the same at size. Method: 160 chains of 1 to 40 blocks, forked, half of them durable, in 8 shards by their
    roots' first byte; each shard is withdrawn, then all are restored, and then all are there again."""
    shell, shards = Shell(1 << 14), dict[int, list[bytes]]()
    for number in range(160):
        keys = chain(1 + number % 40, number.to_bytes(4, "little"))
        mine = keys[: len(keys) // 2] if number % 2 else keys
        fork = chain(3, b"fork" + number.to_bytes(4, "little"))
        parents = b"".join([ROOT_KEY, *mine[:-1]])
        if mine:
            reply = shell.core.handle(
                events.StagePut(b"".join(mine), parents, *shell.columns(len(mine)), log=keys[0][0] % 8), shell.now
            ).reply
            shell.core.handle(events.Settle(reply.batch), shell.now)
        rest = [*mine[-1:], *keys[len(mine) :], *fork]
        at = len(mine[-1:])
        above = b"".join([mine[-1] if mine else ROOT_KEY, *rest[at:-1]])
        columns = shell.columns(len(rest) - at)
        assert not shell.core.handle(events.Put(b"".join(rest[at:]), above, *columns), shell.now).reply.status.any()
        shards.setdefault(keys[0][0] % 8, []).extend([*keys, *fork])
        for key in (keys[-1], fork[-1]):
            assert shell.core.root_of(key) == keys[0]
    durable, total = shell.core.stats().durable_blocks, shell.core.stats().blocks
    held: list[Any] = []
    for shard, keys in sorted(shards.items()):
        rows = shell.core.durable_rows(lambda roots, shard=shard: roots[:, 0] % 8 == shard)
        reply = shell(events.Withdraw(lambda roots, shard=shard: roots[:, 0] % 8 == shard))
        assert reply.blocks == len(keys) and not any(shell.visible(keys))
        assert np.array_equal(reply.rows, rows)
        total -= len(keys)
        assert shell.core.stats().blocks == total
        held.append(reply.rows)
    assert total == 0 and sum(map(len, held)) == durable
    for rows in held[::-1]:
        assert not shell(events.Restore(rows, np.zeros(len(rows), np.uint8))).status.any()
    assert shell.core.stats().durable_blocks == shell.core.stats().blocks == durable


def test_the_root_of_a_block_is_found_on_all_its_ways() -> None:
    """Goal: `root_of` for all that a shell may ask. Method: visible, part of a block, staged, below staged, being
    written, below that, doomed, gone, unknown."""
    shell, keys = Shell(), chain(10)
    _durable(shell, keys[:2])
    shell.put([keys[2]], keys[1])
    first = shell(events.StagePut(keys[3] + keys[4], keys[1] + keys[3], *shell.columns(2)))
    shell(events.StagePut(keys[9], ROOT_KEY, *shell.columns(1)))
    shell.part([keys[5], keys[6]], 0, 2, parents=[keys[2], keys[5]])
    for part in range(2):
        shell.part([keys[7]], part, 2)
    root_of = shell.core.root_of
    for _ in range(2):
        assert [root_of(key) for key in keys] == [keys[0]] * 7 + [keys[7], None, keys[9]]
        assert root_of(ROOT_KEY) is None and root_of(key_of(99)) is None
    derived = shell.core.whole(int(shell.core.table.find(keys[7])[0]))[1][1]
    assert root_of(shell.core.words.key(derived)) is None
    shell(events.Settle(first.batch))
    assert root_of(keys[4]) == keys[0]
    late = shell(events.StagePut(keys[8], keys[4], *shell.columns(1)))
    assert root_of(keys[8]) == keys[0]
    shell(events.Drop(keys[3]))
    assert [root_of(keys[number]) for number in (2, 3, 4, 8)] == [keys[0], None, None, None]
    assert late.status.tolist() == [PutStatus.STORED], "doomed, and not yet settled"


def test_a_slot_that_is_used_again_has_its_new_root() -> None:
    """Goal: what is remembered can't lie. Method: a chain whose roots are asked for, withdrawn; others in its slots."""
    shell, keys, others = Shell(16), chain(16), chain(16, b"other")
    shell.put(keys)
    assert {shell.core.root_of(key) for key in keys} == {keys[0]}
    shell(events.Withdraw(below(keys[0])))
    assert {shell.core.root_of(key) for key in keys} == {None}
    shell.put(others[:8])
    shell.put(others[8:])
    assert [shell.core.root_of(key) for key in others] == [others[0]] * 8 + [others[8]] * 8


def test_extending_a_chain_costs_a_step_a_block() -> None:
    """Goal: O(1) a put, in bounded memory. Method: a chain of 5,000 in puts of one, asked for its parent each; the
    slots looked at are counted. Then chains of one walk each, more of them than are remembered."""
    shell = Shell(1 << 16)
    core, keys, looked = shell.core, chain(20_000), 0
    words = core.roots._directory.words

    class Counting:
        def __getattr__(self, name: str) -> Any:
            nonlocal looked
            looked += name == "generation"
            return getattr(words, name)

    core.words = Counting()  # type: ignore[assignment]
    for above, key in zip([ROOT_KEY, *keys[:-1]], keys, strict=True):
        if above != ROOT_KEY:
            assert core.root_of(above) == keys[0]
        core.handle(events.Put(key, above, *shell.columns(1)), shell.now)
    core.words = words
    assert looked < 4 * len(keys)
    heads, tails = chain(20_000, b"head"), chain(20_000, b"tail")
    columns = shell.columns(40_000)
    core.handle(events.Put(b"".join([*heads, *tails]), ROOT_KEY * 20_000 + b"".join(heads), *columns), shell.now)
    assert [core.root_of(tail) for tail in tails] == heads
    assert len(core.roots._remembered) == _REMEMBERED_MAX
    core.roots.check()
