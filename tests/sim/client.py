"""Simulated clients: they put in token order, delete tails, look at the leader, and read anywhere with their token.

A call that was refused had no effect and is no part of the history. One that got no answer, or "unknown", stays open
there for ever; the client asks again, as another call. A client keeps the highest index that it was ever told of: its
session's token. Order, chains and pauses are drawn from the client's own seed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

from tests.sim.history import History
from tests.sim.network import Network
from tests.sim.process import Process
from tests.sim.witness import Witness

__all__ = ["Client"]

ATTEMPTS = 4
LOOK_LIMIT = 12


class Client:
    """One client. nodes: whom it may ask. chains: of which it puts and reads."""

    def __init__(
        self, process: Process, network: Network, history: History, witness: Witness, seed: str,
        nodes: Sequence[str], chains: Sequence[str], *, timeout_s: float = 0.5, reads_everywhere: bool = False,
    ) -> None:  # fmt: skip
        self.process = process
        self.name = process.host_name
        self.token = 0
        self.counts = {"answered": 0, "refused": 0, "unknown": 0, "read": 0}
        self._network = network
        self._history = history
        self._witness = witness
        self._random = random.Random(f"client {seed}")
        self._nodes = list(nodes)
        self._chains = list(chains)
        self._timeout_s = timeout_s
        self._reads_everywhere = reads_everywhere
        self._leader = self._nodes[0]
        self._number = 0
        self._made = 0
        self._length = dict.fromkeys(self._chains, 0)
        self._again: dict[str, tuple[int, str]] = {}
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        network.attach(self.name, process, self._receive)

    async def work(self, is_over: Callable[[], bool], pause_s: float) -> None:
        """Do one thing after the other until it is over."""
        chance = self._random.random
        while not is_over():
            await asyncio.sleep(pause_s * 2 * chance())
            chain = self._random.choice(self._chains)
            dice = chance()
            if dice < 0.45:
                await self.put(chain)
            elif dice < 0.58:
                await self.delete(chain)
            elif dice < 0.82:
                await self.look(chain)
            else:
                await self.read(chain)

    # ---- operations

    async def put(self, chain: str) -> bool:
        """Put the next block, or again the one of unknown outcome; whether the answer is known."""
        position, content = self._again.get(chain, (self._length[chain], ""))
        if not content:
            self._made += 1
            content = f"{self.name}.{self._made}"
        answer = await self._decide("put", chain, (position, content))
        if answer == "order":
            self._length[chain] = max(0, position - 1)
        elif answer is not None:
            self._length[chain] = position + 1
        if answer == "unknown":
            self._again[chain] = (position, content)
        elif answer is not None:
            self._again.pop(chain, None)
        return answer is not None and answer != "unknown"

    async def delete(self, chain: str) -> None:
        """Delete what it takes for the tail."""
        position = self._length[chain] - 1
        if position < 0:
            return
        answer = await self._decide("delete", chain, position)
        if answer in ("deleted", "absent"):
            self._length[chain] = position
        elif answer == "kept":
            self._length[chain] = position + 2

    async def look(self, chain: str) -> bool:
        """The longest visible prefix, as it is now; whether it was answered."""
        operation = self._history.call(self.name, chain, "look", LOOK_LIMIT, self._now_ns())
        for _ in range(ATTEMPTS):
            node = self._leader
            what = "look"
            if self._reads_everywhere:
                node, what = self._random.choice(self._nodes), "read"
            answer = await self._ask(node, what, chain, LOOK_LIMIT, self.token)
            if answer is not None and answer[0] == "ok":
                self._told(answer)
                self._history.returns(operation, answer[1], self._now_ns())
                self._length[chain] = len(answer[1])
                return True
            await self._turn_to(answer)
        self._history.withdraw(operation)
        return False

    async def read(self, chain: str) -> None:
        """A session's read at any node: at least what this session has seen."""
        token = self.token
        answer = await self._ask(self._random.choice(self._nodes), "read", chain, LOOK_LIMIT, token)
        if answer is not None and answer[0] == "ok":
            self.counts["read"] += 1
            _, contents, index, _ = answer
            self._witness.answered(self.name, chain, index, token, contents, LOOK_LIMIT)
            self._told(answer)

    async def _decide(self, what: str, chain: str, argument: Any) -> str | None:
        """A put or delete at the leader: its answer, "unknown", or None when nobody took it."""
        operation = self._history.call(self.name, chain, what, argument, self._now_ns())
        for _ in range(ATTEMPTS):
            answer = await self._ask(self._leader, what, chain, argument, 0)
            if answer is not None and answer[0] == "refused":
                await self._turn_to(answer)
                continue
            if answer is None or answer[0] == "unknown":
                self.counts["unknown"] += 1
                await self._turn_to(answer)
                return "unknown"
            self._told(answer)
            self._history.returns(operation, answer[1], self._now_ns())
            result: str = answer[1]
            return result
        self.counts["refused"] += 1
        self._history.withdraw(operation)
        return None

    # ---- asking

    def _told(self, answer: Any) -> None:
        self.counts["answered"] += 1
        self.token = max(self.token, answer[2])

    async def _turn_to(self, answer: Any) -> None:
        """Ask another one next: who is said to lead, or any."""
        hint = answer[3] if answer is not None else ""
        if hint and hint != self._leader and self._random.random() < 0.8:
            self._leader = hint
        else:
            self._leader = self._random.choice(self._nodes)
            await asyncio.sleep(0.03 * self._random.random())

    async def _ask(self, node: str, what: str, chain: str, argument: Any, after: int) -> Any:
        loop = asyncio.get_running_loop()
        self._number += 1
        number = self._number
        future = self._waiting[number] = loop.create_future()
        self._network.send(self.name, f"{node}.door", (number, what, chain, argument, after))
        timer = loop.call_later(self._timeout_s, self._expired, number)
        answer = await future
        timer.cancel()
        del self._waiting[number]
        return answer

    def _expired(self, number: int) -> None:
        future = self._waiting.get(number)
        if future is not None and not future.done():
            future.set_result(None)

    def _receive(self, source: str, message: Any) -> None:
        future = self._waiting.get(message[0])
        if future is not None and not future.done():
            future.set_result(message[1:])

    def _now_ns(self) -> int:
        return self.process.loop.now_ns
