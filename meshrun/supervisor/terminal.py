"""Which rank reads our stdin, and the terminal of a rank that is debugged.

That one has its streams and its Ctrl-C, and others are quiet meanwhile. The rank is in a session of
its own, and so the kernel never stops it for reading a terminal that is not its controlling one
(``job_control`` in Linux's ``n_tty.c``). For the same reason Ctrl-C comes to the launcher alone,
which passes it on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import termios
import time
from collections.abc import Callable, Mapping
from typing import Any

from meshrun.console.console import Console
from meshrun.errors import UsageError
from meshrun.host.processes import is_foreground
from meshrun.host.reactor import Reactor
from meshrun.layout import Layout
from meshrun.layout.labels import rank_name
from meshrun.lifecycle.state import State
from meshrun.plan.plan import LaunchPlan
from meshrun.protocol.events import Event, ZygoteGone
from meshrun.protocol.generation import RankState
from meshrun.protocol.rank_end import RankExited

_LOOK_AGAIN_S = 0.05
"""How soon the others are heard again after a line was entered."""
_IN_A_ROW_NS = 2_000_000_000
_MOST_INTERRUPTS = 2
"""Ctrl-C so often in a row is the rank's; once more ends the launch."""
_LOCAL_MODES = 3
_READ = {"x86_64": 0, "aarch64": 63}.get(os.uname().machine)
"""Number of a system call, in the kernel's tables."""


class Terminal:
    """The terminal, lent to a rank."""

    def __init__(
        self, plan: LaunchPlan, console: Console, reactor: Reactor, send: Callable[..., None]
    ) -> None:
        """Check that there is a terminal to lend, if a rank is to be debugged.

        Raises:
            UsageError: If there is none.
        """
        self.rank: int | None = None
        """The rank that is debugged; without one, nothing here does anything."""
        self.stdin: int | None = None
        """The zygote's, as for ``subprocess``; ours if ``None``."""
        self._next_turn = reactor.call_at(None, lambda: None, skips=False)
        """Has the loop look again, which it does in every turn."""
        self._is_behind = False
        """Whether the launch was continued in the background."""
        self._console, self._send = console, send
        self._has_terminal = os.isatty(0)
        self._ranks: Mapping[int, RankState] = {}
        """This node's."""
        if self._has_terminal:
            console.is_read = self._is_read
        self._is_told = False
        """Whether a rank is known to have passed a breakpoint."""
        self._read_by_all = plan.program.kind == "script" and _is_stdin(plan.program.target)
        if self._has_terminal and not is_foreground(0):
            self.stdin = subprocess.DEVNULL  # not stopped for reading it, being no job of the shell
        self._whole_group = plan.program.kind == "command"
        self._interrupts: list[int] = []
        self._modes: list[Any] | None = None
        """How the terminal was found, while it is lent."""
        self._was_typed_on = False
        asked = plan.request.debug_rank
        if asked is None or plan.debugged is None:
            return
        self.rank = plan.debugged
        self.stdin = subprocess.DEVNULL
        self._terminal = _open_terminal(asked)
        self._modes = termios.tcgetattr(self._terminal)
        # A stopped launcher would leave the rank and the shell to read the terminal in turn.
        self._on_stop = signal.signal(signal.SIGTSTP, lambda *_: None)
        console.share_terminal()
        console.is_typed_on = self._is_typed_on

    def has_stdin(self, local_rank: int) -> bool:
        """Whether a rank of this node reads our stdin: one alone, so that nobody gets a part."""
        return self.stdin is None and (local_rank == 0 or self._read_by_all)

    def resume(self) -> None:
        """The launch was continued, by ``fg`` or by ``bg``."""
        if self._has_terminal and self.stdin is None:
            self._is_behind = not is_foreground(0)
            self._look_again()

    def takes_keys(self) -> bool:
        """Whether a rank reads the terminal in the background, and takes the shell's keys.

        The kernel stops a job for that, but not a rank, whose terminal it is not.
        """
        if not self._is_behind:
            return False
        self._look_again()
        return self._is_read()

    def _is_read(self) -> bool:
        """Whether the rank that has stdin waits for somebody to type."""
        if not self._ranks:
            return False
        reader = self._ranks[min(self._ranks)]
        return bool(reader.pid and not reader.exited and _reads_terminal(reader.pid))

    def _look_again(self) -> None:
        self._next_turn.restart(_LOOK_AGAIN_S)

    def why_empty(self, layout: Layout, rank: int) -> str:
        """Return why a rank has no stdin to read, and what gives it one; "" if it has."""
        if self.rank is not None or self.has_stdin(layout.local_rank(rank)):
            return ""
        if self.stdin is not None:
            return "a launch in the background has no stdin"
        if layout.nnodes > 1:
            return "only the first rank of each node has stdin"
        return f"only rank 0 has stdin; --debug-rank {rank} gives rank {rank} the terminal"

    def passed_breakpoint(self, layout: Layout, rank: int) -> None:
        """Say once that a rank did not stop where it would have with a stdin."""
        if self.rank is None and not self._is_told:
            self._is_told = True
            why = self.why_empty(layout, rank)
            self._console.note(f"{rank_name(layout, rank)} skipped a breakpoint: {why}")

    def streams(self, rank: int) -> list[int]:
        """Return the debugged rank's stdout and stderr, for the caller to hand over and close."""
        if rank != self.rank:
            return []
        return [os.dup(self._terminal), os.dup(self._terminal)]

    def takes(self, signum: int, state: State) -> bool:
        """Pass Ctrl-C on to the rank; ``False`` if the signal does what it does without us."""
        if signum != signal.SIGINT or self.rank is None or state.stopping:
            return False
        known = state.ranks[self.rank]
        if not known.ready or known.exited or known.raised or known.finished:
            return False
        now_ns = time.monotonic_ns()
        self._interrupts = [at for at in self._interrupts if at > now_ns - _IN_A_ROW_NS]
        self._interrupts.append(now_ns)
        if len(self._interrupts) > _MOST_INTERRUPTS:
            self._signal(signal.SIGTERM)  # at its prompt the rank would take no other
            return False
        self._signal(signal.SIGINT)
        if len(self._interrupts) == _MOST_INTERRUPTS:
            self._console.note("press Ctrl-C once more to stop the launch")
        return True

    def _signal(self, signum: int) -> None:
        assert self.rank is not None  # noqa: S101 - the caller has looked
        self._send([self.rank], signum, whole_group=self._whole_group)

    # ---- the terminal ----------------------------------------------------------------------

    def look(self) -> bool:
        """Keep the others quiet while a line is typed; return whether that has changed.

        readline and its like put the terminal into a mode of their own for just that long.
        """
        if self.rank is None:
            return False
        was_typed_on, self._was_typed_on = self._was_typed_on, self._is_typed_on()
        if self._was_typed_on:
            self._look_again()
        return was_typed_on != self._was_typed_on

    def _is_typed_on(self) -> bool:
        return self._modes is not None and self._is_typing()

    def see(self, event: Event, state: State) -> None:
        """Know who has stdin; take the terminal back once the rank it was lent to has exited."""
        self._ranks = state.ranks
        if isinstance(event, ZygoteGone) or (
            isinstance(event, RankExited) and event.rank == self.rank
        ):
            self._take_back()

    def close(self) -> None:
        """Leave the terminal as it was found."""
        if self.rank is None:
            return
        self._take_back()
        os.close(self._terminal)
        signal.signal(signal.SIGTSTP, self._on_stop)

    def _is_typing(self) -> bool:
        try:
            return not termios.tcgetattr(self._terminal)[_LOCAL_MODES] & termios.ICANON
        except termios.error:  # it hung up
            return False

    def _take_back(self) -> None:
        if self._modes is None:
            return
        modes, self._modes = self._modes, None
        if self._is_typing():  # it ended in the middle of a line
            os.write(self._terminal, b"\r\n")
        held_back = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
        try:
            termios.tcsetattr(self._terminal, termios.TCSADRAIN, modes)
        except termios.error:
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, held_back)
        self.look()


def _open_terminal(asked: str) -> int:
    """Return a descriptor of the terminal that is our stdin, for reading and writing."""
    if not os.isatty(0):
        raise UsageError(
            f"--debug-rank {asked} needs a terminal, but stdin is not one",
            hint="run meshrun without redirecting or piping stdin; over ssh, use `ssh -t`",
        )
    if not is_foreground(0):
        raise UsageError(
            f"--debug-rank {asked} needs the terminal, but another job has it",
            hint="run meshrun without `&`",
        )
    try:
        return os.open(os.ttyname(0), os.O_RDWR | os.O_NOCTTY)
    except OSError:  # in a container its name may lead nowhere
        return os.dup(0)


def _is_stdin(path: str) -> bool:
    """Whether a program is read from stdin, as ``/dev/stdin`` is."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(0))
    except OSError:
        return False


def _reads_terminal(pid: int) -> bool:
    """Whether a process waits in ``read()`` for the terminal that is our stdin."""
    try:
        with open(f"/proc/{pid}/syscall") as file:
            number, fd = (int(word, 0) for word in file.read().split()[:2])
        return number == _READ and os.path.samestat(os.stat(f"/proc/{pid}/fd/{fd}"), os.fstat(0))
    except (OSError, ValueError):  # it runs, or may not be looked into
        return False
