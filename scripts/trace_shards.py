"""How evenly do the shards of a directory share the look-ups and blocks of real traces, and by how many messages?

    python scripts/trace_shards.py TRACE [TRACE ...] [--shards 4,16,64] [--fanout 1,2,4] [--json] [--quick]

Traces: those of docs/sharding.md, plain or .xz. The rule (`ucxkv.sharding`), walks and remembered heads are the
product's own code; the shards are modelled, nothing is evicted. Each request looks its chain up and then stores what
was missing. `memory`: none = a client forgets everything between look-ups; heads = 16 clients, each with its own
memory of heads, cold at the start (sessions stay with a client, else requests go in turns). Loads are over the whole
trace, the busiest shard over the mean; busiest node: of look-up messages, with the shards levelled over 4 nodes. The
floor is S x the share of the heaviest set of blocks that the rule keeps together. Keys are drawn anew for each of
--draws runs; the median run is printed, and the worst one's loads.

Bound: with S shards and n chains of equal weight the busiest of S has about 1 + sqrt(2 S ln(S) / n) times the mean.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from benchlib import main
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from traces import Pieces, fold

import ucxkv
from ucxkv.cli.measure import Conditions
from ucxkv.heads import Heads
from ucxkv.ids import NodeId
from ucxkv.keys import KeyArray
from ucxkv.placement import Members
from ucxkv.sharding import ShardRule, levelled
from ucxkv.simulation.traces import Ids, Trace, read_trace
from ucxkv.walk import Answer, Ask, Walk

CLIENTS, NODES = 16, 4
TARGETS = {"agentic": 3.0, "lmcache": 3.0}
TARGET, TARGET_MESSAGES = 1.6, 2
Row = dict[str, Any]


def keys_of(ids: Ids, draw: int) -> KeyArray:
    """The keys of block ids in one draw; the rule mixes all bits of a key, so a counter is as good as a hash."""
    words = np.empty((len(ids), 2), "<u8")
    words[:, 0], words[:, 1] = ids, 0x5851F42D4C957F2D + draw
    return words.view(np.uint8)


@dataclass
class Replay:
    """One trace over one rule. A piece's key is its first block's; it lies in one shard as a whole."""

    pieces: Pieces
    keys: KeyArray
    rule: ShardRule
    memory: bool
    messages: list[int] = field(default_factory=list)
    pins: int = 0

    def __post_init__(self) -> None:
        n, shards = len(self.pieces.blocks), self.rule.shards
        self.own: list[int] = self.rule.own_many(self.keys).tolist()
        self.cuts: list[bool] = self.rule.cuts(self.keys).tolist()
        self.home = [-1] * n
        self.local: list[list[int]] = [[] for _ in range(n)]
        self.delegates = [False] * n
        self.chain = list(range(n))  # the first piece of those that lie together
        self.pinned: set[tuple[int, int]] = set()
        self.asked, self.stored = [0] * shards, [0] * shards
        self.asked_of: Counter[int] = Counter()
        self.clients = [Heads() for _ in range(CLIENTS)]
        self.bytes = [key.tobytes() for key in self.keys]
        self.number = {key: piece for piece, key in enumerate(self.bytes)}

    def run(self) -> None:
        """Every request: look up, then store."""
        for turn, (path, known, session) in enumerate(self.pieces.paths):
            heads = self.clients[(turn if session < 0 else session) % CLIENTS] if self.memory else None
            self._look_up(path, known, heads)
            for piece in path[known:]:
                self._store(piece)

    def _look_up(self, path: list[int], known: int, heads: Heads | None) -> None:
        keys = self.keys[path]
        walk = Walk(keys, self.rule, head=heads.find(keys) if heads is not None else None)
        while (ask := walk.ask()) is not None:
            self.asked[ask.shard] += 1
            walk.answer(self._answer(ask, path))
        assert walk.visible == known, "a walk that finds something else than is there"
        messages = walk.messages
        for key, shard in heads.learn(keys, walk) if heads is not None else []:
            piece = self.number[key]
            heads.complete(key, (1, piece), [self.bytes[child] for child in self.local[piece]])  # type: ignore[union-attr]
            self.asked[shard] += 1
            messages += 1
        self.messages.append(messages)

    def _answer(self, ask: Ask, path: list[int]) -> Answer:
        home, shard, at = self.home, ask.shard, ask.first
        while at < ask.last and home[path[at]] == shard:
            at += 1
        visible = at - ask.first
        self.asked_of[self.chain[path[at - 1]] if visible else -1 - shard] += 1
        above = path[ask.first - 1] if ask.first else -1
        vouched = (1, above) if (shard, above) in self.pinned else None
        return Answer(visible, 1, visible > 0 and self.delegates[path[at - 1]], vouched)

    def _store(self, piece: int) -> None:
        above = self.pieces.parents[piece]
        shard = self.own[piece]
        if above >= 0 and not self.cuts[piece]:
            is_delegating = self.rule.delegates(len(self.local[above]), self.delegates[above])
            shard = shard if is_delegating else self.home[above]
        self.home[piece] = shard
        self.stored[shard] += self.pieces.blocks[piece]
        if above >= 0 and shard == self.home[above]:
            self.local[above].append(piece)
            self.chain[piece] = self.chain[above]
        elif above >= 0:
            self.delegates[above] = True
            self.pinned.add((shard, above))
            self.pins += 1

    def result(self) -> Row:
        """The figures of this run."""
        shards, every = self.rule.shards, np.array(self.messages)
        pieces: Counter[int] = Counter()
        for piece, blocks in enumerate(self.pieces.blocks):
            pieces[self.chain[piece]] += blocks
        asked = [count for chain, count in self.asked_of.items() if chain >= 0]
        where = levelled([None] * shards, Members([NodeId(f"node-{number}") for number in range(NODES)]))
        on_node: Counter[str] = Counter()
        for shard, node in enumerate(where):
            on_node[node] += self.asked[shard]
        return {
            "busiest_messages": max(self.asked) * shards / sum(self.asked),
            "busiest_blocks": max(self.stored) * shards / sum(self.stored),
            "floor_messages": max(1.0, shards * max(asked) / sum(self.asked)),
            "floor_blocks": max(1.0, shards * max(pieces.values()) / sum(self.stored)),
            "busiest_node": max(on_node.values()) * NODES / sum(self.asked),
            "messages_p50": float(np.median(every)),
            "messages_p95": float(np.percentile(every, 95)),
            "messages_mean": float(every.mean()),
            "pins_per_1000_blocks": 1000 * self.pins / sum(self.stored),
            "delegating": sum(self.delegates),
        }


def measure(trace: Trace, rule: ShardRule, folded: list[tuple[Pieces, KeyArray]], memory: bool) -> Row:
    """The median of the draws, and the worst loads."""
    runs = []
    for pieces, keys in folded:
        replay = Replay(pieces, keys, rule, memory)
        replay.run()
        runs.append(replay.result())
    found: Row = {"trace": trace.name, "shards": rule.shards, "fanout": rule.fanout, "cut_blocks": rule.cut_blocks}
    found["memory"] = "heads" if memory else "none"
    for name in runs[0]:
        found[name] = round(float(np.median([run[name] for run in runs])), 2)
    for name in ("busiest_messages", "busiest_blocks"):
        found[f"worst_{name}"] = round(max(run[name] for run in runs), 2)
    target = next((most for start, most in TARGETS.items() if trace.name.startswith(start)), TARGET)
    busiest = max(found["busiest_messages"], found["busiest_blocks"])
    found["target"] = target
    found["met"] = bool(busiest <= target and found["messages_p50"] <= TARGET_MESSAGES)
    return found


def numbers(text: str) -> list[int]:
    """A list of numbers from the command line."""
    return [int(one) for one in text.split(",")]


def show(rows: list[Row], conditions: Row) -> None:
    """A table for people."""
    table = Table(title=f"shards over traces (ucxkv {ucxkv.__version__})", box=box.SIMPLE_HEAD, padding=(0, 1))
    names = [name for name in rows[0] if name not in ("bench", "target")]
    for name in names:
        table.add_column(name.replace("_", " "), justify="left" if name in ("trace", "memory") else "right")
    for found in rows:
        table.add_row(*[("yes" if value else "no") if value in (True, False) and name == "met" else str(value)
                        for name, value in ((name, found[name]) for name in names)])  # fmt: skip
    console = Console()
    (console if console.is_terminal else Console(width=200)).print(table)
    console.print(", ".join(f"{name} {value}" for name, value in conditions.items()), style="dim", highlight=False)


def run() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("traces", nargs="+", type=Path, help="trace files")
    options.add_argument("--shards", type=numbers, default=[4, 16, 64], help="numbers of shards (default 4,16,64)")
    options.add_argument("--fanout", type=numbers, default=[1, 2, 4], help="fan-outs (default 1,2,4)")
    options.add_argument("--cut-tokens", type=int, default=65_536, help="mean tokens between cuts (default 65536)")
    options.add_argument("--draws", type=int, default=3, help="runs with keys of their own (default 3)")
    options.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    options.add_argument("--quick", action="store_true", help="one draw, every eighth session")
    arguments = options.parse_args()
    draws, every = (1, 8) if arguments.quick else (arguments.draws, 1)
    conditions = Conditions()
    start, rows = time.monotonic(), []
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        bar = progress.add_task("", total=len(arguments.traces) * len(arguments.shards) * len(arguments.fanout) * 2)
        for path in arguments.traces:
            progress.update(bar, description=f"reading {path.name}")
            trace = read_trace(path, every=every)
            cut_blocks = max(1, arguments.cut_tokens // trace.block_tokens)
            folded = [fold_draw(trace, ShardRule(cut_blocks=cut_blocks), draw) for draw in range(draws)]
            for memory in (False, True):
                for fanout in arguments.fanout:
                    for shards in arguments.shards:
                        progress.update(bar, description=f"{trace.name}, {shards} shards, fan-out {fanout}")
                        rule = ShardRule(shards=shards, fanout=fanout, cut_blocks=cut_blocks)
                        rows.append({"bench": "trace_shards", **measure(trace, rule, folded, memory)})
                        progress.advance(bar)
    facts = conditions.report(draws=draws, clients=CLIENTS, every=every, seconds=round(time.monotonic() - start, 1))
    if arguments.json:
        import json

        for found in rows:
            print(json.dumps({**found, "version": ucxkv.__version__, "conditions": facts}), flush=True)
    else:
        show(rows, facts)
    return 0


def fold_draw(trace: Trace, rule: ShardRule, draw: int) -> tuple[Pieces, KeyArray]:
    """The trace in pieces under one draw's keys, and the pieces' keys."""

    def is_cut(ids: Ids) -> npt.NDArray[np.bool_]:
        return rule.cuts(keys_of(ids, draw))

    pieces = fold(trace, is_cut)
    return pieces, keys_of(pieces.firsts, draw)


if __name__ == "__main__":
    main(run)
