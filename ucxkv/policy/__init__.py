"""Which block goes first when room is needed: pure policies over slot numbers."""

from __future__ import annotations

from ucxkv.policy.base import EvictionPolicy, LeafLinks
from ucxkv.policy.lru import LruPolicy

__all__ = ["EvictionPolicy", "LeafLinks", "LruPolicy"]
