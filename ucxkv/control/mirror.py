"""A picture of a prefix that keeps itself true: list, then watch, and list again after a RESYNC or a failed list.

Each picture is one that the control plane went through, and they come in its order; some in between may be left out. An
outage stops the pictures and nothing else: the last one stays what is known."""

from __future__ import annotations

import logging
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ucxkv import errors
from ucxkv.control.base import ChangeKind, ControlClosed, SystemClock

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from ucxkv.control.base import Clock, ControlPlane, Entry

__all__ = ["Picture", "mirror"]

_BACKOFF_S: Final = (0.1, 0.2, 0.5, 1.0)

log = logging.getLogger("ucxkv.control")


@dataclass(frozen=True, slots=True)
class Picture:
    """entries: by key. revision: all changes up to this one are in it, and none after it."""

    entries: dict[str, Entry]
    revision: int


async def mirror(plane: ControlPlane, prefix: str, *, clock: Clock | None = None) -> AsyncGenerator[Picture, None]:
    """The entries under `prefix`, now and after every change. Raises ControlClosed in the end, and what is not
    Unavailable.

    Changes that the control plane made in one step may come as several pictures of one revision, of which the
    last is whole.
    """
    clock = clock or SystemClock()
    attempt = 0
    while True:
        try:
            entries, revision = await plane.list(prefix)
        except ControlClosed:
            raise
        except errors.Unavailable as exc:
            log.debug("control.list prefix=%s why=%s", prefix, exc)
            await clock.sleep(_BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)])
            attempt += 1
            continue
        attempt = 0
        picture = {entry.key: entry for entry in entries}
        yield Picture(dict(picture), revision)
        async with aclosing(plane.watch(prefix, revision)) as changes:
            async for change in changes:
                if change.kind is ChangeKind.RESYNC:
                    break
                if change.kind is ChangeKind.PUT:
                    picture[change.entry.key] = change.entry
                else:
                    picture.pop(change.entry.key, None)
                revision = change.entry.revision
                yield Picture(dict(picture), revision)
