"""One message to all ranks of a group, and their answers as they come."""

from __future__ import annotations

import contextlib
import pickle
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from meshrun.errors import MeshrunError
from meshrun.host.processes import send_signal
from meshrun.host.reactor import Reactor, Timer
from meshrun.supervisor.signals import SignalQueue
from meshrun.worker.call_channel import Begun, Channel, TimeLimit

GRACE_S = 2.0
"""How long the other ranks may take once one has failed; they may wait for it forever."""


@dataclass(frozen=True, slots=True)
class Member:
    """A rank of a group."""

    rank: int
    pid: int
    label: str
    """Its coordinate, such as ``dp0 tp1``."""
    channel: Channel


@dataclass(slots=True)
class Answers:
    """What the ranks have answered to one message."""

    of: dict[Member, Any] = field(default_factory=dict)
    """Unpickled, in the order in which they came."""
    missing: tuple[Member, ...] = ()
    """The ranks that have not."""
    why: str = ""
    """Why no longer is waited for them."""
    is_rank_gone: bool = False
    """Whether that is because a rank has ended."""
    stacks: str = ""
    """Where they are."""
    trouble: MeshrunError | None = None
    """How the launch has ended, if it has."""


class Asking:
    """One message to all ranks, and their answers as they come."""

    def __init__(
        self,
        members: Iterable[Member],
        reactor: Reactor,
        failed: Callable[[Any], bool],
        takes: Callable[[Member, Any], bool],
    ) -> None:
        self.left = {member.rank: member for member in members}
        self.answers = Answers()
        self.is_interrupted = False
        self._reactor, self._failed, self._takes = reactor, failed, takes
        self._limits: dict[int, Timer] = {}

    @property
    def is_done(self) -> bool:
        """Whether nothing more is waited for."""
        return not self.left or bool(self.answers.why)

    def send(self, message: bytes, timeout_s: float | None) -> None:
        """Send it, and listen."""
        for member in self.left.values():
            with contextlib.suppress(OSError):  # its end is noticed when it is read
                member.channel.send(message)
            self._reactor.add_reader(member.channel, partial(self._hear, member))
        if timeout_s is not None:
            self._limit(timeout_s)

    def interrupt(self) -> None:
        """Have the ranks that have not answered interrupted, as by Ctrl-C, and wait for a moment.

        A second time waits no longer.
        """
        if self.is_interrupted:
            self._give_up("interrupted")
            return
        self.is_interrupted = True
        for member in self.left.values():
            send_signal(member.pid, signal.SIGINT)
        self._give_up_in(GRACE_S, "interrupted")

    def _hear(self, member: Member) -> None:
        try:
            answer = pickle.loads(member.channel.receive())  # noqa: S301 - our ranks'
            if isinstance(answer, Begun):
                if self.is_interrupted:  # it has ignored that, unless it had begun by then
                    send_signal(member.pid, signal.SIGINT)
                return
            if isinstance(answer, TimeLimit):
                self._limit_rank(member.rank, answer.seconds)
                return
            came_ns = self._reactor.now_ns()
            if self._takes(member, answer):
                self._reactor.skip(self._reactor.now_ns() - came_ns)
                return
        except EOFError:
            self._reactor.remove(member.channel)
            self.answers.is_rank_gone = True
            self._give_up(f"{member.label} exited during the call")
            return
        self._reactor.remove(member.channel)
        self.answers.of[member] = answer
        del self.left[member.rank]
        self._limit_rank(member.rank, None)
        if self._failed(answer):
            self._give_up_in(GRACE_S, f"{member.label} failed")

    def _limit(self, seconds: float) -> Timer:
        return self._give_up_in(seconds, f"timed out after {seconds:g} s")

    def _limit_rank(self, rank: int, seconds: float | None) -> None:
        if (before := self._limits.pop(rank, None)) is not None:
            before.cancel()
        if seconds is not None:
            self._limits[rank] = self._limit(seconds)

    def _give_up_in(self, seconds: float, why: str) -> Timer:
        return self._reactor.call_later(seconds, partial(self._give_up, why))

    def _give_up(self, why: str) -> None:
        if not self.is_done:
            self.answers.why, self.answers.missing = why, tuple(self.left.values())


@contextlib.contextmanager
def interrupts_of(reactor: Reactor, call: Callable[[], None]) -> Iterator[None]:
    """Have Ctrl-C call something in a turn of the loop, in place of an exception anywhere in it.

    A handler of the program's own stays.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signals = SignalQueue((signal.SIGINT,))

    def hear() -> None:
        for _ in signals.take():
            call()

    reactor.add_reader(signals, hear)
    try:
        yield
        late = signals.take()
    finally:
        reactor.remove(signals)
        signals.restore()
    if late:
        raise KeyboardInterrupt


def has_raised(answer: tuple[bytes | None, str, bytes | None, str]) -> bool:
    """Whether the answer to a call is an exception."""
    return answer[0] is None


def describe_others(answers: Answers, first: Member) -> Iterator[str]:
    """Say in a line what other ranks have raised."""
    labels: dict[str, list[str]] = {}
    for member, (value, _, _, headline) in answers.of.items():
        if value is None and member is not first:
            labels.setdefault(headline, []).append(member.label)
    for headline, who in labels.items():
        yield f"{', '.join(sorted(who))}: {headline}"


def describe_missing(answers: Answers) -> Iterator[str]:
    """Say which ranks have not finished, and where they are."""
    if answers.missing:
        who = ", ".join(member.label for member in answers.missing)
        yield f"{answers.why}; not finished: {who}"
        yield from answers.stacks.splitlines()
