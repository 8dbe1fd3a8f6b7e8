"""Control messages that ask why a block is where it is; the rules are those of `messages`, which has these names
too.
"""

from __future__ import annotations

from typing import ClassVar

from ucxkv.protocol.base import Message, UInt

__all__ = ["Explain", "Explained", "PastDecision"]


class Explain(Message, frozen=True):
    """What about this one block? It may be gone. Answer: Explained."""

    CODE: ClassVar[int] = 58
    keys: bytes


class PastDecision(Message, frozen=True):
    """One thing that befell a block. verdict: promote, demote or drop; tiers: "" for none; age_s: since its last use
    then; worth and price: prefill seconds saved a second, by the block and by what left before it; hazard: uses a
    second that were expected. The last three are 0 from a policy that knows only an order.
    """

    CODE: ClassVar[int] = 60
    ago_s: float
    verdict: str
    from_tier: str
    to_tier: str
    reason: str
    age_s: float
    worth: float
    price: float
    hazard: float


class Explained(Message, frozen=True):
    """One node's answer. tier: "" when the block is not visible here, and all up to `gain` is 0 then.

    idle_s: since its last use; depth: blocks above it; children, cold_children: blocks that hang on it in memory, or
    are being written, and on disk only; uses: since it came, up to a few; gain: seconds that a hit saves; the rest of
    the numbers as in PastDecision. decisions: the newest first; kept: how many decisions about all blocks are known.
    """

    CODE: ClassVar[int] = 59
    policy: str
    rule: str
    tier: str = ""
    nbytes: UInt = 0
    parts: UInt = 0
    idle_s: float = 0.0
    depth: UInt = 0
    children: UInt = 0
    cold_children: UInt = 0
    leases: UInt = 0
    is_durable: bool = False
    has_copy: bool = False
    uses: UInt = 0
    worth: float = 0.0
    price: float = 0.0
    hazard: float = 0.0
    gain: float = 0.0
    decisions: list[PastDecision] = []
    kept: UInt = 0
