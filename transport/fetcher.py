"""The native table of data requests (fetch.c), and what the memory of those that were let go belongs to."""

from __future__ import annotations

from . import library
from .progress import Worker
from .ucx import error_from_status

__all__ = ["Fetcher"]


class Fetcher:
    """The native table of requests of one worker, shared by its data clients."""

    def __init__(self, worker: Worker) -> None:
        self.ffi, self.lib = library.binding()
        out = self.ffi.new("kv_fetcher **")
        status = self.lib.kv_fetcher_open(worker.native(), out)
        if status != 0:
            raise error_from_status(status, "preparing a worker for data requests")
        self.handle = out[0]
        self.kept: dict[int, object] = {}
        """Of requests that were let go with something in flight: what their memory belongs to."""
        worker.quiet_handler = self._quiet
        worker.closers.append(self._close)
        worker.keepers.append(self.kept.values)

    def _quiet(self, request_id: int) -> None:
        self.kept.pop(request_id, None)

    def _close(self) -> None:
        handle, self.handle = self.handle, None
        self.lib.kv_fetcher_close(handle)
        self.kept.clear()

    @classmethod
    def of(cls, worker: Worker) -> Fetcher:
        """The worker's one fetcher."""
        found = worker.extension
        if found is None:
            found = worker.extension = cls(worker)
        assert isinstance(found, cls)
        return found
