"""The checks of a fault run, on recorded histories: clean ones pass, each planted fault is found."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.chains import BLOCKS_MAX, Chain, content_of, keys_of, value_of
from tests.cluster.judging import AUDITOR, Findings, failovers, judge
from tests.cluster.record import ABSENT, UNTOLD, WRONG, Log, Recorded
from ucxkv.sharding import ShardRule

KEPT = Chain.of("t.one", 3, is_durable=True)
CACHED = Chain.of("t.two", 5, is_durable=False)


class Script:
    """Calls one after the other, logged as clients do."""

    def __init__(self, folder: Path, chain: Chain = KEPT) -> None:
        self._folder = folder
        self.chain = chain
        self.log = Log(folder / f"{chain.name}.ops")

    def do(self, name: str, argument: Any, result: Any, who: str = "w1") -> None:
        """One call of one operation, and its answer."""
        self.log.told(self.log.call(who, self.chain.name, [(name, argument)]), [result])

    def put(self, *contents: str, result: str | None = "stored") -> None:
        """A chain from its root on, in one call."""
        number = self.log.call("w1", self.chain.name, [("put", pair) for pair in enumerate(contents)])
        self.log.told(number, [result] * len(contents))

    def read(self, *contents: str) -> None:
        """The last reading: these, and nothing behind."""
        found = [*contents, *[ABSENT] * (BLOCKS_MAX - len(contents))]
        number = self.log.call(AUDITOR, self.chain.name, [("get", at) for at in range(BLOCKS_MAX)])
        self.log.told(number, found)

    def judge(self) -> Findings:
        """What is wrong with it."""
        recorded = Recorded(self._folder)
        recorded.read()
        return judge(recorded.chains)


def kinds(found: Findings) -> dict[str, int]:
    return dict(found.counts)


def test_a_clean_history_has_no_findings(tmp_path: Path) -> None:
    """Goal: no false alarm. Method: puts, a delete, reads by several; counts of what was acknowledged."""
    script = Script(tmp_path)
    script.put("a", "b", "c")
    script.put("d", "e", result="already")
    script.do("put", (5, "f"), "order")
    script.do("match", BLOCKS_MAX, 3)
    script.do("get", 1, "b", who="w2")
    script.do("get", 3, ABSENT)
    script.do("delete", 0, "kept")
    script.do("delete", 2, "deleted")
    script.do("delete", 2, "absent")
    script.do("match", 1, 1)
    script.read("a", "b")
    found = script.judge()
    assert kinds(found) == {} and found.acknowledged == 3 and found.unknown == 0


def test_a_lost_put_is_found(tmp_path: Path) -> None:
    """Method: acknowledged, never deleted, absent at the end; the block above it is vouched for by its child."""
    script = Script(tmp_path)
    script.put("a", "b")
    script.read("a")
    assert kinds(script.judge()) == {"lost": 1, "order": 1}
    (tmp_path / "more").mkdir()
    other = Script(tmp_path / "more")
    other.put("a", result=UNTOLD)
    other.do("put", (1, "b"), "stored")
    other.read()
    assert kinds(other.judge()) == {"lost": 2, "order": 1}


def test_a_put_that_may_have_been_deleted_is_not_called_lost(tmp_path: Path) -> None:
    """Method: a delete of unknown outcome, called after the put; the same before the put's call was over explains
    nothing."""
    script = Script(tmp_path)
    script.put("a")
    script.do("delete", 0, UNTOLD)
    script.read()
    assert kinds(script.judge()) == {}
    (tmp_path / "more").mkdir()
    other = Script(tmp_path / "more")
    other.put("a")
    other.do("delete", 0, "deleted")
    other.put("b")
    other.read()
    assert kinds(other.judge()) == {"lost": 1, "order": 1}


def test_a_hole_is_found(tmp_path: Path) -> None:
    """Method: the last reading shows block 1 and not block 0; of a cache chain, one read after the other."""
    script = Script(tmp_path)
    script.put("a", "b")
    script.read(ABSENT, "b")
    assert kinds(script.judge()) == {"lost": 1, "hole": 1, "order": 1}
    (tmp_path / "more").mkdir()
    other = Script(tmp_path / "more", CACHED)
    other.put("a", "b")
    other.do("get", 0, ABSENT)
    other.do("get", 1, "b")
    assert kinds(other.judge()) == {"order": 1}


def test_stale_reads_are_found(tmp_path: Path) -> None:
    """Method: the content of before a delete, after the next put; a match of what is deleted; a miss of what is there,
    each by another client, between calls that were answered."""
    for at, (name, argument, result) in enumerate((("get", 0, "a"), ("match", BLOCKS_MAX, 2), ("get", 0, ABSENT))):
        folder = tmp_path / str(at)
        folder.mkdir()
        script = Script(folder)
        script.put("a", "b")
        script.do("delete", 1, "deleted")
        script.do("delete", 0, "deleted")
        script.do("put", (0, "c"), "stored")
        script.do(name, argument, result, who="w2")
        script.read("c")
        assert kinds(script.judge()) == {"order": 1}, name


def test_a_deleted_block_that_is_back_is_found(tmp_path: Path) -> None:
    """Method: deleted by answer, and read at the end; a put of unknown outcome explains it."""
    script = Script(tmp_path)
    script.put("a")
    script.do("delete", 0, "deleted")
    script.read("a")
    assert kinds(script.judge()) == {"back": 1, "order": 1}
    (tmp_path / "more").mkdir()
    other = Script(tmp_path / "more")
    other.put("a", result=UNTOLD)
    other.do("get", 0, ABSENT)
    other.read("a")
    assert kinds(other.judge()) == {}


def test_what_was_seen_of_an_unknown_put_stays(tmp_path: Path) -> None:
    """Goal: an unknown outcome is not a licence. Method: seen once, gone later without a delete."""
    script = Script(tmp_path)
    script.put("a", result=UNTOLD)
    script.do("get", 0, "a")
    script.read()
    assert kinds(script.judge()) == {"order": 1}


def test_a_cache_chain_may_lose_its_tail_and_gets_nothing_back(tmp_path: Path) -> None:
    """Method: shorter and shorter is right; then longer again is not."""
    script = Script(tmp_path, CACHED)
    script.put("a", "b", "c")
    script.do("match", BLOCKS_MAX, 2)
    script.do("get", 1, ABSENT)
    script.do("get", 0, "a")
    script.read("a")
    assert kinds(script.judge()) == {}
    script.do("get", 1, "b")
    assert kinds(script.judge()) == {"order": 1}


def test_wrong_bytes_are_found(tmp_path: Path) -> None:
    """Method: every byte of a value changed in turn, cut, another block's; and a history that has seen such bytes."""
    value = value_of(KEPT, 1, "w1.0-7")
    assert content_of(KEPT, 1, value) == "w1.0-7"
    for at in range(len(value)):
        bad = bytearray(value)
        bad[at] ^= 1
        assert content_of(KEPT, 1, bytes(bad)) is None, at
    assert content_of(KEPT, 1, value[:-1]) is None or len(value) == 7
    assert content_of(KEPT, 1, b"") is None
    longer = next(f"w1.0-{i}" for i in range(99) if len(value_of(KEPT, 1, f"w1.0-{i}")) > 100)
    assert content_of(KEPT, 2, value_of(KEPT, 1, longer)) is None
    assert content_of(CACHED, 1, value_of(KEPT, 1, longer)) is None
    script = Script(tmp_path)
    script.put("a")
    script.do("get", 0, f"{WRONG}12 bytes")
    script.read("a")
    assert kinds(script.judge()) == {"wrong": 1, "order": 1}


def test_what_was_not_read_in_the_end_is_said(tmp_path: Path) -> None:
    """Method: an acknowledged chain that the last reading has no answer for."""
    script = Script(tmp_path)
    script.put("a")
    assert kinds(script.judge()) == {"unread": 1}


def test_withdrawn_and_half_written_lines_are_no_part_of_the_history(tmp_path: Path) -> None:
    """Method: a batch of which one block was refused; a call whose answer was never written; half a line, whose other
    half comes later."""
    script = Script(tmp_path)
    number = script.log.call("w1", KEPT.name, [("put", (0, "a")), ("put", (1, "b")), ("get", 0)])
    script.log.told(number, ["stored", None, None])
    script.log.call("w1", KEPT.name, [("put", (1, "c"))])
    recorded = Recorded(tmp_path)
    recorded.read()
    assert [str(one.result) for one in recorded.chains[KEPT.name]] == ["stored", "?"]
    path = tmp_path / f"{KEPT.name}.ops"
    with path.open("a") as file:
        file.write('{"call": 2, "ns": 1, ')
    recorded.read()
    assert recorded.unknown == 1
    with path.open("a") as file:
        file.write('"told": ["stored"]}\n')
    recorded.read()
    assert recorded.unknown == 0 and recorded.count == 2


def test_times_to_serve_again_are_counted_from_each_death() -> None:
    """Method: two shards, puts before, during and after; a shard that nobody put to is left out."""
    from tests.sim.history import Operation

    def put(shard: int, called: int, returned: int | None, result: Any = "stored") -> Operation:
        name = Chain.of("x", shard, is_durable=True).name
        return Operation("w", name, "put", (0, "a"), called, called, returned, returned, result)

    second = 10**9
    puts = [
        put(1, 0, second),
        put(1, 2 * second, 5 * second),
        put(1, 6 * second, 7 * second),
        put(2, second, None, "?"),
    ]
    chains: dict[str, list[Operation]] = {}
    for one in puts:
        chains.setdefault(one.chain, []).append(one)
    assert failovers(chains, [(second, [1, 2]), (3 * second, [1])]) == [4.0, 4.0]


def test_roots_are_in_their_shards() -> None:
    """Goal: load on every shard. Method: keys of many chains against the rule; all differ."""
    rule = ShardRule(shards=8)
    chains = [Chain.of(f"go.{at}", at % 8, is_durable=bool(at % 2)) for at in range(64)]
    for chain in chains:
        assert rule.own(keys_of(chain, 8)[0]) == chain.shard
        assert len(keys_of(chain, 8)) == BLOCKS_MAX
    assert len({key for chain in chains for key in keys_of(chain, 8)}) == 64 * BLOCKS_MAX


def test_many_unknown_outcomes_are_decided(tmp_path: Path) -> None:
    """Goal: no history of a real run is too hard to search. Method: thirty unknown puts and deletes of five blocks
    while nobody answers, then answers that leave all of them undecided, then one that cannot be."""
    for at, chain in enumerate((KEPT, CACHED)):
        folder = tmp_path / str(at)
        folder.mkdir()
        script = Script(folder, chain)
        for i in range(30):
            script.put(*(f"{i}.{block}" for block in range(1 + i % 5)), result=UNTOLD)
            script.do("delete", i % 5, UNTOLD)
        script.put("a", "b", "c")
        script.do("put", (4, "x"), "order")
        number = script.log.call("w2", chain.name, [("delete", block) for block in range(3)])
        script.log.told(number, ["deleted"] * 3)
        script.do("match", BLOCKS_MAX, 0)
        script.put("d")
        script.read("d")
        assert kinds(script.judge()) == {}
        script.do("get", 0, "e")
        assert script.judge().counts == {"order": 1}


class Store:
    """A right answer to everything: a plain object, for random histories."""

    def __init__(self, rng: random.Random) -> None:
        self.blocks: list[str] = []
        self._rng = rng
        self._made = 0

    def act(self) -> tuple[str, Any, Any]:
        """One operation with its answer."""
        kind = self._rng.choice(("put", "put", "delete", "match", "get"))
        at = self._rng.randrange(min(len(self.blocks) + 2, BLOCKS_MAX))
        if kind == "put":
            self._made += 1
            content = f"c{self._made}"
            if at < len(self.blocks):
                return "put", (at, content), "already"
            if at > len(self.blocks):
                return "put", (at, content), "order"
            self.blocks.append(content)
            return "put", (at, content), "stored"
        if kind == "delete":
            if at >= len(self.blocks):
                return "delete", at, "absent"
            if at < len(self.blocks) - 1:
                return "delete", at, "kept"
            self.blocks.pop()
            return "delete", at, "deleted"
        if kind == "match":
            return "match", BLOCKS_MAX, len(self.blocks)
        return "get", at, self.blocks[at] if at < len(self.blocks) else ABSENT


@pytest.mark.parametrize("seed", range(40))
def test_a_wrong_answer_in_a_random_history_is_found(seed: int, tmp_path: Path) -> None:
    """Goal: neither false alarms nor blindness. Method: random calls on a plain object, some of which are told nothing
    (and have happened or not): no findings; then one answer of the last reading is changed: found."""
    rng = random.Random(seed)
    store, script = Store(rng), Script(tmp_path)
    for _ in range(120):
        before = list(store.blocks)
        name, argument, result = store.act()
        if rng.random() < 0.06 and name in ("put", "delete"):
            if rng.random() < 0.5:
                store.blocks = before
            result = UNTOLD
        script.do(name, argument, result, who=f"w{rng.randrange(3)}")
    truth: Sequence[str] = list(store.blocks)
    script.read(*truth)
    assert kinds(script.judge()) == {}
    script.do("match", BLOCKS_MAX, len(truth) + 1 if len(truth) < BLOCKS_MAX else 0)
    script.do("match", BLOCKS_MAX, len(truth))
    script.do("get", 0, "c0")
    assert script.judge().counts["order"] == 1
