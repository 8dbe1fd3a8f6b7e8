"""What do codecs save, cost and lose on the keys and values of a real model?

    python scripts/bench_codec.py [--dtypes bfloat16,float32] [--block-tokens 16,64] [--peers] [--json] [--quick]

A model (scripts/model_kv.py: SmolLM2-135M-Instruct, prefilled with this project's documents) gives real blocks, rounded
to each dtype. Every block is encoded, decoded into memory that is there, and copied, in turns. `saves` is original /
stored bytes; rates are of original bytes, one thread; the limit is memcpy of the same block by C. Each block's first
decoding is checked: bit by bit, or against the stated error. `max` and `rms` are errors as shares of the largest
magnitude of a value's channel in its block, and of the block's own rms. `none` has no row: its limit is the copy.

`top-1` and `KL` compare the model's next-token choices over --score-tokens tokens of text, read after --prompt-tokens
from restored keys and values, with those from its own in float32. --peers adds what codecs could have been instead:
zstd alone, byte planes under zstd's own level 1, blosc2 (skipped where not installed).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from benchlib import main, parser
from model_kv import ModelKv, load
from numpy.typing import NDArray

import ucxkv
from ucxkv.cli.measure import Conditions, Row, Series, row
from ucxkv.tiers.base import TierError
from ucxkv.tiers.codecs import CODECS, ERROR_BOUND, Codec
from ucxkv.tiers.codecs.planes import WORDS, join_planes, split_plane
from ucxkv.tiers.copy import copy_ns

Words = NDArray[Any]
DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}


def rounded(values: NDArray[np.float32], dtype: str) -> Words:
    """The bits of values rounded to dtype, to nearest even."""
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return values.astype(dtype).view(WORDS[DTYPES[dtype]])


def widened(words: Words, dtype: str) -> NDArray[np.float32]:
    """Their values."""
    if dtype == "bfloat16":
        return (words.astype(np.uint32) << 16).view(np.float32)
    return words.view(dtype).astype(np.float32)


@dataclass
class Way:
    """A codec, or what could be one: encode(block) -> stored, decode(stored, into). bound: of the error; 0 = exact."""

    name: str
    encode: Callable[[Words], Any]
    decode: Callable[[Any, Words], object]
    bound: float = 0.0


def way_of(codec: Codec, dtype: str) -> Way:
    """One of the product's codecs."""
    bound = 0.0 if codec.is_lossless else ERROR_BOUND[dtype]

    def encode(block: Words) -> Any:
        return codec.encode(block.data, dtype=dtype, shape=block.shape)

    return Way(codec.name, encode, lambda stored, into: codec.decode(stored, into.data), bound)


def peers() -> Iterator[Way]:
    """What codecs could have been instead, as far as it is installed."""
    if importlib.util.find_spec("zstandard"):
        zstd = importlib.import_module("zstandard")
        pack, unpack = zstd.ZstdCompressor(level=1).compress, zstd.ZstdDecompressor().decompress
        yield Way("zstd -1", pack, lambda stored, into: np.copyto(raw(into), np.frombuffer(unpack(stored), np.uint8)))
        yield Way("planes, zstd -1", lambda block: pack_planes(block, pack), lambda s, into: join(s, into, unpack))
    if importlib.util.find_spec("blosc2"):
        blosc = importlib.import_module("blosc2")
        for label, filters in (
            ("shuffle", [blosc.Filter.SHUFFLE]),
            ("bitshuffle", [blosc.Filter.BITSHUFFLE]),
        ):
            for codec in (blosc.Codec.ZSTD, blosc.Codec.LZ4):
                yield blosc_way(blosc, f"blosc2 {label} {codec.name.lower()}", codec, filters)


def blosc_way(blosc: Any, name: str, codec: Any, filters: list[Any]) -> Way:
    """blosc2 at its level 1, one thread."""
    chain = [blosc.Filter.NOFILTER] * (6 - len(filters)) + filters

    def pack(block: Words) -> Any:
        parameters = blosc.CParams(codec=codec, clevel=1, typesize=block.itemsize, filters=chain, nthreads=1)
        return blosc.compress2(raw(block), cparams=parameters)

    return Way(name, pack, lambda stored, into: blosc.decompress2(stored, dst=raw(into), nthreads=1))


def raw(block: Words) -> NDArray[np.uint8]:
    """Its bytes, a view."""
    return block.reshape(-1).view(np.uint8)


def pack_planes(block: Words, pack: Callable[[Any], bytes]) -> list[bytes]:
    """Each byte plane of a whole block under zstd's own level 1."""
    words = block.reshape(-1)
    scratch, plane, found = np.empty_like(words), np.empty(words.size, np.uint8), []
    for number in range(words.itemsize):
        split_plane(words, number, plane, scratch)
        found.append(pack(plane))
    return found


def join(stored: list[bytes], into: Words, unpack: Callable[[bytes], bytes]) -> None:
    """The opposite."""
    words = into.reshape(-1)
    join_planes([np.frombuffer(unpack(plane), np.uint8) for plane in stored], words, np.empty_like(words))


@dataclass
class Cell:
    """One way with blocks of one dtype and size."""

    way: Way
    dtype: str
    blocks: Words
    encode: Series = field(default_factory=Series)
    decode: Series = field(default_factory=Series)
    copy: Series = field(default_factory=Series)
    stored_bytes: int = 0
    error_max: float = 0.0
    squares: list[float] = field(default_factory=list)

    def measured(self, rounds: int) -> Row:
        """A warm-up, which also checks every block, then the rounds."""
        self.turn(check=True)
        for series in (self.encode, self.decode, self.copy):
            series.clear()
        for _ in range(rounds):
            self.turn(check=False)
        return self.found()

    def turn(self, *, check: bool) -> None:
        """All blocks once: encode, decode, copy."""
        times = [series.start_round() for series in (self.encode, self.decode, self.copy)]
        into, copied = (np.zeros_like(self.blocks[0]) for _ in range(2))
        for block in self.blocks:
            start = time.perf_counter_ns()
            stored = self.way.encode(block)
            encoded = time.perf_counter_ns()
            assert stored is not None, f"{self.way.name} refuses a real block"
            self.way.decode(stored, into)
            times[1].append(time.perf_counter_ns() - encoded)
            times[0].append(encoded - start)
            times[2].append(copy_ns(copied.ctypes.data, block.ctypes.data, block.nbytes))
            if check:
                self.check(block, into, stored)

    def check(self, block: Words, into: Words, stored: Any) -> None:
        """What came back is what was promised; count its bytes and errors."""
        self.stored_bytes += sum(map(len, stored)) if isinstance(stored, list) else memoryview(stored).nbytes
        if not self.way.bound:
            assert np.array_equal(block, into), f"{self.way.name} gave other bytes"
            return
        own, got = widened(block, self.dtype).astype(np.float64), widened(into, self.dtype)
        errors = np.abs(got - own)
        shares = errors.max(axis=-2) / np.maximum(np.abs(own).max(axis=-2), 1e-30)
        self.error_max = max(self.error_max, float(shares.max()))
        self.squares.append(float((errors**2).sum() / (own**2).sum()))
        assert self.error_max <= self.way.bound, f"{self.way.name} exceeds its stated error"

    def found(self) -> Row:
        """The row."""
        nbytes = self.blocks[0].nbytes
        parts = {
            name: row("codec", name, series, self.copy, nbytes=nbytes)
            for name, series in (("encode", self.encode), ("decode", self.decode))
        }
        fields = {
            f"{name}_{key}": part[key] for name, part in parts.items() for key in ("gbps", "p50_us", "p99_us", "spread")
        }
        return {
            "bench": "codec", "codec": self.way.name, "dtype": self.dtype, "block_tokens": self.blocks.shape[-2],
            "bytes": nbytes, "saves": round(self.blocks.nbytes / self.stored_bytes, 3), **fields,
            "limit_name": "memcpy", "limit_gbps": parts["decode"]["limit_gbps"], "error_max": self.error_max,
            "error_rms": float(np.sqrt(np.mean(self.squares))) if self.squares else 0.0, "verified": True,
        }  # fmt: skip


def answers(kv: ModelKv, arguments: argparse.Namespace, dtypes: list[str], texts: int) -> list[Row]:
    """Next-token choices from restored keys and values beside those from the model's own."""
    context, scored = arguments.prompt_tokens, arguments.score_tokens
    lossy = [codec for codec in CODECS if not codec.is_lossless]
    found: dict[tuple[str, str, int], list[Any]] = {}
    for number in range(texts):
        text = kv.text(number, context + scored)
        for block_tokens in arguments.block_tokens:
            own = kv.blocks(text[:context], block_tokens)
            reference = kv.logits(own, text[context:])
            for dtype in dtypes:
                words = rounded(own, dtype)
                variants = {"none": words} | {codec.name: through(codec, words, dtype) for codec in lossy}
                for name, blocks in variants.items():
                    answer = kv.compare(reference, kv.logits(widened(blocks, dtype), text[context:]))
                    found.setdefault((name, dtype, block_tokens), []).append(answer)
    return [
        {
            "bench": "codec", "codec": name, "dtype": dtype, "block_tokens": block_tokens,
            "positions": sum(answer.positions for answer in each),
            "top1": round(float(np.mean([answer.top1 for answer in each])), 4),
            "kl": float(np.mean([answer.kl for answer in each])),
        }
        for (name, dtype, block_tokens), each in found.items()
    ]  # fmt: skip


def through(codec: Codec, blocks: Words, dtype: str) -> Words:
    """Blocks stored and restored."""
    way, restored = way_of(codec, dtype), np.empty_like(blocks)
    for block, into in zip(blocks, restored, strict=True):
        way.decode(way.encode(block), into)
    return restored


def printed(rows: list[Row], said: list[Row], conditions: Row, *, as_json: bool) -> None:
    """One JSON object a line, or two tables and the conditions."""
    if as_json:
        for found in rows + said:
            print(json.dumps({**found, "version": ucxkv.__version__, "conditions": conditions}), flush=True)
        return
    from rich.console import Console

    console = Console(width=140)
    console.print(table("codecs on real keys and values", rows, RATES))
    console.print(table("what the model says, beside its own keys and values in float32", said, ANSWERS))
    console.print(", ".join(f"{name} {value}" for name, value in conditions.items()), style="dim", highlight=False)


RATES = {
    "codec": "codec", "dtype": "dtype", "block_tokens": "tokens", "bytes": "bytes", "saves": "saves x",
    "encode_gbps": "encode GB/s", "decode_gbps": "decode GB/s", "limit_gbps": "memcpy GB/s", "error_max": "max",
    "error_rms": "rms",
}  # fmt: skip
ANSWERS = {
    "codec": "codec", "dtype": "dtype", "block_tokens": "tokens", "positions": "positions", "top1": "top-1", "kl": "KL",
}  # fmt: skip


def table(title: str, rows: list[Row], columns: dict[str, str]) -> Any:
    from rich import box
    from rich.table import Table

    found = Table(title=f"{title} (ucxkv {ucxkv.__version__})", box=box.SIMPLE_HEAD, pad_edge=False)
    for name, head in columns.items():
        found.add_column(head, justify="left" if name in ("codec", "dtype") else "right", no_wrap=True)
    for each in rows:
        cells = [each[name] for name in columns]
        found.add_row(
            *[f"{cell:.2g}" if isinstance(cell, float) and 0 < abs(cell) < 0.1 else str(cell) for cell in cells]
        )
    return found


def options() -> argparse.Namespace:
    found = parser(__doc__, sizes="")
    found.add_argument("--dtypes", default="bfloat16,float16,float32", help="of the blocks (default: all three)")
    found.add_argument("--block-tokens", default="16,64", help="tokens a block (default 16,64)")
    found.add_argument("--prompt-tokens", type=int, default=1024, help="tokens that are stored (default 1024)")
    found.add_argument("--score-tokens", type=int, default=256, help="tokens that are read after them (default 256)")
    found.add_argument("--model", type=Path, help="folder of the converted model (default: in the user's cache)")
    found.add_argument("--peers", action="store_true", help="also what codecs could have been instead")
    arguments = found.parse_args()
    arguments.dtypes = arguments.dtypes.split(",")
    arguments.block_tokens = [int(word) for word in arguments.block_tokens.split(",")]
    if not set(arguments.dtypes) <= set(DTYPES):
        found.error(f"--dtypes: some of {', '.join(DTYPES)}")
    if any(size < 1 or arguments.prompt_tokens % size for size in arguments.block_tokens):
        found.error("--block-tokens: divisors of --prompt-tokens")
    return arguments


def run() -> int:
    arguments = options()
    rounds, texts = (5, 1) if arguments.quick else (15, 4)
    kv = load(arguments.model)
    conditions = Conditions()
    rows = []
    try:
        for block_tokens in arguments.block_tokens:
            own = kv.blocks(kv.text(0, arguments.prompt_tokens), block_tokens)
            for dtype in arguments.dtypes:
                ways = [way_of(codec, dtype) for codec in CODECS if codec.number] + (
                    list(peers()) if arguments.peers else []
                )
                rows += [Cell(way, dtype, rounded(own, dtype)).measured(rounds) for way in ways]
        said = answers(kv, arguments, arguments.dtypes, texts)
    except TierError as exc:  # the extra codec is missing
        raise SystemExit(str(exc)) from exc
    facts = {"prompt_tokens": arguments.prompt_tokens, "texts": texts, "rounds": rounds}
    printed(rows, said, conditions.report(model="SmolLM2-135M-Instruct", **facts), as_json=arguments.json)
    return 0


if __name__ == "__main__":
    main(run)
