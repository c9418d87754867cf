"""Asks ranks for their calls; they answer through their reports."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from meshrun.host.reactor import Reactor
from meshrun.protocol.collectives import ALL_CALLS, RankCalled
from meshrun.supervisor.rank_pipes import RankPipes

_ANSWER_TAKES_S = 1.5
"""Time for a rank's thread to get the interpreter's lock and read the recorder, if all are busy."""


class CollectiveRequests:
    """The request that is under way, and the last answers.

    Args:
        done: Called once all ranks that were asked have answered, or time has run out.
    """

    def __init__(self, reactor: Reactor, pipes: RankPipes, done: Callable[[], None]) -> None:
        self._pipes = pipes
        self._asked: set[int] = set()
        self._done = done
        self._deadline = reactor.call_at(None, self._complete, skips=False)
        self.called: dict[int, RankCalled] = {}
        """The last answer of each rank."""

    def begin(self) -> None:
        """Prepare for a new generation of ranks."""
        self.called = {}
        self._reset()

    def ask(self, pids: Mapping[int, int], *, soon: bool = False) -> None:
        """Ask ranks for their calls, except for stopped ranks, which cannot answer.

        The report of a rank whose call failed is kept: to the recorder, that call has ended. With
        ``soon``, the answers are awaited only briefly.
        """
        if not self.is_under_way:
            self.called = {
                rank: answer for rank, answer in self.called.items() if answer.has_failed
            }
            self._asked = self._pipes.ask(ALL_CALLS, pids)
            if self._asked:
                self._deadline.restart(_ANSWER_TAKES_S / 5 if soon else _ANSWER_TAKES_S)

    def expect_only(self, alive: Collection[int]) -> None:
        """Do not wait for answers of ranks that have exited."""
        if self._asked and not self._asked <= set(alive):
            self._asked.intersection_update(alive)
            if not self._asked:
                self._complete()

    def receive(self, message: RankCalled) -> None:
        """Take a rank's answer, or its report of a failed call."""
        called = self.called.get(message.rank)
        if called is None or not called.has_failed:
            self.called[message.rank] = message
        if message.rank in self._asked:
            self._asked.remove(message.rank)
            if not self._asked:
                self._complete()

    @property
    def is_under_way(self) -> bool:
        """Whether answers are awaited."""
        return self._deadline.is_pending

    def _complete(self) -> None:
        self._reset()
        self._done()

    def _reset(self) -> None:
        self._asked = set()
        self._deadline.cancel()
