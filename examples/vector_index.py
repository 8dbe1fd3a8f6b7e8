"""A vector-index shard and image embeddings beside KV blocks, in one ucxkv node, used by several processes at once.

    python examples/vector_index.py        # a table;  --json prints one object

Three processes of their own around one node that this script starts and stops:

    writer   builds an IVF index over 20,000 vectors in numpy and stores it; then adds 500 vectors, and again, --updates
             times in all: each update is a new index in place of the old one
    reader   loads the index as it is, searches it, loads the next one when there is one, to the last
    engine   puts KV blocks and embeddings of images (as a vision encoder gives them), and gets them back by the image's
             hash: the second request with an image does not encode it again

The arrays of one index are objects of their own; a small object, the manifest, names them. The writer stores the arrays
first, then replaces the manifest *if it is still the version that it read*, then deletes the arrays of before. So a
reader that has read a manifest finds all of its arrays, or, when they are deleted under it, a newer manifest.

All is checked, else the exit code is 1: every index that the reader saw has the vectors of its generation, bit for bit;
a search of all lists finds what brute force finds, one of 8 lists finds at least 80 % of it; each update was seen in
order; embeddings and KV blocks come back as they were. Needs numpy alone; takes a few seconds."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import secrets
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from ucxkv import Client
    from ucxkv.objects import Version

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]

SHARD = "index/shard-0"
DIM, VECTORS, ADDED, LISTS, TOP = 64, 20_000, 500, 64, 10
PROBES = 8


def main() -> int:
    arguments = parse()
    if arguments.role:
        print(json.dumps(asyncio.run(ROLES[arguments.role](arguments))), flush=True)
        return 0
    from ucxkv.cli.launch import running_node

    with running_node("vector-index", host_bytes=arguments.host_bytes) as node:
        running = {role: start(role, node.address, arguments) for role in ROLES}
        results = {role: result_of(role, process) for role, process in running.items()}
    return report(results, arguments)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=5, help="how often the index is replaced (default: %(default)s)")
    parser.add_argument("--host-bytes", default="128MiB", help="memory the node lends (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--role", choices=sorted(ROLES), help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.updates < 1:
        parser.error("--updates is at least 1")
    return arguments


def start(role: str, address: str, arguments: argparse.Namespace) -> subprocess.Popen[str]:
    """Run one role in a process of its own."""
    command = [sys.executable, __file__, "--role", role, "--address", address, "--updates", str(arguments.updates)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def result_of(role: str, process: subprocess.Popen[str]) -> dict[str, Any]:
    """What a role reports."""
    out, _ = process.communicate(timeout=300)
    if process.returncode:
        raise SystemExit(f"the {role} process ended with exit code {process.returncode}; its messages are above")
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result


# ---- the index: an inverted file, in numpy alone


@dataclass(frozen=True)
class Index:
    """vectors (n, DIM), those of list i at first[i] to first[i + 1]; ids (n,) of them; centroids (LISTS, DIM)."""

    vectors: F32
    ids: I64
    first: I64
    centroids: F32

    @classmethod
    def build(cls, vectors: F32) -> Index:
        """Lists by k-means, a few rounds over a sample."""
        rng = np.random.default_rng(7)
        sample = vectors[rng.choice(len(vectors), 4096, replace=False)]
        centroids = sample[:LISTS].copy()
        for _ in range(4):
            mine = nearest(sample, centroids)
            for at in range(LISTS):
                if (mine == at).any():
                    centroids[at] = sample[mine == at].mean(axis=0)
        mine = nearest(vectors, centroids)
        ids = np.argsort(mine, kind="stable")
        first = np.concatenate([[0], np.cumsum(np.bincount(mine, minlength=LISTS))])
        return cls(vectors[ids], ids, first, centroids)

    def search(self, query: F32, probes: int) -> I64:
        """The ids of the TOP vectors nearest to the query, among the lists nearest to it."""
        lists = np.argsort(((self.centroids - query) ** 2).sum(axis=1))[:probes]
        rows = np.concatenate([np.arange(self.first[at], self.first[at + 1]) for at in lists])
        best = np.argsort(((self.vectors[rows] - query) ** 2).sum(axis=1), kind="stable")[:TOP]
        found: I64 = self.ids[rows[best]]
        return found


def nearest(vectors: F32, centroids: F32) -> I64:
    """The centroid of each vector."""
    distance = (centroids**2).sum(axis=1) - 2 * vectors @ centroids.T
    found: I64 = np.argmin(distance, axis=1)
    return found


def vectors_of(generation: int) -> F32:
    """What is indexed in this generation; every process can make it, to check what it got."""
    rng = np.random.default_rng(1)
    centres = rng.standard_normal((200, DIM)).astype(np.float32)
    count = VECTORS + ADDED * generation
    noise = np.random.default_rng(2).standard_normal((count, DIM)).astype(np.float32)
    vectors: F32 = centres[np.arange(count) % 200] + np.float32(0.4) * noise
    return vectors


# ---- the index in the store


async def store(kv: Client, index: Index, generation: int, before: tuple[Version, dict[str, Any]] | None) -> Any:
    """Put an index in the place of the one before; the manifest's version, and itself."""
    import ucxkv.objects

    stem = f"{SHARD}/{secrets.token_hex(8)}"
    names = {part: f"{stem}/{part}" for part in ("vectors", "ids", "first", "centroids")}
    for part, name in names.items():
        await kv.objects.put(name, getattr(index, part))
    manifest = {"generation": generation, "parts": names}
    expected = ucxkv.objects.ABSENT if before is None else before[0]
    version = await kv.objects.put(SHARD, json.dumps(manifest).encode(), if_version=expected)
    for name in before[1]["parts"].values() if before is not None else ():
        await kv.objects.delete(name)
    return version, manifest


async def load(kv: Client) -> tuple[int, Index] | None:
    """The index as it is now, with its generation; None: there is none yet."""
    while True:
        found = await kv.objects.get(SHARD)
        if found is None:
            return None
        assert isinstance(found.value, bytearray)
        manifest = json.loads(found.value)
        parts: dict[str, Any] = {}
        for part, name in manifest["parts"].items():
            got = await kv.objects.get(name)
            if got is not None:
                parts[part] = got.value
        if len(parts) == len(manifest["parts"]):
            return manifest["generation"], Index(**parts)
        await asyncio.sleep(0)  # replaced between the manifest and its parts: there is a newer one


async def writer(arguments: argparse.Namespace) -> dict[str, Any]:
    """Build, store, and replace."""
    import ucxkv

    stored_s: list[float] = []
    async with ucxkv.connect(arguments.address) as kv:
        before = None
        for generation in range(arguments.updates + 1):
            index = Index.build(vectors_of(generation))
            start = time.perf_counter()
            before = await store(kv, index, generation, before)
            stored_s.append(time.perf_counter() - start)
    nbytes = sum(part.nbytes for part in (index.vectors, index.ids, index.first, index.centroids))
    return {"bytes": nbytes, "store_s": sorted(stored_s)[len(stored_s) // 2]}


async def reader(arguments: argparse.Namespace) -> dict[str, Any]:
    """Load every generation that it meets, check and search it."""
    import ucxkv

    seen: list[int] = []
    loaded_s: list[float] = []
    searched_s: list[float] = []
    found = wanted = exact = 0
    async with ucxkv.connect(arguments.address) as kv:
        while not seen or seen[-1] < arguments.updates:
            start = time.perf_counter()
            got = await load(kv)
            took = time.perf_counter() - start
            if got is None or (seen and got[0] == seen[-1]):
                await asyncio.sleep(0.02)
                continue
            generation, index = got
            seen.append(generation)
            loaded_s.append(took)
            vectors = vectors_of(generation)
            if not np.array_equal(index.vectors, vectors[index.ids]) or len(index.ids) != len(vectors):
                raise SystemExit(f"the index of generation {generation} is not what was put")
            for query in vectors[:: len(vectors) // 20] + np.float32(0.1):
                brute = set(np.argsort(((vectors - query) ** 2).sum(axis=1), kind="stable")[:TOP].tolist())
                start = time.perf_counter()
                few = set(index.search(query, PROBES).tolist())
                searched_s.append(time.perf_counter() - start)
                exact += set(index.search(query, LISTS).tolist()) == brute
                found, wanted = found + len(few & brute), wanted + TOP
    middle = len(searched_s) // 2
    return {
        "generations": seen,
        "load_s": sorted(loaded_s)[len(loaded_s) // 2],
        "search_s": sorted(searched_s)[middle],
        "recall": found / wanted,
        "exact": exact == len(searched_s),
    }


async def engine(arguments: argparse.Namespace) -> dict[str, Any]:
    """Requests with images: KV blocks of the prompt, and the images' embeddings by the images' hashes."""
    import ucxkv

    encoded = 0

    def encode(image: bytes) -> npt.NDArray[np.float16]:
        """In the place of a vision encoder: 256 tokens of 1,024 numbers that depend on the image alone."""
        seed = int.from_bytes(hashlib.sha256(image).digest()[:8], "little")
        return np.random.default_rng(seed).standard_normal((256, 1024)).astype(np.float16)

    layout = ucxkv.Layout(model="any", dtype="float16", layers=4, kv_heads=2, head_dim=64, block_tokens=16)
    images = [b"the bytes of image %d" % number for number in range(8)]
    equal = True
    async with ucxkv.connect(arguments.address) as kv:
        for request in range(40):
            image = images[request * 7 % len(images)]
            name = f"embedding/{hashlib.sha256(image).hexdigest()}"
            got = await kv.objects.get(name)
            if got is None:
                encoded += 1
                await kv.objects.put(name, encode(image))
            else:
                equal &= isinstance(got.value, np.ndarray) and np.array_equal(got.value, encode(image))
            keys = ucxkv.block_keys(np.arange(64) + 1000 * request, layout)
            blocks = np.full((len(keys), layout.block_bytes), request, np.uint8)
            (await kv.put_many(keys, blocks, parents="chain")).raise_for_status()
            into = np.zeros_like(blocks)
            equal &= (await kv.get_many(keys, into)).hits == len(keys) and np.array_equal(into, blocks)
        listed = len(await kv.objects.list("embedding/"))
    return {"requests": 40, "images": len(images), "encoded": encoded, "listed": listed, "equal": bool(equal)}


ROLES = {"writer": writer, "reader": reader, "engine": engine}


def report(results: dict[str, dict[str, Any]], arguments: argparse.Namespace) -> int:
    """Print the outcome; 0 when everything was as it has to be."""
    wrote, read, served = (results[role] for role in ("writer", "reader", "engine"))
    seen = read["generations"]
    checks = {
        "indexes seen in order, to the last": seen == sorted(set(seen)) and seen[-1] == arguments.updates,
        "a search of all lists is brute force": read["exact"],
        "a search of 8 lists finds 80 % of that": read["recall"] >= 0.8,
        "embeddings and KV blocks as they were": served["equal"],
        "each image encoded once": served["encoded"] == served["images"] == served["listed"],
    }
    if arguments.json:
        print(json.dumps({"example": "vector_index", "ok": all(checks.values()), "checks": checks, **results}))
    else:
        mib = wrote["bytes"] / 2**20
        print(f"index         {mib:.1f} MiB in 4 arrays, replaced {arguments.updates} times; the reader saw {seen}")
        print(f"store, load   {wrote['store_s'] * 1e3:8.1f} ms, {read['load_s'] * 1e3:.1f} ms")
        print(
            f"search        {read['search_s'] * 1e6:8.1f} us for {PROBES} of {LISTS} lists, recall {read['recall']:.2f}"
        )
        encoded, requests = served["encoded"], served["requests"]
        print(f"embeddings    {encoded} encoded for {requests} requests with {served['images']} images")
        for what, is_so in checks.items():
            print(f"{'ok' if is_so else 'WRONG':<13} {what}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
