"""Small traces for tests of the simulator, made from a seed, in Mooncake's format."""

from __future__ import annotations

import json
import random
from pathlib import Path

from ucxkv.simulation.traces import read_trace, schedule
from ucxkv.simulation.workload import Workload, lay_out


def rows(requests: int, *, chats: int = 12, seed: int = 5, shared: int = 2) -> list[dict[str, object]]:
    """Chats that share a head of `shared` blocks and grow by a turn each time, mixed with requests that come once."""
    draw, used = random.Random(seed), shared
    head = list(range(shared))
    growing: dict[int, list[int]] = {}
    found: list[dict[str, object]] = []
    for number in range(requests):
        chat = draw.randrange(chats) if draw.random() < 0.5 else -1 - number
        chain = growing.setdefault(chat, list(head))
        if len(chain) > 12:
            chain[:] = head
        more = draw.randrange(1, 4)
        chain += range(used, used + more)
        used += more
        row = {"timestamp": 700 * number, "input_length": 512 * len(chain), "output_length": 9, "hash_ids": chain[:]}
        found.append(row)
    return found


def write(path: Path, lines: list[dict[str, object]]) -> Path:
    """A file of JSON lines."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def workload(tmp_path: Path, requests: int, **more: int) -> Workload:
    """Such a trace, read and laid out."""
    trace = read_trace(write(tmp_path / "made.jsonl", rows(requests, **more)))
    return lay_out(trace.name, trace.block_tokens, schedule(trace))
