"""Puts over all nodes: each chain goes to one home, in token order; parts go where placement puts them.

Where the directory has shards, a chain's home is the leader of its root's shard, and a put waits for one.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from ucxkv import errors
from ucxkv.client.mapped import MappedPath
from ucxkv.client.putter import UNTRIED
from ucxkv.client.results import Part, PutStatus
from ucxkv.client.retrying import until_decided
from ucxkv.ids import ROOT_KEY
from ucxkv.placement import part_indices
from ucxkv.protocol import messages as m

if TYPE_CHECKING:
    import numpy.typing as npt

    from ucxkv.buffers import Pieces
    from ucxkv.client.link import NodeLink
    from ucxkv.client.path import U8
    from ucxkv.client.router import Router

    KeyRows = npt.NDArray[np.uint8]

__all__ = ["chained", "put_blocks", "put_parts"]

_ORDER, _UNAVAILABLE = int(PutStatus.ORDER), int(PutStatus.UNAVAILABLE)


def chained(keys: KeyRows) -> KeyRows:
    """Parents of a call whose keys are one chain in order: root first, then each key before."""
    parents = np.zeros_like(keys)
    parents[1:] = keys[:-1]
    return parents


async def _homes(router: Router, keys: KeyRows, parents: KeyRows, deadline_ns: int) -> list[NodeLink | None]:
    """The node each block belongs to: the home of its chain; None where that is not reachable or the parent not
    found.
    """
    if router.sole is not None:
        return [router.sole] * len(keys)
    here: dict[bytes, NodeLink | None] = {}
    out: list[NodeLink | None] = []
    found: NodeLink | None
    for key, parent in zip(_rows(keys), _rows(parents), strict=True):
        if parent == ROOT_KEY:
            found = router.home_link(key)
        elif parent in here:
            found = here[parent]
        else:
            found = await _find(router, parent, deadline_ns)
            here[parent] = found
        here[key] = found
        out.append(found)
    return out


async def _find(router: Router, key: bytes, deadline_ns: int) -> NodeLink | None:
    answered = []
    for link in router.order(key):
        try:
            if (await link.path.exists(key, deadline_ns))[0]:
                router.remember(key, link)
                return link
        except errors.Unavailable:
            continue
        answered.append(link)
    if not router.covers(answered):
        return None  # a leader that was not asked may have it
    return router.remembered(key) or router.home_link(key)  # nobody has it whole: some of its parts may be out


def _rows(keys: KeyRows) -> list[bytes]:
    raw = keys.tobytes()
    return [raw[i : i + 16] for i in range(0, len(raw), 16)]


async def put_blocks(
    router: Router,
    keys: KeyRows,
    parents: KeyRows,
    pieces: Pieces,
    deadline_ns: int,
    *,
    durable: bool = False,
    exact: bool = False,
) -> U8:
    """Store n single-part blocks: PutStatus u8[n]. durable: all on nodes that keep them, or UsageError and none."""
    if router.shards.count:

        async def attempt(keys: KeyRows, parents: KeyRows, pieces: Pieces) -> U8:
            return await _put_blocks(router, keys, parents, pieces, deadline_ns, durable, exact, UNTRIED)

        return await until_decided(router, keys, parents, pieces, deadline_ns, attempt)
    if router.sole is not None:
        raw = keys.tobytes(), parents.tobytes()
        return await router.sole.putter.put(*raw, pieces, deadline_ns, durable=durable, exact=exact)
    return await _put_blocks(router, keys, parents, pieces, deadline_ns, durable, exact, _UNAVAILABLE)


async def _put_blocks(
    router: Router,
    keys: KeyRows,
    parents: KeyRows,
    pieces: Pieces,
    deadline_ns: int,
    durable: bool,
    exact: bool,
    untried: int,
) -> U8:
    """Try once. untried: the status of blocks of which nothing happened."""
    n = len(keys)
    status = np.full(n, untried, np.uint8)
    homes = await _homes(router, keys, parents, deadline_ns)
    alive = [link for link in dict.fromkeys(homes) if link is not None and link.is_alive]
    for link in alive if durable else ():
        link.putter.check_durable()
    for link in alive:
        mine = np.array([i for i, home in enumerate(homes) if home is link], np.intp)
        whole = len(mine) == n
        some_keys, some_parents = (keys, parents) if whole else (keys[mine], parents[mine])
        part = pieces if whole else pieces.take(mine)
        raw_keys, raw_parents = some_keys.tobytes(), some_parents.tobytes()
        done = await link.putter.put(
            raw_keys, raw_parents, part, deadline_ns, durable=durable, exact=exact, untried=untried
        )
        if untried == UNTRIED:
            await _doubt(router, link, raw_keys[:16], done, deadline_ns)
        status[mine] = done
        router.remember(keys[mine[0]].tobytes(), link)
        router.remember(keys[mine[-1]].tobytes(), link)
    return status


async def _doubt(router: Router, link: NodeLink, key: bytes, status: U8, deadline_ns: int) -> None:
    """Take back what `link` said of parents that are not there, when it may not have led their shard any more."""
    orders = status == _ORDER
    if orders.any() and not await router.is_current(link, key, deadline_ns):
        status[orders] = UNTRIED
    if (status == UNTRIED).any():
        router.shards.doubt(link.name)


async def put_parts(
    router: Router, keys: KeyRows, parents: KeyRows, pieces: Pieces, part: Part, deadline_ns: int
) -> U8:
    """Store one part of each of n blocks on the nodes that placement gives; visible when all parts of a block are in,
    and those of its parent.

    A block is sent with its parent or after it, so one whose part goes to another node than its parent's waits for the
    parent's message to be answered.
    """
    if router.shards.count:

        async def attempt(keys: KeyRows, parents: KeyRows, pieces: Pieces) -> U8:
            return await _put_parts(router, keys, parents, pieces, part, deadline_ns, UNTRIED)

        return await until_decided(router, keys, parents, pieces, deadline_ns, attempt)
    return await _put_parts(router, keys, parents, pieces, part, deadline_ns, _UNAVAILABLE)


async def _put_parts(
    router: Router, keys: KeyRows, parents: KeyRows, pieces: Pieces, part: Part, deadline_ns: int, untried: int
) -> U8:
    """Try once. untried: the status of blocks of which nothing happened."""
    status = np.full(len(keys), untried, np.uint8)
    homes = await _homes(router, keys, parents, deadline_ns)
    if router.members is None:
        return status
    holders = part_indices(keys, part.count, router.members)[:, part.index]
    groups: dict[tuple[int, NodeLink, NodeLink], list[int]] = {}
    sent: dict[bytes, tuple[int, NodeLink, NodeLink]] = {}
    for i, (home, key, parent) in enumerate(zip(homes, _rows(keys), _rows(parents), strict=True)):
        if home is None or not home.is_alive:
            continue
        holder = router.links.get(router.members.nodes[holders[i]], home)
        if not (isinstance(holder.path, MappedPath) and isinstance(home.path, MappedPath)):
            holder = home  # a reader by message finds at the home what is there
        before = sent.get(parent)
        turn = 0 if before is None else before[0] + (before[1:] != (home, holder))
        sent[key] = turn, home, holder
        groups.setdefault(sent[key], []).append(i)
    for (_, home, holder), mine in sorted(groups.items(), key=lambda group: group[0][0]):
        index = np.array(mine, np.intp)
        done = await _put_group(
            home, holder, keys[index], parents[index], pieces.take(index), part, deadline_ns, untried
        )
        if untried == UNTRIED:
            await _doubt(router, home, keys[index[0]].tobytes(), done, deadline_ns)
        status[index] = done
        for key, state in zip(_rows(keys[index]), done.tolist(), strict=True):
            if state not in (UNTRIED, _UNAVAILABLE):
                router.remember(key, home)  # where its other parts go, and the blocks below it
    return status


async def _put_group(
    home: NodeLink,
    holder: NodeLink,
    keys: KeyRows,
    parents: KeyRows,
    pieces: Pieces,
    part: Part,
    deadline_ns: int,
    untried: int,
) -> U8:
    status = np.full(len(keys), untried, np.uint8)
    at = 0
    while at < len(keys):
        length = int(pieces.nbytes[at])
        same = int(np.argmin(np.append(pieces.nbytes[at:] == length, False)))
        try:
            lent = await holder.putter.lend(pieces.run(at, at + same), deadline_ns)
        except errors.Unavailable:
            break
        if lent is None:
            status[at:] = PutStatus.NO_SPACE
            break
        taken, sums = lent
        end = at + len(taken)
        message = m.PutPart(
            keys=keys[at:end].tobytes(),
            parents=parents[at:end].tobytes(),
            segments=taken.regions.tobytes(),
            offsets=taken.offsets.tobytes(),
            lengths=pieces.nbytes[at:end].astype(np.uint32).tobytes(),
            sums=sums.tobytes(),
            part=part.index,
            parts=part.count,
            put_id=part.put_id,
            owner=holder.node_id,
            owner_session=holder.welcome.session,
            deadline_ms=max(1, (deadline_ns - time.monotonic_ns()) // 1_000_000),
            epoch=home.epoch,
        )
        status[at:end] = _UNAVAILABLE  # from here on its answer alone tells
        try:
            answer = await home.ask(message, deadline_ns)
        except BaseException as exc:
            if holder is not home:
                holder.putter.abandon(taken)  # whichever comes first at the holder, this or the home's adoption, wins
            if not isinstance(exc, errors.Unavailable):
                raise
            if isinstance(exc, errors.NotLeader):
                status[at:end] = untried
            break
        if not isinstance(answer, m.PutDone) or len(answer.status) != end - at:
            break
        status[at:end] = np.frombuffer(answer.status, np.uint8)
        at = end
    return status
