"""Reads over all nodes: one pass per node over the keys still missing, best guess first. Statuses, never
exceptions, per key.

Where the directory has shards, a chain whose root is known is asked for at its shard's leader alone; a key that nobody
has is a MISS when the nodes that answered lead all the shards it may be in, and UNAVAILABLE otherwise. No read waits
for a leader.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from ucxkv import errors
from ucxkv.client.cold import read_cold
from ucxkv.client.results import ReadStatus

if TYPE_CHECKING:
    import numpy.typing as npt

    from ucxkv.buffers import Pieces
    from ucxkv.client.link import NodeLink
    from ucxkv.client.path import U8, U64
    from ucxkv.client.router import Router

__all__ = ["plan", "read_blocks"]

_MISS, _UNAVAILABLE = int(ReadStatus.MISS), int(ReadStatus.UNAVAILABLE)
_UNMAPPED, _CORRUPT = int(ReadStatus.UNMAPPED), int(ReadStatus.CORRUPT)


def plan(
    router: Router, keys: npt.NDArray[np.uint8], root: bytes | None
) -> list[tuple[NodeLink, npt.NDArray[np.intp]]]:
    """In which order to ask which nodes for which keys (indices); every node is asked for every key at most once.

    root: the chain's first key, when the caller knows it; with shards, its leader is the only node to ask, and while
    there is none, nobody is asked. Without it, a chain whose first key was seen before is asked for where that was;
    else each key is taken for a root.
    """
    everything = np.arange(len(keys))
    if router.sole is not None:
        return [(router.sole, everything)]
    if not router.links:
        return []
    if root is not None:
        return [(link, everything) for link in router.links_of(root)]
    first = keys[0].tobytes()
    if len(keys) == 1 or router.remembered(first) is not None:
        return [(link, everything) for link in router.order(first)]
    homes = np.array(router.home_names(keys))
    steps = [(link, np.flatnonzero(homes == name)) for name, link in router.links.items()]
    rest = [(link, np.flatnonzero(homes != name)) for name, link in router.links.items()]
    return [step for step in steps + rest if len(step[1])]


async def read_blocks(
    router: Router, keys: npt.NDArray[np.uint8], pieces: Pieces, root: bytes | None, deadline_ns: int
) -> tuple[U8, U64, dict[str, int]]:
    """Read n blocks: (ReadStatus u8[n], stored lengths u64[n], hits by node name)."""
    n = len(keys)
    sole = router.sole
    if sole is not None:
        status, lengths = await _read_at(router, sole, keys.tobytes(), pieces, deadline_ns)
        hits = n - int(np.count_nonzero(status))
        return status, lengths, {sole.name: hits} if hits else {}
    status = np.full(n, int(ReadStatus.MISS if router.links else ReadStatus.UNAVAILABLE), np.uint8)
    lengths = np.zeros(n, np.uint64)
    sources: dict[str, int] = {}
    steps = plan(router, keys, root)
    silent: set[NodeLink] = set()
    for link, indices in steps:
        open_ones = status[indices]
        wanted = indices[(open_ones == _MISS) | (open_ones == _UNAVAILABLE)]
        if not len(wanted):
            continue
        whole = len(wanted) == n
        some = keys if whole else keys[wanted]
        part = pieces if whole else pieces.take(wanted)
        got, sizes = await _read_at(router, link, some.tobytes(), part, deadline_ns)
        if router.shards.count and (got == _UNAVAILABLE).any():
            silent.add(link)
            router.look_for_leaders()  # another may lead by now, and this one may say nothing any more
        status[wanted], lengths[wanted] = got, sizes
        hits = len(got) - int(np.count_nonzero(got))
        if hits:
            sources[link.name] = sources.get(link.name, 0) + hits
            if router.sole is None:
                router.remember(keys[wanted[0]].tobytes(), link)
    if router.shards.count and not router.covers({link for link, _ in steps} - silent, root):
        status[status == _MISS] = _UNAVAILABLE
    return status, lengths, sources


async def _read_at(router: Router, link: NodeLink, keys: bytes, pieces: Pieces, deadline_ns: int) -> tuple[U8, U64]:
    n = len(pieces)
    try:
        if not link.is_alive:
            raise errors.Unavailable("the node is gone", node=link.name)
        start_s = time.perf_counter() if router.loads.is_due(n) else 0.0
        status, lengths = await link.path.read(keys, pieces, deadline_ns)
        bad = status.any()  # HIT is 0
        if start_s and not bad:
            nbytes = int(lengths.sum())
            router.loads.arrived(link.name, link.path.kind, n, nbytes, start_s, time.perf_counter())
        unmapped = np.flatnonzero(status == _UNMAPPED) if bad else ()
        if len(unmapped) and link.welcome.has_disk:
            start_s = time.perf_counter()
            await read_cold(link, keys, pieces, status, lengths, deadline_ns)
            came = unmapped[status[unmapped] == 0]  # HIT
            if len(came):
                nbytes = int(lengths[came].sum())
                router.loads.came_cold(link.name, link.path.kind, len(came), nbytes, start_s, time.perf_counter())
            unmapped = np.flatnonzero(status == _UNMAPPED)
        if len(unmapped):
            await router.learn_regions(link, deadline_ns)
            again = b"".join(keys[16 * i : 16 * i + 16] for i in unmapped)
            status[unmapped], lengths[unmapped] = await link.path.read(again, pieces.take(unmapped), deadline_ns)
            status[status == _UNMAPPED] = _UNAVAILABLE
    except (errors.Unavailable, errors.StaleError):
        return np.full(n, _UNAVAILABLE, np.uint8), np.zeros(n, np.uint64)
    if not link.is_alive:  # it died under the read: what was copied is not trusted
        return np.full(n, _UNAVAILABLE, np.uint8), np.zeros(n, np.uint64)
    if not bad:
        link.touch(keys)
        return status, lengths
    hits = status == 0
    if hits.any():
        link.touch(b"".join(keys[16 * i : 16 * i + 16] for i in np.flatnonzero(hits).tolist()))
    doubtful = np.flatnonzero((status == _CORRUPT) | (status == ReadStatus.STALE))
    if len(doubtful):  # by message a bad sum looks like a block that changed twice; the node tells them apart
        link.report_damage(b"".join(keys[16 * i : 16 * i + 16] for i in doubtful.tolist()))
    return status, lengths
