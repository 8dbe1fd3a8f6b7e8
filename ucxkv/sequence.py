"""Tokens in, KV out: one token sequence's blocks, matched, loaded and saved through a client.

Promises of this module:

- A block counts as matched only when all of its layer groups are visible, and so are those of every block before it.
- With one layer group (the default) a block is one value under its own key. With more, each group is a value under a
  key derived from the block's (keys.derived_keys with the group's number and their count), and the groups form
  separate chains. So layers can be loaded one group at a time, each value carries its own sum, and a half-saved block
  is never taken for whole.
- A load ends at the first block that is not there. Every block it reports holds the stored bytes; the rest of `into`
  is undefined.
- After a load step returned, or `aclose` did, nothing writes into `into`. Only `ahead` > 0 reads before it is asked
  to, and that needs `async with`, which ends with `aclose`.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ucxkv.client.results import GetResult, Match, PutResult, PutStatus, ReadStatus
from ucxkv.errors import DeadlineExceeded, UsageError
from ucxkv.keys import KeyArray, Keys, block_keys, derived_keys
from ucxkv.layout import Layout
from ucxkv.loading import Load, Loaded, Order, Step, Until
from ucxkv.paged import PagedMemory
from ucxkv.policy.cost import PrefillCost
from ucxkv.splitting import Split

__all__ = ["KvClient", "Load", "Loaded", "Order", "SaveResult", "Sequence", "group_keys"]

_T = TypeVar("_T")

_STEP_BYTES: Final = 4 << 20
"""Bytes a step of order "block", or of a split, asks for: about what one peer should have in flight (more falls out
of the cache)."""

_SPAN_TOKENS: Final = 256
"""Tokens of a span to compute in a split: enough to keep an accelerator busy, little enough to stop near the loads."""

_PASS_TOKENS: Final = 64
"""A pass reads all weights; on accelerators and CPUs alike that is worth computing tens to hundreds of tokens."""


class KvClient(Protocol):
    """What a sequence needs of a client; `ucxkv.Client` is one."""

    async def match(self, keys: Keys, *, deadline_s: float | None = None) -> Match:
        """See Client.match."""

    async def get_many(
        self, keys: Keys, into: object, *, root: bytes | None = None, deadline_s: float | None = None
    ) -> GetResult:
        """See Client.get_many."""

    async def put_many(
        self, keys: Keys, blocks: object, parents: Keys, *, durable: bool = False, deadline_s: float | None = None
    ) -> PutResult:
        """See Client.put_many."""


@dataclass(frozen=True, slots=True)
class SaveResult:
    """What a save did.

    blocks: leading blocks of the sequence that are in the store now, whoever stored them. stored: values this call
    made visible.
    status: PutStatus u8 (layer groups, blocks tried), for the blocks from `start` on.
    """

    blocks: int
    stored: int
    start: int
    status: npt.NDArray[np.uint8]


class Sequence:
    """The whole blocks of one token sequence in one layout; made by `kv.sequence(layout, token_ids)`.

    keys: (blocks, 16) uint8. layout: with the salt given, if one was. blocks_count: whole blocks; a partial tail is
    not stored."""

    def __init__(self, kv: KvClient, layout: Layout, token_ids: npt.ArrayLike, *, salt: str | None = None) -> None:
        """token_ids: see `block_keys`. salt: the tenant's, in place of the layout's. Raises UsageError."""
        self._kv = kv
        self.layout = layout if salt is None else dataclasses.replace(layout, salt=salt)
        self.keys = block_keys(token_ids, self.layout)
        self._chains = group_keys(self.keys, self.layout.layer_groups)

    @property
    def blocks_count(self) -> int:
        """Whole blocks in the sequence."""
        return len(self.keys)

    async def match(self, *, deadline_s: float | None = None) -> int:
        """Leading blocks that are in the store, all layers of them. deadline_s: seconds from now."""
        return (await self.look_up(deadline_s=deadline_s)).blocks if len(self.keys) else 0

    async def look_up(self, *, deadline_s: float | None = None) -> Match:
        """What `match` counts, with tiers, sizes and load seconds: those of a block are all its layer groups' together,
        its tier is the slowest of theirs. deadline_s: seconds from now.
        """
        found = await _together([self._kv.match(chain, deadline_s=deadline_s) for chain in self._chains])
        if len(found) == 1:
            return found[0]
        blocks = min(match.blocks for match in found)
        are_sizes_known = all(len(match.nbytes) == match.blocks for match in found)
        return Match(
            blocks,
            np.max([match.tiers[:blocks] for match in found], axis=0),
            np.sum([match.load_s[:blocks] for match in found], axis=0),
            all(match.is_certain for match in found),
            np.sum([match.nbytes[: blocks if are_sizes_known else 0] for match in found], axis=0, dtype=np.uint64),
            found[0].node,
        )

    def load(
        self,
        into: object,
        *,
        order: Order = "layer",
        blocks: int | None = None,
        block_ids: npt.ArrayLike | None = None,
        step_blocks: int | None = None,
        ahead: int = 0,
        deadline_s: float | None = None,
    ) -> Load:
        """Load the sequence's leading blocks step by step: `async for loaded in seq.load(into=cache): ...`.

        into: a paged cache, see PagedMemory; borrowed until the last step returned or `aclose` did. order: see Order.
        blocks: how many to load; None asks `match`. block_ids: the page of each block; None means 0, 1, 2 ...
        step_blocks: blocks a step, for order "block" (default about 4 MiB) and "tail" (default 1).
        ahead: steps to read in advance while the caller works; above 0 it needs `async with`. deadline_s: for all
        steps.
        Raises UsageError here for what is wrong with `into`; Unavailable is never raised: what cannot be read ends
        the load."""
        if order not in ("layer", "block", "tail"):
            raise UsageError(f"order is {order!r}; use 'layer', 'block' or 'tail'")
        if blocks is not None and not 0 <= blocks <= self.blocks_count:
            raise UsageError(f"blocks is {blocks}; the sequence has {self.blocks_count} whole blocks")
        if ahead < 0 or (step_blocks is not None and step_blocks < 1):
            raise UsageError(f"ahead is {ahead} and step_blocks {step_blocks}; at least 0 and 1")
        if step_blocks is None:
            step_blocks = 1 if order == "tail" else max(1, _STEP_BYTES // self.layout.block_bytes)
        memory = PagedMemory(into, self.layout, writable=True)
        return Load(self, memory, order, blocks, block_ids, step_blocks, ahead, deadline_s)

    def split(
        self,
        into: object,
        prefill: float | PrefillCost,
        *,
        pass_s: float | None = None,
        blocks: int | None = None,
        block_ids: npt.ArrayLike | None = None,
        compute_blocks: int | None = None,
        load_blocks: int | None = None,
        deadline_s: float | None = None,
    ) -> Split:
        """Compute the head of the stored prefix while its tail loads: `async with seq.split(cache, 8000.0) as split:`
        and in it `async for blocks in split: await compute(blocks)`; see Split.

        into: the paged cache that the engine computes into, see PagedMemory; borrowed until `async with` ends.
        prefill: the engine's tokens a second, or what they cost by position. pass_s: what a pass costs besides, however
        few tokens it computes (about a decoding step; default as much as 64 tokens). Both are first guesses, which are
        corrected by how long each span takes. blocks: most to split, default all that are stored. block_ids: the page
        of each block; None means 0, 1, 2 ... compute_blocks: most of a span to compute (default 256 tokens).
        load_blocks: most of a load (default about 4 MiB). deadline_s: for all loads; what has not come by then is
        computed.
        Raises UsageError here for what is wrong with `into` and the numbers."""
        if blocks is not None and not 0 <= blocks <= self.blocks_count:
            raise UsageError(f"blocks is {blocks}; the sequence has {self.blocks_count} whole blocks")
        if not isinstance(prefill, PrefillCost):
            if not 0 < prefill < float("inf"):
                raise UsageError(f"prefill is {prefill}; pass the engine's tokens a second, or a ucxkv.PrefillCost")
            prefill = PrefillCost(1.0 / prefill)
        if pass_s is None:
            pass_s = prefill.prompt_s(_PASS_TOKENS)
        if not 0 <= pass_s < float("inf"):
            raise UsageError(f"pass_s is {pass_s}; pass seconds, at least 0")
        if compute_blocks is None:
            compute_blocks = max(1, _SPAN_TOKENS // self.layout.block_tokens)
        if load_blocks is None:
            load_blocks = max(1, _STEP_BYTES // self.layout.block_bytes)
        if min(compute_blocks, load_blocks) < 1:
            raise UsageError(f"compute_blocks is {compute_blocks} and load_blocks {load_blocks}; at least 1")
        memory = PagedMemory(into, self.layout, writable=True)
        return Split(self, memory, prefill, pass_s, blocks, block_ids, (compute_blocks, load_blocks), deadline_s)

    async def save(
        self,
        cache: object,
        *,
        block_ids: npt.ArrayLike | None = None,
        start: int | None = None,
        blocks: int | None = None,
        durable: bool = False,
        deadline_s: float | None = None,
    ) -> SaveResult:
        """Store the sequence's blocks from a paged cache; blocks that are there already are not sent again.

        cache: see PagedMemory; borrowed until this returns. block_ids: the page of each block, from block 0 on; None
        means 0, 1, 2 ... start: first block to store; None asks `match` what is there. blocks: end of what to store,
        default all. durable: see Client.put; blocks that are there already become durable with the last of them, which
        is sent again.
        Raises UsageError. A full or dead node shows in the result's status.
        """
        memory = PagedMemory(cache, self.layout, writable=False)
        end = self.blocks_count if blocks is None else blocks
        if not 0 <= (start or 0) <= end <= self.blocks_count:
            raise UsageError(f"start is {start} and blocks {blocks}; the sequence has {self.blocks_count} whole blocks")
        pages = memory.page_numbers(block_ids, end)
        until = Until(deadline_s)
        first = min(await self.match(deadline_s=until.left_s()), end) if start is None else start
        if durable and start is None:
            first = max(0, first - 1)  # what is there may be of class cache: its last block takes all above it along
        result = await self._put(memory, pages, first, end, until, durable)
        if first and start is None and (result.status == PutStatus.ORDER).any():
            # Blocks that matched were evicted before their children came: store the whole chain.
            result = await self._put(memory, pages, 0, end, until, durable)
        return result

    async def _put(
        self, memory: PagedMemory, pages: npt.NDArray[np.int64], start: int, end: int, until: Until, durable: bool
    ) -> SaveResult:
        status = np.zeros((len(self._chains), end - start), np.uint8)
        stored, whole = 0, end
        for group, chain in enumerate(self._chains):
            if start == end:
                break
            parents = np.zeros((end - start, 16), np.uint8)
            parents[1 if start == 0 else 0 :] = chain[max(start - 1, 0) : end - 1]
            result = await self._kv.put_many(
                chain[start:end],
                memory.pieces(pages[start:end], group),
                parents,
                durable=durable,
                deadline_s=until.left_s(),
            )
            status[group] = result.status
            stored += result.stored
            there = (result.status == PutStatus.STORED) | (result.status == PutStatus.ALREADY)
            missing = np.flatnonzero(~there)
            whole = min(whole, start + int(missing[0]) if len(missing) else end)
        return SaveResult(whole, stored, start, status)

    async def read(
        self, memory: PagedMemory, pages: npt.NDArray[np.int64], step: Step, until: Until
    ) -> npt.NDArray[np.uint8]:
        """Read the step's groups of its blocks: ReadStatus u8 (blocks of the step,), of each the worst of its groups.

        What the deadline does not leave time for is UNAVAILABLE.
        """
        a, b = step.blocks.start, step.blocks.stop
        try:
            deadline_s = until.left_s()
        except DeadlineExceeded:
            return np.full(b - a, ReadStatus.UNAVAILABLE, np.uint8)

        async def read(group: int) -> GetResult:
            chain = self._chains[group]
            return await self._kv.get_many(
                chain[a:b], memory.pieces(pages[a:b], group), root=chain[0].tobytes(), deadline_s=deadline_s
            )

        status = np.zeros(b - a, np.uint8)
        for result in await _together([read(group) for group in step.groups]):
            np.maximum(status, result.status, out=status)
        return status


async def _together(calls: list[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Run the calls side by side; when one raises, end the others first, then raise its error alone."""
    if len(calls) == 1:
        return [await calls[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except BaseExceptionGroup as many:
        raise many.exceptions[0] from None
    return [task.result() for task in tasks]


def group_keys(keys: KeyArray, groups: int) -> list[KeyArray]:
    """The keys of each layer group's values; the block's own where there is one group."""
    if groups == 1:
        return [keys]
    return [derived_keys(keys, f"layer group {group} of {groups}".encode()) for group in range(groups)]
