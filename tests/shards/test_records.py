"""Records of a node's journal of many shards: bytes, and what a sequence of them comes to."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.shards.rows import KEYS, commits_of, distinct_blocks, leaves_of, members, rows_of
from ucxkv.directory.log import LogError
from ucxkv.node.shards.records import (
    LoggedEntry,
    ShardLog,
    base_records,
    claims_record,
    entry_record,
    feed,
    placeless,
    reset_record,
)
from ucxkv.replication import Kind, Member

SHARDS = st.integers(0, 2)


def entries(index: int, epoch: int) -> st.SearchStrategy[LoggedEntry]:
    return st.one_of(
        st.just(LoggedEntry(index, epoch, Kind.EPOCH)),
        distinct_blocks.map(lambda some: commits_of(index, epoch, *some)),
        st.lists(st.integers(0, 5), max_size=3).map(lambda keys: leaves_of(index, epoch, *keys)),
    )


def same(a: LoggedEntry, b: LoggedEntry) -> bool:
    rows = (a.rows is None or not len(a.rows), b.rows is None or not len(b.rows))
    is_alike = all(rows) or (not any(rows) and a.rows.tobytes() == b.rows.tobytes())  # type: ignore[union-attr]
    return (a.index, a.epoch, a.kind, a.keys) == (b.index, b.epoch, b.kind, b.keys) and is_alike


@dataclass
class Model:
    """One shard, as the table in `records` says it."""

    claims: frozenset[Member] = frozenset()
    base: tuple[int, int] = (0, 0)
    rows: bytes = b""
    entries: list[LoggedEntry] = field(default_factory=list)


def agree(log: ShardLog, model: Model) -> None:
    assert (log.claims, (log.base_index, log.base_epoch)) == (model.claims, model.base)
    assert log.rows().tobytes() == model.rows
    assert len(log.entries) == len(model.entries)
    assert all(map(same, log.entries, model.entries))


@given(data=st.data())
def test_every_prefix_of_a_journal_is_what_the_model_says(data: st.DataObject) -> None:
    """Goal: claims, resets with their rows, entries and replaced tails, of three shards. Method: generated sequences;
    the state is compared after each record, so every prefix is."""
    shards: dict[int, ShardLog] = {}
    models: dict[int, Model] = {}
    for _ in range(data.draw(st.integers(1, 15))):
        number = data.draw(SHARDS)
        model = models.setdefault(number, Model())
        kind = data.draw(st.sampled_from(["claims", "reset", "base", "entry", "entry", "entry"]))
        if kind == "claims":
            model.claims = data.draw(members)
            records = [claims_record(number, model.claims)]
        elif kind == "reset":
            model = models[number] = Model(base=data.draw(st.tuples(st.integers(0, 9), st.integers(0, 3))))
            records = [reset_record(number, *model.base)]
        elif kind == "base":
            rows = rows_of(*data.draw(distinct_blocks))
            model.rows += rows.tobytes()
            records = list(base_records(number, rows))
        else:
            last = model.entries[-1].index if model.entries else model.base[0]
            entry = data.draw(entries(data.draw(st.integers(max(1, last - 2), last + 1)), data.draw(st.integers(1, 3))))
            records = [entry_record(number, entry)]
            if not (entry.index <= model.base[0] and entry.epoch <= model.base[1]):
                model.entries = [one for one in model.entries if one.index < entry.index] + [entry]
        for record in records:
            feed(shards, record)
        agree(shards.get(number, ShardLog()), model)
    for number, log in shards.items():
        agree(log, models[number])


@given(raw=st.binary(max_size=120), head=st.sampled_from([b"", b"\x21\x01", b"\x22\x01", b"\x23\x01", b"\x24\x01"]))
def test_garbage_is_refused_and_changes_nothing(raw: bytes, head: bytes) -> None:
    """Goal: LogError, never anything else. Method: random bytes, behind the beginning of a good head or none."""
    padded = head and head + b"\0\0" + bytes(4) + raw
    shards: dict[int, ShardLog] = {0: ShardLog(base=[rows_of((1, 5, 2))], entries=[commits_of(1, 1, (2, 7, 1))])}
    for record in (raw, padded):
        before = (set(shards), len(shards[0].base), len(shards[0].entries), shards[0].claims)
        try:
            feed(shards, record)
        except LogError:
            assert (set(shards), len(shards[0].base), len(shards[0].entries), shards[0].claims) == before


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_short_record_is_refused_or_a_shorter_one(cut: int) -> None:
    """Goal: no torn record passes for another. Method: an entry with rows, cut at its end, in a shard never named."""
    record = entry_record(5, commits_of(3, 1, (1, 4, 2)))
    shards: dict[int, ShardLog] = {}
    with pytest.raises(LogError):
        feed(shards, record[:-cut])
    assert not shards, "a record that was refused made a shard"


def test_what_is_replicated_has_no_places() -> None:
    """Goal: nodes put values where they like. Method: rows at two places come to one record; the rows stay as they
    are."""
    here, there = commits_of(3, 1, (1, 4, 2)), commits_of(3, 1, (1, 9, 2))
    assert here.entry == there.entry
    assert here.rows is not None and here.rows["offset"][0] == 4
    assert not placeless(here.rows)["offset"].any()
    assert leaves_of(3, 1, 2).entry.record.endswith(KEYS[2])
