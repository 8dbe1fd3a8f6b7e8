"""The shipped slice of the Mooncake conversation trace as chains of block keys, and block content that follows from a
key.

Mapping to a small real model: one trace block (512 tokens, 11.25 MiB of SmolLM2-135M in bf16) stands for one 16-token
block of SmolLM2-135M (360 KiB), so that the requests' shape, order and sharing are the trace's and the bytes fit a
laptop. Partial blocks at a request's end are left out, as ucxkv leaves them out by default.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ucxkv.keys import KeyArray, block_keys
from ucxkv.layout import Layout

TRACE = Path(__file__).resolve().parent.parent / "examples" / "data" / "mooncake_conversation_slice.jsonl"
TRACE_BLOCK_TOKENS = 512
SMOLLM2 = Layout(model="SmolLM2-135M", dtype="bfloat16", layers=30, kv_heads=3, head_dim=64, block_tokens=16)
_WORD_STEP = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Request:
    """One request of the trace. keys: u8[blocks, 16], a chain from a root."""

    number: int
    keys: KeyArray


def read_requests(limit: int, path: Path = TRACE) -> list[Request]:
    """The first `limit` requests that have at least one whole block."""
    requests: list[Request] = []
    with path.open() as lines:
        for line in lines:
            fields = json.loads(line)
            ids = np.asarray(fields["hash_ids"][: fields["input_length"] // TRACE_BLOCK_TOKENS], np.int64)
            if len(ids) and len(requests) < limit:
                tokens = (ids[:, None] * SMOLLM2.block_tokens + np.arange(SMOLLM2.block_tokens)).reshape(-1)
                requests.append(Request(len(requests), block_keys(tokens, SMOLLM2)))
    return requests


class Content:
    """Block content from a key: every 8-byte word depends on the whole key and on its place, so that a block that is
    shifted, mixed, stale or another's differs. Two processes that share nothing but the key generate the same bytes."""

    def __init__(self, nbytes: int) -> None:
        """nbytes: size of a block, a multiple of 8."""
        with np.errstate(over="ignore"):
            self._places = np.arange(1, nbytes // 8 + 1, dtype=np.uint64) * _WORD_STEP
        self._expected = np.empty(nbytes // 8, np.uint64)

    def write(self, key: KeyArray, into: npt.NDArray[np.uint8]) -> None:
        """Write the content of `key` (u8[16]) into a block (u8[nbytes])."""
        first, second = key.view(np.uint64)
        words = into.view(np.uint64)
        np.add(self._places, first, out=words)
        np.bitwise_xor(words, second, out=words)

    def is_in(self, key: KeyArray, block: npt.NDArray[np.uint8]) -> bool:
        """True when a block is the content of `key`, byte for byte."""
        self.write(key, self._expected.view(np.uint8))
        return bool(np.array_equal(self._expected, block.view(np.uint64)))
