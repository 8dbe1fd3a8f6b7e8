"""What a simulated node does for clients: the leader's decisions, its answers, and reads.

As leader it decides puts and deletes on the state that its log will come to, logs what it decided, and answers when
that is committed; an answer that changes nothing waits for what it rests on. A read is taken first, and given only if
the lease still runs afterwards. A read with a session's token is answered by any node that has got as far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.sim.machine import Contents, commit_record, leave_record
from ucxkv.replication import events as ev

if TYPE_CHECKING:
    from tests.sim.node import Node

__all__ = ["Door"]


@dataclass(slots=True)
class Asked:
    """A client's question and where its answer goes."""

    client: str
    number: int


@dataclass(slots=True)
class Decided:
    """Proposed and not committed: what to answer then."""

    asked: Asked | None
    chain: str
    before: Contents
    before_index: int
    answer: str


@dataclass(slots=True)
class Waiting:
    """An answer that changes nothing, until `index` is committed."""

    index: int
    give: Callable[[], None]
    asked: Asked


class Door:
    """The clients' side of one life of a node."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._decided: dict[int, Decided] = {}
        self._waiting: list[Waiting] = []
        self._tag = 0
        self._expected: dict[str, Contents] = {}
        self._expected_index: dict[str, int] = {}
        self._expected_epoch = 0
        node.network.attach(f"{node.name}.door", node.process, self._asked)

    # ---- what became of proposals

    def refused(self, effect: ev.Refused) -> None:
        """It was not taken: the chain is as before."""
        decided = self._decided.pop(effect.tag)
        self._expected[decided.chain] = decided.before
        self._expected_index[decided.chain] = decided.before_index
        self._refuse(decided.asked, effect.why.value)

    def unknown(self, effect: ev.Unknown) -> None:
        """This node will not learn it."""
        for tag in effect.tags:
            decided = self._decided.pop(tag)
            if decided.asked is not None:
                self._reply(decided.asked, ("unknown", None, 0, ""))

    def committed(self, tag: int, index: int) -> None:
        """It is so, as of `index`."""
        decided = self._decided.pop(tag)
        if decided.asked is not None:
            self._reply(decided.asked, ("ok", decided.answer, index, ""))

    def moved_on(self) -> None:
        """The watermark is another: answer what waited for it."""
        if self._waiting:
            index = self._node.replica.watermark
            due = [each for each in self._waiting if each.index <= index]
            self._waiting = [each for each in self._waiting if each.index > index]
            for each in due:
                each.give()

    # ---- questions

    def _asked(self, source: str, message: Any) -> None:
        number, what, chain, argument, after = message
        asked = Asked(source, number)
        if what == "read":
            self._read_here(asked, chain, argument, after)
        elif not self._leads():
            self._refuse(asked, "not the leader")
        elif what == "look":
            self._look(asked, chain, argument)
        elif what == "put":
            self._put(asked, chain, *argument)
        else:
            self._delete(asked, chain, argument)

    def _leads(self) -> bool:
        leading = self._node.replica.leading
        if leading is None or self._node.process.now_ns() >= self._node.serve_until_ns:
            return False
        if self._expected_epoch != self._node.replica.epoch:
            self._expected_epoch = self._node.replica.epoch
            self._expected.clear()
            self._expected_index.clear()
        return True

    def _coming(self, chain: str) -> Contents:
        """The chain as it will be when all that was proposed is committed."""
        expected = self._expected.get(chain)
        return self._node.chains.now(chain) if expected is None else expected

    def _put(self, asked: Asked, chain: str, position: int, content: str) -> None:
        coming = self._coming(chain)
        if position == len(coming):
            self._propose(asked, chain, commit_record(chain, position, content), (*coming, content), "stored")
        else:
            self._answer_unchanged(asked, chain, "already" if position < len(coming) else "order")

    def _delete(self, asked: Asked, chain: str, position: int) -> None:
        coming = self._coming(chain)
        if position == len(coming) - 1:
            self._propose(asked, chain, leave_record(chain, position), coming[:-1], "deleted")
        else:
            self._answer_unchanged(asked, chain, "kept" if position < len(coming) else "absent")

    def evict(self, chain: str) -> None:
        """A cache's tail leaves by itself."""
        if self._leads() and (coming := self._coming(chain)):
            self._propose(None, chain, leave_record(chain, len(coming) - 1), coming[:-1], "evicted")

    def _propose(self, asked: Asked | None, chain: str, record: bytes, after: Contents, answer: str) -> None:
        self._tag += 1
        before_index = self._expected_index.get(chain, 0)
        self._decided[self._tag] = Decided(asked, chain, self._coming(chain), before_index, answer)
        self._expected[chain] = after
        self._expected_index[chain] = self._node.replica.log.last_index + 1
        self._node.handle(ev.Propose(self._tag, (record,)))

    def _answer_unchanged(self, asked: Asked, chain: str, answer: str) -> None:
        """Answer when what it rests on is committed, if the lease then still runs."""

        def give() -> None:
            index = self._node.replica.watermark
            self._if_lease_runs(asked, ("ok", answer, index, ""))

        index = self._expected_index.get(chain, 0)
        if index <= self._node.replica.watermark:
            give()
        else:
            self._waiting.append(Waiting(index, give, asked))

    def _look(self, asked: Asked, chain: str, limit: int) -> None:
        index = self._node.replica.watermark
        self._if_lease_runs(asked, ("ok", self._node.chains.at(chain, index)[:limit], index, ""))

    def _read_here(self, asked: Asked, chain: str, limit: int, after: int) -> None:
        """A session's read, by its token alone."""
        if not self._node.replica.can_answer(after):
            self._refuse(asked, "behind")
            return
        index = self._node.replica.watermark
        self._reply(asked, ("ok", self._node.chains.at(chain, index)[:limit], index, ""))

    def _if_lease_runs(self, asked: Asked, answer: Any) -> None:
        """Look at the clock after the read; the process may have slept in between."""
        process = self._node.process
        process.at(
            process.now_ns() + self._node.random.randint(0, 200_000),
            self._check_and_reply,
            asked,
            answer,
            self._node.epoch,
        )

    def _check_and_reply(self, asked: Asked, answer: Any, epoch: int) -> None:
        if epoch == self._node.epoch and self._node.process.now_ns() < self._node.serve_until_ns:
            self._reply(asked, answer)
        else:
            self._refuse(asked, "the lease is over")

    def leads_no_more(self) -> None:
        """What waits will not be answered here."""
        for each in self._waiting:
            self._refuse(each.asked, "leads no more")
        self._waiting.clear()

    def _refuse(self, asked: Asked | None, why: str) -> None:
        if asked is not None:
            config = self._node.replica.config.value
            self._reply(asked, ("refused", why, 0, config.leader.name if config is not None else ""))

    def _reply(self, asked: Asked, answer: Any) -> None:
        self._node.network.send(f"{self._node.name}.door", asked.client, (asked.number, *answer))
