"""Objects for programs without an event loop: `kv.objects` of a `ucxkv.sync` client. Every method is that of `Objects`,
blocking.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from ucxkv.objects.records import Version
    from ucxkv.objects.store import Absent, ObjectInfo, Objects, StoredObject

__all__ = ["BlockingObjects"]

T = TypeVar("T")


class Run(Protocol):
    """Runs a call on the client's loop, from another thread, to its end."""

    def __call__(self, call: Coroutine[Any, Any, T]) -> T:
        """What the call returns, or raises."""
        ...


class BlockingObjects:
    """See the module. Usable from any number of threads."""

    def __init__(self, run: Run, objects: Objects) -> None:
        self._run = run
        self._objects = objects

    def put(
        self,
        name: str,
        value: object,
        *,
        if_version: Version | Absent | None = None,
        durable: bool = False,
        gather: bool = False,
        deadline_s: float | None = None,
    ) -> Version:
        """Store a value under a name."""
        call = self._objects.put(
            name, value, if_version=if_version, durable=durable, gather=gather, deadline_s=deadline_s
        )
        return self._run(call)

    def get(self, name: str, into: object | None = None, *, deadline_s: float | None = None) -> StoredObject | None:
        """Read an object; None: it is not there."""
        return self._run(self._objects.get(name, into, deadline_s=deadline_s))

    def stat(self, name: str, *, deadline_s: float | None = None) -> ObjectInfo | None:
        """What is known of an object without its bytes."""
        return self._run(self._objects.stat(name, deadline_s=deadline_s))

    def list(self, prefix: str = "", *, deadline_s: float | None = None) -> list[ObjectInfo]:
        """All objects whose names begin with `prefix`."""
        return self._run(self._objects.list(prefix, deadline_s=deadline_s))

    def delete(self, name: str, *, if_version: Version | None = None, deadline_s: float | None = None) -> bool:
        """Remove an object; whether there was one."""
        return self._run(self._objects.delete(name, if_version=if_version, deadline_s=deadline_s))

    def sweep(self, *, older_than_s: float = 3600.0, deadline_s: float | None = None) -> int:
        """Remove values that are no object's."""
        return self._run(self._objects.sweep(older_than_s=older_than_s, deadline_s=deadline_s))
