"""The blocking client: the same calls for programs without an event loop, from any number of threads.

    with ucxkv.sync.connect("127.0.0.1:13337") as kv:
        kv.put_many(keys, blocks, parents="chain")

One thread runs a loop of its own for each client. Buffers are borrowed until a call returns.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np

from ucxkv import errors
from ucxkv.client import connect as connect_async
from ucxkv.client.ticket import Ticket

if TYPE_CHECKING:
    from collections.abc import Coroutine

    import numpy.typing as npt

    from ucxkv.buffers import RegisteredBuffer
    from ucxkv.client import (
        Client,
        Connect,
        ConnectionInfo,
        Explanation,
        GetResult,
        KeyInfo,
        Lease,
        Match,
        NodeStatus,
        PeerInfo,
        PutResult,
        PutStatus,
        View,
    )
    from ucxkv.keys import Keys
    from ucxkv.objects import BlockingObjects
    from ucxkv.sessions import PrefetchResult, Session
    from ucxkv.tokens import Token

__all__ = ["HeldLease", "HeldSession", "SyncClient", "connect"]

T = TypeVar("T")


class HeldLease:
    """A lease held by a blocking client; `with kv.lease(keys) as lease:`."""

    def __init__(self, owner: SyncClient, lease: Lease) -> None:
        self._owner = owner
        self._lease = lease
        owner._run(lease.__aenter__())

    @property
    def granted(self) -> npt.NDArray[np.bool_]:
        """Which keys were there, bool[n]."""
        return self._lease.granted

    @property
    def valid(self) -> bool:
        """True while every granted block is certain to stay in place."""
        return self._lease.valid

    def release(self) -> None:
        """End the lease now. Idempotent."""
        self._owner._run(self._lease.release())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


class HeldSession:
    """A session of a blocking client, made by `kv.session(id)`; see `ucxkv.Session`. From any thread."""

    def __init__(self, owner: SyncClient, session: Session) -> None:
        self._owner = owner
        self._session = session
        self.id = session.id

    def turn(self, used: Keys, *, deadline_s: float | None = None) -> None:
        """Remember the chain of keys that this turn used."""
        self._owner._run(self._session.turn(used, deadline_s=deadline_s))

    def prefetch(self, **options: Any) -> PrefetchResult:
        """Bring what the session used to memory, and wait for it; options as `Session.prefetch`."""
        return self._owner._run(self._session.prefetch(**options))

    def submit_prefetch(self, **options: Any) -> Ticket[PrefetchResult]:
        """Start a `prefetch`; complete it as a `submit_get`."""
        return Ticket(self._owner._loop, self._session.prefetch(**options))

    def end(self, *, delete: bool = False, deadline_s: float | None = None) -> int:
        """Forget the session; how many of its values were removed."""
        return self._owner._run(self._session.end(delete=delete, deadline_s=deadline_s))


class SyncClient:
    """See the module; every method is that of `ucxkv.Client`, blocking."""

    def __init__(self, connecting: Connect) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ucxkv-sync", daemon=True)
        self._thread.start()
        self._is_open = True
        try:
            self._client: Client = self._run(_open(connecting))
        except BaseException:
            self._stop()
            raise

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        if not self._is_open:
            call.close()
            raise errors.ClientClosed("this client is closed; connect again")
        if threading.current_thread() is self._thread:
            call.close()
            raise errors.UsageError(
                "a blocking call from the client's own loop thread would wait for ever; use ucxkv.connect there"
            )
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def put(
        self,
        key: bytes,
        block: object,
        parent: bytes | None = None,
        *,
        durable: bool = False,
        exact: bool = False,
        deadline_s: float | None = None,
    ) -> PutStatus:
        """Store one block."""
        return self._run(self._client.put(key, block, parent, durable=durable, exact=exact, deadline_s=deadline_s))

    def put_many(self, keys: Keys, blocks: object, parents: Any = None, **options: Any) -> PutResult:
        """Store n blocks; options as `Client.put_many`."""
        return self._run(self._client.put_many(keys, blocks, parents, **options))

    def get(
        self, key: bytes, into: object = None, *, after: Token | None = None, deadline_s: float | None = None
    ) -> bytes | int | None:
        """Read one block."""
        return self._run(self._client.get(key, into, after=after, deadline_s=deadline_s))

    def get_many(self, keys: Keys, into: object = None, **options: Any) -> GetResult:
        """Read n blocks; options as `Client.get_many`."""
        return self._run(self._client.get_many(keys, into, **options))

    def exists(self, key: bytes) -> bool:
        """Whether the block is visible now."""
        return self._run(self._client.exists(key))

    def exists_many(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Which blocks are visible now, bool[n]."""
        return self._run(self._client.exists_many(keys))

    def match(self, keys: Keys, *, after: Token | None = None) -> Match:
        """The longest visible prefix."""
        return self._run(self._client.match(keys, after=after))

    def lease(self, keys: Keys, *, ttl_s: float = 10.0) -> HeldLease:
        """Hold blocks in place."""
        return HeldLease(self, self._client_lease(keys, ttl_s))

    def _client_lease(self, keys: Keys, ttl_s: float) -> Lease:
        async def make() -> Lease:
            return self._client.lease(keys, ttl_s=ttl_s)

        return self._run(make())

    def view(self, key: bytes, *, ttl_s: float = 10.0) -> View | None:
        """One block's bytes without a copy; give it back with `close_view`."""
        return self._run(self._client.view(key, ttl_s=ttl_s))

    def close_view(self, view: View) -> None:
        """Let a view's block go."""
        self._run(view.aclose())

    def delete(self, keys: Keys) -> npt.NDArray[np.uint8]:
        """Remove blocks."""
        return self._run(self._client.delete(keys))

    def warm(self, keys: Keys, **options: Any) -> int:
        """Bring blocks from disk to memory; options as `Client.warm`."""
        return self._run(self._client.warm(keys, **options))

    def prefetch(self, keys: Keys, **options: Any) -> PrefetchResult:
        """Bring a chain's stored blocks from disk to memory; options as `Client.prefetch`."""
        return self._run(self._client.prefetch(keys, **options))

    def session(self, session_id: str, **options: Any) -> HeldSession:
        """A conversation; options as `Client.session`."""

        async def make() -> Session:
            return self._client.session(session_id, **options)

        return HeldSession(self, self._run(make()))

    def register(self, array: object, *, row_bytes: int | None = None) -> RegisteredBuffer:
        """Check a contiguous array once, to name rows of it without cost."""

        async def make() -> RegisteredBuffer:
            return self._client.register(array, row_bytes=row_bytes)

        return self._run(make())

    @property
    def objects(self) -> BlockingObjects:
        """See Client.objects."""
        from ucxkv.objects import BlockingObjects

        return BlockingObjects(self._run, self._client.objects)

    def peers(self) -> list[PeerInfo]:
        """Every known node and the path taken to it."""
        return self._client.peers()

    @property
    def token(self) -> Token:
        """See Client.token."""
        return self._client.token

    def stats(self) -> dict[str, int]:
        """Totals of this client."""
        return self._client.stats()

    def status(self) -> list[NodeStatus]:
        """A report of every reachable node."""
        return self._run(self._client.status())

    def explain(self, key: bytes) -> list[Explanation]:
        """See Client.explain."""
        return self._run(self._client.explain(key))

    def connections(self) -> list[ConnectionInfo]:
        """See Client.connections."""
        return self._run(self._client.connections())

    def list_keys(self, limit: int = 1000) -> list[KeyInfo]:
        """Up to `limit` visible blocks."""
        return self._run(self._client.list_keys(limit))

    # ---- without waiting

    def submit_get(self, keys: Keys, into: object = None, **options: Any) -> Ticket[GetResult]:
        """Start a `get_many`; complete it by `ticket.poll()`, `ticket.result()` or the ticket's eventfd."""
        return Ticket(self._loop, self._client.get_many(keys, into, **options))

    def submit_put(self, keys: Keys, blocks: object, parents: Any = None, **options: Any) -> Ticket[PutResult]:
        """Start a `put_many`; complete it as a `submit_get`."""
        return Ticket(self._loop, self._client.put_many(keys, blocks, parents, **options))

    # ---- the end

    def close(self) -> None:
        """Leave every node in good order and end the thread. Idempotent."""
        if self._is_open:
            try:
                self._run(self._client.aclose())
            finally:
                self._stop()

    def _stop(self) -> None:
        self._is_open = False
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        pending = asyncio.all_tasks(self._loop)
        for task in pending:
            task.cancel()
        if pending:
            self._loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


async def _open(connecting: Connect) -> Client:
    return await connecting


def connect(
    *addresses: str, token: str | None = None, path: str | None = None, timeout_s: float = 5.0, ucx_library: str = ""
) -> SyncClient:
    """Connect as `ucxkv.connect` does, and wait until it is done."""
    return SyncClient(connect_async(*addresses, token=token, path=path, timeout_s=timeout_s, ucx_library=ucx_library))
