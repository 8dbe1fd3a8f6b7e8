"""Why a block is where it is, as its nodes tell it: values for programs, sentences for people."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ucxkv.protocol import messages as m

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ucxkv.client.link import NodeLink

__all__ = ["Explanation", "PastDecision", "explained_by"]


@dataclass(frozen=True, slots=True)
class PastDecision:
    """One thing that befell a block, `ago_s` before the answer.

    verdict: "promote", "demote" or "drop"; from_tier, to_tier: "host", "nvme" or "" for none; age_s: since the block's
    last use then. worth, price: prefill seconds saved a second, by the block and by what left before it; hazard: uses a
    second that were expected of it; these are 0 from a policy that knows only an order.
    """

    ago_s: float
    verdict: str
    from_tier: str
    to_tier: str
    reason: str
    age_s: float
    worth: float
    price: float
    hazard: float

    def __str__(self) -> str:
        done = {"promote": "brought into memory", "demote": "left memory for the disk"}.get(self.verdict)
        where = done or f"dropped from {'disk' if self.from_tier == 'nvme' else 'memory'}"
        text = f"{_span(self.ago_s)} ago: {where}: {self.reason}; unused for {_span(self.age_s)} then"
        if self.hazard:
            text += f", hazard {self.hazard:.3g}/s, worth {self.worth:.3g} against {self.price:.3g}"
        return text


@dataclass(frozen=True, slots=True)
class Explanation:
    """What one node says of a block. tier: "host", "nvme", or "" when it is not visible there.

    idle_s: since its last use; depth: blocks above it, 0 under lru; children, cold_children: blocks below it that are
    in memory (or being written), and on disk only; uses: up to a few; gain_s: what a hit saves; the other numbers as in
    PastDecision. decisions: the newest first, as far as they are among the `kept` last ones about all blocks.
    """

    node: str
    policy: str
    rule: str
    tier: str
    nbytes: int
    parts: int
    idle_s: float
    depth: int
    children: int
    cold_children: int
    leases: int
    is_durable: bool
    has_copy: bool
    uses: int
    worth: float
    price: float
    hazard: float
    gain_s: float
    decisions: tuple[PastDecision, ...]
    kept: int

    @property
    def is_known(self) -> bool:
        """Whether the block is visible there, or something is remembered of it."""
        return bool(self.tier or self.decisions)

    @property
    def why(self) -> str:
        """One sentence: where it is, and why it is still or no longer there."""
        if not self.tier:
            if self.decisions:
                return f"not stored any more; {self.decisions[0]}"
            return f"not stored, and not among the last {self.kept} decisions"
        used = f"used {_span(self.idle_s)} ago"
        if self.tier == "nvme":
            below = f", {_count(self.cold_children, 'block')} below it" if self.cold_children else ""
            return f"on disk only, {used}{below}: it comes into memory when somebody asks for it"
        holders = [
            _count(self.children, "block") + " below it" if self.children else "",
            _count(self.leases, "lease") if self.leases else "",
            "its class, durable" if self.is_durable else "",
        ]
        held = ", ".join(text for text in holders if text)
        copy = "with a copy on disk" if self.has_copy else "without a copy on disk"
        if held:
            return f"in memory, {copy}, {used}: held by {held}"
        turn = f"in memory, {copy}, {used}: nothing holds it, and it leaves when its turn comes ({self.rule})"
        return turn + (f", worth {self.worth:.3g}, what left last {self.price:.3g}" if self.hazard else "")


async def explained_by(links: Iterable[NodeLink], key: bytes, deadline_ns: int) -> list[Explanation]:
    """Ask these nodes about a block. Raises what asking raises."""
    found = []
    for link in links:
        link.flush_touches()
        a = await link.ask(m.Explain(key), deadline_ns)
        assert isinstance(a, m.Explained)
        past = tuple(
            PastDecision(p.ago_s, p.verdict, p.from_tier, p.to_tier, p.reason, p.age_s, p.worth, p.price, p.hazard)
            for p in a.decisions
        )
        found.append(
            Explanation(
                link.name, a.policy, a.rule, a.tier, a.nbytes, a.parts, a.idle_s, a.depth, a.children,
                a.cold_children, a.leases, a.is_durable, a.has_copy, a.uses, a.worth, a.price, a.hazard, a.gain,
                past, a.kept,
            )
        )  # fmt: skip
    return found


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _span(seconds: float) -> str:
    """A time for people, to two or three digits."""
    for unit, size in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
