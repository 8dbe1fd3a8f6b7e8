"""Conversations: which chains of blocks each used, so that they are brought to memory when its user comes back.

`book` and `records` are pure; `prefetch`, `stored` and `session` do what is awaited.
"""

from __future__ import annotations

from ucxkv.sessions.prefetch import PrefetchOrder, PrefetchResult
from ucxkv.sessions.session import Session, Sessions

__all__ = ["PrefetchOrder", "PrefetchResult", "Session", "Sessions"]
