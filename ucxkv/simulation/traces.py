"""Traces of requests as chains of block ids: reading their formats.

Formats, told apart by their first line, plain or xz, one JSON object a line:

    Mooncake        {"timestamp": ms, "input_length", "output_length", "hash_ids"}, blocks of 512 tokens
    Bailian (vLLM)  the same with "chat_id", "parent_chat_id" and seconds, blocks of 16 tokens
    vLLM prompts    {"prompt_token_ids": [...]}, and "timestamp" or "arrival_time" (s) if known; cut in blocks of 16
    agentic coding  sessions {"trace", "block_size", ...}, then requests {"s", "t", "runs": [first id, length, ...]}
    LMCache agents  {"t", "s", "chars", "hash_ids"}, blocks of about 64 tokens

An id names a block and all before it. A partial block at a request's end is left out, as ucxkv leaves it out, unless
asked for. Agentic ids are local to a session in the file and made global here; sessions of one model with heads of one
length are taken to share them (the trace hides it; that length is the best guess there is), and their times count from
the session's start. Every line that is not as it should be is refused with its number.
"""

from __future__ import annotations

import json
import lzma
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ucxkv.errors import UsageError

__all__ = ["Ids", "Request", "Trace", "read_trace", "schedule"]

Ids = npt.NDArray[np.int64]
Line = tuple[int, dict[str, Any]]

_MOONCAKE_TOKENS, _VLLM_TOKENS, _LMCACHE_TOKENS = 512, 16, 64
_CHARACTERS_A_TOKEN = 4
_SESSION_BLOCKS_MAX = 1 << 24
"""A few bytes of a line name any number of blocks: this bounds what they can make the reader allocate."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request. ids: its chain from the root on; session: a number, -1 where the trace names none."""

    ids: Ids
    session: int
    time_s: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole trace. block_tokens: of its blocks; ids are below `count`. is_relative: a request's time counts from its
    session's start, and requests stand session by session; else requests stand in the order of the file."""

    name: str
    block_tokens: int
    requests: list[Request]
    count: int
    is_relative: bool = False


@dataclass(frozen=True, slots=True)
class _Wish:
    every: int
    partial: bool
    hash_tokens: int | None
    block_tokens: int | None
    session_tokens: int | None


class _File:
    """One trace file: its lines, and errors that name file and line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        name = path.name.split(".")[0]
        self.name = name.removeprefix("mooncake_")

    def wrong(self, number: int, what: str) -> UsageError:
        """The error to raise for a line."""
        return UsageError(f"{self.path}, line {number}: {what}")

    def lines(self) -> Iterator[Line]:
        """(number, object) of each line that is not empty."""
        number = 0
        try:
            with lzma.open(self.path, "rt") if self.path.suffix == ".xz" else self.path.open() as lines:
                for number, line in enumerate(lines, 1):
                    if not line.strip():
                        continue
                    try:
                        found = json.loads(line)
                    except (ValueError, RecursionError) as exc:
                        raise self.wrong(number, f"no JSON: {exc}") from exc
                    if not isinstance(found, dict):
                        raise self.wrong(number, f"a JSON object is expected, not {type(found).__name__}")
                    yield number, found
        except FileNotFoundError as exc:
            raise UsageError(f"--trace {self.path}: no such file") from exc
        except (OSError, lzma.LZMAError, EOFError, UnicodeDecodeError) as exc:
            raise UsageError(f"{self.path} cannot be read after line {number}: {exc}") from exc

    def integer(self, line: Line, name: str, default: int | None = None) -> int:
        """A field that is a whole number, not negative."""
        value = line[1].get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.wrong(line[0], f"{name} is {value!r}; a whole number, not negative, is expected")
        return value

    def seconds(self, line: Line, name: str, unit: float = 1.0) -> float:
        """A field that is a time."""
        value = line[1].get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e15:
            raise self.wrong(line[0], f"{name} is {value!r}; a time, not negative, is expected")
        return value * unit

    def ids(self, line: Line, name: str = "hash_ids") -> Ids:
        """A field that is a list of whole numbers, not negative."""
        value = line[1].get(name)
        try:
            found = np.asarray(value)
            if isinstance(value, list) and (not value or (found.ndim == 1 and found.dtype == np.int64)):
                ids = found.astype(np.int64)
                if not len(ids) or int(ids.min()) >= 0:
                    return ids
        except (ValueError, TypeError, OverflowError):
            pass
        raise self.wrong(line[0], f"{name} is no list of whole numbers, none negative, below 2**63")

    def chain_of_hashes(self, line: Line, tokens: int, *, partial: bool) -> Ids:
        """hash_ids, without the last one when it stands for less than `tokens` tokens."""
        ids, length = self.ids(line), self.integer(line, "input_length")
        whole = length // tokens
        if len(ids) not in (whole, -(-length // tokens)):
            said = f"{len(ids)} hash_ids for {length} tokens are no blocks of {tokens} tokens"
            raise self.wrong(line[0], f"{said}; give the trace's own size with --hash-tokens")
        return ids if partial else ids[:whole]


def read_trace(
    path: Path,
    *,
    every: int = 1,
    partial: bool = False,
    hash_tokens: int | None = None,
    block_tokens: int | None = None,
    session_tokens: int | None = None,
) -> Trace:
    """Read one trace.

    every: keep the first of so many sessions (or requests, without sessions). partial: keep the last block of a request
    when it is not full. hash_tokens: tokens of a block in the file, where its format does not say. block_tokens: tokens
    of a block wanted, a multiple of the file's; longer ones are made of several, a rest at the end is left out.
    session_tokens: the same for agentic sessions alone, unless block_tokens says otherwise.
    Raises UsageError when the file is none of the known kinds, and for its first bad line.
    """
    file = _File(path)
    lines = file.lines()
    first = next(lines, None)
    if first is None:
        raise UsageError(f"{path} is empty")
    wish = _Wish(every, partial, hash_tokens, block_tokens, session_tokens)
    trace = _reader(file, first[1])(file, _chain(first, lines), wish)
    if not trace.requests:
        raise UsageError(f"{path} has no request with a block of {trace.block_tokens} tokens")
    _check_chains(path, trace)
    return trace


def _reader(file: _File, first: dict[str, Any]) -> Callable[[_File, Iterator[Line], _Wish], Trace]:
    if "trace" in first and "block_size" in first:
        return _sessions
    if "hash_ids" in first and "chat_id" in first:
        return _bailian
    if "hash_ids" in first and "input_length" in first:
        return _mooncake
    if "hash_ids" in first and "s" in first:
        return _lmcache
    if "prompt_token_ids" in first:
        return _prompts
    has = ", ".join(sorted(first)) or "nothing"
    raise UsageError(f"{file.path} is no Mooncake, Bailian, vLLM, agentic or LMCache trace: its first line has {has}")


def _mooncake(file: _File, lines: Iterator[Line], wish: _Wish) -> Trace:
    tokens = wish.hash_tokens or _MOONCAKE_TOKENS
    found = []
    for at, line in enumerate(lines):
        ids = file.chain_of_hashes(line, tokens, partial=wish.partial)
        time_s = file.seconds(line, "timestamp", 1e-3) if "timestamp" in line[1] else float(at)
        if at % wish.every == 0:
            lengths = file.integer(line, "input_length"), file.integer(line, "output_length", 0)
            found.append(Request(ids, -1, time_s, *lengths))
    return _trace(file, tokens, found, wish)


def _bailian(file: _File, lines: Iterator[Line], wish: _Wish) -> Trace:
    tokens = wish.hash_tokens or _VLLM_TOKENS
    found = []
    sessions: dict[Any, int] = {}
    for line in lines:
        ids = file.chain_of_hashes(line, tokens, partial=wish.partial)
        chat = file.integer(line, "chat_id")
        above = line[1].get("parent_chat_id", -1)
        if not isinstance(above, int | None):
            raise file.wrong(line[0], f"parent_chat_id is {above!r}; a whole number is expected")
        session = sessions[chat] = sessions.get(above, len(sessions))
        if session % wish.every == 0:
            lengths = file.integer(line, "input_length"), file.integer(line, "output_length", 0)
            found.append(Request(ids, session, file.seconds(line, "timestamp"), *lengths))
    return _trace(file, tokens, found, wish)


def _prompts(file: _File, lines: Iterator[Line], wish: _Wish) -> Trace:
    tokens = wish.hash_tokens or _VLLM_TOKENS
    found = []
    known: dict[tuple[int, bytes], int] = {}
    for at, line in enumerate(lines):
        prompt = file.ids(line, "prompt_token_ids")
        stop = len(prompt) if wish.partial else len(prompt) // tokens * tokens
        above, chain = -1, []
        for start in range(0, stop, tokens):
            above = known.setdefault((above, prompt[start : start + tokens].tobytes()), len(known))
            chain.append(above)
        clock = next((name for name in ("timestamp", "arrival_time") if name in line[1]), None)
        time_s = file.seconds(line, clock) if clock else float(at)
        if at % wish.every == 0:
            found.append(Request(np.array(chain, np.int64), -1, time_s, len(prompt)))
    return _trace(file, tokens, found, wish)


def _lmcache(file: _File, lines: Iterator[Line], wish: _Wish) -> Trace:
    found: list[Request] = []
    sessions: dict[str, int] = {}
    for at, line in enumerate(lines):
        session = sessions.setdefault(str(line[1].get("s")), len(sessions))
        ids = file.ids(line)
        time_s = file.seconds(line, "t") if "t" in line[1] else float(at)
        if session % wish.every == 0:
            lengths = [file.integer(line, name, 0) // _CHARACTERS_A_TOKEN for name in ("chars", "out_chars")]
            found.append(Request(ids, session, time_s, *lengths))
    return _trace(file, wish.hash_tokens or _LMCACHE_TOKENS, found, wish)


def _sessions(file: _File, lines: Iterator[Line], wish: _Wish) -> Trace:
    facts: dict[int, dict[str, Any]] = {}
    rows: dict[int, list[tuple[Line, Ids]]] = {}
    size = 0
    for line in lines:
        if "runs" not in line[1]:
            session = file.integer(line, "trace")
            facts[session] = {name: file.integer(line, name) for name in ("block_size", "tool_tokens", "system_tokens")}
            models = line[1].get("models") or [""]
            if not isinstance(models, list):
                raise file.wrong(line[0], f"models is {models!r}; a list of names is expected")
            facts[session]["model"] = str(models[0])
            size = size or facts[session]["block_size"]
            if facts[session]["block_size"] != size or not size:
                raise file.wrong(line[0], f"block_size is {facts[session]['block_size']}; one size, above 0, for all")
            continue
        session, runs = file.integer(line, "s"), file.ids(line, "runs")
        if len(runs) % 2 or session not in facts:
            raise file.wrong(line[0], "runs are pairs of first id and length, after the line of their session")
        if len(runs) and (int(runs.max()) > _SESSION_BLOCKS_MAX or int(runs[1::2].sum()) > _SESSION_BLOCKS_MAX):
            raise file.wrong(line[0], f"runs name more than {_SESSION_BLOCKS_MAX} blocks of one session")
        if len(runs) and session % wish.every == 0:
            rows.setdefault(session, []).append((line, runs))
    used = 0
    heads: dict[tuple[str, int, int], int] = {}
    found = []
    group = _group(size, wish.block_tokens or wish.session_tokens)
    for session, requests in rows.items():
        most = max(int((runs[::2] + runs[1::2]).max()) for _, runs in requests)
        ids = np.arange(used, used + most, dtype=np.int64)
        used += most
        fact = facts[session]
        length = (fact["tool_tokens"] + fact["system_tokens"]) // size
        first = requests[0][1]
        if length and first[0] == 1:
            kind = (fact["model"], fact["tool_tokens"], fact["system_tokens"])
            if kind not in heads:
                heads[kind] = used
                used += length
            shared = min(length, int(first[1]))
            ids[1 : shared + 1] = heads[kind] + np.arange(shared)
        for line, runs in requests:
            spans = [ids[start : start + count] for start, count in zip(runs[::2].tolist(), runs[1::2].tolist())]  # noqa: B905
            chain = np.concatenate(spans)[group - 1 :: group].copy()  # the rest of `spans` may go
            if len(chain):
                lengths = file.integer(line, "in", 0), file.integer(line, "out", 0)
                found.append(Request(chain, session, file.seconds(line, "t"), *lengths))
    return Trace(file.name, size * group, found, used, is_relative=True)


def _trace(file: _File, tokens: int, requests: list[Request], wish: _Wish) -> Trace:
    """Leave out requests without a block, and make longer blocks where they are wanted."""
    group = _group(tokens, wish.block_tokens)
    if group > 1:  # the last id of a group names it and all before
        requests = [replace(request, ids=request.ids[group - 1 :: group]) for request in requests]
    requests = [request for request in requests if len(request.ids)]
    count = 1 + max((int(request.ids.max()) for request in requests), default=0)
    return Trace(file.name, tokens * group, requests, count)


def _group(tokens: int, wanted: int | None) -> int:
    wanted = tokens if wanted is None else wanted
    if wanted < 1 or wanted % tokens:
        raise UsageError(f"blocks of {wanted} tokens cannot be made of the trace's {tokens}; give a multiple")
    return wanted // tokens


def _chain(first: Line, lines: Iterator[Line]) -> Iterator[Line]:
    yield first
    yield from lines


def _check_chains(path: Path, trace: Trace) -> None:
    """Refuse an id that follows two different ones: it would not name all before it."""
    ids = np.concatenate([request.ids for request in trace.requests])
    above = np.empty_like(ids)
    above[1:] = ids[:-1]
    starts = np.cumsum([0, *[len(request.ids) for request in trace.requests[:-1]]])
    above[starts] = -1
    order = np.argsort(ids, kind="stable")
    ids, above = ids[order], above[order]
    differs = (ids[1:] == ids[:-1]) & (above[1:] != above[:-1])
    if differs.any():
        at = int(np.argmax(differs))
        request = int(np.searchsorted(starts, order[at + 1], side="right"))
        raise UsageError(
            f"{path}: block id {ids[at]} follows {above[at]} and {above[at + 1]} (request {request}); "
            "an id names a block and all before it, so it follows one other only"
        )


def schedule(trace: Trace, *, sessions: int | None = None, seed: int = 1, span_s: float = 4 * 3600.0) -> list[Request]:
    """The requests in the order of their times.

    sessions: of a trace with sessions so many, drawn at random; default all. Where times count from each session's
    start, sessions start at random within span_s. The same seed draws the same.
    """
    named = sorted({request.session for request in trace.requests})
    draw = random.Random(seed)
    if sessions is not None:
        if named[0] < 0 or not 1 <= sessions <= len(named):
            has = "names no sessions" if named[0] < 0 else f"has {len(named)} sessions"
            raise UsageError(f"{sessions} sessions cannot be drawn: the trace {has}")
        named = draw.sample(named, sessions)
    starts = {session: draw.random() * span_s if trace.is_relative else 0.0 for session in named}
    chosen = [
        replace(request, time_s=starts[request.session] + request.time_s)
        for request in trace.requests
        if request.session in starts
    ]
    return sorted(chosen, key=lambda request: request.time_s)
