"""Reading traces: every format, the order of requests, longer blocks, and bad lines by their number."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import numpy as np
import pytest

from ucxkv.errors import UsageError
from ucxkv.simulation.traces import Trace, read_trace, schedule
from ucxkv.simulation.workload import NEVER, lay_out

MOONCAKE = {"timestamp": 1500, "input_length": 1100, "output_length": 7, "hash_ids": [0, 1, 2]}
SESSION = {"trace": 1, "block_size": 64, "tool_tokens": 64, "system_tokens": 64, "models": ["m"]}
BAILIAN = {"chat_id": 1, "parent_chat_id": -1, "timestamp": 0, "input_length": 16, "hash_ids": [1]}


def read(tmp_path: Path, *lines: object, **wish: object) -> Trace:
    path = tmp_path / "a.jsonl.xz"
    with lzma.open(path, "wt") as file:
        file.writelines(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    return read_trace(path, **wish)  # type: ignore[arg-type]


def test_mooncake_leaves_partial_blocks_out_unless_asked(tmp_path: Path) -> None:
    """Goal: chains as ucxkv stores them, or as the trace lists them. Method: 1,100 tokens in three ids."""
    one = read(tmp_path, MOONCAKE).requests[0]
    assert (one.ids.tolist(), one.time_s, one.input_tokens, one.output_tokens) == ([0, 1], 1.5, 1100, 7)
    assert read(tmp_path, MOONCAKE, partial=True).requests[0].ids.tolist() == [0, 1, 2]


def test_bailian_is_vllm_blocks_with_chats(tmp_path: Path) -> None:
    """Goal: 16-token blocks, seconds, a chat's turns in one session. Method: two chats, the first with two turns."""
    base = {"input_length": 32, "output_length": 1, "type": "text", "turn": 1}
    trace = read(
        tmp_path,
        {**base, "chat_id": 7, "parent_chat_id": -1, "timestamp": 1.5, "hash_ids": [0, 1]},
        {**base, "chat_id": 8, "parent_chat_id": -1, "timestamp": 2.5, "hash_ids": [2, 3]},
        {**base, "chat_id": 9, "parent_chat_id": 7, "timestamp": 3.5, "hash_ids": [0, 1, 4], "input_length": 40},
    )
    assert trace.block_tokens == 16
    assert [request.session for request in trace.requests] == [0, 1, 0]
    assert [request.time_s for request in trace.requests] == [1.5, 2.5, 3.5]
    assert trace.requests[2].ids.tolist() == [0, 1]


def test_prompts_of_token_ids_are_cut_and_chained(tmp_path: Path) -> None:
    """Goal: same tokens after the same tokens are the same block. Method: two prompts with a common first block, and
    the second's block of the first's tokens in another place, which is another block."""
    first, second = list(range(32)), [*range(16), *range(16), 5]
    trace = read(tmp_path, {"prompt_token_ids": first}, {"prompt_token_ids": second, "timestamp": 3})
    one, two = (request.ids.tolist() for request in trace.requests)
    assert len(one) == len(two) == 2
    assert one[0] == two[0] and len({*one, *two}) == 3
    assert trace.requests[1].time_s == 3


def test_sessions_share_heads_and_longer_blocks_are_made_of_several(tmp_path: Path) -> None:
    """Goal: agentic sessions with global ids. Method: two sessions of one model with a head of two blocks; as 64-token
    blocks, and as 128-token ones, of which a rest is left out."""
    lines = [SESSION, {"s": 1, "t": 0, "runs": [1, 5]}, {"s": 1, "t": 9.0, "runs": [1, 3, 9, 1]}]
    lines += [{**SESSION, "trace": 2}, {"s": 2, "t": 1, "runs": [1, 4]}]
    fine = read(tmp_path, *lines)
    chains = [request.ids.tolist() for request in fine.requests]
    assert fine.is_relative and fine.block_tokens == 64
    assert chains[0][:2] == chains[1][:2] == chains[2][:2]
    assert chains[0][:3] == chains[1][:3] != chains[2][:3]
    coarse = read(tmp_path, *lines, session_tokens=128)
    again = [request.ids.tolist() for request in coarse.requests]
    assert [len(chain) for chain in again] == [2, 2, 2]
    assert again[0][0] == again[1][0] == again[2][0] and len({chain[1] for chain in again}) == 3
    with pytest.raises(UsageError, match="multiple"):
        read(tmp_path, *lines, block_tokens=100)


def test_sessions_start_by_the_seed_and_stand_by_their_times(tmp_path: Path) -> None:
    """Goal: the same draw again, in order of time. Method: ten sessions, six drawn, twice with a seed and once with
    another; too many are refused."""
    lines: list[object] = []
    for number in range(10):
        lines += [{**SESSION, "trace": number}, *({"s": number, "t": t, "runs": [1, 4]} for t in (0, 50))]
    trace = read(tmp_path, *lines)
    first, again, other = (schedule(trace, sessions=6, seed=seed, span_s=100) for seed in (1, 1, 2))
    shown = [[(request.session, request.time_s) for request in found] for found in (first, again, other)]
    assert shown[0] == shown[1] != shown[2]
    assert [at for _, at in shown[0]] == sorted(at for _, at in shown[0])
    assert len({session for session, _ in shown[0]}) == 6
    with pytest.raises(UsageError, match="10 sessions"):
        schedule(trace, sessions=11)
    with pytest.raises(UsageError, match="names no sessions"):
        schedule(read(tmp_path, MOONCAKE), sessions=1)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "is empty"),
        ([{"a": 1}], "its first line has a"),
        ([MOONCAKE, "{nonsense\n"], "line 2: no JSON"),
        ([MOONCAKE, "[1]\n"], "line 2: a JSON object"),
        ([MOONCAKE, {**MOONCAKE, "hash_ids": [0, -1, 2]}], "line 2: hash_ids"),
        ([MOONCAKE, {**MOONCAKE, "hash_ids": [0, "x", 2]}], "line 2: hash_ids"),
        ([MOONCAKE, {**MOONCAKE, "hash_ids": [[0], [1], [2]]}], "line 2: hash_ids"),
        ([MOONCAKE, {**MOONCAKE, "hash_ids": [0, 1 << 70, 2]}], "line 2: hash_ids"),
        ([MOONCAKE, {**MOONCAKE, "input_length": "9"}], "line 2: input_length"),
        ([MOONCAKE, {**MOONCAKE, "timestamp": -1}], "line 2: timestamp"),
        ([MOONCAKE, {**MOONCAKE, "input_length": 9000}], "--hash-tokens"),
        ([MOONCAKE, {**MOONCAKE, "input_length": 1536, "hash_ids": [0, 2, 1]}], "block id 1 follows 0 and 2"),
        ([{**MOONCAKE, "hash_ids": [], "input_length": 0}], "no request"),
        ([SESSION, {"s": 2, "t": 0, "runs": [1, 2]}], "line 2: runs"),
        ([SESSION, {"s": 1, "t": 0, "runs": [1, 2, 3]}], "line 2: runs"),
        ([SESSION, {**SESSION, "block_size": 32}], "line 2: block_size"),
        ([MOONCAKE, "[" * 100_000 + "\n"], "line 2: no JSON"),
        ([{**SESSION, "models": 5}], "line 1: models"),
        ([{**SESSION, "models": {"a": 1}}], "line 1: models"),
        ([SESSION, {"s": 1, "t": 0, "runs": [0, 10**13]}], "line 2: runs"),
        ([SESSION, {"s": 1, "t": 0, "runs": [2**63 - 1, 5]}], "line 2: runs"),
        ([SESSION, {"s": 1, "t": 0, "runs": [0, 1 << 24] * 2}], "line 2: runs"),
        ([BAILIAN, {**BAILIAN, "chat_id": 2, "parent_chat_id": [1]}], "line 2: parent_chat_id"),
    ],
)
def test_a_bad_line_is_refused_by_its_number(tmp_path: Path, lines: list[object], said: str) -> None:
    """Goal: an operator finds the line. Method: one wrong thing at a time; the message."""
    with pytest.raises(UsageError, match=said.replace("[", r"\[")):
        read(tmp_path, *lines)


def test_times_further_apart_than_ticks_count_are_refused(tmp_path: Path) -> None:
    """Goal: nanoseconds where milliseconds are expected are told, not a traceback. Method: an hour, in nanoseconds, and
    the longest time that is counted."""
    trace = read(tmp_path, MOONCAKE, {**MOONCAKE, "timestamp": 3600 * 10**9})
    with pytest.raises(UsageError, match="apart"):
        lay_out(trace.name, 512, schedule(trace))
    longest = read(tmp_path, MOONCAKE, {**MOONCAKE, "timestamp": 496 * 86_400_000})
    assert lay_out(longest.name, 512, schedule(longest)).ticks[-1] < 2**32 - 1


def test_a_torn_archive_and_a_missing_file_are_usage_errors(tmp_path: Path) -> None:
    """Goal: no traceback for a broken file. Method: an .xz cut in half, and none at all."""
    read(tmp_path, *[{**MOONCAKE, "timestamp": at} for at in range(500)])
    path = tmp_path / "a.jsonl.xz"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    for broken in (path, tmp_path / "none.jsonl"):
        with pytest.raises(UsageError, match=broken.name):
            read_trace(broken)


def test_a_workload_knows_parents_and_next_uses(tmp_path: Path) -> None:
    """Goal: what replay and Belady stand on. Method: three requests by hand, ids with gaps."""
    chains = [[10, 20], [10, 30], [10, 20, 40]]
    lines = [{"timestamp": 20 * at, "input_length": 512 * len(c), "hash_ids": c} for at, c in enumerate(chains)]
    trace = read(tmp_path, *lines)
    made = lay_out(trace.name, 512, schedule(trace))
    assert (made.requests, made.blocks, made.unique, made.longest) == (3, 7, 4, 3)
    assert made.ids.tolist() == [0, 1, 0, 2, 0, 1, 3]
    assert made.parents.tolist() == [-1, 0, 0, 1]
    assert made.next_uses().tolist() == [1, 2, 2, NEVER, NEVER, NEVER, NEVER]
    assert np.array_equal(made.ticks, [1, 3, 5])
