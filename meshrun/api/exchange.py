"""Sends one message to all ranks of a group and collects their answers.

A rank, which runs in another session, may get this process's terminal meanwhile.
"""

from __future__ import annotations

import os
import signal
import sys
import termios
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

from msgspec import Struct

from meshrun.errors import MeshrunError
from meshrun.host.process_state import is_foreground
from meshrun.host.processes import send_signal
from meshrun.host.reactor import Reactor, Timer
from meshrun.worker.call_channel import CallBegun, CallDone, Channel, TimeLimit, packed
from meshrun.worker.debuggers import AcquireTerminal, ReleaseTerminal

GRACE_S = 2.0
"""How long the other ranks may take once one has failed, as they may wait for it forever."""
_AGAIN_S = 0.05
"""After this time, a rank where Python has dropped the exception of SIGINT has left that place."""


class GroupRank(Struct, frozen=True):
    """A rank of a group."""

    rank: int
    pid: int
    label: str
    """Its coordinate, such as ``dp0 tp1``."""
    channel: Channel


class Exchange:
    """One message to all ranks, and their answers so far.

    Time limits do not apply while a rank has the ``terminal``.
    """

    def __init__(
        self, members: Iterable[GroupRank], reactor: Reactor, terminal: TerminalOwner
    ) -> None:
        self._left = {member.rank: member for member in members}
        self.by_member: dict[GroupRank, Any] = {}
        """The answers, in order of arrival."""
        self.reason = ""
        """Why the wait for the others has ended."""
        self.is_rank_gone = False
        """Whether it has ended because a rank exited."""
        self.is_interrupted = False
        self.stacks = ""
        """The stacks of the missing ranks."""
        self.trouble: MeshrunError | None = None
        """How the launch has failed, if it has."""
        self._reactor, self._terminal = reactor, terminal
        self._limits: dict[int, Timer] = {}

    @property
    def is_done(self) -> bool:
        """Whether all ranks have answered, or the wait has ended."""
        return not self._left or bool(self.reason)

    @property
    def missing(self) -> tuple[GroupRank, ...]:
        """The ranks that have not answered."""
        return tuple(self._left.values())

    def send(self, message: object, timeout_s: float | None) -> None:
        """Send the message and begin to receive answers."""
        for member in self._left.values():  # first, as a signal handler may raise below
            self._reactor.add_reader(member.channel, partial(self._receive, member))
        if timeout_s is not None:
            self._limit(timeout_s)
        data = packed(message)
        for member in self._left.values():
            self._send(member, data)

    def interrupt(self) -> None:
        """Interrupt the ranks that have not answered, as Ctrl-C does, and wait for a moment.

        A second call ends the wait.
        """
        if self.is_interrupted:
            self._end("interrupted")
            return
        self.is_interrupted = True
        for member in self._left.values():
            send_signal(member.pid, signal.SIGINT)
        self._end_in(GRACE_S, "interrupted")

    def _send(self, member: GroupRank, data: memoryview) -> None:
        """Send to a rank, which may be stopped, without waiting for it."""
        try:
            data = member.channel.send_now(data)
        except ConnectionError:  # receiving will fail as well
            data = data[:0]
        if data:
            self._reactor.add_writer(member.channel, partial(self._send, member, data))
        else:
            self._reactor.remove_writer(member.channel)

    def _receive(self, member: GroupRank) -> None:
        try:
            answer = member.channel.receive_now()
            if answer is None:
                return
            if isinstance(answer, CallBegun):
                if self.is_interrupted:  # a rank ignores SIGINT until it has begun
                    again = partial(send_signal, member.pid, signal.SIGINT)
                    self._reactor.call_later(_AGAIN_S, again)
                return
            if isinstance(answer, TimeLimit):
                self._limit_rank(member.rank, answer.seconds)
                return
            received_ns = self._reactor.now_ns()
            if self._terminal.handle(answer, member.pid, member.channel):
                self._reactor.skip(self._reactor.now_ns() - received_ns)
                return
        except EOFError:
            self._reactor.remove(member.channel)
            self.is_rank_gone = True
            self._end(f"{member.label} exited during the call")
            return
        self._reactor.remove(member.channel)
        self.by_member[member] = answer
        del self._left[member.rank]
        self._limit_rank(member.rank, None)
        if answer.has_failed:
            self._end_in(GRACE_S, f"{member.label} failed")

    def _limit(self, seconds: float) -> Timer:
        return self._end_in(seconds, f"timed out after {seconds:g} s")

    def _limit_rank(self, rank: int, seconds: float | None) -> None:
        if (before := self._limits.pop(rank, None)) is not None:
            before.cancel()
        if seconds is not None:
            self._limits[rank] = self._limit(seconds)

    def _end_in(self, seconds: float, reason: str) -> Timer:
        return self._reactor.call_later(seconds, partial(self._end, reason))

    def _end(self, reason: str) -> None:
        if not self.is_done:
            self.reason = reason


def describe_others(answers: Exchange, first: GroupRank) -> Iterator[str]:
    """Yield a line for each exception that other ranks have raised."""
    labels: dict[str, list[str]] = {}
    done: CallDone
    for member, done in answers.by_member.items():
        if done.has_failed and member is not first:
            labels.setdefault(done.headline, []).append(member.label)
    for headline, who in labels.items():
        yield f"{', '.join(sorted(who))}: {headline}"


def describe_missing(answers: Exchange) -> Iterator[str]:
    """Yield a line that names the ranks that have not finished, and their stacks."""
    if answers.missing:
        who = ", ".join(member.label for member in answers.missing)
        yield f"{answers.reason}; not finished: {who}"
        yield from answers.stacks.splitlines()


class TerminalOwner:
    """Grants the terminal to the first rank that requests it in a call, and to no other.

    ``around`` is a context in which to grant it, such as one that restores our own streams.
    """

    def __init__(self, around: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._around = around
        self._has_granted = False
        self.has_quit = False
        """Whether the user has quit the debugger."""

    def handle(self, message: object, pid: int, channel: Channel) -> bool:
        """Reply to a request, and wait for the terminal's release; ``False`` for other messages."""
        if not isinstance(message, AcquireTerminal):
            return False
        if self._has_granted:
            channel.send(None)
            return True
        self._has_granted = True
        with self._around(), grant_terminal(pid) as terminal:
            channel.send(terminal)
            if terminal is not None:
                done: ReleaseTerminal = channel.receive()
                self.has_quit = done.quits
        return True


@contextmanager
def grant_terminal(pid: int) -> Iterator[str | None]:
    """Yield the name of the terminal that is our stdin, or ``None`` if there is none to grant.

    While the block runs, Ctrl-C goes to process ``pid``, and Ctrl-Z is ignored: otherwise the shell
    and the process would take turns reading the terminal.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not (is_main and os.isatty(0) and is_foreground(0)):
        yield None
        return
    sys.stdout.flush()
    modes = termios.tcgetattr(0)
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, lambda signum, _: send_signal(pid, signum)),
        signal.SIGTSTP: signal.signal(signal.SIGTSTP, signal.SIG_IGN),
    }
    try:
        yield os.ttyname(0)
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        with suppress(termios.error):  # the terminal was closed
            termios.tcsetattr(0, termios.TCSADRAIN, modes)
