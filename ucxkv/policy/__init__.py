"""Which block goes first when room is needed, and what a block is worth: pure policies over slot numbers."""

from __future__ import annotations

from ucxkv.policy.base import TICKS_PER_S, EvictionPolicy, LeafLinks, LearningPolicy, Rating
from ucxkv.policy.lru import LruPolicy
from ucxkv.policy.residents import Residents
from ucxkv.policy.s3fifo import S3FifoPolicy
from ucxkv.policy.tuc import TucPolicy

__all__ = [
    "TICKS_PER_S",
    "EvictionPolicy",
    "LeafLinks",
    "LearningPolicy",
    "LruPolicy",
    "Rating",
    "Residents",
    "S3FifoPolicy",
    "TucPolicy",
]
