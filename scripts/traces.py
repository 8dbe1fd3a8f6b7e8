"""Public KV-cache traces as chains of block ids: reading their formats, and folding a whole trace into pieces.

Formats, told apart by their first line, plain or xz: Mooncake (`hash_ids`, `input_length`), agentic coding sessions
(`trace` lines, then `runs`), LMCache agents (`hash_ids`, `chars`). An id names a block and all before it; partial
blocks at a request's end are left out, as ucxkv leaves them out. Agentic ids are local to a session there; sessions of
one model with heads of one length are taken to share them (the trace hides it; that length is the best guess there is).

A *piece* is a run of blocks that came together and that no chain leaves or ends inside, so a trace of 10^8 block
references is replayed as 10^6 references to pieces, with exactly the same outcome.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ucxkv.errors import UsageError

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Request:
    """One request. ids: its chain from the root on; session: a number, -1 where the trace names none."""

    ids: Ids
    session: int


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole trace. block_tokens: of its blocks; ids go from 0 to `count` - 1."""

    name: str
    block_tokens: int
    requests: list[Request]
    count: int


def read_trace(path: Path, *, every: int = 1) -> Trace:
    """Read one trace; every: keep the first of so many sessions (or requests, without sessions).

    Raises UsageError when the file is none of the known kinds.
    """
    name = path.name.split(".")[0].removeprefix("mooncake_")
    lines = _lines(path)
    first = next(lines, None)
    if first is None:
        raise UsageError(f"{path} is empty")
    if "trace" in first and "block_size" in first:
        return _sessions(name, first, lines, every)
    if "hash_ids" in first and "input_length" in first:
        return _mooncake(name, first, lines, every)
    if "hash_ids" in first and "s" in first:
        return _lmcache(name, first, lines, every)
    raise UsageError(f"{path} is no Mooncake, agentic or LMCache trace: its first line has {', '.join(first)}")


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with lzma.open(path, "rt") if path.suffix == ".xz" else path.open() as lines:
        for line in lines:
            yield json.loads(line)


def _mooncake(name: str, first: dict[str, Any], lines: Iterator[dict[str, Any]], every: int) -> Trace:
    found = []
    for number, line in enumerate(_chain(first, lines)):
        ids = np.asarray(line["hash_ids"][: line["input_length"] // 512], np.int64)
        if len(ids) and number % every == 0:
            found.append(Request(ids, -1))
    return Trace(name, 512, found, _count(found))


def _lmcache(name: str, first: dict[str, Any], lines: Iterator[dict[str, Any]], every: int) -> Trace:
    found: list[Request] = []
    sessions: dict[str, int] = {}
    for line in _chain(first, lines):
        session = sessions.setdefault(line["s"], len(sessions))
        if line["hash_ids"] and session % every == 0:
            found.append(Request(np.asarray(line["hash_ids"], np.int64), session))
    return Trace(name, 64, found, _count(found))


def _sessions(name: str, first: dict[str, Any], lines: Iterator[dict[str, Any]], every: int) -> Trace:
    facts: dict[int, dict[str, Any]] = {}
    rows: dict[int, list[list[int]]] = {}
    for line in _chain(first, lines):
        if "runs" not in line:
            facts[line["trace"]] = line
        elif line["runs"] and line["s"] % every == 0:
            rows.setdefault(line["s"], []).append(line["runs"])
    used = 0
    heads: dict[tuple[str, int, int], int] = {}
    found = []
    for session, requests in rows.items():
        fact = facts[session]
        most = max(start + length for runs in requests for start, length in zip(runs[::2], runs[1::2], strict=True))
        ids = np.arange(used, used + most, dtype=np.int64)
        used += most
        length = (fact["tool_tokens"] + fact["system_tokens"]) // fact["block_size"]
        if length and requests[0][0] == 1:
            kind = (fact["models"][0] if fact["models"] else "", fact["tool_tokens"], fact["system_tokens"])
            if kind not in heads:
                heads[kind] = used
                used += length
            shared = min(length, requests[0][1])
            ids[1 : shared + 1] = heads[kind] + np.arange(shared)
        for runs in requests:
            spans = [ids[start : start + length] for start, length in zip(runs[::2], runs[1::2], strict=True)]
            found.append(Request(np.concatenate(spans), session))
    return Trace(name, int(first["block_size"]), found, used)


def _chain(first: dict[str, Any], lines: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    yield first
    yield from lines


def _count(requests: list[Request]) -> int:
    return 1 + max((int(request.ids.max()) for request in requests), default=0)


@dataclass(frozen=True, slots=True)
class Pieces:
    """A folded trace. Piece p: `blocks[p]` blocks below the last block of `parents[p]` (-1: a root), the first of
    them the id `firsts[p]`. paths: each request's chain in pieces, and how many of them were there before it."""

    firsts: Ids
    blocks: list[int]
    parents: list[int]
    paths: list[tuple[list[int], int, int]]
    """(pieces, of which known before, session)."""


def fold(trace: Trace, is_cut: Callable[[Ids], npt.NDArray[np.bool_]]) -> Pieces:
    """Fold a trace into pieces; a block of which `is_cut` says so begins one."""
    starts, parents = _starts(trace)
    starts |= is_cut(np.arange(trace.count, dtype=np.int64)) & (parents >= -1)
    firsts = np.flatnonzero(starts)
    number = np.full(trace.count, -1, np.int64)
    number[firsts] = np.arange(len(firsts))
    blocks, above = [0] * len(firsts), [-1] * len(firsts)
    paths = []
    for request in trace.requests:
        at = np.flatnonzero(starts[request.ids])
        pieces: list[int] = number[request.ids[at]].tolist()
        lengths = np.diff(np.append(at, len(request.ids))).tolist()
        known = next((i for i, piece in enumerate(pieces) if not blocks[piece]), len(pieces))
        for i in range(known, len(pieces)):
            blocks[pieces[i]] = lengths[i]
            above[pieces[i]] = pieces[i - 1] if i else -1
        paths.append((pieces, known, request.session))
    return Pieces(firsts, blocks, above, paths)


def _starts(trace: Trace) -> tuple[npt.NDArray[np.bool_], Ids]:
    """Which ids begin a piece, and each id's parent: -1 a root, -2 never seen."""
    seen, starts = np.zeros(trace.count, np.bool_), np.zeros(trace.count, np.bool_)
    parents, children = np.full(trace.count, -2, np.int64), np.zeros(trace.count, np.int32)
    for request in trace.requests:
        ids = request.ids
        old = seen[ids]
        if old.all():
            continue
        at = int(np.argmin(old))
        fresh = ids[at:]
        seen[fresh] = True
        starts[fresh[0]] = True
        parents[fresh[1:]] = fresh[:-1]
        parents[fresh[0]] = ids[at - 1] if at else -1
        children[fresh[:-1]] += 1
        if at:
            children[ids[at - 1]] += 1
    has_parent = parents >= 0
    starts[has_parent] |= children[parents[has_parent]] > 1
    return starts, parents
