"""Waiting for what cannot be stopped: memory that the kernel or a thread uses is nobody's to give back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

__all__ = ["to_the_end"]

T = TypeVar("T")


async def to_the_end(work: asyncio.Future[T], on_cancel: Callable[[], None] = lambda: None) -> T:
    """The result of `work`. A cancel is passed on when it has ended; on_cancel is told at once, to make that soon."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        on_cancel()
        while not work.done():
            try:
                await asyncio.wait([work])
            except asyncio.CancelledError:
                continue
        if not work.cancelled():
            work.exception()  # nobody else will look
        raise
