"""What a backend is: a server and a client in two processes, made by `make_server` and `make_client` of its module.

Everything that crosses a process border is plain JSON: Config, what a server says when it is ready, Task, Result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Client", "Config", "Missing", "OneByOne", "Result", "Server", "ServerCpu", "Task", "WrongBytes"]

Facts = dict[str, Any]
ServerCpu = Callable[[], Awaitable[int]]
"""CPU nanoseconds that the server's process has used so far."""


class Missing(Exception):
    """This backend cannot run here; the text says what is not there and how to get it."""


class WrongBytes(Exception):
    """Bytes arrived that are not those that were sent."""


@dataclass(frozen=True)
class Config:
    """How both sides of a backend are set up.

    backend: its name. wire: "shm" (this host's shared memory) or "net"; host: where the server listens; memory: "host"
    or "cuda"; tool: path of the program that the backend runs, if it is one.
    """

    backend: str
    wire: str = "shm"
    host: str = "127.0.0.1"
    memory: str = "host"
    tool: str = ""


@dataclass(frozen=True)
class Task:
    """One thing to measure.

    op: get, put, am or tag. nbytes: size of a block, a multiple of 8. batch: blocks of one call; at_once: calls on
    their way. count: blocks in the working set. budget_s: about how long the measured rounds may take together.
    """

    op: str
    nbytes: int
    batch: int = 1
    at_once: int = 1
    count: int = 1
    budget_s: float = 0.5


@dataclass
class Result:
    """What was measured.

    rounds: nanoseconds of every operation, a list a round; wall_ns: of all rounds together; cpu: nanoseconds of CPU
    time over them, -1 = not taken. For a tool that says figures only: p50_us and gbps, and no rounds.
    """

    rounds: list[list[int]] = field(default_factory=list)
    wall_ns: int = 0
    cpu_client_ns: int = -1
    cpu_server_ns: int = -1
    verified: bool = False
    is_stream: bool = False
    p50_us: float = 0.0
    gbps: float = 0.0
    samples: int = 0


class Server(ABC):
    """The side that is asked."""

    @abstractmethod
    async def start(self, config: Config) -> Facts:
        """Get ready; what the client needs to find it. Raises Missing."""

    @abstractmethod
    async def ask(self, request: Facts) -> Facts:
        """Answer the driver: {"peer": what the client's `start` said}, or what the backend's own client asks for."""

    def close(self) -> None:  # noqa: B027 - may stay empty
        """End what would outlive this process. It ends right afterwards."""


class Client(ABC):
    """The side that measures."""

    ask_server: Callable[[Facts], Awaitable[Facts]]
    """Asks the server's `ask` through the driver; set before `start`."""

    @abstractmethod
    async def start(self, config: Config, server: Facts) -> Facts:
        """Connect; what the server must know of this side (told as {"peer": ...}; empty = nothing). Raises Missing."""

    async def ready(self) -> None:  # noqa: B027 - may stay empty
        """The server has been told; finish connecting."""

    @abstractmethod
    async def measure(self, tasks: list[Task], server_cpu: ServerCpu) -> list[Result]:
        """Measure the tasks. Raises WrongBytes."""

    def facts(self) -> Facts:
        """Versions and transports in use, for the report."""
        return {}

    def close(self) -> None:  # noqa: B027 - may stay empty
        """End what would outlive this process. It ends right afterwards."""


class OneByOne(Client):
    """A client whose tasks are measured one after the other."""

    async def measure(self, tasks: list[Task], server_cpu: ServerCpu) -> list[Result]:
        """Measure the tasks. Raises WrongBytes."""
        return [await self.measure_one(task, server_cpu) for task in tasks]

    @abstractmethod
    async def measure_one(self, task: Task, server_cpu: ServerCpu) -> Result:
        """Measure one task. Raises WrongBytes."""
